"""A silo's journal: its view of its runs, one JSON object per line in its folder.

It never leaves the silo. ``coterie silo report`` draws it.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord

from coterie import wire
from coterie.system.files import append_line, make_folder

log = logging.getLogger("coterie.silo")

JOURNAL = "journal.jsonl"
WRONG = "wrong-answers"
"""Number of misclassified test samples."""
NOTED = (
    wire.NUM_EXAMPLES, wire.TRAIN_LOSS, wire.SECONDS, wire.LOSS, wire.ERROR, wire.RECEIVED_LOSS,
    wire.RECEIVED_ERROR, wire.TRIVIAL, WRONG,
)  # fmt: skip


def note(
    home: str,
    kind: str,
    run: str,
    config: ConfigRecord,
    metrics: Mapping[str, float | int],
    *,
    lead: Mapping[str, str] | None = None,
) -> None:
    """Append a line about one piece of work; a full disk loses the line, not the work.

    Args:
        home: the silo's folder; empty writes nothing.
        config: of the message: round, purpose, size of the silo's group.
        metrics: of the answer.
        lead: ``metric`` and ``unit`` of the errors; by default an error without a unit.
    """
    if not home:
        return
    numbers = {key: metrics[key] for key in NOTED if key in metrics}
    line: dict[str, Any] = {
        "at": round(time.time(), 3),
        "run": run,
        "round": config.get(wire.ROUND),
        "type": kind,
        "purpose": config.get(wire.PURPOSE, ""),
        "group-size": config.get(wire.GROUP_SIZE),
        **(lead or {}),
        **{key: value if math.isfinite(value) else None for key, value in numbers.items()},
    }
    try:
        make_folder(Path(home))
        append_line(Path(home) / JOURNAL, json.dumps(line).encode(), synced=False)
    except OSError as error:
        log.warning("the journal could not be written: %s", error)


def json_lines(file: Path) -> Iterator[dict[str, Any] | None]:
    """Yield the objects in a silo's journal or ledger, oldest first; None for a damaged line.

    Raises:
        OSError: the file cannot be read.
    """
    with file.open(encoding="utf-8", errors="replace") as opened:
        yield from map(json_object, filter(str.strip, opened))


def json_object(line: str | bytes) -> dict[str, Any] | None:
    """Return the object in a line; None if it is damaged."""
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return entry if isinstance(entry, dict) else None
