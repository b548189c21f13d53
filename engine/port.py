"""What the product needs of an engine: nothing else passes between the two.

A run has an ``Engine``. *Plain* (``engine.plain``) uses only Flower's public Grid, of any
SuperLink, and is the reference. *In process* (``engine.inprocess``) needs no network. *Fast*
(``engine.fast``) is the default. ``tests/contract/engine`` holds all three to the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from flwr.app import Message


@runtime_checkable
class Engine(Protocol):
    """A run's connection to its nodes. Not for several threads at a time."""

    def nodes(self) -> list[int]:
        """Return the ids of the nodes that are connected now."""

    def push(self, messages: Sequence[Message]) -> list[str]:
        """Send messages to their destinations; return their ids, "" for one that is too large."""

    def pull(self, ids: Sequence[str], wait_s: float) -> list[Message]:
        """Return those replies to these messages that are complete.

        ``ids`` are of messages whose reply has not come yet; a message that is not among them is
        withdrawn, and its reply is dropped. The call may wait for at most ``wait_s`` seconds, and
        chooses the pause between two looks itself. For a node that is gone, and for a reply that
        cannot be read, the engine answers with an error reply, or this raises.
        """

    def close(self) -> None:
        """Release connections and threads; replies are not fetched any more."""
