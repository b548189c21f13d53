"""FedCollab's experiments with the paper's settings, ours beside the paper's figures.

    python -m benchmarks.fedcollab --data FOLDER [--parts fashion,time,…] [--seeds 5]

Every part is stored as soon as it is done; a second call adds what is missing. Writes
``results/fedcollab.json``, ``.md`` and a plot. In-process Grid, one thread.

fashion   FashionMNIST, label shift, the 20 silos of the paper's scripts: structure and accuracy
fashion-0       the same with the silos of data seed 0 and five seeds of training
fashion-drawn   the same with silos of our own drawing and pixels from -1 to 1
time      the discriminators' computing beside a sequential loop over pairs
scheme    the discriminators beside the paper's scheme, against known distances
known     estimated distances of silos whose total variation distance is known
cifar10   CIFAR-10, feature shift (rotations)
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

from benchmarks.hcct import Shared
from coterie import wire
from coterie.client.app import app
from coterie.server.runs.config import RunConfig
from coterie.server.runs.inprocess import InProcessGrid
from coterie.server.runs.metrics import ipr, rsd
from coterie.server.runs.run import build_strategy, initial_arrays, train_config
from coterie.strategies import FedCollab
from coterie.strategies.fedcollab.algorithm import FedCollabState
from coterie.strategies.fedcollab.discriminators import Discriminators
from coterie.strategies.partition import fedcollab
from coterie.strategies.partition.distance import Distance
from coterie.strategies.rounds.loop import Order, PhaseReport, Update
from coterie.strategies.rounds.roster import DescribedRoster, Silo
from coterie.tasks import Task, load_task
from coterie.tasks.base import Option, SiloData
from coterie.tasks.images.datasets import FashionMnist, finish, join
from coterie.tasks.images.image_files import read_images
from coterie.wire import Model

RESULTS = Path(__file__).parent / "results"
NAMES = tuple(f"silo-{i:02d}" for i in range(20))
PAPER_STRUCTURE = [list(range(5)), list(range(5, 10)), list(range(10, 20))]
GIVEN_C = 10.0
MIN_AUTHORS_ROUNDS = 101
"""Of the released code, for every pair."""

fashion_mnist = partial(Shared, "fashion-mnist/mlp-200")
cifar10 = partial(Shared, "cifar10/cnn-fedcollab")


# --- the paper's silos ----------------------------------------------------------------------------

OWN_SHARE, SMALL_SHARE, TEST_SHARE = 0.25, np.exp(-5.0), 1 / 7
"""Of a label that one group alone holds; of a small silo; of a silo's samples, for testing."""

HELD = np.zeros((4, 10))
"""The part of each label's samples that each group of five silos holds."""
HELD[:2, 1:4] = HELD[2:, 6:9] = 0.5
HELD[[0, 1, 2, 3], [0, 4, 5, 9]] = OWN_SHARE


