"""What tests of tasks share."""

from __future__ import annotations

import os

import pytest


@pytest.fixture
def real() -> str:
    """Return the folder of the real data sets, where the machine has them."""
    folder = os.environ.get("COTERIE_DATA", "")
    if not folder:
        pytest.skip("COTERIE_DATA is not set: name the folder of the real data sets to run this.")
    return folder
