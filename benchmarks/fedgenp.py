"""FedGenP and its baselines with the paper's settings, ours beside the paper's figures.

    python -m benchmarks.fedgenp --data FOLDER [--columns "10 % α=1,rotated"] [--seeds 3]

Every run is stored as soon as it is done; a second call adds what is missing: columns, methods,
seeds, or more rounds. Writes ``results/fedgenp.json`` and ``results/fedgenp.md``.

In-process Grid, one thread. The global model is evaluated on the whole MNIST test set right after
aggregation, a personalised one ("Per") on its silo's own test data after its training.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ArrayRecord, MetricRecord

from benchmarks.celeba import CelebA, celeba_data
from benchmarks.fedgenp_published import OwnStatistics, PublishedMnist, published_data
from benchmarks.hcct import FixedGroups, Shared
from coterie import wire
from coterie.client.app import app
from coterie.client.work.tensors import load_weights
from coterie.server.runs.config import RunConfig
from coterie.server.runs.inprocess import InProcessGrid
from coterie.server.runs.run import initial_arrays, train_config
from coterie.strategies import HCCT, FedAvg, FedEnsemble, FedGen, FedGenP, FedGroup
from coterie.strategies.fedgenp.generative import Given
from coterie.strategies.fedgenp.latent import GeneratorPlan
from coterie.strategies.rounds.grouping import Members
from coterie.strategies.rounds.loop import Group, GroupStrategy, Order, RoundReport, RunResult
from coterie.strategies.rounds.roster import DescribedRoster, Silo
from coterie.tasks import SiloData, TaskError, load_task
from coterie.tasks.base import Option
from coterie.tasks.images.datasets import Part
from coterie.wire import Model

RESULTS = Path(__file__).parent / "results"
AMPLITUDE, DECAY = 10.0, 0.98
"""a_t = 10 · 0.98^(t−1), the released code's weight of what generators add to a silo's loss."""
RELEASED = Given(weight=AMPLITUDE, distil=AMPLITUDE, decay=DECAY)
EVERY, LAST = 10, 5
"""The global model is evaluated every 10 rounds and after each of the last 5."""

mnist = partial(Shared, "mnist/cnn-fedgen")
mnist_small = partial(Shared, "mnist/mlp-128")
letters = partial(Shared, "emnist-letters/cnn-fedgen")
domains = partial(Shared, "digit-five/mlp-128")
published = PublishedMnist
celeba = CelebA
SMALL = ("mnist_small", "domains")
DATA_OF = {"mnist": "mnist", "mnist_small": "mnist", "letters": "emnist-letters"}


# --- the columns ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Column:
    """One way to cut the data among silos.

    Attributes:
        title: heading.
        silos: how many there are.
        active: how many train in a round.
        data: options of the task.
        task: of this module.
        arms: the methods compared, of ``ARMS``.
        paper: method → (global, Per) accuracy in the paper, %.
        rounds: of a run, unless the command says otherwise.
        groups: for methods that are told who belongs together, by number of the silo.
        own: the global model, too, is judged on the silos' own test data.
        released: folder → all silos' data, for a column measured as the released code does.
        lr_falls: by 1 % a round, as there.
        last: how many rounds at the end are evaluated one by one.
        hidden: width of the generators' hidden layer.
    """

    title: str
    silos: int
    active: int
    data: Mapping[str, Option]
    task: str = "mnist"
    arms: tuple[str, ...] = ("FedAvg", "FedAvg, lr·(1+a_t)", "FedGen", "FedGenP", "FedGenP, a_t")
    paper: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    rounds: int = 100
    groups: tuple[tuple[int, ...], ...] = ()
    own: bool = False
    released: Callable[[str], Sequence[SiloData]] | None = None
    lr_falls: bool = False
    last: int = LAST
    hidden: int = 256


def _dirichlet(percent: int, active: int, alpha: float, *paper: float) -> Column:
    samples = {5: 1500, 10: 3000, 100: 0}[percent]  # the published split script's
    return Column(
        title=f"MNIST {percent} %, Dirichlet α = {alpha:g}, 20 silos, {active} of them a round",
        silos=20,
        active=active,
        data={
            "split": "dirichlet",
            "split-alpha": alpha,
            "split-samples": samples,
            "split-min-samples": 10,
            "test": 100,
        },
        paper=_paper_of(*paper),
    )


def _paper_of(*figures: float) -> dict[str, tuple[float, float]]:
    """Method → (global, Per), from the four global figures and the four of Per."""
    names = ("FedAvg", "FedEnsemble", "FedGen", "FedGenP")
    return dict(zip(names, zip(figures[:4], figures[4:], strict=True), strict=True))


def _celeba(active: int, *paper: float) -> Column:
    return Column(
        title=f"CelebA, smiling, 25 silos of ten celebrities, {active} of them a round",
        silos=25,
        active=active,
        data={},
        task="celeba",
        paper=_paper_of(*paper),
        released=celeba_data,
        lr_falls=True,
        hidden=128,
    )


def _published(name: str, percent: int) -> Column:
    column = COLUMNS[name]
    alpha, ratio = float(column.data["split-alpha"]), percent / 100
    return replace(
        column,
        title=f"{column.title}, cut and measured as released",
        data={"alpha": alpha, "ratio": ratio},
        task="published",
        lr_falls=True,
        arms=("FedAvg", "FedAvg, lr·(1+a_t)", "FedGen, a_t", "FedGenP", "FedGenP, a_t"),
        rounds=300,
        released=partial(published_data, alpha=alpha, ratio=ratio),
        last=100,
    )


def _letters(percent: int, alpha: float, *paper: float) -> Column:
    """The paper gives the global model's figures, and FedGenP's after the silo's training."""
    return Column(
        title=f"EMNIST letters {percent} %, Dirichlet α = {alpha:g}, 20 silos",
        silos=20,
        active=20,
        data={
            "split": "dirichlet",
            "split-alpha": alpha,
            "split-samples": 124_800 * percent // 100,
            "split-min-samples": 10,
            "test": 100,
        },
        task="letters",
        paper={
            "FedAvg": (paper[0], np.nan),
            "FedGen": (paper[1], np.nan),
            "FedGenP": (paper[2], paper[3]),
        },
    )


