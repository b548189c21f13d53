"""Tests with real processes that take minutes: only with ``make nightly``."""

from __future__ import annotations

from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """Mark every test in this folder as nightly."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.nightly)
