"""Starting a SuperLink, with the settings that this project relies on."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coterie.server.site.federation import ENVIRONMENT
from coterie.strategies.errors import EXIT_CONFIG, FederationError
from coterie.system.processes import stop_with_family, tied

START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 10.0


@dataclass(frozen=True)
class Ports:
    """The SuperLink's three APIs: for the ServerApp, for silos, for operators."""

    runtime: int = 9091
    fleet: int = 9092
    control: int = 9093

    @classmethod
    def free(cls) -> Ports:
        """Three ports that nothing listens on."""
        sockets = [socket.socket() for _ in range(3)]
        try:
            for s in sockets:
                s.bind(("127.0.0.1", 0))
            return cls(*(s.getsockname()[1] for s in sockets))
        finally:
            for s in sockets:
                s.close()


def require_free(host: str, ports: Ports, *, operators: str = "") -> None:
    """Refuse ports that are taken, before anything starts; arguments as in ``command``.

    Raises:
        FederationError: names the port, what it is for and the option that changes it.
    """
    for name in ("runtime", "fleet", "control"):
        port = getattr(ports, name)
        where = host if name == "fleet" else operators or host
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((where, port))
            except OSError as error:
                raise FederationError(
                    f"port {port} on {where} ({name} API) cannot be used: {error.strerror}. "
                    f"Stop what listens there, or choose another with --{name}-port.",
                    phase="start",
                    exit_code=EXIT_CONFIG,
                ) from None


def environment(home: Path) -> dict[str, str]:
    """Environment of a SuperLink: no telemetry, no update check, its files under ``home``."""
    own_scripts = str(Path(sys.executable).parent)
    # A federation that the user's commands mean by default has no say in another SuperLink.
    inherited = {key: value for key, value in os.environ.items() if key != ENVIRONMENT}
    return {
        **inherited,
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_HOME": str(home / "flwr"),
        "COTERIE_HOME": str(home),
        # The SuperLink starts its helpers by name.
        "PATH": own_scripts + os.pathsep + os.environ.get("PATH", ""),
    }


def flower_program(name: str) -> str:
    """Path of one of Flower's commands, as installed beside this Python.

    Raises:
        FederationError: it is not there.
    """
    found = shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        raise FederationError(f"{name} is not installed beside this Python.", exit_code=EXIT_CONFIG)
    return found


def command(
    host: str,
    ports: Ports,
    *,
    operators: str = "",
    database: Path | None = None,
    executor: bool = True,
) -> list[str]:
    """The command line of a plain-text SuperLink.

    Args:
        host: address to listen on.
        ports: where.
        operators: address to listen on for operators and the ServerApp, if it is another.
        database: SQLite file of its state, on a local disk; None keeps it in memory.
        executor: whether it starts ServerApps itself. A run that is started by an executor of its
            own (``executor_command``) goes on when the SuperLink with a database is restarted.
    """
    inner = operators or host
    return [
        flower_program("flower-superlink"),
        "--insecure",
        "--disable-runtime-dependency-installation",
        "--serverappio-api-address",
        f"{inner}:{ports.runtime}",
        "--fleet-api-address",
        f"{host}:{ports.fleet}",
        "--control-api-address",
        f"{inner}:{ports.control}",
        *(["--database", str(database)] if database else []),
        *([] if executor else ["--isolation", "process"]),
    ]


def executor_command(address: str) -> list[str]:
    """The command line of an executor of ServerApps at a plain-text SuperLink's runtime API."""
    return [
        flower_program("flower-superexec"),
        "--insecure",
        "--plugin-type",
        "serverapp",
        "--appio-api-address",
        address,
    ]


class SuperLink:
    """A SuperLink as a child process, for demos, tests and benchmarks. A context manager."""

    def __init__(
        self,
        home: Path,
        *,
        host: str = "127.0.0.1",
        ports: Ports | None = None,
        options: Sequence[str] = (),
    ) -> None:
        self.home = home
        self.options = tuple(options)
        self.host = host
        self.ports = ports or Ports.free()
        self.log = home / "superlink.log"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def pid(self) -> int:
        """Of the SuperLink's process."""
        assert self._process is not None
        return self._process.pid

    @property
    def fleet_address(self) -> str:
        """Where silos connect."""
        return f"{self.host}:{self.ports.fleet}"

    @property
    def control_address(self) -> str:
        """Where runs are submitted."""
        return f"{self.host}:{self.ports.control}"

    def start(self, *, extra_environment: Mapping[str, str] | None = None) -> None:
        """Start without waiting until it answers; see ``wait``."""
        require_free(self.host, self.ports)
        self.home.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                tied([*command(self.host, self.ports), *self.options]),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env={**environment(self.home), **(extra_environment or {})},
                start_new_session=True,
            )

    def wait(self) -> None:
        """Wait until every API listens.

        Raises:
            FederationError: it ended, or does not answer within a minute; with its last words.
        """
        deadline = time.monotonic() + START_DEADLINE_S
        while not all(self._listens(p) for p in (self.ports.fleet, self.ports.control)):
            ended = self._process is None or self._process.poll() is not None
            if ended or time.monotonic() > deadline:
                words = "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])
                raise FederationError(f"the SuperLink did not start. Its log ends:\n{words}")
            time.sleep(0.05)

    def _listens(self, port: int) -> bool:
        with socket.socket() as probe:
            probe.settimeout(0.2)
            return probe.connect_ex((self.host, port)) == 0

    def stop(self) -> None:
        """End it and its helpers."""
        if self._process is None:
            return
        # A ServerApp runs in a session of its own and would outlive a SuperLink that is ended.
        stop_with_family(self._process, deadline_s=STOP_DEADLINE_S, rest=signal.SIGKILL)
        self._process = None

    def __enter__(self) -> SuperLink:
        self.start()
        self.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
