"""FedGroup's Table III with the paper's settings, ours beside the paper's figures.

    python -m benchmarks.papers.fedgroup --data FOLDER [--parts mnist-mclr,mnist-mlp] [--seeds 1]

Every run is stored as soon as it is done; a second call adds what is missing. In-process Grid, the
silos' own ClientApp with the training loop of ``fast_sgd``, one thread. After every round the
server's side of this benchmark measures every group's model on the test data of all silos that
were ever placed in that group, as the paper does (section IV-A): hits over all silos / all their
test samples.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch

from benchmarks.kit import UNBOUNDED, Build, Entry, best_so_far, read, train
from benchmarks.papers.fedgroup import fast_sgd
from benchmarks.papers.fedgroup.data import DATASETS, Dataset, TestSets, all_silos
from benchmarks.papers.fedgroup.tables import (
    ALPHA,
    BATCH,
    EPOCHS,
    FIRST,
    METHODS,
    MORE,
    POOLED_BATCH,
    POOLED_EPOCHS,
    ROUNDS,
    SAMPLE,
    STORE,
    longest,
)
from coterie.client.work.data import Held
from coterie.client.work.sgd import TrainPlan, seed_of
from coterie.client.work.weights import read_weights
from coterie.strategies import FedGroup
from coterie.strategies.rivals.fesem import FeSEMState
from coterie.strategies.rivals.flsc import Choices
from coterie.strategies.rounds.handles import Model, arrays_of
from coterie.tasks import Task
from coterie.tasks.base import SiloData


class Meter:
    """Measures after every round what the paper measures.

    Attributes:
        curve: per round, accuracy in % and the share of all test samples that it is of.
        members: silos ever placed in each group.
    """

    def __init__(self, tests: TestSets, names: Sequence[str], label: str) -> None:
        self._tests, self._label = tests, label
        self._number = {name: i for i, name in enumerate(names)}
        self._known: dict[int, tuple[Model, tuple[int, ...], float, int]] = {}
        self._started = time.monotonic()
        self.curve: list[tuple[float, float]] = []
        self.members: list[list[str]] = []

    def look(self, number: int, state: Any) -> None:
        """After a round: FedAvg's global model, or each group's with who was placed there last."""
        match state:
            case FeSEMState(centres=models, centre_of=place):
                pass
            case Choices(models=models, chosen=chosen):
                place = {name: choice[0] for name, choice in chosen.items()}
            case _ if hasattr(state, "group_models"):
                models, place = state.group_models, state.group_of
            case _:
                names = sorted(state.members.models)
                models, place = (state.members.models[names[0]],), dict.fromkeys(names, 0)
        members: list[list[str]] = [[] for _ in models]
        for name, group in sorted(place.items()):
            members[group].append(name)
        self.measure(models, members)

    def measure(self, models: Sequence[Model], members: Sequence[Sequence[str]]) -> None:
        """Note weighted accuracy, and the share of all test samples that it is of."""
        hits, count = 0.0, 0
        for j, (model, names) in enumerate(zip(models, members, strict=True)):
            silos = tuple(self._number[name] for name in names)
            known = self._known.get(j)
            if known is None or known[0] is not model or known[1] != silos:
                if not silos:
                    continue
                found = self._tests.evaluate(arrays_of(model), silos)
                right = (1 - found.error) * found.num_examples
                known = self._known[j] = (model, silos, right, found.num_examples)
            hits, count = hits + known[2], count + known[3]
        self.members = [list(names) for names in members]
        self.curve.append((100 * hits / count, count / self._tests.num_examples))
        if len(self.curve) % 10 == 0:
            passed = time.monotonic() - self._started
            text = f"{self.curve[-1][0]:.2f} %, best {max(a for a, _ in self.curve):.2f} %"
            print(f"  {self._label}, round {len(self.curve)}: {text}, {passed:.0f} s", flush=True)


def measure(folder: str) -> Callable[..., Entry]:
    """What trains a cell of the store."""

    def one(row: str, method: str, seed: int, rounds: int, pretrain_epochs: int) -> Entry:
        data, chosen = DATASETS[row], METHODS[method]
        task, silos = all_silos(row, folder, seed)
        meter = Meter(TestSets(task, silos), data.names, f"{row} {method}")
        mu = data.proximal_mu if chosen.proximal else 0.0
        keys = {
            **{"strategy": chosen.strategy, "sample": SAMPLE, "seed": seed, "rounds": rounds},
            **{"local-epochs": EPOCHS, "batch-size": BATCH, "optimiser": "sgd"},
            **{"lr": data.lr, "lr-decay": 1.0, "proximal-mu": mu},
            **UNBOUNDED,
        }
        build = None
        if chosen.strategy == "fedgroup":
            build = _fedgroup(data, chosen.groups, pretrain_epochs, seed)
        elif chosen.strategy != "fedavg":
            keys["num-groups"] = data.num_groups
        fast_sgd.check(task, _tensors(silos[:1]), TrainPlan(EPOCHS, BATCH, data.lr, proximal_mu=mu))
        with fast_sgd.fast_silos():
            done = train(
                data.nodes(folder, seed=seed),
                keys,
                build=build,
                evaluate=False,
                after_round=meter.look,
            )
        accuracies = [round(100 * accuracy) / 100 for accuracy, _ in meter.curve]
        return {
            "best so far": best_so_far(enumerate(accuracies, start=1)),
            "last ten": float(np.mean(accuracies[-10:])),
            "tested": round(meter.curve[-1][1], 4),
            "pooled": pooled(task, silos, data, meter, seed=seed),
            "groups": [len(names) for names in meter.members],
            "separation": done.result.rounds[-1].details.get("separation"),
            "seconds": round(done.seconds, 1),
        }

    return one


def _fedgroup(data: Dataset, own: Mapping[str, Any], pretrain_epochs: int, seed: int) -> Build:
    made = {"num_groups": data.num_groups, "cold_start_silos": ALPHA * data.num_groups, **own}
    made |= {"cold_start_epochs": pretrain_epochs, "sample": SAMPLE, "seed": seed}
    return lambda config, options: FedGroup(**made, **options)


def pooled(
    task: Task, silos: Sequence[SiloData], data: Dataset, meter: Meter, *, seed: int
) -> float:
    """What the groups allow: accuracy in % of one model per group trained on its pooled data."""
    plan = TrainPlan(POOLED_EPOCHS, POOLED_BATCH, data.lr)
    models = []
    for names in meter.members:
        own = [silos[data.names.index(name)] for name in names]
        torch.manual_seed(seed)
        model = task.model()
        if own:
            fast_sgd.train(task, model, _tensors(own), plan, seed=seed_of(seed, "pooled", 0, ""))
        models.append(read_weights(model))
    meter.measure(models, meter.members)
    accuracy, _ = meter.curve.pop()
    return round(accuracy, 2)


def _tensors(silos: Sequence[SiloData]) -> Held:
    return Held(
        torch.from_numpy(np.concatenate([silo.x_train for silo in silos])),
        torch.from_numpy(np.concatenate([silo.y_train for silo in silos])),
    )


def main() -> None:
    """Measure what is missing, print."""
    given = read(
        STORE,
        __doc__,
        data=True,
        parts=DATASETS,
        chosen="mnist-mclr,mnist-mlp,synthetic-mclr",
        rows=METHODS,
        seeds=1,
        rounds=ROUNDS,
        pretrain_epochs={"type": int, "default": 1},
    )
    cells = (
        {
            "row": row,
            "method": method,
            "seed": seed,
            "rounds": given.rounds,
            "pretrain_epochs": given.pretrain_epochs,
        }
        for row, seed, method in product(given.parts, range(given.seeds), given.only)
        if row == FIRST or method not in MORE
    )
    given.store.fill(cells, measure(given.data))
    whole = longest(given.store.entries)
    given.store.keep(lambda entry: entry in whole)
    print(given.store.text())


if __name__ == "__main__":
    main()
