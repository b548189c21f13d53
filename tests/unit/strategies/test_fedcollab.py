"""FedCollab on the running loop: distances, structure, newcomers, leavers, lost silos."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from coterie import wire
from coterie.engine.inprocess import InProcessGrid
from coterie.server.report.similarity import interval_text
from coterie.server.runs.record.format import run_of
from coterie.strategies import FedCollab, RunResult
from coterie.strategies.fedcollab.algorithm import FedCollab as Structuring
from coterie.strategies.fedcollab.algorithm import FedCollabState, Structure, _settled, _split_known
from coterie.strategies.fedcollab.discriminators import Discriminators, Measurement
from coterie.strategies.fedcollab.starts import starts
from coterie.strategies.partition.distance import Distance
from coterie.strategies.rounds.algorithm import Answers, Round, Update
from coterie.strategies.rounds.members import Members
from coterie.strategies.rounds.roster import Silo
from tests import kit
from tests.conftest import (
    arrays_of,
    assert_equal_models,
    digits_config,
    plain_app,
    plain_initial,
    plain_model,
    plain_nodes,
    plain_trained,
)
from tests.kit import digits, record_of
from tests.unit.strategies.by_hand import ByHand, Minimums

HELD_OUT = 40
ROUNDS = Discriminators().rounds


class Judged:
    """The plain app with discriminators that are as right as the silos' kinds differ.

    Every training adds 1 to what it is sent, so that averages can be written down.

    Attributes:
        seen: (node, message type, pair labels, arrays received).
    """

    def __init__(
        self, rate: Callable[[int, int], float] = lambda kind, label: 1.0, held_out: int = HELD_OUT
    ) -> None:
        self.seen: list[tuple[int, str, str, wire.Model | None]] = []
        self.rate, self.held_out = rate, held_out
        self.fault: Callable[[Message, Message], Message] = lambda message, reply: reply

    def app(self) -> ClientApp:
        app = plain_app()

        @app.train("discriminator")
        def train(message: Message, context: Context) -> Message:
            return self.fault(message, self._answer(message, context, trains=True))

        @app.evaluate("discriminator")
        def evaluate(message: Message, context: Context) -> Message:
            return self.fault(message, self._answer(message, context, trains=False))

        return app

    def _answer(self, message: Message, context: Context, *, trains: bool) -> Message:
        node = message.metadata.dst_node_id
        labels = str(message.content["config"]["pair-labels"])
        record = message.content.array_records.get("discriminators")
        stack = None if record is None else {k: a.numpy() for k, a in record.items()}
        self.seen.append((node, message.metadata.message_type, labels, stack))
        held_out = int(context.node_config.get("held-out", self.held_out))
        content = RecordDict({"arrays": ArrayRecord()})
        if stack is not None:
            others = self._others(context, labels)
            halves = [held_out - held_out // 2, held_out // 2]
            hits = [[round(r * n) for n in halves] for r in others]
            content["hits"] = ArrayRecord(
                {"hits": Array(np.array(hits)), "counts": Array(np.array(halves))}
            )
        if trains:
            start = stack or {"d": np.zeros((len(labels), 3), np.float32)}
            content["discriminators"] = ArrayRecord(
                {k: Array(a + np.float32(node)) for k, a in start.items()}
            )
        content["metrics"] = MetricRecord(
            {
                "num-examples": int(context.node_config["samples"]),
                "held-out": held_out,
                "discriminator-bytes": 12,
            }
        )
        return Message(content, reply_to=message)

    def _others(self, context: Context, labels: str) -> list[float]:
        return [self.rate(int(context.node_config["kind"]), int(label)) for label in labels]


def by_kind(nodes: list[dict[str, Any]]) -> Judged:
    """Discriminators that know the kinds: right always between kinds, half of the time within."""
    judged = Judged()
    active: dict[int, list[int]] = {}

    def others(context: Context, labels: str) -> list[float]:
        own = context.node_id
        # Pairs come in order of the other silo's name; the count shows who is still at work.
        partners = active.get(own) or [n for n in range(1, len(nodes) + 1) if n != own]
        kinds = [nodes[p - 1]["kind"] for p in partners]
        kind = int(context.node_config["kind"])
        if len(labels) < len(kinds):  # those told apart at once are finished
            kinds = [other for other in kinds if other == kind]
        return [1.0 if other != kind else 0.5 for other in kinds]

    judged._others = others  # type: ignore[method-assign]
    judged.active = active  # type: ignore[attr-defined]
    return judged


def run(
    judged: Judged, nodes: list[dict[str, Any]], *, rounds: int = 2, **options: Any
) -> RunResult:
    return started(InProcessGrid(judged.app(), nodes), rounds, **options)


def messages(judged: Judged, kind: str, node: int = 1) -> list[tuple[str, wire.Model | None]]:
    return [(labels, stack) for n, k, labels, stack in judged.seen if (n, k) == (node, kind)]


# ---------------------------------------------------------------- discriminator rounds


def test_a_pair_is_the_mean_of_its_two_silos_and_is_sent_again() -> None:
    judged = Judged(lambda kind, label: 0.5)
    run(judged, plain_nodes(0, 0, 0), rounds=1)
    first, second, third = messages(judged, wire.TRAIN_DISCRIMINATOR, node=2)[:3]
    assert first == ("01", None), "before silo-2 in its pair, after silo-0; no arrays at first"
    assert second[1] is not None and third[1] is not None
    np.testing.assert_array_equal(second[1]["d"][:, 0], [(1 + 2) / 2, (2 + 3) / 2])
    np.testing.assert_array_equal(third[1]["d"][:, 0], [2 * (1 + 2) / 2, 2 * (2 + 3) / 2])


def test_a_pair_that_nobody_gets_better_at_stops_by_itself() -> None:
    judged = Judged(lambda kind, label: 0.5)
    result = run(judged, plain_nodes(0, 0), rounds=1)
    # Five evaluations; each comes with the training after it.
    assert len(messages(judged, wire.TRAIN_DISCRIMINATOR)) == 6
    phases = result.rounds[0].phases
    assert phases[wire.TRAIN_DISCRIMINATOR].exchanges == 6
    assert phases[wire.EVALUATE_DISCRIMINATOR].exchanges == 1, "only the question at the start"
    sent, received = 5 * 12 * 2, 6 * 12 * 2
    assert phases[wire.TRAIN_DISCRIMINATOR].bytes_sent == sent
    arrays = phases[wire.TRAIN_DISCRIMINATOR].bytes_received - received
    assert arrays == 5 * 2 * (2 * 8 + 2 * 8), "hits and counts"


def test_a_finished_pair_is_not_sent_again_while_others_go_on() -> None:
    judged = Judged()
    shown = iter([0.5, 0.6, 0.7, 0.8, 0.9, 0.9, 0.9, 0.9])

    def others(context: Context, labels: str) -> list[float]:
        # node 1 and 2 are told apart at once; pairs with 3 get better slowly.
        if context.node_id == 1:
            judged.now = next(shown, 0.9)  # type: ignore[attr-defined]
        slow = judged.now  # type: ignore[attr-defined]
        full = {1: [1.0, slow], 2: [1.0, slow], 3: [slow, slow]}[context.node_id]
        return full[-len(labels) :]

    judged._others = others  # type: ignore[method-assign]
    run(judged, plain_nodes(0, 1, 2), rounds=1)
    lengths = [len(labels) for labels, _ in messages(judged, wire.TRAIN_DISCRIMINATOR)]
    assert lengths[:3] == [2, 2, 2] and set(lengths[3:]) == {1}
    assert len(messages(judged, wire.TRAIN_DISCRIMINATOR, node=3)) == len(lengths)


def test_the_budget_of_rounds_ends_with_an_evaluation_and_is_said_before_it_starts(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, logger="coterie.run")
    judged = Judged(lambda kind, label: 0.5)
    result = run(judged, plain_nodes(0, 0, 0), rounds=1, discriminators=Discriminators(rounds=3))
    assert len(messages(judged, wire.TRAIN_DISCRIMINATOR)) == 3
    labels = [one for one, _ in messages(judged, wire.EVALUATE_DISCRIMINATOR)]
    assert labels == ["", "11"]
    assert {d.rounds for d in result.state.distances.values()} == {3}
    said = [r.getMessage() for r in caplog.records if r.getMessage().startswith("discriminators")]
    assert said[0] == (
        "discriminators: 3 pairs of 3 silos, at most 3 rounds of 20 steps, 1.2e-05 MB each: "
        "at most 4.32e-07 GB"
    )
    assert said[-1].startswith("discriminators: 3 of 3 pairs measured in 3 rounds")


def test_what_the_phase_may_cost_is_told_before_it_begins_and_recorded(tmp_path: Path) -> None:
    kit.run(tmp_path, digits(), strategy="fedcollab", rounds=2, discriminator_rounds=3)
    record = record_of(tmp_path)
    found = record["rounds"][0]["discriminators"]
    budget = found["budget"]
    assert (budget["pairs"], budget["silos"], budget["rounds"]) == (3, 3, 3)
    assert found["bytes"] <= budget["bytes"] + 1000 and budget["bytes"] % (2 * 3 * 3 * 2) == 0
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").open()]
    (announced,) = [event for event in events if event["event"] == "budget"]
    assert announced.items() >= {"work": "discriminators", **budget}.items()
    work = [event.get("work") for event in events]
    assert work.index("discriminators") < work.index(wire.TRAIN_DISCRIMINATOR)
    assert "discriminators" not in record["rounds"][1]


def test_a_limit_of_bytes_is_the_most_that_the_phase_may_cost() -> None:
    events: list[Any] = []
    run(
        Judged(lambda kind, label: 0.5),
        plain_nodes(0, 0),
        rounds=1,
        discriminators=Discriminators(gigabytes=2e-7),
        on_event=lambda kind, fields: events.append((kind, dict(fields))),
    )
    expected = {"work": "discriminators", "pairs": 1, "silos": 2, "rounds": 10, "bytes": 200}
    assert events == [("budget", expected)]


@pytest.mark.parametrize(("budget", "rounds"), [(20, 0), (100, 1), (150, 2), (200, 3)])
def test_the_budget_of_bytes_is_kept(budget: int, rounds: int) -> None:
    """One pair of 12 bytes: 24 up, then 48 a round, 24 for the last evaluation; hits 64."""
    judged = Judged(lambda kind, label: 0.5)
    options = Discriminators(gigabytes=budget / 1e9)
    result = run(judged, plain_nodes(0, 0), rounds=1, discriminators=options)
    phases = result.rounds[0].phases
    trained = phases.get(wire.TRAIN_DISCRIMINATOR)
    assert (0 if trained is None else trained.exchanges) <= rounds + 1
    weights = sum(stack["d"].nbytes for _, _, _, stack in judged.seen if stack is not None) + 24 * (
        0 if trained is None else trained.exchanges
    )
    assert weights <= budget
    assert bool(result.state.distances) is (rounds > 0)
    if not rounds:
        assert result.rounds[0].groups == (("silo-0",), ("silo-1",))


# ---------------------------------------------------------------- the structure


def test_silos_of_one_kind_train_together_and_the_record_says_why() -> None:
    nodes = plain_nodes(0, 1, 0, 1)
    result = run(by_kind(nodes), nodes, rounds=2)
    assert result.groups[1] == [["silo-0", "silo-2"], ["silo-1", "silo-3"]]
    found = result.rounds[0].details["structure"]
    assert found["compared"] == ["silo-0", "silo-1", "silo-2", "silo-3"]
    assert found["distances"][0] == [0.0, 1.0, 0.0, 1.0]
    bound = found["bound"]
    assert bound["chosen"] < bound["second-best"] <= min(bound["alone"], bound["together"])
    low, high = found["c-interval"]
    assert low < found["c"] == 10.0 and (high is None or high > 10)
    assert "discriminators" in result.rounds[0].details
    assert "discriminators" not in result.rounds[1].details, "measured once"
    model = plain_model()
    for _ in range(2):
        parts = [plain_trained(model, nodes[i]) for i in (0, 2)]
        model = {k: (0.5 * parts[0][k] + 0.5 * parts[1][k]).astype(np.float32) for k in model}
    np.testing.assert_allclose(arrays_of(result.models["silo-0"])["w"], model["w"], atol=1e-6)


@pytest.mark.parametrize(("c", "groups"), [(0.01, 2), (1e4, 1), ("auto", 2)])
def test_c_is_the_hunger_for_data(c: float | str, groups: int) -> None:
    nodes = plain_nodes(0, 1, 0, 1)
    result = run(by_kind(nodes), nodes, rounds=1, c=c)
    assert len(result.groups[1]) == groups
    if c == "auto":
        assert result.rounds[0].details["structure"]["c"] == pytest.approx(3.82, abs=0.01)


@pytest.mark.parametrize(("c", "said"), [(0.01, "alone"), (1e4, "together"), (10.0, "")])
def test_a_run_that_c_alone_decides_says_so_at_its_end(c: float, said: str) -> None:
    nodes = plain_nodes(0, 1, 0, 1)
    judged = by_kind(nodes) if c == 10 else Judged(lambda kind, label: 0.75)
    result = run(judged, nodes, rounds=1, c=c)
    assert len(result.rounds[-1].groups) == {"alone": 4, "together": 1}.get(said, 2)
    choice = result.rounds[-1].details.get("by-choice", "")
    assert said in choice and bool(said) is bool(choice)


@pytest.mark.parametrize(("count", "recorded"), [(32, [1, 1, 1]), (34, [1, 0, 1])])
def test_distances_of_many_silos_are_recorded_in_the_rounds_that_found_a_structure(
    count: int, recorded: list[int]
) -> None:
    nodes = plain_nodes(*[0] * count)
    grid = Changing(Judged(lambda kind, label: 0.5), nodes, goes={count: 3})
    result = started(grid, 3, solver="agglomerative", discriminators=Discriminators(rounds=1))
    found = [report.details["structure"] for report in result.rounds[:3]]
    assert [int("distances" in entry) for entry in found] == recorded
    assert ["distances" in entry for entry in found] == ["standard-errors" in e for e in found]
    assert len(found[0]["distances"]) == count and len(found[2]["distances"]) == count - 1


def test_optimal_with_too_many_silos_goes_on_by_relocation_and_says_so(
    caplog: pytest.LogCaptureFixture,
) -> None:
    nodes = plain_nodes(*[0] * 17)
    grid = Changing(Judged(lambda kind, label: 0.5), nodes, comes={17: 3})
    result = started(grid, 3, solver="optimal", discriminators=Discriminators(rounds=1))
    assert [len(group) for group in result.groups[2]] == [16]
    assert [len(group) for group in result.groups[3]] == [17]
    assert "17 silos are too many for optimal, which takes up to 16; relocation" in caplog.text


# ---------------------------------------------------------------- newcomers and leavers


class Changing(InProcessGrid):
    """A grid on which nodes come before some rounds and go before others."""

    def __init__(
        self,
        judged: Judged,
        nodes: list[dict[str, Any]],
        *,
        comes: Mapping[int, int] | None = None,
        goes: Mapping[int, int] | None = None,
    ) -> None:
        super().__init__(judged.app(), nodes)
        self.all = dict(self.configs)
        self.comes, self.goes, self.looks = dict(comes or {}), dict(goes or {}), 0

    def get_node_ids(self) -> Iterable[int]:
        self.looks += 1
        self.configs = {
            node: config
            for node, config in self.all.items()
            if self.comes.get(node, 1) <= self.looks < self.goes.get(node, 10**6)
        }
        return list(self.configs)


def started(grid: InProcessGrid, rounds: int, **options: Any) -> RunResult:
    return FedCollab(**options).start(
        grid=grid, initial_arrays=plain_initial(), num_rounds=rounds, timeout=5
    )


@pytest.mark.parametrize("newcomers", ["keep", "resolve"])
def test_a_newcomer_costs_its_own_pairs_alone_and_starts_from_its_coalition_s_model(
    newcomers: Any,
) -> None:
    nodes = plain_nodes(0, 1, 0, 1, 0)
    judged = by_kind(nodes)
    judged.active |= {1: [2, 3, 4], 2: [1, 3, 4], 3: [1, 2, 4], 4: [1, 2, 3]}  # type: ignore[attr-defined]
    grid = Changing(judged, nodes, comes={5: 3})
    seen_before: list[int] = []

    def note(report: Any) -> None:
        if report.round == 2 and not report.final:
            seen_before.append(len(judged.seen))
            judged.active |= {n: [5] for n in (1, 2, 3, 4)} | {5: [1, 2, 3, 4]}  # type: ignore[attr-defined]

    result = started(grid, 3, newcomers=newcomers, on_round=note)
    assert result.groups[2] == [["silo-0", "silo-2"], ["silo-1", "silo-3"]]
    assert result.groups[3] == [["silo-0", "silo-2", "silo-4"], ["silo-1", "silo-3"]]
    assert result.rounds[2].details["discriminators"]["pairs"] == 4
    later = judged.seen[seen_before[0] :]
    assert {len(labels) for node, _, labels, _ in later if node != 5 and labels} == {1}
    assert max(len(labels) for node, _, labels, _ in later if node == 5) == 4
    model = plain_model()
    for _ in range(2):
        parts = [plain_trained(model, nodes[i]) for i in (0, 2)]
        model = {k: 0.5 * parts[0][k] + 0.5 * parts[1][k] for k in model}
    parts = [plain_trained(model, nodes[i]) for i in (0, 2, 4)]
    expected = sum(part["w"] for part in parts) / 3
    np.testing.assert_allclose(arrays_of(result.models["silo-4"])["w"], expected, atol=1e-5)


@pytest.mark.parametrize("newcomers", ["keep", "resolve"])
def test_a_kept_structure_that_another_would_beat_says_so_and_has_no_interval(
    newcomers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Two newcomers, each near one of two silos that are together and not quite alike."""
    caplog.set_level(logging.INFO, logger="coterie.run")
    rates = {(1, 2): 0.74, (1, 3): 0.5, (2, 4): 0.5, (1, 4): 0.95, (2, 3): 0.95, (3, 4): 0.95}
    partners = {1: [2], 2: [1]}
    judged = Judged()
    judged._others = lambda context, labels: [  # type: ignore[method-assign]
        rates[min(context.node_id, p), max(context.node_id, p)] for p in partners[context.node_id]
    ]

    def come(report: Any) -> None:
        partners.update({1: [3, 4], 2: [3, 4], 3: [1, 2, 4], 4: [1, 2, 3]})

    grid = Changing(judged, plain_nodes(0, 0, 0, 0), comes={3: 2, 4: 2})
    result = started(grid, 2, newcomers=newcomers, c=9.0, on_round=come)
    before, after = (report.details["structure"] for report in result.rounds[:2])
    assert before["c-interval"][0] < 9.0 and "kept" not in before
    entry = run_of({"rounds": [{"round": 1, "structure": after}]})
    found = entry.rounds[-1].grouping.structure
    assert found is not None
    if newcomers == "resolve":
        assert result.groups[2] == [["silo-0", "silo-2"], ["silo-1", "silo-3"]]
        assert "kept" not in after and after["c-interval"][0] < 9.0
        assert "The answer stays the same for c from" in interval_text(found)
        return
    assert ["silo-0", "silo-1"] in [group[:2] for group in result.groups[2]]
    assert after["kept"] is True and "c-interval" not in after
    assert after["bound"]["second-best"] < after["bound"]["chosen"]
    for text in (interval_text(found), caplog.text):
        assert "smaller bound" in text and "newcomers=keep" in text
    for text in (interval_text(found), caplog.messages[-1]):
        assert "nan" not in text and "∞" not in text and "None" not in text


