"""The model in use, looked at with new samples: drift, a worse metric, and who may know."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, RecordDict

from coterie import wire
from coterie.client.cli.watch import is_worse
from coterie.client.home import in_use, watching
from coterie.client.home.folder import create
from coterie.client.home.policy import Policy
from coterie.client.home.settings import SiloSettings
from coterie.client.home.watching import Look, last_look
from coterie.client.resident.activity import Tally
from coterie.client.resident.vital import Vitals, collector
from coterie.client.work.card import read_card
from coterie.features.statistics.survey import read_survey
from coterie.features.watching.answer import decode_watched, watched_of
from coterie.features.watching.drift import (
    Reference,
    counts,
    independent,
    plain_references,
    reference_of,
    references_of,
    shifts,
    stability,
)
from coterie.features.watching.silo import leaving, look_to_send
from coterie.server.report.command import write_report
from coterie.system.exposition import render
from coterie.tasks.base import Column
from tests.commands import Done, coterie
from tests.kit import restart_silos, run
from tests.tables import declaration
from tests.unit.server.test_json import documented, fields_of

STUDY = declaration("age", "bmi", sex="fm")


def write_table(
    file: Path, rows: int, seed: int, *, older: float = 0.0, sick: int = 1, labels: bool = True
) -> Path:
    """Write rows, of people ``older`` by so many years; ``sick`` −1 turns the labels round."""
    draw = np.random.default_rng(seed)
    lines = ["age,bmi,sex" + ",ill" * labels]
    for _ in range(rows):
        age, bmi, sex = draw.normal(60, 9), draw.normal(27, 4), draw.integers(2)
        ill = sick * ((age - 60) / 3 + sex - 0.5 + draw.normal()) > 0
        label = f",{'yes' if ill else 'no'}" if labels else ""
        lines.append(f"{age + older:.1f},{bmi:.1f},{'fm'[sex]}{label}")
    file.write_text("\n".join(lines) + "\n")
    return file


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A silo with a table whose model of a run is in use."""
    root = tmp_path_factory.mktemp("site")
    (root / "study.toml").write_text(STUDY)
    data = write_table(root / "own.csv", 600, 0)
    home = create(root / "a", "a", task=str(root / "study.toml"), data=data)
    run(root / "runs" / "run-1", [home.settings().to_node_config()], task="study", rounds=5)
    said = coterie("silo", "use", "run-1", "--home", str(home.folder))
    assert "3 columns of 480 samples" in said.stdout, said.stderr + said.stdout
    return root


def watch(site: Path, *words: object) -> Done:
    return coterie("silo", "watch-model", "--home", str(site / "a"), *map(str, words))


def test_new_samples_like_the_old_ones_give_no_warning(site: Path, tmp_path: Path) -> None:
    said = watch(site, "--labelled", write_table(tmp_path / "new.csv", 200, 1))
    assert said.returncode == 0 and said.stdout.startswith("no warning\n"), said.stdout
    assert "200 new samples, 200 with labels" in said.stdout and "  error " in said.stdout


def test_a_column_that_has_moved_is_found_without_labels(site: Path, tmp_path: Path) -> None:
    new = write_table(tmp_path / "new.csv", 200, 2, older=9, labels=False)
    said = watch(site, "--inputs", new, "--json")
    found = json.loads(said.stdout)
    assert said.returncode == 1 and found["worse"] is None and found["labelled"] == 0
    assert [one["name"] for one in found["columns"] if one["drifted"]] == ["age"]
    assert found["warnings"][0].startswith("inputs have drifted: age (PSI ")
    assert fields_of(found) == documented("silo watch-model --json")


def test_rows_of_a_person_count_as_one_with_and_without_labels(site: Path, tmp_path: Path) -> None:
    plain, file = write_table(tmp_path / "plain.csv", 200, 5), tmp_path / "new.csv"
    first, *rows = plain.read_text().split()
    whose = [f"{row},{number // 4}" for number, row in enumerate(rows)]
    file.write_text("\n".join([f"{first},patient", *whose]) + "\n")

    def columns(*words: object) -> Any:
        said = watch(site, *words, "--set", "group=patient", "--json")
        return json.loads(said.stdout)["columns"]

    blind, found = columns("--inputs", plain), columns("--inputs", file)
    assert found == columns("--labelled", file)
    assert found[0]["samples"] == blind[0]["samples"] == 200
    assert found[0]["by_chance"] > 1.5 * blind[0]["by_chance"], "of 50 persons"


