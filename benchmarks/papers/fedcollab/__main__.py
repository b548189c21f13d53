"""FedCollab's experiments with the paper's settings, ours beside the paper's figures.

    python -m benchmarks.papers.fedcollab --data FOLDER [--parts fashion,time,…] [--seeds 5]

Every part is stored as soon as it is done; a second call adds what is missing. In-process Grid,
one thread.

fashion   FashionMNIST, label shift, the 20 silos of the paper's scripts: structure and accuracy
fashion-0       the same with the silos of data seed 0 and five seeds of training
fashion-drawn   the same with silos of our own drawing and pixels from -1 to 1
time      the discriminators' computing beside a sequential loop over pairs
scheme    the discriminators beside the paper's scheme, against known distances
known     estimated distances of silos whose total variation distance is known
cifar10   CIFAR-10, feature shift (rotations), turned and scaled as in the paper's code
cifar10-corners   the same with black corners and pixels from -1 to 1
cifar100  CIFAR-100's coarse labels, concept shift, for whoever has cifar100_coarse.npz
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import combinations, product
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, RecordDict

from benchmarks.kit import UNBOUNDED, Entry, Store, Strategy, Trained, read, train
from benchmarks.papers.fedcollab.distances import (
    KNOWN_BUDGETS,
    KNOWN_KINDS,
    KNOWN_SHARES,
    KNOWN_SIZES,
    compare_schemes,
    estimate,
    measure_distances,
    time_pairs,
)
from benchmarks.papers.fedcollab.experiments import (
    ADAPTING,
    COLLAB,
    DITTO,
    EXPERIMENTS,
    GLOBAL,
    LOCAL,
    NAMES,
    TUNED,
    VARIANTS,
)
from benchmarks.papers.fedcollab.tables import STORE, draw_distances, draw_known, square, turned
from coterie import wire
from coterie.server.runs.config import train_config
from coterie.strategies.fedcollab.algorithm import FedCollabState
from coterie.strategies.partition.distance import Distance
from coterie.strategies.partition.fedcollab import auto_c
from coterie.strategies.partition.objectives import FedCollabBound
from coterie.strategies.partition.solvers import solve
from coterie.wire import Model

ORDER = tuple(dict.fromkeys((COLLAB, TUNED, LOCAL, GLOBAL, DITTO, *VARIANTS)))
"""In which variants are run: the first two share a training."""


def find_structure(experiment: str, seed: int, folder: str) -> Entry:
    """Discriminators and structure, without training."""
    own = EXPERIMENTS[experiment]
    found = measure_distances(own.nodes(folder, seed), own.discriminators, seed=seed, c=own.c)
    bound = found.structure["bound"]
    c, groups = _auto(found.sizes, found.distances)
    return {
        "groups": found.groups,
        "sizes": found.sizes,
        "bound": [bound["chosen"], bound["second-best"]],
        "c from–to": found.structure.get("c-interval"),
        "c = auto": c,
        "auto groups": groups,
        "distances": [row[i + 1 :] for i, row in enumerate(found.distances.tolist())][:-1],
        "discriminator rounds": found.rounds,
        "bytes": found.num_bytes,
        "seconds": found.seconds,
    }


def _auto(sizes: Sequence[int], distances: np.ndarray) -> tuple[float, list[list[int]]]:
    """What ``c=auto`` is for these distances, and the structure that it gives."""
    held = np.array(sizes, dtype=float) - np.minimum(np.array(sizes) // 2, 500)
    c = auto_c(sizes, np.sqrt(0.25 / held[:, None] + 0.25 / held))
    bound = FedCollabBound.from_distances(distances, sizes, c=c)
    return c, solve(bound, solver="relocation", rng=np.random.default_rng(0)).groups


def measure_accuracy(
    experiment: str, variant: str, seed: int, rounds: int, *, folder: str, store: Store
) -> Entry:
    """Every silo's error in %, of what the variant makes of its final model."""
    structure = store.find(part="structure", experiment=experiment, seed=seed)
    assert structure is not None, "the structures come first"
    shared = COLLAB if variant == TUNED else variant
    known = tuple(map(tuple, structure["distances"]))
    done = _trained(experiment, shared, seed, rounds, folder, known)
    if variant in ADAPTING:
        errors = [round(100 * done.errors[name], 4) for name in sorted(done.errors)]
    else:
        errors = _final_errors(done, VARIANTS[variant].get("personalise", "none"))
    return {"errors": errors, "seconds": round(done.seconds, 1)}


