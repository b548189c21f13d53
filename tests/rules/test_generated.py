"""What ``make config`` writes is up to date."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

FILE = Path(__file__).parents[2] / "docs" / "generate.py"


@pytest.fixture(scope="module")
def generate() -> Any:
    spec = importlib.util.spec_from_file_location("generate", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_nothing_that_is_made_from_the_options_is_stale(generate: Any) -> None:
    stale = [str(file) for file in generate.stale()]
    assert not stale, f"run `make config`: {', '.join(stale)}"


def test_a_changed_default_is_noticed(generate: Any) -> None:
    text = (FILE.parents[1] / "pyproject.toml").read_text(encoding="utf-8")
    changed = text.replace("\nlr = 0.1\n", "\nlr = 0.2\n")
    assert changed != text and generate.with_defaults(changed) == text
