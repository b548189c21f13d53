"""Algorithms inside a group: how its silos train, and how their updates become its model.

FedCollab, HCCT and FedGroup decide who trains with whom; inside a group any algorithm of one model
can run. An ``Inside`` is such an algorithm for one group; the strategies of one model
(``one_model``) use it with all silos in the group. FedProx, fine-tuning and Ditto need no option
here: they are entries of the training configuration (``proximal-mu``, ``personalise``), whatever
runs inside.

- FedAvg: McMahan et al., AISTATS 2017, https://arxiv.org/abs/1602.05629, Algorithm 1.
- FedNova: Wang, Liu, Liang, Joshi, Poor: "Tackling the Objective Inconsistency Problem in
  Heterogeneous Federated Optimization", NeurIPS 2020, https://arxiv.org/abs/2007.07481; eqs. 8–10.
- Per-FedAvg: Fallah, Mokhtari, Ozdaglar: "Personalized Federated Learning with Theoretical
  Guarantees: A Model-Agnostic Meta-Learning Approach", NeurIPS 2020,
  https://arxiv.org/abs/2002.07948; Algorithm 1, first order.
- pFedMe: Dinh, Tran, Nguyen: "Personalized Federated Learning with Moreau Envelopes", NeurIPS 2020,
  https://arxiv.org/abs/2006.08848; Algorithm 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from pydantic import BeforeValidator, Field

from coterie import wire
from coterie.strategies.partition.fednova import accumulation, coefficients
from coterie.strategies.rounds.algorithm import Algorithm, Round, State, Update, Updates
from coterie.strategies.rounds.handles import Model, arrays_of
from coterie.strategies.rounds.minimum_sizes import combine
from coterie.strategies.rounds.models import is_statistic, same_model, weighted_mean
from coterie.strategies.rounds.options import Config, Options, Times, TimesOrNone, dashed

# ---------------------------------------------------------------- options

ADAPT_HELP = "Steps on a silo's own data before a model is tested. 0: the paper's number"
MetaLR = Annotated[
    float,
    Field(
        gt=0,
        allow_inf_nan=False,
        le=1000,
        description="α, learning rate of the step on a silo's own data (Per-FedAvg).",
    ),
]
MoreauLambda = Annotated[
    float,
    Field(
        gt=0,
        allow_inf_nan=False,
        le=1e6,
        description="λ: large values keep personal models near the shared one; lr·λ must be below "
        "2 (pFedMe).",
    ),
]
MoreauLR = Annotated[
    float,
    Field(
        gt=0,
        allow_inf_nan=False,
        le=1000,
        description="η, learning rate of the shared model; η·λ must be at most 1 (pFedMe).",
    ),
]
InnerSteps = Annotated[
    Times,
    Field(description="K, number of steps towards the personal model per mini-batch (pFedMe)."),
]
ServerLR = Annotated[
    float,
    Field(
        gt=0,
        allow_inf_nan=False,
        le=1,
        description="β, how far the shared model moves towards the silos' mean, from 0 to 1 "
        "(pFedMe).",
    ),
]
AdaptSteps = Annotated[TimesOrNone, Field(description=f"{ADAPT_HELP} (Per-FedAvg: 1, pFedMe: 20).")]
META_LR, MOREAU_LAMBDA, MOREAU_LR, INNER_STEPS = 0.03, 15.0, 0.005, 5
META_STEPS, MOREAU_STEPS = 1, 20
"""Adaptation steps before a test, as in the papers."""

# ---------------------------------------------------------------- algorithms of one group


class Inside:
    """FedAvg in a group: ordinary training, and the size-weighted mean of the updates."""

    kind: ClassVar[str] = wire.TRAIN
    """Message type of the training."""
    averages: ClassVar[bool] = True
    """Whether the model is ``combine`` of the updates, which other rules may replace."""
    works_unseen: ClassVar[bool] = True
    """Whether it works without seeing silos' models."""

    def problems(self, training: Config) -> Iterator[str]:
        """Yield what conflicts with the run's training."""
        yield from ()

    def entries(self, training: Config) -> Config:
        """Return the entries that every training message of the run has for it."""
        return {}

    def combine(
        self, updates: Updates, now: Round, *, settings: Mapping[str, Config] | None = None
    ) -> Model:
        """Return the group's next model.

        Args:
            updates: at least one, all of which may be averaged.
            settings: silo → entries that replaced the run's in its training, if any.
        """
        return combine(updates)


