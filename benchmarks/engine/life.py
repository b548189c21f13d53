"""A model's life, over ten seeds: silos that only test, what a silo brings, drift.

    python -m benchmarks.engine.life

`testers`: beside the demo's nine silos, one of each kind only tests, 20 rounds of HCCT.
`contribution`: one of the demo's silos is there twice; its groups are trained again for 5 and for
20 rounds. `leaving`: the same for 20 rounds, and once more without one silo of each group. `drift`:
300 rows of scikit-learn's breast cancer table (30 columns), and 100 times 200 others, as they are
and with the first column moved by 0.75 of its deviations.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from sklearn.datasets import load_breast_cancer

from benchmarks.kit import Entry, Store, columns, page, read
from coterie.client.app import app
from coterie.engine.inprocess import InProcessGrid
from coterie.features.evaluation.coordinator import read_judgement
from coterie.features.watching.drift import reference_of, shifts
from coterie.server.report.contribution import Contribution, contributions
from coterie.server.runs.config import RunConfig
from coterie.server.runs.contribution import FILE
from coterie.server.runs.record import Run, read_run
from coterie.server.runs.run import execute
from coterie.server.study.demo import KINDS, NUM_TEST, silos
from coterie.tasks.base import Column

TESTING = 30
"""Samples by which a silo that only tests is placed, and samples of its figures."""
ROUNDS, SHORT = 20, 5
HCCT = {"strategy": "hcct", "rounds": ROUNDS}
DRAWS, OLD, NEW, MOVED = 100, 300, 200, 0.75

Node = Mapping[str, Any]


def played(folder: Path, nodes: Sequence[Node], name: str, **keys: Any) -> Run:
    """Play a run of these silos in one process, and return its record."""
    least = sum("role" not in node for node in nodes)
    config = {"min-silos": least, "wait-for-silos": 1.0, "runs-dir": str(folder), **keys}
    execute(InProcessGrid(app, nodes), RunConfig.read(config), run_id=1, folder=folder / name)
    return read_run(folder / name)


def testers(seed: int, folder: Path) -> Iterator[Entry]:
    """Of which kind the group is that each silo that only tests was placed in."""
    nodes = [spec.node_config() for spec in silos(seed)]
    used = sum(int(spec.options["train"]) + NUM_TEST for spec in silos(seed))
    for number, spec in enumerate(silos(seed)[:: len(nodes) // len(KINDS)]):
        cut = {"train": TESTING, "test": TESTING, "skip": used + 2 * number * TESTING}
        own = replace(spec, name=f"tests-{number}", options={**spec.options, **cut})
        nodes.append({**own.node_config(), "role": "evaluate"})
    record = played(folder, nodes, "run", seed=seed, **HCCT)
    assert record.final is not None
    for number, kind in enumerate(KINDS):
        group = record.final.details["testing"][f"tests-{number}"]["group"]
        yield {"what": kind, "right": {name.split("-")[0] for name in group} == {kind}}


def contribution(seed: int, folder: Path) -> Iterator[Entry]:
    """What the two equal silos bring, and which silos bring something beyond chance."""
    nodes = [spec.node_config() for spec in silos(seed)]
    nodes.append({**nodes[0], "name": "twin"})
    played(folder, nodes, "run", seed=seed, **HCCT)
    for rounds in (SHORT, ROUNDS):
        keys = {"strategy": "contribution", "parent": "run", "rounds": rounds}
        played(folder, nodes, f"again-{rounds}", seed=seed, **keys)
        found = contributions(read_judgement(folder / f"again-{rounds}" / FILE))
        twins = [one for one in found if one.silo in ("twin", nodes[0]["name"])]
        yield {
            "what": f"{rounds} rounds",
            "right": all(one.low <= 0 <= one.high for one in twins),
            "lost": [round(one.lost, 5) for one in twins],
            "half": [round(one.high - one.lost, 5) for one in twins],
            "sure": [one.silo for one in found if one.sure],
        }


def leaving(seed: int, folder: Path) -> Iterator[Entry]:
    """How what silos bring changes when one of their group leaves: a twin, or one of three."""
    nodes = [spec.node_config() for spec in silos(seed)]
    nodes.append({**nodes[0], "name": "twin"})
    groups = played(folder, nodes, "run", seed=seed, **HCCT).final_groups
    gone = {"twin" if "twin" in group else max(group) for group in groups}
    found = []
    for name, here in (("all", nodes), ("left", [n for n in nodes if n["name"] not in gone])):
        keys = {"strategy": "contribution", "parent": "run", "rounds": ROUNDS}
        played(folder, here, name, seed=seed, **keys)
        found.append({c.silo: c for c in contributions(read_judgement(folder / name / FILE))})
    before, after = found
    partner = str(nodes[0]["name"])
    for what, those in (("its twin left", [partner]), ("one of its group left", [*before])):
        pairs = [(before[n], after[n]) for n in those if n not in gone]
        yield {
            "what": what,
            "right": all(
                abs(expected(c, gone) - new.lost) <= new.high - new.lost for c, new in pairs
            ),
            "before": [[round(c.lost, 5), round(c.high - c.lost, 5)] for c, _ in pairs],
            "expected": [round(expected(c, gone), 5) for c, _ in pairs],
            "after": [[round(c.lost, 5), round(c.high - c.lost, 5)] for _, c in pairs],
        }


def expected(found: Contribution, gone: Iterable[str]) -> float:
    """What the figure was to be, once one of these had left."""
    (left,) = (found.if_left[name] for name in gone if name in found.if_left)
    return left


def drift(seed: int, folder: Path) -> Iterator[Entry]:
    """In how many draws a moved column was found, and any column of others."""
    table, draw = load_breast_cancer().data, np.random.default_rng(seed)
    moved = table.copy()
    moved[:, 0] += MOVED * table[:, 0].std()
    found = wrong = 0
    for _ in range(DRAWS):
        order = draw.permutation(len(table))
        old, new = order[:OLD], order[OLD : OLD + NEW]
        reference = [reference_of(one) for one in named(table[old])]
        found += shifts(reference, named(moved[new]))[0].drifted
        wrong += any(one.drifted for one in shifts(reference, named(table[new])))
    yield {"what": "moved", "right": found >= DRAWS - 5, "draws": found}
    yield {"what": "not moved", "right": wrong <= 5, "draws": wrong}


def named(table: np.ndarray) -> list[Column]:
    """The columns of a table (n, d)."""
    return [Column(f"column {number}", values) for number, values in enumerate(table.T)]


PARTS: dict[str, Callable[[int, Path], Iterator[Entry]]] = {
    "testers": testers,
    "contribution": contribution,
    "leaving": leaving,
    "drift": drift,
}


def said(found: Sequence[Entry]) -> str:
    """What else the entries of a row say."""
    if "draws" in found[0]:
        return f"found in {sum(e['draws'] for e in found)} of {DRAWS * len(found)} draws"
    if "before" in found[0]:
        old, new = (100 * np.concatenate([e[key] for e in found]) for key in ("before", "after"))
        moved = abs(new[:, 0] - old[:, 0])
        missed = abs(new[:, 0] - 100 * np.concatenate([e["expected"] for e in found]))
        return (
            f"moved by {moved.mean():.1f} points, at most {moved.max():.1f}; half of an interval "
            f"{old[:, 1].mean():.1f}; {(moved <= old[:, 1]).sum()} of {len(moved)} within it; "
            f"{missed.mean():.1f} points from the expected figure; "
            f"{(missed <= new[:, 1]).sum()} of {len(moved)} within the new interval"
        )
    if "lost" not in found[0]:
        return "placed in the group of its kind"
    lost = 100 * np.array([e["lost"] for e in found])
    half = 100 * np.array([e["half"] for e in found])
    sure = np.mean([len(e["sure"]) for e in found])
    return (
        f"lost without an equal silo {lost.mean():+.1f} points, at most {abs(lost).max():.1f}; half"
        f" of an interval {half.mean():.1f}; beyond chance {sure:.1f} of ten silos"
    )


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    rows: dict[tuple[str, str], list[Entry]] = {}
    for entry in entries:
        rows.setdefault((entry["part"], entry["what"]), []).append(entry)
    shown = [
        {"part": part, "what": what, "right": sum(e["right"] for e in found), "found": found}
        for (part, what), found in rows.items()
    ]
    return page(
        f"# {__doc__}",
        columns(
            shown,
            {
                "": "{part}",
                "of": "{what}",
                "right in": lambda row: f"{row['right']} of {len(row['found'])} seeds",
                "mean over seeds": lambda row: said(row["found"]),
            },
        ),
    )


STORE = Store("life", document, keys=("part", "what", "seed"))


def main() -> None:
    """Measure what is not stored yet, and write after every seed."""
    given = read(STORE, __doc__, parts=tuple(PARTS), seeds=10)
    for part in given.parts:
        for seed in range(given.seeds):
            if given.store.find(part=part, seed=seed) is None:
                with tempfile.TemporaryDirectory() as folder:
                    for found in [*PARTS[part](seed, Path(folder))]:
                        given.store.put({"part": part, "seed": seed, **found})
    print(given.store.text())


if __name__ == "__main__":
    main()
