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

import argparse
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

from coterie.server.machine.local import LocalFederation
from coterie.system.processes import family, proportional_memory

RESULTS = Path(__file__).parent / "results" / "scale.json"
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
    superlink = federation.superlink.pid
    groups = {name: {process.pid} for name, process in federation.processes.items()}
    return {"SuperLink": {superlink}, "ServerApp": family([superlink]) - {superlink}, **groups}


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
) -> dict[str, Any]:
    """Strategies one after the other with so many silos."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "simulation.toml"
        file.write_text(SIMULATION.format(data=data.resolve(), silos=silos))
        found: dict[str, Any] = {"silos": silos, "processes": processes, "rounds": rounds}
        with LocalFederation(Path(folder) / "federation") as federation:
            started = time.perf_counter()
            federation.start_partitions(file, silos, processes)
            federation.wait_for_silos(silos)
            found["seconds-to-connect"] = round(time.perf_counter() - started, 1)
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
                found[name] = summary(record, usage, at_start)
    return found


def summary(folder: Path, usage: Usage, at_start: Mapping[str, float]) -> dict[str, Any]:
    """What a run's record and its processes say."""
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    rounds = record["rounds"]
    seconds = [sum(entry["seconds"].values()) for entry in rounds]
    phases = {
        phase: round(statistics.median(e["seconds"].get(phase, 0.0) for e in rounds), 3)
        for phase in rounds[0]["seconds"]
    }
    training = [sum(s["seconds"] for s in entry["silos"].values()) for entry in rounds]
    return {
        "seconds-a-round": round(statistics.median(seconds), 2),
        "slowest-round": round(max(seconds), 2),
        "phases": phases,
        "training-cpu-a-round": round(statistics.median(training), 2),
        "lost": sum(len(entry["left-out"]) for entry in rounds),
        "messages": sum(len(entry["silos"]) + len(entry["left-out"]) for entry in rounds),
        "evaluated-at-the-end": len(record["final-evaluation"]),
        "seconds": record["seconds"],
        "to-first-training": record["seconds-to-first-training"],
        "record-bytes": (folder / "run.json").stat().st_size,
        "peak-megabytes": {k: round(v / 1e6) for k, v in usage.peak.items()},
        "peak-megabytes-in-all": round(usage.peak_in_all / 1e6),
        "cpu-seconds": {k: round(v - at_start.get(k, 0.0), 1) for k, v in usage.cpu.items()},
    }


def table(results: list[dict[str, Any]]) -> str:
    """The results in Markdown."""
    head = (
        "| silos | processes | strategy | rounds | s a round | slowest | of that training, CPU "
        "| lost | memory in all | SuperLink | ServerApp | largest silo process |"
    )
    lines = [head, "|---" * 12 + "|"]
    for one in results:
        for name in [name for name in RUNS if name in one]:
            run = one[name]
            peak = run["peak-megabytes"]
            largest = max(v for k, v in peak.items() if k.startswith("silos-"))
            lines.append(
                f"| {one['silos']:,} | {one['processes']} | {name} | {one['rounds']} "
                f"| {run['seconds-a-round']:.1f} | {run['slowest-round']:.1f} "
                f"| {run['training-cpu-a-round']:.1f} s | {run['lost']} of {run['messages']:,} "
                f"| {run['peak-megabytes-in-all'] / 1000:.2f} GB | {peak['SuperLink']} MB "
                f"| {peak['ServerApp']} MB | {largest} MB |"
            )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, store after every number of silos, print."""
    own = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    own.add_argument("--data", type=Path, default=os.environ.get("COTERIE_DATA"), required=False)
    own.add_argument("--silos", type=int, nargs="+", default=[100, 300, 1000])
    own.add_argument("--processes", type=int, default=4)
    own.add_argument("--rounds", type=int, default=20)
    own.add_argument("--strategies", nargs="+", choices=list(RUNS), default=list(RUNS))
    own.add_argument("--results", type=Path, default=RESULTS)
    given = own.parse_args()
    if given.data is None:
        own.error("name the folder of MNIST with --data or COTERIE_DATA")
    results = json.loads(given.results.read_text())["runs"] if given.results.exists() else []
    for silos in given.silos:
        measured = measure(given.data, silos, given.processes, given.rounds, given.strategies)
        results = [one for one in results if one["silos"] != silos] + [measured]
        results.sort(key=lambda one: one["silos"])
        stored = {"machine": f"{os.cpu_count()} cores, {platform.system()}", "runs": results}
        given.results.write_text(json.dumps(stored, indent=1) + "\n", encoding="utf-8")
        given.results.with_suffix(".md").write_text(
            f"# {__doc__}\n{stored['machine']}\n\n{table(results)}", encoding="utf-8"
        )
        print(table([measured]), flush=True)


if __name__ == "__main__":
    main()
