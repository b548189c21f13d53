"""Tests with real processes that take minutes: only with ``make nightly``."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Mark every test in this folder as nightly."""
    here = str(Path(__file__).parent)
    for item in items:
        if str(item.path).startswith(here):
            item.add_marker(pytest.mark.nightly)
