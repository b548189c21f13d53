"""Own arrays in an ``.npz`` file. See ``coterie.tasks.own.declared``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from coterie.tasks.base import ColumnScale, Option, Persons, Samples, TaskError, read_array
from coterie.tasks.npy import read_npy
from coterie.tasks.options import read_options
from coterie.tasks.own.declared import Declaration, DeclaredTask, Size, in_nfc
from coterie.tasks.own.scaling import in_32_bits, scale_of, sums_of
from coterie.tasks.own.targets import ArrayTarget, NumberArray, Target
from coterie.tasks.own.whose import checked_keys
from coterie.tasks.problems import Classes, Masks, Numbers


class ArrayDeclaration(Declaration):
    """The declaration of arrays: ``shape`` of one sample, ``scale`` as a factor on every number."""

    kind: Literal["npz"]
    shape: Annotated[tuple[Size, ...], Field(min_length=1, max_length=3)]
    scale: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 1.0
    target: ArrayTarget | None = None

    @property
    def answer(self) -> Target | None:
        return self.target

    @model_validator(mode="after")
    def _masks_have_pixels(self) -> ArrayDeclaration:
        if isinstance(self.problem(), Masks) and len(self.shape) < 2:
            raise ValueError("masks need samples with channels before height and width")
        return self


@dataclass(frozen=True)
class Arrays:
    """Samples and targets of a file; ``test`` holds those that the file marks for testing."""

    x: NDArray[np.float32]
    y: NDArray[Any]
    test: Arrays | None = None
    persons: Persons | None = None

    def take(self, rows: NDArray[np.intp]) -> Arrays:
        """Return only these rows."""
        persons = None if self.persons is None else self.persons[rows]
        return Arrays(self.x[rows], self.y[rows], persons=persons)


class ArrayTask(DeclaredTask):
    """Arrays ``x`` and ``y``; or ``x_train``, ``y_train``, ``x_test``, ``y_test``.

    ``y`` holds class numbers from 0, class names, or what the declared target needs.
    """

    declaration: ArrayDeclaration

    @property
    def shape(self) -> tuple[int, ...]:
        return self.declaration.shape

    def expected(self) -> str:
        return (
            "a .npz file with x and y, or x_train, y_train, x_test and y_test; samples of shape "
            f"{self.shape}"
        )

    def read(self, place: Path, options: Mapping[str, Any]) -> Arrays:
        """Read all arrays of the file."""
        try:
            held = read_npy(place)
            if isinstance(held, np.ndarray):
                raise ValueError("it is an .npy file, with one array and no labels")
        except Exception as error:  # of a damaged file numpy and zipfile raise all sorts of things
            raise TaskError(
                f"{str(place)!r} cannot be read: {error}. Expected {self.expected()}."
            ) from None
        if {"x_train", "y_train", "x_test", "y_test"} <= set(held):
            test = self._arrays(held["x_test"], held["y_test"], place)
            train = self._arrays(held["x_train"], held["y_train"], place)
            return Arrays(train.x, train.y, test)
        if not {"x", "y"} <= set(held):
            raise TaskError(
                f"{str(place)!r} has the arrays {', '.join(held) or 'none'}. "
                f"Expected {self.expected()}."
            )
        return self._arrays(held["x"], held["y"], place)

    def keys(
        self, of: Arrays, place: Path, options: Mapping[str, Any], which: str
    ) -> Sequence[str]:
        """Return the values of the array that ``group`` names."""
        group = options["group"]
        with np.load(place, allow_pickle=False) as loaded:
            wanted = f"{group}_{which}" if which else group
            found = loaded[wanted] if wanted in loaded.files else None
        if found is None or found.shape != (len(of.x),) or found.dtype.kind not in "iuU":
            got = "none" if found is None else f"{found.dtype} of shape {found.shape}"
            raise TaskError(
                f"{str(place)!r} must have an array {wanted!r} of {len(of.x)} whole numbers or "
                f"texts: group = {group!r} means that it identifies the person of each sample. "
                f"Got {got}."
            )
        keys: list[str] = [in_nfc(key).strip() for key in found.astype(str).tolist()]
        return checked_keys(keys, f"array {wanted!r} of {str(place)!r}")

    def parts(self, whole: Arrays) -> tuple[Arrays, Arrays] | None:
        return None if whole.test is None else (whole, whole.test)

    def samples(
        self, train: Arrays, test: Arrays
    ) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        return train.x, test.x

    def inputs(self, file: Path, options: Mapping[str, Option]) -> Samples:
        """Read samples as ``Task.inputs`` does, of the declared shape, and scale them."""
        read_options(self.name, options, self.options)
        return Samples(self._scaled(read_array(file), file))

    def prepared(self, options: Mapping[str, Option]) -> Mapping[str, Any]:
        factor = self.declaration.scale
        how = {"numbers": "multiplied by factor", "factor": factor}
        return {**how, **self.prepared_targets()}

    def scale_of(self, train: Arrays) -> ColumnScale | None:
        """Return the scale of real targets; a kept model's own takes precedence."""
        own = scale_of(train.y) if self.scaled_targets else None
        return own if self.scale is None else self.scale

    @property
    def pooled_columns(self) -> int:  # type: ignore[override]
        target = self.declaration.target
        pooled = isinstance(target, NumberArray) and target.scale == "federation"
        return self.scaled_targets if pooled else 0

    def column_sums(self, options: Mapping[str, Option]) -> NDArray[np.float64]:
        train, _ = self.read_both(read_options(self.name, options, self.options))
        return sums_of(train.persons, train.y)

    def _arrays(self, x: NDArray[Any], y: NDArray[Any], place: Path) -> Arrays:
        samples = self._scaled(x, place)
        if y.ndim and len(x) != len(y):
            raise TaskError(
                f"{str(place)!r} must have one label per sample. "
                f"Got {len(x)} samples and {len(y)} labels."
            )
        if not len(x):
            raise TaskError(f"{str(place)!r} has no samples.")
        return Arrays(samples, self._targets(y, place))

    def _targets(self, y: NDArray[Any], place: Path) -> NDArray[Any]:
        problem = self.problem
        if isinstance(problem, Classes):
            if y.ndim != 1 or y.dtype.kind not in "iuU":
                raise TaskError(
                    f"labels in {str(place)!r} must be whole numbers or names, one per sample. "
                    f"Got {y.dtype} of shape {y.shape}."
                )
            named = y.dtype.kind == "U"
            return self.labels(y.tolist(), str(place)) if named else y.astype(np.int64)
        if y.dtype.kind not in ("iub" if isinstance(problem, Masks) else "fiub"):
            what = "whole numbers" if isinstance(problem, Masks) else "numbers"
            raise TaskError(f"y in {str(place)!r} must contain {what}. Got {y.dtype}.")
        if isinstance(problem, Masks):
            if y.shape[1:] != self.shape[1:]:
                raise TaskError(
                    f"masks in {str(place)!r} must be of shape {self.shape[1:]}. Got {y.shape[1:]}."
                )
            y = y.astype(np.int64)
        else:
            single = isinstance(problem, Numbers) and problem.num_targets == 1 and y.ndim == 1
            y = y.reshape(len(y), 1) if single else y
            of_each = ["y"] * y[:1].size if y.ndim else []
            y = in_32_bits(y, of_each, place) if of_each else y.astype(np.float32)
        try:
            problem.check(y, "all")
        except TaskError as error:
            raise TaskError(f"y in {str(place)!r} does not fit: {error}") from None
        return y

    def _scaled(self, x: NDArray[Any], place: Path) -> NDArray[np.float32]:
        if x.shape[1:] != self.shape:
            raise TaskError(
                f"samples in {str(place)!r} must be of shape {self.shape}. Got {x.shape[1:]}."
            )
        if x.dtype.kind not in "fiub":
            raise TaskError(f"samples in {str(place)!r} must be numbers. Got {x.dtype}.")
        return x.astype(np.float32) * np.float32(self.declaration.scale)
