"""Error replies, and the metrics of the other replies."""

from __future__ import annotations

from math import isfinite

from flwr.app import Error, Message, MetricRecord, RecordDict

from coterie.wire.errors import WireError
from coterie.wire.limits import plain_text
from coterie.wire.names import FAILED, METRICS, OWN_METRICS, REFUSED


def refusal(reason: str, message: Message, *, code: int = REFUSED) -> Message:
    """Return the error reply of a silo that refuses a request."""
    return Message(Error(code, plain_text(reason)), reply_to=message)


def failure(silo: str, error: BaseException, message: Message) -> Message:
    """Return the error reply of a silo whose app raised; the error's text may quote its data."""
    kind = type(error).__name__
    reason = f"silo {silo!r} failed: {kind}; see the silo's log."
    return Message(Error(FAILED, reason), reply_to=message)


def content_of(reply: Message | None) -> RecordDict:
    """Return what a reply holds; raise ``WireError`` if it is none, or an error."""
    if reply is None:
        raise WireError("it did not answer in time.")
    if reply.has_error():
        raise WireError(str(reply.error.reason))
    return reply.content


def whole(value: object) -> int:
    """Return a peer's value if it is an integer of at least 0, else 0."""
    return value if type(value) is int and value >= 0 else 0


Value = float | list[float]
"""The value of a metric: a number, or several."""
MAX_METRICS = 64
"""The most metrics of one reply, numbers in a list, and characters in a name."""


def read_figures(content: RecordDict) -> dict[str, Value]:
    """Return the app's own metrics in a reply: those that are not part of the protocol.

    Values that are not finite are omitted, and so are all metrics beyond the limit.
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
    """Return a reply's scalar metrics, by key; lists of numbers are omitted."""
    metrics = content.get(METRICS)
    if not isinstance(metrics, MetricRecord):
        return {}
    return {
        key: value
        for key, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
