"""Containers: only with ``make e2e-docker``; needs a Docker engine and takes several minutes."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

collect_ignore = [
    *([] if find_spec("helm_python") else ["test_charts.py"]),
    *([] if find_spec("cyclonedx") else ["test_images.py"]),
]


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Everything in this folder is a docker test, and runs only when it is asked for."""
    asked = "docker" in str(config.getoption("markexpr"))
    mine = [item for item in items if Path(__file__).parent in item.path.parents]
    for item in mine:
        item.add_marker(pytest.mark.docker)
    if mine and not asked:
        config.hook.pytest_deselected(items=mine)
        items[:] = [item for item in items if item not in mine]
