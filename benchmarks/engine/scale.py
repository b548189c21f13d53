"""How a federation grows on one machine: 100, 300, 1,000 virtual silos over real gRPC.

MNIST, one softmax layer, FedGroup's power-law split, one local epoch; FedAvg and FedGroup with all
silos in every round. The silos are in a few processes that share a SuperLink; nothing is played.
Measured are seconds per round, where they go, CPU seconds and memory of every process, and
messages that were lost. The total of training samples is the same for every number of silos, so
what grows is the number of messages.

    make bench-scale ARGS='--data FOLDER'

A second call replaces the numbers of silos that it measures and keeps the others.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event, Thread
from typing import Any

from benchmarks.kit import Column, Entry, Store, columns, page, read
from coterie.server.machine.local import LocalFederation
from coterie.system.processes import family, proportional_memory

RUNS: Mapping[str, Mapping[str, Any]] = {
    "fedavg": {"strategy": "fedavg"},
    "fedgroup": {"strategy": "fedgroup", "num-groups": 3},
}
SIMULATION = """\
task = "mnist/mclr"
data = "{data}"
silos = {silos}
[split]
kind = "power-law"
test-share = 0.1
[options]
normalise = "per-pixel"
"""
AWAY = "pointed away from its group's"
"""In the reason of who answered, and was moved out of its group: no message was lost."""
MOVED = """\
Messages beyond 20 a silo are of silos that were moved out of their group for some rounds by the
rule of then, which knew nothing of how far a group's own directions are spread. Today's moves out
none of 100 silos and 3 of 300 in these 20 rounds of FedGroup, run in one process."""
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Usage:
    """What the processes of a federation used, by a name for each."""

    peak: dict[str, int] = field(default_factory=dict)
    cpu: dict[str, float] = field(default_factory=dict)
    peak_in_all: int = 0

    def sample(self, groups: Mapping[str, set[int]]) -> None:
        """Take the memory (bytes, shared pages divided) and CPU seconds of groups of processes."""
        total = 0
        for name, pids in groups.items():
            memory = sum(proportional_memory(pid) for pid in pids)
            total += memory
            self.peak[name] = max(self.peak.get(name, 0), memory)
            self.cpu[name] = max(self.cpu.get(name, 0.0), sum(map(cpu_seconds, pids)))
        self.peak_in_all = max(self.peak_in_all, total)


def cpu_seconds(pid: int) -> float:
    """CPU time of a process and of its children that have ended."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(int(value) for value in fields[11:15]) / TICKS


def processes_of(federation: LocalFederation) -> dict[str, set[int]]:
    """The SuperLink, its ServerApp, and every process of silos."""
    link, all_of_it = federation.superlink.program.process.pid, family(federation.superlink.pids)
    groups = {name: {process.pid} for name, process in federation.processes.items()}
    return {"SuperLink": {link}, "ServerApp": all_of_it - {link}, **groups}


@contextmanager
def watching(federation: LocalFederation) -> Iterator[Usage]:
    """Sample the federation's processes once a second."""
    usage, over = Usage(), Event()

    def watch() -> None:
        while not over.wait(1.0):
            usage.sample(processes_of(federation))

    watcher = Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield usage
    finally:
        over.set()
        watcher.join()


def measure(
    data: Path, silos: int, processes: int, rounds: int, strategies: Sequence[str]
) -> Iterator[Entry]:
    """Strategies one after the other with so many silos."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "simulation.toml"
        file.write_text(SIMULATION.format(data=data.resolve(), silos=silos))
        with LocalFederation(Path(folder) / "federation") as federation:
            started = time.perf_counter()
            federation.start_partitions(file, silos, processes)
            federation.wait_for_silos(silos)
            connected = round(time.perf_counter() - started, 1)
            for name in strategies:
                with watching(federation) as usage:
                    before = processes_of(federation)
                    usage.sample(before)
                    at_start = dict(usage.cpu)
                    record, last = federation.run(
                        **RUNS[name],
                        task="mnist/mclr",
                        wait_for_silos=1800.0,
                        round_timeout=1800.0,
                        rounds=rounds,
                        min_silos=silos,
                        local_epochs=1,
                        batch_size=10,
                        lr=0.03,
                    )
                assert last.status == "completed", last
                yield {
                    **{"silos": silos, "strategy": name, "processes": processes, "rounds": rounds},
                    "seconds-to-connect": connected,
                    "machine": f"{os.cpu_count()} cores, {platform.system()}",
                    **summary(record, usage, at_start),
                }


def record_of_run(folder: Path) -> dict[str, Any]:
    """The ``run.json`` of a run's folder."""
    found: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return found


