"""What goes wrong in the world: killed silos, wrong silos, a lost SuperLink, nobody there."""

from __future__ import annotations

from typing import Any

import pytest

from coterie.server.machine.local import SiloSpec
from tests.e2e.gated import FAILS, ONE_BATCH
from tests.e2e.runs import KEYS, record_of, spec
from tests.e2e.trio import Trio

FEDAVG: dict[str, Any] = {**KEYS, "strategy": "fedavg", "rounds": 3, **ONE_BATCH}


@pytest.mark.nightly
def test_a_silo_killed_in_a_round_is_left_out_and_the_run_goes_on(trio: Trio) -> None:
    trio.gate.close()
    run_id, folder = trio.submit(**FEDAVG, round_timeout=8.0)
    trio.gate.hold(3, rounds=1)
    trio.kill("b")
    trio.gate.open()
    assert trio.follow(run_id, folder, lambda event: None).status == "completed"
    record = record_of(folder)
    assert record["rounds"][0]["left-out"] == {}
    assert set(record["rounds"][1]["left-out"]) == {"b"}
    assert set(record["rounds"][1]["silos"]) == {"a", "c"}
    assert set(record["final-evaluation"]) == {"a", "c"}
    assert "b is left out" in (folder / "run.log").read_text()


def test_a_silo_told_to_end_while_it_trains_says_so_and_ends_at_once(trio: Trio) -> None:
    trio.gate.close()
    run_id, folder = trio.submit(**FEDAVG)
    trio.gate.hold(3, rounds=1)
    trio.end_silo("b")
    assert trio.processes["b"].wait(60) == 0, "it does not wait for its training, which is held"
    trio.gate.open()
    assert trio.follow(run_id, folder, lambda event: None).status == "completed"
    reason = record_of(folder)["rounds"][1]["left-out"]["b"]
    # Flower's own words, if it had signed off before the server fetched its answer.
    assert "shutting down" in reason or "not been in contact" in reason
    assert "stopping: leaving run" in trio.log_of("b").read_text()


@pytest.mark.nightly
def test_silos_come_back_by_themselves_after_the_superlink_was_restarted(trio: Trio) -> None:
    trio.superlink.stop()
    trio.superlink.start()
    trio.wait_for_silos(3)
    assert trio.run(**FEDAVG)[1].status == "completed"


def test_who_does_not_fit_is_refused_and_who_fails_is_left_out(trio: Trio) -> None:
    """One run: a silo of another task, a second silo of a name, one whose task raises."""
    trio.start_silo(SiloSpec("odd"))
    trio.add("failing", 3, train=FAILS)
    first = trio.programs.pop("a")
    # It replaces only the note of the process; a's folder would be refused, too.
    elsewhere = trio.folder / "silos" / "elsewhere"
    trio.start_silo(spec("a", 5), home=elsewhere, environment=trio.gate.environment)
    trio.programs["second a"] = trio.programs.pop("a")
    trio.programs["a"] = first
    trio.wait_for_silos(6)
    folder, last = trio.run(**{**FEDAVG, "min-silos": 4})
    assert last.status == "completed"
    record = record_of(folder)
    assert set(record["silos"]) == {"a", "b", "c", "failing"}

    assert "odd" not in str(record["refused"]), "a silo of another study is expected"
    assert "ERROR" not in trio.log_of("odd").read_text()

    assert "another silo with that name" in record["refused"]["a"]

    left_out = record["rounds"][0]["left-out"]
    assert list(left_out) == ["failing"]
    assert "ZeroDivisionError" in left_out["failing"]
    assert "secret" not in (folder / "run.json").read_text(), "values stay at the silo"
    assert "a secret value" in trio.log_of("failing").read_text()
    assert trio.processes["failing"].poll() is None
