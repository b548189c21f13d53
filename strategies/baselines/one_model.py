"""The algorithms with one model for everybody, or one for each silo: they form no groups.

- ``Independent``: every silo for itself, the baseline that collaboration has to beat.
- ``FedAvg``: McMahan, Moore, Ramage, Hampson, Agüera y Arcas: "Communication-Efficient Learning of
  Deep Networks from Decentralized Data", AISTATS 2017, https://arxiv.org/abs/1602.05629,
  Algorithm 1. With ``proximal-mu`` in the training configuration the silos' objective is FedProx's
  (Li et al., MLSys 2020, https://arxiv.org/abs/1812.06127).
- ``FedFA``: Huang, Li, Wang, Du, Zhang: "Fairness and Accuracy in Federated Learning", 2020,
  https://arxiv.org/abs/2012.10069; as Sun, Kountouris, Zhang compare it (HCCT, section 7.1):
  ``Δ = Σ_i (−log₂ A_i / Σ_j −log₂ A_j) Δ_i`` with plain SGD at the silos.
- ``FedNova``: Wang, Liu, Liang, Joshi, Poor: "Tackling the Objective Inconsistency Problem in
  Heterogeneous Federated Optimization", NeurIPS 2020, https://arxiv.org/abs/2007.07481; eqs. 8–10.
- ``PerFedAvg``: Fallah, Mokhtari, Ozdaglar: "Personalized Federated Learning with Theoretical
  Guarantees: A Model-Agnostic Meta-Learning Approach", NeurIPS 2020,
  https://arxiv.org/abs/2002.07948; Algorithm 1, first order.
- ``PFedMe``: Dinh, Tran, Nguyen: "Personalized Federated Learning with Moreau Envelopes", NeurIPS
  2020, https://arxiv.org/abs/2006.08848; Algorithm 1.
- ``APFL``: Deng, Kamani, Mahdavi: "Adaptive Personalized Federated Learning", 2020,
  https://arxiv.org/abs/2003.13461; Algorithm 1, with α by eq. 10.

All means are size-weighted; where a paper counts its silos equally, that is the difference.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import ceil
from typing import Any, ClassVar

import numpy as np
from pydantic import Field

from coterie import wire
from coterie.strategies.baselines.probes import ask
from coterie.strategies.errors import FederationError
from coterie.strategies.partition.fednova import accumulation, coefficients
from coterie.strategies.rounds import kit
from coterie.wire import Model


class Independent(kit.Algorithm[kit.Plain]):
    """Every silo trains its own model from w⁰ and never hears of another."""

    alone = True
    secure = True

    @property
    def averages(self) -> bool:
        """There is nothing to average."""
        return False

    def orders(self, state: kit.Plain, now: kit.Round) -> tuple[kit.Plain, list[kit.Order]]:
        """Train your own model."""
        members = state.members.grouped((name,) for name in now.names)
        return kit.Plain(members), kit.orders_from(members.models, now.silos)

    def absorb(self, state: kit.Plain, updates: kit.Updates, now: kit.Round) -> kit.Plain:
        """Each update becomes its silo's model."""
        return kit.Plain(kit.average_groups(state.members, updates))


class OneModel(kit.Algorithm[kit.State]):
    """What the algorithms of one global model have in common: who trains from what."""

    kind: ClassVar[str] = wire.TRAIN
    """Message type of the training."""

    def newcomer_model(self, state: kit.State) -> Model:
        """The global model."""
        return kit.global_model(self.members(state))

    def orders(self, state: kit.State, now: kit.Round) -> tuple[kit.State, list[kit.Order]]:
        """Train the global model. Who was away gets today's, not the one it left with."""
        members = kit.together(self.members(state), now.silos)
        orders = kit.orders_from(members.models, now.silos, self.kind)
        return self.with_members(state, members), orders


