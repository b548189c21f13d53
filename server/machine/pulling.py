"""The Grid of a run: few objects per message, and replies fetched one by one within limits.

Flower's Grid waits for every object of one reply before it looks at the next, and raises if it
cannot read one. So one silo can delay a round by minutes, or end a run. Here each reply waits
separately until it is complete, and a reply that is too large or unreadable becomes an error reply
of its silo. This module takes the address and the token from Flower's Grid, and makes its own calls
with Flower's protobuf messages.

``query.describe`` announces to resident silos that bundles (``coterie.wire.bundles``) are read
here. A silo that answers with a bundle is sent bundles from then on; others get Flower's objects. A
process with several silos has one node. It answers with the number of its silos, and each of them
then gets its own node id here. Their messages travel in bundles.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import islice
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryFile
from types import SimpleNamespace
from typing import Any

import grpc
from flwr.app import Error, Message, RecordDict
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ConfirmMessageReceivedResponse,
    ObjectTree,
    PullObjectRequest,
    PushObjectResponse,
)
from flwr.proto.runtime_pb2 import (
    PullAppMessagesRequest,
    PullAppMessagesResponse,
    PushAppMessagesRequest,
    PushAppMessagesResponse,
)
from flwr.serverapp import Grid

from coterie import wire
from coterie.server.machine import shelf
from coterie.system.calls import Retry, calls_of, open_channel
from coterie.system.files import why_unwritten
from coterie.wire.bundles import PIECE_BYTES
from coterie.wire.flower import (
    inflatable_object,
    inflatable_utils,
    make_pull_object_fn_protobuf,
    message_to_proto,
)

log = logging.getLogger("coterie.run")

CALL_DEADLINE_S = 60.0
"""Deadline of a call to the SuperLink, ample for the replies of a thousand silos."""
PATIENCE_MS = 500
"""Longest time that the SuperLink may hold a pull while no reply is on its way."""
FEW = 100
"""Largest number of pending replies for which the SuperLink may hold a pull."""
AT_ONCE = 16
"""Objects that are fetched together before their bytes are counted."""
THREADS = 2
FETCH_S = 1.0
"""Time for fetching the objects of one reply before other replies have their turn."""
GONE = (
    "the rest of it could not be found: the silo has given it up (see its log), or has sent "
    "nothing for minutes."
)


LARGE = 8
"""Objects above which a bundle's 8 MB pieces go to a mapped file: they need not fit in memory."""
HOST_BYTES = 12_000_000
"""Limit on the array bytes of one bundle to a process; an array counts at each mention."""


class RunOverError(BaseException):
    """Raised when the SuperLink has ended the run and rejects its calls; do not continue."""


class _TooLargeError(ValueError):
    """A reply exceeds its size limit."""


@dataclass
class _Reply:
    """An announced reply.

    Attributes:
        message_id: id of the message or bundle that it answers.
        wanted: objects that have not been fetched; the reply's own object comes first.
        most: byte limit.
        why: reason for rejecting it.
        large: pieces that arrive by calls go to the file ``spool``.
        places: positions in ``room`` of the pieces that are mapped from files.
        received: all objects came with the announcement, and the SuperLink knows it.
    """

    message_id: str
    object_id: str
    wanted: list[str]
    contents: dict[str, wire.Content] = field(default_factory=dict)
    most: int = 0
    num_bytes: int = 0
    why: str = ""
    large: bool = False
    spool: _Spool | None = None
    places: dict[str, int] = field(default_factory=dict)
    room: shelf.Room | None = None
    received: bool = False

    def make_room(self) -> None:
        """Reserve addresses for the pieces that it names: large ones may lie in local files."""
        most = (self.most + wire.MAX_OBJECT_BYTES) // PIECE_BYTES + 1
        named = wire.pieces_in(self.contents[self.object_id])
        self.places = {name: place for place, name in enumerate(named[:most])}
        if not self.places:
            return
        with suppress(OSError):  # each is shown by itself then
            self.room = shelf.Room(len(self.places))

    def take(self, object_id: str, content: wire.Content, folder: Path | None) -> None:
        self.num_bytes += len(content)
        came = not isinstance(content, wire.Piece)
        piece = came and object_id != self.object_id and wire.is_bundle(content)
        if self.large and piece and folder is not None:
            try:
                self.spool = self.spool or _Spool(folder)
                self.spool.add(object_id, wire.body_of(content))
                return
            except OSError as error:
                self.large = False
                log.warning("large replies are kept in memory: %s", why_unwritten(error))
        self.contents[object_id] = content

    def take_along(self, came: Mapping[str, bytes], folder: Path | None) -> None:
        """Store those of its objects that came with the announcement."""
        own = [name for name in self.wanted if name in came and not self.why]
        for name in own:
            self.take(name, came[name], folder)
        self.wanted = [name for name in self.wanted if name not in own]
        self.received = not self.wanted

    def all_contents(self) -> dict[str, wire.Content]:
        return {**self.contents, **(self.spool.shown() if self.spool else {})}


