"""Real targets are scaled for the training alone: every figure and answer is in their unit."""

from __future__ import annotations

import csv
import io
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coterie import wire
from coterie.client.cli.answers import write_csv
from coterie.client.cli.check import check
from coterie.client.cli.export import export
from coterie.client.cli.predict import Kept, answer, find_model, load_kept
from coterie.client.cli.report import build_page, read_silo
from coterie.client.home.settings import SiloSettings
from coterie.client.ledger import read
from coterie.client.work.card import read_card, write_card
from coterie.client.work.measure import evaluate_in_full
from coterie.client.work.session import open_session
from coterie.client.work.sgd import TrainPlan, train
from coterie.client.work.weights import read_weights
from coterie.features.statistics.columns import in_scale
from coterie.tasks import TaskError, load_task
from coterie.tasks.problems import Numbers
from tests.conftest import assert_equal_models
from tests.kit import run

TABLE = """
kind = "table"
name = "stay"
numeric = ["a", "b"]
network = "mlp-64"
target = {kind = "number", columns = ["cost"], unit = "EUR"}
"""
ARRAYS = """
kind = "npz"
name = "stay"
network = "mlp-64"
shape = [2]
target = {kind = "number", count = 2, unit = "EUR"}
"""
MEANS = {"x": 20_000.0, "y": 2_000_000.0, "z": -3.0}
SLOPES = {"x": 5_000.0, "y": 400_000.0, "z": 0.01}


def samples(seed: int, mean: float, slope: float, count: int = 300) -> tuple[Any, Any]:
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(count, 2))
    return x, mean + slope * x[:, 0] + 0.1 * slope * draw.normal(size=count)


def silos(folder: Path, declared: str = TABLE, **of: tuple[float, float]) -> list[dict[str, Any]]:
    """Node settings of a silo for each name, whose target has this mean and slope."""
    (folder / "stay.toml").write_text(declared)
    for seed, (name, (mean, slope)) in enumerate(of.items()):
        x, y = samples(seed, mean, slope)
        lines = [f"{a!r},{b!r},{cost!r}" for (a, b), cost in zip(x.tolist(), y.tolist())]  # noqa: B905
        (folder / f"{name}.csv").write_text("\n".join(["a,b,cost", *lines]))
        y = np.stack([y, 2 * y], axis=1).astype(np.float32)
        np.savez(folder / f"{name}.npz", x=x.astype(np.float32), y=y)
    suffix = "csv" if declared.lstrip().startswith('kind = "table"') else "npz"
    return [
        {
            **{"name": name, "task": str(folder / "stay.toml"), "threads": 1, "device": "cpu"},
            **{"data.data": str(folder / f"{name}.{suffix}"), "home": str(folder / name)},
        }
        for name in of
    ]


def play(folder: Path, nodes: list[dict[str, Any]], **keys: Any) -> Any:
    return run(folder / "run", nodes, **({"task": "stay", "rounds": 5} | keys))


def r2(folder: Path, name: str) -> float:
    return float(read_card(find_model(folder / name, "")).figures["r2"][0])


def test_costs_are_learned_with_the_defaults_and_answered_in_euros(tmp_path: Path) -> None:
    nodes = silos(tmp_path, **dict.fromkeys("xyz", (20_000, 5_000)))
    play(tmp_path, nodes)
    for name in "xyz":
        card = read_card(find_model(tmp_path / name, ""))
        assert card.figures["r2"][0] > 0.5
        assert 100 < card.test_error < 3_000, "the MAE is in euros"
        assert card.trivial["mae"] > 3_000
    answers = answer(load_kept(find_model(tmp_path / "x", "")), None, options=options(nodes[0]))
    assert answers.labels is not None
    assert 15_000 < answers.values.mean() < 25_000 and 15_000 < answers.labels.mean() < 25_000
    text = io.StringIO()
    write_csv(answers, text)
    row = next(csv.DictReader(io.StringIO(text.getvalue())))
    assert float(row["cost"]) == pytest.approx(float(answers.values[0, 0]), rel=1e-4)


def test_silos_whose_targets_are_far_apart_learn_together(tmp_path: Path) -> None:
    play(tmp_path, silos(tmp_path, **{n: (MEANS[n], SLOPES[n]) for n in "xyz"}))
    assert min(r2(tmp_path, name) for name in "xyz") > 0.5


