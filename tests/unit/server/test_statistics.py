"""Statistics before training: what leaves a silo, what cannot be worked out of it, and the page."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from coterie import wire
from coterie.client.app import app
from coterie.client.work.small_cells import suppress
from coterie.engine.inprocess import InProcessGrid
from coterie.features.statistics.cells import intervals
from coterie.features.statistics.columns import in_few_digits
from coterie.features.statistics.counts import (
    ColumnCounts,
    Statistics,
    decode_statistics,
    encode_statistics,
)
from coterie.features.statistics.silo import count
from coterie.features.statistics.survey import FILE, Survey, read_survey
from coterie.features.sums.contract import settings_text
from coterie.pictures.page import render
from coterie.server.report.command import write_report
from coterie.server.report.statistics import _interval, build_statistics_page
from coterie.server.report.survey import differences, warnings
from coterie.server.runs.config import RunConfig
from coterie.server.runs.record import read_run
from coterie.server.runs.run import execute
from coterie.strategies.errors import FederationError
from coterie.tasks.base import Column
from tests.kit import CutGrid, interrupted, restart_silos, run
from tests.kit import answer as answer_of
from tests.tables import declaration, table_node, written

SMOKER = ("never", "former", "current")
HEART = declaration("age", "creatinine", "crp", name="heart", smoker=SMOKER)
HEART += "[bounds]\nage = [0, 120]\n"
SITES: Mapping[str, tuple[int, float, float]] = {
    "east": (120, 1.0, 1.0), "north": (300, 1.0, 0.4), "south": (260, 88.4, 0.5),
}  # fmt: skip
"""Rows, unit of creatinine, share of the ill."""


def write_sites(folder: Path) -> list[dict[str, Any]]:
    task = written(folder / "heart.toml", HEART)
    rng, configs = np.random.default_rng(0), []
    for name, (rows, unit, ill) in SITES.items():
        lines = []
        for row in range(rows):
            crp = "" if name == "east" else "-9" if name == "north" and row % 10 == 0 else row % 7
            smoker = "ex" if name == "south" and row % 3 == 0 else ["never", "current"][row % 2]
            age, level = rng.normal(60, 9), rng.uniform(0.6, 1.4) * unit
            sick = "yes" if rng.random() < ill else "no"
            lines.append(f"{age:.0f},{level:.2f},{crp},{smoker},{sick}")
        own = {"home": str(folder / name), "strategies": "hcct", "secure": "required"}
        own["statistics"] = "inputs,targets"
        configs.append(table_node(task, name, "age,creatinine,crp,smoker,ill", lines, **own))
    return configs


def ask(silos: Any, folder: Path, task: str = "heart") -> Path:
    run(folder / "run", silos, strategy="statistics", task=task, wait_for_silos=0.5)
    return folder / "run"


@pytest.fixture(scope="module")
def asked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three sites that tell, one that does not, one with differential privacy."""
    folder = tmp_path_factory.mktemp("sites")
    configs = write_sites(folder)
    quiet = {k: v for k, v in configs[1].items() if k not in ("statistics", "home")}
    private = {**quiet, "statistics": "inputs", "privacy-epsilon": 4.0, "secure": ""}
    configs += [{**quiet, "name": "quiet"}, {**private, "name": "private"}]
    return ask(configs, folder)


def test_silos_tell_what_they_allow_and_others_are_named_with_their_reason(asked: Path) -> None:
    survey = read_survey(asked)
    assert list(survey.reported) == list(SITES)
    north = survey.reported["north"]
    assert north.samples == 240 and north.tests == 60
    assert [c.name for c in north.inputs] == ["age", "creatinine", "crp", "smoker"]
    assert north.inputs[3].categories == ("never", "former", "current")
    (ill,) = north.targets
    assert ill.cells == tuple(np.array(ill.cells)) and sum(filter(None, ill.cells)) == 240
    assert "does not share statistics" in survey.silent["quiet"]
    assert "differential privacy" in survey.silent["private"]
    assert survey.samples["quiet"] == 240
    done = read_run(asked)
    assert (done.status, done.strategy, done.missing) == ("completed", "statistics", ())


