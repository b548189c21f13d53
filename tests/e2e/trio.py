"""A federation without TLS that tests share: silos a, b and c, and a gate for their training."""

from __future__ import annotations

import signal
import time
from pathlib import Path
from typing import Any

from coterie.server.machine.link import control
from coterie.server.machine.local import LocalFederation
from tests.commands import Done, coterie
from tests.e2e.gated import Gate
from tests.e2e.runs import NAMES, spec, until

ENDING_S = 5.0
"""How long the process of a run takes to end after the last event of its record."""


class Trio(LocalFederation):
    """A SuperLink and three silos, which are mended before a test has them."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        folder.mkdir(parents=True, exist_ok=True)
        self.gate = Gate(folder / "gate")

    def add(self, name: str, index: int, **options: Any) -> None:
        """Start one more silo, or one of the three again."""
        self.start_silo(spec(name, index, **options), environment=self.gate.environment)

    def num_online(self) -> int:
        """Silos that the SuperLink takes for connected."""
        with control(self.superlink.control_address) as calls:
            return calls.num_online()

    def kill(self, name: str) -> None:
        """SIGKILL to a silo."""
        self.end_silo(name, how=signal.SIGKILL)
        self.processes[name].wait(60)

    def kill_superlink(self) -> None:
        """SIGKILL to the SuperLink; its helpers are left to find out."""
        self.superlink.program.process.kill()
        self.superlink.program.process.wait(60)

    def control(self, *arguments: str) -> Done:
        """A command to this SuperLink."""
        return coterie(*arguments, "--superlink", self.superlink.control_address)

    def records(self, *arguments: str) -> Done:
        """A command about the records of this federation."""
        return coterie(*arguments, "--runs-dir", str(self.runs_dir))

    def operator(self, *arguments: str) -> Done:
        """A command to this SuperLink about a run that is recorded here."""
        return self.control(*arguments, "--runs-dir", str(self.runs_dir))

    def mend(self) -> None:
        """Three silos, and nothing that another test left behind."""
        self.gate.open()
        self.runs_dir = self.folder / "runs"
        died = self._dismiss()
        if died or self._is_busy():  # a silo that was killed counts as connected for a minute
            self.superlink.stop()
            self.superlink.start()
        for index, name in enumerate(NAMES):
            if name not in self.processes:
                self.add(name, index)
        self.wait_for_silos(len(NAMES))
        until(lambda: self.num_online() == len(NAMES), "the silos of another test to be gone")

    def _dismiss(self) -> bool:
        """End silos that are not of the three; return whether any died without a word."""
        died = False
        for name, process in self.processes.items():
            if name not in NAMES:
                process.terminate()
                process.wait(60)
            if process.poll() is not None:
                died |= process.returncode != 0
                del self.programs[name]
        return died

    def _is_busy(self) -> bool:
        """Whether the SuperLink is gone, or has a run that a test did not see to its end."""
        if self.superlink.program.process.poll() is not None:
            return True
        self.superlink.wait()
        deadline = time.monotonic() + ENDING_S
        with control(self.superlink.control_address) as calls:
            while busy := not all(run.ended for run in calls.runs()):
                if time.monotonic() > deadline:
                    break
                time.sleep(0.1)
        return busy
