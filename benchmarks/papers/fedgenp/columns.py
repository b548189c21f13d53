"""The columns of FedGenP's tables: how the data are cut among silos, and the published figures."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np

from benchmarks.kit import Shared, nodes
from benchmarks.papers.fedgenp.celeba import CelebA, celeba_data
from benchmarks.papers.fedgenp.published import PublishedMnist, published_data
from coterie.tasks.base import Option, SiloData

LAST = 5
"""Rounds at the end whose mean is shown; of a column measured as released, the best of its run."""

mnist = partial(Shared, "mnist/cnn-fedgen")
mnist_small = partial(Shared, "mnist/mlp-128")
letters = partial(Shared, "emnist-letters/cnn-fedgen")
domains = partial(Shared, "benchmarks.papers.digit_five:small")
published = PublishedMnist
celeba = CelebA


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
        steps: mini-batches of a silo in a round, the paper's "local epochs".
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
    steps: int = 20

    @property
    def task_name(self) -> str:
        """What makes the task, of this module."""
        return f"{__name__}:{self.task}"

    @property
    def names(self) -> tuple[str, ...]:
        """Of the silos."""
        return tuple(f"silo-{number:02d}" for number in range(self.silos))

    def nodes(self, folder: str, seed: int) -> list[dict[str, Option]]:
        """What each silo is started with."""
        data = {**self.data, "data": folder, "silos": self.silos, "split-seed": seed}
        return nodes(self.task_name, self.names, data, **{"label-counts": True})


def _dirichlet(percent: int, active: int, alpha: float, *paper: float) -> Column:
    samples = {5: 1500, 10: 3000, 100: 0}[percent]  # the published split script's
    return Column(
        title=f"MNIST {percent} %, Dirichlet α = {alpha:g}, 20 silos, {active} of them a round",
        silos=20,
        active=active,
        data={
            "split": "dirichlet",
            "split-dirichlet-alpha": alpha,
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
    alpha, ratio = float(column.data["split-dirichlet-alpha"]), percent / 100
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
    return Column(
        title=f"EMNIST letters {percent} %, Dirichlet α = {alpha:g}, 20 silos",
        silos=20,
        active=20,
        data={
            "split": "dirichlet",
            "split-dirichlet-alpha": alpha,
            "split-samples": 124_800 * percent // 100,
            "split-min-samples": 10,
            "test": 100,
        },
        task="letters",
        paper=_paper_of(*paper),
    )


def _turned(title: str, silos: int, samples: int, angles: str, **more: Any) -> Column:
    return Column(
        title=title,
        silos=silos,
        active=silos,
        data={"split": "iid", "split-samples": samples, "split-rotations": angles, "test": 200},
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
    "FedGenP, λ = 0.5, 500 steps",
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
    "letters 10 % α=1": _letters(10, 1, 79.35, 79.38, 83.22, 83.69, 79.42, 79.04, 83.27, 83.85),
    "letters 10 % α=0.01": _letters(
        10, 0.01, 60.64, 61.53, 69.51, 70.09, 68.89, 68.79, 75.81, 77.05
    ),
    "letters 100 % α=0.1": _letters(
        100, 0.1, 72.42, 72.54, 76.10, 74.82, 68.29, 66.62, 75.36, 75.21
    ),
    "letters 100 % α=1": _letters(100, 1, 80.00, 80.07, 84.37, 83.64, 79.97, 79.40, 83.89, 83.43),
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
            "split-dirichlet-alpha": 0.1,
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
    f"5 % α=10 {steps} steps": replace(
        COLUMNS["5 % α=10"],
        title=f"{COLUMNS['5 % α=10'].title}, {steps} mini-batches (Table 6)",
        paper={"FedGenP": (accuracy, np.nan)},
        arms=("FedAvg", "FedGenP"),
        rounds=50,
        steps=steps,
    )
    for steps, accuracy in ((20, 92.82), (30, 92.84), (40, 92.95), (50, 92.99))
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