class _Spool:
    """Pieces of a reply in an unnamed file, one after the other."""

    def __init__(self, folder: Path | None) -> None:
        # It lives as long as the reply. Without a buffer, a full disk shows at once and only once.
        self._file = TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self._spans: dict[str, tuple[int, int]] = {}
        self._size = 0

    def add(self, object_id: str, body: memoryview) -> None:
        """Append a piece. Raises ``OSError`` if there is no room; earlier pieces stay."""
        done = 0
        while done < len(body):
            done += os.pwrite(self._file.fileno(), body[done:], self._size + done)
        self._spans[object_id] = self._size, self._size + done
        self._size += done

    def shown(self) -> dict[str, wire.Content]:
        """Return the pieces as views of the file, which stays mapped as long as one is in use."""
        if not self._spans:
            return {}
        with self._file:
            held = memoryview(mmap(self._file.fileno(), 0, access=ACCESS_READ))
        return {name: wire.piece_of(held[begin:end]) for name, (begin, end) in self._spans.items()}


@dataclass(frozen=True)
class _Hosted:
    """A silo that shares a node: the node, and its number there."""

    node: int
    number: int


@dataclass
class _Parcel:
    """Messages for one node that are pushed together.

    ``to`` has the number of each message's silo in its process; None for a single message.
    """

    messages: list[Message]
    to: list[int] | None = None
    bundled: bool = False

    def ids(self, root: str) -> list[str]:
        return [root] if self.to is None else [f"{root}.{i}" for i in range(len(self.to))]


def bounded(grid: Grid, *, hosts: bool = False, folder: Path | None = None) -> Grid:
    """Return a Grid that takes replies one by one, or the same Grid if it has no SuperLink.

    Args:
        grid: of the run.
        folder: for large replies while they are needed; None keeps them in memory.
        hosts: one node may stand for several silos. Not where silos are enrolled, by key.
    """
    if not hasattr(grid, "_token"):
        return grid
    wire.reuse_blocks()
    return _BoundedGrid(grid, hosts, folder)


