"""Secure runs: groups and models as in others, and nothing leaves a silo but sketches and sums."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, RecordDict
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie import wire
from coterie.client.home.settings import SiloSettings
from coterie.client.work import evaluate
from coterie.engine.inprocess import InProcessGrid
from coterie.features.secure import secrets
from coterie.features.secure.atoms import atoms_of
from coterie.features.secure.held import Held, held, hold
from coterie.features.secure.protocol import (
    Peer,
    Sum,
    decode_sum,
    encode_peers,
    fixed,
    from_fixed,
    peer_objection,
    sketch_sizes,
)
from coterie.features.secure.secrets import secrets_of
from coterie.features.secure.sketches import Sketch, measure
from coterie.features.secure.sums import SecureRun
from coterie.server.runs.codec import decode, encode
from coterie.server.runs.config import RunConfig
from coterie.strategies import HCCT, FedAvg, FederationError
from coterie.strategies.rounds import handles
from coterie.strategies.rounds.exchange import exchange
from coterie.strategies.rounds.handles import Masked, MaskedMean
from coterie.strategies.rounds.members import Members, Plain
from coterie.strategies.rounds.models import difference, weighted_mean
from coterie.strategies.rounds.result import RunResult
from coterie.strategies.rounds.roster import DescribedRoster
from coterie.strategies.rounds.stage import Settled
from coterie.wire.statements import Statement, decode_statement
from coterie.wire.updates import JOINT, PIECE, Limit
from tests.conftest import arrays_of, plain_app, plain_initial, plain_nodes
from tests.kit import Tap, digits, mean_error, run

NAMES = "abcdef"
SIZES = (20, 24, 36, 20, 28, 40)
MODEL = {"w": np.linspace(-2, 2, 24, dtype=np.float32).reshape(4, 6), "n": np.array(7)}


def nodes(folder: Path | None = None, **changes: Any) -> list[dict[str, Any]]:
    """Return six silos of two kinds."""
    return [
        {**node, "data.train": SIZES[i], "data.skip": 70 * i, "data.rotation": 90 * (i % 2)}
        for i, node in enumerate(digits(NAMES, folder, **changes))
    ]


def sums(grid: Tap) -> list[Sum]:
    """Return the sums that were asked for, each once."""
    texts = [str(config[wire.SUM]) for config in grid.asked(wire.MASKED_SUM)]
    return [decode_sum(text) for text in dict.fromkeys(texts)]


def play(silos: Any, folder: Path, **keys: Any) -> RunResult:
    usual = {"rounds": 5, "local-epochs": 1, "batch-size": 10, "min-silos": 6, "seed": 1}
    usual |= {"strategy": "hcct", "secure": True, "round-timeout": 5.0, "wait-for-silos": 2.0}
    return run(folder, silos, **(usual | keys))


STRATEGIES: dict[str, dict[str, Any]] = {
    "independent": {},
    "fedavg": {},
    "fedprox": {"strategy": "fedavg", "proximal-mu": 0.1},
    "hcct": {"alpha": 20.0},
    "hcct-e": {"strategy": "hcct", "alpha": 20.0, "layers": "auto"},
    "hcct-p": {"strategy": "hcct", "alpha": 20.0, "personal": "head"},
    "fedgroup": {"num-groups": 2},
    "auto": {"rounds": 8},
}


SHORT = ("hcct",)


@pytest.mark.parametrize(
    "name", [n if n in SHORT else pytest.param(n, marks=pytest.mark.nightly) for n in STRATEGIES]
)
def test_groups_and_models_are_those_of_a_run_that_is_not_secure(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settle, left = SecureRun.settle, list[str]()

    def settled(*args: Any) -> Settled:
        done = settle(*args)
        left.extend(means_in(done.state))
        return done

    monkeypatch.setattr(SecureRun, "settle", settled)
    keys = {"strategy": name, "local-epochs": 5, **STRATEGIES[name]}
    plain = play(nodes(), tmp_path / "plain", **keys, secure=False)
    grid = Tap(nodes())
    result = play(grid, tmp_path / "secure", **keys)
    if name != "auto":  # it races other candidates: no discriminators, and none that overlap
        assert result.groups[result.rounds[-1].round] == plain.groups[plain.rounds[-1].round]
        # Of 20 samples each; and a group that a silo has left is not summed in that round.
        assert abs(mean_error(result) - mean_error(plain)) <= 0.1
    assert left == [], "fields of the state that models_in leaves out"
    assert_sums_show_nobody(sums(grid))
    models = {m.metadata.message_type for m in grid.got if wire.ARRAYS in m.content}
    assert models == {wire.INITIAL}, "no model leaves"
    together = {name for group in result.rounds[-2].groups for name in group if len(group) > 1}
    assert set(result.models) >= together, "who trained with others has the group's model"


def assert_sums_show_nobody(sums: list[Sum]) -> None:
    """All sums are made of the same blocks, so that none can be taken apart by the others."""
    blocks: dict[str, set[tuple[str, ...]]] = {}
    for one in sums:
        for block in one.blocks:
            names = tuple(name for name, _ in block)
            assert len(names) >= 2
            for name in names:
                blocks.setdefault(name, set()).add(names)
    assert all(len(found) == 1 for found in blocks.values()), blocks


def means_in(value: Any, where: str = "state") -> Iterator[str]:
    """Yield where in a state of frozen values there is a mean that nobody has asked for."""
    if isinstance(value, MaskedMean):
        yield where
    elif is_dataclass(value) and not isinstance(value, Masked):
        for one in fields(value):
            yield from means_in(getattr(value, one.name), f"{where}.{one.name}")
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from means_in(inner, f"{where}[{key!r}]")
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from means_in(inner, where)


def test_a_mean_is_the_plain_one_but_for_a_little_noise(tmp_path: Path) -> None:
    keys = {"strategy": "fedavg", "rounds": 1, "local-epochs": 1}
    plain = play(nodes(), tmp_path / "plain", **keys, secure=False)
    result = play(nodes(), tmp_path / "secure", **keys)
    for name, array in arrays_of(plain.models["a"]).items():
        got = arrays_of(result.models["a"])[name]
        assert np.abs(got - array).max() <= 2.0**-18 * np.abs(array).max(), name


@pytest.mark.nightly
def test_a_run_is_the_same_again_whatever_keys_the_silos_draw(tmp_path: Path) -> None:
    hashes = []
    for again in ("one", "two"):
        secrets._memory.clear()
        result = play(nodes(tmp_path / again), tmp_path / f"run-{again}", rounds=3)
        hashes.append({n: wire.model_hash(arrays_of(m)) for n, m in result.models.items()})
    assert hashes[0] == hashes[1] and hashes[0]


@pytest.mark.nightly
def test_a_run_is_the_same_whatever_ran_before_in_its_process(tmp_path: Path) -> None:
    """Also under the same name: the projection is of the run's seed, not of the one before."""
    found = []
    for seed in (2, 1, None, 1):
        if seed is None:
            secrets._memory.clear()
            continue
        grid = Tap(nodes())
        play(grid, tmp_path / str(len(found)) / "run", rounds=1, seed=seed)
        sketches = [
            wire.decode_arrays(m.content.array_records[wire.SKETCH])[JOINT].tobytes()
            for m in grid.got
            if wire.SKETCH in m.content.array_records
        ]
        found.append(sketches)
    assert found[1] == found[2] != found[0]


