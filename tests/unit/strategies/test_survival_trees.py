"""Trees for survival: Cox's loss inside each silo, and the trees of one trainer that stratifies."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import xgboost
from numpy.typing import NDArray

from coterie.client.cli.predict import predict
from coterie.client.home.folder import create
from coterie.client.work.data import Data, Held
from coterie.client.work.figures import of_survival as figures_of_survival
from coterie.features.sums.trees.ensemble import Ensemble
from coterie.features.sums.trees.growth import Settings
from coterie.features.sums.trees.histograms import Rows
from coterie.features.sums.trees.silo import rows_of
from coterie.features.sums.trees.survival import losses_of_survival, of_survival
from coterie.features.sums.trees.together import grown
from coterie.server.report.command import build_story, write_report
from coterie.server.report.page import build_page, make_pictures
from coterie.server.runs.record import read_run
from coterie.strategies.errors import FederationError
from coterie.tasks.base import TaskError
from coterie.tasks.problems import Masks, Survival
from coterie.tasks.trees import named
from tests.commands import coterie
from tests.conftest import silo
from tests.kit import mean_error, restart_silos, run
from tests.tables import site, written

COLUMNS = 4
Array = NDArray[Any]


def drawn(seed: int, count: int = 300, *, opposite: bool = False) -> tuple[Array, Array]:
    """Return x (n, 4) with missing values, and times of which many are equal, with events (n, 2).

    Each silo has another baseline hazard.
    """
    draw = np.random.default_rng(seed)
    x = draw.normal(size=(count, COLUMNS)).astype(np.float32)
    risk = (1.5 * x[:, 0] * x[:, 1] + np.sin(3 * x[:, 2])) * (-1 if opposite else 1)
    until, censored = draw.exponential(np.exp(-risk)) / (1 + seed % 3), draw.exponential(2, count)
    time = np.ceil(10 * np.minimum(until, censored))
    x[draw.random(x.shape) < 0.1] = np.nan
    return x, np.stack([time, until <= censored], axis=1)


def concordance(trees: Ensemble, x: Array, y: Array) -> float:
    risks = trees.answers(x)[:, 0]
    return float(figures_of_survival(risks, *y.T, np.ones((1, len(y))))["concordance"][0])


# ---------------------------------------------------------------- the loss


def test_derivatives_are_those_of_the_loss_of_networks() -> None:
    """Also of large answers; second derivatives by finite differences."""
    _, y = drawn(0, 40)
    answers = np.random.default_rng(1).normal(size=(40, 1)) * 3
    first, second = of_survival(answers, y)
    outputs = torch.tensor(answers, requires_grad=True)
    events = float(y[:, 1].sum())
    (Survival().loss(outputs, torch.tensor(y)) * events).backward()
    assert outputs.grad is not None
    assert first == pytest.approx(outputs.grad.numpy(), abs=1e-10)
    assert losses_of_survival(answers, y).sum() == pytest.approx(
        events * float(Survival().loss(outputs.detach(), torch.tensor(y)))
    )
    for row in range(40):
        step = np.zeros((40, 1))
        step[row] = 1e-4
        after, _ = of_survival(answers + step, y)
        before, _ = of_survival(answers - step, y)
        slope = (after - before)[row, 0] / 2e-4
        assert second[row, 0] == pytest.approx(slope, abs=1e-6), row
    for far in (1e15 * np.sign(answers), answers + 1e6, answers * 400):
        for found in of_survival(far, y):
            assert np.isfinite(found).all()
        assert (of_survival(far, y)[1] >= 0).all() and (losses_of_survival(far, y) >= 0).all()


def stratified(parts: list[tuple[Array, Array]]) -> Rows:
    """Return one trainer's rows, whose derivatives compare a row with its own part's, one by one.

    Their targets are their numbers."""
    y, stratum = np.concatenate([y for _, y in parts]), np.repeat(*_lengths(parts))

    def naive(answers: Array, targets: Array) -> tuple[Array, Array]:
        assert (targets[:, 0] == np.arange(len(y))).all()
        first, second = -y[:, 1:].astype(np.float64), np.zeros((len(y), 1))
        for time, own in {(t, s) for (t, e), s in zip(y.tolist(), stratum, strict=True) if e}:
            at_risk = (y[:, 0] >= time) & (stratum == own)
            tied = ((y[:, 0] == time) & (y[:, 1] == 1) & (stratum == own)).sum()
            shares = np.where(at_risk, np.exp(answers[:, 0]), 0)
            shares /= shares.sum()
            first[:, 0] += tied * shares
            second[:, 0] += tied * shares * (1 - shares)
        return first, second

    return Rows(
        np.concatenate([x for x, _ in parts]), np.arange(len(y), dtype=float)[:, None], naive
    )


def _lengths(parts: list[tuple[Array, Array]]) -> tuple[list[int], list[int]]:
    return list(range(len(parts))), [len(x) for x, _ in parts]


def test_many_silos_grow_the_trees_of_one_trainer_that_stratifies() -> None:
    """One of them is a silo without events: its rows count, and say nothing."""
    parts = [drawn(seed, 150) for seed in range(4)]
    parts[3][1][:, 1] = 0
    empty = Ensemble.empty(8, 1, 3, COLUMNS)
    many = grown([Rows(x, y, of_survival) for x, y in parts], empty, Settings(), bins=32)
    one = grown([stratified(parts)], empty, Settings(), bins=32)
    x, _ = drawn(9)
    assert many.base == 0 and np.ptp(many.answers(x)) > 0.5
    np.testing.assert_allclose(many.answers(x), one.answers(x), rtol=0, atol=1e-6)
    assert (many.feature == one.feature).all()
    pooled = [Rows(*map(np.concatenate, zip(*parts[:3], strict=True)), of_survival)]
    assert (grown(pooled, empty, Settings(), bins=32).feature != one.feature).any()
    silent = Rows(*parts[3], of_survival)
    assert not silent.losses(many).any()
    assert Rows(*parts[0], of_survival).losses(many)[0, 1] == 150


def test_trees_are_as_good_as_those_of_a_known_library() -> None:
    x, y = drawn(0, 2000)
    rows = Rows(x, y, of_survival)
    settings = Settings(min_rows=1, min_second=1)
    own = grown([rows], Ensemble.empty(60, 1, 4, COLUMNS), settings, bins=64)
    known = {"objective": "survival:cox", "eta": 0.1, "max_depth": 4, "max_bin": 64, "lambda": 1}
    labels = np.where(y[:, 1] == 1, y[:, 0], -y[:, 0])
    theirs = xgboost.train(known, xgboost.DMatrix(x, label=labels), 60)
    test, truth = drawn(3, 2000)  # with the same baseline hazard
    margins = theirs.predict(xgboost.DMatrix(test), output_margin=True)
    index = figures_of_survival(margins, *truth.T, np.ones((1, len(truth))))["concordance"][0]
    assert concordance(own, test, truth) > index - 0.005 and index > 0.7


def test_events_count_if_enough_rows_or_persons_are_under_observation() -> None:
    x, y = np.zeros((40, 1), np.float32), np.stack([np.arange(40.0), np.ones(40)], axis=1)
    persons = np.minimum(np.arange(40), 25)  # the last 15 rows are of one
    for whose, counted in ((None, 31), (persons, 17)):
        part = Held(torch.from_numpy(x), torch.tensor(y, dtype=torch.float32), whose)
        session: Any = SimpleNamespace(task=SimpleNamespace(problem=Survival()))
        rows = rows_of(session, Data(part, part), 10)
        assert rows.targets[:, 1].tolist() == [1.0] * counted + [0.0] * (40 - counted)


def test_trees_for_masks_are_refused() -> None:
    with pytest.raises(TaskError, match=r"targets and survival\. Got a target of kind mask"):
        named("trees", shape=(4,), problem=Masks(2))


# ---------------------------------------------------------------- in a federation

STUDY = f"""
kind = "table"
name = "relapse"
target = {{kind = "survival", time = "days", event = "died"}}
numeric = [{", ".join(f'"x{i}"' for i in range(COLUMNS))}]
network = "trees-6x3"
"""
KEYS: dict[str, Any] = {"strategy": "trees", "task": "relapse", "rounds": 3, "seed": 1}


@pytest.fixture
def nodes(tmp_path: Path) -> list[dict[str, Any]]:
    """Return four silos; in two of them a high risk means a low one in the others."""
    task = written(tmp_path / "relapse.toml", STUDY)
    found = []
    for seed, name in enumerate("abcd"):
        x, y = drawn(seed, 400, opposite=name in "cd")
        found.append(site(task, name, x, days=y[:, 0], died=y[:, 1].astype(int)))
    return found


def test_groups_grow_trees_that_silos_use_export_and_compare_also_by_masked_sums(
    tmp_path: Path, nodes: list[dict[str, Any]], caplog: pytest.LogCaptureFixture
) -> None:
    keys = {**KEYS, "given-groups": "a,b;c,d"}
    homes = [{**node, "home": str(tmp_path / node["name"])} for node in nodes]
    with caplog.at_level("INFO", logger="coterie.silo"):
        found = run(tmp_path / "groups", homes, **keys)
    assert caplog.text.count("samples the loss of the group's trees is ") == 4
    assert found.rounds[-1].details["trees"] == {"a,b": 6, "c,d": 6}
    assert mean_error(found) < 0.42 < 0.46 < mean_error(run(tmp_path / "all", nodes, **KEYS))
    arrays = {name: array.numpy() for name, array in found.models["a"].items()}
    x, _ = drawn(9)
    risks = Ensemble.of(arrays).answers(x)[:, 0]
    (kept,) = (tmp_path / "a" / "models").glob("*.safetensors")
    rows = tmp_path / "new.csv"
    table = [",".join("" if v != v else str(v) for v in row) for row in x.tolist()]
    rows.write_text("\n".join([",".join(f"x{i}" for i in range(COLUMNS)), *table]))
    answers = predict(kept, rows, options={}, source=nodes[0]["task"]).values
    np.testing.assert_allclose(answers.reshape(-1), risks, atol=1e-5)
    data = Path(nodes[0]["data.data"])
    create(tmp_path / "a", name="a", task=nodes[0]["task"], data=data)
    file = tmp_path / "trees.json"
    assert silo(["export", "--home", str(tmp_path / "a"), "--output", str(file)]) == 0
    booster = xgboost.Booster(model_file=file)
    np.testing.assert_allclose(booster.predict(xgboost.DMatrix(x)), risks, atol=1e-5)
    assert "concordance" in kept.with_suffix(".md").read_text()
    restart_silos()
    secret = [{**node, "secure": "required"} for node in nodes]
    secure = run(tmp_path / "secure", secret, **keys, secure=True)
    for name, array in secure.models["a"].items():
        np.testing.assert_allclose(array.numpy(), arrays[name], rtol=1e-6, err_msg=name)


@pytest.mark.nightly
def test_auto_finds_who_grows_trees_together(tmp_path: Path, nodes: list[dict[str, Any]]) -> None:
    keys = {**KEYS, "strategy": "auto", "rounds": 6, "budget": 3.0, "seed": 2}
    found = run(tmp_path / "auto", nodes, **keys)
    assert found.rounds[-1].groups == (("a", "b"), ("c", "d"))
    (verdict,) = (r.details["verdict"] for r in found.rounds if "verdict" in r.details)
    noise = [verdict["gains"][name]["noise"] for name in "abcd"]
    assert len(set(noise)) == 4 and all(0.02 < one < 0.3 for one in noise)
    given = run(tmp_path / "given", nodes, **KEYS | {"given-groups": "a,b;c,d", "seed": 2})
    for name, model in found.models.items():  # own leaf values stay at the silos
        for array, values in model.items():
            assert values.numpy().tobytes() == given.models[name][array].numpy().tobytes(), array


# ---------------------------------------------------------------- what people read


@pytest.mark.nightly
def test_a_report_compares_trees_with_trees_and_says_what_they_are(
    tmp_path: Path, nodes: list[dict[str, Any]]
) -> None:
    """By itself: runs of the same trees in the same folder; else it prints their commands."""
    keys, folder = {**KEYS, "rounds": 2}, tmp_path / "runs"
    run(folder / "found", nodes, **{**keys, "strategy": "auto", "rounds": 6})
    story = build_story(read_run(folder / "found"))
    page = build_page(story)
    assert "the command for one is at the end" in page.lead.lower()
    assert [line.split(" --set")[0] for line in page.commands.values()] == [
        *("coterie run auto", "coterie run trees", "coterie run trees")
    ]
    alone = next(line for title, line in page.commands.items() if "--baseline-local" in title)
    assert "--set given-groups=each" in alone and "budget" not in alone
    captions = " ".join(own.caption for own in make_pictures(story)[0])
    assert "Chosen: " in captions and "FedAvg's (budget for the whole run" not in captions
    run(folder / "alone", nodes, **keys, **{"given-groups": "each"})
    run(folder / "slower", nodes, **keys, **{"given-groups": "each", "tree-rate": 0.05})
    run(folder / "given", nodes, **keys, **{"given-groups": "a,b;c,d"})
    run(folder / "all", nodes, **keys)
    page = build_page(story := build_story(read_run(folder / "given")))
    assert (story.gains.alone_run, story.gains.common_run) == ("alone", "all")
    assert story.gains.mean_gain > 0 and "The concordance index rises from" in page.detail
    found = page.tables["All sites"].header
    assert {"concordance index", "95% interval of the concordance index"} <= set(found)
    assert list(page.commands) == ["This run, with the same silos and the same data"]
    drawn_of = {own.key for own in make_pictures(story)[0]}
    assert drawn_of >= {"outcomes", "curves", "importance"} and "discrepancy" not in drawn_of
    page = build_page(build_story(read_run(folder / "alone")))
    assert page.lead.startswith("Every site trained alone")
    assert "(all silos: " in build_page(build_story(read_run(folder / "all"))).subtitle
    problem = r"run of trees \(given-groups = 'each'\)\. all is a run of trees, completed"
    with pytest.raises(FederationError, match=problem):
        write_report("given", root=folder, kind="json", alone="all")


@pytest.mark.nightly
def test_trees_for_survival_are_compared_by_their_concordance(
    tmp_path: Path, nodes: list[dict[str, Any]]
) -> None:
    silos = (
        f'[[silos]]\nname = "{node["name"]}"\noptions = {{ data = "{node["data.data"]}" }}\n'
        for node in nodes
    )
    file, folder = tmp_path / "ours.toml", tmp_path / "out"
    file.write_text(
        'task = "relapse.toml"\nseeds = [0]\nfolds = 2\ntarget = 0.6\n'
        + "".join(silos)
        + '[run]\nrounds = 2\n[[strategies]]\nname = "in groups"\nstrategy = "trees"\n'
        'given-groups = "a,b;c,d"\n[[strategies]]\nname = "all"\nstrategy = "trees"\n'
    )
    done = coterie("compare", str(file), "--workdir", str(folder))
    assert done.returncode == 0, done.stderr
    assert "concordance index: higher is better" in done.stdout
    table = json.loads((folder / "comparison.json").read_text())["table"]
    means = {row["name"]: 1 - row["error"] for row in table}
    assert 0.52 > means["all"] > 0.4 and means["in groups"] > 0.6, means
    assert {row["name"]: row["reached"] for row in table}["in groups"] == 2