def _turned(title: str, silos: int, samples: int, angles: str, **more: Any) -> Column:
    return Column(
        title=title,
        silos=silos,
        active=silos,
        data={
            "split": "iid",
            "split-samples": samples,
            "split-rotations": angles,
            "test": 200,
        },
        task="mnist_small",
        own=True,
        **more,
    )


SMALL_ARMS = (
    "FedAvg",
    "FedAvg, lr·2",
    "FedGen",
    "FedGenP",
    "FedGenP, λ = 1",
    "FedGenP, no reversal",
)
"""Of the columns that ask where generators help."""

COLUMNS = {
    "10 % α=1": _dirichlet(10, 10, 1, 93.75, 92.56, 94.56, 95.08, 94.85, 94.24, 95.66, 96.13),
    "5 % α=10": _dirichlet(5, 20, 10, 92.35, 91.13, 92.38, 92.97, 92.35, 91.74, 92.38, 92.97),
    "5 % α=1": _dirichlet(5, 20, 1, 91.89, 90.81, 91.95, 92.29, 91.92, 90.96, 91.95, 92.30),
    "10 % α=10": _dirichlet(10, 10, 10, 94.41, 93.77, 95.04, 95.47, 95.44, 94.83, 96.11, 96.54),
    "100 % α=0.1": _dirichlet(100, 20, 0.1, 90.13, 90.86, 96.18, 95.41, 90.11, 90.84, 96.22, 95.48),
    "100 % α=1": _dirichlet(100, 20, 1, 94.78, 94.13, 97.74, 97.72, 94.83, 94.19, 97.79, 97.70),
    "letters 10 % α=1": _letters(10, 1, 79.35, 83.22, 83.69, 83.85),
    "letters 10 % α=0.01": _letters(10, 0.01, 60.64, 69.51, 70.09, 77.05),
    "rotated": _turned(
        "Feature shift: MNIST turned by −45°, −15°, 15°, 45°, 8 silos of 40 samples",
        8,
        320,
        "-45,-15,15,45",
        arms=SMALL_ARMS,
    ),
    "domains": Column(
        title="Feature shift: five domains of digits, 10 silos of 40 samples",
        silos=10,
        active=10,
        data={"split": "by-domain", "train": 40, "test": 200},
        task="domains",
        arms=SMALL_ARMS,
        own=True,
    ),
    "skewed": Column(
        title="Personalisation: MNIST, Dirichlet α = 0.1, 10 silos, 1,000 samples in all",
        silos=10,
        active=10,
        data={
            "split": "dirichlet",
            "split-alpha": 0.1,
            "split-samples": 1000,
            "split-min-samples": 10,
            "test": 200,
        },
        task="mnist_small",
        arms=SMALL_ARMS,
        own=False,
    ),
    "groups": _turned(
        "Between groups: MNIST turned by −45°, −15°, 15°, 45°, 12 silos of 20 samples",
        12,
        240,
        "-45,-15,15,45",
        arms=(
            "FedAvg",
            "FedGenP",
            "fixed groups",
            "fixed groups, lr·2",
            "fixed groups + generators",
            "FedGroup",
            "FedGroup + generators",
            "HCCT, α = 15, settled",
            "HCCT, α = 15, settled + generators",
        ),
        groups=((0, 1, 2), (3, 4, 5), (6, 7, 8), (9, 10, 11)),
    ),
}

