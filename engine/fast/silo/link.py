"""The silo's connection to the SuperLink: receive a message and send its reply.

The calls are in ``coterie.engine.fast.silo.calls``. This module waits fractions of a second where
a stock SuperNode waits seconds, and explains why a silo is refused. A contract test runs it
against a real SuperLink. Connections of one process share a channel and a heartbeat thread
(``coterie.engine.fast.silo.sharing``).
"""

from __future__ import annotations

import io
import logging
import sys
import tomllib
import zipfile
import zlib
from collections import defaultdict
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import grpc
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.proto.message_pb2 import ObjectTree

from coterie import wire
from coterie.engine.fast import bundles, objects
from coterie.engine.fast.channel import FROM_BYTES, ChannelError, new_upload
from coterie.engine.fast.silo import sharing
from coterie.engine.fast.silo.calls import Announced, Calls, joined
from coterie.engine.fast.silo.lost import (
    LOST,
    UNKNOWN_WAY,
    Way,
    distrusts,
    meaning_of,
    refusal_of,
)
from coterie.engine.flower import (
    ObjectPullError,
    ObjectPushError,
    ObjectUnavailableError,
    inflatable_object,
    inflatable_utils,
    message_from,
    set_asked_id,
    set_message_id,
    user_config_from_proto,
)
from coterie.engine.port import (
    Connection,
    LinkError,
    Received,
    RunSettings,
    TooLargeError,
    UnreadableError,
    Unsent,
)
from coterie.system.calls import Retry
from coterie.wire import sentence
from coterie.wire.buffers import block_of

log = logging.getLogger("coterie.silo")

RETRY_S = 20.0
"""Seconds that a call is retried before its connection counts as lost."""

BRIEF_RETRY_S = 2.0
"""Seconds that a call is retried while connecting, because the resident silo tries again anyway,
and while its process ends."""

PASSING = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL)
"""Transient: unreachable, or an error inside Flower. Repeating is harmless: a reply counts once."""

MANIFEST, MAX_MANIFEST = "pyproject.toml", 1_000_000
"""Name in a FAB, and the most bytes read of it: it is compressed and comes from a network."""

OBJECT_WAIT_S = 120.0
"""Longest time for an announced object to arrive at the SuperLink."""

OBJECT_PAUSE_S = 0.01
"""First pause before asking again for an announced object that has not arrived."""


