"""Arithmetic on models: named arrays in, named arrays out, nothing changed in place.

Sums are taken in float64, in the order given, so that a result depends on nothing but its
arguments. Integer arrays are counters (BatchNorm's ``num_batches_tracked``): a mean of counters
means nothing, so the longest-training member's is taken.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from math import nan, sqrt
from typing import Any, Literal, TypeVar, cast, get_args

import numpy as np
from numpy.typing import NDArray

from coterie import wire
from coterie.wire import Model
from coterie.wire.updates import Limit, shortened

_T = TypeVar("_T")
_S = TypeVar("_S")

Aggregate = Literal["mean", "trimmed-mean", "median", "krum"]
"""How a group's model is made of its members'."""
AGGREGATES: tuple[Aggregate, ...] = get_args(Aggregate)
TRIMMED = 0.2
"""Share of the values that a trimmed mean drops at either end; at least one."""


@dataclass(frozen=True)
class Unseen:
    """In a secure run, where a model would be: one that only the silo has which trained it.

    Attributes:
        silo, round, purpose: of the training.
        samples: that the silo counts for.
        origin: the last model that the silo was sent before it.
        moved: sketch of what all its trainings since then changed; empty if it made none.
        norm: Euclidean norm of what the last of them changed.
        reach: what all of them since then changed at most, added up.
        trained_as: digest of what it was sent and told for the last.
        fresh: that one was the only one since then.
        limit: of what the last of them changed, where it is longer than that, or one that it is
            compared with is; ``moved``, ``norm`` and ``reach`` are of what is left of it.
    """

    silo: str
    round: int
    purpose: str
    samples: float
    origin: Model
    moved: Model
    norm: float
    reach: float
    trained_as: str
    fresh: bool = True
    limit: Limit | None = None

    def within(self, limit: Limit, before: Model) -> Unseen:
        """The same with its last update no longer than a limit.

        Args:
            limit: of that.
            before: ``moved`` without it; empty if it is the only one.
        """
        most = limit.of(self.samples)
        if self.norm <= most:
            return replace(self, limit=limit)
        start = {n: before.get(n, np.zeros_like(a)) for n, a in self.moved.items()}
        short = shortened(self.moved, start, most / self.norm)
        reach = self.reach - self.norm + most
        return replace(self, limit=limit, moved=short, norm=most, reach=reach)


@dataclass(frozen=True)
class Mean:
    """A mean of models some of which are unseen, until the engine has asked silos for their sum.

    ``parts`` are models and their weights, none of which is a mean itself.
    """

    parts: tuple[tuple[Model, float], ...]


def weighted_mean(models: Sequence[Model], weights: Sequence[float]) -> Model:
    """The mean of models with the same names and shapes.

    Args:
        models: at least one.
        weights: as many, ≥ 0, not all 0.

    Returns:
        Arrays of the inputs' types. One model is returned as it is. Where some are ``Unseen``,
        a ``Mean``, in whose place the engine puts a model before anybody looks into it.
    """
    if len(models) == 1:
        return models[0]
    total = float(sum(weights))
    assert total > 0 and len(models) == len(weights)
    if any(isinstance(model, Unseen | Mean) for model in models):
        return cast(Model, Mean(tuple(_parts(models, [w / total for w in weights]))))
    return {
        name: _mean_array([model[name] for model in models], [w / total for w in weights])
        for name in models[0]
    }


def _parts(
    models: Sequence[Model | Mean], weights: Sequence[float]
) -> Iterator[tuple[Model, float]]:
    for model, weight in zip(models, weights, strict=True):
        inner = model.parts if isinstance(model, Mean) else ((model, 1.0),)
        yield from ((part, weight * share) for part, share in inner)


def is_seen(model: Model) -> bool:
    """Whether the coordinator has the model's numbers."""
    return not isinstance(model, Unseen | Mean)


def plain_mean(models: Sequence[Model]) -> Model:
    """The mean with equal weights."""
    return weighted_mean(models, [1.0] * len(models))


