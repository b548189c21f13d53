"""``coterie silo approve``: which runs wait here, what they are, and what a person says of them."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coterie.client.cli.options import HomeOption, option

if TYPE_CHECKING:
    from coterie.client.home.approvals import Approval
    from coterie.client.home.folder import Home

app = typer.Typer()


@app.command(
    epilog="Examples:\n\n"
    "\b\n"
    "  coterie silo approve --home hospital-b\n"
    "  coterie silo approve hcct-1234 --home hospital-b\n"
    "  coterie silo approve hcct-1234 --refuse --home hospital-b"
)
def approve(
    run: Annotated[
        str, typer.Argument(help="Name of the run. [default: list the runs that wait]")
    ] = "",
    refuse: Annotated[
        bool, typer.Option("--refuse", help="Refuse the run, also one that was approved.")
    ] = False,
    code: Annotated[
        str, option("CODE", "Only if the run still is what was listed with this code.")
    ] = "",
    web: Annotated[
        bool, typer.Option("--web", help="Serve a page with the runs that wait, on this machine.")
    ] = False,
    port: Annotated[
        int,
        typer.Option(min=0, max=65535, help="With --web: port to listen on; 0 picks a free one."),
    ] = 8322,
    home: HomeOption = None,
) -> None:
    """Approve or refuse a run, or list those that wait.

    With approve = "ask" in silo.toml, a run waits until somebody here has approved it. What is
    approved is the run as it announced itself: if it announces something else, it waits again.
    """
    from coterie.client.home.approvals import decide
    from coterie.client.home.folder import Home

    made = Home(home)
    if web:
        if run or refuse or code:
            raise typer.BadParameter(
                "decide on the page, or name a run without it.", param_hint="--web"
            )
        from coterie.client.cli.approve_page import serve

        serve(made, port=port)
        return
    if not run:
        if refuse or code:
            raise typer.BadParameter("name the run: coterie silo approve RUN.", param_hint="RUN")
        for line in listing(made):
            print(line)
        return
    decided = decide(made.folder, run, "refused" if refuse else "approved", code=code)
    for line in described(decided, made):
        print(line)
    what = "It is asked again within half a minute." if not refuse else "It takes no further part."
    print(f"Run {decided.run} is {decided.state}. {what}")


def listing(home: Home) -> Iterator[str]:
    """The runs that wait, each with what to type; of the others a line."""
    from coterie.client.home.approvals import read_all

    known = read_all(home.folder)
    waiting = [one for one in known if one.state == "waits"]
    if home.config.policy.approve != "ask":
        yield 'Runs are not asked for here: set approve = "ask" under [policy] in silo.toml.'
    for one in waiting:
        yield from described(one, home)
        yield f"  approve it:  {_command(one, home.folder)}"
        yield f"  refuse it:   {_command(one, home.folder)} --refuse"
        yield ""
    yield f"{len(waiting)} run{'s wait' if len(waiting) != 1 else ' waits'} for approval."
    for one in known:
        if one.state != "waits":
            yield f"  {_shown(one.run)}  {one.state} {one.decided[:16]} by {one.by}"


def described(one: Approval, home: Home) -> Iterator[str]:
    """What a run says of itself, and what would leave; the coordinator's words are made plain."""
    from coterie import wire
    from coterie.client.home.approvals import leaving
    from coterie.client.home.settings import SettingsError

    try:
        coordinator = home.coordinator()[0]
    except SettingsError:
        coordinator = "one without an address here"
    who = one.terms.get(wire.ASKED_BY)
    by = f"{_shown(who)}, says the coordinator at" if who else "the coordinator at"
    yield f"Run {_shown(one.run)}, code {one.code}"
    yield f"  asked {one.asked[:16].replace('T', ' ')} UTC by {by} {coordinator}"
    for name in (wire.STRATEGY, wire.TASK, wire.ROUNDS):
        yield f"  {name}: {_shown(one.terms.get(name, 'not said'))}"
    rest = {key: value for key, value in one.terms.items() if key not in SHOWN_APART}
    told = ", ".join(f"{_shown(key)} = {_shown(value)}" for key, value in sorted(rest.items()))
    yield f"  keys: {told or 'none'}"
    yield "  would leave this silo:"
    policy = home.settings().policy
    yield from (f"    {line}" for line in leaving(one.terms, policy))


SHOWN_APART = ("strategy", "task", "rounds", "asked-by")


def _command(one: Approval, folder: Path) -> str:
    import shlex

    place = shlex.quote(str(folder))
    return f"coterie silo approve {shlex.quote(one.run)} --code {one.code} --home {place}"


def _shown(text: object) -> str:
    from coterie.wire import plain_text

    return plain_text(text, 200)
