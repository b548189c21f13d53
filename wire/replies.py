"""Replies that say no, and the numbers of those that do not."""

from __future__ import annotations

from flwr.app import Error, Message, MetricRecord, RecordDict

from coterie.wire.names import FAILED, METRICS, REFUSED


def refusal(reason: str, message: Message) -> Message:
    """An error reply of a silo that will not do what was asked."""
    return Message(Error(REFUSED, reason), reply_to=message)


def failure(silo: str, error: BaseException, message: Message) -> Message:
    """An error reply of a silo whose app raised: what the error says may quote the silo's data."""
    kind = type(error).__name__
    reason = f"silo {silo!r} failed: {kind}; see the silo's log."
    return Message(Error(FAILED, reason), reply_to=message)


def read_metrics(content: RecordDict) -> dict[str, float]:
    """Scalar metrics of a reply, by key; lists of numbers are left out."""
    metrics = content.get(METRICS)
    if not isinstance(metrics, MetricRecord):
        return {}
    return {
        key: value
        for key, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