def published_silos(labels: np.ndarray, seed: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Training and test samples of 20 silos, the very ones of the paper's scripts.

    They shuffle with numpy's legacy generator, label by label, and round shares to integers by
    adding 0.49; a small silo throws away what it does not train on.

    Args:
        labels: shape (n,), in [0, 10): FashionMNIST's training part, then its test part.
        seed: their data seed.

    Returns:
        For each silo the indices to train on and to test on.
    """
    rng = np.random.RandomState(seed)

    def shuffled(y: np.ndarray) -> list[np.ndarray]:
        found = [np.flatnonzero(y == label) for label in range(10)]
        for rows in found:
            rng.shuffle(rows)
        return found

    def cut(rows: list[np.ndarray], shares: np.ndarray) -> list[np.ndarray]:
        """``shares`` (parts, 10) of each label's rows, one part after the other."""
        counts = np.array([len(r) for r in rows])
        ends = np.vstack([np.zeros(10), np.cumsum(shares, axis=0) * counts + 0.49]).astype(int)
        return [
            np.concatenate([r[ends[i, k] : ends[i + 1, k]] for k, r in enumerate(rows)])
            for i in range(len(shares))
        ]

    silos = []
    for number, held in enumerate(cut(shuffled(labels), np.repeat(HELD, 5, axis=0) / 5)):
        rng.shuffle(held)
        used = (1 - TEST_SHARE) * (1.0 if number < 10 else SMALL_SHARE)
        parts = np.array([used, 1 - TEST_SHARE - used, TEST_SHARE])
        kept, _, test = cut(shuffled(labels[held]), np.tile(parts[:, None], (1, 10)))
        silos.append((held[kept], held[test]))
    return silos


class PublishedFashion(Shared):
    """FashionMNIST of the paper's silos. Options: ``data``, ``split-seed``, ``silo``."""

    def __init__(self) -> None:
        super().__init__("fashion-mnist/mlp-200")

    def load(self, options: Mapping[str, Option]) -> SiloData:
        """See ``Task``."""
        silos = _published_fashion(str(options["data"]), int(options["split-seed"]))
        return silos[int(options["silo"])]


@lru_cache(maxsize=1)
def _published_fashion(folder: str, seed: int) -> list[SiloData]:
    raw = read_images("fashion-mnist", folder, FashionMnist.files)
    pool = join(raw.train, raw.test)
    return [
        finish(
            (pool.x[train], pool.y[train]),
            (pool.x[test], pool.y[test]),
            scale=FashionMnist.standard,
            num_classes=10,
        )
        for train, test in published_silos(pool.y, seed)
    ]


# --- accuracy -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Experiment:
    """One of the paper's data sets.

    Attributes:
        title, notes: for the table.
        task: function of this module that makes the task.
        data: the task's options without folder, silo and seed.
        keys: of the run's configuration.
        rounds: of the paper.
        paper: variant → accuracy, IPR, RSD in %; the last two NaN for Local.
        discriminators: how they are trained.
    """

    title: str
    task: str
    data: Mapping[str, Option]
    keys: Mapping[str, Any]
    rounds: int
    paper: Mapping[str, tuple[float, float, float]]
    notes: str
    discriminators: Discriminators = field(default_factory=Discriminators)


LOCAL, GLOBAL = "Local", "FedAvg"
COLLAB, TUNED, DITTO = "FedAvg + FedCollab", "Finetune + FedCollab", "Ditto + FedCollab"
VARIANTS: Mapping[str, Mapping[str, Any]] = {
    LOCAL: {"strategy": "independent"},
    GLOBAL: {"strategy": "fedavg"},
    COLLAB: {"strategy": "fedcollab", "c": GIVEN_C},
    TUNED: {"strategy": "fedcollab", "c": GIVEN_C, "personalise": "finetune"},
    DITTO: {"strategy": "fedcollab", "c": GIVEN_C, "personalise": "ditto"},
}

FASHION: Mapping[str, Any] = {
    "keys": {"lr": 0.1, "lr-decay": 1.0, "batch-size": 32, "local-epochs": 1},
    "rounds": 200,
    "paper": {
        LOCAL: (86.05, np.nan, np.nan),
        GLOBAL: (46.64, 46, 41.03),
        COLLAB: (92.45, 100, 5.99),
        TUNED: (92.57, 99, 6.07),
        DITTO: (92.55, 99, 6.11),
    },
}

EXPERIMENTS: dict[str, Experiment] = {
    "fashion": Experiment(
        title="FashionMNIST, label shift",
        task="PublishedFashion",
        data={"silos": 20},
        notes="The samples of every silo are those of the paper's scripts with its data seed, "
        "which is ours: training and test images pooled, a seventh of a silo's for testing, pixels "
        "standardised. Silos 0–9 have 2,100 training samples, 10–19 have 14; 350 test samples "
        "each. MLP 784-200-200-10, plain SGD, learning rate 0.1, batch 32, one epoch a round.",
        **FASHION,
    ),
    "fashion-0": Experiment(
        title="FashionMNIST, label shift, one set of silos",
        task="PublishedFashion",
        data={"silos": 20, "split-seed": 0},
        notes="As above, but always with data seed 0, whose results the paper's code lists: Local "
        "85.80, FedAvg 46.74, FedCollab 92.47 with RSD 6.26.",
        **FASHION,
    ),
    "fashion-drawn": Experiment(
        title="FashionMNIST, label shift, other silos and pixels",
        task="fashion_mnist",
        data={"split": "label-groups", "silos": 20},
        notes="As above, but silos drawn by `split=label-groups`, tested on images of the data "
        "set's test part, and pixels from −1 to 1.",
        **FASHION,
    ),
    "cifar10": Experiment(
        title="CIFAR-10, feature shift",
        task="cifar10",
        data={
            "split": "sizes",
            "silos": 20,
            "split-sizes": "2450x10,340x10",
            "split-rotations": "-25,25,155,205",
        },
        keys={
            "lr": 0.05,
            "lr-decay": 1.0,
            "batch-size": 32,
            "local-epochs": 1,
            "precision": "bfloat16",
        },
        rounds=500,
        paper={
            LOCAL: (38.65, np.nan, np.nan),
            GLOBAL: (44.31, 86, 4.62),
            COLLAB: (52.61, 100, 3.30),
            TUNED: (51.53, 100, 2.92),
            DITTO: (50.97, 99, 3.38),
        },
        notes="A subset of CIFAR-10 with 28,000 training images: large silos have 2,450 (the "
        "paper's 2,500), small ones 340. The discriminator sees the image averaged down to 16×16 "
        "pixels and needs no pre-trained network; the paper's has an ImageNet ResNet-18 in front. "
        "Learning rate 0.05 in place of the paper's 0.01, so that a fifth of its rounds goes as "
        "far; bfloat16 autocast, for time. Up to 40 discriminator rounds on up to 2,000 samples: "
        "within 10 rounds upside-down photographs seem more alike than they are.",
        discriminators=Discriminators(rounds=40, patience=5, samples=2000),
    ),
}


class Given(FedCollab):
    """FedCollab with distances that were measured before, to spare a second measurement."""

    known: Mapping[str, Any]

    def first(self, initial: Model) -> FedCollabState:
        """See ``GroupStrategy``."""
        state = super().first(initial)
        keys = ("compared", "distances", "standard-errors")
        names, matrix, errors = (self.known[key] for key in keys)
        pairs = [(i, j) for i in range(len(names)) for j in range(i + 1, len(names))]
        found = {(names[i], names[j]): Distance(matrix[i][j], errors[i][j], 1) for i, j in pairs}
        held = dict.fromkeys(names, 1)
        return replace(state, distances=found, held_out=held)


def node_configs(task: str, data: Mapping[str, Option], folder: str, seed: int) -> list[Any]:
    """The silos of a split."""
    shared = {f"data.{k}": v for k, v in {"split-seed": seed, **data, "data": folder}.items()}
    name = f"benchmarks.fedcollab:{task}"
    return [
        {"name": silo, "task": name, "threads": 1, "device": "cpu", **shared, "data.silo": i}
        for i, silo in enumerate(NAMES[: int(data["silos"])])
    ]


def train(
    experiment: Experiment,
    variants: Sequence[str],
    *,
    seed: int,
    rounds: int,
    folder: str,
    known: Mapping[str, Any] | None,
) -> list[dict[str, Any]]:
    """Train once; evaluate as every one of ``variants``, which differ in that alone."""
    nodes = node_configs(experiment.task, experiment.data, folder, seed)
    grid = InProcessGrid(app, nodes)
    keys = {**experiment.keys, **VARIANTS[variants[0]], "task": nodes[0]["task"], "seed": seed}
    config = RunConfig.read({**keys, "rounds": rounds, "min-silos": len(nodes)})
    roster = DescribedRoster(config.task, len(nodes))
    strategy = build_strategy(
        config, run=f"{variants[0]}-{seed}", roster=roster, on_round=lambda report: None
    )
    if isinstance(strategy, FedCollab):
        strategy.__class__ = Given
        strategy.known = known  # type: ignore[attr-defined]
    strategy.evaluate = False
    started = time.monotonic()
    here = roster.present(grid, round=1)
    initial = initial_arrays(grid, here[0], config)
    result = strategy.start(grid=grid, initial_arrays=initial, num_rounds=rounds)
    seconds = time.monotonic() - started
    stored = {
        "rounds": rounds,
        "seed": seed,
        "groups": [[NAMES.index(n) for n in group] for group in sorted(result.groups[rounds])],
        "seconds": round(seconds, 1),
    }
    return [
        {"variant": variant}
        | stored
        | {
            "errors": _final_errors(
                grid, here, result.models, variant, config, f"{variants[0]}-{seed}"
            )
        }
        for variant in variants
    ]


def _final_errors(
    grid: InProcessGrid,
    silos: Sequence[Silo],
    models: Mapping[str, ArrayRecord],
    variant: str,
    config: RunConfig,
    run: str,
) -> list[float]:
    """Every silo's error in % on its own test data, of what it makes of its final model."""
    own = config.model_copy(update={"personalise": VARIANTS[variant].get("personalise", "none")})
    entries = {**train_config(own, run=run), wire.ROUND: config.rounds}
    messages = [
        Message(
            RecordDict({wire.ARRAYS: models[silo.name], wire.CONFIG: ConfigRecord(dict(entries))}),
            dst_node_id=silo.node_id,
            message_type=wire.EVALUATE,
            group_id="last",
        )
        for silo in silos
    ]
    names = {silo.node_id: silo.name for silo in silos}
    found: dict[str, float] = {}
    for reply in grid.send_and_receive(messages):
        if reply.has_error():
            raise RuntimeError(reply.error.reason)
        found[names[reply.metadata.src_node_id]] = wire.read_metrics(reply.content)[wire.ERROR]
    return [round(100 * found[name], 4) for name in sorted(found)]


def run_experiment(
    name: str, *, seeds: int, rounds: int, variants: Sequence[str], folder: str, store: Store
) -> None:
    """What is not stored yet: all seeds' structures, then the trainings, seed by seed."""
    experiment = EXPERIMENTS[name]
    for seed in range(seeds):
        if not store.of("structure", experiment=name, seed=seed):
            print(f"{name}, seed {seed}: discriminators", flush=True)
            store.add(
                {"part": "structure", "experiment": name} | find_structure(experiment, seed, folder)
            )
    for seed in range(seeds):
        have = {
            run["variant"]: run
            for run in store.of("accuracy", experiment=name, seed=seed, rounds=rounds)
        }
        for group in ((COLLAB, TUNED), (LOCAL,), (GLOBAL,), (DITTO,)):
            wanted = [v for v in group if v in variants and v not in have]
            if not wanted:
                continue
            (found,) = store.of("structure", experiment=name, seed=seed)
            print(f"{name}, seed {seed}: {', '.join(wanted)}", flush=True)
            runs = train(
                experiment,
                wanted,
                seed=seed,
                rounds=rounds,
                folder=folder,
                known=found["structure"],
            )
            for run in runs:
                store.add({"part": "accuracy", "experiment": name} | run)
                print(f"  {np.mean(run['errors']):.2f} % error, {run['seconds']:.0f} s", flush=True)


def find_structure(experiment: Experiment, seed: int, folder: str) -> dict[str, Any]:
    """Discriminators and structure, without training."""
    nodes = node_configs(experiment.task, experiment.data, folder, seed)
    details, phases, sizes = measured(
        nodes, experiment.discriminators, seed=seed, task=nodes[0]["task"]
    )
    names = details["structure"]["compared"]
    return {
        "seed": seed,
        "groups": [[names.index(n) for n in group] for group in details["planned"]],
        "sizes": sizes,
        "structure": details["structure"],
        "discriminators": details["discriminators"],
        "phases": {kind: round(cost.seconds, 2) for kind, cost in phases.items()},
    }


# --- silos with a known distance ------------------------------------------------------------------


class Known(Task):
    """Two FashionMNIST silos of one size whose total variation distance is known.

    Options:
        kind: ``label``: the first has labels 0–4, of the second a share has labels 5–9.
            ``concept``: a share of the second's labels is moved on by one. ``feature``: a share of
            the second's images is upside down (an image tells which way up it is: nearly exact).
        share: the distance.
        samples, seed, silo: how many, and which of the two (0 or 1).
        data: the folder.
    """

    name = "known"
    num_classes = 10

    def model(self) -> torch.nn.Module:
        """A small one; its training is of no interest here."""
        return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(784, 10))

    def load(self, options: Mapping[str, Option]) -> SiloData:
        """See ``Task``."""
        x, y = _fashion(str(options["data"]))
        silo, count = int(options["silo"]), int(options["samples"])
        rng = np.random.default_rng([int(options["seed"]), silo])
        changed = rng.random(count) < float(options["share"]) * silo
        kind = options["kind"]
        low = np.flatnonzero(y < 5) if kind == "label" else np.arange(len(y))
        high = np.flatnonzero(y >= 5) if kind == "label" else low
        # The two silos draw from different halves, so that no image is in both.
        rows = np.where(changed, _half(high, rng, silo, count), _half(low, rng, silo, count))
        images, labels = x[rows].copy(), y[rows].copy()
        if kind == "concept":
            labels[changed] = (labels[changed] + 1) % 10
        if kind == "feature":
            images[changed] = images[changed][:, :, ::-1, ::-1]
        return SiloData(images, labels, images[:1], labels[:1], 10)


