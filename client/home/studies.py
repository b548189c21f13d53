"""Choice among a silo's tasks: it may serve several (``[[also]]`` in silo.toml)."""

from __future__ import annotations

from collections import Counter
from functools import lru_cache

from coterie.client.home.settings import SettingsError, SiloSettings
from coterie.tasks import load_task
from coterie.tasks.base import TaskError
from coterie.tasks.own.table_declaration import TableDeclaration


def tasks_of(settings: SiloSettings) -> tuple[str, ...]:
    """Return the names of all tasks that a silo serves, sorted.

    Raises:
        TaskError: one cannot be loaded.
        SettingsError: two have the same name, by which a run chooses.
    """
    names = tuple(_name_of(one.task) for one in settings.studies())
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise SettingsError(
            f"two tasks of silo {settings.name!r} are called {twice[0]!r}. A run names one "
            "task: give each its own name, or its own silo."
        )
    return tuple(sorted(names))


def study_of(settings: SiloSettings, task: str) -> SiloSettings:
    """Return the settings with the task of this name as ``task``; unchanged if there is none."""
    for one in settings.studies() if settings.also else ():
        if _name_of(one.task) == task:
            return one
    return settings


def columns_of(settings: SiloSettings, task: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the names of inputs and targets that the task declares; empty if they are unknown."""
    try:
        declared = getattr(load_task(study_of(settings, task).task), "declaration", None)
    except TaskError:  # a person can decide without them
        return (), ()
    if not isinstance(declared, TableDeclaration):
        return (), ()
    return (*declared.numeric, *declared.categorical), declared.targets


@lru_cache(maxsize=64)
def _name_of(source: str) -> str:
    return load_task(source).name
