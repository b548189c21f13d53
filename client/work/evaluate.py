"""Answers to ``evaluate`` messages: how good a model is on this silo's data."""

from __future__ import annotations

from contextlib import suppress
from math import isfinite, nan

import torch
from flwr.app import MetricRecord, RecordDict

from coterie import wire
from coterie.client.home import rounds
from coterie.client.home.local_log import WRONG, note
from coterie.client.home.rounds import file_of, write_model
from coterie.client.work.card import card_of, keep_model
from coterie.client.work.measure import Evaluation, evaluate, evaluate_in_full, leading
from coterie.client.work.request import RefusedError, Request
from coterie.client.work.sgd import Stopwatch
from coterie.client.work.stage import Begun, Holding
from coterie.client.work.train import OPTIMISER
from coterie.client.work.weights import load_weights, read_weights
from coterie.tasks.problems import Classes
from coterie.wire import Model

UNMEASURED = Evaluation(nan, nan, 0)
"""Result of a silo without labels, which cannot measure a model."""
LAST_ROUND = 2**31
"""Later than any round: a plain Flower server need not state the round of an evaluation."""


def evaluate_model(request: Request) -> RecordDict:
    """Evaluate the received model on this silo's test data; save it if the server asks."""
    session = request.session
    round_number = request.round_number(default=LAST_ROUND)
    before = 0 if request.purpose else round_number + 1
    packed = request.receive(request.personal(), before=before)
    if session.settings.unlabelled:
        return _keep_unmeasured(request)
    stages = Begun(request, before=before, packed=packed)
    keep, metric = request.config.get(wire.KEEP), request.metric()
    final = is_final(request)
    with Stopwatch() as watch:
        spared = request.spared()
        holding = Holding(
            request=request, session=spared, after=round_number, metric=metric, ends=final
        )
        with suppress(RefusedError):  # if the silo trains no further, it keeps the received model
            stages.personalise(spared)
        result = kept = (
            evaluate_in_full(session.task, session.model, spared.data, metric=metric)
            if keep
            else evaluate(session.task, session.model, spared.data.test, metric=metric)
        )
        if keep and final:
            stages.held(holding)
    if keep and session.settings.home:
        if holding.best is not None:
            kept = evaluate_in_full(session.task, session.model, spared.data, metric=metric)
        model = read_weights(session.model)
        card = card_of(session, request.config, model, kept, best=holding.best)
        keep_model(session.settings.home, card, model, final=final)
    if keep and final:
        _end_run(request)
    return reply_of(request, result, watch.seconds)


def reply_of(request: Request, result: Evaluation, seconds: float) -> RecordDict:
    """Write a result in the silo's journal, and return the reply with what may leave."""
    session, metric = request.session, request.metric()
    figures = {
        wire.NUM_EXAMPLES: result.num_examples,
        wire.ERROR: result.error,
        wire.LOSS: result.loss,
        wire.SECONDS: seconds,
        **_trivial(request, result),
    }
    if leading(session.task, metric).name == wire.ERROR and isfinite(result.error):
        figures[WRONG] = round(result.error * result.num_examples)
    note(
        session.settings.home,
        wire.EVALUATE,
        request.run,
        request.config,
        figures,
        lead=request.lead(),
    )
    return evaluation(request, result, seconds)


def _keep_unmeasured(request: Request) -> RecordDict:
    session = request.session
    if not request.config.get(wire.KEEP):
        request.refuse_for("has no labels yet (unlabelled), so it cannot evaluate a model.")
    if session.settings.home:
        model = read_weights(session.model)
        card = card_of(session, request.config, model, UNMEASURED)
        keep_model(session.settings.home, card, model, final=is_final(request))
    note(session.settings.home, wire.EVALUATE, request.run, request.config, {})
    return RecordDict({wire.METRICS: MetricRecord({wire.NUM_EXAMPLES: 0})})


