"""A model of several pieces in a real federation: its objects lie in files that are shared."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from coterie.client.app import app
from coterie.engine.fast.superlink import blob_store
from coterie.engine.inprocess import InProcessGrid
from coterie.server.machine.link import control
from coterie.server.machine.local import LocalFederation, SiloSpec
from coterie.server.machine.superlink import SuperLink
from coterie.server.runs.config import RunConfig
from coterie.server.runs.run import execute
from coterie.system.files import held_by
from coterie.tasks.base import Option, SiloData
from tests.e2e.crashes import committed, kill_server_app
from tests.e2e.planted import Towards
from tests.e2e.runs import ROOT, hashes_of, record_of, until

TASK = "tests.e2e.test_large:Wide"
LENGTH = 5_000_000
"""Numbers: three pieces of 8 MB and less."""
MODELS = 5
"""The first, the round's, that one encoded, the next, and less than one of all else."""
KEYS: dict[str, Any] = {
    **{"task": TASK, "strategy": "fedavg", "seed": 5, "min-silos": 2, "rounds": 3},
    **{"local-epochs": 1, "batch-size": 64, "lr": 0.1},
}


class Wide(Towards):
    """The digits, and many numbers that go towards a silo's own."""

    begin = torch.linspace(0.0, 1.0, LENGTH)

    def load(self, options: Mapping[str, Option]) -> SiloData:
        """The digits."""
        self.numbers = torch.tensor(float(options["skip"]))
        return super().load(options)


def specs() -> list[SiloSpec]:
    cuts = [{"train": 40, "test": 30, "skip": 70 * i} for i in range(2)]
    return [SiloSpec(f"silo-{i}", TASK, options=cut) for i, cut in enumerate(cuts)]


@contextmanager
def watched(home: Path) -> Iterator[set[str]]:
    """Names of the objects that lie in the SuperLink's folder meanwhile."""
    seen, over = set[str](), threading.Event()

    def look() -> None:
        while not over.wait(0.002):
            for folder in filter(Path.is_dir, home.glob(f"{blob_store.PREFIX}*")):
                seen.update(one.name for one in folder.iterdir() if len(one.name) == 64)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield seen
    finally:
        over.set()
        thread.join()


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("state", ["in memory", "in a database"])
def test_models_in_files_are_the_same_bit_for_bit_and_leave_nothing(
    tmp_path: Path, state: str
) -> None:
    home = tmp_path / "federation" / "superlink"
    database = home / f"{blob_store.PREFIX}of.db"  # the folder beside it is found by the same name
    local = LocalFederation(tmp_path / "federation")
    if state == "in a database":
        home.mkdir(parents=True)
        local.superlink = SuperLink(home, options=["--database", str(database)])
    with local:
        for spec in specs():
            local.start_silo(spec, environment={"PYTHONPATH": path()})
        local.wait_for_silos(2)
        with watched(home) as seen:
            folder, last = local.run(**KEYS)
        assert last.status == "completed"
        assert len(seen) >= 3, "some of the pieces were seen in their files"
        (shared,) = filter(Path.is_dir, home.glob(f"{blob_store.PREFIX}*"))
        rest = {blob_store.TOKEN, blob_store.SPARE, "lock"}
        until(lambda: {f.name for f in shared.iterdir()} <= rest, "no object left")
    left = [one for one in home.glob(f"{blob_store.PREFIX}*") if one.is_dir()]
    assert left == ([blob_store.beside(database)] if database.exists() else []), (
        "it goes with the SuperLink, unless that is to go on from there"
    )
    configs = [spec.node_config() for spec in specs()]
    execute(InProcessGrid(app, configs), RunConfig.read(KEYS), run_id=1, folder=tmp_path / "run")
    assert hashes_of(folder) == record_of(tmp_path / "run")["model-hashes"]


