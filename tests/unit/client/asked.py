"""Tasks of every kind of problem, whose models are known exactly, and models of them as silos keep.

A model is one linear layer, so that what it must answer is a line of numpy in a test.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import ConfigRecord
from torch import nn
from torch.utils.data import Dataset

from coterie import wire
from coterie.client.home.settings import SiloSettings
from coterie.client.work.card import card_of, keep_model
from coterie.client.work.measure import evaluate_in_full
from coterie.client.work.session import open_session
from coterie.client.work.weights import read_weights
from coterie.tasks.base import Option, Samples, SiloData, StreamedData, Task
from coterie.tasks.problems import Classes, Labels, Masks, Numbers, Problem, Survival
from coterie.tasks.trees import Trees

WEIGHT = np.array([[1.0, -2.0, 0.5], [0.5, 1.0, -1.0]], np.float32)
TRUE_TEMPERATURE = 4.0
"""The models of classes and labels are that much too sure."""


class Known(Task):
    """Three numbers a sample; options: ``rows``, and ``seed`` of the data."""

    its_problem: Problem

    @property
    def problem(self) -> Problem:
        return self.its_problem

    def weight(self) -> np.ndarray:
        return WEIGHT

    def model(self) -> nn.Module:
        weight = torch.from_numpy(self.weight())
        layer = nn.Linear(weight.shape[1], weight.shape[0])
        with torch.no_grad():
            layer.weight.copy_(weight)
            layer.bias.zero_()
        return layer

    def targets(self, outputs: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        raise NotImplementedError

    def load(self, options: Mapping[str, Option]) -> SiloData | StreamedData:
        draw = np.random.default_rng(int(options.get("seed", 0)))
        rows = int(options.get("rows", 60))
        x = draw.normal(size=(2 * rows, 3)).astype(np.float32)
        y = self.targets(x @ self.weight().T, draw)
        return SiloData(x[:rows], y[:rows], x[rows:], y[rows:])


class TwoClasses(Known):
    its_problem = Classes(2)
    num_classes = 2
    classes = ("healthy", "ill")

    def targets(self, outputs: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        odds = (outputs[:, 1] - outputs[:, 0]) / TRUE_TEMPERATURE
        return (draw.random(len(odds)) < 1 / (1 + np.exp(-odds))).astype(np.int64)


class ThreeClasses(Known):
    its_problem = Classes(3)
    num_classes = 3

    def weight(self) -> np.ndarray:
        return np.concatenate([WEIGHT, np.zeros((1, 3), np.float32)])

    def targets(self, outputs: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        noise = draw.gumbel(size=outputs.shape)
        return (outputs / TRUE_TEMPERATURE + noise).argmax(axis=1)


class TwoLabels(Known):
    its_problem = Labels(2)
    classes = ("cough", "fever")

    def targets(self, outputs: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        chances = 1 / (1 + np.exp(-outputs / TRUE_TEMPERATURE))
        return (draw.random(outputs.shape) < chances).astype(np.float32)


class TwoNumbers(Known):
    its_problem = Numbers(2, "days")

    def targets(self, outputs: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        return (outputs + draw.normal(size=outputs.shape)).astype(np.float32)


class Lives(Known):
    its_problem = Survival()

    def weight(self) -> np.ndarray:
        return WEIGHT[:1]

    def targets(self, outputs: np.ndarray, draw: np.random.Generator) -> np.ndarray:
        times = draw.exponential(np.exp(-outputs[:, 0]))
        return np.stack([times, draw.random(len(times)) < 0.7], axis=1).astype(np.float32)


class Pixels(Known):
    """A class for every pixel of one-channel images of 4×5, by a threshold on its brightness."""

    its_problem = Masks(2)
    num_classes = 2
    shape = (4, 5)

    def model(self) -> nn.Module:
        layer = nn.Conv2d(1, 2, 1) if len(self.shape) == 2 else nn.Conv3d(1, 2, 1)
        with torch.no_grad():
            layer.weight.zero_()
            layer.weight[1] = 1.0
            layer.bias.copy_(torch.tensor([0.25, 0.0]))
        return layer

    def load(self, options: Mapping[str, Option]) -> SiloData:
        x = np.random.default_rng(0).normal(size=(24, 1, *self.shape)).astype(np.float32)
        y = (x[:, 0] > 0).astype(np.int64)
        return SiloData(x[:12], y[:12], x[12:], y[12:])

    def inputs(self, file: Path, options: Mapping[str, Option]) -> Samples:
        names = json.loads(file.read_text())
        return Samples(self.load(options).x_test[: len(names)], names)


class Voxels(Pixels):
    """The same of volumes of 2×3×4."""

    shape = (2, 3, 4)


class Two(nn.Module):
    """Numbers and a category in a dict."""

    def __init__(self, weight: np.ndarray) -> None:
        super().__init__()
        self.numbers = nn.Linear(3, 2, bias=False)
        self.category = nn.Embedding(4, 2)
        with torch.no_grad():
            self.numbers.weight.copy_(torch.from_numpy(weight))
            self.category.weight.copy_(torch.arange(8).reshape(4, 2).float())

    def forward(self, x: Any) -> torch.Tensor:
        out: torch.Tensor = self.numbers(x["numbers"]) + self.category(x["more"][0])
        return out


class Nested(TwoNumbers):
    """Inputs are a dict of an array and a list."""

    def model(self) -> nn.Module:
        return Two(self.weight())

    def load(self, options: Mapping[str, Option]) -> SiloData:
        plain = super().load(options)
        assert isinstance(plain, SiloData)
        kinds = np.arange(len(plain.x_train)) % 4
        x_train = {"numbers": plain.x_train, "more": [kinds]}
        x_test = {"numbers": plain.x_test, "more": [kinds[::-1].copy()]}
        return SiloData(x_train, plain.y_train, x_test, plain.y_test)

    def inputs(self, file: Path, options: Mapping[str, Option]) -> Samples:
        return Samples(self.load(options).x_test)


class Branching(TwoNumbers):
    """A model whose steps depend on what it sees."""

    def model(self) -> nn.Module:
        class Odd(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) if float(x.sum()) > 0 else -super().forward(x)

        return Odd(3, 2)


class Grown(TwoClasses):
    """Trees for a task of two classes."""

    def model(self) -> nn.Module:
        return trees_of(self.its_problem, 3)


def trees_of(problem: Problem, columns: int) -> Trees:
    """Return trees with splits at numbers such as 0 and 1, and nodes that do not split."""
    outputs = 1 if problem == Survival() else getattr(problem, "num_classes", 2)
    two = problem == Classes(2)
    model = Trees(5, 1 if two else outputs, 3, columns, two_classes=two)
    draw = torch.Generator().manual_seed(0)
    for name, array in model.state_dict().items():
        ends = {"feature": (-1, columns), "missing_left": (0, 2), "threshold": (-1, 2)}
        shape = array.shape
        drawn = (
            torch.randint(*ends[name], shape, generator=draw)
            if name in ends
            else torch.randn(shape, generator=draw)
        )
        drawn = torch.arange(columns) if name == "gain" else drawn
        array.copy_(drawn)
    return model


@dataclass(frozen=True)
class Listed(Dataset[Any]):
    """Samples one by one."""

    x: np.ndarray
    y: np.ndarray

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.from_numpy(self.x[row]), torch.as_tensor(self.y[row])


class Streaming(TwoLabels):
    """The same data, read sample by sample."""

    def load(self, options: Mapping[str, Option]) -> StreamedData:
        plain = super().load(options)
        assert isinstance(plain, SiloData)
        return StreamedData(
            Listed(plain.x_train, plain.y_train), Listed(plain.x_test, plain.y_test)
        )


def keep(home: Path, kind: type[Task], *, validation: float = 0.0, **options: Option) -> Path:
    """Keep a task's model as a silo with a folder does at the end of a run; return its file."""
    home.mkdir(parents=True, exist_ok=True)
    (home / "silo.toml").write_text(f'name = "a"\ntask = "{__name__}:{kind.__name__}"\n')
    settings = SiloSettings("a", f"{__name__}:{kind.__name__}", options=options, home=str(home))
    session = open_session(settings)
    tested = evaluate_in_full(session.task, session.model, session.data)
    values = {wire.RUN: kind.__name__, wire.ROUND: 1, wire.ROUNDS: 1}
    config = ConfigRecord({**values, wire.SEED: 3, wire.VALIDATION: validation})
    model = read_weights(session.model)
    return keep_model(str(home), card_of(session, config, model, tested), model)
