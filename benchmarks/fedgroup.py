"""FedGroup's Table III with the paper's settings, ours beside the paper's figures.

    python -m benchmarks.fedgroup --data FOLDER [--rows mnist-mclr,mnist-mlp] [--seeds 1]

Every run is stored as soon as it is done; a second call adds what is missing. Writes
``results/fedgroup.json`` and ``results/fedgroup.md``.

In-process Grid, the silos' own ClientApp with the training loop of ``benchmarks.fast_sgd``, one
thread. After every round the server's side of this benchmark measures every group's model on the
test data of all silos that were ever placed in that group, as the paper does (section IV-A): hits
over all silos / all their test samples.
"""

from __future__ import annotations

import argparse
import json
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import fast_sgd
from benchmarks.fedgroup_data import DATASETS, Dataset, TestSets, all_silos
from coterie.client.app import app
from coterie.client.work.sgd import TrainPlan, seed_of
from coterie.client.work.tensors import Tensors, read_weights, to_device
from coterie.server.runs.config import RunConfig
from coterie.server.runs.inprocess import InProcessGrid
from coterie.server.runs.run import initial_arrays, train_config
from coterie.strategies import FedAvg, FedGroup
from coterie.strategies.fedgroup.algorithm import FedGroupState
from coterie.strategies.rounds.grouping import Members
from coterie.strategies.rounds.loop import Update
from coterie.strategies.rounds.roster import DescribedRoster
from coterie.tasks import Task
from coterie.tasks.base import SiloData
from coterie.wire import Model

RESULTS = Path(__file__).parent / "results"
ROUNDS = 300
BATCH, EPOCHS, SAMPLE, ALPHA = 10, 20, 20, 20
"""B, E, K and α of the paper."""
POOLED_EPOCHS, POOLED_BATCH = 20, 100
"""Of training on a group's pooled data."""
CURVE = (1, 5, 10, 20, 50, 100, 150, 200, 250, 300)
"""Rounds whose accuracy is shown."""

Curve = list[tuple[float, float]]


@dataclass(frozen=True)
class Method:
    """A column of Table III.

    Attributes:
        groups: FedGroup's options; None is FedAvg.
        proximal: with the paper's μ.
        paper: data set → accuracy, %.
    """

    groups: Mapping[str, Any] | None
    proximal: bool
    paper: Mapping[str, float]


def _paper(*figures: float | None) -> dict[str, float]:
    return {n: f for n, f in zip(DATASETS, figures, strict=True) if f is not None}


_MADC, _RCC, _RAC = {"measure": "madc"}, {"centres": "random"}, {"assign": "random"}
METHODS = {
    "FG-EDC": Method({}, False, _paper(96.0, 97.9, 91.7, 96.8, 88.4)),
    "FedAvg": Method(None, False, _paper(89.8, 95.3, 78.8, 82.7, 74.7)),
    "FG-MADC": Method(_MADC, False, _paper(95.6, 97.9, 91.2, 94.6, 92.1)),
    "FGP-EDC": Method({}, True, _paper(96.1, 97.7, 91.7, 95.4, 87.4)),
    "RCC": Method(_RCC, False, _paper(92.6, 96.5, 88.8, 91.5, 92.9)),
    "RAC": Method(_RAC, False, _paper(88.8, 94.3, 74.7, 78.4, None)),
    "FedProx": Method(None, True, _paper(90.7, 94.6, 77.9, 81.0, 81.5)),
    "FGP-MADC": Method(_MADC, True, _paper(95.3, 97.7, 90.7, 93.6, 88.5)),
}
"""In the order in which they are run."""
TARGETS = {("mnist-mclr", "FG-EDC"): 96.0, ("mnist-mlp", "FG-EDC"): 97.9}


# --- one run --------------------------------------------------------------------------------------


