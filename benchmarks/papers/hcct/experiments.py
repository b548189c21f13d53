"""The experiments of HCCT's paper, from ``experiments.toml``: data, variants, published figures."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.kit import Shared, nodes
from coterie.tasks.base import Option

PERSISTENCE = "persistence"
"""In place of a number for α: the value that persists, see ``observe.persistent_alpha``."""

Keys = Mapping[str, Any]

digit_five = partial(Shared, "benchmarks.papers.digit_five:DigitFive")
digit_five_mlp = partial(Shared, "benchmarks.papers.digit_five:small")
fashion_mnist = partial(Shared, "fashion-mnist")
cifar10 = partial(Shared, "cifar10")


@dataclass(frozen=True)
class Variant:
    """One way to train.

    Attributes:
        keys: of the run's configuration.
        groups: fixed groups, by number of the silo, in place of a strategy.
        first_statistics: with fixed groups: BatchNorm's statistics are those of a group's first
            silo, as the paper's authors released it.
        paper: mean and deviation of the error in the paper, %.
        spread: deviation, least and largest error over silos in the paper, %.
    """

    keys: Keys = field(default_factory=dict)
    groups: Sequence[Sequence[int]] = ()
    first_statistics: bool = False
    paper: Sequence[float] | None = None
    spread: Sequence[float] | None = None


@dataclass(frozen=True)
class Experiment:
    """One of the paper's experiments.

    Attributes:
        title: heading of its table.
        task: name of the built-in task.
        silos: names, in the order of the split.
        data: the task's options without folder, silo and seed.
        rounds: of the paper.
        epochs: local ones, a round.
        variants: name → variant.
        truth: groups that are right by construction, by number of the silo.
        notes: how the data differs from the paper's.
    """

    title: str
    task: str
    silos: Sequence[str]
    data: Mapping[str, Option]
    rounds: int
    epochs: int
    variants: Mapping[str, Variant]
    truth: Sequence[Sequence[int]]
    notes: str

    def nodes(self, folder: str, seed: int, **more: Option) -> list[dict[str, Option]]:
        """The silos of a split; ``more`` of the task's options."""
        task = f"{__name__}:{self.task.replace('-', '_')}"
        return nodes(task, self.silos, {**self.data, **more, "data": folder, "split-seed": seed})


def _read(variants: Mapping[str, Mapping[str, Any]], **own: Any) -> Experiment:
    return Experiment(variants={name: Variant(**v) for name, v in variants.items()}, **own)


def hcct(alpha: float | str) -> Keys:
    """HCCT with another α."""
    return {"strategy": "hcct", "alpha": alpha, "similarity": "parameters"}


EXPERIMENTS = {
    name: _read(**own)
    for name, own in tomllib.loads(
        Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    ).items()
}
