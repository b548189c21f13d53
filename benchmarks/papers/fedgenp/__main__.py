"""FedGenP and its baselines with the paper's settings, ours beside the paper's figures.

    python -m benchmarks.papers.fedgenp --data FOLDER [--parts "10 % α=1,rotated"] [--seeds 3]

Every run is stored as soon as it is done; a second call adds what is missing: columns, methods,
seeds, or more rounds. In-process Grid, one thread. The global model is evaluated on the whole MNIST
test set right after aggregation, a personalised one ("Per") on its silo's own test data after its
training.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import product
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, MetricRecord

from benchmarks.kit import UNBOUNDED, Entry, FixedGroups, Sampled, Strategy, mean_error, read, train
from benchmarks.papers.fedgenp.columns import COLUMNS, LAST, Column
from benchmarks.papers.fedgenp.published import OwnStatistics
from benchmarks.papers.fedgenp.tables import STORE
from coterie import wire
from coterie.client.app import app
from coterie.client.work.weights import load_weights
from coterie.strategies import HCCT, FedEnsemble, FedGen, FedGenP, FedGroup
from coterie.strategies.fedgenp.generative import Given
from coterie.strategies.fedgenp.latent import GeneratorPlan
from coterie.strategies.rounds.reports import RoundReport
from coterie.strategies.rounds.result import RunResult
from coterie.tasks import TaskError, load_task
from coterie.tasks.base import SiloData
from coterie.tasks.images.datasets import Part
from coterie.wire import Model

AMPLITUDE, DECAY = 10.0, 0.98
"""a_t = 10 · 0.98^(t−1), the released code's weight of what generators add to a silo's loss."""
RELEASED = Given(weight=AMPLITUDE, distil=AMPLITUDE, decay=DECAY)
EVERY = 10
"""The global model is evaluated every so many rounds, and after each of the last."""
SMALL = ("mnist_small", "domains")
DATA_OF = {"mnist": "mnist", "mnist_small": "mnist", "letters": "emnist-letters"}

Course = Sequence[tuple[int, float]]
"""Rounds and their accuracies in %."""

# --- the methods ----------------------------------------------------------------------------------

Build = Callable[[Column, int, dict[str, Any]], Strategy]


def _average(
    column: Column, seed: int, keys: dict[str, Any], raised: Callable[[int], float] | None = None
) -> Strategy:
    def factor(number: int) -> float:
        fallen = 0.99 ** max(number - 2, 0) if column.lr_falls else 1.0
        return fallen * (1.0 if raised is None else raised(number))

    return Strategy(Sampled(active=column.active, draw=seed, factor=factor), **keys)


PAPERS = Given()
"""How the paper's silos use generators."""


def _raised(number: int) -> float:
    """1 + a_t."""
    return 1 + AMPLITUDE * DECAY ** (number - 1)


def _fedgen(column: Column, seed: int, keys: dict[str, Any], given: Given = PAPERS) -> Strategy:
    plan = GeneratorPlan(hidden=column.hidden)
    return FedGen(base=_average(column, seed, {}), given=given, plan=plan, seed=seed, **keys)


def _fedgenp(
    column: Column, seed: int, keys: dict[str, Any], given: Given = PAPERS, **plan: Any
) -> Strategy:
    base = _average(column, seed, {})
    own = GeneratorPlan(**{"hidden": column.hidden, **plan})
    return FedGenP(base=base, given=given, plan=own, seed=seed, **keys)


def _fixed(column: Column, keys: dict[str, Any], factor: float = 1.0) -> Strategy:
    groups = [tuple(column.names[i] for i in group) for group in column.groups]
    own = dict(keys.get("train_config") or {wire.LR: 0.0})
    own[wire.LR] = float(own[wire.LR]) * factor
    return Strategy(FixedGroups(fixed=tuple(groups)), **{**keys, "train_config": own})


def _around(base: Strategy, seed: int, keys: dict[str, Any]) -> Strategy:
    return FedGenP(base=base, receivers="groups", seed=seed, **keys)


def _fedgroup(column: Column, seed: int, keys: dict[str, Any]) -> Strategy:
    return FedGroup(num_groups=len(column.groups), seed=seed, **keys)