def test_a_model_that_has_become_worse_is_found_shown_and_counted(
    site: Path, tmp_path: Path
) -> None:
    settings = site / "a" / "silo.toml"
    text = settings.read_text()
    write_table(site / "a" / "new.csv", 200, 3, sick=-1)
    settings.write_text(text.replace('watch_labelled = ""', 'watch_labelled = "new.csv"'))
    said = watch(site)
    assert said.returncode == 1 and "the model has become worse: error " in said.stdout
    look = last_look(site / "a")
    assert look is not None and look.worse and look.metric == "error"
    assert len(look.rows) == len(look.answered) == 200
    assert look.before is not None and look.before["error"][0] < 0.3 < look.figures["error"][0]  # type: ignore[index]
    own = [SiloSettings("a", home=str(site / "a"))]
    assert 'coterie_silo_model_warnings{silo="a"} 1.0' in render(
        collector(own, Vitals([]), Tally())()
    )
    page = tmp_path / "page.html"
    assert coterie("silo", "report", "--home", str(site / "a"), "-o", str(page)).returncode == 0
    html = page.read_text()
    assert "the model has become worse" in html and "Inputs of new samples" in html
    settings.write_text(text)


def test_what_cannot_be_watched_is_refused_with_the_way_out(site: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.csv"
    other.write_text("age\n60\n")
    for words, said in (
        ([], "give --labelled or --inputs, or set watch_labelled"),
        (["--inputs", tmp_path / "none.csv"], "there is no file or folder"),
        (["--inputs", other], "bmi"),
    ):
        found = watch(site, *words)
        assert found.returncode == 2 and said in found.stderr, found.stderr
    unused = coterie("silo", "watch-model", "--home", str(tmp_path))
    assert unused.returncode == 2 and "`coterie silo use`" in unused.stderr


def test_few_samples_give_no_verdict_but_the_number_that_is_needed(
    site: Path, tmp_path: Path
) -> None:
    said = watch(site, "--inputs", write_table(tmp_path / "new.csv", 20, 4, labels=False))
    assert said.returncode == 0 and "too few samples to find a large drift" in said.stdout


def test_a_sites_dossier_has_its_ledger_policy_models_and_who_chose_them(site: Path) -> None:
    said = coterie("silo", "report", "--dossier", "--home", str(site / "a"))
    assert said.returncode == 0, said.stderr
    text = Path(said.stdout.strip()).read_text()
    card = read_card(site / "a" / "models" / "run-1.safetensors")
    assert card.sha256[:16] in text and "| run-1 | train | 5 |" in text
    assert f"| run-1 | {in_use.history(site / 'a')[-1].since} | " in text
    assert r"| min\_group\_size | 1 |" in text and "No differential privacy" in text


# ---------------------------------------------------------------- the numbers


def columns(draw: np.random.Generator, size: int, shift: float = 0.0) -> list[Column]:
    """Nine columns, of which the first is moved by ``shift`` deviations."""
    found = []
    for i in range(9):
        values = draw.normal(size=size) + (shift if i == 0 else 0)
        if i % 3 == 1:
            values = np.round(np.exp(values))
        if i % 3 == 2:
            kinds = draw.choice(4, p=[0.6, 0.3, 0.08, 0.02], size=size)
            found.append(Column(f"c{i}", kinds.astype(float), "abcd"))
            continue
        values[draw.random(size) < 0.05] = np.nan
        found.append(Column(f"c{i}", values))
    return found


def test_200_rows_show_a_shift_and_at_most_5_of_100_draws_show_one_that_is_not_there() -> None:
    draw, found, wrong = np.random.default_rng(0), 0, 0
    references = [reference_of(one) for one in columns(draw, 500)]
    for _ in range(100):
        found += shifts(references, columns(draw, 200, shift=0.75))[0].drifted
        wrong += any(one.drifted for one in shifts(references, columns(draw, 200)))
    assert found >= 95 and wrong <= 5


def test_several_rows_of_a_person_count_as_one() -> None:
    """Else every other draw has a drift: a person's rows are alike."""
    draw, wrong = np.random.default_rng(1), np.zeros(2)
    for _ in range(60):
        (old,), (new,) = ([Column("x", np.repeat(draw.normal(size=size), 5))] for size in (100, 60))
        persons = np.repeat(np.arange(100), 5), np.repeat(np.arange(60), 5)
        (found,) = shifts([reference_of(old, persons[0])], [new], persons[1])
        (blind,) = shifts([reference_of(old)], [new])
        wrong += found.drifted, blind.drifted
        assert found.samples == 300
    assert wrong[0] <= 2 and wrong[1] > 20
    assert independent(np.array([0, 0, 0, 1])) == 4 / 10 and independent(None) == 1
    (same,) = references_of(plain_references([reference_of(old, persons[0])]))
    assert same.independent == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        (np.full(300, 5.0), np.full(200, 6.0)),  # a constant, which has changed
        (np.arange(300.0), np.where(np.arange(200) % 3 == 0, np.nan, np.arange(200) * 1.5)),
        (np.arange(300.0) % 2, np.ones(200)),
    ],
)
def test_a_changed_constant_missing_values_and_a_changed_flag_are_found(old: Any, new: Any) -> None:
    (found,) = shifts([reference_of(Column("x", old))], [Column("x", new)])
    assert found.drifted and not found.few
    (same,) = shifts([reference_of(Column("x", old))], [Column("x", old)])
    assert not same.drifted and same.psi == 0


