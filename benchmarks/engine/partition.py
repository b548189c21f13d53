"""Speed of the partition numerics beside their limits, measured side by side in one run.

    python -m benchmarks.engine.partition [--quick]

Every time is the smallest of a few repetitions; what is compared is measured in turn, so that other
load hits both.
"""

from __future__ import annotations

import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.kit import Entry, Store, page, read, select, table
from coterie.strategies.partition import fedgroup
from coterie.strategies.partition.gram import cross, gram
from coterie.strategies.partition.objectives import FedCollabBound, HCCTUtility
from coterie.strategies.partition.solvers import agglomerative, optimal, relocation

GRAM_SIZES = [
    (20, 100_000),
    (20, 1_000_000),
    (20, 10_000_000),
    (100, 100_000),
    (100, 1_000_000),
    (300, 100_000),
    (300, 1_000_000),
    (1000, 10_000),
    (1000, 100_000),
    (1000, 1_000_000),
]
Row = dict[str, Any]


def fastest(calls: Sequence[Callable[[], object]], *, repeat: int) -> list[float]:
    """Smallest time in seconds of each call, taken in turn."""
    times = [[] for _ in calls]  # type: list[list[float]]
    for _ in range(repeat):
        for call, seconds in zip(calls, times, strict=True):
            start = time.perf_counter()
            call()
            seconds.append(time.perf_counter() - start)
    return [min(seconds) for seconds in times]


# --- Gram matrix ----------------------------------------------------------------------------------


def free_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def random_updates(num_silos: int, num_parameters: int) -> np.ndarray:
    rng = np.random.default_rng(0)
    updates = np.empty((num_silos, num_parameters), dtype=np.float32)
    for row in updates:
        rng.random(out=row, dtype=np.float32)
        row -= 0.5
    return updates


def as_layers(updates: np.ndarray) -> list[dict[str, np.ndarray]]:
    """The same numbers as twenty named layers per silo, each a view."""
    cuts = np.linspace(0, updates.shape[1], 21).astype(int)
    return [{f"layer{k}": row[a:b] for k, (a, b) in enumerate(pairwise(cuts))} for row in updates]


def measure_gram(num_silos: int, num_parameters: int) -> Row:
    """Ours beside one N x P by P x N float32 product (sgemm)."""
    print(f"Gram matrix, {num_silos} silos, {num_parameters} parameters", file=sys.stderr)
    sizes: Row = {"N": num_silos, "P": num_parameters}
    if 4 * num_silos * num_parameters > 0.6 * free_bytes():
        return {**sizes, "BLAS": "not enough free memory"}
    updates = random_updates(num_silos, num_parameters)
    layers = as_layers(updates)
    repeat = 2 if num_silos * num_parameters >= 1e9 else 5
    # Shifted by one column, the two factors are different matrices for numpy, which would use
    # the faster syrk for a matrix and its own transpose; nothing is copied.
    blas, syrk, ours, layered = fastest(
        [
            lambda: updates[:, :-1] @ updates[:, 1:].T,
            lambda: updates @ updates.T,
            lambda: gram(updates),
            lambda: gram(layers),
        ],
        repeat=repeat,
    )
    known = gram(updates)
    replaced = fastest([lambda: cross(updates[:1], updates)], repeat=1)[0]
    return {
        **sizes,
        "BLAS": blas,
        "X @ X.T": syrk,
        "ours": ours,
        "ours, layers": layered,
        "ours / BLAS": ours / blas,
        "layers / BLAS": layered / blas,
        "replace one row": replaced,
        "error": cosine_error(updates, known),
    }


def cosine_error(updates: np.ndarray, result: np.ndarray) -> float:
    """Largest error over |u_i||u_j| against float64, on the first 20 silos."""
    wide = updates[:20].astype(np.float64)
    truth = wide @ wide.T
    norms = np.sqrt(np.outer(truth.diagonal(), truth.diagonal()))
    return float((np.abs(result[:20, :20] - truth) / norms).max())


# --- solvers --------------------------------------------------------------------------------------


