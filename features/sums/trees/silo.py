"""A silo's part of growing trees: sums over its rows, and a comparison with trees of it alone.

A silo sends no tree and no row. The trees of its group come with the questions, complete up to the
ones that grow. Their arrays are a network of the task (``coterie.tasks.trees``), so they are
measured, kept and used like any model.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
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
from coterie.client.work.weights import load_weights, read_weights, travelling
from coterie.features.sums.rows import objection
from coterie.features.sums.rows import rows_of as all_rows
from coterie.features.sums.spells import spells_of
from coterie.features.sums.trees import questions
from coterie.features.sums.trees.ensemble import Ensemble
from coterie.features.sums.trees.growth import HOLDOUT, Settings
from coterie.features.sums.trees.histograms import Rows, of_classes, of_labels, of_numbers
from coterie.features.sums.trees.questions import AnswerError
from coterie.features.sums.trees.seen import Seen
from coterie.features.sums.trees.survival import of_survival
from coterie.features.sums.trees.together import grown_alone
from coterie.tasks.base import TaskError, has_own
from coterie.tasks.problems import Classes, Numbers, Survival
from coterie.tasks.trees import Trees

log = logging.getLogger("coterie.silo")

NAME, AUTO = "trees", "auto"
GROWERS = wire.KINDS[wire.EVALUATE_HISTOGRAMS].strategies
"""Strategies that grow trees."""
CHANCE = 2.0
"""Standard errors beyond which a difference is not chance."""

_rows: dict[tuple[str, str, str, bool], tuple[Data, str, Rows, Rows | None]] = {}
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

    def before(self, mine: None, work: Work) -> None:
        """Leave the trees as they are: they grow by sums, and training only measures them.

        If samples are held out, state how sure the loss on them is.
        """
        if not isinstance(work.session.model, Trees):
            return
        work.training = _measured(work.session, work.metric)
        if wire.HOLDOUT_LOSS in work.metrics and len(work.data.test) > 1:
            losses = sample_losses(work.session.task, work.session.model, work.data.test)
            work.metrics[wire.HOLDOUT_LOSS_ERROR] = float(losses.std(ddof=1)) / sqrt(len(losses))

    def held(self, mine: None, holding: Holding) -> None:
        """Compare the trees with trees of this silo alone, and log which are better here."""
        session, settings = holding.session, holding.request.config.get(wire.GROWING)
        if holding.ends and isinstance(session.model, Trees) and isinstance(settings, str):
            try:
                log.info("%s", _beside_alone(session, _read_settings(settings)))
            except (ValueError, TypeError, AttributeError) as error:
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
    known = _rows.get(key)
    if known is None or known[0] is not data or known[1] != request.run:
        least, used = settings.policy.smallest_count, _trained_on(request)
        few = _apart(request, used, least)
        if few and request.config.get(wire.STRATEGY) != AUTO:
            used, kept, held = _trained_on(request, race=False), request.spared().data, None
        else:
            request.refuse_for(few)
            kept, held = _spared(request)
        request.refuse_for(objection(session, all_rows(session), used, least))
        judged = None
        if held is not None and session.permitted({wire.HOLDOUT_LOSS: 0.0}):
            judged = rows_of(session, replace(data, train=held), least)
        known = _rows[key] = data, request.run, rows_of(session, kept, least), judged
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
    share = request.held_out_share(wire.HOLDOUT, of=data)
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


def rows_of(session: Session, data: Data, least: int) -> Rows:
    """Return training rows; ``least`` counts persons where they are known.

    Of survival, events count as in regressions (``spells_of``).
    """
    part = data.train
    assert isinstance(part, Held), "a table is held as a whole"
    most = 1 if part.persons is None else int(np.unique(part.persons, return_counts=True)[1].max())
    targets, problem = part.y.cpu().double().numpy(), session.task.problem
    if isinstance(problem, Classes):
        classes = targets.astype(np.intp)
        if problem.num_classes == 2:
            targets, derivatives = classes[:, None].astype(np.float64), of_labels
        else:
            targets, derivatives = np.eye(problem.num_classes)[classes], of_classes
    elif isinstance(problem, Survival):
        spells = spells_of(targets[:, 0], targets[:, 1], part.persons, least)
        targets[spells.order, 1], derivatives = spells.event, of_survival
    else:
        derivatives = of_numbers if isinstance(problem, Numbers) else of_labels
    x: NDArray[np.float32] = part.x.cpu().numpy()
    return Rows(x, targets, derivatives, least * most)


def _measured(session: Session, metric: str) -> Any:
    def training(part: Part, plan: TrainPlan, *, seed: int, **how: Any) -> float:
        return evaluate(session.task, session.model, part, metric=metric).loss

    return training


@dataclass(frozen=True)
class _Asked:
    settings: Settings
    bins: int


def _read_settings(text: str) -> _Asked:
    found: Mapping[str, Any] = json.loads(text)
    bins = int(found["bins"])
    if not 2 <= bins <= 1024:
        raise ValueError(f"bins must be from 2 to 1024. Got {bins}")
    rate, penalty, second = (float(found[name]) for name in ("rate", "penalty", "min_second"))
    return _Asked(Settings(rate, penalty, int(found["min_rows"]), second), bins)


def _beside_alone(session: Session, asked: _Asked) -> str:
    """Return how the model in the session and trees of this silo alone compare on its test data."""
    group = read_weights(session.model)
    losses = sample_losses(session.task, session.model, session.data.test)
    like = Ensemble.of(group)
    empty = Ensemble.empty(*(len(like.leaf), len(like.base), like.depth, len(like.gain)))
    split = session.data.hold_out(HOLDOUT, seed=0)
    rows, kept, held = (
        rows_of(session, replace(session.data, train=part), 1)
        for part in (session.data.train, split.train, split.test)
    )
    alone = grown_alone(rows, kept, held, empty, asked.settings, bins=asked.bins)
    load_weights(session.model, {name: alone.arrays()[name] for name in travelling(session.model)})
    own = sample_losses(session.task, session.model, session.data.test)
    load_weights(session.model, group)
    apart = losses - own
    error = float(apart.std(ddof=1)) / sqrt(len(apart)) if len(apart) > 1 else float("inf")
    said = (
        f"on {len(apart)} test samples the loss of the group's trees is {losses.mean():.4g}, that "
        f"of trees of this silo's rows alone {own.mean():.4g}"
    )
    if apart.mean() > CHANCE * error:
        return f"{said}: alone is better here, beyond chance"
    if -apart.mean() > CHANCE * error:
        return f"{said}: the group's are better here, beyond chance"
    return f"{said}: the difference may be chance"
