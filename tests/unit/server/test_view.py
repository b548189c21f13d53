"""What a person sees: lines, a picture, and names that are text whatever is in them."""

from __future__ import annotations

import io
import json
from typing import Any

import pytest
from rich.console import Console

from coterie.server.report.history import follow_groups
from coterie.server.report.view import line_of, megabytes, picture, showing
from coterie.server.runs.record import Event, Round, event_of
from coterie.server.runs.record.follow import Progress
from coterie.system import terminal

NAMES = ["[red]", "<script>alert(1)</script>", "[/bold]x", "[link=file:///x]y[/link]", "a\\"]


def event(kind: str, **fields: Any) -> Event:
    read = event_of(json.dumps({"event": kind, **fields}))
    assert read is not None
    return read


START = event("start", config={"rounds": 5})


def round_event(names: list[str], number: int = 2, **changes: Any) -> Event:
    fields: dict[str, Any] = {
        "round": number,
        "groups": [names[:1], names[1:]] if len(names) > 1 else [names],
        "joined": [],
        "left": [],
        "left-out": {},
        "seconds": {"train": 0.25, "aggregate": 0.01},
        "silos": {n: {"num-examples": 40, "bytes-sent": 10, "bytes-received": 10} for n in names},
        "evaluated-round": number - 1,
        "evaluation": {n: {"error": 0.25} for n in names},
    }
    return event("round", **fields | changes)


def shown(last: Event, *before: Event) -> str:
    progress = Progress("HCCT")
    for one in (*before, last):
        progress.feed(one)
    return line_of(progress, last)


def drawn(progress: Progress, width: int = 160) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=False)
    console.print(picture(progress))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    return text


def test_states_of_silos_are_counted_and_few_are_named() -> None:
    progress = Progress("HCCT")
    progress.feed(START)
    progress.feed(event("here", round=1, silos=[f"s{i}" for i in range(8)]))
    progress.feed(event("answer", work="train", silos=[f"s{i}" for i in range(6)]))
    assert "silos: 6 answered · 2 training (s6, s7)" in drawn(progress)


# ---------------------------------------------------------------- lines


def test_a_round_is_one_line_and_its_phases_are_for_v(monkeypatch: pytest.MonkeyPatch) -> None:
    line = shown(round_event(["a", "b", "c"]), START)
    assert line == ("round 2/5  2 groups  mean error after round 1: 25.0%  0.26 s")
    monkeypatch.setattr(terminal.shown, "verbose", True)
    verbose = shown(round_event(["a", "b", "c"]), START)
    assert verbose == f"{line}  {{a}} {{b, c}}  train 0.25 s, aggregate 0.01 s"


def test_joins_leaves_and_replies_left_out_are_named() -> None:
    ended = round_event(["a"], joined=["a"], left=["z"], **{"left-out": {"b": "too late"}})
    line = shown(ended, START)
    assert line.endswith("  (+a, -z, b left out: too late)")
    first = shown(round_event(["a"], 1, joined=["a"]), START)
    assert "+a" not in first  # everybody does in round 1


def budget(size: int) -> Event:
    return event("budget", work="discriminators", pairs=36, silos=9, rounds=10, bytes=size)


BUDGET = budget(2_340_000)
BUDGET_LINE = (
    "HCCT: discriminators before the training: 36 pairs of 9 silos, at most 10 rounds and 2.34 MB"
    " of weights"
)


@pytest.mark.parametrize(
    ("one", "line"),
    [
        (BUDGET, BUDGET_LINE),
        (budget(5 * 10**9), BUDGET_LINE.replace("2.34 MB", "5 GB")),
        (START, "HCCT: waiting for silos"),
        (event("ready", silos=["a", "b"]), "HCCT: 2 silos have joined: a, b"),
        (event("end", status="completed", seconds=3.21), "HCCT: completed after 3.2 s"),
        (
            event("end", status="failed", seconds=3.0, error="no silos"),
            "HCCT: failed after 3.0 s: no silos",
        ),
        (
            event("end", status="stopped", seconds=3.0, error="stopped by Ctrl-C (SIGINT)"),
            "HCCT: stopped after 3.0 s: by Ctrl-C (SIGINT)",
        ),
        (event("look", round=3), ""),
    ],
)
def test_other_events_are_a_line_or_nothing(one: Event, line: str) -> None:
    assert shown(one) == line


def test_without_a_terminal_every_event_is_a_plain_line() -> None:
    console = Console(file=io.StringIO(), width=40)
    progress = Progress("HCCT")
    with showing(console, progress) as take:
        take(START)
        take(event("look", round=1))
        take(round_event(["a", "b"], 1))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert len(text.splitlines()) == 2  # long lines are not broken
    assert "\x1b" not in text
    assert progress.round == 1


