"""Operators at a real SuperLink: their keys and roles over TLS, approval at a silo, withdrawal."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from coterie.engine.fast.superlink.leftovers import forget_ended_runs
from coterie.server.runs.record import read_run
from coterie.server.site import audit, coordinator, operators
from coterie.server.site.statement import verified
from coterie.system.processes import account
from tests.commands import coterie
from tests.e2e.gated import TASK
from tests.e2e.organisations import SETTINGS, Organisations
from tests.e2e.runs import until

RUN = ("fedavg", "--task", TASK, "--min-silos", "2", *SETTINGS)


@pytest.fixture
def ada(pair: Organisations, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What an operator elsewhere types after a command; ada may look."""
    monkeypatch.setenv("COTERIE_OPERATOR", str(tmp_path / "ada"))
    name = f"ada-{tmp_path.name}"
    request = coterie("operator", "init", "--name", name).stdout.strip()
    pair.command("operator", "enrol", request, "--role", "look")
    made = pair.federation
    return ["--superlink", made.control_address, "--root-certificates", str(made.ca)]


def test_an_operator_without_the_role_is_refused_over_tls_and_starts_runs_with_it(
    pair: Organisations, ada: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    made = pair.federation
    refused = coterie("run", *RUN, "--rounds", "2", "--detach", *ada)
    assert refused.returncode != 0
    assert (
        "has the roles look; the role 'run' is required to start and stop runs." in refused.stderr
    )
    assert "2 silos connected" in coterie("status", *ada).stdout
    name = operators.read(made)[-1].name
    pair.command("operator", "set-roles", name, "--role", "run")
    started = coterie("run", *RUN, "--rounds", "2", "--detach", "--runs-dir", str(made.runs), *ada)
    assert started.returncode == 0, started.stderr
    pair.command("operator", "remove", name, "--yes")
    shut = coterie("status", *ada)
    assert shut.returncode != 0 and "no operator with that name and key is enrolled" in shut.stderr
    acts = audit.verify(made).acts
    begun = next(act for act in reversed(acts) if act.act == audit.BEGUN)
    assert begun.who == name and audit.who_started(made, int(begun.about["run"])) == name
    assert [act.act for act in acts if act.who == name] == ["refused", "run", "run begun"]
    folder = made.runs / f"fedavg-{begun.about['run']}"
    until(lambda: ended(folder), "the run's end", deadline_s=60)
    assert read_run(folder).status == "completed"
    assert (
        coterie("federation", "audit", "--verify", "--federation", str(made.folder)).returncode == 0
    )


@pytest.mark.nightly
def test_a_silo_that_asks_its_people_joins_late_and_withdraws(
    pair: Organisations, tmp_path: Path
) -> None:
    pair.add("asked", 3, extra='[policy]\napprove = "ask"')
    pair.wait_for(3)
    pair.gate.close()
    folder = pair.submit(*RUN, "--rounds", "60")
    pair.gate.hold(2, rounds=1)
    home = str(pair.home_of("asked"))
    shown = pair.done("silo", "pending", "--home", home)
    assert f"Run {folder.name}, code" in shown and "1 run waits" in shown
    assert f"by {account()}, says the coordinator at 127.0.0.1" in shown
    pair.done("silo", "approve", folder.name, "--home", home)

    def a_round_later() -> bool:  # it is asked again after some seconds, however short a round is
        time.sleep(0.3)
        pair.gate.hold(2, rounds=1)
        return "asked" in read_run(folder).rounds[-1].silos

    until(a_round_later, "the silo to join", deadline_s=60)
    pair.gate.open()
    until(lambda: ended(folder), "the run's end", deadline_s=120)
    rounds = read_run(folder).rounds
    assert "asked" not in rounds[0].silos
    assert "asked" in rounds[-1].silos
    printed = pair.command("members", "erase", "asked", "--yes")
    (file,) = (pair.coordinator / "withdrawals").glob("asked-*.json")
    done = verified(file.read_text(), pair.federation.ca.read_bytes())
    assert f"runs/{folder.name}/models/asked.safetensors" in {one.file for one in done.deleted}
    assert "models of a, b" in printed
    assert not (folder / "models" / "asked.safetensors").exists()
    assert (folder / "models" / "a.safetensors").exists()
    pair.end("asked")


@pytest.mark.nightly
def test_a_silo_withdraws_in_the_middle_of_a_run(pair: Organisations) -> None:
    pair.add("leaver", 4)
    pair.wait_for(3)
    pair.gate.close()
    three = ("fedavg", "--task", TASK, "--min-silos", "3", *SETTINGS, "--rounds", "8")
    folder = pair.submit(*three)
    pair.gate.hold(3, rounds=1)
    printed = pair.command("members", "erase", "leaver", "--yes")
    pair.gate.open()
    assert f"Stopping run {folder.name}, which has models of leaver." in printed
    assert read_run(folder).status == "stopped"
    assert not list((folder / "checkpoints").glob("round-*"))
    (file,) = (pair.coordinator / "withdrawals").glob("leaver-*.json")
    assert verified(file.read_text(), pair.federation.ca.read_bytes()).stopped == (folder.name,)
    made = pair.federation
    assert coordinator.damage_of(made.database) == ""
    pair.gate.close()
    last = pair.submit(*RUN, "--rounds", "2")
    pair.gate.hold(2)
    forget_ended_runs(made.database)  # of the run that goes on nothing is lost
    pair.gate.open()
    until(lambda: ended(last), "the next run's end", deadline_s=120)
    assert read_run(last).status == "completed"
    pair.end("leaver")


def ended(folder: Path) -> bool:
    return (folder / "run.json").exists() and read_run(folder).ended