def test_nobody_sees_what_a_silo_has_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No reply holds a silo's arrays, nor any numbers that are equal to some of them."""
    own: dict[tuple[str, int], Held] = {}

    def tapped(settings: SiloSettings, kept: Held, *, number: int, **where: Any) -> None:
        own[settings.name, number] = kept
        hold(settings, kept, number=number, **where)

    monkeypatch.setattr("coterie.features.secure.silo.hold", tapped)
    grid = Tap(nodes(tmp_path / "homes"))
    play(grid, tmp_path / "run", strategy="fedavg", rounds=2)
    assert own.keys() == {(name, number) for name in NAMES for number in (1, 2)}
    masked = [m for m in grid.got if m.metadata.message_type == wire.MASKED_SUM]
    assert len(masked) == 12
    kinds = {m.metadata.message_type for m in grid.got}
    assert kinds >= {wire.SECURE_KEY, wire.SECURE_SEED, wire.TRAIN, wire.MASKED_SUM, wire.EVALUATE}
    texts = [
        array.data
        for m in grid.got
        for record in m.content.array_records.values()
        for array in record.values()
    ]
    parts = [np.asarray(a).tobytes() for kept in own.values() for a in kept.model.values()]
    assert not any(part in text for part in parts for text in texts)
    asked = {one.round: one for one in sums(grid)}
    for reply in grid.got:
        name = grid.name_of(reply.metadata.src_node_id)
        if reply.metadata.message_type == wire.MASKED_SUM:
            asked_sum = asked[int(reply.metadata.group_id)]
            kept = own[name, asked_sum.round]
            bounds = asked_sum.bounds(kept.largest, kept.model)
            bare = fixed(kept.model, asked_sum.share(name), bounds)
            sent = wire.decode_arrays(reply.content.array_records[wire.MASKED])[wire.MASKED]
            assert np.mean(sent == bare) < 0.01