def silos(num_silos: int, num_parameters: int = 200) -> tuple[np.ndarray, np.ndarray]:
    """Updates around one hidden direction for every twenty silos, and sizes."""
    rng = np.random.default_rng(num_silos)
    centres = rng.standard_normal((max(2, num_silos // 20), num_parameters))
    updates = centres[rng.integers(len(centres), size=num_silos)]
    return updates + rng.standard_normal(updates.shape), rng.integers(20, 500, num_silos)


def literal_partition(updates: np.ndarray, sizes: np.ndarray, alpha: float) -> list[list[int]]:
    """Algorithm 2 word by word on P-dimensional vectors, benefits recorded as in the paper."""

    def utility(group: tuple[int, ...]) -> float:
        rows = list(group)
        total = sizes[rows].sum()
        mean = (sizes[rows, None] / total * updates[rows]).sum(axis=0)
        norm = np.linalg.norm(mean)
        cosines = [updates[i] @ mean / (np.linalg.norm(updates[i]) * norm) for i in rows]
        return float(-alpha / total * len(rows) + sum(cosines))

    groups: list[tuple[int, ...]] = [(i,) for i in range(len(sizes))]
    value = {group: utility(group) for group in groups}
    benefit: dict[tuple[tuple[int, ...], tuple[int, ...]], float] = {}
    while len(groups) > 1:
        for k, a in enumerate(groups):
            for b in groups[k + 1 :]:
                if (a, b) not in benefit:
                    benefit[a, b] = utility(a + b) - value[a] - value[b]
        pairs = [(a, b) for k, a in enumerate(groups) for b in groups[k + 1 :]]
        a, b = max(pairs, key=lambda pair: benefit[pair])
        if benefit[a, b] <= 0:
            break
        value[a + b] = utility(a + b)
        groups = [a + b if group == a else group for group in groups if group != b]
    return sorted(sorted(group) for group in groups)


def measure_literal(num_silos: int, num_parameters: int = 10_000) -> Row:
    """Updates to groups, all merging: the literal version beside Gram matrix and agglomeration."""
    updates, sizes = silos(num_silos, num_parameters)

    def ours() -> list[list[int]]:
        return agglomerative(HCCTUtility.from_gram(gram(updates), sizes, alpha=1e4)).groups

    equal = ours() == literal_partition(updates, sizes, 1e4)
    literal, quick = fastest([lambda: literal_partition(updates, sizes, 1e4), ours], repeat=2)
    return {
        "N": num_silos,
        "P": num_parameters,
        "literal": literal,
        "ours, Gram included": quick,
        "times faster": literal / quick,
        "same groups": equal,
    }


def measure_agglomerative(num_silos: int, alpha: float) -> Row:
    updates, sizes = silos(num_silos)
    products = gram(updates)
    result = agglomerative(HCCTUtility.from_gram(products, sizes, alpha=alpha))
    seconds = fastest(
        [lambda: agglomerative(HCCTUtility.from_gram(products, sizes, alpha=alpha))], repeat=3
    )[0]
    return {
        "N": num_silos,
        "alpha": alpha,
        "groups": len(result.groups),
        "merges": result.num_steps,
        "seconds": seconds,
    }


def measure_optimal(num_silos: int) -> Row:
    updates, sizes = silos(num_silos)
    objective = HCCTUtility.from_gram(gram(updates), sizes, alpha=100)
    best = optimal(objective)
    greedy = agglomerative(objective)
    return {
        "N": num_silos,
        "seconds": fastest([lambda: optimal(objective)], repeat=3)[0],
        "optimum": best.objective,
        "agglomerative": greedy.objective,
    }


def measure_others() -> list[Row]:
    rng = np.random.default_rng(0)
    half = np.triu(rng.random((20, 20)), 1)
    bound = FedCollabBound.from_distances(half + half.T, rng.integers(14, 2100, 20), c=10)
    products = gram(silos(1000)[0])
    norms = np.sqrt(products.diagonal())

    def edc_groups() -> object:
        return fedgroup.cold_start(
            products, num_groups=5, measure="edc", rng=np.random.default_rng(0)
        )

    cases: dict[str, Callable[[], object]] = {
        "FedCollab relocation, 20 silos, 100 restarts": lambda: relocation(
            bound, rng=np.random.default_rng(0)
        ),
        "EDC, 1,000 silos, 5 directions": lambda: fedgroup.edc(products, 5),
        "EDC and k-means++, 1,000 silos, 5 groups": edc_groups,
        "MADC, 1,000 silos": lambda: fedgroup.madc(products / np.outer(norms, norms)),
    }
    return [{"what": what, "seconds": fastest([call], repeat=2)[0]} for what, call in cases.items()]


# --- what is shown --------------------------------------------------------------------------------

TITLES = {
    "gram": "## Gram matrix (float32 updates) beside the BLAS limit\n\n"
    "BLAS: one N x P by P x N `sgemm`. Ours reads a matrix in place; *layers* are twenty named "
    "arrays per silo. numpy's `X @ X.T` is the symmetric product (half the work) without float64 "
    "accumulation. Error: against float64, over |u_i||u_j|.",
    "literal": "## HCCT's Algorithm 2, from updates to groups, all merging",
    "agglomerative": "## Agglomeration from a given Gram matrix",
    "optimal": "## Exact optimum",
    "others": "## Others",
}
"""Part → what stands above its table. Its columns are the entries' fields."""


def cell(value: object) -> str:
    """A value as text."""
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return f"{value:,}"
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    (machine,) = select(entries, part="machine")
    blocks: list[str | list[str]] = [
        "# Partition numerics",
        f"`python -m benchmarks.engine.partition` on {machine['cores']} shared cores, numpy "
        f"{machine['numpy']}. Smallest of several repetitions, in seconds.",
    ]
    for part, title in TITLES.items():
        rows = select(entries, part=part)
        heads = list(dict.fromkeys(key for row in rows for key in row))[1:]
        cells = ([cell(row.get(head, "")) for head in heads] for row in rows)
        blocks += [title, table(heads, cells, rule="---:")]
    return page(*blocks)


STORE = Store("partition", document, keys=("part", "N", "P", "alpha", "what"))


def main() -> None:
    """Measure, store, print."""
    quick = {"action": "store_true", "help": "leave out the largest sizes"}
    given = read(STORE, __doc__, quick=quick)
    warnings.simplefilter("ignore", RuntimeWarning)
    sizes = [(n, p) for n, p in GRAM_SIZES if not given.quick or n * p <= 1e8]
    parts: dict[str, list[Row]] = {
        "machine": [{"cores": os.cpu_count(), "numpy": np.__version__}],
        "gram": [measure_gram(n, p) for n, p in sizes],
        "literal": [measure_literal(n) for n in (5, 10, 20, 40)],
        "agglomerative": [
            measure_agglomerative(n, alpha) for n in (100, 300, 1000) for alpha in (0.0, 1e2, 1e9)
        ],
        "optimal": [measure_optimal(n) for n in range(8, 17)],
        "others": measure_others(),
    }
    for part, rows in parts.items():
        for row in rows:
            given.store.put({"part": part, **row})
    print(given.store.text())


if __name__ == "__main__":
    main()
