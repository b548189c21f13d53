"""Arithmetic on models: named arrays in, named arrays out, nothing changed in place.

Sums are taken in float64, in the order given, so that a result depends only on its arguments.
Integer arrays are counters (BatchNorm's ``num_batches_tracked``): a mean of counters is
meaningless, so the counter of the member that trained longest is taken.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from math import nan, sqrt
from typing import Any, Literal, TypeVar, get_args, overload

import numpy as np
from numpy.typing import NDArray

from coterie import wire
from coterie.strategies.rounds.handles import (
    Arrays,
    Handle,
    Model,
    arrays_of,
    equal_arrays,
    is_seen,
    masked_mean,
)

_M = TypeVar("_M", Arrays, Model)
_T = TypeVar("_T")
_S = TypeVar("_S")

Aggregate = Literal["mean", "trimmed-mean", "median", "krum"]
"""The rule that makes a group's model from its members' models."""
AGGREGATES: tuple[Aggregate, ...] = get_args(Aggregate)
TRIMMED = 0.2
"""Share of the values that a trimmed mean drops at each end; at least one value."""


@overload
def weighted_mean(models: Sequence[Arrays], weights: Sequence[float]) -> Arrays: ...
@overload
def weighted_mean(models: Sequence[Model], weights: Sequence[float]) -> Model: ...
def weighted_mean(models: Sequence[Model], weights: Sequence[float]) -> Model:
    """Average models with the same names and shapes.

    Args:
        models: at least one.
        weights: as many, ≥ 0, not all 0.

    Returns:
        Arrays of the inputs' types. One model is returned as it is. Where some are handles, a
        handle, in whose place the engine puts a model before anybody looks into it.
    """
    if len(models) == 1:
        return models[0]
    total = float(sum(weights))
    assert total > 0 and len(models) == len(weights)
    shares = [w / total for w in weights]
    seen = [model for model in models if is_seen(model)]
    if len(seen) < len(models):
        return masked_mean(models, shares)
    return {name: _mean_array([model[name] for model in seen], shares) for name in seen[0]}


def plain_mean(models: Sequence[_M]) -> _M:
    """Return the mean with equal weights."""
    return weighted_mean(models, [1.0] * len(models))


def aggregated(models: Sequence[Model], weights: Sequence[float], how: Aggregate) -> Model:
    """Return one model of several by a rule; fewer than three are always averaged.

    ``trimmed-mean`` and ``median`` work value by value (Yin, Chen, Ramchandran, Bartlett: ICML
    2018, https://arxiv.org/abs/1803.01498, Definitions 1 and 2); ``krum`` takes one of the models
    (Blanchard, El Mhamdi, Guerraoui, Stainer: NeurIPS 2017, https://arxiv.org/abs/1703.02757,
    section 4, with f = ⌊(n − 3) / 2⌋). These three count every model equally; ``weights`` (≥ 0, not
    all 0) are for the mean. The arrays have the inputs' types.
    """
    if how == "mean" or len(models) < 3:
        return weighted_mean(models, weights)
    if how == "krum":
        return models[_krum([arrays_of(model) for model in models])]
    seen = [arrays_of(model) for model in models]
    cut = 0 if how == "median" else max(1, int(TRIMMED * len(models)))
    middle = {}
    for name, first in seen[0].items():
        arrays = [model[name] for model in seen]
        if not np.issubdtype(first.dtype, np.floating):
            middle[name] = _mean_array(arrays, weights)
            continue
        stacked = np.sort(np.stack(arrays).astype(np.float64), axis=0)
        kept = stacked[cut : len(models) - cut]
        value = np.median(stacked, axis=0) if how == "median" else kept.mean(axis=0)
        middle[name] = value.astype(first.dtype)
    return middle


def _krum(models: Sequence[Arrays]) -> int:
    """Return the index of the model whose n − f − 2 nearest others are nearest; first of ties."""
    count = len(models)
    nearest = max(count - (count - 3) // 2 - 2, 1)
    squares = np.zeros((count, count))
    for name, first in models[0].items():
        if np.issubdtype(first.dtype, np.floating):
            rows = np.stack([model[name].ravel() for model in models]).astype(np.float64)
            for i in range(count):
                squares[i] += np.square(rows - rows[i]).sum(axis=1)
    np.fill_diagonal(squares, np.inf)
    return int(np.argmin(np.sort(squares, axis=1)[:, :nearest].sum(axis=1)))


COLUMNS = 2**17
"""Values of one array processed at a time: few enough for the processor's cache, enough that
threads seldom contend for Python's lock."""
SHARE = 8 * COLUMNS
"""Values that one thread averages before it takes others."""


def _mean_array(
    arrays: Sequence[NDArray[np.generic]], weights: Sequence[float]
) -> NDArray[np.generic]:
    first = arrays[0]
    if not np.issubdtype(first.dtype, np.floating):
        longest: NDArray[np.generic] = np.maximum.reduce(arrays)
        return longest
    mean = wire.empty(first)
    into, flat = mean.reshape(-1), [array.reshape(-1) for array in arrays]

    def fill(first_of: int) -> None:
        whole, weighted, wide = np.empty(COLUMNS), np.empty(COLUMNS), np.empty(COLUMNS, np.float32)
        for begin in range(first_of, min(first_of + SHARE, first.size), COLUMNS):
            part = slice(begin, begin + COLUMNS)  # of a size that stays in the processor's cache
            total, own = whole[: into[part].size], weighted[: into[part].size]
            total[...] = 0
            for array, weight in zip(flat, weights, strict=True):
                np.multiply(wire.widened(array[part], wide), weight, out=own, dtype=float)
                total += own
            if first.dtype == np.float16:  # none is larger than the largest
                wire.narrow(total.astype(np.float32), into[part])
            else:
                into[part] = total

    each(fill, range(0, first.size, SHARE), num_bytes=first.nbytes)
    return mean


THREADS = 4
"""Most threads that process a large model."""
FROM_BYTES = 2**22
"""Bytes of a model from which threads are worthwhile."""


def each(work: Callable[[_T], _S], items: Sequence[_T], *, num_bytes: int) -> list[_S]:
    """Return ``work`` of every item, in order: the same as one by one.

    Args:
        work: changes nothing that another call reads; numpy code, which releases Python's lock.
        num_bytes: of a model, or about as much; small ones are not worth another thread.
    """
    if num_bytes < FROM_BYTES or len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1, len(items))) as threads:
        return list(threads.map(work, items))


