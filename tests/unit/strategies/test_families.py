"""A network or trees: ``auto`` finds per silo which is better, in one run."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from coterie import wire
from coterie.client.cli.predict import predict
from coterie.client.work.card import read_card
from coterie.features.evaluation.coordinator import FILE, read_judgement
from coterie.features.sums.trees.ensemble import Ensemble
from coterie.server.report.command import build_story
from coterie.server.report.gains import baselines
from coterie.server.report.race import explain_race
from coterie.server.runs.checkpoint import Checkpoints
from coterie.server.runs.record import read_run
from coterie.strategies.auto.algorithm import Auto
from coterie.strategies.auto.families import (
    compared,
    entries_of,
    handed_out,
    sentence,
    suiting,
    values_of,
)
from coterie.strategies.auto.state import AutoState, Boosted, Measured
from coterie.strategies.errors import FederationError
from coterie.strategies.plain.pooling import TRIED_LEAVES
from coterie.strategies.rounds.algorithm import Update
from coterie.strategies.rounds.members import Members
from coterie.strategies.rounds.roster import Silo
from coterie.tasks import families
from tests.commands import coterie
from tests.conftest import assert_equal_models
from tests.kit import CutGrid, Tap, ask, assert_same_models, interrupted, restart_silos, run
from tests.tables import site, written
from tests.unit.strategies.test_grown_trees import COLUMNS, STUDY, drawn

KEYS: dict[str, Any] = {
    "strategy": "auto",
    "task": "study",
    "rounds": 6,
    "seed": 1,
    "local-epochs": 1,
    "discriminators": False,
    "budget": 3.0,
    "tree-rate": 0.4,
    "column-bins": 16,
}
EXPECTED = {"a": wire.TREES, "b": wire.TREES, "c": wire.NETWORK, "d": wire.NETWORK}


@pytest.fixture
def nodes(tmp_path: Path) -> list[dict[str, Any]]:
    """Return four silos: the labels of two are steps of the columns, those of two a line."""
    task = written(tmp_path / "study.toml", STUDY.replace("trees-6x3", "any-8x2"))
    found = []
    for seed, name in enumerate("abcd"):
        x, _ = drawn(seed, 400)
        known = np.nan_to_num(x)
        steps = np.where(known[:, :2] > 0.5, 3, -1).sum(axis=1) + np.where(known[:, 2] > 1, -6, 1)
        line = 2 * (known @ [1.0, -1.0, 0.5, 0.5, 0, 0])
        z = steps if name in "ab" else line
        ill = np.random.default_rng(seed).random(len(x)) < 1 / (1 + np.exp(-z))
        own = site(task, name, x, ill=np.where(ill, "yes", "no"))
        own |= {"home": str(tmp_path / f"home-{name}")} if name in "ac" else {}
        found.append(own)
    return found


def arrays_of(result: Any, name: str) -> dict[str, Any]:
    return {n: a.numpy() for n, a in result.models[name].items()}


def test_every_silo_gets_the_better_family(tmp_path: Path, nodes: list[dict[str, Any]]) -> None:
    whole = run(tmp_path / "whole", nodes, **KEYS)
    found = whole.rounds[-1].details["families"]
    assert {n: own["family"] for n, own in found.items()} == EXPECTED
    assert [own["hidden-layers"] for own in found.values()] == [False] * 4
    assert whole.rounds[-1].details["boosted"]["at-home"] == list("abcd")
    assert whole.models.keys() == {"c", "d"}, "trees of silos that are alone stay there"
    run(tmp_path / "judged", nodes, task="study", strategy="evaluation", parent="whole")
    judged = read_judgement(tmp_path / "judged" / FILE)
    assert {name for one in judged.models for name in one.group} == {"c", "d"}
    assert all(judged.answers[name].models for name in "abcd")
    said = explain_race(read_run(tmp_path / "whole"))
    assert {"Networks:", "Boosted trees:"} < set(said.whole)
    printed = coterie("runs", "explain", "whole", "--runs-dir", str(tmp_path)).stdout
    titles = [line.strip() for line in printed.splitlines()]
    assert [t for t in titles if t in ("Networks", "Boosted trees")] == [
        "Networks",
        "Boosted trees",
    ]
    assert printed.count("samples per model") == 2 and "Histograms moved" in printed
    text = r"uses boosted trees, grown (alone|with b): held-out loss 0\.\d+ against 0\.\d+ of a "
    assert re.match(text + r"linear model \(64 samples\)\. It ", said.silos["a"])
    for name in "ac":  # as they are kept: trees take missing values and no scale
        (kept,) = (tmp_path / f"home-{name}" / "models").glob("*.safetensors")
        answers = predict(
            kept, None, source=nodes[0]["task"], options={"data": str(tmp_path / f"{name}.csv")}
        ).values
        assert answers.shape == (80, 2) and np.isfinite(answers).all()
        assert read_card(kept).task_values == {wire.FAMILY: EXPECTED[name]}
    number, standing = Checkpoints(tmp_path / "whole" / "checkpoints").load() or (0, None)
    kept = standing.checkpoint.state
    assert (number, kept.boosted.uses) == (6, EXPECTED)
    alone, together = baselines(read_run(tmp_path / "whole"))
    assert alone["task.family"] == together["task.family"] == wire.NETWORK
    usual = {name: KEYS[name] for name in ("task", "rounds", "seed", "local-epochs")}
    run(tmp_path / "alone", nodes, **usual, **alone)
    compared = build_story(read_run(tmp_path / "whole"))
    assert compared.alone is not None and set(compared.gains.alone) == set("abcd")


@pytest.mark.nightly
def test_a_run_that_was_cut_ends_the_same(tmp_path: Path, nodes: list[dict[str, Any]]) -> None:
    whole = run(tmp_path / "whole", nodes, **KEYS)
    restart_silos()
    interrupted(tmp_path / "cut", CutGrid(nodes, (wire.EVALUATE_OWN, 6), 1), **KEYS)
    again = run(tmp_path / "cut", nodes, run_id=2, resume="cut", **KEYS)
    assert again.rounds[-1].evaluation == whole.rounds[-1].evaluation
    assert_same_models(whole, again, "cd")


@pytest.mark.nightly
@pytest.mark.parametrize("family", wire.FAMILIES)
def test_models_are_those_of_a_run_with_that_family_alone(
    tmp_path: Path, nodes: list[dict[str, Any]], family: str
) -> None:
    whole = run(tmp_path / "whole", nodes, **KEYS)
    restart_silos()
    task = Path(nodes[0]["task"])
    network = {wire.TREES: "trees-8x2", wire.NETWORK: "mlp-64"}[family]
    task.write_text(task.read_text().replace("any-8x2", network))
    keys = dict(KEYS)
    if family == wire.TREES:
        groups = ";".join(",".join(group) for group in whole.rounds[-1].groups)
        keys |= {"strategy": "trees", "given-groups": groups}
        del keys["budget"], keys["discriminators"]
    only = run(tmp_path / "only", nodes, **keys)
    for name in (n for n, own in EXPECTED.items() if own == family):
        assert only.rounds[-1].evaluation[name] == whole.rounds[-1].evaluation[name]
        if family == wire.NETWORK:
            assert_equal_models(arrays_of(only, name), arrays_of(whole, name))


@pytest.mark.nightly
def test_a_newcomer_and_a_silo_that_keeps_its_losses_back_get_a_family(
    tmp_path: Path, nodes: list[dict[str, Any]]
) -> None:
    nodes[3] |= {"share-metrics": "seconds"}
    keys = {**KEYS, "rounds": 10, "min-silos": 3, "churn": "b+9"}
    found = run(tmp_path / "run", nodes, **keys)
    (chosen,) = [r.details["families"] for r in found.rounds if r.round == 10 and r.final]
    assert "measured" not in chosen["d"] and chosen["d"]["family"] == wire.NETWORK
    assert chosen["b"]["family"] in wire.FAMILIES and len(chosen) == 4


def with_numbers(
    folder: Path, levels: dict[str, float], lines: str = "", rows: int = 300
) -> list[dict[str, Any]]:
    """Return silos whose real targets are the same steps and an own level, or a line."""
    target = 'target = {kind = "number", columns = ["y"]}\nnumeric = ["x0", "x1", "x2"]'
    text = f'kind = "table"\nname = "study"\n{target}\nnetwork = "any-10x3"\n'
    task = written(folder / "study.toml", text)
    found = []
    for seed, (name, level) in enumerate(levels.items()):
        draw = np.random.default_rng(seed)
        x = draw.normal(size=(rows, 3))
        y = 2.0 * (x[:, 0] > 0) + np.abs(x[:, 1]) + level * (1 + (x[:, 2] > 0.5))
        y = (x @ [1, -1, 0.5] if name in lines else y) + 0.5 * draw.normal(size=len(x))
        found.append(site(task, name, x, y=y) | {"home": str(folder / f"home-{name}")})
    return found


LEVELS = {"a": -0.8, "b": -0.3, "c": 0.3, "d": 0.8}
OF_NUMBERS = {**KEYS, "budget": 2.0, "leaf-rows": 10}


@pytest.mark.nightly
def test_silos_have_own_leaf_values_of_the_groups_trees(tmp_path: Path) -> None:
    grid = Tap(with_numbers(tmp_path, LEVELS, rows=140))
    whole = run(tmp_path / "whole", grid, **OF_NUMBERS)
    trees = whole.rounds[-1].details["families"]
    assert {own["family"] for own in trees.values()} == {wire.TREES}
    (verdict,) = [v for r in whole.rounds if (v := r.details["boosted"].get("verdict"))]
    winner = verdict["candidates"][verdict["winner"]]
    assert winner["groups"] == [list("abcd")] and winner["own-penalty"] in TRIED_LEAVES
    asked = grid.asked(wire.EVALUATE_OWN)
    own = [c for c in asked if wire.OWN_PENALTY in c and wire.HIDDEN_SHARE not in c]
    told = {(str(c[wire.FAMILY]), c[wire.OWN_PENALTY]) for c in own}
    assert told >= {(wire.TREES, one) for one in TRIED_LEAVES}
    assert {c[wire.OWN_PENALTY] for c in asked[-1:]} == {winner["own-penalty"]}, "at the choice"
    held = [m.content[wire.CONFIG] for m in grid.sent[-4:]]
    assert [c.get(wire.OWN_PENALTY) for c in held] == [winner["own-penalty"]] * 4
    (kept,) = (tmp_path / "home-a" / "models").glob("*.safetensors")
    own, group = load_file(kept), arrays_of(whole, "a")
    assert (own["leaf"] != group["leaf"]).any()
    text = explain_race(read_run(tmp_path / "whole")).silos["a"]
    assert "It takes its trees from the group of b, c and d, with own leaf values and a few" in text

    nodes = with_numbers(tmp_path, LEVELS, rows=140)
    cut = [{**node, "home": f"{node['home']}-cut"} for node in nodes]
    restart_silos()
    grid = CutGrid(cut, (wire.EVALUATE_OWN, verdict["round"]), 7)
    interrupted(tmp_path / "cut", grid, **OF_NUMBERS)
    again = run(tmp_path / "cut", cut, run_id=2, resume="cut", **OF_NUMBERS)
    assert again.rounds[-1].evaluation == whole.rounds[-1].evaluation
    assert_same_models(whole, again, LEVELS)


@pytest.mark.nightly
def test_a_silo_whose_real_targets_are_a_line_differs_from_the_others(tmp_path: Path) -> None:
    nodes = with_numbers(tmp_path, {**LEVELS, "e": 0.0}, lines="e")
    found = run(tmp_path / "run", nodes, **OF_NUMBERS)
    families = found.rounds[-1].details["families"]
    expected = {**dict.fromkeys("abcd", wire.TREES), "e": wire.NETWORK}
    assert {n: own["family"] for n, own in families.items()} == expected
    assert not any(own["loss"] for own in families.values()), "errors in the targets' unit"
    text = explain_race(read_run(tmp_path / "run")).silos["e"]
    assert re.match(r"uses a linear model, trained .*: held-out error 0\.\d+ against", text)


@pytest.mark.parametrize(
    ("metric", "share"), [("r2", 0.2), ("rmse", 0.1), ("mae", 0.1), ("concordance", 0.2)]
)
def test_an_error_has_the_relative_noise_of_its_loss(metric: str, share: float) -> None:
    """The loss is 3 ± 0.6. Of a root it is half; where losses have one unit, they decide."""
    metrics = {wire.HOLDOUT_EXAMPLES: 9.0, wire.HOLDOUT_ERROR: 0.5, wire.HOLDOUT_LOSS: 3.0}
    metrics[wire.HOLDOUT_LOSS_ERROR] = 0.6
    one = Silo("a", 1, 45, described=True, metric=metric)
    update = Update(one, {}, {}, 45.0, metrics, purpose="family-1")
    (found,) = values_of([update], 1).values()
    assert found.error == (3.0 if metric == "concordance" else 0.5)
    assert found.noise == pytest.approx(share * found.error)


@pytest.mark.parametrize("noise", [0.001, 0.0])
def test_a_silo_whose_trees_are_equally_sure_of_all_samples_compares_both(noise: float) -> None:
    """As of one class. Nobody's losses differ in survival without an event held out."""
    one = Silo("a", 1, 45, described=True, metric="auroc")
    updates = []
    for number, own in enumerate((noise, 0.0)):
        metrics = {wire.HOLDOUT_EXAMPLES: 9.0, wire.HOLDOUT_LOSS: 0.1, wire.HOLDOUT_LOSS_ERROR: own}
        updates.append(Update(one, {}, {}, 45.0, metrics, purpose=f"family-{number}"))
    assert bool(compared(updates)) == bool(noise)


