"""Trees that grow by sums: those of one trainer, whatever silos the rows are at."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from flwr.app import Message
from safetensors.numpy import load_file
from sklearn.ensemble import HistGradientBoostingClassifier
from sklearn.metrics import log_loss

from coterie import wire
from coterie.client.cli.predict import predict
from coterie.client.home.folder import create
from coterie.features.sums.trees import bins, growth, questions
from coterie.features.sums.trees.asking import Growing, Grown
from coterie.features.sums.trees.coordinator import Trees
from coterie.features.sums.trees.ensemble import Ensemble
from coterie.features.sums.trees.growth import Level, Settings
from coterie.features.sums.trees.histograms import Rows, floored, of_classes, of_labels, of_numbers
from coterie.features.sums.trees.together import grown
from coterie.server.report.command import write_report
from coterie.strategies import RunResult
from coterie.strategies.auto import decision, evidence
from coterie.strategies.auto.algorithm import Auto
from coterie.strategies.auto.candidates import Candidate
from coterie.strategies.auto.state import AutoState
from coterie.strategies.errors import FederationError
from coterie.strategies.partition.race import Gain
from coterie.strategies.rounds.algorithm import Update
from coterie.strategies.rounds.roster import Silo
from coterie.tasks.own.declared import load_declared
from coterie.wire.fixed import HISTOGRAMS
from tests.conftest import assert_equal_models, silo
from tests.kit import (
    CutGrid,
    Tap,
    ask,
    assert_same_models,
    interrupted,
    mean_error,
    restart_silos,
    run,
)
from tests.tables import declaration, site, written

COLUMNS, ROWS = 6, 900


def drawn(seed: int, rows: int = ROWS) -> tuple[Any, Any]:
    """Return x (n, 6) with missing values, and y (n,) that a line does not explain."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(rows, COLUMNS)).astype(np.float32)
    x[:, 3], x[:, 4] = np.round(x[:, 3]), x[:, 4] > 0
    x[:, 5] = 2000 + np.round(20 * x[:, 5])
    z = 2 * x[:, 0] * x[:, 1] + np.sin(3 * x[:, 2]) + x[:, 3] * x[:, 4] + (x[:, 5] - 2000) / 20
    x[rng.random(x.shape) < 0.1] = np.nan
    return x, rng.random(rows) < 1 / (1 + np.exp(-2 * z))


def parts(kind: str, count: int, least: int = 1) -> list[Rows]:
    x, y = drawn(0)
    if kind == "numbers":
        targets, derivatives = (np.nan_to_num(x[:, :1]) ** 2 + y[:, None]), of_numbers
    elif kind == "classes":
        targets, derivatives = np.eye(3)[y.astype(int) + (np.nan_to_num(x[:, 2]) > 1)], of_classes
    else:
        targets, derivatives = y[:, None].astype(float), of_labels
    rows = np.array_split(np.arange(len(x)), count)
    return [Rows(x[own], targets[own].astype(float), derivatives, least) for own in rows]


def trees_of(some: list[Rows], **settings: Any) -> Ensemble:
    outputs = some[0].targets.shape[1]
    return grown(some, Ensemble.empty(12, outputs, 4, COLUMNS), Settings(**settings), bins=32)


@pytest.mark.parametrize("kind", ["labels", "classes", "numbers"])
def test_many_silos_grow_the_trees_of_one_trainer_with_all_rows(kind: str) -> None:
    one, many = trees_of(parts(kind, 1)), trees_of(parts(kind, 7))
    x, _ = drawn(1)
    assert np.ptp(one.answers(x)) > 0.5
    np.testing.assert_allclose(many.answers(x), one.answers(x), rtol=0, atol=1e-6)
    assert (many.feature == one.feature).all()


def test_trees_are_as_good_as_those_of_a_known_library() -> None:
    x, y = drawn(0, 3000)
    test, truth = drawn(1, 3000)
    rows = Rows(x, y[:, None].astype(float), of_labels)
    own = grown([rows], Ensemble.empty(60, 1, 4, COLUMNS), Settings(penalty=0), bins=64)
    theirs = HistGradientBoostingClassifier(
        max_iter=60, max_depth=4, max_leaf_nodes=None, max_bins=64, early_stopping=False
    ).fit(x, y)
    ours = log_loss(truth, 1 / (1 + np.exp(-own.answers(test)[:, 0])))
    assert ours < 1.005 * log_loss(truth, theirs.predict_proba(test)), ours


def test_silos_take_all_questions_about_bins_also_of_few_rows_whose_small_counts_are_joined() -> (
    None
):
    some = [Rows(drawn(seed, 320)[0], np.zeros((320, 1)), of_labels, 10) for seed in range(4)]
    asking = bins.agreed(COLUMNS, 64)
    cells = next(asking)
    while True:
        assert max(map(len, cells)) <= bins.MOST_CUTS
        counts = [own.counts(cells) for own in some]
        try:
            cells = asking.send([np.sum(own, axis=0) for own in zip(*counts, strict=True)])
        except StopIteration as end:
            assert len(end.value[0]) > 40
            break


