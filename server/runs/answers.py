"""An engine that reports answers as they arrive, for the live views."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flwr.app import Message

from coterie import wire
from coterie.engine.port import Engine


class Announcing:
    """An engine that forwards everything to another one and reports answers.

    Args:
        answered: called after each pull with the ids of the nodes that answered, and the message
            type; without ``asked`` not for questions (``query.…``).
        later: called with a node that cannot do its work now, and why.
        asked: called before each push with the ids of the nodes that it goes to.
    """

    def __init__(
        self,
        inner: Engine,
        answered: Callable[[Sequence[int], str], None],
        later: Callable[[int, str], None],
        asked: Callable[[Sequence[int]], None] | None = None,
    ) -> None:
        self.inner = inner
        self.answered, self.later, self.asked = answered, later, asked

    def nodes(self) -> list[int]:
        return self.inner.nodes()

    def push(self, messages: Sequence[Message]) -> list[str]:
        if self.asked is not None:
            self.asked([message.metadata.dst_node_id for message in messages])
        return self.inner.push(messages)

    def close(self) -> None:
        self.inner.close()

    def pull(self, ids: Sequence[str], wait_s: float) -> list[Message]:
        """Return the replies of the inner engine, and report who answered."""
        replies = self.inner.pull(ids, wait_s)
        nodes: dict[str, list[int]] = {}
        for reply in replies:
            meta = reply.metadata
            if self.asked or meta.message_type.split(".")[0] in (wire.TRAIN, wire.EVALUATE):
                nodes.setdefault(meta.message_type, []).append(meta.src_node_id)
                if reply.has_error() and reply.error.code in wire.NOT_NOW:
                    self.later(meta.src_node_id, str(reply.error.reason))
        for kind, who in nodes.items():
            self.answered(who, kind)
        return replies
