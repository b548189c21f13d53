"""The coordinator's folder: configuration, certificates, enrolment lists, the SuperLink's state.

``coterie federation init`` makes it, every other command of the operator reads it:

    coterie.toml     listening addresses, and the addresses that silos use
    tls/             the CA and the SuperLink's certificate; the keys never leave this folder
    roster.json      enrolled silos
    operators.json   operators and roles; operator.key is the key of the folder's owner
    audit.jsonl      acts of operators; audit.head is signed
    withdrawals/     statements of what was deleted
    superlink.db     the SuperLink's state
    runs/            a folder per run
    silos.json       the tasks of each silo; contacts.json has their last contact
    queue.json       runs that wait for their turn
"""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field

from coterie.server.paths import ENVIRONMENT, place
from coterie.server.site import certificates
from coterie.strategies.errors import refused
from coterie.system import logs
from coterie.system.files import make_folder, write_atomically
from coterie.system.ports import (
    address_of,
    from_here,
    is_loopback,
    join_address,
    listen_address,
    split_address,
)
from coterie.tasks.toml import checked, read_table, table_of

RENEW_BELOW_DAYS = 30
DEFAULT_PORT = 9092

TEMPLATE = """\
# The coordinator of a coterie federation. Commands read this file each time they start and
# refuse keys that they do not know.

# Where silos reach this machine, HOST:PORT. The silos' join bundles contain the first; the
# coordinator's certificate contains all. After a change: coterie federation init FOLDER --renew
addresses = [{addresses}]

[listen]
# For silos. 0.0.0.0 means every network interface.
silos = "{silos}"
# For operators, who need a key: `coterie operator`. For those on other machines: 0.0.0.0:9093.
operators = "{operators}"
# For the ServerApp, which runs next to the SuperLink.
serverapp = "{serverapp}"

[state]
# true: the SuperLink keeps its state in superlink.db, and runs continue after it was restarted. The
# file must be on a local disk, not NFS.
database = true

[runs]
# Most active runs; further ones wait in the queue. 0: no limit.
at_once = 0

[monitoring]
# Address of /metrics for Prometheus: PORT (for this machine only) or HOST:PORT. Empty: none. It
# shows names of silos and runs, without a password.
metrics_address = ""
# Log format of the coordinator and its runs: text, or json (one object per line).
log_format = "text"
"""


Address = Annotated[str, AfterValidator(address_of)]


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Listen(_Section):
    silos: Address = "0.0.0.0:9092"
    operators: Address = "127.0.0.1:9093"
    serverapp: Address = "127.0.0.1:9091"


class _State(_Section):
    database: bool = True


def _is_to_listen_on(text: str) -> str:
    return listen_address(text) if text else ""


class _Monitoring(_Section):
    metrics_address: Annotated[str, AfterValidator(_is_to_listen_on)] = ""
    log_format: Literal["text", "json"] = "text"


class _Runs(_Section):
    at_once: Annotated[int, Field(ge=0)] = 0


class _Config(_Section):
    addresses: Annotated[list[Address], Field(min_length=1)]
    listen: _Listen = _Listen()
    state: _State = _State()
    runs: _Runs = _Runs()
    monitoring: _Monitoring = _Monitoring()