def _hcct(seed: int, keys: dict[str, Any]) -> Strategy:
    """α as the turned MNIST needs it: 10 leaves all alone, 20 joins two of the four turns."""
    return HCCT(alpha=15.0, settle_after=3, seed=seed, **keys)


ARMS: dict[str, Build] = {
    "FedAvg": lambda c, s, k: FedEnsemble(base=_average(c, s, k), **k),
    "FedAvg, lr·(1+a_t)": lambda c, s, k: _average(c, s, k, _raised),
    "FedAvg, lr·2": lambda c, s, k: _average(c, s, k, lambda number: 2.0),
    "FedGen": lambda c, s, k: _fedgen(c, s, k),
    "FedGen, a_t": lambda c, s, k: _fedgen(c, s, k, RELEASED),
    "FedGenP": lambda c, s, k: _fedgenp(c, s, k),
    "FedGenP, a_t": lambda c, s, k: _fedgenp(c, s, k, RELEASED),
    "FedGenP, λ = 1": lambda c, s, k: _fedgenp(c, s, k, reversal_weight=1.0),
    "FedGenP, λ = 0.5, 500 steps": lambda c, s, k: _fedgenp(
        c, s, k, reversal_weight=0.5, steps=500
    ),
    "FedGenP, no reversal": lambda c, s, k: _fedgenp(c, s, k, reversal="none"),
    "fixed groups": lambda c, s, k: _fixed(c, k),
    "fixed groups, lr·2": lambda c, s, k: _fixed(c, k, 2.0),
    "fixed groups + generators": lambda c, s, k: _around(_fixed(c, {}), s, k),
    "FedGroup": _fedgroup,
    "FedGroup + generators": lambda c, s, k: _around(_fedgroup(c, s, {}), s, k),
    "HCCT, α = 15, settled": lambda c, s, k: _hcct(s, k),
    "HCCT, α = 15, settled + generators": lambda c, s, k: _around(_hcct(s, {}), s, k),
}
"""Name → strategy. FedAvg's run also gives FedEnsemble: the same training, other predictions."""


# --- one run --------------------------------------------------------------------------------------


def measure(folder: str) -> Callable[..., Entry]:
    """What trains a cell of the store."""

    def one(column: str, arm: str, seed: int, rounds: int) -> Entry:
        own, silos = COLUMNS[column], OwnStatistics(app)
        keys = {
            **{"seed": seed, "rounds": rounds, "local-steps": own.steps, "batch-size": 32},
            **{"lr": 0.05 if own.task in SMALL else 0.01, "lr-decay": 1.0},
            **UNBOUNDED,
            "evaluate-trained": True,
        }
        watch = Watch(own, folder, rounds, silos)
        done = train(
            own.nodes(folder, seed),
            keys,
            app=silos if own.released else app,
            build=lambda config, options: ARMS[arm](own, seed, options),
            evaluate=own.own,
            evaluate_fn=watch.evaluate,
            on_round=watch.report,
            after_round=watch.look,
        )
        assert _finite(done.result), f"{column}, {arm}, seed {seed}: not every value is finite"
        return watch.stored() | {"seconds": round(done.seconds, 1)}

    return one


def _finite(result: RunResult) -> bool:
    models = [wire.decode_arrays(arrays) for arrays in result.models.values()]
    return all(bool(np.isfinite(a).all()) for m in models for a in m.values())


