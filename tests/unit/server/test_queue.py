"""Runs that wait for their turn: who goes next, what a kill costs, and what commands show."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from coterie.engine.control import RunInfo, digest_of
from coterie.server.runs.config import RunConfig
from coterie.server.runs.record import Recorder
from coterie.server.site.contacts import Contacts
from coterie.server.site.federation import Federation, create, load
from coterie.server.site.queue import MAX_ENDED, MAX_TRIES, Dispatcher, Queue, task_of
from coterie.strategies import FederationError
from tests.commands import coterie


@pytest.fixture
def federation(tmp_path: Path) -> Federation:
    return create(tmp_path / "study", ["127.0.0.1"])


class FakeControl:
    """A SuperLink that remembers what was submitted."""

    def __init__(self) -> None:
        self.known: list[RunInfo] = []
        self.before: Callable[[], None] = lambda: None
        self.after: Callable[[], None] = lambda: None

    def submit(self, config: RunConfig, bundle: bytes = b"") -> int:
        self.before()
        number = 100 + len(self.known)
        info = RunInfo(number, "running", "", "", "", digest_of(bundle), config.plain())
        self.known.append(info)
        self.after()
        return number

    def runs(self) -> list[RunInfo]:
        return list(self.known)

    def going_on(self, task: str) -> None:
        self.known.append(RunInfo(len(self.known), "running", "", "", "", "", {"task": task}))

    def end_all(self) -> None:
        self.known = [
            RunInfo(r.run_id, "finished", "completed", "", "", r.bundle, r.keys) for r in self.known
        ]

    @property
    def tasks(self) -> list[Any]:
        return [run.keys["task"] for run in self.known if not run.ended]


def config(task: str = "digits", **keys: Any) -> RunConfig:
    return RunConfig.read({"task": task, **keys})


def dispatcher(federation: Federation, said: list[str] | None = None) -> Dispatcher:
    return Dispatcher(federation, (said if said is not None else []).append)


def test_a_run_waits_for_the_one_of_the_same_silos_and_the_highest_priority_is_next(
    federation: Federation,
) -> None:
    calls, made = FakeControl(), dispatcher(federation)
    calls.going_on("digits")
    for seed, priority in ((1, 0), (2, 5), (3, 5)):
        made.queue.add(config(seed=seed), priority=priority)
    made.dispatch(calls)  # type: ignore[arg-type]
    assert [one.id for one in made.queue.waiting()] == ["q2", "q3", "q1"]
    for seed in (2, 3, 1):
        calls.end_all()
        made.dispatch(calls)  # type: ignore[arg-type]
        (now,) = [run for run in calls.known if not run.ended]
        assert now.keys["seed"] == seed
    assert made.queue.waiting() == []
    assert [(one.state, one.run_id) for one in made.queue.entries()] == [
        ("started", 103), ("started", 101), ("started", 102),
    ]  # fmt: skip


def test_studies_of_other_silos_do_not_wait_for_each_other_and_shared_silos_do(
    federation: Federation,
) -> None:
    contacts = Contacts(federation.folder)
    contacts.note({"a": (1, ("one", "shared"))})
    contacts.note({"b": (2, ("two",))})
    calls, made = FakeControl(), dispatcher(federation)
    calls.going_on("one")
    for task in ("shared", "two"):
        made.queue.add(config(task))
    made.dispatch(calls)  # type: ignore[arg-type]
    assert calls.tasks == ["one", "two"]


def test_nobody_overtakes_a_run_with_more_priority_to_its_silos(federation: Federation) -> None:
    Contacts(federation.folder).note({"a": (1, ("one", "both"))})
    Contacts(federation.folder).note({"b": (2, ("two", "both"))})
    calls, made = FakeControl(), dispatcher(federation)
    calls.going_on("one")
    made.queue.add(config("both"), priority=1)
    made.queue.add(config("two"))  # its silo is free, but both is next there
    made.dispatch(calls)  # type: ignore[arg-type]
    assert calls.tasks == ["one"]


@pytest.mark.parametrize(("at_once", "started"), [(0, 3), (2, 1), (1, 0)])
def test_so_many_runs_go_on_at_once_as_the_federation_says(
    at_once: int, started: int, federation: Federation
) -> None:
    file = federation.folder / "coterie.toml"
    file.write_text(file.read_text().replace("at_once = 0", f"at_once = {at_once}"))
    calls, made = FakeControl(), dispatcher(load(federation.folder))
    calls.going_on("digits")
    for _ in range(3):
        made.queue.add(config(), alone=False)
    made.dispatch(calls)  # type: ignore[arg-type]
    assert len(calls.known) == 1 + started


class KilledError(BaseException):
    """The process was killed."""


@pytest.mark.parametrize("point", ["before", "after"])
def test_a_kill_around_the_submission_starts_a_run_once(point: str, federation: Federation) -> None:
    def kill() -> None:
        raise KilledError

    calls, made = FakeControl(), dispatcher(federation)
    made.queue.add(config())
    setattr(calls, point, kill)
    with pytest.raises(KilledError):
        made.dispatch(calls)  # type: ignore[arg-type]
    (entry,) = Queue(federation.folder).waiting()
    assert entry.state == "starting"
    setattr(calls, point, lambda: None)
    for _ in range(3):
        dispatcher(federation).dispatch(calls)  # type: ignore[arg-type]
    assert len(calls.known) == 1
    (entry,) = Queue(federation.folder).entries()
    assert (entry.state, entry.run_id) == ("started", 100)


def test_a_run_that_the_superlink_refuses_is_given_up_and_the_next_one_goes_on(
    federation: Federation,
) -> None:
    said: list[str] = []
    calls, made = FakeControl(), dispatcher(federation, said)
    made.queue.add(config(seed=1))
    refusing = True

    def refuse() -> None:
        if refusing:
            raise FederationError("not with me.")

    calls.before = refuse
    for _ in range(MAX_TRIES + 1):
        made.dispatch(calls)  # type: ignore[arg-type]
    (entry,) = made.queue.entries()
    assert (entry.state, entry.error) == ("refused", "not with me.")
    assert said == ["Queued run q1 was not started: not with me."] * MAX_TRIES
    refusing = False
    made.queue.add(config(seed=2))
    made.dispatch(calls)  # type: ignore[arg-type]
    assert [run.keys["seed"] for run in calls.known] == [2]


def test_a_run_that_is_resumed_waits_for_the_silos_of_its_own_task(federation: Federation) -> None:
    folder = federation.runs / "hcct-1"
    Recorder(folder, config("readm").plain(), run_id=1).fail(KeyboardInterrupt())
    keys = {"resume": "hcct-1", "runs-dir": str(federation.runs), "task": "digits"}
    assert task_of(keys) == "readm"
    assert task_of({**keys, "resume": "gone"}) == ""


def test_a_queue_forgets_what_is_long_over_and_never_a_number(federation: Federation) -> None:
    queue = Queue(federation.folder)
    for _ in range(MAX_ENDED + 5):
        queue.change(queue.add(config()), state="started")
    assert len(queue.entries()) == MAX_ENDED
    assert queue.add(config()).id == f"q{MAX_ENDED + 6}"


@pytest.mark.parametrize("content", ["{", "[]", '{"next": 1, "entries": [{"x": 1}]}'])
def test_a_damaged_queue_is_named(content: str, federation: Federation) -> None:
    (federation.folder / "queue.json").write_text(content)
    with pytest.raises(FederationError, match=r"queue\.json cannot be read: .*the runs again"):
        Queue(federation.folder).waiting()


def test_commands_add_a_run_to_the_queue_show_it_and_take_it_away(federation: Federation) -> None:
    here = ("--federation", str(federation.folder))
    done = coterie("run", "fedavg", "--queue", "--priority", "7", "--detach", *here)
    assert done.returncode == 0 and "run q1 is in the queue" in done.stdout
    assert "The coordinator is not running: the run waits until it is." in done.stdout
    shown = coterie("runs", *here).stdout
    row = next(line.split() for line in shown.splitlines() if line.split()[:1] == ["q1"])
    assert row[:4] == ["q1", "7", "fedavg", "digits"] and row[-3:] == ["the", "same", "silos"]
    assert coterie("runs", "stop", "q1", *here).stdout == "q1 is taken out of the queue.\n"
    assert "q1" not in coterie("runs", *here).stdout
    again = coterie("runs", "stop", "q1", *here)
    assert again.returncode == 2 and "no run 'q1' is in the queue" in again.stderr


def test_a_federation_with_a_limit_queues_every_run(federation: Federation) -> None:
    file = federation.folder / "coterie.toml"
    file.write_text(file.read_text().replace("at_once = 0", "at_once = 1"))
    done = coterie("run", "fedavg", "--detach", "--federation", str(federation.folder))
    assert "run q1 is in the queue" in done.stdout
    (entry,) = json.loads((federation.folder / "queue.json").read_text())["entries"]
    assert entry["alone"] is False


def test_a_queue_that_there_is_not_is_refused() -> None:
    done = coterie("run", "fedavg", "--queue", "--superlink", "127.0.0.1:1")
    assert done.returncode == 2 and "--queue needs a federation," in done.stderr


def test_a_run_that_cannot_be_resumed_is_not_queued(federation: Federation) -> None:
    done = coterie("run", "--resume", "gone", "--queue", "--federation", str(federation.folder))
    assert done.returncode == 2 and "there is no run 'gone'" in done.stderr
    assert Queue(federation.folder).entries() == []
