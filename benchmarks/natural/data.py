"""The data sets: how they are read, split into folds, and scaled; and the task of their silos.

A set is a file ``NAME.npz`` with arrays ``SILO_X`` (n, p), NaN where a value is missing,
``SILO_y`` (n,) and, if the silos share a calendar, ``SILO_t`` (n,) in days; ``meta`` is JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray
from torch import nn

from coterie.tasks import SiloData, Task, families, trees
from coterie.tasks.base import Option
from coterie.tasks.models import named
from coterie.tasks.problems import Numbers, Problem

Floats = NDArray[np.float64]

BLOCK_DAYS = 30
"""Length of the blocks that sets with a calendar are split by, the same blocks for all silos."""
FOLDS = 5
"""Of every set: parts of which one is held out."""
MOST_ROWS = 500
"""Most training rows of a silo, drawn by the seed: with thousands, there is little to share."""
CALENDAR = ("weather_aus", "gefcom_load")
"""Sets whose rows have a day."""
STRICT = {"parkinsons": ("test_time", 0.3)}
"""Set → (feature, share): held out are the rows in which this feature is largest.

Neighbouring rows of these sets are interpolated from each other."""


@dataclass(frozen=True)
class Silo:
    """One silo's rows, scaled; x_train (n, p), x_test (m, p)."""

    x_train: Floats
    y_train: NDArray[np.float64] | NDArray[np.int64]
    x_test: Floats
    y_test: NDArray[np.float64] | NDArray[np.int64]
    blocks: NDArray[np.int64]
    """(n,) Numbers of the training rows' blocks: a tuning must not split a block."""


@dataclass(frozen=True)
class Fold:
    """A set with one part held out.

    Attributes:
        silos: name → rows. Columns are scaled by the mean and deviation of all training rows, real
            targets likewise; missing values are 0, with an indicator for each column that lacks
            any.
        classes: number of classes; 0 for real targets.
    """

    silos: Mapping[str, Silo]
    classes: int

    @property
    def width(self) -> int:
        """Return the number of columns."""
        return int(next(iter(self.silos.values())).x_train.shape[1])


def folds_of(name: str) -> int:
    """Return the number of folds of a set: 1 if it has a strict split."""
    return 1 if name in STRICT else FOLDS


@lru_cache(maxsize=2)
def read(file: Path) -> tuple[dict[str, dict[str, NDArray[np.generic]]], dict[str, object]]:
    """Return silo → its arrays ``X``, ``y`` and, with a calendar, ``t``; and the set's meta."""
    with np.load(file, allow_pickle=False) as arrays:
        meta = json.loads(str(arrays["meta"]))
        silos = {
            name: {k: arrays[f"{name}_{k}"] for k in "Xyt" if f"{name}_{k}" in arrays}
            for name in meta["silos"]
        }
    return silos, meta


@lru_cache(maxsize=2)
def fold(file: Path, number: int, seed: int) -> Fold:
    """Return a set with part ``number`` held out, and training rows drawn by ``seed``."""
    silos, meta = read(file)
    classes = int(meta["n_classes"] or 0)  # type: ignore[call-overload]
    parts = {name: _split(file.stem, own, meta, number, seed) for name, own in silos.items()}
    x = np.concatenate([silos[n]["X"][train] for n, (train, _) in parts.items()]).astype(float)
    seen = ~np.isnan(x)
    count = np.maximum(seen.sum(axis=0), 1)
    mean = np.where(seen, x, 0).sum(axis=0) / count
    width = np.sqrt(np.where(seen, (x - mean) ** 2, 0).sum(axis=0) / count)
    width[width == 0] = 1.0
    gaps = [np.isnan(own["X"].astype(float)).any(axis=0) for own in silos.values()]
    lacking = np.flatnonzero(np.any(gaps, axis=0))
    y = np.concatenate([silos[n]["y"][train] for n, (train, _) in parts.items()])
    centre, spread = (0.0, 1.0) if classes else (float(y.mean()), float(y.std()))

    def inputs(rows: NDArray[np.generic]) -> Floats:
        raw = rows.astype(float)
        missing = np.isnan(raw)
        return np.hstack([np.where(missing, 0, (raw - mean) / width), missing[:, lacking]])

    def targets(own: NDArray[np.generic]) -> NDArray[np.float64] | NDArray[np.int64]:
        return own.astype(np.int64) if classes else (own.astype(float) - centre) / spread

    made = {}
    for name, (train, test) in parts.items():
        own = silos[name]
        days = own["t"][train].astype(int) // BLOCK_DAYS if "t" in own else np.arange(len(train))
        made[name] = Silo(
            inputs(own["X"][train]),
            targets(own["y"][train]),
            inputs(own["X"][test]),
            targets(own["y"][test]),
            days,
        )
    return Fold(made, classes)


