"""Starting a SuperLink, with the settings that this project relies on."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points, version
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from coterie.server.site.federation import ENVIRONMENT
from coterie.strategies.errors import FederationError, refused
from coterie.system.memory import keeping_freed_memory
from coterie.system.ports import check_free, free_ports, from_here, join_address, listens
from coterie.system.processes import Program, ProgramError
from coterie.system.proxies import past_proxies

HTTP_SINCE, NEWEST = (1, 40), (1, 42)
"""Releases of Flower: from which on silos, operators and ServerApps call a SuperLink over HTTP, and
the newest that was tried. Between 1.34 and the first of them it is some of each."""
ENGINES = f"1.34, or {'.'.join(map(str, HTTP_SINCE))} to {'.'.join(map(str, NEWEST))}"
START_DEADLINE_S = 60.0
STOP_DEADLINE_S = 10.0
HOST = "127.0.0.1"
MEANT_SO = ("Option `--insecure` was set", "SuperNode authentication is disabled")
"""How warnings of Flower's begin of what is meant so: `coterie superlink` says it itself."""
NO_EXECUTOR = ("--isolation", "process")


@dataclass(frozen=True)
class Ports:
    """The SuperLink's three APIs: for the ServerApp, for silos, for operators."""

    runtime: int = 9091
    fleet: int = 9092
    control: int = 9093

    @classmethod
    def free(cls) -> Ports:
        """Three ports that nothing listens on."""
        return cls(*free_ports(3))

    def at(self, host: str, operators: str = "") -> tuple[str, str, str]:
        """``HOST:PORT`` for silos, operators and the ServerApp; arguments as in ``command``."""
        inner = operators or host
        return (
            join_address(host, self.fleet),
            join_address(inner, self.control),
            join_address(inner, self.runtime),
        )


def engine() -> tuple[int, int]:
    """The release of Flower that is installed here."""
    major, minor = version("flwr").split(".")[:2]
    return int(major), int(minor)


def engine_speaks_http() -> bool:
    """Whether the SuperLink and the ServerApps of the Flower that is installed here do.

    Raises:
        FederationError: it is a release that this project does not know.
    """
    if engine() == (1, 34) or HTTP_SINCE <= engine() <= NEWEST:
        return engine() >= HTTP_SINCE
    raise refused(
        f"Flower {version('flwr')} is installed here. A coordinator needs {ENGINES}: "
        "`pip install 'flwr==1.34.*'`."
    )


def require_free(host: str, ports: Ports, *, operators: str = "") -> None:
    """Refuse ports that are taken, before anything starts; arguments as in ``command``.

    Raises:
        FederationError: names the port, what it is for and the option that changes it.
    """
    for name in ("runtime", "fleet", "control"):
        port = getattr(ports, name)
        where = host if name == "fleet" else operators or host
        try:
            check_free(join_address(where, port))
        except OSError as error:
            raise refused(
                f"port {port} on {where} ({name} API) cannot be used: {error.strerror}. "
                f"Stop what listens there, or choose another with --{name}-port."
            ) from None


def environment(home: Path) -> dict[str, str]:
    """Environment of a SuperLink: no telemetry, no update check, its files under ``home``, no proxy
    between its parts."""
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


def flower_command(name: str) -> Callable[[], None]:
    """One of Flower's commands, to be called here, with its arguments in ``sys.argv``."""
    (found,) = entry_points(group="console_scripts", name=name)
    command = cast(Callable[[], None], found.load())
    for handler in logging.getLogger("flwr").handlers:
        vars(handler)["colored"] = sys.stderr.isatty()
        handler.addFilter(lambda record: not str(record.msg).startswith(MEANT_SO))
    return command


def replace_in(module: ModuleType, **values: Any) -> None:
    """Put ours in the place of names that a module of Flower's has."""
    there = vars(module)
    assert values.keys() <= there.keys(), f"another Flower: {module} has no {list(values)}"
    there.update(values)


def command(silos: str, operators: str, serverapp: str, *options: str) -> list[str]:
    """The command line of a SuperLink: where it listens for whom, ``HOST:PORT``, and more.

    With ``NO_EXECUTOR`` a run that is started by an executor of its own (``executor_command``) goes
    on when the SuperLink, with a database, is restarted.
    """
    own = "serving" if engine_speaks_http() else "lean"
    program = [sys.executable, "-P", "-m", f"coterie.server.machine.{own}"]
    return [*program, *_where(silos, operators, serverapp), *options]


