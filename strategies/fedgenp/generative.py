"""The common part of FedGenP and FedGen: generators of latents in another strategy's rounds.

Any strategy of the common loop forms groups and aggregates (``base``). Here every training order
also carries its receiver's generator, and the predictors that return are kept for the next round's
generators. The server's stage runs at the beginning of a round, when the start models are known: θ
is aggregated, generators are trained, both are sent (Algorithm 1 of FedGenP, lines 10–16).
"""

from __future__ import annotations

import hashlib
import logging
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from typing import Annotated, Any

import numpy as np
from pydantic import AfterValidator, Field

from coterie import wire
from coterie.strategies.errors import refused
from coterie.strategies.fedgenp.latent import (
    Generator,
    GeneratorPlan,
    common_layers,
    fresh_generator,
    linear_head,
    out_of_line,
    predictor_arrays,
    predictor_shape,
)
from coterie.strategies.plain.fedavg import FedAvg
from coterie.strategies.rounds.algorithm import (
    Answers,
    Around,
    Base,
    Exchanges,
    Order,
    Round,
    Updates,
)
from coterie.strategies.rounds.handles import Arrays, arrays_of
from coterie.strategies.rounds.members import staying
from coterie.strategies.rounds.models import holders
from coterie.strategies.rounds.options import Config, NotNegative, Options, Positive, Scalar, Seed
from coterie.strategies.rounds.reports import Group
from coterie.strategies.rounds.roster import Silo
from coterie.wire import Layers

log = logging.getLogger("coterie.run")


class Given(Options):
    """The silos' use of their generators."""

    weight: NotNegative = Field(
        1.0,
        lt=1e6,
        alias="generated-weight",
        description="Weight of the loss on generated latents. The released code uses 10.",
    )
    distil: NotNegative = Field(
        0.0,
        lt=1e6,
        alias="distil-weight",
        description="Weight of the divergence from the head's outputs on latents generated for "
        "the silo's own labels. The released code uses 10. 0: no such term.",
    )
    decay: Positive = Field(
        1.0,
        le=1,
        alias="generated-decay",
        description="Factor by which both weights are multiplied after every round. The released "
        "code uses 0.98.",
    )

    def config(self, number: int) -> dict[str, Scalar]:
        """Return the entries of a training message of round ``number``."""
        factor = self.decay ** (number - 1)
        return {
            wire.GENERATED_WEIGHT: self.weight * factor,
            wire.DISTIL_WEIGHT: self.distil * factor,
            wire.EVALUATE_TRAINED: True,
        }


def usable_device(device: str) -> str:
    """Return ``device``, or raise ValueError if torch does not know it or this machine lacks it."""
    if re.fullmatch(r"auto|cpu|cuda(:\d+)?", device) is None:
        raise ValueError(
            f"device of the generators must be auto, cpu, cuda or cuda:<number>. Got {device!r}"
        )
    if device.startswith("cuda"):
        import torch

        found = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if found <= int(device.partition(":")[2] or 0):
            raise ValueError(
                f"device of the generators is {device!r}, but torch can use "
                f"{wire.counted(found, 'GPU')} of this machine. Take auto or cpu"
            )
    return device


@dataclass(frozen=True)
class GenerativeState:
    """The state between rounds, in addition to the base's.

    Attributes:
        initial: w⁰.
        layers: layers of the predictors; empty before round 1.
        heads: present silo → arrays of its predictor as it last sent them.
        trained: present silos that have sent an update, including of a cold start.
        sources: silo → the silos whose updates its model averages.
        other: present silos that describe a predictor different from ``layers``.
        generators: receiver → its generator, kept also while none is sent.
        members: receiver → its present silos when its generator was last trained.
        receiving: receivers whose silos get their generator in this round.
        teachers: receivers (for FedGen silos) whose heads this round's generators learned from.
        counts: present silo → its label counts (FedGen), or None if it refused; missing if it has
            yet to be asked.
        quality: receiver → shares of latents that the other heads, and its own, label as intended.
        seconds: duration of the server's stage in this round.
        alone: there are no other heads to learn from.
    """

    base: Any
    initial: Arrays = field(default_factory=dict)
    layers: Layers = ()
    heads: Mapping[str, Arrays] = field(default_factory=dict)
    trained: frozenset[str] = frozenset()
    sources: Mapping[str, Group] = field(default_factory=dict)
    other: frozenset[str] = frozenset()
    generators: Mapping[str, Generator] = field(default_factory=dict)
    members: Mapping[str, Group] = field(default_factory=dict)
    receiving: Group = ()
    teachers: Group = ()
    counts: Mapping[str, np.ndarray | None] = field(default_factory=dict)
    quality: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    seconds: float = 0.0
    alone: bool = False


