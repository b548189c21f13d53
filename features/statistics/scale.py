"""One scale for the numbers of all silos, computed before round 1 from those that consent.

A silo shares for each column the count, the mean, and the sum of squared deviations; these three
add up over silos exactly (Chan, Golub, LeVeque, "Algorithms for computing the sample variance", The
American Statistician 37, 1983, eq. 2.1).
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Message, MetricRecord, RecordDict
from numpy.typing import NDArray

from coterie import wire
from coterie.engine.port import Engine
from coterie.strategies.errors import FederationError
from coterie.strategies.rounds.exchange import exchange
from coterie.strategies.rounds.members import minimums_of, staying
from coterie.strategies.rounds.roster import Silo

log = logging.getLogger("coterie.run")

LARGEST = 1e100
"""Largest absolute mean that is accepted, as for numbers of a table."""
ROUNDING = 1e-12
"""Ratio of deviation to mean below which a column counts as constant."""

Sums = NDArray[np.float64]
"""(columns, 3) Count, mean and sum of squared deviations."""


def ask_for_scale(
    engine: Engine, silos: Sequence[Silo], config: Mapping[str, Any], *, deadline_s: float
) -> list[float]:
    """Return mean and deviation of each column in turn; empty if the silos' task needs none.

    ``config`` describes the run to the silos, which have ``deadline_s`` seconds to answer. Raises
    ``FederationError`` if no silo shares enough of some column.
    """
    columns = silos[0].pooled_columns
    if not columns:
        return []
    messages = [
        Message(
            RecordDict({wire.CONFIG: ConfigRecord({**config, wire.PROTOCOL_KEY: silo.protocol})}),
            dst_node_id=silo.node_id,
            message_type=wire.COLUMN_SUMS,
            group_id="0",
        )
        for silo in silos
    ]
    replies = exchange(engine, messages, deadline_s=deadline_s)
    sums: dict[str, Sums] = {}
    silent: list[str] = []
    for silo, reply in zip(silos, replies, strict=True):
        try:
            sums[silo.name] = read_sums(reply, columns, most=silo.num_examples)
        except wire.WireError as error:
            silent.append(f"{silo.name}: {error}")
    for reason in silent:
        log.info("its columns are not part of the run's scale: %s", reason)
    return combine(sums, columns, minimums=minimums_of(silos), silent=silent)


def read_sums(reply: Message | None, columns: int, *, most: int) -> Sums:
    """Return a silo's sums of its columns.

    Raises ``WireError`` if they are missing or impossible.
    """
    metrics = wire.content_of(reply).get(wire.METRICS)
    keys = (wire.COLUMN_COUNTS, wire.COLUMN_MEANS, wire.COLUMN_SQUARES)
    try:
        if not isinstance(metrics, MetricRecord):
            raise TypeError
        sums = np.array([metrics[key] for key in keys], dtype=np.float64).T
        counts, means, squares = sums.reshape(columns, 3).T
    except (KeyError, TypeError, ValueError, OverflowError):
        raise wire.WireError(f"it must send three numbers for each of {columns} columns.") from None
    odd = (counts < 0) | (counts > most) | (np.abs(means) > LARGEST) | (squares < 0)
    if not np.isfinite(sums).all() or odd.any():
        raise wire.WireError("it sent invalid column statistics.")
    return sums


def combine(
    sums: Mapping[str, Sums],
    columns: int,
    *,
    minimums: Mapping[str, int],
    silent: Sequence[str] = (),
) -> list[float]:
    """Return mean and deviation of each column over the silos, in turn.

    Args:
        sums: silo → its sums; a count of 0 means that the column is not shared.
        minimums: silo → smallest number of silos in a sum with its numbers.
        silent: why others share nothing, for the error.

    Raises:
        FederationError: no silo shares enough of some column.
    """
    scale: list[float] = []
    for column in range(columns):
        sharing = [name for name in sorted(sums) if sums[name][column, 0] > 0]
        own = np.array([sums[name][column] for name in staying(sharing, minimums)]).reshape(-1, 3)
        counts, means, squares = own.T
        if not len(own):
            raise FederationError(
                'the task has scale = "federation", but no silo shares the sums of numeric '
                f"column {column + 1}. At least one silo must allow it (`column_sums = true` in "
                "silo.toml, or --share-column-sums) and have at least column_sums_from "
                f"numbers; min_group_size applies here as well. {' '.join(silent)}".rstrip()
            )
        mean = float((counts * means).sum() / counts.sum())
        total = float((squares + counts * (means - mean) ** 2).sum())
        deviation = float(np.sqrt(total / counts.sum()))
        scale += [mean, deviation if deviation > ROUNDING * abs(mean) else 1.0]
    return scale
