"""An engine without a network, for tests, benchmarks and simulations: it calls the ClientApp here.

The models equal those of the real federation bit for bit, because silos draw their randomness only
from (seed, silo, round), and messages pass through the same encoding.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType

from flwr.app import Context, Error, Message, RecordDict
from flwr.serverapp import Grid

from coterie import wire
from coterie.engine.flower import set_message_id, set_sender
from coterie.engine.plain import Plain
from coterie.wire.games import Game, PlayedContext

NodeConfig = Mapping[str, str | int | float | bool]


class InProcessGrid(Plain, Grid):
    """An engine that calls a ClientApp, or a callable like one, for every message, in order.

    It is also Flower's Grid, so that Flower's own strategies run on it.

    Node i, counted from 0 in ``node_configs``, gets id i+1. ``run_config`` is the app's
    configuration, as ``flwr run --run-config`` gives it.
    """

    def __init__(
        self,
        app: Callable[[Message, Context], Message],
        node_configs: Sequence[NodeConfig],
        *,
        run_config: NodeConfig = MappingProxyType({}),
    ) -> None:
        Plain.__init__(self, self)
        self.app, self.run_config = app, run_config
        self.configs: dict[int, NodeConfig] = dict(enumerate(node_configs, start=1))
        self.game = Game()
        self._states: dict[int, RecordDict] = {}
        self._replies: dict[str, Message] = {}
        self._ids = itertools.count(1)

    def connect(self, node_config: NodeConfig) -> int:
        """Add a node; return its id."""
        node_id = max(self.configs, default=0) + 1
        self.configs[node_id] = node_config
        return node_id

    def disconnect(self, node_id: int) -> None:
        """Remove a node; messages to it are answered with an error."""
        del self.configs[node_id]

    def set_run(self, run: object) -> None:
        """Do nothing: there is only one run."""

    @property
    def run(self) -> object:  # type: ignore[override]
        """Not available: the run has no record at a SuperLink."""
        raise NotImplementedError("an in-process grid has no SuperLink run")

    def create_message(
        self,
        content: RecordDict,
        message_type: str,
        dst_node_id: int,
        group_id: str,
        ttl: float | None = None,
    ) -> Message:
        return Message(content, dst_node_id, message_type, ttl=ttl, group_id=group_id)

    def get_node_ids(self) -> Iterable[int]:
        return list(self.configs)

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Answer every message at once; return their ids."""
        ids = []
        for message in messages:
            message_id = f"message-{next(self._ids)}"
            set_message_id(message, message_id)
            self._replies[message_id] = self._answer(message)
            ids.append(message_id)
        return ids

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies to these messages, each of them once."""
        return [self._replies.pop(i) for i in message_ids if i in self._replies]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        return self.pull_messages(self.push_messages(messages))

    def _answer(self, message: Message) -> Message:
        node_id = message.metadata.dst_node_id
        if node_id in self.configs:
            reply = self._called(node_id, message)
        else:
            reply = Message(Error(wire.FAILED, f"node {node_id} has left"), reply_to=message)
        set_sender(reply, node_id)
        reply.metadata.delivered_at = str(time.time())
        return reply

    def _called(self, node_id: int, message: Message) -> Message:
        state = self._states.setdefault(node_id, RecordDict())
        own, config = dict(self.configs[node_id]), dict(self.run_config)
        context = PlayedContext(self.game, 1, node_id, own, state, run_config=config)
        try:
            return self.app(message, context)
        except Exception as error:
            failure = Error(wire.FAILED, f"{type(error).__name__}: {error}")
            return Message(failure, reply_to=message)
