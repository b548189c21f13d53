"""The Grid of a run: messages in as few objects as can be, replies taken one by one within limits.

Flower's Grid asks for all replies at once, waits for every object of the first before it looks at
the second, and raises if one of them cannot be read. So a single silo can hold up a round by
minutes (an object that it announced and does not send) and end a run. Here a reply waits by
itself until it is whole, and one that is too large or cannot be read becomes an error reply of its
silo. Flower's Grid speaks gRPC in 1.34 and HTTP since; of either, this takes where it calls and
with which token, and makes its own calls on Flower's protobuf messages.

A resident silo is told with ``query.describe`` that bundles (``coterie.wire.bundles``) are read
here. Whoever answers with one is sent bundles from then on; all others get Flower's own objects. A
process of several silos has one node. It answers how many they are, and from then on each of them
has a node id of its own here; what is for them travels in bundles.
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
from coterie.server.machine.superlink import engine_speaks_http
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
"""Of a call to the SuperLink: longer than it needs for the replies of a thousand silos."""
PATIENCE_MS = 500
"""How long the SuperLink may hold the question for replies while none is on its way."""
FEW = 100
"""Replies for which it may."""
AT_ONCE = 16
"""Objects that are fetched before their bytes are added up."""
THREADS = 2
FETCH_S = 1.0
"""How long the objects of one reply are fetched before others have their turn."""
GONE = (
    "the rest of it could not be found: the silo has given it up, as its own log says, or has "
    "sent nothing for minutes."
)


LARGE = 8
"""Objects of a reply: of a bundle that has more, 8 MB each, the pieces go to a file, which memory
shows. What the kernel has no room for it writes there, so that replies need not fit in memory."""
HOST_BYTES = 12_000_000
"""Most bytes of arrays, each counted as often as it is named, of one bundle to a process."""


class RunOverError(BaseException):
    """The SuperLink has ended the run and takes no more calls of it: nobody may go on after it."""


class _TooLargeError(ValueError):
    """A reply holds more than it may."""


@dataclass
class _Reply:
    """A reply that is announced.

    Attributes:
        message_id: of the message, or bundle, that it answers.
        object_id: its own.
        wanted: objects that have not been fetched, itself first.
        contents: those that have been.
        most: bytes that it may have.
        why: it is refused, in words.
        large: its pieces go to a file, ``spool``, if they come by calls.
        places: of its objects in ``room``, where those are shown that lie in files.
        received: all of it came along with what told of it, and the SuperLink knows.
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
        """Once it says which pieces it has: large ones may lie in files of this machine."""
        most = (self.most + wire.MAX_OBJECT_BYTES) // PIECE_BYTES + 1
        named = wire.pieces_in(self.contents[self.object_id])
        self.places = {name: place for place, name in enumerate(named[:most])}
        if not self.places:
            return
        with suppress(OSError):  # each is shown by itself then
            self.room = shelf.Room(len(self.places))

    def take(self, object_id: str, content: wire.Content, folder: Path | None) -> None:
        """Hold an object that was fetched."""
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
                log.warning("large replies are held in memory: %s", why_unwritten(error))
        self.contents[object_id] = content

    def take_along(self, came: Mapping[str, bytes], folder: Path | None) -> None:
        """Hold those of its objects that came with what told of it."""
        own = [name for name in self.wanted if name in came and not self.why]
        for name in own:
            self.take(name, came[name], folder)
        self.wanted = [name for name in self.wanted if name not in own]
        self.received = not self.wanted

    def all_contents(self) -> dict[str, wire.Content]:
        """What it consists of."""
        return {**self.contents, **(self.spool.shown() if self.spool else {})}


class _Spool:
    """Pieces of a reply in a file without a name, one behind the other."""

    def __init__(self, folder: Path | None) -> None:
        # It lives as long as the reply. Without a buffer, a full disk shows at once and only once.
        self._file = TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115
        self._spans: dict[str, tuple[int, int]] = {}
        self._size = 0

    def add(self, object_id: str, body: memoryview) -> None:
        """Raises ``OSError``: there is no room for it; what was added before stays."""
        done = 0
        while done < len(body):
            done += os.pwrite(self._file.fileno(), body[done:], self._size + done)
        self._spans[object_id] = self._size, self._size + done
        self._size += done

    def shown(self) -> dict[str, wire.Content]:
        """The pieces where the file is shown in memory, which it stays as long as anybody looks."""
        if not self._spans:
            return {}
        with self._file:
            held = memoryview(mmap(self._file.fileno(), 0, access=ACCESS_READ))
        return {name: wire.piece_of(held[begin:end]) for name, (begin, end) in self._spans.items()}