@pytest.mark.parametrize("terminal", [False, True])
def test_who_resumes_a_run_is_not_told_its_earlier_rounds_again(terminal: bool) -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=terminal)
    progress = Progress("HCCT")
    with showing(console, progress, resumed_as=8) as take:
        take(event("start", run_id="7", config={"rounds": 5}))
        take(BUDGET)
        take(round_event(["a", "b"], 1))
        assert progress.round == 1
        take(event("resume", run_id="8", after=1, config={"rounds": 6}))
        take(event("waits", text="b refuses"))
        take(event("waits", text="b refuses"))
        take(round_event(["a", "b"], 2))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert BUDGET_LINE not in text and "round 1/5" not in text and "round 2/6" in text
    assert terminal or text.count("b refuses") == 1
    resumed = "HCCT: continues after round 1 of 6; waiting for silos\n"
    assert terminal or text.startswith(resumed)
    fit = event("resume", run_id="8", after=0, config={"strategy": "regression", "rounds": 10})
    progress.feed(fit)
    assert line_of(progress, fit) == "HCCT: continues; waiting for silos", "it has no rounds"


def test_on_a_terminal_what_a_phase_may_cost_stays_above_the_picture() -> None:
    console = Console(file=io.StringIO(), width=200, force_terminal=True)
    with showing(console, Progress("HCCT")) as take:
        take(START)
        take(BUDGET)
        take(round_event(["a", "b"], 1))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert text.count(BUDGET_LINE) == 1


# ---------------------------------------------------------------- names are text


@pytest.mark.parametrize("name", NAMES)
def test_names_with_markup_are_printed_as_they_are(name: str) -> None:
    console = Console(file=io.StringIO(), width=40, force_terminal=False)
    with showing(console, Progress(f"run {name}")) as take:
        take(START)
        take(event("ready", silos=[name]))
        take(round_event([name], joined=[name], left=[name], **{"left-out": {name: "[b]no[/b]"}}))
        take(event("end", status="failed", seconds=1.0, error=f"lost {name}"))
    lines = console.file.getvalue().splitlines()  # type: ignore[attr-defined]
    assert lines[0] == f"run {name}: waiting for silos"
    assert lines[1].endswith(f"1 silo has joined: {name}")
    assert f"(+{name}, -{name}, {name} left out: [b]no[/b])" in lines[2]
    assert lines[3].endswith(f"lost {name}")


@pytest.mark.parametrize("name", NAMES)
def test_names_with_markup_are_drawn_as_they_are(name: str) -> None:
    progress = Progress(f"run {name}")
    progress.feed(START)
    progress.feed(round_event([name, "b"], left=[name], **{"left-out": {name: "[b]no[/b]"}}))
    text = drawn(progress)
    rows = [line.strip() for line in text.splitlines()]
    assert any(row.startswith(f"{name} ") and "■" in row for row in rows)
    assert f"run {name}" in text
    assert f"{name} left before round 2" in text
    assert "[b]no[/b]" in text


# ---------------------------------------------------------------- the picture


def test_the_picture_has_round_groups_errors_and_who_joined_late() -> None:
    progress = Progress("HCCT")
    assert "HCCT" in drawn(progress)
    progress.feed(START)
    progress.feed(round_event(["a", "b", "late"], 3, joined=["late"]))
    text = drawn(progress)
    assert "round 3/5" in text and "mean error after round 2: 25.0%" in text
    assert "error after round 2" in text, "a column says of which models its figures are"
    (late,) = [line for line in text.splitlines() if line.strip().startswith("late")]
    assert "joined in round 3" in late and "25.0%" in late and "40" in late


def test_a_silo_that_was_not_evaluated_has_no_error() -> None:
    progress = Progress("HCCT")
    progress.feed(round_event(["a"], evaluation={"a": {"error": None}}))
    assert "–" in drawn(progress)


def test_a_crowd_of_silos_does_not_fill_the_screen() -> None:
    progress = Progress("HCCT")
    progress.feed(round_event([f"s{i:03d}" for i in range(100)]))
    text = drawn(progress)
    assert "… and 76 more" in text
    assert len(text.splitlines()) < 32


def test_numbers_are_written_for_people() -> None:
    assert megabytes(2_540_000) == "2.5 MB moved"


def test_groups_have_the_letters_of_the_report() -> None:
    progress = Progress("HCCT")
    groups = [["d"], ["c", "b"], ["a", "e"]]
    progress.feed(round_event(["a", "b", "c", "d", "e"], groups=groups))
    rows = [line.split("■") for line in drawn(progress).splitlines() if "■" in line]
    shown = {row[0].split()[0]: row[1].split()[0] for row in rows}
    assert shown == {"a": "A", "e": "A", "b": "B", "c": "B", "d": "alone"}
    report = follow_groups([Round(1, tuple(map(tuple, groups)), joined=(), left=())]).now
    assert {n: report[n][0] or "alone" for n in shown} == shown
