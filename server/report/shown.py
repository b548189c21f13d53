"""Where a run is shown while it is active: a terminal, a notebook, lines of text, or nowhere."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from html import escape

from rich.console import Console

from coterie.server.report.view import line_of, showing
from coterie.server.runs.record import ENDS, Event
from coterie.server.runs.record.follow import Progress

Shown = Callable[[Progress], AbstractContextManager[Callable[[Event], None]]]
"""Takes the progress of a run, which its events feed; gives what takes these."""


@contextmanager
def nothing(progress: Progress) -> Iterator[Callable[[Event], None]]:
    yield lambda event: None


NOTHING: Shown = nothing


def on_console(console: Console) -> Shown:
    return partial(showing, console)


def shown_for(progress: bool | Console) -> Shown:
    """Return the display for ``progress``: a console's; for True, a notebook's or standard error's.

    False shows nothing.
    """
    if isinstance(progress, Console):
        return NOTHING if progress.quiet else on_console(progress)
    if not progress:
        return NOTHING
    return in_notebook if is_notebook() else on_console(Console(stderr=True))


def is_notebook() -> bool:
    """Return whether a Jupyter kernel runs this program."""
    shell = getattr(sys.modules.get("IPython"), "get_ipython", lambda: None)()
    return shell is not None and hasattr(shell, "kernel")


@contextmanager
def in_notebook(progress: Progress) -> Iterator[Callable[[Event], None]]:
    """Show a bar below the cell, and the last line of news beside it."""
    from IPython.display import HTML, display

    handle = display(HTML(bar(progress, "")), display_id=True)  # type: ignore[no-untyped-call]

    def take(event: Event) -> None:
        progress.feed(event)
        if line := line_of(progress, event):
            handle.update(HTML(bar(progress, line.splitlines()[0])))  # type: ignore[no-untyped-call]

    yield take


def bar(progress: Progress, line: str) -> str:
    """Return the state of a run as HTML: a bar, and a line of text."""
    ended = progress.status in ENDS
    done = f'value="{progress.round}" ' if progress.round or ended else ""
    text = escape(line or f"{progress.title}: {progress.status}")
    return (
        f'<div><progress {done}max="{max(progress.rounds, 1)}"></progress> '
        f"<code>{text}</code></div>"
    )
