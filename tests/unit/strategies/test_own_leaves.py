"""Partial pooling of boosted trees: silos' own leaf values, in ``trees`` and in ``auto``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from coterie import wire
from coterie.client.app import app
from coterie.engine.inprocess import InProcessGrid
from coterie.server.report.race import explain_race
from coterie.server.runs.checkpoint import Checkpoints
from coterie.server.runs.record import read_run
from coterie.strategies.auto import decision
from coterie.strategies.auto.candidates import Candidate
from coterie.strategies.plain.pooling import TRIED_LEAVES
from coterie.strategies.rounds.result import RunResult
from coterie.tasks.trees import Trees, named
from tests.kit import (
    CutGrid,
    Tap,
    assert_same_models,
    interrupted,
    record_of,
    restart_silos,
    run,
)
from tests.unit.client.models import Drawn
from tests.unit.strategies.test_own_models import chosen, verdict_of
from tests.unit.strategies.test_pooling import losses

ROWS, MOST_OWN = 120, 1
"""Rows of a silo; own trees of a model of ten."""


class Steps(Drawn):
    """Silos whose answers share steps, and have an own ``level`` and an own share of one."""

    name = "steps"
    rows = (ROWS, 300)

    def model(self) -> Trees:
        return named("trees-10x3", shape=(3,), problem=self.problem)

    def targets(self, x: Any, draw: np.random.Generator, options: Any) -> Any:
        level = float(options["level"])
        y = 2.0 * (x[:, 0] > 0) + np.abs(x[:, 1]) + level * (1 + (x[:, 2] > 0.5))
        return y + 0.5 * draw.normal(size=len(x))


TASK = f"{__name__}:Steps"
LEVELS = [-0.8, -0.3, 0.3, 0.8]
KEYS: dict[str, Any] = {
    **{"task": TASK, "strategy": "trees", "rounds": 5, "tree-rate": 0.2, "leaf-rows": 10},
    "column-bins": 16,
}
AUTO = {**KEYS, "strategy": "auto", "rounds": 6}


def silos(levels: list[float] = LEVELS, **more: Any) -> list[dict[str, Any]]:
    own = {"task": TASK, "device": "cpu", "threads": 1, "sums": "trees", **more}
    return [
        {"name": f"s{n}", "data.silo": n, "data.level": level, **own}
        for n, level in enumerate(levels)
    ]


def pooled(folder: Path, nodes: Any = None, **more: Any) -> RunResult:
    return run(folder, silos() if nodes is None else nodes, **KEYS, personalise="partial", **more)


def choice(result: RunResult) -> dict[str, Any]:
    (found,) = [r.details["own-penalty"] for r in result.rounds if "own-penalty" in r.details]
    return dict(found)


def remembered(folder: Path, rounds: int = KEYS["rounds"]) -> Mapping[str, Any]:
    """Return the complete trials that the last checkpoint has, of so many rounds."""
    number, standing = Checkpoints(folder / "checkpoints").load() or (0, None)
    assert number == rounds
    found: Mapping[str, Any] = standing.checkpoint.state.tried
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("leaves")


@pytest.fixture(scope="module")
def plain(folder: Path) -> RunResult:
    """The group's trees as they are."""
    return run(folder / "plain", silos(), **KEYS)


@pytest.fixture(scope="module")
def grid() -> Tap:
    """The silos of ``own``, and what they were asked."""
    return Tap(silos())


@pytest.fixture(scope="module")
def own(folder: Path, grid: Tap) -> RunResult:
    return pooled(folder / "own", grid)


@pytest.fixture(scope="module")
def auto(folder: Path) -> RunResult:
    return run(folder / "auto-1", silos(), **AUTO)


def test_silos_that_contradict_each_other_gain_and_the_groups_trees_stay(
    plain: RunResult, own: RunResult, grid: Tap, folder: Path
) -> None:
    assert_same_models(plain, own)
    assert choice(own)["penalty"] in TRIED_LEAVES[1:]
    assert set(choice(own)["losses"]) == {f"{one:g}" for one in TRIED_LEAVES}
    assert losses(own) < 0.6 * losses(plain)
    assert not remembered(folder / "own") and not remembered(folder / "plain")
    asked = [m for m in grid.sent if m.metadata.message_type == wire.EVALUATE_OWN]
    assert len(asked) == len(TRIED_LEAVES) * len(LEVELS), "once"
    trial = wire.decode_arrays(asked[0].content.array_records[wire.ARRAYS])["leaf"]
    assert np.ptp(trial) > np.ptp(own.models["s0"]["leaf"].numpy()), "with the trial's trees"
    answers = [m for m in grid.got if m.metadata.message_type == wire.EVALUATE_OWN]
    assert not any(m.content.array_records for m in answers), "what is a silo's own stays"


@pytest.mark.nightly
def test_a_penalty_that_is_given_is_used_and_a_large_one_leaves_the_groups_trees(
    plain: RunResult, tmp_path: Path
) -> None:
    grid = Tap(silos())
    large = pooled(tmp_path / "large", grid, own_penalty=1e6)
    assert losses(large) == pytest.approx(losses(plain), rel=2e-3)
    assert not [m for m in grid.sent if m.metadata.message_type == wire.EVALUATE_OWN]
    given = pooled(tmp_path / "given", own_penalty=1.0)
    assert losses(given) < 0.6 * losses(plain)


