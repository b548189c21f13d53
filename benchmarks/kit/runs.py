"""One way to run a strategy over silos in this process, and to read its course."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord
from threadpoolctl import threadpool_limits  # type: ignore[import-untyped]

from coterie import wire
from coterie.client.app import app as coterie_app
from coterie.engine.inprocess import InProcessGrid
from coterie.server.runs.config import RunConfig, train_config
from coterie.server.runs.initial import initial_arrays
from coterie.server.runs.run import build_strategy
from coterie.strategies.rounds.checkpoint import Checkpoint
from coterie.strategies.rounds.churn import Churn
from coterie.strategies.rounds.reports import RoundReport
from coterie.strategies.rounds.result import RunResult
from coterie.strategies.rounds.roster import DescribedRoster, Silo
from coterie.strategies.strategy import GroupStrategy
from coterie.tasks.base import Option
from coterie.wire import Model

Node = Mapping[str, Option]
App = Callable[[Message, Context], Message]
Strategy = GroupStrategy
Build = Callable[[RunConfig, dict[str, Any]], Strategy]
"""Run configuration, and the options that every strategy takes → a strategy."""
UNBOUNDED: Mapping[str, Any] = {"max-share": 1.0, "clip-updates": 0.0, "quarantine-after": 0}
"""No bounds on one silo's influence, of which the papers have none."""
DEVICE = "COTERIE_BENCH_DEVICE"
"""Variable of the environment, which processes that measure inherit: on what silos train."""


def device() -> str:
    """What silos train on: the CPU unless a command names another (``--device``)."""
    return os.environ.get(DEVICE, "cpu")


def nodes(
    task: str, names: Sequence[str], data: Mapping[str, Option], **more: Option
) -> list[dict[str, Option]]:
    """Silos of one split: what each is started with; ``data.silo`` is its number, from 0."""
    shared = {"task": task, "threads": 1, "device": device(), **more}
    options = {f"data.{key}": value for key, value in data.items()}
    return [{"name": n, **shared, **options, "data.silo": i} for i, n in enumerate(names)]


@dataclass(frozen=True)
class Trained:
    """A run that is over.

    Attributes:
        result: Flower's, with a report of every round.
        config: of the run.
        grid: to the silos.
        silos: who was there in round 1.
        seconds: wall.
    """

    result: RunResult
    config: RunConfig
    grid: InProcessGrid
    silos: list[Silo]
    seconds: float

    @property
    def errors(self) -> dict[str, float]:
        """Silo → error of its final model on its own test data, in [0, 1]."""
        return {n: error for n, (_, error, _) in self.result.rounds[-1].evaluation.items()}

    def curve(self) -> list[tuple[int, float]]:
        """(round, mean error over silos in % of the models held after it), as far as measured."""
        return [(r.evaluated_round, mean_error(r)) for r in self.result.rounds if r.evaluation]


def mean_error(report: RoundReport) -> float:
    """Over silos, in %; NaN if none was evaluated."""
    return float(100 * np.mean([error for _, error, _ in report.evaluation.values()] or [np.nan]))


def train(
    nodes: Sequence[Node],
    keys: Mapping[str, Any],
    *,
    app: App = coterie_app,
    build: Build | None = None,
    run: str = "bench",
    evaluate: bool = True,
    evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
    on_round: Callable[[RoundReport], None] | None = None,
    after_round: Callable[[int, Any], None] | None = None,
    resume: Callable[[Strategy, Model], Any] | None = None,
) -> Trained:
    """Run a strategy.

    Args:
        nodes: the silos; they share the task of the first, unless ``keys`` names one.
        keys: of the run's configuration. All silos are waited for unless ``min-silos`` says so.
        app: the silos' ClientApp.
        build: makes another strategy than the configuration names, which need not name one.
        run: a name, which takes part in nothing that is computed.
        evaluate: whether silos evaluate their models after every round.
        evaluate_fn: evaluates the mean of all models after every round.
        on_round: called with every report.
        after_round: called with the round and the state of the strategy after it.
        resume: strategy and w⁰ → the state that it begins with.
    """
    torch.set_num_threads(1)
    threadpool_limits(1)  # of numpy's BLAS, whose threads wait for each other in loops that spin
    task = {"task": nodes[0]["task"]} if "task" in nodes[0] else {}
    named = {} if build is None else {"strategy": "fedavg"}
    config = RunConfig.read({"min-silos": len(nodes), **task, **named, **keys})
    grid = InProcessGrid(app, nodes)
    roster = DescribedRoster(config.task, config.min_silos, churn=Churn.parse(config.churn))
    notify = on_round or (lambda report: None)
    if build is None:
        strategy = build_strategy(config, run=run, roster=roster, on_round=notify)
        strategy.evaluate = evaluate
    else:
        entries = train_config(config, run=run)
        del entries[wire.STRATEGY]  # a strategy names itself: silos answer some messages only so
        common = {"train_config": entries, "roster": roster, "influence": config.influence}
        strategy = build(config, {**common, "evaluate": evaluate})
        strategy.on_round = notify
    started = time.monotonic()
    here = roster.present(grid, number=1)
    initial = initial_arrays(grid, here, config)

    def commit(checkpoint: Checkpoint[Any]) -> None:
        if after_round is not None:
            after_round(checkpoint.round, checkpoint.state)

    begin = None
    if resume is not None:
        begin = Checkpoint(0, resume(strategy, wire.decode_arrays(initial)), ())
    result = strategy.start(
        grid=grid,
        initial_arrays=initial,
        num_rounds=config.rounds,
        evaluate_fn=evaluate_fn,
        commit=commit,
        resume=begin,
    )
    return Trained(result, config, grid, here, time.monotonic() - started)


def say(label: str, *, every: int = 1) -> Callable[[RoundReport], None]:
    """For ``on_round``: print how a run goes, after every so many rounds."""
    started = time.monotonic()

    def show(report: RoundReport) -> None:
        if report.evaluation and report.evaluated_round % every == 0:
            print(
                f"  {label}, round {report.evaluated_round}: {len(report.groups)} groups, "
                f"{mean_error(report):.2f} %, {time.monotonic() - started:.0f} s",
                flush=True,
            )

    return show


def best_so_far(curve: Iterable[tuple[int, float]]) -> list[tuple[int, float]]:
    """The entries of (round, accuracy) that beat all before: the best after any round is one."""
    kept: list[tuple[int, float]] = []
    for number, accuracy in curve:
        if not kept or accuracy > kept[-1][1]:
            kept.append((number, accuracy))
    return kept


def numbered_groups(groups: Iterable[Iterable[str]], names: Sequence[str]) -> list[list[int]]:
    """Groups by number of the silo, from 0, sorted."""
    place = {name: number for number, name in enumerate(names)}
    return sorted(sorted(place[name] for name in group) for group in groups)
