"""Answers to ``train`` messages: the model received, trained on this silo's data."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import numpy as np
from flwr.app import ConfigRecord, RecordDict

from coterie import wire
from coterie.client.home import personal
from coterie.client.home.card import card_of, keep_model
from coterie.client.home.journal import note
from coterie.client.home.policy import permitted
from coterie.client.work.generators import AddedLoss, latent_loss
from coterie.client.work.guard import sparing, train_alone, without_validation
from coterie.client.work.meta_sgd import train_per_fedavg, train_pfedme
from coterie.client.work.personalisation import evaluate_own, train_own
from coterie.client.work.request import RefusedError, Request
from coterie.client.work.sgd import Stopwatch, TrainPlan, train
from coterie.client.work.tensors import (
    Evaluation,
    Tensors,
    evaluate,
    load_weights,
    read_weights,
)
from coterie.client.work.workbench import Workbench
from coterie.wire import Model


class Training(Protocol):
    """Trains the bench's model in place on some data; returns the loss."""

    def __call__(self, data: Tensors, plan: TrainPlan, *, seed: int) -> float:
        """See ``coterie.client.work.sgd.train``."""
        ...


def train_model(request: Request) -> RecordDict:
    """Train the model received on this silo's data and send it back.

    With a generator beside the model, on generated latents as well.
    """
    bench = request.bench
    return _train(request, partial(train, bench.task, bench.model, added=_added_loss(request)))


def train_model_per_fedavg(request: Request) -> RecordDict:
    """The same with Per-FedAvg's steps."""
    bench, meta_lr = request.bench, request.real(wire.META_LR, default=0.03)
    return _train(request, partial(train_per_fedavg, bench.task, bench.model, meta_lr=meta_lr))


def train_model_pfedme(request: Request) -> RecordDict:
    """The same with pFedMe's steps."""
    training = partial(
        train_pfedme,
        request.bench.task,
        request.bench.model,
        moreau_lambda=request.real(wire.MOREAU_LAMBDA, default=15.0),
        moreau_lr=request.real(wire.MOREAU_LR, default=0.005),
        inner_steps=request.inner_steps(),
    )
    return _train(request, training)


def _train(request: Request, training: Training) -> RecordDict:
    """Check what is asked, train the model received, and pack what leaves.

    All steps share ``bench.model``: each loads what it works on, or finds there what the one before
    it says it leaves.
    """
    bench, config, purpose = request.bench, request.config, request.purpose
    request.refuse_for(bench.settings.policy.group_objection(config))
    plan, names = request.plan(), request.personal()
    round_number, run, run_seed = request.round_number(), request.run, request.run_seed
    before = 0 if purpose else round_number
    packed = request.receive(names, before=before)
    guard, how = request.held_out_share(wire.GUARD), request.personalisation(before=before)
    metrics: dict[str, float | int] = {wire.NUM_EXAMPLES: len(bench.data.x_train)}
    bench = sparing(bench, guard, run_seed=run_seed)
    holdout = request.held_out_share(wire.HOLDOUT, of=bench.data)
    received = {} if how is None else read_weights(bench.model)
    with Stopwatch() as watch:
        if config.get(wire.EVALUATE_RECEIVED):
            metrics |= _received_metrics(evaluate_own(bench, how))
            if how is not None:
                load_weights(bench.model, received)
        data = bench.data
        if holdout:
            data = without_validation(bench, holdout, run_seed=run_seed)
            metrics[wire.HOLDOUT_ERROR] = evaluate(bench.task, bench.model, data).error
        metrics[wire.TRAIN_LOSS] = training(data, plan, seed=request.seed())
        trained = read_weights(bench.model)
        if config.get(wire.EVALUATE_TRAINED) and not purpose:
            metrics |= _evaluate_trained(bench, trained, config)
        if how is not None and not purpose:
            train_own(bench, received, how)
        if guard and not purpose:
            train_alone(bench, plan, run=run, run_seed=run_seed, round_number=round_number)
    metrics[wire.SECONDS] = watch.seconds
    note(bench.settings.home, wire.TRAIN, run, config, metrics)
    if not purpose:
        personal.keep(bench, trained, names, run=run, round=round_number)
    return RecordDict(
        {
            wire.ARRAYS: wire.encode_arrays(personal.without(trained, names), packed=packed),
            wire.METRICS: permitted(metrics, bench.settings.policy),
        }
    )


def _added_loss(request: Request) -> AddedLoss | None:
    """What a generator that came with the message adds to the loss."""
    record = request.message.content.array_records.get(wire.GENERATOR)
    if record is None:
        return None
    try:
        return latent_loss(
            request.bench.task,
            request.bench.model,
            wire.decode_arrays(record),
            seed=request.seed(),
            device=request.bench.device,
            generated_weight=request.real(wire.GENERATED_WEIGHT, default=1.0),
            distil_weight=request.real(wire.DISTIL_WEIGHT, default=0.0),
        )
    except (wire.WireError, ValueError) as error:
        raise RefusedError(str(error)) from None


def _received_metrics(result: Evaluation) -> dict[str, float | int]:
    return {
        wire.RECEIVED_LOSS: result.loss,
        wire.RECEIVED_ERROR: result.error,
        wire.RECEIVED_EXAMPLES: result.num_examples,
    }


def _evaluate_trained(
    bench: Workbench, trained: Model, config: ConfigRecord
) -> dict[str, float | int]:
    """Evaluate and keep the model as this silo has just trained it; it is in the bench."""
    result = evaluate(bench.task, bench.model, bench.data)
    finite = all(np.isfinite(array).all() for array in trained.values())
    if bench.settings.home and finite:  # what it kept before is worth more than one of NaN
        card = card_of(bench, config, trained, result, here=True)
        keep_model(bench.settings.home, card, trained)
    return {wire.TRAINED_LOSS: result.loss, wire.TRAINED_ERROR: result.error}
