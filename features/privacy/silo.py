"""Differential privacy at a silo with ``[privacy]``: which messages it rules out, and its noise.

Everything that is derived from training data and may leave uses clipped gradients with noise
(``coterie.features.privacy.dp_sgd``) and is counted (``coterie.features.privacy.budget``). Anything
else does not leave; this module alone defines what that is. Neighbours are data sets of which one
has a training sample more. The number of training samples is not protected, nor are test data:
errors on them leave unchanged. A request that was answered before gets the same reply
(``coterie.features.privacy.replies``), also after the budget is spent. Seconds leave as whole ones.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from flwr.app import ConfigRecord, Message, RecordDict
from torch import nn

from coterie import wire
from coterie.client.home.policy import number
from coterie.client.work.card import card_of, keep_model
from coterie.client.work.data import Part
from coterie.client.work.measure import evaluate_in_full
from coterie.client.work.request import RefusedError, Request
from coterie.client.work.session import Loop, Session
from coterie.client.work.sgd import TrainPlan
from coterie.client.work.stage import Stage, Training, Work
from coterie.client.work.weights import read_weights
from coterie.features.privacy.budget import Budget, SpentError, require_opacus
from coterie.features.privacy.dp_sgd import (
    Private,
    noise_per_number,
    num_trained,
    require_private,
    train_privately,
)
from coterie.features.privacy.replies import Replies, request_digest
from coterie.tasks.base import Task, TaskError

log = logging.getLogger("coterie.silo")

REFUSED = {
    wire.LABEL_COUNTS: "label counts",
    wire.COLUMN_SUMS: "sums of columns",
    wire.STATISTICS: "exact statistics of data",
    wire.EVALUATE_TRAINING: "errors on training data",
    wire.EVALUATE_OWN: "errors of own models on held-out training data, which choose own-penalty",
    wire.TRAIN_DISCRIMINATOR: "discriminators",
    wire.EVALUATE_DISCRIMINATOR: "discriminators",
    wire.TRAIN_PLACING: "discriminators",
    wire.EVALUATE_PLACING: "discriminators",
    wire.EVALUATE_HISTOGRAMS: "histograms for trees",
    wire.TRAIN_SUMS: "exact sums for a regression",
    wire.TRAIN_PER_FEDAVG: "Per-FedAvg's training",
    wire.TRAIN_PFEDME: "pFedMe's training",
    wire.TRAIN_APFL: "APFL's training",
}
"""Message type → what it asks for that has no private version."""
CANNOT_DO_WITHOUT = {
    **{"maxfl": wire.EVALUATE_TRAINING, "fedfa": wire.EVALUATE_TRAINING},
    **{"ifca": wire.EVALUATE_TRAINING, "flsc": wire.EVALUATE_TRAINING},
    **{"perfedavg": wire.TRAIN_PER_FEDAVG, "pfedme": wire.TRAIN_PFEDME, "apfl": wire.TRAIN_APFL},
    **{"fedgen": wire.LABEL_COUNTS, "trees": wire.EVALUATE_HISTOGRAMS},
    **dict.fromkeys(wire.BY_SUMS, wire.TRAIN_SUMS),
}
"""Strategy → the message type without which it cannot use a silo: refused at the join."""
REFUSED_KEYS = {
    wire.META_LR: REFUSED[wire.TRAIN_PER_FEDAVG],  # also within the groups of another strategy
    wire.MOREAU_LAMBDA: REFUSED[wire.TRAIN_PFEDME],
    wire.ASKS_LABEL_COUNTS: "label counts",
    wire.GENERATED_WEIGHT: "training on generated latents",
    wire.DISTIL_WEIGHT: "training on generated latents",
    wire.ADAPT_STEPS: "steps on all training data before a test",
}
"""Entry of a message, refused above 0 → what it asks for."""
REFUSED_VALUES = {
    wire.BALANCE: ("weights", "sampling"),  # both come of the labels' counts
    wire.PRECISION: ("float16",),  # its loss scaling goes by all gradients
}
STAYING = frozenset(
    {
        *(wire.TRIVIAL, wire.TRAIN_LOSS, wire.HOLDOUT_ERROR, *wire.HOLDOUT_LOSSES),
        wire.RECEIVED_VALIDATION_ERROR,
    }
)
"""Metrics that depend on training data, and do not leave."""


def objection(kind: str, config: Mapping[str, object]) -> str:
    """Return why a silo with differential privacy refuses a message; empty if it accepts."""
    if kind in REFUSED:
        return _cannot(REFUSED[kind], kind)
    needed = CANNOT_DO_WITHOUT.get(str(config.get(wire.STRATEGY, "")))
    if needed is not None:
        return _cannot(REFUSED[needed], f"{wire.STRATEGY} = {config[wire.STRATEGY]}")
    for key, what in REFUSED_KEYS.items():
        asked = config.get(key, 0)
        if asked is True or not (asked is False or number(asked) <= 0):
            return _cannot(what, key)
    for key, values in REFUSED_VALUES.items():
        if config.get(key) in values:
            return _cannot(f"{key} = {config[key]}", key)
    return ""


def _cannot(what: str, key: str) -> str:
    return (
        f"trains with differential privacy ([privacy] in silo.toml), and {what} cannot be made "
        f"private here ({key})."
    )


def private_of(session: Session) -> Private | None:
    """Return how the silo trains with differential privacy; None if it does not."""
    if session.settings.privacy is None:
        return None
    run, number, purpose = session.work
    return Private(Budget(session.settings, session.num_examples, run), run, number, purpose)


def check_privacy(session: Session) -> None:
    """Check [privacy]: Opacus and δ (``SettingsError``), and the task (``TaskError``)."""
    if (private := private_of(session)) is not None:
        require_opacus()
        _ = private.budget.delta
        require_private(session.task, session.model)


def _train(
    private: Private, task: Task, model: nn.Module, part: Part, plan: TrainPlan, **how: Any
) -> float:
    """Train as ``train_privately``; refuse what the budget does not allow."""
    added, beside = how.pop("added", None), how.pop("beside", None)
    assert added is None and beside is None, "refused before: neither is made private"
    try:
        return train_privately(task, model, part, plan, private, **how)
    except SpentError as reason:
        why = f"silo {private.budget.settings.name!r} {reason}"
        log.warning("%s", why)
        raise RefusedError(why, code=wire.SPENT) from None


def _figures(private: Private) -> dict[str, float]:
    spent, terms = private.budget.spent(), private.terms
    figures = {"epsilon": spent.epsilon, "delta": spent.delta}
    return figures | {"noise": terms.noise, "clip": terms.clip}


class DifferentialPrivacy(Stage):
    """The stage for silos with ``[privacy]``."""

    name = "privacy"

    def admit(self, request: Request) -> Request:
        """Refuse what cannot be private, and a run that would exceed the budget."""
        session = request.session
        if (private := private_of(session)) is None:
            return request
        request.refuse_for(objection(request.message.metadata.message_type, request.config))
        if request.joins:
            try:
                check_privacy(session)
            except TaskError as error:  # of a model that the run's own keys make
                raise RefusedError(str(error)) from None
            _check_budget(request, private)
        return request

    def answer(self, request: Request, work: Callable[[Request], RecordDict]) -> RecordDict:
        """Train with noise; return the stored reply instead if this request was answered before."""
        if (private := private_of(request.session)) is None:
            return work(request)
        private = replace(private, digest=request_digest(request))
        replies = Replies(private)
        if (known := replies.get()) is not None:
            return known
        loop = Loop(partial(_train, private), partial(_figures, private), STAYING)
        content = work(replace(request, session=replace(request.session, loop=loop)))
        for record in wire.metric_records(content).values():
            seconds = record.get(wire.SECONDS)
            if isinstance(seconds, float):  # a finer one tells how many samples were in the steps
                record[wire.SECONDS] = float(math.ceil(seconds))
        if private.charged:
            if request.trains_own:
                replies.remove_later()
            replies.put(Message(content, reply_to=request.message))
        return content

    def before(self, mine: None, work: Work) -> None:
        """Report the noise of the update; keep the received model if the budget is spent.

        The coordinator compares updates, and would otherwise mistake noise for a difference.
        """
        session, private = work.session, private_of(work.session)
        if private is None:
            return
        each = noise_per_number(
            session.task, session.model, work.data.train, work.plan, private.terms
        )
        if each is not None:
            work.metrics[wire.UPDATE_NOISE] = each * num_trained(session.model, work.staying)
        work.training = partial(_train_or_keep, work, work.training)


def _check_budget(request: Request, private: Private) -> None:
    """Refuse a run whose stated training would exceed the silo's privacy budget."""
    rounds = request.value(wire.ROUNDS)
    if not rounds:
        return
    plan, model, data = request.plan(), request.session.model, request.session.data
    of_a_round = [plan] * (2 if request.config.get(wire.PERSONAL) == wire.HEAD_FIRST else 1)
    if request.config.get(wire.PERSONALISE) in (wire.PARTIAL, wire.FINETUNE, wire.DITTO):
        of_a_round.append(replace(plan, epochs=request.value(wire.PERSONAL_EPOCHS), steps=0))
    planned = [private.planned(model, data.train, one) for one in of_a_round]
    planned = [replace(one, steps=one.steps * rounds) for one in planned]
    steps, epochs = request.value(wire.COLD_START_STEPS), request.value(wire.COLD_START_EPOCHS)
    if steps or epochs:
        first = replace(plan, steps=steps, epochs=max(epochs, 1))
        planned.append(private.planned(model, data.train, first))
    stated = request.run if wire.RUN in request.config else ""
    run = str(request.config.get(wire.OF_RUN, stated))
    request.refuse_for(private.budget.objection(planned, run), code=wire.SPENT)


def _train_or_keep(
    work: Work, training: Training, part: Part, plan: TrainPlan, *, seed: int
) -> float:
    """Train; without the budget for it, keep the received model: the silo trains no further."""
    try:
        return training(part, plan, seed=seed)
    except RefusedError:
        session = work.session
        config = ConfigRecord({**work.request.config, wire.ROUND: work.after})
        if not work.request.purpose and work.after >= 1 and session.settings.home:
            result = evaluate_in_full(session.task, session.model, session.data, metric=work.metric)
            model = read_weights(session.model)
            card = card_of(session, config, model, result)
            keep_model(session.settings.home, card, model, final=True)
        raise
