"""Auto: the groups that are there are found, and nobody is grouped where there are none."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message, MetricRecord, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import norm

from coterie import wire
from coterie.client.app import app
from coterie.engine.inprocess import InProcessGrid
from coterie.server.runs.codec import decode, encode
from coterie.strategies import Auto, FederationError, RunResult
from coterie.strategies.auto import candidates, evidence
from coterie.strategies.auto.budget import Budget
from coterie.strategies.auto.candidates import Candidate, between, nested, trivial
from coterie.strategies.auto.race import decided
from coterie.strategies.auto.state import BY_SILO, AutoState, Entrant, Measured, Verdict, group_of
from coterie.strategies.partition.distance import Distance, any_apart
from coterie.strategies.partition.gram import gram
from coterie.strategies.partition.race import (
    Gain,
    Standing,
    loss_variances,
    sampling_variances,
    shrunken_gains,
    standings,
)
from coterie.strategies.rounds.algorithm import Round, Update
from coterie.strategies.rounds.checkpoint import Checkpoint
from coterie.strategies.rounds.churn import Churn
from coterie.strategies.rounds.members import Members
from coterie.strategies.rounds.play import welcome
from coterie.strategies.rounds.reports import Group, RoundReport
from coterie.strategies.rounds.roster import DescribedRoster, Silo
from tests.conftest import (
    assert_equal_models,
    digits_config,
    plain_app,
    plain_initial,
    plain_nodes,
)
from tests.kit import ask, assert_same_models, initial

ROUNDS = 8
TRAINING = {
    "task": "digits",
    "local-epochs": 10,
    "batch-size": 16,
    "lr": 0.1,
    "run": "r",
    "seed": 0,
}


def nodes(kinds: Sequence[int], *, train: int = 60, **more: Any) -> list[dict[str, Any]]:
    """One silo for each entry: by how much it moves its labels on."""
    return [
        digits_config(
            f"s{number}-by-{kind}",
            **{
                "data.train": train,
                "data.test": 40,
                "data.skip": number * (train + 40),
                "data.label-shift": kind,
                **more,
            },
        )
        for number, kind in enumerate(kinds)
    ]


def start(
    silos: Sequence[Mapping[str, Any]],
    *,
    rounds: int = ROUNDS,
    churn: str = "",
    leaves: Mapping[int, int] | None = None,
    returns: Mapping[int, Mapping[str, Any]] | None = None,
    says: Callable[[Message, Context], Message] = app,
    **more: Any,
) -> RunResult:
    """``leaves``: round → node that goes after it; ``returns``: round → what comes then."""
    grid = InProcessGrid(says, silos)

    def notify(report: RoundReport) -> None:
        if leaves and report.round in leaves and not report.final:
            grid.disconnect(leaves[report.round])
        if returns and report.round in returns and not report.final:
            grid.connect(returns[report.round])

    arrays = wire.encode_arrays(initial(node=silos[0]), packed=False)
    roster = DescribedRoster("digits", min_silos=1, churn=Churn.parse(churn))
    strategy = Auto(
        roster=roster,
        train_config={**TRAINING, "rounds": rounds},
        on_round=notify,
    )
    return strategy.start(grid=grid, initial_arrays=arrays, num_rounds=rounds, **more)


def errors(result: RunResult) -> dict[str, float]:
    return {name: error for name, (_, error, _) in result.rounds[-1].evaluation.items()}


def verdict_of(result: RunResult) -> dict[str, Any]:
    """Reported in the round in which it was found."""
    (found,) = [r.details["verdict"] for r in result.rounds if "verdict" in r.details]
    return dict(found)


@pytest.fixture(scope="module")
def committed() -> dict[int, Any]:
    """Round → what is kept of the run of two kinds."""
    return {}


@pytest.fixture(scope="module")
def two_kinds(committed: dict[int, Any]) -> RunResult:
    def commit(checkpoint: Checkpoint[AutoState]) -> None:
        committed[checkpoint.round] = encode(checkpoint)

    return start(nodes([0, 0, 0, 5, 5, 5]), commit=commit)


def test_the_kinds_of_silos_are_found_without_being_told(two_kinds: RunResult) -> None:
    assert two_kinds.rounds[-1].groups == (
        ("s0-by-0", "s1-by-0", "s2-by-0"),
        ("s3-by-5", "s4-by-5", "s5-by-5"),
    )
    assert len(two_kinds.models) == 6


def test_the_record_says_what_was_raced_and_what_it_cost(two_kinds: RunResult) -> None:
    phases = [report.details["phase"] for report in two_kinds.rounds]
    assert phases == sorted(phases, key=["look", "race", "hold"].index)
    verdict = verdict_of(two_kinds)
    assert verdict["judges"] == sorted(errors(two_kinds))
    sources = [c["source"] for c in verdict["candidates"]]
    assert {"everybody alone", "all together"} <= {s for one in sources for s in one.split("; ")}
    winner = verdict["candidates"][verdict["winner"]]
    assert tuple(map(tuple, winner["groups"])) == two_kinds.rounds[-1].groups
    assert all(gain["expected"] > 0 for gain in verdict["gains"].values())
    assert max(two_kinds.rounds[-1].details["trainings"].values()) <= 2 * ROUNDS
    cost = two_kinds.rounds[-1].details["bytes"]
    reports = two_kinds.rounds[:-1]  # after the last round models are handed out, as FedAvg's are
    phases = [cost for report in reports for cost in report.phases.values()]
    moved = sum(
        one.bytes_sent + one.bytes_received
        for one in (*phases, *(silo for report in reports for silo in report.silos.values()))
    )
    model = sum(array.nbytes for array in wire.decode_arrays(two_kinds.models["s0-by-0"]).values())
    assert cost["usual"] == ROUNDS * 6 * 2 * model
    hits = 100_000  # what is counted of discriminators beside weights
    assert cost["moved"] == pytest.approx(moved, abs=hits)
    assert 0 < cost["discriminators"] <= cost["usual"] / 2
    assert cost["moved"] <= cost["budget"] * cost["usual"] and cost["budget"] == 3


def test_the_record_has_the_evidence_of_every_silo_once(two_kinds: RunResult) -> None:
    verdict = verdict_of(two_kinds)
    assert sum("verdict" in report.details for report in two_kinds.rounds) == 1
    alone = next(
        number
        for number, one in enumerate(verdict["candidates"])
        if all(len(group) == 1 for group in one["groups"])
    )
    for name, trial in verdict["trials"].items():
        assert trial["count"] == 12, "a fifth of sixty"
        assert len(trial["errors"]) == len(verdict["candidates"])
        gain, own = verdict["gains"][name], trial["errors"]
        assert gain["measured"] == pytest.approx(own[alone] - own[verdict["winner"]], abs=1e-5)
        assert gain["noise"] > 0
    for number, one in enumerate(verdict["candidates"]):
        measured = [trial["errors"][number] for trial in verdict["trials"].values()]
        if one.get("dropped") in (None, verdict["round"]):  # others were out before
            assert one["error"] == pytest.approx(np.mean(measured), abs=1e-5)
    winner = verdict["candidates"][verdict["winner"]]
    assert winner["samples"] == 180, "three silos of sixty"


def test_the_record_says_in_which_round_a_candidate_was_out(two_kinds: RunResult) -> None:
    verdict = verdict_of(two_kinds)
    raced = [r for r in two_kinds.rounds if r.details["phase"] == "race"]
    assert raced[0].round == verdict["began"]
    for one in verdict["candidates"]:
        assert bool(one.get("dropped")) == one["out"]
        there = [r.round for r in raced if one["groups"] in _groups_of(r, "candidates")]
        assert there[0] == verdict["began"]
        assert there[-1] == (one.get("dropped") or verdict["round"]) - 1
    reports = [r for r in raced if "dropped" in r.details]
    for report in reports:
        assert all(one["dropped"] == report.round for one in report.details["dropped"])


def _groups_of(report: RoundReport, key: str) -> list[Any]:
    return [one["groups"] for one in report.details[key]]


@pytest.mark.nightly
def test_the_order_in_which_silos_are_listed_does_not_matter(two_kinds: RunResult) -> None:
    again = start(nodes([0, 0, 0, 5, 5, 5])[::-1])
    assert again.rounds[-1].groups == two_kinds.rounds[-1].groups
    for name, model in two_kinds.models.items():
        assert_equal_models(model, again.models[name])


@pytest.mark.nightly
def test_where_everybody_differs_everybody_stays_alone() -> None:
    result = start(nodes([0, 3, 5, 8]))
    assert all(len(group) == 1 for group in result.rounds[-1].groups)


@pytest.mark.nightly
def test_where_all_are_alike_all_are_together() -> None:
    result = start(nodes([0, 0, 0, 0]))
    assert [len(group) for group in result.rounds[-1].groups] == [4]


def liars(count: int) -> Callable[[Message, Context], Message]:
    """Silos of which the last two report an error of 0 alone, of 1 in a group, of ``count``."""

    def says(message: Message, context: Context) -> Message:
        reply = app(message, context)
        metrics = reply.content.get(wire.METRICS, {}) if reply.has_content() else {}
        if message.metadata.dst_node_id > 4 and wire.HOLDOUT_ERROR in metrics:
            together = message.content[wire.CONFIG].get(wire.GROUP_SIZE, 1) > 1
            metrics[wire.HOLDOUT_ERROR] = metrics[wire.HOLDOUT_LOSS] = float(together)
            metrics[wire.HOLDOUT_EXAMPLES] = count or metrics[wire.HOLDOUT_EXAMPLES]
        return reply

    return says


@pytest.mark.nightly
def test_two_silos_that_lie_do_so_with_as_many_samples_as_they_can_hold_out() -> None:
    usual, many = (start(nodes([0] * 6), rounds=6, says=liars(n)) for n in (0, 10**6))
    assert verdict_of(many) == verdict_of(usual)
    assert many.rounds[-1].groups == usual.rounds[-1].groups
    assert_same_models(usual, many)


@pytest.mark.nightly
def test_a_run_that_stops_in_the_middle_goes_on_bit_for_bit(
    two_kinds: RunResult, committed: dict[int, Any]
) -> None:
    kept = [decode(*stored) for stored in committed.values()]
    racing = next(standing for standing in kept if standing.state.phase == "race")
    again = start(nodes([0, 0, 0, 5, 5, 5]), resume=racing)
    for name, model in two_kinds.models.items():
        assert_equal_models(model, again.models[name])


@pytest.mark.nightly
def test_a_run_that_ends_in_its_race_hands_out_what_is_best_by_then(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """As it does where it is not worth going on (``patience``)."""
    kept: list[Checkpoint[AutoState]] = []
    start(nodes([0, 0, 0, 5, 5, 5]), commit=kept.append)
    racing = [k for k in kept if k.state.phase == "race"]
    first, second = racing[0], racing[2]
    ended = {}
    for checkpoint in (first, second):
        now = Round(checkpoint.round, checkpoint.silos, {"rounds": ROUNDS})
        with caplog.at_level(logging.WARNING, logger="coterie.run"):
            steps = Auto().algorithm.finish(checkpoint.state, now)
            with pytest.raises(StopIteration) as end:
                next(steps)
        ended[checkpoint.round] = end.value.value
    assert not ended[first.round].held, "nobody has measured anything yet"
    assert len(ended[second.round].held) < 6
    assert not ended[second.round].verdict.complete
    assert "Every silo keeps its own model" in caplog.text
    assert "It keeps the best so far" in caplog.text


@pytest.mark.nightly
def test_silos_that_keep_their_errors_back_are_grouped_by_what_the_others_measured() -> None:
    silos = nodes([0, 0, 0, 5, 5, 5], train=100)
    for silo in (silos[0], silos[4]):
        silo["share-metrics"] = "train-loss"
    result = start(silos)
    assert verdict_of(result)["judges"] == [
        "s1-by-0", "s2-by-0", "s3-by-5", "s5-by-5"
    ]  # fmt: skip
    assert [len(group) for group in result.rounds[-1].groups] == [3, 3]


@pytest.mark.nightly
def test_where_nobody_may_say_anything_nobody_is_grouped(caplog: pytest.LogCaptureFixture) -> None:
    silos = nodes([0, 0, 0, 0], **{"share-metrics": "train-loss"})
    with caplog.at_level(logging.WARNING, logger="coterie.run"):
        result = start(silos)
    assert all(len(group) == 1 for group in result.rounds[-1].groups)
    assert "the race cannot be decided." in caplog.text


@pytest.mark.nightly
def test_no_silo_trains_in_a_smaller_group_than_it_accepts() -> None:
    silos = nodes([0, 0, 0, 5, 5, 5])
    silos[3]["min-group-size"] = 4
    result = start(silos)
    group = next(g for g in result.rounds[-1].groups if "s3-by-5" in g)
    assert len(group) == 1 or len(group) >= 4


@pytest.mark.nightly
def test_a_newcomer_finds_its_group_and_one_of_another_kind_stays_alone() -> None:
    silos = nodes([0, 0, 0, 5, 5, 5, 0, 8], train=100)
    late = [str(silo["name"]) for silo in silos[6:]]
    result = start(silos, rounds=12, churn=f"{late[0]}+8, {late[1]}+8")
    groups = result.rounds[-1].groups
    assert ("s0-by-0", "s1-by-0", "s2-by-0", late[0]) in groups
    assert (late[1],) in groups
    joined = next(r for r in result.rounds if late[0] in r.joined)
    assert (late[0],) in joined.groups, "on probation it does not count in the group"
    placements = {
        n: (r.round, p) for r in result.rounds for n, p in r.details.get("placed", {}).items()
    }
    assert joined.details["probation"][late[0]] == ["s0-by-0", "s1-by-0", "s2-by-0"]
    number, placed = placements[late[0]]
    assert number == joined.round + 1 and placed["joins"] and placed["count"] == 20
    assert placed["grouped"] <= placed["alone"]
    assert not placements[late[1]][1]["joins"] and placements[late[1]][1]["grouped"] > 0.5


@pytest.mark.nightly
def test_the_others_stay_together_when_one_leaves() -> None:
    result = start(nodes([0, 0, 0, 5, 5, 5]), rounds=10, leaves={7: 1})
    assert ("s1-by-0", "s2-by-0") in result.rounds[-1].groups


@pytest.mark.nightly
def test_a_silo_that_comes_back_with_other_data_is_placed_anew(tmp_path: Path) -> None:
    """As many samples as before, of the other kind: it says that they are others.

    One that comes back with the data that it had keeps its place.
    """
    silos = nodes([0, 0, 0, 5, 5, 5])
    for number in (0, 2):
        silos[number] |= {"home": str(tmp_path / str(number))}
    moved = {**silos[2], "data.label-shift": 5}
    back = {6: silos[0], 7: moved}
    found = start(silos, rounds=11, leaves={6: 1, 7: 3}, returns=back)
    assert ("s0-by-0", "s1-by-0", "s2-by-0") in found.rounds[6].groups
    assert ("s0-by-0", "s1-by-0") in found.rounds[-1].groups
    assert found.rounds[-1].details["other-data"] == ["s2-by-0"]
    (placed,) = [r.details["placed"] for r in found.rounds if "placed" in r.details]
    assert placed["s2-by-0"]["group"] == ["s3-by-5", "s4-by-5", "s5-by-5"]


def _held(rounds: int) -> tuple[Any, AutoState, Any]:
    names = tuple("abcdef")
    model = {"w": np.zeros(2, np.float32)}
    groups = (("a", "b", "c"), ("d", "e", "f"))
    state = AutoState(
        members=Members(
            *(model, dict.fromkeys(names, model), dict.fromkeys(names, 50.0)),
            data=dict.fromkeys(names, (50, "0")),
        ),
        number=8,
        phase="hold",
        alone=dict.fromkeys(names, model),
        held=groups,
        group_models={group: {"w": np.ones(2, np.float32)} for group in groups},
        raced=frozenset(names),
        trainings=dict.fromkeys(names, 8.0),
    )

    def now(**changed: tuple[int, str]) -> Round:
        facts = {name: changed.get(name, (50, "0")) for name in names}
        silos = [
            Silo(n, i + 1, size, described=True, mark=mark)
            for i, (n, (size, mark)) in enumerate(facts.items())
        ]
        return Round(9, tuple(silos), {"rounds": rounds})

    return Auto(train_config={**TRAINING, "rounds": rounds}).algorithm, state, now


def test_the_race_is_run_again_where_many_have_other_data() -> None:
    auto, state, now = _held(40)
    assert welcome(auto, state, now()).phase == "hold"
    one = welcome(auto, state, now(a=(50, "1")))
    assert one.phase == "hold" and one.probation == {"a": 0} and one.drifted == {"a"}
    assert one.held == (("b", "c"), ("d", "e", "f"))
    both = welcome(auto, one, now(a=(50, "1"), e=(70, "0")))
    assert both.phase == "look" and both.drifted == {"a", "e"}


def test_a_group_that_loses_a_silo_to_other_data_keeps_its_model() -> None:
    auto, state, now = _held(12)
    shared = state.group_models[("a", "b", "c")]
    state = welcome(auto, state, now(a=(50, "1")))
    assert state.group_models[("b", "c")] is shared and state.phase == "hold"
    state = welcome(auto, state, now(a=(50, "1"), b=(50, "1")))
    assert ("c",) in state.held and state.alone["c"] is shared
    assert ("b", "c") not in state.group_models


KINDS = (0, 0, 0, 1, 1, 1)


def measures_what_it_holds_out(message: Message, answer: RecordDict) -> RecordDict:
    """The plain app, with the received model's distance from what all of its kind look for."""
    if message.content["config"].get("holdout"):
        kind = KINDS[message.metadata.dst_node_id - 1]
        wanted = np.random.default_rng([7, kind]).normal(size=(6, 5))
        loss = float(np.mean((message.content["arrays"]["w"].numpy() - wanted) ** 2))
        held = {"holdout-error": loss / (1 + loss), "holdout-num-examples": 20}
        answer["metrics"] = MetricRecord({**answer["metrics"], **held})
    return answer


