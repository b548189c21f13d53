"""Secure runs on real processes: the models of one process, and no update anywhere to be seen."""

from __future__ import annotations

import json
import mmap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from coterie import wire
from coterie.system.processes import family
from tests.commands import coterie
from tests.e2e import planted
from tests.e2e.gated import TASK
from tests.e2e.organisations import Organisations
from tests.e2e.runs import HCCT, KEYS, finished, hashes_of, in_process, record_of, spec
from tests.e2e.trio import Trio

PLANT = 77


def test_real_processes_give_the_models_of_one_process(trio: Trio, tmp_path: Path) -> None:
    folder, last = trio.run(**HCCT, secure=True)
    assert last.status == "completed"
    assert hashes_of(folder) == in_process(tmp_path / "run", **HCCT, secure=True)["model-hashes"]
    record = record_of(folder)
    assert record["config"]["secure"] is True
    sums = [entry["phases"].get("sum", {}) for entry in record["rounds"]]
    assert any(cost.get("messages") for cost in sums)


@pytest.mark.nightly
def test_enrolled_silos_that_require_it_take_part_in_secure_runs_alone(
    pair: Organisations, tmp_path: Path
) -> None:
    files = [pair.home_of(name) / "silo.toml" for name in ("a", "b")]
    before = [file.read_text() for file in files]
    try:
        for name, file in zip(("a", "b"), files, strict=True):
            file.write_text(file.read_text() + '\n[policy]\nsecure = "required"\n')
            pair.end(name)
            pair.start_silo(name)
        pair.wait_for(2)
        keys = ("--rounds", "2", "--min-silos", "2", "--seed", "3", "--task", TASK)
        folder = pair.submit("fedavg", *keys, "--secure")
        finished(folder)
        assert record_of(folder)["status"] == "completed"
        soon = ("--set", "wait-for-silos=3", "--federation", str(pair.coordinator))
        refused = coterie("run", "fedavg", *keys, *soon)
        assert refused.returncode == 3, refused.stdout + refused.stderr
        assert "takes part only in secure runs" in refused.stdout + refused.stderr
        ledger = (pair.home_of("a") / "ledger.jsonl").read_text().splitlines()
        own = [entry for line in ledger if (entry := json.loads(line))["run"] == folder.name]
        left = {(e["type"], t["record"]) for e in own for t in e.get("tensors", ())}
        assert (wire.MASKED_SUM, wire.MASKED) in left and (wire.TRAIN, wire.SKETCH) in left
        assert {kind for kind, record in left if record == wire.ARRAYS} <= {wire.INITIAL}
    finally:
        for name, file, text in zip(("a", "b"), files, before, strict=True):
            file.write_text(text)
            pair.end(name)
            pair.start_silo(name)
        pair.wait_for(2)


@pytest.mark.parametrize("secure", [True, pytest.param(False, marks=pytest.mark.nightly)])
def test_a_planted_value_is_nowhere_but_at_its_silo(
    secure: bool, trio: Trio, tmp_path: Path
) -> None:
    """In memory and files of SuperLink and ServerApp, and in memory of the other silos; in a run
    that is not secure the coordinator has it."""
    names, seed = ("p", "q", "r"), PLANT + secure
    for index, name in enumerate(names):
        plant = {"plant": seed} if name == "p" else {}
        silo = spec(name, index, **plant)
        trio.start_silo(
            type(silo)(silo.name, planted.TASK, options=silo.options),
            environment=trio.gate.environment,
        )
    trio.wait_for_silos(6)
    trio.gate.close()
    keys = {**KEYS, **planted.KEYS, "task": planted.TASK, "strategy": "fedavg", "rounds": 3}
    run_id, folder = trio.submit(**keys, secure=secure)
    trio.gate.hold(3, rounds=1)
    assert record_of(folder)["rounds"], "a round is over, with its sum"
    coordinators = sorted(family(trio.superlink.pids))
    others = [trio.processes[name].pid for name in ("q", "r")]
    wanted = parts_of(seed)
    assert found_in_memory(trio.processes["p"].pid, wanted), "the silo itself has it"
    assert any(found_in_memory(pid, wanted) for pid in coordinators) is not secure
    assert not any(found_in_memory(pid, wanted) for pid in others)
    trio.gate.open()
    last = trio.follow(run_id, folder, lambda event: None)
    assert last.status == "completed"
    if secure:
        files = files_of(trio)
        assert folder / "run.json" in files and any("checkpoints" in f.parts for f in files)
        assert not any(holds(file.read_bytes(), wanted) for file in files)


def parts_of(seed: int) -> list[bytes]:
    """Pairs of the planted numbers that are beside each other: first, in the middle, last."""
    content = planted.numbers_of(seed).tobytes()
    return [content[at : at + 8] for at in (0, len(content) // 2 - 4, len(content) - 8)]


def holds(content: bytes, wanted: list[bytes]) -> bool:
    """Whether any of these is in it."""
    return any(one in content for one in wanted)


def found_in_memory(pid: int, wanted: list[bytes]) -> bool:
    """Whether a process has any of these anywhere in what it may write to."""
    return any(holds(part, wanted) for part in memory_of(pid))


def memory_of(pid: int) -> Iterator[bytes]:
    """Pages that lie beside each other, of those that are in memory at all."""
    size, kept = mmap.PAGESIZE, 3 << 62  # a page that is in memory, or swapped
    with (
        Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory,
        Path(f"/proc/{pid}/pagemap").open("rb", buffering=0) as pages,
    ):
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            place, rights = line.split()[:2]
            if not rights.startswith("rw"):
                continue
            start, end = (int(one, 16) for one in place.split("-"))
            pages.seek(start // size * 8)
            known = np.frombuffer(pages.read((end - start) // size * 8), np.uint64)
            here = np.concatenate([[False], (known & np.uint64(kept)) != 0, [False]])
            for first, last in np.flatnonzero(here[1:] != here[:-1]).reshape(-1, 2).tolist():
                memory.seek(start + first * size)
                with suppress(OSError):
                    yield memory.read((last - first) * size)


def files_of(trio: Trio) -> list[Path]:
    """All that the coordinator's side has written."""
    silos = {"p", "q", "r"}
    files = [file for file in trio.folder.rglob("*") if file.is_file()]
    return [file for file in files if not silos & set(file.relative_to(trio.folder).parts)]