def _half(rows: np.ndarray, rng: np.random.Generator, silo: int, count: int) -> np.ndarray:
    return rng.permutation(rows[silo::2])[:count]


@lru_cache(maxsize=1)
def _fashion(folder: str) -> tuple[np.ndarray, np.ndarray]:
    data = load_task("fashion-mnist").load({"data": folder})
    return data.x_train, data.y_train


known = Known
KNOWN_SIZES = (20, 100, 500, 2000)
KNOWN_SHARES = (0.0, 0.25, 0.5, 0.75, 1.0)
KNOWN_KINDS = ("label", "concept", "feature")
KNOWN_BUDGETS = {
    "known": ("the default, at most 10 rounds", Discriminators()),
    "known, long": (
        "at most 100 rounds: discriminator-rounds=100, -patience=10, -samples=2000",
        Discriminators(rounds=100, patience=10, samples=2000),
    ),
}


def measured(
    nodes: Sequence[Mapping[str, Any]], options: Discriminators, *, seed: int, task: str
) -> tuple[dict[str, Any], Mapping[str, PhaseReport], list[int]]:
    """What the discriminators of a federation find and cost, and the silos' sizes; no training."""
    grid = InProcessGrid(app, list(nodes))
    roster = DescribedRoster(task, len(nodes))
    strategy = OnlyDistances(
        discriminators=options, roster=roster, train_config={wire.TASK: task, wire.SEED: seed}
    )
    strategy.evaluate = False
    strategy.start(grid=grid, initial_arrays=ArrayRecord(), num_rounds=1)
    return dict(strategy.found), strategy.phases, strategy.silo_sizes


