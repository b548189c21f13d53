"""Cutting one data set into the shares of many silos, as the papers' experiments do.

A split is a matrix of shares: row i is silo i, column c a class (one column: classes do not
matter), and an entry is the part of that class's samples which the silo gets. A kind of split is a
way to draw that matrix; ``cut`` turns any of them into disjoint index arrays. The training and
the test part of a data set are cut by the same matrix, so a silo is tested on its own distribution.

Everything is numpy and seeded: every silo process can compute its own share of a common folder,
and all of them agree on it without talking.

Sources: HCCT (section 3.2, section 7.1), FedGroup (section V; the generator of FedProx), FedCollab
(section "Setup"; numbers from its published settings), FedGenP (Table 2; the Dirichlet split of
FedGen, after Hsu, Qi, Brown 2019).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike

from coterie.tasks.splits.config import COMMON_KEYS, KINDS, Share, make_split
from coterie.tasks.splits.shares import (
    Indices,
    by_domain_shares,
    checked_labels,
    classes_per_silo_shares,
    count_classes,
    cut,
    dirichlet_shares,
    half_normal_shares,
    iid_shares,
    label_groups_shares,
    one_class_shards_shares,
    power_law_shares,
    shrink,
    silos_of_domains,
    sizes_shares,
    three_silos_shares,
)
from coterie.tasks.splits.shifts import permutation, rotate

__all__ = [
    "COMMON_KEYS",
    "KINDS",
    "Share",
    "make_split",
    "cut",
    "iid",
    "sizes",
    "half_normal",
    "dirichlet",
    "classes_per_silo",
    "one_class_shards",
    "power_law",
    "label_groups",
    "three_silos",
    "by_domain",
    "silos_of_domains",
    "rotate",
    "permutation",
]


def iid(
    labels: ArrayLike, *, silos: int, rng: np.random.Generator, units: ArrayLike | None = None
) -> list[Indices]:
    """Equal sizes, samples at random. Arguments as in ``cut``."""
    y = checked_labels(labels, silos)
    return cut(y, iid_shares(silos), rng=rng, units=units)


def sizes(labels: ArrayLike, *, sizes: Sequence[int], rng: np.random.Generator) -> list[Indices]:
    """Silo i gets ``sizes[i]`` samples at random (FedCollab: 10 × 2500 and 10 × 340).

    Raises:
        TaskError: a size below 1, or more samples in all than there are.
    """
    y = checked_labels(labels, len(sizes))
    return cut(y, sizes_shares(sizes, len(y)), rng=rng)


def half_normal(
    labels: ArrayLike, *, silos: int, rng: np.random.Generator, min_samples: int = 1
) -> list[Indices]:
    """IID samples, sizes in proportion to |N(0, 1)| (HCCT section 7.1, FMNIST)."""
    y = checked_labels(labels, silos)
    shares = half_normal_shares(silos, len(y), min_samples=min_samples, rng=rng)
    return cut(y, shares, rng=rng)


def dirichlet(
    labels: ArrayLike,
    *,
    silos: int,
    alpha: float,
    rng: np.random.Generator,
    min_samples: int = 1,
) -> list[Indices]:
    """Each class is divided over the silos by a draw of Dirichlet(α) (FedGenP, after FedGen).

    As in FedGen's generator, a silo that already holds an even share of all samples gets none of
    the classes that follow, and a draw that leaves a silo below ``min_samples`` is repeated.

    Args:
        alpha: concentration, > 0; small is heterogeneous.

    Raises:
        TaskError: α is not a positive number, or no draw gave every silo enough.
    """
    y = checked_labels(labels, silos)
    shares = dirichlet_shares(
        count_classes(y), silos, alpha=alpha, min_samples=min_samples, rng=rng
    )
    return cut(y, shares, rng=rng)


def classes_per_silo(
    labels: ArrayLike, *, silos: int, classes: int, rng: np.random.Generator
) -> list[Indices]:
    """Every silo holds ``classes`` different classes; a class is shared evenly by its holders.

    Classes are dealt so that the numbers of their holders differ by at most one.

    Raises:
        TaskError: more classes per silo than there are classes.
    """
    y = checked_labels(labels, silos)
    return cut(
        y, classes_per_silo_shares(count_classes(y), silos, classes=classes, rng=rng), rng=rng
    )


def one_class_shards(
    labels: ArrayLike, *, silos: int, rng: np.random.Generator, shards: int = 100
) -> list[Indices]:
    """Shards of one class each, dealt at random in half-normal numbers (HCCT, CIFAR-10).

    The classes have shards in proportion to their samples. Every silo gets at least one shard;
    the others are dealt in proportion to |N(0, 1)|.

    Raises:
        TaskError: fewer shards than silos or than classes.
    """
    y = checked_labels(labels, silos)
    return cut(y, one_class_shards_shares(count_classes(y), silos, shards=shards, rng=rng), rng=rng)


def power_law(
    labels: ArrayLike,
    *,
    silos: int,
    rng: np.random.Generator,
    classes: int = 2,
    base: int = 5,
    sigma: float = 2.0,
) -> list[Indices]:
    """Silo u holds classes u, u+1, … mod C, with sizes by a power law (FedGroup, MNIST).

    Of each of its classes a silo gets ``base`` samples; what then remains of the class is divided
    by shares drawn from lognormal(0, σ).

    Raises:
        TaskError: a class has too few samples for ``base`` in each silo.
    """
    y = checked_labels(labels, silos)
    shares = power_law_shares(
        count_classes(y), silos, classes=classes, base=base, sigma=sigma, rng=rng
    )
    return cut(y, shares, rng=rng)


def label_groups(
    labels: ArrayLike,
    *,
    silos: int,
    groups: Sequence[Sequence[int]],
    rng: np.random.Generator,
    own_share: float = 0.25,
    small_from: int | None = None,
    small_share: float = 1.0,
) -> list[Indices]:
    """Groups of silos, each with its own set of labels (FedCollab, FashionMNIST).

    With the paper's four groups of five silos, ``own_share=0.25`` and FashionMNIST's 6,000
    samples per class, a silo gets 300 of the label that only its group has and 600 of each other.

    Args:
        groups: the labels of each group. Silo i is in group ``i · len(groups) // silos``.
        own_share: the part that is used of a label that one group alone holds; other labels are
            used up.
        small_from: silos from this number on are small. None: there are no small ones.
        small_share: the part of a large silo's samples that a small one gets (14 of 2,100).

    Raises:
        TaskError: a label that does not exist, more groups than silos, a share outside (0, 1].
    """
    y = checked_labels(labels, silos)
    large = label_groups_shares(count_classes(y), silos, groups=groups, own_share=own_share)
    return cut(y, shrink(large, small_from, small_share), rng=rng)


def three_silos(labels: ArrayLike, *, rng: np.random.Generator) -> list[Indices]:
    """HCCT's motivating example (section 3.2, Table 2).

    Silos 0 and 1 have 20 % and 80 % of half of the classes, silo 2 all of the other half. Which
    classes these are is random.
    """
    y = checked_labels(labels, 3)
    return cut(y, three_silos_shares(count_classes(y), rng=rng)[0], rng=rng)


def by_domain(
    domains: ArrayLike, *, silos: int, rng: np.random.Generator, units: ArrayLike | None = None
) -> list[Indices]:
    """Every silo has samples of one domain (HCCT, Digit: ten silos, two for each domain).

    Args:
        domains: shape (n,), the number of each sample's domain in [0, D).
        silos: at least D. The first silos have domain 0, and so on.
        units: as in ``cut``.
    """
    d = checked_labels(domains, silos)
    return cut(d, by_domain_shares(count_classes(d), silos), rng=rng, units=units)
