"""A silo's part of growing trees: sums over its rows.

A silo sends no tree and no row. The trees of its group come with the questions, complete up to the
ones that grow. Their arrays are a network of the task (``coterie.tasks.trees``), so they are
measured, kept and used like any model. A silo alone has its trees from ``at_home``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from math import sqrt
from typing import Any

import numpy as np
import torch
from flwr.app import MetricRecord, RecordDict
from numpy.typing import NDArray

from coterie import wire
from coterie.client.work.data import Data, Held, Part
from coterie.client.work.hold_out import held_apart
from coterie.client.work.measure import evaluate, sample_losses
from coterie.client.work.request import RefusedError, Request
from coterie.client.work.session import Session
from coterie.client.work.sgd import TrainPlan
from coterie.client.work.stage import Holding, Stage, Work
from coterie.client.work.weights import load_weights
from coterie.features.sums.rows import objection
from coterie.features.sums.rows import rows_of as all_rows
from coterie.features.sums.trees import questions
from coterie.features.sums.trees.alone import Alone
from coterie.features.sums.trees.at_home import AtHome, at_home, beside_alone
from coterie.features.sums.trees.histograms import Rows
from coterie.features.sums.trees.own import OwnOfGroup
from coterie.features.sums.trees.questions import AnswerError
from coterie.features.sums.trees.rows import rows_of
from coterie.features.sums.trees.seen import Seen
from coterie.tasks.base import TaskError, has_own
from coterie.tasks.trees import Trees

log = logging.getLogger("coterie.silo")

NAME, AUTO = "trees", "auto"
GROWERS = wire.KINDS[wire.EVALUATE_HISTOGRAMS].strategies
"""Strategies that grow trees."""
_rows: dict[tuple[str, str, str, bool], tuple[Data, object, Rows, Rows | None]] = {}
"""(silo, home, task, whether more is held out) → its data, a run, the rows it trains on, and those
that are held out for now, if it may tell losses on them."""


class Growing(Stage):
    """The stage for silos whose network is trees."""

    name = NAME

    def admit(self, request: Request) -> Request:
        """Refuse trees in runs of strategies that grow none, and other networks in one of these."""
        named, session = request.config.get(wire.STRATEGY), request.session
        if not request.joins or named in wire.UNTRAINED or named is None:
            return request
        boosted = isinstance(session.model, Trees)
        if boosted and named not in GROWERS:
            request.refuse_for(f"has a network of trees, which only {', '.join(GROWERS)} grow.")
        if named == NAME and not boosted:
            request.refuse_for('does not have network = "trees" in its task, which this needs.')
        if boosted and session.settings.trains:
            request.refuse_for(session.settings.policy.sums_objection(NAME))
        return request

    def begin(self, request: Request, *, before: int, packed: bool) -> AtHome | OwnOfGroup | None:
        """Return the trees that the silo makes at home; None if it uses those received."""
        return at_home(request) or _own_of_group(request)

    def personalise(self, mine: AtHome | OwnOfGroup | None, session: Session) -> bool:
        if mine is not None:
            mine.put(session)
        return mine is not None

    def before(self, mine: AtHome | OwnOfGroup | None, work: Work) -> None:
        """Leave the trees as they are: they grow by sums, and training only measures them.

        If samples are held out, state how sure the loss on them is.
        """
        if not isinstance(work.session.model, Trees):
            return
        work.training = partial(_measured, work, mine if isinstance(mine, AtHome) else None)
        if mine is not None:
            work.keep_received()
        if wire.HOLDOUT_LOSS in work.metrics and len(work.data.test) > 1:
            losses = sample_losses(work.session.task, work.session.model, work.data.test)
            work.metrics[wire.HOLDOUT_LOSS_ERROR] = float(losses.std(ddof=1)) / sqrt(len(losses))

    def held(self, mine: AtHome | OwnOfGroup | None, holding: Holding) -> None:
        """Compare the trees with trees of this silo alone, and log which are better here."""
        session, how = holding.session, holding.request.config.get(wire.GROWING)
        shared = not isinstance(mine, AtHome) and isinstance(session.model, Trees)
        if holding.ends and shared and isinstance(how, str):
            try:
                log.info("%s", beside_alone(session, Alone.model_validate_json(how)))
            except ValueError as error:
                log.warning("no trees could be grown from this silo's rows alone: %s", error)


def answer_histograms(request: Request) -> RecordDict:
    """Answer a question about this silo's rows with sums over them, if its policy allows it."""
    session, policy = request.session, request.session.settings.policy
    request.refuse_for(policy.sums_objection(NAME))
    request.refuse_for(policy.group_objection(request.config))
    if not isinstance(session.model, Trees):
        request.refuse_for('does not have network = "trees" in its task.')
    record = wire.array_records(request.message.content).get(wire.ARRAYS)
    try:
        if record is None:
            raise AnswerError(f"a question about trees needs {wire.ARRAYS!r}.")
        sums = questions.answer(wire.decode_arrays(record), *_rows_of(request))
    except (AnswerError, wire.WireError) as error:
        raise RefusedError(str(error)) from None
    except TaskError as error:  # its text may name a file, or quote what stands in it
        log.error("the rows cannot be read: %s", error)
        request.refuse_for("can no longer read its data; see the silo's log.")
    sent = wire.encode_arrays({questions.RECORD: sums}, packed=True)
    metrics = MetricRecord({wire.NUM_EXAMPLES: len(session.data.train)})
    return RecordDict({questions.RECORD: sent, wire.METRICS: metrics})