def of_plain_app(fault: Any) -> RunResult:
    return Auto().start(
        grid=InProcessGrid(plain_app(fault), plain_nodes(*KINDS)),
        initial_arrays=plain_initial(),
        num_rounds=9,
    )


def test_any_client_app_that_measures_what_it_holds_out_is_grouped() -> None:
    result = of_plain_app(measures_what_it_holds_out)
    hidden = [["silo-0", "silo-1", "silo-2"], ["silo-3", "silo-4", "silo-5"]]
    assert sorted(result.groups[9]) == hidden
    assert result.state.verdict is not None and len(result.state.verdict.judges) == 6


def test_an_app_that_measures_nothing_stays_alone_and_the_log_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level("INFO", "coterie.run"):
        result = of_plain_app(None)
    assert result.groups[9] == [[f"silo-{i}"] for i in range(6)]
    assert "answers the entry holdout of a training message with holdout-error" in caplog.text
    assert "the race cannot be decided" in caplog.text


@pytest.mark.parametrize(
    ("training", "why"),
    [({"rounds": 5}, "rounds must be at least 6. Got 5"), ({"personal": "head"}, "personal")],
)
def test_what_does_not_go_with_a_race_is_refused(training: dict[str, Any], why: str) -> None:
    with pytest.raises(FederationError, match=why):
        Auto(train_config=training)


