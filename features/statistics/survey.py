"""Statistics of the silos' data, requested once in a run without training, and its record.

A silo that does not consent, has another task, or does not answer is listed with the reason.
Answers are validated before use (``coterie.features.statistics.counts``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

from flwr.app import ConfigRecord, Message, RecordDict
from pydantic import Field, TypeAdapter

from coterie import wire
from coterie.engine.port import Engine
from coterie.features.statistics.counts import Checked, Statistics, decode_statistics
from coterie.strategies import stored
from coterie.strategies.errors import FederationError
from coterie.strategies.rounds.exchange import exchange
from coterie.strategies.rounds.roster import Silo

log = logging.getLogger("coterie.run")

FILE = "statistics.json"
"""File name in the run's folder."""


@dataclass(frozen=True)
class Survey:
    """The statistics of the silos of a task.

    Attributes:
        reported: silo → its statistics.
        silent: silo → why it shares none, including silos that were not admitted.
        samples: silo → number of training samples that it stated when it joined.
        models: silo → what it reports about its model in use, as JSON values.
    """

    task: str
    reported: Annotated[Mapping[str, Checked], Field(alias="told")]
    silent: Mapping[str, str] = field(default_factory=dict)
    samples: Mapping[str, int] = field(default_factory=dict)
    models: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)


def ask_for_statistics(
    engine: Engine,
    silos: Mapping[str, Silo],
    terms: Mapping[str, wire.Scalar],
    *,
    deadline_s: float,
    read_model: Callable[[RecordDict], Mapping[str, Any] | None],
) -> Survey:
    """Ask every silo that is here once.

    Args:
        terms: describe the run to the silos.
        read_model: reads and checks, in an answer, what it says of the silo's model in use.
    """
    names = sorted(silos)
    messages = [
        Message(
            RecordDict({wire.CONFIG: ConfigRecord(dict(terms))}),
            dst_node_id=silos[name].node_id,
            message_type=wire.STATISTICS,
            group_id="0",
        )
        for name in names
    ]
    answers: dict[str, Statistics] = {}
    silent, models = {}, {}
    replies = exchange(engine, messages, deadline_s=deadline_s)
    for name, reply in zip(names, replies, strict=True):
        try:
            content = wire.content_of(reply)
            found = decode_statistics(content)
            if (model := read_model(content)) is not None:
                models[name] = model
            answers[name] = found
            log.info("silo %s has shared its statistics", name)
        except wire.WireError as error:
            silent[name] = str(error)
            log.info("silo %s shares no statistics: %s", name, error)
    stated = {name: silos[name].num_examples for name in names}
    return Survey(str(terms[wire.TASK]), answers, silent, stated, models)


_SURVEY = TypeAdapter(Survey)


def write_survey(folder: Path, survey: Survey) -> None:
    """Write a survey into the run's folder, atomically."""
    stored.write(folder / FILE, _SURVEY, survey)


def read_survey(folder: Path) -> Survey:
    """Read a written survey; ``FederationError`` if there is none, or it is damaged."""
    return stored.read(folder / FILE, _SURVEY, "Run `coterie stats` again.")


def require_answers(survey: Survey) -> None:
    """Raise ``FederationError``, with the reasons, if no silo shared statistics."""
    if not survey.reported:
        reasons = " ".join(f"{name}: {why}" for name, why in sorted(survey.silent.items())[:5])
        raise FederationError(f"no silo shared statistics. {reasons}")