@pytest.mark.parametrize("values", ["few", "many", "equal", "huge", "missing"])
def test_bins_hold_about_equal_numbers_of_rows(values: str) -> None:
    draw = np.random.default_rng(0)
    column = {
        "few": draw.integers(-1, 3, 1000),
        "many": draw.normal(2023, 1, 1000),
        "equal": np.full(1000, 7),
        "huge": 10 ** draw.uniform(-30, 30, 1000) * draw.choice([-1, 1], 1000),
        "missing": np.full(1000, np.nan),
    }[values].astype(np.float32)
    rows = Rows(column[:, None], np.zeros((1000, 1)), of_numbers)
    asking = bins.agreed(1, 10)
    cells = next(asking)
    while True:
        try:
            cells = asking.send(rows.counts(cells))
        except StopIteration as end:
            (edges,) = end.value
            break
    found = np.bincount(bins.codes(column[:, None], [edges])[0], minlength=len(edges) + 2)
    if values in ("few", "equal", "missing"):
        distinct = len(np.unique(column[~np.isnan(column)]))
        assert len(edges) == max(distinct - 1, 0) and (found[:distinct] > 0).all()
    else:
        assert len(edges) == 9 and found[:-1].min() > 40 and found[:-1].max() < 160


def fewest_summed(sums: Any) -> float:
    """Return the fewest rows of neighbouring bins with equal sums, of columns (m, bins, 3)."""
    found = [np.inf]
    for column in sums:
        starts = np.flatnonzero((np.diff(column, axis=0, prepend=np.nan) != 0).any(axis=1))
        rows = np.add.reduceat(column[:, 2], starts)
        found += rows[rows > 0].tolist()
    return min(found)


def as_sent(sums: Any, last: Any) -> Any:
    """Return a column's sums (m, bins, 3) as they leave a silo that sends no sum over four rows."""
    return np.moveaxis(floored(np.moveaxis(sums, 2, 0).copy(), last, 5), 0, 2)


def test_no_sum_over_few_rows_leaves_and_no_row_is_lost() -> None:
    draw = np.random.default_rng(0)
    for _ in range(200):
        counts = draw.integers(0, 4 + 3 * draw.integers(2), (3, 8)) * (
            draw.random((3, 8)) < draw.random()
        )
        last = draw.integers(0, 7, 3)
        counts[:, :-1][np.arange(7) > last[:, None]] = 0
        sums = draw.normal(size=(3, 8, 3)) * counts[..., None]
        sums[..., 2] = counts
        found = as_sent(sums, last)
        assert fewest_summed(found) > 5 - 1e-9
        assert not found[:, :-1][np.arange(7) > last[:, None]].any(), "bins that a column lacks"
        whole = sums.sum(axis=1)
        np.testing.assert_allclose(
            found.sum(axis=1), np.where(whole[:, 2:] < 5, 0, whole), atol=1e-12
        )


@pytest.mark.parametrize(
    ("rows", "sent"),
    [
        ([5, 0, 7, 0, 0], [5, 0, 7, 0, 0]),
        ([3, 3, 3, 0, 0], [2.25, 2.25, 2.25, 2.25, 0]),  # values above the last may be there
        ([2, 1, 3, 0, 4], [2.5, 2.5, 2.5, 2.5, 0]),  # few missing ones, too
        ([2, 1, 3, 0, 6], [1.5, 1.5, 1.5, 1.5, 6]),
        ([1, 0, 9, 2, 0], [0, 0, 12, 0, 0]),  # a value that many rows have stays exact
        ([4, 2, 3, 5, 0], [3, 3, 3, 5, 0]),
        ([1, 1, 0, 0, 5], [0, 0, 0, 0, 7]),
        ([1, 1, 0, 0, 3], [1.25, 1.25, 1.25, 1.25, 0]),
    ],
)
def test_small_bins_share_the_sums_of_their_run(rows: list[int], sent: list[float]) -> None:
    sums = np.array(rows, float)[None, :, None] * np.array([-2.0, 0.5, 1.0])
    found = as_sent(sums, np.array([3]))
    np.testing.assert_allclose(found[0, :, 2], sent)
    np.testing.assert_allclose(found, found[..., 2:] * np.array([-2.0, 0.5, 1.0]))


@pytest.mark.parametrize("split", [False, True], ids=["sums", "by silo"])
def test_rows_of_a_node_that_are_too_few_to_send_count_by_what_the_others_left(split: bool) -> None:
    """Silo b sends one sum of its five 0s and five 1s, and then nothing of the 0s by themselves."""
    counts = {"a": (15, 0, 15), "b": (5, 5, 20)}
    rows = {}
    for name, own in counts.items():
        means = [2.0 + (name == "b"), -4.0, -0.5]
        x, y = (np.repeat(some, own)[:, None] for some in ([0.0, 1.0, 2.0], means))
        rows[name] = Rows(x.astype(np.float32), y, of_numbers, 10)
    empty = Grown(Ensemble.empty(1, 1, 2, 1).arrays())
    own = empty.split_by(("a", "b")) if split else empty
    growing = Growing(Settings(min_rows=16, penalty=0, rate=1.0), 8, ("a", "b"), own, 1)
    answer(growing, rows)
    tree = Ensemble.of(growing.grown.trees)
    assert tree.feature[0, 0].tolist() == [0, -1, -1] and tree.threshold[0, 0, 0] == 0.5
    found = tree.answers(np.array([[0], [2]], np.float32))
    np.testing.assert_allclose(found[:, 0], [2.25, (35 * -0.5 - 5 * 4) / 40], rtol=1e-6)


