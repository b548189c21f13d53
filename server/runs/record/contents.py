"""The contents of a run's record, as typed values.

``run.json`` holds one ``Run``, ``events.jsonl`` one ``Event`` per line; ``format`` converts them.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from coterie import wire
from coterie.server.runs.record.grouping import Grouping
from coterie.server.runs.record.metrics import Collaboration, Lead
from coterie.server.runs.record.values import Fields, Groups, clean
from coterie.strategies.rounds.reports import Evaluation, PhaseReport, RoundReport, SiloReport

OWN_APP = "own-app"
"""Key of the configuration of a run that a Flower app of your own has started."""
ENDS = ("completed", "failed", "stopped")
"""Final states of a run; ``stopped`` means by a person, and keeps the rounds so far."""
Evaluations = Mapping[str, Evaluation]
"""Silo → loss, error in [0, 1], number of test samples; values that a silo keeps back are NaN."""


def errors_of(evaluation: Evaluations) -> dict[str, float]:
    """Return silo → error in [0, 1], for silos that report it."""
    return {name: own[1] for name, own in evaluation.items() if math.isfinite(own[1])}


@dataclass(frozen=True)
class Influence:
    """Each silo's distance from the others in a round, and the measures taken.

    Attributes:
        cosines: silo → cosine of its update with the mean direction of the others in its group.
        norms: silo → norm of its update, as a multiple of the median.
        clipped: silo → the factor by which its update was multiplied.
        claimed: silo → training samples that it stated, if more than at first; they do not count.
        apart: silo → why it trains alone.
    """

    cosines: Mapping[str, float] = field(default_factory=dict)
    norms: Mapping[str, float] = field(default_factory=dict)
    clipped: Mapping[str, float] = field(default_factory=dict)
    claimed: Mapping[str, float] = field(default_factory=dict)
    apart: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Round(RoundReport):
    """A recorded round: the loop's report, and an evaluation that arrived later.

    ``after`` evaluates the models held after this round. ``evaluation`` came with this round's
    replies, for the models held after round ``evaluated_round``.
    """

    after: Evaluations = field(default_factory=dict)

    @classmethod
    def of(cls, report: RoundReport) -> Round:
        """Return a round from a report, before the models after it are evaluated."""
        return cls(**vars(report))

    @cached_property
    def errors(self) -> dict[str, float]:
        """Silo → error of the model that it held after the round."""
        return errors_of(self.after)

    @property
    def personal_errors(self) -> dict[str, float]:
        """Silo → error of the model that it trained in the round, before averaging."""
        items = self.personalised.items()
        return {name: error for name, (_, error) in items if math.isfinite(error)}

    @property
    def grouping(self) -> Grouping:
        """How the groups were found."""
        return Grouping(self.details)

    @cached_property
    def influence(self) -> Influence:
        """The bounds on influence in this round: measurements and measures taken."""
        return Fields(self.details.get("influence", {}), "", []).read(Influence)

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes of arrays: to silos, from silos."""
        costs: list[SiloReport | PhaseReport] = [*self.silos.values(), *self.phases.values()]
        return sum(c.bytes_sent for c in costs), sum(c.bytes_received for c in costs)

    @property
    def phase_seconds(self) -> dict[str, float]:
        """Phase → wall seconds; work before the training is listed by its message type."""
        seconds = dict(self.seconds)
        for kind, cost in self.phases.items():
            if cost.seconds > 0:
                seconds[kind] = seconds.get(kind, 0.0) + cost.seconds
                seconds["prepare"] = max(seconds.get("prepare", cost.seconds) - cost.seconds, 0.0)
        return seconds


@dataclass(frozen=True)
class SiloFacts:
    """The known facts of a silo; samples and α are NaN if unknown or not set.

    ``private`` (differential privacy) and ``release`` (of coterie) are as the silo reports them.
    """

    num_examples: float = math.nan
    alpha: float = math.nan
    node_id: str = ""
    private: bool = False
    release: str = ""


@dataclass(frozen=True)
class Resumption:
    """A continuation of a run after a round, as a new Flower run.

    ``added``: rounds that a complete run got in addition; 0 if it was interrupted.
    """

    after_round: int
    at: str
    previous_run_id: str
    added: int = 0

    @property
    def words(self) -> str:
        """What happened, as text."""
        when = f"after round {self.after_round}" if self.after_round else "before round 1"
        more = wire.counted(self.added, "more round") if self.added else ""
        return f"continued {when} for {more}" if self.added else f"resumed {when}"