@pytest.mark.parametrize(
    "keys",
    [
        {"strategy": "fedavg"},
        pytest.param({"strategy": "hcct", "alpha": 1e-6}, marks=pytest.mark.nightly),
    ],
)
def test_what_is_too_long_is_shortened_by_the_silos(
    keys: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the coordinator does it in other runs: in sums, and where silos go on by themselves.

    In a sum a whole block is shortened alike: from then on models are only nearly the same.
    """
    keys = {**keys, "rounds": 3, "local-epochs": 5, "clip-updates": 0.9, "seed": 3}
    monkeypatch.setattr("coterie.features.secure.sketches.NORM_NOISE", 0.0)  # by which they differ
    ends = []
    for secure in (False, True):
        result = play(nodes(), tmp_path / str(secure), **keys, secure=secure)
        assert all(report.left_out == {} for report in result.rounds)
        ends.append(result)
    plain, secret = ends
    clipped = [
        [report.details.get("influence", {}).get("clipped") for report in end.rounds[:3]]
        for end in ends
    ]
    assert clipped[0][0]
    summed = keys["strategy"] == "fedavg"
    for one, other in list(zip(*clipped, strict=True))[: 1 if summed else 3]:
        assert (one or {}) == pytest.approx(other or {}, rel=0.02)
    close = 0.05 if summed else 1e-2
    for name, (loss, _, _) in plain.rounds[-1].evaluation.items():
        assert secret.rounds[-1].evaluation[name][0] == pytest.approx(loss, rel=close)


def test_newcomers_wait_until_enough_come_and_leavers_take_their_block_along(
    tmp_path: Path,
) -> None:
    def leave(silo: str, reply: Message) -> Message:
        meta = reply.metadata
        if (meta.group_id, meta.message_type, silo) == ("5", wire.MASKED_SUM, "f"):
            grid.disconnect(2)
        return reply

    grid = Tap(nodes(), change=leave)
    keys = {"strategy": "fedavg", "rounds": 6, "churn": "e+3, f+5, b-6", "min-silos": 3}
    result = play(grid, tmp_path / "run", **keys)
    of_round = {one.round: {tuple(n for n, _ in b) for b in one.blocks} for one in sums(grid)}
    first, second = sorted(of_round[1])
    assert {*first, *second} == set("abcd") and len(first) == 2
    assert of_round[1] == of_round[2] == of_round[3] == of_round[4]
    assert "as soon as 2 silos can" in result.rounds[2].left_out["e"]
    assert of_round[5] == of_round[1] | {("e", "f")}
    block = first if "b" in first else second
    assert of_round[6] == of_round[5] - {block}
    (mate,) = set(block) - {"b"}
    assert "only together with b" in result.rounds[5].left_out[mate]
    assert set(result.rounds[-1].evaluation) == set("acdef"), "all get the group's model"
    assert_sums_show_nobody(sums(grid))


@pytest.mark.parametrize("name", [pytest.param("hcct", marks=pytest.mark.nightly), "fedgroup"])
def test_a_newcomer_is_compared_by_a_projection_that_the_others_used(
    name: str, tmp_path: Path
) -> None:
    """Groups that were formed once have sketches of an earlier round, by which it sketches too."""
    grid = Tap(nodes())
    keys = {"strategy": name, **STRATEGIES[name], "local-epochs": 5, "churn": "e+3"}
    keys |= {"rounds": 5, "min-silos": 5}
    result = play(grid, tmp_path / "run", **keys)
    left_out = {name: why for report in result.rounds for name, why in report.left_out.items()}
    assert set(left_out) <= {"e"}
    assert all("as soon as 2 silos can" in why for why in left_out.values())
    (group,) = [group for group in result.rounds[-2].groups if "e" in group]
    assert set(group) & set("bdf") == set(), "those with other data"
    assert {"a", "c"} & set(group), "those with alike data"
    named = {
        config[wire.SKETCH_AS] for config in grid.asked(wire.TRAIN) if wire.SKETCH_AS in config
    }
    assert bool(named) is (name != "hcct"), "it compares updates of the same round"


# ---------------------------------------------------------------- silos that are lost, or lie


def lost(name: str, at: int) -> Callable[[str, Message], Message]:
    """A silo whose part of the sum does not come in a round."""

    def change(silo: str, reply: Message) -> Message:
        meta = reply.metadata
        if silo == name and meta.message_type == wire.MASKED_SUM and meta.group_id == str(at):
            return _error(reply)
        return reply

    return change


def test_a_silo_that_trained_nothing_is_named_and_in_no_sum(tmp_path: Path) -> None:
    def change(silo: str, reply: Message) -> Message:
        metrics = reply.content.get(wire.METRICS, {}) if reply.has_content() else {}
        if silo == "c" and wire.UPDATE_NORM in metrics:
            metrics[wire.UPDATE_NORM] = 0.0
        return reply

    grid = Tap(nodes(), change=change)
    result = play(grid, tmp_path / "run", strategy="fedavg", rounds=2)
    for report in result.rounds[:2]:
        assert report.left_out.keys() == {"c"} and "its update is zero" in report.left_out["c"]
    assert [set(asked.members) for asked in sums(grid)] == [set("abdef")] * 2


def _error(reply: Message) -> Message:
    # Flower's class of replies cannot be made of a reply: its content goes, its header stays.
    broken = Message(RecordDict(), dst_node_id=1, message_type=reply.metadata.message_type)
    broken.__dict__["_metadata"] = reply.metadata
    broken.__dict__["_content"] = None
    broken.__dict__["_error"] = Error(wire.FAILED, "gone")
    return broken


def test_a_lost_silo_costs_one_repetition_and_never_a_wrong_sum(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sum is asked for again without its block, so that no difference shows one silo."""
    grid = Tap(nodes(), change=lost("c", 2))
    result = play(grid, tmp_path / "run", strategy="fedavg", rounds=3)
    again = [asked for asked in sums(grid) if asked.round == 2]
    assert [len(asked.members) for asked in again] == [6, 4]
    assert not {"c"} & set(again[1].members) and set(again[1].blocks) < set(again[0].blocks)
    assert "its part of the group's sum:" in result.rounds[1].left_out["c"]
    assert len(sums(grid)) == 4

    # The model is the mean of what the four have trained, which they still hold.
    monkeypatch.setattr(evaluate, "_end_run", lambda request: None)
    homes = tmp_path / "homes"
    grid = Tap(nodes(homes), change=lost("c", 2))
    keys = {"strategy": "fedavg", "local-epochs": 5}  # so alike long that none is shortened
    result = play(grid, tmp_path / "two", **keys, rounds=2)
    own = [
        held(SiloSettings(name, home=str(homes / name)), run="two", number=2, purpose="")
        for name in again[1].members
    ]
    assert all(own)
    sizes = [SIZES[NAMES.index(name)] for name in again[1].members]
    expected = weighted_mean([one.model for one in own if one], sizes)
    for name, array in arrays_of(result.models["c"]).items():
        np.testing.assert_allclose(array, expected[name], rtol=0, atol=1e-6)


def test_a_group_of_which_too_few_are_left_keeps_its_model(tmp_path: Path) -> None:
    keys = {"strategy": "fedavg", "min-silos": 3}
    three = nodes()[:3]
    result = play(Tap(three, change=lost("c", 2)), tmp_path / "run", rounds=2, **keys)
    before = play(three, tmp_path / "one", rounds=1, **keys)
    for name, array in arrays_of(before.models["a"]).items():
        np.testing.assert_array_equal(arrays_of(result.models["a"])[name], array)


def other(content: Callable[[RecordDict], RecordDict], kind: str) -> Callable[..., Message]:
    """Silo c answers messages of a type otherwise."""

    def change(silo: str, reply: Message) -> Message:
        if silo == "c" and reply.metadata.message_type == kind and reply.has_content():
            reply.content = content(reply.content)
        return reply

    return change


def _with(**entries: Any) -> Callable[[RecordDict], RecordDict]:
    return lambda good: RecordDict({**good, **entries})


def _config(**entries: Any) -> Callable[[RecordDict], RecordDict]:
    own = {key.replace("_", "-"): value for key, value in entries.items()}
    return lambda good: RecordDict(
        {**good, wire.CONFIG: ConfigRecord({**good.config_records.get(wire.CONFIG, {}), **own})}
    )


def _packed(array: Any, name: str = wire.MASKED) -> Any:
    return wire.encode_arrays({name: array}, packed=True)


def _stated(**changes: Any) -> Callable[[RecordDict], RecordDict]:
    def change(good: RecordDict) -> RecordDict:
        arrays = wire.decode_arrays(good.array_records[wire.SKETCH])
        stated = decode_statement(arrays[wire.STATEMENT].tobytes().decode())
        text = np.frombuffer(replace(stated, **changes).encode().encode(), np.uint8)
        sketch = wire.encode_arrays({**arrays, wire.STATEMENT: text}, packed=True)
        return RecordDict({**good, wire.SKETCH: sketch})

    return change


LIES: dict[str, tuple[str, Callable[[RecordDict], RecordDict]]] = {
    "no key": (wire.SECURE_KEY, lambda good: RecordDict()),
    "a key that is none": (wire.SECURE_KEY, _config(secure_peers="no")),
    "a key of small order": (
        wire.SECURE_KEY,
        _config(secure_peers=encode_peers([Peer("c", bytes(32))])),
    ),
    "another silo's name": (
        wire.SECURE_KEY,
        _config(secure_peers=encode_peers([Peer("a", b"\1" * 32)])),
    ),
    "a text that is too deep": (wire.SECURE_KEY, _config(secure_peers="[" * 100_000)),
    "two keys": (
        wire.SECURE_KEY,
        _config(secure_peers=encode_peers([Peer("a", b"\1" * 32), Peer("c", b"\1" * 32)])),
    ),
    "its model": (wire.TRAIN, _with(arrays=_packed(np.zeros(3, np.float32)))),
    "no sketch": (
        wire.TRAIN,
        lambda good: RecordDict({k: r for k, r in good.items() if k != wire.SKETCH}),
    ),
    "another count in its statement": (wire.TRAIN, _stated(samples=10**6)),
    "an endless update in its statement": (wire.TRAIN, _stated(length=1e300)),
    "a statement that is none": (wire.TRAIN, _stated(made="no")),
    "a sketch of another size": (
        wire.TRAIN,
        _with(sketch=_packed(np.zeros(3, np.float32), "sketch")),
    ),
    "a sketch of NaN": (
        wire.TRAIN,
        _with(sketch=_packed(np.full(609, np.nan, np.float32), "sketch")),
    ),
    "no statement of its training": (
        wire.TRAIN,
        _with(sketch=_packed(np.zeros(609, np.float32), "sketch")),
    ),
    "no masked numbers": (wire.MASKED_SUM, lambda good: RecordDict()),
    "too few masked numbers": (wire.MASKED_SUM, _with(masked=_packed(np.zeros(3, np.uint32)))),
    "floats for masked numbers": (wire.MASKED_SUM, _with(masked=_packed(np.zeros(3)))),
}


FEW = {
    "no key",
    "its model",
    "another count in its statement",
    "a sketch of NaN",
    "no masked numbers",
}
"""The other lies are told in ``make nightly``."""


@pytest.mark.parametrize(
    "lie", [n if n in FEW else pytest.param(n, marks=pytest.mark.nightly) for n in LIES]
)
def test_whatever_one_silo_answers_the_others_go_on(lie: str, tmp_path: Path) -> None:
    kind, content = LIES[lie]
    # HCCT asks for no sum in round 1.
    strategy = "fedavg" if kind == wire.MASKED_SUM else "hcct"
    grid = Tap(nodes(), change=other(content, kind))
    result = play(grid, tmp_path / "run", rounds=2, strategy=strategy)
    assert all("c" in report.left_out for report in result.rounds[:2])
    others = {name for report in result.rounds[:2] for name in report.left_out}
    assert others == {"c"}, result.rounds[0].left_out
    assert set(result.rounds[-1].evaluation) >= set(NAMES) - {"c"}


def test_a_sum_longer_than_any_of_its_updates_does_not_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """One silo sends other numbers than it trained: nobody can say which, but all keep theirs."""

    def change(silo: str, reply: Message) -> Message:
        if silo == "c" and reply.metadata.message_type == wire.MASKED_SUM:
            record = reply.content.array_records[wire.MASKED]
            numbers = wire.decode_arrays(record)[wire.MASKED] + np.uint32(2**25)
            reply.content = RecordDict({**reply.content, wire.MASKED: _packed(numbers)})
        return reply

    grid = Tap(nodes(), change=change)
    result = play(grid, tmp_path / "run", strategy="fedavg", rounds=1)
    assert "sent something other than its update," in caplog.text
    start = next(m for m in grid.got if m.metadata.message_type == wire.INITIAL)
    initial = wire.decode_arrays(start.content.array_records[wire.ARRAYS])
    for name, array in initial.items():
        np.testing.assert_array_equal(arrays_of(result.models["a"])[name], array)


@pytest.mark.parametrize(
    "lie",
    [dict.fromkeys(NAMES, "00"), *(pytest.param(n, marks=pytest.mark.nightly) for n in ({}, []))],
)
def test_who_seals_a_wrong_seed_is_passed_over(lie: Any, tmp_path: Path) -> None:
    """The first by name makes the seed; the others cannot open what it sent them."""

    def change(silo: str, reply: Message) -> Message:
        if silo == "a" and reply.metadata.message_type == wire.SECURE_SEED:
            config = ConfigRecord({wire.SEALED: json.dumps(lie)})
            reply.content = RecordDict({wire.CONFIG: config})
        return reply

    result = play(Tap(nodes(), change=change), tmp_path / "run", rounds=3)
    last = result.rounds[2]
    assert set(last.silos) >= set(NAMES) - {"a"}, last.left_out


def test_a_strategy_of_one_s_own_program_names_its_run(tmp_path: Path) -> None:
    grid = Tap(nodes(tmp_path / "homes"))
    roster = DescribedRoster("digits", min_silos=6, deadline_s=5.0)
    (reply,) = exchange(
        grid,
        [Message(RecordDict({wire.CONFIG: ConfigRecord({wire.SEED: 1})}), 1, wire.INITIAL)],
        deadline_s=5.0,
    )
    assert reply is not None
    initial = ArrayRecord(
        {n: Array(a) for n, a in wire.decode_arrays(reply.content[wire.ARRAYS]).items()}  # type: ignore[arg-type]
    )
    result = HCCT(alpha=20.0, secure=True, roster=roster).start(grid, initial, num_rounds=2)
    assert all(report.left_out == {} for report in result.rounds)


# ---------------------------------------------------------------- the arithmetic


@given(st.lists(st.integers(1, 1000), min_size=2, max_size=8), st.integers(0, 2**16))
def test_fixed_point_means_are_exact_enough(counts: list[int], seed: int) -> None:
    rng = np.random.default_rng(seed)
    models = [{"w": rng.normal(size=30).astype(np.float32), "n": np.array([n])} for n in counts]
    bounds = (max(float(np.abs(model["w"]).max()) for model in models), 2.0**22)
    shares = [n / sum(counts) for n in counts]

    def mean(order: list[int]) -> wire.Model:
        total = np.zeros(31, np.uint32)
        for i in order:
            total += fixed(models[i], shares[i], bounds)
        return from_fixed(total, models[0], bounds)

    got = mean(list(range(len(counts))))
    wide = [model["w"].astype(np.float64) for model in models]
    expected = sum(share * w for share, w in zip(shares, wide, strict=True))
    np.testing.assert_allclose(got["w"], expected, rtol=2.0**-23, atol=2.0**-26 * bounds[0])
    assert got["n"] == round(sum(share * n for share, n in zip(shares, counts, strict=True)))
    again = mean(list(range(len(counts)))[::-1])
    np.testing.assert_array_equal(got["w"], again["w"])


def test_values_that_do_not_fit_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="array 'w' contains NaN"):
        fixed({"w": np.array([np.nan], np.float32)}, 1.0, [4.0])
    beyond, at = (fixed({"w": np.array([v], np.float32)}, 1.0, [4.0]) for v in (5.0, 4.0))
    np.testing.assert_array_equal(beyond, at, "who chose the bound learns nothing of who is beyond")


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 2**16))
def test_sketches_keep_lengths_and_angles(seed: int) -> None:
    rng = np.random.default_rng(seed)
    common, size = rng.normal(size=50_000), 4096
    updates = [{"w": common + rng.normal(size=50_000)} for _ in range(2)]

    def sketched(update: wire.Model, key: bytes) -> np.ndarray:
        sketch = Sketch(key, size)
        zeros = {name: np.zeros_like(array) for name, array in update.items()}
        assert measure(zeros, update, {"sketch": sketch}) == pytest.approx(
            np.linalg.norm(update["w"])
        )
        return sketch.exact

    sketches = [sketched(update, b"key") for update in updates]
    for i in range(2):
        for j in range(2):
            one, two = updates[i]["w"], updates[j]["w"]
            scale = np.linalg.norm(one) * np.linalg.norm(two)
            assert abs(sketches[i] @ sketches[j] - one @ two) < 5 * np.sqrt(2 / size) * scale
    assert not np.allclose(sketches[0], sketched(updates[0], b"other"))