def test_the_index_is_siddiqis_and_cells_count_every_sample_once() -> None:
    old, new = np.array([99.5, 299.5]), np.array([199.5, 199.5])
    expected = (0.25 - 0.5) * np.log(0.25 / 0.5) + (0.75 - 0.5) * np.log(0.75 / 0.5)
    assert stability(old, new) == pytest.approx(expected)
    reference = Reference("x", (0.0, 1.0), (), ())
    column = Column("x", np.array([-1, 0, 0.5, 1, 9, np.nan]), odd=np.arange(6) == 4)
    assert counts(reference, column) == (1, 2, 1, 1, 1)
    with pytest.raises(ValueError, match="'x' is missing"):
        shifts([reference], [])


@pytest.mark.parametrize(
    ("metric", "before", "now", "worse"),
    [
        ("error", (0.10, 0.05, 0.15, 100), (0.30, 0.24, 0.36, 200), True),
        ("error", (0.10, 0.05, 0.15, 100), (0.14, 0.09, 0.19, 200), False),
        ("error", (0.0, 0.0, 0.0, 30), (0.05, 0.01, 0.12, 40), False),  # a bootstrap of no errors
        ("auroc", (0.90, 0.87, 0.93, 100), (0.75, 0.68, 0.82, 200), True),
        ("auroc", (0.75, 0.68, 0.82, 100), (0.90, 0.87, 0.93, 200), False),
        ("auroc", (0.90, np.nan, np.nan, 100), (0.75, 0.68, 0.82, 200), None),
    ],
)
def test_a_metric_is_worse_if_the_difference_has_an_interval_above_zero(
    metric: str, before: Any, now: Any, worse: bool | None
) -> None:
    assert is_worse(metric, before, now) is worse


# ---------------------------------------------------------------- who may know