def test_trees_of_small_silos_are_nearly_those_of_one_trainer() -> None:
    """With 90 rows a silo sends at most nine sums of a column, and of small nodes nothing."""
    x, y = drawn(1, 3000)
    losses = [
        log_loss(y, 1 / (1 + np.exp(-trees_of(parts("labels", count, least)).answers(x)[:, 0])))
        for count, least in ((1, 1), (10, 10))
    ]
    assert losses[1] < losses[0] + 0.18 * (log_loss(y, np.full(len(y), y.mean())) - losses[0])


def with_value(sums: Any, at: Any, value: float) -> Any:
    changed = sums.copy()
    changed[at] = value
    return changed


LIES = {
    "NaN": lambda sums: with_value(sums, (0, 0, 0), np.nan),
    "huge": lambda sums: with_value(sums, (0, 0, 0), 1e16),
    "rows below 0": lambda sums: with_value(sums, (0, 0, 2), -1),
    "half a row": lambda sums: with_value(sums, (0, slice(None, None, 4), 2), 0.5),
    "curvature below 0": lambda sums: with_value(sums, (0, 0, 1), -1),
    "sums over no row": lambda sums: with_value(with_value(sums, (0, 0), 0), (0, 0, 1), 1),
    "columns of other rows": lambda sums: with_value(sums, (0, 0, 0), sums[0, 0, 0] + 1),
    "more rows than it has": lambda sums: sums * 20,
    "fewer nodes": lambda sums: sums[:0],
    "other numbers": lambda sums: sums.astype(np.float32),
    "none": lambda sums: None,
}


@pytest.mark.parametrize("value", [1e16, -1e16])
def test_sums_that_are_impossibly_large_are_refused_as_such(value: float) -> None:
    (rows,) = parts("labels", 1)
    asked = questions.losses(trees_of([rows]), 3)
    told = with_value(questions.answer(asked.arrays, rows, rows), (0, 0), value)
    with pytest.raises(questions.AnswerError, match="not finite, or impossibly large"):
        questions.read_answer(asked, {"sums": told}, ROWS)


@pytest.mark.parametrize(
    "told",
    [np.tile([-1.0, 5.0], (4, 1)), 5 + np.eye(4, 2), np.full((4, 2), np.nan), np.ones((3, 2))],
)
def test_impossible_losses_are_refused(told: Any) -> None:
    (rows,) = parts("labels", 1)
    asked = questions.losses(trees_of([rows]), 3)
    answer = questions.answer(asked.arrays, rows, rows)
    assert (questions.read_answer(asked, {"sums": answer}, ROWS) == answer).all()
    with pytest.raises(questions.AnswerError):
        questions.read_answer(asked, {"sums": told}, ROWS)


@pytest.mark.parametrize("place", [0, 1, -1, -2])
def test_rows_in_cells_that_no_number_is_in_are_refused(place: int) -> None:
    """Bins between NaN would have all other silos refuse the next question."""
    far = np.array([[-3e38, 3e38]] * 2, np.float32)
    asked = questions.cells(next(bins.agreed(2, 8)))
    told = questions.answer(asked.arrays, Rows(far, np.zeros((2, 1)), of_numbers))
    assert (questions.read_answer(asked, {"sums": told}, 2) == told).all()
    told[:] = 0
    told[place] = 2
    with pytest.raises(questions.AnswerError, match="no finite number"):
        questions.read_answer(asked, {"sums": told}, 2)