class Meter:
    """Measures after every round what the paper measures."""

    def __init__(self, tests: TestSets, names: Sequence[str], label: str) -> None:
        self._tests, self._label = tests, label
        self._number = {name: i for i, name in enumerate(names)}
        self._known: dict[int, tuple[Model, tuple[int, ...], float, int]] = {}
        self._started = time.monotonic()
        self.curve: Curve = []
        self.members: list[list[str]] = []

    def measure(self, models: Sequence[Model], members: Sequence[Sequence[str]]) -> None:
        """Note weighted accuracy, and the share of all test samples that it is of."""
        hits, count = 0.0, 0
        for j, (model, names) in enumerate(zip(models, members, strict=True)):
            silos = tuple(self._number[name] for name in names)
            known = self._known.get(j)
            if known is None or known[0] is not model or known[1] != silos:
                if not silos:
                    continue
                found = self._tests.evaluate(model, silos)
                right = (1 - found.error) * found.num_examples
                known = self._known[j] = (model, silos, right, found.num_examples)
            hits, count = hits + known[2], count + known[3]
        self.members = [list(names) for names in members]
        self.curve.append((100 * hits / count, count / self._tests.num_examples))
        if len(self.curve) % 10 == 0:
            passed = time.monotonic() - self._started
            text = f"{self.curve[-1][0]:.2f} %, best {max(a for a, _ in self.curve):.2f} %"
            print(f"  {self._label}, round {len(self.curve)}: {text}, {passed:.0f} s", flush=True)


class MeasuredFedAvg(FedAvg):
    """FedAvg, its global model measured on all silos."""

    def __init__(self, meter: Meter, **keys: Any) -> None:
        super().__init__(**keys)
        self.meter = meter

    def absorb(self, state: Members, updates: Sequence[Update], *, round: int) -> Members:
        """Measure what comes of the round."""
        state = super().absorb(state, updates, round=round)
        names = sorted(state.models)
        self.meter.measure([state.models[names[0]]], [names])
        return state


class MeasuredFedGroup(FedGroup):
    """FedGroup, every group's model measured on the silos placed in it so far."""

    def __init__(self, meter: Meter, **keys: Any) -> None:
        super().__init__(**keys)
        self.meter = meter

    def absorb(
        self, state: FedGroupState, updates: Sequence[Update], *, round: int
    ) -> FedGroupState:
        """Measure what comes of the round."""
        state = super().absorb(state, updates, round=round)
        members: list[list[str]] = [[] for _ in state.group_models]
        for name, number in sorted(state.group_of.items()):
            members[number].append(name)
        self.meter.measure(state.group_models, members)
        return state


@dataclass(frozen=True)
class Setting:
    """What a call asks for."""

    row: str
    method: str
    seed: int
    rounds: int
    pretrain_epochs: int

    def matches(self, run: Mapping[str, Any]) -> bool:
        """Whether a stored run is this one."""
        return all(run[key] == value for key, value in vars(self).items())


def run_one(setting: Setting, folder: str) -> dict[str, Any]:
    """Train once; return what is stored."""
    data, method = DATASETS[setting.row], METHODS[setting.method]
    task, silos = all_silos(setting.row, folder, setting.seed)
    meter = Meter(TestSets(task, silos), data.names, f"{setting.row} {setting.method}")
    config = _run_config(data, method, setting)
    roster = DescribedRoster(config.task, data.silos)
    grid = InProcessGrid(app, data.node_configs(folder=folder, seed=setting.seed))
    common: dict[str, Any] = {
        "sample": SAMPLE,
        "seed": setting.seed,
        "train_config": train_config(config, run="bench"),
        "roster": roster,
        "evaluate": False,
    }
    strategy: FedAvg | FedGroup
    if method.groups is None:
        strategy = MeasuredFedAvg(meter, **common)
    else:
        strategy = MeasuredFedGroup(
            meter,
            num_groups=data.num_groups,
            pretrain_silos=ALPHA * data.num_groups,
            pretrain_epochs=setting.pretrain_epochs,
            **method.groups,
            **common,
        )
    plan = TrainPlan(EPOCHS, BATCH, data.lr, proximal_mu=config.proximal_mu)
    fast_sgd.check(task, _tensors(silos[:1]), plan)
    started = time.monotonic()
    initial = initial_arrays(grid, roster.present(grid, round=1)[0], config)
    with fast_sgd.fast_silos():
        result = strategy.start(grid=grid, initial_arrays=initial, num_rounds=setting.rounds)
    separation = result.rounds[-1].details.get("separation")
    return vars(setting) | {
        "curve": [[round(100 * a) / 100, round(share, 4)] for a, share in meter.curve],
        "groups": [len(names) for names in meter.members],
        "separation": separation,
        "seconds": round(time.monotonic() - started, 1),
        "pooled": pooled(task, silos, data, meter, seed=setting.seed),
    }


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


