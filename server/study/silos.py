"""The silos that a command plays itself, in its own process.

Only here does the server import code of silos, and no earlier than it plays them.
"""

from __future__ import annotations

from collections.abc import Sequence

from flwr.clientapp import ClientApp

from coterie.engine.inprocess import NodeConfig
from coterie.strategies.errors import refused
from coterie.tasks.base import Task
from coterie.wire import Layers


def client_app() -> ClientApp:
    """Return coterie's ClientApp."""
    from coterie.client.app import app

    return app


def open_silos(node_configs: Sequence[NodeConfig], *, whose: str = "") -> None:
    """Open the data of this app's silos now: in a run, a silo only reports that it failed.

    Args:
        node_configs: of silos that differ only in ``silo``; the data are read once.
        whose: name of the data in the error.

    Raises:
        FederationError: a task or settings are invalid.
    """
    from coterie.client.prepare import prepare_nodes

    try:
        prepare_nodes(node_configs)
    except ValueError as error:  # what tasks and settings raise are ValueErrors
        text = f"{whose}: {error}" if whose else str(error)
        raise refused(text) from None


def close_silos() -> None:
    """Release the data of all open silos; a message to a silo opens them again."""
    from coterie.client.work.session import close_all

    close_all()


def describe_head(task: Task) -> Layers:
    """Return the layers of the head as this task's silos describe them; empty if they cannot.

    Raises ``TaskError`` if the model cannot be made.
    """
    from coterie.client.work import generators

    return generators.describe_head(task, task.model())
