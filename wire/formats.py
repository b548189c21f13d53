"""Updates in fewer bytes: the difference to the model that was sent, rounded to 16 or 8 bits.

In such a format a silo sends the update in place of its model. A rounded array is numbers of 16
bits (``delta-fp16``) or 8 (``delta-int8``) and scales; its values are number times scale. 16-bit
numbers have one scale per array, a power of two that brings the largest to between ½ and 1, so that
none overflows and few are too small. 8-bit numbers have one scale per output (the first axis), or
per array if an output has few numbers; the largest is ±127. All rounding is to nearest.

Models also go to silos in 16 bits, once the silos have shown that they know the format. The
coordinator keeps what it rounded and adds the update to the unrounded model, so that rounding a
model only moves the point at which a silo trains. The silo adds an update's rounding error to its
next update, so that nothing is lost for good (error feedback: Seide et al., Interspeech 2014;
Karimireddy et al., ICML 2019, https://arxiv.org/abs/1901.09847, Algorithm 2). ``make
bench-formats`` measures the formats.

Never rounded: integers, booleans, arrays of fewer than 32 bits per number, arrays that the caller
names (running statistics, which must not become negative), and small vectors (biases).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from coterie.wire.arrays import Model
from coterie.wire.buffers import empty
from coterie.wire.errors import WireError
from coterie.wire.half_precision import PART, largest_of, narrow, parts, widen

WireFormat = Literal["float32", "delta-fp16", "delta-int8"]
WIRE_FORMATS: tuple[WireFormat, ...] = get_args(WireFormat)
FLOAT32: Final = WIRE_FORMATS[0]
"""Unrounded models."""
KINDS: Final[Mapping[str, type[np.generic]]] = {"delta-fp16": np.float16, "delta-int8": np.int8}
OF_MODELS: Final = "delta-fp16"
"""The format of models sent to silos, whatever the format of updates: a difference to zero."""
SCALES: Final = "scales "
"""Scales of all rounded arrays, in the model's order, float32; no array's name ends with a
space."""
LARGEST = 127
LEAST_ROW = 32
"""The fewest numbers of an output that get their own scale."""
LEAST_VECTOR = 1024
"""The fewest numbers of a vector that is rounded."""
TINY, HUGE = 1e-30, 1e30
"""Values below the first change no model; values above the second occur in no model, and are sent
unrounded."""

Span = tuple[slice, slice]
"""Rows and columns."""


@dataclass(frozen=True)
class Rounded:
    """An update in its wire format.

    Attributes:
        arrays: by name, and ``SCALES``.
        lost: the rounding error of each rounded array.
        norm: Euclidean norm before rounding.
        share: rounding error as a share of that norm, in [0, 1].
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
    """Round an update; return None if it is not finite, or larger than any model.

    The coordinator then reports the error.

    Args:
        trained: the model after training.
        sent: the model before training, with the same names, shapes and types.
        exact: names of arrays that are not rounded.
        before: rounding error of the previous update, by name; None: zero.
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
    """Return the model that a rounded update makes of the ``sent`` one.

    Without ``SCALES`` the arrays are a model already. Other invalid parts are left unchanged, for
    the check of the model.

    Raises:
        WireError: the scales do not fit the arrays.
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
    """Return a finite model in 16 bits per number and ``SCALES``; an invalid model unchanged.

    It is for a silo that sends back the difference. ``exact`` is as in ``round_update``.
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
    """Return the inverse of ``round_model``, up to rounding; an unrounded model is unchanged.

    ``like`` is name → shape and type.

    Raises:
        WireError: see ``restore_update``.
    """
    if SCALES not in arrays:
        return arrays
    nothing: Model = {n: _zeros(*like[n]) for n in arrays if n in like}
    return restore_update(arrays, nothing, OF_MODELS)


def _zeros(shape: tuple[int, ...], kind: str) -> NDArray[np.generic]:
    """Return zeros of any shape in the memory of one number."""
    return np.broadcast_to(np.zeros((), kind), shape)


def num_rounded_bytes(model: Model, *, exact: Collection[str] = ()) -> int:
    """Return the bytes of the arrays that ``round_model`` makes of a finite model."""
    short = np.dtype(KINDS[OF_MODELS]).itemsize
    scale = np.dtype(np.float32).itemsize
    return sum(
        array.size * short + scale if name not in exact and _is_rounded(array) else array.nbytes
        for name, array in model.items()
    )


def _checked(scales: NDArray[Any]) -> NDArray[np.float32]:
    if scales.dtype != np.float32 or scales.ndim != 1:
        raise WireError(
            f"the scales of an update must be one list of float32. Got {scales.dtype} of shape "
            f"{scales.shape}."
        )
    if not ((scales >= 0) & (scales < HUGE)).all():
        raise WireError(f"the scales of an update must be at least 0 and below {HUGE:g}.")
    return scales


def _is_rounded(array: NDArray[np.generic]) -> bool:
    long = array.size >= LEAST_VECTOR or (array.ndim >= 2 and array.size > 0)
    return array.dtype.kind == "f" and array.itemsize >= 4 and long


def _num_scales(shape: tuple[int, ...], kind: type[np.generic]) -> int:
    rows = shape[0] if len(shape) >= 2 else 1
    return rows if kind is np.int8 and math.prod(shape) >= LEAST_ROW * rows else 1


@dataclass(frozen=True)
class _Numbers:
    """A rounded array and its scales; sums of squares before rounding and of the error, float64."""

    numbers: NDArray[Any]
    scales: NDArray[np.float32]
    square: float
    lost_square: float


def _wanted(
    trained: NDArray[Any], start: NDArray[Any], before: NDArray[Any] | None, kind: type[np.generic]
) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Return the numbers to send of an array, and the largest absolute value per scale."""
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
    """Update the largest absolute values with a part's numbers; NaN propagates."""
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
    """Round an array, with the largest absolute value per scale, to numbers of the same shape.

    ``lost`` replaces ``wanted`` by the rounding error, and adds up squares.
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
    """Return the restored array: the same bits at the silo and at the coordinator."""
    made = empty(start)
    kind = numbers.dtype.type
    flat, before, got = (_in_rows(one, kind) for one in (made, start, numbers))
    with np.errstate(over="ignore", invalid="ignore"):
        for span in _spans(flat):
            np.add(before[span], _values(got[span], scales[span[0]]), out=flat[span])
    return made


def _values(numbers: NDArray[Any], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    wide = np.empty(numbers.shape, np.float32)
    if numbers.dtype == np.float16:
        widen(numbers.reshape(-1), wide.reshape(-1))
    else:
        wide[...] = numbers
    wide *= scales.reshape(-1, 1)
    return wide


def _in_rows(array: NDArray[Any], kind: type[np.generic]) -> NDArray[Any]:
    return array.reshape(_num_scales(array.shape, kind), -1)


def _spans(rows: NDArray[Any]) -> Iterator[Span]:
    """Yield parts of a 2-D array that fit the cache: whole rows, or a part of one."""
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