def _tensors(silos: Sequence[SiloData]) -> Tensors:
    keys = ("x_train", "y_train", "x_test", "y_test")
    joined = {key: np.concatenate([getattr(silo, key) for silo in silos]) for key in keys}
    return to_device(joined, torch.device("cpu"))


def _run_config(data: Dataset, method: Method, setting: Setting) -> RunConfig:
    return RunConfig.read(
        {
            "task": data.task,
            "seed": setting.seed,
            "rounds": setting.rounds,
            "min-silos": data.silos,
            "local-epochs": EPOCHS,
            "batch-size": BATCH,
            "lr": data.lr,
            "lr-decay": 1.0,
            "proximal-mu": data.proximal_mu if method.proximal else 0.0,
        }
    )


# --- what is stored, what is shown ----------------------------------------------------------------


class Store:
    """All runs so far, written after each of them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        path = folder / "fedgroup.json"
        self.runs: list[dict[str, Any]] = (
            json.loads(path.read_text())["runs"] if path.exists() else []
        )

    def has(self, setting: Setting) -> bool:
        """Whether this run is stored."""
        return any(setting.matches(run) for run in self.runs)

    def add(self, run: dict[str, Any]) -> None:
        """Keep a run and write both files."""
        self.runs.append(run)
        self.folder.mkdir(exist_ok=True)
        text = ",\n".join(json.dumps(entry) for entry in self.runs)
        (self.folder / "fedgroup.json").write_text(f'{{"runs": [\n{text}\n]}}\n')
        (self.folder / "fedgroup.md").write_text(document(self.runs))


def best(run: Mapping[str, Any], rounds: int = ROUNDS) -> float:
    """The paper's score: the accuracy of the best of these rounds."""
    return float(max(accuracy for accuracy, _ in run["curve"][:rounds]))


def document(runs: Sequence[Mapping[str, Any]]) -> str:
    """Everything stored, as Markdown."""
    lines = [
        "# FedGroup's Table III",
        "",
        "Made by `python -m benchmarks.fedgroup --data FOLDER`. Weighted test accuracy in %: hits "
        "over all silos / all test samples, best of the rounds as in the paper (which is a choice "
        "by the test data; the last ten rounds' mean stands beside it). "
        f"B = {BATCH}, E = {EPOCHS}, K = {SAMPLE} silos a round, α = {ALPHA}, the paper's η, μ, m; "
        "every cold start is one epoch and the round goes on with the other 19. FG: FedGroup, FGP: "
        "with FedProx's term. RCC, RAC: random centres, random assignment of cold silos (EDC). "
        "*Pooled*: one model per group trained on the pooled data of its silos, "
        f"{POOLED_EPOCHS} epochs of batch {POOLED_BATCH}: what these groups allow. *Tested*: share "
        "of the test samples whose silos have a group after the last round. In-process Grid, one "
        "thread; seconds are of shared cores.",
        "",
        "Fewer than 300 rounds are fewer than the paper's. Methods are compared over the rounds "
        "that all of a table have.",
        "",
    ]
    for row in DATASETS:
        own = [run for run in runs if run["row"] == row]
        if own:
            lines += _section(row, own)
    return "\n".join(lines)


