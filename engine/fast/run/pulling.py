"""The fast engine of a run: few objects per message, and replies fetched one by one within limits.

Flower's Grid waits for every object of one reply before it looks at the next, and raises if it
cannot read one. So one silo can delay a round by minutes, or end a run. Here each reply waits
separately until it is complete, and a reply that is too large or unreadable becomes an error reply
of its silo.

``query.describe`` announces to resident silos that bundles (``engine.fast.bundles``) are read here.
A silo that answers with a bundle is sent bundles from then on; others get Flower's objects. A
process with several silos has one node. It answers with the number of its silos, and each of them
then gets its own node id here. Their messages travel in bundles.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import grpc
from flwr.app import Array, Error, Message, RecordDict
from flwr.proto.message_pb2 import (
    ConfirmMessageReceivedRequest,
    ObjectTree,
    PullObjectRequest,
)
from flwr.proto.runtime_pb2 import (
    PullAppMessagesRequest,
    PushAppMessagesRequest,
)
from flwr.serverapp import Grid

from coterie import wire
from coterie.engine import flower
from coterie.engine.fast import bundles, inline_objects, objects
from coterie.engine.fast.bundles import SHARED_BYTES
from coterie.engine.fast.channel import ChannelError, Part, get, new_upload, put
from coterie.engine.fast.run.announced import Announced, gathered
from coterie.engine.fast.run.appcalls import CALL_DEADLINE_S, runtime_calls, said
from coterie.engine.fast.run.parcels import Nodes, Parcel
from coterie.engine.fast.superlink import blob_store
from coterie.engine.flower import inflatable_object, inflatable_utils
from coterie.engine.pauses import Pauses
from coterie.engine.plain import Plain
from coterie.engine.port import Engine
from coterie.system.files import why_unwritten

log = logging.getLogger("coterie.run")

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


def fast_engine(grid: Grid, *, hosts: bool = False, folder: Path | None = None) -> Engine:
    """Return the engine of a run.

    Args:
        grid: of the run.
        folder: for large replies while they are needed; None keeps them in memory.
        hosts: one node may stand for several silos. Not where silos are enrolled, by key.
    """
    if flower.connection_of(grid) is None:  # of Flower's simulation
        return Plain(grid)
    wire.reuse_blocks()
    return FastEngine(grid, hosts, folder)


class FastEngine:
    """A run's engine."""

    def __init__(self, inner: Any, hosts: bool, folder: Path | None) -> None:
        self.inner = inner
        self._stub = runtime_calls(inner)
        self._nodes, self._folder = Nodes(hosts), folder
        self._sent: dict[str, Parcel] = {}
        self._announced: dict[str, Announced] = {}
        self._singly = False
        self._threads, self._pauses = ThreadPoolExecutor(THREADS), Pauses()
        # A channel of its own for objects, so that gRPC refuses one that is too large, also one
        # that is small only while it is compressed, before it is in memory.
        self._objects = runtime_calls(inner, wire.MAX_OBJECT_BYTES)
        self._store: blob_store.BlobStore | None = None
        """The SuperLink's folder, if it is on this machine."""
        self._has_channel: bool | None = None
        """Whether the SuperLink is coterie's; None: not asked yet."""

    def nodes(self) -> list[int]:
        """Return the node ids; silos that share a node replace it."""
        return self._nodes.present(list(self.inner.get_node_ids()))

    def push(self, messages: Sequence[Message]) -> list[str]:
        """Push messages; the size of each one sets the size limit of its reply."""
        parcels = self._nodes.parcels(messages, self._waiting)
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
        self._pauses.begin()
        return [ids.get(id(message), "") for message in messages]

    def _known(self, name: str) -> bytes:
        """Return what coterie's SuperLink knows by this name; nothing from another one."""
        request = PullObjectRequest(
            node=self.inner.node, run_id=self.inner.run.run_id, object_id=name
        )
        with suppress(grpc.RpcError):
            return bytes(self._objects.PullObject(request, timeout=CALL_DEADLINE_S).object_content)
        return b""

    def _waiting(self) -> set[int]:
        """Ask coterie's SuperLink for nodes that read bundles but have not announced it."""
        with suppress(ValueError, TypeError):
            return set(json.loads(self._known(wire.WAITING)))
        return set()

    def _invite(self, message: Message) -> None:
        """Announce in ``query.describe`` that bundles are read here; other apps ignore it."""
        if message.metadata.message_type == wire.DESCRIBE and self._find_channel():
            config = wire.config_records(message.content)[wire.CONFIG]
            config[wire.BUNDLES], config[wire.HOSTED] = True, self._nodes.hosts

    def _find_channel(self) -> bool:
        """Return whether the SuperLink has the channel; find its folder if that is here."""
        if self._has_channel is None:
            location = self._known(blob_store.WHERE)
            self._has_channel, self._store = bool(location), blob_store.find(location)
        return self._has_channel

    def _push_bundles(self, parcels: Sequence[Parcel]) -> list[str]:
        """Push each parcel as one message; return the ids, empty where one was not accepted."""
        if not parcels:
            return []
        self._find_channel()
        run_id, names = self.inner.run.run_id, dict[int, tuple[Array, str]]()
        headers, trees, roots = [], [], dict[str, bytes]()

        def put(array: Array) -> str:
            if id(array) not in names:  # which keeps it, so that its id stays its own
                names[id(array)] = array, self._put(array.data)
            return names[id(array)][1]

        for parcel in parcels:
            for message in parcel.messages:
                flower.set_run(message, run_id)
                flower.set_sender(message, self.inner.node.node_id)
            made = bundles.bundle(parcel.messages, put, parcel.to, inline=SHARED_BYTES)
            root = bundles.object_id(made.content)
            roots[root] = made.content
            header = flower.message_to_proto(flower.message_from(parcel.messages[0], RecordDict()))
            header.metadata.message_id = root
            headers.append(header)
            trees.append(made.tree(root))
        along = inline_objects.small(roots.items())
        apart = roots.keys() - along.keys()
        for root in apart:
            self._put(roots[root])
        request = PushAppMessagesRequest(messages_list=headers, message_object_trees=trees)
        inline_objects.attach(request, along.values())
        answer = self._stub.PushMessages(request)
        if answer.objects_to_push:
            missing = answer.objects_to_push[0]
            raise inflatable_utils.ObjectPushError(missing, run_id, answer.session_id)
        for name in (*apart, *(name for _, name in names.values())):
            self._withdraw(name)
        ids = list(answer.message_ids)
        return ids + [""] * (len(parcels) - len(ids))

    def _put(self, content: bytes | memoryview) -> str:
        """Give the SuperLink a content; return its name."""
        held = memoryview(content)
        if self._store is not None:
            try:
                return self._store.offer(held, self.inner.run.run_id, self.inner.node.node_id)
            except OSError as error:
                if not self._store.folder.is_dir():  # of a SuperLink that was restarted
                    self._has_channel = self._store = None
                    self._find_channel()
                    return self._put(content)
                log.warning("large objects are sent in calls: %s", why_unwritten(error))
                self._store = None
        return put(self._call("Put"), self.inner.node, self.inner.run.run_id, held, new_upload())

    def _withdraw(self, name: str) -> None:
        """Delete a content that the SuperLink has had already."""
        if self._store is not None:
            run, node = self.inner.run.run_id, self.inner.node.node_id
            self._store.offered(name, run, node).unlink(missing_ok=True)

    def _call(self, name: str) -> Callable[[Part], bytes]:
        call = getattr(self._objects, name)
        return lambda part: bytes(call(part, more=part.head, timeout=CALL_DEADLINE_S))

    def pull(self, ids: Sequence[str], wait_s: float) -> list[Message]:
        """Return the complete or rejected replies to these messages; see ``Engine``.

        Replies announced for other messages are dropped.
        """
        asked = set(ids)
        self._pauses.rest(wait_s, held=self._holds(len(asked)))
        began = time.monotonic()
        roots = {one.partition(".")[0] for one in asked}
        gone = [self._announced.pop(root) for root in set(self._announced) - roots]
        confirmed = [self._threads.submit(self._let_go, reply) for reply in gone]
        self._sent = {root: parcel for root, parcel in self._sent.items() if root in roots}
        for reply in self._ask(sorted(self._sent.keys() - set(self._announced))):
            self._announced[reply.message_id] = reply
        whole: list[Message] = []
        for reply in list(self._announced.values()):
            if reply.why or self._fetch(reply):
                del self._announced[reply.message_id]
                confirmed.append(self._threads.submit(self._let_go, reply))
                whole += self._read(reply)
                del self._sent[reply.message_id]  # what was sent is as large as the next
        for one in confirmed:
            one.result()
        self._pauses.looked(time.monotonic() - began, found=bool(whole))
        return [one for one in whole if one.metadata.reply_to_message_id in asked]

    def close(self) -> None:
        """End its threads and channels."""
        self._threads.shutdown()
        for calls in (self._stub, self._objects):
            calls.close()

    # ---------------------------------------------------------------- what is announced

    def _holds(self, count: int) -> bool:
        """Return whether coterie's SuperLink holds a pull of ``count`` replies until more arrive.

        If very many are pending, some are always there; those of an incomplete reply are asked for.
        """
        return bool(self._has_channel) and count <= FEW and not self._announced

    def _ask(self, ids: Sequence[str]) -> Iterator[Announced]:
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
                    said(error),
                )
        for message_id in ids:
            try:
                yield from self._announcements([message_id])
            except grpc.RpcError as error:
                why = f"the SuperLink cannot send it: {said(error)}"
                yield Announced(message_id, "", [], why=why)

    def _announcements(self, ids: Sequence[str]) -> list[Announced]:
        waits = self._holds(len(ids))
        patient = ((wire.PATIENCE, str(PATIENCE_MS)),) if waits else ()
        answer = self._stub.PullMessages(
            PullAppMessagesRequest(message_ids=ids),
            timeout=CALL_DEADLINE_S,
            more=(*patient, (wire.ALONG, "1")),
        )
        came = inline_objects.attached(answer)
        pairs = zip(answer.messages_list, answer.message_object_trees, strict=True)
        found = [self._announced_reply(header.metadata, tree) for header, tree in pairs]
        for reply in found:
            reply.take_along(came)
        return [reply for reply in found if reply.message_id in ids]

    def _announced_reply(self, metadata: Any, tree: ObjectTree) -> Announced:
        reply = Announced(metadata.reply_to_message_id, metadata.message_id, [])
        objects = inflatable_object.iterate_object_tree(tree)
        ids = [one.object_id for one in islice(objects, wire.MAX_OBJECTS + 1)]
        reply.wanted = list(dict.fromkeys((reply.object_id, *ids)))
        sent = self._sent.get(reply.message_id)
        if sent is not None:
            reply.most = sent.most_bytes
        if len(ids) > wire.MAX_OBJECTS:
            reply.why = f"it consists of more than {wire.MAX_OBJECTS:,} objects."
        elif tree.object_id != reply.object_id or not all(
            map(inflatable_object.is_valid_sha256_hash, ids)
        ):
            reply.why = "its objects have invalid ids."
        return reply

    # ---------------------------------------------------------------- its objects

    def _fetch(self, reply: Announced) -> bool:
        """Fetch the available objects of a reply; return whether it is complete or rejected."""

        def pulled(object_id: str) -> bytes | None:
            try:
                return self._pulled(object_id)
            except inflatable_utils.ObjectUnavailableError:
                return None

        until = time.monotonic() + FETCH_S
        try:
            while reply.wanted and not bundles.is_bundle(reply.root):
                if time.monotonic() > until:
                    return False
                some = reply.wanted[: AT_ONCE if reply.root else 1]
                missing = list[str]()
                for object_id, content in zip(some, self._threads.map(pulled, some), strict=True):
                    if content is None:
                        missing.append(object_id)
                    else:
                        reply.take(object_id, content)
                reply.wanted = missing + [one for one in reply.wanted if one not in some]
                _require_few(reply, reply.num_bytes)
                if missing:
                    return False
            if bundles.is_bundle(reply.root):
                named = bundles.blobs_of(reply.root)
                _require_few(reply, reply.num_bytes + sum(blob.size for blob in named))
                reply.blobs = {blob.name: self._content(blob) for blob in named}
        except grpc.RpcError as error:
            reply.why = f"it cannot be fetched: {said(error)}"
        except inflatable_utils.ObjectUnavailableError:  # the contents of a bundle
            return False
        except inflatable_utils.ObjectPullError:
            reply.why = GONE
        except (ValueError, ChannelError) as error:
            reply.why = str(error)
        return True

    def _pulled(self, object_id: str) -> bytes:
        """Fetch an object by a call."""
        call = partial(self._objects.PullObject, timeout=CALL_DEADLINE_S)
        pull = flower.make_pull_object_fn_protobuf(call, self.inner.node, self.inner.run.run_id)
        return bytes(pull(object_id))

    def _content(self, blob: bundles.Blob) -> memoryview:
        """Return a content of a reply, from a file of this machine if there is one."""
        if self._store is not None:
            with suppress(OSError, ValueError):
                found = self._store.shown(blob.name)
                if found is not None:
                    return found
        node, run_id = self.inner.node, self.inner.run.run_id
        fetch = partial(get, self._call("Get"), node, run_id, blob.name, blob.size)
        return gathered(fetch, blob.size, self._folder)

    def _let_go(self, reply: Announced) -> None:
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
            log.debug("a reply was not confirmed: %s", said(error))

    def _read(self, reply: Announced) -> list[Message]:
        parcel = self._sent[reply.message_id]
        why, found = reply.why, list[Message]()
        to: list[int] | None = None
        if not why:
            try:
                found, to = self._messages_of(reply)
                if to is None:
                    self._nodes.note(parcel, found[0], bundled=bundles.is_bundle(reply.root))
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
            flower.set_message_id(message, own_id)
            own = of_all if parcel.to is None else by_silo.get(parcel.to[place])
            if own is None:
                what = why or "its process sent no answer for it."
                failed = Error(
                    wire.UNREADABLE, f"its reply cannot be read: {wire.plain_text(what)}"
                )
                own = Message(failed, reply_to=message)
            flower.set_asked_id(own, own_id)
            answers.append(own)
        return answers

    def _messages_of(self, reply: Announced) -> tuple[list[Message], list[int] | None]:
        most = reply.most + wire.MAX_OBJECT_BYTES
        if bundles.is_bundle(reply.root):
            return bundles.unbundle(reply.object_id, reply.root, reply.blobs, max_bytes=most)
        message = objects.put_together(reply.object_id, reply.contents, max_bytes=most)
        flower.set_message_id(message, reply.object_id)
        return [message], None


def _require_few(reply: Announced, num_bytes: int) -> None:
    if num_bytes > reply.most + wire.MAX_OBJECT_BYTES:
        raise ValueError(f"it has more than {reply.most:,} bytes.")
