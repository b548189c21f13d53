"""Checkpoints: the state of a run after a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic

from coterie.strategies.rounds.algorithm import State
from coterie.strategies.rounds.handles import Model
from coterie.strategies.rounds.roster import Silo


@dataclass(frozen=True)
class Checkpoint(Generic[State]):
    """The state of a run after a round: everything that the next round depends on.

    Randomness is drawn from (seed, round) and is not stored. Silos store their own state.

    Attributes:
        round: the last finished round; 0 before the first.
        silos: those of that round; their nodes may have other ids after a restart.
        ended_early: why no further round is played; empty if the run continues.
        apart: silo → its own model, for silos that train outside all groups.
        kept: name of a stage → what it remembers.
    """

    round: int
    state: State
    silos: tuple[Silo, ...]
    ended_early: str = ""
    apart: Mapping[str, Model] = field(default_factory=dict)
    kept: Mapping[str, Any] = field(default_factory=dict)
