"""What a run's record contains, as typed values.

``run.json`` holds one ``Run``, ``events.jsonl`` one ``Event`` a line; ``format`` reads and writes
them as JSON.
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

ENDS = ("completed", "failed", "stopped")
"""How a run may end: ``stopped`` by a person, with its rounds so far."""
Evaluations = Mapping[str, Evaluation]
"""Silo → loss, error in [0, 1], number of test samples; NaN where a silo does not say it."""


def errors_of(evaluation: Evaluations) -> dict[str, float]:
    """Silo → error in [0, 1], of those that say it."""
    return {name: told[1] for name, told in evaluation.items() if math.isfinite(told[1])}


@dataclass(frozen=True)
class Influence:
    """How far silos were from the others in a round, and what was done about it.

    Attributes:
        cosines: silo → of its update to the mean direction of the others in its group.
        norms: silo → length of its update, as a multiple of the median.
        clipped: silo → what its update was multiplied by.
        claimed: silo → training samples that it stated, more than at first; they do not count.
        apart: silo → why it trains alone.
    """

    cosines: Mapping[str, float] = field(default_factory=dict)
    norms: Mapping[str, float] = field(default_factory=dict)
    clipped: Mapping[str, float] = field(default_factory=dict)
    claimed: Mapping[str, float] = field(default_factory=dict)
    apart: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Round(RoundReport):
    """A round as it is recorded: what the loop reported, and an evaluation that came later.

    Attributes:
        after: of the models that the silos held after this round. ``evaluation`` came with this
            round's replies and is of the models held after round ``evaluated_round``.
    """

    after: Evaluations = field(default_factory=dict)

    @classmethod
    def of(cls, report: RoundReport) -> Round:
        """A report, before the models after it are evaluated."""
        return cls(**vars(report))

    @cached_property
    def errors(self) -> dict[str, float]:
        """Silo → error of the model that it held after the round."""
        return errors_of(self.after)

    @property
    def personal_errors(self) -> dict[str, float]:
        """Silo → error of the model as it trained it in the round, before the averaging."""
        told = self.personalised.items()
        return {name: error for name, (_, error) in told if math.isfinite(error)}

    @property
    def grouping(self) -> Grouping:
        """How the groups were found."""
        return Grouping(self.details)

    @cached_property
    def influence(self) -> Influence:
        """What each silo did to the others at most."""
        return Fields(self.details.get("influence", {}), "", []).read(Influence)

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Of arrays: to silos, from silos."""
        costs: list[SiloReport | PhaseReport] = [*self.silos.values(), *self.phases.values()]
        return sum(c.bytes_sent for c in costs), sum(c.bytes_received for c in costs)

    @property
    def phase_seconds(self) -> dict[str, float]:
        """Phase → wall seconds; what came before the training by its message type."""
        seconds = dict(self.seconds)
        for kind, cost in self.phases.items():
            if cost.seconds > 0:
                seconds[kind] = seconds.get(kind, 0.0) + cost.seconds
                seconds["prepare"] = max(seconds.get("prepare", cost.seconds) - cost.seconds, 0.0)
        return seconds


@dataclass(frozen=True)
class SiloFacts:
    """What is known of a silo: samples and its own α, NaN where unknown or not set, and whether it
    trains with differential privacy and which release of coterie it has, as it says."""

    num_examples: float = math.nan
    alpha: float = math.nan
    node_id: str = ""
    private: bool = False
    release: str = ""


@dataclass(frozen=True)
class Resumption:
    """A run went on after a round, as another run of Flower's."""

    after_round: int
    at: str
    previous_run_id: str

    @property
    def when(self) -> str:
        """Where it went on, in words."""
        return f"after round {self.after_round}" if self.after_round else "before round 1"


