"""The clustering of the cold start's updates: how many groups, which, and how well separated."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Literal

import numpy as np

from coterie import wire
from coterie.strategies.partition import fedgroup

log = logging.getLogger("coterie.run")

LOW_SEPARATION = 0.6
"""Silhouette of the MADC distances below which groups are doubtful; see ``choose_num_groups``."""
MAX_AUTO_GROUPS = 32
"""Maximum number of groups that ``num_groups="auto"`` tries."""


def clusters(
    matrix: np.ndarray,
    names: Sequence[str],
    rng: np.random.Generator,
    *,
    num_groups: int | Literal["auto"],
    measure: fedgroup.Measure,
    centres: Literal["clustered", "random"],
) -> list[list[int]]:
    """Return the groups of updates, as rows of their Gram matrix."""
    for row in np.flatnonzero(matrix.diagonal() == 0).tolist():
        log.warning("silo %s sent an all-zero update, so its group is arbitrary", names[row])
    wanted = _count(matrix, rng, num_groups, measure)
    if centres == "random":
        picked = rng.choice(len(matrix), size=wanted, replace=False)
        return [[row] for row in sorted(picked.tolist())]
    groups = fedgroup.cold_start(matrix, num_groups=wanted, measure=measure, rng=rng)
    if len(groups) < wanted:
        log.warning(
            "the updates have only %s: %s, not %d",
            wire.counted(len(groups), "different direction"),
            wire.counted(len(groups), "group"),
            wanted,
        )
    return groups


def _count(
    matrix: np.ndarray,
    rng: np.random.Generator,
    num_groups: int | Literal["auto"],
    measure: fedgroup.Measure,
) -> int:
    if num_groups != "auto":
        return num_groups
    highest = min(MAX_AUTO_GROUPS, len(matrix))
    found = fedgroup.choose_num_groups(matrix, measure=measure, rng=rng, max_groups=highest)
    log.info("num-groups: %d, by silhouettes %s", found.num_groups, found.silhouettes)
    return found.num_groups


def separation_of(matrix: np.ndarray, groups: list[list[int]]) -> float:
    with warnings_by_name():
        separation = fedgroup.silhouette(matrix, groups)
    if separation < LOW_SEPARATION:
        log.warning(
            "the groups are badly separated: silhouette %.2f, below %.1f. More cold-start-epochs "
            "or another num-groups may help.",
            separation,
            LOW_SEPARATION,
        )
    return separation


@contextmanager
def warnings_by_name() -> Iterator[None]:
    """Silence the numerics' warnings, which name rows; they are logged with silo names instead."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Zero update|Only \d+ different", RuntimeWarning)
        yield