@pytest.mark.parametrize("size", [256, 300])
def test_every_release_sketches_alike(size: int) -> None:
    """Of silos that count places or signs in another way than the others, nothing can be said."""
    rng = np.random.default_rng(size)
    start = {
        "a": np.zeros((3, PIECE), np.float32),
        "n": np.array(7),
        "b": np.zeros(1000, np.float16),
    }
    moved = {
        name: rng.normal(size=array.shape).astype(array.dtype) for name, array in start.items()
    }
    sketch, aside = Sketch(b"key", size), Sketch(b"key", size, {"b"})
    measure(start, moved, {"sketch": sketch, "aside": aside})
    for own, of in ((sketch, "ab"), (aside, "b")):
        flat = np.concatenate([moved[name].reshape(-1).astype(np.float64) for name in of])
        key = hashlib.sha256(b"key").digest()
        stream = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
        drawn = np.frombuffer(stream.update(bytes(4 * flat.size)), np.uint32)
        signed = np.where(drawn >> 31, -flat, flat)
        expected = np.bincount(drawn % np.uint32(size), weights=signed, minlength=size)
        np.testing.assert_allclose(own.exact, expected, rtol=1e-6, atol=1e-6)


def test_a_silo_knows_its_models_again_by_a_mark_of_its_own() -> None:
    own, other = (secrets_of(SiloSettings(name=name), "run") for name in "ab")
    model = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(3), "e": np.zeros(0)}
    again = {name: np.array(array) for name, array in model.items()}
    assert own.mark_of(model) == own.mark_of(again) != other.mark_of(model)
    changed = [
        {**model, "w": model["w"] + np.float32(1e-6)},
        {**model, "w": model["w"].reshape(3, 2)},
        {**model, "w": model["w"].view(np.int32)},
        {**model, "n": np.array(4)},
        {"v": model["w"], "n": model["n"], "e": model["e"]},
    ]
    assert len({own.mark_of(one) for one in (model, *changed)}) == 6