class _BoundedGrid(Grid):
    """Flower's Grid with its own transport of messages."""

    def __init__(self, inner: Any, hosts: bool, folder: Path | None) -> None:
        self.inner = inner
        self._stub = runtime_calls(inner)
        self._hosts, self._folder = hosts, folder
        self._hosted: dict[int, _Hosted] = {}
        self._processes: dict[int, list[int]] = {}
        """Node → the ids of its silos here."""
        self._bundling: set[int] = set()
        """Nodes that read bundles."""
        self._sent: dict[str, _Parcel] = {}
        self._announced: dict[str, _Reply] = {}
        self._singly = False
        self._threads = ThreadPoolExecutor(THREADS)
        # A channel of its own for objects, so that gRPC refuses one that is too large, also one
        # that is small only while it is compressed, before it is in memory.
        self._objects = runtime_calls(inner, wire.MAX_OBJECT_BYTES)
        self._shelf: shelf.Shelf | None = None
        self._asked = False
        self._along = False
        """The SuperLink, coterie's, takes small objects along with messages."""

    @property
    def run(self) -> Any:
        """Flower's record of the run."""
        return self.inner.run

    def set_run(self, run: Any) -> None:
        self.inner.set_run(run)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        made: Message = self.inner.create_message(*args, **kwargs)
        return made

    def get_node_ids(self) -> Iterable[int]:
        """Return the node ids; silos that share a node replace it."""
        nodes = list(self.inner.get_node_ids())
        for node in self._processes.keys() - set(nodes):
            for own in self._processes.pop(node):
                del self._hosted[own]
        self._bundling &= set(nodes)
        return [own for node in nodes for own in self._processes.get(node, [node])]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        replies: Iterable[Message] = self.inner.send_and_receive(messages, timeout=timeout)
        return replies

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Push messages; the size of each one sets the size limit of its reply."""
        messages = list(messages)
        parcels = self._parcels(messages)
        ids: dict[int, str] = {}
        plain = [parcel.messages[0] for parcel in parcels if not parcel.bundled]
        for parcel in parcels:
            if parcel.to is None:
                self._invite(parcel.messages[0])
        pushed = [*self.inner.push_messages(plain)] if plain else []
        roots = iter(pushed + [""] * (len(plain) - len(pushed)))  # none of what was too large
        bundled = iter(self._push_bundles([parcel for parcel in parcels if parcel.bundled]))
        for parcel in parcels:
            root = next(bundled if parcel.bundled else roots)
            if root:
                self._sent[root] = parcel
                found = zip(parcel.messages, parcel.ids(root), strict=True)
                ids |= {id(message): one for message, one in found}
        return [ids.get(id(message), "") for message in messages]

    def _parcels(self, messages: Sequence[Message]) -> list[_Parcel]:
        """Group the messages to silos of one process, up to the limits of a bundle."""
        parcels: list[_Parcel] = []
        filling: dict[int, tuple[_Parcel, int]] = {}
        asked = [message.metadata.message_type == wire.DESCRIBE for message in messages]
        waiting = self._waiting() if any(asked) else set()
        for message, describe in zip(messages, asked, strict=True):
            node = message.metadata.dst_node_id
            hosted = self._hosted.get(node)
            if hosted is None:
                # Another app may have come in its place.
                bundled = node in (waiting if describe else self._bundling)
                parcels.append(_Parcel([message], bundled=bundled))
                continue
            size = wire.num_array_bytes(message.content)
            parcel, held = filling.get(hosted.node, (None, 0))
            full = held + size > HOST_BYTES or (parcel and len(parcel.messages) >= wire.MAX_BUNDLED)
            if parcel is None or full:
                parcel, held = _Parcel([], [], bundled=True), 0
                parcels.append(parcel)
            parcel.messages.append(message)
            assert parcel.to is not None
            parcel.to.append(hosted.number)
            message.metadata.dst_node_id = hosted.node
            filling[hosted.node] = parcel, held + size
        return parcels

    def _waiting(self) -> set[int]:
        """Ask coterie's SuperLink for nodes that read bundles but have not announced it."""
        request = PullObjectRequest(
            node=self.inner.node, run_id=self.inner.run.run_id, object_id=wire.WAITING
        )
        with suppress(grpc.RpcError, ValueError, TypeError):
            answer = self._objects.PullObject(request, timeout=CALL_DEADLINE_S)
            waiting = set(json.loads(bytes(answer.object_content)))
            self._along = True
            return waiting
        return set()

    def _invite(self, message: Message) -> None:
        """Announce in ``query.describe`` that bundles are read here; other apps ignore it."""
        if message.metadata.message_type == wire.DESCRIBE:
            config = wire.config_records(message.content)[wire.CONFIG]
            config[wire.BUNDLES], config[wire.HOSTED] = True, self._hosts

    def _push_bundles(self, parcels: Sequence[_Parcel]) -> list[str]:
        """Push each parcel as one message; return the ids, empty where one was not accepted."""
        if not parcels:
            return []
        run_id, objects = self.inner.run.run_id, dict[str, wire.Content]()
        headers, trees, roots, pieces = [], [], list[str](), wire.Pieces()
        for parcel in parcels:
            for message in parcel.messages:
                message.metadata.__dict__["_run_id"] = run_id
                message.metadata.__dict__["_src_node_id"] = self.inner.node.node_id
            made = wire.bundle(parcel.messages, parcel.to, inline=wire.SHARED_BYTES, pieces=pieces)
            header = message_to_proto(_without_content(parcel.messages[0]))
            header.metadata.message_id = made.root
            headers.append(header)
            trees.append(made.tree)
            objects |= made.objects
            roots.append(made.root)
        ids_in_order = dict.fromkeys((*roots, *objects))
        request = PushAppMessagesRequest(messages_list=headers, message_object_trees=trees)
        if self._along:
            along = wire.small((name, objects[name]) for name in ids_in_order)
            wire.attach(request, along.values())
        answer = self._stub.PushMessages(request)
        wanted = set(answer.objects_to_push)
        self._find_shelf()
        pushed: list[Any] = [(name, objects[name]) for name in ids_in_order if name in wanted]
        push = partial(self._push, answer.session_id)
        inflatable_utils.push_object_contents_from_iterable(pushed, push)
        ids = list(answer.message_ids)
        return ids + [""] * (len(parcels) - len(ids))

    def _find_shelf(self) -> None:
        """Find the SuperLink's folder of large objects, if it is on this machine and ours."""
        if self._shelf is not None and not self._shelf.folder.is_dir():  # another SuperLink
            self._shelf, self._asked = None, False
        if self._asked:
            return
        self._asked = True
        request = PullObjectRequest(
            node=self.inner.node, run_id=self.inner.run.run_id, object_id=shelf.WHERE
        )
        with suppress(grpc.RpcError):
            answer = self._objects.PullObject(request, timeout=CALL_DEADLINE_S)
            self._shelf = shelf.find(bytes(answer.object_content))

    def _push(self, session: str, object_id: str, content: wire.Content) -> None:
        request = partial(wire.Pushed, self.inner.node, self.inner.run.run_id, object_id, session)
        if self._shelf is not None and isinstance(content, wire.Piece):
            try:
                self._shelf.offer(object_id, content.body)
            except OSError as error:
                log.warning("large objects are sent in calls: %s", why_unwritten(error))
                self._shelf = None
            else:
                if self._stub.PushObject(request(b"")).stored:
                    return
        if not self._stub.PushObject(request(content)).stored:
            raise inflatable_utils.ObjectPushError(object_id, self.inner.run.run_id, session)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the complete or rejected replies to these messages, without waiting for others.

        Replies announced for other messages are dropped.
        """
        asked = set(message_ids)
        roots = {one.partition(".")[0] for one in asked}
        for root in set(self._announced) - roots:
            self._let_go(self._announced.pop(root))
        self._sent = {root: parcel for root, parcel in self._sent.items() if root in roots}
        for reply in self._ask(sorted(self._sent.keys() - set(self._announced))):
            self._announced[reply.message_id] = reply
        whole: list[Message] = []
        for reply in list(self._announced.values()):
            if reply.why or self._fetch(reply):
                del self._announced[reply.message_id]
                self._let_go(reply)
                whole += self._read(reply)
                del self._sent[reply.message_id]  # what was sent is as large as the next
        if not whole and self._announced and self.holds(len(asked)):
            self._wait_for_more()
        return [one for one in whole if one.metadata.reply_to_message_id in asked]

    # ---------------------------------------------------------------- what is announced

    def holds(self, count: int) -> bool:
        """Return whether coterie's SuperLink holds a pull of ``count`` replies until more arrive.

        If very many are pending, some are always there.
        """
        return self._shelf is not None and count <= FEW

    def _wait_for_more(self) -> None:
        """Let the SuperLink hold a call for the next object of an unfinished reply.

        Replies take turns, so a stalled silo delays the others by at most ``PATIENCE_MS``.
        """
        message_id, reply = next(iter(self._announced.items()))
        more = (wire.IN_FILE, "1"), (wire.PATIENCE, str(PATIENCE_MS))
        unanswered = inflatable_utils.ObjectUnavailableError, inflatable_utils.ObjectPullError
        with suppress(grpc.RpcError, *unanswered):  # what is wrong the next fetch finds out
            self._pulled(reply.wanted[0], *more)
        self._announced[message_id] = self._announced.pop(message_id)

    def _ask(self, ids: Sequence[str]) -> Iterator[_Reply]:
        """Yield the SuperLink's replies; a call that fails half-way loses its replies there."""
        if not ids:
            return
        if not self._singly:
            try:
                yield from self._announcements(ids)
                return
            except grpc.RpcError as error:
                self._singly = True
                log.warning(
                    "the SuperLink cannot send all replies at once (%s): from now on they are "
                    "fetched one by one",
                    _said(error),
                )
        for message_id in ids:
            try:
                yield from self._announcements([message_id])
            except grpc.RpcError as error:
                why = f"the SuperLink cannot send it: {_said(error)}"
                yield _Reply(message_id, "", [], why=why)

    def _announcements(self, ids: Sequence[str]) -> list[_Reply]:
        waits = self.holds(len(ids)) and not self._announced
        patient = ((wire.PATIENCE, str(PATIENCE_MS)),) if waits else ()
        answer = self._stub.PullMessages(
            PullAppMessagesRequest(message_ids=ids),
            timeout=CALL_DEADLINE_S,
            more=(*patient, (wire.ALONG, "1")),
        )
        came = wire.attached(answer)
        pairs = zip(answer.messages_list, answer.message_object_trees, strict=True)
        found = [self._announced_reply(header.metadata, tree) for header, tree in pairs]
        for reply in found:
            reply.take_along(came, self._folder)
        return [reply for reply in found if reply.message_id in ids]

    def _announced_reply(self, metadata: Any, tree: ObjectTree) -> _Reply:
        reply = _Reply(metadata.reply_to_message_id, metadata.message_id, [])
        objects = inflatable_object.iterate_object_tree(tree)
        ids = [one.object_id for one in islice(objects, wire.MAX_OBJECTS + 1)]
        reply.wanted = list(dict.fromkeys((reply.object_id, *ids)))
        reply.large = len(ids) > LARGE
        sent = self._sent.get(reply.message_id)
        if sent is not None:
            reply.most = max(map(_most_bytes, sent.messages))
            if len(sent.messages) > 1:  # of which each is short of its limit by far
                reply.most = max(reply.most, wire.TIMES_SENT * HOST_BYTES)
        if len(ids) > wire.MAX_OBJECTS:
            reply.why = f"it consists of more than {wire.MAX_OBJECTS:,} objects."
        elif tree.object_id != reply.object_id or not all(
            map(inflatable_object.is_valid_sha256_hash, ids)
        ):
            reply.why = "its objects have invalid ids."
        return reply

    # ---------------------------------------------------------------- its objects

    def _fetch(self, reply: _Reply) -> bool:
        """Fetch the available objects of a reply; return whether it is complete or rejected."""

        def pulled(object_id: str) -> wire.Content | None:
            try:
                return (
                    self._shown(reply, object_id)
                    or (self._pulled(object_id, (wire.IN_FILE, "1")) if self._shelf else None)
                    # It came while that was asked. Shown, it lies beside the others.
                    or self._shown(reply, object_id)
                    or self._pulled(object_id)
                )
            except inflatable_utils.ObjectUnavailableError:
                return None

        until = time.monotonic() + FETCH_S
        try:
            while reply.wanted:
                if time.monotonic() > until:
                    return False
                some, missing = self._next_of(reply), list[str]()
                for object_id, content in zip(some, self._threads.map(pulled, some), strict=True):
                    if content is None:
                        missing.append(object_id)
                    else:
                        reply.take(object_id, content, self._folder)
                reply.wanted = missing + [one for one in reply.wanted if one not in some]
                if reply.num_bytes > reply.most + wire.MAX_OBJECT_BYTES:
                    raise _TooLargeError(f"it has more than {reply.most:,} bytes.")
                if missing:
                    return False
        except grpc.RpcError as error:
            reply.why = f"it cannot be fetched: {_said(error)}"
        except inflatable_utils.ObjectPullError:
            reply.why = GONE
        except ValueError as error:
            reply.why = str(error)
        return True

    def _pulled(self, object_id: str, *more: tuple[str, str]) -> wire.Content:
        """Fetch an object by a call; empty if it is in a file and ``more`` allows that."""
        call = partial(self._objects.PullObject, timeout=CALL_DEADLINE_S, more=more)
        pull = make_pull_object_fn_protobuf(call, self.inner.node, self.inner.run.run_id)
        content: wire.Content = pull(object_id)
        return content

    def _next_of(self, reply: _Reply) -> list[str]:
        """Return the objects to fetch next: those in files first, then one by a call.

        Silos send in order, so if that one is missing, so is the rest.
        """
        some = reply.wanted[:AT_ONCE]
        if self._shelf is None:
            return some
        if reply.object_id in some:
            return [reply.object_id]
        if reply.room is None:
            reply.make_room()
        return [one for one in some if self._shelf.has(one)] or some[:1]

    def _shown(self, reply: _Reply, object_id: str) -> wire.Piece | None:
        """Return an object from a file of this machine, or None if it has none."""
        if self._shelf is None:
            return None
        place = reply.places.get(object_id)
        with suppress(OSError):
            return self._shelf.shown(object_id, None if place is None else reply.room, place or 0)
        return None

    def _let_go(self, reply: _Reply) -> None:
        if not reply.object_id or reply.received:
            return
        request = ConfirmMessageReceivedRequest(
            node=self.inner.node,
            run_id=self.inner.run.run_id,
            message_object_id=reply.object_id,
        )
        try:
            self._stub.ConfirmMessageReceived(request, timeout=CALL_DEADLINE_S)
        except grpc.RpcError as error:
            log.debug("a reply was not confirmed: %s", _said(error))

    def _read(self, reply: _Reply) -> list[Message]:
        parcel = self._sent[reply.message_id]
        why, found = reply.why, list[Message]()
        to: list[int] | None = None
        if not why:
            try:
                found, to = self._messages_of(reply)
                if to is None:
                    self._note(parcel, found[0], bundled=wire.is_bundle(_root_of(reply)))
            except (wire.WireError, OSError) as error:
                why = str(error)
        of_all = found[0] if found and to is None else None
        if of_all is not None and of_all.has_error() and parcel.to is not None:
            why = str(of_all.error.reason)
        by_silo = dict(zip(to or (), found, strict=True)) if to is not None else {}
        answers = []
        for place, (message, own_id) in enumerate(
            zip(parcel.messages, parcel.ids(reply.message_id), strict=True)
        ):
            message.metadata.__dict__["_message_id"] = own_id
            own = of_all if parcel.to is None else by_silo.get(parcel.to[place])
            if own is None:
                what = why or "its process sent no answer for it."
                failed = Error(
                    wire.UNREADABLE, f"its reply cannot be read: {wire.plain_text(what)}"
                )
                own = Message(failed, reply_to=message)
            own.metadata.__dict__["_reply_to_message_id"] = own_id
            answers.append(own)
        return answers

    def _messages_of(self, reply: _Reply) -> tuple[list[Message], list[int] | None]:
        most = reply.most + wire.MAX_OBJECT_BYTES
        if wire.is_bundle(_root_of(reply)):
            return wire.unbundle(reply.object_id, reply.all_contents(), max_bytes=most)
        message = wire.put_together(reply.object_id, reply.contents, max_bytes=most)
        message.metadata.__dict__["_message_id"] = reply.object_id
        return [message], None

    def _note(self, parcel: _Parcel, answer: Message, *, bundled: bool) -> None:
        """Record a node's answer to ``query.describe``."""
        asked = parcel.messages[0].metadata
        if asked.message_type != wire.DESCRIBE or parcel.to is not None:
            return
        node = asked.dst_node_id
        (self._bundling.add if bundled else self._bundling.discard)(node)
        if not self._hosts or not answer.has_error() or answer.error.code != wire.HOSTS:
            return
        said = str(answer.error.reason)
        count = int(said) if said.isascii() and said.isdigit() and len(said) < 6 else 0
        if not 1 < count <= wire.MAX_BUNDLED:
            raise wire.WireError("it does not state how many silos it has.")
        own = [_own_id(node, number) for number in range(count)]
        self._processes[node] = own
        self._hosted |= {one: _Hosted(node, number) for number, one in enumerate(own)}


