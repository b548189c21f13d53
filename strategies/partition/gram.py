"""Inner products of updates: the only part of this package whose cost depends on P.

HCCT, EDC, MADC and the placing of newcomers only need the N x N Gram matrix ``G = U U^T`` of the
updates ``U`` (N silos, P parameters); see HCCT eq. 8 and FedGroup eqs. 5-6.

The updates are read in blocks of columns. A block is multiplied with its own transpose in the
updates' precision (float32 BLAS; numpy calls the symmetric ``syrk``, half the work of a general
product), and its N x N result is added in float64. A float32 sum is thus never longer than one
block; the remaining rounding (measured: at most 5e-7 of ``|u_i||u_j|``) is far below the precision
that cosines need. Float64 blocks would take 2-3 times as long; float64 updates are multiplied in
float64.

Layers (lists of arrays or mappings) are packed into blocks across layer borders, so that a thousand
biases do not cost a thousand N x N additions. An (N, P) array, even memory-mapped, is read through
views and never copied. Extra memory: at most two updates and N^2 numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.strategies.partition import _check
from coterie.strategies.partition._check import FloatArray

Update: TypeAlias = "NDArray[Any] | Sequence[ArrayLike] | Mapping[str, ArrayLike]"
Updates: TypeAlias = "NDArray[Any] | Sequence[Update]"

# Columns of one block. 4,096 to 65,536 are equally fast; fewer pay for the additions, more for
# the float32 rounding.
_WIDTH = 16_384
# Of what known noise leaves: so many deviations of its squared norm.
_SCATTER = 3.0
# Relative to the largest squared norm: equal updates have no inverse.
_LIFT = 1e-9
# A squared norm of a float32 block below this may have lost digits to underflow.
_TINY = 1e-30


def gram(updates: Updates, *, noise: ArrayLike | None = None) -> FloatArray:
    """Return the N x N inner products of N updates, float64, exactly symmetric.

    Args:
        updates: an (N, P) array (in memory or memory-mapped), N arrays, or N updates each given as
            a sequence of layer arrays or a mapping from layer name to array, with equal names and
            shapes.
        noise: (N,) expected squared norms >= 0 of independent noise known to be in the updates;
            removed from the diagonal by `without_noise`.

    Raises ValueError, naming silo and layer, for no silo, shapes or names that differ, and values
    that are not finite. Example: ``gram([[1.0, 0.0], [3.0, 4.0]])`` is ``[[1, 3], [3, 25]]``.
    """
    source = _open(updates, "updates")
    result = np.zeros((source.num_silos, source.num_silos))
    scratch = np.empty_like(result, dtype=source.dtype)
    for block in _blocks(source):
        _add_square(block, result, scratch)
    del scratch
    _refuse_non_finite(result.diagonal(), source)
    result += result.T  # BLAS promises equal halves only where it was asked for one of them
    result *= 0.5
    if noise is None:
        return result
    return without_noise(result, noise, num_parameters=source.num_parameters)


def without_noise(matrix: FloatArray, noise: ArrayLike, *, num_parameters: int) -> FloatArray:
    """Return a Gram matrix without the contribution of known noise to its diagonal.

    With independent noise of mean 0 and expected squared norm ``N_i`` in update i, the expected
    matrix is ``G + diag(N)``: all cosines shrink because ``|u_i||u_j|`` grows, and silos look
    dissimilar. So ``diag(N)`` is subtracted, but of each N_i only a plausible part:

    - at most its squared distance from the span of the other updates, to which noise in many
      dimensions is nearly orthogonal (``1/(G^-1)_ii``), so that a silo that overstates its noise
      comes no nearer to others than its update is;
    - at most what leaves more than the noise's own scatter, three deviations of ``N sqrt(2/P)`` in
      P parameters;
    - and of all together the largest share that leaves the matrix positive semidefinite, so that
      cosines stay valid.

    `matrix` is (N, N), `noise` (N,) finite and >= 0, `num_parameters` is P. Example: two parallel
    updates, each with as much noise as signal: ``[[2, 1], [1, 2]]`` with noise ``[1, 1]`` becomes
    ``[[1, 1], [1, 1]]``, if there are many parameters.
    """
    claimed = _check.per_silo("noise", noise, num_silos=len(matrix))
    if not claimed.any():
        return matrix
    squares = matrix.diagonal()
    surely = max(0.0, 1 - _SCATTER * float(np.sqrt(2 / max(num_parameters, 1))))
    lifted = matrix + _LIFT * max(float(squares.max()), np.finfo(float).tiny) * np.eye(len(matrix))
    inverse = np.linalg.inv(lifted)
    plausible = np.minimum.reduce([claimed, surely * squares, 1 / inverse.diagonal()])
    root = np.sqrt(plausible)
    largest = float(np.linalg.eigvalsh(root[:, None] * inverse * root[None, :])[-1])
    return np.asarray(matrix - np.diag(plausible / max(largest, 1.0)))


def cross(updates: Updates, directions: Updates) -> FloatArray:
    """Return the N x M inner products of N updates with M other vectors of the same layout.

    Forms, blocks and errors as in `gram`. Used for a newcomer against group directions.
    """
    left, right = _open(updates, "updates"), _open(directions, "directions")
    if left.layout != right.layout:
        raise ValueError(_difference(left, right))
    both = _Source(
        rows=[*left.rows, *right.rows],
        layout=left.layout,
        names=left.names,
        dtype=np.promote_types(left.dtype, right.dtype),
        label=f"updates (0 to {left.num_silos - 1}) and directions (from {left.num_silos})",
    )
    result = np.zeros((left.num_silos, right.num_silos))
    squares = np.zeros(both.num_silos)
    for block in _packed(both, _packed_width(both)):
        with np.errstate(over="ignore", invalid="ignore", under="ignore"):
            norms = np.einsum("ij,ij->i", block, block)
            wide = block.astype(np.float64) if _is_doubtful(block, norms) else block
            result += wide[: left.num_silos] @ wide[left.num_silos :].T
            squares += norms if wide is block else np.einsum("ij,ij->i", wide, wide)
    _refuse_non_finite(squares, both)
    return result


@dataclass(frozen=True, eq=False)
class _Source:
    """N updates as rows of pieces (one per layer, of any shape), not copied."""

    rows: Sequence[Sequence[NDArray[Any]]]
    layout: tuple[tuple[int, ...], ...]
    names: tuple[str, ...]
    dtype: np.dtype[Any]
    label: str
    matrix: NDArray[Any] | None = None  # the (N, P) array, where the updates came as one

    @property
    def num_silos(self) -> int:
        return len(self.rows)

    @property
    def num_parameters(self) -> int:
        return sum(_count(shape) for shape in self.layout)


def _count(shape: tuple[int, ...]) -> int:
    return int(np.prod(shape, dtype=np.int64))


# --- reading the forms in which updates come -----------------------------------------------------


def _open(updates: Any, label: str) -> _Source:
    if isinstance(updates, (str, Mapping)):
        raise _check.fail(label, "a sequence of updates, one per silo", type(updates).__name__)
    matrix = _as_matrix(updates, label)
    if matrix is not None:
        rows: list[list[NDArray[Any]]] = [[row] for row in matrix]
        names: tuple[str, ...] = ("",)
    else:
        names = _names(updates[0]) if len(updates) else ()
        rows = [_layers(update, names, silo, label) for silo, update in enumerate(updates)]
    if not rows:
        raise _check.fail(label, "those of at least one silo", "none")
    layout = tuple(piece.shape for piece in rows[0])
    dtype = _precision(rows, layout, names, label)
    usable = matrix if matrix is not None and matrix.dtype == dtype else None
    return _Source(rows, layout, names, dtype, label, usable)


def _as_matrix(updates: Any, label: str) -> NDArray[Any] | None:
    """Return (N, P) updates as an array, also from nested lists of numbers."""
    if isinstance(updates, np.ndarray) and updates.dtype != object:
        if updates.ndim != 2:
            raise _check.fail(label, "of shape (N, P)", f"shape {updates.shape}")
        return np.asarray(updates)
    numbers = len(updates) and all(
        isinstance(row, (list, tuple)) and len(row) and all(np.isscalar(x) for x in row)
        for row in updates
    )
    if not numbers:
        return None
    if len({len(row) for row in updates}) > 1:
        raise _check.fail(label, "equally long", f"lengths {[len(row) for row in updates]}")
    return np.asarray(updates, dtype=np.float64)


def _names(update: Any) -> tuple[str, ...]:
    if isinstance(update, Mapping):
        return tuple(update)
    if isinstance(update, np.ndarray) or not isinstance(update, Sequence):
        return ("",)
    return tuple(str(position) for position in range(len(update)))


def _layers(update: Any, names: tuple[str, ...], silo: int, label: str) -> list[NDArray[Any]]:
    """Return one silo's layers in the order of `names`, the first silo's."""
    if isinstance(update, Mapping):
        if set(update) != set(names):
            odd = sorted(set(update) ^ set(names))
            raise ValueError(
                f"{label} must have the layers of silo 0. Silo {silo} differs in {odd}."
            )
        return [np.asarray(update[name]) for name in names]
    if isinstance(update, np.ndarray) or not isinstance(update, Sequence):
        return [np.asarray(update)]
    if len(update) != len(names):
        raise ValueError(
            f"{label} must have {len(names)} layers like silo 0. Silo {silo} has {len(update)}."
        )
    return [np.asarray(layer) for layer in update]


def _precision(
    rows: Sequence[Sequence[NDArray[Any]]],
    layout: tuple[tuple[int, ...], ...],
    names: tuple[str, ...],
    label: str,
) -> np.dtype[Any]:
    """Return float32, or float64 if any layer has it; refuse wrong shapes and non-real layers."""
    for silo, row in enumerate(rows):
        for name, piece, shape in zip(names, row, layout, strict=True):
            if piece.shape != shape:
                raise ValueError(
                    f"{label} must have the shapes of silo 0. "
                    f"Silo {silo}, {_layer(name)} has {piece.shape} instead of {shape}."
                )
            if piece.dtype.kind not in "fiu":
                raise ValueError(
                    f"{label} must be real numbers. Silo {silo}, {_layer(name)} is {piece.dtype}."
                )
    kinds = {piece.dtype for row in rows for piece in row}
    single = all(kind.kind == "f" and kind.itemsize <= 4 for kind in kinds)
    return np.dtype(np.float32 if single else np.float64)


def _layer(name: str) -> str:
    return f"layer {name}" if name else "its only layer"


def _difference(left: _Source, right: _Source) -> str:
    for name, a, b in zip(left.names, left.layout, right.layout, strict=False):
        if a != b:
            return f"directions must have the shapes of updates. {_layer(name)} has {b}, not {a}."
    return (
        "directions must have the layers of updates. "
        f"Got {len(right.layout)} layers instead of {len(left.layout)}."
    )


# --- blocks ---------------------------------------------------------------------------------------


def _blocks(source: _Source) -> Iterator[NDArray[Any]]:
    """Yield the updates as N x b blocks, valid until the next is requested."""
    matrix = source.matrix
    if matrix is not None and matrix.strides[1] == matrix.itemsize:
        for start in range(0, matrix.shape[1], _WIDTH):
            yield matrix[:, start : start + _WIDTH]
        return
    yield from _packed(source, _packed_width(source))


def _packed_width(source: _Source) -> int:
    # A block holds no more numbers than 1.5 updates (or, where silos outnumber parameters, than
    # N^2/2), which is what bounds the extra memory.
    num_silos = source.num_silos
    wanted = max(3 * source.num_parameters // (2 * num_silos), num_silos // 2, 1)
    return min(_WIDTH, wanted, max(source.num_parameters, 1))


def _packed(source: _Source, width: int) -> Iterator[NDArray[Any]]:
    """Copy layers into one buffer of `width` columns, across layer borders."""
    buffer = np.empty((source.num_silos, width), dtype=source.dtype)
    filled = 0
    for layer, shape in enumerate(source.layout):
        # What gives numbers start:stop of a piece without copying all of it.
        pieces = [
            piece.reshape(-1) if piece.flags.c_contiguous else piece.flat
            for piece in (row[layer] for row in source.rows)
        ]
        size, start = _count(shape), 0
        while start < size:
            stop = min(size, start + width - filled)
            for silo, piece in enumerate(pieces):
                buffer[silo, filled : filled + stop - start] = piece[start:stop]
            filled, start = filled + stop - start, stop
            if filled == width:
                yield buffer
                filled = 0
    if filled:
        yield buffer[:, :filled]


def _add_square(block: NDArray[Any], result: FloatArray, scratch: NDArray[Any]) -> None:
    with np.errstate(over="ignore", invalid="ignore", under="ignore"):
        np.matmul(block, block.T, out=scratch)
    if not _is_doubtful(block, scratch.diagonal()):
        np.add(result, scratch, out=result)
        return
    width = max(_WIDTH // len(block), 16)  # a float64 copy of so much at a time stays small
    for start in range(0, block.shape[1], width):
        wide = block[:, start : start + width].astype(np.float64)
        result += wide @ wide.T


def _is_doubtful(block: NDArray[Any], squares: NDArray[Any]) -> bool:
    """Return whether float32 overflowed, or underflowed to 0, for finite numbers."""
    if block.dtype == np.float64:
        return False
    odd = np.flatnonzero(~((squares > _TINY) & np.isfinite(squares)))
    return any(bool(block[silo].any()) for silo in odd)


def _refuse_non_finite(squares: FloatArray, source: _Source) -> None:
    """Raise ValueError naming silo and layer if a squared norm is not finite."""
    for silo in np.flatnonzero(~np.isfinite(squares)).tolist():
        for name, piece in zip(source.names, source.rows[silo], strict=True):
            if not np.isfinite(piece).all():
                raise ValueError(
                    f"{source.label} must be finite. "
                    f"Silo {silo}, {_layer(name)} has values that are not."
                )
        raise ValueError(f"{source.label} must be of moderate size. Silo {silo}: too large a norm.")
