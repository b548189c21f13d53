"""Personalisation: what a silo makes of its group's model before it evaluates or keeps it.

*Partial pooling* and *fine-tuning*: the silo's own model is the one received, trained for some more
epochs on its own data. It is made again whenever it is needed, and never sent. In partial pooling
the training has a penalty λ/(2n)·|w − w_received|² beside the mean loss of the silo's n samples, so
that more samples leave the common model further behind; it leaves out the last bias, so that a silo
keeps its own base rate (Gelman and Hill: Data Analysis Using Regression and Multilevel/Hierarchical
Models, 2007, chapter 12). Own models of boosted trees are made elsewhere
(``coterie.features.sums.trees.own``). The steps that Per-FedAvg and pFedMe take before a test
belong here too, along the gradient of all training data.

*Ditto* (Li, Hu, Beirami, Smith: "Ditto: Fair and Robust Federated Learning Through
Personalization", ICML 2021, https://arxiv.org/abs/2012.04221, Algorithm 1): in addition to the
group's training the silo trains its own model v, with the proximal term λ/2·|v − w|² towards the
model w that it received.

*APFL* (``coterie.features.personal.mixture``): the silo's model is a mixture of the one received
and one that it trains in the same steps as the group's.

The models that Ditto and APFL train are kept at the silo per run, survive a restart, and are never
sent.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from flwr.app import RecordDict
from torch import nn

from coterie import wire
from coterie.client.home import rounds
from coterie.client.work.data import Part
from coterie.client.work.diverged import odd_array
from coterie.client.work.hold_out import held_apart
from coterie.client.work.linear import linear_layer
from coterie.client.work.measure import evaluate, held_out_metrics, loss_error
from coterie.client.work.request import RefusedError, Request
from coterie.client.work.session import Session
from coterie.client.work.sgd import Stopwatch, TrainPlan
from coterie.client.work.stage import Begun, Stage, Training, Work
from coterie.client.work.train import train_and_reply
from coterie.client.work.weights import load_weights, read_weights, travelling
from coterie.features.personal.mixture import Mixture, mix_in
from coterie.tasks.models import TableNetwork
from coterie.tasks.trees import Trees
from coterie.wire import Model


class Personal(Stage):
    """The stage for personalisation."""

    name = "personal"

    def admit(self, request: Request) -> Request:
        """Refuse what a task with its own training loop has none of: pulls, parts of a model."""
        if request.session.families and request.config.get(wire.PERSONALISE):
            request.refuse_for(
                f'has network = "any" in its task, which cannot be combined with {wire.PERSONALISE}'
                ": auto makes silos' own linear models itself. Leave it empty, or name a network."
            )
        pulls = {wire.DITTO: wire.DITTO_LAMBDA, wire.PARTIAL: wire.OWN_PENALTY}
        if (key := pulls.get(str(request.config.get(wire.PERSONALISE)))) is not None:
            request.refuse_with(key, wire.LOOP, idle=0)
        if request.config.get(wire.PERSONAL) == wire.HEAD_FIRST:
            request.refuse_with(wire.PERSONAL, wire.LOOP, idle="")
        return request

    def begin(self, request: Request, *, before: int, packed: bool) -> Personalisation | None:
        """Return how the silo personalises; None if it uses the model received."""
        return _personalisation(request, before=before)

    def before(self, mine: Personalisation | None, work: Work) -> None:
        """Remember the model received, from which the silo's own is made."""
        if mine is not None:
            work.keep_received()
            if mine.strength and work.plan.part == wire.HIDDEN_PART:
                work.training = partial(_beside_own, work, mine, work.training)

    def personalise(self, mine: Personalisation | None, session: Session) -> bool:
        if mine is not None:
            personalise(session, mine)
        return mine is not None

    def after(self, mine: Personalisation | None, work: Work) -> None:
        """Train the personal model that the silo keeps."""
        if mine is not None and not work.request.purpose:
            train_own(work.session, work.received, mine)


def train_model_apfl(request: Request) -> RecordDict:
    """Train the model received and, in the same steps, the silo's own, which stays here (APFL)."""
    before = 0 if request.purpose else request.round_number()
    own = _own(request, wire.APFL, before=before)
    return train_and_reply(
        request, partial(train_mixed, request.session, own, keep=not request.purpose)
    )


