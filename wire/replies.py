"""Replies that say no, and the numbers of those that do not."""

from __future__ import annotations

from copy import copy
from math import isfinite

from flwr.app import Error, Message, MetricRecord, RecordDict

from coterie.wire.limits import plain_text
from coterie.wire.names import FAILED, METRICS, OWN_METRICS, REFUSED, UNREADABLE


def refusal(reason: str, message: Message, *, code: int = REFUSED) -> Message:
    """An error reply of a silo that will not do what was asked."""
    return Message(Error(code, plain_text(reason)), reply_to=message)


def instead_of(reply: Message, reason: str) -> Message:
    """An error reply in the place of one that cannot be sent."""
    made = Message.__new__(Message)
    error = Error(UNREADABLE, plain_text(reason))
    made.__dict__.update(_metadata=copy(reply.metadata), _content=None, _error=error)
    return made


def failure(silo: str, error: BaseException, message: Message) -> Message:
    """An error reply of a silo whose app raised: what the error says may quote the silo's data."""
    kind = type(error).__name__
    reason = f"silo {silo!r} failed: {kind}; see the silo's log."
    return Message(Error(FAILED, reason), reply_to=message)


def whole(value: object) -> int:
    """A whole number of at least 0 that the other side states; 0 for whatever else it states."""
    return value if type(value) is int and value >= 0 else 0


Value = float | list[float]
"""What a metric is: a number, or several."""
MAX_METRICS = 64
"""Of one reply; and numbers in a list, and letters in a name."""


def read_figures(content: RecordDict) -> dict[str, Value]:
    """Metrics of a reply beyond those that the conversation itself has: its app's own.

    What is not finite is left out, and of a reply that states a great many the rest.
    """
    metrics = content.get(METRICS)
    if not isinstance(metrics, MetricRecord):
        return {}
    found: dict[str, Value] = {}
    for key, value in metrics.items():
        numbers = value if isinstance(value, list) else [value]
        fits = 0 < len(numbers) <= MAX_METRICS and 0 < len(key) <= MAX_METRICS
        fits = fits and key.isprintable()
        if key not in OWN_METRICS and fits and all(isfinite(number) for number in numbers):
            found[key] = [float(n) for n in value] if isinstance(value, list) else float(value)
        if len(found) == MAX_METRICS:
            break
    return found


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