class Generative(Around[GenerativeState]):
    """Another algorithm, ``base``, whose silos also get generators."""

    base: Base = FedAvg()
    plan: GeneratorPlan = GeneratorPlan()
    given: Given = Given()
    head: Annotated[
        str, Field(title="Prefix of the predictor's arrays, for silos that do not describe theirs.")
    ] = ""
    seed: Seed = 0
    device: Annotated[
        str,
        AfterValidator(usable_device),
        Field(title="Device of the generators; `auto`: a GPU, if there is one."),
    ] = "auto"

    def demands(self) -> Config:
        return {**super().demands(), wire.GENERATED_WEIGHT: self.given.weight}

    def generated(
        self, state: GenerativeState, orders: Sequence[Order], now: Round
    ) -> GenerativeState:
        """Train generators and note this round's receivers and teachers: the server's stage.

        Args:
            state: with the base's groups of the round, and the heads and layers of present silos.
            orders: the round's own training.
        """
        raise NotImplementedError

    def fresh(self, receiver: str, heads: Mapping[str, Arrays], layers: Layers) -> Generator:
        """Return an untrained generator of latents for these heads."""
        latent, num_classes = predictor_shape(heads, layers)
        rng = rng_of(self.seed, 0, receiver, 0)
        return fresh_generator(
            num_classes=num_classes, latent=latent, hidden=self.plan.hidden, rng=rng
        )

    def sent(self, state: GenerativeState, receiver: str) -> Arrays:
        """Return the arrays that a receiver's silos get."""
        return state.generators[receiver].weights

    def problems(self, training: Config) -> Iterator[str]:
        yield from super().problems(training)
        if training.get(wire.PERSONAL):
            yield "generators need the predictors, so personal must be empty"
        within = getattr(self.base, "within", None)
        if within is not None and within.inside.kind != wire.TRAIN:
            yield (
                "silos learn from generators in ordinary training, so within must be fedavg or "
                f"fednova. Got {within.algorithm}"
            )
        if find_spec("torch") is None:  # the coordinator's image has none
            yield (
                "the coordinator itself trains generators, which needs PyTorch: install it "
                "there, or run the coordinator from the silo image"
            )

    def first(self, initial: Arrays) -> GenerativeState:
        layers = linear_head(initial, self.head) if self.head else ()
        return GenerativeState(self.base.first(initial), initial=initial, layers=layers)

    def prepare(self, state: GenerativeState, now: Round) -> Exchanges[GenerativeState]:
        """Run the base's exchanges; an answer to a cold start counts as trained."""
        state = self._seen(state, now)  # refuses what cannot learn before anybody works
        steps = self.base.prepare(state.base, now)
        answers: Answers | None = None
        while True:  # as often as the base asks; the engine gives every exchange its deadline
            try:
                orders = next(steps) if answers is None else steps.send(answers)
            except StopIteration as end:
                return replace(state, base=end.value)
            answers = yield orders
            state = replace(state, trained=state.trained | _who_trained(answers))

    def orders(self, state: GenerativeState, now: Round) -> tuple[GenerativeState, list[Order]]:
        """Return the base's orders, each with its receiver's generator."""
        base, orders = self.base.orders(state.base, now)
        for order in orders:  # only ordinary training knows what to do with a generator
            if not order.purpose and order.kind != wire.TRAIN:
                raise refused(
                    f"generators need ordinary training ({wire.TRAIN!r}). The silos of "
                    f"{type(self.base).__name__} train differently ({order.kind!r}): run it "
                    "without generators, or choose another base."
                )
        state = self._seen(replace(state, base=base), now)
        own = [order for order in orders if _is_own(order)]
        if self.base.comparing(state.base, now):
            state = paused(state)  # partitions are compared: all are to be trained alike
        else:
            state = self.generated(state, own, now)
        receiver_of = {name: r for r in state.receiving for name in _fitting(state, r)}
        records = {receiver: self.sent(state, receiver) for receiver in state.receiving}
        config = self.given.config(now.number)
        return state, [
            _with(order, records.get(receiver_of.get(order.silo.name, "")), config)
            if _is_own(order)
            else order
            for order in orders
        ]

    def _seen(self, state: GenerativeState, now: Round) -> GenerativeState:
        """Drop what was known of absent silos, including their consent."""
        state = self._settled(state, now)
        here = set(now.names)
        heads = {silo.name: silo.head for silo in now.silos if self._describes(silo)}
        other = {name for name, head in heads.items() if head != state.layers}
        for name in sorted(other - state.other):
            log.warning(
                "silo %s has %s: it trains without generators, and no generator learns from "
                "its predictor. Install the same version of the task at all silos.",
                name,
                "a different head" if heads[name] else "no latent split",
            )
        present = {r: tuple(n for n in names if n in here) for r, names in state.members.items()}
        members = {receiver: names for receiver, names in present.items() if names}
        return replace(
            state,
            heads={name: head for name, head in state.heads.items() if name in here - other},
            trained=state.trained & here,
            sources={name: of for name, of in state.sources.items() if name in here},
            other=frozenset(other),
            counts={name: counts for name, counts in state.counts.items() if name in here},
            members=members,
            generators={receiver: state.generators[receiver] for receiver in members},
        )

    def _settled(self, state: GenerativeState, now: Round) -> GenerativeState:
        """Fix the predictor's layers to those of the first round's silos.

        Raises:
            FederationError: most of these describe none, or one that cannot be learned from.
        """
        if now.number > 1 and state.layers:
            return state
        described = [(silo.name, silo.head) for silo in now.silos if self._describes(silo)]
        task = str(now.config.get(wire.TASK, ""))
        layers = common_layers(described, task=task) if described else state.layers
        predictor_shape({"w⁰": predictor_arrays(state.initial, layers)}, layers)
        return replace(state, layers=layers)

    def _describes(self, silo: Silo) -> bool:
        """Return whether the silo's own description counts, not the prefix ``head``."""
        return silo.described or not self.head

    def absorb(self, state: GenerativeState, updates: Updates, now: Round) -> GenerativeState:
        """Aggregate with the base; keep the predictors for the next generators."""
        answered = {update.silo.name: update for update in updates if not update.purpose}
        heads = {
            name: predictor_arrays(arrays_of(update.model), state.layers)
            for name, update in answered.items()
            if name not in state.other
        }
        base = self.base.absorb(state.base, updates, now)
        sources = dict(state.sources)  # who holds a mean of no answer keeps its entry
        for _, names in holders(self.base.next_models(base)):
            if behind := tuple(sorted(answered.keys() & set(names))):
                sources |= dict.fromkeys(names, behind)
        return replace(
            state,
            base=base,
            heads={**state.heads, **heads},
            trained=state.trained | _who_trained(updates),
            sources=sources,
        )

    def details(self, state: GenerativeState) -> Mapping[str, Any]:
        receivers = {
            receiver: {
                "silos": _fitting(state, receiver),
                "others-agree": round(state.quality[receiver][0], 4),
                "own-agrees": round(state.quality[receiver][1], 4),
            }
            for receiver in state.receiving
        }
        stage = {"seconds": round(state.seconds, 4), "receivers": receivers}
        return {**self.base.details(state.base), "generators": stage}


