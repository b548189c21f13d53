"""How much one dishonest silo can do to the others, and that honest ones notice nothing of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, RecordDict
from hypothesis import given
from hypothesis import strategies as st

from coterie import wire
from coterie.engine.inprocess import InProcessGrid
from coterie.features.robust import bounds
from coterie.features.robust.bounds import bound, update_norm
from coterie.features.robust.coordinator import Robust
from coterie.features.robust.reputation import Quarantined, Reputation
from coterie.server.runs.codec import decode, encode
from coterie.server.runs.config import RunConfig
from coterie.strategies import (
    FedAvg,
    FederationError,
    FedFA,
    FedGroup,
    Influence,
    PFedGraph,
    RunResult,
)
from coterie.strategies.rounds.algorithm import Order, Round, Update
from coterie.strategies.rounds.checkpoint import Checkpoint
from coterie.strategies.rounds.members import Members, Plain, capped
from coterie.strategies.rounds.minimum_sizes import average
from coterie.strategies.rounds.models import weighted_mean
from coterie.strategies.rounds.replies import Checked, ReplyError
from coterie.strategies.rounds.roster import Silo
from coterie.strategies.rounds.stage import Came, Room, Scene
from tests.conftest import (
    Fault,
    arrays_of,
    assert_equal_models,
    plain_app,
    plain_initial,
    plain_model,
    plain_nodes,
    plain_trained,
)
from tests.kit import assert_same_models, start

HONEST = 7
BAD = HONEST + 1
"""Of eight nodes of one kind, the last is dishonest."""
IDLE = "it trained nothing: its update is zero, the model that it was sent."
OFF = Influence(max_share=1, clip_updates=0, quarantine_after=0)


def dishonest(change: Callable[[str, Any, Any, np.random.Generator], Any], count: int = 0) -> Fault:
    """A fault of the last node's in every round: (name, sent, trained, rng) → what it sends."""

    def fault(message: Message, answer: RecordDict) -> RecordDict:
        if message.metadata.dst_node_id != BAD:
            return answer
        sent, back = (wire.decode_arrays(m["arrays"]) for m in (message.content, answer))
        rng = np.random.default_rng([3, int(message.content["config"]["server-round"])])
        made = {k: change(k, sent[k], back[k], rng).astype(np.float32) for k in sent}
        answer["arrays"] = wire.encode_arrays(made, packed=False)
        if count:
            answer["metrics"]["num-examples"] = count
        return answer

    return fault


def times(factor: float) -> Callable[..., Any]:
    return lambda name, sent, back, rng: sent + factor * (back - sent)


def noise(factor: float) -> Callable[..., Any]:
    return lambda name, sent, back, rng: (
        sent + factor * rng.normal(size=sent.shape) * max(float(np.std(back - sent)), 0.3)
    )


def run(fault: Fault | None = None, *, strategy: Any = None, rounds: int = 8, **more: Any) -> Any:
    made = strategy or FedAvg(influence=more.pop("influence", None))
    grid = InProcessGrid(plain_app(fault), plain_nodes(*[0] * (HONEST + 1)))
    return start(made, grid, rounds, timeout=5.0, **more)


def distance(result: RunResult) -> float:
    """Of node 1's model from what honest training alone comes to."""
    target = {k: np.zeros_like(a) for k, a in plain_model().items()}
    for node in plain_nodes(*[0] * HONEST):
        made = plain_model()
        for _ in range(60):
            made = plain_trained(made, node)
        target = {k: target[k] + made[k] / HONEST for k in target}
    got = arrays_of(result.models["silo-0"])
    return float(np.sqrt(sum(np.square(got[k] - target[k]).sum() for k in target)))