class OnlyDistances(FedCollab):
    """Measures, and trains nothing."""

    found: Mapping[str, Any]
    phases: Mapping[str, PhaseReport]
    silo_sizes: list[int]

    def prepare(
        self, state: FedCollabState, silos: Sequence[Silo], *, round: int
    ) -> Generator[Sequence[Order], list[Update], FedCollabState]:
        """See ``GroupStrategy``."""
        state = yield from super().prepare(state, silos, round=round)
        self.found = {**self.details(state), "planned": [list(group) for group in state.planned]}
        self.silo_sizes = [int(size) for _, size in sorted(state.members.sizes.items())]
        return state

    def orders(
        self, state: FedCollabState, silos: Sequence[Silo], *, round: int
    ) -> tuple[FedCollabState, list[Order]]:
        """Nobody trains."""
        self.phases = self._report.phases
        return state, []


def run_known(*, seeds: int, folder: str, store: Store) -> None:
    """Estimates of known distances, by kind, distance and number of samples."""
    cells = product(range(seeds), reversed(KNOWN_SIZES), KNOWN_KINDS, KNOWN_SHARES, KNOWN_BUDGETS)
    for seed, size, kind, share, part in cells:
        key = {"kind": kind, "share": share, "samples": size}
        if not store.of(part, seed=seed, **key):
            found = _estimate(key, seed, folder, KNOWN_BUDGETS[part][1])
            store.add({"part": part, "seed": seed, **key, "estimate": found})
            print(f"{part}: {kind} {share} of {size}: {found:.2f}", flush=True)
    plot_known(store)