ANSWERS: dict[str, Callable[[bytes], Any]] = {
    "PushMessages": PushAppMessagesResponse.FromString,
    "PullMessages": PullAppMessagesResponse.FromString,
    "PushObject": PushObjectResponse.FromString,
    "PullObject": wire.read_pulled,
    "ConfirmMessageReceived": ConfirmMessageReceivedResponse.FromString,
}
"""Maps each call to the parser of its answer."""


def runtime_calls(grid: Any, max_bytes: int = 2**31 - 1) -> Any:
    """Return the calls of a run's ServerApp.

    They wait for a SuperLink that is away, as Flower's do. The SuperLink ends a run whose ServerApp
    has been silent for long. ``max_bytes`` limits the size of an answer.
    """
    certificates = None if grid._insecure else grid._cert or b""
    channel = open_channel(grid._addr, certificates, max_bytes=max_bytes)
    token = (("flwr-task-token", grid._token),)
    retry = Retry(partial(_is_lasting, grid), max_s=None, first_s=1.0, most_s=20.0)
    calls = calls_of(channel, "Runtime", ANSWERS)

    def calling(call: Callable[..., Any]) -> Callable[..., Any]:
        def invoke(request: Any, *, more: tuple[tuple[str, str], ...] = (), **how: Any) -> Any:
            return retry.invoke(call, request, metadata=(*token, *more), **how)

        return invoke

    return SimpleNamespace(**{name: calling(call) for name, call in calls.items()})


