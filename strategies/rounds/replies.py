"""Checks of replies before any arithmetic: a silo's reply is wrong until proven right."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from math import ceil
from types import MappingProxyType
from typing import Any

import numpy as np
from flwr.app import Message, MetricRecord, RecordDict

from coterie import wire
from coterie.strategies.errors import FederationError, refused
from coterie.strategies.rounds.admission import MAX_EXAMPLES
from coterie.strategies.rounds.algorithm import Answers, Order, Update, Updates, num_bytes
from coterie.strategies.rounds.handles import Arrays, Masked, Model, arrays_of
from coterie.strategies.rounds.models import each
from coterie.strategies.rounds.reports import (
    Evaluation,
    Figures,
    PhaseReport,
    SiloReport,
)
from coterie.strategies.rounds.roster import Silo
from coterie.wire import Value
from coterie.wire.statements import Statement, read_statement

log = logging.getLogger("coterie.run")

MAX_VALUE, MAX_LOSS = 1e15, 1e50
"""Larger than any parameter, running statistic or counter of a model that can still be trained: the
float32 squares in training overflow at 1.8e19, and one such value spoils a mean. A loss of trees is
in squared units of their target."""

Names = Mapping[str, str]
"""A metric's name in an app → its name here, for names that are not understood directly."""
OWN_NAMES: Names = MappingProxyType({})
MAPPED = (wire.NUM_EXAMPLES, wire.TRAIN_LOSS, wire.LOSS, wire.ERROR, wire.ACCURACY)
"""The metrics that a ClientApp may name differently."""

RAISED = 2
"""Flower's error code of a ClientApp that raised."""


class ReplyError(ValueError):
    """The reason why a reply does not count.

    Attributes:
        refused: the silo refused.
        spent: the silo refused because of its privacy budget.
        raised: the ClientApp raised, as it does without a function for the message.
        silent: none came in time.
        diverged: the silo reports that its training ended in NaN or infinity.
    """

    def __init__(
        self,
        reason: str,
        *,
        refused: bool = False,
        spent: bool = False,
        raised: bool = False,
        silent: bool = False,
        diverged: bool = False,
    ) -> None:
        super().__init__(wire.plain_text(reason))
        self.refused, self.spent, self.raised, self.silent = refused, spent, raised, silent
        self.diverged = diverged

    @property
    def is_ours(self) -> bool:
        """Whether the reply was found wrong here, which the silo cannot know."""
        return not (self.refused or self.spent or self.raised or self.silent or self.diverged)


@dataclass(frozen=True)
class Checked:
    """The checked replies of one exchange: valid updates, and the other orders with the reasons."""

    updates: list[Update]
    failed: list[tuple[Order, ReplyError]]

    @property
    def answers(self) -> Answers:
        """The answers of an exchange outside the round's training."""
        return Answers(
            self.updates,
            missing={order.silo.name: str(error) for order, error in self.failed},
            refused=[order.silo.name for order, error in self.failed if error.refused],
        )

    @property
    def left_out(self) -> dict[str, str]:
        """Silo → why its own training does not count; other failures are only logged."""
        return {order.silo.name: str(why) for order, why in self.failed if not order.purpose}


def check_replies(
    orders: Sequence[Order],
    replies: Sequence[Message | None],
    names: Names = OWN_NAMES,
    *,
    number: int = 0,
    wire_format: str = wire.FLOAT32,
) -> Checked:
    """Check the reply to every order; None is a reply that did not come in time.

    Args:
        names: a metric's name in an app → its name here.
        wire_format: that silos were asked for, see ``coterie.wire.formats``.
    """
    updates: list[Update] = []
    failed: list[tuple[Order, ReplyError]] = []

    def checked(pair: tuple[Order, Message | None]) -> Update | ReplyError:
        try:
            return check_reply(*pair, names, number=number, wire_format=wire_format)
        except ReplyError as error:
            return error

    pairs = list(zip(orders, replies, strict=True))
    largest = max((order.num_bytes for order in orders), default=0)
    for order, found in zip(orders, each(checked, pairs, num_bytes=largest), strict=True):
        if isinstance(found, Update):
            updates.append(found)
            continue
        failed.append((order, found))
        if order.purpose:
            log.warning("%s: its %s is left out: %s", order.silo.name, order.purpose, found)
    return Checked(sorted(updates, key=lambda u: (u.silo.name, u.purpose)), failed)


