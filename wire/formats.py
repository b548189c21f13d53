"""Updates in fewer bytes: the difference to the model that was sent, rounded to 16 or 8 bits.

A silo that is asked for such a format sends, in the place of its model, what training changed. Of
every array that is rounded there are numbers of 16 bits (``delta-fp16``) or of 8 (``delta-int8``)
and scales; what they stand for is number times scale. 16-bit numbers have one scale an array, a
power of two that brings the largest to between ½ and 1, so that none overflows and few are too
small. 8-bit numbers have one scale for every output (the first axis), or for the array where
an output has few numbers; the largest is ±127. All rounding is to nearest.

Models go to silos in 16 bits too, once these have shown that they know the format. The
coordinator keeps what it rounded: it adds the update to the model as it was before, so that
rounding a model moves the point at which a silo trains, and nothing else.

What is lost by rounding an update is the silo's to keep and to add to what it sends next (error
feedback: Seide et al., Interspeech 2014; Karimireddy et al., ICML 2019,
https://arxiv.org/abs/1901.09847, Algorithm 2), so that nothing is lost for good. ``make
bench-formats`` has what each choice gives.

Never rounded, and sent as they are: whole numbers, truth values, arrays of fewer than 32 bits a
number, what the caller names (running statistics, which must not become negative), and small
vectors (biases), of which the bytes are few.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from coterie.wire.arrays import Model
from coterie.wire.blocks import empty
from coterie.wire.errors import WireError
from coterie.wire.halves import PART, largest_of, narrow, parts, widen

WireFormat = Literal["float32", "delta-fp16", "delta-int8"]
WIRE_FORMATS: tuple[WireFormat, ...] = get_args(WireFormat)
FLOAT32: Final = WIRE_FORMATS[0]
"""Models as they are."""
KINDS: Final[Mapping[str, type[np.generic]]] = {"delta-fp16": np.float16, "delta-int8": np.int8}
OF_MODELS: Final = "delta-fp16"
"""How models travel to silos, whatever the format of updates: as differences to nothing."""
SCALES: Final = "scales "
"""The scales of all rounded arrays, in the model's order, float32. Beside the arrays, whose names
have no space at their end."""
LARGEST = 127
LEAST_ROW = 32
"""Numbers of an output that are worth a scale of their own."""
LEAST_VECTOR = 1024
"""Numbers of a vector that is worth rounding."""
TINY, HUGE = 1e-30, 1e30
"""What is below changes no model. What is above no model holds, and is sent as it is."""

Span = tuple[slice, slice]
"""Rows and columns."""


@dataclass(frozen=True)
class Rounded:
    """An update as it travels.

    Attributes:
        arrays: by name, and ``SCALES``.
        lost: of the arrays that were rounded, what was rounded away.
        norm: Euclidean norm of what was to be sent.
        share: of that norm, what was rounded away; in [0, 1].
    """

    arrays: Model
    lost: Model
    norm: float
    share: float


def round_update(
    trained: Model,
    sent: Model,
    wire_format: str,
    *,
    exact: Collection[str] = (),
    before: Model | None = None,
) -> Rounded | None:
    """Round what training changed.

    Args:
        trained: after the training.
        sent: before it; of the same names, shapes and types.
        wire_format: of ``KINDS``.
        exact: names of arrays that are not rounded.
        before: what was rounded away of the update before, by name; None: nothing.

    Returns:
        None if that holds what is not finite, or beyond any model: it is for the coordinator to
        say so.
    """
    kind, arrays, lost = KINDS[wire_format], dict(trained), Model()
    scales: list[NDArray[np.float32]] = []
    squares, lost_squares = 0.0, 0.0
    for name, start in sent.items():
        if start.dtype.kind != "f":
            continue
        if name in exact or not _is_rounded(start):
            squares += _square_between(trained[name], start)
            continue
        last = None if before is None else before[name]
        wanted, largest = _wanted(trained[name], start, last, kind)
        if not (largest < HUGE).all():
            return None
        rounded = _round(wanted, kind, largest, lost=True)
        arrays[name], lost[name] = rounded.numbers, wanted
        scales.append(rounded.scales)
        squares, lost_squares = squares + rounded.square, lost_squares + rounded.lost_square
    if not math.isfinite(squares):
        return None
    arrays[SCALES] = np.concatenate([np.zeros(0, np.float32), *scales])
    share = math.sqrt(lost_squares / squares) if squares else 0.0
    return Rounded(arrays, lost, math.sqrt(squares), share)


def restore_update(arrays: Model, sent: Model, wire_format: str) -> Model:
    """The model that a rounded update makes of the one that was sent.

    Whatever is not as it should be but for the scales is left as it came, for who checks models.

    Args:
        arrays: as they arrived; without ``SCALES`` they are a model already.
        sent: what the silo started from.
        wire_format: what it was asked for.

    Raises:
        WireError: the scales are not what these arrays need.
    """
    if wire_format not in KINDS or SCALES not in arrays:
        return arrays
    kind, scales = KINDS[wire_format], _checked(arrays[SCALES])
    restored = {name: array for name, array in arrays.items() if name != SCALES}
    used = 0
    for name, start in sent.items():
        got = restored.get(name)
        if got is None or got.dtype != kind or got.shape != start.shape or not _is_rounded(start):
            continue
        count = _num_scales(got.shape, kind)
        own = scales[used : used + count]
        used += count
        if used > scales.size:
            break
        restored[name] = _restored(got, own, start)
    if used != scales.size:
        raise WireError(f"its update needs {used} scales. Got {scales.size}.")
    return restored


def round_model(model: Model, *, exact: Collection[str] = ()) -> Model:
    """A model in 16 bits a number, for who is to train from it and to send the difference.

    Args:
        model: all finite.
        exact: see ``round_update``.

    Returns:
        Arrays and ``SCALES``; the model as it is if it holds what none should.
    """
    rounded, scales = dict(model), [np.zeros(0, np.float32)]
    for name, array in model.items():
        if array.dtype.kind != "f":
            continue
        if name in exact or not _is_rounded(array):
            if not largest_of(array) < HUGE:
                return model
        else:
            kind = KINDS[OF_MODELS]
            rows = _in_rows(array, kind)
            largest = np.zeros(len(rows), np.float32)
            for span in _spans(rows):
                _raise_to(largest, rows, span)
            if not (largest < HUGE).all():
                return model
            made = _round(array, kind, largest)
            rounded[name] = made.numbers
            scales.append(made.scales)
    return {**rounded, SCALES: np.concatenate(scales)}


def restore_model(arrays: Model, like: Mapping[str, tuple[tuple[int, ...], str]]) -> Model:
    """The inverse, as near as 16 bits come; a model that was not rounded as it is.

    Args:
        arrays: as they arrived.
        like: name → shape and type.

    Raises:
        WireError: see ``restore_update``.
    """
    if SCALES not in arrays:
        return arrays
    nothing: Model = {n: _zeros(*like[n]) for n in arrays if n in like}
    return restore_update(arrays, nothing, OF_MODELS)


def _zeros(shape: tuple[int, ...], kind: str) -> NDArray[np.generic]:
    """Of any shape in the memory of one number."""
    return np.broadcast_to(np.zeros((), kind), shape)


def num_rounded_bytes(model: Model, *, exact: Collection[str] = ()) -> int:
    """Bytes of the arrays that ``round_model`` makes of a finite one."""
    short = np.dtype(KINDS[OF_MODELS]).itemsize
    scale = np.dtype(np.float32).itemsize
    return sum(
        array.size * short + scale if name not in exact and _is_rounded(array) else array.nbytes
        for name, array in model.items()
    )


def _checked(scales: NDArray[Any]) -> NDArray[np.float32]:
    if scales.dtype != np.float32 or scales.ndim != 1:
        raise WireError(
            "the scales of an update are one list of float32. "
            f"Got {scales.dtype} of shape {scales.shape}."
        )
    if not ((scales >= 0) & (scales < HUGE)).all():
        raise WireError(f"the scales of an update must be at least 0 and below {HUGE:g}.")
    return scales


def _is_rounded(array: NDArray[np.generic]) -> bool:
    """Whether it is worth it; what came of it shows by its type."""
    long = array.size >= LEAST_VECTOR or (array.ndim >= 2 and array.size > 0)
    return array.dtype.kind == "f" and array.itemsize >= 4 and long


def _num_scales(shape: tuple[int, ...], kind: type[np.generic]) -> int:
    rows = shape[0] if len(shape) >= 2 else 1
    return rows if kind is np.int8 and math.prod(shape) >= LEAST_ROW * rows else 1


@dataclass(frozen=True)
class _Numbers:
    """An array that was rounded, and its scales; sums of squares of what was to be rounded, and of
    what was lost, both float64."""

    numbers: NDArray[Any]
    scales: NDArray[np.float32]
    square: float
    lost_square: float


def _wanted(
    trained: NDArray[Any],
    start: NDArray[Any],
    before: NDArray[Any] | None,
    kind: type[np.generic],
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """What is to be sent of an array, and the largest size of a number that has one scale."""
    wanted = empty(start)
    into, new, old = (_in_rows(one, kind) for one in (wanted, trained, start))
    last = None if before is None else _in_rows(before, kind)
    largest = np.zeros(len(into), np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        for span in _spans(into):
            np.subtract(new[span], old[span], out=into[span])
            if last is not None:
                into[span] += last[span]
            _raise_to(largest, into, span)
    return wanted, largest


def _raise_to(largest: NDArray[np.float32], rows: NDArray[Any], span: Span) -> None:
    """With a part's numbers; NaN where one is."""
    own, part = largest[span[0]], rows[span]
    for found in (part.max(axis=1), -part.min(axis=1)):
        np.maximum(own, found.astype(np.float32), out=own)


