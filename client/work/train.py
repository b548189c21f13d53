"""Answers to ``train`` messages: the model received, trained on this silo's data."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import numpy as np
import torch
from flwr.app import ConfigRecord, RecordDict

from coterie import wire
from coterie.client.home import personal, rounds
from coterie.client.home.budget import SpentError
from coterie.client.home.card import card_of, keep_model
from coterie.client.home.journal import note
from coterie.client.home.policy import permitted
from coterie.client.work.data import Data, Part
from coterie.client.work.diverged import divergence, odd_array
from coterie.client.work.generators import AddedLoss, latent_loss
from coterie.client.work.hold_out import split_validation
from coterie.client.work.measure import evaluate, evaluate_in_full
from coterie.client.work.meta_sgd import train_per_fedavg, train_pfedme
from coterie.client.work.optimisers import Slots
from coterie.client.work.personalisation import (
    Personalisation,
    personalise,
    train_mixed,
    train_own,
)
from coterie.client.work.request import RefusedError, Request
from coterie.client.work.rounding import rounded
from coterie.client.work.secure import keep_back
from coterie.client.work.sgd import Stopwatch, TrainPlan
from coterie.client.work.training import train
from coterie.client.work.validation import validate, validation_of
from coterie.client.work.weights import load_weights, read_weights
from coterie.client.work.workbench import Workbench
from coterie.wire import Model

log = logging.getLogger("coterie.silo")

OPTIMISER = "optimiser"
"""Folder of what optimisers remember, at the silo."""


class Training(Protocol):
    """Trains the bench's model in place on some data; returns the loss."""

    def __call__(self, part: Part, plan: TrainPlan, *, seed: int) -> float:
        """See ``coterie.client.work.sgd.train``."""
        ...


def train_model(request: Request) -> RecordDict:
    """Train the model received on this silo's data and send it back.

    With a generator beside the model, on generated latents as well.
    """
    bench = request.bench
    slots = _kept_slots(request)
    training = partial(train, bench, added=_added_loss(request), slots=slots)
    return _train(request, training, slots)


def train_model_per_fedavg(request: Request) -> RecordDict:
    """The same with Per-FedAvg's steps."""
    bench, meta_lr = request.bench, request.value(wire.META_LR)
    return _train(request, partial(train_per_fedavg, bench.task, bench.model, meta_lr=meta_lr))


def train_model_pfedme(request: Request) -> RecordDict:
    """The same with pFedMe's steps."""
    training = partial(
        train_pfedme,
        request.bench.task,
        request.bench.model,
        moreau_lambda=request.value(wire.MOREAU_LAMBDA),
        moreau_lr=request.value(wire.MOREAU_LR),
        inner_steps=request.inner_steps(),
    )
    return _train(request, training)


def train_model_apfl(request: Request) -> RecordDict:
    """Train the model received, and in the same steps one of the silo's own, which stays (APFL)."""
    own, keep = request.mixture(), not request.purpose
    return _train(request, partial(train_mixed, request.bench, own, keep=keep))


@dataclass(frozen=True)
class _Order:
    """What a train message asks for, checked.

    Attributes:
        plan: how to train.
        bench: with the model received, and without validation data.
        data: what to train with: the bench's, less a part if ``holdout`` is positive.
        holdout: share of the training data.
        validation: what rounds are chosen by, if the run has such data.
        own: what the silo makes of the model received for itself, if anything.
        received: that model, where something else is made of it, or only the difference leaves.
        wire_format: of what leaves.
        staying: names of the arrays that do not leave.
        packed: how the model came, and so how it goes back.
        metric: that leads; empty: the task's.
    """

    plan: TrainPlan
    bench: Workbench
    data: Data
    holdout: float
    validation: Part | None
    own: Personalisation | None
    received: Model
    staying: tuple[str, ...]
    packed: bool
    metric: str
    wire_format: str


