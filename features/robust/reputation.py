"""What is remembered about silos between rounds: first counts, outliers, and who is quarantined."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace

from coterie.strategies.rounds.algorithm import Updates
from coterie.strategies.rounds.handles import Model


@dataclass(frozen=True)
class Quarantined:
    """A quarantined silo: its own model, and the rounds in which it left and will return."""

    model: Model
    since: int
    until: int
    why: str


@dataclass(frozen=True)
class Reputation:
    """The record of silos between two rounds.

    Attributes:
        counts: silo → training samples that it stated first, if it did not describe itself.
        strikes: silo → consecutive rounds in which it was an outlier.
        probation: silos that one such round is enough for: those that came later, or returned.
        times, apart: silo → how often it was quarantined; the silos in quarantine now.
    """

    counts: Mapping[str, float] = field(default_factory=dict)
    strikes: Mapping[str, int] = field(default_factory=dict)
    probation: frozenset[str] = frozenset()
    times: Mapping[str, int] = field(default_factory=dict)
    apart: Mapping[str, Quarantined] = field(default_factory=dict)

    @property
    def models(self) -> dict[str, Model]:
        """Silo → its own model, for silos that are quarantined."""
        return {name: apart.model for name, apart in self.apart.items()}

    def begin(self, number: int, new: Collection[str]) -> Reputation:
        """Begin a round: end quarantines that are over; newcomers after round 1 go on probation."""
        back = {name for name, apart in self.apart.items() if apart.until <= number}
        later = frozenset(new) if number > 1 else frozenset()
        return replace(
            self,
            apart={name: apart for name, apart in self.apart.items() if name not in back},
            probation=self.probation | back | later,
        )

    def diverged(self, models: Mapping[str, Model], number: int) -> Reputation:
        """Set apart silos whose training ended in NaN, with the models that they started from.

        A silo in quarantine for longer stays there.
        """
        why = (
            f"its training of round {number} diverged: it trains alone until its training gives "
            "finite numbers"
        )
        until = number + 2
        kept = {name: own for name, own in self.apart.items() if own.until > until}
        out = {name: Quarantined(model, number, until, why) for name, model in models.items()}
        return replace(self, apart={**self.apart, **out, **kept})

    def trained_alone(self, updates: Updates) -> Reputation:
        """Store the new own models of quarantined silos."""
        own = {
            u.silo.name: replace(self.apart[u.silo.name], model=u.model)
            for u in updates
            if u.silo.name in self.apart
        }
        return replace(self, apart={**self.apart, **own})