def _own_of_group(request: Request) -> OwnOfGroup | None:
    """Return how a message asks for the silo's own of its group's trees; None if it does not."""
    if request.config.get(wire.PERSONALISE) != wire.PARTIAL:
        return None
    penalty = request.value(wire.OWN_PENALTY)
    return OwnOfGroup(penalty) if penalty and isinstance(request.session.model, Trees) else None


def in_bins(
    answer: Callable[..., RecordDict], *, labelled: bool
) -> Callable[[Request], RecordDict]:
    """Return an answer about discriminators that sees rows of trees in bins that are sent."""

    def answered(request: Request) -> RecordDict:
        return answer(request, labelled=labelled, seen=_bins(request))

    return answered


def _bins(request: Request) -> Seen | None:
    """Return the bins with which all silos of the run see rows, if its models are trees.

    None for a task that says itself what discriminators see, or which these are.
    """
    model, task = request.session.model, request.session.task
    own = has_own(task, "discriminator") or has_own(task, "discriminator_features")
    if own or not isinstance(model, Trees):
        return None
    record = wire.array_records(request.message.content).get(wire.BINS)
    if record is None:
        raise RefusedError(f"discriminators of rows whose model is trees need {wire.BINS!r}.")
    try:
        return Seen.of(wire.decode_arrays(record), len(model.gain), len(model.base))
    except ValueError as error:
        raise RefusedError(f"{wire.BINS!r} must fit the rows: {error}.") from None


def _rows_of(request: Request) -> tuple[Rows, Rows | None]:
    """Return the rows that the run trains on, and those held out for now, made once.

    Refuse if they are nearly those of an earlier run: the difference would describe few rows. A
    silo with too few rows to hold some out holds none out for a trial, and refuses a race.
    """
    session = request.session
    settings, data = session.settings, session.data
    key = settings.name, settings.home, session.task.name, bool(request.value(wire.HOLDOUT))
    # Otherwise a message that asks for another share would be answered from these rows.
    whose = request.run, *request.splits
    known = _rows.get(key)
    if known is None or known[0] is not data or known[1] != whose:
        least, used = settings.policy.smallest_count, _trained_on(request)
        few = _apart(request, used, least)
        if few and request.config.get(wire.STRATEGY) != AUTO:
            used, kept, held = _trained_on(request, race=False), request.spared().data, None
        else:
            request.refuse_for(few)
            kept, held = _spared(request)
        request.refuse_for(objection(session, all_rows(session), used, least, repeated=False))
        judged = None
        if held is not None and session.permitted({wire.HOLDOUT_LOSS: 0.0}):
            judged = rows_of(session, replace(data, train=held), least)
        known = _rows[key] = data, whose, rows_of(session, kept, least), judged
    return known[2:]


def _apart(request: Request, used: NDArray[np.bool_], least: int) -> str:
    """Return why sums over ``used`` rows may not leave if those over all rows are to follow."""
    left = _trained_on(request, race=False) & ~used
    persons = request.session.data.train.persons
    number = int(left.sum()) if persons is None else len(np.unique(np.asarray(persons)[left]))
    if not 0 < number < least:
        return ""
    return (
        f"has too few rows for a race: it would hold out {number}, and sums over fewer than "
        f"{least} follow from those over the others and over all."
    )


def _spared(request: Request, *, race: bool = True) -> tuple[Data, Part | None]:
    """Return the silo's data without what the run holds out, by itself and in a race; and that."""
    data = request.spared().data
    needed = request.config.get(wire.STRATEGY) == AUTO
    share = request.held_out_share(wire.HOLDOUT, of=data, needed=needed)
    if not (share and race):
        return data, None
    session = replace(request.session, data=data)
    spared, held = held_apart(session, share, run_seed=request.run_seed)
    return spared.data, held


def _trained_on(request: Request, *, race: bool = True) -> NDArray[np.bool_]:
    """Return which training rows (n,) the run does not hold out."""
    session, part = request.session, request.session.data.train
    assert isinstance(part, Held), "a table is held as a whole"
    numbers = replace(part, x=torch.arange(len(part), device=part.device)[:, None])
    numbered = replace(session, data=replace(session.data, train=numbers))
    kept = _spared(replace(request, session=numbered), race=race)[0].train
    assert isinstance(kept, Held), "a part of it is, too"
    used = np.zeros(len(part), np.bool_)
    used[kept.x[:, 0].cpu().numpy()] = True
    return used


def _measured(
    work: Work, mine: AtHome | None, part: Part, plan: TrainPlan, *, seed: int, **how: Any
) -> float:
    """Return the loss of the received trees, or of the silo's own, which do not leave."""
    session = work.session
    if mine is not None:
        mine.put(session)
    loss = evaluate(session.task, session.model, part, metric=work.metric).loss
    if mine is not None:
        load_weights(session.model, work.received)
    return loss
