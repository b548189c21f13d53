"""What FedGroup's groups allow on MNIST-MCLR, by how they are made: m, directions, sample, k-means.

    python -m benchmarks.papers.fedgroup.groups --data FOLDER [--seeds 3]

A thousand silos pre-train from w⁰, some of them make the groups (Algorithm 3), and all are placed
by the direction of their update (eq. 9), as in a run. Then every group has one model, trained on
the pooled data of its silos, and is tested on theirs: what no federated training of these groups
is far above. Groups by the digits alone, which no server knows, stand beside them. Minutes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from benchmarks.kit import Entry, Store, page, read, select, spread, table
from benchmarks.papers.fedgroup import fast_sgd
from benchmarks.papers.fedgroup.data import DATASETS, TestSets, all_silos
from benchmarks.papers.fedgroup.tables import (
    ALPHA,
    BATCH,
    METHODS,
    POOLED_BATCH,
    POOLED_EPOCHS,
)
from coterie.client.work.data import Held
from coterie.client.work.sgd import TrainPlan, seed_of
from coterie.client.work.weights import load_weights, read_weights
from coterie.strategies.partition.clustering import k_means_of
from coterie.strategies.partition.fedgroup import cold_start, edc
from coterie.tasks.base import SiloData
from coterie.wire import Model

ROW, DRAWS, CLASSES = "mnist-mclr", 5, 10
GROUPS = DATASETS[ROW].num_groups
PAPER = METHODS["FG-EDC"].paper[ROW]
THEIRS = "as in the paper"
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    THEIRS: {},
    "another k-means++ alone": {"sample": 0},
    "all 1,000 silos make the groups": {"silos": 1000},
    "pre-training of 5 epochs": {"epochs": 5},
    "pre-training of 20 epochs": {"epochs": 20},
    "2 directions": {"directions": 2},
    "6 directions": {"directions": 6},
    "10 directions": {"directions": 10},
    "MADC": {"measure": "madc"},
    "random centres (RCC)": {"centres": "random"},
    "m = 2": {"m": 2},
    "m = 4": {"m": 4},
    "m = 5": {"m": 5},
    "m = 10": {"m": 10},
    "m = 1, one model": {"m": 1},
    "m = 3, by the digits": {"digits": True},
    "m = 10, by the digits": {"m": 10, "digits": True},
}

Updates = NDArray[np.float32]


@lru_cache(maxsize=1)
def _data(folder: str, seed: int) -> tuple[Any, list[SiloData], TestSets]:
    task, silos = all_silos(ROW, folder, seed)
    return task, silos, TestSets(task, silos)


@lru_cache(maxsize=1)
def _updates(folder: str, seed: int, epochs: int) -> Updates:
    """(silos, parameters): what each does in so many epochs from w⁰."""
    task, silos, _ = _data(folder, seed)
    plan, model = TrainPlan(epochs, BATCH, DATASETS[ROW].lr), task.model()
    torch.manual_seed(seed)
    start = read_weights(task.model())
    made = []
    for number, silo in enumerate(silos):
        load_weights(model, start)
        how = seed_of(seed, "groups", 1, str(number))
        fast_sgd.train(task, model, _held([silo]), plan, seed=how)
        made.append(_flat(read_weights(model)) - _flat(start))
    return np.stack(made)


def _flat(model: Model) -> NDArray[np.float32]:
    return np.concatenate([array.ravel() for array in model.values()])


def _held(silos: Sequence[SiloData]) -> Held:
    return Held(
        torch.from_numpy(np.concatenate([silo.x_train for silo in silos])),
        torch.from_numpy(np.concatenate([silo.y_train for silo in silos])),
    )


def _placed(
    updates: Updates,
    *,
    seed: int,
    draw: int,
    m: int,
    silos: int,
    sample: int,
    directions: int,
    measure: Any,
    centres: str,
) -> list[int]:
    """Every silo's group: Algorithm 3 on some of the silos, eq. 9 for all."""
    chosen = np.random.default_rng([seed, sample, 0]).permutation(len(updates))[:silos]
    rng, made = np.random.default_rng([seed, draw, 1]), updates[chosen].astype(np.float64)
    if centres == "random":
        groups = [[row] for row in range(m)]  # of a random order
    elif directions != m:
        groups = k_means_of(edc(made @ made.T, num_directions=directions), m, rng)
    else:
        groups = cold_start(made @ made.T, num_groups=m, measure=measure, rng=rng)
    ways = np.stack([made[group].mean(axis=0) for group in groups])
    ways /= np.linalg.norm(ways, axis=1, keepdims=True)
    best: list[int] = (updates @ ways.T).argmax(axis=1).tolist()
    return best


