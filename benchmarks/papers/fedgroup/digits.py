"""FedGroup on the demo's silos, over ten seeds: hidden groups found, newcomer placed.

    python -m benchmarks.papers.fedgroup.digits [--seeds 10] [--only ROWS]

Nine silos of three hidden kinds as in ``coterie demo``; the tenth, which is upright, joins at
round 7 of 20. On the in-process Grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np

from benchmarks.kit import Entry, Store, page, read, table, train
from benchmarks.papers.hcct.digits import by_setting, error_cells, node
from coterie.server.study.demo import NEWCOMER, hidden_groups, newcomer, silos

ROUNDS, JOIN = 20, 7
"""The newcomer comes in the round in which it comes in the demo."""

SETTINGS: dict[str, Mapping[str, Any]] = {
    "alone": {"strategy": "independent"},
    "global (FedAvg)": {"strategy": "fedavg"},
    "EDC, 5 epochs": {"measure": "edc", "cold-start-epochs": 5},
    "MADC, 5 epochs": {"measure": "madc", "cold-start-epochs": 5},
    "EDC, 25 epochs": {"measure": "edc", "cold-start-epochs": 25},
    "MADC, 25 epochs": {"measure": "madc", "cold-start-epochs": 25},
    "EDC, 25 epochs, number of groups not given": {
        "measure": "edc",
        "cold-start-epochs": 25,
        "num-groups": "auto",
    },
}


def measure(setting: str, seed: int) -> Entry:
    """Mean error over silos, whether round 1's groups are right, and the newcomer's place."""
    specs = silos(seed)
    keys = {"strategy": "fedgroup", "seed": seed, "rounds": ROUNDS, "min-silos": len(specs)}
    keys |= {"churn": f"{NEWCOMER}+{JOIN}", **SETTINGS[setting]}
    done = train([node(spec) for spec in [*specs, newcomer(seed)]], keys)
    groups = done.result.groups
    return {
        "error": float(np.mean(list(done.errors.values()))),
        "found": groups[1] == hidden_groups([s.name for s in specs]),
        "placed": _is_right(groups[JOIN]),
        "separation": done.result.rounds[0].details.get("separation"),
    }


def _is_right(groups: list[list[str]]) -> bool:
    """The newcomer is with upright silos, for the most part."""
    (group,) = (group for group in groups if NEWCOMER in group)
    fellows = [name for name in group if name != NEWCOMER]
    return 2 * sum(name.startswith("upright") for name in fellows) > len(fellows)


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    found = by_setting(entries, SETTINGS)
    heads = ("setting", "found", "placed", "separation", "mean error", "best–worst seed")
    rows = ([name, *_shares(name, runs), *error_cells(runs)] for name, runs in found.items())
    return page(
        "# FedGroup on the demo's silos",
        "Nine silos of scikit-learn's digits, three hidden groups; an upright newcomer of 30\n"
        f"samples at round {JOIN} of {ROUNDS}; seeds "
        f"0–{max(map(len, found.values()), default=1) - 1}. Made by\n"
        "`python -m benchmarks.papers.fedgroup.digits`. *Found*: the groups of the cold start are "
        "the\nhidden ones. *Placed*: most silos of the newcomer's group are upright. "
        "*Separation*:\nsilhouette of the MADC distances, mean and range over seeds. Errors in "
        "%, mean over the\nten silos at the end; mean ± standard deviation over seeds, and the "
        "best and the worst\nseed.",
        table(heads, rows),
    )


def _shares(name: str, runs: Sequence[Entry]) -> list[str]:
    if "strategy" in SETTINGS[name]:
        return ["", "", ""]
    found, placed = (f"{sum(r[key] for r in runs)} of {len(runs)}" for key in ("found", "placed"))
    known = np.array([r["separation"] for r in runs if r["separation"] is not None])
    parted = f"{known.mean():.2f} ({known.min():.2f}–{known.max():.2f})" if len(known) else "–"
    return [found, placed, parted]


STORE = Store("fedgroup_digits", document, keys=("setting", "seed"))


def main() -> None:
    """Measure what is not stored yet."""
    given = read(STORE, __doc__, rows=SETTINGS, seeds=10)
    cells = ({"setting": s, "seed": i} for s, i in product(given.only, range(given.seeds)))
    given.store.fill(cells, measure)
    print(given.store.text())


if __name__ == "__main__":
    main()