COLUMNS |= {
    f"celeba r={active / 25:g}": _celeba(active, *paper)
    for active, *paper in (
        (5, 85.44, 86.03, 86.26, 86.96, 90.46, 85.74, 86.69, 86.98),
        (10, 85.07, 86.07, 87.77, 87.89, 89.84, 86.12, 88.35, 90.06),
        (15, 84.84, 86.18, 87.38, 87.21, 88.84, 86.08, 87.58, 91.72),
        (20, 84.80, 86.60, 87.29, 87.90, 88.49, 86.49, 87.44, 90.39),
        (25, 84.65, 85.50, 87.77, 87.56, 87.65, 86.51, 88.35, 90.06),
    )
}
COLUMNS |= {
    f"{name} as released": _published(name, percent)
    for name, percent in (("10 % α=1", 10), ("10 % α=10", 10), ("5 % α=10", 5))
}


# --- the methods ------------------------------------------------------------------------------


class Sampled(FedAvg):
    """FedAvg with some silos a round, and a learning rate that may be raised.

    Args:
        active: silos a round, drawn by seed.
        raised: round → factor on the learning rate.
    """

    def __init__(
        self, *, active: int, draw: int, raised: Callable[[int], float], **keys: Any
    ) -> None:
        super().__init__(**keys)
        self.active, self.draw, self.raised = active, draw, raised

    def orders(
        self, state: Members, silos: Sequence[Silo], *, round: int
    ) -> tuple[Members, list[Order]]:
        """Some of FedAvg's orders, each with this round's learning rate."""
        state, orders = super().orders(state, silos, round=round)
        rng = np.random.default_rng([self.draw, round])
        turn = set(rng.choice(len(orders), size=min(self.active, len(orders)), replace=False))
        lr = float(self.train_config[wire.LR]) * self.raised(round)
        return state, [replace(o, config={wire.LR: lr}) for i, o in enumerate(orders) if i in turn]


def released_factor(round: int) -> float:
    """1 + a_t."""
    return 1 + AMPLITUDE * DECAY ** (round - 1)


Build = Callable[[Column, int, dict[str, Any]], GroupStrategy[Any]]


def _average(
    column: Column, seed: int, keys: dict[str, Any], raised: Callable[[int], float] | None = None
) -> Sampled:
    def factor(round: int) -> float:
        fallen = 0.99 ** max(round - 2, 0) if column.lr_falls else 1.0
        return fallen * (1.0 if raised is None else raised(round))

    return Sampled(active=column.active, draw=seed, raised=factor, **keys)


def _fedgen(column: Column, seed: int, keys: dict[str, Any], given: Given | None = None) -> FedGen:
    plan = GeneratorPlan(hidden=column.hidden)
    return FedGen(base=_average(column, seed, {}), given=given, plan=plan, seed=seed, **keys)