def test_a_sketch_is_ten_times_smaller_than_what_it_is_of() -> None:
    model = {"a.w": np.zeros(9000, np.float32), "b.w": np.zeros(40_000, np.float32)}
    assert sketch_sizes(model, "all") == {"sketch": 4096}
    assert sketch_sizes(model, "each") == {"a.sketch": 900, "b.sketch": 4000}
    assert sketch_sizes(model, "a.") == {"a.sketch": 900}
    assert sketch_sizes({"w": np.zeros(2559, np.float32)}, "all") == {}
    assert sketch_sizes({"w": np.zeros(2560, np.float32)}, "all") == {"sketch": 256}


def unseen(name: str, samples: float = 1.0, trained_as: str = "") -> Any:
    stated = Statement(trained_as or "0" * 64, "0" * 32, int(samples), 1.0, 1.0)
    return Masked(name, 1, "", samples, MODEL, {}, 1.0, stated)


def test_means_are_made_of_the_fewest_sums() -> None:
    """Two groups and the mean of all: two sums, not three, and never that of a part of a group."""
    a, b, c, d = (unseen(n, s) for n, s in (("a", 3.0), ("b", 5.0), ("c", 2.0), ("d", 2.0)))
    one = weighted_mean([a, b], [3, 5])
    two = weighted_mean([c, d], [2, 2])
    everything = weighted_mean([one, two], [8, 4])
    assert isinstance(everything, MaskedMean)
    atoms = atoms_of([one, two, everything])  # type: ignore[list-item]
    assert [atom.names for atom in atoms] == [("a", "b"), ("c", "d")]
    assert [atom.counting for atom in atoms] == [5.0, 2.0]