def _round(
    wanted: NDArray[Any],
    kind: type[np.generic],
    largest: NDArray[np.float32],
    *,
    lost: bool = False,
) -> _Numbers:
    """Numbers of a kind, of the same shape.

    Args:
        wanted: what is rounded.
        kind: of ``KINDS``.
        largest: size of those that have one scale.
        lost: what was rounded away takes its place, and squares are added up.
    """
    numbers = empty(wanted, kind)
    flat, into = _in_rows(wanted, kind), _in_rows(numbers, kind)
    if kind is np.float16:
        scales = np.ldexp(np.float32(1), np.frexp(largest)[1])
    else:
        scales = largest / np.float32(LARGEST)
    # What is smaller than that becomes 0 whatever it is divided by.
    scales = np.where(largest < TINY, np.float32(0), scales).astype(np.float32)
    divisors = np.where(scales > 0, scales, np.float32(1)).reshape(-1, 1)
    square = lost_square = 0.0
    for span in _spans(flat):
        part, own, rows = flat[span], into[span], span[0]
        scaled: NDArray[Any] = part / divisors[rows]
        if kind is np.int8:
            np.rint(scaled, out=scaled)
        if kind is np.float16 and scaled.dtype == np.float32:
            narrow(scaled.reshape(-1), own.reshape(-1))
        else:
            own[...] = scaled
        if lost:
            square += _square(part)
            part -= _values(own, scales[rows])
            lost_square += _square(part)
    return _Numbers(numbers, scales, square, lost_square)