def _is_lasting(grid: Any, error: grpc.RpcError) -> bool:
    """Return whether an error is permanent; end this process if it means that the run is over.

    If the run's token is gone, one of Flower's own calls fails too. Flower then ends the process by
    one signal for all its calls; a second signal would interrupt writes in progress.
    """
    if error.code() == grpc.StatusCode.UNAUTHENTICATED:
        with suppress(Exception):  # it is about to end already
            grid.get_node_ids()
    if error.code() == grpc.StatusCode.PERMISSION_DENIED:
        raise RunOverError("the SuperLink has ended the run.") from error
    return bool(error.code() != grpc.StatusCode.UNAVAILABLE)


def _without_content(message: Message) -> Message:
    bare = Message.__new__(Message)
    bare.__dict__.update(message.__dict__ | {"_content": RecordDict()})
    return bare


def _root_of(reply: _Reply) -> wire.Content:
    return reply.contents.get(reply.object_id, b"")


def _own_id(node: int, number: int) -> int:
    return int.from_bytes(sha256(f"{node}/{number}".encode()).digest()[:8], "big") >> 1


def _most_bytes(message: Message) -> int:
    return wire.most_bytes(message.metadata.message_type, wire.num_array_bytes(message.content))


def _said(error: grpc.RpcError) -> str:
    return wire.plain_text(f"{error.code().name}: {error.details()}", 200)