@lru_cache(maxsize=1)
def _trained(
    experiment: str,
    variant: str,
    seed: int,
    rounds: int,
    folder: str,
    known: tuple[tuple[float, ...], ...],
) -> Trained:
    own = EXPERIMENTS[experiment]
    matrix = square(known)
    pairs = {
        (NAMES[i], NAMES[j]): Distance(matrix[i, j], 0.0, 1)
        for i, j in combinations(range(len(matrix)), 2)
    }

    def measured_before(strategy: Strategy, initial: Model) -> FedCollabState:
        held = dict.fromkeys(NAMES[: len(matrix)], 1)
        state: FedCollabState = replace(
            strategy.algorithm.first(initial), distances=pairs, held_out=held
        )
        return state

    grouped = VARIANTS[variant]["strategy"] == "fedcollab"
    given = {"c": own.c} if grouped else {}
    return train(
        own.nodes(folder, seed),
        {**UNBOUNDED, **own.keys, **VARIANTS[variant], **given, "seed": seed, "rounds": rounds},
        evaluate=variant in ADAPTING,
        resume=measured_before if grouped else None,
    )


def _final_errors(done: Trained, personalise: str) -> list[float]:
    """Every silo's error in % on its own test data, of what it makes of its final model."""
    own = done.config.model_copy(update={"personalise": personalise})
    entries = {**train_config(own, run="bench"), wire.ROUND: own.rounds}
    messages = [
        Message(
            RecordDict(
                {
                    wire.ARRAYS: done.result.models[silo.name],
                    wire.CONFIG: ConfigRecord(dict(entries)),
                }
            ),
            dst_node_id=silo.node_id,
            message_type=wire.EVALUATE,
            group_id="last",
        )
        for silo in done.silos
    ]
    names = {silo.node_id: silo.name for silo in done.silos}
    found: dict[str, float] = {}
    for reply in done.grid.send_and_receive(messages):
        if reply.has_error():
            raise RuntimeError(reply.error.reason)
        found[names[reply.metadata.src_node_id]] = wire.read_metrics(reply.content)[wire.ERROR]
    return [round(100 * found[name], 4) for name in sorted(found)]


def cells_of(part: str, *, seeds: int, rounds: int, only: list[str]) -> Iterator[Entry]:
    """What a part measures: all seeds' structures, then the trainings, seed by seed."""
    if part in ("time", "scheme"):
        yield {"part": part}
    elif part == "known":
        cells = product(
            range(seeds), reversed(KNOWN_SIZES), KNOWN_KINDS, KNOWN_SHARES, KNOWN_BUDGETS
        )
        for seed, samples, kind, share, budget in cells:
            own = {"budget": budget, "kind": kind, "share": share, "samples": samples}
            yield {"part": part, **own, "seed": seed}
    else:
        for seed in range(seeds):
            yield {"part": "structure", "experiment": part, "seed": seed}
        count = rounds or EXPERIMENTS[part].rounds
        for seed, variant in product(range(seeds), [v for v in ORDER if v in only]):
            own = {"experiment": part, "variant": variant, "seed": seed, "rounds": count}
            yield {"part": "accuracy", **own}


def measure(folder: str, store: Store, *, part: str, **cell: Any) -> Entry:
    """One cell of the store."""
    if part == "accuracy":
        return measure_accuracy(**cell, folder=folder, store=store)
    ways: Mapping[str, Any] = {
        "structure": find_structure,
        "time": time_pairs,
        "scheme": compare_schemes,
        "known": estimate,
    }
    found: Entry = ways[part](folder=folder, **cell)
    return found


def main() -> None:
    """Measure what is missing, print."""
    given = read(
        STORE,
        __doc__,
        data=True,
        parts=(*EXPERIMENTS, "time", "scheme", "known"),
        chosen="fashion,fashion-drawn,time,scheme,known",
        rows=VARIANTS,
        seeds=5,
        rounds=0,
    )
    for part in given.parts:
        cells = cells_of(part, seeds=given.seeds, rounds=given.rounds, only=given.only)
        given.store.fill(cells, lambda **cell: measure(given.data, given.store, **cell))
        if part == "known":
            draw_known(given.store.entries, given.results / "fedcollab_known.png")
    if turned(given.store.entries):
        draw_distances(given.store.entries, given.results / "fedcollab_distances.png")
    print(given.store.text())


if __name__ == "__main__":
    main()