# ---------------------------------------------------------------- the numbers


def test_a_difference_at_every_silo_is_beyond_chance_and_one_of_noise_is_not() -> None:
    alone, worse = np.full(9, 0.2), np.full(9, 0.6)
    noise = np.array([0.1, 0.3, 0.1, 0.3, 0.2, 0.2, 0.3, 0.1, 0.25])
    found = standings(
        np.stack([alone, worse, noise]), np.full(9, 20.0), np.zeros((3, 9)), shares=True
    )
    assert [s.out for s in found] == [False, True, False]
    assert found[0].behind == 0 and found[1].behind == pytest.approx(0.4)


def test_the_spread_over_silos_is_not_believed_below_what_sampling_makes() -> None:
    """Two models that differ by one sample of four at every silo may differ by nothing."""
    one, other = np.full(3, 0.25), np.full(3, 0.5)
    (_, few) = standings(np.stack([one, other]), np.full(3, 4.0), np.zeros((2, 3)), shares=True)
    (_, many) = standings(np.stack([one, other]), np.full(3, 4e4), np.zeros((2, 3)), shares=True)
    assert not few.out and many.out
    expected = np.sqrt(sampling_variances(other, one, np.full(3, 4.0)).mean() / 3)
    assert few.standard_error == pytest.approx(expected)