def check_reply(
    order: Order,
    reply: Message | None,
    names: Names = OWN_NAMES,
    *,
    number: int = 0,
    wire_format: str = wire.FLOAT32,
) -> Update:
    """Check a reply against its order; arguments as in ``check_replies``.

    Raises:
        ReplyError: none came, an error reply, missing or undecodable arrays, other names, shapes or
            types, NaN or infinity, or a sample count that is missing or not positive.
    """
    content = _content(reply)
    try:
        arrays = {k: wire.decode_arrays(r) for k, r in wire.array_records(content).items()}
    except wire.WireError as error:
        raise ReplyError(str(error)) from None
    received = num_bytes(*arrays.values())
    model: Model = order.model
    if order.sketches is not None:
        _check_sketches(order, arrays)
    elif order.content is not None:
        pass  # of any shape: it is for another strategy
    elif not order.evaluates:
        trained = arrays.pop(wire.ARRAYS, None)
        if trained is None:
            raise ReplyError(f"its reply has no arrays (expected a record {wire.ARRAYS!r}).")
        sent = arrays_of(order.model)
        trained = _restored(trained, sent, wire_format if order.silo.described else wire.FLOAT32)
        _check_like(trained, sent)
        model = {name: trained[name] for name in sent}
    for extra in arrays.values():
        for name, array in extra.items():
            if array.dtype.kind not in "biuf":
                raise ReplyError(f"array {name!r} must contain numbers. Got {array.dtype}.")
            _check_values(name, array)
    stated = wire.understood(wire.read_metrics(content), names)
    count = stated.get(wire.NUM_EXAMPLES)
    if count is None or not 1 <= count <= MAX_EXAMPLES:
        raise ReplyError(
            f"{wire.NUM_EXAMPLES} must be a number from 1 to {MAX_EXAMPLES:g}. Got {count}."
        )
    metrics = {key: _sane(value, key) for key, value in stated.items()}
    if order.sketches is not None and not order.evaluates:
        if count != order.silo.num_examples:
            raise ReplyError(
                f"in a secure run its weight is the {order.silo.num_examples} training samples "
                f"that it stated when it joined. Now it states {count:g}."
            )
        sketch = arrays.pop(wire.SKETCH, {})
        try:
            signed = read_statement(sketch.pop(wire.STATEMENT), count, most=MAX_VALUE)
        except wire.WireError as error:
            raise ReplyError(str(error)) from None
        model = _masked(order, number, float(count), sketch, metrics, signed)
    return Update(
        silo=_with_minimum(order.silo, stated),
        start=order.model,
        model=model,
        num_examples=float(count),
        metrics=metrics,
        figures=wire.read_figures(content),
        purpose=order.purpose,
        kind=order.kind,
        extras=arrays,
        bytes_sent=order.num_bytes,
        bytes_received=received,
        reply=None if order.content is None else content,
    )


def _content(reply: Message | None) -> RecordDict:
    """Return what a reply holds; raise ``ReplyError`` if it is none, or an error."""
    if reply is None:
        raise ReplyError("it did not answer in time.", silent=True)
    if reply.has_error():
        raise ReplyError(
            str(reply.error.reason or "it answered with an error."),
            refused=reply.error.code in (wire.REFUSED, wire.SPENT),
            spent=reply.error.code == wire.SPENT,
            raised=reply.error.code in (wire.FAILED, RAISED),
            diverged=reply.error.code == wire.DIVERGED,
        )
    return reply.content


