"""A silo that only tests: what it answers, and how it measures the models that it receives."""

from __future__ import annotations

from collections.abc import Callable

from flwr.app import RecordDict

from coterie import wire
from coterie.client.work.card import card_of, keep_model
from coterie.client.work.evaluate import evaluation, is_final, reply_of
from coterie.client.work.measure import evaluate, evaluate_in_full
from coterie.client.work.request import Request
from coterie.client.work.sgd import Stopwatch
from coterie.client.work.stage import Stage
from coterie.client.work.weights import read_weights


class Testing(Stage):
    """The stage for ``role = "evaluate"``: nothing is trained, whatever a message asks for."""

    name = "testing"

    def admit(self, request: Request) -> Request:
        """Refuse every message that asks for more than a measurement."""
        kind = request.message.metadata.message_type
        if not request.session.settings.tests:
            if kind == wire.EVALUATE_GROUP:
                request.refuse_for('trains: only a silo with role = "evaluate" is asked for that.')
            return request
        if not wire.kind_of(kind).testing:
            request.refuse_for('only tests (role = "evaluate" in silo.toml): it trains nothing.')
        if request.joins and request.personal():
            request.refuse_for(
                'only tests (role = "evaluate"), and this run leaves layers at the silos '
                "(personal), which it cannot train: there is no whole model to test."
            )
        return request

    def answer(self, request: Request, work: Callable[[Request], RecordDict]) -> RecordDict:
        """Measure the received model as it is; no stage changes it or trains."""
        kind = request.message.metadata.message_type
        if kind != wire.EVALUATE or not request.session.settings.tests:
            return work(request)
        return _measure(request)


def _measure(request: Request) -> RecordDict:
    """Measure the received model on the test samples; save it if the run asks."""
    session, metric = request.session, request.metric()
    keep, home = request.config.get(wire.KEEP), session.settings.home
    request.receive((), before=0)
    with Stopwatch() as watch:
        result = (
            evaluate_in_full(session.task, session.model, session.data, metric=metric)
            if keep
            else evaluate(session.task, session.model, session.data.test, metric=metric)
        )
    if keep and home:
        model = read_weights(session.model)
        keep_model(
            home, card_of(session, request.config, model, result), model, final=is_final(request)
        )
    return reply_of(request, result, watch.seconds)


def measure_group(request: Request) -> RecordDict:
    """Measure a group's model on the samples by which the silo's group is chosen.

    They are not those on which the chosen model is then measured.
    """
    session, metric = request.session, request.metric()
    request.receive((), before=0)
    with Stopwatch() as watch:
        result = evaluate(session.task, session.model, session.data.train, metric=metric)
    return evaluation(request, result, watch.seconds)
