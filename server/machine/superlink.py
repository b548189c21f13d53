"""Commands and processes of a SuperLink, with the settings that this project relies on."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from coterie.server.paths import ENVIRONMENT
from coterie.strategies.errors import FederationError, refused
from coterie.system.memory import keeping_freed_memory
from coterie.system.ports import check_free, free_ports, from_here, join_address, listens
from coterie.system.processes import Program, ProgramError
from coterie.system.proxies import past_proxies

ENGINE = "1.34"
"""The release of Flower that is needed: the last in which all calls are gRPC."""
START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 10.0
HOST = "127.0.0.1"
NO_EXECUTOR = ("--isolation", "process")


@dataclass(frozen=True)
class Ports:
    """The SuperLink's three APIs: for the ServerApp, for silos, for operators."""

    runtime: int = 9091
    fleet: int = 9092
    control: int = 9093

    @classmethod
    def free(cls) -> Ports:
        """Return three ports that nothing listens on."""
        return cls(*free_ports(3))

    def at(self, host: str, operators: str = "") -> tuple[str, str, str]:
        """Return ``HOST:PORT`` for silos, operators and the ServerApp (see ``plain_command``)."""
        inner = operators or host
        return (
            join_address(host, self.fleet),
            join_address(inner, self.control),
            join_address(inner, self.runtime),
        )


def require_engine() -> None:
    """Raise ``FederationError`` if another release of Flower is installed than ``ENGINE``."""
    installed = version("flwr")
    if not installed.startswith(f"{ENGINE}."):
        raise refused(
            f"Flower {installed} is installed here. A coordinator needs {ENGINE}: "
            f"`pip install 'flwr=={ENGINE}.*'`."
        )


def require_free(host: str, ports: Ports, *, operators: str = "") -> None:
    """Check that the ports are free before anything starts.

    Raises ``FederationError`` with the port, its purpose and the option that changes it.
    """
    for name in ("runtime", "fleet", "control"):
        port = getattr(ports, name)
        where = host if name == "fleet" else operators or host
        try:
            check_free(join_address(where, port))
        except OSError as error:
            raise refused(
                f"port {port} on {where} ({name} API) cannot be used: {error.strerror}. Stop "
                f"the process that listens there, or choose another port with --{name}-port."
            ) from None


def environment(home: Path) -> dict[str, str]:
    """Return the environment of a SuperLink whose files are under ``home``.

    It has no telemetry, no update check, and no proxy between its parts.
    """
    own_scripts = str(Path(sys.executable).parent)
    # A federation that the user's commands mean by default has no say in another SuperLink.
    inherited = {key: value for key, value in os.environ.items() if key != ENVIRONMENT}
    return {
        **keeping_freed_memory(),
        **inherited,
        **past_proxies(inherited),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_HOME": str(home / "flwr"),
        "COTERIE_HOME": str(home),
        # The SuperLink starts its helpers by name.
        "PATH": own_scripts + os.pathsep + os.environ.get("PATH", ""),
    }


def gated_command(silos: str, operators: str, serverapp: str, *options: str) -> list[str]:
    """Return the command line of a federation's SuperLink, which checks each operator.

    Raises ``FederationError`` where another Flower is installed, as ``plain_command`` does.
    """
    return _command("coterie.server.site.gate", silos, operators, serverapp, *options)


def _command(program: str, silos: str, operators: str, serverapp: str, *options: str) -> list[str]:
    require_engine()
    return [
        *(sys.executable, "-P", "-m", program),
        "--disable-runtime-dependency-installation",
        *("--fleet-api-address", silos),
        *("--control-api-address", operators),
        *("--serverappio-api-address", serverapp),
        *options,
    ]