@pytest.mark.parametrize("lie", LIES)
def test_impossible_sums_are_refused(lie: str) -> None:
    (rows,) = parts("labels", 1)
    edges = tuple(np.array([0, 1], np.float32) for _ in range(COLUMNS))
    nodes = np.zeros((1, 2), np.int64)
    (asked,) = questions.levels(Level(Ensemble.empty(3, 1, 2, COLUMNS), 0, 0, nodes), edges)
    sums = questions.answer(asked.arrays, rows)
    assert (questions.read_answer(asked, {"sums": sums}, ROWS) == sums).all()
    told = LIES[lie](sums)
    with pytest.raises(questions.AnswerError):
        questions.read_answer(asked, {} if told is None else {"sums": told}, ROWS)
    exact = told is not None and told.dtype == sums.dtype and told.size == sums.size
    if exact and np.abs(told).max() < 1e15:
        with pytest.raises(questions.AnswerError):  # as the sum of a secure run
            questions.read_sum(asked, [HISTOGRAMS.encode(told.reshape(-1).astype(float))], ROWS)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("nodes", np.array([[0, 1]])),
        ("nodes", np.array([[1, 0]])),
        ("nodes", np.array([[0, 0], [0, 0]])),
        ("at", np.array([0, 2])),
        ("at", np.array([1, 0])),
        ("at", np.array([np.inf, 0.0])),
        ("edges", np.array([1, 0] * COLUMNS, np.float32)),
        ("edges", np.full(2 * COLUMNS, np.nan, np.float32)),
        ("sizes", np.full(COLUMNS, 3)),
        ("sizes", np.array([-2, 6, *[2] * (COLUMNS - 2)])),
        ("feature", np.full((1, 1, 3), COLUMNS, np.int32)),
        ("leaf", np.full((1, 1, 4), np.inf, np.float32)),
        ("leaf", np.zeros((1, 1, 5), np.float32)),
        ("gain", np.zeros(COLUMNS + 1, np.float32)),
        ("base", np.zeros(2, np.float32)),
        ("losses", np.array([2])),
    ],
)
def test_impossible_questions_are_refused(name: str, value: Any) -> None:
    (rows,) = parts("labels", 1)
    edges = tuple(np.array([0, 1], np.float32) for _ in range(COLUMNS))
    at = Level(Ensemble.empty(3, 1, 2, COLUMNS), 0, 0, np.zeros((1, 2), np.int64))
    asked = questions.levels(at, edges)[0].arrays
    with pytest.raises(questions.AnswerError):
        questions.answer({**asked, name: value}, rows)


# ---------------------------------------------------------------- in a federation


def answer(
    growing: Growing, rows: dict[str, Rows], held: Mapping[str, Rows] = MappingProxyType({})
) -> None:
    while not growing.over:
        answers = {
            name: questions.answer(growing.question_for(name).arrays, own, held.get(name))
            for name, own in rows.items()
        }
        updates = {
            name: Update(Silo(name, 1), {}, {}, ROWS, {}, extras={"sums": {"sums": sums}})
            for name, sums in answers.items()
        }
        growing.receive(updates, {}, {})


@pytest.mark.parametrize("kind", ["labels", "classes", "numbers"])
def test_as_many_trees_are_used_as_are_best_on_rows_held_out(kind: str) -> None:
    """With few rows and a high rate, some of twelve are. The others leave no trace."""
    few, rest = parts(kind, 6)[0], parts(kind, 6)[1]
    empty, settings = Ensemble.empty(12, few.targets.shape[1], 4, COLUMNS), Settings(rate=0.8)
    growing = Growing(settings, 32, ("a",), Grown(empty.arrays()).split_by(("a",)), 12, judged=12)
    answer(growing, {"a": few}, {"a": rest})
    own = growing.grown
    losses = rest.losses(grown([few], empty, settings, bins=32))[:, 0]
    assert own.whole and own.done == own.most == losses.argmin() and 0 < own.done < 12
    fewer = grown([few], empty, settings, bins=32, most=own.done)
    assert_equal_models(own.trees, fewer.arrays())
    assert growth.enough(own.done, Settings(), 60) == min(5 * own.done, 60)


