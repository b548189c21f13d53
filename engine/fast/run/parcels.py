"""Which messages of a run travel together: those to silos that share a process, and so a node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256

from flwr.app import Message

from coterie import wire
from coterie.engine.fast.bundles import MAX_BUNDLED

HOST_BYTES = 12_000_000
"""Limit on the array bytes of one bundle to a process; an array counts at each mention."""


@dataclass(frozen=True)
class _Hosted:
    """A silo that shares a node: the node, and its number there."""

    node: int
    number: int


@dataclass
class Parcel:
    """Messages for one node that are pushed together.

    ``to`` has the number of each message's silo in its process; None for a single message.
    """

    messages: list[Message]
    to: list[int] | None = None
    bundled: bool = False

    @property
    def most_bytes(self) -> int:
        """The most bytes of its reply."""
        most = max(map(_most_bytes, self.messages))
        if len(self.messages) > 1:  # of which each is short of its limit by far
            most = max(most, wire.TIMES_SENT * HOST_BYTES)
        return most

    def ids(self, root: str) -> list[str]:
        """Return the ids of its messages, given that of all."""
        return [root] if self.to is None else [f"{root}.{i}" for i in range(len(self.to))]


class Nodes:
    """The nodes of a run: which stand for several silos, and which read bundles.

    Args:
        hosts: whether a node may stand for several silos.
    """

    def __init__(self, hosts: bool) -> None:
        self.hosts = hosts
        self.bundling: set[int] = set()
        """Nodes that read bundles."""
        self._hosted: dict[int, _Hosted] = {}
        self._processes: dict[int, list[int]] = {}
        """Node → the ids of its silos here."""

    def present(self, nodes: Sequence[int]) -> list[int]:
        """Return the ids of the silos of these nodes, and forget all others."""
        for node in self._processes.keys() - set(nodes):
            for own in self._processes.pop(node):
                del self._hosted[own]
        self.bundling &= set(nodes)
        return [own for node in nodes for own in self._processes.get(node, [node])]

    def parcels(self, messages: Sequence[Message], waiting: Callable[[], set[int]]) -> list[Parcel]:
        """Group the messages to silos of one process, up to the limits of a bundle.

        ``waiting`` looks for nodes that read bundles but have not announced it.
        """
        parcels: list[Parcel] = []
        filling: dict[int, tuple[Parcel, int]] = {}
        asked = [message.metadata.message_type == wire.DESCRIBE for message in messages]
        found = waiting() if any(asked) else set()
        for message, describe in zip(messages, asked, strict=True):
            node = message.metadata.dst_node_id
            hosted = self._hosted.get(node)
            if hosted is None:
                # Another app may have come in its place.
                bundled = node in (found if describe else self.bundling)
                parcels.append(Parcel([message], bundled=bundled))
                continue
            size = wire.num_array_bytes(message.content)
            parcel, held = filling.get(hosted.node, (None, 0))
            full = held + size > HOST_BYTES or (parcel and len(parcel.messages) >= MAX_BUNDLED)
            if parcel is None or full:
                parcel, held = Parcel([], [], bundled=True), 0
                parcels.append(parcel)
            parcel.messages.append(message)
            assert parcel.to is not None
            parcel.to.append(hosted.number)
            message.metadata.dst_node_id = hosted.node
            filling[hosted.node] = parcel, held + size
        return parcels

    def note(self, parcel: Parcel, answer: Message, *, bundled: bool) -> None:
        """Record a node's answer to ``query.describe``."""
        asked = parcel.messages[0].metadata
        if asked.message_type != wire.DESCRIBE or parcel.to is not None:
            return
        node = asked.dst_node_id
        (self.bundling.add if bundled else self.bundling.discard)(node)
        if not self.hosts or not answer.has_error() or answer.error.code != wire.HOSTS:
            return
        said = str(answer.error.reason)
        count = int(said) if said.isascii() and said.isdigit() and len(said) < 6 else 0
        if not 1 < count <= MAX_BUNDLED:
            raise wire.WireError("it does not state how many silos it has.")
        own = [_own_id(node, number) for number in range(count)]
        self._processes[node] = own
        self._hosted |= {one: _Hosted(node, number) for number, one in enumerate(own)}


def _own_id(node: int, number: int) -> int:
    return int.from_bytes(sha256(f"{node}/{number}".encode()).digest()[:8], "big") >> 1


def _most_bytes(message: Message) -> int:
    return wire.most_bytes(message.metadata.message_type, wire.num_array_bytes(message.content))