def teaching(
    heads: Mapping[str, Arrays],
    receivers: Mapping[str, Group],
    behind: Mapping[str, Group],
    minimums: Mapping[str, int],
) -> Group:
    """Return the receivers, sorted, from whose heads generators may learn.

    A generator reveals to its receiver what the heads behind it know. So the head of a silo that
    accepts only groups of m must be a mean of so many already, or be among at least m from which
    every other receiver's generator learns. No generator learns from an outlier head, which would
    make all generators useless for hundreds of rounds.

    Args:
        heads: receiver → arrays of its predictor.
        receivers: receiver → its silos.
        behind: receiver → the silos whose updates its head averages.
        minimums: silo → the smallest group that it accepts, if it stated one.
    """
    wild = out_of_line({receiver: heads[receiver] for receiver in receivers})
    for receiver, times in sorted(wild.items()):
        log.warning(
            "no generator learns from %s: its predictor's norm is %.3g times the usual one. "
            "Check its data and its training",
            receiver,
            times,
        )
    least = {}
    for receiver, group in receivers.items():
        wanted = max(minimums.get(name, 1) for name in group)
        if wanted > len(behind[receiver]):
            least[receiver] = wanted + 1  # a receiver's own head hides nothing from it
    usable = sorted(set(receivers) - set(wild))
    names = staying(usable, least)
    left_out = sorted(set(usable) - set(names))
    if left_out:
        log.warning(
            "no generator learns from %s: their min_group_size requires more silos",
            ", ".join(left_out),
        )
    return names


def without_teachers(state: GenerativeState, now: Round) -> GenerativeState:
    """Continue without generators while there are too few heads to learn from."""
    expected = now.number == 1 and len(now.silos) > 1  # nobody has trained yet
    if not expected and not state.alone:
        log.warning(
            "round %d: no silo to learn from, so training continues without generators", now.number
        )
    return replace(paused(state), alone=not expected)


def paused(state: GenerativeState) -> GenerativeState:
    """Skip generators for a round, keeping them for later."""
    return replace(state, receiving=(), teachers=(), quality={}, seconds=0.0)


def rng_of(seed: int, number: int, receiver: str, purpose: int) -> np.random.Generator:
    """Return a receiver's own random generator, independent of the other receivers."""
    digest = hashlib.sha256(receiver.encode()).digest()
    return np.random.default_rng([seed, number, purpose, int.from_bytes(digest[:8], "little")])


def _is_own(order: Order) -> bool:
    """Return whether this is a round's own training, not that of a partition on trial."""
    return order.kind == wire.TRAIN and not order.purpose and wire.HOLDOUT not in order.config


def _fitting(state: GenerativeState, receiver: str) -> list[str]:
    return [name for name in state.members[receiver] if name not in state.other]


def _who_trained(updates: Updates) -> frozenset[str]:
    return frozenset(u.silo.name for u in updates if u.kind in (wire.TRAIN, wire.COLD_START))


def _with(order: Order, generator: Arrays | None, config: Mapping[str, Any]) -> Order:
    extras = {} if generator is None else {wire.GENERATOR: generator}
    return replace(order, extras={**order.extras, **extras}, config={**order.config, **config})
