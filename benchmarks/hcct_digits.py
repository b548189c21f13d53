"""HCCT's options on the demo's silos, over ten seeds: what memory, solver and α are worth.

    python -m benchmarks.hcct_digits [--seeds 10]

Nine silos of three hidden kinds as in ``coterie demo``, without join and leave, 20 rounds, on the
in-process Grid. Writes ``results/hcct_digits.json`` and ``.md``.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from pathlib import Path
from typing import Any

import numpy as np

from coterie.client.app import app
from coterie.server.runs.config import RunConfig
from coterie.server.runs.inprocess import InProcessGrid
from coterie.server.runs.run import build_strategy, initial_arrays
from coterie.server.study.demo import hidden_groups, silos
from coterie.strategies.rounds.roster import DescribedRoster

RESULTS = Path(__file__).parent / "results"
SETTLED = 7
"""From this round on the groups should stand; ``auto`` needs so many to find them."""

SETTINGS: dict[str, dict[str, Any]] = {
    "alone": {"strategy": "independent"},
    "global (FedAvg)": {"strategy": "fedavg"},
    "HCCT, the paper: last update, greedy, α = 50": {"memory": 0.0, "solver": "agglomerative"},
    "last update, best partition, α = 50": {"memory": 0.0},
    "memory 1, greedy, α = 50": {"solver": "agglomerative"},
    "memory 1, greedy, α = 100": {"solver": "agglomerative", "alpha": 100.0},
    "memory 1, best partition, α = 25": {"alpha": 25.0},
    "**memory 1, best partition, α = 50** (default)": {},
    "memory 1, best partition, α = 100": {"alpha": 100.0},
    "memory 1, best partition, α = auto": {"alpha": "auto"},
    "HCCT-E (one layer), α = 50": {"layers": "auto"},
    "HCCT-P (personal head), α = 50": {"personal": "head"},
}


def one(seed: int, rounds: int, keys: dict[str, Any]) -> dict[str, Any]:
    """One run: error per silo, and in how many settled rounds the groups were the hidden ones."""
    specs = silos(seed)
    configs = [
        {"name": s.name, "threads": 1, **{f"data.{k}": v for k, v in s.options.items()}}
        for s in specs
    ]
    config = RunConfig.read({"seed": seed, "rounds": rounds, "min-silos": len(specs), **keys})
    grid = InProcessGrid(app, configs)
    roster = DescribedRoster(config.task, len(specs))
    strategy = build_strategy(config, run="bench", roster=roster, on_round=lambda report: None)
    initial = initial_arrays(grid, roster.present(grid, round=1)[0], config)
    result = strategy.start(grid=grid, initial_arrays=initial, num_rounds=rounds)
    hidden = hidden_groups([s.name for s in specs])
    right = [result.groups[t] == hidden for t in range(SETTLED, rounds + 1)]
    changes = sum(result.groups[t] != result.groups[t - 1] for t in range(2, rounds + 1))
    errors = [error for _, error, _ in result.rounds[-1].evaluation.values()]
    return {
        "error": float(np.mean(errors)),
        "worst": float(np.max(errors)),
        "right at the end": bool(right[-1]),
        "right rounds": float(np.mean(right)),
        "changes": changes,
    }


def table(results: dict[str, list[dict[str, Any]]], seeds: int) -> str:
    """The results as Markdown."""
    lines = [
        "# HCCT on the demo's silos",
        "",
        f"Nine silos of scikit-learn's digits, three hidden groups, 20 rounds, {seeds} seeds.",
        "Made by `python -m benchmarks.hcct_digits`. Errors in %, mean over silos; mean ± standard",
        "deviation over seeds, and the best and the worst seed.",
        "",
        "| setting | mean error | best–worst seed | hidden groups at the end | "
        f"in rounds ≥ {SETTLED} | changes in 19 |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in results.items():
        errors = 100 * np.array([r["error"] for r in runs])
        right = sum(r["right at the end"] for r in runs)
        share = 100 * np.mean([r["right rounds"] for r in runs])
        changes = np.mean([r["changes"] for r in runs])
        grouped = name not in ("alone", "global (FedAvg)")
        lines.append(
            f"| {name} | {errors.mean():.1f} ± {errors.std(ddof=1):.1f} "
            f"| {errors.min():.1f}–{errors.max():.1f} "
            + (
                f"| {right} of {len(runs)} | {share:.0f} % | {changes:.1f} |"
                if grouped
                else "| | | |"
            )
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--only", default="", help="rows with this in their name; others as stored")
    given = parser.parse_args()
    logging.getLogger("coterie").setLevel(logging.ERROR)
    file = RESULTS / "hcct_digits.json"
    stored = json.loads(file.read_text()) if given.only and file.exists() else {}
    results: dict[str, list[dict[str, Any]]] = {}
    for name, keys in SETTINGS.items():
        if name in stored and given.only not in name:
            results[name] = stored[name]
            continue
        started = time.monotonic()
        results[name] = [one(seed, given.rounds, keys) for seed in range(given.seeds)]
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
    RESULTS.mkdir(exist_ok=True)
    file.write_text(json.dumps(results, indent=1) + "\n")
    text = table(results, given.seeds)
    (RESULTS / "hcct_digits.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
