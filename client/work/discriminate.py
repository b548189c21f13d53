"""Answers to messages about client discriminators (FedCollab)."""

from __future__ import annotations

from flwr.app import MetricRecord, RecordDict

from coterie import wire
from coterie.client.work.discriminators import (
    DiscriminatorError,
    DiscriminatorPlan,
    Pairs,
    View,
    count_hits,
    open_pairs,
    train_stack,
)
from coterie.client.work.request import RefusedError, Request
from coterie.client.work.session import Session
from coterie.client.work.sgd import Stopwatch


def train(request: Request, *, labelled: bool, seen: View | None) -> RecordDict:
    """Score the received discriminators on held-out samples, train them, and send both back.

    Without ``labelled`` they see features only: no label of the silo is used.
    """
    pairs = _pairs(request, labelled=labelled, seen=seen)
    if not len(pairs.pool.x):
        request.refuse_for("has no sample to train on.")
    plan = DiscriminatorPlan(
        steps=request.integer(wire.STEPS, minimum=1),
        batch_size=request.value(wire.BATCH_SIZE),
        lr=request.value(wire.LR),
    )
    most = request.value(wire.SAMPLES)
    request.check_samples(plan.steps, plan.batch_size, most=most)
    seed = request.seed()
    content = RecordDict({wire.ARRAYS: wire.encode_arrays({}, packed=True)})
    with Stopwatch() as watch:
        if pairs.received:
            content[wire.HITS] = wire.encode_arrays(count_hits(pairs), packed=True)
        train_stack(pairs, plan, seed=seed)
    content[wire.DISCRIMINATORS] = wire.encode_arrays(pairs.arrays(), packed=True)
    content[wire.METRICS] = _metrics(request.session, pairs, watch.seconds)
    return content


def evaluate(request: Request, *, labelled: bool, seen: View | None) -> RecordDict:
    """Score the received discriminators, if any; report one's size and what can be held out."""
    pairs = _pairs(request, labelled=labelled, seen=seen)
    content = RecordDict()
    with Stopwatch() as watch:
        if pairs.received:
            content[wire.HITS] = wire.encode_arrays(count_hits(pairs), packed=True)
    content[wire.METRICS] = _metrics(request.session, pairs, watch.seconds)
    return content


def _pairs(request: Request, *, labelled: bool, seen: View | None) -> Pairs:
    policy = request.session.settings.policy
    request.refuse_for(policy.unshared("auxiliary"))
    # Whatever the message says: a discriminator is averaged with that of one other silo.
    request.refuse_for(policy.group_objection({wire.GROUP_SIZE: 2}))
    labels = str(request.config.get(wire.PAIR_LABELS, ""))
    if set(labels) - {"0", "1"}:
        raise RefusedError(
            f"{wire.PAIR_LABELS} must consist of the digits 0 and 1. Got {labels!r}."
        )
    record = wire.array_records(request.message.content).get(wire.DISCRIMINATORS)
    spared = request.spared()
    try:
        return open_pairs(
            spared,
            None if record is None else wire.decode_arrays(record),
            [int(label) for label in labels],
            samples=request.value(wire.SAMPLES),
            seed=request.run_seed,
            labelled=labelled,
            most_bytes=request.value(wire.MOST_BYTES),
            seen=seen,
        )
    except (wire.WireError, DiscriminatorError) as error:
        raise RefusedError(str(error)) from None


def _metrics(session: Session, pairs: Pairs, seconds: float) -> MetricRecord:
    metrics = {
        wire.NUM_EXAMPLES: len(session.data.train),
        wire.HELD_OUT: len(pairs.pool.x_held) if len(pairs.pool.x) else 0,
        wire.DISCRIMINATOR_BYTES: pairs.bytes_each,
        wire.SECONDS: seconds,
    }
    return session.permitted(metrics)
