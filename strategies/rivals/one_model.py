"""Baselines with one model for all silos, without groups.

- ``FedFA``: Huang, Li, Wang, Du, Zhang: "Fairness and Accuracy in Federated Learning", 2020,
  https://arxiv.org/abs/2012.10069; as Sun, Kountouris, Zhang compare it (HCCT, section 7.1):
  ``Δ = Σ_i (−log₂ A_i / Σ_j −log₂ A_j) Δ_i`` with plain SGD at the silos.
- ``FedNova``, ``PerFedAvg``, ``PFedMe``: see ``within``, which has them for any group.
- ``APFL``: Deng, Kamani, Mahdavi: "Adaptive Personalized Federated Learning", 2020,
  https://arxiv.org/abs/2003.13461; Algorithm 1, with α by eq. 10.

All means are size-weighted, also where a paper counts its silos equally.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from pydantic import Field

from coterie import wire
from coterie.strategies.errors import FederationError
from coterie.strategies.plain.fedavg import OneModel
from coterie.strategies.plain.probes import ask
from coterie.strategies.plain.within import (
    INNER_STEPS,
    META_LR,
    MOREAU_LAMBDA,
    MOREAU_LR,
    AdaptSteps,
    FedNovaInside,
    InnerSteps,
    Inside,
    MetaLR,
    MoreauLambda,
    MoreauLR,
    PerFedAvgInside,
    PFedMeInside,
    ServerLR,
    joint_only,
)
from coterie.strategies.rounds.algorithm import Exchanges, Round, Updates
from coterie.strategies.rounds.members import Members, Plain, global_model, hand_out
from coterie.strategies.rounds.minimum_sizes import accepted, average_groups
from coterie.strategies.rounds.models import weighted_mean
from coterie.strategies.rounds.options import Config, NotNegative
from coterie.strategies.rounds.replies import error_of

# ---------------------------------------------------------------- FedFA


@dataclass(frozen=True)
class FedFAState:
    """Members, and silo → (accuracy, number of samples) of the round's global model."""

    members: Members
    accuracy: Mapping[str, tuple[float, float]] = field(default_factory=dict)


class FedFA(OneModel[FedFAState]):
    """One global model; silos that it fits badly count for more, by −log₂ of their accuracy.

    Differs from the paper in:

    - Only the accuracies weigh, not how often a silo took part (here all do), and there is no
      momentum, as in HCCT's comparison.
    - A_i is the accuracy of the round's global model on the training data, before the training.
      After it most small silos reach 1, where −log₂ 1 = 0 carries no information.
    - An accuracy of 0 counts as half a sample's. If all accuracies are 1, all silos weigh the same.

    It costs one forward pass over the training data and one more model per round and silo.
    """

    remembers = FedFAState

    @property
    def averages(self) -> bool:
        return False

    def prepare(self, state: FedFAState, now: Round) -> Exchanges[FedFAState]:
        """Ask all silos for the global model's accuracy on their training data."""
        answers = yield from ask(now.silos, [global_model(state.members)])
        stated = {
            name: (1.0 - error_of(by_model[0].metrics), by_model[0].num_examples)
            for name, by_model in answers.items()
        }
        valid = {name: pair for name, pair in stated.items() if 0 <= pair[0] <= 1}
        return replace(state, accuracy=valid)

    def absorb(self, state: FedFAState, updates: Updates, now: Round) -> FedFAState:
        if not (kept := accepted(updates)):
            return state
        weights = information([state.accuracy.get(u.silo.name) for u in kept])
        model = weighted_mean([u.model for u in kept], weights)
        return replace(state, members=hand_out(state.members, model))

    def details(self, state: FedFAState) -> Mapping[str, Any]:
        here = sorted(state.members.here)
        known = {n: round(state.accuracy[n][0], 6) for n in here if n in state.accuracy}
        return {"training-accuracy": known}


def information(accuracies: Sequence[tuple[float, float] | None]) -> list[float]:
    """Return weights −log₂ A_i ≥ 0, not all 0; a silo that stated nothing has the others' mean.

    Args:
        accuracies: (A_i in [0, 1], number of samples > 0), or None.
    """
    known = [-np.log2(max(a, 0.5 / n)) for a, n in filter(None, accuracies)]
    mean = float(np.mean(known)) if known else 1.0
    if mean == 0:
        return [1.0] * len(accuracies)
    rest = iter(known)
    return [mean if pair is None else float(next(rest)) for pair in accuracies]


# ---------------------------------------------------------------- one group with another algorithm


class OneGroup(OneModel[Plain]):
    """An algorithm of one group (``within``), with all silos in it."""

    @property
    def inside(self) -> Inside:
        raise NotImplementedError

    @property
    def averages(self) -> bool:
        return self.inside.averages

    def problems(self, training: Config) -> Iterator[str]:
        return self.inside.problems(training)

    def entries(self, training: Config) -> Config:
        return self.inside.entries(training)

    def absorb(self, state: Plain, updates: Updates, now: Round) -> Plain:
        """Compute the group's next model; without any answer it stays."""
        if self.kind != wire.TRAIN:
            require_understood(updates, self.kind, now.number)
        if not (kept := accepted(updates)):
            return state
        return Plain(hand_out(state.members, self.inside.combine(kept, now)))