def plain_command(
    host: str, ports: Ports, *, operators: str = "", database: Path | None = None
) -> list[str]:
    """Return the command line of a SuperLink without TLS; a separate executor starts ServerApps.

    With a database, runs of ``executor_command`` survive its restart.

    Args:
        host: address to listen on.
        operators: address to listen on for operators and the ServerApp, if different.
        database: SQLite file of its state, on a local disk; None keeps it in memory.
    """
    options = ["--insecure", *NO_EXECUTOR]
    options += ["--database", str(database)] if database else []
    return _command("coterie.engine.fast.superlink.serving", *ports.at(host, operators), *options)


def executor_command(address: str, *options: str) -> list[str]:
    """Return the command line of an executor of ServerApps at a SuperLink's runtime API."""
    return [
        *(sys.executable, "-m", "coterie.server.executor"),
        "--insecure",  # between processes of one machine, or in a network that is trusted
        *("--plugin-type", "serverapp"),
        *("--appio-api-address", from_here(address)),
        *options,
    ]


def wait_until_it_answers(
    program: Program,
    addresses: Sequence[str],
    stopped: Callable[[], bool] = lambda: False,
    *,
    deadline_s: float = START_DEADLINE_S,
) -> None:
    """Wait until a SuperLink listens on these addresses, or ``stopped``.

    Raises ``FederationError``, with the end of its log, if it ended or is silent until the
    deadline.
    """
    try:
        program.wait_until(
            lambda: all(map(listens, addresses)), deadline_s=deadline_s, stopped=stopped
        )
    except ProgramError as error:
        raise FederationError(str(error)) from None


class SuperLink:
    """A SuperLink as a child process, for demos, tests and benchmarks. A context manager.

    Without ``executes``, ServerApps are not started: this process is one (``run_here``).
    """

    def __init__(
        self,
        home: Path,
        *,
        ports: Ports | None = None,
        options: Sequence[str] = (),
        executes: bool = True,
    ) -> None:
        self.ports = ports or Ports.free()
        self._home, self._executes = home, executes
        self.program = self._program("SuperLink", [*plain_command(HOST, self.ports), *options])
        self.executor: Program | None = None

    @property
    def fleet_address(self) -> str:
        """The address for silos."""
        return f"{HOST}:{self.ports.fleet}"

    @property
    def control_address(self) -> str:
        """The address at which runs are submitted."""
        return f"{HOST}:{self.ports.control}"

    @property
    def runtime_address(self) -> str:
        """The address for ServerApps."""
        return f"{HOST}:{self.ports.runtime}"

    def _program(self, name: str, line: list[str]) -> Program:
        log = self._home / f"{name.lower()}.log"
        return Program(name, line, log=log, environment=environment(self._home))

    def start(self) -> None:
        """Start without waiting until it answers; see ``wait``."""
        require_free(HOST, self.ports)
        self._stop_executor()
        self.program.start()

    def wait(self, deadline_s: float = START_DEADLINE_S) -> None:
        """Wait until silos and operators can connect; see ``wait_until_it_answers``."""
        addresses = [self.fleet_address, self.control_address, self.runtime_address]
        wait_until_it_answers(self.program, addresses, deadline_s=deadline_s)
        if self.executor is None and self._executes:
            parent = ("--parent-pid", str(self.program.process.pid))
            self.executor = self._program("executor", executor_command(addresses[-1], *parent))
            self.executor.start()

    def _stop_executor(self) -> None:
        if self.executor is not None:
            self.executor.stop(deadline_s=STOP_DEADLINE_S, rest=signal.SIGKILL)
            self.executor = None

    @property
    def pids(self) -> set[int]:
        """The process ids of the SuperLink and the executor."""
        programs = [self.program, *([self.executor] if self.executor else [])]
        return {program.process.pid for program in programs if not program.ended}

    def stop(self) -> None:
        """Stop it and its helpers."""
        self._stop_executor()
        # A ServerApp runs in a session of its own and would outlive a SuperLink that is ended.
        self.program.stop(deadline_s=STOP_DEADLINE_S, rest=signal.SIGKILL)

    def __enter__(self) -> SuperLink:
        self.start()
        self.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
