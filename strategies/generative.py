"""What FedGenP and FedGen share: generators of latents beside the rounds of another strategy.

Any strategy of the common loop forms groups and aggregates (``base``); here every training order
of a round gets the generator of its receiver, and the predictors that come back are kept for the
next round's generators. The server's stage runs at the beginning of a round, when it is known who
trains from which model: θ is aggregated, generators are trained, both are sent (Algorithm 1 of
FedGenP, lines 10–16).
"""

from __future__ import annotations

import hashlib
import logging
from abc import abstractmethod
from collections.abc import Generator as Steps
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Unpack

import numpy as np

import wire
from strategies.errors import require
from strategies.fedavg import FedAvg
from strategies.latent import (
    Generator,
    GeneratorPlan,
    common_layers,
    linear_head,
    predictor_arrays,
)
from strategies.loop import Group, GroupStrategy, LoopOptions, Order, Update
from strategies.roster import Silo, minimums_of, staying
from wire import Layers, Model

__all__ = ["Generative", "GenerativeState", "Given", "nobody", "rng_of", "teaching"]

log = logging.getLogger("coterie.run")


@dataclass(frozen=True)
class Given:
    """How silos use the generators that they are given.

    Attributes:
        weight: of the loss on generated latents, ≥ 0; the paper 1, the released code 10.
        distil: weight of the divergence from the head's answers to latents generated for the
            own labels, ≥ 0; the paper 0, the released code 10.
        decay: factor on both after every round, in (0, 1]; the paper 1, the released code 0.98.
    """

    weight: float = 1.0
    distil: float = 0.0
    decay: float = 1.0

    def __post_init__(self) -> None:
        for name in ("weight", "distil"):
            value = getattr(self, name)
            require(0 <= value < 1e6, f"{name} of latents must be in [0, 1e6). Got {value}.")
        require(0 < self.decay <= 1, f"decay of latents must be in (0, 1]. Got {self.decay}.")

    def config(self, round: int) -> dict[str, int | float | str | bool]:
        """Entries of a training message of this round."""
        factor = self.decay ** (round - 1)
        return {
            wire.GENERATED_WEIGHT: self.weight * factor,
            wire.DISTIL_WEIGHT: self.distil * factor,
            wire.EVALUATE_TRAINED: True,
        }


@dataclass(frozen=True)
class GenerativeState:
    """What is known between two rounds, beside the state of the base.

    Attributes:
        base: state of the strategy that groups and aggregates.
        layers: what the predictors compute; empty before round 1.
        heads: silo that is here → arrays of its predictor as it last sent them.
        generators: receiver → its generator.
        members: receiver → its silos in this round.
        teachers: whose heads this round's generators learned from: receivers, of FedGen silos.
        counts: silo → its label counts (FedGen), or None if it refused; without an entry, it is
            asked.
        quality: receiver → shares of latents that the other heads, and its own, label as meant.
        seconds: of the server's stage in this round.
        alone: there is nobody to learn from.
    """

    base: Any
    layers: Layers = ()
    heads: Mapping[str, Model] = field(default_factory=dict)
    generators: Mapping[str, Generator] = field(default_factory=dict)
    members: Mapping[str, Group] = field(default_factory=dict)
    teachers: Group = ()
    counts: Mapping[str, np.ndarray | None] = field(default_factory=dict)
    quality: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    seconds: float = 0.0
    alone: bool = False


