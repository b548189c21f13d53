"""Records of runs that never ran, for the report: groups that form, silos that come and go."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

NUM_KINDS = 4


def write_run(
    folder: Path,
    *,
    num_silos: int,
    num_rounds: int,
    strategy: str = "hcct",
    status: str = "completed",
    names: list[str] | None = None,
    seed: int = 0,
) -> Path:
    """Write ``run.json`` and ``events.jsonl`` as a run of ``num_silos`` would; return the folder.

    Silos are alone at first, then in the groups of their kind, with some that stray: one silo
    changes its group in most rounds. The last silo joins at a third, the first leaves at two
    thirds of the rounds.
    """
    rng = np.random.default_rng(seed)
    names = names or [f"site-{i:03d}" for i in range(num_silos)]
    kind = {name: i % NUM_KINDS for i, name in enumerate(names)}
    level = {name: rng.uniform(0.05, 0.15) for name in names}
    floor = {"independent": 0.1, "fedavg": 0.25}.get(strategy, 0.0)
    luck = dict(
        zip(names, np.random.default_rng(1).normal(scale=0.05, size=num_silos), strict=True)
    )
    if strategy == "independent":
        level = {name: max(0.0, own + luck[name]) for name, own in level.items()}
    rounds, events = [], []
    before: list[str] = []
    config = {
        "strategy": strategy, "task": "digits", "rounds": num_rounds, "seed": seed, "alpha": 50.0,
        "lr": 0.1, "local-epochs": 5,
    }  # fmt: skip
    events.append({"event": "start", "at": 0.0, "config": config, "run-id": "1"})
    for number in range(1, num_rounds + 1):
        here = names[:]
        if number < num_rounds / 3 and num_silos > 2:
            here.remove(names[-1])
        if number > 2 * num_rounds / 3 and num_silos > 2:
            here.remove(names[0])
        errors = {
            n: {
                "loss": 1.0,
                "error": min(1.0, level[n] + floor + float(np.exp(-number / 5))),
                "num-examples": 70,
            }
            for n in here
        }
        entry: dict[str, Any] = {
            "round": number,
            "groups": _groups(here, kind, number, num_rounds, strategy),
            "joined": [n for n in here if n not in before],
            "left": [n for n in before if n not in here],
            "left-out": {here[0]: "it did not answer in time."} if number == 2 else {},
            "seconds": {"prepare": 0.01, "train": 1.0 + 0.1 * rng.random(), "aggregate": 0.02},
            "phases": {},
            "silos": {
                n: {
                    "num-examples": 100.0, "train-loss": 2.0 / number, "seconds": 0.5,
                    "bytes-sent": 24360, "bytes-received": 24360,
                }
                for n in here
            },
            "evaluated-round": number,
            "evaluation-after": errors,
        }  # fmt: skip
        if strategy == "hcct" and number == num_rounds:
            entry |= _similarity(here, kind, rng) | {"planned": entry["groups"]}
        rounds.append(entry)
        events.append({"event": "round", "at": float(number), "refused": {}, **entry})
        before = here
    record: dict[str, Any] = {
        "format": 1, "run-id": "1", "status": status, "started": "2026-01-02T03:04:05+00:00",
        "config": config, "versions": {"python": "3.11.2", "coterie": "0.1.0"},
        "silos": {n: {"num-examples": 100.0, "alpha": None, "node-id": "7"} for n in names},
        "refused": {}, "rounds": rounds,
    }  # fmt: skip
    if status == "completed":
        record |= {"final-evaluation": errors, "final-groups": rounds[-1]["groups"]}
        record |= {"seconds": float(num_rounds), "model-hashes": {}}
        events.append({"event": "end", "at": 9.0, "status": status, "seconds": float(num_rounds)})
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "run.json").write_text(json.dumps(record), encoding="utf-8")
    lines = [json.dumps(event) for event in events]
    (folder / "events.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def _groups(
    here: list[str], kind: dict[str, int], number: int, num_rounds: int, strategy: str
) -> list[list[str]]:
    if strategy == "fedavg":
        return [sorted(here)]
    if number == 1 or strategy == "independent":
        return [[name] for name in here]
    stray = here[number % len(here)] if number < num_rounds else ""
    groups: dict[int, list[str]] = {}
    for name in here:
        own = (kind[name] + 1) % NUM_KINDS if name == stray else kind[name]
        groups.setdefault(own, []).append(name)
    return sorted(groups.values())


def _similarity(here: list[str], kind: dict[str, int], rng: np.random.Generator) -> dict[str, Any]:
    centres = rng.normal(size=(NUM_KINDS, 40))
    points = np.array([centres[kind[n]] + 0.6 * rng.normal(size=40) for n in here])
    points /= np.linalg.norm(points, axis=1, keepdims=True)
    return {
        "compared": here,
        "similarity": (points @ points.T).round(4).tolist(),
        "norms": [1.0] * len(here),
        "alphas": [50.0] * len(here),
        "sizes": [100.0] * len(here),
    }
