"""Answers to ``train`` messages: the received model, trained on this silo's data."""

from __future__ import annotations

import logging
from functools import partial

import numpy as np
import torch
from flwr.app import RecordDict

from coterie import wire
from coterie.client.home import rounds
from coterie.client.home.local_log import note
from coterie.client.work import personal
from coterie.client.work.card import card_of, keep_model
from coterie.client.work.diverged import divergence, odd_array
from coterie.client.work.generators import AddedLoss, latent_loss
from coterie.client.work.measure import evaluate
from coterie.client.work.optimisers import Slots
from coterie.client.work.request import RefusedError, Request
from coterie.client.work.sgd import Stopwatch
from coterie.client.work.stage import Begun, Training, Work
from coterie.client.work.weights import load_weights, read_weights

log = logging.getLogger("coterie.silo")

OPTIMISER = "optimiser"
"""Name of the folder for optimiser state, at the silo."""


def train_model(request: Request) -> RecordDict:
    """Train the received model, also on a generator's latents if there is one, and send it back."""
    slots = _kept_slots(request)
    training: Training = partial(request.session.train, added=_added_loss(request), slots=slots)
    if request.config.get(wire.PERSONAL) == wire.HEAD_FIRST:
        seed = request.seed_for(f"{request.purpose}/head")
        model = request.session.model
        training = personal.head_first(training, model, request.personal(), seed)
    return train_and_reply(request, training, slots)


def _kept_slots(request: Request) -> Slots | None:
    session = request.session
    if request.purpose or not request.value(wire.KEEP_OPTIMISER):
        return None
    kept = rounds.latest(
        session.settings, OPTIMISER, run=request.run, before=request.round_number()
    )
    return {
        name: torch.from_numpy(np.array(array)).to(session.device)
        for name, array in (kept or {}).items()
    }


def train_and_reply(request: Request, training: Training, slots: Slots | None = None) -> RecordDict:
    """Receive, train and reply; the stages act before, after and at the end.

    ``training`` trains the session's model; ``slots`` is the optimiser state, to be saved.
    """
    work, stages = _received(request, training)
    with Stopwatch() as watch:
        stages.before(work)
        _evaluate_received(work, stages)
        loss = work.training(work.data.train, work.plan, seed=request.seed())
        work.trained = read_weights(work.session.model)
        work.metrics[wire.TRAIN_LOSS] = loss
        _evaluate_trained(work)
        stages.after(work)
    work.metrics[wire.SECONDS] = watch.seconds
    settings = request.session.settings
    note(
        *(settings.home, wire.TRAIN, request.run, request.config, work.metrics), lead=request.lead()
    )
    work.leaving = {wire.ARRAYS: personal.without(work.trained, work.staying)}
    _look_at(work, loss)
    _keep(work, slots)
    stages.leave(work)
    return RecordDict(
        {
            **{n: wire.encode_arrays(m, packed=work.packed) for n, m in work.leaving.items()},
            wire.METRICS: request.session.permitted(work.metrics),
        }
    )


def _received(request: Request, training: Training) -> tuple[Work, Begun]:
    session = request.session
    request.refuse_for(session.settings.policy.group_objection(request.config))
    plan, staying = request.plan(), request.personal()
    before = 0 if request.purpose else request.round_number()
    packed = request.receive(staying, before=before)
    stages = Begun(request, before=before, packed=packed)
    spared = request.spared()
    work = Work(
        request=request,
        session=spared,
        training=training,
        data=spared.data,
        plan=plan,
        packed=packed,
        staying=staying,
        metric=request.metric(),
        after=request.round_number() - 1,
    )
    work.metrics[wire.NUM_EXAMPLES] = len(session.data.train)
    return work, stages


def _evaluate_received(work: Work, stages: Begun) -> None:
    """Evaluate the received model, if asked; it is in the session before and after."""
    request, session = work.request, work.session
    if not request.config.get(wire.EVALUATE_RECEIVED):
        return
    changed = stages.personalise(session)
    result = evaluate(session.task, session.model, session.data.test, metric=work.metric)
    work.metrics |= {
        wire.RECEIVED_LOSS: result.loss,
        wire.RECEIVED_ERROR: result.error,
        wire.RECEIVED_EXAMPLES: result.num_examples,
    }
    stages.held(work)
    if changed:
        load_weights(session.model, work.received)


def _evaluate_trained(work: Work) -> None:
    request, session = work.request, work.session
    if request.purpose or not request.value(wire.EVALUATE_TRAINED):
        return
    result = evaluate(session.task, session.model, session.data.test, metric=work.metric)
    work.metrics |= {wire.TRAINED_LOSS: result.loss, wire.TRAINED_ERROR: result.error}
    if session.settings.home and not odd_array(work.trained):  # what was kept before is worth more
        card = card_of(session, request.config, work.trained, result, here=True)
        keep_model(session.settings.home, card, work.trained)


def _look_at(work: Work, loss: float) -> None:
    request, why = work.request, divergence(work.trained, loss)
    if why:
        lost = bool(odd_array(work.leaving[wire.ARRAYS]))
        end = " This silo's training of this round does not count." * lost
        log.warning("run %s round %s: %s%s", request.run, request.round_number(), why, end)


def _keep(work: Work, slots: Slots | None) -> None:
    request, run = work.request, work.request.run
    if request.purpose or odd_array(work.trained):  # what was kept before is worth more
        return
    number, session = request.round_number(), request.session
    personal.keep(session, work.trained, work.staying, run=run, number=number)
    if slots is not None:
        kept = {name: slot.detach().cpu().numpy() for name, slot in slots.items()}
        rounds.keep(session.settings, OPTIMISER, kept, run=run, number=number, passing=True)


def _added_loss(request: Request) -> AddedLoss | None:
    record = wire.array_records(request.message.content).get(wire.GENERATOR)
    if record is None:
        return None
    try:
        return latent_loss(
            request.session.task,
            request.session.model,
            wire.decode_arrays(record),
            seed=request.seed(),
            device=request.session.device,
            generated_weight=request.value(wire.GENERATED_WEIGHT),
            distil_weight=request.value(wire.DISTIL_WEIGHT),
        )
    except (wire.WireError, ValueError) as error:
        raise RefusedError(str(error)) from None
