"""A silo's answer about its model in use, and its checks at the coordinator.

It is an entry of the answer to ``query.statistics``: verdicts, and the index of each column. None
of its figures is of fewer samples than the silo's ``statistics_from``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any

from flwr.app import ConfigRecord, RecordDict
from pydantic import AfterValidator, Field, TypeAdapter

from coterie.wire.checked import checked_answer
from coterie.wire.limits import MAX_NAME, plain_text
from coterie.wire.metrics import KNOWN_METRICS
from coterie.wire.names import CONFIG

ENTRY = "model-in-use"
MOST_COLUMNS = 1000
MOST_SAMPLES = 1_000_000_000
Text = Annotated[str, AfterValidator(lambda text: plain_text(text, MAX_NAME))]
Count = Annotated[int, Field(strict=True, ge=0, le=MOST_SAMPLES)]
Number = Annotated[float, Field(strict=True, allow_inf_nan=False)]


@dataclass(frozen=True)
class Watched:
    """What a silo reports about its model in use.

    Attributes:
        at: when the silo looked; model: the first digits of its arrays' hash.
        samples, labelled: new samples; 0: too few, nothing is reported about them.
        psi: column → population stability index, in two decimals.
        drifted: columns of ``psi`` that have drifted.
        metric, value, before: the deciding metric, now and when the model was taken into use;
            empty and None if the silo does not share it.
        worse: whether it is worse; None if that cannot be said.
    """

    at: Text
    model: Text
    samples: Count
    labelled: Count
    psi: Annotated[Mapping[Text, Number], Field(max_length=MOST_COLUMNS)]
    drifted: Annotated[tuple[Text, ...], Field(max_length=MOST_COLUMNS)]
    metric: str
    value: Number | None
    before: Number | None
    worse: Annotated[bool, Field(strict=True)] | None


def _consistent(watched: Watched) -> Watched:
    if not {*watched.drifted} <= watched.psi.keys():
        raise ValueError("it has a verdict without a figure")
    if watched.metric not in ("", *KNOWN_METRICS):
        raise ValueError("its metric is unknown")
    return watched


_WATCHED = TypeAdapter[Watched](Annotated[Watched, AfterValidator(_consistent)])


def add_watched(content: RecordDict, watched: Watched) -> None:
    """Add it to the answer to ``query.statistics``."""
    record = content[CONFIG]
    assert isinstance(record, ConfigRecord)
    record[ENTRY] = _WATCHED.dump_json(watched).decode()


def decode_watched(content: RecordDict) -> dict[str, Any] | None:
    """Read and check what ``add_watched`` added, as JSON values; None if there is nothing.

    Raises:
        WireError: a field is missing, of the wrong kind, or impossible.
    """
    record = content.get(CONFIG)
    if not isinstance(record, ConfigRecord) or ENTRY not in record:
        return None
    found = checked_answer(content, ENTRY, _WATCHED, "its answer about the model in use")
    plain: dict[str, Any] = _WATCHED.dump_python(found, mode="json")
    return plain


def watched_of(plain: Any) -> Watched:
    """Return what ``decode_watched`` returned as JSON values.

    Raises:
        ValueError: it is something else, or impossible.
    """
    return _WATCHED.validate_python(plain)
