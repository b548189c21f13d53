"""Tasks that have several families of models: a network and boosted trees, whichever is better.

Such a task lists them as ``families``. Each is a task, with its own model and its own
preparation of the same samples: ``task.of_run({FAMILY: name})``. The model of the whole task has
the arrays of all of them, as ``NAME.ARRAY``; it only says what silos must have in common.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeVar

from coterie.tasks.base import RunKey, Task

if TYPE_CHECKING:
    from torch import nn

Own = TypeVar("Own", bound=Task)

FAMILY, TREES = "family", "trees"
FAMILIES = "network", TREES
"""As in messages (``coterie.wire.names``)."""
KEYS = {FAMILY: RunKey("", choices=("", *FAMILIES))}
"""The run keys of such a task."""


def families_of(task: object) -> Sequence[str]:
    """Return the names of a task's families; none if it has one model."""
    return tuple(getattr(task, "families", ()))


def of_family(task: Own, name: str) -> Own:
    """Return the task of one family."""
    return task.of_run({FAMILY: name})


def of_all(task: Task) -> nn.ModuleDict:
    """Return the models of all families."""
    from torch import nn

    return nn.ModuleDict({name: of_family(task, name).model() for name in families_of(task)})
