"""Rules read all sources. They share what they have read, and leave it to no other test."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path

import pytest

READ = ("test_engine", "test_imports", "test_structure", "test_words")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """The sources are read in one worker."""
    for item in items:
        if item.path.parent == Path(__file__).parent and item.path.stem in READ:
            item.add_marker(pytest.mark.xdist_group("sources"))


@pytest.fixture(autouse=True, scope="module")
def kept() -> Iterator[None]:
    """No collection of other tests looks through the trees of all sources."""
    yield
    gc.freeze()