@pytest.mark.nightly
def test_silos_that_are_alike_stay_near_the_groups_trees(tmp_path: Path) -> None:
    assert not 0 < choice(pooled(tmp_path, silos([0.5] * 4)))["penalty"] < 3


def test_silos_alone_have_nothing_to_shrink_to_and_those_that_hold_out_few_rows_no_vote(
    tmp_path: Path,
) -> None:
    """One of the group holds out 24 rows, so the trees that are measured have seen these."""
    restart_silos()  # which have answered about other rows
    grid = Tap([{**silos()[0], "statistics-from": 30}, *silos()[1:]])
    pooled(tmp_path, grid, **{"given-groups": "s0,s3;s1"})
    with_penalty: dict[str, set[str]] = {wire.EVALUATE_OWN: set(), wire.TRAIN: set()}
    for message in grid.sent:
        kind, config = message.metadata.message_type, message.content.config_records[wire.CONFIG]
        if kind in with_penalty and config.get(wire.OWN_PENALTY):
            with_penalty[kind].add(str(message.metadata.dst_node_id))
    first, *_, last = map(str, grid.get_node_ids())
    assert with_penalty == {wire.EVALUATE_OWN: {first, last}, wire.TRAIN: {first, last}}
    answers = [m for m in grid.got if m.metadata.message_type == wire.EVALUATE_OWN]
    told = [wire.HOLDOUT_LOSS in m.content.metric_records[wire.METRICS] for m in answers]
    assert len(told) == 2 * len(TRIED_LEAVES) and sum(told) == len(TRIED_LEAVES)
    assert not remembered(tmp_path, rounds=3), "no more trees help the group"


@pytest.mark.nightly
@pytest.mark.parametrize("strategy", ["trees", "auto"])
def test_a_run_that_was_cut_while_own_trees_are_measured_ends_the_same(
    strategy: str, own: RunResult, auto: RunResult, folder: Path, tmp_path: Path
) -> None:
    if strategy == "auto":
        keys, whole, at = AUTO, auto, verdict_of(auto)["round"]
    else:
        keys, whole = {**KEYS, "personalise": "partial"}, own
        rounds = record_of(folder / "own")["rounds"]
        at = next(n for n, one in enumerate(rounds, 1) if "own-penalty" in one)
    homes = [{**node, "home": str(tmp_path / node["name"])} for node in silos()]
    restart_silos()
    interrupted(tmp_path / "cut", CutGrid(homes, (wire.EVALUATE_OWN, at), 7), **keys)
    resumed = run(tmp_path / "cut", InProcessGrid(app, homes), run_id=2, resume="cut", **keys)
    assert_same_models(whole, resumed)
    assert resumed.rounds[-1].evaluation == whole.rounds[-1].evaluation
    (file,) = (tmp_path / "s0" / "models").glob("*.safetensors")
    kept, group = load_file(file), {n: a.numpy() for n, a in whole.models["s0"].items()}
    first = len(kept["leaf"]) - MOST_OWN
    assert (kept["feature"][:first] == group["feature"][:first]).all()
    assert (kept["leaf"][:first] != group["leaf"][:first]).any()


def test_auto_tries_own_leaf_values_and_says_so(
    auto: RunResult, plain: RunResult, folder: Path
) -> None:
    number, penalty = chosen(auto)
    assert number == 1 and penalty in TRIED_LEAVES[1:]
    assert losses(auto) < 0.6 * losses(plain)
    text = explain_race(read_run(folder / "auto-1"))
    assert "own leaf values shrunk towards these, and a few own trees" in " ".join(text.whole)
    assert text.rows[0][0] == "all together with own models – chosen"
    assert "takes its trees from the group of s0, s2 and s3, with own leaf" in text.silos["s1"]


@pytest.mark.nightly
def test_trees_that_split_by_silo_have_own_leaf_values_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def split_first(candidates: Sequence[Candidate], *found: Any, **how: Any) -> list[int]:
        both = [one.by_silo and one.penalty > 0 for one in candidates]
        return sorted(range(len(candidates)), key=lambda n: not both[n])

    monkeypatch.setattr(decision, "by_preference", split_first)
    monkeypatch.setattr(decision, "behind_alone", lambda state, candidate: False)
    nodes = [{**node, "home": str(tmp_path / str(node["name"]))} for node in silos()]
    grid = Tap(nodes)
    found = run(tmp_path / "auto", grid, **AUTO, budget=3.0)
    verdict = verdict_of(found)
    winner = verdict["candidates"][verdict["winner"]]
    assert winner["by-silo"] and winner["own-penalty"] in TRIED_LEAVES[1:]
    asked = grid.asked(wire.EVALUATE_OWN)
    alone = [config for config in asked if wire.AT_HOME in config]
    assert len(alone) == len(LEVELS), "each by its rows alone"
    own = len(asked) - len(alone)
    assert own == 2 * len(TRIED_LEAVES) * len(LEVELS), "with and without such splits"
    held, own = [m["feature"].numpy() for m in found.models.values()], set[str]()
    assert any((one != held[0]).any() for one in held)
    for name, model in found.models.items():
        (file,) = (tmp_path / name / "models").glob("*.safetensors")
        kept = load_file(file)
        first = len(kept["leaf"]) - MOST_OWN
        assert (kept["feature"][:first] == model["feature"].numpy()[:first]).all()
        own |= {name} if (kept["leaf"] != model["leaf"].numpy()).any() else set()
    keeping = {name for name, gain in verdict["gains"].items() if gain["own"]}
    assert own == found.models.keys() - keeping and own