def test_after_a_crash_the_question_has_the_same_answer(tmp_path: Path) -> None:
    whole, configs = ask(write_sites(tmp_path / "a"), tmp_path / "a"), write_sites(tmp_path / "b")
    cut = CutGrid(configs, at=(wire.STATISTICS, 0), answered=2)
    interrupted(tmp_path / "b" / "run", cut, play=lambda run, silos: ask(silos, run.parent))
    keys = {"resume": "run", "runs_dir": str(tmp_path / "b")}
    run(tmp_path / "b" / "run", configs, run_id=2, strategy="statistics", **keys)
    assert (tmp_path / "b" / "run" / FILE).read_bytes() == (whole / FILE).read_bytes()


def test_what_left_is_in_the_ledger_and_nothing_was_kept(asked: Path) -> None:
    lines = (asked.parent / "north" / "ledger.jsonl").read_text().splitlines()
    entries = [json.loads(line) for line in lines]
    assert [entry["type"] for entry in entries] == [wire.DESCRIBE, wire.STATISTICS]
    reported = json.loads(entries[1]["values"]["config"]["statistics"])
    assert reported["inputs"][0]["name"] == "age" and entries[1]["run"] == "run"
    assert not (asked.parent / "north" / "models").exists()


def test_the_page_warns_of_what_is_probably_wrong(asked: Path) -> None:
    found = "\n".join(warnings(read_survey(asked)))
    for said in (
        "all training samples of east are 'yes'",
        "creatinine: the median is about",
        "Creatinine in mg/dL and µmol/L differ by a factor of 88.4.",
        "crp: east has no value of it at all.",
        "crp: only north has values below 0. Is that a code for missing?",
        "of the samples of south are of no declared category",
    ):
        assert said in found
    assert "age" not in found
    assert [one.name for one in differences(read_survey(asked))][-1] == "age"
    (page,) = write_report(str(asked))
    text = page.read_text(encoding="utf-8")
    assert "Look at this first" in text and "creatinine" in text and "quiet" in text
    assert len(write_report(str(asked), kind="svg")) == 5
    (summary,) = write_report(str(asked), kind="json")
    assert set(json.loads(summary.read_text())["silos"]) == set(SITES)
    with pytest.raises(FederationError, match="trained no models to keep"):
        write_report(str(asked), kind="tensorboard")


@pytest.mark.parametrize(
    ("own", "other", "said"),
    [
        ((80, 0, 0, 0), (40, 40, 0, 0), True),
        ((80, 0, 0, 0), (80, 0, 0, 0), False),
        ((80, 0, 0, 0), (None, 30, None, 0), True),
        ((80, 0, 0, 0), (None, None, None, None), False),  # perhaps it is all in one
        ((80, 0, 0, 0), (0, 0, 80, 0), False),
        ((None, 0, None, 0), (40, 40, 0, 0), False),  # perhaps of few values
    ],
)
def test_a_column_is_called_constant_only_where_hidden_cells_leave_no_doubt(
    own: tuple[int | None, ...], other: tuple[int | None, ...], said: bool
) -> None:
    def telling(cells: tuple[int | None, ...]) -> Statistics:
        column = ColumnCounts("smoker", cells[:2], *cells[2:], ("no", "yes"), 0, 0.0)
        return Statistics(80, 20, 10, ((3,),), (column,), (), 0)

    found = "\n".join(warnings(Survey("t", {"a": telling(own), "b": telling(other)})))
    assert ("all samples of a are in one category; elsewhere it varies" in found) is said


def test_what_differs_by_chance_is_not_named_but_what_a_silo_lacks_or_all_have_alike_is() -> None:
    """32 rows of the same distribution differ by more than a tenth of the samples."""
    rng, shares = np.random.default_rng(3), (0.5, 0.3, 0.2)

    def telling(rows: int, kinds: tuple[float, ...], shift: float = 0.0) -> Statistics:
        columns = [
            Column("age", rng.normal(60 + shift, 12, rows)),
            Column("crp", np.exp(rng.normal(0, 1, rows))),
            Column("stage", rng.choice(3, rows, p=kinds).astype(float), ("I", "II", "III")),
            Column("device", np.full(rows, 5.0)),
        ]
        return Statistics(rows, 0, 10, (), tuple(count(one, 10) for one in columns), (), 0)

    alike = {"north": telling(400, shares), "south": telling(300, shares)}
    few = Survey("t", {**alike, "west": telling(32, shares)})
    assert [one.score for one in differences(few)] == [0.0] * 4
    assert warnings(few) == [
        "device: all values of every silo are in one interval: nothing can be learned from it."
    ]
    other = Survey("t", {**alike, "west": telling(200, (0.6, 0.4, 0.0), shift=6)})
    found = {one.name: one.silo for one in differences(other) if one.score}
    assert found == {"age": "west", "stage": "west"}
    assert (
        "stage: west has no training sample of 'III', the other silos have " in warnings(other)[0]
    )