class FedNova(OneGroup):
    """FedAvg in which a silo counts by its samples, not by its number of local steps.

    ``w ← w + τ_eff Σ p_i Δ_i / |a_i|₁``, with τ_eff = Σ p_i |a_i|₁. The number of steps τ_i is the
    silo's ``num-steps``, else ``local-steps`` of the training configuration, else epochs · ⌈samples
    / batch⌉; if unknown, all silos are assumed to run equally many epochs with equal batches, so
    τ_i is proportional to the samples. It thus works with any ClientApp. BatchNorm's running
    statistics are not sums of gradients: they are averaged size-weighted.
    """

    @property
    def inside(self) -> Inside:
        return FedNovaInside()


class PerFedAvg(OneGroup):
    """A common start that suits every silo after a step on its own data.

    A silo's step from w is ``w ← w − β ∇f(w − α ∇f(w; B); B′)``, with B and B′ two batches; the
    server averages. α is ``meta_lr``, β the run's learning rate. Before a model is tested, and
    before a silo keeps its final one, the silo takes ``adapt_steps`` steps of rate α along the
    gradient of all its training data; that personal model never leaves it.

    Needs silos that understand ``train.per_fedavg``, such as coterie's. Two gradients a step.
    """

    kind = wire.TRAIN_PER_FEDAVG
    meta_lr: MetaLR = META_LR
    adapt_steps: AdaptSteps = 0

    @property
    def inside(self) -> Inside:
        return PerFedAvgInside(self.meta_lr, self.adapt_steps)


class PFedMe(OneGroup):
    """A common model, to which personal models are tied by a Moreau envelope.

    For every batch a silo takes K steps towards ``θ̃ = argmin f(θ; B) + λ/2 |θ − w|²`` and then
    moves ``w ← w − η λ (w − θ̃)``; the server moves ``w ← (1 − β) w + β · mean(w_i)``. The K steps
    have the run's learning rate. Before a model is tested, and before a silo keeps its final one,
    the silo takes ``adapt_steps`` such steps from w on all its training data: its personal model,
    which never leaves it. Differs from the paper in β ≤ 1 (the paper tries up to 4).

    Needs silos that understand ``train.pfedme``, such as coterie's. K gradients a step.
    """

    kind = wire.TRAIN_PFEDME
    moreau_lambda: MoreauLambda = MOREAU_LAMBDA
    moreau_lr: MoreauLR = MOREAU_LR
    inner_steps: InnerSteps = INNER_STEPS
    server_lr: ServerLR = 1.0
    adapt_steps: AdaptSteps = 0

    @property
    def inside(self) -> Inside:
        return PFedMeInside(
            self.moreau_lambda, self.moreau_lr, self.inner_steps, self.server_lr, self.adapt_steps
        )


# ---------------------------------------------------------------- APFL


class APFL(OneModel[Plain]):
    """FedAvg, and at every silo a mixture of the common model and its own.

    In addition to FedAvg's w, a silo trains its own model v: every mini-batch that moves w moves v
    along the gradient of the mixture ``v̄ = α v + (1 − α) w``, and α by
    ``α ← α − η_α ⟨v − w, ∇f(v̄)⟩``, kept in [0, 1]. A silo is tested with, and keeps, v̄ with the
    last w that it received. v and α stay on the silo's disk and are never sent; w is FedAvg's, bit
    for bit.

    Differs from the paper in:

    - α has its own learning rate, ``mixture_lr``; the paper's is the models'.
    - v has the run's optimiser, schedule and clipping, as w has; the optimiser of v is reset every
      round.
    - Every silo takes part in every round.

    Needs silos that understand ``train.apfl``, such as coterie's. Two gradients a step, and two
    models at the silo.
    """

    kind = wire.TRAIN_APFL
    mixture: NotNegative = Field(
        0.5,
        le=1,
        description="α before a silo's first round, from 0 (only the global model) to 1 (only the "
        "silo's own model).",
    )
    mixture_lr: NotNegative = Field(
        0.1, le=1000, description="η_α, learning rate of α. 0: α stays at `mixture`."
    )

    def problems(self, training: Config) -> Iterator[str]:
        if training.get(wire.PERSONALISE):
            yield (
                "apfl itself trains a personal model for each silo, so personalise must be "
                f"none. Got {training[wire.PERSONALISE]!r}"
            )
        if training.get(wire.KEEP_OPTIMISER):
            yield "apfl trains two models at once, so keep-optimiser must be false"
        if training.get(wire.PRECISION) == "float16":
            yield "apfl has no loss scaling for α; use precision = float32 or bfloat16"
        yield from joint_only(training, "apfl")

    def entries(self, training: Config) -> Config:
        return {
            wire.PERSONALISE: "apfl",
            wire.MIXTURE: self.mixture,
            wire.MIXTURE_LR: self.mixture_lr,
        }

    def absorb(self, state: Plain, updates: Updates, now: Round) -> Plain:
        require_understood(updates, wire.TRAIN_APFL, now.number)
        return Plain(average_groups(state.members, accepted(updates)))


def require_understood(updates: Updates, kind: str, number: int) -> None:
    """Raise FederationError if round 1 has no update: no silo understood ``kind``."""
    if number == 1 and not updates:
        raise FederationError(
            f"no silo answered {kind!r} in round 1; see the log. This strategy needs silos that "
            f"handle it, such as `coterie silo`; other ClientApps need a function for {kind!r}."
        )
