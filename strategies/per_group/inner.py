"""A Flower strategy as a pure function of what it remembers, over the nodes of one group.

A strategy object changes as it works. Here a new one is made for every step and given its memory, a
copy of its attributes, so that a round can be repeated, saved and resumed. Nodes are numbered by
the run, because Flower's ids change when a silo comes back.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from dataclasses import dataclass
from typing import Any, NoReturn

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Strategy

from coterie import wire
from coterie.strategies.errors import FederationError
from coterie.strategies.rounds.handles import Arrays

MOST_LOOKS = 5
"""Most times that a strategy looks for nodes before it trains: those of a group do not become more,
and Flower's strategies wait a second between two looks."""

Factory = Callable[[tuple[str, ...]], Strategy]
"""Makes a group's strategy; called with the names of the group's silos."""


@dataclass(frozen=True)
class Record:
    """An ``ArrayRecord`` in a memory."""

    arrays: Arrays


@dataclass(frozen=True)
class Nested:
    """The memory of a strategy that another wraps."""

    memory: Mapping[str, Any]


def memory_of(strategy: Strategy) -> dict[str, Any]:
    """Return a copy of a strategy's attributes, except functions."""
    own = {name: value for name, value in vars(strategy).items() if not callable(value)}
    return {name: _packed(value) for name, value in own.items()}


def with_memory(strategy: Strategy, memory: Mapping[str, Any]) -> Strategy:
    """Give a new strategy the attributes that an earlier one had."""
    for name, value in memory.items():
        if isinstance(value, Nested):
            with_memory(getattr(strategy, name), value.memory)
        else:
            setattr(strategy, name, _unpacked(value))
    return strategy


def _packed(value: Any) -> Any:
    if isinstance(value, Strategy):
        return Nested(memory_of(value))
    if isinstance(value, ArrayRecord):
        return Record({name: array.numpy() for name, array in value.items()})
    return deepcopy(value)


def _unpacked(value: Any) -> Any:
    return array_record(value.arrays) if isinstance(value, Record) else deepcopy(value)


def array_record(arrays: Arrays) -> ArrayRecord:
    """Return arrays as Flower's strategies take them."""
    return wire.encode_arrays(arrays, packed=False)


def nodes_needed(strategy: Strategy) -> int:
    """Return how many nodes a strategy waits for; Flower's own have two by default."""
    own = [getattr(strategy, name, 0) for name in ("min_available_nodes", "min_train_nodes")]
    inner = getattr(strategy, "strategy", None)
    return max([*own, nodes_needed(inner) if isinstance(inner, Strategy) else 0])


def training_of(
    strategy: Strategy,
    nodes: Sequence[int],
    model: Arrays,
    config: Mapping[str, Any],
    *,
    number: int,
    group: str,
) -> dict[int, Message]:
    """Return node → the training message that a strategy has for it.

    Raises:
        FederationError: the strategy addresses a node twice, or one that is not in the group.
    """
    messages: dict[int, Message] = {}
    given = ConfigRecord(dict(config))
    for message in strategy.configure_train(number, array_record(model), given, _Nodes(nodes)):
        node = message.metadata.dst_node_id
        if node not in nodes or node in messages:
            raise FederationError(
                f"the strategy of the group of {group} sent node {node} a message, which must be "
                f"one of {', '.join(map(str, nodes))}, each once."
            )
        messages[node] = message
    return messages


def aggregated(
    strategy: Strategy, replies: Mapping[int, RecordDict], *, number: int
) -> tuple[Arrays | None, MetricRecord | None]:
    """Return the model and metrics that a strategy makes of its nodes' replies, in their order."""
    came = [
        Message(content, reply_to=Message(RecordDict(), dst_node_id=node, message_type=wire.TRAIN))
        for node, content in sorted(replies.items())
    ]
    model, metrics = strategy.aggregate_train(number, came)
    return None if model is None else wire.decode_arrays(model), metrics


@contextmanager
def seeded(*seed: int) -> Iterator[None]:
    """Seed the generators that Flower's strategies draw from, and restore them afterwards."""
    before, numpy_before = random.getstate(), np.random.get_state()  # noqa: NPY002
    own = int(np.random.SeedSequence(seed).generate_state(1)[0])
    random.seed(own)
    np.random.seed(own)  # noqa: NPY002
    try:
        yield
    finally:
        random.setstate(before)
        np.random.set_state(numpy_before)  # noqa: NPY002


class _Nodes(Grid):
    """The nodes of a group as a Grid; the engine sends the messages."""

    def __init__(self, nodes: Iterable[int]) -> None:
        self.nodes, self.looks = list(nodes), 0

    def get_node_ids(self) -> list[int]:
        self.looks += 1
        if self.looks > MOST_LOOKS:
            raise FederationError(
                f"the strategy of a group waits for more nodes than the {len(self.nodes)} in it. "
                "Give it smaller numbers, such as min_train_nodes and min_available_nodes."
            )
        return list(self.nodes)

    def _not_here(self, *_: Any, **__: Any) -> NoReturn:
        raise FederationError(
            "the strategy of a group must not send messages: it returns them from "
            "configure_train, and coterie sends them."
        )

    set_run = create_message = push_messages = pull_messages = send_and_receive = _not_here
    run = property(_not_here)
