"""Runs of the same silos wait for each other in the queue of a real federation."""

from __future__ import annotations

from coterie.server.site.contacts import Contacts
from coterie.server.site.queue import Queue
from tests.e2e.gated import TASK
from tests.e2e.organisations import SETTINGS, Organisations
from tests.e2e.runs import record_of, until


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
    second = pair.coordinator / "runs" / f"fedavg-{entry.run_id}" / "run.json"
    done = lambda: second.exists() and record_of(second.parent)["status"] == "completed"  # noqa: E731
    until(done, "the second run", deadline_s=60)
    assert {Contacts(pair.coordinator).served()[name].tasks for name in "ab"} == {(TASK,)}
    assert TASK in pair.command("roster")
