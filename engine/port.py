"""What the product needs of an engine: nothing else passes between the two.

A run has an ``Engine``. *Plain* (``engine.plain``) uses only Flower's public Grid, of any
SuperLink, and is the reference. *In process* (``engine.inprocess``) needs no network. *Fast*
(``engine.fast``) is the default. ``tests/contract/engine`` holds all three to the same.

A silo's process has a ``SiloEngine`` for each connection, which only *fast* has: a stock SuperNode
and the engine in process call the ClientApp themselves.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol, runtime_checkable

from cryptography.hazmat.primitives.asymmetric import ec
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


# ---------------------------------------------------------------- at the silo


class LinkError(ConnectionError):
    """No connection to the SuperLink.

    ``retry``: whether trying again can help. ``holds``: whether the SuperLink probably still
    knows this node, so that the same connection can be used again.
    """

    def __init__(self, text: str, *, retry: bool = True, holds: bool = False) -> None:
        super().__init__(text)
        self.retry, self.holds = retry, holds


class RunEndedError(RuntimeError):
    """The message belongs to a run that has ended."""


class NotPassedError(LinkError):
    """A message that the SuperLink, or a proxy on the way to it, never accepts: it is too large, or
    the silo has sent too much in this run."""


class UnreadableError(RuntimeError):
    """A message that cannot be read; ``header`` is the part that can be answered."""

    def __init__(self, text: str, header: Message) -> None:
        super().__init__(text)
        self.header = header


class TooLargeError(UnreadableError):
    """A message larger than this silo accepts."""


@dataclass(frozen=True)
class Connection:
    """The way to a SuperLink, and how long to wait for it.

    Attributes:
        address: ``HOST:PORT`` of its Fleet API.
        root_certificates: PEM file of the CA; None: plain text.
        keys: registered key pair of a single silo; None: a new key and node id at every start.
        patience_s: seconds without a connection before the process gives up; longer than the 60 s
            for which Flower refuses a key that was not released.
    """

    address: str
    root_certificates: Path | None = None
    keys: tuple[ec.EllipticCurvePrivateKey, ec.EllipticCurvePublicKey] | None = None
    patience_s: float = 600.0


@dataclass(frozen=True)
class RunSettings:
    """A run's settings, as an app receives them.

    ``series`` identifies runs that share the app's state in Flower; ``config`` is the
    configuration of the run's FAB with the values that the run was started with.
    """

    series: int = 0
    config: dict[str, str | int | float | bool] = field(default_factory=dict)


@dataclass(frozen=True)
class Received:
    """A message or bundle, with the header that the SuperLink delivered.

    Attributes:
        messages: one message, or those of a bundle.
        to: number of each message's silo in this process; None: it came without a bundle.
        bundled: whether the sender reads bundles.
    """

    header: Message
    messages: tuple[Message, ...]
    to: tuple[int, ...] | None = None
    bundled: bool = False


@dataclass(frozen=True)
class Unsent:
    """The replies to one message or bundle, and what is sent with them.

    Attributes:
        to: number of each reply's silo; None: a single reply to a message without a bundle.
        seconds: that the silos worked for them.
        node_id: of the node that was asked: no other one may answer.
        bundled: whether the other side reads bundles.
    """

    replies: tuple[Message, ...]
    seconds: float
    node_id: int
    to: tuple[int, ...] | None = None
    bundled: bool = False


class SiloEngine(Protocol):
    """One connection of a silo's process to its SuperLink.

    Attributes:
        node_id: of this connection.
        notifies: ``wait`` is worth a call, as far as is known.
    """

    node_id: int
    notifies: bool

    def receive(self) -> Received | None:
        """Return the next message for this process, or None at once if there is none.

        It is delivered once. If the connection is lost while its content is fetched, the next call
        continues with it.

        Raises:
            LinkError: the SuperLink cannot be reached or no longer knows this silo.
            RunEndedError: the message's run ended while it was fetched.
            UnreadableError: it is not a message, or larger than this silo accepts.
        """

    def send(self, unsent: Unsent) -> None:
        """Send the replies to a message or bundle; errors as ``receive`` and ``NotPassedError``."""

    def wait(self) -> bool:
        """Wait a while for a message; return whether the SuperLink has this call.

        It may run in a thread separate from those of ``receive`` and ``send``; errors as there.
        """

    def hurry(self) -> None:
        """Repeat failing calls only briefly from now on: the process ends.

        May be called by a signal handler.
        """

    def require_running(self, run_id: int) -> None:
        """Check that a run is still active; raise ``RunEndedError`` if not, or ``LinkError``."""

    def settings_of(self, run_id: int) -> RunSettings:
        """Fetch a run's settings; errors as ``receive``."""


class Kept(Protocol):
    """The replies to one message or bundle until they are sent, even if their process ends."""

    unsent: Unsent | None

    def keep(self, unsent: Unsent) -> None:
        """Keep replies."""

    def give_up(self, why: str) -> None:
        """Keep error replies in place of those that cannot be sent."""

    def clear(self) -> None:
        """Drop the replies, which were sent or are not wanted any more."""


class SiloEngines(Protocol):
    """What makes the connections of a silo's process."""

    def connect(self, *, max_bytes: int, silos: int) -> AbstractContextManager[SiloEngine]:
        """Register as a node for so many silos; ``LinkError`` with the reason if that fails.

        ``max_bytes`` limits a message; a larger one is refused before it is unpacked.
        """

    def outbox(self, home: str) -> Kept:
        """Return the replies that are kept in a folder; an empty name keeps them in memory."""
