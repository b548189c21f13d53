"""A silo whose numbers turn NaN says so in its own log, and costs the others nothing."""

from __future__ import annotations

from math import inf, isfinite, nan
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Error, Message, RecordDict

from coterie import wire
from coterie.client.cli.check import check
from coterie.client.home.settings import SiloSettings
from coterie.client.resident.activity import ActivityLog
from coterie.client.work.diverged import divergence, odd_array
from coterie.client.work.session import Session
from coterie.engine.inprocess import InProcessGrid
from coterie.strategies import FederationError
from coterie.strategies.rounds.result import RunResult
from tests.conftest import digits_config
from tests.kit import Tap, run

KEYS = {"rounds": 6, "local-epochs": 2, "batch-size": 10, "seed": 1, "round-timeout": 5.0}


def nodes() -> list[dict[str, Any]]:
    """Two kinds of silos: a and d, b and c."""
    turned = {"a": 0, "b": 90, "c": 90, "d": 0}
    return [
        digits_config(name, i, **{"data.train": 30, "data.rotation": turned[name]})
        for i, name in enumerate(turned)
    ]


def sicken(monkeypatch: pytest.MonkeyPatch, *rounds: int, silos: str = "d") -> None:
    """The first trained array of these silos is NaN after a training in these rounds."""
    plain = Session.train

    def train(session: Session, *args: Any, **kwargs: Any) -> float:
        loss = plain(session, *args, **kwargs)
        _, number, _ = session.work
        if session.settings.name in silos and number in rounds:
            with torch.no_grad():
                next(session.model.parameters())[0] = nan
        return loss

    monkeypatch.setattr(Session, "train", train)


def play(folder: Path, silos: InProcessGrid | None = None, **keys: Any) -> RunResult:
    return run(folder, silos or nodes(), **(KEYS | keys))


def sick_rounds(result: RunResult) -> list[int]:
    return [report.round for report in result.rounds if "d" in report.left_out]


SECURE = {"strategy": "hcct", "alpha": 20.0, "secure": True, "settle-after": 1}


