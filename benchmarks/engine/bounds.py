"""What the bounds on a silo's influence cost where nobody attacks: runs with them and without.

    python -m benchmarks.engine.bounds [--seeds 10] [--only SETS] [--data FOLDER]

The demo's silos, those of ``benchmarks/compare``, and with a folder of data those of its label
shift and FedCollab's 20 of FashionMNIST, in this process. Goes on where it stopped. What was
measured with other bounds is forgotten.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.engine.poison import BOUNDS, measured_with
from benchmarks.kit import UNBOUNDED, Entry, Node, Store, page, read, select, spread, table, train
from benchmarks.papers.fedcollab.experiments import EXPERIMENTS
from benchmarks.papers.hcct.digits import node
from coterie.server.study import comparison_file, demo
from coterie.server.study.comparison import Repeat

FILES = Path(__file__).parents[1] / "compare"
DEMO, FASHION = "demo", "FashionMNIST"
SHIFTS = ("label", "feature", "concept", "quantity", "iid")
SETS = (DEMO, *SHIFTS, FASHION)
ROUNDS = {DEMO: 20, FASHION: 10}
SEEDS = {**dict.fromkeys(SHIFTS, 3), FASHION: 1}
"""Most of a set; of the demo, and of HCCT on the shifts, as many as asked for."""
STRATEGIES: Mapping[str, Mapping[str, Any]] = {
    "hcct": {"alpha": 50.0},
    "fedavg": {},
    "fedgroup": {"cold-start-epochs": 10},
    "auto": {},
    "ifca": {},
    "fedcollab": {},
    "fednova": {},
    "fedfa": {},
    "perfedavg": {},
}
"""Those that docs/how-to/choose-a-strategy.md advises, with that page's options; MAXFL is FedAvg on
these silos."""
FEW = {DEMO: ("hcct", "auto"), FASHION: ("hcct", "fedavg", "fedcollab")}
"""Those that these sets are measured with."""
MUCH = 0.2
"""Points of mean error more than without the bounds that are listed."""


def _silos(on: str, seed: int, folder: str) -> tuple[Sequence[Node], dict[str, Any]]:
    """The silos of a set, and how they train."""
    if on == DEMO:
        return [node(spec) for spec in demo.silos(seed)], {"rounds": ROUNDS[on], "num-groups": 3}
    if on == FASHION:
        chosen = EXPERIMENTS["fashion-drawn"]
        rounds = {"rounds": ROUNDS[on], "evaluate-every": ROUNDS[on]}
        return chosen.nodes(folder, seed), {**chosen.keys, **rounds, "num-groups": 4}
    given = comparison_file.read(FILES / f"{on}.toml", data=Path(folder) if on == "label" else None)
    specs = given.silos(Repeat(seed))
    return [{**spec.node_config(), "threads": 1} for spec in specs], dict(given.file.run)


def measure(on: str, strategy: str, seed: int, *, folder: str) -> Entry:
    """Mean error in % over silos with the bounds and without, and whom the bounds touched."""
    nodes, own = _silos(on, seed, folder)
    keys = {**own, **STRATEGIES[strategy], "strategy": strategy, "seed": seed}
    if strategy not in ("fedgroup", "ifca"):
        keys.pop("num-groups", None)
    bounded, free = (train(nodes, {**keys, **more}) for more in ({}, UNBOUNDED))
    influences = [report.details.get("influence", {}) for report in bounded.result.rounds]
    return {
        "bounds": BOUNDS,
        **{
            name: 100 * float(np.mean(list(run.errors.values())))
            for name, run in (("error", bounded), ("free", free))
        },
        "clipped": sum(len(one.get("clipped", {})) for one in influences),
        "moved-out": len({name for one in influences for name in one.get("apart", {})}),
        "same-groups": bounded.result.groups == free.result.groups,
    }


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    return page(
        "# What the bounds cost without an attacker",
        "`make bench-bounds`: mean error in % over silos with the defaults, less that without the "
        "bounds (`max-share=1 clip-updates=0 quarantine-after=0`); mean ± deviation over seeds, "
        "and in brackets the error with the defaults. No change to the last bit is `=`; – is not "
        f"measured. The demo has {ROUNDS[DEMO]} rounds, FedCollab's 20 silos of FashionMNIST "
        f"{ROUNDS[FASHION]}. **Bold** is more than {MUCH} points worse.",
        measured_with(entries),
        table(
            ["strategy", *(f"{on} ({_seeds(entries, on)})" for on in SETS)],
            [
                [name, *(_cell(select(entries, on=on, strategy=name)) for on in SETS)]
                for name in STRATEGIES
                if select(entries, strategy=name)
            ],
        ),
        _mean_text(entries),
    )


def _seeds(entries: Sequence[Entry], on: str) -> str:
    count = len({entry["seed"] for entry in select(entries, on=on)})
    return f"up to {count} seeds" if count > 1 else "1 seed"


def costs(runs: Sequence[Entry]) -> list[float]:
    """Points of mean error that the bounds cost, a run each."""
    return [run["error"] - run["free"] for run in runs]


def _cell(runs: Sequence[Entry]) -> str:
    if not runs:
        return "–"
    more, level = costs(runs), f"({np.mean([run['error'] for run in runs]):.1f})"
    if not any(more):
        return f"= {level}"
    change = spread(more, sign="+")
    return f"**{change}** {level}" if np.mean(more) > MUCH else f"{change} {level}"


def _mean_text(entries: Sequence[Entry]) -> str:
    if not entries:
        return ""
    return (
        f"Over all {len(entries)} pairs of runs the bounds change the error by "
        f"{np.mean(costs(entries)):+.2f} points. {sum(e['clipped'] for e in entries)} updates were "
        f"clipped, {sum(e['moved-out'] for e in entries)} silos moved out for some rounds: nearly "
        "all of the difference is the cap on a silo's share, in groups in which one silo has more "
        "than all others together."
    )


STORE = Store("bounds", document, keys=("on", "strategy", "seed"))


def cells(only: Sequence[str], seeds: int, folder: str) -> Iterator[dict[str, Any]]:
    """What is measured: first one seed of everything."""
    for seed in range(seeds):
        for strategy in STRATEGIES:
            for on in only:
                if strategy not in FEW.get(on, STRATEGIES):
                    continue
                if on in ("label", FASHION) and not folder:
                    continue
                if seed < SEEDS.get(on, seeds) or (strategy == "hcct" and on in SHIFTS):
                    yield {"on": on, "strategy": strategy, "seed": seed}


def main() -> None:
    """Measure what is not stored yet, store, print."""
    workers = {"type": int, "default": 1}
    given = read(STORE, __doc__, rows=SETS, seeds=10, data=None, workers=workers)
    given.store.keep(lambda entry: entry.get("bounds") == BOUNDS)
    every = cells(given.only, given.seeds, given.data)
    given.store.fill(every, partial(measure, folder=given.data), workers=given.workers)
    print(given.store.text())


if __name__ == "__main__":
    main()
