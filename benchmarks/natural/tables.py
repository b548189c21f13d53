"""The page of the measurements: losses of every method, and silos that lose."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.stats import t

from benchmarks.kit import Entry, Store, page, select, table
from benchmarks.natural import classical, federated
from benchmarks.natural.data import FOLDS, MOST_ROWS, STRICT

SETS: Mapping[str, str] = {
    "impact_tbi": "15 studies of head injuries",
    "gusto_regions": "16 regions, infarctions",
    "parkinsons": "42 patients' speech",
    "lendingclub_states": "35 states, loans",
    "office_caltech10": "4 picture domains",
    "weather_aus": "49 weather stations",
    "gefcom_load": "20 zones, load",
}
OUTSIDE = "outside"
"""In the place of a network: methods of scikit-learn, outside any federation."""
REFERENCE = "tuned alone"
LEVEL = 0.05
"""Of the test whether a silo is worse than by its tuned training alone, after Holm."""
Rates = Mapping[tuple[str, int, int], float]
"""(silo, fold, seed) → loss."""


def losses(entries: Sequence[Entry]) -> dict[tuple[str, int, int], float]:
    """Return the losses of one method on one set; infinite where a training diverged."""
    return {
        (silo, entry["fold"], entry["seed"]): np.inf if np.isnan(scores["loss"]) else scores["loss"]
        for entry in entries
        for silo, scores in entry["scores"].items()
    }


def mean_loss(found: Rates) -> float:
    """Return the mean over silos of their means over folds and seeds."""
    silos = sorted({silo for silo, _, _ in found})
    return float(np.mean([np.mean([v for k, v in found.items() if k[0] == s]) for s in silos]))


def worse_than(found: Rates, reference: Rates) -> tuple[int, int]:
    """Return how many silos are worse than by the reference: beyond chance, and at all.

    Differences are paired by fold and seed. Chance: Student's t of a silo's differences, one-sided,
    with Holm's correction over the silos.
    """
    silos = sorted({silo for silo, _, _ in found})
    chances, worse = [], 0
    for silo in silos:
        own = [found[k] - reference[k] for k in found if k[0] == silo and k in reference]
        worse += bool(own) and float(np.mean(own)) > 0
        deviation = float(np.std(own, ddof=1)) if len(own) > 1 and np.isfinite(own).all() else 0.0
        if deviation > 0:
            statistic = float(np.mean(own)) / (deviation / np.sqrt(len(own)))
            chances.append(float(t.sf(statistic, len(own) - 1)))
    beyond = 0
    for place, chance in enumerate(sorted(chances)):
        if chance > LEVEL / (len(chances) - place):
            break
        beyond += 1
    return beyond, worse


def rows_of(entries: Sequence[Entry], name: str, network: str) -> dict[str, Rates]:
    """Return method → losses on a set: those of a network, and those outside any federation."""
    both = [(OUTSIDE, classical.METHODS), (network, federated.METHODS)]
    found = {
        method if kind == OUTSIDE else f"{method} ": losses(own)
        for kind, methods in both
        for method in methods
        if (own := select(entries, dataset=name, network=kind, method=method))
    }
    return {method: of for method, of in found.items() if of}


def document(entries: Sequence[Entry]) -> str:
    """Return the page."""
    parts: list[Any] = [
        "# Silos that nobody cut",
        "Made by `python -m benchmarks.natural --data FOLDER`.",
        "Mean over silos of the loss on held-out rows: log loss, or squared error in units of the "
        "target's variance; lower is better. Silos have up to "
        f"{MOST_ROWS} training rows. Sets with a calendar hold out blocks of 30 days, the same for "
        f"all silos; {', '.join(STRICT)} the last 30% of its time; the others one of {FOLDS} "
        "random parts. Methods of scikit-learn, outside any federation, are in italics; *tuned "
        "alone* has one penalty for all silos, chosen by training rows that are held out in turn. "
        "In brackets: silos that are worse than by *tuned alone* beyond chance (paired by fold and "
        "seed, Student's t, Holm at 5%), and silos that are worse at all. The first table of a "
        "network has fold 0, seed 0.",
    ]
    for network in federated.NETWORKS:
        if not any(e["network"] == network for e in entries):
            continue
        parts += [f"## {network}", *_compared(select(entries, fold=0, seed=0), network)]
        if several := _on_several(entries, network):
            parts += [f"### {network}, on several folds", *_compared(several, network)]
    done = sorted({(e["fold"], e["seed"]) for e in entries})
    parts.append(f"Folds and seeds measured: {len(done)}. Sets: {', '.join(SETS)}.")
    return page(*parts)


def _compared(entries: Sequence[Entry], network: str) -> list[Any]:
    """Return the table of methods and sets of entries that all have the same folds."""
    shown = [name for name in SETS if select(entries, dataset=name, network=network)]
    found = {name: rows_of(entries, name, network) for name in shown}
    methods = [*classical.METHODS, *(f"{method} " for method in federated.METHODS)]
    lines = [
        [_title(method), *(_cell(found[name], method) for name in shown)]
        for method in methods
        if any(method in found[name] for name in shown)
    ]
    return [table(["method", *(SETS[name] for name in shown)], lines), _distances(found)]


def _on_several(entries: Sequence[Entry], network: str) -> list[Entry]:
    """Return what was measured on every fold and seed of a set that has several."""
    found: list[Entry] = []
    for name in SETS:
        of_set = [e for e in entries if e["dataset"] == name and e["network"] in (OUTSIDE, network)]
        folds = {(e["fold"], e["seed"]) for e in of_set if e["network"] == network}
        for kind, method in {(e["network"], e["method"]) for e in of_set}:
            own = select(of_set, network=kind, method=method)
            complete = folds <= {(e["fold"], e["seed"]) for e in own}
            found += own if len(folds) > 1 and complete else []
    return found


def _title(method: str) -> str:
    return f"*{method}*" if method in classical.METHODS else method.strip()


def _cell(found: Mapping[str, Rates], method: str) -> str:
    if method not in found:
        return "–"
    diverged = {silo for (silo, _, _), loss in found[method].items() if np.isinf(loss)}
    text = f"{mean_loss(found[method]):.3f}" if not diverged else f"diverges at {len(diverged)}"
    best = min(mean_loss(of) for name, of in found.items() if not name.startswith("trees"))
    text = f"**{text}**" if mean_loss(found[method]) <= best else text
    if REFERENCE not in found or method == REFERENCE:
        return text
    beyond, worse = worse_than(found[method], found[REFERENCE])
    return f"{text} ({beyond}, {worse})"


def _distances(found: Mapping[str, Mapping[str, Rates]]) -> str:
    """Say how far `auto` is from the best answer of regressions and strategies, on average."""
    shares = []
    for of in found.values():
        others = {m: mean_loss(r) for m, r in of.items() if not m.startswith("trees")}
        if "auto " not in others or REFERENCE not in others:
            continue
        best = min(others.values())
        width = others[REFERENCE] - best
        shares.append((others["auto "] - best) / width if width > 0 else np.inf)
    if not shares:
        return ""
    each = ", ".join(f"{share:.2f}" for share in shares)
    return (
        f"`auto`, set by set: (loss − best) / (tuned alone − best) = {each}. 0 is as good as the "
        "best method, 1 as good as tuned alone. Trees are left out of this comparison."
    )


STORE = Store("natural", document, keys=("dataset", "network", "method", "fold", "seed"))
