"""Options that several commands share, and the SuperLink and records that they name."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import typer

from coterie.system.commandline import MisuseError, address_option

if TYPE_CHECKING:
    from coterie.server.machine.link import Control
    from coterie.server.site.federation import Federation

MAX_PORT = 65535
CONTROL_API = "127.0.0.1:9093"


def expand(value: Path | None) -> Path | None:
    from coterie.server.paths import place

    return value if value is None else place(value)


def folder_option(text: str, *names: str) -> Any:
    return typer.Option(*names, metavar="FOLDER", help=text, file_okay=False, callback=expand)


def file_option(text: str, *names: str) -> Any:
    return typer.Option(*names, metavar="FILE", help=text, dir_okay=False, callback=expand)


def file_argument(text: str) -> Any:
    return typer.Argument(help=text, dir_okay=False, callback=expand)


def port(text: str) -> Any:
    return typer.Option(min=1, max=MAX_PORT, help=text)


FederationOption = Annotated[
    Path | None,
    folder_option(
        "Folder of the federation, created by `coterie federation init`. [default: "
        "$COTERIE_FEDERATION, or the current folder]"
    ),
]
SuperLinkOption = Annotated[
    str | None,
    address_option(
        f"Address of the SuperLink's Control API. [default: the federation's, or {CONTROL_API}]",
        9093,
    ),
]
CertificateOption = Annotated[
    Path | None, file_option("CA certificate (PEM). Without it, the connection does not use TLS.")
]
RunsOption = Annotated[
    Path | None,
    folder_option(
        "Folder of run records. [default: the federation's, if there is one; otherwise "
        "$COTERIE_RUNS or ~/.coterie/runs]"
    ),
]
MinSilosOption = Annotated[
    int,
    typer.Option(
        min=1, max=100_000, help="Number of silos that must be connected before they are asked."
    ),
]
WaitOption = Annotated[
    float, typer.Option(min=1, max=86_400, help="Time to wait for the silos, in seconds.")
]
RunArgument = Annotated[str, typer.Argument(help="Folder, name or id of the run.")]
SetOption = Annotated[
    list[str] | None,
    typer.Option(
        "--set",
        metavar="KEY=VALUE",
        help="Set any key of the run, for example lr=0.05. The reference page on run "
        "configuration lists all keys. Can be repeated.",
    ),
]


class Place(NamedTuple):
    """The SuperLink and the records that a command uses."""

    superlink: str
    root_certificates: Path | None
    runs_dir: Path | None


@dataclass(frozen=True)
class Given:
    """The location options as given."""

    federation: Path | None = None
    superlink: str | None = None
    root_certificates: Path | None = None
    runs_dir: Path | None = None

    def made(self) -> Federation | None:
        """Return the chosen federation, if its folder is here."""
        from coterie.server.site.federation import find

        return find(self.federation) if self.superlink is None else None

    def place(self) -> Place:
        """Return the given values, else the federation's, else this machine's."""
        if self.federation is not None and self.superlink is not None:
            raise MisuseError(
                "--federation and --superlink name two SuperLinks: the one of the federation in "
                f"{self.federation}, and the one at {self.superlink}. Leave one of them out."
            )
        made = self.made()
        if made is None:
            return Place(self.superlink or CONTROL_API, self.root_certificates, self.runs_dir)
        return Place(
            made.control_address, self.root_certificates or made.ca, self.runs_dir or made.runs
        )

    @contextmanager
    def control(self) -> Iterator[Control]:
        """Connect to the SuperLink as the operator of this federation or of this account."""
        from coterie.server.machine.link import control
        from coterie.server.site.operators import local_identity, own_identity

        address, certificates, _ = self.place()
        made = self.made()
        identity = own_identity() if made is None else local_identity(made)
        with control(address, root_certificates=certificates, identity=identity) as calls:
            yield calls

    def act(self, what: str, **fields: str) -> Mapping[str, Any]:
        """Have an act of an operator done in the federation's folder, or at its SuperLink."""
        if self.superlink is None:
            from coterie.server.site.acts import ACTS
            from coterie.server.site.federation import load

            return ACTS[what].do(load(self.federation), "", fields)
        with self.control() as calls:
            return calls.act(what, **fields)

    def again(self, command: str, *, records_only: bool = False) -> str:
        """Return a command line with the same options, or only those for records."""
        options: dict[str, object] = {"federation": self.federation, "runs-dir": self.runs_dir}
        if not records_only:
            options |= {"superlink": self.superlink, "root-certificates": self.root_certificates}
        named = [f"--{key} {shlex.quote(str(v))}" for key, v in options.items() if v is not None]
        return " ".join([f"coterie {command}", *named])