class FedAvg(OneModel[kit.Plain]):
    """The size-weighted mean of all updates, every round."""

    sample: kit.Sample = 0
    seed: kit.Seed = 0
    secure = True

    def orders(self, state: kit.Plain, now: kit.Round) -> tuple[kit.Plain, list[kit.Order]]:
        """Whose turn it is trains the global model."""
        members = kit.together(state.members, now.silos)
        turn = kit.drawn_silos(now, self.sample, seed=self.seed)
        return kit.Plain(members), kit.orders_from(members.models, turn)

    def absorb(self, state: kit.Plain, updates: kit.Updates, now: kit.Round) -> kit.Plain:
        """The mean goes to everybody who is here; without any answer the model stays."""
        return kit.Plain(kit.average_groups(state.members, updates))


# ---------------------------------------------------------------- FedFA


@dataclass(frozen=True)
class FedFAState:
    """Members, and silo → (accuracy, samples it is of) of the global model."""

    members: kit.Members
    accuracy: Mapping[str, tuple[float, float]] = field(default_factory=dict)


class FedFA(OneModel[FedFAState]):
    """One global model; silos that it fits badly count for more, by −log₂ of their accuracy.

    Differs from the paper in:

    - Only the accuracies weigh, not how often a silo took part (here all do), and there is no
      momentum, as in HCCT's comparison.
    - A_i is the accuracy of the round's global model on the training data, before the training.
      After it most small silos reach 1, and −log₂ 1 = 0 says nothing.
    - An accuracy of 0 counts as half a sample's. Where all accuracies are 1 all silos weigh the
      same.

    One forward pass over the training data and one model more a round and silo.
    """

    remembers = FedFAState

    @property
    def averages(self) -> bool:
        """Weights are of accuracies."""
        return False

    def prepare(self, state: FedFAState, now: kit.Round) -> kit.Exchanges[FedFAState]:
        """Ask everybody for the global model's accuracy on its training data."""
        answers = yield from ask(now.silos, [kit.global_model(state.members)])
        stated = {
            name: (1.0 - kit.error_of(by_model[0].metrics), by_model[0].num_examples)
            for name, by_model in answers.items()
        }
        valid = {name: pair for name, pair in stated.items() if 0 <= pair[0] <= 1}
        return replace(state, accuracy={**state.accuracy, **valid})

    def absorb(self, state: FedFAState, updates: kit.Updates, now: kit.Round) -> FedFAState:
        """The weighted mean goes to everybody who is here."""
        if not updates:
            return state
        weights = information([state.accuracy.get(u.silo.name) for u in updates])
        model = kit.weighted_mean([u.model for u in updates], weights)
        return replace(state, members=kit.hand_out(state.members, model))

    def details(self, state: FedFAState) -> Mapping[str, Any]:
        """Every silo's training accuracy of the model before the round."""
        here = sorted(state.members.here)
        known = {n: round(state.accuracy[n][0], 6) for n in here if n in state.accuracy}
        return {"training-accuracy": known}


def information(accuracies: Sequence[tuple[float, float] | None]) -> list[float]:
    """Weights −log₂ A_i; a silo that stated nothing has the mean of the others'.

    Args:
        accuracies: (A_i in [0, 1], number of samples > 0), or None.

    Returns:
        One weight ≥ 0 each, not all 0.
    """
    known = [-np.log2(max(a, 0.5 / n)) for a, n in filter(None, accuracies)]
    mean = float(np.mean(known)) if known else 1.0
    if mean == 0:
        return [1.0] * len(accuracies)
    rest = iter(known)
    return [mean if pair is None else float(next(rest)) for pair in accuracies]


# ---------------------------------------------------------------- FedNova

NUM_STEPS = "num-steps"
"""Metric by which a silo may state its τ_i."""


