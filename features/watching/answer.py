"""A silo's answer about its model in use, and its checks at the coordinator.

It is an entry of the answer to ``query.statistics``: verdicts, and the index of each column. None
of its figures is of fewer samples than the silo's ``statistics_from``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from coterie.wire.errors import WireError
from coterie.wire.limits import MAX_ANSWER_BYTES, MAX_NAME, plain_text
from coterie.wire.metrics import KNOWN_METRICS
from coterie.wire.names import CONFIG

ENTRY = "model-in-use"
MOST_COLUMNS = 1000
MOST_SAMPLES = 1_000_000_000


@dataclass(frozen=True)
class Watched:
    """What a silo reports about its model in use.

    Attributes:
        at: when the silo looked; model: the first digits of its arrays' hash.
        samples, labelled: new samples; 0: too few, nothing is reported about them.
        psi: column → population stability index, in two decimals.
        drifted: columns of ``psi`` that have drifted.
        metric, value, before: the deciding metric, now and when the model was taken into use;
            empty and NaN if the silo does not share it.
        worse: whether it is worse; None if that cannot be said.
    """

    at: str
    model: str
    samples: int = 0
    labelled: int = 0
    psi: Mapping[str, float] = field(default_factory=dict)
    drifted: tuple[str, ...] = ()
    metric: str = ""
    value: float = math.nan
    before: float = math.nan
    worse: bool | None = None


def add_watched(content: RecordDict, watched: Watched) -> None:
    """Add it to the answer to ``query.statistics``."""
    record = content[CONFIG]
    assert isinstance(record, ConfigRecord)
    record[ENTRY] = json.dumps(plain_watched(watched), ensure_ascii=False)


def plain_watched(watched: Watched) -> dict[str, Any]:
    """Return it as JSON values; NaN is None."""
    own = {
        key: None if isinstance(value, float) and math.isnan(value) else value
        for key, value in asdict(watched).items()
    }
    return own | {"drifted": list(watched.drifted)}


def decode_watched(content: RecordDict) -> dict[str, Any] | None:
    """Read and check what ``add_watched`` added, as JSON values; None if there is nothing.

    Raises:
        WireError: a field is missing, of the wrong kind, or impossible.
    """
    record = content.get(CONFIG)
    if not isinstance(record, ConfigRecord) or ENTRY not in record:
        return None
    try:
        text = record[ENTRY]
        if not isinstance(text, str) or len(text) > MAX_ANSWER_BYTES:
            raise ValueError(f"it must be a text of at most {MAX_ANSWER_BYTES:,} characters")
        return plain_watched(watched_of(json.loads(text)))
    except Exception as error:  # values from elsewhere, of any kind
        raise WireError(
            f"its answer about the model in use cannot be read: {plain_text(error, 200)}."
        ) from None


def watched_of(plain: Any) -> Watched:
    """Return the checked inverse of ``plain_watched``.

    Raises:
        KeyError, TypeError, ValueError: it is something else, or impossible.
    """
    psi, drifted, worse = dict(plain["psi"]), plain["drifted"], plain["worse"]
    if len(psi) > MOST_COLUMNS or not isinstance(drifted, list) or not set(drifted) <= set(psi):
        raise ValueError(f"it has over {MOST_COLUMNS} columns, or a verdict without a figure")
    if not isinstance(worse, bool | None) or plain["metric"] not in ("", *KNOWN_METRICS):
        raise ValueError("the verdict or the metric is none that is known")
    return Watched(
        at=_text(plain["at"]),
        model=_text(plain["model"]),
        samples=_count(plain["samples"]),
        labelled=_count(plain["labelled"]),
        psi={_text(name): _number(value) for name, value in psi.items()},
        drifted=tuple(map(_text, drifted)),
        metric=plain["metric"],
        value=_number(plain["value"], missing=True),
        before=_number(plain["before"], missing=True),
        worse=worse,
    )


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("expected a text")
    return plain_text(value, MAX_NAME)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= MOST_SAMPLES:
        raise ValueError("expected a number of samples")
    return value


def _number(value: Any, *, missing: bool = False) -> float:
    if value is None and missing:
        return math.nan
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError("expected a finite number")
    return float(value)