@dataclass(frozen=True)
class _Hosted:
    """A silo that shares a node with others: the node, and its number there."""

    node: int
    number: int


@dataclass
class _Parcel:
    """What is pushed as one: messages for one node.

    Attributes:
        messages: in order; of a bundle to a process of several silos there may be many.
        to: for each the number of its silo in its process; None: a message by itself.
        bundled: they travel as a bundle.
    """

    messages: list[Message]
    to: list[int] | None = None
    bundled: bool = False

    def ids(self, root: str) -> list[str]:
        """What each of its messages is known by."""
        return [root] if self.to is None else [f"{root}.{i}" for i in range(len(self.to))]


def bounded(grid: Grid, *, hosts: bool = False, folder: Path | None = None) -> Grid:
    """The Grid with replies taken one by one; one that has no SuperLink behind it as it is.

    Args:
        grid: of the run.
        folder: for large replies while they are needed; None keeps them in memory.
        hosts: one node may stand for several silos. Not where silos are enrolled: there a silo is
            a key.
    """
    if not hasattr(grid, "_token"):
        return grid
    wire.reuse_blocks()
    return _BoundedGrid(grid, hosts, folder)


class _BoundedGrid(Grid):
    """Flower's Grid, but for how messages travel."""

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
        """As Flower's."""
        self.inner.set_run(run)

    def create_message(self, *args: Any, **kwargs: Any) -> Message:
        """As Flower's."""
        made: Message = self.inner.create_message(*args, **kwargs)
        return made

    def get_node_ids(self) -> Iterable[int]:
        """As Flower's, with silos that share a node in its place."""
        nodes = list(self.inner.get_node_ids())
        for node in self._processes.keys() - set(nodes):
            for own in self._processes.pop(node):
                del self._hosted[own]
        self._bundling &= set(nodes)
        return [own for node in nodes for own in self._processes.get(node, [node])]

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> Iterable[Message]:
        """As Flower's, which nothing here calls."""
        replies: Iterable[Message] = self.inner.send_and_receive(messages, timeout=timeout)
        return replies

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """As Flower's; what was sent says how large its reply may be."""
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
        """Messages to silos of one process together, as many as a bundle takes."""
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
        """Nodes that read bundles before they have said so, as far as coterie's SuperLink knows."""
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
        """Say in a question who one is that bundles are read here. No other app answers it."""
        if message.metadata.message_type == wire.DESCRIBE:
            config = wire.config_records(message.content)[wire.CONFIG]
            config[wire.BUNDLES], config[wire.HOSTED] = True, self._hosts

    def _push_bundles(self, parcels: Sequence[_Parcel]) -> list[str]:
        """Push each as one message; returns their ids, empty of those that were not taken."""
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
        """Find where the SuperLink has large objects, if it is of this machine and ours."""
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
                log.warning("large objects are sent by calls: %s", why_unwritten(error))
                self._shelf = None
            else:
                if self._stub.PushObject(request(b"")).stored:
                    return
        if not self._stub.PushObject(request(content)).stored:
            raise inflatable_utils.ObjectPushError(object_id, self.inner.run.run_id, session)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Replies to these messages that are whole, or refused. Waits for none that is not there.

        What was announced for other messages, which nobody waits for any more, is let go.
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
        """Whether a pull of so many replies waits at the SuperLink, coterie's, for more of them.

        Of very many some are always there.
        """
        return self._shelf is not None and count <= FEW

    def _wait_for_more(self) -> None:
        """Have the SuperLink hold a question for the rest of a reply that is on its way.

        Of one at a time, in turn, so that a silo that sends no more delays the others' for
        ``PATIENCE_MS`` at most.
        """
        message_id, reply = next(iter(self._announced.items()))
        more = (wire.IN_FILE, "1"), (wire.PATIENCE, str(PATIENCE_MS))
        unanswered = inflatable_utils.ObjectUnavailableError, inflatable_utils.ObjectPullError
        with suppress(grpc.RpcError, *unanswered):  # what is wrong the next fetch finds out
            self._pulled(reply.wanted[0], *more)
        self._announced[message_id] = self._announced.pop(message_id)

    def _ask(self, ids: Sequence[str]) -> Iterator[_Reply]:
        """Replies that the SuperLink has. It forgets those of a call that fails half-way."""
        if not ids:
            return
        if not self._singly:
            try:
                yield from self._announcements(ids)
                return
            except grpc.RpcError as error:
                self._singly = True
                log.warning(
                    "the SuperLink cannot give all replies at once (%s): from now on each is "
                    "asked for by itself",
                    _said(error),
                )
        for message_id in ids:
            try:
                yield from self._announcements([message_id])
            except grpc.RpcError as error:
                why = f"the SuperLink cannot give it: {_said(error)}"
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
            reply.why = "its objects have ids that cannot be."
        return reply

    # ---------------------------------------------------------------- its objects

    def _fetch(self, reply: _Reply) -> bool:
        """Fetch what is there of a reply; return whether that is all, or it is refused."""

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
                    raise _TooLargeError(f"it holds more than {reply.most:,} bytes.")
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
        """An object's content by a call; empty if it is in a file and ``more`` says so."""
        call = partial(self._objects.PullObject, timeout=CALL_DEADLINE_S, more=more)
        pull = make_pull_object_fn_protobuf(call, self.inner.node, self.inner.run.run_id)
        content: wire.Content = pull(object_id)
        return content

    def _next_of(self, reply: _Reply) -> list[str]:
        """The objects that are asked for now.

        Those in files come first, and then one by a call, for silos send in order: if that is not
        there yet, the rest is not.
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
        """An object that lies in a file of this machine; None if it does not."""
        if self._shelf is None:
            return None
        place = reply.places.get(object_id)
        with suppress(OSError):
            return self._shelf.shown(object_id, None if place is None else reply.room, place or 0)
        return None

    def _let_go(self, reply: _Reply) -> None:
        """The SuperLink may delete the objects of this reply."""
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
        """The replies that it holds, one for each message that it answers."""
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
                what = why or "its process gave no answer for it."
                told = Error(wire.UNREADABLE, f"its reply cannot be read: {wire.plain_text(what)}")
                own = Message(told, reply_to=message)
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
        """What the answer to a question who one is tells of its node."""
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
            raise wire.WireError("it does not say how many silos it has.")
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
"""Call → what reads its answer."""


def runtime_calls(grid: Any, max_bytes: int = 2**31 - 1) -> Any:
    """Calls of a run's ServerApp, over what Flower's Grid speaks.

    A SuperLink that is away is waited for, as by Flower; the SuperLink itself ends a run whose
    ServerApp it has not heard of for long.

    Args:
        grid: Flower's.
        max_bytes: of an answer.
    """
    http = engine_speaks_http()
    certificates = None if grid._insecure else grid._cert or b""
    channel = open_channel(grid._addr, certificates, http=http, max_bytes=max_bytes)
    token = (("flwr-task-token", grid._token),)
    retry = Retry(partial(_is_lasting, grid), max_s=None, first_s=1.0, most_s=20.0)
    calls = calls_of(channel, "Runtime", ANSWERS)

    def calling(call: Callable[..., Any]) -> Callable[..., Any]:
        def invoke(request: Any, *, more: tuple[tuple[str, str], ...] = (), **how: Any) -> Any:
            return retry.invoke(call, request, metadata=(*token, *more), **how)

        return invoke

    return SimpleNamespace(**{name: calling(call) for name, call in calls.items()})


def _is_lasting(grid: Any, error: grpc.RpcError) -> bool:
    """Whether an error stays; one that means that the run is over ends this process.

    Where the run's token is gone, a call of Flower's own fails as well. Flower then ends the
    process by a signal, one for all its calls: another would cut off what is being written.
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
    """A node id for a silo that shares one."""
    return int.from_bytes(sha256(f"{node}/{number}".encode()).digest()[:8], "big") >> 1


def _most_bytes(message: Message) -> int:
    return wire.most_bytes(message.metadata.message_type, wire.num_array_bytes(message.content))


def _said(error: grpc.RpcError) -> str:
    """A gRPC error in a line."""
    return wire.plain_text(f"{error.code().name}: {error.details()}", 200)
