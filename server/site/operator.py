"""What an operator does with a federation: create it, enrol silos, list them, remove them."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table
from rich.text import Text

from coterie import wire
from coterie.server.machine.link import Node
from coterie.server.site import enrolled, upgrade
from coterie.server.site.contacts import Contacts, Served
from coterie.server.site.coordinator import answers, tell_superlink
from coterie.server.site.federation import Federation, load
from coterie.strategies.errors import EXIT_CONFIG, FederationError
from coterie.system.terminal import wide
from coterie.wire import enrolment, is_silo_name


def print_init(made: Federation, folder: Path) -> None:
    """Say what was created, and what to do next; ``folder`` as it was named."""
    console = _console()
    console.print(
        f"Created a federation in {made.folder}. Silos connect to {made.config.addresses[0]}"
    )
    console.print(f"CA fingerprint: {_ca_fingerprint(made)}")
    console.print("Keep tls/ca.key private and backed up. Next:")
    console.print(f"  coterie superlink --federation {folder}")
    console.print(f"  coterie enrol --federation {folder} REQUEST     (the line that a silo sent)")


def renew(folder: Path) -> None:
    """Renew the server's certificate; silos keep what they have."""
    made = load(folder)
    made.renew_certificate(always=True)
    _console().print(
        f"The new server certificate, for {', '.join(made.names)}, is in {made.tls}. It takes "
        "effect at the next start of `coterie superlink`. Nothing changes for the silos."
    )


def take_request(made: Federation, text: str) -> None:
    """Enrol a silo and print its join bundle: alone on standard output, the rest on the other."""
    try:
        request = enrolment.read_request(text)
    except enrolment.EnrolmentError as error:
        raise FederationError(str(error), phase="enrolment", exit_code=EXIT_CONFIG) from None
    if not is_silo_name(request.name):
        raise FederationError(
            f"the request's name {request.name!r} must have 1 to 64 letters, digits, '.', '_' or "
            "'-'.",
            phase="enrolment",
            exit_code=EXIT_CONFIG,
        )
    entry = enrolled.enrol(made.roster, request, made.tls)
    aside = Console(stderr=True, highlight=False, soft_wrap=True)
    aside.print(f"{entry.name} is enrolled. Key fingerprint: {entry.fingerprint}", markup=False)
    aside.print(
        "Compare it with what the silo sees, for example by telephone. If it differs, run: "
        f"coterie remove {entry.name}"
    )
    _, reason = _update_superlink(made)
    if reason:
        aside.print(
            f"{reason}. The silo will be accepted after the SuperLink's next start.", markup=False
        )
    aside.print(f"CA fingerprint: {_ca_fingerprint(made)}. Send the silo this line:")
    address = made.config.addresses[0]
    print(
        enrolment.write_bundle(
            enrolment.Bundle(entry.name, entry.fingerprint, address, made.ca.read_bytes())
        )
    )


def print_roster(made: Federation) -> None:
    """Who is enrolled, whether it is connected, when it last was, and which tasks it serves."""
    nodes, reason = _update_superlink(made)
    entries = enrolled.read(made.roster)
    console = _console()
    if reason:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"{reason}.", markup=False)
    if not entries:
        console.print(
            "No silo is enrolled. `coterie silo init --name NAME` makes a silo's enrolment request."
        )
        return
    contacts = Contacts(made.folder)
    served, noted = contacts.served(), contacts.seen()
    table = Table(box=None, padding=(0, 1))
    for column in ("silo", "status", "last contact", "tasks", "enrolled", "key fingerprint"):
        table.add_column(column, overflow="fold")  # compared by telephone, so never cut
    for entry in entries:
        status = nodes[entry.name].status if entry.name in nodes else "unknown"
        if entry.removed:
            status = f"removed {entry.removed[:10]}"
        elif status == "registered":
            status = "never connected"
        last = nodes.get(entry.name) or noted.get(entry.name)
        table.add_row(
            Text(entry.name),
            status,
            _when(last.seen) if last and not entry.removed else "",
            Text(_tasks(served.get(entry.name), entry)),
            entry.enrolled[:10],
            entry.fingerprint,
        )
    wide(console).print(table, soft_wrap=False)


def print_outlook(outlook: upgrade.Outlook) -> None:
    """Which silos have which release, and what an upgrade would meet."""
    console = _console()
    words = {True: "yes", False: "no", None: "not known"}
    table = Table(box=None, padding=(0, 1))
    for column in ("silo", "coterie", "last run", f"talks with {outlook.to}"):
        table.add_column(column, overflow="fold")
    for silo in outlook.silos:
        seen = silo.seen[:10] or "–"
        table.add_row(Text(silo.name), Text(silo.release or "–"), seen, words[silo.talks])
    if outlook.silos:
        wide(console).print(table, soft_wrap=False)
    for line in upgrade.lines(outlook):
        console.print(line)


def print_remove(made: Federation, name: str) -> None:
    """Remove a silo, at once if the SuperLink is running.

    Raises:
        FederationError: no silo of that name is enrolled, or the SuperLink was not told.
    """
    gone = enrolled.remove(made.roster, name)
    console = _console()
    if not answers(made):
        console.print(f"{gone.name} is removed. No SuperLink is running here.")
        return
    _, reason = _update_superlink(made)
    if reason:  # an error all the same: it may still be connected
        raise FederationError(
            f"{gone.name} is removed from the roster. {reason}. The silo stays "
            "connected until the SuperLink starts again, which then refuses it.",
            phase="enrolment",
        )
    console.print(f"{gone.name} is removed. Its connection ends now; runs continue without it.")


def _update_superlink(made: Federation) -> tuple[dict[str, Node], str]:
    """Have the SuperLink follow the roster; its nodes, or why it was not told.

    The roster is written by then, and every start of a SuperLink reads it.
    """
    if not answers(made):
        return {}, "No SuperLink is running here"
    try:
        return tell_superlink(made), ""
    except FederationError as error:
        return {}, f"The SuperLink was not told: {str(error).rstrip('.')}"


def _tasks(served: Served | None, entry: enrolled.Entry) -> str:
    """Which tasks a silo serves, as it said last."""
    if entry.removed:
        return ""
    if served is None or served.node != entry.node_id:
        return "not asked yet"
    return wire.plain_text(", ".join(served.tasks))


def _when(seen: float) -> str:
    """A time by this machine's clock; empty of what never was."""
    return datetime.fromtimestamp(seen).strftime("%Y-%m-%d %H:%M:%S") if seen else ""


def _ca_fingerprint(made: Federation) -> str:
    return enrolment.fingerprint_of_certificate(made.ca.read_bytes())


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True, markup=False)
