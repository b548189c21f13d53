"""A real federation's queue, and what it tells of itself: numbers and health."""

from __future__ import annotations

import re
from urllib.request import urlopen

import pytest

from coterie.server.site.contacts import Contacts
from coterie.server.site.queue import Queue
from tests.e2e.gated import TASK
from tests.e2e.organisations import SETTINGS, Organisations
from tests.e2e.runs import record_of, until


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
    assert TASK in pair.command("roster")


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
    assert re.search(r"2 of \d+ silos online", pair.command("health"))
    assert pair.done("silo", "health", "--home", str(pair.home_of("a"))).count("ok ") == 4

    def numbers() -> str:
        with urlopen(f"http://127.0.0.1:{pair.metrics}/metrics", timeout=10) as answer:
            text: str = answer.read().decode()
        return text

    until(lambda: 'coterie_silos{status="online"} 2.0' in numbers(), "both silos", deadline_s=60)
    assert 'coterie_memory_bytes{part="superlink"}' in numbers()