def test_a_leaver_s_row_and_column_go_and_come_back_with_it() -> None:
    nodes = plain_nodes(0, 1, 0)
    judged = by_kind(nodes)
    grid = Changing(judged, nodes, goes={1: 2})
    result = started(grid, 3)
    assert result.groups[1] == [["silo-0", "silo-2"], ["silo-1"]]
    assert result.groups[2] == [["silo-1"], ["silo-2"]]
    assert result.rounds[1].details["structure"]["compared"] == ["silo-1", "silo-2"]
    assert "discriminators" not in result.rounds[1].details
    assert "silo-0" in result.models, "who left keeps the last model that it had"
    assert len(result.state.distances) == 3


# ---------------------------------------------------------------- what goes wrong


def test_a_silo_with_too_few_samples_to_hold_any_out_is_named_and_alone(
    caplog: pytest.LogCaptureFixture,
) -> None:
    nodes = plain_nodes(0, 0, 0, samples=[100, 1, 100])
    nodes[1]["held-out"] = 0
    result = run(Judged(lambda kind, label: 0.5), nodes, rounds=2)
    assert result.groups[2] == [["silo-0", "silo-2"], ["silo-1"]]
    assert "silo silo-1 is not measured: it has too few samples to hold any out: 1" in caplog.text
    details = result.rounds[0].details
    assert "too few samples" in details["discriminators"]["missing"]["silo-1"]
    assert details["structure"]["alone"] == ["silo-1"]
    assert "discriminators" not in result.rounds[1].details, "it is not asked again"