@dataclass(frozen=True)
class Run:
    """Everything that a run's record says.

    Attributes:
        folder: where it is.
        run_id: Flower's, of the last resumption.
        status: ``starting``, ``running``, one of ``ENDS``, or ``unknown``.
        error: why it failed or who stopped it, or empty.
        started: date and time as written, or empty.
        seconds, seconds_to_first_training: wall seconds since it was started or last resumed; NaN
            while unknown.
        config, versions: as recorded.
        metric: that leads: silos' errors are what is missing to its best value.
        unit: in which it is counted, of real targets.
        silos: all that ever took part.
        refused: silo → why it was not let in.
        rounds: ascending.
        initial: of the initial model.
        final: what came after the last round: evaluation, last groups, exchanges.
        collaboration: figures beside training alone, if the run was told which run that is.
        model_hashes: silo → of its final model.
        resumed: in time.
        missing: what is damaged or not there, in words.
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
        """In what its errors are counted."""
        return Lead(self.metric, self.unit)

    @property
    def name(self) -> str:
        """Of its folder."""
        return clean(self.folder.name)

    @property
    def strategy(self) -> str:
        """As configured; empty if unknown."""
        return str(self.config.get("strategy", ""))

    @property
    def planned_rounds(self) -> int:
        """How many the configuration asks for; 0 if unknown, or if it trains nothing."""
        if self.strategy == wire.ONLY_STATISTICS:
            return 0
        rounds = self.config.get("rounds", 0)
        return rounds if isinstance(rounds, int) and not isinstance(rounds, bool) else 0

    @property
    def ended_early(self) -> str:
        """Why it has fewer rounds than planned, in words; empty: neither its patience nor its
        silos' privacy ended it."""
        after_a_round = self.rounds[-1].ended_early if self.rounds else ""
        return after_a_round or (self.final.ended_early if self.final else "")

    @property
    def ended(self) -> bool:
        """Nothing more is written to it unless it is resumed."""
        return self.status in ENDS

    @property
    def final_errors(self) -> dict[str, float]:
        """Silo → error of the model that it has at the end. Who left before is not in."""
        return errors_of(self.final.evaluation) if self.final else {}

    @property
    def final_groups(self) -> Groups:
        """Who trained together in the last round, where the final models were evaluated."""
        return self.final.groups if self.final else ()

    def last_errors(self) -> dict[str, float]:
        """Every silo's error when it was last measured; who left keeps its last."""
        found = {} if self.rounds else errors_of(self.initial)
        for one in self.rounds:
            found |= one.errors
        return found | self.final_errors

    def last_personal_errors(self) -> dict[str, float]:
        """Every silo's error with the model that it trained itself last, where that was asked."""
        found: dict[str, float] = {}
        for one in self.rounds:
            found |= one.personal_errors
        return found

    def test_counts(self) -> dict[str, int]:
        """Silo → samples that it was last tested on."""
        told = [self.initial, *(one.after for one in self.rounds)]
        told += [self.final.evaluation] if self.final else []
        return {n: count for evaluation in told for n, (_, _, count) in evaluation.items()}

    def until(self, after: int, now: str) -> Run:
        """The run as it was after a round, to go on from there: the rest is done again."""
        return replace(
            self,
            error="",
            seconds=math.nan,
            rounds=tuple(one for one in self.rounds if one.round <= after),
            final=None,
            model_hashes={},
            resumed=(*self.resumed, Resumption(after, now, self.run_id)),
        )

    def rounds_to_end(self) -> tuple[Round, ...]:
        """The rounds; the exchanges after the last one are added to what that one cost."""
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
    """What an exchange before the training may cost at most; bytes are of weights."""

    work: str
    pairs: int
    silos: int
    rounds: int
    bytes: int


@dataclass(frozen=True)
class Event:
    """One line of ``events.jsonl``: what happened, as far as its kind says so.

    Attributes:
        kind: ``start``, ``resume``, ``look`` (for silos), ``waits`` (for them), ``here``,
            ``ready``, ``answer``, ``budget``, ``commit``, ``round``, ``final`` or ``end``.
        number: the round that it is about; of ``resume``, the one after which the run goes on.
        run_id, config: of ``start`` and ``resume``.
        metric, unit: of ``ready``, see ``Run``.
        silos: who is here, or answered.
        work: message type that was answered.
        text: of ``waits``: for whom, and why others who are there do not take part.
        budget: of ``budget``.
        report, refused: of ``round`` and ``final``.
        status, error, seconds: of ``end``.
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
