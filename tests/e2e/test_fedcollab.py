"""FedCollab with real processes: a newcomer and a leaver, a silo killed in the middle."""

from __future__ import annotations

import io
import signal
from pathlib import Path

import pytest
from rich.console import Console

from coterie.server.machine.local import LocalFederation
from coterie.server.runs.record import Event
from coterie.server.study.demo import demo
from tests.e2e.conftest import coterie, record_of, spec, until
from tests.e2e.test_runs import KEYS, in_process_hashes


@pytest.mark.timeout(400)
def test_the_demo_finds_the_hidden_groups_places_the_newcomer_and_lets_one_leave(
    tmp_path: Path,
) -> None:
    console = Console(file=io.StringIO(), width=120)
    outcome = demo(console, seed=3, rounds=6, strategy="fedcollab", folder=tmp_path)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert outcome.groups == outcome.hidden
    assert sum(len(group) for group in outcome.groups) == 9, "one joined, one left"
    means = {run: sum(e.values()) / len(e) for run, e in outcome.errors.items()}
    assert means["grouped"] < means["alone"] and means["grouped"] < means["global"]
    assert "found exactly" in text and "FedCollab's bound for these groups" in text
    assert "IPR (better than alone)" in text
    (folder,) = (tmp_path / "runs").glob("FedCollab-*")
    rounds = record_of(folder)["rounds"]
    pairs = [entry["discriminators"]["pairs"] for entry in rounds if "discriminators" in entry]
    assert pairs == [36, 9], "all pairs before round 1, then the newcomer's alone"
    assert "discriminators: 36 pairs of 9 silos, at most" in (folder / "run.log").read_text()


@pytest.mark.timeout(300)
def test_a_silo_killed_in_the_middle_of_the_discriminators_is_lost_and_the_run_goes_on(
    federation: LocalFederation,
) -> None:
    for index, name in enumerate(("a", "b", "c")):
        federation.start_silo(spec(name, index))
    federation.wait_for_silos(3)
    run_id, folder = federation.submit(
        strategy="fedcollab",
        rounds=2,
        min_silos=3,
        seed=1,
        discriminator_steps=1500,
        round_timeout=120.0,
    )

    def kill(event: Event) -> None:
        if event.kind == "ready":
            log = folder / "run.log"
            until(lambda: "discriminators: 3 pairs" in log.read_text(), "the discriminators")
            federation.end_silo("b", how=signal.SIGKILL)

    assert federation.follow(run_id, folder, kill).status == "completed"
    record = record_of(folder)
    phase = record["rounds"][0]["discriminators"]
    assert set(phase["missing"]) == {"b"}
    assert phase["unfinished"] == [["a", "b"], ["b", "c"]]
    groups = record["rounds"][0]["groups"]
    assert sorted(name for group in groups for name in group) == ["a", "b", "c"]
    assert set(record["final-evaluation"]) == {"a", "c"}
    assert "silo b is lost" in (folder / "run.log").read_text()


@pytest.mark.timeout(300)
def test_the_federation_and_the_in_process_grid_agree_bit_for_bit_with_ditto_too(
    trio: LocalFederation, tmp_path: Path
) -> None:
    keys = {"strategy": "fedcollab", "rounds": 2, "personalise": "ditto", "c": 4.0}
    record = record_of(trio.run(**{**KEYS, **keys})[0])
    assert record["status"] == "completed"
    assert record["model-hashes"] == in_process_hashes(tmp_path, **keys)
    same = record_of(tmp_path / "in-process")
    assert record["final-evaluation"] == same["final-evaluation"]
    distances = [one["rounds"][0]["structure"]["distances"] for one in (record, same)]
    assert distances[0] == distances[1]


def test_a_bad_c_is_refused_before_anything_starts() -> None:
    for c in ("0", "-1", "much"):
        done = coterie("run", "fedcollab", "-c", c)
        assert done.returncode == 2 and "wrong: c" in done.stderr, done.stderr