@pytest.mark.parametrize(
    ("gains", "expected"),
    [
        ([0.1, 0.12, 0.08, 0.1], "TTTT"),
        ([-0.1, -0.1, -0.12, -0.08], "NNNN"),
        ([0.01, -0.01, 0.02, -0.015], "NNNN"),
        ([0.2, 0.2, -0.2, -0.2], "TTNN"),
        ([0.1, 0.1, 0.1, 0.1, 0.1, -0.4], "TTTTTN"),
        ([0.1, 0.1, 0.1, 0.1, 0.1, -0.01], "TTTTTT"),
        ([float("nan")] * 4, "NNNN"),
        ([], ""),
    ],
)
def test_a_silo_differs_from_the_others_only_on_evidence(gains: list[float], expected: str) -> None:
    measured = {
        str(n): tuple(Measured(x, x, 100.0, False, 0.03) for x in (0.5, 0.5 - gain))
        for n, gain in enumerate(gains)
    }
    found = suiting(measured)  # type: ignore[arg-type]
    assert "".join(own[0].upper() for own in found.values()) == expected


def test_the_reason_says_with_whom_the_model_of_a_family_was_made() -> None:
    """Also with silos that chose the other family."""
    sizes, leaf = dict.fromkeys("abcd", 100.0), {"leaf": np.zeros(2, np.float32)}
    trees = Members(leaf, dict.fromkeys("abcd", leaf), sizes, (("a", "b", "c"), ("d",)))
    both = Measured(0.5, 0.5, 50, False, 0.01), Measured(0.4, 0.4, 50, False, 0.01)
    uses = {name: wire.TREES if name == "a" else wire.NETWORK for name in "abcd"}
    boosted = Boosted(AutoState(trees), dict.fromkeys("abcd", both), uses, wire.NETWORK, 9)
    weight = {"head.weight": np.zeros((1, 2), np.float32)}
    groups = (("a", "b"), ("c", "d"))
    network = Members(weight, dict.fromkeys("abcd", weight), sizes, groups)
    models = dict.fromkeys(groups, weight)
    state = AutoState(network, held=groups, group_models=models, boosted=boosted)
    found = handed_out(state)
    entries = entries_of(found)
    said = {name: sentence(entries[name]) for name in "abc"}
    assert said["a"].startswith("uses boosted trees, grown with b, c: ")
    assert said["b"].startswith("uses a linear model, trained with a: ")
    assert said["c"].startswith("uses a linear model, trained with d: ")


