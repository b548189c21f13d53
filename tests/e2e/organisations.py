"""Several organisations on this machine, made only by the commands that people type."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coterie.server.machine.link import control
from coterie.server.machine.superlink import Ports
from coterie.server.site.federation import Federation, load
from tests.e2e.conftest import COTERIE, coterie, until

STOP_S = 20.0
COMMAND_S = 150.0
"""A command starts a Python that imports Flower: seconds, and more on a machine that is busy."""


class Organisations:
    """A coordinator with TLS and node authentication, and silos with folders of their own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.ports = Ports.free()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.coordinator = folder / "coordinator"
        done = coterie(
            "init", str(self.coordinator), "--address", f"127.0.0.1:{self.ports.fleet}",
            "--control-port", str(self.ports.control), "--runtime-port", str(self.ports.runtime),
            deadline_s=COMMAND_S,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr

    def __enter__(self) -> Organisations:
        return self

    def __exit__(self, *_: object) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.terminate()
        for process in self.processes.values():
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(STOP_S)

    @property
    def federation(self) -> Federation:
        """The coordinator's folder."""
        return load(self.coordinator)

    def command(self, *arguments: str, deadline_s: float = COMMAND_S) -> str:
        """An operator's command, which has to succeed; returns its standard output."""
        done = coterie(*arguments, "--federation", str(self.coordinator), deadline_s=deadline_s)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def start(
        self, name: str, *arguments: str, environment: Mapping[str, str] | None = None
    ) -> None:
        """Start a command that stays, with its log in ``log_of``."""
        self.log_of(name).parent.mkdir(parents=True, exist_ok=True)
        with self.log_of(name).open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [*COTERIE, *arguments],
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **(environment or {})},
                start_new_session=True,
            )

    def log_of(self, name: str) -> Path:
        """Log of a process that ``start`` started."""
        return self.folder / "logs" / f"{name}.log"

    def said(self, name: str) -> str:
        """What it logged so far."""
        return self.log_of(name).read_text(errors="replace")

    def start_superlink(self) -> None:
        """Start the coordinator and wait until it is ready."""
        self.start("superlink", "superlink", "--federation", str(self.coordinator))
        until(
            lambda: "operators to" in self.said("superlink"),
            "the SuperLink to be ready",
            deadline_s=120,
        )

    def home_of(self, name: str) -> Path:
        """A silo's folder."""
        return self.folder / "silos" / name

    def make(self, name: str, data: Mapping[str, Any], *, extra: str = "") -> str:
        """``coterie silo init`` and a silo.toml; returns the enrolment request."""
        home = str(self.home_of(name))
        done = coterie("silo", "init", "--name", name, "--home", home, deadline_s=COMMAND_S)
        assert done.returncode == 0, done.stderr
        self.configure(name, data, extra=extra)
        return done.stdout.strip()

    def configure(self, name: str, data: Mapping[str, Any], *, extra: str = "") -> None:
        """Write a silo.toml."""
        lines = "\n".join(f"{key} = {value!r}" for key, value in data.items())
        text = f'name = "{name}"\ntask = "digits"\n[data]\n{lines}\n{extra}\n'
        (self.home_of(name) / "silo.toml").write_text(text)

    def enrol(self, request: str) -> str:
        """``coterie enrol``; returns the join bundle."""
        return self.command("enrol", request).strip()

    def join(self, name: str, bundle: str) -> None:
        """``coterie silo join``."""
        home = str(self.home_of(name))
        done = coterie("silo", "join", "--home", home, bundle, deadline_s=COMMAND_S)
        assert done.returncode == 0, done.stderr

    def start_silo(self, name: str, *arguments: str, **keys: Any) -> None:
        """``coterie silo start``."""
        self.start(name, "silo", "start", "--home", str(self.home_of(name)), *arguments, **keys)

    def add(self, name: str, index: int, *, extra: str = "") -> None:
        """Everything for one more digits silo; silos of different indices share no sample."""
        request = self.make(name, {"train": 40, "test": 30, "skip": 70 * index}, extra=extra)
        self.join(name, self.enrol(request))
        self.start_silo(name)

    def num_online(self) -> int:
        """Silos that are connected."""
        made = self.federation
        with control(made.control_address, root_certificates=made.ca) as calls:
            return calls.num_online()

    def wait_for(self, count: int) -> None:
        """Wait until so many silos are connected."""
        until(lambda: self.num_online() >= count, f"{count} silos", deadline_s=150)

    def submit(self, *arguments: str) -> Path:
        """``coterie run --detach``; returns the record's folder."""
        out = self.command("run", *arguments, "--detach")
        found = re.search(r"its record: (\S+)", out)
        assert found, out
        return Path(found[1])

    def end(self, name: str, how: signal.Signals = signal.SIGTERM) -> int:
        """Signal a process and wait for its end; returns its status."""
        self.processes[name].send_signal(how)
        return self.processes[name].wait(STOP_S)


def processes_of(superlink: subprocess.Popen[bytes], program: str) -> list[int]:
    """Process ids of a program that runs under the coordinator."""
    from coterie.system.processes import family

    found = []
    for pid in family([superlink.pid]):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if any(part.endswith(program) for part in line[:3]):
            found.append(pid)
    return sorted(found)


def rest(seconds: float) -> None:
    """Let time pass that the system under test needs."""
    time.sleep(seconds)


PYTHON = sys.executable
