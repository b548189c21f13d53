"""``coterie superlink`` of a federation: TLS, enrolled silos only, and it outlives a crash.

Two processes are kept alive: the SuperLink, and the executor that starts ServerApps. A ServerApp
is not the SuperLink's child, so with the database on a run carries on while a crashed SuperLink
is started anew.
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from coterie.server.machine.link import control
from coterie.server.machine.superlink import environment, flower_program
from coterie.server.site import enrolled
from coterie.server.site.certificates import write_private
from coterie.server.site.enrolled import Node
from coterie.server.site.federation import ENVIRONMENT, Federation
from coterie.strategies.errors import EXIT_CONFIG, EXIT_RUN, FederationError
from coterie.system.processes import ENDING, stop_with_family, tied

START_DEADLINE_S, STOP_DEADLINE_S = 60.0, 10.0
LOOK_S = 0.2
SHORTEST_LIFE_S = 5.0
"""A process that ends sooner than this after its start is not started again at once."""
MAX_PAUSE_S = 30.0


def answers(federation: Federation) -> bool:
    """Whether something listens where the SuperLink takes operators."""
    host, _, port = federation.control_address.rpartition(":")
    with suppress(OSError), socket.create_connection((host.strip("[]"), int(port)), timeout=2):
        return True
    return False


def tell_superlink(federation: Federation) -> dict[str, Node]:
    """Make the running SuperLink follow the roster; return name → node."""
    with control(federation.control_address, root_certificates=federation.ca) as calls:
        return enrolled.sync(federation.roster, calls)


def serve(federation: Federation, say: Callable[[str], None]) -> int:
    """Run the SuperLink in the foreground until SIGTERM, SIGHUP or Ctrl-C; return the exit status.

    Raises:
        FederationError: a port is taken, or the SuperLink does not start.
    """
    reason = federation.renew_certificate()
    if reason:
        say(f"The server's certificate was renewed: {reason}.")
    listen = federation.config.listen
    for address in (listen.silos, listen.operators, listen.serverapp):
        _require_free(address)
    secret = federation.folder / "executor.secret"
    if not secret.exists():
        write_private(secret, secrets.token_bytes(32))
    superlink = _Child("SuperLink", _superlink_command(federation, secret), federation)
    executor = _Child("executor", _executor_command(federation, secret), federation)
    with _stopping() as stopped:
        try:
            superlink.start()
            _until_it_listens(superlink, federation, stopped)
            tell_superlink(federation)
            executor.start()
            _greet(federation, say)
            while not stopped():
                time.sleep(LOOK_S)
                if superlink.ended and superlink.restart(say, stopped):
                    _come_back(superlink, federation, say, stopped)
                if executor.ended:
                    executor.restart(say, stopped)
        finally:
            executor.stop()
            superlink.stop()
    say("The SuperLink has ended.")
    return 0


def _come_back(
    superlink: _Child,
    federation: Federation,
    say: Callable[[str], None],
    stopped: Callable[[], bool],
) -> None:
    """After a crash: whatever keeps it from starting may pass (a full disk), so never give up."""
    try:
        _until_it_listens(superlink, federation, stopped)
        if not stopped():
            tell_superlink(federation)
            say("The SuperLink is back.")
    except FederationError as error:
        say(str(error))


def _greet(federation: Federation, say: Callable[[str], None]) -> None:
    count = len(enrolled.names_by_node(federation.roster))
    silos, operators = ", ".join(federation.config.addresses), federation.control_address
    say(f"SuperLink: silos connect to {silos} (TLS, {count} enrolled), operators to {operators}")
    if federation.is_open_to_operators_elsewhere:
        say(
            f"WARNING: operators' API listens on {federation.config.listen.operators}. It asks for "
            "no password: anyone who can reach it can start runs and enrol silos."
        )


def _superlink_command(federation: Federation, secret: Path) -> list[str]:
    listen, tls = federation.config.listen, federation.tls
    database = ["--database", str(federation.folder / "superlink.db")]
    return [
        flower_program("flower-superlink"),
        "--ssl-ca-certfile", str(federation.ca),
        "--ssl-certfile", str(tls / "server.pem"),
        "--ssl-keyfile", str(tls / "server.key"),
        "--enable-supernode-auth",
        "--disable-runtime-dependency-installation",
        "--isolation", "process",
        "--superexec-auth-secret-file", str(secret),
        "--fleet-api-address", listen.silos,
        "--control-api-address", listen.operators,
        "--serverappio-api-address", listen.serverapp,
        *(database if federation.config.state.database else []),
    ]  # fmt: skip


def _executor_command(federation: Federation, secret: Path) -> list[str]:
    return [
        flower_program("flower-superexec"),
        "--insecure",  # between two processes of this machine, with a shared secret
        "--plugin-type", "serverapp",
        "--appio-api-address", federation.config.listen.serverapp,
        "--superexec-auth-secret-file", str(secret),
        "--parent-pid", str(os.getpid()),
    ]  # fmt: skip


class _Child:
    """A process that is started again when it ends, less and less often if it ends at once."""

    def __init__(self, name: str, command: list[str], federation: Federation) -> None:
        self.name = name
        self.log = federation.folder / "logs" / f"{name.lower()}.log"
        self._command = command
        self._environment = {
            **environment(federation.folder),
            "COTERIE_RUNS": str(federation.runs),
            ENVIRONMENT: str(federation.folder),
        }
        self._process: subprocess.Popen[bytes] | None = None
        self._started = 0.0
        self._pause = 1.0

    def start(self) -> None:
        self.log.parent.mkdir(exist_ok=True)
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                # Left behind, it would hold the ports and keep the next one from starting.
                tied(self._command),
                stdout=log,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                env=self._environment,
                start_new_session=True,  # Ctrl-C is for the parent, which ends them in order
            )
        self._started = time.monotonic()

    @property
    def ended(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def restart(self, say: Callable[[str], None], stopped: Callable[[], bool]) -> bool:
        """Start again after a pause; False if told to stop meanwhile."""
        assert self._process is not None
        lived = time.monotonic() - self._started
        self._pause = 1.0 if lived > SHORTEST_LIFE_S else min(2 * self._pause, MAX_PAUSE_S)
        status = self._process.returncode
        say(f"The {self.name} ended (status {status}); starting it again. Its log: {self.log}")
        due = time.monotonic() + self._pause
        while time.monotonic() < due:
            if stopped():
                return False
            time.sleep(LOOK_S)
        self.start()
        return True

    def last_words(self) -> str:
        return "\n".join(self.log.read_text(errors="replace").splitlines()[-5:])

    def stop(self) -> None:
        if self._process is None:
            return
        stop_with_family(self._process, deadline_s=STOP_DEADLINE_S, rest=signal.SIGTERM)


def _until_it_listens(
    superlink: _Child, federation: Federation, stopped: Callable[[], bool]
) -> None:
    deadline = time.monotonic() + START_DEADLINE_S
    while not answers(federation):
        if stopped():
            return
        if superlink.ended or time.monotonic() > deadline:
            raise FederationError(
                f"the SuperLink did not start. Its log ends:\n{superlink.last_words()}",
                phase="start",
                exit_code=EXIT_RUN,
            )
        time.sleep(LOOK_S)


def _require_free(address: str) -> None:
    host, _, port = address.rpartition(":")
    kind = socket.AF_INET6 if host.startswith("[") else socket.AF_INET
    with socket.socket(kind) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip("[]"), int(port)))
        except OSError as error:
            raise FederationError(
                f"{address} cannot be listened on: {error.strerror}. Stop what listens there, or "
                "change it under [listen] in coterie.toml.",
                phase="start",
                exit_code=EXIT_CONFIG,
            ) from None


@contextmanager
def _stopping() -> Iterator[Callable[[], bool]]:
    """Whether SIGTERM, SIGINT or SIGHUP came; the handlers before are restored."""
    came: list[int] = []

    def note(signum: int, frame: FrameType | None) -> None:
        came.append(signum)

    numbers = [signal.SIGINT, *(s for s in ENDING if signal.getsignal(s) != signal.SIG_IGN)]
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield lambda: bool(came)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