def _fedgenp(
    column: Column, seed: int, keys: dict[str, Any], given: Given | None = None, **plan: Any
) -> FedGenP:
    base = _average(column, seed, {})
    plan = {"hidden": column.hidden, **plan}
    return FedGenP(base=base, given=given, plan=GeneratorPlan(**plan), seed=seed, **keys)


def _fixed(column: Column, keys: dict[str, Any], factor: float = 1.0) -> FixedGroups:
    groups: list[Group] = [tuple(_name(i) for i in group) for group in column.groups]
    own = dict(keys.get("train_config") or {wire.LR: 0.0})
    own[wire.LR] = float(own[wire.LR]) * factor
    return FixedGroups(groups, first_statistics=False, **{**keys, "train_config": own})


def _around(base: GroupStrategy[Any], seed: int, keys: dict[str, Any]) -> FedGenP:
    return FedGenP(base=base, receivers="groups", seed=seed, **keys)


def _hcct(seed: int, keys: dict[str, Any]) -> HCCT:
    """α as the turned MNIST needs it: 10 leaves all alone, 20 joins two of the four turns."""
    return HCCT(alpha=15.0, settle_after=3, seed=seed, **keys)


GENERATORS = " + generators"
PARTS = ("global", "per")

ARMS: dict[str, Build] = {
    "FedAvg": lambda c, s, k: FedEnsemble(base=_average(c, s, k), **k),
    "FedAvg, lr·(1+a_t)": lambda c, s, k: _average(c, s, k, released_factor),
    "FedAvg, lr·2": lambda c, s, k: _average(c, s, k, lambda round: 2.0),
    "FedGen": lambda c, s, k: _fedgen(c, s, k),
    "FedGen, a_t": lambda c, s, k: _fedgen(c, s, k, RELEASED),
    "FedGenP": lambda c, s, k: _fedgenp(c, s, k),
    "FedGenP, a_t": lambda c, s, k: _fedgenp(c, s, k, RELEASED),
    "FedGenP, λ = 1": lambda c, s, k: _fedgenp(c, s, k, reversal_weight=1.0),
    "FedGenP, no reversal": lambda c, s, k: _fedgenp(c, s, k, reversal="none"),
    "fixed groups": lambda c, s, k: _fixed(c, k),
    "fixed groups, lr·2": lambda c, s, k: _fixed(c, k, 2.0),
    "fixed groups + generators": lambda c, s, k: _around(_fixed(c, {}), s, k),
    "FedGroup": lambda c, s, k: FedGroup(num_groups=len(c.groups), seed=s, **k),
    "FedGroup + generators": lambda c, s, k: _around(
        FedGroup(num_groups=len(c.groups), seed=s), s, k
    ),
    "HCCT, α = 15, settled": lambda c, s, k: _hcct(s, k),
    "HCCT, α = 15, settled + generators": lambda c, s, k: _around(_hcct(s, {}), s, k),
}
"""Name → strategy. FedAvg's run also gives FedEnsemble: the same training, other predictions."""


# --- one run ----------------------------------------------------------------------------------


def run(name: str, arm: str, seed: int, rounds: int, folder: str) -> dict[str, Any]:
    """Train once; return what is stored."""
    column = COLUMNS[name]
    config = RunConfig.read(
        {
            "task": f"benchmarks.fedgenp:{column.task}",
            "seed": seed,
            "rounds": rounds,
            "min-silos": column.silos,
            "local-steps": 20,
            "batch-size": 32,
            "lr": 0.05 if column.task in SMALL else 0.01,
            "lr-decay": 1.0,
            "evaluate-trained": True,
        }
    )
    silos = OwnStatistics(app)
    nodes = _nodes(column, config.task, seed, folder)
    grid = InProcessGrid(silos if column.released else app, nodes)
    roster = DescribedRoster(config.task, column.silos)
    keys: dict[str, Any] = {"train_config": train_config(config, run="bench")}
    watch = Watch(column, folder, rounds, silos)
    strategy = ARMS[arm](column, seed, {**keys, "roster": roster, "evaluate": column.own})
    strategy.on_round = watch.report
    watch.strategy = strategy
    started = time.monotonic()
    here = roster.present(grid, round=1)
    initial = initial_arrays(grid, here[0], config)
    result = strategy.start(
        grid=grid, initial_arrays=initial, num_rounds=rounds, evaluate_fn=watch.evaluate
    )
    return watch.stored() | {
        "rounds": rounds,
        "finite": _finite(result),
        "seconds": round(time.monotonic() - started, 1),
        "peak MB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
    }


