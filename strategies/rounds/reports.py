"""What is told of a round: to whoever follows the run, and to its record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from math import nan
from typing import Any

from coterie.wire import Value

Group = tuple[str, ...]
Evaluation = tuple[float, float, int]
"""Loss, error and number of test samples."""
Figures = Mapping[str, Value]
"""Metric → value."""


@dataclass(frozen=True)
class PhaseReport:
    """What one kind of work beside the round's own training cost. Bytes are of arrays.

    Attributes:
        exchanges, seconds: of its own, wall seconds; 0 where it went with the round's training.
        messages: to silos.
        silo_seconds: the silos' own, added up, as far as they state them.
    """

    exchanges: int = 0
    messages: int = 0
    seconds: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    silo_seconds: float = 0.0

    def __add__(self, other: PhaseReport) -> PhaseReport:
        """Both together."""
        return PhaseReport(
            *(getattr(self, f.name) + getattr(other, f.name) for f in fields(PhaseReport))
        )


@dataclass(frozen=True)
class SiloReport:
    """One silo in one round. Bytes are of arrays; seconds are the silo's own.

    Attributes:
        update_norm: Euclidean norm of what its training changed, where it says so.
        update_lost: what was rounded away of that in a smaller format, as a share of the norm.
        discrepancy: Euclidean distance of the parameters that it trained to those of its group's
            model after the round (Duan et al., FedGroup, eq. 4); where it trained with others, and
            not in a secure run, in which nobody sees what one silo trained.
    """

    num_examples: float
    train_loss: float
    seconds: float
    bytes_sent: int
    bytes_received: int
    update_norm: float = nan
    update_lost: float = nan
    discrepancy: float = nan


@dataclass(frozen=True)
class RoundReport:
    """What happened in a round.

    Attributes:
        round: from 1; 0 for the evaluation of the initial model.
        groups: who trained together.
        joined, left: since the round before.
        left_out: silo → why its update does not count.
        silos: per silo that answered.
        evaluation: silo → (loss, error, number of test samples) of the model held after
            round ``evaluated_round``.
        train_metrics, metrics: silo → metric → value, of what else its app says of its training,
            and of that evaluation.
        personalised: silo → (loss, error) of the model as it trained it in this round, on the same
            test samples; of silos that were asked for it.
        seconds: phase → wall seconds.
        phases: message type → what was exchanged before the round's training; purpose → what
            silos did in the round's own exchange beside their training.
        details: what the algorithm adds for the record.
        ended_early: why this is the last round of a run of more, in words; empty: it is not.
        final: this is the evaluation after the last round.
    """

    round: int
    groups: tuple[Group, ...] = ()
    joined: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    silos: Mapping[str, SiloReport] = field(default_factory=dict)
    evaluated_round: int = 0
    evaluation: Mapping[str, Evaluation] = field(default_factory=dict)
    train_metrics: Mapping[str, Figures] = field(default_factory=dict)
    metrics: Mapping[str, Figures] = field(default_factory=dict)
    personalised: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    phases: Mapping[str, PhaseReport] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)
    ended_early: str = ""
    final: bool = False