def test_unknown_distances_may_count_as_the_mean() -> None:
    nodes = plain_nodes(0, 0, 0, samples=[100, 1, 100])
    nodes[1]["held-out"] = 0
    result = run(Judged(lambda kind, label: 0.5), nodes, rounds=1, unmeasured="unknown")
    found = result.rounds[0].details["structure"]
    assert found["alone"] == [] and result.groups[1] == [["silo-0", "silo-1", "silo-2"]]
    assert found["standard-errors"][0][1] is None
    assert found["distances"][0][1] == found["distances"][0][2]


@pytest.mark.parametrize("unmeasured", ["alone", "unknown"])
def test_where_no_distance_is_known_everybody_is_alone_and_nothing_looks_measured(
    unmeasured: Any, caplog: pytest.LogCaptureFixture
) -> None:
    budget = Discriminators(gigabytes=1e-9)
    result = run(
        Judged(), plain_nodes(0, 0, 0), rounds=2, unmeasured=unmeasured, discriminators=budget
    )
    names = ["silo-0", "silo-1", "silo-2"]
    assert result.groups[1] == result.groups[2] == [[name] for name in names]
    assert result.rounds[0].details["structure"] == {"compared": [], "alone": names, "c": None}
    assert "every silo trains alone: no distance between silos is known" in caplog.text