def test_gains_are_drawn_towards_the_mean_the_more_the_fewer_samples_there_are() -> None:
    alone, grouped = [0.5, 0.5, 0.1, 0.5], [0.1, 0.1, 0.5, 0.1]
    few = shrunken_gains(alone, grouped, [4, 4, 4, 4], shares=True)
    many = shrunken_gains(alone, grouped, [4000] * 4, shares=True)
    assert many[2].expected < 0, "it has good reason to go by itself"
    assert few[2].expected > many[2].expected
    assert few[0].measured == pytest.approx(0.4)
    (lone,) = shrunken_gains([0.5], [0.1], [40], shares=False)
    assert lone.expected == pytest.approx(0.4) and not lone.own
    assert np.isnan([lone.noise, lone.standard_error]).all(), "of one silo nothing is sure"
    unknown = shrunken_gains(alone, grouped, [4000] * 4, shares=False)
    assert {round(g.expected, 9) for g in unknown} == {0.2}
    variances = loss_variances(np.array([[0.01, 0.02]] * 4))
    assert variances == pytest.approx(np.full(4, 3e-4))
    losses = shrunken_gains(alone, grouped, [4000] * 4, shares=False, variances=variances)
    assert [gain.own for gain in losses] == [False, False, True, False]
    assert loss_variances(np.array([[0.01, np.nan]])) is None


def test_what_the_race_decided_is_not_decided_again_by_a_few_samples() -> None:
    """As it happened: six silos with 18 samples lose nothing, four with 5 or 6 lose a few answers.

    Silos counted alike, all ten were expected to lose, and each was sent away from the group that
    had won.
    """
    measured = [0.056, 0.0, 0.028, -0.028, 0.0, -0.028, -0.1, 0.083, -0.167, -0.333]
    counts = [18.0] * 6 + [5.0, 6.0, 6.0, 6.0]
    grouped = [0.2] * 9 + [0.4]
    alone = [g + m for g, m in zip(grouped, measured, strict=True)]
    assert not any(gain.own for gain in shrunken_gains(alone, grouped, counts, shares=True))


def test_of_candidates_that_cannot_be_told_apart_the_one_with_most_data_is_held() -> None:
    alone, together = trivial(["a", "b", "c"], {})
    sizes = {"a": 10.0, "b": 10.0, "c": 10.0}
    close = [Standing(0.2, 0.0, 0.0, False), Standing(0.22, 0.02, 0.03, False)]
    far = [Standing(0.2, 0.0, 0.0, False), Standing(0.26, 0.06, 0.03, False)]
    out = [Standing(0.2, 0.0, 0.0, False), Standing(0.22, 0.02, 0.03, True)]
    wanted = [evidence.by_preference((alone, together), one, sizes) for one in (close, far, out)]
    assert wanted == [[1, 0], [0], [0]]
    split = replace(together, source=BY_SILO, by_silo=True)
    assert evidence.by_preference((split, together), close, sizes) == [1, 0], "the simpler one"