@dataclass(frozen=True)
class FedNovaInside(Inside):
    """FedNova: a silo counts by its samples, not by its number of steps (eqs. 8–10)."""

    averages = False
    works_unseen = False

    def problems(self, training: Config) -> Iterator[str]:
        yield from sgd_only(training, "fednova", "counts the steps of SGD")
        lr, mu = (float(training.get(key, 0.0)) for key in (wire.LR, wire.PROXIMAL_MU))
        if lr * mu >= 1:
            yield (
                "lr · proximal-mu must be below 1 with fednova, otherwise an update's steps "
                f"cannot be counted. Got {lr:g} · {mu:g}"
            )

    def entries(self, training: Config) -> Config:
        return {wire.PLAIN_STEPS: True}

    def combine(
        self, updates: Updates, now: Round, *, settings: Mapping[str, Config] | None = None
    ) -> Model:
        """Return the model of eq. 8 over the silos that answered."""
        own = settings or {}
        sizes = [u.num_examples for u in updates]
        steps = [
            _accumulated(u, {**now.config, **own.get(u.silo.name, {})}, now.number) for u in updates
        ]
        return normalised(updates, coefficients(sizes, steps))


@dataclass(frozen=True)
class PerFedAvgInside(Inside):
    """Per-FedAvg: silos train a start from which one step on their own data leads far."""

    meta_lr: float = META_LR
    adapt_steps: int = 0
    kind = wire.TRAIN_PER_FEDAVG
    works_unseen = False

    def problems(self, training: Config) -> Iterator[str]:
        yield from sgd_only(training, "perfedavg", STEPS_OF_ITS_OWN)
        yield from joint_only(training, "perfedavg")

    def entries(self, training: Config) -> Config:
        return {
            wire.PLAIN_STEPS: True,
            wire.META_LR: self.meta_lr,
            wire.ADAPT_STEPS: self.adapt_steps or META_STEPS,
            wire.ADAPT_LR: self.meta_lr,
        }


@dataclass(frozen=True)
class PFedMeInside(Inside):
    """pFedMe: personal models in a Moreau envelope; the group's model follows at its own rate."""

    moreau_lambda: float = MOREAU_LAMBDA
    moreau_lr: float = MOREAU_LR
    inner_steps: int = INNER_STEPS
    server_lr: float = 1.0
    adapt_steps: int = 0
    kind = wire.TRAIN_PFEDME
    works_unseen = False

    def problems(self, training: Config) -> Iterator[str]:
        yield from sgd_only(training, "pfedme", STEPS_OF_ITS_OWN)
        yield from joint_only(training, "pfedme")
        lr = float(training.get(wire.LR, 0.01))
        if self.moreau_lr * self.moreau_lambda > 1:
            yield (
                "moreau-lr · moreau-lambda must be at most 1. "
                f"Got {self.moreau_lr:g} · {self.moreau_lambda:g}"
            )
        if lr * self.moreau_lambda >= 2:
            yield (
                "lr · moreau-lambda must be below 2, otherwise the steps towards a personal "
                f"model diverge. Got {lr:g} · {self.moreau_lambda:g}"
            )

    def entries(self, training: Config) -> Config:
        return {
            wire.PLAIN_STEPS: True,
            wire.MOREAU_LAMBDA: self.moreau_lambda,
            wire.MOREAU_LR: self.moreau_lr,
            wire.INNER_STEPS: self.inner_steps,
            wire.ADAPT_STEPS: self.adapt_steps or MOREAU_STEPS,
            wire.ADAPT_LR: float(training.get(wire.LR, 0.01)),
            wire.ADAPT_MU: self.moreau_lambda,
        }

    def combine(
        self, updates: Updates, now: Round, *, settings: Mapping[str, Config] | None = None
    ) -> Model:
        """Return ``(1 − β) w + β · mean``."""
        mean = combine(updates)
        if self.server_lr == 1:
            return mean
        return weighted_mean([_start(updates), mean], [1 - self.server_lr, self.server_lr])


# ---------------------------------------------------------------- as an option of a strategy


class Within(Options):
    """The algorithm that runs inside the groups, with its options.

    A name is enough with default options: ``HCCT(within="fednova")``.
    """

    algorithm: Literal["fedavg", "fednova", "perfedavg", "pfedme"] = Field(
        "fedavg",
        alias="within",
        description="Algorithm inside the groups. For FedProx, use `fedavg` with `proximal-mu`; "
        "for fine-tuning and Ditto, use `personalise`.",
    )
    meta_lr: MetaLR = META_LR
    moreau_lambda: MoreauLambda = MOREAU_LAMBDA
    moreau_lr: MoreauLR = MOREAU_LR
    inner_steps: InnerSteps = INNER_STEPS
    server_lr: ServerLR = 1.0
    adapt_steps: AdaptSteps = 0

    @property
    def inside(self) -> Inside:
        fields = {name: getattr(self, name) for name in OWN_FIELDS[self.algorithm]}
        made: Inside = KINDS[self.algorithm](**fields)
        return made

    def problems(self, training: Config) -> Iterator[str]:
        """Yield options of another algorithm, and what conflicts in the algorithm itself."""
        mine = OWN_FIELDS[self.algorithm]
        for name, field in type(self).model_fields.items():
            given = getattr(self, name)
            if name != "algorithm" and name not in mine and given != field.default:
                others = " or ".join(kind for kind, own in OWN_FIELDS.items() if name in own)
                yield f"{dashed(name)} is for within = {others}. Got within = {self.algorithm}"
        yield from self.inside.problems(training)

    def insecure(self) -> str:
        """Return why a secure run cannot use it; empty if it can."""
        if self.inside.works_unseen:
            return ""
        return f"within = {self.algorithm} is not available in a secure run: use within = fedavg"