def test_a_single_silo_has_no_bound_and_no_interval() -> None:
    result = run(Judged(), plain_nodes(0), rounds=1, min_silos=1)
    expected = {"compared": ["silo-0"], "alone": [], "c": None}
    assert result.rounds[0].details["structure"] == expected


def lost_after(judged: Judged, node: int, number: int, *, for_good: bool) -> None:
    """The node's answers in the middle of its discriminators are errors."""
    count = {"now": 0}

    def fault(message: Message, reply: Message) -> Message:
        meta = message.metadata
        if meta.dst_node_id == node and meta.message_type == wire.TRAIN_DISCRIMINATOR:
            count["now"] += 1
            if count["now"] > number and (for_good or count["now"] <= number + 1):
                return Message(Error(wire.FAILED, "the power is gone"), reply_to=message)
        return reply

    judged.fault = fault


def test_a_silo_lost_in_the_middle_keeps_what_was_measured_and_is_tried_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    judged = Judged(lambda kind, label: 0.5)
    lost_after(judged, 2, 3, for_good=False)
    result = run(judged, plain_nodes(0, 0, 0), rounds=2)
    first, second = (report.details["discriminators"] for report in result.rounds[:2])
    assert first["unfinished"] == [["silo-0", "silo-1"], ["silo-1", "silo-2"]]
    reason = "during its discriminators: the power is gone"
    assert first["missing"] == {"silo-1": reason}
    assert f"silo silo-1 is lost: {reason}" in caplog.text
    assert (first["pairs"], second["pairs"], second["unfinished"]) == (3, 2, [])
    assert {d.rounds for d in result.state.distances.values()} == {5}