def aggregated(models: Sequence[Model], weights: Sequence[float], how: Aggregate) -> Model:
    """One model of several, by one of the rules; of fewer than three it is always the mean.

    ``trimmed-mean`` and ``median`` go value by value (Yin, Chen, Ramchandran, Bartlett: ICML 2018,
    https://arxiv.org/abs/1803.01498, Definitions 1 and 2); ``krum`` takes one of the models
    (Blanchard, El Mhamdi, Guerraoui, Stainer: NeurIPS 2017, https://arxiv.org/abs/1703.02757,
    section 4, with f = ⌊(n − 3) / 2⌋). These three weigh all alike.

    Args:
        models: at least one.
        weights: as many, ≥ 0, not all 0; of the mean.
        how: the rule.

    Returns:
        Arrays of the inputs' types.
    """
    if how == "mean" or len(models) < 3:
        return weighted_mean(models, weights)
    if how == "krum":
        return models[_krum(models)]
    cut = 0 if how == "median" else max(1, int(TRIMMED * len(models)))
    middle = {}
    for name, first in models[0].items():
        arrays = [model[name] for model in models]
        if not np.issubdtype(first.dtype, np.floating):
            middle[name] = _mean_array(arrays, weights)
            continue
        stacked = np.sort(np.stack(arrays).astype(np.float64), axis=0)
        kept = stacked[cut : len(models) - cut]
        value = np.median(stacked, axis=0) if how == "median" else kept.mean(axis=0)
        middle[name] = value.astype(first.dtype)
    return middle


def _krum(models: Sequence[Model]) -> int:
    """The position of the model whose n − f − 2 nearest others are nearest; ties to the first."""
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
"""Values of one array that are worked on at a time: few enough to stay in the processor's cache,
enough that threads seldom hand Python's lock around."""
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
"""At most, in which large models are worked on."""
FROM_BYTES = 2**22
"""Of a model, from which that is worth it."""


def each(work: Callable[[_T], _S], items: Sequence[_T], *, num_bytes: int) -> list[_S]:
    """What ``work`` gives of every item, in order: the same as one by one.

    Args:
        work: changes nothing that another looks at; numpy's, which lets go of Python's lock.
        items: to work on.
        num_bytes: of a model, or what it is about: small ones are not worth another thread.
    """
    if num_bytes < FROM_BYTES or len(items) < 2:
        return [work(item) for item in items]
    with ThreadPoolExecutor(min(THREADS, os.cpu_count() or 1, len(items))) as threads:
        return list(threads.map(work, items))


def same_model(one: Model, other: Model) -> bool:
    """Whether two models hold the same values; of an unseen one, whether it is the same one."""
    if one is other or not (is_seen(one) and is_seen(other)):
        return one is other or (not is_seen(one) and not is_seen(other) and _same(one, other))
    return all(
        array is other[name] or np.array_equal(array, other[name]) for name, array in one.items()
    )


def _same(one: Any, other: Any) -> bool:
    """Of what stands for unseen models."""
    if isinstance(one, Mean) or isinstance(other, Mean):
        return False
    return (one.silo, one.round, one.purpose) == (other.silo, other.round, other.purpose)


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
    """The update ``new − old`` of the floating-point arrays; counters have no update.

    Of an unseen model, the sketch of that.

    Raises:
        ValueError: it was not trained from ``old``.
    """
    if isinstance(new, Unseen):
        return _sketch_between(new, old)
    return {
        name: array - old[name]  # type: ignore[operator]
        for name, array in new.items()
        if np.issubdtype(array.dtype, np.floating)
    }


def _sketch_between(new: Unseen, old: Model) -> Model:
    if isinstance(old, Unseen) and same_model(old.origin, new.origin):
        return {
            name: (array - old.moved[name]).astype(array.dtype)  # type: ignore[operator]
            for name, array in new.moved.items()
        }
    if isinstance(old, Unseen) or not same_model(old, new.origin):
        raise ValueError(f"of silo {new.silo!r} no sketch from that model is known.")
    return new.moved


def distance(one: Model, other: Model, buffers: Sequence[str] = ()) -> float:
    """Euclidean distance of two models' parameters; NaN where one of them is not seen."""
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
"""Values that are squared and added up at a time: few enough that BLAS uses one thread, whose sum
depends on nothing else, and none of its others waits in a loop for more."""


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