def _nodes(column: Column, task: str, seed: int, folder: str) -> list[dict[str, Option]]:
    options = {**column.data, "data": folder, "silos": column.silos, "split-seed": seed}
    shared = {f"data.{key}": value for key, value in options.items()}
    own: dict[str, Option] = {"task": task, "threads": 1, "device": "cpu"}
    return [
        {"name": _name(i), **own, "label-counts": True, **shared, "data.silo": i}
        for i in range(column.silos)
    ]


def _name(number: int) -> str:
    return f"silo-{number:02d}"


def _finite(result: RunResult) -> bool:
    models = [wire.decode_arrays(arrays) for arrays in result.models.values()]
    return all(bool(np.isfinite(a).all()) for m in models for a in m.values())


class Watch:
    """What a run's course is judged by. Accuracies in %."""

    def __init__(self, column: Column, folder: str, rounds: int, silos: OwnStatistics) -> None:
        self.column, self.folder, self.rounds, self.silos = column, folder, rounds, silos
        self.strategy: GroupStrategy[Any] | None = None
        self.shared: list[list[float]] = []
        self.personal: list[list[float]] = []
        self.latents: list[list[float]] = []
        self.groups = 0
        self.ensemble: float | None = None

    def due(self, round: int) -> bool:
        """Whether the global model is evaluated after this round."""
        return round > 0 and (round % EVERY == 0 or round > self.rounds - self.column.last)

    def evaluate(self, round: int, arrays: ArrayRecord) -> MetricRecord | None:
        """The global model on all test data; after the last round the ensemble as well."""
        if not self.due(round) or self.column.own:
            return None
        shared, model, tests = wire.decode_arrays(arrays), self._model(), self._tests()
        if self.column.released:
            accuracy = 100 * self.silos.accuracy(model, shared, tests)
        else:
            accuracy = _accuracy(model, [shared], tests)
        self.shared.append([round, accuracy])
        if isinstance(self.strategy, FedEnsemble) and round == self.rounds:
            assert self.strategy._state is not None
            members = list(self.strategy._state.local.values())
            self.ensemble = _accuracy(model, members, tests)
        return None

    def _model(self) -> torch.nn.Module:
        return load_task(f"benchmarks.fedgenp:{self.column.task}").model()

    def _tests(self) -> Sequence[Part]:
        if self.column.released:
            return [(data.x_test, data.y_test) for data in self.column.released(self.folder)]
        return [_test_set(self.column.task, self.folder)]

    def report(self, report: RoundReport) -> None:
        """Personalised models, and the global one where it is judged by the silos."""
        if self.column.own and report.evaluation and self.due(report.evaluated_round):
            errors = [error for _, error, _ in report.evaluation.values()]
            self.shared.append([report.evaluated_round, 100 * (1 - float(np.mean(errors)))])
            told = report.details.get("ensemble", {}).get("evaluation", {})
            if told:
                own = [entry["error"] for entry in told.values()]
                self.ensemble = 100 * (1 - float(np.mean(own)))
        if report.personalised and self.due(report.round):
            errors = [error for _, error in report.personalised.values()]
            self.personal.append([report.round, 100 * (1 - float(np.mean(errors)))])
        receivers = report.details.get("generators", {}).get("receivers", {})
        if receivers and self.due(report.round):
            agree = [[r["others-agree"], r["own-agrees"]] for r in receivers.values()]
            self.latents.append([report.round, *(100 * np.mean(agree, axis=0)).tolist()])
        self.groups = len(report.groups)

    def stored(self) -> dict[str, Any]:
        """For the results file."""
        parts = {"global": self.shared, "per": self.personal, "latents": self.latents}
        rounded = {k: [[round(x, 3) for x in row] for row in rows] for k, rows in parts.items()}
        return {**rounded, "ensemble": self.ensemble, "groups": self.groups}


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
    return data.x_test, data.y_test


