"""Several organisations: enrolment, TLS, a name and its key, joining during a run, crashes."""

from __future__ import annotations

import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from coterie.server.site.enrolled import names_by_node
from coterie.system.files import held_by
from coterie.system.processes import family
from tests.commands import coterie
from tests.e2e.gated import ONE_BATCH, TASK
from tests.e2e.organisations import NAMES, SETTINGS, Organisations, processes_of
from tests.e2e.runs import finished, in_process, record_of, until, until_happened

pytestmark = pytest.mark.timeout(600)

KEYS = {"task": TASK, "min-silos": 2, "seed": 7, "strategy": "fedavg", "rounds": 5, **ONE_BATCH}
RUN = ("fedavg", "--rounds", "5", "--min-silos", "2", "--seed", "7", "--task", TASK, *SETTINGS)


def test_from_init_to_a_run_that_gives_the_models_of_the_plain_federation(
    pair: Organisations, tmp_path: Path
) -> None:
    """The whole path by command: one silo enrolled before the SuperLink runs, one while it does."""
    out = pair.command("run", *RUN)
    assert "round 5/5" in out
    (folder,) = (f for f in pair.federation.runs.iterdir() if f.name in out)
    assert finished(folder) == in_process(tmp_path / "run", *NAMES, **KEYS)["model-hashes"]
    assert "</html>" in (folder / "report.html").read_text(encoding="utf-8")
    roster = pair.command("members", "list")
    assert roster.count("online") == 2
    assert "2 silos connected" in pair.command("status")


def test_a_silo_enrolled_during_a_run_takes_part_from_the_next_round(pair: Organisations) -> None:
    # The run waits for it, so that the test does not depend on how fast this machine is.
    waiting = ("--set", "churn=late+3", "--set", "wait-for-silos=300")
    keys = ("--alpha", "20", "--rounds", "5", "--min-silos", "2", "--task", TASK)
    folder = pair.submit("hcct", *keys, *waiting)
    until_happened(folder, "round", 1)
    pair.add("late", 2)
    finished(folder)
    record = record_of(folder)
    assert [entry["round"] for entry in record["rounds"] if "late" in entry["joined"]] == [3]
    assert set(record["final-evaluation"]) == {"a", "b", "late"}


def test_a_silo_that_does_not_agree_is_refused_with_the_reason_on_both_sides(
    pair: Organisations,
) -> None:
    pair.add("choosy", 3, extra='[policy]\nstrategies = ["fedgroup"]')
    pair.add("careful", 4, extra="[policy]\nmin_group_size = 9")
    pair.wait_for(4)
    keys = ("--alpha", "1000", "--rounds", "2", "--min-silos", "3", "--task", TASK)
    folder = pair.submit("hcct", *keys)
    finished(folder)
    record = record_of(folder)
    assert set(record["silos"]) == {"a", "b", "careful"}
    reason = "silo 'choosy' takes part in fedgroup; this run's strategy is hcct."
    assert reason in record["refused"].values()
    assert reason in pair.said("choosy")
    assert sorted(record["final-groups"]) == [["a", "b"], ["careful"]], "it trains alone"
    assert record["rounds"][1]["left-out"] == {}


def test_a_run_carries_on_when_the_superlink_is_killed_and_gives_the_same_models(
    pair: Organisations, tmp_path: Path
) -> None:
    pair.gate.close()
    folder = pair.submit(*RUN)
    # While both train. A message that a silo is just fetching is lost with the SuperLink: Flower
    # has marked it delivered, and the round waits for its deadline.
    pair.gate.hold(2, rounds=2)
    (superlink,) = processes_of(pair.processes["superlink"], "site.gate")
    os.kill(superlink, signal.SIGKILL)
    until(
        lambda: "The SuperLink answers again." in pair.said("superlink"),
        "the SuperLink",
        deadline_s=120,
    )
    pair.gate.open()
    assert finished(folder) == in_process(tmp_path / "run", *NAMES, **KEYS)["model-hashes"]
    assert all(not entry["left-out"] for entry in record_of(folder)["rounds"])


@pytest.mark.nightly
def test_a_coordinator_that_lost_its_database_resumes_with_a_new_certificate(
    pair: Organisations, tmp_path: Path
) -> None:
    """Its machine dies; what the backup holds, and the run's folder, are enough."""
    pair.gate.close()
    folder = pair.submit(*RUN)
    pair.gate.hold(2, rounds=2)
    for pid in family([pair.processes["superlink"].pid]):
        os.kill(pid, signal.SIGKILL)
    pair.processes["superlink"].wait(60)
    until(lambda: held_by(folder) is None, "the ServerApp's end")
    record = record_of(folder)
    assert record["status"] == "running" and len(record["rounds"]) < 5
    pair.gate.open()
    databases = list(pair.coordinator.rglob("*.db*"))
    assert databases, "there was one"
    for place in databases:
        shutil.rmtree(place) if place.is_dir() else place.unlink()  # objects lie in a folder
    certificate = pair.coordinator / "tls" / "server.pem"
    before = certificate.read_bytes()
    pair.done("federation", "init", str(pair.coordinator), "--renew")
    assert certificate.read_bytes() != before
    pair.log_of("superlink").unlink()
    pair.start_superlink()
    pair.wait_for(2)
    assert "completed" in pair.command("run", "--resume", folder.name)
    assert finished(folder) == in_process(tmp_path / "run", *NAMES, **KEYS)["model-hashes"]
    assert all(pair.processes[name].poll() is None for name in NAMES)


@pytest.mark.nightly
def test_silos_tell_what_their_data_look_like_over_tls(pair: Organisations) -> None:
    """One that consents, two that do not; a slip in the task's name ends at once."""
    pair.add("open", 5, extra='[policy]\nstatistics = ["targets"]')
    pair.wait_for(3)
    out = pair.command("stats", "--task", TASK, "--min-silos", "3")
    assert "a is left out: silo 'a' does not share statistics" in out
    assert re.search(r"open\s+│\s+40\s+│\s+targets", out)
    (folder,) = (f for f in pair.federation.runs.iterdir() if f.name in out)
    page = (folder / "report.html").read_text(encoding="utf-8")
    assert "class (target)" in page and not list((folder / "models").iterdir())
    everybody = len(names_by_node(pair.federation.roster))  # other tests' silos, which are away
    slip = ("--federation", str(pair.coordinator), "--detach", "--min-silos", str(everybody))
    done = coterie("run", "fedavg", "--task", f"{TASK}s", *slip)
    assert done.returncode != 0 and f"Did you mean --task {TASK}?" in done.stdout
