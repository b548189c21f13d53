"""Several samples of one person at the silo: what is held out, what is counted, what is said."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coterie import wire
from coterie.client.cli.calibrate import calibrate
from coterie.client.cli.check import check
from coterie.client.cli.predict import answer, halves, load_kept
from coterie.client.home.policy import Policy
from coterie.client.home.privacy import Privacy
from coterie.client.home.settings import SiloSettings
from coterie.client.work.card import read_card
from coterie.client.work.data import Data, Held, Streamed, draw
from coterie.client.work.data_warnings import warnings_of
from coterie.client.work.discriminators import open_pairs
from coterie.client.work.figures import with_intervals
from coterie.client.work.hold_out import held_out, leave_out_validation, split_validation
from coterie.client.work.session import Session, hash_of, open_session
from coterie.client.work.small_cells import suppress
from coterie.features.statistics.cells import intervals
from coterie.features.statistics.columns import column_sums
from coterie.features.statistics.silo import count
from coterie.tasks.base import Column, Option, SiloData
from tests.kit import TRAINING, ask, initial, reason, run, train
from tests.tables import declaration
from tests.unit.client import asked

TABLE = declaration("age", "dose")
PERSONS, ROWS = 60, 5
KEY = "Q7SECRET"
"""What every key of these tests begins with."""
CPU = torch.device("cpu")


def a_table(folder: Path, *, name: str = "t.csv", seed: int = 0) -> Path:
    """60 persons with 5 rows each, nearly equal; the last 20 have no dose."""
    rng = np.random.default_rng(seed)
    lines = ["patient,age,dose,ill"]
    for person in range(PERSONS):
        age, ill = rng.normal(60, 9), "yes" if person % 2 else "no"
        for _ in range(ROWS):
            dose = "" if person >= 40 else f"{rng.normal(5, 1):.3f}"
            lines.append(f"{KEY}{person:02},{age + rng.normal() / 50:.4f},{dose},{ill}")
    (folder / "study.toml").write_text(TABLE)
    (folder / name).write_text("\n".join(lines))
    return folder / name


def options(folder: Path, **more: Option) -> dict[str, Option]:
    return {"data": str(a_table(folder)), "group": "patient", **more}


def session_with(folder: Path, *, policy: Policy | None = None, **more: Any) -> Session:
    home = more.pop("home", "")
    privacy = more.pop("privacy", None)
    settings = SiloSettings(
        "a", str(folder / "study.toml"), options(folder, **more), device="cpu", home=str(home),
        policy=policy or Policy(), privacy=privacy,
    )  # fmt: skip
    return open_session(settings)


def said(folder: Path, **more: Any) -> str:
    return "\n".join(check(session_with(folder, **more).settings))


def persons_of(data: Data) -> tuple[set[int], set[int]]:
    assert data.train.persons is not None and data.test.persons is not None
    return set(data.train.persons.tolist()), set(data.test.persons.tolist())


# ---------------------------------------------------------------- what is held out


@pytest.mark.parametrize("share", [0.1, 0.2, 0.5])
@pytest.mark.parametrize("seed", range(3))
def test_whole_persons_are_held_out_by_validation_and_trials(
    share: float, seed: int, tmp_path: Path
) -> None:
    session = session_with(tmp_path)
    data = split_validation(session, share, run_seed=seed)
    kept, held = persons_of(data)
    assert not kept & held and len(kept | held) == PERSONS * 4 // 5
    assert abs(len(data.test) - share * len(session.data.train)) <= 2 * ROWS
    labels = data.test.targets().float().mean()
    assert 0.3 <= float(labels) <= 0.7, "both classes are held out alike"
    again = held_out(session.data, share, silo="a", seed=seed)
    assert torch.equal(
        leave_out_validation(session, share, run_seed=seed).data.train.x, data.train.x
    )  # type: ignore[attr-defined]
    assert again.persons is not None and set(again.persons.tolist()) == held

    spared = replace(session, data=replace(session.data, train=data.train))
    further, trial = persons_of(split_validation(spared, 0.25, run_seed=seed))
    assert not further & trial and not (further | trial) & held


def test_what_is_drawn_is_the_same_from_memory_and_one_by_one() -> None:
    x, y = torch.randn(40, 3), torch.arange(40) % 2
    persons = np.arange(40) // 4
    held = Held(x, y, persons)
    listed = asked.Listed(x.numpy(), y.numpy())
    object.__setattr__(listed, "targets", y.numpy())
    streamed = Streamed(listed, torch.arange(40), CPU, persons=persons)
    for one, other in zip(draw(held, 10, seed=3), draw(streamed, 10, seed=3), strict=True):
        assert torch.equal(one, other)
    part = streamed.take(torch.tensor([39, 0]))
    assert part.persons is not None and part.persons.tolist() == [9, 0]


@pytest.mark.parametrize("seed", range(3))
def test_without_persons_rows_are_held_out_as_ever(seed: int) -> None:
    part = Held(torch.randn(30, 2), torch.arange(30) % 3)
    order = torch.randperm(30, generator=torch.Generator().manual_seed(seed))
    data = Data(part, part).hold_out(0.25, seed=seed)
    assert torch.equal(data.test.x, part.x[order[:8]])  # type: ignore[attr-defined]
    assert torch.equal(data.train.x, part.x[order[8:]])  # type: ignore[attr-defined]
    shuffled = np.random.default_rng([0, 30]).permutation(30)
    assert halves(30)[0].tolist() == sorted(shuffled[:15].tolist())


def test_discriminators_are_trained_and_scored_on_different_persons(tmp_path: Path) -> None:
    session = session_with(tmp_path)
    pool = open_pairs(session, None, [1], samples=500, seed=0).pool
    ages = session.data.train.x[:, 0].tolist()  # type: ignore[attr-defined]
    assert session.data.train.persons is not None
    of = dict(zip(ages, session.data.train.persons.tolist(), strict=True))
    used, held = ([of[age] for age in x[:, 0].tolist()] for x in (pool.x, pool.x_held))
    assert not set(used) & set(held) and abs(len(used) - len(held)) <= 2 * ROWS
    halves_of = [{p for p, two in zip(held, pool.second.tolist(), strict=True) if two == half}
                 for half in (False, True)]  # fmt: skip
    assert not halves_of[0] & halves_of[1] and all(halves_of)


@pytest.mark.parametrize(
    ("patients", "said"),
    [
        ((1, 1), "has too few persons in its training data for {}: 1 remains,"),
        ((1, 2), "can hold out none of the persons in its training data for {}: each is the only"),
    ],
)
def test_a_silo_whose_persons_are_all_needed_cannot_hold_out(
    patients: tuple[int, int], said: str, tmp_path: Path
) -> None:
    file = a_table(tmp_path)
    (tmp_path / "one.csv").write_text(
        "patient,age,dose,ill\n"
        + "".join(f"{patients[i % 2]},{i},1,{'yes' if i % 2 else 'no'}\n" for i in range(9))
    )
    node = {
        **{"name": "a", "task": str(tmp_path / "study.toml"), "device": "cpu", "threads": 1},
        **{"data.data": str(tmp_path / "one.csv"), "data.test-data": str(file)},
        "data.group": "patient",
    }
    settings = {**TRAINING, "task": "study", "local_epochs": 1}
    for key in ("validation", "holdout"):
        reply = train(initial(0, node), node, **{**settings, key: 0.2})
        assert said.format(key) in reply.error.reason


# ---------------------------------------------------------------- calibration


class Grouped(asked.TwoClasses):
    """Ten samples of each person, in the same order in training and test data."""

    def load(self, options: Mapping[str, Option]) -> SiloData:
        plain = super().load(options)
        assert isinstance(plain, SiloData)
        n = len(plain.x_train)
        return replace(plain, persons=(np.arange(n) // 10, n + np.arange(n) // 10))


def kept_at(home: Path, *, validation: float = 0.0) -> Path:
    asked.Grouped = Grouped  # type: ignore[attr-defined]
    return asked.keep(home, Grouped, validation=validation, rows=400)


def test_a_model_is_calibrated_on_other_persons_than_it_is_measured_on(tmp_path: Path) -> None:
    fit, rest = halves(400, np.arange(400) // 10)
    assert not {*(fit // 10)} & {*(rest // 10)} and len(fit) == len(rest) == 200

    kept = load_kept(kept_at(tmp_path))
    assert (kept.card.num_persons, kept.card.test_persons) == (40, 40)
    found = calibrate(kept, options={"rows": 400}).calibration
    assert (found.part, found.part_persons, found.examples, found.measured) == (
        *("test", 40, 200, 200),
    )
    kept = replace(kept, card=replace(kept.card, calibration=found))
    answers = answer(kept, None, options={"rows": 400})
    assert "the 200 samples not used for calibration)" in answers.measured

    class Renamed(asked.TwoClasses): ...

    answers = answer(replace(kept, task=Renamed()), None, options={"rows": 400})
    assert "changed since the model was calibrated" in str(answers.samples.notes)


def test_with_a_guard_it_is_calibrated_on_whom_no_training_saw(tmp_path: Path) -> None:
    kept = load_kept(kept_at(tmp_path, validation=0.25))
    found = calibrate(kept, options={"rows": 400}).calibration
    assert (found.part, found.examples, found.part_persons) == ("validation", 100, 10)


def test_data_are_others_once_it_is_said_whose_they_are() -> None:
    plain, grouped = asked.TwoClasses().load({}), Grouped().load({})
    assert hash_of(plain) != hash_of(grouped)


def test_intervals_are_of_persons() -> None:
    """Ten equal answers of each person say no more than one."""
    wrong = np.repeat(np.random.default_rng(0).integers(0, 2, 30), 10).astype(np.float64)

    def metric(weights: np.ndarray) -> dict[str, np.ndarray]:
        return {"error": (weights @ wrong) / weights.sum(axis=1)}

    rows = with_intervals(metric, 300)["error"]
    persons = with_intervals(metric, 300, persons=np.repeat(np.arange(30), 10))["error"]
    assert rows.value == persons.value
    assert persons.high - persons.low > 2 * (rows.high - rows.low)
    for size, whose in ((1, None), (300, np.zeros(300, np.int64))):
        alone = with_intervals(lambda w, n=size: metric(w @ np.eye(n, 300)), size, persons=whose)
        assert np.isfinite(alone["error"].value) and np.isnan(alone["error"].low), "of one: none"


# ---------------------------------------------------------------- counts that protect people


@pytest.mark.parametrize(
    ("steps", "batch", "said"), [(1, 47, "use 10"), (1, 48, ""), (6, 8, ""), (0, 8, "")]
)
def test_an_update_has_as_many_persons_behind_it_as_the_silo_wants(
    steps: int, batch: int, said: str, tmp_path: Path
) -> None:
    """Ten persons of five rows, here, so that 47 rows are those of ten at least."""
    node = {
        **{"name": "a", "task": str(tmp_path / "study.toml"), "device": "cpu", "threads": 1},
        **{f"data.{key}": value for key, value in options(tmp_path).items()},
        "min-samples": 10 if not said else 11,
    }
    settings = {**TRAINING, "task": "study", wire.LOCAL_STEPS: steps, wire.BATCH_SIZE: batch}
    reply = train(initial(0, node), node, **settings)
    if said:
        behind = "fewer than 11 persons (min_samples); this run's would "
        assert behind + said in reason(reply)
    else:
        assert not reply.has_error()


def test_of_few_persons_no_number_of_samples_is_told() -> None:
    """Twelve samples of three persons among others of many."""
    values = np.concatenate([np.zeros(60), np.ones(12), np.full(60, 2.0)])
    persons = np.concatenate([np.arange(60), 60 + np.arange(12) // 4, 70 + np.arange(60)])
    column = Column("x", values, ("a", "b", "c"))
    assert count(column, 10).cells == (60, 12, 60)
    counts = count(column, 10, persons)
    assert counts.cells[1] is None and [*counts.cells, counts.missing, counts.odd].count(None) == 2
    gone = Column("x", np.where(values == 1, -1, values), ("a", "c", "d"))
    assert count(gone, 10, persons).missing is None and count(gone, 10).missing == 12


def test_no_interval_ends_where_one_person_s_many_values_are() -> None:
    values = np.append(np.random.default_rng(0).normal(60, 5, 300), np.full(40, 200.0))
    persons = np.append(np.arange(300), np.full(40, 300))
    first, step, cells = intervals(values, 10, persons, samples=340)
    assert first + len(cells) <= 90 / step, "200 is not to be seen"
    first, step, cells = intervals(values, 10, samples=340)
    assert (first + len(cells)) * step > 190


@pytest.mark.parametrize(
    ("cells", "members"),
    [
        ([12, 30, 30], [range(2), range(30), range(30)]),
        ([20, 20, 40], [range(5), range(3, 9), range(40)]),
        ([1] * 12 + [40], [*([i % 11] for i in range(12)), range(40)]),
    ],
)
def test_what_is_hidden_is_together_of_enough_persons(
    cells: list[int], members: list[range | list[int]]
) -> None:
    shown = suppress(cells, 10, [frozenset(one) for one in members])
    hidden = [i for i, cell in enumerate(shown) if cell is None]
    assert all(len({*members[i]}) >= 10 for i in range(len(cells)) if i not in hidden)
    assert len(hidden) > 1 and len(set().union(*(members[i] for i in hidden))) >= 10
    assert sum(cells[i] for i in hidden) > len(hidden)


def test_statistics_of_a_silo_hide_by_persons(tmp_path: Path) -> None:
    node = {
        **{"name": "a", "task": str(tmp_path / "study.toml"), "device": "cpu", "threads": 1},
        **{f"data.{key}": value for key, value in options(tmp_path).items()},
        **{"statistics": "inputs,targets", "statistics-from": 30},
    }
    for group, hidden in (("patient", True), ("", False)):
        reply = ask(
            wire.STATISTICS, {**node, "data.group": group}, strategy=wire.ONLY_STATISTICS,
            task="study",
        )  # fmt: skip
        reported = json.loads(str(reply.content[wire.CONFIG]["statistics"]))
        assert (None in reported["targets"][0]["cells"]) == hidden, "120 rows of 24 persons each"
        assert reported["samples"] == 240


def test_sums_of_a_column_are_of_enough_persons(tmp_path: Path) -> None:
    """The dose is known of fewer persons than the age."""
    a_table(tmp_path)
    (tmp_path / "study.toml").write_text(TABLE + 'scale = "federation"\n')
    settings = SiloSettings("a", str(tmp_path / "study.toml"), device="cpu")
    given = {"data": str(tmp_path / "t.csv"), "group": "patient"}
    session = open_session(replace(settings, options=given))
    _, dose = session.task.columns(given)
    assert session.data.train.persons is not None
    known = len({*session.data.train.persons[np.isfinite(dose.values)].tolist()})
    assert known < 40

    def counts(least: int) -> list[int]:
        policy = Policy(column_sums=True, column_sums_from=least)
        asked_for = replace(session, settings=replace(session.settings, policy=policy))
        return list(column_sums(asked_for)[wire.METRICS][wire.COLUMN_COUNTS])  # type: ignore[arg-type]

    assert counts(known) == [240, known * ROWS]
    assert counts(known + 1) == [240, 0]
    assert counts(49) == [0, 0]


# ---------------------------------------------------------------- what is said


def test_the_check_says_both_numbers_and_what_is_counted(tmp_path: Path) -> None:
    text = said(tmp_path)
    assert "training  240 samples" in text and "test      60 samples" in text
    assert "persons   48 of the training samples, 12 of the test samples; one has at most 5" in text
    assert "the 60 test samples are from only 12 persons" in text
    assert "all 48 persons of yours, fewer than min_samples = 64" in text
    assert "warning   column" not in text and KEY not in text
    text = said(tmp_path, group="")
    assert "warning   column 'patient' has 60 different values in 300 rows" in text
    assert "persons   " not in text and "all training" not in text and KEY not in text
    assert "at least 64 different samples" in text


def test_persons_in_both_of_two_files_are_counted(tmp_path: Path) -> None:
    file = a_table(tmp_path)
    some = file.read_text().splitlines()
    (tmp_path / "test.csv").write_text("\n".join(some[: 1 + 7 * ROWS]))
    session = session_with(tmp_path, **{"test-data": str(tmp_path / "test.csv")})
    lines = list(warnings_of(session))
    assert any(
        one.startswith("7 persons have samples in both the training and the") for one in lines
    )
    (tmp_path / "test.csv").write_text("\n".join(some[: 1 + ROWS]).replace(KEY, "new"))
    session = session_with(tmp_path, **{"test-data": str(tmp_path / "test.csv")})
    assert not any("in both the training and" in one for one in warnings_of(session))


def test_epsilon_is_said_to_be_of_one_sample(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    text = said(tmp_path, privacy=Privacy(epsilon=8.0), home=tmp_path / "home")
    assert "ε applies to one sample. For a person with 5, the whole budget is up to" in text
    assert "5 times as much: ε 40." in text
    assert text.count("ε = 8 allows (for a person, up to 5 times that)") == 2


# ---------------------------------------------------------------- a whole run


@pytest.mark.parametrize(
    "keys",
    [
        {"strategy": "hcct", "validation": 0.2, "alpha": "auto"},
        pytest.param({"strategy": "auto", "validation": 0.2}, marks=pytest.mark.nightly),
        {"strategy": "fedcollab"},
    ],
)
def test_no_key_leaves_or_is_written_down(
    keys: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    held: list[tuple[set[int], set[int]]] = []
    own = Data.hold_out

    def watched(data: Data, share: float, *, seed: int) -> Data:
        found = own(data, share, seed=seed)
        held.append(persons_of(found))
        return found

    monkeypatch.setattr(Data, "hold_out", watched)
    caplog.set_level(logging.DEBUG)
    nodes = []
    for seed, name in enumerate("abc"):
        file = a_table(tmp_path, name=f"{name}.csv", seed=seed)
        nodes.append({
            **{"name": name, "task": str(tmp_path / "study.toml"), "device": "cpu", "threads": 1},
            **{"data.data": str(file), "data.group": "patient", "home": str(tmp_path / name)},
        })  # fmt: skip
    run(tmp_path / "run", nodes, task="study", rounds=6, seed=1, **keys)
    assert all(not kept & out and out for kept, out in held)
    assert bool(held) == (keys["strategy"] != "fedcollab")
    assert KEY not in caplog.text
    for folder in (*"abc", "run"):
        files = [file for file in (tmp_path / folder).rglob("*") if file.is_file()]
        assert files and not any(KEY.encode() in file.read_bytes() for file in files)
    (model,) = (tmp_path / "a" / "models").glob("*.safetensors")
    card = read_card(model)
    assert (card.num_examples, card.num_persons, card.test_examples, card.test_persons) == (
        *(240, 48, 60, 12),
    )
    text = model.with_suffix(".md").read_text()
    assert "| Training samples of this silo | 240 of 48 persons |" in text
    assert "of 60 samples of 12 persons (loss" in text