def _estimate(key: Mapping[str, Any], seed: int, folder: str, options: Discriminators) -> float:
    task = "benchmarks.fedcollab:known"
    shared = {f"data.{k}": v for k, v in {**key, "data": folder, "seed": seed}.items()}
    nodes = [
        {"name": f"silo-{i}", "task": task, "threads": 1, "device": "cpu", **shared, "data.silo": i}
        for i in (0, 1)
    ]
    details, _, _ = measured(nodes, options, seed=seed, task=task)
    return round(float(details["structure"]["distances"][0][1]), 4)


# --- what discriminators cost ---------------------------------------------------------------------


def true_distances() -> np.ndarray:
    """Total variation distances of the FashionMNIST silos' labels, (20, 20)."""
    shares = np.zeros((4, 10))
    shares[0, :4], shares[1, 1:5] = [1, 2, 2, 2], [2, 2, 2, 1]
    shares[2, 5:9], shares[3, 6:] = [1, 2, 2, 2], [2, 2, 2, 1]
    each = np.repeat(shares / 7, 5, axis=0)
    return np.asarray(np.abs(each[:, None] - each).sum(axis=2) / 2)


def run_time(*, folder: str, store: Store) -> None:
    """One round of all pairs: one wide layer a silo beside a loop over (a tenth of) the pairs."""
    experiment = EXPERIMENTS["fashion-drawn"]
    nodes = node_configs(experiment.task, experiment.data, folder, 0)
    if not store.of("time"):
        # Before and after, because the machine may have other work.
        before = wide_seconds(nodes)
        loop = sequential_seconds(nodes)
        after = wide_seconds(nodes)
        store.add({"part": "time", "loop over pairs": loop, "wide layers": [before, after]})


def run_scheme(*, folder: str, store: Store) -> None:
    """Ours beside the paper's scheme, against known distances."""
    experiment = EXPERIMENTS["fashion-drawn"]
    nodes = node_configs(experiment.task, experiment.data, folder, 0)
    task = nodes[0]["task"]
    if store.of("scheme"):
        return
    rows = [0, 1, 5, 6, 10, 11, 15, 16]
    few = [nodes[i] for i in rows]
    truth = true_distances()[np.ix_(rows, rows)]
    authors = Discriminators(
        rounds=MIN_AUTHORS_ROUNDS,
        min_rounds=MIN_AUTHORS_ROUNDS,
        patience=MIN_AUTHORS_ROUNDS,
        steps=1,
        samples=7,
        score="max",
    )
    entry: dict[str, Any] = {"part": "scheme"}
    for name, options in (("ours", Discriminators()), ("the paper's", authors)):
        details, phases, _ = measured(few, options, seed=0, task=task)
        off = np.array(details["structure"]["distances"]) - truth
        pairs = np.triu_indices(len(few), 1)
        entry[name] = {
            "rounds": details["discriminators"]["rounds"],
            "bytes": details["discriminators"]["bytes"],
            "seconds": sum(cost.seconds for cost in phases.values()),
            "mean absolute error": float(np.abs(off[pairs]).mean()),
            "mean error": float(off[pairs].mean()),
        }
    store.add(entry)


def _opened(nodes: Sequence[Mapping[str, Any]]) -> list[Any]:
    from flwr.app import Context

    from coterie.client.work.workbench import workbench_of

    return [
        workbench_of(Context(1, i, dict(node), RecordDict(), {})) for i, node in enumerate(nodes)
    ]


def wide_seconds(nodes: Sequence[Mapping[str, Any]]) -> float:
    """Seconds of training, averaging and scoring all pairs, with one wide layer a silo."""
    from coterie.client.work.discriminators import (
        DiscriminatorPlan,
        count_hits,
        open_pairs,
        train_stack,
    )

    benches = _opened(nodes)
    everybody = range(len(nodes))
    plan = DiscriminatorPlan(20, 32, 0.01)
    started = time.perf_counter()
    stacks: list[Any] = []
    for i, bench in enumerate(benches):
        labels = [int(i < j) for j in everybody if j != i]
        pairs = open_pairs(bench, None, labels, samples=500, seed=0)
        train_stack(pairs, plan, seed=0)
        stacks.append(pairs.arrays())
    for i in everybody:
        for j in everybody[i + 1 :]:
            for key in stacks[i]:
                mean = 0.5 * (stacks[i][key][j - 1] + stacks[j][key][i])
                stacks[i][key][j - 1] = stacks[j][key][i] = mean
    for bench, stack in zip(benches, stacks, strict=True):
        count_hits(open_pairs(bench, stack, [1] * (len(nodes) - 1), samples=500, seed=0))
    return time.perf_counter() - started


