"""Shares: each silo's part of every class, and the cut that turns shares into indices.

Each kind of split has a function that returns shares (silos, C) or (silos, 1) from the samples per
class (C,) and the number of silos. For definitions and sources see ``coterie.tasks.splits``.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from math import isfinite

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.tasks.base import TaskError

Indices = NDArray[np.int64]
Matrix = NDArray[np.float64]

MIN_ALPHA = 1e-4  # below it a draw is one silo in any case, and numpy's sampler loses its footing
MAX_TRIES = 200  # a Dirichlet split that leaves a silo too little is drawn again, not for ever


def cut(labels: ArrayLike, shares: Matrix, *, rng: np.random.Generator) -> list[Indices]:
    """Return each silo's share of every class, as sorted, disjoint and possibly empty indices.

    A silo gets its exact share of a class rounded down or up, as random samples; together the silos
    never get more than there are.

    Args:
        labels: (n,) integers in [0, C).
        shares: (silos, C), or (silos, 1) to ignore the labels. Entries ≥ 0; each column sums to at
            most 1, and the rest of a class is left out.
    """
    y = np.asarray(labels)
    parts: list[list[Indices]] = [[] for _ in range(len(shares))]
    for column in range(shares.shape[1]):
        members = np.arange(len(y)) if shares.shape[1] == 1 else np.flatnonzero(y == column)
        members = rng.permutation(members)
        for silo, (start, end) in enumerate(pairwise(ends(shares[:, column], len(members)))):
            parts[silo].append(members[start:end])
    return [np.sort(np.concatenate(part)) for part in parts]


def ends(shares: Matrix, count: int) -> Indices:
    """Return boundaries 0 ≤ e₀ ≤ … ≤ count; rounding the running sum keeps pieces within 1."""
    running = np.concatenate([[0.0], np.cumsum(shares)]) * count
    return np.minimum(np.floor(running + 0.5 + 1e-9), count).astype(np.int64)


def checked_labels(labels: ArrayLike, silos: int) -> Indices:
    """Return labels as int64 (n,); raise ``TaskError`` if they or ``silos`` are invalid."""
    y = np.asarray(labels)
    if y.ndim != 1 or y.dtype.kind not in "iu":
        raise TaskError(f"labels must be integers of shape (n,). Got {y.dtype} {y.shape}.")
    if silos < 1 or silos > len(y):
        raise TaskError(f"silos must be in [1, {len(y)}], the number of samples. Got {silos}.")
    if y.min() < 0:
        raise TaskError(f"labels must be at least 0. Got {y.min()}.")
    return y.astype(np.int64, copy=False)


def count_classes(labels: Indices, num_classes: int | None = None) -> Indices:
    """Return samples per class, shape (C,) with C ≥ ``num_classes``."""
    return np.bincount(labels, minlength=num_classes or 0).astype(np.int64)


def iid_shares(silos: int) -> Matrix:
    """Give equal shares of random samples."""
    return np.full((silos, 1), 1.0 / silos)


def sizes_shares(wanted: Sequence[int], available: int) -> Matrix:
    """Give silo i ``wanted[i]`` random samples (FedCollab: 10 × 2500 and 10 × 340)."""
    if min(wanted) < 1 or sum(wanted) > available:
        raise TaskError(
            f"sizes must each be at least 1 and together at most the {available} samples "
            f"available. Got {sum(wanted)} in all, the smallest {min(wanted)}."
        )
    return np.asarray(wanted, dtype=np.float64)[:, None] / available


def half_normal_shares(
    counts: Indices, silos: int, *, min_samples: int, rng: np.random.Generator
) -> Matrix:
    """Give ``min_samples`` each, the rest in proportion to |N(0, 1)| (HCCT section 7.1, FMNIST)."""
    available = int(counts.sum())
    if min_samples < 0 or silos * min_samples > available:
        raise TaskError(
            f"min-samples must be in [0, {available // silos}] for {silos} silos and {available} "
            f"samples. Got {min_samples}."
        )
    floor = min_samples / available
    draw = np.abs(rng.standard_normal(silos))
    shares: Matrix = floor + (1.0 - silos * floor) * draw / draw.sum()
    return shares[:, None]


def dirichlet_shares(
    counts: Indices, silos: int, *, alpha: float, min_samples: int, rng: np.random.Generator
) -> Matrix:
    """Divide each class over the silos by a draw of Dirichlet(α) (FedGenP, after FedGen).

    As in FedGen's generator, a silo that already holds an even share of all samples gets none of
    the following classes, and a draw that leaves a silo below ``min_samples`` is repeated. Small α
    is heterogeneous.
    """
    if not (isfinite(alpha) and alpha >= MIN_ALPHA):
        raise TaskError(
            f"dirichlet-alpha must be a finite number of at least {MIN_ALPHA}. Got {alpha}."
        )
    for _ in range(MAX_TRIES):
        shares = _draw_dirichlet(counts, silos, alpha, rng)
        if _rounded(shares, counts).sum(axis=1).min() >= min_samples:
            return shares
    raise TaskError(
        f"no Dirichlet split with alpha {alpha} gave each of {silos} silos at least "
        f"{min_samples} samples in {MAX_TRIES} tries. Use fewer silos, a larger alpha, or a "
        "smaller min-samples."
    )


def _draw_dirichlet(counts: Indices, silos: int, alpha: float, rng: np.random.Generator) -> Matrix:
    """Draw once. A silo with its even share is full, as in FedGen's generator."""
    shares = np.zeros((silos, len(counts)))
    held = np.zeros(silos)
    even = counts.sum() / silos
    for column, count in enumerate(counts):
        open_silos = held < even
        draw = np.where(open_silos, rng.dirichlet(np.full(silos, alpha)), 0.0)
        if draw.sum() <= 0.0:  # a tiny α put everything on silos that are full already
            draw = open_silos.astype(np.float64) if open_silos.any() else np.ones(silos)
        shares[:, column] = draw / draw.sum()
        held += shares[:, column] * count
    return shares


