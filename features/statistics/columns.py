"""One scale for all silos of a run: a silo's column sums, and its data in that scale.

A task requests it (``Task.pooled_columns``); a silo's policy decides whether its sums leave
(``Policy.column_sums``). The run collects them once, before round 1; the resulting scale travels
in every message, so that newcomers and restarted silos have it too.
"""

from __future__ import annotations

import math
from dataclasses import replace
from threading import Lock

import numpy as np
from flwr.app import MetricRecord, RecordDict
from numpy.typing import NDArray

from coterie import wire
from coterie.client.work.data import Data, to_device
from coterie.client.work.session import Session, hash_of, read_unlabelled
from coterie.features.statistics.cells import round_step
from coterie.tasks.base import ColumnScale, Samples, SiloData, StreamedData, TaskError
from coterie.tasks.draws import fewest_persons

_in_scale: dict[int, tuple[Data, ColumnScale, Data, str]] = {}
"""``id`` of a silo's data → the data, the last scale, the data in that scale, and its hash."""
_loading = Lock()


def column_sums(session: Session) -> RecordDict:
    """Return count, mean and sum of squared deviations of each column, in few digits.

    A column with too few numbers, or those of too few persons, gives zeros.
    """
    found = session.task.column_sums(session.settings.options)
    enough = _persons(session, found) >= session.settings.policy.column_sums_from
    counts, means, squares = np.where(enough[:, None], in_few_digits(found[:, :3]), 0.0).T.tolist()
    metrics = {
        wire.COLUMN_COUNTS: [int(count) for count in counts],
        wire.COLUMN_MEANS: means,
        wire.COLUMN_SQUARES: squares,
    }
    return RecordDict({wire.METRICS: MetricRecord(metrics)})


def in_few_digits(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return counts, and means and squares (columns, 3) rounded to steps of a standard error.

    Smaller steps would not help to scale, but show single rows: the difference to other sums over
    nearly the same rows, such as a regression's, is the rows between. With these, one row's value
    follows to ± √n/2 deviations at best.
    """
    found = sums.copy()
    counts = np.maximum(sums[:, 0], 1)
    for row, count, deviation in zip(found, counts, np.sqrt(sums[:, 2] / counts), strict=True):
        if deviation > 0:
            of_mean, own = (round_step(deviation / math.sqrt(k * count)) for k in (1, 2))
            row[1] = round(row[1] / of_mean) * of_mean
            row[2] = count * (round(deviation / own) * own) ** 2
    return found


def _persons(session: Session, found: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return how many persons contribute to each column (columns,), or a lower bound."""
    persons, counts = session.data.train.persons, found[:, 0]
    if persons is None:
        return counts
    if found.shape[1] > 3:
        return found[:, 3]
    return np.array([fewest_persons(persons, int(count)) for count in counts], np.float64)


def in_scale(session: Session, numbers: object) -> Session:
    """Return the session with its data in a run's scale, ``wire.SCALE`` of a message.

    Data are read again if the scale is new. Raises ``ValueError`` if it does not fit these
    columns, or the data have changed or are not readable.
    """
    scale = _scale(numbers, session.task.pooled_columns)
    with _loading:
        known = _in_scale.get(id(session.data))
        if known is None or known[0] is not session.data or known[1] != scale:
            known = _in_scale[id(session.data)] = session.data, scale, *_scaled(session, scale)
    task = session.task.of_scale(scale)
    return replace(session, task=task, data=known[2], scale=scale, data_hash=known[3])


def _scaled(session: Session, scale: ColumnScale) -> tuple[Data, str]:
    task = session.task
    task.scale = scale
    try:
        if session.settings.unlabelled:
            loaded: SiloData | StreamedData | Samples = read_unlabelled(task, session.settings)
        else:
            loaded = task.load(session.settings.options)
    except TaskError as error:
        # Its text may name a file, or quote what stands in it.
        raise ValueError("can no longer read its data; see the silo's log.") from error
    finally:
        task.scale = None
    data = to_device(loaded, session.device, workers=session.settings.workers)
    if (len(data.train), len(data.test)) != (len(session.data.train), len(session.data.test)):
        raise ValueError("has different data than when it was started. Restart it.")
    return data, hash_of(loaded) if session.settings.home else ""


def _scale(numbers: object, columns: int) -> ColumnScale:
    if not isinstance(numbers, list) or len(numbers) != 2 * columns:
        raise ValueError(
            f"needs the run's mean and deviation of {columns} columns ({wire.SCALE}): its task "
            'has scale = "federation".'
        )
    pairs = np.array(numbers, dtype=np.float64).reshape(columns, 2)
    if not np.isfinite(pairs).all() or (pairs[:, 1] <= 0).any():
        raise ValueError(f"cannot scale by the run's {wire.SCALE}: it contains invalid numbers.")
    scale: ColumnScale = pairs.tolist()
    return scale