def sequential_seconds(nodes: Sequence[Mapping[str, Any]], *, every: int = 10) -> float:
    """The same as plain PyTorch does it, one pair after another: every tenth pair, times ten."""
    from coterie.client.work.discriminators import open_pairs

    benches = _opened(nodes)
    pools = [open_pairs(bench, None, [], samples=500, seed=0).pool for bench in benches]
    first = open_pairs(benches[0], None, [], samples=500, seed=0).module
    start = {k: v.clone() for k, v in first.state_dict().items()}
    pairs = [(i, j) for i in range(len(nodes)) for j in range(i + 1, len(nodes))][::every]
    started = time.perf_counter()
    for i, j in pairs:
        weights, after = start, []
        for silo, label in ((i, 1.0), (j, 0.0)):
            first.load_state_dict(weights)
            optimiser = torch.optim.SGD(first.parameters(), lr=0.01)
            pool = pools[silo]
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
            for silo in (i, j):
                pool = pools[silo]
                first(pool.x_held, one_hot(pool.y_held, 10).float())
    return every * (time.perf_counter() - started)


# --- what is stored, what is shown ----------------------------------------------------------------


@dataclass
class Store:
    """Everything so far, written after each piece."""

    folder: Path
    entries: list[dict[str, Any]] = field(default_factory=list)

    def __post_init__(self) -> None:
        path = self.folder / "fedcollab.json"
        if path.exists():
            self.entries = json.loads(path.read_text())["entries"]

    def of(self, part: str, **keys: Any) -> list[dict[str, Any]]:
        """Stored pieces of a part with these values."""
        return [
            e
            for e in self.entries
            if e["part"] == part and all(e.get(k) == v for k, v in keys.items())
        ]

    def add(self, entry: dict[str, Any]) -> None:
        """Keep a piece and write the files."""
        self.entries.append(entry)
        self.folder.mkdir(exist_ok=True)
        text = ",\n".join(json.dumps(e) for e in self.entries)
        (self.folder / "fedcollab.json").write_text(f'{{"entries": [\n{text}\n]}}\n')
        (self.folder / "fedcollab.md").write_text(document(self))


def document(store: Store) -> str:
    """Everything stored, as Markdown."""
    lines = [
        "# FedCollab's experiments",
        "",
        "Made by `python -m benchmarks.fedcollab --data FOLDER`. Silos are numbered "
        "from 0. Seconds are wall clock of a machine that may have had other work.",
        "",
    ]
    for name in EXPERIMENTS:
        lines += _accuracy_section(name, store)
    lines += _cost_section(store)
    lines += _known_section(store)
    return "\n".join(lines)


def _accuracy_section(name: str, store: Store) -> list[str]:
    experiment = EXPERIMENTS[name]
    runs = store.of("accuracy", experiment=name)
    lines: list[str] = []
    for rounds in sorted({run["rounds"] for run in runs}, reverse=True):
        made = [run for run in runs if run["rounds"] == rounds]
        short = "" if rounds == experiment.rounds else f" (**the paper's: {experiment.rounds}**)"
        lines += [
            f"## {experiment.title}",
            "",
            f"{experiment.notes} {rounds} rounds{short}. c = {GIVEN_C:g}. Accuracy: plain mean "
            "over silos of the last round's, on each silo's own test data; IPR: share of silos "
            "better than Local; RSD: standard deviation of the gain over Local. All in %, mean ± "
            "standard deviation over seeds.",
            "",
            "| | accuracy | the paper's | IPR | the paper's | RSD | the paper's | seeds | s |",
            "|---|---|---|---|---|---|---|---|---|",
        ]
        local = {run["seed"]: run for run in made if run["variant"] == LOCAL}
        for variant in VARIANTS:
            mine = [run for run in made if run["variant"] == variant]
            if mine:
                lines.append(_accuracy_row(variant, mine, local, experiment.paper[variant]))
        lines.append("")
    return lines + _structures(name, store)


def _accuracy_row(
    variant: str,
    runs: Sequence[Mapping[str, Any]],
    local: Mapping[int, Mapping[str, Any]],
    paper: tuple[float, float, float],
) -> str:
    figures = [_figures(run, local.get(run["seed"])) for run in runs]
    ours = [_plus_minus([f[i] for f in figures]) for i in range(3)]
    published = [f"{value:.2f}" if value == value else "" for value in paper]
    pairs = [cell for both in zip(ours, published, strict=True) for cell in both]
    seeds = ", ".join(str(run["seed"]) for run in runs)
    seconds = f"{np.mean([run['seconds'] for run in runs]):.0f}"
    return "| " + " | ".join([variant, *pairs, seeds, seconds]) + " |"