ATTACKS: dict[str, Fault] = {
    "sign flipped": dishonest(times(-1)),
    "sign flipped, x 10": dishonest(times(-10)),
    "honest direction x 100": dishonest(times(100)),
    "random": dishonest(noise(1)),
    "random, x 1e6": dishonest(noise(1e6)),
    "claims 1e15": dishonest(times(-1), 10**15),
    "claims 1e8": dishonest(times(-1), 10**8),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_one_dishonest_silo_of_eight_does_little_to_the_others(attack: str) -> None:
    free = distance(run())
    assert distance(run(ATTACKS[attack])) < free + 0.6


@pytest.mark.parametrize("attack", ["sign flipped, x 10", "random, x 1e6", "claims 1e8"])
def test_without_the_bounds_it_spoils_everybodys_model(attack: str) -> None:
    assert distance(run(ATTACKS[attack], influence=OFF)) > 5


def test_a_silo_that_points_away_is_moved_out_told_so_and_comes_back_on_probation(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("coterie.features.robust.bounds.AWAY", 1)
    reasons: dict[int, str] = {}

    def listening(message: Message, answer: RecordDict) -> Any:
        config = message.content["config"]
        if message.metadata.message_type == wire.TRAIN and wire.APART in config:
            assert message.metadata.dst_node_id == BAD
            reasons[config[wire.ROUND]] = config[wire.APART]
        return ATTACKS["sign flipped"](message, answer)

    result = run(listening, rounds=7)
    out = [r for r in result.rounds if (f"silo-{BAD - 1}",) in r.groups and not r.final]
    assert [r.round for r in out] == [3, 4, 5, 6, 7], "out at once when it came back"
    assert "pointed away from its group's 3 rounds in a row" in result.rounds[2].left_out["silo-7"]
    assert "on probation" in result.rounds[4].left_out["silo-7"]
    assert "silo-7" in result.rounds[2].details["influence"]["apart"]
    together = tuple(f"silo-{i - 1}" for i in range(1, BAD))
    assert together in result.rounds[5].groups
    assert set(result.models) == {*together, "silo-7"}
    assert "silo-7" in result.rounds[5].silos, "it trains on, alone"
    assert reasons[4] == result.rounds[2].left_out["silo-7"], "with the reason"


@pytest.mark.parametrize(
    ("purposes", "known", "model", "until"),
    [
        (["race-0"], {}, None, 0),  # its own training counts
        (["", "race-0"], {}, 0.0, 5),
        (["", "race-0"], {"a": Quarantined({"w": np.ones(2)}, 2, 9, "away")}, 1.0, 9),
    ],
)
def test_a_silo_whose_own_training_diverges_goes_on_alone(
    purposes: list[str], known: dict[str, Quarantined], model: float | None, until: int
) -> None:
    """Not with a model that it trains beside its own, and not for less than its quarantine."""
    silo, algorithm = Silo("a", 1), FedAvg().algorithm
    starts = {purpose: {"w": np.full(2, 9.0 * bool(purpose))} for purpose in ("", "race-0")}
    orders = [Order(silo, start, purpose) for purpose, start in starts.items()]
    failed = [(o, ReplyError("NaN", diverged=True)) for o in orders if o.purpose in purposes]
    updates = [Update(silo, o.model, o.model, 9, {}) for o in orders if o.purpose not in purposes]
    state, now = Plain(Members({})), Round(3, (silo,))
    scene = Scene(now, Room(3, now.silos, algorithm, state), algorithm, state, training=True)
    came = Came(orders, Checked(updates, failed), state, updates, {}, {})
    mine, came = Robust(Influence()).incoming(Reputation(apart=known), scene, came)
    assert {n: own["w"][0] for n, own in came.apart.items()} == (
        {} if model is None else {"a": model}
    )
    assert [own.until for own in mine.apart.values()] == [until] * (model is not None)


def test_what_is_remembered_survives_a_checkpoint() -> None:
    stored: dict[int, Checkpoint[Any]] = {}
    whole = run(ATTACKS["sign flipped"], rounds=10, commit=lambda c: stored.__setitem__(c.round, c))
    for after in (2, 5, 9):
        resumed = run(ATTACKS["sign flipped"], rounds=10, resume=decode(*encode(stored[after])))
        assert_same_models(whole, resumed)
        assert [r.groups for r in resumed.rounds] == [r.groups for r in whole.rounds[after:]]


def test_a_silo_weighs_by_what_it_stated_first() -> None:
    def later(message: Message, answer: RecordDict) -> RecordDict:
        if message.metadata.dst_node_id == BAD and message.content["config"]["server-round"] > 1:
            answer["metrics"]["num-examples"] = 700
        return answer

    result = run(later, rounds=3)
    assert result.rounds[1].details["influence"]["claimed"] == {"silo-7": 700}
    free = run(rounds=3)
    assert_equal_models(arrays_of(result.models["silo-0"]), arrays_of(free.models["silo-0"]))


def test_honest_silos_notice_nothing() -> None:
    bounded, free = run(), run(influence=OFF)
    assert_same_models(free, bounded)
    influences = [r.details["influence"] for r in bounded.rounds if not r.final]
    assert not any({"clipped", "apart", "claimed"} & set(one) for one in influences)
    assert set(influences[0]["norms"]) == set(influences[0]["cosines"]) == set(free.models)


def test_a_silo_that_sends_back_what_it_got_is_named_and_does_not_count(
    caplog: pytest.LogCaptureFixture,
) -> None:
    result = run(dishonest(times(0)), rounds=3)
    together = tuple(f"silo-{i - 1}" for i in range(1, BAD + 1))
    for report in result.rounds[:3]:
        assert report.groups == (together,)
        assert report.left_out == {"silo-7": IDLE}
    assert f"silo-7 is left out: {IDLE}" in caplog.text
    grid = InProcessGrid(plain_app(), plain_nodes(*[0] * HONEST))
    without = start(FedAvg(), grid, 3, timeout=5.0)
    for name in together[:-1]:
        assert_equal_models(arrays_of(result.models[name]), arrays_of(without.models[name]))


def test_where_nobody_moves_nobody_is_named() -> None:
    def idle(message: Message, answer: RecordDict) -> RecordDict:
        answer["arrays"] = message.content["arrays"]
        return answer

    result = run(idle, rounds=2)
    assert [report.left_out for report in result.rounds] == [{}] * 3
    assert_equal_models(arrays_of(result.models["silo-0"]), plain_model())


# ---------------------------------------------------------------- the arithmetic


def updates_of(models: list[Any], counts: list[float]) -> list[Update]:
    start = {"w": np.zeros(models[0].shape, np.float32)}
    return [
        Update(Silo(f"s{i}", i), start, {"w": model.astype(np.float32)}, count, {})
        for i, (model, count) in enumerate(zip(models, counts, strict=True))
    ]


@given(st.lists(st.floats(1, 1e9), min_size=1, max_size=12), st.floats(0.05, 1.0))
def test_no_weight_is_above_its_share_and_only_too_large_ones_change(
    weights: list[float], share: float
) -> None:
    named = {str(i): weight for i, weight in enumerate(weights)}
    kept = capped(named, share)
    if len(weights) < 3:
        assert kept == named
        return
    most = max(share, 1 / len(weights))
    assert max(kept.values()) <= most * sum(kept.values()) * (1 + 1e-9)
    cut = {name for name in named if kept[name] != named[name]}
    assert all(kept[name] == pytest.approx(max(kept.values())) for name in cut)
    if max(weights) <= most * sum(weights):
        assert kept == named


@pytest.mark.parametrize(
    ("size", "share"), [(3, 1 / 2), (4, 1 / 2), (5, 2 / 5), (9, 2 / 9), (20, 1 / 10)]
)
def test_a_claim_of_many_samples_weighs_twice_an_equal_share_at_most(
    size: int, share: float, caplog: pytest.LogCaptureFixture
) -> None:
    counts = [100.0] * (size - 1)
    updates = updates_of([np.ones(4)] * size, [*counts, 1e8])
    bounded = bound(Influence(), Reputation(), updates, number=1)
    found = [u.num_examples for u in bounded.updates]
    assert found[:-1] == counts and found[-1] / sum(found) == pytest.approx(share)
    (said,) = caplog.messages
    assert f"silo s{size - 1} states 100,000,000 samples" in said and "max-share to 1" in said
    free = bound(Influence(max_share=1), Reputation(), updates, number=1)
    assert [u.num_examples for u in free.updates] == [*counts, 1e8]


def test_who_trains_a_model_of_its_own_has_no_more_than_its_share_of_all() -> None:
    """Where models that began apart are averaged, as in pFedGraph, FeSEM and FLSC."""
    updates = updates_of([np.full(4, 1.0 + i) for i in range(4)], [40.0, 70.0, 100.0, 1e8])
    apart = [replace(u, start={"w": np.full(4, i, np.float32)}) for i, u in enumerate(updates)]
    bounded = bound(Influence(), Reputation(), apart, number=1, crosses=True)
    counts = [u.num_examples for u in bounded.updates]
    assert counts[:3] == [40.0, 70.0, 100.0] and counts[3] == pytest.approx(210.0)


def test_a_claim_of_many_samples_does_not_make_pfedgraphs_means_alone() -> None:
    """There everybody trains its own model."""
    nodes = plain_nodes(0, 0, 0, 0, samples=[50, 60, 70, 10**8])
    result = PFedGraph().start(
        grid=InProcessGrid(plain_app(), nodes),
        initial_arrays=plain_initial(),
        num_rounds=2,
        timeout=5.0,
    )
    weights = result.rounds[1].details["weights"]
    for name in ("silo-0", "silo-1", "silo-2"):
        assert weights[name]["silo-3"] < 0.75, "nearly 1 without the cap"


@given(st.integers(3, 9), st.integers(0, 2**31))
def test_where_nobody_is_out_of_line_bounded_aggregation_is_the_plain_mean(
    count: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    common = rng.normal(size=20)
    models = [common + 0.3 * rng.normal(size=20) for _ in range(count)]
    updates = updates_of(models, rng.integers(50, 100, size=count).astype(float).tolist())
    names = tuple(u.silo.name for u in updates)
    bounded = bound(Influence(), Reputation(), updates, number=1, groups=[names])
    assert all(one is other for one, other in zip(bounded.updates, updates, strict=True))
    assert not bounded.left_out and "clipped" not in bounded.details
    plain = weighted_mean([u.model for u in updates], [u.num_examples for u in updates])
    mean = average(bounded.updates)
    assert mean is not None
    assert_equal_models(mean, plain)


@given(st.floats(0, 1e9), st.integers(3, 9))
def test_no_update_is_longer_than_the_multiple_of_the_median(factor: float, count: int) -> None:
    rng = np.random.default_rng(count)
    models = [rng.normal(size=20) for _ in range(count - 1)]
    updates = updates_of([*models, factor * models[0]], [100.0] * count)
    bounded = bound(Influence(), Reputation(), updates, number=1)
    median = np.median([update_norm(u) for u in updates])
    longest = max(update_norm(u) for u in bounded.updates)
    assert longest <= 1.5 * median * (1 + 1e-5)


@pytest.mark.parametrize("how", ["trimmed-mean", "median", "krum"])
def test_robust_means_stay_among_the_honest_whatever_two_of_seven_send(how: Any) -> None:
    honest = [np.full(4, value) for value in (0.9, 0.95, 1.0, 1.05, 1.1)]
    updates = updates_of([*honest, np.full(4, 1e9), np.full(4, -1e9)], [1, 1, 1, 1, 1, 1e8, 1e8])
    found = average([replace(u, aggregate=how) for u in updates])
    assert found is not None and 0.9 <= found["w"].min() <= found["w"].max() <= 1.1
    pair = average([replace(u, aggregate=how) for u in updates[:2]])
    assert pair is not None and pair["w"] == pytest.approx(np.full(4, 0.925))


def test_the_run_s_aggregate_is_what_groups_are_made_by() -> None:
    for how in ("trimmed-mean", "median", "krum"):
        bounds = Influence(aggregate=how, max_share=1, clip_updates=0, quarantine_after=0)
        assert distance(run(ATTACKS["random, x 1e6"], influence=bounds)) < 1
    grouped = FedGroup(num_groups=1, influence=Influence(aggregate="median"))
    assert distance(run(ATTACKS["sign flipped"], strategy=grouped)) < 1


def test_robust_means_are_refused_where_they_mean_nothing() -> None:
    for strategy in ("independent", "fedfa", "fednova", "pfedgraph"):
        with pytest.raises(FederationError, match=f"{strategy} weights single .* 'median'"):
            RunConfig.read({"strategy": strategy, "aggregate": "median"})
    with pytest.raises(FederationError, match="FedFA weights single updates"):
        FedFA(influence=Influence(aggregate="krum"))
    config = RunConfig.read({"strategy": "hcct", "aggregate": "median", "max-share": 0.7})
    assert (config.influence.aggregate, config.influence.max_share) == ("median", 0.7)
    assert config.plain()["aggregate"] == "median"


def test_a_newcomer_is_moved_out_at_its_first_update_against_the_group() -> None:
    def leave(grid: InProcessGrid) -> None:
        grid.connect(plain_nodes(*[0] * (HONEST + 1))[-1])

    grid = InProcessGrid(plain_app(ATTACKS["sign flipped"]), plain_nodes(*[0] * HONEST))

    def joins(checkpoint: Checkpoint[Any]) -> None:
        if checkpoint.round == 2:
            leave(grid)

    result = FedAvg().start(
        grid=grid, initial_arrays=plain_initial(), num_rounds=4, timeout=5.0, commit=joins
    )
    assert "on probation" in result.rounds[2].left_out["silo-7"]
    assert ("silo-7",) in result.rounds[3].groups


def test_models_of_equal_values_are_one_start_whatever_object_holds_them() -> None:
    updates = updates_of([np.ones(4)] * 3 + [np.full(4, 100.0)], [100.0] * 4)
    copies = [replace(u, start={k: a.copy() for k, a in u.start.items()}) for u in updates]
    one, other = (
        bound(Influence(max_share=0.3), Reputation(), some, number=1, groups=[tuple("abcd")])
        for some in (updates, copies)
    )
    assert one.details == other.details and one.details["clipped"] == {"s3": 0.015}
    for a, b in zip(one.updates, other.updates, strict=True):
        assert a.num_examples == b.num_examples
        assert_equal_models(a.model, b.model)


def spread_updates(shares: list[float]) -> list[Update]:
    """Updates of one length of which so much goes in a common direction, the rest in own ones."""
    own = np.eye(len(shares) + 1)
    models = [
        share * own[0] + np.sqrt(1 - share**2) * own[i] for i, share in enumerate(shares, start=1)
    ]
    return updates_of(models, [100.0] * len(models))


def moved_out_of(shares: list[float]) -> set[str]:
    """Whom three rounds of such updates move out."""
    updates, reputation = spread_updates(shares), Reputation()
    names = tuple(u.silo.name for u in updates)
    for number in (1, 2, 3):
        bounded = bound(Influence(), reputation, updates, number=number, groups=[names])
        reputation = bounded.reputation
    return set(bounded.left_out)


def test_where_directions_are_spread_only_one_far_from_all_is_out_of_line() -> None:
    """As where silos of one group have other labels; the least of the honest is below 0."""
    honest = np.linspace(-0.1, 0.95, 12).tolist()
    updates = spread_updates(honest)
    together = [tuple(u.silo.name for u in updates)]
    voting = bounds._voting(updates, together, bounds._Starts())
    cosines = [one.cosine for one in bounds._directions(voting)]
    assert np.median(cosines) > bounds.AGREEMENT and min(cosines) < -0.05
    assert moved_out_of(honest) == set()
    assert moved_out_of([*honest, -0.9]) == {"s12"}
    assert moved_out_of([*[0.9] * 12, -0.1]) == {"s12"}, "among silos of one mind"


@pytest.mark.parametrize("kind", [np.float32, np.float16])
def test_products_of_large_updates_are_the_same_bit_for_bit_in_several_threads(
    kind: type, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)

    def model() -> wire.Model:
        return {"w": rng.normal(size=3 * bounds.SHARE).astype(kind), "n": np.array(3)}

    start = model()
    silos = [Silo(f"s{i}", i, 5) for i in range(3)]
    updates = [Update(silo, start, model(), 5.0, {}) for silo in silos]
    found = bounds._products(updates)
    one_by_one = bounds._products([updates[1]])
    assert found[1, 1] == pytest.approx(one_by_one[0, 0], rel=1e-6)
    changed = [u.model["w"].astype(np.float64) - start["w"].astype(np.float64) for u in updates]
    np.testing.assert_allclose(found, np.array(changed) @ np.array(changed).T, rtol=1e-4)
    monkeypatch.setattr(bounds, "each", lambda work, items, **_: [work(one) for one in items])
    np.testing.assert_array_equal(found, bounds._products(updates))
