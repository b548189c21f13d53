"""Logging of rounds through Flower's logger, for strategies without an ``on_round``."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import numpy as np

from coterie import wire
from coterie.strategies.rounds.replies import evaluation_record, means_of
from coterie.strategies.rounds.reports import Group, RoundReport

log = logging.getLogger("flwr")
"""Flower's own logger."""
own = logging.getLogger("coterie.run")
MOST_NAMES = 12
"""Most names listed of a group; the others are counted."""


def say(report: RoundReport, *, rounds: int) -> None:
    """Log a finished round."""
    for line in lines(report, rounds=rounds):
        log.info("%s", line)


@contextmanager
def heard() -> Iterator[None]:
    """Send the strategies' own log to Flower's handlers, unless it has some."""
    if own.hasHandlers():
        yield
        return
    handlers, level = list(log.handlers), own.level
    try:
        for handler in handlers:
            own.addHandler(handler)
        own.setLevel(logging.INFO)
        yield
    finally:
        for handler in handlers:
            own.removeHandler(handler)
        own.setLevel(level)


def lines(report: RoundReport, *, rounds: int) -> Iterator[str]:
    """Yield the log lines of a round; silos left out have been logged before."""
    yield ""
    if report.final:
        yield f"[AFTER ROUND {rounds}]"
    else:
        seconds = sum(report.seconds.values())
        yield f"[ROUND {report.round}/{rounds}] {seconds:.1f} s"
        for what, names in (("joined", report.joined), ("left", report.left)):
            if names and not (what == "joined" and report.round == 1):
                yield f"\t├──> {what}: {wire.some(names, MOST_NAMES)}"
        answered = {name: silo.num_examples for name, silo in report.silos.items()}
        losses = {
            name: {"train-loss": silo.train_loss}
            for name, silo in report.silos.items()
            if np.isfinite(silo.train_loss)
        }
        means = {**means_of(report.train_metrics, answered), **means_of(losses, answered)}
        yield f"\t├──> training: {len(answered)} answered{_figures(means)}"
    if report.evaluation:
        record = evaluation_record(report.evaluation, report.metrics)
        means = {key: value for key, value in record.items() if key != "num-examples"}  # type: ignore[misc]
        which = f" (after round {report.evaluated_round})" if not report.final else ""
        yield f"\t├──> evaluation{which}: {len(report.evaluation)} answered{_figures(means)}"
    yield f"\t└──> {groups_text(report.groups)}"


def groups_text(groups: Sequence[Group]) -> str:
    """Return the groups as text, the largest first; silos alone come last."""
    several = sorted((g for g in groups if len(g) > 1), key=len, reverse=True)
    alone = [name for group in groups if len(group) == 1 for name in group]
    parts = [wire.some(group, MOST_NAMES) for group in several]
    parts += [f"alone: {wire.some(alone, MOST_NAMES)}"] if alone else []
    count = wire.counted(len(groups), "group")
    return f"{count}: {' | '.join(parts)}" if parts else "no groups"


def _figures(means: Mapping[str, object]) -> str:
    """Return the means that are numbers as text, without names that cannot be printed."""
    parts = [
        f"{key} {wire.readable(value, figures=4)}"
        for key, value in means.items()
        if isinstance(value, int | float) and key.isprintable()
    ]
    return f"; {', '.join(parts)}" if parts else ""
