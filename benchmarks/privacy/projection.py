"""A secret projection from what the server knows of it: how many rounds it lasts.

    python -m benchmarks.privacy.projection [--rounds 800]

Of every round the server has the sum of a group's updates, and the sum of their sketches, which is
the sketch of that sum: known plaintext. Each of the sketch's numbers is a sum, with signs, of the
few coordinates in its bucket, so that orthogonal matching pursuit (Tropp and Gilbert 2007) finds
them from far fewer equations than there are coordinates. Updates of ten silos of digits (FedAvg,
one epoch a round) beside random ones, of which every round tells something new.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.kit import Entry, Store, page, read, select, table
from benchmarks.privacy.attacks import sketch_of
from benchmarks.privacy.inversion import LR, SHARE, digits, mean_of
from coterie.client.work.sgd import TrainPlan, seed_of, train
from coterie.client.work.weights import load_weights, read_weights
from coterie.tasks import load_task

SILOS, SAMPLES = 10, 60
ROUNDS = (50, 100, 200, 400, 800)
KINDS = ("updates", "random")
PICKS = 2 * SHARE
"""Coordinates looked for in a bucket: about twice as many as are in one."""

Matrix = NDArray[np.float64]


def sums(kind: str, rounds: int) -> Matrix:
    """What the server reads of every round, (rounds, P), each scaled to length 1."""
    task, images = load_task("digits"), digits()
    torch.manual_seed(0)
    net = task.model()
    model = read_weights(net)
    num = sum(array.size for array in model.values())
    if kind == "random":
        found = np.random.default_rng(0).normal(size=(rounds, num))
        return np.asarray(found / np.linalg.norm(found, axis=1, keepdims=True))
    parts = [images.take(rows) for rows in torch.arange(SILOS * SAMPLES).split(SAMPLES)]
    plan = TrainPlan(epochs=1, batch_size=16, lr=LR)
    found = np.empty((rounds, num))
    for number in range(rounds):
        ends = []
        for silo, part in enumerate(parts):
            load_weights(net, model)
            train(task, net, part, plan, seed=seed_of(0, f"silo-{silo}", number + 1, ""))
            ends.append(read_weights(net))
        after = mean_of(ends)
        found[number] = np.concatenate([np.subtract(after[n], model[n]).ravel() for n in model])
        model = after
    return np.asarray(found / np.linalg.norm(found, axis=1, keepdims=True))


def solve(seen: Matrix, sketches: Matrix) -> Matrix:
    """The projection, (P, k), as far as so many rounds tell, by orthogonal matching pursuit.

    Args:
        seen: sums of updates, (rounds, P).
        sketches: theirs, (rounds, k).
    """
    lengths = np.linalg.norm(seen, axis=0)
    moving = lengths > 1e-9 * lengths.max()
    atoms = np.where(moving, seen / np.where(moving, lengths, 1.0), 0.0)
    rest, size = sketches.copy(), sketches.shape[1]
    picked: list[list[int]] = [[] for _ in range(size)]
    found = np.zeros((seen.shape[1], size))
    for _ in range(min(PICKS, len(seen))):
        near = np.abs(atoms.T @ rest)
        for bucket, best in enumerate(near.argmax(axis=0)):
            if np.linalg.norm(rest[:, bucket]) < 1e-9 * np.linalg.norm(sketches[:, bucket]):
                continue  # all of it is explained
            picked[bucket].append(int(best))
            own = seen[:, picked[bucket]]
            weights, *_ = np.linalg.lstsq(own, sketches[:, bucket], rcond=None)
            rest[:, bucket] = sketches[:, bucket] - own @ weights
            found[:, bucket] = 0.0
            found[picked[bucket], bucket] = weights
    return found


def measure(kind: str, rounds: int) -> Entry:
    """Share of the coordinates, in %, of which bucket and sign are found."""
    seen = sums(kind, rounds)
    num = seen.shape[1]
    view = sketch_of(num, num // SHARE, seed=0)
    sketches = view(torch.from_numpy(seen)).numpy()
    true = view(torch.eye(num, dtype=torch.float64)).numpy()
    found = np.round(solve(seen, sketches))
    right = (found == true).all(axis=1)
    moving = np.abs(seen).max(axis=0) > 0
    return {"found": 100 * float(right[moving].mean()), "still": int((~moving).sum())}


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    rows = [
        [str(rounds), *(_cell(select(entries, kind=kind, rounds=rounds)) for kind in KINDS)]
        for rounds in ROUNDS
    ]
    return page(
        "## How long a secret projection lasts",
        "`make bench-privacy`: share of the 6,090 coordinates of which the server finds bucket and "
        "sign, after so many sums that it knows together with their sketch (609 numbers).",
        table(["sums known", "of updates in training", "of random vectors"], rows),
    )


def _cell(entries: Sequence[Entry]) -> str:
    return f"{entries[0]['found']:.0f} %" if entries else "–"


STORE = Store("projection", document, keys=("kind", "rounds"))


def main() -> None:
    """Measure, store, print."""
    given = read(STORE, __doc__, rounds=ROUNDS[-1])
    torch.set_num_threads(1)
    cells = (
        {"kind": kind, "rounds": rounds}
        for rounds in ROUNDS
        for kind in KINDS
        if rounds <= given.rounds
    )
    given.store.fill(cells, measure)
    print(given.store.text())


if __name__ == "__main__":
    main()
