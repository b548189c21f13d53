"""FedGroup's group cold start (EDC, MADC) and client cold start, from inner products alone.

Source: Duan et al., "FedGroup: Efficient Federated Learning via Decomposed Similarity-Based
Clustering" (2021), eqs. 5-9 and Algorithm 3. Differs from the paper in never forming the
P-dimensional singular directions (with ``G = U L U^T`` the embedding is ``U_m L_m^(1/2)``, each row
divided by its update's norm) and in `choose_num_groups`: the paper always gives m.

scikit-learn is imported by `cold_start` and its callers only.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

import numpy as np
from numpy.typing import ArrayLike

from coterie.strategies.partition import _check
from coterie.strategies.partition._check import FloatArray, Groups
from coterie.strategies.partition.clustering import k_means_of

Measure: TypeAlias = Literal["edc", "madc"]

# Updates whose cosine is above this count as one: an angle of a quarter of a degree, about what
# inner products summed in float32 blocks can tell.
_SAME = 1 - 1e-5


def edc(gram: FloatArray, num_directions: int) -> FloatArray:
    """Return the (N, m) embedding behind EDC, eq. 8: cosines with the top singular directions.

    Args:
        gram: (N, N) inner products of the updates (uncentred, as in the paper).
        num_directions: m in [1, N]; the paper takes the number of groups.

    Entry (i, j) is ``cos(u_i, v_j)`` with v_j the j-th left singular vector of the P x N matrix of
    updates, signed so that the largest entry of every column is positive. EDC(i, j) is the
    Euclidean distance of rows i and j, divided by m. Zero updates, and directions beyond the rank,
    have cosine 0.
    """
    values, vectors = np.linalg.eigh(gram)
    values, vectors = values[::-1][:num_directions], vectors[:, ::-1][:, :num_directions]
    noise = len(gram) * np.finfo(np.float64).eps * max(float(values[0]), 0.0)
    embedding = vectors * np.sqrt(np.where(values > noise, values, 0.0))
    largest = np.abs(embedding).argmax(axis=0)
    signs = np.where(embedding[largest, np.arange(num_directions)] < 0, -1.0, 1.0)
    return np.asarray(embedding * signs * _check.inverse_norms(gram)[:, None])


def madc(cosines: FloatArray) -> FloatArray:
    """Return the (N, N) MADC dissimilarities, eq. 7, of N >= 3 silos, from their cosines.

    The mean over all third silos z of ``|cos(i, z) - cos(j, z)|``. A zero update has cosine 0 to
    every other. O(N^3) time, O(N^2) memory.
    """
    num_silos = len(cosines)
    result = np.empty_like(cosines)
    for silo in range(num_silos):
        differences = np.abs(cosines - cosines[silo])
        # z = i and z = j are no third silos.
        own = differences[:, silo] + differences.diagonal()
        result[silo] = (differences.sum(axis=1) - own) / (num_silos - 2)
    np.fill_diagonal(result, 0.0)
    result = 0.5 * (result + result.T)
    return np.asarray(np.maximum(result, 0.0))


# --- group cold start -----------------------------------------------------------------------------


def cold_start(
    gram: ArrayLike, *, num_groups: int, measure: Measure = "edc", rng: np.random.Generator
) -> Groups:
    """Return the groups of Algorithm 3: sorted lists of silos, ordered by their first.

    Args:
        gram: (N, N) inner products of the pre-training updates.
        num_groups: the paper's m, in [1, N].
        measure: "edc", k-means++ on the m-dimensional embedding; or "madc", agglomerative
            clustering with complete linkage. One group and N groups need neither.
        rng: seeds k-means++; MADC is deterministic.

    Updates in one direction (cosine above 1 - 1e-5) are not separated: with fewer different
    directions than `num_groups`, that many groups are returned, with a warning. Zero updates count
    as one direction, with a warning too. Raises ValueError for a bad matrix, number or measure.
    """
    checked = _check.gram(gram)
    num_silos = len(checked)
    num_groups = _check.integer("num_groups", num_groups, low=1, high=num_silos)
    _refuse_measure(measure)
    _check.warn_zero_updates(checked.diagonal())
    representatives = _representatives(_check.cosines(checked))
    num_different = len(set(representatives))
    if num_different < num_groups:
        _check.warn(
            f"Only {num_different} different updates: {num_different} groups, not {num_groups}."
        )
    return _cluster(checked, representatives, min(num_groups, num_different), measure, rng)


def _cluster(
    gram: FloatArray,
    representatives: list[int],
    num_groups: int,
    measure: Measure,
    rng: np.random.Generator,
) -> Groups:
    if num_groups == 1:
        return [list(range(len(gram)))]
    if num_groups == len(set(representatives)):
        return _check.by_label(representatives)
    if measure == "edc":
        return k_means_of(edc(gram, num_groups), num_groups, rng)
    from sklearn.cluster import AgglomerativeClustering

    model = AgglomerativeClustering(num_groups, metric="precomputed", linkage="complete")
    return _check.by_label(model.fit_predict(madc(_check.cosines(gram))).tolist())


def _representatives(cosines: FloatArray) -> list[int]:
    """Return for each silo the first silo whose update points in the same direction."""
    zero = cosines.diagonal() == 0
    same = (cosines > _SAME) | (zero[:, None] & zero)
    result: list[int] = []
    for silo in range(len(cosines)):
        first = int(same[silo].argmax())
        result.append(result[first] if first < silo else silo)
    return result


def _refuse_measure(measure: str) -> None:
    if measure not in ("edc", "madc"):
        raise _check.fail("measure", "edc or madc", repr(measure))


# --- how well separated, and how many -------------------------------------------------------------


def silhouette(gram: ArrayLike, groups: Iterable[Sequence[int]]) -> float:
    """Return the mean silhouette of a grouping in [-1, 1]; low means badly separated.

    Distances are MADC: EDC sees groups even if there are none, see `choose_num_groups`. A silo
    alone in its group counts 0; a single group of all silos gives 0.
    """
    checked = _check.gram(gram)
    given = _check.groups(groups, num_silos=len(checked))
    if len(given) in (1, len(checked)):
        return 0.0
    return _silhouette(madc(_check.cosines(checked)), given)


def _silhouette(distances: FloatArray, groups: Groups) -> float:
    totals = np.stack([distances[:, group].sum(axis=1) for group in groups])
    counts = np.array([len(group) for group in groups], dtype=np.float64)
    scores = np.zeros(len(distances))
    for index, group in enumerate(groups):
        if len(group) == 1:
            continue
        within = totals[index, group] / (len(group) - 1)
        means = totals[:, group] / counts[:, None]
        means[index] = np.inf
        nearest = means.min(axis=0)
        larger = np.maximum(within, nearest)
        scores[group] = np.divide(
            nearest - within, larger, out=np.zeros_like(larger), where=larger > 0
        )
    return float(scores.mean())


@dataclass(frozen=True)
class GroupCount:
    """The number of groups chosen, and the MADC silhouette of every number tried."""

    num_groups: int
    silhouettes: dict[int, float]


def choose_num_groups(
    gram: ArrayLike,
    *,
    measure: Measure = "edc",
    rng: np.random.Generator,
    threshold: float = 0.6,
    max_groups: int | None = None,
) -> GroupCount:
    """Choose m by the best MADC silhouette of `cold_start` over m in [2, N - 1].

    The paper has no such choice. The smallest m of equals; 1 if none reaches `threshold`, for fewer
    than three silos, and for indistinguishable updates. `max_groups` limits the search (else N
    clusterings).

    MADC judges EDC's groups because k-means cuts the very directions of the embedding: random
    updates around one common direction, which have no groups, reach EDC silhouettes of 0.5 to 0.86
    (9 to 50 silos) but MADC silhouettes below 0.35, while three groups with cosines of 0.6 within
    and 0.4 between have 0.95 and at least 0.85.
    """
    checked = _check.gram(gram)
    _refuse_measure(measure)
    threshold = _check.number("threshold", threshold, low=-1.0)
    _check.warn_zero_updates(checked.diagonal())
    cosines = _check.cosines(checked)
    representatives = _representatives(cosines)
    highest = min(len(checked) - 1, len(set(representatives)))
    if max_groups is not None:
        highest = min(highest, _check.integer("max_groups", max_groups, low=1, high=len(checked)))
    distances = madc(cosines) if highest > 1 else cosines
    scores = {
        m: _silhouette(distances, _cluster(checked, representatives, m, measure, rng))
        for m in range(2, highest + 1)
    }
    best = max(scores, key=lambda m: scores[m], default=1)
    return GroupCount(best if scores.get(best, -1.0) >= threshold else 1, scores)


# --- client cold start ----------------------------------------------------------------------------


def direction_norms(gram: ArrayLike, groups: Iterable[Sequence[int]]) -> FloatArray:
    """Return (K,) norms of the groups' directions, the plain means of their members' updates.

    In the order given; rows of `gram` in no group are ignored.
    """
    checked = _check.gram(gram)
    given = [list(group) for group in groups]
    _check.groups(given, num_silos=len(checked), cover=False)
    means = [checked[np.ix_(group, group)].mean() for group in given]
    return np.asarray(np.sqrt(np.maximum(np.array(means), 0.0)))


def similarities(
    inner_products: ArrayLike, direction_norms: ArrayLike, update_norm: float
) -> FloatArray:
    """Return (K,) cosines of a newcomer's update with K group directions.

    Args:
        inner_products: (K,) of the newcomer's pre-training update with each direction.
        direction_norms, update_norm: (K,) norms of the directions, norm of the update.

    A zero update (with a warning) or direction has cosine 0. Raises ValueError for no group, shapes
    that differ, negative norms and values that are not finite.
    """
    inner = np.asarray(inner_products, dtype=np.float64)
    if inner.ndim != 1 or not len(inner) or not np.isfinite(inner).all():
        raise _check.fail("inner_products", "finite, one for each of K >= 1 groups", inner)
    if np.ndim(direction_norms) != 1:
        raise _check.fail("direction_norms", "one for each group", direction_norms)
    norms = _check.per_silo("direction_norms", direction_norms, num_silos=len(inner))
    update_norm = _check.number("update_norm", update_norm)
    if update_norm == 0:
        _check.warn("Zero update of a newcomer: cosine 0 to every group.")
    # One division at a time: the product of two small norms may be no number at all.
    inner = np.divide(inner, norms, out=np.zeros_like(inner), where=norms > 0)
    return np.clip(inner / update_norm if update_norm > 0 else 0 * inner, -1.0, 1.0)


def assign(cosines: FloatArray) -> int:
    """Return the index of a newcomer's group, eq. 9: the smallest ``(1 - cos) / 2``.

    Ties go to the lowest index, so a zero update gets 0. Cosines as from `similarities`.
    """
    return int(((1.0 - cosines) / 2.0).argmin())