@pytest.mark.nightly
@pytest.mark.timeout(400)
@pytest.mark.parametrize("killed", ["SuperLink", "ServerApp"])
def test_a_kill_while_objects_are_on_their_way_leaves_none_behind(
    tmp_path: Path, killed: str
) -> None:
    home = tmp_path / "federation" / "superlink"
    home.mkdir(parents=True)
    database, keys = home / "state.db", KEYS | {"rounds": 12}
    local = LocalFederation(tmp_path / "federation")
    local.superlink = SuperLink(home, options=["--database", str(database)])
    with local:
        for spec in specs():
            local.start_silo(spec, environment={"PYTHONPATH": path()})
        local.wait_for_silos(2)
        run_id, folder = local.submit(**keys)
        committed(folder, 1)
        shared, rest = blob_store.beside(database), {blob_store.TOKEN, blob_store.SPARE, "lock"}
        process = local.superlink.program.process

        def caught() -> bool:
            process.send_signal(signal.SIGSTOP)
            if {file.name for file in shared.iterdir()} - rest:
                return True
            process.send_signal(signal.SIGCONT)
            return False

        until(caught, "an object in its file")
        if killed == "SuperLink":
            process.kill()
            process.wait()
            until(lambda: held_by(folder) is None, "the orphaned ServerApp's end")
            local.superlink.start()
            local.wait_for_silos(2)
        else:
            kill_server_app(folder)
            process.send_signal(signal.SIGCONT)
            until(lambda: ended(local, run_id), "the run's end at the SuperLink", deadline_s=150)
        with control(local.superlink.control_address) as calls:
            calls.stop(run_id)  # as `coterie run --resume` does
        again = local.resume(folder)
        assert local.follow(again, folder, lambda event: None).status == "completed"
        until(lambda: finished(shared) <= rest, "no object left")
    configs, config = [spec.node_config() for spec in specs()], RunConfig.read(keys)
    execute(InProcessGrid(app, configs), config, run_id=1, folder=tmp_path / "run")
    assert hashes_of(folder) == record_of(tmp_path / "run")["model-hashes"]


def finished(shared: Path) -> set[str]:
    """Without what the killed process was writing, which goes after ``blob_store.LEFT_S``."""
    unfinished = {blob_store.NEW, blob_store.UNFINISHED}
    return {file.name for file in shared.iterdir() if file.suffix not in unfinished}


def ended(local: LocalFederation, run_id: int) -> bool:
    with control(local.superlink.control_address) as calls:
        return all(run.ended for run in calls.runs(run_id))


class Wider(Wide):
    """Many more numbers."""

    begin = torch.linspace(0.0, 1.0, 8 * LENGTH)


@pytest.mark.nightly
@pytest.mark.timeout(400)
def test_the_coordinator_holds_few_models_at_a_time(tmp_path: Path) -> None:
    """Of its own memory: replies are in the SuperLink's files, which it shows. Final models too,
    however many silos there are."""
    size, peaks, over = 4 * 8 * LENGTH, dict[int, list[int]](), threading.Event()

    def look() -> None:
        assert local.superlink.executor is not None
        executor = psutil.Process(local.superlink.executor.process.pid)
        while not over.wait(0.02):
            for process in executor.children(recursive=True):
                with suppress(psutil.Error):
                    seen = process.memory_info()
                    peaks.setdefault(process.pid, []).append(seen.rss - seen.shared)

    thread = threading.Thread(target=look)
    with LocalFederation(tmp_path / "federation") as local:
        for spec in specs():
            wider = replace(spec, task="tests.e2e.test_large:Wider")
            local.start_silo(wider, environment={"PYTHONPATH": path()})
        local.wait_for_silos(2)
        thread.start()
        try:
            _, last = local.run(**KEYS | {"task": "tests.e2e.test_large:Wider", "rounds": 6})
        finally:
            over.set()
            thread.join()
    assert last.status == "completed"
    grown = max(max(seen) - min(seen) for seen in peaks.values())
    assert 2 * size < grown < MODELS * size, f"{grown / size:.1f} models"


def path() -> str:
    return os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
