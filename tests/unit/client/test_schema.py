"""Silos that do not fit each other: coordinator and silo say in what they differ."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from coterie.client.home.settings import SiloSettings
from coterie.client.ledger import read
from coterie.client.work.session import open_session
from coterie.strategies import FederationError
from coterie.wire import differences
from tests.kit import run
from tests.unit.tasks.test_declared import ROWS, TABLE, table

CODE = """
from coterie.tasks.images.digits import Digits
from torch import nn

class Mine(Digits):
    def model(self):
        return nn.Sequential(nn.Flatten(), nn.Linear(64, {width}), nn.Linear({width}, 10))
"""


def refused(configs: list[dict[str, Any]], folder: Path, task: str) -> str:
    """Why the last of three silos does not take part."""
    for name, config in zip("abc", configs, strict=True):
        config |= {"name": name, "threads": 1, "device": "cpu", "home": str(folder / name)}
    with pytest.raises(FederationError, match="2 of at least 3 have joined") as said:
        run(folder / "run", configs, task=task, rounds=1, wait_for_silos=0.2)
    return str(said.value)


@pytest.mark.parametrize(
    ("before", "after", "differs"),
    [
        ('"age", "bmi"', '"bmi", "age"', "the order of numeric differs"),
        ('"f", "m"', '"m", "f"', "the order of categorical differs"),
        ('"f", "m"', '"f", "m", "x"', "categorical differs"),
        ('"no", "yes"', '"yes", "no"', "the order of classes differs"),
        ("mlp-64", "mlp-128", "network differs"),
        ('target = "ill"', 'target = "sick"', "target differs"),
        ('["age", "bmi"]\nnetwork = "mlp-64"', '["bmi"]\nnetwork = "mclr"',
         "network, numeric differ"),
    ],
)  # fmt: skip
def test_what_a_declaration_has_otherwise_is_named_here_and_there(
    before: str, after: str, differs: str, tmp_path: Path
) -> None:
    assert before in TABLE
    rows = ROWS.replace("ill\n", "ill,sick\n", 1).replace("yes\n", "yes,yes\n")
    data = table(tmp_path, rows.replace("no\n", "no,no\n"))
    configs: list[dict[str, Any]] = []
    for name, text in (("a", TABLE), ("b", TABLE), ("c", TABLE.replace(before, after))):
        (tmp_path / f"{name}.toml").write_text(text)
        configs.append({"task": str(tmp_path / f"{name}.toml"), "data.data": data})
    problem = refused(configs, tmp_path, "study")
    assert f"c was refused: its task is not that of a, b: {differs} (schema differs)." in problem
    said = f"({differs.removesuffix('s').removesuffix(' differ')}). Ask them"
    error = list(read(tmp_path / "c"))[-1]["error"]  # which its process logs, as every refusal
    assert "silo 'c' does not fit the run: its model or task differs from the other" in error
    assert said in error
    assert len(list(read(tmp_path / "a"))) == 1, "who fits gets no message"


def test_other_code_of_a_task_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    parts = []
    for width in (16, 8):
        (tmp_path / "mine.py").write_text(CODE.format(width=width) + "#" * width)
        sys.modules.pop("mine", None)
        parts.append(open_session(SiloSettings("a", task="mine:Mine", device="cpu")).parts)
    assert differences(*parts) == ["the code of the task"]
    arrays = [{k: v for k, v in own.items() if k != "the code of the task"} for own in parts]
    assert differences(*arrays) == ["the arrays of the model"]