@pytest.mark.parametrize("rounds", [(2, 3, 4, 5, 6), (6,), (3,)], ids=["always", "last", "once"])
def test_a_sick_silo_costs_no_healthy_one_its_round(
    rounds: tuple[int, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sicken(monkeypatch, *rounds)
    result = play(tmp_path / "run", **SECURE)
    assert {frozenset(g) for g in result.rounds[2].groups} >= {frozenset("bc")}
    for report in result.rounds[:6]:
        assert set(report.left_out) == ({"d"} if report.round in rounds else set())
        if report.round in rounds:
            assert ("d",) in report.groups, "in no group with others"
            assert "array" in report.left_out["d"] and "NaN" in report.left_out["d"]
            assert set(report.silos) == set("abc")
    assert set(result.rounds[-1].evaluation) >= set("abc")


def test_a_silo_that_recovers_comes_back_to_its_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sicken(monkeypatch, 4)
    groups = [set(map(frozenset, one.groups)) for one in play(tmp_path / "run", **SECURE).rounds]
    pair, alone = frozenset("ad"), frozenset("d")
    assert [pair in own for own in groups] == [False, False, True, False, False, True, True], groups
    assert alone in groups[3] and alone in groups[4]


def test_who_trained_beside_a_sick_silo_goes_on_from_what_it_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its loss falls on, as that of a silo that is alone."""
    sicken(monkeypatch, *range(2, 7))
    result = play(tmp_path / "run", **SECURE)
    losses = [report.silos["a"].train_loss for report in result.rounds[:6]]
    assert losses == sorted(losses, reverse=True)


@pytest.mark.parametrize(
    "strategy",
    ["fedavg", *(pytest.param(one, marks=pytest.mark.nightly) for one in ("fedgroup", "auto"))],
)
def test_every_secure_strategy_goes_on_without_it(
    strategy: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sicken(monkeypatch, *range(2, 9))
    own = {"num-groups": 2} if strategy == "fedgroup" else {}
    result = play(tmp_path / "run", strategy=strategy, secure=True, rounds=8, **own)
    left = [item for report in result.rounds for item in report.left_out.items()]
    others = {name: why for name, why in left if name != "d"}
    assert len(others) <= 1 and all("only together with d" in why for why in others.values())
    assert sick_rounds(result) == list(range(2, 9))
    assert set(result.rounds[-1].evaluation) >= set("abc")


@pytest.mark.parametrize("keys", [{"strategy": "fedavg"}, {"strategy": "hcct"}, SECURE])
def test_the_silo_s_own_log_has_the_array_and_the_key_to_change(
    keys: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    sicken(monkeypatch, 2)
    result = play(tmp_path / "run", **keys)
    logged = [r.getMessage() for r in caplog.records if r.name == "coterie.silo"]
    (line,) = [text for text in logged if "quarantined" not in text]
    assert "round 2" in line and "array '" in line and "NaN" in line and "smaller lr" in line
    assert sick_rounds(result) == [2]


def test_layers_that_stay_at_a_silo_are_kept_as_they_were_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sicken(monkeypatch, 2)
    result = play(tmp_path / "run", personal="representation")
    assert isfinite(result.rounds[2].silos["d"].train_loss), "it does not go on from NaN"


def test_what_is_no_number_is_named_and_only_that() -> None:
    good = {"w": np.ones(2, np.float32), "n": np.array(7)}
    assert divergence(good, 0.5) == "" and odd_array(good) == ""
    assert "array 'v' contains NaN or infinity" in divergence(good | {"v": np.array([inf])}, 0.5)
    assert "the loss is NaN or infinite" in divergence(good, nan)


def test_the_reason_of_all_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sicken(monkeypatch, 1, silos="abcd")
    monkeypatch.setattr("coterie.strategies.strategy.TRY_AGAIN_S", 0.0)
    with pytest.raises(FederationError) as failed:
        play(tmp_path / "run")
    assert str(failed.value).count("NaN") == 1 and ".;" not in str(failed.value)
    assert "of round 1: a, b, c, d: array '" in str(failed.value)


def test_what_several_are_left_out_for_is_joined_by_reason() -> None:
    found = wire.reasons({"a": "too large.", "b": "late", "c": "too large"})
    assert found == "a, c: too large; b: late."
    assert wire.reasons({}) == ""


def test_a_silo_is_told_why_what_it_sent_did_not_count(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Where the coordinator alone knows it: here what d sends is spoiled on its way."""

    def spoiled(silo: str, reply: Message) -> Message:
        meta = reply.metadata
        if silo == "d" and meta.message_type == wire.TRAIN and meta.group_id in "24":
            reply.content[wire.ARRAYS] = wire.encode_arrays({"x": np.zeros(1)}, packed=True)
        return reply

    grid = Tap(nodes(), change=spoiled)
    result = play(tmp_path / "run", grid, rounds=4)
    reasons = []
    for message in grid.sent:
        config = message.content.config_records.get(wire.CONFIG, ConfigRecord())
        if wire.LEFT_OUT in config:
            name = grid.name_of(message.metadata.dst_node_id)
            reasons.append(f"{name} {config[wire.ROUND]}: {config[wire.LEFT_OUT]}")
    assert sick_rounds(result) == [2, 4]
    assert [text.split(":")[0] for text in reasons] == ["d 3", "d 4"], "with its next message"
    assert "its arrays differ from those sent" in reasons[0]
    message = Message(
        RecordDict({wire.CONFIG: ConfigRecord({wire.LEFT_OUT: "it is\n odd", wire.RUN: "r"})}),
        dst_node_id=1,
        message_type=wire.TRAIN,
    )
    ActivityLog().answered(message, Message(RecordDict(), reply_to=message), 0.1)
    assert "run r: the last reply did not count: it is  odd" in caplog.text


def test_a_check_names_the_key_where_one_epoch_diverges(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(
        'kind = "npz"\nname = "t"\nnetwork = "mlp-64"\nshape = [3]\nclasses = ["no", "yes"]\n'
    )
    draw = np.random.default_rng(0)
    np.savez(tmp_path / "d.npz", x=1e18 * draw.normal(size=(200, 3)), y=np.arange(200) % 2)
    own = {"name": "s", "task": str(tmp_path / "t.toml"), "data.data": str(tmp_path / "d.npz")}
    lines = list(check(SiloSettings.from_node_config(own | {"device": "cpu"}, node_id=1)))
    (warning,) = [line for line in lines if line.startswith("warning")]
    assert "contains NaN or infinity" in warning and "lr" in warning and "scale" in warning
    assert not any("loss nan" in line for line in lines)


def test_an_error_of_a_silo_s_own_is_not_told_back() -> None:
    message = Message(RecordDict(), dst_node_id=1, message_type=wire.TRAIN)
    assert wire.refusal("no", message, code=wire.DIVERGED).error == Error(wire.DIVERGED, "no")
