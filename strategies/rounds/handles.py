"""Handles for models whose numbers the coordinator lacks.

An algorithm may average handles, subtract them, and check whether two refer to the same model. Code
that needs the numbers calls ``arrays_of``, which raises a clear error in a secure run; a type
checker shows where that call is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from typing_extensions import TypeIs

from coterie import wire
from coterie.wire.statements import Statement
from coterie.wire.updates import Limit, shortened

Arrays: TypeAlias = wire.Model
"""Array name → values."""
Change = Callable[["Model"], "Model"]
"""Function that returns a model's replacement."""


class Handle:
    """A model whose numbers the coordinator does not have."""

    def same_as(self, other: Handle) -> bool:
        """Return whether both refer to the same model."""
        return self is other

    def minus(self, old: Model) -> Arrays:
        """Return a sketch of the training that made this model of ``old``.

        Raises:
            ValueError: there is no such sketch.
        """
        raise ValueError("there is no sketch of a sum that was not computed.")


Model: TypeAlias = Arrays | Handle
"""Named arrays or, in a secure run, a handle."""


@dataclass(frozen=True)
class Masked(Handle):
    """A model held only by the silo that trained it.

    Attributes:
        silo, round, purpose: identify the training.
        samples: the silo's weight.
        origin: the last model that the silo received before the training.
        moved: sketch of the last training's change; empty if it made none. Sketches of different
            rounds have different projections and cannot be added.
        norm: Euclidean norm of the last training's change.
        stated: what the silo stated of the last training, for the others of a sum.
        fresh: whether that training was the only one since ``origin``.
        limit: bound on the last change, if that change, or one compared with it, is longer;
            ``moved`` and ``norm`` then describe the shortened change.
    """

    silo: str
    round: int
    purpose: str
    samples: float
    origin: Arrays
    moved: Arrays
    norm: float
    stated: Statement
    fresh: bool = True
    limit: Limit | None = None

    def within(self, limit: Limit) -> Masked:
        """Return the handle with its last update shortened to a limit."""
        most = limit.of(self.samples)
        if self.norm <= most:
            return replace(self, limit=limit)
        zero = {n: np.zeros_like(a) for n, a in self.moved.items()}
        short = shortened(self.moved, zero, most / self.norm)
        return replace(self, limit=limit, moved=short, norm=most)

    def same_as(self, other: Handle) -> bool:
        return isinstance(other, Masked) and self.training == other.training

    @property
    def trained_as(self) -> str:
        """The digest of all that decided the last training, but the silo's data."""
        return self.stated.trained_as

    @property
    def training(self) -> tuple[str, int, str]:
        """The training's silo, round and purpose."""
        return self.silo, self.round, self.purpose

    def minus(self, old: Model) -> Arrays:
        if isinstance(old, Masked):
            started = not self.fresh and old.silo == self.silo
        else:
            started = self.fresh and not isinstance(old, Handle) and equal_arrays(old, self.origin)
        if started:
            return self.moved
        raise ValueError(f"silo {self.silo!r} sent no sketch from that model.")


def equal_arrays(one: Arrays, other: Arrays) -> bool:
    """Return whether two models have the same names and hold the same values."""
    if one is other:
        return True
    return one.keys() == other.keys() and all(
        a is other[name] or np.array_equal(a, other[name]) for name, a in one.items()
    )


@dataclass(frozen=True)
class AtHome(Handle):
    """A model that a silo makes and keeps; ``sent``: what it is sent in place of it."""

    silo: str
    sent: Arrays

    def same_as(self, other: Handle) -> bool:
        return isinstance(other, AtHome) and self.silo == other.silo


@dataclass(frozen=True)
class MaskedMean(Handle):
    """A mean of models, some of them masked, whose sum has not been requested yet.

    ``parts`` are models and their weights; no part is itself a mean.
    """

    parts: tuple[tuple[Model, float], ...]


def masked_mean(models: Sequence[Model], weights: Sequence[float]) -> MaskedMean:
    """Return the handle of a mean of models; ``weights`` add up to 1."""
    return MaskedMean(tuple(_parts(models, weights)))


def _parts(models: Sequence[Model], weights: Sequence[float]) -> Iterator[tuple[Model, float]]:
    for model, weight in zip(models, weights, strict=True):
        inner = model.parts if isinstance(model, MaskedMean) else ((model, 1.0),)
        yield from ((part, weight * share) for part, share in inner)


def is_seen(model: Model) -> TypeIs[Arrays]:
    """Return whether the coordinator has the model's numbers."""
    return not isinstance(model, Handle)


def sent_for(model: Model) -> Model:
    """Return what a silo is sent for a model that it is to hold."""
    return model.sent if isinstance(model, AtHome) else model


def arrays_of(model: Model) -> Arrays:
    """Return the model's numbers.

    Raises:
        TypeError: the coordinator does not have them.
    """
    if isinstance(model, Handle):
        raise TypeError(
            "the coordinator does not have this model's numbers: the run is secure, or its silo "
            "keeps it. An algorithm that works_unseen may use only means of models and their "
            "differences"
        )
    return model


def changed(models: Any, change: Change) -> Any:
    """Return the models with ``change`` applied to each; the input itself if none changes."""
    before = list(models.values() if isinstance(models, Mapping) else models)
    after = [change(model) for model in before]
    if all(old is new for old, new in zip(before, after, strict=True)):
        return models
    return dict(zip(models, after, strict=True)) if isinstance(models, Mapping) else tuple(after)