def test_discriminators_break_ties_within_a_standard_error_and_no_more() -> None:
    """The proposal of few samples comes before one of many, but not if it is behind that."""
    alone, together = trivial(["a", "b", "c"], {})
    sizes = {"a": 10.0, "b": 10.0, "c": 10.0}
    proposed = replace(alone, supported=True)
    for behind, wanted, usual in (
        ((0.0, 0.02), [0, 1], [1, 0]),
        ((0.02, 0.02), [0, 1], [1, 0]),
        ((0.02, 0.0), [1, 0], [1, 0]),
        ((0.06, 0.0), [1], [1]),
    ):
        found = [Standing(0.2 + b, b, 0.03, False) for b in behind]
        assert evidence.by_preference((proposed, together), found, sizes) == wanted
        assert evidence.by_preference((alone, together), found, sizes) == usual


@pytest.mark.parametrize(
    ("distances", "apart"),
    [
        ([], False),
        ([(0.2, 0.1)] * 6, False),  # two standard errors, in one of six comparisons
        ([(0.2, 0.1)] * 5 + [(0.28, 0.1)], True),
        ([(0.2, 0.1)], True),
        ([(-0.5, 0.1)], False),
    ],
)
def test_discriminators_at_chance_for_every_pair_tell_nobody_apart(
    distances: list[tuple[float, float]], apart: bool
) -> None:
    assert any_apart([Distance(value, error, 5) for value, error in distances]) is apart


NAMES = tuple("abcdef")
SILOS = tuple(Silo(n, i + 1, 50, described=True) for i, n in enumerate(NAMES))


def _won_by_all(worse: Mapping[str, float], *, since: int = 3) -> AutoState:
    """A race of six silos that all together wins, and what those who differ measured in it."""
    alone, together = trivial(NAMES, {})

    def times(error: float) -> tuple[Measured, ...]:
        return (Measured(error, 2 * error, 4000),) * evidence.MEASURES

    measured = {(name,): {name: times(0.5)} for name in NAMES}
    measured[NAMES] = {name: times(worse.get(name, 0.1)) for name in NAMES}
    return AutoState(
        members=Members({"w": np.zeros(2, np.float32)}, sizes=dict.fromkeys(NAMES, 50.0)),
        phase="race",
        since=since,
        alone={name: {"w": np.full(2, number, np.float32)} for number, name in enumerate(NAMES)},
        candidates=(alone, together),
        models={NAMES: {"w": np.full(2, 9, np.float32)}},
        measured=measured,
        raced=frozenset(NAMES),
    )


def _decided(worse: Mapping[str, float]) -> tuple[Any, AutoState, Round]:
    now = Round(6, SILOS, {"rounds": ROUNDS})
    auto = Auto(train_config=TRAINING).algorithm
    return auto, auto.absorb(_won_by_all(worse), [], now), replace(now, number=7)


def test_who_loses_by_the_winner_s_group_keeps_its_own_model() -> None:
    """Its group is the best for all others: one model cannot be right for everybody."""
    auto, state, now = _decided({"f": 0.9})
    assert state.phase == "hold" and state.held == (tuple("abcdef"),) and state.own == {"f"}
    assert_equal_models(state.members.models["f"], {"w": np.full(2, 5, np.float32)})
    assert_equal_models(state.members.models["a"], {"w": np.full(2, 9, np.float32)})
    _, work = auto.orders(state, now)
    (first, *_) = [order for order in work if order.silo.name == "f"]
    assert not first.purpose
    assert_equal_models(first.model, {"w": np.full(2, 5, np.float32)})


def test_of_a_group_that_most_of_its_silos_leave_nothing_is_left() -> None:
    """What the others measured was of a model that these trained too: one honest silo would stay
    with one that lies, in a group that nobody has raced."""
    auto, state, now = _decided({"a": 0.9, "b": 0.9, "c": 0.9})
    assert state.held == (tuple("abcdef"),) and state.own == set("abc"), "half of them stay"
    auto, state, now = _decided({"a": 0.6, "b": 0.6, "c": 0.6, "d": 0.6, "e": 0.1, "f": 0.1})
    assert state.held == tuple((name,) for name in "abcdef")
    assert not state.own and not state.group_models
    assert state.verdict is not None and state.verdict.left == ("e", "f")
    assert auto.details(replace(state, number=6))["verdict"]["left"] == ["e", "f"]
    for name, model in state.alone.items():
        assert_equal_models(state.members.models[name], model)
    assert all(gain.share == 0 for gain in state.verdict.gains.values())
    _, work = auto.orders(state, now)
    assert [(order.silo.name, order.purpose) for order in work] == [(n, "") for n in "abcdef"]


PAIRS, THREES = (("a", "b"), ("c", "d"), ("e", "f")), (("a", "b", "c"), ("d", "e", "f"))
TOGETHER = trivial(NAMES, {})[1].groups
SINGLES = candidates.everybody_alone(NAMES).groups


def _race(
    errors: Mapping[tuple[Group, ...], Sequence[float | None]],
    *,
    dropped: Sequence[tuple[Group, ...]] = (),
    supported: tuple[Group, ...] | None = None,
    count: float = 20,
) -> AutoState:
    """A race that is over: partition → what each of six silos measured of it, None: nothing."""
    measured: dict[Group, dict[str, tuple[Measured, ...]]] = {}
    for groups, own in errors.items():
        for name, error in zip(NAMES, own, strict=True):
            if groups != SINGLES and group_of(groups, name) == (name,):
                continue  # alone is one model, in whichever partition
            found = () if error is None else (Measured(error, error, count),) * evidence.MEASURES
            measured.setdefault(group_of(groups, name), {})[name] = found
    entrants = [Candidate(p, str(n), supported=p == supported) for n, p in enumerate(errors)]
    out = Standing(0.5, 0.3, 0.1, True)
    return AutoState(
        members=Members({"w": np.zeros(2, np.float32)}, sizes=dict.fromkeys(NAMES, 50.0)),
        phase="race",
        since=3,
        alone={name: {"w": np.zeros(2, np.float32)} for name in NAMES},
        candidates=tuple(one for one in entrants if one.groups not in dropped),
        dropped=tuple(Entrant(one, out, out, 50.0, 5) for one in entrants if one.groups in dropped),
        models={g: {"w": np.ones(2, np.float32)} for p in errors for g in p if len(g) > 1},
        measured=measured,
        raced=frozenset(NAMES),
    )