def _split(
    name: str,
    own: Mapping[str, NDArray[np.generic]],
    meta: Mapping[str, object],
    number: int,
    seed: int,
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Return the training and test rows of one silo."""
    rows = len(own["y"])
    if name in STRICT:
        feature, share = STRICT[name]
        at = list(meta["features"]).index(feature)  # type: ignore[call-overload]
        order = np.argsort(own["X"][:, at].astype(float), kind="stable")
        held_out = np.isin(np.arange(rows), order[rows - int(share * rows) :])
    elif "t" in own:
        held_out = own["t"].astype(int) // BLOCK_DAYS % FOLDS == number
    else:
        held_out = np.random.default_rng(0).permutation(rows) % FOLDS == number
    train = np.flatnonzero(~held_out)
    drawn = np.random.default_rng([seed, rows]).permutation(len(train))[:MOST_ROWS]
    return np.sort(train[drawn]), np.flatnonzero(held_out)


class Natural(Task):
    """A silo of a set. Options: ``file``, ``fold``, ``seed``, ``silo``, ``network``, ``blocks``.

    Networks are ``linear`` and those of coterie for tables, such as ``mlp-64``, or ``any-TxD``.
    With ``blocks``, runs hold out whole blocks of days.
    """

    name = "natural"

    def __init__(self, file: str, network: str) -> None:
        self.file, self.network = Path(file), network
        _, meta = read(self.file)
        self.num_classes = int(meta["n_classes"] or 0)  # type: ignore[call-overload]
        self.metric = "" if self.num_classes else "rmse"
        if network.startswith("any"):
            self.families, self.run_keys = families.FAMILIES, families.KEYS

    families: tuple[str, ...] = ()

    def of_run(self, values: Mapping[str, Any]) -> Self:
        """Return the task of one family of models, if the values name one."""
        made = super().of_run(values)
        if family := values.get(families.FAMILY):
            trees = self.network.replace("any", families.TREES)
            made.network = trees if family == families.TREES else "mlp-64"
            made.families = ()
        return made

    @property
    def problem(self) -> Problem:
        """Classes, or one real target."""
        return super().problem if self.num_classes else Numbers()

    def model(self) -> nn.Module:
        """Return a linear model that starts from 0, or a network."""
        if self.families:
            return families.of_all(self)
        width, outputs = fold(self.file, 0, 0).width, self.num_classes or 1
        if self.network.startswith("trees"):
            return trees.named(self.network, shape=(width,), problem=self.problem)
        if self.network != "linear":
            return named(self.network, shape=(width,), num_classes=outputs)
        model, head = nn.Sequential(), nn.Linear(width, outputs)
        nn.init.zeros_(head.weight)
        nn.init.zeros_(head.bias)
        model.add_module("head", head)
        return model

    def load(self, options: Mapping[str, Option]) -> SiloData:
        """Load one silo's rows of one fold."""
        found = fold(self.file, int(options["fold"]), int(options["seed"]))
        own = list(found.silos.values())[int(options["silo"])]
        y_train, y_test = (
            y if self.num_classes else y.astype(np.float32)[:, None]
            for y in (own.y_train, own.y_test)
        )
        x_train, x_test = (x.astype(np.float32) for x in (own.x_train, own.x_test))
        blocks = own.blocks if options.get("blocks") else None
        classes = self.num_classes or None
        return SiloData(x_train, y_train, x_test, y_test, classes, blocks=blocks)


def registered(file: Path, network: str) -> str:
    """Return the name by which ``coterie.tasks`` loads this set's task with a network."""
    attribute = f"{file.stem}_{network}".replace("-", "_")
    globals()[attribute] = partial(Natural, str(file), network)
    return f"{__name__}:{attribute}"
