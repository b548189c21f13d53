"""FedGroup's phase ``train.cold_start``: a cold start that begins a round, on the digits silos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from coterie import wire
from coterie.client.app import app as coterie_app
from coterie.engine.inprocess import InProcessGrid
from coterie.server.runs.config import RunConfig, train_config
from coterie.strategies import FedGroup
from coterie.strategies.errors import EXIT_NO_SILOS, FederationError
from coterie.strategies.fedgroup.algorithm import COLD_START
from coterie.strategies.rounds.churn import Churn
from coterie.strategies.rounds.reports import RoundReport
from coterie.strategies.rounds.roster import DescribedRoster
from coterie.wire import Model
from tests.conftest import arrays_of, digits_config
from tests.kit import first_arrays

KEYS = ("head.weight", "head.bias")
ROUND = {"local-epochs": 3, "batch-size": 8, "lr": 0.05, "lr-decay": 0.5, "proximal-mu": 0.1}


class Witness:
    """The silos' ClientApp, which notes what is asked of it, and fails where it is set to.

    Attributes:
        asked: (round, silo, message type, epochs, steps, μ, rate, purpose), in order.
    """

    def __init__(self, *, fails: Sequence[tuple[int, str]] = ()) -> None:
        self.asked: list[tuple[Any, ...]] = []
        self.fails = set(fails)
        self.sent: dict[tuple[int, str, str], Model] = {}
        self.replies: dict[tuple[int, str, str], Model] = {}

    def __call__(self, message: Message, context: Any) -> Message:
        kind, name = message.metadata.message_type, str(context.node_config["name"])
        config = message.content.config_records["config"]
        if kind.split(".")[0] != wire.TRAIN:
            return coterie_app(message, context)
        keys = ("local-epochs", "local-steps", "proximal-mu", "lr", "purpose")
        round = int(config["server-round"])  # type: ignore[call-overload]
        self.asked.append((round, name, kind, *(config.get(key) for key in keys)))
        if kind == wire.COLD_START and (round, name) in self.fails:
            raise RuntimeError("the power is out")
        self.sent[round, name, kind] = _arrays(message)
        reply = coterie_app(message, context)
        self.replies[round, name, kind] = _arrays(reply)
        return reply

    def of(self, round: int, name: str) -> list[tuple[Any, ...]]:
        """What it was asked in a round, without round and name."""
        return [entry[2:] for entry in self.asked if entry[:2] == (round, name)]


def _arrays(message: Message) -> Model:
    return wire.decode_arrays(message.content.array_records[wire.ARRAYS])


def digits_grid(witness: Witness, count: int) -> InProcessGrid:
    """Silos s0, s1, … ; the odd ones see their digits upside down."""
    nodes = [
        digits_config(f"s{i}", i, **({"data.rotation": 180} if i % 2 else {})) for i in range(count)
    ]
    return InProcessGrid(witness, nodes)  # type: ignore[arg-type]


def digits_run(
    strategy_keys: Mapping[str, Any],
    witness: Witness,
    *,
    count: int,
    rounds: int,
    churn: str = "",
    leaves: tuple[int, int] = (0, 0),
    training: Mapping[str, Any] = ROUND,
) -> Any:
    """Run on digits silos; ``leaves``: after which round which node does."""
    grid = digits_grid(witness, count)
    least = count - churn.count("+")
    roster = DescribedRoster("digits", least, deadline_s=5, churn=Churn.parse(churn))
    initial = first_arrays(grid, roster)
    common = train_config(RunConfig.read({"seed": 0}), run="test") | training

    def on_round(report: RoundReport) -> None:
        if report.round == leaves[0]:
            grid.disconnect(leaves[1])

    strategy = FedGroup(roster=roster, train_config=common, on_round=on_round, **strategy_keys)
    return strategy.start(grid=grid, initial_arrays=initial, num_rounds=rounds, timeout=5)


def test_silos_that_described_themselves_go_on_with_the_round_from_their_groups_model() -> None:
    witness = Witness()
    keys = {"num_groups": 2, "cold_start_epochs": 1}
    result = digits_run(keys, witness, count=4, rounds=2)
    cold = (wire.COLD_START, 1, 0, 0.0, 0.05, COLD_START)
    for i in range(4):
        assert witness.of(1, f"s{i}") == [cold, (wire.TRAIN, 2, None, 0.1, 0.05, None)]
        assert witness.of(2, f"s{i}") == [(wire.TRAIN, 3, None, 0.1, 0.025, None)]
    assert [entry[2] for entry in witness.asked[:8]] == [wire.COLD_START] * 4 + [wire.TRAIN] * 4

    report = result.rounds[0]
    assert report.phases[wire.COLD_START].messages == 4
    assert set(report.silos) == {f"s{i}" for i in range(4)}
    # What round 1 started from is nobody's w⁰: round 0 has no evaluation.
    assert not report.evaluation and result.rounds[1].evaluated_round == 1


def test_a_rounds_training_starts_from_w0_plus_the_mean_update_and_ends_in_a_fedavg() -> None:
    witness = Witness()
    result = digits_run({"num_groups": 2, "cold_start_epochs": 1}, witness, count=4, rounds=1)
    assert sorted(map(len, result.groups[1])) in ([1, 3], [2, 2])
    for group in result.groups[1]:
        cold, trained = (
            {k: np.mean([witness.replies[1, n, kind][k] for n in group], axis=0) for k in KEYS}
            for kind in (wire.COLD_START, wire.TRAIN)
        )
        for name in group:
            for key in KEYS:
                sent, own = witness.sent[1, name, wire.TRAIN], arrays_of(result.models[name])
                np.testing.assert_allclose(sent[key], cold[key], rtol=1e-5, atol=1e-6)
                np.testing.assert_allclose(own[key], trained[key], rtol=1e-5, atol=1e-6)


def test_newcomers_take_part_in_the_round_of_their_arrival_and_one_may_be_lost(
    caplog: pytest.LogCaptureFixture,
) -> None:
    witness = Witness(fails=[(3, "s5")])
    keys = {"num_groups": 2, "cold_start_epochs": 1}
    result = digits_run(keys, witness, count=7, rounds=4, churn="s4+3,s5+3,s6+3", leaves=(3, 1))
    three, four = result.rounds[2], result.rounds[3]
    cold = (wire.COLD_START, 1, 0, 0.0, 0.05, COLD_START)
    for name in ("s4", "s6"):
        assert witness.of(3, name) == [cold, (wire.TRAIN, 2, None, 0.1, 0.0125, None)]
        assert name in three.silos and name in three.details["placed"]
    assert witness.of(3, "s5") == [cold] and "s5" not in three.silos
    assert three.details["cold"] == ["s5"] and "s5: its cold-start is left out" in caplog.text
    assert witness.of(4, "s5")[0] == cold and "s5" in four.silos
    assert four.details["cold"] == [] and four.left == ("s0",)
    assert "s0" in result.models and sorted(n for g in four.groups for n in g) == [
        f"s{i}" for i in range(1, 7)
    ]


def test_steps_are_taken_off_the_round_and_who_has_none_left_does_not_train_on() -> None:
    witness = Witness()
    result = digits_run(
        {"num_groups": 1, "cold_start_steps": 6}, witness, count=3, rounds=1
    )  # 20 samples in batches of 8: nine steps in three epochs
    rest = (wire.TRAIN, 3, 3, 0.1, 0.05, None)
    cold = (wire.COLD_START, 3, 6, 0.0, 0.05, COLD_START)
    assert [witness.of(1, f"s{i}") for i in range(3)] == [[cold, rest]] * 3
    long = Witness()
    result = digits_run({"num_groups": 1, "cold_start_steps": 9}, long, count=3, rounds=1)
    assert {entry[2] for entry in long.asked} == {wire.COLD_START}
    cold_models = [long.replies[1, f"s{i}", wire.COLD_START] for i in range(3)]
    for name, array in arrays_of(result.models["s1"]).items():
        mean = np.mean([model[name].astype(np.float64) for model in cold_models], axis=0)
        np.testing.assert_allclose(array, mean, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("epochs", "left"), [(1, 6), (2, 3), (3, 0)])
def test_where_rounds_count_steps_a_cold_start_in_epochs_is_taken_off_them(
    epochs: int, left: int
) -> None:
    """20 samples in batches of 8 are three steps an epoch; a round has nine."""
    witness, training = Witness(), {**ROUND, "local-steps": 9}
    keys = {"num_groups": 1, "cold_start_epochs": epochs}
    digits_run(keys, witness, count=3, rounds=2, training=training)
    if left:
        cold = [(wire.COLD_START, epochs, 0, 0.0, 0.05, COLD_START)]
        cold += [(wire.TRAIN, 3, left, 0.1, 0.05, None)]
    else:  # no shorter than a round: it is the round
        cold = [(wire.TRAIN, epochs, 0, 0.0, 0.05, None)]
    for name in ("s0", "s1", "s2"):
        assert witness.of(1, name) == cold
        assert witness.of(2, name) == [(wire.TRAIN, 3, 9, 0.1, 0.025, None)]


def test_steps_of_a_cold_start_are_taken_off_the_steps_of_a_round() -> None:
    witness, training = Witness(), {**ROUND, "local-steps": 6}
    keys = {"num_groups": 1, "cold_start_steps": 3}
    digits_run(keys, witness, count=2, rounds=1, training=training)
    assert [entry[1] for entry in witness.of(1, "s0")] == [3, 3]
    assert [entry[2] for entry in witness.of(1, "s0")] == [3, 3]


def test_a_sampled_cold_silo_starts_and_trains_in_its_own_round() -> None:
    witness = Witness()
    keys = {"num_groups": 2, "cold_start_epochs": 1, "cold_start_silos": 2, "sample": 2, "seed": 1}
    result = digits_run(keys, witness, count=6, rounds=5)
    started = [entry[1] for entry in witness.asked if entry[2] == wire.COLD_START]
    assert len(started) == len(set(started))
    for report in result.rounds[:-1]:
        turn = {entry[1] for entry in witness.asked if entry[0] == report.round}
        trained = {e[1] for e in witness.asked if e[0] == report.round and e[2] == wire.TRAIN}
        assert len(trained) == 2 and set(report.silos) == trained
        assert report.round == 1 or turn == trained


@pytest.mark.parametrize("epochs", [0, 3, 5])
def test_a_cold_start_as_long_as_a_round_is_the_round_and_a_newcomers_is_beside_the_others(
    epochs: int,
) -> None:
    witness = Witness()
    keys = {"num_groups": 2, "cold_start_epochs": epochs}
    result = digits_run(keys, witness, count=3, rounds=2, churn="s2+2")
    length, steps = epochs or 3, 0 if epochs else None
    assert witness.of(1, "s0") == [(wire.TRAIN, length, steps, 0.0, 0.05, None)]
    assert witness.of(2, "s2") == [(wire.TRAIN, length, steps, 0.0, 0.05, COLD_START)]
    assert result.rounds[0].evaluation and not result.rounds[0].phases
    (beside,) = result.rounds[1].phases.items()
    assert beside[0] == COLD_START and beside[1].messages == 1 and beside[1].exchanges == 0
    assert "s2" in result.rounds[1].details["placed"]


def test_too_few_answers_to_the_phase_end_the_run_and_as_many_as_groups_are_enough() -> None:
    keys = {"num_groups": 3, "cold_start_epochs": 1}
    result = digits_run(keys, Witness(fails=[(1, "s1")]), count=4, rounds=2)
    assert sum(len(group) for group in result.groups[1]) == 3
    assert result.rounds[0].details["cold"] == ["s1"]
    assert "s1" in result.rounds[1].details["placed"]
    with pytest.raises(FederationError, match=r"at least 3 silos .* Only 2 answered") as caught:
        digits_run(keys, Witness(fails=[(1, "s1"), (1, "s2")]), count=4, rounds=2)
    assert caught.value.exit_code == EXIT_NO_SILOS