def test_too_few_rounds_for_both_families_are_refused_before_the_first() -> None:
    trees = Ensemble.empty(100, 1, 6, COLUMNS).arrays()
    both = {f"trees.{n}": a for n, a in trees.items()} | {"network.head.weight": np.zeros(1)}
    Auto().check(both, 7)
    with pytest.raises(FederationError, match="Set rounds to at least 7"):
        Auto().check(both, 6)
    more = {n: np.tile(a, (5,) + (1,) * (a.ndim - 1)) for n, a in trees.items()}
    with pytest.raises(FederationError, match="Name fewer or smaller trees"):
        Auto().check(both | {f"trees.{n}": a for n, a in more.items()}, 20)


@pytest.mark.parametrize(
    ("entries", "own", "why"),
    [
        ({"strategy": "fedavg"}, {}, "For another strategy, set task.family to network or trees"),
        ({"personalise": "finetune"}, {}, "personalise"),
        ({}, {"sums": ""}, "sums"),
    ],
)
def test_a_run_that_cannot_choose_is_refused(
    nodes: list[dict[str, Any]], entries: dict[str, Any], own: dict[str, Any], why: str
) -> None:
    asked = {"task": "study", "run": "r", "strategy": "auto", **entries}
    reply = ask(wire.DESCRIBE, nodes[0] | own, **asked)
    assert reply.has_error() and why in reply.error.reason