def test_a_column_that_silos_declare_differently_is_not_compared() -> None:
    sites = {
        "a": ColumnCounts("x", (100, 0), 0, 0, ("p", "q"), 0, 0.0),
        "b": ColumnCounts("x", (100,), 0, 0, (), 0, 1.0),
    }
    told = {name: Statistics(100, 0, 10, (), (one,), (), 0) for name, one in sites.items()}
    survey = Survey("t", told)
    assert [one.score for one in differences(survey)] == [0.0]
    assert not any("nothing can be learned" in text for text in warnings(survey))


def test_nobody_who_tells_is_an_end_with_the_reasons(tmp_path: Path) -> None:
    configs = [{**one, "statistics": ""} for one in write_sites(tmp_path)[:2]]
    with pytest.raises(
        FederationError, match=r"no silo shared statistics\. east: silo 'east' does not"
    ):
        ask(configs, tmp_path)
    assert read_run(tmp_path / "run").status == "failed"
    willing = InProcessGrid(app, write_sites(tmp_path)[:2])
    config = RunConfig.read({"resume": "run", "runs-dir": str(tmp_path)})
    execute(willing, config, run_id=2, folder=tmp_path / "run")
    assert set(read_survey(tmp_path / "run").reported) == {"east", "north"}, "it is asked again"


def test_a_silo_that_answers_nonsense_is_named_and_the_others_are_read(tmp_path: Path) -> None:
    def lying(message: Message, context: Context) -> Message:
        reply = app(message, context)
        if message.metadata.message_type == wire.STATISTICS and message.metadata.dst_node_id == 1:
            reply.content = answer(samples=10**9)
        return reply

    survey = read_survey(ask(InProcessGrid(lying, write_sites(tmp_path)), tmp_path))
    assert set(survey.reported) == {"north", "south"}
    assert "its statistics cannot be read" in survey.silent["east"]


@pytest.mark.parametrize("kind", [wire.TRAIN, wire.INITIAL, wire.LABEL_COUNTS])
def test_a_run_of_statistics_gets_nothing_else(kind: str, tmp_path: Path) -> None:
    """Its name opens the door of silos that take part in some strategies only."""
    (silo, *_) = write_sites(tmp_path)
    reply = query({**silo, "secure": ""}, kind, {wire.STRATEGY: wire.ONLY_STATISTICS})
    assert "in a run of statistics alone" in reply


def test_statistics_are_told_in_no_other_run(tmp_path: Path) -> None:
    (silo, *_) = write_sites(tmp_path)
    reply = query(silo, wire.STATISTICS, {wire.STRATEGY: "hcct"})
    assert "only in a run that asks for nothing else" in reply


def test_data_that_changed_since_the_start_are_not_told_of(tmp_path: Path) -> None:
    (silo, *_) = write_sites(tmp_path)
    asks = {wire.STRATEGY: wire.ONLY_STATISTICS}
    assert query(silo, wire.STATISTICS, asks) == ""
    file = tmp_path / "east.csv"
    file.write_text("\n".join(file.read_text().splitlines()[:-30]))
    reply = query(silo, wire.STATISTICS, asks)
    assert "data changed after the silo started" in reply and str(tmp_path) not in reply


def query(silo: dict[str, Any], kind: str, config: dict[str, Any]) -> str:
    """What a silo answers, where it refuses."""
    grid = InProcessGrid(app, [silo])
    content = RecordDict({wire.CONFIG: ConfigRecord({wire.TASK: "heart", **config})})
    message = Message(content, dst_node_id=1, message_type=kind, group_id="0")
    (reply,) = grid.send_and_receive([message])
    return reply.error.reason if reply.has_error() else ""


# ---------------------------------------------------------------- what cannot be worked out