def _restored(arrays: Arrays, sent: Arrays, wire_format: str) -> Arrays:
    try:
        return wire.restore_update(arrays, sent, wire_format)
    except wire.WireError as error:
        raise ReplyError(str(error)) from None


def _check_sketches(order: Order, arrays: Mapping[str, Arrays]) -> None:
    """Raise unless a reply has exactly the sketches that were asked for, and a statement."""
    wanted = {} if order.evaluates else {n: (k,) for n, k in (order.sketches or {}).items()}
    sketch = arrays.get(wire.SKETCH, {})
    got = {name: array.shape for name, array in sketch.items() if name != wire.STATEMENT}
    states = (wire.STATEMENT in sketch) is not order.evaluates
    if got != wanted or not states or set(arrays) - {wire.SKETCH}:
        raise ReplyError(
            "in a secure run its reply must contain the requested sketches, a statement of its "
            f"training, and no model: {wanted}. Got {got}, and "
            f"{sorted(set(arrays) - {wire.SKETCH})[:3]}."
        )
    for name, array in sketch.items():
        kind = np.uint8 if name == wire.STATEMENT else np.float32
        if array.dtype != kind:
            raise ReplyError(f"{name!r} must be {np.dtype(kind)}. Got {array.dtype}.")


def _masked(
    order: Order,
    number: int,
    samples: float,
    sketch: Arrays,
    metrics: Mapping[str, float],
    stated: Statement,
) -> Masked:
    norm = metrics.get(wire.UPDATE_NORM, float("nan"))
    if not 0 <= norm <= MAX_VALUE:
        raise ReplyError(f"{wire.UPDATE_NORM} must be a number of at least 0. Got {norm}.")
    start = order.model
    origin = start.origin if isinstance(start, Masked) else arrays_of(start)
    return Masked(
        *(order.silo.name, number, order.purpose, samples, origin, sketch, norm, stated),
        fresh=start is origin,
    )


def _with_minimum(silo: Silo, metrics: Mapping[str, float]) -> Silo:
    """Return the silo with the smallest group stated in its update, unless it described itself."""
    stated = metrics.get(wire.MIN_GROUP_SIZE, 1)
    if silo.described or not stated > 1:
        return silo
    return replace(silo, min_group_size=ceil(min(stated, MAX_EXAMPLES)))


def _sane(value: float, name: str = "", *, least: float = -math.inf) -> float:
    """Return a silo's figure, or NaN if nothing like it can be measured."""
    most = MAX_LOSS if "loss" in name else MAX_VALUE
    return value if max(least, -most) <= value <= most else float("nan")


def check_finite(model: Arrays) -> None:
    """Check that the initial model holds no NaN or infinity.

    Raises:
        FederationError: names the first array that does.
    """
    for name, array in model.items():
        if np.issubdtype(array.dtype, np.floating) and not np.isfinite(array).all():
            raise FederationError(f"the initial model's array {name!r} contains NaN or infinity.")


def check_averageable(model: Arrays) -> None:
    """Check that no array is bytes: a mean of the bytes of a serialised model is none.

    Raises:
        FederationError: names the first array that is.
    """
    for name, array in model.items():
        if array.dtype == np.uint8:
            raise refused(
                f"the initial model's array {name!r} is uint8. Bytes of a serialised model, such "
                "as boosted trees, cannot be averaged: send the model's parameters as numbers, or "
                "boost trees inside groups, by PerGroup(groups, lambda group: FedXgbBagging())."
            )


def _check_like(model: Arrays, sent: Arrays) -> None:
    if set(model) != set(sent):
        odd = sorted(set(model) ^ set(sent))[:3]
        raise ReplyError(f"its arrays differ from those sent: {', '.join(odd)}.")
    for name, array in sent.items():
        got = model[name]
        if got.shape != array.shape or got.dtype != array.dtype:
            raise ReplyError(
                f"array {name!r} must be {array.dtype} of shape {array.shape}. "
                f"Got {got.dtype} of shape {got.shape}."
            )
        _check_values(name, got, array)