class FleetLink:
    """A ``SiloEngine``, made by ``connect``."""

    def __init__(
        self,
        calls: Calls,
        cache: sharing.ObjectCache | None = None,
        max_bytes: int = 0,
        silos: int = 1,
        way: Way = UNKNOWN_WAY,
    ) -> None:
        self.node_id, self._calls = calls.node.node_id, calls
        self._way = way
        self._cache = cache
        self._max_bytes = max_bytes
        self._silos = silos
        self._claimed: Announced | None = None
        self._sending: Unsent | None = None
        self._uploads: dict[int, str] = {}
        """Numbers of the uploads for the replies that are being sent."""
        self.notifies = True
        """The SuperLink says when there is a message, as far as is known."""

    def receive(self) -> Received | None:
        with self._translated():
            self._claimed = self._claimed or self._calls.receive()
            if self._claimed is None:
                return None
            try:
                received = self._content_of(*self._claimed)
            except grpc.RpcError as error:
                if error.code() not in LOST:
                    self._claimed = None
                raise
            except BaseException:
                self._claimed = None
                raise
            self._claimed = None
            return received

    def wait(self) -> bool:
        with self._translated():
            try:
                self._calls.wait()
            except grpc.RpcError as error:
                if error.code() != grpc.StatusCode.UNIMPLEMENTED:
                    raise
                self.notifies = False
        return self.notifies

    def hurry(self) -> None:
        self._calls.retry.max_s = BRIEF_RETRY_S

    def _content_of(self, header: Message, tree: ObjectTree, came: Mapping[str, bytes]) -> Received:
        message_id = header.metadata.message_id
        try:
            contents, blobs = self._objects_of(header, tree, came)
            root = contents.get(message_id, b"")
            if not bundles.is_bundle(root):
                message = objects.put_together(message_id, contents, max_bytes=self._max_bytes)
                set_message_id(message, message_id)
                received = Received(header, (message,), bundled=_reads_bundles(message))
            else:
                messages, to = bundles.unbundle(message_id, root, blobs, max_bytes=self._max_bytes)
                whose = None if to is None else tuple(to)
                received = Received(header, tuple(messages), whose, bundled=True)
        except wire.WireError as error:
            raise UnreadableError(str(error), header) from None
        for objection in map(self._objection, received.messages):
            if objection:
                raise UnreadableError(objection, header)
        if any(number >= self._silos for number in received.to or ()):
            raise UnreadableError(f"this process serves {self._silos} silos.", header)
        return received

    def _objects_of(
        self, header: Message, tree: ObjectTree, came: Mapping[str, bytes]
    ) -> tuple[dict[str, bytes], dict[str, memoryview]]:
        """Return the objects of a message and, if it is a bundle, the contents that it names."""
        run_id, message_id = header.metadata.run_id, header.metadata.message_id
        ids = [node.object_id for node in inflatable_object.iterate_object_tree(tree)]
        if len(ids) > wire.MAX_OBJECTS:
            raise UnreadableError(f"more than {wire.MAX_OBJECTS:,} objects.", header)
        pulled = dict[str, int]()

        def pull(object_id: str) -> bytes:
            content = came.get(object_id) or self._pulled(run_id, message_id, object_id)
            pulled[object_id] = len(content)
            self._require_few(sum(list(pulled.values())), header)
            return content

        contents = _pulled_all({message_id} & set(ids), pull, came)
        blobs = dict[str, memoryview]()
        root = contents.get(message_id, b"")
        if bundles.is_bundle(root):
            named = {blob.name: blob for blob in bundles.blobs_of(root)}
            self._require_few(len(root) + sum(blob.size for blob in named.values()), header)
            blobs = _pulled_all(named, lambda name: self._content(run_id, named[name]))
        else:
            contents |= _pulled_all(dict.fromkeys(ids).keys() - {message_id}, pull, came)
        if not came.keys() >= set(ids):  # otherwise the SuperLink knows
            self._calls.confirm(run_id, message_id)
        if not blobs:  # an object that is named many times is unpacked as often
            self._require_few(sum(len(contents.get(one, b"")) for one in ids), header)
        return contents, blobs

    def _require_few(self, num_bytes: int, header: Message) -> None:
        if 0 < self._max_bytes * self._silos < num_bytes:
            what = f"a message of more than {self._max_bytes / 1e6:,.0f} MB"
            raise TooLargeError(what, header)

    def _content(self, run_id: int, blob: bundles.Blob) -> memoryview:
        """Fetch a content; connections of one process fetch it once."""
        if self._cache is None:
            return self._fetched(run_id, blob)
        fetch = partial(self._fetched, run_id, blob)
        return memoryview(self._cache.get(blob.name, fetch))

    def _fetched(self, run_id: int, blob: bundles.Blob) -> memoryview:
        block = block_of(blob.size)
        held = memoryview(bytearray(blob.size)) if block is None else block.data[: blob.size]
        at = 0
        for part in self._calls.get(run_id, blob.name, blob.size):
            held[at : at + len(part)] = part
            at += len(part)
        return held.toreadonly()

    def _objection(self, message: Message) -> str:
        if not message.has_content():
            return "it has no content."
        return wire.content_objection(message.content, max_bytes=self._max_bytes or sys.maxsize)

    def require_running(self, run_id: int) -> None:
        with self._translated():
            self._calls.run(run_id)

    def settings_of(self, run_id: int) -> RunSettings:
        with self._translated():
            run = self._calls.run(run_id)
            content = self._calls.fab(run.fab_hash, run_id).content if run.fab_hash else b""
            own = user_config_from_proto(run.override_config)
        return RunSettings(run.series_id, {**_config_of(content), **own})

    def _pulled(self, run_id: int, message_id: str, object_id: str) -> bytes:
        """Pull an object; all but the message itself may be shared with other silos."""
        pull: Callable[[], bytes] = partial(self._calls.pull_object, run_id, object_id)
        if self._cache is None or object_id == message_id:
            return pull()
        return bytes(self._cache.get(object_id, pull))

    def send(self, unsent: Unsent) -> None:
        with self._translated():
            if not unsent.bundled:
                self._send_as_flower(unsent)
                return
            header = _header_of(unsent.replies[0], several=unsent.to is not None)
            if self._sending is not unsent:
                self._sending, self._uploads = unsent, defaultdict(new_upload)

            def put(content: bytes | memoryview, key: int) -> str:
                run_id = header.metadata.run_id
                return str(self._calls.put(run_id, memoryview(content), self._uploads[key]))

            made = bundles.bundle(unsent.replies, lambda one: put(one.data, id(one)), unsent.to)
            if len(made.content) < FROM_BYTES:
                root = bundles.object_id(made.content)
                along = {root: made.content}
            else:
                root, along = put(made.content, 0), {}
            set_message_id(header, root)
            left, _ = self._calls.send(header, made.tree(root), unsent.seconds, along)
            if left:
                self._sending = None
                raise ChannelError("the SuperLink does not have all of the reply any more.")

    def _send_as_flower(self, unsent: Unsent) -> None:
        (reply,) = unsent.replies
        with inflatable_object.no_object_id_recompute():
            set_message_id(reply, reply.object_id)
            objects = inflatable_object.get_all_nested_objects(reply)
            tree = inflatable_object.get_object_tree(reply)
            wanted, session = self._calls.send(reply, tree, unsent.seconds, {})
            push = partial(self._calls.push_object, reply.metadata.run_id, session)
            inflatable_utils.push_objects(objects, push, object_ids_to_push=wanted)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except grpc.RpcError as error:
            raise meaning_of(error, self._way) from error
        except UnreadableError:
            raise
        except (ObjectPullError, ObjectUnavailableError, ObjectPushError, ChannelError) as error:
            # One that did not come, or that the SuperLink takes no more under this number: the
            # reply is announced again.
            raise LinkError(f"the SuperLink was lost: {sentence(error)}", holds=True) from error
        except RuntimeError as error:  # a node that is gone
            raise LinkError(f"the SuperLink was lost: {sentence(error)}") from error


