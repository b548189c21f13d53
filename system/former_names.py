"""Former names of keys and settings, which still work for one release, with a warning.

Files, command lines and records pass here before they are checked, so that all other code knows
only today's names. Former names of options and commands are declared beside these
(``coterie.system.commandline``).
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from functools import cache
from typing import Any

RUN_KEYS = {
    "alone": "baseline-run",
    "leading-metric": "primary-metric",
    "pretrain-epochs": "cold-start-epochs",
    "pretrain-silos": "cold-start-silos",
    "pretrain-steps": "cold-start-steps",
}
FIELDS = {k.replace("-", "_"): now.replace("-", "_") for k, now in RUN_KEYS.items()}
"""Options of a strategy in Python."""
SILO = {"policy": {"metrics": "share_metrics"}, "monitoring": {"metrics": "metrics_address"}}
"""Sections of ``silo.toml``."""
NODE = {"metrics": "share-metrics"}
"""Keys of a silo's settings in a node config."""
COORDINATOR = {"monitoring": {"metrics": "metrics_address"}}
"""Sections of ``coterie.toml``."""
SPLIT = {"alpha": "dirichlet-alpha"}
"""Keys of a ``[split]``."""
REPORT = {"alone-run": "local-run", "error-alone": "error-local"}
"""Fields of a report as JSON."""
OPTIONS = {f"split-{former}": f"split-{now}" for former, now in SPLIT.items()}
"""Options of a built-in task."""


def of_today(
    values: Mapping[str, Any], names: Mapping[str, str], *, quiet: bool = False
) -> dict[str, Any]:
    """Return values under today's names; if both names are given, today's counts.

    Args:
        names: former name → today's.
        quiet: do not warn, because nobody typed these names now: a record, for example.
    """
    found = dict(values)
    for former in names.keys() & values.keys():
        value = found.pop(former)
        found.setdefault(names[former], value)
        if not quiet:
            warn(former, names[former])
    return found


def in_sections(
    table: Mapping[str, Any], sections: Mapping[str, Mapping[str, str]]
) -> dict[str, Any]:
    """Return a file's content with today's names in these sections."""
    return {
        name: of_today(part, sections[name])
        if name in sections and isinstance(part, Mapping)
        else part
        for name, part in table.items()
    }


def with_former(fields: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    """Return fields for programs to read, also under their former names."""
    former = {former: fields[now] for former, now in names.items() if now in fields}
    return {**fields, **former}


@cache
def warn(former: str, now: str) -> None:
    """Print, once, what a name that still works is called today."""
    print(f"warning: `{former}` is now `{now}`.", file=sys.stderr)