def test_silos_that_are_weighed_differently_in_two_means_are_not_in_one_sum() -> None:
    """The sum by samples is not the plain mean."""
    a, b = unseen("a", 3.0), unseen("b", 5.0)
    by_samples, equal = weighted_mean([a, b], [3, 5]), weighted_mean([a, b], [1, 1])
    atoms = atoms_of([by_samples, equal])  # type: ignore[list-item]
    assert [atom.names for atom in atoms] == [("a",), ("b",)]


def test_silos_that_were_told_other_things_are_not_in_one_sum() -> None:
    """A newcomer that has trained for less than a round, for example."""
    updates = [unseen("a", 1, "x"), unseen("b", 1, "x"), unseen("c", 1, "y")]
    atoms = atoms_of([weighted_mean(updates, [1, 1, 1])])  # type: ignore[list-item]
    assert [atom.names for atom in atoms] == [("a", "b"), ("c",)]


@pytest.mark.parametrize(
    ("weights", "cap"), [((3, 5, 9), 9.0), ((1, 1, 1), 3.0), ((3, 4, 4), 4.0), ((3, 5, 1), None)]
)
def test_silos_count_by_their_samples_up_to_a_cap(
    weights: tuple[float, ...], cap: float | None
) -> None:
    models = [unseen(n, s) for n, s in (("a", 3.0), ("b", 5.0), ("c", 9.0))]
    (atom,) = atoms_of([weighted_mean(models, weights)])  # type: ignore[list-item]
    assert atom.counting == (None if cap is None else pytest.approx(cap))


