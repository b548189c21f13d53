"""A task for silos of the tests: the digits, but a test can hold their training, and make it fail.

It is also the plug-in point at work: a task of the user's own, named by module and attribute.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

from coterie.tasks.images.digits import Digits

TASK = "tests.e2e.gated:Gated"
GATE = "COTERIE_TEST_GATE"
FAILS, DIES = 41, 43
"""Numbers of training samples (in one batch) at which a silo raises, and at which it is killed."""
DEADLINE_S = 150.0
ONE_BATCH = {"local-epochs": 1, "batch-size": 64}
"""Keys of a run whose trainings are one mini-batch."""


class Gated(Digits):
    """The digits; training waits at the gate."""

    def loss(self, outputs: Any, targets: Any) -> Any:
        """As the digits', after the gate."""
        if outputs.requires_grad:
            pass_gate()
            if targets.numel() == FAILS:
                raise ZeroDivisionError("a secret value: 41")
            if targets.numel() == DIES:
                os.kill(os.getpid(), signal.SIGKILL)
        return super().loss(outputs, targets)


def pass_gate() -> None:
    """Wait, in a silo, until its gate lets it through; a process without a gate does not wait."""
    folder = os.environ.get(GATE)
    ticket = read_ticket(Path(folder)) if folder else ""
    if not folder or not ticket:
        return
    waiting = Path(folder, f"{os.getpid()}.{ticket}")
    waiting.touch()
    deadline = time.monotonic() + DEADLINE_S
    while read_ticket(Path(folder)) == ticket:
        if time.monotonic() > deadline:
            raise TimeoutError(f"the gate was closed for {DEADLINE_S:.0f} s")
        time.sleep(0.02)
    waiting.unlink()


def read_ticket(folder: Path) -> str:
    """Each process that comes to the gate waits until there is another; empty: it is open."""
    try:
        return (folder / "ticket").read_text()
    except FileNotFoundError:
        return ""


class Gate:
    """The test's side of it. A run of ``ONE_BATCH`` comes to it once in every training."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self.tickets = 0
        path = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]
        self.environment = {GATE: str(folder), "PYTHONPATH": os.pathsep.join(path)}

    def close(self) -> None:
        """From now on every training waits; who waited already goes on."""
        self.tickets += 1
        unfinished = self.folder / "next"
        unfinished.write_text(str(self.tickets))
        unfinished.replace(self.folder / "ticket")

    def open(self) -> None:
        """Let all go on."""
        (self.folder / "ticket").unlink(missing_ok=True)

    def hold(self, count: int, *, rounds: int = 0) -> None:
        """Wait until so many silos train; after so many rounds that are let through."""
        for _ in range(rounds):
            self._until_held(count)
            self.close()
        self._until_held(count)

    def _until_held(self, count: int) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while len(held := list(self.folder.glob(f"*.{self.tickets}"))) < count:
            assert time.monotonic() < deadline, f"waited for {count} silos to train, {held} do"
            time.sleep(0.02)
