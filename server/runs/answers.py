"""A Grid that reports answers as they arrive, for the live views."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from flwr.app import Message
from flwr.serverapp import Grid

from coterie import wire


class AnnouncingGrid:
    """A Grid that forwards everything to another one and reports answers.

    Args:
        answered: called after each pull with the ids of the nodes that answered, and the message
            type; not for questions (``query.…``).
        later: called with a node that cannot do its work now, and why.
    """

    def __init__(
        self,
        inner: Grid,
        answered: Callable[[Sequence[int], str], None],
        later: Callable[[int, str], None],
    ) -> None:
        self.inner = inner
        self.answered, self.later = answered, later

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies of the inner Grid, and report who answered."""
        replies = list(self.inner.pull_messages(message_ids))
        nodes: dict[str, list[int]] = {}
        for reply in replies:
            meta = reply.metadata
            if meta.message_type.split(".")[0] in (wire.TRAIN, wire.EVALUATE):
                nodes.setdefault(meta.message_type, []).append(meta.src_node_id)
                if reply.has_error() and reply.error.code in wire.NOT_NOW:
                    self.later(meta.src_node_id, str(reply.error.reason))
        for kind, ids in nodes.items():
            self.answered(ids, kind)
        return replies