def test_a_limit_comes_through_messages_and_checkpoints() -> None:
    limit = Limit(0.3, 40.0)
    assert [limit.of(n) for n in (10.0, 40.0, 160.0, 1e6)] == pytest.approx([0.3, 0.3, 0.6, 0.6])
    stated = Statement("0" * 64, "0" * 32, 40, 2.0, 2.5)
    for one in (limit, None):
        silos = {"a": stated, "b": stated}
        asked = Sum("r", 1, "", ((("a", 9.0), ("b", 1.0)),), silos, limit=one)
        assert decode_sum(asked.encode()) == asked
    one = Masked("a", 3, "", 40.0, MODEL, {"sketch": np.full(4, 3.0, np.float32)}, 2.0, stated)
    short = one.within(limit)
    assert short.norm == pytest.approx(0.3)
    assert short.moved["sketch"] == pytest.approx(np.full(4, 3.0 * 0.3 / 2.0))
    tree, arrays = encode(short)
    assert decode(tree, arrays).limit == limit


def test_what_changes_no_model_stays_the_very_same_object() -> None:
    members = Members(MODEL, models={"a": unseen("a"), "b": MODEL})
    state = Plain(members)
    assert FedAvg().algorithm.with_models(state, lambda model: model) is state
    made = FedAvg().algorithm.with_models(state, lambda model: MODEL)
    assert made.members.models == {"a": MODEL, "b": MODEL} and state.members is members


