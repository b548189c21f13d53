"""A strategy outside the project: the one of the page, run, resumed, compared, and named."""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from pathlib import Path

import pytest
from rich.console import Console

from coterie.server.runs.config import RunConfig
from coterie.server.study.compare import compare, print_comparison
from coterie.strategies import FederationError, registry
from tests.conftest import digits_config
from tests.kit import (
    CutGrid,
    Node,
    assert_same_models,
    digits,
    interrupted,
    mean_error,
    record_of,
    run,
)

PAGE = Path(__file__).parents[3] / "docs" / "how-to" / "own-strategy.md"
NAME = "medians:MedianPerGroup"


@pytest.fixture
def medians(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The strategy of the page, in a file where it can be imported."""
    text = PAGE.read_text("utf-8")
    code = re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)[0]
    assert len(code.splitlines()) <= 60
    (tmp_path / "medians.py").write_text(code, encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    registry.row_of.cache_clear()
    yield NAME
    sys.modules.pop("medians", None)
    registry.row_of.cache_clear()


def kinds() -> list[Node]:
    """Four digits silos; to two of them the same image means another class."""
    cut = {"data.train": 120, "data.test": 60}
    return [
        digits_config(name, **cut, **{"data.skip": 180 * row, "data.label-shift": 3 * (row // 2)})
        for row, name in enumerate("abcd")
    ]


def test_the_strategy_of_the_page_finds_groups_and_learns(medians: str, tmp_path: Path) -> None:
    keys = {"rounds": 4, "local-epochs": 5, "lr": 0.1, "batch-size": 16}
    result = run(tmp_path / "r", kinds(), strategy=medians, **keys, **{"max-distance": 0.8})
    assert result.groups[4] == [["a", "b"], ["c", "d"]]
    assert mean_error(result) < mean_error(run(tmp_path / "f", kinds(), **keys)) - 0.1
    record = record_of(tmp_path / "r")
    assert record["config"]["strategy"] == medians and record["config"]["max-distance"] == 0.8


def test_it_resumes_like_any_other(medians: str, tmp_path: Path) -> None:
    keys = {"strategy": medians, "rounds": 3, "local-epochs": 1}
    whole = run(tmp_path / "whole", digits(), **keys)
    interrupted(tmp_path / "cut", CutGrid(digits(), at=("train", 3)), **keys)
    assert_same_models(whole, run(tmp_path / "cut", digits(), resume="cut"))


def test_it_is_compared_like_any_other(medians: str, tmp_path: Path) -> None:
    file = tmp_path / "comparison.toml"
    silos = "".join(
        f"[[silos]]\nname = '{name}'\noptions = {{ train = 20, test = 20, skip = {40 * row} }}\n"
        for row, name in enumerate("abc")
    )
    strategy = f"[[strategies]]\nname = 'per group'\nstrategy = '{medians}'\nmax-distance = 0.9\n"
    file.write_text(f"seeds = [0]\n{silos}[run]\nrounds = 2\nlocal-epochs = 1\n{strategy}")
    out = io.StringIO()
    console = Console(file=out, width=200)
    print_comparison(console, compare(file, folder=tmp_path / "out"))
    assert "per group" in out.getvalue() and "local" in out.getvalue()


def test_an_entry_point_gives_it_a_name(medians: str, monkeypatch: pytest.MonkeyPatch) -> None:
    point = EntryPoint("medians", NAME, registry.ENTRY_POINTS)
    monkeypatch.setattr(registry, "entry_points", lambda group: [point])
    assert RunConfig.read({"strategy": "medians"}).plain()["max-distance"] == 0.5


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("nowhere:Strategy", "cannot be imported: ModuleNotFoundError"),
        ("medians:Nothing", "must be a class derived from coterie.strategies.own.Algorithm"),
        ("medians:median", "must be a class derived from coterie.strategies.own.Algorithm"),
        ("medians", "or module:Class. Got 'medians'"),
        (NAME + "X", "must be a class derived"),
    ],
)
def test_what_cannot_be_used_is_named(medians: str, name: str, said: str) -> None:
    with pytest.raises(FederationError, match=re.escape(said)):
        RunConfig.read({"strategy": name})


def test_its_keys_have_bounds_and_no_other_strategys_pass(medians: str) -> None:
    with pytest.raises(FederationError, match="max-distance must be above 0"):
        RunConfig.read({"strategy": medians, "max-distance": 0})
    with pytest.raises(FederationError, match="alpha belongs to hcct"):
        RunConfig.read({"strategy": medians, "alpha": 5.0})
