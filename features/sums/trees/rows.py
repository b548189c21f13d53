"""A silo's rows as trees need them."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.client.work.data import Data, Held
from coterie.client.work.session import Session
from coterie.features.sums.spells import spells_of
from coterie.features.sums.trees.histograms import Rows, of_classes, of_labels, of_numbers
from coterie.features.sums.trees.survival import of_survival
from coterie.tasks.problems import Classes, Numbers, Survival

ANY = 0
"""Smallest count of rows: of what does not leave, none."""


def rows_of(session: Session, data: Data, least: int) -> Rows:
    """Return training rows; ``least`` counts persons where they are known.

    Of survival, events count as in regressions (``spells_of``).
    """
    part = data.train
    assert isinstance(part, Held), "a table is held as a whole"
    most = 1 if part.persons is None else int(np.unique(part.persons, return_counts=True)[1].max())
    targets, problem = part.y.cpu().double().numpy(), session.task.problem
    if isinstance(problem, Classes):
        classes = targets.astype(np.intp)
        if problem.num_classes == 2:
            targets, derivatives = classes[:, None].astype(np.float64), of_labels
        else:
            targets, derivatives = np.eye(problem.num_classes)[classes], of_classes
    elif isinstance(problem, Survival):
        spells = spells_of(targets[:, 0], targets[:, 1], part.persons, least)
        targets[spells.order, 1], derivatives = spells.event, of_survival
    else:
        derivatives = of_numbers if isinstance(problem, Numbers) else of_labels
    x: NDArray[np.float32] = part.x.cpu().numpy()
    return Rows(x, targets, derivatives, least * most)
