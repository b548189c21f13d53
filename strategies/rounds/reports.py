"""Reports of rounds, for observers of a run and for its record."""

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
    """The cost of one kind of work outside the round's own training; bytes are of arrays.

    Attributes:
        exchanges, seconds: exchanges for this work only, and their wall-clock seconds; 0 if it was
            part of the round's training.
        silo_seconds: sum of the seconds that silos state.
    """

    exchanges: int = 0
    messages: int = 0
    seconds: float = 0.0
    bytes_sent: int = 0
    bytes_received: int = 0
    silo_seconds: float = 0.0

    def __add__(self, other: PhaseReport) -> PhaseReport:
        return PhaseReport(
            *(getattr(self, f.name) + getattr(other, f.name) for f in fields(PhaseReport))
        )


@dataclass(frozen=True)
class SiloReport:
    """One silo in one round; bytes are of arrays, seconds are measured by the silo.

    Attributes:
        update_norm: Euclidean norm of its update, if stated.
        update_lost: the share of that norm lost to rounding in a smaller format.
        discrepancy: Euclidean distance of the parameters that it trained to those of its group's
            model after the round (Duan et al., FedGroup, eq. 4); only if it trained with others,
            and not in a secure run, where nobody sees what one silo trained.
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
    """The report of one round.

    Attributes:
        round: from 1; 0 for the evaluation of the initial model.
        groups: that trained together.
        joined, left: since the previous round.
        left_out: silo → why its update does not count.
        evaluation: silo → (loss, error, number of test samples) of the model held after round
            ``evaluated_round``.
        train_metrics, metrics: silo → metric → value: further metrics of the training, and of that
            evaluation.
        personalised: silo → (loss, error) of the model that it trained in this round, on the same
            test samples; only silos that were asked.
        seconds: phase → wall-clock seconds.
        phases: message type → what was exchanged before the round's training; purpose → other work
            in the round's own exchange.
        details: further entries of the record, from the algorithm.
        ended_early: why the run ends with this round, before its last; empty if it does not.
        final: this is the evaluation after the last round.
    """

    round: int
    groups: tuple[Group, ...] = ()
    joined: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    silos: Mapping[str, SiloReport] = field(default_factory=dict, repr=False)
    evaluated_round: int = 0
    evaluation: Mapping[str, Evaluation] = field(default_factory=dict)
    train_metrics: Mapping[str, Figures] = field(default_factory=dict, repr=False)
    metrics: Mapping[str, Figures] = field(default_factory=dict, repr=False)
    personalised: Mapping[str, tuple[float, float]] = field(default_factory=dict, repr=False)
    seconds: Mapping[str, float] = field(default_factory=dict)
    phases: Mapping[str, PhaseReport] = field(default_factory=dict, repr=False)
    details: Mapping[str, Any] = field(default_factory=dict, repr=False)
    ended_early: str = ""
    final: bool = False