def _after(state: AutoState, **more: Any) -> AutoState:
    return decided(state, Round(6, SILOS, {"rounds": 8}, **more), complete=True)


@pytest.mark.parametrize(
    ("race", "held"),
    [
        pytest.param(
            _race({SINGLES: [0.3] * 6, TOGETHER: [0.3, 0.3, 0.3, 0.3, 0.3, 0.35]}),
            SINGLES,
            id="most data, and hardly behind",
        ),
        pytest.param(
            _race({SINGLES: [0.3] * 6, TOGETHER: [0.3] * 6}), TOGETHER, id="most data, and equal"
        ),
        pytest.param(
            _race({SINGLES: [0.533] * 6, TOGETHER: [0.7, 0.4] * 3}, supported=TOGETHER),
            SINGLES,
            id="the discriminators' proposal",
        ),
        pytest.param(
            _race(
                {
                    SINGLES: [0.533] * 6,
                    THREES: [0.5, 0.45] * 3,
                    TOGETHER: [0.7, 0.4] * 3,
                },
                supported=TOGETHER,
            ),
            THREES,
            id="the next one is not behind",
        ),
        pytest.param(
            _race({SINGLES: [0.2] * 6, TOGETHER: [0.3] * 6}, dropped=[SINGLES]),
            SINGLES,
            id="alone was out before, and is better by now",
        ),
        pytest.param(
            _race({SINGLES: [0.4] * 6, TOGETHER: [0.3] * 6}, dropped=[SINGLES]),
            TOGETHER,
            id="alone was out before, rightly",
        ),
        pytest.param(
            _race({SINGLES: [None] * 6, TOGETHER: [None] * 6}, dropped=[SINGLES]),
            SINGLES,
            id="nobody judges any more",
        ),
        pytest.param(
            _race(
                {
                    SINGLES: [0.3, None, None, 0.2, 0.2, 0.2],
                    TOGETHER: [0.2, None, 0.0, 0.3, 0.3, 0.2],
                }
            ),
            SINGLES,
            id="of silos that tell both, more lose",
        ),
        pytest.param(
            # Two of three leave a, b, c, which won by a; what is left, d, e, f, is behind.
            _race(
                {
                    SINGLES: [0.9, 0.1, 0.1, 0.3, 0.3, 0.3],
                    THREES: [0.0, 0.2, 0.2, 0.305, 0.305, 0.305],
                },
                count=4000,
            ),
            SINGLES,
            id="what is left of it is behind",
        ),
    ],
)
def test_no_partition_is_held_that_stands_behind_everybody_alone(
    race: AutoState, held: tuple[Group, ...]
) -> None:
    state = _after(race)
    assert state.held == held
    verdict = state.verdict
    assert verdict is not None and verdict.entrants[verdict.winner].candidate.groups == held
    assert set(state.group_models) == {group for group in held if len(group) > 1}
    if held == SINGLES:
        assert not state.own and not verdict.gains


PARTITIONS = (
    TOGETHER,
    THREES,
    PAIRS,
    (("a", "d"), ("b", "c", "e", "f")),
    (("a", "b"), ("c",), ("d",), ("e",), ("f",)),
)
FEW_ERRORS = st.sampled_from([None, 0.0, 0.1, 0.2, 0.3, 0.5, 0.9, 1.0])
"""So few that candidates are often equal, and all kinds of silos say nothing."""


@st.composite
def _races(draw: st.DrawFn) -> AutoState:
    errors = {SINGLES: draw(st.lists(FEW_ERRORS, min_size=6, max_size=6))}
    for groups in draw(st.lists(st.sampled_from(PARTITIONS), unique=True)):
        errors[groups] = draw(st.lists(FEW_ERRORS, min_size=6, max_size=6))
    out = draw(st.sets(st.sampled_from(list(errors)), max_size=len(errors) - 1))
    supported = draw(st.sampled_from([None, *errors]))
    count = draw(st.sampled_from([3.0, 20.0, 4000.0]))
    return _race(errors, dropped=sorted(out), supported=supported, count=count)


@settings(deadline=None, max_examples=300)
@given(_races(), st.booleans())
def test_whoever_proposes_it_and_whatever_is_measured_what_is_held_is_not_behind_alone(
    race: AutoState, secure: bool
) -> None:
    held = _after(race, unseen=secure).held
    judges = [
        name
        for name in NAMES
        if all(race.measured[group_of(c.groups, name)][name] for c in race.candidates)
        and race.measured[(name,)][name]
    ]

    def error(groups: tuple[Group, ...]) -> float:
        return sum(race.measured[group_of(groups, name)][name][-1].error for name in judges)

    assert held == SINGLES or (judges and error(held) <= error(SINGLES) + 1e-7)


def test_groups_that_fall_behind_alone_in_a_later_race_are_left_when_the_run_ends_in_it() -> None:
    models = {group: {"w": np.full(2, 7, np.float32)} for group in THREES}
    now = Round(9, SILOS, {"rounds": 40})
    for own, held in ((0.35, SINGLES), (0.3, THREES)):
        state = _race({SINGLES: [0.3] * 6, THREES: [own] * 6, TOGETHER: [0.8] * 6})
        steps = Auto().algorithm.finish(replace(state, held=THREES, group_models=models), now)
        with pytest.raises(StopIteration) as end:
            next(steps)
        assert end.value.value.held == held


