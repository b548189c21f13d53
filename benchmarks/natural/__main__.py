"""Every strategy beside what a statistician would do, on silos that nobody cut.

    python -m benchmarks.natural --data FOLDER [--folds 3] [--seeds 1] [--networks linear]

FOLDER holds the sets as ``NAME.npz``, and Fed-TCGA-BRCA in ``tcga_brca``. Each measurement is
stored when it is done, and a benchmark that was interrupted continues where it stopped.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any

from benchmarks.kit import read
from benchmarks.natural import brca, classical, federated
from benchmarks.natural.data import FOLDS, fold, folds_of
from benchmarks.natural.tables import OUTSIDE, SETS, STORE


def measure(
    *, data: str, dataset: str, network: str, method: str, fold: int, seed: int
) -> dict[str, Any]:
    """Measure one method on one fold of one set."""
    file = Path(data) / f"{dataset}.npz"
    if network == OUTSIDE:
        return {"scores": _rounded(classical.measured(method, _fold(file, fold, seed)))}
    scores, known = federated.measured(method, file, network, fold, seed)
    return {"scores": _rounded(scores), **known}


_fold = fold


def _rounded(scores: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, float]]:
    return {n: {k: round(v, 5) for k, v in own.items()} for n, own in scores.items()}


def cells(given: Any) -> Iterator[dict[str, Any]]:
    """Yield what to measure: whole folds of all sets first."""
    networks = [OUTSIDE, *given.networks.split(",")]
    sets = [name for name in given.parts if name in SETS]
    for seed, number, name in product(range(given.seeds), range(given.folds), sets):
        if number >= folds_of(name):
            continue
        for network in networks:
            methods = classical.METHODS if network == OUTSIDE else federated.METHODS
            for method in given.only if given.only else methods:
                if method in methods and (
                    network == OUTSIDE or federated.fits(method, network, name)
                ):
                    yield {
                        "dataset": name, "network": network, "method": method,
                        "fold": number, "seed": seed,
                    }  # fmt: skip


def main() -> None:
    """Measure what is missing, and print the page."""
    given = read(
        STORE,
        __doc__,
        data=True,
        parts=[*SETS, brca.STORE.name],
        rows=[*classical.METHODS, *federated.METHODS],
        seeds=1,
        folds={"type": int, "default": 3, "help": f"how many, at most {FOLDS}"},
        networks={"default": "linear", "help": f"of {', '.join(federated.NETWORKS)}"},
    )
    given.store.fill(cells(given), lambda **cell: measure(data=given.data, **cell))
    print(given.store.text())
    if brca.STORE.name in given.parts:
        brca.fill(brca.STORE.at(given.results), Path(given.data) / "tcga_brca", seeds=given.seeds)


if __name__ == "__main__":
    main()