KINDS: Mapping[str, Any] = {
    "fedavg": Inside,
    "fednova": FedNovaInside,
    "perfedavg": PerFedAvgInside,
    "pfedme": PFedMeInside,
}
OWN_FIELDS: Mapping[str, tuple[str, ...]] = {
    name: tuple(getattr(kind, "__dataclass_fields__", {})) for name, kind in KINDS.items()
}
"""Algorithm → names of its options."""


def _of_name(value: Any) -> Any:
    return {"within": value} if isinstance(value, str) else value


WithinField = Annotated[Within, BeforeValidator(_of_name)]
"""A field of a strategy that forms groups."""


class Grouping(Algorithm[State]):
    """An algorithm that forms groups, with another, ``within``, inside them."""

    if TYPE_CHECKING:  # a field, with its default, of every subclass
        within: Within

    @property
    def averages(self) -> bool:
        return self.within.inside.averages

    def entries(self, training: Config) -> Config:
        return self.within.inside.entries(training)

    def problems(self, training: Config) -> Iterator[str]:
        return self.within.problems(training)


# ---------------------------------------------------------------- FedNova's arithmetic

NUM_STEPS = "num-steps"
"""Metric in which a silo may state its τ_i."""


def _accumulated(update: Update, config: Config, number: int) -> float:
    """Return |a_i|₁."""
    lr = float(config.get(wire.LR, 0.0)) * float(config.get(wire.LR_DECAY, 1.0)) ** (number - 1)
    return accumulation(
        num_steps(update, config),
        momentum=float(config.get(wire.MOMENTUM, 0.0)),
        decay=lr * float(config.get(wire.PROXIMAL_MU, 0.0)),
    )


def num_steps(update: Update, config: Config) -> int:
    """Return τ_i, as stated or else from the configuration; see ``FedNova``."""
    stated = update.metrics.get(NUM_STEPS, 0)
    if np.isfinite(stated) and stated >= 1:
        return int(stated)
    if config.get(wire.LOCAL_STEPS):  # silos make so many, whatever the epochs
        return int(config[wire.LOCAL_STEPS])
    samples = ceil(update.num_examples)
    if wire.BATCH_SIZE not in config:
        return samples
    return int(config.get(wire.LOCAL_EPOCHS, 1)) * ceil(samples / int(config[wire.BATCH_SIZE]))


def normalised(updates: Updates, factors: np.ndarray) -> Model:
    """Return ``w + Σ c_i (w_i − w)`` of parameters, and the size-weighted mean of everything else.

    Updates that started from different models count from their own starts; the first w is then the
    size-weighted mean of these.
    """
    mean = weighted_mean([u.model for u in updates], [u.num_examples for u in updates])
    if len(updates) == 1:
        return mean
    start = arrays_of(_start(updates))
    trained = [(arrays_of(u.start), arrays_of(u.model)) for u in updates]
    buffers = {name for u in updates for name in u.silo.buffers}
    return {
        name: _stepped(start[name], [(old[name], new[name]) for old, new in trained], factors)
        if np.issubdtype(array.dtype, np.floating) and not is_statistic(name, sorted(buffers))
        else array
        for name, array in arrays_of(mean).items()
    }


def _start(updates: Updates) -> Model:
    """Return the model that a group trained from; the mean if its silos started apart."""
    first = updates[0].start
    if all(same_model(u.start, first) for u in updates):
        return first
    return weighted_mean([u.start for u in updates], [u.num_examples for u in updates])


def _stepped(
    start: np.ndarray, moves: Sequence[tuple[np.ndarray, np.ndarray]], factors: np.ndarray
) -> np.ndarray:
    wide = start.astype(np.float64)
    step = sum(
        c * (new.astype(np.float64) - old.astype(np.float64))
        for c, (old, new) in zip(factors, moves, strict=True)
    )
    return np.asarray((wide + step).astype(start.dtype))


# ---------------------------------------------------------------- what they have no place for

STEPS_OF_ITS_OWN = "sets its own steps"


def sgd_only(training: Config, name: str, why: str) -> Iterator[str]:
    """Yield an error for every key of local training that an algorithm does not support."""
    for key in wire.loop_entries():
        # Only sent where it is not what silos take for granted.
        if training.get(key) and training[key] != "sgd":
            yield f"{name} {why}: {key} = {training[key]} cannot be combined with it"


def joint_only(training: Config, name: str) -> Iterator[str]:
    """Yield an error if a run trains parts of a model in turn, which an algorithm does not."""
    if training.get(wire.PERSONAL) == wire.HEAD_FIRST:
        yield (
            f"{name} {STEPS_OF_ITS_OWN}: personal = {wire.HEAD_FIRST} cannot be combined with it. "
            "Use personal = head"
        )