@pytest.mark.parametrize("nodes", [None, 3])
def test_trees_that_split_by_silo_are_those_of_one_trainer_with_that_column(
    nodes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if no more than three nodes' histograms fit into an answer."""
    if nodes:
        monkeypatch.setattr(questions, "MOST", nodes * COLUMNS * 33 * 3)
    x, y = drawn(0)
    first = np.arange(ROWS) % 3 > 0
    y = np.where(first, y, ~y)[:, None].astype(float)
    rows = {name: Rows(x[own], y[own], of_labels) for name, own in (("a", first), ("b", ~first))}
    empty = Ensemble.empty(12, 1, 3, COLUMNS).arrays()
    split = Grown(empty).split_by(("a", "b"))
    growing = Growing(Settings(), 32, ("a", "b"), split, 12, judged=12)
    answer(growing, rows, rows)
    assert growing.grown.done == 12, "each silo judges its own side of the trees"
    numbered = np.hstack([x, first[:, None]]).astype(np.float32)
    wide = Ensemble.empty(12, 1, 3, COLUMNS + 1)
    pooled = grown([Rows(numbered, y, of_labels)], wide, Settings(), bins=32)
    assert (pooled.feature == COLUMNS).any()
    for name, own in (("a", first), ("b", ~first)):
        held = Ensemble.of(growing.grown.of(name))
        np.testing.assert_allclose(held.answers(x[own]), pooled.answers(numbered[own]), atol=1e-5)
    other = Ensemble.of(growing.grown.of("newcomer")).answers(x)
    assert np.abs(other - Ensemble.of(growing.grown.of("a")).answers(x)).mean() < 0.05, "most rows"


STUDY = declaration(*(f"x{i}" for i in range(COLUMNS)), network="trees-6x3")
KEYS: dict[str, Any] = {"strategy": "trees", "task": "study", "rounds": 3, "seed": 1}
FEW_BINS = KEYS | {"column-bins": 16}
"""So that silos answer three times as fast."""


@pytest.fixture
def nodes(tmp_path: Path) -> list[dict[str, Any]]:
    """Return four silos; two of them have labels that mean the opposite."""
    task = written(tmp_path / "study.toml", STUDY)
    found = []
    for seed, name in enumerate("abcd"):
        x, y = drawn(seed, 300)
        found.append(site(task, name, x, ill=np.where(y != (name in "cd"), "yes", "no")))
    return found


def test_groups_grow_their_own_trees_and_a_run_that_was_cut_ends_the_same(
    tmp_path: Path, nodes: list[dict[str, Any]]
) -> None:
    keys = {**FEW_BINS, "given-groups": "a,b;c,d"}
    whole = run(tmp_path / "whole", nodes, **keys)
    assert [tuple(group) for group in whole.rounds[-1].groups] == [("a", "b"), ("c", "d")]
    assert mean_error(whole) < 0.35
    page = write_report(str(tmp_path / "whole"))[0].read_text()
    inputs = re.findall(r'>group ([AB])</th><td role="cell">(input \d)</td>', page)
    assert dict(reversed(inputs)) == dict.fromkeys("AB", "input 6"), "the first of each group"
    together = run(tmp_path / "together", nodes, **FEW_BINS | {"seed": 2})
    assert mean_error(together) > 0.4
    ended = together.rounds[-2]
    assert ended.details["trees"] == {"*": 0}, "none helps on held-out rows"
    assert ended.round == 1 and ended.ended_early
    keys = {**FEW_BINS, "groups-of": "whole"}
    restart_silos()
    interrupted(tmp_path / "cut", CutGrid(nodes, (wire.EVALUATE_HISTOGRAMS, 2), 1), **keys)
    again = run(tmp_path / "cut", nodes, run_id=2, resume="cut", **FEW_BINS)
    assert_same_models(whole, again, "abcd")


@pytest.mark.nightly
def test_auto_finds_who_grows_trees_together_and_a_run_that_was_cut_ends_the_same(
    tmp_path: Path, nodes: list[dict[str, Any]]
) -> None:
    keys = {**KEYS, "strategy": "auto", "rounds": 6, "budget": 3.0, "seed": 3}
    whole = run(tmp_path / "whole", nodes, **keys)
    kinds = (("a", "b"), ("c", "d"))
    assert whole.rounds[-1].groups == kinds and mean_error(whole) < 0.35
    assert whole.rounds[-1].details["trees"] == {"a,b": 6, "c,d": 6}
    given = run(tmp_path / "given", nodes, **KEYS, **{"given-groups": "a,b;c,d"})
    (verdict,) = (r.details["verdict"] for r in whole.rounds if "verdict" in r.details)
    sources = [one["source"].split(",")[0] for one in verdict["candidates"]]
    assert {"everybody alone", "all together", "split by silo"} < set(sources)
    paired = next(c for c in verdict["candidates"] if "FedCollab" in c["source"])
    assert ["a", "b"] in paired["groups"] and paired["supported"]
    assert "clusters" in verdict["candidates"][verdict["winner"]]["source"]
    noise = {verdict["gains"][name]["noise"] for name in "abcd"}
    assert len(noise) == 4, "each silo states how sure its losses are"
    restart_silos()
    interrupted(tmp_path / "cut", CutGrid(nodes, (wire.EVALUATE_HISTOGRAMS, 3), 1), **keys)
    again = run(tmp_path / "cut", nodes, run_id=2, resume="cut", **keys)
    assert_same_models(whole, again, "abcd")
    assert_same_models(again, given, "abcd")  # all rows, and the run's own rate


def evaluated(result: RunResult, name: str) -> tuple[float, float, int]:
    """Return what a silo measured of its model after the last round."""
    return result.rounds[-1].evaluation[name]


@pytest.mark.nightly
def test_a_silo_that_loses_by_its_group_grows_its_own_trees_at_home(
    tmp_path: Path, nodes: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def losing(state: AutoState, winner: Candidate) -> dict[str, Gain]:
        gains = evidence.gains_of(state, winner)
        return {**gains, "d": replace(gains["d"], expected=-1.0, standard_error=0.1)}

    monkeypatch.setattr(decision, "gains_of", losing)
    keys = {**KEYS, "strategy": "auto", "rounds": 6, "budget": 3.0, "seed": 3}
    found = run(tmp_path / "auto", nodes, **keys)
    assert found.rounds[-1].details["trees"] == {"a,b": 6, "c,d": 6}
    without = run(tmp_path / "given", nodes, **KEYS, **{"given-groups": "a,b"})
    assert evaluated(found, "d") == evaluated(without, "d")
    grew = found.rounds[-1].details["trainings"]
    assert grew["d"] == grew["c"], "within the budget d also grows those of its group"
    given = run(tmp_path / "both", nodes, **KEYS, **{"given-groups": "a,b;c,d"})
    models = [{n: a.numpy() for n, a in r.models["c"].items()} for r in (found, given)]
    assert_equal_models(*models)


@pytest.mark.nightly
def test_a_newcomer_is_placed_by_its_losses_and_then_grows_all_its_trees(
    tmp_path: Path, nodes: list[dict[str, Any]]
) -> None:
    keys = {**KEYS, "strategy": "auto", "rounds": 9, "budget": 3.0, "min-silos": 3, "churn": "d+4"}
    found = run(tmp_path / "auto", nodes, **keys)
    (placed,) = (r.details["placed"]["d"] for r in found.rounds if "placed" in r.details)
    assert placed["group"] == ["a", "b"] and not placed["joins"]
    assert found.rounds[-1].groups == (("a", "b"), ("c",), ("d",))
    assert found.rounds[-1].details["trees"] == {"a,b": 6}
    alone = run(tmp_path / "given", nodes, **KEYS, **{"given-groups": "a,b"})
    assert evaluated(found, "d") == evaluated(alone, "d")


@pytest.mark.nightly
def test_auto_leaves_silos_alone_that_contradict_and_groups_the_others_of_one_that_lies(
    tmp_path: Path, nodes: list[dict[str, Any]]
) -> None:
    keys = {**KEYS, "strategy": "auto", "rounds": 6, "budget": 3.0}
    assert run(tmp_path / "two", nodes[1:3], **keys).rounds[-1].groups == (("b",), ("c",))

    def lying(silo: str, reply: Message) -> Message:
        if silo == "d" and "sums" in reply.content.array_records:
            lie = wire.decode_arrays(reply.content.array_records["sums"])["sums"] * 1.5
            reply.content["sums"] = wire.encode_arrays({"sums": lie}, packed=True)
        return reply

    found = run(tmp_path / "lying", Tap(nodes, change=lying), **keys)
    assert list(found.rounds[0].details["not-summed"]) == ["d"]
    assert ("a", "b") in found.rounds[-1].groups


@pytest.mark.parametrize(("strategy", "least"), [(Trees(), 5), (Auto(), 6)])
def test_too_few_rounds_for_all_trees_are_refused_before_the_first(
    strategy: Any, least: int
) -> None:
    """26 trees of depth 6 are a round, of all rows and on trial; auto looks, races a group of 20
    trees, and then grows 26 a round."""
    trees = Ensemble.empty(100, 1, 6, COLUMNS).arrays()
    strategy.check(trees, least)
    with pytest.raises(FederationError, match=f"Set rounds to at least {least}"):
        strategy.check(trees, least - 1)


@pytest.mark.parametrize("strategy", [Trees(), Auto()])
def test_histograms_that_are_too_large_for_an_answer_are_asked_in_parts(strategy: Any) -> None:
    """Of 300 columns, 136 nodes are an answer: the last level of ten classes is three."""
    wide = Ensemble.empty(100, 10, 6, 300).arrays()
    assert strategy.exchanges(wide) == 1 + 1 + 1 + 1 + 2 + 3
    with pytest.raises(FederationError, match="Set rounds to at least"):
        strategy.check(wide, 7)
    for outputs, columns in ((200, 300), (1, 50_000)):
        with pytest.raises(FederationError, match=f"of {columns} columns, 64 .* too large"):
            strategy.check(Ensemble.empty(100, outputs, 6, columns).arrays(), 1000)


def test_a_silo_that_lies_is_left_out_and_the_others_grow_the_trees_without_it(
    tmp_path: Path, nodes: list[dict[str, Any]]
) -> None:
    def lying(silo: str, reply: Message) -> Message:
        if silo == "d" and "sums" in reply.content.array_records:
            lie = wire.encode_arrays({"sums": np.full((1, 3), -1.0)}, packed=True)
            reply.content["sums"] = lie
        return reply

    found = run(tmp_path / "lying", Tap(nodes, change=lying), **FEW_BINS)
    assert list(found.rounds[0].details["not-summed"]) == ["d"]
    without = run(tmp_path / "without", nodes, **FEW_BINS, **{"given-groups": "a,b,c;d"})
    models = [{n: a.numpy() for n, a in r.models["a"].items()} for r in (found, without)]
    assert_equal_models(*models)


def test_secure_runs_grow_the_same_trees_also_when_a_silo_and_its_block_are_lost(
    tmp_path: Path, nodes: list[dict[str, Any]]
) -> None:
    restart_silos()
    keys = {**FEW_BINS, "given-groups": "a,b;c,d"}
    plain = run(tmp_path / "plain", nodes, **keys)
    secret = [node | {"secure": "required"} for node in nodes]
    grid = Tap(secret)
    secure = run(tmp_path / "secure", grid, **keys, secure=True)
    got = [m for m in grid.got if m.metadata.message_type == wire.EVALUATE_HISTOGRAMS]
    assert {name for m in got for name in m.content.array_records} == {wire.MASKED}
    asked = {"count": 0}

    def change(silo: str, reply: Message) -> Message:
        if silo == "d" and wire.MASKED in reply.content:
            asked["count"] += 1
            if asked["count"] > 9:
                del reply.content[wire.MASKED]
        return reply

    enough = {"a,b": 6, "c,d": 6}
    assert secure.rounds[-1].details["trees-enough"] == enough
    lost = run(tmp_path / "lost", Tap(secret, change=change), **FEW_BINS, secure=True)
    left_out = lost.rounds[0].details["not-summed"]
    assert "uint32" in left_out.pop("d") and "waits" in left_out.pop("c") and not left_out
    for name, result in [*((name, secure) for name in "abcd"), ("a", lost)]:
        for key, array in result.models[name].items():
            same = plain.models[name][key].numpy()
            np.testing.assert_allclose(array.numpy(), same, rtol=1e-6, err_msg=key)


@pytest.mark.parametrize("secure", [False, True])
def test_silos_alone_grow_their_trees_at_home_and_send_nothing_of_them(
    tmp_path: Path, nodes: list[dict[str, Any]], secure: bool
) -> None:
    homes = [node | {"home": str(tmp_path / node["name"])} for node in nodes]
    grid = Tap(homes)
    found = run(tmp_path / "run", grid, **FEW_BINS, **{"given-groups": "each"}, secure=secure)
    assert not [m for m in grid.sent if m.metadata.message_type == wire.EVALUATE_HISTOGRAMS]
    assert not any(own.leaf.any() or own.base.any() for own in sent_trees(grid))
    kept = {name: load_file(*(tmp_path / name / "models").glob("*.safetensors")) for name in "abcd"}
    some = {name for name, arrays in kept.items() if (arrays["feature"] >= 0).any()}
    assert len(some) > 1 and mean_error(found) < 0.45, "others lose by any tree, as a trial says"
    assert all(arrays["base"].any() for arrays in kept.values())


def sent_trees(grid: Tap) -> list[Ensemble]:
    """Return all trees that silos sent."""
    records = [record for m in grid.got for record in wire.array_records(m.content).values()]
    arrays = [wire.decode_arrays(record) for record in records]
    return [Ensemble.of(own) for own in arrays if "leaf" in own]


def test_no_sums_leave_over_rows_that_differ_by_few_from_those_of_an_earlier_run(
    tmp_path: Path, nodes: list[dict[str, Any]]
) -> None:
    nodes = [node | {"home": str(tmp_path / f"home-{node['name']}")} for node in nodes]
    for number in (1, 2):
        found = run(tmp_path / f"run-{number}", nodes, **FEW_BINS, validation=0.2)
        assert "not-summed" not in found.rounds[0].details
        restart_silos()
    head, *lines = (tmp_path / "a.csv").read_text().split("\n")
    lines[:3] = [line.replace(line.split(",")[0], "0.5", 1) for line in lines[:3]]
    (tmp_path / "a.csv").write_text("\n".join([head, *lines]))
    found = run(tmp_path / "changed", nodes, **FEW_BINS, validation=0.2)
    assert "fewer than 10" in found.rounds[0].details["not-summed"]["a"]
    assert list(found.rounds[0].details["not-summed"]) == ["a"]


@pytest.mark.parametrize(
    ("own", "rows"), [({"share-metrics": "error"}, 301), ({}, 41)], ids=["no losses", "few rows"]
)
def test_silos_that_tell_no_losses_grow_all_trees(
    tmp_path: Path, nodes: list[dict[str, Any]], own: dict[str, Any], rows: int
) -> None:
    """Of 32 training rows, 6 would be held out: fewer than a sum may be over."""
    for name in "bc":
        file = tmp_path / f"{name}.csv"
        file.write_text("\n".join(file.read_text().split("\n")[:rows]))
    found = run(tmp_path / "run", [node | own for node in nodes[1:3]], **FEW_BINS)
    assert found.rounds[0].details["trees-enough"] == {"*": 6}
    assert found.rounds[-1].details["trees"] == {"*": 6}
    assert all("not-summed" not in one.details for one in found.rounds)


@pytest.mark.parametrize(
    ("own", "why"),
    [
        ({"sums": "regression"}, "sends no sums for trees"),
        ({"secure": "required"}, "only in secure runs"),
    ],
)
def test_a_silo_sends_histograms_only_if_it_says_so(
    nodes: list[dict[str, Any]], own: dict[str, Any], why: str
) -> None:
    entries = {"task": "study", "run": "r", "strategy": "trees", "round": 1, "group_size": 2}
    model = {"base": np.zeros(1, np.float32)}
    for kind in (wire.DESCRIBE, wire.EVALUATE_HISTOGRAMS):
        reply = ask(kind, nodes[0] | own, model=model, **entries)
        assert reply.has_error() and why in reply.error.reason


def test_a_silo_answers_from_the_rows_of_this_message_and_not_of_an_earlier_one(
    tmp_path: Path, nodes: list[dict[str, Any]]
) -> None:
    """Otherwise two runs that ask the same of a group would differ by rows of one silo."""
    own = nodes[0] | {"home": str(tmp_path / "home")}
    arrays = Ensemble.empty(1, 1, 1, COLUMNS).arrays(1) | {
        "edges": np.array([0.0], np.float32),
        "sizes": np.array([1, *[0] * (COLUMNS - 1)]),
        "at": np.array([0, 0]),
        "nodes": np.array([[0, 0]]),
    }

    def rows(run_name: str, **more: Any) -> float:
        entries = {"task": "study", "strategy": "trees", "round": 1, "group_size": 2, "seed": 1}
        records = {wire.ARRAYS: wire.encode_arrays(arrays, packed=True)}
        answer = ask(
            wire.EVALUATE_HISTOGRAMS, own, records=records, run=run_name, **entries, **more
        )
        assert not answer.has_error(), answer.error.reason
        (record,) = wire.array_records(answer.content).values()
        (found,) = wire.decode_arrays(record).values()
        return float(found.reshape(-1, 3)[:2, 2].sum())

    whole = rows("first")
    assert 0.4 * whole < rows("second", validation=0.5) < 0.6 * whole
    assert rows("second") == whole


def test_the_network_answers_as_the_trees_do_and_a_silo_hears_what_they_are_worth(
    tmp_path: Path, nodes: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", logger="coterie.silo"):
        model = run(tmp_path / "run", nodes[:2], **FEW_BINS).models["a"]
    assert caplog.text.count("on 60 test samples the loss of the group's trees is ") == 2
    arrays = {name: array.numpy() for name, array in model.items()}
    x, _ = drawn(9)
    network = load_declared(tmp_path / "study.toml").model()
    network.load_state_dict({n: torch.from_numpy(np.array(a)) for n, a in arrays.items()})
    with torch.no_grad():
        logits = network(torch.from_numpy(x)).numpy()
    trees = Ensemble.of(arrays)
    assert not logits[:, 0].any() and np.ptp(logits[:, 1]) > 0.5
    np.testing.assert_allclose(logits[:, 1], trees.answers(x)[:, 0], atol=1e-6)
    assert trees.gain.argmax() == 5


def test_silos_that_only_test_or_have_no_labels_get_trees_and_send_no_sums(
    tmp_path: Path, nodes: list[dict[str, Any]]
) -> None:
    """Values are missing in their rows, too, and in those that trees are then asked about."""
    table = Path(nodes[3]["data.data"])
    without = table.with_name("new.csv")
    without.write_text("\n".join(row.rpartition(",")[0] for row in table.read_text().split()))
    more = {"home": str(tmp_path / "home"), "sums": ""}
    nodes[2] |= {"role": "evaluate", "sums": ""}
    nodes[3] = {n: v for n, v in nodes[3].items() if n != "data.data"} | more
    nodes[3]["unlabelled"] = str(without)
    found = run(tmp_path / "run", nodes, **FEW_BINS, **{"min-silos": 2})
    details = found.rounds[-1].details
    assert details["testing"]["c"]["group"] == details["unlabelled"]["d"]["group"] == ["a", "b"]
    (kept,) = (tmp_path / "home" / "models").glob("*.safetensors")
    answers = predict(kept, without, options={}, source=nodes[0]["task"]).values
    trees = {name: array.numpy() for name, array in found.models["a"].items()}
    x, _ = drawn(3, 300)
    chances = 1 / (1 + np.exp(-Ensemble.of(trees).answers(x)[:, 0]))
    np.testing.assert_allclose(answers[:, 1], chances, atol=1e-5)


@pytest.mark.nightly
def test_kept_trees_are_exported_and_take_missing_values(
    tmp_path: Path, nodes: list[dict[str, Any]]
) -> None:
    homes = [node | {"home": str(tmp_path / node["name"])} for node in nodes[:2]]
    run(tmp_path / "run", homes, **KEYS)
    file = tmp_path / "trees.onnx"
    data = Path(nodes[0]["data.data"])
    create(tmp_path / "a", name="a", task=str(tmp_path / "study.toml"), data=data)
    assert silo(["export", "--home", str(tmp_path / "a"), "--output", str(file)]) == 0
    x, _ = drawn(9)
    (answers,) = onnxruntime.InferenceSession(file).run(None, {"x": x})
    (kept,) = (tmp_path / "a" / "models").glob("*.safetensors")
    assert "| x5 | 0." in kept.with_suffix(".md").read_text()
    trees = Ensemble.of(load_file(kept))
    np.testing.assert_allclose(answers[:, 1], 1 / (1 + np.exp(-trees.answers(x)[:, 0])), atol=1e-5)


GOOD = '{"rate": 0.1, "penalty": 1.0, "min_rows": 20, "min_second": 0.001, "bins": 64}'


@pytest.mark.parametrize(
    ("how", "why"),
    [
        ("trees", "at-home must be JSON. Got 'trees'"),
        (GOOD.replace("0.1,", "2,"), "at-home is wrong: rate: input should be less than"),
        (GOOD.replace("64", "1e9"), "bins"),
        (GOOD.replace("20", "NaN"), "min_rows"),
        (GOOD.replace("}", ', "rows": 3}'), "unknown key 'rows'"),
        ("[" * 5000, "at-home"),
        (GOOD, 'does not have network = "trees"'),
    ],
)
def test_a_silo_refuses_impossible_trees_of_its_rows(
    how: str, why: str, nodes: list[dict[str, Any]], tmp_path: Path
) -> None:
    file = tmp_path / "study.toml"
    if how == GOOD:
        file.write_text(STUDY.replace("trees-6x3", "mclr"))
    model = {n: a.numpy() for n, a in load_declared(file).model().state_dict().items()}
    entries = {"task": "study", "run": "r", "rounds": 3, "at-home": how}
    reply = ask(wire.EVALUATE, nodes[0], model=model, **entries, **{"server-round": 1})
    assert reply.has_error() and why in reply.error.reason, reply.error.reason