@pytest.mark.parametrize(("cells", "least", "most"), [(2, 4, 20), (3, 4, 13), (4, 3, 10)])
def test_no_hidden_cell_follows_from_the_others_the_sum_and_the_rule(
    cells: int, least: int, most: int
) -> None:
    """Every table of so many cells: to what leaves of it, others of the same sum fit as well."""
    alike: dict[tuple[int | None, ...], list[tuple[int, ...]]] = {}
    for table in itertools.product(range(most + 1), repeat=cells):
        hidden = suppress(table, least)
        assert hidden is not None
        shown = (sum(table), *hidden)
        assert all(c is None or c == 0 or c >= least for c in shown[1:])
        if shown[0] <= most:  # all others of this sum are tried
            alike.setdefault(shown, []).append(table)
    assert any(None in shown for shown in alike)
    for shown, tables in alike.items():
        for i in (i for i, cell in enumerate(shown[1:]) if cell is None):
            assert len({table[i] for table in tables}) > 1, (shown, tables)


def histograms(samples: int, places: int) -> Iterator[tuple[int, ...]]:
    for bars in itertools.combinations(range(samples + places - 1), places - 1):
        edges = (-1, *bars, samples + places - 1)
        yield tuple(b - a - 1 for a, b in itertools.pairwise(edges))


@pytest.mark.parametrize(
    ("samples", "least", "places"),
    [(45, 10, 3), (21, 10, 3), (7, 3, 4), (9, 3, 4), (14, 3, 4), (16, 4, 4), (13, 3, 5)],
)
@pytest.mark.parametrize("kinds", [False, True], ids=["numbers", "categories"])
def test_no_hidden_count_of_a_column_follows_from_the_published_rule(
    samples: int, least: int, places: int, kinds: bool
) -> None:
    """Every histogram over few values and none: who inverts the whole rule finds no count.

    The last place is of missing values. Intervals are chosen by the rule as well.
    """
    alike: dict[Any, list[tuple[int, ...]]] = {}
    for table in histograms(samples, places):
        *counts, missing = table
        values = np.repeat(np.arange(places - 1, dtype=float), counts)
        none = np.full(missing, -1.0 if kinds else np.nan)
        names = tuple("abcd"[: places - 1]) if kinds else ()
        found = count(Column("x", np.append(values, none), names), least)
        size = len(found.cells)
        at = values if kinds else np.floor(values / found.step) if found.step else values * 0
        cells = np.bincount(np.clip(at - found.first, 0, size - 1).astype(int), minlength=size)
        shown = (*found.cells, found.missing, found.odd, found.first, found.step)
        alike.setdefault(shown, []).append((*cells.tolist(), missing))
    assert any(None in shown for shown in alike)
    for shown, tables in alike.items():
        hidden = [i for i, cell in enumerate(shown[: len(tables[0])]) if cell is None]
        for i in hidden:
            assert len({table[i] for table in tables}) > 1, (shown, tables)


def test_intervals_are_round_and_no_end_holds_few() -> None:
    values = np.random.default_rng(1).normal(60, 12, 500)
    first, step, cells = intervals(values, 10, samples=500)
    assert sum(cells) == 500 and cells[0] >= 10 and cells[-1] >= 10
    assert step == 5.0 and first * step <= 50
    single = intervals(np.full(30, 5.0), 10, samples=30)
    assert single[2] == [30]
    far = np.append(values, 6300.0)
    assert intervals(far, 10, samples=501)[:2] == (first, step), "one value moves nothing"


def test_intervals_of_days_have_different_names() -> None:
    days = 20240100.0 + np.random.default_rng(1).integers(1, 29, 400)
    counts = count(Column("day", days), 10)
    named = [_interval(counts, number) for number in range(len(counts.cells))]
    assert len({*named}) == len(named) > 2 and named[0].startswith("below 202401")


def test_numbers_that_differ_only_by_rounding_have_intervals_that_can_be_drawn() -> None:
    rounded = np.repeat([0.3, 0.1 + 0.2], 100)
    told = Statistics(200, 0, 10, (), (count(Column("x", rounded), 10),), (), 0)
    survey = Survey("t", {"a": decode_statistics(encode_statistics(told))})
    assert "below 0.3" in render(build_statistics_page(survey, "run"))


def test_a_column_with_few_values_tells_no_number() -> None:
    values = np.append(np.full(95, np.nan), [1.0, 2.0, 3.0, 4.0, 5.0])
    counts = count(Column("x", values), 10)
    assert counts.step == 0 and counts.cells == (None,) and counts.missing is None


