"""The display of an active run: a live picture on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import datetime

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from coterie import wire
from coterie.server.report import race_news
from coterie.server.runs.letters import letters_of
from coterie.server.runs.record import ENDS, Budget, Event, Round
from coterie.server.runs.record.follow import Progress
from coterie.server.runs.record.metrics import Collaboration, Lead
from coterie.strategies.errors import FederationError
from coterie.system.terminal import shown

GROUP_STYLES = ("cyan", "yellow", "magenta", "green", "blue", "red", "bright_black")
MAX_SILOS_SHOWN = 24
MAX_NAMED = 4


@contextmanager
def showing(
    console: Console, progress: Progress, *, resumed_as: int | None = None
) -> Iterator[Callable[[Event], None]]:
    """Show a run; yields a callable that takes its events.

    ``progress`` accumulates the events. Events before ``resumed_as``, the new id, are not shown
    again.
    """
    new = resumed_as is None

    def is_new(event: Event) -> bool:
        nonlocal new
        new = new or event.run_id == str(resumed_as)
        return new

    if shown.still or console.quiet or not console.is_terminal:
        yield lambda event: _print_line(console, progress, event, silent=not is_new(event))
        return
    with Live(picture(progress), console=console, refresh_per_second=8, transient=False) as live:

        def take(event: Event) -> None:
            progress.feed(event)
            if not is_new(event):
                return
            if event.kind == "budget":  # stays above the picture
                live.console.print(Text(line_of(progress, event)), soft_wrap=True)
            for line in _news(progress, event):
                live.console.print(Text(line), soft_wrap=True)
            live.update(picture(progress))

        yield take


def _print_line(console: Console, progress: Progress, event: Event, *, silent: bool) -> None:
    repeated = event.kind == "waits" and event.text == progress.waits
    progress.feed(event)
    line = "" if silent or repeated else line_of(progress, event)
    if line:
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def line_of(progress: Progress, event: Event) -> str:
    """Format an event as text: one line, several with news of a round, or none."""
    if event.kind == "start":
        return f"{progress.title}: waiting for silos"
    if event.kind == "resume":
        done = f" after round {event.number} of {progress.rounds}" * bool(progress.rounds)
        return f"{progress.title}: continues{done}; waiting for silos"
    if event.kind == "waits":
        return f"{progress.title}: {event.text}"
    if event.kind == "ready":
        have = "has" if len(event.silos) == 1 else "have"
        joined = f"{wire.counted(len(event.silos), 'silo')} {have} joined"
        return f"{progress.title}: {joined}: {', '.join(event.silos)}"
    if event.budget:
        return f"{progress.title}: {_budget_text(event.budget)}"
    if event.report:
        line = [] if event.report.final else [_round_line(progress, event.report)]
        return "\n".join(line + _news(progress, event))
    if event.kind == "end":
        why = f": {progress.error.removeprefix('stopped ')}" if progress.error else ""
        return f"{progress.title}: {progress.status} after {event.seconds:.1f} s{why}"
    return ""


def _budget_text(budget: Budget) -> str:
    size = budget.bytes
    most = f"{size / 1e9:.3g} GB" if size >= 1e9 else f"{size / 1e6:.3g} MB"
    return (
        f"{budget.work} before the training: {budget.pairs} pairs of {budget.silos} silos, "
        f"at most {budget.rounds} rounds and {most} of weights"
    )


def _news(progress: Progress, event: Event) -> list[str]:
    if event.report is None:
        return []
    with suppress(FederationError):  # a damaged record costs only these lines
        lines = race_news.news(event.report, progress.spent_on[0], progress.lead)
        lines += race_news.of_trees(event.report, progress.unsummed_now)
        return [f"{progress.title}: {line}" for line in lines]
    return []


def _round_line(progress: Progress, report: Round) -> str:
    parts = [f"round {report.round}/{progress.rounds}"]
    parts += [doing] if (doing := race_news.activity(*progress.spent_on)) else []
    parts.append(wire.counted(len(report.groups), "group"))
    if progress.mean_error is not None:
        parts.append(_mean_text(progress))
    parts.append(f"{sum(report.seconds.values()):.2f} s")
    changes = [f"+{name}" for name in report.joined if report.round > 1]
    changes += [f"-{name}" for name in report.left]
    changes += [f"{name} left out: {why}" for name, why in report.left_out.items()]
    parts += [f"({', '.join(changes)})"] if changes else []
    parts += [f"the run ends early: {report.ended_early}"] if report.ended_early else []
    if shown.verbose:
        groups = " ".join("{" + ", ".join(group) + "}" for group in report.groups)
        parts += [groups] if progress.regrouped else []
        parts.append(", ".join(f"{phase} {s:.2f} s" for phase, s in report.seconds.items()))
    return "  ".join(parts)


def picture(progress: Progress) -> RenderableType:
    """Return the whole state of a run as one renderable."""
    rows: list[RenderableType] = [_headline(progress)]
    if progress.waits:
        rows.append(Text(progress.waits, style="dim"))
    if progress.states:
        rows.append(_states(progress))
    if progress.groups:
        rows.append(_silo_table(progress))
        rows.append(_footer(progress))
    if progress.error:
        rows.append(Text(progress.error, style="bold red"))
    return Group(*rows)


def _headline(progress: Progress) -> RenderableType:
    row = Table.grid(padding=(0, 2))
    row.add_row(
        Text(progress.title, style="bold"),
        *_rounds(progress),
        Text(_status(progress), style="green" if progress.status == "completed" else "dim"),
        Text(_time_left(progress), style="dim"),
    )
    return row


def _rounds(progress: Progress) -> list[RenderableType]:
    if progress.config.get("strategy") in wire.UNTRAINED:
        return []
    bar = ProgressBar(total=max(progress.rounds, 1), completed=progress.round, width=24)
    return [Text(f"round {progress.round}/{progress.rounds or '?'}"), bar]


def _status(progress: Progress) -> str:
    running = progress.status not in ENDS
    doing = race_news.activity(progress.phase, progress.racing) if running else ""
    return f"{progress.status}, {doing}" if doing else progress.status


def _time_left(progress: Progress) -> str:
    recent = progress.round_seconds[-5:]
    left = (progress.rounds - progress.round) * sum(recent) / len(recent) if recent else 0.0
    return f"{progress.elapsed:.0f} s" + (f", about {left:.0f} s left" if left >= 1 else "")


def _silo_table(progress: Progress) -> RenderableType:
    table = Table(box=None, padding=(0, 1), header_style="dim")
    for column, side in (("silo", "left"), ("samples", "right"), ("group", "left")):
        table.add_column(column, justify=side)  # type: ignore[arg-type]
    table.add_column(f"{progress.lead.title} {_when(progress)}", justify="right")
    table.add_column("")
    letters = letters_of(progress.groups)
    group_of = {n: i for i, group in enumerate(progress.groups) for n in group}
    names = sorted(group_of, key=lambda n: (group_of[n], n))
    for name in names[:MAX_SILOS_SHOWN]:
        error = progress.errors.get(name)
        style = GROUP_STYLES[group_of[name] % len(GROUP_STYLES)]
        joined = progress.joined.get(name, 1)
        table.add_row(
            Text(name),
            f"{progress.samples.get(name, 0):.0f}",
            Text(f"■ {letters[name] or 'alone'}", style=style),
            Text(progress.lead.text(error)),  # a unit may have brackets
            Text(_bar(error) + (f"  joined in round {joined}" if joined > 1 else ""), style=style),
        )
    if len(names) > MAX_SILOS_SHOWN:
        table.add_row(f"… and {len(names) - MAX_SILOS_SHOWN} more", "", "", "", "")
    return table


def _states(progress: Progress) -> RenderableType:
    parts = []
    for state in ("answered", "done", "training", "awaited", "left out", "left", "not let in"):
        names = sorted(name for name, own in progress.states.items() if own == state)
        named = state not in ("answered", "done") and 0 < len(names) <= MAX_NAMED
        if names:
            parts.append(f"{len(names)} {state}" + (f" ({', '.join(names)})" if named else ""))
    return Text("silos: " + " · ".join(parts), style="dim")


def _bar(error: float | None) -> str:
    return "" if error is None else "▇" * max(1, min(20, round(error * 20)))


def _footer(progress: Progress) -> RenderableType:
    parts = [f"{phase} {seconds:.2f} s" for phase, seconds in progress.seconds.items()]
    if progress.mean_error is not None:
        parts.insert(0, _mean_text(progress))
    parts.append(megabytes(progress.bytes))
    gone = [f"{name} left before round {at}" for name, at in progress.left.items()]
    return Text(" · ".join(parts + gone + progress.left_out[-2:]), style="dim")


def _mean_text(progress: Progress) -> str:
    """Format the mean error, which is that of an earlier model: silos test what they receive."""
    title = progress.lead.title
    return f"mean {title} {_when(progress)}: {progress.lead.text(progress.mean_error)}"


def _when(progress: Progress) -> str:
    return f"after round {progress.evaluated}" if progress.evaluated else "at the start"


def collaboration_text(figures: Collaboration, lead: Lead) -> str:
    """Summarise the benefit over local training in one line."""
    error, alone = 1 - figures.mean_accuracy, 1 - figures.mean_accuracy_alone
    better = f"{figures.ipr * figures.silos:.0f}" if figures.silos else "0"
    gain = f"{lead.gain(alone - error)} ± {lead.gain(figures.rsd, sign='')} {lead.points}"
    return (
        f"mean {lead.title} of {figures.silos} silos with a baseline: {lead.text(error)}, local "
        f"{lead.text(alone)}; better than local: {better} of {figures.silos} silos; gain {gain} "
        "(± is the standard deviation over silos)"
    )


def megabytes(count: int) -> str:
    return f"{count / 1e6:.1f} MB moved"


def local_time(text: str) -> str:
    """Format a time by this machine's clock, as in run.log; other text is unchanged."""
    try:
        return datetime.fromisoformat(text).astimezone().strftime("%Y-%m-%d %H:%M:%S")
    except (ValueError, OverflowError):
        return text