# --- what is stored, what is shown --------------------------------------------------------------


class Store:
    """All runs so far, written after each of them."""

    def __init__(self, file: Path) -> None:
        self.file = file
        text = file.read_text(encoding="utf-8") if file.exists() else "{}"
        self.runs: dict[str, Any] = json.loads(text)

    def has(self, key: str, rounds: int) -> bool:
        """Whether a run of at least so many rounds is there."""
        return key in self.runs and self.runs[key]["rounds"] >= rounds

    def put(self, key: str, entry: dict[str, Any]) -> None:
        """Add a run, and write."""
        self.runs[key] = entry
        self.file.write_text(json.dumps(self.runs, indent=0), encoding="utf-8")
        self.file.with_suffix(".md").write_text(report(self.runs), encoding="utf-8")


def _runs_of(runs: Mapping[str, Any], column: str, arm: str) -> dict[str, dict[str, Any]]:
    """Seed → run."""
    before = f"{column}/{arm}/"
    return {key[len(before) :]: runs[key] for key in sorted(runs) if key.startswith(before)}


def report(runs: Mapping[str, Any]) -> str:
    """The tables as Markdown."""
    lines, missing = ["# FedGenP beside its baselines", "", *INTRODUCTION, ""], []
    for name, column in COLUMNS.items():
        rows = [row for arm in column.arms for row in _rows(runs, name, arm)]
        if not rows:
            missing.append(f"- {column.title}")
            continue
        title = f"## {column.title}: after {_reached(runs, name)} rounds"
        lines += [title, "", *_head(column), *rows, ""]
    if missing:
        lines += ["## Not run", "", *missing, ""]
    extra = RESULTS / "generators.md"
    if extra.exists():
        lines += [extra.read_text(encoding="utf-8").strip(), ""]
    return "\n".join(lines)


INTRODUCTION = (
    "Accuracy in %, mean ± deviation over seeds, of the last five rounds' mean where they were "
    "evaluated. All methods of a table are compared after the same round, the last that all of "
    "them reached. 20 mini-batches of 32 a round; MNIST and EMNIST: lr 0.01, the network of "
    "FedGen's published code (conv 6, conv 16, each with BatchNorm, 784 → 32 → classes), whose "
    "numbers FedGenP's table repeats; the smaller "
    "columns: lr 0.05, an MLP of 128 units. *Per*: each silo's own model after its training, on "
    "its own test data. *Gain*: over FedAvg, or over the same groups without generators: mean ± "
    "deviation of the differences seed by seed, which say more than the deviations of the means, "
    "as a seed is another cut of the data. *Latents*: share that the other heads, and the "
    "receiver's own, label as meant. a_t = 10·0.98^(t−1), the released code's weights.",
    "",
    "*Cut and measured as released*: the very silos of the released scripts (one cut for all "
    "seeds), 300 rounds with a learning rate that falls by 1 % a round, which together is as much "
    "as 95 rounds of the other columns; BatchNorm's running statistics stay at the silos, and the "
    "global model is tested with them, on each silo's twentieth of the test images of its own "
    "labels; the figure is the mean of the five best rounds, of every tenth and the last hundred. "
    "So measures the code that was released with the paper.",
    "",
    "Made by `python -m benchmarks.fedgenp --data FOLDER`.",
)


def _head(column: Column) -> list[str]:
    names = [
        "method",
        "global",
        "Per",
        "gain: global",
        "gain: Per",
        "latents: others, own",
        "seeds",
    ]
    names += ["paper: global, Per"] if column.paper else []
    return ["| " + " | ".join(names) + " |", "|---" * len(names) + "|"]


def _reached(runs: Mapping[str, Any], name: str) -> int:
    """The last round that all methods of a column reached."""
    return min(int(entry["rounds"]) for key, entry in runs.items() if key.startswith(f"{name}/"))