LOOK = Look(
    "2026-01-01T00:00:00+00:00", "run-1", "ab" * 32, 50, 50,
    ({"name": "age", "psi": 0.31415, "drifted": True, "samples": 50},),
    "auroc", {"auroc": (0.7, 0.6, 0.8)}, {"auroc": (0.9, 0.8, 1.0)}, True, ("worse",),
    tuple((i, i) for i in range(50)), tuple((i, i) for i in range(50)),
)  # fmt: skip
PAIRS = tuple((i, i // 7) for i in range(50))
"""Samples of eight persons."""


@pytest.mark.parametrize(
    ("look", "policy", "leaves"),
    [
        ({}, {}, (50, {"age": 0.31}, 50, "auroc", True)),
        ({}, {"share_metrics": ("error",)}, (50, {"age": 0.31}, 50, "", True)),
        ({"labelled": 9}, {}, (50, {"age": 0.31}, 0, "", None)),
        ({"samples": 9}, {}, (0, {}, 50, "auroc", True)),
        ({"rows": PAIRS}, {}, (0, {}, 50, "auroc", True)),
        ({"answered": PAIRS}, {}, (50, {"age": 0.31}, 0, "", None)),
    ],
)
def test_no_figure_of_few_samples_or_of_a_metric_that_stays_leaves(
    look: dict[str, Any], policy: dict[str, Any], leaves: tuple[Any, ...]
) -> None:
    found = leaving(replace(LOOK, **look), Policy(statistics=("model",), **policy))
    assert (found.samples, found.psi, found.labelled, found.metric, found.worse) == leaves
    assert found.model == "ab" * 6


def test_the_last_look_is_sent_until_enough_samples_differ_from_every_one(tmp_path: Path) -> None:
    first, others = LOOK.rows, tuple((100 + i, 100 + i) for i in range(10))
    ten = (*first, *others)
    asked = [(first, first), (ten[:-1], first), (ten, ten), (first, first), (ten[1:], first)]
    for rows, expected in (*asked, (others, others), (first[1:], others)):
        watching.keep(tmp_path, replace(LOOK, rows=rows))
        look = look_to_send(tmp_path, 10)
        assert look is not None and look.rows == expected
    of_one_person = (*first, *((row, 100) for row, _ in others))
    same_inputs = ((first, first), (ten[:-1], first), (of_one_person, first), (ten, ten))
    for answered, expected in same_inputs:
        watching.keep(tmp_path, replace(LOOK, rows=first, answered=answered))
        look = look_to_send(tmp_path, 10)
        assert look is not None and look.answered == expected


@pytest.mark.parametrize(
    "damage",
    [
        lambda plain: plain.pop("psi"),
        lambda plain: plain.update(psi={"age": "high"}),
        lambda plain: plain.update(psi={"age": float("inf")}),
        lambda plain: plain.update(drifted=["unknown"]),
        lambda plain: plain.update(worse=2),
        lambda plain: plain.update(metric="made-up"),
        lambda plain: plain.update(samples=-1),
        lambda plain: plain.update(psi={str(i): 0.0 for i in range(1001)}),
    ],
)
def test_an_answer_that_cannot_be_is_refused(damage: Callable[[dict[str, Any]], Any]) -> None:
    good = {
        "at": "now", "model": "ab", "samples": 1, "labelled": 0, "psi": {"age": 0.1},
        "drifted": ["age"], "metric": "error", "value": 0.1, "before": None, "worse": None,
    }  # fmt: skip
    content = RecordDict({wire.CONFIG: ConfigRecord({"model-in-use": json.dumps(good)})})
    assert watched_of(decode_watched(content)).drifted == ("age",)
    damage(good)
    content = RecordDict({wire.CONFIG: ConfigRecord({"model-in-use": json.dumps(good)})})
    with pytest.raises(wire.WireError, match="model in use cannot be read"):
        decode_watched(content)


def test_the_coordinator_learns_of_the_model_only_where_the_policy_allows_it(
    site: Path, tmp_path: Path
) -> None:
    assert watch(site, "--labelled", write_table(tmp_path / "new.csv", 200, 5, older=9)).returncode
    own = {**create(site / "a", "a").settings().to_node_config(), "home": str(site / "a")}
    silos = [{**own, "statistics": "model"}]
    silos.append({**own, "statistics": "inputs", "name": "b", "home": str(tmp_path / "b")})
    look = last_look(site / "a")
    assert look is not None
    watching.keep(tmp_path / "b", look)
    restart_silos()
    run(tmp_path / "run", silos, strategy="statistics", task="study", wait_for_silos=0.5)
    survey = read_survey(tmp_path / "run")
    assert list(survey.models) == ["a"] and survey.reported["a"].inputs == ()
    assert survey.models["a"]["drifted"] == ["age"] and survey.models["a"]["samples"] == 200
    entries = (site / "a" / "ledger.jsonl").read_text().splitlines()
    assert "model-in-use" in json.loads(entries[-1])["values"]["config"]
    (page,) = write_report(str(tmp_path / "run"))
    assert "a: inputs of its model in use have drifted: age (PSI" in page.read_text()