def _kept_slots(request: Request) -> Slots | None:
    """What the optimiser remembers of the run's earlier rounds; None: it begins afresh."""
    bench = request.bench
    if request.purpose or not request.value(wire.KEEP_OPTIMISER):
        return None
    kept = rounds.latest(bench.settings, OPTIMISER, run=request.run, before=request.round_number())
    return {
        name: torch.from_numpy(np.array(array)).to(bench.device)
        for name, array in (kept or {}).items()
    }


def _train(request: Request, training: Training, slots: Slots | None = None) -> RecordDict:
    order = _read_order(request)
    metrics: dict[str, float | int] = {wire.NUM_EXAMPLES: len(request.bench.data.train)}
    with Stopwatch() as watch:
        metrics |= _evaluate_received(request, order)
        metrics |= _stated_noise(order)
        try:
            loss = training(order.data.train, order.plan, seed=request.seed())
        except SpentError:
            _keep_received(request, order)
            raise
        trained = read_weights(order.bench.model)
        metrics[wire.TRAIN_LOSS] = loss
        if not request.purpose:
            metrics |= _train_own_models(request, order, trained)
    metrics[wire.SECONDS] = watch.seconds
    settings, staying = request.bench.settings, order.staying
    note(*(settings.home, wire.TRAIN, request.run, request.config, metrics), lead=request.lead())
    leaving = {wire.ARRAYS: personal.without(trained, staying)}
    _look_at(request, trained, loss, lost=bool(odd_array(leaving[wire.ARRAYS])))
    if not request.purpose and not odd_array(trained):  # what was kept before is worth more
        round_number = request.round_number()
        personal.keep(request.bench, trained, staying, run=request.run, number=round_number)
        if slots is not None:
            kept = {name: slot.detach().cpu().numpy() for name, slot in slots.items()}
            rounds.keep(
                settings, OPTIMISER, kept, run=request.run, number=round_number, passing=True
            )
    if request.config.get(wire.SECURE):
        received = personal.without(order.received, staying)
        leaving, figures = keep_back(request, received, leaving[wire.ARRAYS])
        metrics |= figures
    elif order.wire_format != wire.FLOAT32:
        received = personal.without(order.received, staying)
        leaving[wire.ARRAYS], figures = rounded(request, received, leaving[wire.ARRAYS])
        metrics |= figures
    return RecordDict(
        {
            **{n: wire.encode_arrays(m, packed=order.packed) for n, m in leaving.items()},
            wire.METRICS: permitted(metrics, settings.policy, staying=request.staying),
        }
    )


def _look_at(request: Request, trained: Model, loss: float, *, lost: bool) -> None:
    """Tell the silo's people of a training that ended in NaN or infinity.

    Args:
        request, trained, loss: what was asked, and what came of it.
        lost: it is in what would leave.

    Raises:
        RefusedError: in a secure run, where others would see it in a sum alone.
    """
    why = divergence(trained, loss)
    if not why:
        return
    end = " What this silo trained in this round does not count." * lost
    log.warning("run %s round %s: %s%s", request.run, request.round_number(), why, end)
    if lost and request.config.get(wire.SECURE):
        request.refuse_for(f"sends nothing of this training: {why}", code=wire.DIVERGED)


def _read_order(request: Request) -> _Order:
    """Check everything before any work, and load the model received."""
    bench, run_seed = request.bench, request.run_seed
    request.refuse_for(bench.settings.policy.group_objection(request.config))
    plan, staying, round_number = request.plan(), request.personal(), request.round_number()
    before = 0 if request.purpose else round_number
    packed = request.receive(staying, before=before)
    own, metric = request.personalisation(before=before), request.metric()
    validation = validation_of(request)
    bench = request.spared()
    holdout = request.held_out_share(wire.HOLDOUT, of=bench.data)
    data = split_validation(bench, holdout, run_seed=run_seed) if holdout else bench.data
    wire_format = request.wire_format() if packed else wire.FLOAT32
    kept = own is not None or request.config.get(wire.SECURE) or wire_format != wire.FLOAT32
    received = read_weights(bench.model) if kept else {}
    return _Order(
        *(plan, bench, data, holdout, validation, own, received, staying, packed, metric),
        wire_format,
    )


