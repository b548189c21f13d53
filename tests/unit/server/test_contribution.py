"""Groups trained again without each silo, measured on the others' data."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from coterie import wire
from coterie.client.app import app
from coterie.client.ledger import read
from coterie.engine.inprocess import InProcessGrid
from coterie.features.evaluation.answers import Answer, Difference
from coterie.features.evaluation.coordinator import FILE as EVALUATION
from coterie.features.evaluation.coordinator import Given, Judgement, read_judgement
from coterie.server.report.command import write_report
from coterie.server.report.contribution import Contribution, contributions, training_noise
from coterie.server.runs.config import RunConfig
from coterie.server.runs.contribution import FILE
from coterie.server.runs.record import read_run
from coterie.server.runs.run import execute
from coterie.server.study import demo
from coterie.strategies.errors import FederationError
from tests.kit import (
    CutGrid,
    Node,
    digits,
    interrupted,
    nodes_of,
    reason,
    record_of,
    restart_silos,
    run,
)
from tests.kit import ask as kit_ask
from tests.unit.server.test_evaluation import sites
from tests.unit.server.test_json import documented, fields_of

KEYS: dict[str, Any] = {"strategy": "contribution", "rounds": 3}
TRAINED: dict[str, Any] = {
    "strategy": "fedgroup", "num_groups": 2, "rounds": 2, "task": "heart", "min_silos": 5,
}  # fmt: skip


def silos(folder: Path) -> list[Node]:
    """Three silos of one kind, of which b is a duplicate of a, and two of another."""
    twin = {"data.data": str(folder / "a.csv")}
    return sites(folder, {name: (-1 if name in "xy" else 1, {}) for name in "abcxy"}, b=twin)


def ask(folder: Path, who: InProcessGrid | list[Node], name: str, **keys: Any) -> Path:
    usual = {**KEYS, "parent": "trained", "min_silos": 5, "wait_for_silos": 0.5}
    run(folder / name, who, **{**usual, **keys})
    return folder / name


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("asked")
    restart_silos()
    run(folder / "trained", silos(folder / "homes"), **TRAINED, lr=0.5)
    assert sorted(map(len, read_run(folder / "trained").final_groups)) == [2, 3]
    return ask(folder, silos(folder / "homes"), "brought")


def by_silo(folder: Path) -> dict[str, Contribution]:
    return {one.silo: one for one in contributions(read_judgement(folder / FILE))}


def test_a_duplicate_brings_nothing_beyond_chance(asked: Path) -> None:
    found = by_silo(asked)
    assert set(found) == set("abcxy") and not any(one.why for one in found.values())
    for twin in "ab":
        assert found[twin].low <= 0 <= found[twin].high and abs(found[twin].lost) < 0.1
    assert found["x"].measured_by == ("y",) and found["c"].measured_by == ("a", "b")
    assert found["x"].group != found["a"].group == found["c"].group
    judged = read_judgement(asked / FILE)
    noise = training_noise(judged, judged.models[0])
    assert 0 <= noise.deviation < 0.2 and noise.pairs == 4, "of the whole group and of three parts"
    names = [one.name for one in judged.models]
    assert names[:3] == ["A", "B", "A without a"] and len(names) == 2 * (4 + 3) + 3
    assert {"A (2)", "A without c (2)"} <= {*names} and names[-1] == "A without b and c"
    assert {*found["a"].if_left} == {"b", "c"} and not found["x"].if_left
    assert all(one.samples == 48 for one in judged.answers.values())


def test_the_silo_that_is_left_out_neither_trains_nor_sees_the_others_model(asked: Path) -> None:
    judged = read_judgement(asked / FILE)
    (one,) = [one for one in judged.models if one.name == "A without c"]
    assert one.group == ("a", "b") and one.name not in judged.answers["c"].models
    ledger = [e for e in read(asked.parent / "homes" / "c") if e["run"] == "brought"]
    trained = [entry["purpose"] for entry in ledger if entry["type"] == wire.TRAIN]
    parts = [f"without-{number}-{time}" for number in (0, 1) for time in (0, 1)]
    assert sorted(trained) == sorted(["", "whole-0-1", *parts, "without-two-0-0"] * 3)


def test_silos_keep_none_of_its_models_and_the_record_names_its_groups(asked: Path) -> None:
    record = record_of(asked)
    assert record["config"]["given-groups"] == "a,b,c;x,y"
    assert record["config"]["lr"] == 0.5 and record["config"]["task"] == "heart"
    assert len(record["rounds"]) == record["config"]["rounds"] == 3
    models = asked.parent / "homes" / "a" / "models"
    assert [one.stem for one in models.glob("*.safetensors")] == ["trained"]


def test_its_page_says_that_it_is_not_a_payment(asked: Path) -> None:
    (page,) = write_report(str(asked))
    text = page.read_text(encoding="utf-8")
    assert "Do not pay by these figures" in text and "What each silo contributes to trained" in text
    (summary,) = write_report(str(asked), kind="json")
    plain = json.loads(summary.read_text())
    assert fields_of(plain) == documented("contribution RUN --json")


@pytest.mark.nightly
@pytest.mark.parametrize("at", [(wire.TRAIN, 2), (wire.EVALUATE_GIVEN, 0)])
def test_after_a_crash_it_has_the_same_figures(at: tuple[str, int], asked: Path) -> None:
    folder, name = asked.parent, f"cut-{at[1]}"
    restart_silos()
    cut = CutGrid(silos(folder / "homes"), at=at, answered=1)
    interrupted(folder / name, cut, play=lambda run, who: ask(run.parent, who, run.name))
    keys = {"resume": name, "runs-dir": str(folder)}
    execute(InProcessGrid(app, silos(folder / "homes")), RunConfig.read(keys), run_id=2,
            folder=folder / name)  # fmt: skip
    assert (folder / name / FILE).read_bytes() == (asked / FILE).read_bytes()


def judgement(*differences: tuple[str, float, float], silos: str = "bc") -> Judgement:
    """Every silo's difference from the group's model: name, value, half of the interval."""
    found = tuple(Difference("A", name, v, v - half, v + half) for name, v, half in differences)
    answer = Answer(samples=50, models={}, differences=found)
    given = Given("A", ("a", "b", "c"), only=True)
    return Judgement("t", "r", (given,), dict.fromkeys(silos, answer))


def test_what_was_lost_has_the_sign_and_the_width_that_it_must() -> None:
    known = judgement(("A (2)", 0.0, 0.02), ("A without a", 0.2, 0.0196 * 2**0.5))
    (one, *_) = contributions(known)
    assert (one.lost, one.measured_by, one.sure) == (pytest.approx(0.2), ("b", "c"), True)
    quantile = 12.706204736  # Student's, one degree of freedom
    assert one.high - one.lost == pytest.approx(0.01 * quantile, rel=1e-4), (
        "of two silos that are as wide"
    )
    noisy = judgement(("A (2)", 0.02, 0.0), ("A without a", 0.1, 0.0))
    assert training_noise(noisy, noisy.models[0]).deviation == pytest.approx(0.02)
    found = contributions(noisy)[0]
    assert found.high - found.lost == pytest.approx(0.02 / 2**0.5 * quantile, rel=1e-4)
    assert not found.sure, "two equal trainings may differ as much"
    pair = ("A without b", "A without a and b", 0.3), ("A without b (2)", "A without a and b", 0.1)
    again = tuple(Difference(one, two, v, v, v) for one, two, v in pair)
    answers = {
        "c": Answer(samples=50, models={}, differences=(*known.answers["c"].differences, *again))
    }
    (one, *_) = contributions(replace(known, answers=answers))
    assert one.if_left == {"b": pytest.approx(0.2)}, "of both trainings without b"
    (lone, *_) = contributions(judgement(("A without a", 0.1, 0.01)))
    assert lone.lost == pytest.approx(0.1) and not lone.sure, "nothing was trained twice"
    assert "shares its error" in contributions(judgement(silos="bc"))[0].why


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"strategy": "independent"}, "it has no group of several silos"),
        (
            {"strategy": "fedavg", "secure": True},
            r"silos hold models or layers for that run alone \(secure",
        ),
        ({"strategy": "fedavg", "personalise": "ditto"}, "silos hold models"),
    ],
)
def test_a_run_that_cannot_be_measured_is_refused_by_name(
    keys: dict[str, Any], why: str, tmp_path: Path
) -> None:
    nodes = digits("abc", tmp_path / "homes", **{"data.train": 20, "data.test": 20})
    restart_silos()
    run(tmp_path / "trained", nodes, rounds=1, local_epochs=1, **keys)
    with pytest.raises(FederationError, match=why):
        ask(tmp_path, nodes, "brought", min_silos=3)
    assert not (tmp_path / "brought").exists()
    if keys.get("secure"):  # its group's model can be evaluated, and that is no secret
        folder = ask(tmp_path, nodes, "judged", min_silos=3, strategy="evaluation", task="digits")
        assert {*read_judgement(folder / EVALUATION).answers} == {*"abc"}


def test_a_silo_that_wants_larger_groups_refuses_because_others_could_compute_its_update() -> None:
    node = digits("a", **{"min-group-size": 3})[0]
    config = {wire.STRATEGY: wire.CONTRIBUTION, wire.ROUNDS: 3}
    assert "can compute its updates" in reason(kit_ask(wire.DESCRIBE, node, **config))
    assert not kit_ask(wire.DESCRIBE, digits("a")[0], **config).has_error()


@pytest.mark.nightly
def test_on_the_demo_a_duplicate_brings_nothing_beyond_chance(tmp_path: Path) -> None:
    nodes = [
        {**node, "home": str(tmp_path / str(node["name"]))} for node in nodes_of(demo.silos(0))
    ]
    nodes.append({**nodes[0], "name": "twin", "home": str(tmp_path / "twin")})
    restart_silos()
    own = {"min_silos": len(nodes), "rounds": 20, "local_epochs": 5, "lr": 0.1}
    run(tmp_path / "trained", nodes, strategy="hcct", **own)
    found = by_silo(ask(tmp_path, nodes, "brought", min_silos=len(nodes), rounds=20))
    for twin in ("twin", str(nodes[0]["name"])):
        assert found[twin].low <= 0 <= found[twin].high
