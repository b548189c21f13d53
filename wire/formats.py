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
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from coterie.wire.arrays import Model
from coterie.wire.errors import WireError

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

Floats = NDArray[Any]


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
        with np.errstate(over="ignore", invalid="ignore"):
            wanted: Floats = trained[name] - start  # type: ignore[operator]
        if name not in exact and _is_rounded(start):
            if before is not None:
                wanted += before[name]
            if not largest_of(wanted) < HUGE:
                return None
            arrays[name], own_scales = _round(wanted, kind)
            lost[name] = wanted - _restored(arrays[name], own_scales)
            scales.append(own_scales)
            lost_squares += _square(lost[name])
        squares += _square(wanted)
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
        own = scales[used : used + _num_scales(got)]
        used += _num_scales(got)
        if used > scales.size:
            break
        with np.errstate(over="ignore", invalid="ignore"):
            made = start + _restored(got, own)  # type: ignore[operator]
            restored[name] = made.astype(start.dtype, copy=False)
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
        if array.dtype.kind == "f" and not largest_of(array) < HUGE:
            return model
        if name not in exact and _is_rounded(array):
            rounded[name], own_scales = _round(array, KINDS[OF_MODELS])
            scales.append(own_scales)
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
    nothing: Model = {n: np.zeros(*like[n]) for n in arrays if n in like}
    return restore_update(arrays, nothing, OF_MODELS)


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


def _num_scales(rounded: NDArray[np.generic]) -> int:
    rows = rounded.shape[0]
    has_rows = rounded.ndim >= 2 and rounded.dtype == np.int8 and rounded.size >= LEAST_ROW * rows
    return rows if has_rows else 1


def _round(wanted: Floats, kind: type[np.generic]) -> tuple[NDArray[Any], NDArray[np.float32]]:
    """Numbers of a kind, of the same shape, and their scales."""
    numbers = np.empty(wanted.shape, kind)
    largest = np.abs(wanted).reshape(_num_scales(numbers), -1).max(axis=1).astype(np.float32)
    if kind is np.float16:
        scales = np.ldexp(np.float32(1), np.frexp(largest)[1])
    else:
        scales = largest / np.float32(LARGEST)
    # What is smaller than that becomes 0 whatever it is divided by.
    scales = np.where(largest < TINY, np.float32(0), scales).astype(np.float32)
    parts = wanted / _as_rows(np.where(scales > 0, scales, np.float32(1)), numbers)
    if kind is np.int8:
        numbers[...] = np.rint(parts)
    else:
        numbers[...] = narrowed(parts) if parts.dtype == np.float32 else parts
    return numbers, scales


def _restored(numbers: NDArray[np.generic], scales: NDArray[np.float32]) -> NDArray[np.float32]:
    """What rounded numbers stand for: the same bits at the silo and at the coordinator."""
    wide = widened(numbers) if numbers.dtype == np.float16 else numbers.astype(np.float32)
    return wide * _as_rows(scales, numbers)


def _as_rows(scales: NDArray[np.float32], like: NDArray[np.generic]) -> NDArray[np.float32]:
    """Scales in a shape that goes with the numbers that they are of."""
    return scales.reshape(-1, *([1] * (like.ndim - 1)))


# ---------------------------------------------------------------- numbers of 16 bits
#
# numpy takes them one by one, at 3 ns for a cast and 14 for a maximum. Their bits it takes many at
# a time. Subnormal numbers are exact as well: a product with a power of two is.

INFINITE: Final = 0x7C00
"""The bits of an infinite number; those of NaN are beyond."""
_SIGN, _MORE = 0x8000, 127 - 15
"""The bit of the sign, and by how much float32 adds more to exponents."""
_SMALLEST = (_MORE + 1) << 23
"""float32's bits of the smallest normal number."""


def widened(array: NDArray[Any]) -> NDArray[Any]:
    """Numbers of 16 bits in float32, each as it is; all others as they came."""
    if array.dtype != np.float16:
        return array
    bits = array.reshape(-1).view(np.uint16)  # of no axis, numpy would make copies
    size = bits & np.uint16(_SIGN - 1)
    if size.max(initial=0) >= INFINITE:
        return array.astype(np.float32)
    made = size.astype(np.uint32)
    made <<= 13
    wide = made.view(np.float32)
    wide *= np.float32(2.0**_MORE)
    signs = (bits & np.uint16(_SIGN)).astype(np.uint32)
    signs <<= 16
    made |= signs
    return wide.reshape(array.shape)


def narrowed(array: Floats) -> NDArray[np.float16]:
    """The nearest numbers of 16 bits, of two the even one; of float32 of at most 1."""
    bits = array.reshape(-1).view(np.uint32)
    size = bits & np.uint32(2**31 - 1)
    normal = (size >> 13) & np.uint32(1)
    normal += size
    normal += np.uint32(2**32 - (_MORE << 23) + 2**12 - 1)  # which goes round
    normal >>= 13
    # The sum has the last bits of a subnormal number where float32 rounds, to the nearest.
    small = (size.view(np.float32) + np.float32(0.5)).view(np.uint32)
    small -= np.float32(0.5).view(np.uint32)
    made = np.where(size < _SMALLEST, small, normal)
    made |= (bits >> 16) & np.uint32(_SIGN)
    return made.astype(np.uint16).view(np.float16).reshape(array.shape)


def largest_of(array: NDArray[Any]) -> float:
    """The largest size of a number, NaN or infinity where there is one; 0 of none."""
    if not array.size:
        return 0.0
    if array.dtype != np.float16:
        return max(float(array.max()), -float(array.min()))
    size = array.view(np.uint16) & np.uint16(_SIGN - 1)
    return float(size.max().view(np.float16))


def _square(array: Floats) -> float:
    with np.errstate(over="ignore", invalid="ignore"):
        return float(np.square(array, dtype=np.float64).sum())