def _evaluate_received(request: Request, order: _Order) -> dict[str, float | int]:
    """Evaluate the model received, if asked; it is in the bench before and after."""
    bench, metrics = order.bench, dict[str, float | int]()
    if request.config.get(wire.EVALUATE_RECEIVED):
        if order.own is not None:
            personalise(bench, order.own)
        result = evaluate(bench.task, bench.model, bench.data.test, metric=order.metric)
        metrics[wire.RECEIVED_LOSS] = result.loss
        metrics[wire.RECEIVED_ERROR] = result.error
        metrics[wire.RECEIVED_EXAMPLES] = result.num_examples
        if order.validation is not None:
            before = request.round_number() - 1
            validated, _ = validate(request, order.validation, held_after=before)
            metrics[wire.RECEIVED_VALIDATION_ERROR] = validated.error
        if order.own is not None:
            load_weights(bench.model, order.received)
    if order.holdout:
        held_out = evaluate(bench.task, bench.model, order.data.test, metric=order.metric)
        metrics[wire.HOLDOUT_ERROR] = held_out.error
        metrics[wire.HOLDOUT_EXAMPLES] = held_out.num_examples
        metrics[wire.HOLDOUT_LOSS] = held_out.loss
    return metrics


def _keep_received(request: Request, order: _Order) -> None:
    """Keep the model received, which is in the bench: the silo trains no further one."""
    bench, before = order.bench, request.round_number() - 1
    if request.purpose or before < 1 or not bench.settings.home:
        return
    config = ConfigRecord({**request.config, wire.ROUND: before})
    result = evaluate_in_full(bench.task, bench.model, bench.data, metric=order.metric)
    model = read_weights(bench.model)
    keep_model(bench.settings.home, card_of(bench, config, model, result), model, final=True)


def _stated_noise(order: _Order) -> dict[str, float | int]:
    """Of an update with differential privacy, how much noise it has: the server, which compares
    updates, would else take it for what sets silos apart."""
    bench, private = order.bench, order.bench.private()
    if private is None:
        return {}
    from coterie.client.work.private import noise_per_number, num_trained

    each = noise_per_number(bench.task, bench.model, order.data.train, order.plan, private.terms)
    return (
        {} if each is None else {wire.UPDATE_NOISE: each * num_trained(bench.model, order.staying)}
    )


def _train_own_models(request: Request, order: _Order, trained: Model) -> dict[str, float | int]:
    """After the group's training, those that the silo has beside it; return what is measured.

    ``trained`` is in the bench, which is overwritten.
    """
    bench, metrics = order.bench, dict[str, float | int]()
    if request.value(wire.EVALUATE_TRAINED):
        result = evaluate(bench.task, bench.model, bench.data.test, metric=order.metric)
        metrics = {wire.TRAINED_LOSS: result.loss, wire.TRAINED_ERROR: result.error}
        if bench.settings.home and not odd_array(
            trained
        ):  # what it kept before is worth more than one of NaN
            card = card_of(bench, request.config, trained, result, here=True)
            keep_model(bench.settings.home, card, trained)
    if order.own is not None:
        train_own(bench, order.received, order.own)
    return metrics


def _added_loss(request: Request) -> AddedLoss | None:
    """What a generator that came with the message adds to the loss."""
    record = wire.array_records(request.message.content).get(wire.GENERATOR)
    if record is None:
        return None
    try:
        return latent_loss(
            request.bench.task,
            request.bench.model,
            wire.decode_arrays(record),
            seed=request.seed(),
            device=request.bench.device,
            generated_weight=request.value(wire.GENERATED_WEIGHT),
            distil_weight=request.value(wire.DISTIL_WEIGHT),
        )
    except (wire.WireError, ValueError) as error:
        raise RefusedError(str(error)) from None