class FedNova(OneModel[kit.Plain]):
    """FedAvg in which a silo counts by its samples, not by its number of local steps.

    ``w ← w + τ_eff Σ p_i Δ_i / |a_i|₁``, with τ_eff = Σ p_i |a_i|₁. The number of steps τ_i is what
    a silo states as ``num-steps``, else ``local-steps`` of the training configuration, else its
    epochs · ⌈samples / batch⌉; where that is not known, all are taken to have made equally many
    epochs with equal batches, which makes τ_i proportional to the samples. So it works with any
    ClientApp. BatchNorm's running statistics are no sum of gradients: they are averaged
    size-weighted.
    """

    @property
    def averages(self) -> bool:
        """Updates are put together by their steps."""
        return False

    def problems(self, training: kit.Config) -> Iterator[str]:
        """With a stronger pull the steps of an update cancel out, and it has no |a_i|₁."""
        yield from sgd_only(training, "fednova", "counts the steps of SGD")
        lr, mu = (float(training.get(key, 0.0)) for key in (wire.LR, wire.PROXIMAL_MU))
        if lr * mu >= 1:
            yield (
                "lr · proximal-mu must be below 1 with fednova, or an update's steps cannot be "
                f"counted. Got {lr:g} · {mu:g}"
            )

    def entries(self, training: kit.Config) -> kit.Config:
        """What a silo must know to say that its steps are others."""
        return {wire.PLAIN_STEPS: True}

    def absorb(self, state: kit.Plain, updates: kit.Updates, now: kit.Round) -> kit.Plain:
        """Eq. 8, over those who answered; without any answer the model stays."""
        if not updates:
            return state
        sizes, steps = [u.num_examples for u in updates], [_accumulated(u, now) for u in updates]
        return kit.Plain(
            kit.hand_out(state.members, normalised(updates, coefficients(sizes, steps)))
        )


def _accumulated(update: kit.Update, now: kit.Round) -> float:
    """|a_i|₁."""
    lr = float(now.config.get(wire.LR, 0.0))
    lr *= float(now.config.get(wire.LR_DECAY, 1.0)) ** (now.number - 1)
    return accumulation(
        _num_steps(update, now.config),
        momentum=float(now.config.get(wire.MOMENTUM, 0.0)),
        decay=lr * float(now.config.get(wire.PROXIMAL_MU, 0.0)),
    )


def _num_steps(update: kit.Update, config: kit.Config) -> int:
    """τ_i."""
    stated = update.metrics.get(NUM_STEPS, 0)
    if np.isfinite(stated) and stated >= 1:
        return int(stated)
    if config.get(wire.LOCAL_STEPS):  # silos make so many, whatever the epochs
        return int(config[wire.LOCAL_STEPS])
    samples = ceil(update.num_examples)
    if wire.BATCH_SIZE not in config:
        return samples
    return int(config.get(wire.LOCAL_EPOCHS, 1)) * ceil(samples / int(config[wire.BATCH_SIZE]))


def normalised(updates: kit.Updates, factors: np.ndarray) -> Model:
    """``w + Σ c_i (w_i − w)`` of parameters; the size-weighted mean of everything else.

    Args:
        updates: at least one, all from the same start w.
        factors: c_i, one each.
    """
    mean = kit.weighted_mean([u.model for u in updates], [u.num_examples for u in updates])
    if len(updates) == 1:
        return mean
    start = updates[0].start
    buffers = {name for u in updates for name in u.silo.buffers}
    return {
        name: _stepped(start[name], [u.model[name] for u in updates], factors)
        if np.issubdtype(array.dtype, np.floating) and not kit.is_statistic(name, sorted(buffers))
        else array
        for name, array in mean.items()
    }


def _stepped(start: np.ndarray, arrays: Sequence[np.ndarray], factors: np.ndarray) -> np.ndarray:
    wide = start.astype(np.float64)
    step = sum(c * (a.astype(np.float64) - wide) for c, a in zip(factors, arrays, strict=True))
    return np.asarray((wide + step).astype(start.dtype))


# ---------------------------------------------------------------- Per-FedAvg, pFedMe and APFL

ADAPT_STEPS = "Steps on a silo's own data before a model is tested; 0 takes the paper's number"


