"""Several organisations on this machine, made only by the commands that people type."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from coterie.server.machine.link import Control, control
from coterie.server.machine.superlink import Ports
from coterie.server.site.federation import Federation, load
from coterie.server.site.operators import local_identity
from coterie.system.ports import free_ports
from coterie.system.processes import family
from tests.commands import coterie
from tests.e2e import warm
from tests.e2e.gated import ONE_BATCH, TASK, Gate
from tests.e2e.runs import COTERIE, until

STOP_S = 60.0
SETTINGS = [part for key, value in ONE_BATCH.items() for part in ("--set", f"{key}={value}")]
NAMES = ("a", "b")


class Organisations:
    """A coordinator with TLS and node authentication, and silos with their own folders."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.gate = Gate(folder / "gate")
        self.ports = Ports.free()
        (self.metrics,) = free_ports(1)
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.coordinator = folder / "coordinator"
        self.done(
            "federation", "init", str(self.coordinator),
            "--address", f"127.0.0.1:{self.ports.fleet}",
            "--control-port", str(self.ports.control), "--runtime-port", str(self.ports.runtime),
        )  # fmt: skip

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

    def control(self) -> AbstractContextManager[Control]:
        """The coordinator's own calls to its SuperLink."""
        made = self.federation
        return control(
            made.control_address, root_certificates=made.ca, identity=local_identity(made)
        )

    def done(self, *arguments: str) -> str:
        """A command, which has to succeed; returns its standard output."""
        done = coterie(*arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def command(self, *arguments: str) -> str:
        """The same of an operator."""
        return self.done(*arguments, "--federation", str(self.coordinator))

    def start(self, name: str, *arguments: str) -> None:
        """Start a command that stays, with its log in ``log_of``."""
        self.start_program(name, *COTERIE, *arguments)

    def start_program(self, name: str, *line: str) -> None:
        """Start a program that stays; silos among them have the gate."""
        self.log_of(name).parent.mkdir(parents=True, exist_ok=True)
        cold = name == "superlink" or line[0] != sys.executable
        program = subprocess.Popen if cold else warm.popen
        with self.log_of(name).open("ab") as log:
            self.processes[name] = program(
                line,
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **self.gate.environment},
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
        watched = ("--metrics-address", str(self.metrics))
        self.start("superlink", "superlink", "--federation", str(self.coordinator), *watched)
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
        request = self.done("silo", "init", "--name", name, "--home", str(self.home_of(name)))
        self.configure(name, data, extra=extra)
        return request.strip()

    def configure(self, name: str, data: Mapping[str, Any], *, extra: str = "") -> None:
        """Write a silo.toml."""
        lines = "\n".join(f"{key} = {value!r}" for key, value in data.items())
        text = f'name = "{name}"\ntask = "{TASK}"\n[data]\n{lines}\n{extra}\n'
        (self.home_of(name) / "silo.toml").write_text(text)

    def enrol(self, request: str) -> str:
        """``coterie members enrol``; returns the join bundle."""
        return self.command("members", "enrol", request).strip()

    def join(self, name: str, bundle: str) -> None:
        """``coterie silo join``."""
        self.done("silo", "join", "--home", str(self.home_of(name)), bundle)

    def start_silo(self, name: str) -> None:
        """``coterie silo serve``."""
        self.start(name, "silo", "serve", "--home", str(self.home_of(name)))

    def mend(self) -> None:
        """The SuperLink, two silos, and nothing that another test left behind."""
        self.gate.open()
        self.stop_runs()  # one that goes on would hold its silos at the gate of the next test
        for name, process in list(self.processes.items()):
            if name not in (*NAMES, "superlink") and process.poll() is None:
                self.end(name)
        for name in NAMES:
            if self.processes[name].poll() is not None:
                self.start_silo(name)
        until(lambda: self.num_online() == len(NAMES), "a, b and nobody else", deadline_s=150)

    def stop_runs(self) -> None:
        """End every run that goes on."""
        with self.control() as calls:
            for run in calls.runs():
                if not run.ended:
                    calls.stop(run.run_id)

    def add(self, name: str, index: int, *, extra: str = "") -> None:
        """Everything for one more digits silo; silos of different indices share no sample."""
        request = self.make(name, {"train": 40, "test": 30, "skip": 70 * index}, extra=extra)
        self.join(name, self.enrol(request))
        self.start_silo(name)

    def num_online(self) -> int:
        """Silos that are connected."""
        with self.control() as calls:
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
    found = []
    for pid in family([superlink.pid]):
        try:
            line = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
        except OSError:
            continue
        if any(part.endswith(program) for part in line[:4]):
            found.append(pid)
    return sorted(found)
