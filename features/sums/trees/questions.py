"""Questions and answers as arrays, and the checks of both sides.

Four kinds: the sums of derivatives for a constant answer (``base``), the rows in cells of each
column (``cells``), the histograms of nodes of the trees that grow (``level``), and the losses of
complete trees on rows that are held out (``losses``).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie import wire
from coterie.features.sums.trees import bins, growth
from coterie.features.sums.trees.bins import LOWEST, MOST_CUTS, Ints
from coterie.features.sums.trees.ensemble import Ensemble, Floats
from coterie.features.sums.trees.growth import Level, Sides
from coterie.features.sums.trees.histograms import SUMS, Rows
from coterie.wire.fixed import HISTOGRAMS, Words, total_of

Arrays = dict[str, NDArray[Any]]
RECORD = "sums"
"""Name of the record of an answer, and of its array."""
MOST = 8_000_000
"""Most numbers of an answer; what would be larger is asked in parts."""
LARGEST = 1e15
"""Largest absolute value of a sum."""
CLOSE = 1e-6
"""Relative difference of sums over the same rows, by rounding."""


class AnswerError(ValueError):
    """A question or an answer is impossible; the text says why."""


@dataclass(frozen=True)
class Question:
    """A question: its kind, its arrays, and the shape of an answer to it."""

    kind: str = ""
    arrays: Arrays = field(default_factory=dict)
    shape: tuple[int, ...] = ()


def base(answers: NDArray[np.float32]) -> Question:
    """Ask for the sums of derivatives where every answer is ``answers`` (K,)."""
    return Question("base", {"base": answers}, (len(answers), SUMS))


def cells(columns: Sequence[Ints]) -> Question:
    """Ask for the rows in each column's cells."""
    return Question("cells", joined("cells", columns), (sum(map(len, columns)),))


def levels(at: Level, edges: Sequence[NDArray[np.float32]]) -> list[Question]:
    """Ask for the histograms of some nodes, in as many questions as ``MOST`` needs."""
    width = _width(edges)
    arrays = {
        **at.trees.arrays(at.done + 1),
        **joined("edges", edges),
        "at": np.array([at.done, at.level]),
    }
    size = max(nodes_of(width), 1)
    parts = [at.nodes[i : i + size] for i in range(0, len(at.nodes), size)]
    return [
        Question("level", {**arrays, "nodes": part}, (len(part), width, SUMS)) for part in parts
    ]


def nodes_of(width: int) -> int:
    """Return the most nodes of one question, where all columns have ``width`` bins together."""
    return MOST // (width * SUMS)


def bytes_of_tree(columns: int, outputs: int, depth: int, bins: int) -> int:
    """Return the bytes of a silo's histograms for one tree of each output, at most.

    ``bins`` are those of a column, without that of missing values.
    """
    nodes: int = outputs * (2**depth - 1)
    return columns * (bins + 1) * nodes * SUMS * np.dtype(np.float64).itemsize


def losses(trees: Ensemble, done: int) -> Question:
    """Ask for the losses on held-out rows after 0, 1, … ``done`` trees."""
    arrays = {**trees.arrays(done), "losses": np.array([done])}
    return Question("losses", arrays, (done + 1, 2))


def for_silo(question: Question, sides: Sides, silo: int) -> Question:
    """Return the question about nodes of trees that split by silo, as it is put to one silo."""
    trees = Ensemble(**{name: question.arrays[name] for name in Ensemble.names()})
    own = growth.for_silo(trees, sides, silo).arrays()
    return replace(question, arrays={**question.arrays, **own})


def answer(arrays: Arrays, rows: Rows, held_out: Rows | None = None) -> Floats:
    """Return a silo's answer to a question that was received; losses are those on ``held_out``.

    Raises:
        AnswerError: it is not a question, or does not fit the rows.
    """
    try:
        columns, outputs = rows.x.shape[1], rows.outputs
        if "losses" in arrays:
            trees = _complete(arrays, columns, outputs)
            _require(arrays["losses"].tolist() == [len(trees.leaf)], "complete trees")
            if held_out is None:
                return np.zeros((len(trees.leaf) + 1, 2))
            return held_out.losses(trees)
        if "nodes" in arrays:
            trees = _complete(arrays, columns, outputs)
            at, edges = arrays["at"], parted("edges", arrays, columns)
            done, number = (int(value) for value in at)
            nodes = arrays["nodes"]
            _require(len(trees.leaf) == done + 1 and 0 <= number < trees.depth, "other trees")
            _check_nodes(nodes, outputs, number)
            _require(len(nodes) * _width(edges) * SUMS <= MOST, "smaller histograms")
            return rows.histograms(trees, done, number, nodes, edges)
        if "cells" in arrays:
            own = parted("cells", arrays, columns)
            _require(all(len(one) and one[0] == LOWEST for one in own), "cells from the lowest on")
            return np.concatenate(rows.counts(own)).astype(np.float64)
        constant = arrays["base"]
        fits = constant.shape == (outputs,) and constant.dtype == np.float32
        _require(fits and bool(np.isfinite(constant).all()), "one finite answer per output")
        return rows.totals(constant)
    except KeyError as missing:
        raise AnswerError(f"a question about trees needs {missing}") from None
    except (ValueError, TypeError, OverflowError) as error:
        raise AnswerError(f"a question about trees must fit the rows: {error}") from None


def _complete(arrays: Arrays, columns: int, outputs: int) -> Ensemble:
    trees = Ensemble.of({name: arrays[name] for name in Ensemble.names()})
    _require(len(trees.gain) == columns and len(trees.base) == outputs, "other rows")
    return trees