def _restored(
    numbers: NDArray[Any], scales: NDArray[np.float32], start: NDArray[Any]
) -> NDArray[Any]:
    """What rounded numbers make of an array: the same bits at the silo and at the coordinator."""
    made = empty(start)
    kind = numbers.dtype.type
    flat, before, got = (_in_rows(one, kind) for one in (made, start, numbers))
    with np.errstate(over="ignore", invalid="ignore"):
        for span in _spans(flat):
            np.add(before[span], _values(got[span], scales[span[0]]), out=flat[span])
    return made


def _values(numbers: NDArray[Any], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """What a part of some rows stands for, their scales given."""
    wide = np.empty(numbers.shape, np.float32)
    if numbers.dtype == np.float16:
        widen(numbers.reshape(-1), wide.reshape(-1))
    else:
        wide[...] = numbers
    wide *= scales.reshape(-1, 1)
    return wide


def _in_rows(array: NDArray[Any], kind: type[np.generic]) -> NDArray[Any]:
    """Flat, with a row for each scale that numbers of a kind have of it."""
    return array.reshape(_num_scales(array.shape, kind), -1)


def _spans(rows: NDArray[Any]) -> Iterator[Span]:
    """Of an array of two axes, parts that stay in the cache: some whole rows, or part of one."""
    count, length = rows.shape
    some = max(1, PART // max(length, 1))
    for first in range(0, count, some):
        for columns in parts(length):
            yield slice(first, first + some), columns


def _square_between(one: NDArray[Any], other: NDArray[Any]) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        return _square(one - other)


def _square(array: NDArray[Any]) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        wide = array.reshape(-1).astype(np.float64)
        return float(np.einsum("i,i->", wide, wide))