def test_a_silo_lost_before_anything_was_measured_trains_alone_and_is_tried_once_more() -> None:
    judged = Judged(lambda kind, label: 0.5)
    lost_after(judged, 2, 0, for_good=True)
    result = run(judged, plain_nodes(0, 0, 0), rounds=4)
    assert all(result.groups[t] == [["silo-0", "silo-2"], ["silo-1"]] for t in (1, 2, 3, 4))
    tried = ["discriminators" in report.details for report in result.rounds[:4]]
    assert tried == [True, True, False, False]


@pytest.mark.parametrize("newcomers", ["keep", "resolve"])
def test_a_silo_that_was_alone_until_its_second_attempt_takes_its_place_then(
    newcomers: Any,
) -> None:
    judged = Judged(lambda kind, label: 0.5)
    lost_after(judged, 2, 0, for_good=False)
    result = run(judged, plain_nodes(0, 0, 0), rounds=3, newcomers=newcomers)
    assert result.groups[1] == [["silo-0", "silo-2"], ["silo-1"]]
    assert result.groups[2] == result.groups[3] == [["silo-0", "silo-1", "silo-2"]]
    assert result.rounds[1].details["structure"]["alone"] == []


def test_a_silo_placed_by_a_mean_of_distances_moves_when_its_own_are_known() -> None:
    judged = Judged(lambda kind, label: 1.0 if kind else 0.5)
    lost_after(judged, 2, 0, for_good=False)
    result = run(judged, plain_nodes(0, 1, 0), rounds=3, c=2.0, unmeasured="unknown")
    assert result.groups[1] == [["silo-0", "silo-1", "silo-2"]]
    assert result.groups[2] == result.groups[3] == [["silo-0", "silo-2"], ["silo-1"]]


def test_a_silo_placed_by_an_unfinished_distance_moves_when_it_is_finished() -> None:
    shown = {"rate": 0.9}
    judged = Judged(lambda kind, label: shown["rate"] if kind else 0.5)
    lost_after(judged, 2, 2, for_good=False)
    result = run(
        judged,
        plain_nodes(0, 1, 0),
        rounds=3,
        c=2.0,
        on_round=lambda report: shown.update(rate=0.5),
    )
    assert result.rounds[0].details["structure"]["alone"] == [], "it was measured, a little"
    assert result.groups[1] == [["silo-0", "silo-2"], ["silo-1"]]
    assert result.groups[2] == result.groups[3] == [["silo-0", "silo-1", "silo-2"]]


@pytest.mark.parametrize(("second", "rounds"), [(2, 4), (6, 5)])
def test_of_two_broken_attempts_the_distance_of_more_rounds_counts(
    second: int, rounds: int
) -> None:
    """Discriminators get better with every round: an early end finds less than there is."""
    judged, trained = Judged(), {"now": 0, "lost-after": 5}
    judged.rate = lambda kind, label: 0.5 + 0.1 * trained["now"]

    def fault(message: Message, reply: Message) -> Message:
        meta = message.metadata
        if meta.dst_node_id == 2 and meta.message_type == wire.TRAIN_DISCRIMINATOR:
            trained["now"] += 1
            if trained["now"] > trained["lost-after"]:
                return Message(Error(1, "gone"), reply_to=message)
        return reply

    def next_attempt(report: Any) -> None:
        trained.update({"now": 0, "lost-after": second})

    judged.fault = fault
    result = run(judged, plain_nodes(0, 0), rounds=3, c=5.0, on_round=next_attempt)
    (found,) = result.state.distances.values()
    assert found.rounds == rounds
    first, last = (result.rounds[t].details["structure"]["distances"] for t in (0, 1))
    assert (last == first) is (rounds == 4)
    assert result.groups[1] == result.groups[3] == [["silo-0"], ["silo-1"]]


def test_where_nobody_was_measured_at_first_the_second_attempt_decides_for_all() -> None:
    nodes = plain_nodes(0, 1, 0, 1)
    judged = by_kind(nodes)
    asked: set[int] = set()

    def fault(message: Message, reply: Message) -> Message:
        first = message.metadata.dst_node_id not in asked
        asked.add(message.metadata.dst_node_id)
        return Message(Error(1, "not yet"), reply_to=message) if first else reply

    judged.fault = fault
    result = run(judged, nodes, rounds=3)
    assert result.groups[1] == [["silo-0"], ["silo-1"], ["silo-2"], ["silo-3"]]
    assert result.groups[2] == result.groups[3] == [["silo-0", "silo-2"], ["silo-1", "silo-3"]]


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("held-out", None, "it did not report how many samples it can hold out."),
        ("held-out", float("nan"), "it did not report how many samples it can hold out."),
        ("discriminator-bytes", None, "it did not report the size of its discriminator."),
        ("discriminator-bytes", 16, "its discriminator has 16 bytes, the others' 12."),
    ],
)
def test_what_a_silo_does_not_say_is_not_taken_for_nothing(
    key: str, value: float | None, reason: str
) -> None:
    judged = Judged(lambda kind, label: 0.5)

    def fault(message: Message, reply: Message) -> Message:
        metrics = reply.content["metrics"]
        if message.metadata.dst_node_id == 2:
            del metrics[key]
            if value is not None:
                metrics[key] = value
        return reply

    judged.fault = fault
    result = run(judged, plain_nodes(0, 0, 0), rounds=1)
    assert result.rounds[0].details["discriminators"]["missing"] == {"silo-1": reason}
    assert result.groups[1] == [["silo-0", "silo-2"], ["silo-1"]]