class Generative(GroupStrategy[GenerativeState]):
    """A base strategy whose silos also get generators.

    Args:
        base: forms groups and aggregates; ``FedAvg`` by default. Its options of the loop (roster,
            time limits, reports) are not used; its ``train_config`` becomes this one's.
        plan: how generators are trained.
        given: how silos use them.
        head: prefix of a linear predictor's arrays, for silos that do not describe theirs.
        seed: of the generators.
        device: of the generators; ``auto`` takes a GPU if there is one.

    The other arguments are those of ``GroupStrategy``.
    """

    def __init__(
        self,
        *,
        base: GroupStrategy[Any] | None = None,
        plan: GeneratorPlan | None = None,
        given: Given | None = None,
        head: str = "",
        seed: int = 0,
        device: str = "auto",
        **options: Unpack[LoopOptions],
    ) -> None:
        super().__init__(**options)
        self.base: GroupStrategy[Any] = FedAvg() if base is None else base
        self.base.train_config = dict(self.train_config)
        self.plan = GeneratorPlan() if plan is None else plan
        self.given = Given() if given is None else given
        self.head, self.seed, self.device = head, int(seed), device

    @abstractmethod
    def generated(
        self,
        state: GenerativeState,
        orders: Sequence[Order],
        minimums: Mapping[str, int],
        *,
        round: int,
    ) -> GenerativeState:
        """The server's stage: ``generators``, ``members`` and ``teachers`` of the round.

        Args:
            state: with the heads and layers of who is here.
            orders: of the round's own training.
            minimums: silo that is here → the smallest group that it accepts, as ``teaching`` takes.
            round: its number.
        """

    def sent(self, state: GenerativeState, receiver: str) -> Model:
        """What a receiver's silos get."""
        return state.generators[receiver].weights

    def first(self, initial: Model) -> GenerativeState:
        """No generators."""
        layers = linear_head(initial, self.head) if self.head else ()
        return GenerativeState(self.base.first(initial), layers=layers)

    def admit(
        self, state: GenerativeState, silos: Sequence[Silo], *, round: int
    ) -> GenerativeState:
        """A newcomer gets the base's model at once, a generator after its first update."""
        return replace(state, base=self.base.admit(state.base, silos, round=round))

    def prepare(
        self, state: GenerativeState, silos: Sequence[Silo], *, round: int
    ) -> Steps[Sequence[Order], list[Update], GenerativeState]:
        """What the base must ask."""
        base = yield from self.base.prepare(state.base, silos, round=round)
        return replace(state, base=base)

    def orders(
        self, state: GenerativeState, silos: Sequence[Silo], *, round: int
    ) -> tuple[GenerativeState, list[Order]]:
        """The base's orders, each with its receiver's generator. Leavers' heads are dropped."""
        base, orders = self.base.orders(state.base, silos, round=round)
        here = {silo.name for silo in silos}
        state = replace(
            state,
            base=base,
            layers=self._layers(state, silos),
            heads={name: head for name, head in state.heads.items() if name in here},
        )
        own = [order for order in orders if _is_own(order)]
        state = self.generated(state, own, minimums_of(silos), round=round)
        receiver_of = {name: r for r, names in state.members.items() for name in names}
        records = {receiver: self.sent(state, receiver) for receiver in state.members}
        config = self.given.config(round)
        return state, [
            _with(order, records.get(receiver_of.get(order.silo.name, "")), config)
            if _is_own(order)
            else order
            for order in orders
        ]

    def _layers(self, state: GenerativeState, silos: Sequence[Silo]) -> Layers:
        """What the predictors of who is here compute."""
        described = [(silo.name, silo.head) for silo in silos if silo.described or not self.head]
        return common_layers(described) if described else state.layers

    def absorb(
        self, state: GenerativeState, updates: Sequence[Update], *, round: int
    ) -> GenerativeState:
        """The base aggregates; the predictors are kept for the next generators."""
        heads = {
            update.silo.name: predictor_arrays(update.model, state.layers)
            for update in updates
            if not update.purpose
        }
        base = self.base.absorb(state.base, updates, round=round)
        return replace(state, base=base, heads={**state.heads, **heads})

    def models(self, state: GenerativeState) -> Mapping[str, Model]:
        """The base's."""
        return self.base.models(state.base)

    def next_models(self, state: GenerativeState) -> Mapping[str, Model]:
        """The base's."""
        return self.base.next_models(state.base)

    def groups(self, state: GenerativeState) -> Sequence[Group]:
        """The base's."""
        return self.base.groups(state.base)

    def sharing(self, state: GenerativeState) -> Sequence[Group]:
        """The base's."""
        return self.base.sharing(state.base)

    def sizes(self, state: GenerativeState) -> Mapping[str, float]:
        """The base's."""
        return self.base.sizes(state.base)

    def details(self, state: GenerativeState) -> Mapping[str, Any]:
        """The base's; who received a generator, and what heads say of its latents."""
        receivers = {
            receiver: {
                "silos": list(names),
                "others-agree": round(state.quality[receiver][0], 4),
                "own-agrees": round(state.quality[receiver][1], 4),
            }
            for receiver, names in state.members.items()
        }
        stage = {"seconds": round(state.seconds, 4), "receivers": receivers}
        return {**self.base.details(state.base), "generators": stage}


def teaching(receivers: Mapping[str, Group], minimums: Mapping[str, int]) -> Group:
    """Receivers from whose heads generators may learn, sorted.

    A generator shows its receiver what the heads behind it know. So a silo that accepts only
    groups of m either is in one, and the head is a mean already, or its head is one of at least m
    that every other receiver's generator learns from.

    Args:
        receivers: receiver that has a head → its silos.
        minimums: silo → the smallest group that it accepts, where it stated one.
    """
    heads = {}
    for receiver, group in receivers.items():
        wanted = max(minimums.get(name, 1) for name in group)
        if wanted > len(group):
            heads[receiver] = wanted + 1  # a receiver's own head hides nothing from it
    names = staying(sorted(receivers), heads)
    left_out = sorted(set(receivers) - set(names))
    if left_out:
        log.warning(
            "no generator learns from %s: by min_group_size their heads count only among more",
            ", ".join(left_out),
        )
    return names


def nobody(state: GenerativeState, round: int) -> GenerativeState:
    """Too few heads: there is nobody to learn from, the base goes on by itself."""
    if round > 1 and not state.alone:
        log.warning(
            "round %d: there is nobody to learn from, so there are no generators: training goes on "
            "as without them",
            round,
        )
    empty: Mapping[str, Any] = {}
    return replace(
        state,
        generators=empty,
        members=empty,
        teachers=(),
        quality=empty,
        seconds=0.0,
        alone=round > 1,
    )


def rng_of(seed: int, round: int, receiver: str, purpose: int) -> np.random.Generator:
    """A receiver's own randomness: who else is there does not change it."""
    digest = hashlib.sha256(receiver.encode()).digest()
    return np.random.default_rng([seed, round, purpose, int.from_bytes(digest[:8], "little")])


def _is_own(order: Order) -> bool:
    """A round's own training."""
    return order.kind == wire.TRAIN and not order.purpose


def _with(order: Order, generator: Model | None, config: Mapping[str, Any]) -> Order:
    extras = {} if generator is None else {wire.GENERATOR: generator}
    return replace(order, extras={**order.extras, **extras}, config={**order.config, **config})
