"""An operator's work with a federation: create it, enrol silos, list them, remove them."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime
from pathlib import Path

from rich.console import Console

from coterie import wire
from coterie.engine.control import Node
from coterie.server.paths import with_federation
from coterie.server.site import audit, enrolled, statement, upgrade, withdrawal
from coterie.server.site.contacts import Contacts, Served
from coterie.server.site.coordinator import answers, sync_superlink
from coterie.server.site.federation import Federation, load
from coterie.strategies.errors import FederationError, refused
from coterie.system.commandline import plain, print_json
from coterie.system.terminal import print_table
from coterie.wire import enrolment, is_silo_name, plain_text

EXIT_TAMPERED = 1


def print_init(made: Federation, folder: Path) -> None:
    """Report what was created and what to do next; ``folder`` as it was named."""
    audit.note(made, "init", addresses=", ".join(made.config.addresses), ca=_ca_fingerprint(made))
    console = _console()
    console.print(
        f"Created a federation in {made.folder}. Silos connect to {made.config.addresses[0]}"
    )
    console.print(f"CA fingerprint: {_ca_fingerprint(made)}")
    console.print("Keep tls/ca.key private and backed up. Next:")
    console.print(f"  coterie superlink --federation {folder}")
    console.print(f"  coterie members enrol --federation {folder} REQUEST     (the silo's line)")


def renew(folder: Path) -> None:
    """Renew the server's certificate; nothing changes for the silos."""
    made = load(folder)
    with audit.acting(made, "renew", names=", ".join(made.names)):
        made.renew_certificate(always=True)
    _console().print(
        f"The new server certificate, for {', '.join(made.names)}, is in {made.tls}. It takes "
        "effect at the next start of `coterie superlink`. Nothing changes for the silos."
    )


def enrol_silo(made: Federation, text: str, *, who: str = "") -> tuple[list[str], str]:
    """Enrol a silo by its request; return lines for the operator, and the join bundle.

    ``who`` is the operator for the log; if empty, the account of this process. Raises
    ``FederationError`` if the request cannot be read, or its name or key is taken.
    """
    try:
        request = enrolment.read_request(text)
    except enrolment.EnrolmentError as error:
        raise refused(str(error)) from None
    if not is_silo_name(request.name):
        raise refused(
            f"the request's name {request.name!r} must have 1 to 64 letters, digits, '.', '_' or "
            "'-'."
        )
    key = enrolment.fingerprint_of_key(request.key)
    with audit.acting(made, "enrol", who=who, silo=request.name, key=key):
        entry = enrolled.enrol(made.roster, request)
    _, reason = _update_superlink(made)
    later = f"{reason}. The silo will be accepted after the SuperLink's next start."
    remove = f"coterie members remove {entry.name}"
    lines = [
        f"{entry.name} is enrolled. Key fingerprint: {entry.fingerprint}",
        "Compare it with the silo's, for example by telephone. If it differs, run: "
        + (remove if who else with_federation(remove, made.folder)),
        *([later] if reason else []),
        f"CA fingerprint: {_ca_fingerprint(made)}. Send the silo this line:",
    ]
    bundle = enrolment.Bundle(
        entry.name, entry.fingerprint, made.config.addresses[0], made.ca.read_bytes()
    )
    return lines, enrolment.write_bundle(bundle)


def print_roster(made: Federation, *, as_json: bool = False) -> None:
    """Print the enrolled silos with status, last contact and tasks."""
    nodes, reason = _update_superlink(made)
    entries = enrolled.read(made.roster)
    console = _console()
    if reason:
        Console(stderr=True, highlight=False, soft_wrap=True).print(f"{reason}.", markup=False)
    contacts = Contacts(made.folder)
    served, noted = contacts.served(), contacts.seen()
    rows = []
    for entry in entries:
        status = nodes[entry.name].status if entry.name in nodes else "unknown"
        if entry.removed:
            status = f"removed {entry.removed[:10]}"
        elif status == "registered":
            status = "never connected"
        last = nodes.get(entry.name) or noted.get(entry.name)
        row = {
            "silo": entry.name,
            "status": status,
            "last contact": _when(last.seen) if last and not entry.removed else "",
            "tasks": _tasks(served.get(entry.name), entry),
            "enrolled": entry.enrolled[:10],
            "key fingerprint": entry.fingerprint,
        }
        rows.append(row)
    if as_json:
        print_json([{key.replace(" ", "-"): cell for key, cell in row.items()} for row in rows])
        return
    if not rows:
        console.print(
            "No silo is enrolled. `coterie silo init --name NAME` makes a silo's enrolment request."
        )
        return
    print_table(console, rows[0], (row.values() for row in rows))