@dataclass(frozen=True)
class Run:
    """A run's complete record.

    Attributes:
        run_id: Flower's, of the last resumption.
        status: ``starting``, ``running``, one of ``ENDS``, or ``unknown``.
        error: why it failed or who stopped it, or empty.
        started: date and time as written, or empty.
        seconds, seconds_to_first_training: wall seconds since the start or the last resumption; NaN
            while unknown.
        metric: the primary metric; a silo's error is the distance from its best value.
        unit: of the metric, for real targets.
        silos: all that ever took part.
        refused: silo → why it was not admitted.
        rounds: ascending.
        initial: evaluation of the initial model.
        final: the results after the last round: evaluation, last groups, exchanges.
        collaboration: figures compared with local training, if the run has such a comparison.
        model_hashes: silo → hash of its final model.
        resumed: in chronological order.
        missing: descriptions of damaged or missing parts.
    """

    folder: Path = Path()
    run_id: str = ""
    status: str = "unknown"
    error: str = ""
    started: str = ""
    seconds: float = math.nan
    seconds_to_first_training: float = math.nan
    config: Mapping[str, Any] = field(default_factory=dict)
    metric: str = "error"
    unit: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    silos: Mapping[str, SiloFacts] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    rounds: tuple[Round, ...] = ()
    initial: Evaluations = field(default_factory=dict)
    final: Round | None = None
    collaboration: Collaboration | None = None
    model_hashes: Mapping[str, str] = field(default_factory=dict)
    resumed: tuple[Resumption, ...] = ()
    missing: tuple[str, ...] = ()

    @property
    def lead(self) -> Lead:
        """The primary metric and its unit."""
        return Lead(self.metric, self.unit)

    @property
    def name(self) -> str:
        """The name of its folder."""
        return clean(self.folder.name)

    @property
    def strategy(self) -> str:
        """The configured strategy; empty if unknown."""
        return str(self.config.get("strategy", ""))

    @property
    def planned_rounds(self) -> int:
        """The configured number of rounds; 0 if unknown, or if the run trains nothing."""
        if self.strategy in wire.UNTRAINED:
            return 0
        rounds = self.config.get("rounds", 0)
        return rounds if isinstance(rounds, int) and not isinstance(rounds, bool) else 0

    @property
    def ended_early(self) -> str:
        """Why patience or privacy ended the run before its planned rounds, or empty."""
        after_a_round = self.rounds[-1].ended_early if self.rounds else ""
        return after_a_round or (self.final.ended_early if self.final else "")

    @property
    def ended(self) -> bool:
        """Whether nothing more is written to the record unless the run is resumed."""
        return self.status in ENDS

    @property
    def final_errors(self) -> dict[str, float]:
        """Silo → error of its final model, without silos that left before the end."""
        return errors_of(self.final.evaluation) if self.final else {}

    @property
    def mean_error(self) -> float | None:
        """The mean final error of silos with a baseline, or of all if there is none; or None."""
        if self.collaboration is not None and self.collaboration.silos:
            return 1 - self.collaboration.mean_accuracy
        errors = self.final_errors.values()
        return sum(errors) / len(errors) if errors else None

    @property
    def final_groups(self) -> Groups:
        """The groups of the last round, whose final models were evaluated; empty if unknown."""
        return self.final.groups if self.final else ()

    def last_errors(self) -> dict[str, float]:
        """Return every silo's last measured error, including silos that left."""
        found = {} if self.rounds else errors_of(self.initial)
        for one in self.rounds:
            found |= one.errors
        return found | self.final_errors

    def last_personal_errors(self) -> dict[str, float]:
        """Return silo → last error of the model that it trained itself, where measured."""
        found: dict[str, float] = {}
        for one in self.rounds:
            found |= one.personal_errors
        return found

    def test_counts(self) -> dict[str, int]:
        """Return silo → number of samples in its last test."""
        evaluations = [self.initial, *(one.after for one in self.rounds)]
        evaluations += [self.final.evaluation] if self.final else []
        return {n: count for evaluation in evaluations for n, (_, _, count) in evaluation.items()}

    def until(self, after: int, now: str, *, added: int = 0) -> Run:
        """Return the run as it was after a round, to go on there: later rounds are repeated.

        ``added``: see ``Resumption``.
        """
        return replace(
            self,
            error="",
            seconds=math.nan,
            rounds=tuple(one for one in self.rounds if one.round <= after),
            final=None,
            model_hashes={},
            resumed=(*self.resumed, Resumption(after, now, self.run_id, added)),
        )

    def rounds_to_end(self) -> tuple[Round, ...]:
        """Return the rounds; costs of exchanges after the last round are added to that round."""
        if not self.rounds or not self.final or not self.final.phases:
            return self.rounds
        phases = dict(self.rounds[-1].phases)
        for kind, cost in self.final.phases.items():
            before = phases.get(kind, PhaseReport())
            # The seconds after the last round are in no round's wall time.
            phases[kind] = replace(before + cost, seconds=before.seconds)
        return *self.rounds[:-1], replace(self.rounds[-1], phases=phases)


@dataclass(frozen=True)
class Budget:
    """The maximum cost of an exchange before the training; bytes are those of weights."""

    work: str
    pairs: int
    silos: int
    rounds: int
    bytes: int


@dataclass(frozen=True)
class Event:
    """One line of ``events.jsonl``; the kind decides which fields are set.

    Attributes:
        kind: ``start``, ``resume``, ``look`` (for silos), ``waits`` (for them), ``here``,
            ``ready``, ``answer``, ``budget``, ``commit``, ``round``, ``final`` or ``end``.
        number: the round concerned; for ``resume``, the one after which the run continues.
        run_id, config: for ``start`` and ``resume``.
        metric, unit: for ``ready``, see ``Run``.
        silos: those that are connected, or that answered.
        work: message type that was answered.
        text: for ``waits``: the missing silos, and why connected ones do not take part.
        report, refused: for ``round`` and ``final``.
        status, error, seconds: for ``end``.
    """

    kind: str
    number: int = 0
    run_id: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    metric: str = "error"
    unit: str = ""
    silos: tuple[str, ...] = ()
    work: str = ""
    text: str = ""
    budget: Budget | None = None
    report: Round | None = None
    refused: Mapping[str, str] = field(default_factory=dict)
    status: str = ""
    error: str = ""
    seconds: float = math.nan
