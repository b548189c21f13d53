"""Arithmetic on models: named arrays in, named arrays out, nothing changed in place.

Sums are taken in float64, in the order given, so that a result depends on nothing but its
arguments. Integer arrays are counters (BatchNorm's ``num_batches_tracked``): a mean of counters
means nothing, so the longest-training member's is taken.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.wire import Model


def weighted_mean(models: Sequence[Model], weights: Sequence[float]) -> Model:
    """The mean of models with the same names and shapes.

    Args:
        models: at least one.
        weights: as many, ≥ 0, not all 0.

    Returns:
        Arrays of the inputs' types. One model is returned as it is.
    """
    if len(models) == 1:
        return models[0]
    total = float(sum(weights))
    assert total > 0 and len(models) == len(weights)
    return {
        name: _mean_array([model[name] for model in models], [w / total for w in weights])
        for name in models[0]
    }


def plain_mean(models: Sequence[Model]) -> Model:
    """The mean with equal weights."""
    return weighted_mean(models, [1.0] * len(models))


def _mean_array(
    arrays: Sequence[NDArray[np.generic]], weights: Sequence[float]
) -> NDArray[np.generic]:
    first = arrays[0]
    if not np.issubdtype(first.dtype, np.floating):
        longest: NDArray[np.generic] = np.maximum.reduce(arrays)
        return longest
    mean = np.zeros(first.shape, dtype=np.float64)
    for array, weight in zip(arrays, weights, strict=True):
        mean += weight * array.astype(np.float64)
    return mean.astype(first.dtype)


def same_model(one: Model, other: Model) -> bool:
    """Whether two models hold the same values."""
    return one is other or all(
        array is other[name] or np.array_equal(array, other[name]) for name, array in one.items()
    )


def holders(models: Mapping[str, Model]) -> list[tuple[Model, list[str]]]:
    """The different models among these, each with the names of those that hold it, sorted."""
    found: list[tuple[Model, list[str]]] = []
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


def difference(new: Model, old: Model) -> Model:
    """The update ``new − old`` of the floating-point arrays; counters have no update."""
    return {
        name: array - old[name]  # type: ignore[operator]
        for name, array in new.items()
        if np.issubdtype(array.dtype, np.floating)
    }


def accumulate(memory: Model | None, update: Model, *, decay: float) -> Model:
    """``decay · memory + update``; without a memory, the update."""
    if memory is None or decay == 0:
        return update
    return {
        name: (decay * memory[name] + array).astype(array.dtype)  # type: ignore[operator]
        for name, array in update.items()
    }


def is_statistic(name: str, buffers: Sequence[str] = ()) -> bool:
    """Whether an array holds running statistics: described as a buffer, or named as PyTorch's."""
    return name in buffers or name.endswith((".running_mean", ".running_var"))


def comparable(update: Model, *, similarity: str, buffers: Sequence[str] = ()) -> Model:
    """The part of an update that silos are compared by.

    Args:
        update: made by ``difference``; without counters.
        similarity: ``parameters``, or ``parameters+buffers`` to include running statistics.
        buffers: names that the silos described as buffers.
    """
    if similarity == "parameters+buffers":
        return update
    return {name: array for name, array in update.items() if not is_statistic(name, buffers)}
