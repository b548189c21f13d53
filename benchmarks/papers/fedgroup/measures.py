"""EDC beside MADC (FedGroup's Fig. 5), and what a cold start costs beside the SVD of the updates.

    python -m benchmarks.papers.fedgroup.measures --data FOLDER

*Mapping.* α·m silos pre-train one epoch from w⁰ (α = 20); a point is a pair of them, with its MADC
(eq. 7) and its EDC (eq. 8).

*Cost.* From 1,000 updates of 100,000 parameters, as they come from the silos (layers, float32), to
groups: ours from the Gram matrix, and the paper's way, scikit-learn's TruncatedSVD of the P×n
matrix and cosines with its directions; k-means is the same. Every measurement is a process of its
own, in turn; seconds are the processor's, which other load disturbs least; memory is the peak
resident size above that after the updates were made.
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.kit import Entry, Store, Watched, columns, page, panels, read, select, train
from benchmarks.papers.fedgroup.data import DATASETS
from benchmarks.papers.fedgroup.tables import ALPHA, BATCH
from coterie.strategies.partition.fedgroup import cold_start, edc, madc
from coterie.strategies.partition.gram import gram
from coterie.strategies.rounds.models import difference

SILOS, PARAMETERS, GROUPS = 1000, 100_000, 5
LAYERS = (78_400, 100, 21_000, 500)  # like a small network's, together P
REPEAT = 3

Layers = list[NDArray[np.float32]]


# --- the mapping ----------------------------------------------------------------------------------


def pretrained(row: str, folder: str, seed: int) -> NDArray[np.float64]:
    """Inner products of the updates that α·m silos of a data set make in one epoch from w⁰."""
    data, silos = DATASETS[row], Watched()
    keys = {
        **{"strategy": "fedavg", "sample": ALPHA * data.num_groups, "seed": seed, "rounds": 1},
        **{"local-epochs": 1, "batch-size": BATCH, "lr": data.lr},
    }
    train(data.nodes(folder, seed=seed), keys, app=silos, evaluate=False)
    updates = [difference(new, old) for _, (old, new) in sorted(silos.trained.items())]
    return gram([list(update.values()) for update in updates])


def mapping(row: str, folder: str, seed: int) -> dict[str, Any]:
    """Both distances of every pair of silos, their correlation, and the best line."""
    matrix, num_groups = pretrained(row, folder, seed), DATASETS[row].num_groups
    points = edc(matrix, num_directions=num_groups)
    pairs = np.triu_indices(len(matrix), 1)
    x = madc(matrix)[pairs]
    y = np.linalg.norm(points[pairs[0]] - points[pairs[1]], axis=1) / num_groups
    slope, intercept = np.polyfit(x, y, 1)
    return {
        "row": row,
        "seed": seed,
        "silos": len(matrix),
        "correlation": float(np.corrcoef(x, y)[0, 1]),
        "slope": float(slope),
        "intercept": float(intercept),
        "madc": np.round(x, 4).tolist(),
        "edc": np.round(y, 4).tolist(),
    }


def draw(found: Sequence[Mapping[str, Any]], file: Path) -> None:
    """One panel per data set."""
    with panels(file, 1, len(found), figsize=(3.4 * len(found), 3.2)) as axes:
        for panel, entry in zip(axes[0], found, strict=True):
            x = np.array(entry["madc"])
            ends = np.array([x.min(), x.max()])
            panel.scatter(x, entry["edc"], s=4, alpha=0.3, linewidths=0)
            panel.plot(ends, entry["slope"] * ends + entry["intercept"], color="black", linewidth=1)
            panel.set_title(f"{entry['row']}, r = {entry['correlation']:.2f}", fontsize=10)
            panel.set_xlabel("MADC")
        axes[0][0].set_ylabel("EDC")


# --- the cost -------------------------------------------------------------------------------------


def some_updates() -> list[Layers]:
    """Updates of silos of ``GROUPS`` kinds, as lists of layers, each an array of its own."""
    rng = np.random.default_rng(0)
    kinds = [_random_layers(rng) for _ in range(GROUPS)]
    made = []
    for silo in range(SILOS):
        own = _random_layers(rng)
        made.append([own[k] + kinds[silo % GROUPS][k] for k in range(len(LAYERS))])
    return made


def _random_layers(rng: np.random.Generator) -> Layers:
    return [rng.standard_normal(size, dtype=np.float32) for size in LAYERS]


def ours(updates: Sequence[Layers]) -> list[int]:
    """The cold start as the strategy does it."""
    rng = np.random.default_rng(0)
    groups = cold_start(gram(updates), num_groups=GROUPS, measure="edc", rng=rng)
    labels = np.empty(len(updates), dtype=int)
    for number, group in enumerate(groups):
        labels[group] = number
    return labels.tolist()


def truncated_svd(updates: Sequence[Layers]) -> list[int]:
    """Algorithm 3 as printed: SVD(ΔWᵀ, m) of the P×n matrix, then cosines with V, then k-means."""
    from sklearn.cluster import KMeans
    from sklearn.decomposition import TruncatedSVD
    from sklearn.metrics.pairwise import cosine_similarity
    from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

    matrix = np.stack([np.concatenate(layers) for layers in updates])
    directions = TruncatedSVD(GROUPS, random_state=0).fit_transform(matrix.T)
    points = cosine_similarity(matrix, directions.T)
    with threadpool_limits(limits=1):
        labels: list[int] = KMeans(GROUPS, n_init=10, random_state=0).fit_predict(points).tolist()
    return labels


WAYS: dict[str, Callable[[Sequence[Layers]], list[int]]] = {
    "ours": ours,
    "TruncatedSVD": truncated_svd,
}


def measure(way: str) -> dict[str, Any]:
    """One measurement in this process: seconds, extra bytes, whether the kinds were found."""
    import sklearn.cluster
    import sklearn.decomposition  # noqa: F401  (imports are not what is measured)

    updates = some_updates()
    before = _peak()
    started = time.process_time()
    labels = WAYS[way](updates)
    seconds = time.process_time() - started
    kinds = {(silo % GROUPS, label) for silo, label in enumerate(labels)}
    return {"seconds": seconds, "bytes": _peak() - before, "right": len(kinds) == GROUPS}


def _peak() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def cost() -> list[Entry]:
    """The smallest time and the largest memory of each way, in turn."""
    runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
    for _ in range(REPEAT):
        for way in WAYS:
            command = [sys.executable, "-m", __spec__.name, "--measure", way]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            runs[way].append(json.loads(done.stdout))
    return [
        {
            "part": "cost",
            "way": way,
            "seconds": min(run["seconds"] for run in made),
            "bytes": max(run["bytes"] for run in made),
            "right": all(run["right"] for run in made),
        }
        for way, made in runs.items()
    ]


# --- what is shown --------------------------------------------------------------------------------


def document(entries: Sequence[Entry]) -> str:
    """Everything measured, as Markdown."""
    costs = select(entries, part="cost")
    mine, theirs = (select(costs, way=way)[0] for way in WAYS)
    return page(
        "# FedGroup's measures",
        "Made by `python -m benchmarks.papers.fedgroup.measures --data FOLDER`.",
        "## From MADC to EDC (Fig. 5)",
        "![EDC over MADC](fedgroup_measures.png)",
        f"α·m silos (α = {ALPHA}) pre-train one epoch from w⁰, batch {BATCH}; every pair is a "
        "point. The paper calls the mapping approximately linear and gives no number; r is "
        "Pearson's correlation.",
        columns(
            select(entries, part="mapping"),
            {
                "data": "{row}",
                "m": lambda entry: str(DATASETS[entry["row"]].num_groups),
                "silos": "{silos}",
                "r": "{correlation:.3f}",
                "EDC ≈": "{slope:.2f} · MADC {intercept:+.2f}",
                "seed": "{seed}",
            },
        ),
        f"## Cost of a cold start: {SILOS:,} silos, {PARAMETERS:,} parameters",
        "From updates (layers, float32) to groups; one thread, every measurement in a process of "
        f"its own, in turn. Processor seconds: the smallest of {REPEAT}. Memory: the largest peak "
        "above the updates themselves.",
        columns(
            costs,
            {
                "": "{way}",
                "seconds": "{seconds:.2f}",
                "MB": lambda run: f"{run['bytes'] / 1e6:.0f}",
                "hidden kinds found": lambda run: "yes" if run["right"] else "no",
            },
        ),
        f"TruncatedSVD takes {theirs['seconds'] / mine['seconds']:.1f} × the time and "
        f"{theirs['bytes'] / mine['bytes']:.1f} × the memory (targets: 1 and 5).",
    )


STORE = Store("fedgroup_measures", document, keys=("part", "row", "seed", "way"))


def main() -> None:
    """Measure, draw, store."""
    if sys.argv[1:2] == ["--measure"]:
        print(json.dumps(measure(sys.argv[2])))
        return
    given = read(
        STORE,
        __doc__,
        data=True,
        parts=DATASETS,
        chosen="mnist-mclr,mnist-mlp,femnist-mlp,synthetic-mclr",
        seeds=1,
    )
    found = [mapping(row, given.data, s) for s in range(given.seeds) for row in given.parts]
    for entry in cost():
        given.store.put(entry)
    for entry in found:
        points = ("madc", "edc")
        given.store.put({"part": "mapping"} | {k: v for k, v in entry.items() if k not in points})
    draw(found, given.results / "fedgroup_measures.png")
    print(given.store.text())


if __name__ == "__main__":
    main()