def print_outlook(outlook: upgrade.Outlook, *, as_json: bool = False) -> None:
    """Print the release of each silo, and obstacles to an upgrade."""
    if as_json:
        print_json(
            {"is-safe": outlook.is_safe, **plain(outlook), "text": [*upgrade.lines(outlook)]}
        )
        return
    console = _console()
    words = {True: "yes", False: "no", None: "not known"}
    rows = [
        (one.name, one.release or "–", one.seen[:10] or "–", words[one.talks])
        for one in outlook.silos
    ]
    if rows:
        header = ("silo", "coterie", "last run", f"works with {outlook.to}")
        print_table(console, header, rows)
    for line in upgrade.lines(outlook):
        console.print(line)


def remove_silo(made: Federation, name: str, *, who: str = "") -> str:
    """Remove a silo, at once if the SuperLink is running; return text for the operator.

    Raises ``FederationError`` if no such silo is enrolled, or the SuperLink was not informed.
    """
    with audit.acting(made, "remove", who=who, silo=name):
        gone = enrolled.remove(made.roster, name)
    if not answers(made):
        return f"{gone.name} is removed. No SuperLink is running here."
    _, reason = _update_superlink(made)
    if reason:  # an error all the same: it may still be connected
        raise FederationError(
            f"{gone.name} is removed from the roster. {reason}. The silo stays connected until "
            "the SuperLink is restarted, and is refused from then on."
        )
    return f"{gone.name} is removed. Its connection ends now; runs continue without it."


def withdraw_silo(
    made: Federation, name: str, *, who: str = "", say: Callable[[str], None] = lambda _: None
) -> list[str]:
    """Erase a silo (``withdrawal.withdraw``); return lines for the operator.

    Raises ``FederationError`` if there was no such silo, or a run with its models does not end.
    """
    done, file = withdrawal.withdraw(made, name, who=who, say=say)
    return [*statement.lines_of(done), f"The signed statement: {file}"]


def print_audit(made: Federation, *, last: int, as_json: bool = False) -> None:
    """Print acts of operators, the newest at the end, and the head to note elsewhere."""
    log = audit.verify(made)
    if as_json:
        _print_log(log, last)
        return
    console = _console()
    rows = []
    for act in log.acts[-last:] if last else log.acts:
        about = ", ".join(f"{key} {value}" for key, value in act.about.items())
        when = datetime.fromisoformat(act.at).astimezone().strftime("%Y-%m-%d %H:%M:%S")
        rows.append((act.number, *map(plain_text, (when, act.who, act.act, about))))
    print_table(console, ("", "when", "who", "act", "about"), rows)
    console.print(f"head: {log.head}")
    for line in log.findings:
        console.print(f"WRONG: {line} See `coterie federation audit --verify`.")


def _print_log(log: audit.Log, last: int) -> None:
    acts = log.acts[-last:] if last else log.acts
    facts = ("number", "at", "who", "act", "about")
    shown = [{name: getattr(act, name) for name in facts} for act in acts]
    print_json({"head": log.head, "findings": log.findings, "notes": log.notes, "acts": shown})


def print_verification(made: Federation, *, head: str, as_json: bool = False) -> int:
    """Report whether the audit log is intact; return the exit status."""
    log = audit.verify(made, head=head)
    if as_json:
        _print_log(log, 0)
        return EXIT_TAMPERED if log.findings else 0
    console = _console()
    for line in log.notes:
        console.print(f"note: {line}")
    for line in log.findings:
        console.print(f"WRONG: {line}")
    if log.findings:
        console.print(f"{made.folder / audit.AUDIT} is not intact.")
        return EXIT_TAMPERED
    console.print(
        f"{wire.counted(len(log.acts), 'action')}, each following from the one before; their end "
        "matches audit.head."
    )
    console.print(f"head: {log.head}")
    return 0


def _update_superlink(made: Federation) -> tuple[dict[str, Node], str]:
    """Apply the roster to the SuperLink; return its nodes, or why that failed.

    The roster is already written, and every SuperLink reads it at its start.
    """
    if not answers(made):
        return {}, "No SuperLink is running here"
    try:
        return sync_superlink(made), ""
    except FederationError as error:
        return {}, f"The SuperLink could not be notified: {str(error).rstrip('.')}"


def _tasks(served: Served | None, entry: enrolled.Entry) -> str:
    if entry.removed:
        return ""
    if served is None or served.node != entry.node_id:
        return "not asked yet"
    return wire.plain_text(", ".join(served.tasks))


def _when(seen: float) -> str:
    return datetime.fromtimestamp(seen).strftime("%Y-%m-%d %H:%M:%S") if seen else ""


def _ca_fingerprint(made: Federation) -> str:
    return enrolment.fingerprint_of_certificate(made.ca.read_bytes())


def _console() -> Console:
    return Console(highlight=False, soft_wrap=True, markup=False)