def _figures(run: Mapping[str, Any], local: Mapping[str, Any] | None) -> tuple[float, float, float]:
    """Accuracy, IPR and RSD in %."""
    errors = {str(i): e / 100 for i, e in enumerate(run["errors"])}
    accuracy = 100 - float(np.mean(run["errors"]))
    if local is None or run["variant"] == LOCAL:
        return accuracy, float("nan"), float("nan")
    alone = {str(i): e / 100 for i, e in enumerate(local["errors"])}
    return accuracy, 100 * ipr(errors, alone), 100 * rsd(errors, alone)


def _plus_minus(values: Sequence[float]) -> str:
    found = [value for value in values if value == value]
    if not found:
        return ""
    if len(found) == 1:
        return f"{found[0]:.2f}"
    return f"{np.mean(found):.2f} ± {np.std(found, ddof=1):.2f}"


def _structures(name: str, store: Store) -> list[str]:
    """Seed by seed: structure, bound, interval of c, rounds and bytes of the discriminators."""
    found = store.of("structure", experiment=name)
    if not found:
        return []
    lines = [
        f"### {EXPERIMENTS[name].title}: the structure, seed by seed",
        "",
        "| seed | structure | the paper's | bound: chosen, second best | c from – to | c = auto | "
        "rounds | GB | s |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for run in found:
        structure, phase = run["structure"], run["discriminators"]
        low, high = structure.get("c-interval", (float("nan"), float("nan")))
        cells = [
            str(run["seed"]),
            _groups_text(run["groups"]),
            "yes" if run["groups"] == PAPER_STRUCTURE else "no",
            f"{structure['bound']['chosen']:.4g}, {structure['bound']['second-best']:.4g}",
            f"{low:.3g} – {'∞' if high is None else f'{high:.3g}'}",
            _auto_text(run),
            str(phase["rounds"]),
            f"{phase['bytes'] / 1e9:.2f}",
            f"{sum(run['phases'].values()):.0f}",
        ]
        lines.append("| " + " | ".join(cells) + " |")
    per_seed = store.of("accuracy", experiment=name, variant=COLLAB)
    if per_seed:
        lines += ["", f"{COLLAB}, seed by seed (accuracy, IPR, RSD): "]
        for run in per_seed:
            local = store.of(
                "accuracy", experiment=name, variant=LOCAL, seed=run["seed"], rounds=run["rounds"]
            )
            figures = _figures(run, local[0] if local else None)
            lines.append(
                f"- seed {run['seed']}, {run['rounds']} rounds: "
                + ", ".join(f"{v:.2f}" for v in figures if v == v)
            )
    return [*lines, ""]


def _auto_text(run: Mapping[str, Any]) -> str:
    """c = auto on the same distances, and whether it gives the paper's structure."""
    sizes = np.array(run["sizes"], dtype=float)
    held = sizes - np.minimum(sizes // 2, 500)
    noise = np.sqrt(0.25 / held[:, None] + 0.25 / held)
    c = fedcollab.auto_c(sizes, noise)
    groups = fedcollab.solve(
        run["structure"]["distances"], sizes, c=c, rng=np.random.default_rng(0)
    ).groups
    same = "the paper's" if groups == PAPER_STRUCTURE else _groups_text(groups)
    return f"{c:.3g}: {same}"


def _groups_text(groups: Sequence[Sequence[int]]) -> str:
    parts = []
    for group in groups:
        whole = list(group) == list(range(group[0], group[-1] + 1)) and len(group) > 1
        parts.append(
            f"{{{group[0]}–{group[-1]}}}" if whole else "{" + ", ".join(map(str, group)) + "}"
        )
    return " ".join(parts)


def _cost_section(store: Store) -> list[str]:
    lines = ["## What the discriminators cost (FashionMNIST, 20 silos, 190 pairs)", ""]
    found = store.of("structure", experiment="fashion")
    if found:
        bytes_each = 4 * (784 * 200 + 200 + 10 * 200 + 200 + 200 + 1)
        authors = MIN_AUTHORS_ROUNDS * 190 * 4 * bytes_each
        moved = float(np.mean([run["discriminators"]["bytes"] for run in found]))
        rounds = ", ".join(str(run["discriminators"]["rounds"]) for run in found)
        lines += [
            "| | ours | the paper's, at the least | ours / the paper's |",
            "|---|---|---|---|",
            f"| federated rounds, by seed | {rounds} | {MIN_AUTHORS_ROUNDS} a pair, in turn | |",
            f"| arrays on the wire, GB | {moved / 1e9:.2f} | {authors / 1e9:.1f} | "
            f"{100 * moved / authors:.1f} % |",
            "",
        ]
    for entry in store.of("time"):
        loop, wide = entry["loop over pairs"], entry["wide layers"]
        ratios = " and ".join(f"{loop / one:.1f}" for one in wide)
        lines += [
            "Computing one round of 20 steps of all pairs, averaging and scoring included, one "
            f"thread: a loop over pairs {loop:.1f} s (every tenth pair, times ten); one wide "
            f"layer a silo, before and after it, {wide[0]:.1f} and {wide[1]:.1f} s: {ratios} "
            "times faster.",
            "",
        ]
    for entry in store.of("scheme"):
        lines += [
            "Two silos of each kind (8 of the 20, 28 pairs), against the known total variation "
            "distance. *The paper's*: 101 rounds of one mini-batch, 7 training samples a silo "
            "(half of the smallest), best of all evaluations; here all pairs at once.",
            "",
            "| | rounds | MB | s | mean absolute error | mean error |",
            "|---|---|---|---|---|---|",
        ]
        for name in ("ours", "the paper's"):
            one = entry[name]
            lines.append(
                f"| {name} | {one['rounds']} | {one['bytes'] / 1e6:.0f} | {one['seconds']:.0f} | "
                f"{one['mean absolute error']:.3f} | {one['mean error']:+.3f} |"
            )
        lines.append("")
    return lines


def _known_section(store: Store) -> list[str]:
    entries = store.of("known")
    if not entries:
        return []
    sizes = sorted({e["samples"] for e in entries})
    lines = [
        "## Estimates of known distances",
        "",
        "Two FashionMNIST silos; mean ± standard deviation of the estimates over seeds, by the "
        "number of samples of each silo. *label*: a share of the second silo's samples has "
        "labels that the first has none of; *concept*: other labels for the same images; "
        "*feature*: images upside down. The share is the total variation distance (of *concept* "
        "and *feature* nearly: an image tells its class and which way up it is, but not always).",
        "",
    ]
    for part, (budget, _) in KNOWN_BUDGETS.items():
        if store.of(part):
            lines += [f"Budget: {budget}.", "", *_known_table(store, part, sizes), ""]
    return [*lines, "![estimates of known distances](fedcollab_known.png)", ""]


def _known_table(store: Store, part: str, sizes: Sequence[int]) -> list[str]:
    lines = [
        "| kind | distance | " + " | ".join(f"{size} samples" for size in sizes) + " |",
        "|---" * (2 + len(sizes)) + "|",
    ]
    for kind in KNOWN_KINDS:
        for share in KNOWN_SHARES:
            cells = []
            for size in sizes:
                mine = store.of(part, kind=kind, share=share, samples=size)
                cells.append(_plus_minus([e["estimate"] for e in mine]))
            if any(cells):
                lines.append(f"| {kind} | {share:g} | " + " | ".join(cells) + " |")
    return lines


def plot_known(store: Store) -> None:
    """Estimates over known distances: a panel per kind and budget, a line per number of samples."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    parts = [part for part in KNOWN_BUDGETS if store.of(part)]
    figure, rows = pyplot.subplots(
        len(parts), len(KNOWN_KINDS), figsize=(10, 3.4 * len(parts)), sharey=True, squeeze=False
    )
    for part, panels in zip(parts, rows, strict=True):
        entries = store.of(part)
        for panel, kind in zip(panels, KNOWN_KINDS, strict=True):
            panel.plot([0, 1], [0, 1], color="black", linewidth=1, label="known")
            for size in sorted({entry["samples"] for entry in entries}):
                found = {
                    share: [e["estimate"] for e in entries if _cell(e) == (kind, size, share)]
                    for share in KNOWN_SHARES
                }
                means = {share: float(np.mean(values)) for share, values in found.items() if values}
                panel.plot(
                    *zip(*means.items(), strict=True), marker="o", markersize=3,
                    label=f"{size} samples",
                )  # fmt: skip
            panel.set_title(f"{kind}, {'10' if part == 'known' else '100'} rounds")
            panel.set_xlabel("total variation distance")
        panels[0].set_ylabel("estimate")
    rows[0][0].legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(store.folder / "fedcollab_known.png", dpi=110)
    pyplot.close(figure)


def _cell(entry: Mapping[str, Any]) -> tuple[str, int, float]:
    return entry["kind"], entry["samples"], entry["share"]


# --- the command ----------------------------------------------------------------------------------


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder with the data sets")
    parser.add_argument("--parts", default="fashion,fashion-drawn,time,scheme,known")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=0, help="0 = the paper's")
    parser.add_argument("--variants", default=";".join(VARIANTS), help="separated by ';'")
    given = parser.parse_args()
    logging.getLogger("coterie").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    store = Store(RESULTS)
    parts: Mapping[str, Callable[[], None]] = {
        "time": partial(run_time, folder=given.data, store=store),
        "scheme": partial(run_scheme, folder=given.data, store=store),
        "known": partial(run_known, seeds=given.seeds, folder=given.data, store=store),
        **{
            name: partial(
                run_experiment,
                name,
                seeds=given.seeds,
                rounds=given.rounds or EXPERIMENTS[name].rounds,
                variants=given.variants.split(";"),
                folder=given.data,
                store=store,
            )
            for name in EXPERIMENTS
        },
    }
    for name in given.parts.split(","):
        parts[name]()
    print(document(store))


if __name__ == "__main__":
    main()