def evaluate_own(request: Request) -> RecordDict:
    """Make the silo's own of the model received, and evaluate it on samples held out of that."""
    if request.config.get(wire.PERSONALISE) != wire.PARTIAL:
        request.refuse_for(f"makes no own models in this run: {wire.PERSONALISE} is not partial.")
    share = request.held_out_share(wire.HOLDOUT)
    if not share:
        request.refuse_for(f"was asked for its own model's errors without {wire.HOLDOUT}.")
    number = request.round_number()
    packed = request.receive(request.personal(), before=number)
    stages = Begun(request, before=number, packed=packed)
    session, part = held_apart(request.spared(), share, run_seed=request.run_seed)
    boosted = isinstance(session.model, Trees)
    # Trees that grow by sums have seen these rows if they are few: sums without them may not leave.
    summed = boosted and wire.AT_HOME not in request.config
    votes = not summed or len(part) >= session.settings.policy.smallest_count
    with Stopwatch() as watch:
        _scale_hidden(session.model, request.value(wire.HIDDEN_SHARE))
        stages.personalise(session)
        found = evaluate(session.task, session.model, part, metric=request.metric())
        sure = {}
        if votes and (request.config.get(wire.FAMILY) or boosted):
            sure[wire.HOLDOUT_LOSS_ERROR] = loss_error(session.task, session.model, part)
    metrics = {
        wire.NUM_EXAMPLES: len(request.session.data.train),
        wire.SECONDS: watch.seconds,
        **(held_out_metrics(found) if votes else {}),
        **sure,
    }
    return RecordDict({wire.METRICS: request.session.permitted(metrics)})


@dataclass(frozen=True)
class Own:
    """The personal model that a silo keeps from round to round.

    Attributes:
        kind: ``wire.DITTO`` or ``wire.APFL``.
        before: the kept model is the last one of a round before this.
        strength: Ditto's λ, ≥ 0.
        share, share_lr: APFL's α before the first round, in [0, 1], and its learning rate, ≥ 0.
    """

    kind: str
    run: str
    round: int
    before: int
    strength: float = 0.0
    share: float = 0.0
    share_lr: float = 0.0

    def kept(self, session: Session) -> Model | None:
        """Return the kept model; None before its first round."""
        return rounds.latest(session.settings, self.kind, run=self.run, before=self.before)

    def keep(self, session: Session, arrays: Model) -> None:
        """Keep the model as it is after its round; if it diverged, what was kept before stays."""
        if not odd_array(arrays):
            rounds.keep(session.settings, self.kind, arrays, run=self.run, number=self.round)


@dataclass(frozen=True)
class Personalisation:
    """How to personalise for one message: with the model ``own``, or by training the one received.

    ``plan`` and ``seed`` belong to the silo's own training; APFL uses the round's.
    """

    plan: TrainPlan
    seed: int
    own: Own | None = None
    strength: float = 0.0
    """λ of partial pooling, beside the sum of the losses; 0: no penalty."""


def personalise(session: Session, how: Personalisation) -> None:
    """Turn the model received, in ``session.model``, into the silo's own, in place."""
    if how.own is None:
        # The penalty alone says how far a linear model may go.
        length = math.inf if how.strength else 0.0
        strength = how.strength / len(session.data.train)
        plan = _of_own(session, replace(how.plan, penalty=strength, length=length))
        centre = read_weights(session.model) if how.strength else None
        session.train(session.data.train, plan, seed=how.seed, centre=centre)
        return
    kept = how.own.kept(session)
    if kept is None:
        return
    if how.own.kind == wire.APFL:
        mix_in(session.model, kept)
    else:
        # In the model's order: a file lists arrays by name.
        own = {name: kept[name] for name in travelling(session.model) if name in kept}
        load_weights(session.model, own)


def _of_own(session: Session, plan: TrainPlan) -> TrainPlan:
    """Return how a silo trains its own model: of a table's network the linear part, exactly.

    What the hidden layers add stays the group's: few rows do not train them, and gradient steps of
    the whole network may diverge.
    """
    linear = replace(plan, part=wire.LINEAR_PART)
    exact = isinstance(session.model, TableNetwork) and linear_layer(
        session.task, session.model, session.data.train, linear
    )
    return linear if exact else plan


def _take_hidden(session: Session, received: Model) -> None:
    """Give the model the hidden layers of the one received."""
    own = read_weights(session.model)
    linear = {n: array for n, array in own.items() if n.startswith(wire.LINEAR_LAYER)}
    load_weights(session.model, {**received, **linear})