class PerFedAvg(OneModel[kit.Plain]):
    """A common start from which every silo is well off after a step on its own data.

    A silo's step from w is ``w ← w − β ∇f(w − α ∇f(w; B); B′)``, with B and B′ two batches; the
    server averages. α is ``meta_lr``, β the run's learning rate. Before a model is tested, and
    before a silo keeps its final one, the silo takes ``adapt_steps`` steps of rate α along the
    gradient of all its training data; that personal model never leaves it.

    Needs silos that understand ``train.per_fedavg``; those of coterie do. Two gradients a step.
    """

    kind = wire.TRAIN_PER_FEDAVG
    meta_lr: kit.Positive = Field(
        0.03, le=1000, description="α, rate of the step on a silo's own data."
    )
    adapt_steps: kit.TimesOrNone = Field(0, description=f"{ADAPT_STEPS} (Per-FedAvg: 1).")

    def problems(self, training: kit.Config) -> Iterator[str]:
        """What its steps have no place for."""
        yield from sgd_only(training, "perfedavg", STEPS_OF_ITS_OWN)

    def entries(self, training: kit.Config) -> kit.Config:
        """The meta-step's rate, and the steps before a test."""
        return {
            wire.PLAIN_STEPS: True,
            wire.META_LR: self.meta_lr,
            wire.ADAPT_STEPS: self.adapt_steps or 1,
            wire.ADAPT_LR: self.meta_lr,
        }

    def absorb(self, state: kit.Plain, updates: kit.Updates, now: kit.Round) -> kit.Plain:
        """The mean goes to everybody who is here."""
        require_understood(updates, wire.TRAIN_PER_FEDAVG, now.number)
        return kit.Plain(kit.average_groups(state.members, updates))


class PFedMe(OneModel[kit.Plain]):
    """A common model that personal models are held near to by a Moreau envelope.

    For every batch a silo takes K steps towards ``θ̃ = argmin f(θ; B) + λ/2 |θ − w|²`` and then
    moves ``w ← w − η λ (w − θ̃)``; the server moves ``w ← (1 − β) w + β · mean(w_i)``. The K steps
    have the run's learning rate. Before a model is tested, and before a silo keeps its final one,
    the silo takes ``adapt_steps`` such steps from w on all its training data: that is its personal
    model, and never leaves it. Differs from the paper in β ≤ 1 (the paper tries up to 4).

    Needs silos that understand ``train.pfedme``; those of coterie do. K gradients a step.
    """

    kind = wire.TRAIN_PFEDME
    moreau_lambda: kit.Positive = Field(
        15.0,
        le=1e6,
        description="λ; large keeps personal models near the common one. lr·λ must be below 2.",
    )
    moreau_lr: kit.Positive = Field(
        0.005, le=1000, description="η, rate of the common model; η·λ must be at most 1."
    )
    inner_steps: kit.Times = Field(5, description="K, steps towards the personal model per batch.")
    server_lr: kit.Positive = Field(
        1.0, le=1, description="β, how far the server follows the silos' mean."
    )
    adapt_steps: kit.TimesOrNone = Field(0, description=f"{ADAPT_STEPS} (pFedMe: 20).")

    def problems(self, training: kit.Config) -> Iterator[str]:
        """Steps that would diverge."""
        yield from sgd_only(training, "pfedme", STEPS_OF_ITS_OWN)
        lr = float(training.get(wire.LR, 0.01))
        if self.moreau_lr * self.moreau_lambda > 1:
            yield (
                "moreau-lr · moreau-lambda must be at most 1. "
                f"Got {self.moreau_lr:g} · {self.moreau_lambda:g}"
            )
        if lr * self.moreau_lambda >= 2:
            yield (
                "lr · moreau-lambda must be below 2, or the steps towards a personal model "
                f"diverge. Got {lr:g} · {self.moreau_lambda:g}"
            )

    def entries(self, training: kit.Config) -> kit.Config:
        """The envelope, and the steps before a test."""
        return {
            wire.PLAIN_STEPS: True,
            wire.MOREAU_LAMBDA: self.moreau_lambda,
            wire.MOREAU_LR: self.moreau_lr,
            wire.INNER_STEPS: self.inner_steps,
            wire.ADAPT_STEPS: self.adapt_steps or 20,
            wire.ADAPT_LR: float(training.get(wire.LR, 0.01)),
            wire.ADAPT_MU: self.moreau_lambda,
        }

    def absorb(self, state: kit.Plain, updates: kit.Updates, now: kit.Round) -> kit.Plain:
        """``(1 − β) w + β · mean``."""
        require_understood(updates, wire.TRAIN_PFEDME, now.number)
        if not updates:
            return state
        mean = kit.combine(updates)
        if self.server_lr < 1:
            mean = kit.weighted_mean([updates[0].start, mean], [1 - self.server_lr, self.server_lr])
        return kit.Plain(kit.hand_out(state.members, mean))


