"""Several organisations: enrolment, TLS, a name and its key, joining during a run, crashes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from coterie.system.files import held_by
from coterie.system.processes import family
from tests.e2e.conftest import coterie, record_of, until
from tests.e2e.organisations import COMMAND_S, Organisations, processes_of
from tests.e2e.test_runs import in_process_hashes

pytestmark = pytest.mark.timeout(600)

RUN = ("hcct", "--alpha", "20", "--seed", "5", "--min-silos", "3")


@pytest.fixture
def organisations(tmp_path: Path) -> Iterator[Organisations]:
    with Organisations(tmp_path) as made:
        yield made


def test_from_init_to_a_run_that_gives_the_models_of_the_plain_federation(
    organisations: Organisations, tmp_path: Path
) -> None:
    """The whole path by command: one silo enrolled before the SuperLink runs, two while it does."""
    organisations.add("a", 0)
    organisations.start_superlink()
    organisations.add("b", 1)
    organisations.add("c", 2)
    organisations.wait_for(3)
    out = organisations.command("run", *RUN, "--rounds", "4")
    assert "round 4/4" in out
    (folder,) = organisations.federation.runs.iterdir()
    assert record_of(folder)["model-hashes"] == in_process_hashes(tmp_path)
    roster = organisations.command("roster")
    assert roster.count("online") == 3
    assert "3 silos connected" in organisations.command("status")
    assert organisations.end("a") == 0
    assert organisations.end("superlink") == 0
    assert not processes_of(organisations.processes["superlink"], "flower-superlink")


def rounds_of(folder: Path) -> int:
    """Rounds that are over."""
    return len(record_of(folder)["rounds"]) if (folder / "run.json").exists() else 0


def status_of(folder: Path) -> str:
    """Of a run, as its record says."""
    return str(record_of(folder)["status"]) if (folder / "run.json").exists() else ""


@pytest.fixture
def pair(organisations: Organisations) -> Organisations:
    """A coordinator and two silos, ready."""
    organisations.start_superlink()
    for index, name in enumerate(("a", "b")):
        organisations.add(name, index)
    organisations.wait_for(2)
    return organisations


def test_a_silo_enrolled_during_a_run_takes_part_from_the_next_round(pair: Organisations) -> None:
    # The run waits for it, so that the test does not depend on how fast this machine is.
    waiting = ("--set", "churn=late+5", "--set", "wait-for-silos=300")
    folder = pair.submit("hcct", "--rounds", "8", *waiting)
    until(lambda: rounds_of(folder) >= 1, "round 1", deadline_s=120)
    pair.add("late", 2)
    until(lambda: status_of(folder) == "completed", "the end of the run", deadline_s=250)
    record = record_of(folder)
    assert [entry["round"] for entry in record["rounds"] if "late" in entry["joined"]] == [5]
    assert set(record["final-evaluation"]) == {"a", "b", "late"}


def test_a_run_carries_on_when_the_superlink_is_killed_and_gives_the_same_models(
    pair: Organisations,
) -> None:
    keys = ("fedavg", "--rounds", "8", "--set", "local-epochs=400", "--seed", "7")
    undisturbed = pair.submit(*keys)
    until(lambda: status_of(undisturbed) == "completed", "the undisturbed run", deadline_s=200)
    folder = pair.submit(*keys)
    until(lambda: rounds_of(folder) >= 3, "round 3", deadline_s=120)
    # While both train. A message that a silo is just fetching is lost with the SuperLink: Flower
    # has marked it delivered, and the round waits for its deadline.
    time.sleep(0.7)
    (superlink,) = processes_of(pair.processes["superlink"], "flower-superlink")
    os.kill(superlink, signal.SIGKILL)
    until(
        lambda: "The SuperLink is back." in pair.said("superlink"), "the SuperLink", deadline_s=120
    )
    until(lambda: status_of(folder) == "completed", "the end of the run", deadline_s=150)
    assert record_of(folder)["model-hashes"] == record_of(undisturbed)["model-hashes"]
    assert all(not entry["left-out"] for entry in record_of(folder)["rounds"])


def test_a_coordinator_that_lost_its_database_resumes_with_a_new_certificate(
    pair: Organisations,
) -> None:
    """Its machine dies; what the backup holds, and the run's folder, are enough."""
    keys = ("fedavg", "--rounds", "10", "--set", "local-epochs=20", "--seed", "7")
    undisturbed = pair.submit(*keys)
    until(lambda: status_of(undisturbed) == "completed", "the undisturbed run", deadline_s=200)
    folder = pair.submit(*keys)
    until(lambda: rounds_of(folder) >= 3, "round 3", deadline_s=120)
    for pid in family([pair.processes["superlink"].pid]):
        os.kill(pid, signal.SIGKILL)
    pair.processes["superlink"].wait(20)
    until(lambda: held_by(folder) is None, "the ServerApp's end")
    assert status_of(folder) == "running" and rounds_of(folder) < 10
    databases = list(pair.coordinator.rglob("*.db*"))
    assert databases, "there was one"
    for file in databases:
        file.unlink()
    certificate = pair.coordinator / "tls" / "server.pem"
    before = certificate.read_bytes()
    done = coterie("init", str(pair.coordinator), "--renew", deadline_s=COMMAND_S)
    assert done.returncode == 0, done.stderr
    assert certificate.read_bytes() != before
    pair.log_of("superlink").unlink()
    pair.start_superlink()
    pair.wait_for(2)
    assert "completed" in pair.command("run", "--resume", folder.name)
    assert record_of(folder)["model-hashes"] == record_of(undisturbed)["model-hashes"]
    assert all(pair.processes[name].poll() is None for name in ("a", "b"))


def test_a_silo_that_does_not_agree_is_refused_with_the_reason_on_both_sides(
    pair: Organisations,
) -> None:
    pair.add("choosy", 2, extra='[policy]\nstrategies = ["fedgroup"]')
    pair.add("shy", 3, extra="[policy]\nmin_group_size = 9")
    pair.wait_for(4)
    folder = pair.submit("hcct", "--alpha", "1000", "--rounds", "2", "--min-silos", "3")
    until(lambda: status_of(folder) == "completed", "the end of the run", deadline_s=150)
    record = record_of(folder)
    assert set(record["silos"]) == {"a", "b", "shy"}
    reason = "silo 'choosy' takes part in fedgroup; this run's strategy is hcct."
    assert reason in record["refused"].values()
    assert reason in pair.said("choosy")
    assert sorted(record["final-groups"]) == [["a", "b"], ["shy"]], "it trains alone"
    assert record["rounds"][1]["left-out"] == {}
