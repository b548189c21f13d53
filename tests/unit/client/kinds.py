"""A small task in code, which others change, and runs of three silos that have it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch import nn

from coterie.engine.inprocess import InProcessGrid
from coterie.strategies import FederationError
from coterie.strategies.rounds.result import RunResult
from coterie.tasks.base import SiloData, Task
from tests.kit import Node, run


class Kinds(Task):
    """Three classes from four numbers; the silo's number is the seed of its data."""

    name = "kinds"
    num_classes = 3

    def model(self) -> nn.Module:
        return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))

    def load(self, options: Any) -> SiloData:
        draw = np.random.default_rng(int(options["silo"]))
        x = draw.normal(size=(60, 4)).astype(np.float32)
        y = (x[:, 0] > 0).astype(np.int64) + (x[:, 1] > 0)
        return SiloData(x[:40], y[:40], x[40:], y[40:], 3)


def source(task: type[Task]) -> str:
    """Return what a silo's settings call a task in code."""
    return f"{task.__module__}:{task.__name__}"


def nodes_of(task: type[Task], folder: Path, **more: Any) -> list[Node]:
    """Return nodes of three silos of a task, each with a folder."""
    own = {"task": source(task), "device": "cpu", "threads": 1, **more}
    return [
        {"name": name, **own, "data.silo": index, "home": str(folder / name)}
        for index, name in enumerate("abc")
    ]


def play(
    folder: Path,
    task: type[Task],
    strategy: str = "fedavg",
    *,
    silos: InProcessGrid | Sequence[Node] | None = None,
    **keys: Any,
) -> RunResult:
    """Play a run of three silos of a task, recorded in ``folder/run``."""
    usual = {"rounds": 2, "local_epochs": 1, "wait_for_silos": 0.05, "lr": 0.1}
    own = {"strategy": strategy, "task": source(task)}
    return run(folder / "run", silos or nodes_of(task, folder), **(usual | own | keys))


def refusal(folder: Path, task: type[Task], strategy: str = "fedavg", **keys: Any) -> str:
    """Play a run that does not begin; return why."""
    with pytest.raises(FederationError, match="timed out") as error:
        play(folder, task, strategy, **keys)
    return str(error.value)
