"""Where a run stands after a round."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Generic

from coterie.strategies.rounds.algorithm import State
from coterie.strategies.rounds.handles import Model
from coterie.strategies.rounds.roster import Silo


@dataclass(frozen=True)
class Checkpoint(Generic[State]):
    """Where a run stands after a round: all that the next one depends on.

    Randomness is drawn from (seed, round) and needs no place here. Silos keep what is their own.

    Attributes:
        round: the last one that is over; 0 before the first.
        state: the algorithm's, a frozen value.
        silos: who was here in that round. Their nodes may have other ids after a restart.
        ended_early: why no further round is played, in words; empty: the run goes on.
        apart: silo → its own model, of those that train outside all groups.
        kept: name of a stage → what it remembers.
    """

    round: int
    state: State
    silos: tuple[Silo, ...]
    ended_early: str = ""
    apart: Mapping[str, Model] = field(default_factory=dict)
    kept: Mapping[str, Any] = field(default_factory=dict)
