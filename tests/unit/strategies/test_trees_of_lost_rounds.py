"""Trees where a round, a silo or its rows are lost, few or far from usual."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from safetensors.numpy import load_file

from coterie import wire
from coterie.features.evaluation.coordinator import FILE, read_judgement
from coterie.features.sums.trees.alone import Alone
from coterie.features.sums.trees.asking import Grown
from coterie.features.sums.trees.coordinator import Trees
from coterie.features.sums.trees.ensemble import Ensemble
from coterie.features.sums.trees.growth import LEFT, RIGHT, Settings
from coterie.server.report.view import line_of
from coterie.server.runs import record
from coterie.server.runs.record.follow import Progress
from coterie.strategies.auto.algorithm import Auto
from coterie.strategies.auto.newcomers import after_probation
from coterie.strategies.auto.state import ALONE, GROUP, AutoState, Forest, Measured, holding
from coterie.strategies.errors import FederationError
from coterie.strategies.fedcollab.algorithm import FedCollab
from coterie.strategies.rounds.algorithm import Round
from coterie.strategies.rounds.members import Members
from coterie.strategies.rounds.roster import Silo
from coterie.strategies.strategy import RunResult
from coterie.tasks.own.declared import load_declared
from tests.conftest import assert_equal_models
from tests.kit import CutGrid, Tap, ask, interrupted, restart_silos, run
from tests.unit.strategies.test_arriving_trees import models_of, sites
from tests.unit.strategies.test_grown_trees import COLUMNS, FEW_BINS, STUDY, drawn

QUIET = {"share-metrics": "error"}
"""Of silos that state no losses, so that all trees grow."""


def asked(grid: Tap) -> Counter[tuple[str, int]]:
    """Return (round, node) → its questions about trees."""
    about = [m.metadata for m in grid.sent if m.metadata.message_type == wire.EVALUATE_HISTOGRAMS]
    return Counter((one.group_id, one.dst_node_id) for one in about)


def test_a_repeated_round_is_answered_as_before_by_silos_that_answer_no_more(
    tmp_path: Path,
) -> None:
    nodes = [node | QUIET for node in sites(tmp_path, {"a": 200, "b": 200})]
    grid = Tap(nodes)
    whole = run(tmp_path / "whole", grid, **FEW_BINS)
    most = max(count for (number, _), count in asked(grid).items() if number != "1") + 2
    nodes = [node | {"home": str(tmp_path / f"home-{node['name']}")} for node in nodes]
    interrupted(tmp_path / "cut", CutGrid(nodes, at=(wire.TRAIN, 2)), **FEW_BINS)
    nodes = [node | {"max-evaluations": most} for node in nodes]
    again = run(tmp_path / "cut", nodes, run_id=2, resume="cut", **FEW_BINS)
    assert [one.details.get("not-summed") for one in again.rounds] == [None] * len(again.rounds)
    assert_equal_models(*models_of(again, names="a"), *models_of(whole, names="a"))


def test_trees_of_a_lost_round_grow_in_a_later_one_or_the_run_says_so(tmp_path: Path) -> None:
    nodes = [node | QUIET for node in sites(tmp_path, {"a": 200, "b": 200, "c": 200, "d": 200})]
    lost, now = set[str](), {"round": ""}

    def before(messages: list[Message]) -> None:
        now["round"] = messages[0].metadata.group_id

    def change(silo: str, reply: Message) -> Message:
        if silo in "cd" and now["round"] in lost and "sums" in reply.content:
            del reply.content["sums"]
        return reply

    keys = {**FEW_BINS, "rounds": 5, "given-groups": "a,b;c,d"}
    for lost, behind, last in (({"2"}, 2, 10), ({"5"}, 8, 8)):
        found = run(tmp_path / f"run{last}", Tap(nodes, before=before, change=change), **keys)
        counts = [one.details["trees"] for one in found.rounds]
        assert counts[int(max(lost)) - 1] == {"a,b": 2 * int(max(lost)), "c,d": behind}
        assert counts[-1] == {"a,b": 10, "c,d": last}
        said = [line for line in lines_of(found) if "began late" in line]
        assert ["c,d: 8 of 10 have grown" in line for line in said] == [True] * (last == 8)


def lines_of(found: RunResult) -> list[str]:
    """Return the lines that a run shows."""
    progress, lines = Progress("run"), list[str]()
    for one in found.rounds:
        event = record.Event("final" if one.final else "round", report=record.Round.of(one))
        progress.feed(event)
        lines += line_of(progress, event).splitlines()
    return lines


@pytest.mark.parametrize("secure", [False, True])
def test_silos_whose_given_group_has_no_other_grow_trees_at_home_and_the_screen_says_so(
    tmp_path: Path, secure: bool
) -> None:
    nodes = sites(tmp_path, {"a": 200, "b": 200, "c": 200, "gamma": 1})
    nodes[3]["data.test-data"] = nodes[0]["data.data"]
    keys = {**FEW_BINS, "given-groups": "a, b ;c,nobody;gama"}
    grid = Tap(nodes)
    found = run(tmp_path / "run", grid, **keys, secure=secure)
    assert len({node_id for _, node_id in asked(grid)}) == 2, "of a and b"
    assert found.rounds[-1].details["at-home"] == ["c", "gamma"]
    assert not any(one.left_out for one in found.rounds)
    said = [line for line in lines_of(found) if "given-groups" in line]
    named = [line.removeprefix("run: ").split(" ")[0] for line in said]
    assert named == ["c", "gama", "gamma", "nobody"], "each once"


def test_silos_that_answer_for_no_sums_grow_trees_at_home_and_a_later_round_asks_again(
    tmp_path: Path,
) -> None:
    """In the memory of their folders all three are one block."""
    nodes = sites(tmp_path, {"a": 200, "b": 200, "c": 200})
    nodes = [node | {"home": str(tmp_path / f"home-{node['name']}")} for node in nodes]
    run(tmp_path / "first", nodes, **FEW_BINS, secure=True)
    found = run(tmp_path / "run", nodes, **FEW_BINS, **{"given-groups": "a,b;c"}, secure=True)
    assert found.rounds[-1].groups == (("a",), ("b",), ("c",))
    kept = (tmp_path / "home-a" / "models").rglob("*.safetensors")
    assert all((load_file(file)["feature"] >= 0).any() for file in kept)
    assert any("a is in no sum of trees" in line for line in lines_of(found))


@pytest.mark.parametrize("rows", [1, 4])
def test_a_masked_trial_counts_also_beside_a_silo_that_can_hold_no_rows_out(
    tmp_path: Path, rows: int
) -> None:
    restart_silos()
    nodes = sites(tmp_path, {"a": 200, "b": 200, "c": rows})
    nodes[2]["data.test-data"] = nodes[0]["data.data"]
    found = run(tmp_path / "run", nodes, **FEW_BINS, secure=True)
    assert list(found.rounds[-1].details["trees-enough"]) == ["*"]


def test_a_group_that_begins_late_takes_no_complete_trees_away(tmp_path: Path) -> None:
    nodes = [node | QUIET for node in sites(tmp_path, {"a": 200, "b": 200, "c": 200, "d": 200})]
    now = {"round": ""}

    def before(messages: list[Message]) -> None:
        now["round"] = messages[0].metadata.group_id

    def change(silo: str, reply: Message) -> Message:
        if silo in "cd" and now["round"] in {"1", "2", "3", "4"} and "sums" in reply.content:
            del reply.content["sums"]
        return reply

    keys = {**FEW_BINS, "rounds": 5, "given-groups": "a,b;c,d"}
    found = run(tmp_path / "run", Tap(nodes, before=before, change=change), **keys)
    alone = run(tmp_path / "alone", nodes, **{**keys, "given-groups": "each"})
    assert found.rounds[-1].details["trees"] == {"a,b": 10, "c,d": 2}
    for one in found.rounds[1:]:
        for name in "cd":
            assert one.evaluation[name][1:] == alone.rounds[-1].evaluation[name][1:], one.round


@pytest.mark.parametrize("strategy", [Trees(), Auto(), FedCollab()])
def test_trees_grow_from_no_model_that_has_some(strategy: Any) -> None:
    empty = Ensemble.empty(10, 1, 3, COLUMNS)
    strategy.check(empty.arrays(), 10)
    with pytest.raises(FederationError, match="Leave --from out"):
        strategy.check(replace(empty, leaf=empty.leaf + 1).arrays(), 10)


@pytest.mark.parametrize("strategy", ["trees", "auto", "fedcollab"])
def test_a_silo_by_itself_is_asked_for_no_sums_and_has_its_trees(
    tmp_path: Path, strategy: str
) -> None:
    (node,) = sites(tmp_path, {"a": 300})
    home = tmp_path / "home"
    grid = Tap([node | {"home": str(home)}])
    run(tmp_path / "run", grid, **{**FEW_BINS, "rounds": 7, "strategy": strategy})
    assert not asked(grid)
    (kept,) = (home / "models").glob("*.safetensors")
    assert (load_file(kept)["feature"] >= 0).any()


def test_targets_of_any_unit_grow_trees(tmp_path: Path) -> None:
    """The gain of a split is in squared units of the target, times rows."""
    found, large = {}, 2.0**30
    for unit in (1.0, large):
        nodes = sites(tmp_path / f"{unit:g}", {"a": 200, "b": 200})
        for seed, node in enumerate(nodes):
            x, ill = drawn(seed, 200)
            rows = zip(np.nan_to_num(x).tolist(), (unit * (ill + 0.5)).tolist(), strict=True)
            lines = [",".join(map(str, [*row, y])) for row, y in rows]
            head = ",".join([*(f"x{i}" for i in range(COLUMNS)), "cost"])
            Path(node["data.data"]).write_text("\n".join([head, *lines]))
        Path(nodes[0]["task"]).write_text(
            STUDY.replace('"ill"', '{kind = "number", columns = ["cost"], unit = "yen"}').replace(
                'classes = ["no", "yes"]', ""
            )
        )
        trees = run(tmp_path / f"run-{unit:g}", nodes, **FEW_BINS)
        assert all(len(one.silos) == 2 for one in trees.rounds if not one.final)
        (found[unit],) = models_of(trees, names="a")
        losses = [loss for one in trees.rounds for loss, _, _ in one.evaluation.values()]
        assert max(losses) > unit**2 / 10 and np.isfinite(losses).all()
        keys = {"strategy": "evaluation", "task": "study", "parent": f"run-{unit:g}"}
        run(tmp_path / f"judged-{unit:g}", nodes, **keys)
        assert not read_judgement(tmp_path / f"judged-{unit:g}" / FILE).silent
    assert found[large]["gain"].max() > 1e15
    assert (found[large]["feature"] == found[1.0]["feature"]).all()


def test_a_silo_whose_data_changed_holds_the_trees_by_which_it_joined() -> None:
    names, empty = ("a", "b", "c", "d"), Ensemble.empty(1, 1, 1, 1)
    trees = replace(empty, leaf=np.array([[[-1.0, 1.0]]], np.float32)).arrays()
    sides = np.full((1, 1, 1, 5), LEFT, np.int8)
    sides[..., 3] = RIGHT
    grown = Grown(trees, 1, (np.zeros(0, np.float32),), names, sides, most=1)
    state = AutoState(
        Members(empty.arrays(), sizes=dict.fromkeys(names, 100.0)),
        phase="hold",
        held=(names,),
        group_models={names: grown.of("")},
        by_silo=True,
        alone=dict.fromkeys(names, empty.arrays()),
        raced=frozenset(names),
        trees=Forest(finals={names: grown}, own={name: grown.of(name) for name in names}),
    )
    now = Round(7, tuple(Silo(n, i) for i, n in enumerate(names)), {"rounds": 20, "num-rounds": 20})
    state = Auto().renew(state, frozenset("d"), now)
    state = replace(state, beside={"d": ("a", "b", "c")}, probation={"d": 1})
    measured = holding(state)["d"]
    better = {
        (ALONE, "d"): {"d": (Measured(1, 1, 20),)},
        (GROUP, "d"): {"d": (Measured(0, 0, 20),)},
    }
    state = after_probation(replace(state, measured=better), now)
    assert state.held == (names,)
    assert_equal_models(holding(state)["d"], measured)
    assert (grown.of("d")["feature"] != measured["feature"]).any(), "its old rows went elsewhere"
    (final,) = state.trees.finals.values()
    assert final.number_of("d") == -1 and final.number_of("c") == 2


@pytest.mark.parametrize("share", [0.004, 0.03])
def test_no_loss_on_few_rows_of_own_models_leaves(tmp_path: Path, share: float) -> None:
    (node,) = sites(tmp_path, {"a": 300})
    model = of_a_task(tmp_path)
    model["feature"][0, 0, 0], model["leaf"][0, 0, 4:] = 0, 3.0
    entries = {"task": "study", "run": "r", "holdout": share, "seed": 1, "group-size": 3}
    entries |= {"server-round": 1, "rounds": 20, "strategy": "auto"}
    for held_out, told in ((share, False), (0.2, True)):
        keys = {**entries, "personalise": "partial", "holdout": held_out}
        reply = ask(wire.EVALUATE_OWN, node, model=model, **keys)
        assert any("holdout" in name for name in reply.content["metrics"]) == told


@pytest.mark.parametrize("rows", [6, 9, 14])
def test_a_silo_with_few_rows_measures_trees_that_it_grows(tmp_path: Path, rows: int) -> None:
    (node,) = sites(tmp_path, {"a": rows})
    entries = {"task": "study", "run": "r", "holdout": 0.2, "seed": 1, "group-size": 1}
    entries |= {"server-round": 1, "rounds": 20, "strategy": "auto", "personalise": "partial"}
    how = Alone.of(Settings(), 64, 3).model_dump_json()
    reply = ask(wire.EVALUATE_OWN, node, model=of_a_task(tmp_path), **entries, **{"at-home": how})
    assert not reply.has_error(), reply.error.reason


def of_a_task(folder: Path) -> dict[str, Any]:
    """Return the empty model of a task."""
    arrays = load_declared(folder / "study.toml").model().state_dict()
    return {name: array.numpy().copy() for name, array in arrays.items()}
