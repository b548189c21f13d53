"""Validation shared by the public functions of this package; the numerical cores have none."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

FloatArray: TypeAlias = NDArray[np.float64]
Groups: TypeAlias = list[list[int]]

# Matrices that should be symmetric may differ this much, relative to their largest entry: enough
# for one computed in float32, far too little for one whose sides were swapped.
_SYMMETRY = 1e-3


def fail(name: str, must: str, got: object) -> ValueError:
    """Return an error in this package's one form: ``name must be ... Got ...``."""
    return ValueError(f"{name} must be {must}. Got {got}.")


def integer(name: str, value: Any, *, low: int, high: int) -> int:
    """Return `value` as an int in [low, high]."""
    whole = isinstance(value, (int, np.integer)) and not isinstance(value, (bool, np.bool_))
    if not whole or not low <= value <= high:
        raise fail(name, f"in [{low}, {high}]", repr(value))
    return int(value)


def number(name: str, value: Any, *, low: float = 0.0, above: bool = False) -> float:
    """Return `value` as a finite float that is >= `low`, or > `low` where `above`."""
    result = float(value)
    if not math.isfinite(result) or result < low or (above and result == low):
        raise fail(name, f"finite and {'>' if above else '>='} {low:g}", repr(value))
    return result


def square(name: str, matrix: Any) -> FloatArray:
    """Return a symmetric float64 copy of a finite, square, (nearly) symmetric matrix, N >= 1."""
    result = np.array(matrix, dtype=np.float64)
    if result.ndim != 2 or result.shape[0] != result.shape[1] or result.shape[0] == 0:
        raise fail(name, "a square matrix of at least one silo", f"shape {result.shape}")
    if not np.isfinite(result).all():
        row, column = np.argwhere(~np.isfinite(result))[0]
        raise fail(name, "finite", f"{result[row, column]} for silos {row} and {column}")
    if np.abs(result - result.T).max() > _SYMMETRY * np.abs(result).max():
        raise fail(name, "symmetric", f"a difference of {np.abs(result - result.T).max():.3g}")
    return np.asarray(0.5 * (result + result.T), dtype=np.float64)


def gram(matrix: Any) -> FloatArray:
    """Return a checked copy of a Gram matrix: square, finite, no negative squared norm."""
    result = square("gram", matrix)
    if (result.diagonal() < 0).any():
        silo = int(np.argmin(result.diagonal()))
        raise fail("gram", "non-negative on its diagonal", f"{result[silo, silo]} for silo {silo}")
    return result


def distances(matrix: Any) -> FloatArray:
    """Return checked pairwise distances clipped to [0, 1]: symmetric, zero on the diagonal."""
    result = square("distances", matrix)
    if result.diagonal().any():
        silo = int(np.argmax(np.abs(result.diagonal())))
        raise fail("distances", "0 on the diagonal", f"{result[silo, silo]} for silo {silo}")
    return np.clip(result, 0.0, 1.0)


def sizes(values: Any, *, num_silos: int) -> FloatArray:
    """Return the silos' numbers of samples as float64, each finite and > 0."""
    result = np.array(values, dtype=np.float64)
    if result.shape != (num_silos,):
        raise fail("sizes", f"one number for each of {num_silos} silos", f"shape {result.shape}")
    bad = ~(np.isfinite(result) & (result > 0))
    if bad.any():
        silo = int(np.argmax(bad))
        raise fail("sizes", "finite and > 0", f"{result[silo]} for silo {silo}")
    return result


def per_silo(name: str, values: Any, *, num_silos: int) -> FloatArray:
    """Return one finite number >= 0 per silo, from one number for all or one per silo."""
    result = np.array(values, dtype=np.float64)
    if result.shape not in ((), (num_silos,)):
        must = f"one number or one for each of {num_silos} silos"
        raise fail(name, must, f"shape {result.shape}")
    if not np.isfinite(result).all() or (result < 0).any():
        raise fail(name, "finite and >= 0", values)
    return np.broadcast_to(result, (num_silos,)).copy()


def groups(values: Iterable[Sequence[int]], *, num_silos: int, cover: bool = True) -> Groups:
    """Return disjoint groups as sorted lists, ordered by first silo; `cover` demands every silo."""
    result = sorted(sorted(int(silo) for silo in group) for group in values)
    members = [silo for group in result for silo in group]
    if not all(result):
        raise fail("groups", "non-empty", result)
    if any(not 0 <= silo < num_silos for silo in members):
        raise fail("groups", f"of silos in [0, {num_silos - 1}]", result)
    if len(set(members)) != len(members) or (cover and len(members) != num_silos):
        raise fail("groups", f"a partition of {num_silos} silos", result)
    return result


def warn(message: str) -> None:
    """Warn about input that is allowed but odd."""
    warnings.warn(message, RuntimeWarning, stacklevel=3)


def warn_zero_updates(squares: FloatArray) -> None:
    """Warn about zero updates, which have no direction to compare."""
    zero = np.flatnonzero(squares == 0)
    if len(zero):
        warn(f"Zero update of silos {zero.tolist()}: cosine 0 to every other update.")


def inverse_norms(matrix: FloatArray) -> FloatArray:
    """Return (N,) inverse norms from a checked Gram matrix, 0 for a zero update."""
    squares = matrix.diagonal()
    return np.asarray(
        np.divide(1.0, np.sqrt(squares), out=np.zeros_like(squares), where=squares > 0)
    )


def cosines(matrix: FloatArray) -> FloatArray:
    """Return cosines from a checked Gram matrix: 1 on the diagonal, 0 for a zero update."""
    inverse = inverse_norms(matrix)
    result = np.clip(matrix * inverse[:, None] * inverse, -1.0, 1.0)
    np.fill_diagonal(result, np.where(inverse > 0, 1.0, 0.0))
    return np.asarray(result)


def by_label(labels: Sequence[int]) -> Groups:
    """Return groups from one label per silo, ordered by their first silo."""
    found: dict[int, list[int]] = {}
    for silo, label in enumerate(labels):
        found.setdefault(label, []).append(silo)
    return list(found.values())
