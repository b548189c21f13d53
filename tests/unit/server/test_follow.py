"""Following a run from what it writes."""

from __future__ import annotations

import io
import json
import os
import threading
import time
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from rich.console import Console

import coterie.server.cli.commands
import coterie.server.machine.local
import coterie.server.runs.record.follow
from benchmarks.engine.synthetic import write_run
from coterie.engine.control import RunInfo
from coterie.server.cli.commands import watch_run
from coterie.server.cli.options import Given
from coterie.server.cli.waiting import print_queue
from coterie.server.machine.link import Control
from coterie.server.machine.local import Start, follow_run
from coterie.server.runs.record import Event, event_of
from coterie.server.runs.record.follow import Progress, events
from coterie.server.site.queue import Entry
from coterie.strategies import FederationError
from coterie.system.files import locked

CONFIG = {"rounds": 5}


def round_event(number: int = 1, **changes: Any) -> dict[str, Any]:
    event: dict[str, Any] = {
        "event": "round",
        "round": number,
        "groups": [["a", "b"], ["c"]],
        "joined": [],
        "left": [],
        "left-out": {},
        "seconds": {"prepare": 0.1, "train": 0.4},
        "silos": {
            name: {"num-examples": 10, "bytes-sent": 100, "bytes-received": 50} for name in "abc"
        },
    }
    return event | changes


def errors(**values: float | None) -> dict[str, Any]:
    return {name: {"error": error} for name, error in values.items()}


def write(folder: Path, *parts: dict[str, Any] | str) -> None:
    folder.mkdir(exist_ok=True)
    with (folder / "events.jsonl").open("a", encoding="utf-8") as file:
        for part in parts:
            file.write(part if isinstance(part, str) else json.dumps(part) + "\n")


def kinds(found: Iterable[Event]) -> list[str]:
    return [event.kind for event in found]


def never() -> str | None:
    return None


# ---------------------------------------------------------------- events


def test_who_watches_a_run_whose_process_was_killed_is_told_soon(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coterie.server.runs.record.follow, "CHECK_S", 0.0)
    folder = write_run(tmp_path / "hcct-1", num_silos=2, num_rounds=2, status="running")
    past = time.time() - 10  # no longer ago than a round may take
    os.utime(folder / "events.jsonl", (past, past))
    line = f"coterie run resume hcct-1 --runs-dir {tmp_path}"
    with pytest.raises(FederationError, match=rf"gone.*{line}$"):
        watch_run("hcct-1", Given(runs_dir=tmp_path))


def test_a_run_that_somebody_holds_is_watched_however_long_it_says_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coterie.server.runs.record.follow, "CHECK_S", 0.0)
    folder = write_run(tmp_path / "hcct-1", num_silos=2, num_rounds=2, status="running")
    past = time.time() - 10
    os.utime(folder / "events.jsonl", (past, past))
    end = {"event": "end", "status": "completed", "seconds": 1.0}
    with locked(folder):
        threading.Timer(0.5, write, (folder, end)).start()
        assert watch_run("hcct-1", Given(runs_dir=tmp_path)) == 0


def test_events_are_given_in_order_until_the_end(tmp_path: Path) -> None:
    write(tmp_path, *({"event": kind} for kind in ("start", "round", "end", "after")))
    assert kinds(events(tmp_path, start_deadline_s=1, ended=never)) == ["start", "round", "end"]


def test_an_end_before_a_resumption_is_not_the_last(tmp_path: Path) -> None:
    first, again = {"event": "end", "status": "failed"}, {"event": "resume", "run_id": "2"}
    write(tmp_path, {"event": "start", "run_id": "1"}, first, again)
    found = events(tmp_path, start_deadline_s=60, ended=never)
    assert kinds(next(found) for _ in range(3)) == ["start", "end", "resume"]
    write(tmp_path, {"event": "end", "status": "completed"}, {"event": "after"})
    assert [event.status for event in found] == ["completed"]
    own = events(tmp_path, start_deadline_s=60, ended=never, run_id=1)
    assert kinds(own) == ["start", "end"]


def test_a_line_that_is_still_being_written_is_waited_for(tmp_path: Path) -> None:
    write(tmp_path, {"event": "start"}, '{"event": "ro')

    def go_on() -> None:
        time.sleep(0.15)
        write(tmp_path, 'und", "round": 3}\n{"event": "end"}\n')

    writer = threading.Thread(target=go_on)
    writer.start()
    found = list(events(tmp_path, start_deadline_s=60, ended=never))
    writer.join()
    assert [(e.kind, e.number) for e in found] == [("start", 0), ("round", 3), ("end", 0)]