@pytest.mark.parametrize("network", ["any-8x2", "trees-8x2"])
def test_a_secure_run_that_would_compare_trees_is_refused(
    tmp_path: Path, nodes: list[dict[str, Any]], network: str
) -> None:
    task = tmp_path / "study.toml"
    task.write_text(task.read_text().replace("any-8x2", network))
    secret = [node | {"secure": "required"} for node in nodes]
    with pytest.raises(FederationError, match=r"secure run hides\. .*task\.family to trees"):
        run(tmp_path / "run", secret, **KEYS, secure=True)


def test_losses_in_different_units_are_not_compared(tmp_path: Path) -> None:
    node = with_numbers(tmp_path, LEVELS)[0]
    asked = {"task": "study", "run": "r", "strategy": "auto", wire.METRIC: "loss"}
    reply = ask(wire.DESCRIBE, node, **asked)
    assert reply.has_error() and "Set primary-metric to mae, rmse or r2" in reply.error.reason
    reply = ask(wire.DESCRIBE, node, **{**asked, wire.METRIC: "mae"})
    assert not reply.has_error(), reply.error.reason


def test_a_silo_refuses_a_family_that_it_does_not_have(nodes: list[dict[str, Any]]) -> None:
    assert (wire.FAMILY, wire.FAMILIES) == (families.FAMILY, families.FAMILIES)
    reply = ask(wire.EVALUATE, nodes[0], task="study", strategy="auto", run="r", family="forest")
    assert reply.has_error() and "network, trees. Got 'forest'" in reply.error.reason


@pytest.mark.nightly
def test_silos_that_only_test_or_have_no_labels_get_a_model_of_either_family(
    tmp_path: Path, nodes: list[dict[str, Any]]
) -> None:
    table = tmp_path / "d.csv"
    without = tmp_path / "new.csv"
    without.write_text("\n".join(row.rpartition(",")[0] for row in table.read_text().split()))
    nodes[1] |= {"role": "evaluate", "sums": ""}
    nodes[3] = {n: v for n, v in nodes[3].items() if n != "data.data"}
    nodes[3] |= {"unlabelled": str(without), "home": str(tmp_path / "home-d"), "sums": ""}
    nodes += [nodes[i] | {"name": name, "home": ""} for i, name in ((0, "e"), (2, "f"))]
    found = run(tmp_path / "run", nodes, **KEYS, **{"min-silos": 4}).rounds[-1].details
    assert set(found["families"]) == set("acef")
    assert found["testing"]["b"]["group"] and found["unlabelled"]["d"]["group"]
    (kept,) = (tmp_path / "home-d" / "models").glob("*.safetensors")
    answers = predict(kept, without, options={}, source=nodes[0]["task"]).values
    assert answers.shape == (400, 2) and np.isfinite(answers).all()