def test_silos_that_let_few_metrics_leave_are_measured_like_others(tmp_path: Path) -> None:
    found = []
    for name, metrics in (("few", ["", "train-loss,loss,error,seconds"]), ("all", [None, None])):
        configs = [
            digits_config(silo, i, **({} if may is None else {"share-metrics": may}))
            for i, (silo, may) in enumerate(zip("abc", [*metrics, None], strict=True))
        ]
        result = kit.run(tmp_path / name, configs, strategy="fedcollab", rounds=1)
        found.append(result.rounds[0].details)
    few, everything = found
    assert few["discriminators"]["missing"] == {} and few["discriminators"]["pairs"] == 3
    assert few["structure"] == everything["structure"]


def test_a_silo_that_refuses_is_recorded_with_its_reason_and_not_asked_again(
    tmp_path: Path,
) -> None:
    configs = [digits_config(n, i, auxiliary=n != "a") for i, n in enumerate("abc")]
    result = kit.run(tmp_path / "run", configs, strategy="fedcollab", rounds=2)
    reason = "silo 'a' sends no model except the task's; this run trains discriminators."
    assert result.rounds[0].details["discriminators"]["missing"] == {"a": reason}
    assert "discriminators" not in result.rounds[1].details
    assert all(["a"] in groups for groups in result.groups.values())


def test_a_refusal_in_the_middle_is_final_and_one_that_comes_back_is_asked_again() -> None:
    nodes = plain_nodes(0, 0, 0)
    judged = Judged(lambda kind, label: 0.5)

    def fault(message: Message, reply: Message) -> Message:
        meta = message.metadata
        if meta.dst_node_id == 2 and meta.message_type == wire.TRAIN_DISCRIMINATOR:
            return wire.refusal("not with my data", message)
        return reply

    class Returning(Changing):
        def get_node_ids(self) -> Iterable[int]:
            return [node for node in super().get_node_ids() if (node, self.looks) != (2, 3)]

    judged.fault = fault
    result = started(Returning(judged, nodes), 5)
    tried = [report.details.get("discriminators") for report in result.rounds[:5]]
    assert [found is not None for found in tried] == [True, False, False, True, False]
    assert tried[0] is not None
    reason = "during its discriminators: not with my data"
    assert tried[0]["missing"] == {"silo-1": reason}


def test_samples_kept_for_validation_are_not_called_too_few_to_begin_with(tmp_path: Path) -> None:
    configs = [
        digits_config(n, i, **{"data.train": 2 if n == "a" else 30}) for i, n in enumerate("abc")
    ]
    keys = {"strategy": "fedcollab", "rounds": 1, "validation": 0.2}
    result = kit.run(tmp_path / "run", configs, **keys)
    assert result.rounds[0].details["discriminators"]["missing"] == {
        "a": "it has too few samples to hold any out: 2, of which fewer than the required 2 remain "
        "(validation holds some out)."
    }


def test_a_silo_that_accepts_no_group_of_two_shares_no_discriminator(
    caplog: pytest.LogCaptureFixture,
) -> None:
    judged = Judged(lambda kind, label: 0.5)
    stated: set[Any] = set()

    def fault(message: Message, reply: Message) -> Message:
        stated.add(message.content["config"]["group-size"])
        return reply

    judged.fault = fault
    result = run(judged, plain_nodes(0, 0, 0), rounds=3, roster=Minimums({1: 3, 2: 2}))
    assert {node for node, *_ in judged.seen} == {2, 3} and stated == {2}
    reason = "it accepts groups of at least 3 silos; a discriminator is the mean of two."
    assert result.rounds[0].details["discriminators"]["missing"] == {"silo-0": reason}
    assert caplog.text.count(f"silo silo-0 is not measured: {reason}") == 1
    assert result.groups[3] == [["silo-0"], ["silo-1", "silo-2"]]
    assert "discriminators" not in result.rounds[1].details, "nobody is asked again"


@pytest.mark.parametrize("newcomers", ["keep", "resolve"])
def test_a_silo_whose_coalition_becomes_too_small_trains_alone_until_it_is_not(
    newcomers: Any, caplog: pytest.LogCaptureFixture
) -> None:
    class Back(Changing):
        def get_node_ids(self) -> Iterable[int]:
            return [n for n in super().get_node_ids() if n != 3 or self.looks not in (2, 3)]

    grid = Back(Judged(lambda kind, label: 0.5), plain_nodes(0, 0, 0, 0))
    result = started(grid, 4, roster=Minimums({1: 4}), unmeasured="unknown", newcomers=newcomers)
    assert result.groups[2] == result.groups[3] == [["silo-0"], ["silo-1", "silo-3"]]
    assert result.groups[1] == result.groups[4]
    assert result.groups[4] == [["silo-0", "silo-1", "silo-2", "silo-3"]]
    assert all(not report.left_out for report in result.rounds)
    found = [report.details["structure"].get("aside") for report in result.rounds[:4]]
    assert found == [None, ["silo-0"], ["silo-0"], None]
    assert "silo-0 trains alone: it accepts groups of at least 4 silos" in caplog.text


def test_where_nobody_accepts_a_group_of_two_nothing_is_asked() -> None:
    judged = Judged()
    result = run(judged, plain_nodes(0, 0), rounds=2, roster=Minimums({1: 3, 2: 3}))
    assert judged.seen == [] and result.rounds[0].phases == {}
    assert set(result.rounds[0].details["discriminators"]["missing"]) == {"silo-0", "silo-1"}
    assert result.groups[2] == [["silo-0"], ["silo-1"]]