def _by_digits(silos: Sequence[SiloData], m: int) -> list[int]:
    """Neighbouring digits together: a silo has the digits u and u + 1, modulo ten."""
    first = []
    for silo in silos:
        low, high = (int(f(silo.y_train)) for f in (np.min, np.max))
        first.append(high if (low, high) == (0, CLASSES - 1) else low)
    return [u * m // CLASSES for u in first]


def measure(folder: str, setting: str, seed: int, draw: int) -> Entry:
    """Accuracy in % over all silos' test samples of one model per group, on its pooled data."""
    torch.set_num_threads(1)
    threadpool_limits(1)
    chosen: dict[str, Any] = {"m": GROUPS, "sample": draw, "measure": "edc", "centres": "means"}
    chosen |= {"epochs": 1, "digits": False, **SETTINGS[setting]}
    chosen = {"silos": ALPHA * chosen["m"], "directions": chosen["m"], **chosen}
    epochs, digits = chosen.pop("epochs"), chosen.pop("digits")
    task, silos, tests = _data(folder, seed)
    if digits:
        place = _by_digits(silos, chosen["m"])
    else:
        place = _placed(_updates(folder, seed, epochs), seed=seed, draw=draw, **chosen)
    plan, right, sizes = TrainPlan(POOLED_EPOCHS, POOLED_BATCH, DATASETS[ROW].lr), 0.0, []
    for number in range(max(place) + 1):
        own = [i for i, group in enumerate(place) if group == number]
        sizes.append(len(own))
        if own:
            torch.manual_seed(seed)
            model = task.model()
            how = seed_of(seed, "pooled", 0, "")
            fast_sgd.train(task, model, _held([silos[i] for i in own]), plan, seed=how)
            found = tests.evaluate(read_weights(model), own)
            right += (1 - found.error) * found.num_examples
    return {"accuracy": round(100 * right / tests.num_examples, 3), "groups": sorted(sizes)}


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    rows = []
    for name in SETTINGS:
        if runs := select(entries, setting=name):
            seeds = sorted({run["seed"] for run in runs})
            of_seeds = [[r["accuracy"] for r in select(runs, seed=seed)] for seed in seeds]
            each = [own for own in of_seeds if len(own) > 1]
            within = float(np.mean([np.std(own, ddof=1) for own in each])) if each else np.nan
            all_of = [accuracy for own in of_seeds for accuracy in own]
            shown = [spread([float(np.mean(own)) for own in of_seeds])]
            shown += ["" if np.isnan(within) else f"{within:.2f}"]
            shown += [f"{min(all_of):.1f} to {max(all_of):.1f}", f"{np.mean(all_of) - PAPER:+.2f}"]
            sizes = ", ".join(map(str, runs[0]["groups"]))
            rows.append([name, *shown, str(len(runs)), sizes])
    heads = ("", "pooled", "between draws", "all", "less 96.0", "runs", "groups of the first")
    return page(
        "# What FedGroup's groups allow (MNIST-MCLR)",
        "Made by `python -m benchmarks.papers.fedgroup.groups --data FOLDER`. A thousand silos, "
        f"all placed; one model per group, trained for {POOLED_EPOCHS}\nepochs on the pooled data "
        "of its silos, tested on theirs. Accuracy in %, mean over draws of the pre-training "
        "sample and of\nk-means++, ± deviation over seeds of the data; *between draws*: the "
        f"deviation within a seed. The paper's FedGroup has {PAPER:g}\nafter 300 rounds. "
        f"{THEIRS.capitalize()}: m = {GROUPS}, {ALPHA * GROUPS} silos of one epoch, {GROUPS} "
        "directions, EDC. Where nothing else is said, the rest is as in the paper. Rows of "
        f"fewer than {3 * DRAWS} runs (by the\ndigits, which have no draws: of three) were not "
        "run again for want of time.",
        table(heads, rows),
    )


STORE = Store("fedgroup_groups", document, keys=("setting", "seed", "draw"))


def main() -> None:
    """Measure what is missing, print."""
    given = read(STORE, __doc__, data=True, rows=SETTINGS, seeds=3)
    ordered = sorted(given.only, key=lambda name: SETTINGS[name].get("epochs", 1))
    cells = (
        {"setting": name, "seed": seed, "draw": draw}
        for seed, name, draw in product(range(given.seeds), ordered, range(DRAWS))
        if draw == 0 or not SETTINGS[name].get("digits")
    )
    given.store.fill(cells, lambda **cell: measure(given.data, **cell))
    print(given.store.text())


if __name__ == "__main__":
    main()