@pytest.mark.parametrize(("secure", "group_error"), [(True, 0.6), (True, 0.1), (False, 0.6)])
def test_a_secure_race_goes_on_while_a_silo_would_leave_its_group(
    secure: bool, group_error: float
) -> None:
    """The group without it is not raced there, so nothing else keeps the race open."""
    state = _won_by_all({"f": group_error}, since=4)
    auto = Auto(train_config=TRAINING).algorithm
    phases = []
    for number in range(6, 10):
        now = Round(number, SILOS, {"rounds": 20}, unseen=secure)
        state = auto.absorb(state, [], now)
        phases.append(state.phase)
    doubted = secure and group_error > 0.5
    assert phases == (["race", "race", "hold", "hold"] if doubted else ["hold"] * 4)
    assert state.held == (NAMES,) and state.own == ({"f"} if group_error > 0.5 else set())


def test_candidates_are_what_the_updates_suggest_and_fit_the_smallest_groups() -> None:
    rng = np.random.default_rng(0)
    kinds = rng.normal(size=(2, 50))
    updates = [[kinds[i // 4] + 0.3 * rng.normal(size=50)] for i in range(8)]
    names, sizes = [f"s{i}" for i in range(8)], np.full(8, 50.0)
    hidden = (tuple(names[:4]), tuple(names[4:]))
    found = between(names, gram(updates), sizes, {}, np.random.default_rng(0))
    assert found[0].groups == hidden and "clusters, 2 groups" in found[0].source
    assert candidates.visible(found, found) and not candidates.visible(found, ())
    picky = between(names, gram(updates), sizes, {"s0": 5}, np.random.default_rng(0))
    assert all(("s0",) in c.groups or len(_group(c, "s0")) >= 5 for c in picky)
    assert between(names[:2], gram(updates[:2]), sizes[:2], {}, rng) == ()


def test_sums_over_the_groups_of_a_secure_race_show_nobody() -> None:
    """However many of them are added and subtracted, what is left is of as many as silos accept."""
    names = tuple("abcdefghi")
    least = dict.fromkeys(names, 2)
    ends = trivial(names, least)
    kinds = Candidate((tuple("abc"), tuple("def"), tuple("ghi")), "kinds")
    one_left = Candidate((tuple("abcd"), tuple("efgh"), ("i",)), "all less two groups is i")
    one_less = Candidate((tuple("ab"), ("c",), tuple("def"), tuple("ghi")), "abc less ab is c")
    crossing = Candidate((tuple("abcd"), tuple("efghi")), "neither in the other")
    coarse = Candidate((tuple("abcdef"), tuple("ghi")), "groups of groups")
    assert nested([*ends, kinds, coarse], least) == (*ends, kinds, coarse)
    assert nested([*ends, one_left, kinds], least) == (*ends, kinds)
    assert nested([*ends, kinds, one_less, crossing], least) == (*ends, kinds)
    assert nested([ends[0], one_left], least) == (ends[0], one_left)
    agreed = replace(kinds, source="clusters, 3 groups; HCCT, α 40")
    split = (tuple("ab"), ("c",), tuple("de"), ("f",), tuple("ghi"))
    two_less = Candidate(split, "beside all, c and f are left; beside abc, c")
    assert nested([*ends, two_less, kinds], least) == (*ends, two_less)
    assert nested([*ends, two_less, agreed], least) == (*ends, agreed), "two propose it"
    pairs = Candidate((tuple("abcdefg"), ("h",), ("i",)), "all less seven are two")
    assert nested([*ends, pairs], least) == (*ends, pairs)
    assert nested([*ends, pairs], {**least, "a": 3}) == ends


def _group(candidate: Candidate, name: str) -> tuple[str, ...]:
    return next(group for group in candidate.groups if name in group)


def test_who_is_in_doubt_about_its_group_ends_with_a_share_of_its_own_training() -> None:
    """Once the run is over; until then the group's model is what everybody trains."""
    auto, state, now = _held(9)
    sure, unsure = Gain(0.3, 0.1, 0.3, 0.05, 0.001), Gain(0.0, 0.1, 0.02, 0.05, 0.4)
    gains = {**dict.fromkeys("abcdf", sure), "e": unsure}
    state = replace(state, verdict=Verdict(2, 5, (), (), 0, gains), own=frozenset({"f"}), number=8)
    trained = {"w": np.full(2, 3, np.float32)}
    updates = [
        Update(silo, state.group_models[state.held[0]], trained, 50.0, {})
        for silo in now().silos
        if silo.name in "abde"
    ]
    state = auto.absorb(state, updates, now())
    assert_equal_models(state.members.models["e"], trained)
    _, work = auto.orders(state, replace(now(), number=10))
    (order,) = [one for one in work if one.silo.name == "e"]
    assert_equal_models(order.model, trained)
    state = replace(state, group_models={g: {"w": np.zeros(2, np.float32)} for g in state.held})
    with pytest.raises(StopIteration) as end:
        next(auto.finish(state, now()))
    done = end.value.value
    np.testing.assert_allclose(done.members.models["e"]["w"], 0.4 * 3, rtol=1e-6)
    for name in "acd":  # sure, and away in the last round
        assert done.members.models[name] is state.members.models[name]
    assert done.group_models is state.group_models
    with pytest.raises(StopIteration) as end:  # its gain was that of other data
        next(auto.finish(replace(state, drifted=frozenset("e")), now()))
    assert end.value.value.members.models["e"] is state.members.models["e"]


@pytest.mark.parametrize("secure", [False, True])
def test_what_nobody_sees_or_has_noise_gets_no_share(secure: bool) -> None:
    names = ("a", "b", "c", "d")
    alone, together = trivial(names, {})
    measured = {
        group: {name: (Measured(0.3, 0.6, 20),) * evidence.MEASURES for name in group}
        for candidate in (alone, together)
        for group in candidate.groups
    }
    model = {"w": np.zeros(2, np.float32)}
    state = AutoState(
        members=Members(model, sizes=dict.fromkeys(names, 50.0)),
        phase="race",
        since=1,
        alone=dict.fromkeys(names, model),
        noise={"b": 2.0},
        candidates=(alone, together),
        models={names: model},
        measured=measured,
        raced=frozenset(names),
    )
    silos = tuple(Silo(n, i + 1, 50, described=True) for i, n in enumerate(names))
    auto = Auto(train_config=TRAINING).algorithm
    state = auto.absorb(state, [], Round(7, silos, {"rounds": ROUNDS}, unseen=secure))
    shares = {name: gain.share for name, gain in state.verdict.gains.items()}
    half = 0 if secure else pytest.approx(0.5)
    assert shares == {"a": half, "b": 0, "c": half, "d": half}


def test_doubt_is_half_without_evidence_and_nobody_is_sure_how_much_silos_differ() -> None:
    counts = [20.0] * 10
    same = shrunken_gains([0.3] * 10, [0.3] * 10, counts, shares=True)
    assert all(gain.doubt == pytest.approx(0.5) for gain in same)
    better = shrunken_gains([0.3] * 10, [0.2] * 10, counts, shares=True)
    much = shrunken_gains([0.6] * 10, [0.1] * 10, counts, shares=True)
    sure = shrunken_gains([0.3] * 10, [0.2] * 10, [200.0] * 10, shares=True)
    assert 0.5 > better[0].share > 0.05 and much[0].share == 0 == sure[0].share
    assert better[0].doubt > norm.sf(better[0].expected / better[0].standard_error)
    (single,) = shrunken_gains([0.5], [0.4], [20.0], shares=True)
    assert 0 < single.doubt < 0.5
    worse = shrunken_gains([0.1] * 3 + [0.1], [0.1] * 3 + [0.9], [400.0] * 4, shares=True)[3]
    assert worse.own and worse.share == 0, "it keeps its own model, and no mean"


@pytest.mark.parametrize("kind", [wire.EVALUATE_TRAINING, wire.TRAIN])
def test_silos_answer_what_auto_asks_of_newcomers_and_others(kind: str) -> None:
    entries = {"server_round": 1, "strategy": "auto", "task": "digits", "holdout": 0.2}
    assert not ask(kind, model=initial(), **entries).has_error()


def test_candidates_that_the_budgets_do_not_allow_are_not_raced() -> None:
    """Alone and all together always are; of the others the weakest goes first."""
    auto, state, now = _held(12)
    names = now().names
    agreed = Candidate(state.held, "clusters, 2 groups; HCCT, α 5")
    weak = Candidate((("a", "b"), ("c",), ("d", "e", "f")), "HCCT, α 50")
    found = (*trivial(names, {}), weak, agreed)
    each = {"moved": 6 * 6, "usual": 6 * 6, "each": 1.0, "number": 6}
    state = replace(state, trainings=dict.fromkeys(names, 5.0), **each)
    at = replace(now(), number=6)
    limits = Budget(auto.budget, auto.byte_budget)

    def affordable(state: AutoState) -> tuple[Candidate, ...]:
        return limits.affordable(found, lambda kept: limits.allows_race(state, kept, at))

    assert affordable(state) == found
    # Two rounds of a race of all are 40 models there and back, of all but the weak one 36, and the
    # four rounds after it 24; in all 3 · (36 + 36) may be.
    most, without = 3 * (36 + 36), (*found[:2], agreed)
    for ahead, left in ((64, found), (63, without), (60, without), (59, found[:2]), (0, found[:2])):
        assert affordable(replace(state, moved=most - ahead)) == left
    tired = replace(state, trainings={**state.trainings, "a": 2 * 12 - 4 - 2 * 3.5 * 0.8})
    assert affordable(tired) == without


def test_a_lie_beyond_what_an_error_can_be_is_no_measurement() -> None:

    own = {wire.HOLDOUT_ERROR: 0.5, wire.HOLDOUT_LOSS: 1.0, wire.HOLDOUT_EXAMPLES: 10.0}
    update = Update(Silo("a", 1, num_examples=46), {}, {}, 37.0, own)
    assert evidence.measurement(update) == Measured(0.5, 1.0, 10.0)
    for claim in (11.0, 1e6, 1e300):
        claimed = replace(update, metrics={**own, wire.HOLDOUT_EXAMPLES: claim})
        assert evidence.measurement(claimed) == Measured(0.5, 1.0, 10.0), "a fifth of 46"
    undescribed = replace(update, silo=Silo("a", 1))
    assert evidence.measurement(undescribed) == Measured(0.5, 1.0, 8.0), "a fifth of 37"
    for key, value in (
        (wire.HOLDOUT_ERROR, -1e6),
        (wire.HOLDOUT_ERROR, 1e300),
        (wire.HOLDOUT_ERROR, float("nan")),
        (wire.HOLDOUT_EXAMPLES, 0.0),
        (wire.HOLDOUT_EXAMPLES, float("nan")),
    ):
        assert evidence.measurement(replace(update, metrics={**own, key: value})) is None


@pytest.mark.parametrize(
    ("shapes", "decides"),
    [({"w": (3, 4), "b": (3,)}, 2.0), ({"w": (3, 4)}, 2.0), ({"w": (3, 4), "v": (3, 3)}, 0.5)],
)
def test_losses_decide_for_linear_models_and_errors_for_networks(
    shapes: dict[str, tuple[int, ...]], decides: float
) -> None:
    model = {name: np.zeros(shape, np.float32) for name, shape in shapes.items()}
    own = {wire.HOLDOUT_ERROR: 0.5, wire.HOLDOUT_LOSS: 2.0, wire.HOLDOUT_EXAMPLES: 9.0}
    update = Update(Silo("a", 1, num_examples=46, described=True), {}, {}, 37.0, own)
    state = AutoState(Members(model))
    (found,) = evidence.noted(state, ("a",), [update])["a",]["a"]
    assert found.error == decides
    silent = replace(update, metrics={**own, wire.HOLDOUT_LOSS: float("nan")})
    kept = evidence.noted(state, ("a",), [silent])["a",]
    assert bool(kept) == (decides == 0.5)
    undefined = replace(update, metrics={**own, wire.HOLDOUT_ERROR: float("nan")})
    kept = evidence.noted(state, ("a",), [undefined])["a",]
    assert bool(kept) == (decides == 2.0), "as where a label has one value"
