"""Load tasks by name: built-in ones, or plug-ins as ``module:attribute``."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from coterie.tasks.base import Task, TaskError

BUILT_IN: dict[str, str] = {
    "digits": "coterie.tasks.images.digits:Digits",
    "mnist": "coterie.tasks.images.datasets:Mnist",
    "fashion-mnist": "coterie.tasks.images.datasets:FashionMnist",
    "emnist-letters": "coterie.tasks.images.datasets:EmnistLetters",
    "cifar10": "coterie.tasks.images.datasets:Cifar10",
}
"""Name → ``module:class``, imported only on demand.

``name/model`` is the same task with another of its models, e.g. ``mnist/mclr``, or with GroupNorm
instead of BatchNorm: ``mnist/cnn-fedgen+groupnorm``."""


def load_task(name: str) -> Task:
    """Return the task called ``name``.

    Args:
        name: a built-in name, alone or as ``name/model``; or ``module:attribute``, where the
            attribute is a ``Task``, a subclass, or a function without arguments that returns one.
            The module must be importable on this machine; it is never fetched. Or the path of a
            ``.toml`` file that declares a task (``coterie.tasks.own.declared``) and names it.

    Raises:
        TaskError: the task is unknown or cannot be imported. The message gives the reason.
    """
    if name.endswith(".toml"):
        from coterie.tasks.own.declared import load_declared

        return load_declared(Path(name))
    base, _, model = name.partition("/")
    if base in BUILT_IN and model:
        return _with_model(name, base, model)
    reference = BUILT_IN.get(name, name)
    module_name, _, attribute = reference.partition(":")
    if not attribute:
        raise TaskError(
            f"no task is called {name!r}. Built in: {', '.join(sorted(BUILT_IN))}; give your "
            "own task as module:attribute, or as a .toml file that declares it."
        )
    try:
        found = getattr(import_module(module_name), attribute)
    except ImportError as error:
        raise TaskError(
            f"task {name!r} cannot be imported: {error}. "
            "Install its module where this runs, or set PYTHONPATH."
        ) from error
    except AttributeError:
        raise TaskError(f"module {module_name!r} has no attribute {attribute!r}.") from None
    task = found() if callable(found) else found
    if not isinstance(task, Task):
        raise TaskError(
            f"task {name!r} must be a coterie.tasks.Task, or a class or function that gives one. "
            f"Got {type(task).__name__}."
        )
    if name not in BUILT_IN:
        task.name = name  # both sides must mean the same import, whatever the class calls itself
    return task


def _with_model(name: str, base: str, model: str) -> Task:
    """Return a built-in task with one of its models, called ``name`` on the wire."""
    module, _, attribute = BUILT_IN[base].partition(":")
    kind = getattr(import_module(module), attribute)
    models = getattr(kind, "models", ())
    if model.removesuffix("+groupnorm") not in models:
        offer = ", ".join(f"{base}/{other}" for other in models) or f"only {base!r} itself"
        raise TaskError(f"task {base!r} has no model {model!r}. There is: {offer}.")
    task: Task = kind(model=model)
    task.name = name
    return task