def test_arrays_with_several_targets_are_learned_likewise(tmp_path: Path) -> None:
    nodes = silos(tmp_path, ARRAYS, x=(20_000, 5_000), y=(1_000, 5))
    play(tmp_path, nodes)
    assert min(r2(tmp_path, name) for name in "xy") > 0.5
    kept = load_kept(find_model(tmp_path / "y", ""))
    values = answers_of(kept, nodes[1])
    np.testing.assert_allclose(values.mean(axis=0), [1_000, 2_000], rtol=0.01)


def _ask(file: Path, x: torch.Tensor) -> Any:
    if file.suffix == ".pt2":
        return torch.export.load(file).module()(x).detach().numpy()
    runtime = pytest.importorskip("onnxruntime")
    return runtime.InferenceSession(file.read_bytes()).run(None, {"x": x.numpy()})[0]


def answers_of(kept: Kept, node: dict[str, Any]) -> Any:
    """For the silo's own test data."""
    return answer(kept, None, options=options(node)).values


def options(node: dict[str, Any]) -> dict[str, Any]:
    return {"data": node["data.data"]}


def settings(node: dict[str, Any]) -> SiloSettings:
    return SiloSettings.from_node_config(node, node_id=1)


@pytest.mark.xdist_group("test_export")
@pytest.mark.parametrize(("declared", "suffix"), [
    (TABLE, "pt2"), pytest.param(ARRAYS, "pt2", marks=pytest.mark.nightly), (TABLE, "onnx"),
])  # fmt: skip
def test_an_exported_file_answers_in_the_unit_and_its_card_says_how(
    declared: str, suffix: str, tmp_path: Path
) -> None:
    if suffix == "onnx":
        pytest.importorskip("onnxscript")
    nodes = silos(tmp_path, declared, x=(20_000, 5_000), y=(20_000, 5_000))
    play(tmp_path, nodes, rounds=2)
    kept = load_kept(find_model(tmp_path / "x", ""))
    place = tmp_path / "out" / f"model.{suffix}"
    written = export(kept, place, options=options(nodes[0]))
    session = open_session(settings(nodes[0]))
    x, said = session.data.test.at(torch.arange(60))[0], answers_of(kept, nodes[0])
    np.testing.assert_allclose(_ask(place, x), said, rtol=1e-4)
    assert said.mean() > 10_000 and written.own
    targets = kept.task.prepared({})["targets"]
    mean, deviation = (targets[0][key] for key in ("mean", "deviation"))
    assert 18_000 < mean < 22_000 and 4_000 < deviation < 6_000
    assert "| target | mean | deviation |" in written.files[2].read_text()


def test_a_pooled_scale_has_the_targets_of_those_that_allow_it(tmp_path: Path) -> None:
    declared = TABLE + 'scale = "federation"\n'
    nodes = silos(tmp_path, declared, x=(20_000, 5_000), y=(22_000, 5_000))
    play(tmp_path, [node | {"column-sums": True} for node in nodes])
    scales = [read_card(find_model(tmp_path / name, "")).scale for name in "xy"]
    assert scales[0] == scales[1] and scales[0] is not None
    assert scales[0][2][0] == pytest.approx(21_000, rel=0.03)
    assert min(r2(tmp_path, name) for name in "xy") > 0.5
    (reported,) = [
        e["values"]["metrics"] for e in read(tmp_path / "x") if e["type"] == wire.COLUMN_SUMS
    ]
    assert reported["column-means"][2] == pytest.approx(20_000, rel=0.05)


def test_arrays_may_have_targets_of_one_scale_too(tmp_path: Path) -> None:
    declared = ARRAYS.replace('"EUR"', '"EUR", scale = "federation"')
    nodes = silos(tmp_path, declared, x=(20_000, 5_000), y=(21_000, 5_000))
    play(tmp_path, [node | {"column-sums": True} for node in nodes])
    scales = [read_card(find_model(tmp_path / name, "")).scale for name in "xy"]
    assert scales[0] == scales[1] and min(r2(tmp_path, name) for name in "xy") > 0.5


def test_an_update_does_not_show_the_mean_or_the_unit_of_the_targets(tmp_path: Path) -> None:
    trained = []
    for number, factor in enumerate((1.0, 1024.0)):  # of two, so that scaling rounds nothing
        folder = tmp_path / str(number)
        folder.mkdir()
        (node,) = silos(folder, x=(4 * factor, factor))
        session = open_session(settings(node))
        train(session.task, session.model, session.data.train, TrainPlan(1, 16, 0.01), seed=0)
        trained.append(read_weights(session.model))
    assert_equal_models(*trained)


