"""``scale = "federation"``: one mean and deviation for all silos, of those that allow it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message, MetricRecord, RecordDict

from coterie import wire
from coterie.client.cli.check import check
from coterie.client.cli.export import export
from coterie.client.cli.predict import load_kept
from coterie.client.home.settings import SiloSettings
from coterie.client.ledger import read
from coterie.client.work.card import read_card
from coterie.client.work.session import open_session
from coterie.features.statistics.columns import in_scale
from coterie.features.statistics.scale import combine, read_sums
from coterie.strategies import FederationError
from coterie.tasks import TaskError, load_task
from tests.kit import CutGrid, Tap, assert_same_models, interrupted, run
from tests.tables import declaration

STUDY = declaration("age", "dose", "site", scale="federation")
NAMES = "abc"
KEYS = {
    **{"task": "study", "rounds": 2, "local-epochs": 1, "batch-size": 8, "seed": 1},
    **{"wait-for-silos": 0.3, "round-timeout": 5.0},
}
STEP = 0.2
"""Sums of fifty rows leave in steps of about their standard errors; in deviations."""


def rows(seed: int, count: int = 50) -> np.ndarray:
    """Ages about 50 + 10 · seed, doses about 1e6, and one site that is the same everywhere."""
    rng = np.random.default_rng(seed)
    ages, doses = rng.normal(50 + 10 * seed, 5, count), rng.normal(1e6, 1, count)
    return np.stack([ages, doses, np.full(count, 0.1)], axis=1)


@pytest.fixture
def study(tmp_path: Path) -> Path:
    (tmp_path / "study.toml").write_text(STUDY)
    for seed, name in enumerate(NAMES):
        for part, salt in (("train", 0), ("test", 10)):
            numbers = rows(seed + salt)
            lines = [
                f"{'' if i == 3 else age},{dose},{site},{'yes' if age > 55 + 10 * salt else 'no'}"
                for i, (age, dose, site) in enumerate(numbers.tolist())
            ]
            text = "\n".join(["age,dose,site,ill", *lines])
            (tmp_path / f"{name}-{part}.csv").write_text(text)
    return tmp_path


def nodes(study: Path, home: Path, *, agree: str = "ab") -> list[dict[str, Any]]:
    return [
        {
            **{"name": name, "task": str(study / "study.toml"), "threads": 1, "device": "cpu"},
            **{"data.data": str(study / f"{name}-train.csv"), "home": str(home / name)},
            "data.test-data": str(study / f"{name}-test.csv"),
            **({"column-sums": True} if name in agree else {}),
        }
        for name in NAMES
    ]


def settings(config: dict[str, Any]) -> SiloSettings:
    return SiloSettings.from_node_config(config, node_id=1)


def play(folder: Path, silos: Any, **keys: Any) -> Any:
    return run(folder, silos, **(KEYS | keys))


def expected_of(names: str) -> np.ndarray:
    """(columns, 2) From all rows at once."""
    values = np.concatenate([rows(NAMES.index(name)) for name in names])
    ages = np.concatenate([np.delete(rows(NAMES.index(name))[:, 0], 3) for name in names])
    return np.array(
        [[ages.mean(), ages.std()], [values[:, 1].mean(), values[:, 1].std()], [0.1, 1]]
    )


def assert_near(scale: Any, expected: np.ndarray) -> None:
    """Compare means and deviations, shape (…, 2)."""
    assert (np.abs(np.asarray(scale) - expected) <= STEP * expected[..., 1:]).all()


def test_all_silos_use_the_scale_of_those_that_tell_and_only_these_tell(
    study: Path, tmp_path: Path
) -> None:
    play(tmp_path / "run", nodes(study, tmp_path))
    expected = expected_of("ab")
    for name in NAMES:
        (file,) = (tmp_path / name / "models").glob("*.safetensors")
        card = read_card(file)
        assert_near(card.scale, expected)
        assert card.scale_from == "federation"
        assert (
            "mean and deviation of the federation's numbers" in file.with_suffix(".md").read_text()
        )
        noted = [entry for entry in read(tmp_path / name) if entry["type"] == wire.COLUMN_SUMS]
        (entry,) = noted
        if name == "c":
            assert "does not share sums of its columns" in entry["error"]
        else:
            metrics = entry["values"]["metrics"]
            assert metrics["column-counts"] == [49, 50, 50]
            assert (
                metrics["column-means"][2] == pytest.approx(0.1)
                and metrics["column-squares"][2] == 0
            )
    card = load_kept(file)
    exported = export(card, tmp_path / "out" / "model.pt2", options={})
    made = json.loads(exported.files[1].read_text())
    age = made["preparation"]["columns"][0]
    assert_near([age["mean"], age["deviation"]], expected[0])
    assert made["preparation"]["mean and deviation"] == "one pair for all silos of the run"
    assert not exported.own, "whoever has no data can use it too"


def test_a_silo_with_few_numbers_tells_nothing_of_that_column(study: Path, tmp_path: Path) -> None:
    configs = nodes(study, tmp_path)
    configs[0]["column-sums-from"] = 50
    play(tmp_path / "run", configs)
    (entry,) = [e for e in read(tmp_path / "a") if e["type"] == wire.COLUMN_SUMS]
    assert entry["values"]["metrics"]["column-counts"] == [0, 50, 50]
    assert entry["values"]["metrics"]["column-means"][0] == 0
    (file,) = (tmp_path / "a" / "models").glob("*.safetensors")
    scale = np.array(read_card(file).scale)
    assert_near(scale[0], expected_of("b")[0])
    assert_near(scale[1], expected_of("ab")[1])


def test_where_nobody_tells_enough_the_run_does_not_begin(study: Path, tmp_path: Path) -> None:
    for number, changes in enumerate(({}, {"min-group-size": 3})):
        agree = "" if not changes else "ab"
        configs = [config | changes for config in nodes(study, tmp_path, agree=agree)]
        with pytest.raises(
            FederationError, match="no silo shares the sums of numeric column 1"
        ) as said:
            play(tmp_path / f"run-{number}", configs)
        assert "does not share sums of its columns" in str(said.value)


def test_a_resumed_run_and_a_newcomer_have_the_run_s_scale(study: Path, tmp_path: Path) -> None:
    """c comes in round 3 and is not asked, whatever it allows."""
    keys = {"rounds": 4, "min-silos": 2, "churn": "c+3"}
    whole = play(tmp_path / "1" / "run", nodes(study, tmp_path / "1", agree="abc"), **keys)
    silos = nodes(study, tmp_path / "2", agree="abc")
    grid = CutGrid(silos, at=(wire.TRAIN, 3))
    interrupted(tmp_path / "2" / "run", grid, play=play, **keys)
    assert len(grid.asked(wire.COLUMN_SUMS)) == 2, "c was not there in time"
    again = Tap(silos)
    resumed = play(tmp_path / "2" / "run", again, resume="run", **keys)
    assert not again.asked(wire.COLUMN_SUMS)
    assert set(resumed.models) == set(NAMES)
    assert_same_models(whole, resumed)


def test_a_run_that_says_no_scale_is_refused_and_data_that_changed_too(
    study: Path, tmp_path: Path
) -> None:
    session = open_session(settings(nodes(study, tmp_path)[0]))
    scale = [50.0, 5.0, 0.0, 1.0, 0.0, 1.0]
    same = in_scale(session, scale)
    assert in_scale(session, list(scale)).data is same.data, "read once"
    assert same.data_hash != session.data_hash, "of what the model sees"
    x = same.data.train.at(same.data.train.targets().nonzero()[:0, 0])[0]
    assert x.shape[1] == 3 and same.scale == [[50.0, 5.0], [0.0, 1.0], [0.0, 1.0]]
    for odd in (None, scale[:4], [*scale[:5], 0.0], [*scale[:5], float("nan")]):
        with pytest.raises(ValueError, match="scale"):
            in_scale(session, odd)
    file = study / "a-train.csv"
    file.write_text(file.read_text() + "\n50.0,1.0,0.1,no")
    with pytest.raises(ValueError, match="different data than when it was started"):
        in_scale(session, [51.0, *scale[1:]])


@pytest.mark.parametrize(
    "wrong",
    [
        {},
        {wire.COLUMN_COUNTS: [5]},
        {wire.COLUMN_COUNTS: [99, 5]},
        {wire.COLUMN_COUNTS: [-1, 5]},
        {wire.COLUMN_MEANS: [float("nan"), 0.0]},
        {wire.COLUMN_MEANS: [1e200, 0.0]},
        {wire.COLUMN_SQUARES: [-1.0, 0.0]},
        {wire.COLUMN_SQUARES: 3.0},
    ],
)
def test_sums_that_cannot_be_are_left_out(wrong: dict[str, Any]) -> None:
    good = {
        wire.COLUMN_COUNTS: [5, 5],
        wire.COLUMN_MEANS: [0.5, 1.0],
        wire.COLUMN_SQUARES: [1.0, 2.0],
    }
    asked = Message(RecordDict(), 1, wire.COLUMN_SUMS, group_id="0")

    def reply(values: dict[str, Any]) -> Message:
        return Message(RecordDict({wire.METRICS: MetricRecord(values)}), reply_to=asked)

    assert read_sums(reply(good), 2, most=10).shape == (2, 3)
    with pytest.raises(wire.WireError):
        read_sums(reply(good | wrong if wrong else {}), 2, most=10)


def test_sums_add_up_to_the_moments_of_all_rows_however_large_the_mean() -> None:
    parts = [np.random.default_rng(i).normal(1e9, 1e-2, (30, 1)) for i in range(3)]
    sums = {
        str(i): np.array([[30, part.mean(), ((part - part.mean()) ** 2).sum()]])
        for i, part in enumerate(parts)
    }
    whole = np.concatenate(parts)
    np.testing.assert_allclose(
        combine(sums, 1, minimums={}), [whole.mean(), whole.std()], rtol=1e-6
    )


def test_check_says_what_is_told_of_the_columns(study: Path, tmp_path: Path) -> None:
    for agree, said in (
        ("a", "count, mean and deviation of each of 3"),
        ("", "shared (column_sums)"),
    ):
        assert said in "\n".join(check(settings(nodes(study, tmp_path, agree=agree)[0])))


def test_a_scale_of_nothing_is_refused(tmp_path: Path) -> None:
    text = STUDY.replace('numeric = ["age", "dose", "site"]', "") + '[categorical]\nsex = ["f"]\n'
    (tmp_path / "study.toml").write_text(text)
    with pytest.raises(TaskError, match="no numeric columns to scale over the federation"):
        load_task(str(tmp_path / "study.toml"))