def _check_values(name: str, array: Any, sent: Any = None) -> None:
    largest = wire.largest_of(array)
    if not math.isfinite(largest):  # a NaN is the largest and the smallest of its array
        raise ReplyError(f"array {name!r} contains NaN or infinity. A smaller lr may help.")
    # What comes back as it was sent, such as the gain of trees, may be of any size.
    if largest > MAX_VALUE and (sent is None or not np.array_equal(array, sent)):
        raise ReplyError(f"array {name!r} contains values beyond ±{MAX_VALUE:g}.")


# ---------------------------------------------------------------- what replies say of models


def read_evaluations(
    silos: Sequence[Silo], replies: Sequence[Message | None], names: Names = OWN_NAMES
) -> dict[str, Evaluation]:
    """Return silo → (loss, error, test samples) of the evaluations that count."""
    found = {}
    for silo, reply in zip(silos, replies, strict=True):
        if reply is None:
            continue
        if reply.has_error():
            log.warning("%s was not evaluated: %s", silo.name, reply.error.reason)
            continue
        metrics = wire.understood(wire.read_metrics(reply.content), names)
        count = metrics.get(wire.NUM_EXAMPLES, 0)
        if not 1 <= count <= MAX_EXAMPLES:
            log.warning("%s was not evaluated: it states %s test samples", silo.name, count)
            continue
        loss = _sane(metrics.get(wire.LOSS, float("nan")), wire.LOSS)
        found[silo.name] = (loss, _sane(error_of(metrics), least=0), int(count))
    return dict(sorted(found.items()))


def received_evaluations(updates: Updates) -> dict[str, Evaluation]:
    """Return silo → its evaluation of the model that it was sent with its training."""
    stated = {u.silo.name: u.metrics for u in updates if wire.RECEIVED_ERROR in u.metrics}
    counts = {name: metrics.get(wire.RECEIVED_EXAMPLES, 0) for name, metrics in stated.items()}
    return {
        name: (
            metrics.get(wire.RECEIVED_LOSS, float("nan")),
            _sane(metrics[wire.RECEIVED_ERROR], least=0),
            int(counts[name]),
        )
        for name, metrics in stated.items()
        if 1 <= counts[name] <= MAX_EXAMPLES
    }


def trained_evaluations(updates: Updates) -> dict[str, tuple[float, float]]:
    """Return silo → (loss, error) of the model that it trained, for silos that were asked."""
    return {
        u.silo.name: (
            u.metrics.get(wire.TRAINED_LOSS, float("nan")),
            _sane(u.metrics[wire.TRAINED_ERROR], least=0),
        )
        for u in updates
        if wire.TRAINED_ERROR in u.metrics
    }


def read_own_metrics(
    silos: Sequence[Silo], replies: Sequence[Message | None], counted: Container[str]
) -> dict[str, Figures]:
    """Return silo → further metrics of its app, for silos whose evaluation counts."""
    found = {
        silo.name: wire.read_figures(reply.content)
        for silo, reply in zip(silos, replies, strict=True)
        if silo.name in counted and reply is not None
    }
    return {name: figures for name, figures in sorted(found.items()) if figures}


def error_of(metrics: Mapping[str, float]) -> float:
    """Return a silo's error, from its accuracy if it states that instead."""
    return wire.understood(metrics, OWN_NAMES).get(wire.ERROR, float("nan"))


def silo_report(update: Update) -> SiloReport:
    """Return the record of a silo's training."""
    return SiloReport(
        num_examples=update.num_examples,
        train_loss=update.metrics.get(wire.TRAIN_LOSS, float("nan")),
        seconds=update.metrics.get(wire.SECONDS, float("nan")),
        bytes_sent=update.bytes_sent,
        bytes_received=update.bytes_received,
        update_norm=_sane(update.metrics.get(wire.UPDATE_NORM, float("nan")), least=0),
        update_lost=_sane(update.metrics.get(wire.UPDATE_LOST, float("nan")), least=0),
    )


