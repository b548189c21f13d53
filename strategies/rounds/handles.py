"""What stands for a model whose numbers the coordinator does not have: secure aggregation.

An algorithm may take means of handles and differences between them, and ask whether two are of the
same model. Who needs the numbers asks for them by ``arrays_of``, and gets a clear error in a secure
run; a type checker says where that is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import numpy as np
from typing_extensions import TypeIs

from coterie import wire
from coterie.wire.updates import Limit, shortened

Arrays: TypeAlias = wire.Model
"""Name → numbers."""
Change = Callable[["Model"], "Model"]
"""What comes in a model's place."""


class Handle:
    """A model that the coordinator does not have."""

    def same_as(self, other: Handle) -> bool:
        """Return whether both are of the same model."""
        return self is other

    def minus(self, old: Model) -> Arrays:
        """Return a sketch of what was changed since ``old``.

        Raises:
            ValueError: there is no such sketch.
        """
        raise ValueError("there is no sketch of a sum that has not been taken.")


Model: TypeAlias = Arrays | Handle
"""Named arrays; in a secure run also what stands for them."""


@dataclass(frozen=True)
class Masked(Handle):
    """A model that only the silo has which trained it.

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
    origin: Arrays
    moved: Arrays
    norm: float
    reach: float
    trained_as: str
    fresh: bool = True
    limit: Limit | None = None

    def within(self, limit: Limit, before: Arrays) -> Masked:
        """Return the same with its last update no longer than a limit.

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

    def same_as(self, other: Handle) -> bool:
        """Return whether both are of the same training."""
        return isinstance(other, Masked) and self.training == other.training

    @property
    def training(self) -> tuple[str, int, str]:
        """Silo, round and purpose."""
        return self.silo, self.round, self.purpose

    def minus(self, old: Model) -> Arrays:
        """Return a sketch of what its trainings changed since ``old``."""
        if isinstance(old, Masked):
            if _equal(old.origin, self.origin):
                return {
                    name: (array - old.moved[name]).astype(array.dtype)  # type: ignore[operator]
                    for name, array in self.moved.items()
                }
        elif not isinstance(old, Handle) and _equal(old, self.origin):
            return self.moved
        raise ValueError(f"of silo {self.silo!r} no sketch from that model is known.")


def _equal(one: Arrays, other: Arrays) -> bool:
    if one is other:
        return True
    return all(a is other[name] or np.array_equal(a, other[name]) for name, a in one.items())


@dataclass(frozen=True)
class MaskedMean(Handle):
    """A mean of models some of which are masked, until silos have been asked for their sum.

    ``parts`` are models and their weights, none of which is a mean itself.
    """

    parts: tuple[tuple[Model, float], ...]


def masked_mean(models: Sequence[Model], weights: Sequence[float]) -> MaskedMean:
    """Return what stands for a mean of models; ``weights`` add up to 1."""
    return MaskedMean(tuple(_parts(models, weights)))


def _parts(models: Sequence[Model], weights: Sequence[float]) -> Iterator[tuple[Model, float]]:
    for model, weight in zip(models, weights, strict=True):
        inner = model.parts if isinstance(model, MaskedMean) else ((model, 1.0),)
        yield from ((part, weight * share) for part, share in inner)


def is_seen(model: Model) -> TypeIs[Arrays]:
    """Return whether the coordinator has the model's numbers."""
    return not isinstance(model, Handle)


def arrays_of(model: Model) -> Arrays:
    """Return the model's numbers.

    Raises:
        TypeError: the coordinator does not have them.
    """
    if isinstance(model, Handle):
        raise TypeError(
            "in a secure run the coordinator does not have this model's numbers. An algorithm that "
            "works_unseen takes means of models and differences between them, and nothing else"
        )
    return model


def changed(models: Any, change: Change) -> Any:
    """Return a mapping or tuple of models with ``change`` of each; itself if all stay."""
    before = list(models.values() if isinstance(models, Mapping) else models)
    after = [change(model) for model in before]
    if all(old is new for old, new in zip(before, after, strict=True)):
        return models
    return dict(zip(models, after, strict=True)) if isinstance(models, Mapping) else tuple(after)