def changed(reply: Message, key: str, change: Callable[[np.ndarray], np.ndarray]) -> Message:
    for name, record in reply.content.array_records.items():
        if key in record:
            reply.content[name] = ArrayRecord(
                {k: Array(change(a.numpy()) if k == key else a.numpy()) for k, a in record.items()}
            )
    return reply


@pytest.mark.parametrize(
    ("key", "change"),
    [
        ("d", lambda a: a[:1]),
        ("d", lambda a: a.astype(np.float64)),
        ("d", lambda a: a * np.float32("nan")),
        ("hits", lambda a: a + 1000),
        ("hits", lambda a: -1 - a),
        ("hits", lambda a: a[:, :1]),
        ("counts", lambda a: 0 * a),
    ],
    ids=["too few", "other type", "NaN", "too many hits", "negative", "one half", "no counts"],
)
def test_a_bad_reply_loses_its_silo_and_nobody_else(
    key: str, change: Callable[[np.ndarray], np.ndarray]
) -> None:
    judged = Judged(lambda kind, label: 0.5)
    judged.fault = lambda message, reply: (
        changed(reply, key, change) if message.metadata.dst_node_id == 1 else reply
    )
    result = run(judged, plain_nodes(0, 0, 0), rounds=1)
    assert result.groups[1] == [["silo-0"], ["silo-1", "silo-2"]]


@pytest.mark.parametrize("odd", [1, 2, 3])
@pytest.mark.parametrize("shape", ["renamed", "reshaped", "halved"])
def test_other_arrays_of_the_same_size_lose_the_silo_that_sent_them(odd: int, shape: str) -> None:
    def other(array: np.ndarray) -> dict[str, np.ndarray]:
        if shape == "renamed":
            return {"e": array}
        return {"d": array.reshape(len(array), 3, 1) if shape == "reshaped" else array.view("<f2")}

    def fault(message: Message, reply: Message) -> Message:
        if message.metadata.dst_node_id == odd and "discriminators" in reply.content:
            array = reply.content["discriminators"]["d"].numpy()
            made = {k: Array(a) for k, a in other(array).items()}
            reply.content["discriminators"] = ArrayRecord(made)
        return reply

    judged = Judged(lambda kind, label: 0.5)
    judged.fault = fault
    result = run(judged, plain_nodes(0, 0, 0), rounds=1)
    assert set(result.rounds[0].details["discriminators"]["missing"]) == {f"silo-{odd - 1}"}
    assert [f"silo-{odd - 1}"] in result.groups[1] and len(result.groups[1]) == 2


def test_of_two_that_differ_the_first_silo_s_arrays_count() -> None:
    def fault(message: Message, reply: Message) -> Message:
        if message.metadata.dst_node_id == 2 and "discriminators" in reply.content:
            array = reply.content["discriminators"]["d"].numpy()
            reply.content["discriminators"] = ArrayRecord({"e": Array(array)})
        return reply

    judged = Judged(lambda kind, label: 0.5)
    judged.fault = fault
    result = run(judged, plain_nodes(0, 0), rounds=1)
    assert set(result.rounds[0].details["discriminators"]["missing"]) == {"silo-1"}


# ---------------------------------------------------------------- pieces


def test_who_lacks_most_distances_is_left_out_first() -> None:
    known = {(a, b): Distance(0.0, 0.1, 5) for a, b in [("a", "b"), ("a", "d"), ("b", "d")]}
    assert _split_known(("a", "b", "c", "d"), known) == (("a", "b", "d"), ("c",))
    assert _split_known(("a", "c"), known) == (("c",), ("a",))


def test_who_was_placed_unmeasured_is_not_settled() -> None:
    structure = Structure(("a", "b", "d"), ("c",), 10.0, (), ())
    members = Members(plain_model())
    state = FedCollabState(members, planned=(("a", "b"), ("c",), ("d",)), structure=structure)
    names = ("a", "b", "c", "d", "new")
    assert _settled(state, names) == [["a", "b"], ["d"]], "c was alone unmeasured"

    def after(*pairs: tuple[str, str]) -> list[list[str]]:
        measured = Measurement(distances={pair: Distance(0.0, 0.1, 5) for pair in pairs})
        return _settled(FedCollabState(members, planned=state.planned, measured=measured), names)

    assert after(("a", "d"), ("b", "d")) == [["a", "b"], ["c"]], "d has most new distances"
    assert after(("a", "b")) == [["c"], ["d"]], "one of them as much as the other"
    better = {("a", "d"): Distance(0.5, 0.1, 9)}
    measured = Measurement(distances={("a", "d"): Distance(0.0, 0.1, 5)})
    kept = replace(state, structure=None, distances=better, measured=measured)
    assert _settled(kept, names) == [["a", "b"], ["c"], ["d"]], "the distance did not change"
    assert after(("a", "new"), ("b", "new"), ("c", "new")) == [["a", "b"], ["c"], ["d"]]
    assert _settled(state, ("a", "d")) == [["a"], ["d"]]


def test_a_coalition_that_changes_starts_from_the_mean_of_what_its_members_had() -> None:
    one, two = ({k: a + np.float32(v) for k, a in plain_model().items()} for v in (1, 4))
    members = Members(
        plain_model(),
        models={"a": one, "b": one, "c": two, "new": plain_model()},
        sizes={"a": 10.0, "b": 20.0, "c": 60.0, "new": 500.0},
        groups=(("a", "b"), ("c",)),
    )
    state = FedCollabState(members, trained=frozenset("abc"))
    assert all(
        model is one for model in starts(state.members, state.trained, ("a", "b", "new")).values()
    )
    assert starts(state.members, state.trained, ("new",))["new"] is members.initial
    mixed = starts(state.members, state.trained, ("b", "c", "new"))["new"]
    np.testing.assert_allclose(mixed["w"], (20 * 1 + 60 * 4) / 80)  # type: ignore[arg-type]
    assert_equal_models(starts(state.members, state.trained, ("a", "b"))["a"], one)