def test_a_damaged_line_costs_itself(tmp_path: Path) -> None:
    write(tmp_path, {"event": "start"})
    with (tmp_path / "events.jsonl").open("ab") as file:
        file.write(b"\xff\xfe\x00\n")
    write(tmp_path, {"event": "end"})
    assert kinds(events(tmp_path, start_deadline_s=60, ended=never)) == ["start", "end"]


def test_a_folder_that_does_not_exist_yet_is_waited_for(tmp_path: Path) -> None:
    def begin() -> None:
        time.sleep(0.1)
        write(tmp_path / "later", {"event": "end"})

    writer = threading.Thread(target=begin)
    writer.start()
    found = list(events(tmp_path / "later", start_deadline_s=60, ended=never))
    writer.join()
    assert kinds(found) == ["end"]


def test_a_run_that_does_not_begin_in_time_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match="has not begun after 0 s"):
        list(events(tmp_path / "nothing", start_deadline_s=0.1, ended=never))


def test_a_run_that_is_over_without_saying_so_is_an_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(coterie.server.runs.record.follow, "CHECK_S", 0.01)
    write(tmp_path, {"event": "start"})
    found = []
    with pytest.raises(FederationError, match="its record does not show how: it was stopped"):
        for event in events(tmp_path, start_deadline_s=60, ended=lambda: "it was stopped"):
            found.append(event)
    assert kinds(found) == ["start"]


def test_a_run_that_was_stopped_is_given_time_to_write_how_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Calls:
        def runs(self, run_id: int) -> list[RunInfo]:
            return [RunInfo(run_id, "finished", "stopped", "", "")]

    def end() -> None:
        time.sleep(0.3)
        write(tmp_path, {"event": "end", "status": "failed"})

    monkeypatch.setattr(coterie.server.runs.record.follow, "CHECK_S", 0.01)
    write(tmp_path, {"event": "start", "run_id": "1"})
    shown: list[Event] = []
    with locked(tmp_path):
        process = threading.Thread(target=end)
        process.start()
        last = follow_run(Calls(), 1, tmp_path, shown.append)  # type: ignore[arg-type]
        process.join()
    assert last.kind == "end"
    write(tmp_path, {"event": "resume", "run_id": "2"})
    with pytest.raises(FederationError, match="its record does not show how: stopped"):
        follow_run(Calls(), 2, tmp_path, shown.append)  # type: ignore[arg-type]