def test_who_looks_at_a_model_that_nobody_sees_is_told_so() -> None:
    mean = weighted_mean([unseen("a"), unseen("b")], [1, 1])
    for handle in (unseen("a"), mean):
        with pytest.raises(TypeError, match="the coordinator does not have this model's numbers"):
            handles.arrays_of(handle)
    assert handles.arrays_of(MODEL) is MODEL
    with pytest.raises(ValueError, match="no sketch of a sum"):
        difference(mean, MODEL)


# ---------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("keys", "says"),
    [
        ({"strategy": "ifca"}, "secure = true needs a strategy that only averages"),
        ({"strategy": "fedcollab"}, "secure = true needs a strategy that only averages"),
        ({"strategy": "fedgenp"}, "secure = true needs a strategy that only averages"),
        ({"strategy": "hcct", "generators": "silos"}, "secure = true needs"),
        ({"strategy": "hcct", "alpha": "auto"}, "use the strategy auto"),
        ({"strategy": "fedgroup", "inter-group-lr": 0.1}, "inter-group-lr"),
        ({"strategy": "fedavg", "aggregate": "median"}, "must be mean"),
        *(({"strategy": name}, "block of its first sum") for name in ("cfl", "flhc", "kmeans")),
    ],
)
def test_what_cannot_be_done_is_refused_before_anything_starts(
    keys: dict[str, Any], says: str
) -> None:
    with pytest.raises(FederationError, match=says):
        RunConfig.read({**keys, "secure": True})


def test_other_client_apps_are_refused_with_the_reason() -> None:
    grid = InProcessGrid(plain_app(), plain_nodes(3))
    with pytest.raises(FederationError, match="needs coterie's own silos"):
        HCCT(secure=True, min_silos=1).start(grid, plain_initial(), num_rounds=1)


def test_keys_are_checked_by_name_and_curve() -> None:
    good = X25519PrivateKey.generate().public_key().public_bytes_raw()
    assert peer_objection(Peer("a", good), "r", ca=b"") == ""
    assert "not a valid X25519 key." in peer_objection(Peer("a", b"short"), "r", ca=b"")
    assert "not signed" in peer_objection(Peer("a", good, b"-----", b"x"), "r", ca=b"")


def test_secrets_survive_a_restart_in_a_private_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = SiloSettings("a", home=str(tmp_path))
    first = secrets.secrets_of(settings, "r").made_seed(5)
    secrets._memory.clear()
    with monkeypatch.context() as busy:  # too many open files, for example
        busy.setattr(Path, "read_text", Mock(side_effect=OSError))
        with pytest.raises(OSError):
            secrets.secrets_of(settings, "r")
    again = secrets.secrets_of(settings, "r")
    assert (again.public, again.seed) == (first.public, first.seed)
    (file,) = (tmp_path / "secure").iterdir()
    assert file.stat().st_mode & 0o077 == 0
    for number in range(6):
        secrets.secrets_of(settings, f"r{number}")
    assert len(list((tmp_path / "secure").iterdir())) == secrets.MAX_RUNS
    file.unlink(missing_ok=True)


@pytest.mark.parametrize("unreadable", ["key.pem", "ca.pem"])
def test_an_enrolled_silo_without_its_files_is_in_no_sum(tmp_path: Path, unreadable: str) -> None:
    for name in ("key.pem", "ca.pem"):
        (tmp_path / name).write_bytes(b"-----")
    own = secrets.secrets_of(SiloSettings("a", home=str(tmp_path)), "r")
    (tmp_path / unreadable).unlink()
    (tmp_path / unreadable).mkdir()
    with pytest.raises(IsADirectoryError):
        assert own.ca, "anybody's keys would do"


def test_a_seed_opens_for_whom_it_was_sealed(tmp_path: Path) -> None:
    one, two, three = (
        secrets.secrets_of(SiloSettings(name, home=str(tmp_path / name)), "r")
        for name in ("a", "b", "c")
    )
    one = one.made_seed(5)
    sealed = one.seal(two.as_peer())
    assert two.unseal(one.as_peer(), sealed).seed == one.seed
    with pytest.raises(ValueError, match="cannot be opened here"):
        three.unseal(one.as_peer(), sealed)


def test_a_secure_run_of_silos_with_differential_privacy(tmp_path: Path) -> None:
    """Noise goes into the sums, and out of what is compared."""
    private = {"privacy-epsilon": 20.0, "privacy-noise": 1.0, "privacy-clip": 1.0}
    grid = Tap(nodes(tmp_path / "homes", **private))
    keys = {"rounds": 2, "local-epochs": 1, "alpha": 20.0, "lr": 0.05}
    result = play(grid, tmp_path / "run", **keys)
    assert result.rounds[0].left_out == {}
    trained = [m for m in grid.got if m.metadata.message_type == wire.TRAIN]
    assert all(m.content.metric_records[wire.METRICS][wire.UPDATE_NOISE] > 0 for m in trained)
    assert not any(wire.ARRAYS in m.content for m in trained)
