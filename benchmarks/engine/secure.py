"""What secure runs cost: groups and errors on the demo's silos, seconds and bytes of a round.

    python -m benchmarks.engine.secure                 # the seeds, and rounds of 0.4 and 50 MB
    python -m benchmarks.engine.secure --sizes         # the seeds alone

Of the demo's nine silos every strategy runs plain and secure in one process, 20 rounds each: ten
seeds, and of auto, whose race takes another path where it is secure, thirteen more. The
rounds are of real processes with a network of one layer and hardly any data, plain and secure in
turn.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import ttest_1samp
from torch import nn

from benchmarks.kit import Entry, Store, columns, page, read
from coterie.client.app import app
from coterie.engine.inprocess import InProcessGrid
from coterie.server.machine.local import LocalFederation, SiloSpec
from coterie.server.runs.config import RunConfig
from coterie.server.runs.record import reading
from coterie.server.runs.run import execute
from coterie.server.study.demo import hidden_groups, silos
from coterie.tasks import Task
from coterie.tasks.base import Option, SiloData

STRATEGIES: dict[str, dict[str, Any]] = {
    "hcct": {"alpha": 50.0},
    "fedgroup": {"cold-start-epochs": 25},
    "auto": {},
    "fedavg": {},
}
SEEDS = range(10)
MORE = {"auto": range(10, 23)}
"""Further seeds, beside those by which differences were found."""
ROUNDS = 20
NODES, CLASSES = {0.4: 10, 50.0: 4}, 10
TIMED = {0.4: 20, 50.0: 4}
"""Megabytes → rounds that are timed, half of them in each of two turns."""


class Wide(Task):
    """A linear network as large as is asked for, and eight samples."""

    def __init__(self, megabytes: float) -> None:
        self.name = f"wide-{megabytes:g}"
        self.num_classes = CLASSES
        self.width = int(megabytes * 1e6 / 4 / CLASSES)

    def model(self) -> nn.Module:
        """One layer."""
        return nn.Linear(self.width, CLASSES, bias=False)

    def load(self, options: Mapping[str, Option]) -> SiloData:
        """Other samples at every silo."""
        rng = np.random.default_rng(int(options.get("seed", 0)))
        x = (rng.normal(size=(9, self.width)) / np.sqrt(self.width)).astype(np.float32)
        y = rng.integers(CLASSES, size=9)
        return SiloData(x[:8], y[:8], x[8:], y[8:])


WIDE_0_4, WIDE_50 = Wide(0.4), Wide(50.0)
NAMES = {0.4: "benchmarks.engine.secure:WIDE_0_4", 50.0: "benchmarks.engine.secure:WIDE_50"}


def outcome(strategy: str, seed: int, *, secure: bool) -> Entry:
    """Mean error in % after the last round, the groups, and whether they are the hidden ones."""
    nodes = [spec.node_config() for spec in silos(seed)]
    keys = {"strategy": strategy, "seed": seed, "rounds": ROUNDS, "min-silos": len(nodes)}
    config = RunConfig.read({**keys, **STRATEGIES[strategy], "secure": secure})
    with tempfile.TemporaryDirectory() as folder:
        result = execute(InProcessGrid(app, nodes), config, run_id=1, folder=Path(folder) / "run")
    last = result.rounds[-1]
    groups = sorted(sorted(group) for group in last.groups)
    errors = [error for _, error, _ in last.evaluation.values()]
    found = groups == hidden_groups([str(node["name"]) for node in nodes])
    return {"error": 100 * float(np.mean(errors)), "found": found, "groups": groups}


def compare(strategy: str, seed: int) -> Entry:
    """A strategy plain and secure, of one seed."""
    plain, secure = (outcome(strategy, seed, secure=how) for how in (False, True))
    return {
        "plain": plain["error"],
        "secure": secure["error"],
        "found": [plain["found"], secure["found"]],
        "same": plain["groups"] == secure["groups"],
    }


def timed(megabytes: float, rounds: int, *, secure: bool, folder: Path) -> tuple[list[float], int]:
    """Seconds of rounds, without the first, and bytes of a round."""
    count = NODES[megabytes]
    with LocalFederation(folder) as federation:
        for number in range(count):
            federation.start_silo(SiloSpec(f"silo-{number}", NAMES[megabytes], {"seed": number}))
        federation.wait_for_silos(count)
        keys = {"task": NAMES[megabytes], "min-silos": count, "rounds": rounds + 1}
        keys |= {"local-steps": 1, "batch-size": 8, "lr": 0.01, "optimiser": "sgd"}
        record, last = federation.run(strategy="fedavg", secure=secure, **keys)
        assert last.status == "completed"
    found = reading.read_whole(record).rounds[1 : rounds + 1]
    moved = sum(
        sum(silo.bytes_sent + silo.bytes_received for silo in entry.silos.values())
        + sum(cost.bytes_sent + cost.bytes_received for cost in entry.phases.values())
        for entry in found
    )
    return [sum(entry.seconds.values()) for entry in found], moved // len(found)


def rounds(megabytes: float) -> Entry:
    """Rounds plain and secure, in turn."""
    seconds: dict[bool, list[float]] = {False: [], True: []}
    size: dict[bool, int] = {}
    for _ in range(2):
        for secure in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                found, size[secure] = timed(
                    megabytes, TIMED[megabytes] // 2, secure=secure, folder=Path(folder)
                )
            seconds[secure] += found
            print(f"{megabytes} MB, secure {secure}: {found}", flush=True)
    return {
        "silos": NODES[megabytes],
        "rounds": len(seconds[True]),
        "plain": statistics.median(seconds[False]),
        "secure": statistics.median(seconds[True]),
        "plain-bytes": size[False],
        "secure-bytes": size[True],
    }


def apart(runs: Sequence[Entry]) -> str:
    """How far secure errors are above plain ones, ± standard error, and Student's p of pairs."""
    more = np.array([e["secure"] - e["plain"] for e in runs])
    if len(more) < 2 or not more.any():
        return f"{more.mean():+.2f}"
    error = more.std(ddof=1) / np.sqrt(len(more))
    return f"{more.mean():+.2f} ± {error:.2f} (p {ttest_1samp(more, 0).pvalue:.2f})"


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    seeds = [entry for entry in entries if entry["part"] == "seeds"]
    sizes = sorted((e for e in entries if e["part"] == "rounds"), key=lambda e: e["megabytes"])
    rows = [
        {
            "strategy": name,
            "seeds": f"{chosen[0]} to {chosen[-1]}",
            "runs": [e for e in seeds if e["strategy"] == name and e["seed"] in chosen],
        }
        for name in STRATEGIES
        for chosen in (SEEDS, *([MORE[name]] if name in MORE else []))
    ]
    return page(
        "# What secure runs cost",
        "`make bench-secure`; 2 cores, loopback. Of the demo's nine silos, mean error in % after "
        f"{ROUNDS} rounds, mean over seeds.",
        columns(
            [row for row in rows if row["runs"]],
            {
                "strategy": "{strategy}",
                "seeds": lambda row: f"{len(row['runs'])}, of {row['seeds']}",
                "plain": lambda row: f"{np.mean([e['plain'] for e in row['runs']]):.2f}",
                "secure": lambda row: f"{np.mean([e['secure'] for e in row['runs']]):.2f}",
                "secure − plain": lambda row: apart(row["runs"]),
                "hidden groups": lambda row: str(sum(e["found"][0] for e in row["runs"])),
                "hidden groups, secure": lambda row: str(sum(e["found"][1] for e in row["runs"])),
                "same groups": lambda row: str(sum(e["same"] for e in row["runs"])),
            },
        ),
        "Rounds of real processes, medians; bytes are of arrays, both ways.",
        columns(
            sizes,
            {
                "model": "{megabytes:g} MB",
                "silos": "{silos}",
                "rounds": "{rounds}",
                "plain": "{plain:.2f} s",
                "secure": "{secure:.2f} s",
                "ratio": lambda e: f"{e['secure'] / e['plain']:.2f}",
                "more bytes": lambda e: f"{e['secure-bytes'] / e['plain-bytes']:.2f} ×",
            },
        ),
    )


STORE = Store("secure", document, keys=("part", "strategy", "seed", "megabytes"))


def main() -> None:
    """Measure what is not stored yet, and write after every figure."""
    sizes = {"nargs": "*", "type": float, "default": list(TIMED), "metavar": "MB"}
    given = read(STORE, __doc__, sizes=sizes)
    for megabytes in given.sizes:
        key = {"part": "rounds", "strategy": "fedavg", "seed": 0, "megabytes": megabytes}
        given.store.put({**key, **rounds(megabytes)})
    for strategy in STRATEGIES:
        for seed in (*SEEDS, *MORE.get(strategy, ())):
            key = {"part": "seeds", "strategy": strategy, "seed": seed, "megabytes": 0.0}
            if not given.store.has(key):
                given.store.put({**key, **compare(strategy, seed)})
    print(given.store.text())


if __name__ == "__main__":
    main()
