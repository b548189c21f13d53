"""FedCollab's discriminators: what they find of known distances, and what they cost."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import Context, RecordDict
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

from benchmarks.kit import Entry, Node, nodes, numbered_groups, train
from benchmarks.papers.fedcollab.data import true_distances
from benchmarks.papers.fedcollab.experiments import EXPERIMENTS, MIN_AUTHORS_ROUNDS
from coterie.client.work.discriminators import (
    DiscriminatorPlan,
    count_hits,
    open_pairs,
    train_stack,
)
from coterie.client.work.session import session_of
from coterie.strategies import FedCollab
from coterie.strategies.fedcollab.discriminators import Discriminators
from coterie.tasks.base import Option

KNOWN_SIZES = (20, 100, 500, 2000)
KNOWN_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
KNOWN_KINDS = ("label", "concept", "feature")
KNOWN_BUDGETS = {
    "default": ("the default, at most 10 rounds", Discriminators()),
    "long": (
        "at most 100 rounds: discriminator-rounds=100, -patience=10, -samples=2000",
        Discriminators(rounds=100, patience=10, samples=2000),
    ),
}


@dataclass(frozen=True)
class Measured:
    """What the discriminators of a federation found and cost.

    Attributes:
        structure: the record's entry: distances, the bound beside its rivals, the interval of c.
        groups: by number of the silo.
        sizes: training samples of each silo.
        rounds, num_bytes: of the discriminators.
        seconds: wall.
    """

    structure: Mapping[str, Any]
    groups: list[list[int]]
    sizes: list[int]
    rounds: int
    num_bytes: int
    seconds: float

    @property
    def distances(self) -> np.ndarray:
        """(N, N)."""
        return np.array(self.structure["distances"])


def measure_distances(
    silos: Sequence[Node], options: Discriminators, *, seed: int, c: float = 10.0
) -> Measured:
    """A federation's discriminators, and the structure solved from them, in one short round."""
    sizes: dict[str, float] = {}
    done = train(
        silos,
        {"strategy": "fedcollab", "seed": seed, "rounds": 1, "local-steps": 1, "batch-size": 64},
        build=lambda config, common: FedCollab(c=c, discriminators=options, **common),
        evaluate=False,
        after_round=lambda number, state: sizes.update(state.members.sizes),
    )
    report = done.result.rounds[0]
    found = report.details["discriminators"]
    return Measured(
        structure=report.details["structure"],
        groups=numbered_groups(report.groups, sorted(sizes)),
        sizes=[int(size) for _, size in sorted(sizes.items())],
        rounds=found["rounds"],
        num_bytes=found["bytes"],
        seconds=round(sum(cost.seconds for cost in report.phases.values()), 2),
    )


def estimate(
    folder: str, *, budget: str, kind: str, share: float, samples: int, seed: int
) -> Entry:
    """The distance that is found between two silos whose distance is known."""
    data: dict[str, Option] = {"kind": kind}
    data |= {"share": share, "samples": samples, "data": folder, "seed": seed}
    silos = nodes("benchmarks.papers.fedcollab.data:Known", ("silo-0", "silo-1"), data)
    found = measure_distances(silos, KNOWN_BUDGETS[budget][1], seed=seed)
    return {"estimate": round(float(found.distances[0, 1]), 4)}


# --- what discriminators cost ---------------------------------------------------------------------


def time_pairs(folder: str) -> Entry:
    """One round of all pairs: one wide layer a silo beside a loop over (a tenth of) the pairs."""
    silos = EXPERIMENTS["fashion-drawn"].nodes(folder, 0)
    # Before and after, because the machine may have other work.
    before = wide_seconds(silos)
    loop = sequential_seconds(silos)
    return {"loop over pairs": loop, "wide layers": [before, wide_seconds(silos)]}


def compare_schemes(folder: str) -> Entry:
    """Ours beside the paper's scheme, against known distances."""
    rows = [0, 1, 5, 6, 10, 11, 15, 16]
    silos = EXPERIMENTS["fashion-drawn"].nodes(folder, 0)
    truth = true_distances()[np.ix_(rows, rows)]
    authors = Discriminators(
        rounds=MIN_AUTHORS_ROUNDS,
        min_rounds=MIN_AUTHORS_ROUNDS,
        patience=MIN_AUTHORS_ROUNDS,
        steps=1,
        samples=7,
        score="max",
    )
    entry = {}
    for name, options in (("ours", Discriminators()), ("the paper's", authors)):
        found = measure_distances([silos[i] for i in rows], options, seed=0)
        off = (found.distances - truth)[np.triu_indices(len(rows), 1)]
        entry[name] = {
            "rounds": found.rounds,
            "bytes": found.num_bytes,
            "seconds": found.seconds,
            "mean absolute error": float(np.abs(off).mean()),
            "mean error": float(off.mean()),
        }
    return entry


def _opened(silos: Sequence[Node]) -> list[Any]:
    return [session_of(Context(1, i, dict(node), RecordDict(), {})) for i, node in enumerate(silos)]


def wide_seconds(silos: Sequence[Node]) -> float:
    """Seconds of training, averaging and scoring all pairs, with one wide layer a silo."""
    sessions = _opened(silos)
    everybody = range(len(silos))
    plan = DiscriminatorPlan(20, 32, 0.01)
    started = time.perf_counter()
    stacks: list[Any] = []
    for i, session in enumerate(sessions):
        labels = [int(i < j) for j in everybody if j != i]
        pairs = open_pairs(session, None, labels, samples=500, seed=0)
        train_stack(pairs, plan, seed=0)
        stacks.append(pairs.arrays())
    for i in everybody:
        for j in everybody[i + 1 :]:
            for key in stacks[i]:
                mean = 0.5 * (stacks[i][key][j - 1] + stacks[j][key][i])
                stacks[i][key][j - 1] = stacks[j][key][i] = mean
    for session, stack in zip(sessions, stacks, strict=True):
        count_hits(open_pairs(session, stack, [1] * (len(silos) - 1), samples=500, seed=0))
    return time.perf_counter() - started


def sequential_seconds(silos: Sequence[Node], *, every: int = 10) -> float:
    """The same as plain PyTorch does it, one pair after another: every tenth pair, times ten."""
    sessions = _opened(silos)
    pools = [open_pairs(session, None, [], samples=500, seed=0).pool for session in sessions]
    first = open_pairs(sessions[0], None, [], samples=500, seed=0).module
    start = {k: v.clone() for k, v in first.state_dict().items()}
    pairs = [(i, j) for i in range(len(silos)) for j in range(i + 1, len(silos))][::every]
    started = time.perf_counter()
    for i, j in pairs:
        weights, after = start, []
        for own, label in ((i, 1.0), (j, 0.0)):
            first.load_state_dict(weights)
            optimiser = torch.optim.SGD(first.parameters(), lr=0.01)
            pool = pools[own]
            for _ in range(20):
                rows = torch.randperm(len(pool.x))[:32]
                logits = first(pool.x[rows], one_hot(pool.y[rows], 10).float())
                targets = torch.full_like(logits, label)
                loss = binary_cross_entropy_with_logits(logits, targets)
                optimiser.zero_grad()
                loss.backward()
                optimiser.step()
            after.append({k: v.clone() for k, v in first.state_dict().items()})
        first.load_state_dict({k: 0.5 * (after[0][k] + after[1][k]) for k in start})
        with torch.no_grad():
            for own in (i, j):
                pool = pools[own]
                first(pool.x_held, one_hot(pool.y_held, 10).float())
    return every * (time.perf_counter() - started)
