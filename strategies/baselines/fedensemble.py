"""FedEnsemble: FedAvg's training, and the mean of the silos' logits as the predictor.

The ensemble of Lin, Kong, Stich, Jaggi: "Ensemble Distillation for Robust Model Fusion in
Federated Learning", NeurIPS 2020, https://arxiv.org/abs/2006.07242, without its distillation, as
FedGen and FedGenP compare themselves with it. A baseline: to evaluate it every silo must get every
silo's model, N² models in all; what a silo learned alone is shown to the others.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

from coterie import wire
from coterie.strategies.baselines.fedavg import FedAvg
from coterie.strategies.errors import require
from coterie.strategies.rounds.grouping import Members
from coterie.strategies.rounds.loop import Group, GroupStrategy, LoopOptions, Order, Update
from coterie.strategies.rounds.roster import Silo
from coterie.wire import Model


@dataclass(frozen=True)
class EnsembleState:
    """What is known between two rounds.

    Attributes:
        base: FedAvg's.
        local: silo that is here → its model after its own training.
        errors: silo → (loss, error, test samples) of the last ensemble evaluated.
        round: after which that was.
    """

    base: Members
    local: Mapping[str, Model] = field(default_factory=dict)
    errors: Mapping[str, tuple[float, float, int]] = field(default_factory=dict)
    round: int = 0


class FedEnsemble(GroupStrategy[EnsembleState]):
    """FedAvg, evaluated also as the ensemble of the silos' models.

    Args:
        every: rounds between two evaluations of the ensemble; 0 evaluates the last one only.
        base: trains and averages; ``FedAvg`` by default.

    The other arguments are those of ``GroupStrategy``.
    """

    def __init__(
        self, *, every: int = 0, base: FedAvg | None = None, **options: Unpack[LoopOptions]
    ) -> None:
        super().__init__(**options)
        require(every >= 0, f"every must be at least 0. Got {every}.")
        self.every = int(every)
        self._average = FedAvg() if base is None else base

    def first(self, initial: Model) -> EnsembleState:
        """FedAvg's."""
        return EnsembleState(self._average.first(initial))

    def admit(self, state: EnsembleState, silos: Sequence[Silo], *, round: int) -> EnsembleState:
        """FedAvg's."""
        return replace(state, base=self._average.admit(state.base, silos, round=round))

    def prepare(
        self, state: EnsembleState, silos: Sequence[Silo], *, round: int
    ) -> Generator[Sequence[Order], list[Update], EnsembleState]:
        """Every so many rounds, the ensemble of the round before."""
        if self.every and round > 1 and (round - 1) % self.every == 0:
            state = yield from self._evaluated(state, silos, round=round - 1, keep=False)
        return state

    def finish(
        self, state: EnsembleState, silos: Sequence[Silo], *, round: int
    ) -> Generator[Sequence[Order], list[Update], EnsembleState]:
        """The final ensemble, which silos keep."""
        state = yield from self._evaluated(state, silos, round=round, keep=True)
        return state

    def _evaluated(
        self, state: EnsembleState, silos: Sequence[Silo], *, round: int, keep: bool
    ) -> Generator[Sequence[Order], list[Update], EnsembleState]:
        names = sorted(n for n in state.local if n in {s.name for s in silos if _shows(s)})
        members = {f"{wire.MEMBER}{i}": state.local[name] for i, name in enumerate(names)}
        described = [silo for silo in silos if silo.described]
        if not members or not described:
            return state
        config = {wire.KEEP: keep}
        answers = yield [
            Order(s, {}, purpose="ensemble", kind=wire.ENSEMBLE, config=config, extras=members)
            for s in described
        ]
        errors = {
            u.silo.name: (u.metrics[wire.LOSS], u.metrics[wire.ERROR], int(u.num_examples))
            for u in answers
            if wire.LOSS in u.metrics and wire.ERROR in u.metrics
        }
        return replace(state, errors=errors, round=round)

    def orders(
        self, state: EnsembleState, silos: Sequence[Silo], *, round: int
    ) -> tuple[EnsembleState, list[Order]]:
        """FedAvg's. Models of who left, or no longer shows its own, are dropped."""
        base, orders = self._average.orders(state.base, silos, round=round)
        here = {silo.name for silo in silos if _shows(silo)}
        local = {name: model for name, model in state.local.items() if name in here}
        return replace(state, base=base, local=local), orders

    def absorb(
        self, state: EnsembleState, updates: Sequence[Update], *, round: int
    ) -> EnsembleState:
        """FedAvg's; every silo's own model is a member of the ensemble."""
        base = self._average.absorb(state.base, updates, round=round)
        return replace(
            state,
            base=base,
            local={
                **state.local,
                **{u.silo.name: u.model for u in updates if _shows(u.silo)},
            },
        )

    def models(self, state: EnsembleState) -> Mapping[str, Model]:
        """The mean model; the ensemble's members are the silos' own."""
        return self._average.models(state.base)

    def groups(self, state: EnsembleState) -> Sequence[Group]:
        """One."""
        return self._average.groups(state.base)

    def sizes(self, state: EnsembleState) -> Mapping[str, float]:
        """Silo → training samples."""
        return self._average.sizes(state.base)

    def details(self, state: EnsembleState) -> Mapping[str, Any]:
        """The last ensemble's errors."""
        if not state.errors:
            return {}
        errors = {
            name: {"loss": loss, "error": error, "num-examples": count}
            for name, (loss, error, count) in state.errors.items()
        }
        return {"ensemble": {"round": state.round, "evaluation": errors}}


def _shows(silo: Silo) -> bool:
    """Whether others may see what it learned alone."""
    return silo.min_group_size <= 1