def is_linear(model: Arrays) -> bool:
    """Return whether a model is one layer: a matrix, with or without a bias."""
    return sorted(np.ndim(array) for array in model.values()) in ([2], [1, 2])


def same_model(one: Model, other: Model) -> bool:
    """Return whether two models hold the same values, or two handles refer to the same model."""
    if one is other:
        return True
    if isinstance(one, Handle) or isinstance(other, Handle):
        return isinstance(one, Handle) and isinstance(other, Handle) and one.same_as(other)
    return equal_arrays(one, other)


def holders(models: Mapping[str, _M]) -> list[tuple[_M, list[str]]]:
    """Return the distinct models, each with the sorted names of the silos that hold it."""
    found: list[tuple[_M, list[str]]] = []
    for name in sorted(models):
        model = models[name]
        # Most who share a model share its arrays: look for these before any values are compared.
        match = next((names for held, names in found if held is model), None) or next(
            (names for held, names in found if same_model(held, model)), None
        )
        if match is None:
            found.append((model, [name]))
        else:
            match.append(name)
    return found


def difference(new: Model, old: Model) -> Arrays:
    """Return the update ``new − old`` of the floating-point arrays; counters have no update.

    For a handle, return the sketch of that.

    Raises:
        ValueError: the handle was not trained from ``old``.
    """
    if isinstance(new, Handle):
        return new.minus(old)
    before = arrays_of(old)
    return {
        name: array - before[name]  # type: ignore[operator]
        for name, array in new.items()
        if np.issubdtype(array.dtype, np.floating)
    }


def distance(one: Model, other: Model, buffers: Sequence[str] = ()) -> float:
    """Return the Euclidean distance of two models' parameters; NaN if one is a handle."""
    if not (is_seen(one) and is_seen(other)):
        return nan
    names = comparable(other, similarity="parameters", buffers=buffers)
    return sqrt(
        sum(
            _square_apart(one[name].reshape(-1), other[name].reshape(-1))
            for name in names
            if np.issubdtype(one[name].dtype, np.floating)
        )
    )


SUMMED = 2**13
"""Values squared and added up at a time: few enough that BLAS uses one thread, so that the sum is
reproducible and no other BLAS thread spins while it waits for work."""


def _square_apart(one: NDArray[Any], other: NDArray[Any]) -> float:
    total, apart, now, then = 0.0, np.empty(COLUMNS), *np.empty((2, COLUMNS), np.float32)
    for first in range(0, one.size, COLUMNS):
        part = slice(first, first + COLUMNS)
        new, old = wire.widened(one[part], now), wire.widened(other[part], then)
        far = apart[: new.size]
        far[...] = np.subtract(new, old, out=now[: new.size] if new.dtype == now.dtype else None)
        for begin in range(0, new.size, SUMMED):
            few = far[begin : begin + SUMMED]
            total += float(few @ few)
    return total


def accumulate(memory: Arrays | None, update: Arrays, *, decay: float) -> Arrays:
    """Return ``decay · memory + update``; without a memory, the update."""
    if memory is None or decay == 0:
        return update
    return {
        name: (decay * memory[name] + array).astype(array.dtype)  # type: ignore[operator]
        for name, array in update.items()
    }


def is_statistic(name: str, buffers: Sequence[str] = ()) -> bool:
    """Return whether an array holds running statistics, as described or by PyTorch's names."""
    return name in buffers or name.endswith((".running_mean", ".running_var"))


def comparable(update: Arrays, *, similarity: str, buffers: Sequence[str] = ()) -> Arrays:
    """Return the part of an update that silos are compared by.

    Args:
        similarity: ``parameters``, or ``parameters+buffers`` to include running statistics.
        buffers: names that the silos described as buffers.
    """
    if similarity == "parameters+buffers":
        return update
    return {name: array for name, array in update.items() if not is_statistic(name, buffers)}
