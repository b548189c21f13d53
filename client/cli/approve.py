"""The runs that wait for approval at a silo: list, approve and reject them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from coterie.client.cli.options import HomeOption, option
from coterie.system.commandline import JsonOption, MisuseError, print_json

if TYPE_CHECKING:
    from coterie.client.home.approvals import Approval, State
    from coterie.client.home.folder import Home

app = typer.Typer()


CodeOption = Annotated[
    str, option("CODE", "Decide only if the run still matches this code from the list.")
]


@app.command(
    epilog="Examples:\n\n"
    "\b\n"
    "  coterie silo approve hcct-1234 --home hospital-b\n"
    "  coterie silo approve --web --home hospital-b"
)
def approve(
    run: Annotated[str, typer.Argument(help="Name of the run.")] = "",
    code: CodeOption = "",
    web: Annotated[
        bool, typer.Option("--web", help="Serve a page with the waiting runs, on this machine.")
    ] = False,
    port: Annotated[
        int, typer.Option(min=0, max=65535, help="With --web: port to listen on. 0: a free port.")
    ] = 8322,
    home: HomeOption = None,
) -> None:
    """Approve a run, which then trains here.

    With approve = "ask" in silo.toml, a run waits until a person at this silo has approved it.
    Approval covers exactly the settings that the run announced. If they change, the run waits
    again.
    """
    if web:
        if run or code:
            raise MisuseError("--web shows all waiting runs: do not give RUN with it.")
        from coterie.client.cli.approve_page import make_server
        from coterie.client.home.folder import Home
        from coterie.system.tokens import new_token

        with make_server(Home(home), port=port, token=new_token()) as server:
            server.run()
    else:
        _decide(home, run, "approved", code)


@app.command(epilog="Example:  coterie silo reject hcct-1234 --home hospital-b")
def reject(
    run: Annotated[str, typer.Argument(help="Name of the run.")],
    code: CodeOption = "",
    home: HomeOption = None,
) -> None:
    """Reject a run, even if it was approved before."""
    _decide(home, run, "refused", code)


@app.command(epilog="Example:  coterie silo pending --home hospital-b")
def pending(home: HomeOption = None, as_json: JsonOption = False) -> None:
    """List the runs that wait for approval."""
    from coterie.client.home.approvals import read_all
    from coterie.client.home.folder import Home

    made = Home(home)
    if as_json:
        facts = ("run", "code", "state", "asked", "decided", "by", "over", "terms")
        print_json([{f: getattr(one, f) for f in facts} for one in read_all(made.folder)])
        return
    for line in listing(made):
        print(line)


def _decide(home: Path | None, run: str, state: State, code: str) -> None:
    from coterie.client.home.approvals import decide
    from coterie.client.home.folder import Home

    if not run:
        raise MisuseError(
            "name the run: coterie silo approve RUN. `coterie silo pending` lists them."
        )
    made = Home(home)
    decided = decide(made.folder, run, state, code=code)
    for line in described(decided, made):
        print(line)
    what = (
        "The silo takes no further part in it."
        if state == "refused"
        else "The silo joins at its next check, within 30 seconds."
    )
    print(f"Run {decided.run} is {decided.state}. {what}")


def listing(home: Home) -> Iterator[str]:
    """Yield the waiting runs, each with the commands to decide, and one line for each other run."""
    from coterie.client.home.approvals import read_all

    known = read_all(home.folder)
    waiting = [one for one in known if one.state == "waits" and not one.over]
    if home.settings().policy.approve != "ask":
        yield (
            'This silo needs no approval for runs. To require it, set approve = "ask" under '
            "[policy] in silo.toml."
        )
    for one in waiting:
        yield from described(one, home)
        yield f"  approve it:  {_command('approve', one, home.folder)}"
        yield f"  reject it:   {_command('reject', one, home.folder)}"
        yield ""
    yield f"{len(waiting)} run{'s wait' if len(waiting) != 1 else ' waits'} for approval."
    yield from (f"  {line}" for line in decided_on(known))


def decided_on(known: Sequence[Approval]) -> Iterator[str]:
    """Yield one line per active run that was decided, and one line that counts the ended ones."""
    for one in known:
        if one.state != "waits" and not one.over:
            yield f"{_shown(one.run)}  {one.state} {_minute(one.decided)} by {one.by}"
    if over := [one for one in known if one.over]:
        last = max(over, key=lambda one: one.over)
        yield (
            f"{'1 run is over:' if len(over) == 1 else f'{len(over)} runs are over, the last'} "
            f"{_shown(last.run)}, {last.state} {_minute(last.decided)} by {last.by}"
        )


class Announced(NamedTuple):
    """The description of a run for a person, with the coordinator's texts sanitised.

    The title has its name and approval code; ``leaving`` lists what would leave the silo.
    """

    title: str
    facts: list[tuple[str, str]]
    leaving: list[str]


def announced(one: Approval, home: Home) -> Announced:
    """Return a run's announcement, and what would leave the silo."""
    from coterie import wire
    from coterie.client.home.approvals import leaving
    from coterie.client.home.studies import columns_of

    coordinator = home.recipient()
    who = one.terms.get(wire.ASKED_BY)
    by = f"{_shown(who)}, says {coordinator}" if who else coordinator
    facts = [("asked", f"{_minute(one.asked)} by {by}")]
    trains = one.terms.get(wire.STRATEGY) not in wire.UNTRAINED
    for name in (wire.STRATEGY, wire.TASK, *([wire.ROUNDS] if trains else [])):
        facts.append((name, _shown(one.terms.get(name, "not stated"))))
    rest = {key: value for key, value in one.terms.items() if key not in SHOWN_APART}
    keys = ", ".join(f"{_shown(key)} = {_shown(value)}" for key, value in sorted(rest.items()))
    facts.append(("keys", keys or "none"))
    title = f"Run {_shown(one.run)}, code {one.code}"
    settings, task = home.settings(), str(one.terms.get(wire.TASK, ""))
    columns = columns_of(settings, task) if wire.SUMS_OF in one.terms else ((), ())
    return Announced(title, facts, list(leaving(one.terms, settings.policy, *columns)))


def described(one: Approval, home: Home) -> Iterator[str]:
    """Yield the lines of ``announced``."""
    shown = announced(one, home)
    yield shown.title
    yield from (f"  {what}: {value}" for what, value in shown.facts)
    yield "  would leave this silo:"
    yield from (f"    {line}" for line in shown.leaving)


SHOWN_APART = ("strategy", "task", "rounds", "asked-by", "sums-of", "each-alone")


def _command(what: str, one: Approval, folder: Path) -> str:
    import shlex

    place = shlex.quote(str(folder))
    return f"coterie silo {what} {shlex.quote(one.run)} --code {one.code} --home {place}"


def _minute(at: str) -> str:
    return f"{at[:16].replace('T', ' ')} UTC"


def _shown(text: object) -> str:
    from coterie.wire import plain_text

    return plain_text(text, 200)
