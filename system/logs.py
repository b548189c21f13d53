"""A process's log: lines for people, or one JSON object per line with the same keys everywhere.

at        ISO 8601, UTC
level     debug, info, warning, error or critical
part      coordinator, run or silo
message   the text for people
silo, run, round, strategy, group, seconds, bytes    if the line concerns one
error     the traceback, if there is one
"""

from __future__ import annotations

import json
import logging
import os
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TextIO

from coterie.system.terminal import legible

ENVIRONMENT = "COTERIE_LOG_FORMAT"
"""The variable with the format, for commands without the option and for their child processes."""
FORMATS = ("text", "json")
FIELDS = ("silo", "run", "round", "strategy", "group", "seconds", "bytes")
"""Keys of ``extra`` that a JSON line has."""
TEXT = "%(asctime)s %(levelname)s %(message)s"


def chosen(asked: str = "", configured: str = "") -> str:
    """Return the format: the command's option, else ``$COTERIE_LOG_FORMAT``, else ``configured``.

    Raises:
        ValueError: there is no such format.
    """
    found = asked or os.environ.get(ENVIRONMENT, "") or configured or FORMATS[0]
    if found not in FORMATS:
        raise ValueError(f"the format of the log must be {' or '.join(FORMATS)}. Got {found!r}.")
    return found


def show_progress() -> None:
    """Have a command without a log report the progress of long reads on standard error."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    logging.getLogger("coterie.tasks").setLevel(logging.INFO)


def formatter(part: str, kind: str, *, text: str = TEXT, **always: str) -> logging.Formatter:
    """Return a formatter of log records.

    Args:
        part: coordinator, run or silo.
        kind: a result of ``chosen``.
        text: format of lines for people, as in ``logging``.
        always: fields that every JSON line has.
    """
    return _Json(part, always) if kind == "json" else logging.Formatter(text)


class _Json(logging.Formatter):
    def __init__(self, part: str, always: dict[str, str]) -> None:
        super().__init__()
        self._part, self._always = part, always

    def format(self, record: logging.LogRecord) -> str:
        own = {key: getattr(record, key) for key in FIELDS if hasattr(record, key)}
        trace = self.formatException(record.exc_info) if record.exc_info else ""
        error = {"error": legible(trace)} if trace else {}
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        return json.dumps(
            {
                "at": at,
                "level": record.levelname.lower(),
                "part": self._part,
                "message": legible(record.getMessage()),
                **self._always,
                **own,
                **error,
            },
            default=str,
        )


def saying(part: str, kind: str, stream: TextIO | None = None) -> Callable[[str], None]:
    """Return a function that prints a line of this part on standard output, or on another stream.

    Lines for people have no timestamp: the process that collects them adds it.
    """
    lines = formatter(part, kind, text="%(message)s")

    def say(text: str) -> None:
        warns = text.startswith("WARNING")
        level = logging.WARNING if warns else logging.INFO
        record = logging.LogRecord(part, level, "", 0, text, None, None)
        print(lines.format(record), file=stream or sys.stdout, flush=True)

    return say