# ---------------------------------------------------------------- before and after one patient


def change(file: Path, added: int, removed: int) -> None:
    head, *rows = file.read_text().splitlines()
    rows = rows[: len(rows) - removed]
    file.write_text("\n".join([head, *rows, *(f"{20 + i},0.9,3,never,yes" for i in range(added))]))


def tabular(folder: Path, **policy: Any) -> dict[str, Any]:
    (silo, *_) = write_sites(folder)
    test = folder / "test.csv"
    head, *rows = (folder / "east.csv").read_text().splitlines()
    test.write_text("\n".join([head, *rows[-40:]]))
    (folder / "east.csv").write_text("\n".join([head, *rows[:-40]]))
    text = (folder / "heart.toml").read_text()
    scaled = text.replace("[categorical]", 'scale = "federation"\n[categorical]')
    (folder / "heart.toml").write_text(scaled)
    return {**silo, "data.test-data": str(test), "secure": "", "strategies": "", **policy}


def told(silo: dict[str, Any], kind: str) -> RecordDict:
    restart_silos()
    grid = InProcessGrid(app, [silo])
    config = {wire.TASK: "heart"}
    config |= {wire.STRATEGY: wire.ONLY_STATISTICS} if kind == wire.STATISTICS else {}
    content = RecordDict({wire.CONFIG: ConfigRecord(config)})
    message = Message(content, dst_node_id=1, message_type=kind, group_id="0")
    (reply,) = grid.send_and_receive([message])
    assert not reply.has_error(), reply.error.reason
    return reply.content


@pytest.mark.parametrize("kind", [wire.STATISTICS, wire.COLUMN_SUMS])
def test_who_asks_again_gets_the_last_answer_until_enough_rows_have_changed(
    kind: str, tmp_path: Path
) -> None:
    """Else the difference is the new patient's row."""
    silo = tabular(tmp_path, **{"column-sums": True, "column-sums-from": 10})
    first = told(silo, kind)
    for added, removed in ((1, 0), (8, 0), (0, 1), (1, 1)):
        change(tmp_path / "east.csv", added, removed)
        assert told(silo, kind) == first, "fewer than ten in all since the answer"
    change(tmp_path / "east.csv", 2, 0)
    second = told(silo, kind)
    assert second != first
    change(tmp_path / "east.csv", 1, 0)
    assert told(silo, kind) == second


def test_with_other_settings_and_few_changed_rows_nothing_is_answered(tmp_path: Path) -> None:
    silo = tabular(tmp_path)
    told(silo, wire.STATISTICS)
    change(tmp_path / "east.csv", 1, 0)
    restart_silos()
    asks = {wire.STRATEGY: wire.ONLY_STATISTICS}
    reply = query({**silo, "statistics": "inputs"}, wire.STATISTICS, asks)
    assert "differ from rows that it has answered about by fewer than 10" in reply


def test_means_and_deviations_leave_in_steps_of_their_standard_errors() -> None:
    sums = np.array([[100.0, 2015.123456, 900.0], [50.0, 0.00123456, 1e-9], [9.0, 4.5, 0.0]])
    found = in_few_digits(sums)
    np.testing.assert_allclose(found[0], [100, 2015.0, 100 * 3.0**2])
    np.testing.assert_allclose(found[1], [50, 0.001235, 50 * 4.5e-6**2], rtol=1e-3)
    np.testing.assert_array_equal(found[2], sums[2])


def test_a_regression_beside_column_sums_shows_no_row_that_it_leaves_out(tmp_path: Path) -> None:
    """The difference was the age of the one row without a smoking status, to 0.4 years."""
    found = set()
    for age in range(40, 90, 10):
        (folder := tmp_path / str(age)).mkdir()
        silo = tabular(folder, **{"column-sums": True, "sums": "regression"})
        file = folder / "east.csv"
        head, _, *rows = file.read_text().splitlines()
        file.write_text("\n".join([head, f"{age},0.9,,,yes", *rows]))
        metrics = told(silo, wire.COLUMN_SUMS)[wire.METRICS]
        settings = settings_text({"model": "logistic", "columns": ["age", "smoker"], "target": ""})
        asked = {"strategy": "regression", "task": "heart", "sums_of": settings, "group_size": 2}
        reply = answer_of(wire.TRAIN_SUMS, silo, **asked)
        sums = wire.decode_arrays(reply.content[wire.ARRAYS])
        assert metrics[wire.COLUMN_COUNTS][0] == sums["count"] + 1
        whole = metrics[wire.COLUMN_COUNTS][0] * metrics[wire.COLUMN_MEANS][0]
        found.add(round(float(whole - sums["sums"][0])))
    assert len(found) <= 2, found


