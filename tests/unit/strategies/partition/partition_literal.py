"""The papers' formulas written out word by word, slow and P-dimensional: what ours must equal."""

from __future__ import annotations

import itertools

import numpy as np


def cosine(a, b):
    norms = np.linalg.norm(a) * np.linalg.norm(b)
    return float(a @ b / norms) if norms > 0 else 0.0


def mean_update(updates, sizes, group):
    """HCCT eq. 13."""
    total = sum(sizes[i] for i in group)
    return sum(sizes[i] / total * updates[i] for i in group)


def silo_utility(updates, sizes, alpha, i, group):
    """HCCT eqs. 8-9 without beta; alpha is one number per silo."""
    similarity = cosine(updates[i], mean_update(updates, sizes, group))
    return -alpha[i] / sum(sizes[j] for j in group) + similarity


def group_utility(updates, sizes, alpha, group):
    """HCCT eq. 14."""
    return sum(silo_utility(updates, sizes, alpha, i, group) for i in group)


def benefit(updates, sizes, alpha, a, b):
    """HCCT eq. 15."""
    return (
        group_utility(updates, sizes, alpha, a + b)
        - group_utility(updates, sizes, alpha, a)
        - group_utility(updates, sizes, alpha, b)
    )


def client_partition(updates, sizes, alpha):
    """HCCT Algorithm 2, eqs. 12-17, testing before merging."""
    groups = [[i] for i in range(len(sizes))]
    while len(groups) > 1:
        best, best_pair = -np.inf, None
        for k1 in range(len(groups)):
            for k2 in range(k1 + 1, len(groups)):
                gain = benefit(updates, sizes, alpha, groups[k1], groups[k2])
                if gain > best:
                    best, best_pair = gain, (k1, k2)
        if best <= 1e-12:
            break
        k1, k2 = best_pair
        groups[k1] = groups[k1] + groups[k2]
        del groups[k2]
    return sorted(sorted(group) for group in groups)


def fedcollab_bound(distances, sizes, groups, c):
    """FedCollab's L with the matrix A of collaboration weights, as on the poster."""
    n, m = len(sizes), sum(sizes)
    beta = [size / m for size in sizes]
    weights = np.zeros((n, n))
    for group in groups:
        for i, j in itertools.product(group, group):
            weights[i, j] = beta[j] / sum(beta[member] for member in group)
    total = 0.0
    for i in range(n):
        quantity = np.sqrt(sum(weights[i, j] ** 2 / beta[j] for j in range(n)))
        total += c / np.sqrt(m) * quantity
        total += sum(weights[i, j] * distances[i, j] for j in range(n))
    return total


def set_partitions(items):
    """All partitions of a list."""
    if not items:
        yield []
        return
    first, rest = items[0], items[1:]
    for partition in set_partitions(rest):
        yield [[first], *partition]
        for k, group in enumerate(partition):
            yield [*partition[:k], [first, *group], *partition[k + 1 :]]


def madc(updates):
    """FedGroup eq. 7, three loops."""
    n = len(updates)
    result = np.zeros((n, n))
    for i in range(n):
        for j in range(n):
            if i == j:
                continue
            for z in range(n):
                if z not in (i, j):
                    difference = cosine(updates[i], updates[z]) - cosine(updates[j], updates[z])
                    result[i, j] += abs(difference) / (n - 2)
    return result


def edc_embedding(updates, num_directions):
    """FedGroup eq. 8: cosines with the left singular vectors of the P x n matrix of updates."""
    directions, _, _ = np.linalg.svd(np.asarray(updates).T, full_matrices=False)
    return np.array([[cosine(u, directions[:, k]) for k in range(num_directions)] for u in updates])


def assignment(directions, update):
    """FedGroup eq. 9."""
    values = [(-cosine(direction, update) + 1) / 2 for direction in directions]
    return values.index(min(values))