def _rows(runs: Mapping[str, Any], name: str, arm: str) -> list[str]:
    found = _runs_of(runs, name, arm)
    if not found:
        return []
    column = COLUMNS[name]
    value = partial(_best if column.released else _late, upto=_reached(runs, name))
    last = [r["latents"][-1][1:] for r in found.values() if r["latents"]]
    latents = f"{np.mean(last, axis=0)[0]:.0f}, {np.mean(last, axis=0)[1]:.0f}" if last else "–"
    base = _runs_of(runs, name, arm.removesuffix(GENERATORS) if GENERATORS in arm else "FedAvg")
    both = [(run, base[seed]) for seed, run in found.items() if seed in base and arm != "FedAvg"]
    cells = [
        arm,
        *(_spread([value(run, part) for run in found.values()]) for part in PARTS),
        *(_spread([value(a, part) - value(b, part) for a, b in both], "+") for part in PARTS),
        latents,
        str(len(found)),
    ]
    rows = [cells + _paper(column, arm)]
    told = [r["ensemble"] for r in found.values() if r["ensemble"] is not None]
    if told:
        after = ", ".join(str(r) for r in sorted({r["rounds"] for r in found.values()}))
        own = [f"FedEnsemble (after {after})", _spread(told), *"––––", str(len(told))]
        rows.append(own + _paper(column, "FedEnsemble"))
    return ["| " + " | ".join(row) + " |" for row in rows]


def _paper(column: Column, arm: str) -> list[str]:
    if not column.paper:
        return []
    figures = column.paper.get(arm.removesuffix(", a_t"))
    return ["–" if figures is None else f"{figures[0]:.2f}, {figures[1]:.2f}".replace("nan", "–")]


def _late(run: Mapping[str, Any], part: str, upto: int) -> float:
    """The mean of the rounds evaluated among the last five before ``upto``; NaN if none was."""
    values = [v for r, v in run[part] if upto - LAST < r <= upto]
    return float(np.mean(values)) if values else float("nan")


def _best(run: Mapping[str, Any], part: str, upto: int) -> float:
    """The mean of the five best rounds, as the paper's figures; NaN if none was evaluated."""
    values = sorted(v for r, v in run[part] if r <= upto)[-5:]
    return float(np.mean(values)) if values else float("nan")


def _spread(values: Sequence[float], sign: str = "") -> str:
    if not values or np.isnan(values).any():
        return "–"
    mean = f"{np.mean(values):{sign}.2f}"
    return f"{mean} ± {np.std(values, ddof=1):.2f}" if len(values) > 1 else mean


def _problem(column: Column, folder: str) -> str:
    """Why the folder's data cannot be had, or an empty text."""
    try:
        options = {**column.data, "data": folder, "silos": column.silos, "silo": 0, "split-seed": 0}
        load_task(f"benchmarks.fedgenp:{column.task}").load(options)
    except TaskError as error:
        return str(error)
    return ""


def main() -> None:
    """Run what is missing and print the tables."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--data", required=True, help="folder with MNIST, and what else there is")
    parser.add_argument("--columns", default="", help="names, with commas; empty takes all")
    parser.add_argument("--arms", default="", help="names, with semicolons; empty takes all")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--rounds", type=int, default=0, help="0 takes the column's")
    given = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("coterie").setLevel(logging.ERROR)
    store = Store(RESULTS / "fedgenp.json")
    names = [name.strip() for name in given.columns.split(",") if name] or list(COLUMNS)
    if unknown := [name for name in names if name not in COLUMNS]:
        parser.error(f"no column {unknown[0]!r}. There are: {', '.join(COLUMNS)}.")
    for name in names:
        column = COLUMNS[name]
        if problem := _problem(column, given.data):
            print(f"{name}: not run. {problem}", flush=True)
            continue
        arms = [arm for arm in given.arms.split(";") if arm] or column.arms
        for seed in range(given.seeds):
            for arm in arms:
                key, rounds = f"{name}/{arm}/{seed}", given.rounds or column.rounds
                if store.has(key, rounds):
                    continue
                entry = run(name, arm, seed, rounds, given.data)
                store.put(key, entry)
                print(key, entry["global"][-1:], entry["per"][-1:], entry["seconds"], flush=True)
    print(report(store.runs))


if __name__ == "__main__":
    main()
