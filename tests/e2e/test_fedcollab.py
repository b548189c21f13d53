"""FedCollab with real processes: a newcomer and a leaver, a silo killed in the middle."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from coterie.server.study.demo import demo
from tests.e2e.runs import KEYS, in_process, record_of, until
from tests.e2e.trio import Trio


@pytest.mark.nightly
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
    assert "found exactly" in text and "FedCollab chose these groups by error bounds" in text
    assert "better than local: " in text and " points (± is" in text
    (folder,) = (tmp_path / "runs").glob("FedCollab-*")
    rounds = record_of(folder)["rounds"]
    pairs = [entry["discriminators"]["pairs"] for entry in rounds if "discriminators" in entry]
    assert pairs == [36, 9], "all pairs before round 1, then the newcomer's alone"
    assert "discriminators: 36 pairs of 9 silos, at most" in (folder / "run.log").read_text()


@pytest.mark.nightly
def test_a_silo_killed_in_the_middle_of_the_discriminators_is_lost_and_the_run_goes_on(
    trio: Trio,
) -> None:
    run_id, folder = trio.submit(
        **{**KEYS, "strategy": "fedcollab", "rounds": 2},
        discriminator_steps=800,
        round_timeout=15.0,
    )
    log = folder / "run.log"
    until(lambda: log.exists() and "discriminators: 3 pairs" in log.read_text(), "discriminators")
    trio.kill("b")
    assert trio.follow(run_id, folder, lambda event: None).status == "completed"
    record = record_of(folder)
    phase = record["rounds"][0]["discriminators"]
    assert set(phase["missing"]) == {"b"}
    assert phase["unfinished"] == [["a", "b"], ["b", "c"]]
    groups = record["rounds"][0]["groups"]
    assert sorted(name for group in groups for name in group) == ["a", "b", "c"]
    assert set(record["final-evaluation"]) == {"a", "c"}
    assert "silo b is lost" in log.read_text()


@pytest.mark.nightly
def test_the_federation_and_the_in_process_grid_agree_bit_for_bit_with_ditto_too(
    trio: Trio, tmp_path: Path
) -> None:
    own = {"strategy": "fedcollab", "rounds": 2, "personalise": "ditto", "c": 4.0}
    own |= {"discriminator-rounds": 1}
    record = record_of(trio.run(**{**KEYS, **own})[0])
    assert record["status"] == "completed"
    same = in_process(tmp_path / "in-process", **{**KEYS, **own})
    assert record["model-hashes"] == same["model-hashes"]
    assert record["final-evaluation"] == same["final-evaluation"]
    distances = [one["rounds"][0]["structure"]["distances"] for one in (record, same)]
    assert distances[0] == distances[1]
