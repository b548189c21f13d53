"""FedCollab's data sets with the paper's settings and figures, from ``experiments.toml``."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.kit import nodes
from coterie.strategies.fedcollab.discriminators import Discriminators
from coterie.tasks.base import Option

NAMES = tuple(f"silo-{i:02d}" for i in range(20))
PAPER_STRUCTURE = [list(range(5)), list(range(5, 10)), list(range(10, 20))]
MIN_AUTHORS_ROUNDS = 101
"""Of the released code, for every pair."""


@dataclass(frozen=True)
class Experiment:
    """One of the paper's data sets.

    Attributes:
        title, notes: for the table.
        task: what makes it, of ``data``.
        data: the task's options without folder, silo and seed.
        keys: of the run's configuration.
        rounds: of the paper.
        paper: variant → accuracy, IPR, RSD in %, as far as they are at hand; the last two NaN for
            Local.
        discriminators: how they are trained.
        c: FedCollab's preference for more data.
    """

    title: str
    task: str
    data: Mapping[str, Option]
    keys: Mapping[str, Any]
    rounds: int
    paper: Mapping[str, Sequence[float]]
    notes: str
    discriminators: Discriminators = field(default_factory=Discriminators)
    c: float = 10.0

    def nodes(self, folder: str, seed: int) -> list[dict[str, Option]]:
        """The silos of a split."""
        data = {"split-seed": seed, **self.data, "data": folder}
        task = f"benchmarks.papers.fedcollab.data:{self.task}"
        return nodes(task, NAMES[: int(self.data["silos"])], data)


LOCAL, GLOBAL = "Local", "FedAvg"
COLLAB, TUNED, DITTO = "FedAvg + FedCollab", "Finetune + FedCollab", "Ditto + FedCollab"
VARIANTS: dict[str, Mapping[str, Any]] = {
    LOCAL: {"strategy": "independent"},
    GLOBAL: {"strategy": "fedavg"},
    COLLAB: {"strategy": "fedcollab"},
    TUNED: {"strategy": "fedcollab", "personalise": "finetune"},
    DITTO: {"strategy": "fedcollab", "personalise": "ditto"},
}
_BASES: Mapping[str, Mapping[str, Any]] = {
    "FedProx": {"proximal-mu": 0.1},
    "FedNova": {"within": "fednova"},
    "Per-FedAvg": {"within": "perfedavg"},
    "pFedMe": {"within": "pfedme", "moreau-lambda": 1.0, "moreau-lr": 0.1, "inner-steps": 5},
}
"""With the options of the paper's code."""
VARIANTS |= {
    f"{name}{collab}": {**keys, "strategy": "fedcollab"}
    if collab
    else {
        "strategy": keys.get("within", "fedavg"),
        **{k: v for k, v in keys.items() if k != "within"},
    }
    for name, keys in _BASES.items()
    for collab in ("", " + FedCollab")
}
ADAPTING = [name for name in VARIANTS if "Per-FedAvg" in name or "pFedMe" in name]
"""Silos test what they make of their model, as these methods say."""


def _read(discriminators: Mapping[str, Any] | None = None, **own: Any) -> Experiment:
    return Experiment(discriminators=Discriminators(**discriminators or {}), **own)


EXPERIMENTS = {
    name: _read(**own)
    for name, own in tomllib.loads(
        Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
    ).items()
}
