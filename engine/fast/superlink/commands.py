"""Flower's own commands, run in this process, and the few names in them that are replaced."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from importlib.metadata import entry_points
from types import ModuleType
from typing import Any, cast

MEANT_SO = ("Option `--insecure` was set", "SuperNode authentication is disabled")
"""Beginnings of Flower's warnings about intended settings; `coterie superlink` reports them."""


def flower_command(name: str) -> Callable[[], None]:
    """Return one of Flower's commands as a function that reads ``sys.argv``."""
    (found,) = entry_points(group="console_scripts", name=name)
    command = cast(Callable[[], None], found.load())
    for handler in logging.getLogger("flwr").handlers:
        vars(handler)["colored"] = sys.stderr.isatty()
        handler.addFilter(lambda record: not str(record.msg).startswith(MEANT_SO))
    return command


def replace_in(module: ModuleType, **values: Any) -> None:
    """Replace names in one of Flower's modules."""
    there = vars(module)
    assert values.keys() <= there.keys(), f"another Flower: {module} has no {list(values)}"
    there.update(values)