def _section(row: str, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    data, common = DATASETS[row], min(run["rounds"] for run in runs)
    lines = [
        f"## {row}",
        "",
        f"{data.silos} silos, η = {data.lr:g}, m = {data.num_groups}. {data.notes}".rstrip(),
        "",
        *(f"`{command}`  " for command in _commands(row, runs)),
        "",
        f"| | seed | rounds | best | best of {common} | the paper | gap | last ten | pooled | "
        "silos in groups | tested | separation | s | target |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    lines += [_line(run, common) for name in METHODS for run in runs if run["method"] == name]
    lines += ["", *_order(row, runs, common), "", *_curves(runs), ""]
    return lines


def _commands(row: str, runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """What to type for these runs."""
    commands = []
    for rounds, epochs in sorted({(r["rounds"], r["pretrain_epochs"]) for r in runs}, reverse=True):
        made = [r for r in runs if (r["rounds"], r["pretrain_epochs"]) == (rounds, epochs)]
        methods = ",".join(name for name in METHODS if any(r["method"] == name for r in made))
        seeds = ",".join(map(str, sorted({r["seed"] for r in made})))
        parts = f"--rows {row} --methods {methods} --seeds {seeds} --rounds {rounds}"
        more = "" if epochs == 1 else f" --pretrain-epochs {epochs}"
        commands.append(f"python -m benchmarks.fedgroup --data FOLDER {parts}{more}")
    return commands


def _line(run: Mapping[str, Any], common: int) -> str:
    paper = METHODS[run["method"]].paper.get(run["row"])
    target = TARGETS.get((run["row"], run["method"]))
    found, last = best(run), float(np.mean([a for a, _ in run["curve"][-10:]]))
    separation = run["separation"]
    cells = [
        _name(run),
        str(run["seed"]),
        str(run["rounds"]),
        f"{found:.2f}",
        f"{best(run, common):.2f}",
        "" if paper is None else f"{paper:.1f}",
        "" if paper is None else f"{found - paper:+.2f}",
        f"{last:.2f}",
        f"{run['pooled']:.2f}",
        ", ".join(map(str, run["groups"])),
        f"{100 * run['curve'][-1][1]:.0f} %",
        "" if separation is None else f"{separation:.2f}",
        f"{run['seconds']:.0f}",
        "" if target is None else f"≥ {target}: {'met' if found >= target else 'missed'}",
    ]
    return "| " + " | ".join(cells) + " |"


def _name(run: Mapping[str, Any]) -> str:
    epochs: int = run["pretrain_epochs"]
    method: str = run["method"]
    return method + ("" if epochs == 1 else f", pre-training {epochs or EPOCHS} epochs")


def _order(row: str, runs: Sequence[Mapping[str, Any]], common: int) -> list[str]:
    """Both orders of the methods, best first."""
    made: dict[str, list[float]] = {}
    for run in runs:
        made.setdefault(run["method"], []).append(best(run, common))
    named = {name: float(np.mean(scores)) for name, scores in made.items()}
    published = {name: METHODS[name].paper[row] for name in named if row in METHODS[name].paper}
    return [
        f"Order of methods, ours: {_ranking(named)}.",
        f"In the paper: {_ranking(published)}.",
    ]


def _ranking(scores: Mapping[str, float]) -> str:
    ordered = sorted(scores, key=lambda name: -scores[name])
    return " > ".join(f"{name} {scores[name]:.1f}" for name in ordered)


def _curves(runs: Sequence[Mapping[str, Any]]) -> list[str]:
    """Best accuracy so far after some rounds."""
    rounds = [r for r in CURVE if r <= max(run["rounds"] for run in runs)]
    lines = [
        "Best so far, after so many rounds:",
        "",
        "| | seed | " + " | ".join(map(str, rounds)) + " |",
        "|---" * (len(rounds) + 2) + "|",
    ]
    for name in METHODS:
        for run in (run for run in runs if run["method"] == name):
            cells = [f"{best(run, r):.1f}" if r <= run["rounds"] else "" for r in rounds]
            lines.append(f"| {_name(run)} | {run['seed']} | " + " | ".join(cells) + " |")
    return lines


# --- the command ----------------------------------------------------------------------------------


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", required=True, help="folder with the data sets")
    parser.add_argument("--rows", default="mnist-mclr,mnist-mlp,synthetic-mclr")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--seeds", default="0", help="e.g. 0,1,2")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--pretrain-epochs", type=int, default=1)
    given = parser.parse_args()
    logging.getLogger("coterie").setLevel(logging.ERROR)
    store = Store(RESULTS)
    for row in given.rows.split(","):
        for seed in map(int, given.seeds.split(",")):
            for method in given.methods.split(","):
                setting = Setting(row, method, seed, given.rounds, given.pretrain_epochs)
                if not store.has(setting):
                    store.add(run_one(setting, given.data))
    print(document(store.runs))


if __name__ == "__main__":
    main()
