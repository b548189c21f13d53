"""Every test of this folder has silos that have just started."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.kit import restart_silos


@pytest.fixture(autouse=True)
def fresh_silos() -> Iterator[None]:
    """Forget at both ends what silos' processes keep in memory."""
    restart_silos()
    yield
    restart_silos()