class Watch:
    """What a run's course is judged by. Accuracies in %."""

    def __init__(self, column: Column, folder: str, rounds: int, silos: OwnStatistics) -> None:
        self.column, self.folder, self.rounds, self.silos = column, folder, rounds, silos
        self.shared: list[tuple[int, float]] = []
        self.personal: list[tuple[int, float]] = []
        self.latents: list[float] | None = None
        self.groups = 0
        self.ensemble: float | None = None

    def due(self, number: int) -> bool:
        """Whether models are evaluated after this round."""
        return number > 0 and (number % EVERY == 0 or number > self.rounds - self.column.last)

    def evaluate(self, number: int, arrays: ArrayRecord) -> MetricRecord | None:
        """The global model on all test data."""
        if not self.due(number) or self.column.own:
            return None
        shared, model, tests = wire.decode_arrays(arrays), self._model(), self._tests()
        if self.column.released:
            accuracy = 100 * self.silos.accuracy(model, shared, tests)
        else:
            accuracy = _accuracy(model, [shared], tests)
        self.shared.append((number, accuracy))
        return None

    def look(self, number: int, state: Any) -> None:
        """The ensemble on all test data, after the last round of a run that has one."""
        if number == self.rounds and not self.column.own and hasattr(state, "local"):
            self.ensemble = _accuracy(self._model(), list(state.local.values()), self._tests())

    def _model(self) -> torch.nn.Module:
        return load_task(self.column.task_name).model()

    def _tests(self) -> Sequence[Part]:
        if self.column.released:
            return [(data.x_test, data.y_test) for data in self.column.released(self.folder)]
        return [_test_set(self.column.task, self.folder)]

    def report(self, report: RoundReport) -> None:
        """Personalised models, and the global one where it is judged by the silos."""
        if self.column.own and report.evaluation and self.due(report.evaluated_round):
            self.shared.append((report.evaluated_round, 100 - mean_error(report)))
            evaluation = report.details.get("ensemble", {}).get("evaluation", {})
            if evaluation:
                own = [entry["error"] for entry in evaluation.values()]
                self.ensemble = 100 * (1 - float(np.mean(own)))
        if report.personalised and self.due(report.round):
            errors = [error for _, error in report.personalised.values()]
            self.personal.append((report.round, 100 * (1 - float(np.mean(errors)))))
        receivers = report.details.get("generators", {}).get("receivers", {})
        if receivers and self.due(report.round):
            agree = [[r["others-agree"], r["own-agrees"]] for r in receivers.values()]
            self.latents = [round(x, 3) for x in (100 * np.mean(agree, axis=0)).tolist()]
        self.groups = len(report.groups)

    def stored(self) -> dict[str, Any]:
        """What the tables read of the course: the last rounds and, as released, the best ones."""
        courses = {"global": self.shared, "per": self.personal}
        best = {part: _best(course) for part, course in courses.items()}
        return {
            **{part: self._last(course) for part, course in courses.items()},
            **({"best": best} if self.column.released else {}),
            "latents": self.latents,
            "ensemble": self.ensemble,
            "groups": self.groups,
        }

    def _last(self, course: Course) -> list[float]:
        return [round(accuracy, 3) for n, accuracy in course if n > self.rounds - LAST]


def _best(course: Course) -> list[float]:
    return sorted(round(accuracy, 3) for _, accuracy in course)[-LAST:]


@torch.no_grad()
def _accuracy(model: torch.nn.Module, members: Sequence[Model], tests: Sequence[Part]) -> float:
    """Of the members' mean logits on all tests, %; the model's arrays are overwritten."""
    model.eval()
    x, y = (np.concatenate(arrays) for arrays in zip(*tests, strict=True))
    logits: Any = 0
    for member in members:
        load_weights(model, member)
        logits = logits + torch.cat([model(part) for part in torch.from_numpy(x).split(1000)])
    return float(100 * (logits.argmax(dim=1).numpy() == y).mean())


@lru_cache(maxsize=2)
def _test_set(task: str, folder: str) -> Part:
    data = load_task(DATA_OF[task]).load({"data": folder, "train": 1})
    assert isinstance(data, SiloData)
    return data.x_test, data.y_test


# --- the command ----------------------------------------------------------------------------------


def problem(column: Column, folder: str) -> str:
    """Why the folder's data cannot be had, or an empty text."""
    try:
        node = column.nodes(folder, 0)[0]
        options = {k.removeprefix("data."): v for k, v in node.items() if k.startswith("data.")}
        load_task(column.task_name).load(options)
    except TaskError as error:
        return str(error)
    return ""


def main() -> None:
    """Measure what is missing, print."""
    given = read(STORE, __doc__, data=True, parts=COLUMNS, rows=ARMS, seeds=3, rounds=0)
    for name in given.parts:
        column = COLUMNS[name]
        if why := problem(column, given.data):
            print(f"{name}: not run. {why}", flush=True)
            continue
        cells = (
            {"column": name, "arm": arm, "seed": s, "rounds": given.rounds or column.rounds}
            for s, arm in product(range(given.seeds), column.arms)
            if arm in given.only
        )
        given.store.fill(cells, measure(given.data))
    print(given.store.text())


if __name__ == "__main__":
    main()