def _beside_own(
    work: Work, how: Personalisation, training: Training, part: Part, plan: TrainPlan, **more: Any
) -> float:
    """Train hidden layers beside the silo's own linear part, which does not leave."""
    session, received = work.session, work.received
    personalise(replace(session, data=replace(session.data, train=part)), how)
    loss = training(part, plan, **more)
    mixed = {
        n: received[n] if n.startswith(wire.LINEAR_LAYER) else array
        for n, array in read_weights(session.model).items()
    }
    load_weights(session.model, mixed)
    return loss


def _scale_hidden(model: nn.Module, share: float) -> None:
    if share != 1 and isinstance(model, TableNetwork):
        with torch.no_grad():
            model.get_parameter("head.weight").mul_(share)


def train_own(session: Session, received: Model, how: Personalisation) -> None:
    """Train one round of Ditto's own model, which starts as the first model received.

    ``session.model`` is overwritten; nothing is done without Ditto.
    """
    if (ditto := how.own) is None or ditto.kind != wire.DITTO:
        return
    load_weights(session.model, received)
    personalise(session, how)
    plan = _of_own(session, replace(how.plan, proximal_mu=ditto.strength))
    if plan.part:
        _take_hidden(session, received)
    session.train(session.data.train, plan, seed=how.seed, towards=received)
    ditto.keep(session, read_weights(session.model))


def train_mixed(
    session: Session, own: Own, part: Part, plan: TrainPlan, *, seed: int, keep: bool
) -> float:
    """Train the model received, in ``session.model``, and the silo's own with it (APFL).

    The silo's own is kept if ``keep``, which trainings for another purpose do not set. Returns the
    loss of the model received.
    """
    mixture = Mixture(
        session.task,
        session.model,
        part,
        plan,
        kept=own.kept(session),
        share=own.share,
        lr=own.share_lr,
    )
    loss = session.train(part, plan, seed=seed, beside=mixture)
    if keep:
        own.keep(session, mixture.arrays())
    return loss


def _personalisation(request: Request, *, before: int) -> Personalisation | None:
    """Return how the silo personalises the model received before it evaluates it, if at all.

    A kept model (Ditto, APFL) is the last one of a round before ``before``.
    """
    steps = _steps_before_a_test(request)
    kind = request.config.get(wire.PERSONALISE)
    if kind is None:
        return steps
    if kind not in (wire.PARTIAL, wire.FINETUNE, wire.DITTO, wire.APFL):
        known = f"{wire.PARTIAL}, {wire.FINETUNE}, {wire.DITTO} or {wire.APFL}"
        raise RefusedError(f"{wire.PERSONALISE} must be {known}. Got {kind!r}.")
    strength = request.value(wire.OWN_PENALTY) if kind == wire.PARTIAL else 0.0
    if kind == wire.PARTIAL and (not strength or isinstance(request.session.model, Trees)):
        return steps  # λ is not known yet, the group's model is best as it is, or it is of trees
    plan = replace(
        request.way(),
        epochs=request.value(wire.PERSONAL_EPOCHS),
        lr=request.value(wire.PERSONAL_LR),
    )
    kept = kind in (wire.DITTO, wire.APFL)
    own = _own(request, kind, before=before) if kept else None
    return Personalisation(plan, request.seed_for(str(kind)), own, strength)


def _own(request: Request, kind: str, *, before: int) -> Own:
    share = request.value(wire.MIXTURE)
    if share > 1:
        raise RefusedError(f"{wire.MIXTURE} must be in [0, 1]. Got {share}.")
    return Own(
        kind,
        request.run,
        request.round_number(),
        before,
        strength=request.value(wire.DITTO_LAMBDA),
        share=share,
        share_lr=request.value(wire.MIXTURE_LR),
    )


def _steps_before_a_test(request: Request) -> Personalisation | None:
    """Return steps along the gradient of all training data, with FedProx's pull (Per-FedAvg …)."""
    plan = TrainPlan(
        epochs=request.value(wire.ADAPT_STEPS),
        batch_size=len(request.session.data.train),
        lr=request.value(wire.ADAPT_LR),
        proximal_mu=request.value(wire.ADAPT_MU),
    )
    return Personalisation(plan, seed=0) if plan.epochs else None