def test_a_target_that_is_always_the_same_is_only_shifted(tmp_path: Path) -> None:
    (node,) = silos(tmp_path, x=(7.0, 0.0))
    session = open_session(settings(node))
    assert session.scale is not None and list(session.scale[2]) == [7.0, 1.0]
    found = evaluate_in_full(session.task, session.model, session.data)
    assert found.figures["mae"].value < 3 and "r2" not in found.figures


def test_a_model_kept_before_targets_were_scaled_answers_as_it_was_trained(tmp_path: Path) -> None:
    nodes = silos(tmp_path, x=(20_000, 5_000), y=(20_000, 5_000))
    play(tmp_path, nodes, rounds=1)
    file = find_model(tmp_path / "x", "")
    card, kept = read_card(file), load_kept(file)
    assert card.scale is not None
    weights = {n: t.numpy().copy() for n, t in kept.model.state_dict().items()}
    write_card(file, type(card)(**{**card.__dict__, "scale": card.scale[:2]}), weights)
    earlier = load_kept(file)
    assert isinstance(earlier.task.problem, Numbers) and not earlier.task.problem.scale
    values = answers_of(earlier, nodes[0])
    assert np.abs(values).max() < 100


@pytest.mark.parametrize("declared", [TABLE, ARRAYS])
def test_a_silo_without_labels_needs_the_scale_of_the_others(declared: str, tmp_path: Path) -> None:
    (node,) = silos(tmp_path, declared, x=(20_000, 5_000))
    place = node.pop("data.data")
    with pytest.raises(TaskError, match="would have no unit"):
        open_session(settings(node | {"unlabelled": place}))


def test_a_silo_without_labels_answers_in_the_unit_of_the_run(tmp_path: Path) -> None:
    (node,) = silos(tmp_path, TABLE + 'scale = "federation"\n', x=(20_000, 5_000))
    place = node.pop("data.data")
    session = open_session(settings(node | {"unlabelled": place}))
    assert session.schema == open_session(settings(node | {"data.data": place})).schema
    scaled = in_scale(session, [0.0, 1.0, 0.0, 1.0, 20_000.0, 5_000.0])
    assert torch.equal(scaled.task.problem.answers(torch.ones(1, 1)), torch.tensor([[25_000.0]]))


def test_the_best_constant_is_that_of_its_metric() -> None:
    """A median for the MAE, a mean for RMSE and R²."""
    training, y = np.array([[0.0], [0.0], [9.0]]), np.zeros((2, 1))
    problem = Numbers(1)
    for metric, best in (("mae", 0.0), ("rmse", 3.0), ("r2", 3.0)):
        found = problem.trivial(training, (y, y), metric)
        assert found is not None and found[0].tolist() == [[best], [best]]


def test_a_task_of_ones_own_sees_its_targets_as_they_are() -> None:
    task = load_task("digits")
    assert task.scaled_targets == 0 and task.of_scale([[1.0, 2.0]]) is task


def test_a_check_shows_the_unit_as_people_read_it(tmp_path: Path) -> None:
    (node,) = silos(tmp_path, x=(20_000, 5_000))
    lines = "\n".join(check(settings(node)))
    assert re.search(r"mean (19,\d00|20,\d00) ± [45],\d\d0 EUR", lines)
    assert re.search(r"MAE on own test data \d,\d\d0 EUR before, \d,\d\d0 EUR after", lines)
    assert "e+" not in lines


def test_a_silo_s_report_is_in_the_unit(tmp_path: Path) -> None:
    play(tmp_path, silos(tmp_path, **dict.fromkeys("xy", (20_000, 5_000))), rounds=2)
    page = build_page(read_silo(tmp_path / "x"), tmp_path / "x")
    assert re.search(r"has MAE [\d,]{3,5} EUR on this silo's test data", page.lead)
    assert "%" not in page.lead and page.figures["MAE now"].endswith(" EUR")
    assert page.pictures[0].title == "MAE"


def test_a_training_with_differential_privacy_sees_scaled_targets() -> None:
    """Per sample, and all at once."""
    problem = Numbers(2, "EUR", ((20_000.0, 5_000.0), (3.0, 1.0)))
    outputs, targets = torch.zeros(4, 2), torch.tensor([[25_000.0, 3.0]]).repeat(4, 1)
    each = torch.func.vmap(problem.loss)(outputs[:, None], targets[:, None])
    assert each.tolist() == [0.5] * 4 and float(problem.loss(outputs, targets)) == 0.5
