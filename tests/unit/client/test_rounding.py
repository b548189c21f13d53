"""Silos that send what training changed, rounded: what leaves, what stays, what the record says."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message

from coterie import wire
from coterie.client.app import app
from coterie.client.home import rounds
from coterie.client.ledger import read
from coterie.client.work import evaluate
from coterie.engine.inprocess import InProcessGrid
from coterie.features.compression.coordinator import Compression
from coterie.features.compression.silo import KIND
from coterie.server.runs.config import RunConfig
from coterie.server.runs.record import read_run
from coterie.strategies import FedAvg, FederationError
from coterie.strategies.rounds.algorithm import Order, Update
from coterie.strategies.rounds.replies import Checked, ReplyError
from coterie.strategies.rounds.roster import Silo
from coterie.strategies.rounds.stage import Came, Outcome, Played
from coterie.wire.formats import SCALES
from tests.conftest import arrays_of, assert_equal_models, plain_app, plain_initial, plain_nodes
from tests.kit import Tap, ask, reason, restart_silos
from tests.unit.client.kinds import Kinds, nodes_of, play

FORMATS = ("delta-fp16", "delta-int8")
EACH = pytest.mark.parametrize("how", FORMATS)


class Failing(Kinds):
    """Its loss is not a number."""

    name = "failing"

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        return super().loss(outputs, targets) * math.nan


def kept(home: Path) -> list[str]:
    return sorted(file.name for file in (home / KIND / "run").iterdir())


@EACH
def test_the_record_says_what_was_lost_and_the_bytes_that_came(how: str, tmp_path: Path) -> None:
    plain, smaller = (
        play(tmp_path / name, Kinds, wire_format=name, rounds=3) for name in ("float32", how)
    )
    for name, arrays in plain.models.items():
        for mine, theirs in zip(
            arrays_of(arrays).values(), arrays_of(smaller.models[name]).values(), strict=True
        ):
            np.testing.assert_allclose(mine, theirs, atol=0.01)
    recorded = read_run(tmp_path / how / "run").rounds[1].silos
    as_it_is = read_run(tmp_path / "float32" / "run").rounds[1].silos
    assert recorded["a"].bytes_received < as_it_is["a"].bytes_received == as_it_is["a"].bytes_sent
    assert recorded["a"].bytes_sent < as_it_is["a"].bytes_sent
    assert all(0 < own.update_lost < 0.05 and own.update_norm > 0 for own in recorded.values())
    assert np.isnan(as_it_is["a"].update_lost)
    assert "update-lost" not in (tmp_path / "float32" / "run" / "run.json").read_text()


@EACH
def test_models_go_in_16_bits_to_silos_that_have_shown_that_they_know_how(
    how: str, tmp_path: Path
) -> None:
    sent: list[tuple[str, int, set[str], int]] = []

    def spy(messages: list[Message]) -> None:
        for message in messages:
            if record := message.content.array_records.get(wire.ARRAYS):
                tensors = wire.tensors_of(record)
                meta, types = message.metadata, {t.dtype for t in tensors}
                size = sum(t.bytes for t in tensors)
                sent.append((meta.message_type, int(meta.group_id), types, size))

    grid = Tap(nodes_of(Kinds, tmp_path), before=spy)
    play(tmp_path, Kinds, wire_format=how, rounds=2, silos=grid)
    types = {(kind, number): types for kind, number, types, _ in sent}
    assert types[wire.TRAIN, 1] == {"f32"} == types[wire.EVALUATE, 2]
    assert types[wire.TRAIN, 2] == {"f16", "f32"}
    sizes = {number: size for kind, number, _, size in sent if kind == wire.TRAIN}
    recorded = read_run(tmp_path / "run").rounds
    assert {one.round: one.silos["a"].bytes_sent for one in recorded} == sizes


def test_whose_reply_is_wrong_gets_models_as_they_are_again() -> None:
    a, b, c = (Order(Silo(name, 1, described=True), {}) for name in "abc")
    rounded = [Update(o.silo, {}, {}, 1, {wire.UPDATE_LOST: 0.1}) for o in (b, c)]
    refused, silent = ReplyError("no", refused=True), ReplyError("late", silent=True)
    checked = Checked(rounded[:1], [(a, refused), (c, silent)])
    came = Came((), checked, None, checked.updates, {}, {})
    played = Played(*(None,) * 4, came, frozenset(), (), 1.0)  # type: ignore[arg-type]
    assert Compression().after(frozenset("ac"), played) == ({"b", "c"}, Outcome())


@EACH
def test_the_ledger_lists_what_leaves(how: str, tmp_path: Path) -> None:
    play(tmp_path, Kinds, wire_format=how)
    entries = [entry for entry in read(tmp_path / "a") if entry["type"] == wire.TRAIN]
    types = {t["name"]: (t["type"], t["bytes"]) for t in entries[0]["tensors"]}
    short, size = {"delta-fp16": ("f16", 2), "delta-int8": ("i8", 1)}[how]
    assert types["0.weight"] == (short, 32 * size) and types["2.weight"] == (short, 24 * size)
    assert types["0.bias"] == ("f32", 32) and types[SCALES] == ("f32", 8)
    record = read_run(tmp_path / "run").rounds[0].silos["a"]
    assert entries[0]["bytes"] == record.bytes_received
    assert record.update_lost == entries[0]["values"]["metrics"][wire.UPDATE_LOST]


def test_what_was_lost_survives_the_silos_end_and_a_round_that_is_repeated(tmp_path: Path) -> None:
    """Bit for bit, whatever is in memory."""
    whole = play(tmp_path / "whole", Kinds, wire_format="delta-int8", rounds=4)
    restart_silos()

    class Forgetful(InProcessGrid):
        def push_messages(self, messages: Any) -> Any:
            messages = list(messages)
            if messages[0].metadata.message_type == wire.TRAIN:
                super().push_messages(messages)  # whose replies nobody fetches
                restart_silos()
            return super().push_messages(messages)

    grid = Forgetful(app, nodes_of(Kinds, tmp_path / "again"))
    again = play(tmp_path / "again", Kinds, wire_format="delta-int8", rounds=4, silos=grid)
    for name, arrays in whole.models.items():
        assert_equal_models(arrays_of(arrays), arrays_of(again.models[name]))


def test_when_the_run_is_over_only_the_last_rounding_error_stays(tmp_path: Path) -> None:
    """For more rounds; until then some stay for a coordinator that comes back from a crash."""
    before: list[list[str]] = []

    def look(messages: list[Message]) -> None:
        if messages[0].metadata.message_type == wire.EVALUATE:
            before.append(kept(tmp_path / "a"))

    grid = Tap(nodes_of(Kinds, tmp_path), before=look)
    play(tmp_path, Kinds, wire_format="delta-int8", rounds=5, silos=grid)
    assert before == [[f"round-{r:06d}.safetensors" for r in (2, 3, 4, 5)]]
    assert kept(tmp_path / "a") == ["round-000005.safetensors"]


def test_of_runs_without_an_end_the_last_ones_keep_what_was_lost(tmp_path: Path) -> None:
    settings: Any = type("S", (), {"name": "a", "home": str(tmp_path)})
    for number in range(6):
        for kind, passing in ((KIND, True), ("personal", False)):
            arrays = {"w": np.zeros(1, np.float32)}
            rounds.keep(settings, kind, arrays, run=f"r{number}", number=1, passing=passing)
            os.utime(tmp_path / kind / f"r{number}", (number, number))
    assert {one.name for one in (tmp_path / KIND).iterdir()} == {"r2", "r3", "r4", "r5"}
    assert len(list((tmp_path / "personal").iterdir())) == 6, "a silo's own layers stay"


def test_what_was_lost_is_added_to_the_next_round(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "_end_run", lambda request: None)

    def lost(number: int) -> wire.Model:
        found = rounds.latest(settings, KIND, run="run", before=number + 1)
        assert found is not None
        return found

    play(tmp_path, Kinds, wire_format="delta-int8", rounds=3)
    settings: Any = type("S", (), {"name": "a", "home": str(tmp_path / "a")})
    restart_silos()
    assert set(lost(2)) == {"0.weight", "2.weight"}
    assert not np.array_equal(lost(1)["0.weight"], lost(2)["0.weight"])


def test_personal_layers_and_running_statistics_stay_as_they_are(tmp_path: Path) -> None:
    keys = {"wire_format": "delta-int8", "personal": "2."}
    result = play(tmp_path, Kinds, **keys)
    assert set(arrays_of(result.models["a"])) == {"0.weight", "0.bias"}
    entries = [entry for entry in read(tmp_path / "a") if entry["type"] == wire.TRAIN]
    assert {t["name"] for t in entries[0]["tensors"]} == {"0.weight", "0.bias", SCALES}


def test_trainings_beside_the_rounds_own_are_rounded_and_leave_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(evaluate, "_end_run", lambda request: None)
    keys = {"num-groups": 2, "cold-start-steps": 3, "rounds": 2, "wire-format": "delta-int8"}
    play(tmp_path, Kinds, "fedgroup", **keys)
    entries = {e["purpose"]: e for e in read(tmp_path / "a") if "train" in e["type"]}
    for purpose in ("cold-start", ""):
        assert SCALES in {t["name"] for t in entries[purpose]["tensors"]}
    assert kept(tmp_path / "a") == ["round-000002.safetensors"], "that of the round alone"


def test_a_silo_with_differential_privacy_rounds_what_has_its_noise_already(tmp_path: Path) -> None:
    private = nodes_of(Kinds, tmp_path, **{"privacy-epsilon": 500.0})
    play(tmp_path, Kinds, wire_format="delta-int8", silos=private)
    entries = [entry for entry in read(tmp_path / "a") if entry["type"] == wire.TRAIN]
    spent = [entry["privacy"]["epsilon"] for entry in entries]
    assert spent[0] < spent[1] and all(SCALES in str(entry["tensors"]) for entry in entries)
    assert entries[0]["values"]["metrics"][wire.UPDATE_NOISE] > 0


@EACH
def test_other_clientapps_get_and_send_plain_arrays(how: str) -> None:
    def played(**config: Any) -> Any:
        grid = InProcessGrid(plain_app(), plain_nodes(0, 1))
        strategy = FedAvg(train_config=config)
        return strategy.start(grid, plain_initial(), num_rounds=2)

    assert_equal_models(
        arrays_of(played(**{wire.WIRE_FORMAT: how}).arrays), arrays_of(played().arrays)
    )


def test_a_training_that_fails_says_so_and_what_was_lost_before_waits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("coterie.strategies.strategy.TRY_AGAIN_S", 0.0)
    with pytest.raises(FederationError, match=r"NaN or infinity\. A smaller lr may help"):
        play(tmp_path, Failing, wire_format="delta-int8")
    assert not (tmp_path / "a" / KIND).exists()


@EACH
def test_a_secure_run_refuses_a_format_at_both_ends(how: str, tmp_path: Path) -> None:
    with pytest.raises(FederationError, match=r"wire-format = delta.* must be float32"):
        RunConfig.read({"strategy": "fedavg", "secure": True, "wire-format": how})
    with pytest.raises(FederationError, match=r"wire-format = delta.* must be float32"):
        FedAvg(secure=True, train_config={wire.WIRE_FORMAT: how})
    config = {"protocol": wire.PROTOCOL, "task": "digits", "wire_format": how, "secure": True}
    assert "cannot be used in a secure run," in reason(ask(wire.DESCRIBE, **config))
    refusal = reason(ask(wire.DESCRIBE, protocol=wire.PROTOCOL, wire_format="int4"))
    assert "wire-format must be one of float32, delta-fp16, delta-int8. Got 'int4'" in refusal
