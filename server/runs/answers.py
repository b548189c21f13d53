"""A Grid that tells who has answered, as it happens: the live views show whom a round waits for."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from coterie import wire


class AnnouncingGrid(Grid):
    """Passes everything on to another Grid.

    Args:
        inner: the Grid that does the work.
        answered: called with the ids of the nodes whose answers one pull brought, and the type of
            the messages they answer. Not called for questions (``query.…``).
    """

    def __init__(self, inner: Grid, answered: Callable[[Sequence[int], str], None]) -> None:
        self.inner = inner
        self.answered = answered

    def set_run(self, run: Any) -> None:
        """See the other Grid."""
        self.inner.set_run(run)

    @property
    def run(self) -> object:  # type: ignore[override]
        """See the other Grid."""
        return self.inner.run

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        """See the other Grid."""
        return self.inner.create_message(content, message_type, dst_node_id, group_id, ttl)

    def get_node_ids(self) -> Iterable[int]:
        """See the other Grid."""
        return self.inner.get_node_ids()

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """See the other Grid."""
        return self.inner.push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """What the other Grid gives; who answered is told."""
        replies = list(self.inner.pull_messages(message_ids))
        nodes: dict[str, list[int]] = {}
        for reply in replies:
            meta = reply.metadata
            if meta.message_type.split(".")[0] in (wire.TRAIN, wire.EVALUATE):
                nodes.setdefault(meta.message_type, []).append(meta.src_node_id)
        for kind, ids in nodes.items():
            self.answered(ids, kind)
        return replies

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """See the other Grid."""
        return self.inner.send_and_receive(messages, timeout=timeout)