def gated_command(silos: str, operators: str, serverapp: str, *options: str) -> list[str]:
    """The same of a federation's SuperLink, which lets in operators by their keys and roles."""
    program = [sys.executable, "-P", "-m", "coterie.server.machine.gate"]
    return [*program, *_where(silos, operators, serverapp), *options]


def _where(silos: str, operators: str, serverapp: str) -> list[str]:
    return [
        "--disable-runtime-dependency-installation",
        *("--fleet-api-address", silos),
        *("--control-api-address", operators),
        *("--serverappio-api-address", serverapp),
    ]


def plain_command(
    host: str,
    ports: Ports,
    *,
    operators: str = "",
    database: Path | None = None,
) -> list[str]:
    """The command line of a plain-text SuperLink; ServerApps are started by an executor beside it.

    Args:
        host: address to listen on.
        ports: where.
        operators: address to listen on for operators and the ServerApp, if it is another.
        database: SQLite file of its state, on a local disk; None keeps it in memory.
    """
    options = ["--insecure", *NO_EXECUTOR]
    options += ["--database", str(database)] if database else []
    return command(*ports.at(host, operators), *options)


def executor_command(address: str, *options: str) -> list[str]:
    """The command line of an executor of ServerApps at a SuperLink's runtime API."""
    return [
        *(sys.executable, "-m", "coterie.server.machine.executor"),
        "--insecure",  # between processes of one machine, or in a network that is trusted
        *("--plugin-type", "serverapp"),
        *("--appio-api-address", from_here(address)),
        *options,
    ]


def wait_until_it_answers(
    program: Program, addresses: Sequence[str], stopped: Callable[[], bool] = lambda: False
) -> None:
    """Wait until a SuperLink listens on these addresses, or ``stopped``.

    Raises:
        FederationError: it ended, or does not answer within a minute; with the end of its log.
    """
    try:
        program.wait_until(
            lambda: all(map(listens, addresses)), deadline_s=START_DEADLINE_S, stopped=stopped
        )
    except ProgramError as error:
        raise FederationError(str(error), phase="start") from None


class SuperLink:
    """A SuperLink as a child process, for demos, tests and benchmarks. A context manager."""

    def __init__(
        self, home: Path, *, ports: Ports | None = None, options: Sequence[str] = ()
    ) -> None:
        self.ports = ports or Ports.free()
        self._home = home
        self.program = self._program("SuperLink", [*plain_command(HOST, self.ports), *options])
        self.executor: Program | None = None

    @property
    def fleet_address(self) -> str:
        """Where silos connect."""
        return f"{HOST}:{self.ports.fleet}"

    @property
    def control_address(self) -> str:
        """Where runs are submitted."""
        return f"{HOST}:{self.ports.control}"

    def _program(self, name: str, line: list[str]) -> Program:
        log = self._home / f"{name.lower()}.log"
        return Program(name, line, log=log, environment=environment(self._home))

    def start(self) -> None:
        """Start without waiting until it answers; see ``wait``."""
        require_free(HOST, self.ports)
        self._stop_executor()
        self.program.start()

    def wait(self) -> None:
        """Wait until silos and operators can connect; see ``wait_until_it_answers``."""
        addresses = [self.fleet_address, self.control_address, f"{HOST}:{self.ports.runtime}"]
        wait_until_it_answers(self.program, addresses)
        if self.executor is None:
            parent = ("--parent-pid", str(self.program.process.pid))
            self.executor = self._program("executor", executor_command(addresses[-1], *parent))
            self.executor.start()

    def _stop_executor(self) -> None:
        if self.executor is not None:
            self.executor.stop(deadline_s=STOP_DEADLINE_S, rest=signal.SIGKILL)
            self.executor = None

    @property
    def pids(self) -> set[int]:
        """Of the SuperLink and the executor."""
        programs = [self.program, *([self.executor] if self.executor else [])]
        return {program.process.pid for program in programs if not program.ended}

    def stop(self) -> None:
        """End it and its helpers."""
        self._stop_executor()
        # A ServerApp runs in a session of its own and would outlive a SuperLink that is ended.
        self.program.stop(deadline_s=STOP_DEADLINE_S, rest=signal.SIGKILL)

    def __enter__(self) -> SuperLink:
        self.start()
        self.wait()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()
