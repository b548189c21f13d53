"""The silo's side: add the last look at the model in use to its statistics, if the policy allows.

Nothing is computed for the coordinator: what leaves, the silo's people have seen before.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import numpy as np
from flwr.app import RecordDict

from coterie import wire
from coterie.client.home.policy import Policy, permitted
from coterie.client.home.settings import SettingsError
from coterie.client.home.watching import SENT, Look, keep, last_look, looks_sent
from coterie.client.work.answered import Marks, difference
from coterie.client.work.request import Request
from coterie.client.work.stage import Stage
from coterie.features.watching.answer import MOST_COLUMNS, Watched, add_watched

log = logging.getLogger("coterie.silo")

DIGITS = 12
"""Digits of the model's hash that leave."""


class Watching(Stage):
    """The stage that adds the last look to the answer to ``query.statistics``."""

    name = "watching"

    def answer(self, request: Request, work: Callable[[Request], RecordDict]) -> RecordDict:
        content, settings = work(request), request.session.settings
        kind, least = wire.kind_of(request.message.metadata.message_type), settings.policy.of_model
        if not (kind.with_model and least and settings.home):
            return content
        try:
            look = look_to_send(Path(settings.home), least)
        except SettingsError as error:
            log.error("the last look at the model in use is not reported: %s", error)
            look = None
        if look is not None:
            add_watched(content, leaving(look, settings.policy))
        return content


def look_to_send(home: Path, least: int) -> Look | None:
    """Return the look that may leave.

    The difference of two looks describes the samples that changed between them. So the last one
    that was sent leaves again until ``least`` samples (or persons), or none, differ from those of
    every one.
    """
    now, sent = last_look(home), looks_sent(home)
    if now is None:
        return None
    for look in sent:
        if any(0 < difference(*own) < least for own in zip(_marks(look), _marks(now), strict=True)):
            return sent[-1]
    if now not in sent[-1:]:
        keep(home, now, f"{SENT}/{len(sent):04}.json")
    return now


def _marks(look: Look) -> tuple[Marks, Marks]:
    """Return the samples that a look's columns, and its metric, are about."""
    rows, answered = (np.array(m, np.uint64).reshape(-1, 2) for m in (look.rows, look.answered))
    return rows, answered


def leaving(look: Look, policy: Policy) -> Watched:
    """Return what leaves of a look: no figure of fewer than ``of_model`` samples, or persons."""
    persons = (len(np.unique(marks[:, 1])) for marks in _marks(look))
    samples, labelled = (
        size if min(size, whose) >= policy.of_model else 0
        for size, whose in zip((look.samples, look.labelled), persons, strict=True)
    )
    columns = look.columns[:MOST_COLUMNS] if samples else ()
    name = look.metric
    shared = bool(labelled and name and permitted({name: 0.0}, policy))
    value, before = ((own or {}).get(name, (None,))[0] for own in (look.figures, look.before))
    return Watched(
        look.at,
        look.sha256[:DIGITS],
        samples,
        labelled,
        psi={wire.plain_text(one["name"]): round(float(one["psi"]), 2) for one in columns},
        drifted=tuple(wire.plain_text(one["name"]) for one in columns if one["drifted"]),
        metric=name if shared else "",
        value=value if shared else None,
        before=before if shared else None,
        worse=look.worse if labelled else None,
    )