def _width(edges: Sequence[NDArray[np.float32]]) -> int:
    """Return the bins of all columns, with those of missing values."""
    return sum(len(own) + 2 for own in edges)


def read_answer(question: Question, arrays: Arrays, samples: int) -> Floats:
    """Return the checked answer of a silo with this number of samples.

    Raises:
        AnswerError: it is not a possible answer to the question.
    """
    found = arrays.get(RECORD)
    if found is None or found.shape != question.shape or found.dtype != np.float64:
        got = None if found is None else (str(found.dtype), found.shape)
        raise AnswerError(f"it must answer with float64 of shape {question.shape}. Got {got}.")
    if not (found.max(initial=0) <= LARGEST and found.min(initial=0) >= -LARGEST):
        raise AnswerError(
            f"its sums are not finite, or impossibly large: above {LARGEST:g}. If its targets are "
            "as large as that, all silos need another unit of them."
        )
    counts = found if question.kind == "cells" else found[..., -1]
    parts = question.kind == "level"  # of the rows of a run of bins
    if (counts < 0).any() or not (parts or (counts == np.round(counts)).all()):
        raise AnswerError("its numbers of rows must be whole, and at least 0.")
    if question.kind == "cells":
        _check_total(counts, question.arrays["sizes"], samples)
        if counts[bins.of_no_number(question.arrays["cells"])].any():
            raise AnswerError("it counts rows in cells that have no finite number.")
    elif (found[..., 1] < 0).any() or found[counts == 0].any():
        raise AnswerError("its sums over no row must be 0, and second derivatives at least 0.")
    elif question.kind == "losses":
        if (found[:, 0] < 0).any() or (counts != counts[0]).any():
            raise AnswerError("its losses must be at least 0, and all over the same rows.")
    elif question.kind == "level":
        _check_columns(found, question.arrays["sizes"], samples)
    elif (counts > samples).any():
        raise AnswerError(f"it counts more rows than the {samples} that it has.")
    return found


def read_masked(question: Question, arrays: Arrays) -> Words:
    """Return the masked answer of a silo in a secure run.

    Raises:
        AnswerError: it is not as long as an answer to the question.
    """
    try:
        return HISTOGRAMS.receive(arrays.get(wire.MASKED), math.prod(question.shape))
    except wire.WireError as error:
        raise AnswerError(str(error)) from None


def read_sum(question: Question, parts: Sequence[Words], samples: int) -> Floats:
    """Return the checked sum of the masked answers of all silos that were asked.

    ``samples`` is the number of samples of all of them. Raises ``AnswerError`` if it cannot be.
    """
    total = HISTOGRAMS.decode(total_of(parts)).reshape(question.shape)
    return read_answer(question, {RECORD: total}, samples)


def _check_total(counts: Floats, sizes: Ints, samples: int) -> None:
    if (np.add.reduceat(counts, np.cumsum(sizes) - sizes) > samples).any():
        raise AnswerError(f"it counts more rows of a column than the {samples} that it has.")


def _check_columns(sums: Floats, sizes: Ints, samples: int) -> None:
    """Check that all columns of a node add up to the same: they are sums over the same rows."""
    widths = sizes + 2
    starts = np.cumsum(widths) - widths
    whole = np.add.reduceat(sums, starts, axis=1)
    apart = np.abs(whole - whole[:, :1])
    scale = np.add.reduceat(np.abs(sums), starts, axis=1).sum(axis=1, keepdims=True) + 1
    if (apart > CLOSE * scale).any():
        raise AnswerError("the columns of a node do not add up to the same sums.")
    by_output = whole[:, 0, 2]
    if (np.abs(by_output - np.round(by_output)) > CLOSE * scale[:, 0, 2]).any():
        raise AnswerError("its numbers of rows in a node must be whole.")
    if (by_output > samples * (1 + CLOSE)).any():
        raise AnswerError(f"it counts more rows in a node than the {samples} that it has.")


def _check_nodes(nodes: NDArray[Any], outputs: int, number: int) -> None:
    first = 2**number - 1
    fits = nodes.ndim == 2 and nodes.shape[1] == 2 and nodes.dtype == np.int64 and len(nodes)
    _require(bool(fits), "nodes as pairs of output and node")
    inside = (nodes[:, 0] >= 0) & (nodes[:, 0] < outputs)
    inside &= (nodes[:, 1] >= first) & (nodes[:, 1] < 2 * first + 1)
    _require(bool(inside.all()) and len(np.unique(nodes, axis=0)) == len(nodes), "nodes of a level")


def joined(name: str, columns: Sequence[NDArray[Any]]) -> dict[str, NDArray[Any]]:
    """Return the arrays of columns of different lengths."""
    return {name: np.concatenate(columns), "sizes": np.array([len(one) for one in columns])}


def parted(name: str, arrays: Mapping[str, NDArray[Any]], columns: int) -> list[NDArray[Any]]:
    """Return the inverse of ``joined``; raise ``ValueError`` or ``KeyError`` if there is none."""
    whole, sizes = arrays[name], arrays["sizes"]
    kind = np.float32 if name == "edges" else np.int64
    fits = whole.ndim == 1 and whole.dtype == kind and bool(np.isfinite(whole).all())
    fits &= sizes.shape == (columns,) and sizes.dtype == np.int64
    _require(fits and bool(((sizes >= 0) & (sizes <= MOST_CUTS)).all()), f"{name} of each column")
    _require(int(sizes.sum()) == len(whole), f"{name} of each column")
    parts = np.split(whole, np.cumsum(sizes)[:-1])
    _require(all((np.diff(own) > 0).all() for own in parts), f"ascending {name}")
    return parts


def _require(fits: bool, what: str) -> None:
    if not fits:
        raise ValueError(f"it must have {what}")