class APFL(OneModel[kit.Plain]):
    """FedAvg, and at every silo a mixture of the common model and one of its own.

    Beside its part in FedAvg a silo trains v, a model of its own: every mini-batch that moves the
    common model w moves v along the gradient of the mixture ``v̄ = α v + (1 − α) w``, and α by
    ``α ← α − η_α ⟨v − w, ∇f(v̄)⟩``, kept in [0, 1]. What a silo is tested with, and keeps, is v̄
    with the w that it received last. v and α stay at the silo, on its disk, and are never sent; w
    is FedAvg's, bit for bit.

    Differs from the paper in:

    - α has a learning rate of its own, ``mixture_lr``; the paper's is the models'.
    - v has the run's optimiser, schedule and clipping, as w has; the optimiser of v begins afresh
      in every round.
    - Every silo takes part in every round.

    Needs silos that understand ``train.apfl``; those of coterie do. Two gradients a step, and two
    models at the silo.
    """

    kind = wire.TRAIN_APFL
    mixture: kit.NotNegative = Field(
        0.5,
        le=1,
        description="α before a silo's first round: 0 is the common model alone, 1 the silo's own.",
    )
    mixture_lr: kit.NotNegative = Field(
        0.1, le=1000, description="η_α, learning rate of α; 0 leaves it at `mixture`."
    )

    def problems(self, training: kit.Config) -> Iterator[str]:
        """A second model of the silo's own, and what is remembered of one training only."""
        if training.get(wire.PERSONALISE):
            yield (
                "apfl makes a model of each silo's own by itself, so personalise must be none. "
                f"Got {training[wire.PERSONALISE]!r}"
            )
        if training.get(wire.KEEP_OPTIMISER):
            yield "apfl trains two models at once, so keep-optimiser must be false"
        if training.get(wire.PRECISION) == "float16":
            yield "apfl has no loss scaling for α; take precision = float32 or bfloat16"

    def entries(self, training: kit.Config) -> kit.Config:
        """The mixture."""
        return {
            wire.PERSONALISE: "apfl",
            wire.MIXTURE: self.mixture,
            wire.MIXTURE_LR: self.mixture_lr,
        }

    def absorb(self, state: kit.Plain, updates: kit.Updates, now: kit.Round) -> kit.Plain:
        """The mean goes to everybody who is here."""
        require_understood(updates, wire.TRAIN_APFL, now.number)
        return kit.Plain(kit.average_groups(state.members, updates))


STEPS_OF_ITS_OWN = "has steps of its own"
FOR_SGD_ONLY = (
    *(wire.OPTIMISER, wire.KEEP_OPTIMISER, wire.SCHEDULE, wire.WARM_UP),
    *(wire.CLIP_NORM, wire.ACCUMULATE, wire.BALANCE),
)


def sgd_only(training: kit.Config, name: str, why: str) -> Iterator[str]:
    """Keys of local training that an algorithm has no place for, in words."""
    for key in FOR_SGD_ONLY:
        if training.get(key):  # only sent where it is not what silos take for granted
            yield f"{name} {why}: {key} = {training[key]} cannot be combined with it"


def require_understood(updates: kit.Updates, kind: str, number: int) -> None:
    """End a run in whose first round no silo understood what it was asked.

    Raises:
        FederationError: in round 1, without any update.
    """
    if number == 1 and not updates:
        raise FederationError(
            f"no silo answered {kind!r} in round 1; the log says why. This strategy needs silos "
            "that understand it, like those of `coterie silo`; other ClientApps need a function "
            f"for {kind!r}.",
            round_number=number,
            phase=kind,
        )
