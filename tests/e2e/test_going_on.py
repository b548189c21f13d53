"""More rounds and runs from other runs, on real processes and as a person types it."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from coterie.client.home.approvals import read_all
from coterie.features.evaluation.coordinator import FILE, read_judgement
from coterie.server.report.contribution import contributions
from coterie.server.runs.contribution import FILE as CONTRIBUTION
from tests.e2e.crashes import kill_server_app
from tests.e2e.gated import ONE_BATCH, TASK
from tests.e2e.organisations import NAMES, SETTINGS, Organisations
from tests.e2e.runs import (
    HCCT,
    finished,
    happened,
    hashes_of,
    in_process,
    record_of,
    until,
    until_happened,
)
from tests.e2e.trio import Trio


def test_more_rounds_and_a_run_from_a_run_as_a_person_types_it(trio: Trio, tmp_path: Path) -> None:
    folder, _ = trio.run(**{**HCCT, "rounds": HCCT["rounds"] - 1})
    done = trio.operator("run", "continue", str(folder), "--rounds", "1")
    assert done.returncode == 0, done.stderr
    assert hashes_of(folder) == in_process(tmp_path / "run", **HCCT)["model-hashes"]
    assert "continued after round" in done.stderr + done.stdout
    refused = trio.operator("run", "resume", folder.name)
    assert refused.returncode == 2 and "coterie run continue" in refused.stderr
    done = trio.operator("run", "--from", folder.name, "--rounds", "2", "--set", "lr=0.05")
    assert done.returncode == 0, done.stderr
    (own,) = [
        one for one in trio.runs_dir.iterdir() if record_of(one)["config"]["parent"] == folder.name
    ]
    record = record_of(own)
    assert len(record["rounds"]) == HCCT["rounds"] + 2 and record["config"]["lr"] == 0.05
    assert record["config"]["alpha"] == HCCT["alpha"]
    done = trio.operator("evaluate", folder.name, "--min-silos", "3", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert {one["silo"] for one in found["cells"] if one["figures"]} == {"a", "b", "c"}
    tree = trio.records("runs", "--tree").stdout
    assert f"└ {own.name}" in tree


@pytest.mark.nightly
def test_a_tester_more_rounds_and_an_evaluation_over_tls_wait_for_approval(
    pair: Organisations, tmp_path: Path
) -> None:
    home = str(pair.home_of("tester"))
    request = pair.make("tester", {"train": 40, "test": 30, "skip": 280})
    settings = pair.home_of("tester") / "silo.toml"
    own = 'role = "evaluate"\n[policy]\napprove = "ask"\n[data]'
    settings.write_text(settings.read_text().replace("[data]", own))
    pair.join("tester", pair.enrol(request))
    pair.start_silo("tester")
    pair.wait_for(3)

    def approved(folder: Path, end: int) -> None:
        def asked() -> bool:
            return folder.name in pair.done("silo", "pending", "--home", home)

        until(asked, "the question to the tester's approver", deadline_s=90, every_s=1.0)
        assert not happened(folder, "commit", end), "it waits for the tester"
        pair.done("silo", "approve", folder.name, "--home", home)
        until_happened(folder, "commit", end)

    keys = {"task": TASK, "min-silos": 2, "seed": 7, "strategy": "fedavg", **ONE_BATCH}
    waiting = ("--set", "churn=tester+1", "--set", "wait-for-silos=300")
    folder = pair.submit(
        "fedavg", "--rounds", "2", "--min-silos", "2", "--seed", "7", "--task", TASK,
        *SETTINGS, *waiting,
    )  # fmt: skip
    approved(folder, 2)
    finished(folder)
    again = ("run", "continue", folder.name, "--rounds", "1", "--detach")
    pair.command(*again)
    approved(folder, 3)

    def over() -> bool:
        record = record_of(folder)
        return len(record["rounds"]) == 3 and record["status"] not in ("starting", "running")

    until(over, "the end of the third round", deadline_s=90)
    alone = in_process(tmp_path / "run", *NAMES, **keys, rounds=3)
    assert hashes_of(folder) == alone["model-hashes"]
    testing = record_of(folder)["final-details"]["testing"]
    assert list(testing) == ["tester"] and testing["tester"]["group"] == ["a", "b"]
    judges = ("evaluate", folder.name, "--min-silos", "3", "--federation", str(pair.coordinator))
    pair.start("judge", *judges)
    until(lambda: list(folder.parent.glob("evaluation-*")), "the evaluation", deadline_s=90)
    (judged,) = folder.parent.glob("evaluation-*")

    def asked() -> bool:
        return judged.name in pair.done("silo", "pending", "--home", home)

    until(asked, "the question to the tester's approver", deadline_s=90, every_s=1.0)
    (one,) = (one for one in read_all(Path(home)) if one.run == judged.name)
    assert one.terms["model.A"] == record_of(folder)["model-hashes"]["a"]
    assert not read_judgement(judged / FILE).answers, "it waits for the tester"
    pair.done("silo", "approve", judged.name, "--home", home)
    assert pair.processes["judge"].wait(90) == 0, pair.said("judge")
    found = read_judgement(judged / FILE)
    assert set(found.answers) == {"a", "b", "tester"}
    pair.end("tester")


@pytest.mark.nightly
def test_what_each_silo_brings_over_tls_waits_for_approval_and_survives_kills(
    pair: Organisations, tmp_path: Path
) -> None:
    home = str(pair.home_of("careful"))
    pair.add("careful", 2, extra='[policy]\napprove = "ask"')
    pair.wait_for(3)

    def approve(folder: Path) -> None:
        def asked() -> bool:
            return folder.name in pair.done("silo", "pending", "--home", home)

        until(asked, "the question to the third silo's approver", deadline_s=90, every_s=1.0)
        pair.done("silo", "approve", folder.name, "--home", home)

    trained = pair.submit(
        "fedavg", "--rounds", "1", "--min-silos", "3", "--seed", "7", "--task", TASK, *SETTINGS,
        "--set", "wait-for-silos=300",
    )  # fmt: skip
    approve(trained)
    finished(trained)
    pair.gate.close()
    words = ("contribution", trained.name, "--rounds", "2", "--min-silos", "3", "--wait", "300")
    pair.start("asks", *words, "--federation", str(pair.coordinator))
    until(lambda: list(trained.parent.glob("contribution-*")), "the run", deadline_s=90)
    (folder,) = trained.parent.glob("contribution-*")
    pair.end("asks", signal.SIGKILL)
    assert not happened(folder, "ready"), "it waits for the third silo"
    approve(folder)
    pair.gate.hold(3, rounds=2 * 3 + 1)  # a silo's trainings in a round, in a group of three
    until_happened(folder, "commit", 1)
    kill_server_app(folder)
    pair.gate.open()
    pair.command("run", "resume", folder.name)
    record = record_of(folder)
    assert record["resumed"][0]["after-round"] == 1 and record["status"] == "completed"
    keys = {"strategy": "contribution", "parent": str(trained), "rounds": 2, "min-silos": 3}
    in_process(tmp_path / "run", *NAMES, "careful", **keys)
    assert (folder / CONTRIBUTION).read_bytes() == (tmp_path / "run" / CONTRIBUTION).read_bytes()
    found = contributions(read_judgement(folder / CONTRIBUTION))
    assert [(one.silo, one.why, len(one.measured_by)) for one in found] == [
        (name, "", 2) for name in sorted((*NAMES, "careful"))
    ]
    pair.end("careful")
