"""The best model of a run for this silo, by data that the run does not train on.

With ``validation`` a silo keeps a share of its training data out of every training, evaluates
each received model on it, and reports the error if its policy lets errors leave. With ``keep =
best`` it finally keeps the model that was best there. With ``holdout`` a single training leaves
out a share of the rest, and the silo reports the received model's error on it.
"""

from __future__ import annotations

from coterie import wire
from coterie.client.home import best
from coterie.client.home.best import Best
from coterie.client.work.hold_out import split_validation
from coterie.client.work.measure import evaluate, held_out_metrics
from coterie.client.work.request import Request
from coterie.client.work.stage import Holding, Stage, Work
from coterie.client.work.weights import load_weights, read_weights, travelling


class Validation(Stage):
    """The stage for samples that are held out."""

    name = "validation"

    def admit(self, request: Request) -> Request:
        """Refuse a run for which the silo has too few samples."""
        if request.joins:
            request.held_out_share(wire.VALIDATION)
        return request

    def before(self, mine: None, work: Work) -> None:
        """Hold out what this training alone leaves out, and evaluate the received model on it."""
        request, session = work.request, work.session
        share = request.held_out_share(wire.HOLDOUT, of=work.data)
        if not share:
            return
        work.data = split_validation(session, share, run_seed=request.run_seed)
        found = evaluate(session.task, session.model, work.data.test, metric=work.metric)
        work.metrics |= held_out_metrics(found)

    def held(self, mine: None, holding: Holding) -> None:
        """Evaluate the model on validation data; at the run's end, load the best one instead."""
        request = holding.request
        share = request.held_out_share(wire.VALIDATION)
        if not share:
            return
        session, run = request.session, request.run
        part = split_validation(session, share, run_seed=request.run_seed).test
        found = evaluate(session.task, session.model, part, metric=holding.metric)
        holding.metrics[wire.RECEIVED_VALIDATION_ERROR] = found.error
        keeps = request.config.get(wire.KEEP_BEST) and session.settings.home
        if not keeps or holding.after < 1:  # w⁰, of round 0, is not kept
            return
        worth = Best(found.error, found.loss, holding.after, found.num_examples)
        holding.best = best.consider(session.settings, read_weights(session.model), worth, run=run)
        if holding.ends and holding.best is not None:
            arrays = best.load(session.settings, holding.best, run=run)
            best.keep_only(session.settings, holding.best, run=run)
            load_weights(session.model, {name: arrays[name] for name in travelling(session.model)})
