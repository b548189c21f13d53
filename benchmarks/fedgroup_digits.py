"""FedGroup on the demo's silos, over ten seeds: hidden groups found, newcomer placed.

    python -m benchmarks.fedgroup_digits [--seeds 10]

Nine silos of three hidden kinds as in ``coterie demo``; the tenth, which is upright, joins at
round 7 of 20. On the in-process Grid. Writes ``results/fedgroup_digits.json`` and ``.md``.
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
from coterie.server.machine.local import SiloSpec
from coterie.server.runs.config import RunConfig
from coterie.server.runs.inprocess import InProcessGrid
from coterie.server.runs.run import build_strategy, initial_arrays
from coterie.server.study.demo import NEWCOMER, hidden_groups, newcomer, silos
from coterie.strategies.rounds.roster import Churn, DescribedRoster

RESULTS = Path(__file__).parent / "results"
JOIN = 7
"""Round in which the newcomer comes, as in the demo."""

SETTINGS: dict[str, dict[str, Any]] = {
    "alone": {"strategy": "independent"},
    "global (FedAvg)": {"strategy": "fedavg"},
    "EDC, 5 epochs": {"measure": "edc", "pretrain-epochs": 5},
    "MADC, 5 epochs": {"measure": "madc", "pretrain-epochs": 5},
    "EDC, 25 epochs": {"measure": "edc", "pretrain-epochs": 25},
    "MADC, 25 epochs": {"measure": "madc", "pretrain-epochs": 25},
    "EDC, 25 epochs, number of groups not given": {
        "measure": "edc",
        "pretrain-epochs": 25,
        "num-groups": "auto",
    },
}


def one(seed: int, rounds: int, keys: dict[str, Any]) -> dict[str, Any]:
    """One run: errors, the groups of round 1, and where the newcomer went."""
    specs = silos(seed)
    grid = InProcessGrid(app, [_node(spec) for spec in [*specs, newcomer(seed)]])
    keys = {"strategy": "fedgroup", **keys}
    config = RunConfig.read({"seed": seed, "rounds": rounds, "min-silos": len(specs), **keys})
    churn = Churn.parse(f"{NEWCOMER}+{JOIN}")
    roster = DescribedRoster(config.task, len(specs), churn=churn)
    strategy = build_strategy(config, run="bench", roster=roster, on_round=lambda report: None)
    initial = initial_arrays(grid, roster.present(grid, round=1)[0], config)
    result = strategy.start(grid=grid, initial_arrays=initial, num_rounds=rounds)
    errors = [error for _, error, _ in result.rounds[-1].evaluation.values()]
    return {
        "error": float(np.mean(errors)),
        "worst": float(np.max(errors)),
        "groups": len(result.groups[1]),
        "found": result.groups[1] == hidden_groups([s.name for s in specs]),
        "placed": _is_right(result.groups[JOIN]),
        "separation": result.rounds[0].details.get("separation"),
    }


def _node(spec: SiloSpec) -> dict[str, str | int | float | bool]:
    return {"name": spec.name, "threads": 1, **{f"data.{k}": v for k, v in spec.options.items()}}


def _is_right(groups: list[list[str]]) -> bool:
    """The newcomer is with upright silos, for the most part."""
    (group,) = (group for group in groups if NEWCOMER in group)
    fellows = [name for name in group if name != NEWCOMER]
    return 2 * sum(name.startswith("upright") for name in fellows) > len(fellows)


def table(results: dict[str, list[dict[str, Any]]], seeds: int, rounds: int) -> str:
    """The results as Markdown."""
    lines = [
        "# FedGroup on the demo's silos",
        "",
        "Nine silos of scikit-learn's digits, three hidden groups; an upright newcomer of 30",
        f"samples at round {JOIN} of {rounds}; seeds 0–{seeds - 1}. Made by",
        "`python -m benchmarks.fedgroup_digits`. *Found*: the groups of the cold start are the",
        "hidden ones. *Placed*: most silos of the newcomer's group are upright. *Separation*:",
        "silhouette of the MADC distances, mean and range over seeds. Errors in %, mean over the",
        "ten silos at the end; mean ± standard deviation over seeds, and the best and the worst",
        "seed.",
        "",
        "| setting | found | placed | separation | mean error | best–worst seed |",
        "|---|---|---|---|---|---|",
    ]
    for name, runs in results.items():
        errors = 100 * np.array([r["error"] for r in runs])
        grouped = name not in ("alone", "global (FedAvg)")
        lines.append(
            f"| {name} | {_shares(runs) if grouped else '| | '}"
            f"| {errors.mean():.1f} ± {errors.std(ddof=1):.1f} "
            f"| {errors.min():.1f}–{errors.max():.1f} |"
        )
    return "\n".join(lines) + "\n"


def _shares(runs: list[dict[str, Any]]) -> str:
    found, placed = sum(r["found"] for r in runs), sum(r["placed"] for r in runs)
    known = np.array([r["separation"] for r in runs if r["separation"] is not None])
    parted = f"{known.mean():.2f} ({known.min():.2f}–{known.max():.2f})" if len(known) else "–"
    return f"{found} of {len(runs)} | {placed} of {len(runs)} | {parted} "


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    logging.getLogger("coterie").setLevel(logging.ERROR)
    results: dict[str, list[dict[str, Any]]] = {}
    for name, keys in SETTINGS.items():
        started = time.monotonic()
        results[name] = [one(seed, given.rounds, keys) for seed in range(given.seeds)]
        print(f"{name}: {time.monotonic() - started:.0f} s", flush=True)
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "fedgroup_digits.json").write_text(json.dumps(results, indent=1) + "\n")
    text = table(results, given.seeds, given.rounds)
    (RESULTS / "fedgroup_digits.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
