"""Silos with images: memory of a folder of 100,000 JPEGs, and ResNet-18 on three small silos.

    python -m benchmarks.engine.images                  # both; ten minutes on two cores
    python -m benchmarks.engine.images --parts folder   # of folder, resnet18

The files are hard links to a few hundred JPEGs of 224×224, and are deleted afterwards.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from benchmarks.kit import Entry, Store, page, read, select
from coterie.tasks.base import Option

SIDE = 224
DIFFERENT = 300
CLASSES = ("clear", "shadow")
DECLARATION = f"""
kind = "image-folder"
name = "xray"
classes = ["clear", "shadow"]
shape = [3, {SIDE}, {SIDE}]
network = "torchvision/resnet18"
freeze = "all-but-head"
"""
SILOS = 3
PER_SILO = 600
TRAINED = 256
"""Samples of the large folder that are trained on: memory does not grow with more."""


def make_folder(folder: Path, count: int, *, seed: int = 0) -> None:
    """So many JPEGs in two classes, the second brighter in its middle."""
    draw = np.random.default_rng(seed)
    originals = folder.parent / f"{folder.name}-originals"
    originals.mkdir(parents=True)
    for number in range(min(count, DIFFERENT)):
        coarse = draw.integers(0, 200, (14, 14, 3), np.uint8)
        coarse[4:10, 4:10] += np.uint8(55 * (number % 2))
        Image.fromarray(coarse).resize((SIDE, SIDE)).save(originals / f"{number}.jpg", quality=85)
    for name in CLASSES:
        (folder / name).mkdir(parents=True)
    for number in range(count):
        which = number % min(count, DIFFERENT)
        os.link(originals / f"{which}.jpg", folder / CLASSES[which % 2] / f"{number:06d}.jpg")


def peak_mb() -> float:
    """Of this process, since it began."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def open_folder(folder: Path) -> dict[str, Any]:
    """What a silo's process does before it joins, then a training and a test."""
    import torch

    from coterie.client.home.settings import SiloSettings
    from coterie.client.prepare import prepare
    from coterie.client.work.measure import evaluate
    from coterie.client.work.sgd import TrainPlan, train

    task = str(folder.parent / "xray.toml")
    started = time.perf_counter()
    (session,) = prepare(
        [SiloSettings("a", task=task, options={"data": str(folder)}, device="cpu")]
    )
    ready = time.perf_counter() - started
    opened, some = peak_mb(), torch.arange(TRAINED)
    plan = TrainPlan(epochs=1, batch_size=32, lr=0.01)
    train(session.task, session.model, session.data.train.take(some), plan, seed=0)
    evaluate(session.task, session.model, session.data.test.take(some))
    samples = len(session.data.train) + len(session.data.test)
    return {"images": samples, "ready_s": ready, "opened_mb": opened, "peak_mb": peak_mb()}


def run_silos(folder: Path) -> dict[str, Any]:
    """Three silos in one process, one round of FedAvg; seconds of the round and of the test."""
    from coterie.engine.inprocess import InProcessGrid
    from coterie.server.runs.config import RunConfig
    from coterie.server.runs.run import execute
    from coterie.server.study.silos import client_app, open_silos

    own: dict[str, Option] = {
        "task": str(folder.parent / "xray.toml"),
        "threads": 1,
        "device": "cpu",
    }
    nodes: list[dict[str, Option]] = [
        {**own, "name": f"silo-{i}", "data.data": str(folder.parent / f"silo-{i}")}
        for i in range(SILOS)
    ]
    for node in nodes:
        open_silos([node])
    keys = {"task": "xray", "strategy": "fedavg", "rounds": 1, "min-silos": SILOS, "lr": 0.05}
    keys |= {"local-epochs": 1, "batch-size": 32}
    config, started = RunConfig.read(keys), time.perf_counter()
    result = execute(
        InProcessGrid(client_app(), nodes), config, run_id=1, folder=folder.parent / "run"
    )
    errors = [error for _, error, _ in result.rounds[-1].evaluation.values()]
    return {
        "images": SILOS * PER_SILO,
        "round_s": time.perf_counter() - started,
        "error": float(np.mean(errors)),
        "peak_mb": peak_mb(),
    }


WORK = {"folder": open_folder, "resnet18": run_silos}


def measure(part: str, folder: Path, *, images: int) -> Entry:
    """What a process of its own finds of a part."""
    folder.mkdir()
    (folder / "xray.toml").write_text(DECLARATION)
    if part == "folder":
        make_folder(folder / "images", images)
    for number in range(SILOS if part == "resnet18" else 0):
        make_folder(folder / f"silo-{number}", PER_SILO, seed=number)
    command = [sys.executable, "-m", "benchmarks.engine.images", "--work", part]
    done = subprocess.run(
        [*command, str(folder / "images")], check=True, stdout=subprocess.PIPE, timeout=3600
    )
    found: Entry = json.loads(done.stdout.splitlines()[-1])
    return found


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    lines = [
        f"A folder of {row['images']:,} JPEGs of {SIDE}×{SIDE}: the silo is ready after "
        f"{row['ready_s']:.0f} s, with {row['opened_mb']:,.0f} MB at most; training and testing "
        f"ResNet-18 with a frozen backbone, {row['peak_mb']:,.0f} MB."
        for row in select(entries, part="folder")
    ]
    lines += [
        f"ResNet-18 with a frozen backbone, {SILOS} silos of {PER_SILO} JPEGs in one process on "
        f"one thread: a round of one epoch with its test takes {row['round_s']:.0f} s and "
        f"{row['peak_mb']:,.0f} MB at most."
        for row in select(entries, part="resnet18")
    ]
    machines = dict.fromkeys(entry["machine"] for entry in entries)
    return page(
        "# Silos with images",
        "Made by `python -m benchmarks.engine.images`.",
        f"Machine: {'; '.join(machines)}.",
        *lines,
    )


STORE = Store("images", document, keys=("part",))


def main() -> None:
    """Measure, print, store."""
    if sys.argv[1:2] == ["--work"]:
        print(json.dumps(WORK[sys.argv[2]](Path(sys.argv[3]))))
        return
    given = read(
        STORE, __doc__, parts=("folder", "resnet18"), images={"default": 100_000, "type": int}
    )
    with tempfile.TemporaryDirectory() as folder:
        for part in given.parts:
            found = measure(part, Path(folder) / part, images=given.images)
            given.store.put({"part": part, "machine": f"{os.cpu_count()} cores", **found})
    print(given.store.text())


if __name__ == "__main__":
    main()
