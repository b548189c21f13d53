"""A real federation's queue, and what it tells of itself: numbers and health."""

from __future__ import annotations

import re
import time
from collections.abc import Iterable
from urllib.request import urlopen

import psutil
import pytest

from coterie.server.site.contacts import Contacts
from coterie.server.site.queue import Queue
from coterie.system.processes import family
from tests.e2e.gated import TASK
from tests.e2e.organisations import SETTINGS, Organisations
from tests.e2e.runs import record_of, until

QUIET_S, LOOK_S = 25.0, 20.0


def completed(pair: Organisations, run_id: int) -> bool:
    record = pair.coordinator / "runs" / f"fedavg-{run_id}" / "run.json"
    return record.exists() and record_of(record.parent)["status"] == "completed"


def test_the_coordinator_starts_a_run_of_the_queue_and_learns_who_serves_its_task(
    pair: Organisations,
) -> None:
    queue = Queue(pair.coordinator)
    pair.command("run", "fedavg", "--rounds", "1", "--task", TASK, *SETTINGS, "--queue", "--detach")
    until(lambda: not queue.waiting(), "its turn", deadline_s=60)
    entry = queue.entries()[-1]
    until(lambda: completed(pair, entry.run_id), "the run", deadline_s=60)
    assert {Contacts(pair.coordinator).served()[name].tasks for name in "ab"} == {(TASK,)}
    assert TASK in pair.command("members", "list")


@pytest.mark.nightly
def test_a_run_waits_until_that_of_the_same_silos_is_over(pair: Organisations) -> None:
    queue, common = Queue(pair.coordinator), ("fedavg", "--rounds", "1", "--task", TASK, *SETTINGS)
    pair.gate.close()
    first = pair.submit(*common)
    pair.gate.hold(2)
    pair.command("run", *common, "--queue", "--detach")
    assert "the same silos" in pair.command("runs")
    (waiting,) = queue.waiting()
    pair.gate.open()
    until(lambda: not queue.waiting(), "its turn", deadline_s=60)
    entry = queue.find(waiting.id)
    assert entry is not None and entry.run_id
    assert record_of(first)["status"] == "completed"
    until(lambda: completed(pair, entry.run_id), "the second run", deadline_s=60)


def test_a_federation_that_works_says_so_in_numbers_and_in_exit_codes(pair: Organisations) -> None:
    assert re.search(r"2 of \d+ silos online", pair.command("federation", "check"))
    assert pair.done("silo", "health", "--home", str(pair.home_of("a"))).count("ok ") == 4

    def numbers() -> str:
        with urlopen(f"http://127.0.0.1:{pair.metrics}/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
        return text

    until(lambda: 'coterie_silos{status="online"} 2.0' in numbers(), "both silos", deadline_s=60)
    assert 'coterie_memory_bytes{part="superlink"}' in numbers()


@pytest.mark.nightly
def test_who_waits_for_work_costs_next_to_nothing(pair: Organisations) -> None:
    """CPU seconds: a busy machine takes no more of them. 50 silos: benchmarks.engine.overhead."""
    time.sleep(QUIET_S)  # a silo that has just worked looks for more of it more often
    pids = {
        name: family([process.pid])
        for name, process in pair.processes.items()
        if name in ("superlink", "a", "b")
    }
    before = {name: cpu_seconds(own) for name, own in pids.items()}
    time.sleep(LOOK_S)
    shares = {name: (cpu_seconds(own) - before[name]) / LOOK_S for name, own in pids.items()}
    assert shares["superlink"] < 0.10, shares
    assert max(shares["a"], shares["b"]) < 0.01, shares


def cpu_seconds(pids: Iterable[int]) -> float:
    times = [psutil.Process(pid).cpu_times() for pid in set(pids) if psutil.pid_exists(pid)]
    return sum(one.user + one.system for one in times)
