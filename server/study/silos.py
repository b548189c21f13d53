"""The silos that a command plays itself, in its own process."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module

from flwr.clientapp import ClientApp

from coterie.engine.inprocess import NodeConfig
from coterie.strategies.errors import refused
from coterie.tasks.base import Task
from coterie.wire import Layers

CLIENT_APP, PREPARE = "coterie.client.app", "coterie.client.prepare"
GENERATORS, SESSION = "coterie.client.work.generators", "coterie.client.work.session"
"""Modules of the ClientApp and of what opens its silos, loaded by name as Flower's engines do:
the server imports no silo code except where it plays all silos itself."""


def client_app() -> ClientApp:
    """Return coterie's ClientApp."""
    app: ClientApp = import_module(CLIENT_APP).app
    return app


def open_silos(node_configs: Sequence[NodeConfig], *, whose: str = "") -> None:
    """Open the data of this app's silos now: in a run, a silo only reports that it failed.

    Args:
        node_configs: of silos that differ only in ``silo``; the data are read once.
        whose: name of the data in the error.

    Raises:
        FederationError: a task or settings are invalid.
    """
    try:
        import_module(PREPARE).prepare_nodes(node_configs)
    except ValueError as error:  # what tasks and settings raise are ValueErrors
        text = f"{whose}: {error}" if whose else str(error)
        raise refused(text) from None


def close_silos() -> None:
    """Release the data of all open silos; a message to a silo opens them again."""
    import_module(SESSION).close_all()


def describe_head(task: Task) -> Layers:
    """Return the layers of the head as this task's silos describe them; empty if they cannot.

    Raises ``TaskError`` if the model cannot be made.
    """
    layers: Layers = import_module(GENERATORS).describe_head(task, task.model())
    return layers
