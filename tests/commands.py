"""``coterie`` as a person types it, but in this process: no Python starts, the same ``main``."""

from __future__ import annotations

import io
import logging
import signal
import sys
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass

import pytest

from coterie.server.cli.main import main

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""A silo takes them for itself, for the rest of its process's life."""


@dataclass(frozen=True)
class Done:
    """What a command said, and its exit status."""

    returncode: int
    stdout: str
    stderr: str


def coterie(*arguments: str) -> Done:
    """Run a command to its end; what it logs is on standard error, as at a terminal."""
    out, err = io.StringIO(), io.StringIO()
    root, handler = logging.getLogger(), logging.StreamHandler(err)
    level = root.level
    root.addHandler(handler)
    root.setLevel(logging.INFO)
    handlers = {number: signal.getsignal(number) for number in SIGNALS}
    try:
        with redirect_stdout(out), redirect_stderr(err):
            returncode = _status(arguments)
    finally:
        root.removeHandler(handler)
        root.setLevel(level)
        for number, before in handlers.items():
            signal.signal(number, before)
    return Done(returncode, out.getvalue(), err.getvalue())


def _status(arguments: tuple[str, ...]) -> int:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["coterie", *arguments])
        try:
            main()
        except SystemExit as ended:
            assert ended.code is None or isinstance(ended.code, int)
            return ended.code or 0
    return 0