def _rounded(shares: Matrix, counts: Indices) -> Indices:
    """Return the number of samples that ``cut`` gives, shape (silos, C)."""
    return np.stack([np.diff(ends(shares[:, c], int(n))) for c, n in enumerate(counts)], axis=1)


def classes_per_silo_shares(
    counts: Indices, silos: int, *, classes: int, rng: np.random.Generator
) -> Matrix:
    """Give every silo ``classes`` different classes, each divided evenly among its holders.

    The classes' numbers of holders differ by at most one; classes without samples are not dealt.
    """
    present = np.flatnonzero(counts)
    if not 1 <= classes <= len(present):
        raise TaskError(f"classes per silo must be in [1, {len(present)}]. Got {classes}.")
    holds = np.zeros((silos, len(counts)))
    for silo in range(silos):
        # the least dealt classes first, ties at random: holders of two classes differ by ≤ 1
        order = np.lexsort((rng.random(len(present)), holds[:, present].sum(axis=0)))
        holds[silo, present[order[:classes]]] = 1.0
    return _per_column(holds)


def _per_column(weights: Matrix) -> Matrix:
    """Divide each column by its sum; an empty one stays empty."""
    sums = weights.sum(axis=0)
    shares: Matrix = weights / np.where(sums > 0, sums, 1.0)
    return shares


def one_class_shards_shares(
    counts: Indices, silos: int, *, shards: int, rng: np.random.Generator
) -> Matrix:
    """Deal shards of one class each at random, in half-normal numbers (HCCT, CIFAR-10).

    A class has shards in proportion to its samples. Every silo gets at least one shard; the others
    are dealt in proportion to |N(0, 1)|.
    """
    present = int((counts > 0).sum())
    if shards < max(silos, present):
        raise TaskError(
            f"shards must be at least {max(silos, present)}: one for each of {silos} silos and "
            f"{present} classes. Got {shards}."
        )
    if shards > counts.sum():
        raise TaskError(f"{shards} shards cannot be made from {counts.sum()} samples.")
    per_class = _apportion(counts / counts.sum(), shards, at_least=(counts > 0).astype(np.int64))
    draw = np.abs(rng.standard_normal(silos))
    per_silo = _apportion(draw / draw.sum(), shards, at_least=np.ones(silos, dtype=np.int64))
    shard_class = rng.permutation(np.repeat(np.arange(len(counts)), per_class))
    held = np.zeros((silos, len(counts)))
    np.add.at(held, (np.repeat(np.arange(silos), per_silo), shard_class), 1.0)
    return _per_column(held)  # every shard is dealt, so a column's sum is its shards


def _apportion(shares: Matrix, total: int, *, at_least: Indices) -> Indices:
    """Return integers that sum to ``total``, by the largest remainder above ``at_least``."""
    exact = shares * (total - at_least.sum())
    whole = np.floor(exact).astype(np.int64)
    missing = total - int(at_least.sum() + whole.sum())
    whole[np.argsort(whole - exact, kind="stable")[:missing]] += 1
    total_each: Indices = at_least + whole
    return total_each