def summary(folder: Path, usage: Usage, at_start: Mapping[str, float]) -> dict[str, Any]:
    """What a run's record and its processes say."""
    record = record_of_run(folder)
    rounds = record["rounds"]
    seconds = [sum(entry["seconds"].values()) for entry in rounds]
    phases = {
        phase: round(statistics.median(e["seconds"].get(phase, 0.0) for e in rounds), 3)
        for phase in rounds[0]["seconds"]
    }
    training = [sum(s["seconds"] for s in entry["silos"].values()) for entry in rounds]
    return {
        "seconds-a-round": round(statistics.median(seconds), 2),
        "fastest-round": round(min(seconds), 2),
        "slowest-round": round(max(seconds), 2),
        "phases": phases,
        "training-cpu-a-round": round(statistics.median(training), 2),
        "lost": sum(AWAY not in why for entry in rounds for why in entry["left-out"].values()),
        "messages": sum(len(entry["silos"]) + len(entry["left-out"]) for entry in rounds),
        "evaluated-at-the-end": len(record["final-evaluation"]),
        "seconds": record["seconds"],
        "to-first-training": record["seconds-to-first-training"],
        "record-bytes": (folder / "run.json").stat().st_size,
        "peak-megabytes": {k: round(v / 1e6) for k, v in usage.peak.items()},
        "peak-megabytes-in-all": round(usage.peak_in_all / 1e6),
        "cpu-seconds": {k: round(v - at_start.get(k, 0.0), 1) for k, v in usage.cpu.items()},
    }


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    shown: dict[str, Column] = {
        "silos": "{silos:,}",
        "processes": "{processes}",
        "strategy": "{strategy}",
        "rounds": "{rounds}",
        "s a round": "{seconds-a-round:.1f}",
        "fastest to slowest": lambda run: (
            (f"{run['fastest-round']:.1f} to " if "fastest-round" in run else "up to ")
            + f"{run['slowest-round']:.1f}"
        ),
        "of that training, CPU": "{training-cpu-a-round:.1f} s",
        "lost": "{lost} of {messages:,}",
        "memory in all": lambda run: f"{run['peak-megabytes-in-all'] / 1000:.2f} GB",
        "SuperLink": "{peak-megabytes[SuperLink]} MB",
        "ServerApp": "{peak-megabytes[ServerApp]} MB",
        "largest silo process": lambda run: f"{_largest(run['peak-megabytes'])} MB",
    }
    ordered = sorted(entries, key=lambda run: (run["silos"], list(RUNS).index(run["strategy"])))
    machines = dict.fromkeys(run["machine"] for run in entries)
    return page(f"# {__doc__}\n{'; '.join(machines)}", columns(ordered, shown), MOVED)


def _largest(peak: Mapping[str, int]) -> int:
    return max(megabytes for name, megabytes in peak.items() if name.startswith("silos-"))


STORE = Store("scale", document, keys=("silos", "strategy"))


def main() -> None:
    """Measure, store after every run, print."""
    given = read(
        STORE,
        __doc__,
        data=True,
        silos={"type": int, "nargs": "+", "default": [100, 300, 1000]},
        processes={"type": int, "default": 4},
        rounds=20,
        parts=RUNS,
    )
    for silos in given.silos:
        own = (silos, given.processes, given.rounds, given.parts)
        for entry in measure(Path(given.data), *own):
            given.store.put(entry)
    print(given.store.text())


if __name__ == "__main__":
    main()