# ---------------------------------------------------------------- what a silo may answer


GOOD = Statistics(30, 10, 5, ((3,),), (ColumnCounts("x", (10, 20), 0, 0, (), 0, 1.0),), (), 0)


def answer(**changes: Any) -> RecordDict:
    reported = json.loads(str(encode_statistics(GOOD)[wire.CONFIG]["statistics"]))
    column = {**reported["inputs"][0], **changes.pop("column", {})}
    text = json.dumps({**reported, "inputs": [column], **changes})
    return RecordDict({wire.CONFIG: ConfigRecord({"statistics": text})})


def test_good_statistics_are_read_as_they_were_told() -> None:
    assert decode_statistics(answer()) == GOOD


@pytest.mark.parametrize(
    "content",
    [
        RecordDict(),
        RecordDict({wire.CONFIG: ConfigRecord({"statistics": 7})}),
        RecordDict({wire.CONFIG: ConfigRecord({"statistics": "[" * 100_000})}),
        RecordDict({wire.CONFIG: ConfigRecord({"statistics": " " * 2**21})}),
        answer(samples=31),
        answer(samples=True),
        answer(tests=-1),
        answer(least=0),
        answer(shapes=[[1] * 9]),
        answer(inputs=[{}]),
        answer(inputs=[vars(GOOD.inputs[0])] * 2),
        answer(inputs=[0] * 1001),
        answer(column={"cells": []}),
        answer(column={"cells": [0] * 257}),
        answer(column={"cells": [10, 21]}),
        answer(column={"cells": [10, 19]}),
        answer(column={"cells": [None, 20]}),
        answer(column={"cells": [1e99, 20]}),
        answer(column={"cells": [-1, 31]}),
        answer(column={"categories": ["one"]}),
        answer(column={"categories": ["one", "two"]}),
        answer(column={"step": float("inf")}),
        answer(column={"step": float("nan")}),
        answer(column={"first": 10**16}),
        answer(column={"name": 5}),
    ],
)
def test_statistics_that_cannot_be_are_refused(content: RecordDict) -> None:
    with pytest.raises(wire.WireError) as error:
        decode_statistics(content)
    assert len(str(error.value)) < 400 and str(error.value).isprintable()


def test_a_hostile_name_is_shown_as_it_is(tmp_path: Path) -> None:
    evil = '<script>alert("x")</script>\x1b[2J'
    reported = decode_statistics(answer(column={"name": evil}))
    page = render(build_statistics_page(Survey("t", {"a": reported, "b": GOOD}), "run"))
    assert "<script>alert" not in page and "\x1b" not in page and "alert" in page


def test_images_and_arrays_tell_means_by_channel(tmp_path: Path) -> None:
    from tests.unit.tasks.test_declared import picture

    (tmp_path / "scans.toml").write_text(
        'kind = "image-folder"\nname = "scans"\nclasses = ["a", "b"]\nshape = [3, 8, 6]\n'
        'network = "mclr"\nnormalise = "unit"\n'
    )
    for name, i in itertools.product("ab", range(20)):
        picture(tmp_path / "data" / name / f"{i}.png", (200, 10 * (i % 3), 0))
    silo = {
        "name": "eyes", "task": str(tmp_path / "scans.toml"), "data.data": str(tmp_path / "data"),
        "statistics": "inputs,targets", "statistics-from": 3,
    }  # fmt: skip
    eyes = read_survey(ask([silo], tmp_path, "scans")).reported["eyes"]
    names = [column.name for column in eyes.inputs]
    assert names[:2] == ["mean of a sample of channel 1", "deviation within a sample of channel 1"]
    assert len(names) == 6 and eyes.shapes == ((3, 8, 6),)
    assert eyes.targets[0].categories == ("a", "b") and sum(map(bool, eyes.targets[0].cells)) == 2