def power_law_shares(
    counts: Indices,
    silos: int,
    *,
    classes: int,
    base: int,
    sigma: float,
    rng: np.random.Generator,
) -> Matrix:
    """Give silo u classes u, u+1, … mod C, with sizes by a power law (FedGroup, MNIST).

    A silo gets ``base`` samples of each of its classes; the rest of a class is divided by shares
    drawn from lognormal(0, σ).
    """
    num_classes = len(counts)
    if not 1 <= classes <= num_classes:
        raise TaskError(f"classes per silo must be in [1, {num_classes}]. Got {classes}.")
    if base < 0 or not (isfinite(sigma) and sigma >= 0):
        raise TaskError(f"base and sigma must be at least 0. Got {base} and {sigma}.")
    rows = np.repeat(np.arange(silos), classes)
    columns = (rows + np.tile(np.arange(classes), silos)) % num_classes
    holders = np.bincount(columns, minlength=num_classes)
    if (base * holders > counts).any():
        worst = int(np.argmax(base * holders - counts))
        raise TaskError(
            f"class {worst} has {counts[worst]} samples, too few for {base} in each of the "
            f"{holders[worst]} silos that have it. Use fewer silos or a smaller base."
        )
    draw = np.zeros((silos, num_classes))
    draw[rows, columns] = rng.lognormal(0.0, sigma, size=len(rows))
    floor = np.zeros_like(draw)
    floor[rows, columns] = base
    rest = (counts - base * holders) * _per_column(draw)
    shares: Matrix = (floor + rest) / np.maximum(counts, 1)
    return shares


def label_groups_shares(
    counts: Indices, silos: int, *, groups: Sequence[Sequence[int]], own_share: float
) -> Matrix:
    """Give each group of silos its own set of labels (FedCollab, FashionMNIST).

    Silo i is in group ``i · len(groups) // silos``. ``own_share`` is the part used of a label that
    only one group has; other labels are used fully. With the paper's four groups of five silos,
    ``own_share=0.25`` and FashionMNIST's 6,000 samples per class, a silo gets 300 of the label that
    only its group has and 600 of each other label.
    """
    num_classes = len(counts)
    named = [label for group in groups for label in group]
    if not named or min(named) < 0 or max(named) >= num_classes:
        raise TaskError(f"groups must name labels in [0, {num_classes - 1}]. Got {named}.")
    if any(not group or len(set(group)) != len(group) for group in groups):
        raise TaskError("every group must name at least one label, and none of them twice.")
    if len(groups) > silos:
        raise TaskError(f"there are {len(groups)} groups for {silos} silos. Use more silos.")
    if not 0 < own_share <= 1:
        raise TaskError(f"own-share must be in (0, 1]. Got {own_share}.")
    holds = np.zeros((silos, num_classes))
    for silo in range(silos):
        holds[silo, list(groups[silo * len(groups) // silos])] = 1.0
    num_groups = np.bincount(np.asarray(named), minlength=num_classes)
    used = np.where(num_groups == 1, own_share, 1.0)
    shares: Matrix = _per_column(holds) * used
    return shares


def shrink(shares: Matrix, small_from: int, small_share: float) -> Matrix:
    """Reduce the rows from ``small_from`` on to ``small_share`` of themselves (14 of 2,100)."""
    if small_from < 0 or not 0 < small_share <= 1:
        raise TaskError(
            "small-from must be at least 0 and small-share in (0, 1]. "
            f"Got {small_from} and {small_share}."
        )
    small = np.arange(len(shares)) >= small_from
    return np.where(small[:, None], shares * small_share, shares)


def three_silos_shares(counts: Indices, *, rng: np.random.Generator) -> tuple[Matrix, Matrix]:
    """Return training and test shares of HCCT's motivating example (section 3.2, Table 2).

    Silos 0 and 1 have 20% and 80% of a random half of the classes, silo 2 all of the other half. In
    the test part, silos 0 and 1 have 50% each.
    """
    num_classes = len(counts)
    if num_classes < 2:
        raise TaskError(f"three-silos needs at least two classes. Got {num_classes}.")
    first = rng.permutation(num_classes)[: num_classes // 2]
    train = np.zeros((3, num_classes))
    train[2] = 1.0
    train[:, first] = np.array([[0.2], [0.8], [0.0]])
    test = train.copy()
    test[:, first] = np.array([[0.5], [0.5], [0.0]])
    return train, test