def is_final(request: Request) -> bool:
    """Return whether the run ends with this evaluation."""
    planned = request.value(wire.ROUNDS)
    ended_early = bool(request.config.get(wire.ENDED_EARLY))
    return ended_early or request.round_number(default=LAST_ROUND) >= planned


def _end_run(request: Request) -> None:
    rounds.keep_newest(request.session.settings, OPTIMISER, run=request.run)
    for stage in request.stages:
        stage.end(request)


def evaluate_model_on_training_data(request: Request) -> RecordDict:
    """Evaluate the received model on this silo's training data, for a strategy to choose by.

    Validation data is left out: it says nothing new about a model that was chosen by it.
    """
    session, round_number = request.session, request.round_number(default=LAST_ROUND)
    request.receive(request.personal(), before=round_number)
    with Stopwatch() as watch:
        data = request.spared().data
        result = evaluate(session.task, session.model, data.train, metric=request.metric())
    return evaluation(request, result, watch.seconds)


def evaluate_ensemble(request: Request) -> RecordDict:
    """Evaluate the mean of the received models' logits on this silo's test data (FedEnsemble)."""
    session = request.session
    try:
        members = members_of(request)
        for member in members:
            load_weights(session.model, member)
    except (wire.WireError, ValueError) as error:
        raise RefusedError(str(error)) from None
    with Stopwatch() as watch:
        part, metric = session.data.test, request.metric()
        result = evaluate(session.task, session.model, part, metric=metric, members=members)
    if request.config.get(wire.KEEP) and session.settings.home:
        named = {f"{i}.{n}": a for i, member in enumerate(members) for n, a in member.items()}
        write_model(file_of(session.settings.home, "ensembles", request.run), named)
    return evaluation(request, result, watch.seconds)


def count_labels(request: Request) -> RecordDict:
    """Count the training samples of each label, if this silo's policy allows it (FedGen)."""
    session = request.session
    request.refuse_for(session.settings.policy.unshared("label_counts"))
    if not isinstance(session.task.problem, Classes):
        request.refuse_for("has no classes to count.")
    labels = session.data.train.targets()
    counts = torch.bincount(labels, minlength=session.task.num_classes).cpu().numpy()
    return RecordDict(
        {
            wire.LABELS: wire.encode_arrays({wire.LABELS: counts}, packed=True),
            wire.METRICS: MetricRecord({wire.NUM_EXAMPLES: len(labels)}),
        }
    )


def members_of(request: Request) -> list[Model]:
    """Return the models of a message of several; ``RefusedError`` if there is none."""
    records = wire.array_records(request.message.content)
    names = sorted((n for n in records if n.startswith(wire.MEMBER)), key=lambda n: (len(n), n))
    if not names:
        kind = request.message.metadata.message_type
        raise RefusedError(f"a {kind} message needs records {wire.MEMBER}0, {wire.MEMBER}1, ….")
    return [wire.decode_arrays(records[name]) for name in names]


def evaluation(request: Request, result: Evaluation, seconds: float) -> RecordDict:
    """Return the reply with what may leave of a result."""
    metrics = {
        wire.NUM_EXAMPLES: result.num_examples,
        wire.LOSS: result.loss,
        wire.ERROR: result.error,
        wire.SECONDS: seconds,
        **_figures(result),
        **_trivial(request, result),
    }
    return RecordDict({wire.METRICS: request.session.permitted(metrics)})


def _figures(result: Evaluation) -> dict[str, float]:
    found: dict[str, float] = {}
    for name, figure in result.figures.items():
        ends = ((wire.LOW, figure.low), (wire.HIGH, figure.high))
        found |= {name: figure.value} if name != wire.ERROR else {}
        found |= {name + end: value for end, value in ends if isfinite(value)}
    return found


def _trivial(request: Request, result: Evaluation) -> dict[str, float]:
    """Return the constant baseline's error; it reveals class frequencies, so it seldom leaves."""
    lead = leading(request.session.task, request.metric())
    value = result.trivial.get(lead.name, nan)
    return {wire.TRIVIAL: lead.shortfall(value)} if isfinite(value) else {}