@dataclass(frozen=True)
class Federation:
    """A coordinator's folder that was read and checked. Made by ``load``."""

    folder: Path
    config: _Config

    @property
    def tls(self) -> Path:
        """The folder of certificates and keys."""
        return self.folder / "tls"

    @property
    def ca(self) -> Path:
        """The CA's certificate, PEM."""
        return self.tls / "ca.pem"

    @property
    def roster(self) -> Path:
        """The file of enrolled silos."""
        return self.folder / "roster.json"

    @property
    def database(self) -> Path:
        """The file of the SuperLink's state."""
        return self.folder / "superlink.db"

    @property
    def runs(self) -> Path:
        """The folder of run records."""
        return self.folder / "runs"

    @property
    def control_address(self) -> str:
        """The address at which operators on this machine connect."""
        return from_here(self.config.listen.operators)

    @property
    def is_open_to_operators_elsewhere(self) -> bool:
        """Whether other machines reach the operators' API."""
        return not is_loopback(split_address(self.config.listen.operators)[0])

    def monitored(self, *, metrics: str = "", log_format: str = "") -> Federation:
        """Return a copy with monitoring options from the command line and the environment.

        Raises ``FederationError`` if an option is invalid.
        """
        own = self.config.monitoring
        try:
            changes = {
                "metrics_address": _is_to_listen_on(metrics) or own.metrics_address,
                "log_format": logs.chosen(log_format, own.log_format),
            }
        except ValueError as error:
            raise refused(f"{error}.".replace("..", ".")) from None
        config = self.config.model_copy(update={"monitoring": own.model_copy(update=changes)})
        return replace(self, config=config)

    @property
    def names(self) -> list[str]:
        """The hosts under which silos reach this machine."""
        return [split_address(address)[0] for address in self.config.addresses]

    def renew_certificate(self, *, always: bool = False) -> str:
        """Renew the server's certificate if needed; return why, or an empty text."""
        file, key = self.tls / "server.pem", self.tls / "server.key"
        reason = ""
        if always:
            reason = "you asked for it"
        elif not file.exists() or not key.exists():
            reason = "there was no certificate"
        elif not certificates.belongs_to(file, key):  # a crash came between the two files
            reason = "the old one belonged to another key"
        elif certificates.days_left(file) < RENEW_BELOW_DAYS:
            reason = f"the old one had {certificates.days_left(file):.0f} days left"
        elif not certificates.covers(file, self.names):
            reason = "coterie.toml has different addresses"
        if reason:
            certificates.make_server_certificate(self.tls, self.names)
        return reason


def create(
    folder: Path,
    addresses: list[str],
    *,
    fleet_port: int | None = None,
    control_port: int = 9093,
    runtime_port: int = 9091,
    operators: str = "127.0.0.1",
) -> Federation:
    """Make a coordinator's folder; ``folder`` must not hold a federation yet.

    Args:
        addresses: ``HOST`` or ``HOST:PORT`` under which silos reach it.
        fleet_port: to listen on for silos; None takes the first address's, or 9092.
        control_port, runtime_port: to listen on for operators and for the ServerApp.
        operators: address to listen on for operators.

    Raises:
        FederationError: there is one already, or an address cannot be read.
    """
    file = folder / "coterie.toml"
    if file.exists():
        raise refused(
            f"{folder} is a federation already. To renew its certificate: coterie federation init "
            f"{folder} --renew"
        )
    try:
        complete = [address_of(address, fleet_port or DEFAULT_PORT) for address in addresses]
    except ValueError as error:
        raise refused(f"--address {error}.") from None
    host, port = split_address(complete[0])
    text = TEMPLATE.format(
        addresses=", ".join(f'"{address}"' for address in complete),
        silos=join_address("::" if ":" in host else "0.0.0.0", fleet_port or port),
        operators=join_address(operators, control_port),
        serverapp=f"127.0.0.1:{runtime_port}",
    )
    checked(_Config, table_of(text, "--address", refused), "--address", refused)
    make_folder(folder, private=True)  # the database holds models
    certificates.make_ca(folder / "tls", host)
    make_folder(folder / "runs")
    write_atomically(file, text.encode())  # last: what has a coterie.toml is whole
    federation = load(folder)
    federation.renew_certificate()
    return federation


def load(folder: Path | None = None) -> Federation:
    """Read a coordinator's folder; None means ``$COTERIE_FEDERATION``, else the current folder.

    Raises ``FederationError`` if there is none, or its configuration is wrong.
    """
    root = place(folder or os.environ.get(ENVIRONMENT) or ".").resolve()
    file = root / "coterie.toml"
    absent = (
        f"{root} is not a federation (no coterie.toml). Create one with `coterie federation init`, "
        f"or name its folder with --federation or {ENVIRONMENT}."
    )
    table = read_table(file, refused, absent=absent)
    return Federation(root, checked(_Config, table, file, refused))


def find(folder: Path | None) -> Federation | None:
    """Return the federation named by argument or environment, or in the current folder; or None.

    Raises ``FederationError`` if one is named, but is missing or wrong.
    """
    named = folder is not None or bool(os.environ.get(ENVIRONMENT))
    return load(folder) if named or Path("coterie.toml").exists() else None