def test_a_coalition_s_model_is_not_shown_to_a_newcomer_where_too_few_are_behind_it() -> None:
    """b accepts two, c three: who trained alone or in two meanwhile is not shown whole."""
    one, two, own = ({k: a + np.float32(v) for k, a in plain_model().items()} for v in (1, 4, 9))
    state = FedCollabState(
        Members(
            plain_model(),
            models={"a": one, "b": two, "c": own, "d": own},
            sizes=dict.fromkeys("abcd", 10.0),
            groups=(("a",), ("b",), ("c", "d")),
            minimums={"b": 2, "c": 3},
        ),
        trained=frozenset("abcd"),
    )
    first = state.members.initial
    of_b = starts(state.members, state.trained, ("b", "new"))
    of_c = starts(state.members, state.trained, ("c", "d", "new"))
    assert (of_b["b"] is two) and (of_b["new"] is first)
    assert starts(state.members, state.trained, ("b",))["b"] is two
    assert all(model is own for model in starts(state.members, state.trained, ("c", "d")).values())
    assert (of_c["c"] is own) and (of_c["d"] is own) and (of_c["new"] is first)
    assert starts(state.members, state.trained, ("a", "new"))["new"] is one, "a accepts being alone"
    both = starts(state.members, state.trained, ("a", "b", "new"))["new"]
    np.testing.assert_allclose(both["w"], 2.5)  # type: ignore[arg-type]


# ---------------------------------------------------------------- other conditions on return


def _driven(
    strategy: ByHand, state: FedCollabState, here: Sequence[Silo], round: int, refuses: str = ""
) -> tuple[FedCollabState, set[str]]:
    """A round without a federation: equal silos, one of which may refuse. Also who was asked."""
    steps = strategy.prepare(state, here, round=round)
    asked: set[str] = set()
    answers: Answers | None = None
    while True:
        try:
            orders = next(steps) if answers is None else steps.send(answers)
        except StopIteration as end:
            return strategy.go_on(end.value, here, round=round)[0], asked
        asked |= {order.silo.name for order in orders}
        updates = []
        for order in orders:
            pairs: Any = order.config["pair-labels"]
            count = len(pairs)
            extras: dict[str, Any] = {}
            if order.extras or count:
                extras["discriminators"] = {"d": np.zeros((count, 3), np.float32)}
            if order.extras:
                hits = {"hits": np.full((count, 2), 13), "counts": np.array([25, 25])}
                extras["hits"] = hits
            metrics = {"held-out": 50.0, "discriminator-bytes": 12.0}
            if order.silo.name != refuses:
                updates.append(
                    Update(order.silo, {}, {}, 100, metrics, order.purpose, order.kind, extras)
                )
        answers = Answers(updates, {refuses: "it refuses"} if refuses else {}, refuses or ())


def _three() -> tuple[ByHand, FedCollabState, list[Silo]]:
    measured = Discriminators(rounds=2, min_rounds=1)
    strategy = ByHand(FedCollab(c=100.0, unmeasured="unknown", discriminators=measured))
    here = [Silo(n, i, num_examples=100, described=True) for i, n in enumerate("abc", start=1)]
    return strategy, strategy.first({"w": np.zeros(3, np.float32)}), here


def test_who_refused_twice_is_asked_again_when_it_comes_back() -> None:
    strategy, state, (a, b, c) = _three()
    for number in (1, 3):
        state, asked = _driven(strategy, state, [a, b, c], number, refuses="c")
        assert "c" in asked
        state, asked = _driven(strategy, state, [a, b], number + 1)
        assert not asked
    state, asked = _driven(strategy, state, [a, b, c], 5)
    assert "c" in asked and ("a", "c") in state.distances


def test_a_silo_is_planned_by_the_smallest_group_that_it_accepts_now() -> None:
    strategy, state, (a, b, c) = _three()
    state, _ = _driven(strategy, state, [a, b, c], 1)
    assert state.planned == (("a", "b", "c"),)
    strict = replace(c, min_group_size=4)
    state, _ = _driven(strategy, state, [a, b, strict], 2)
    assert state.planned == (("a", "b"), ("c",)) and state.structure is not None
    assert state.structure.aside == ("c",)
    state, _ = _driven(strategy, state, [a, b, c], 3)
    assert state.planned == (("a", "b", "c"),) and not state.members.minimums


@pytest.mark.parametrize("claim", [100, 10**9])
def test_who_states_a_great_many_samples_does_not_merge_everybody(claim: int) -> None:
    names = "abcdef"
    sizes = dict.fromkeys(names, 100.0) | {"f": float(claim)}
    far = {(x, y): Distance(0.5 * ((i + j) % 2), 0.01, 60) for (i, x), (j, y) in
           combinations(enumerate(names), 2)}  # fmt: skip
    held_out = dict.fromkeys(names, 40)
    state = FedCollabState(Members({}, sizes=sizes), distances=far, held_out=held_out)
    now = Round(1, tuple(Silo(n, i) for i, n in enumerate(names)), max_share=0.5)
    planned = Structuring(c=10.0)._structured(state, names, now).planned
    assert planned == (("a", "c", "e"), ("b", "d", "f"))


def test_the_bound_is_of_the_samples_that_silos_state_whatever_their_last_weight() -> None:
    near = {pair: Distance(0.0, 0.01, 60) for pair in combinations("abc", 2)}
    weights, stated = {"a": 200.0, "b": 100.0, "c": 100.0}, {"a": (400, ""), "b": (100, "")}
    members = Members({}, sizes=weights, data=stated)
    state = FedCollabState(members, distances=near, held_out=dict.fromkeys("abc", 50))
    now = Round(2, tuple(Silo(n, 1) for n in "abc"))
    structure = Structuring(c=10.0)._structured(state, tuple("abc"), now).structure
    assert structure is not None and structure.report is not None
    assert structure.report.alone == pytest.approx(0.5 + 1 + 1)
