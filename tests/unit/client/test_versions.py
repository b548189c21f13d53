"""The models that a silo keeps: a list, the one in use, and the way back."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from coterie.client.cli.predict import find_model
from coterie.client.home import in_use
from coterie.client.work.card import read_card, write_card
from tests.commands import Done, coterie
from tests.kit import digits, restart_silos
from tests.unit.server.test_resume import go

KEYS = {"strategy": "fedavg", "rounds": 1, "min-silos": 2}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    """Silo a, after run-1 and run-2, which began from the first."""
    for number, more in ((1, {}), (2, {"parent": "run-1"})):
        restart_silos()
        folder = tmp_path / "runs" / f"run-{number}"
        go(folder, digits("ab", tmp_path / "homes"), run_id=number, **KEYS, **more)
    own = tmp_path / "homes" / "a"
    for number in (1, 2):  # a card is written again when its model is calibrated
        file = own / "models" / f"run-{number}.safetensors"
        card = replace(read_card(file), kept=f"2026-01-0{number}T00:00:00+00:00")
        write_card(file, card, load_file(file))
        os.utime(file, (1e9 - number, 1e9 - number))
    return own


def silo(home: Path, *words: str) -> Done:
    said = coterie("silo", *words, "--home", str(home))
    assert said.returncode == 0, said.stderr
    return said


def listed(home: Path) -> dict[str, dict[str, Any]]:
    rows = json.loads(silo(home, "models", "--json").stdout)
    return {row["model"]: row for row in rows}


def test_the_list_has_origin_figures_and_data_of_every_model(home: Path) -> None:
    rows = listed(home)
    assert list(rows) == ["run-1", "run-2"]
    one, two = rows["run-1"], rows["run-2"]
    assert (one["from"], two["from"]) == ("–", "run-1")
    assert (one["round"], two["round"]) == (1, 2) and two["group"] == 2
    card = read_card(home / "models" / "run-2.safetensors")
    assert two["sha256"] == card.sha256 and card.data_hash.startswith(two["data"])
    assert two["low"] <= two["value"] <= two["high"] and two["value"] == card.test_error
    assert two["metric"].startswith("error ") and "% to " in two["metric"]
    assert {row["in-use-since"] for row in rows.values()} == {"–"}
    shown = silo(home, "models").stdout
    assert "run-2" in shown and card.sha256 not in shown


def test_what_is_in_use_is_taken_until_another_is_chosen(home: Path) -> None:
    assert find_model(home, "").stem == "run-2"  # the newest
    said = silo(home, "use", "run-1")
    assert said.stdout.startswith("in use: run-1, error ")
    assert read_card(find_model(home, "")).run == "run-1"
    assert listed(home)["run-1"]["in-use-since"] == in_use.history(home)[-1].since
    silo(home, "use", "run-2")
    assert read_card(find_model(home, "")).run == "run-2"
    assert silo(home, "back").stdout.startswith("in use: run-1, ")
    assert read_card(find_model(home, "")).run == "run-1"
    gone = coterie("silo", "back", "--home", str(home))
    assert gone.returncode == 2 and "no model was in use before" in gone.stderr
    assert find_model(home, "run-2") == home / "models" / "run-2.safetensors"


def test_no_later_round_changes_the_model_in_use(home: Path, tmp_path: Path) -> None:
    silo(home, "use", "run-2")
    before = find_model(home, "").read_bytes()
    restart_silos()
    go(tmp_path / "runs" / "run-2", digits("ab", home.parent), resume="run-2", **{"more-rounds": 1})
    assert read_card(home / "models" / "run-2.safetensors").round == 3
    assert find_model(home, "").read_bytes() == before
    rows = listed(home)
    (copy,) = [name for name in rows if name.startswith("in-use/")]
    assert rows[copy]["in-use-since"] != "–" == rows["run-2"]["in-use-since"]
    assert rows[copy]["round"] == 2


def test_a_choice_that_was_cut_off_changes_nothing(
    home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    silo(home, "use", "run-1")

    def dies(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(in_use, "_write", dies)
        with pytest.raises(KeyboardInterrupt):
            in_use.use(home, "run-2", b"half", "0" * 64)
    assert [one.model for one in in_use.history(home)] == ["run-1"]
    assert read_card(find_model(home, "")).run == "run-1"


def test_a_damaged_list_or_a_model_that_is_gone_is_named(home: Path) -> None:
    silo(home, "use", "run-1")
    find_model(home, "").unlink()
    said = coterie("silo", "use", "nothing", "--home", str(home))
    assert said.returncode == 2 and "has no model 'nothing'" in said.stderr
    with pytest.raises(in_use.SettingsError, match="is gone"):
        find_model(home, "")
    (home / "in-use" / "history.json").write_text('[{"model": 1}]')
    with pytest.raises(in_use.SettingsError, match="is damaged"):
        find_model(home, "")


def test_a_silo_without_models_says_so(tmp_path: Path) -> None:
    assert "no models are kept" in silo(tmp_path, "models").stdout
