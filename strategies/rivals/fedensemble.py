"""FedEnsemble: FedAvg's training, with the mean of the silos' logits as the predictor.

The ensemble of Lin, Kong, Stich, Jaggi: "Ensemble Distillation for Robust Model Fusion in Federated
Learning", NeurIPS 2020, https://arxiv.org/abs/2006.07242, without its distillation, the baseline of
FedGen and FedGenP. To evaluate it every silo must get every silo's model, N² models in total; this
shows what a silo learned alone to the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, InstanceOf

from coterie import wire
from coterie.strategies.plain.fedavg import FedAvg
from coterie.strategies.rounds.algorithm import (
    Around,
    Exchanges,
    Order,
    Round,
    Updates,
    algorithm_of,
)
from coterie.strategies.rounds.handles import Arrays, Model, arrays_of
from coterie.strategies.rounds.options import Config, CountOrNone
from coterie.strategies.rounds.roster import Silo


@dataclass(frozen=True)
class EnsembleState:
    """The state between rounds.

    Attributes:
        base: FedAvg's state.
        local: present silo → its model after its own training.
        errors: silo → (loss, error, test samples) of the last ensemble evaluated.
        round: round of that ensemble.
    """

    base: Any
    local: Mapping[str, Model] = field(default_factory=dict)
    errors: Mapping[str, tuple[float, float, int]] = field(default_factory=dict)
    round: int = 0


class FedEnsemble(Around[EnsembleState]):
    """FedAvg, also evaluated as the ensemble of the silos' models."""

    every: CountOrNone = Field(
        0,
        alias="ensemble-every",
        description="Rounds between two evaluations of the ensemble, each of which sends every "
        "silo's model to every silo. 0: only after the last round.",
    )
    base: Annotated[InstanceOf[FedAvg], BeforeValidator(algorithm_of)] = FedAvg()

    def problems(self, training: Config) -> Iterator[str]:
        if training.get(wire.PERSONAL):
            yield "fedensemble sends every silo the others' whole models, so personal must be empty"

    def first(self, initial: Arrays) -> EnsembleState:
        return EnsembleState(self.base.first(initial))

    def prepare(self, state: EnsembleState, now: Round) -> Exchanges[EnsembleState]:
        """Evaluate the previous round's ensemble every ``every`` rounds."""
        before = now.number - 1
        if self.every and before and before % self.every == 0:
            state = yield from _evaluated(state, now.silos, after=before, keep=False)
        return state

    def finish(self, state: EnsembleState, now: Round) -> Exchanges[EnsembleState]:
        """Evaluate the final ensemble, which silos keep."""
        return (yield from _evaluated(state, now.silos, after=now.number, keep=True))

    def orders(self, state: EnsembleState, now: Round) -> tuple[EnsembleState, list[Order]]:
        """Order as FedAvg; drop models of silos that left or no longer show theirs."""
        base, orders = self.base.orders(state.base, now)
        here = {silo.name for silo in now.silos if _shows(silo)}
        local = {name: model for name, model in state.local.items() if name in here}
        return replace(state, base=base, local=local), orders

    def absorb(self, state: EnsembleState, updates: Updates, now: Round) -> EnsembleState:
        own = {u.silo.name: u.model for u in updates if _shows(u.silo)}
        base = self.base.absorb(state.base, updates, now)
        return replace(state, base=base, local={**state.local, **own})

    def details(self, state: EnsembleState) -> Mapping[str, Any]:
        if not state.errors:
            return {}
        errors = {
            name: {"loss": loss, "error": error, "num-examples": count}
            for name, (loss, error, count) in state.errors.items()
        }
        return {"ensemble": {"round": state.round, "evaluation": errors}}


def _evaluated(
    state: EnsembleState, silos: Sequence[Silo], *, after: int, keep: bool
) -> Exchanges[EnsembleState]:
    """Send every silo all models that may be shown; record the errors of their mean."""
    names = sorted(n for n in state.local if n in {s.name for s in silos if _shows(s)})
    members = {f"{wire.MEMBER}{i}": arrays_of(state.local[name]) for i, name in enumerate(names)}
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
    return replace(state, errors=errors, round=after)


def _shows(silo: Silo) -> bool:
    """Return whether others may see what the silo learned alone."""
    return silo.min_group_size <= 1