def _pulled_all(
    names: Collection[str], pull: Callable[[str], Any], came: Collection[str] = ()
) -> dict[str, Any]:
    """Return objects or contents by name; wait for those that are on their way, in threads.

    ``came`` are those that nobody has to wait for.
    """
    found = {name: pull(name) for name in names if name in came}
    if left := [name for name in names if name not in found]:
        found |= inflatable_utils.pull_objects(
            left,
            pull,
            initial_backoff=OBJECT_PAUSE_S,
            backoff_cap=0.5,
            max_time=OBJECT_WAIT_S,
        )
    return found


def _reads_bundles(message: Message) -> bool:
    if message.metadata.message_type != wire.DESCRIBE or not message.has_content():
        return False
    config = wire.config_records(message.content).get(wire.CONFIG, ConfigRecord())
    return bool(config.get(wire.BUNDLES))


def _header_of(reply: Message, *, several: bool) -> Message:
    """Return a bundle's header: its replies' metadata, and the id of what it answers."""
    header = message_from(reply, RecordDict())
    if several:
        set_asked_id(header, header.metadata.reply_to_message_id.rpartition(".")[0])
    return header


def _config_of(fab: bytes) -> dict[str, str | int | float | bool]:
    """Return the run's configuration in a FAB, table keys joined by dots; empty if it has none."""
    if not fab:
        return {}
    try:
        with zipfile.ZipFile(io.BytesIO(fab)) as packed, packed.open(MANIFEST) as file:
            text = file.read(MAX_MANIFEST + 1)
        if len(text) > MAX_MANIFEST:
            raise ValueError(f"{MANIFEST} is larger than {MAX_MANIFEST:,} bytes")
        own = tomllib.loads(text.decode()).get("tool", {}).get("flwr", {}).get("app", {})
        return dict(_flat(own.get("config", {})))
    except (
        *(zipfile.BadZipFile, zlib.error, NotImplementedError, RuntimeError, EOFError, OSError),
        *(KeyError, ValueError, AttributeError),
    ) as error:  # RuntimeError: also of tables too deep, and of a password
        log.warning("the run's configuration cannot be read from its FAB: %s", error)
        return {}


def _flat(table: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{above}{key}.")
        elif isinstance(value, str | int | float):
            yield above + key, value
        else:
            raise ValueError(f"{above}{key} is a {type(value).__name__}")


@contextmanager
def connect(
    how: Connection,
    cache: sharing.ObjectCache | None = None,
    *,
    max_bytes: int = 0,
    silos: int = 1,
) -> Iterator[FleetLink]:
    """Register with a SuperLink and hold the connection.

    Raises ``LinkError`` with the SuperLink's reason if it is not reachable, or refuses.

    Args:
        cache: of pulled objects, shared with other connections; None if there are none.
        max_bytes: largest message; a larger one is refused before it is unpacked. 0: no limit.
        silos: number of silos that share the connection.
    """
    errors: list[grpc.RpcError] = []
    retry, way = _retry(), Way(how.address, tls=how.root_certificates is not None)

    def failed(error: grpc.RpcError, stalled: bool) -> None:
        if not entered:
            errors.append(error)
        if stalled:
            sharing.renew(how.address)

    certificates = how.root_certificates.read_bytes() if how.root_certificates else None
    entered = False
    with ExitStack() as stack:
        try:
            opening = joined(how.address, certificates, how.keys, retry, failed)
            calls = stack.enter_context(opening)
        except grpc.RpcError as error:
            raise refusal_of(errors[-1] if errors else error, way) from error
        entered, retry.max_s = True, RETRY_S
        yield FleetLink(calls, cache, max_bytes, silos, way)


def _retry() -> Retry:
    """Retry only transient errors, and not forever: the resident silo reconnects."""

    def is_lasting(error: Any) -> bool:
        return error.code() not in PASSING or distrusts(str(error.details()))

    return Retry(is_lasting, max_s=BRIEF_RETRY_S)
