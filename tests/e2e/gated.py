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


class Gated(Digits):
    """The digits; training waits while the gate is closed."""

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
    """Wait, in a silo, until its gate is open; a process without a gate does not wait."""
    folder = os.environ.get(GATE)
    if folder is None or not Path(folder, "closed").exists():
        return
    waiting = Path(folder, f"{os.getpid()}.waiting")
    waiting.touch()
    deadline = time.monotonic() + DEADLINE_S
    while Path(folder, "closed").exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"the gate was closed for {DEADLINE_S:.0f} s")
        time.sleep(0.02)
    waiting.unlink()


class Gate:
    """The test's side of it."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        root = str(Path(__file__).parents[2])
        self.environment = {GATE: str(folder), "PYTHONPATH": root}

    def close(self) -> None:
        """From now on whoever trains waits."""
        for left in self.folder.glob("*.waiting"):  # of processes that were killed there
            left.unlink()
        (self.folder / "closed").touch()

    def open(self) -> None:
        """Let all go on."""
        (self.folder / "closed").unlink(missing_ok=True)

    def waiting(self) -> int:
        """Silos that are held in the middle of their training."""
        return len(list(self.folder.glob("*.waiting")))