class Pending:
    """A SuperLink at which a run is not begun before the clock of the test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, until_s: float, step_s: float) -> None:
        self.now, self.until_s = 0.0, until_s
        clock = SimpleNamespace(monotonic=lambda: self.now, sleep=lambda _: self._pass(step_s))
        monkeypatch.setattr(coterie.server.machine.local, "time", clock)
        monkeypatch.setattr(coterie.server.runs.record.follow, "time", clock)
        monkeypatch.setattr(coterie.server.cli.commands, "time", clock)

    def _pass(self, seconds: float) -> None:
        self.now += seconds

    def runs(self, run_id: int) -> list[RunInfo]:
        return [RunInfo(run_id, "pending" if self.now < self.until_s else "finished", "", "", "")]

    def log_lines(self, run_id: int, *, deadline_s: float) -> list[str]:
        return ["begun\x1b[2J"]


NOT_STARTED = "the coordinator has not started run 7 for {} s. Is its executor running?"


@pytest.mark.parametrize(("wait_s", "said"), [(10.0, ["30"]), (170.0, ["30", "90", "150"])])
def test_a_run_that_the_coordinator_does_not_start_is_said_to_wait_and_not_for_ever(
    wait_s: float, said: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: Any = Pending(monkeypatch, until_s=1e6, step_s=5.0)
    shown: list[Event] = []
    with pytest.raises(FederationError, match="has not begun after") as caught:
        follow_run(calls, 7, tmp_path, shown.append, wait_s=wait_s)
    assert f"after {max(wait_s, 60):.0f} s" in str(caught.value)
    assert kinds(shown) == ["waits"] * len(said)
    for event, seconds in zip(shown, said, strict=True):
        assert event.text.startswith(NOT_STARTED.format(seconds))
        assert "logs/executor.log" in event.text and "Ctrl-C" in event.text


def test_the_same_of_a_run_whose_record_is_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), width=500)
    calls: Any = Pending(monkeypatch, until_s=100.0, step_s=5.0)
    follow_log = coterie.server.cli.commands._follow_log
    assert follow_log(console, calls, 7, Start(7, 300.0)) != 0
    first, second, then = console.file.getvalue().splitlines()[:3]  # type: ignore[attr-defined]
    assert first.startswith(NOT_STARTED.format(30)) and second.startswith(NOT_STARTED.format(90))
    assert then == r"begun\x1b[2J", "a coordinator elsewhere writes no escape sequences here"
    calls.until_s = 1e6
    with pytest.raises(FederationError, match="has not begun after 300 s"):
        follow_log(console, calls, 7, Start(7, 300.0))


def test_reasons_and_queues_from_elsewhere_are_shown_without_escape_sequences(
    capsys: pytest.CaptureFixture[str],
) -> None:
    class Failed(grpc.RpcError):
        said = json.dumps({"public_message": "\x1b[2J"})

        def details(self) -> str:
            return self.said

        def code(self) -> grpc.StatusCode:
            return grpc.StatusCode.INTERNAL

    calls = Control.__new__(Control)
    calls._address = "fl.example.org:9093"
    failed = Failed()
    assert str(calls._translated(failed)).endswith(r"refuses: INTERNAL: \x1b[2J")
    failed.said = 2000 * "[" + "who?"
    assert "refuses: INTERNAL: [[[" in str(calls._translated(failed))
    print_queue([Entry("q1", {"strategy": "\x1b[2J"}, by="\x1b]0;x")])
    assert "\x1b" not in capsys.readouterr().out


# ---------------------------------------------------------------- progress


def fed(*entries: dict[str, Any]) -> Progress:
    progress = Progress("HCCT")
    for event in entries:
        read = event_of(json.dumps(event))
        assert read is not None
        progress.feed(read)
    return progress


START = {"event": "start", "config": CONFIG}


def test_silos_are_followed_by_state() -> None:
    before = [
        START,
        {"event": "here", "round": 1, "silos": ["a", "b", "c"]},
        {"event": "answer", "work": "train", "silos": ["a"]},
    ]
    assert fed(*before).states == {"a": "answered", "b": "training", "c": "training"}
    later = {"event": "here", "round": 2, "silos": ["a", "c", "d"]}
    assert fed(*before, later).states == {
        "a": "training", "b": "left", "c": "training", "d": "training",
    }  # fmt: skip
    over = fed(*before, {"event": "end", "status": "failed", "seconds": 1.0})
    assert over.states["a"] == "done" and over.states["b"] == "training"


def test_progress_begins_with_waiting() -> None:
    assert Progress("x").status == "waiting"
    progress = fed(START)
    assert (progress.status, progress.rounds, progress.round) == ("waiting for silos", 5, 0)
    assert fed(START, {"event": "ready", "silos": ["a"]}).status == "training"
    assert fed(START, {"event": "look", "round": 3}).status == "round 3"


def test_progress_adds_up_bytes_and_takes_the_last_groups_and_errors() -> None:
    progress = fed(
        START,
        round_event(1, evaluation=errors(a=0.5, b=0.3, c=0.1)),
        round_event(2, groups=[["a"], ["b", "c"]], evaluation=errors(a=0.2, b=None)),
    )
    assert progress.round == 2
    assert progress.groups == (("a",), ("b", "c"))
    assert progress.errors == {"a": 0.2, "b": 0.3, "c": 0.1}
    assert progress.bytes == 2 * 3 * 150
    beside = {"trial": {"bytes-sent": 30, "bytes-received": 20}}
    assert fed(START, round_event(1, phases=beside)).bytes == 3 * 150 + 50
    assert progress.samples == {"a": 10, "b": 10, "c": 10}
    assert progress.mean_error == pytest.approx(0.2)
    assert progress.round_seconds == pytest.approx([0.5, 0.5])


def test_the_mean_error_is_of_those_who_are_here() -> None:
    here = [["a", "b"]]
    progress = fed(
        START,
        round_event(1, evaluation=errors(a=0.5, b=0.3, c=0.9)),
        round_event(2, groups=here, left=["c"]),
    )
    assert progress.mean_error == pytest.approx(0.4)
    assert progress.left == {"c": 2}
    assert fed(START).mean_error is None


def test_who_comes_back_has_not_left_and_joined_when_it_first_came() -> None:
    progress = fed(
        START,
        round_event(1, joined=["a", "b", "c"]),
        round_event(2, left=["c"]),
        round_event(4, joined=["c"]),
    )
    assert progress.left == {}
    assert progress.joined == {"a": 1, "b": 1, "c": 1}


def test_replies_left_out_are_named_with_round_and_reason() -> None:
    progress = fed(START, round_event(2, **{"left-out": {"b": "NaN"}}))
    assert progress.left_out == ["round 2: b: NaN"]


def test_the_final_evaluation_counts_and_its_time_is_no_rounds() -> None:
    final = round_event(5, evaluation=errors(a=0.1), silos={}) | {"event": "final"}
    progress = fed(START, round_event(5), final)
    assert progress.errors["a"] == 0.1
    assert len(progress.round_seconds) == 1


def test_the_end_brings_status_and_reason() -> None:
    progress = fed(START, {"event": "end", "status": "failed", "error": "no silos", "seconds": 3})
    assert (progress.status, progress.error) == ("failed", "no silos")