# ---------------------------------------------------------------- costs and means


def costs_by_kind(
    orders: Sequence[Order], updates: Updates, seconds: float
) -> dict[str, PhaseReport]:
    """Return the costs of an exchange outside the training, by message type."""
    return _costs(orders, updates, lambda one: one.kind, exchanges=1, seconds=seconds)


def costs_beside_training(orders: Sequence[Order], updates: Updates) -> dict[str, PhaseReport]:
    """Return the costs of other work in the training exchange; ``trial-3`` counts as ``trial``."""
    return _costs(orders, updates, lambda one: re.sub(r"-\d+$", "", one.purpose))


def add_costs(
    one: Mapping[str, PhaseReport], other: Mapping[str, PhaseReport]
) -> dict[str, PhaseReport]:
    """Return both costs, added up per kind of work."""
    return {**one, **{key: one.get(key, PhaseReport()) + cost for key, cost in other.items()}}


def _costs(
    orders: Sequence[Order],
    updates: Updates,
    sort: Callable[[Order | Update], str],
    *,
    exchanges: int = 0,
    seconds: float = 0.0,
) -> dict[str, PhaseReport]:
    """Return costs per kind of work; work of an empty kind is left out."""
    costs = {}
    for wanted in sorted({sort(order) for order in orders} - {""}):
        asked = [order for order in orders if sort(order) == wanted]
        done = [update for update in updates if sort(update) == wanted]
        stated = [u.metrics.get(wire.SECONDS, 0.0) for u in done]
        costs[wanted] = PhaseReport(
            exchanges=exchanges,
            messages=len(asked),
            seconds=seconds,
            bytes_sent=sum(order.num_bytes for order in asked),
            bytes_received=sum(u.bytes_received for u in done),
            silo_seconds=sum(s for s in stated if np.isfinite(s)),
        )
    return costs


def evaluation_record(
    evaluation: Mapping[str, Evaluation], metrics: Mapping[str, Figures]
) -> MetricRecord:
    """Return Flower's record: means of all metrics, weighted by test samples."""
    weights = np.array([count for _, _, count in evaluation.values()], dtype=np.float64)
    means: dict[str, int | float] = {wire.NUM_EXAMPLES: int(weights.sum())}
    for i, key in enumerate((wire.LOSS, wire.ERROR)):
        values = np.array([entry[i] for entry in evaluation.values()], dtype=np.float64)
        if np.isfinite(values).all():
            means[key] = float((values * weights).sum() / weights.sum())
    counts = {name: float(count) for name, (_, _, count) in evaluation.items()}
    return MetricRecord({**means_of(metrics, counts), **means})


def means_of(metrics: Mapping[str, Figures], weights: Mapping[str, float]) -> dict[str, Value]:
    """Return weighted means over the silos that state a metric; lists are averaged item by item.

    A metric has no mean if its shape differs between silos.
    """
    means: dict[str, Value] = {}
    for key in sorted({key for figures in metrics.values() for key in figures}):
        stated = {name: figures[key] for name, figures in metrics.items() if key in figures}
        if len({np.shape(value) for value in stated.values()}) == 1:
            own = [weights[name] for name in stated]
            means[key] = np.average(list(stated.values()), axis=0, weights=own).tolist()
    return means


def training_record(updates: Updates) -> MetricRecord:
    """Return Flower's record: mean training loss and metrics, weighted by training samples."""
    pairs = [
        (u.metrics[wire.TRAIN_LOSS], u.num_examples)
        for u in updates
        if wire.TRAIN_LOSS in u.metrics
    ]
    total = sum(weight for _, weight in pairs)
    mean = sum(value * weight for value, weight in pairs) / total if total else float("nan")
    own = {u.silo.name: u.figures for u in updates if u.figures}
    means = means_of(own, {u.silo.name: u.num_examples for u in updates})
    return MetricRecord({**means, **({wire.TRAIN_LOSS: mean} if mean == mean else {})})
