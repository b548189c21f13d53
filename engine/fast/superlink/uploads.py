"""Contents that arrive part by part over the channel, until a message has their names.

A silo's parts are within its limits (``quota``) before they come here. What its next message does
not name is deleted after ``blob_store.LEFT_S``, as is an upload that does not go on.
"""

from __future__ import annotations

import os
import time
from collections import OrderedDict
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from threading import Lock
from typing import Any

from coterie.engine.fast.channel import UNKNOWN, Part
from coterie.engine.fast.superlink.blob_store import LEFT_S, BlobStore, write_at

MOST = 4
"""Unfinished uploads of one node; the oldest gives way to another one."""
SWEEP_S = LEFT_S / 10


@dataclass
class _Upload:
    """A content of which the first ``have`` bytes have come."""

    file: Path
    size: int
    have: int = 0
    digest: Any = field(default_factory=sha256)
    lock: Lock = field(default_factory=Lock)
    touched: float = field(default_factory=time.monotonic)

    @property
    def name(self) -> str:
        """The name of the content; empty until all of it has come."""
        return str(self.digest.hexdigest()) if self.have == self.size else ""


class Uploads:
    """The uploads to one folder; thread-safe."""

    def __init__(self, store: BlobStore) -> None:
        self._store, self._lock = store, Lock()
        self._open: dict[tuple[int, int], OrderedDict[str, _Upload]] = {}
        """Run and node → its uploads by number, the oldest first."""
        self._swept = time.monotonic()

    def take(self, part: Part) -> bytes:
        """Store a part; return how much has arrived, or the name of the content if it is whole.

        A part that comes again is not stored again. Without those before it the answer is
        ``UNKNOWN``. Raises ``OSError``.
        """
        run, node = part.run_id, part.node.node_id
        self._sweep()
        with self._lock:
            own = self._open.setdefault((run, node), OrderedDict())
            upload = own.get(part.object_id)
            if upload is None and part.at == 0:
                file, descriptor = self._store.begin(run, node)
                os.close(descriptor)
                upload = own[part.object_id] = _Upload(file, part.size)
                while len(own) > MOST:
                    own.popitem(last=False)[1].file.unlink(missing_ok=True)
        if upload is None:
            return UNKNOWN
        with upload.lock:
            end = part.at + len(part.object_content)
            if part.at > upload.have or part.size != upload.size or end > part.size:
                return UNKNOWN
            upload.touched = time.monotonic()
            try:
                if part.at == upload.have < end:
                    self._write(upload, part.object_content)
                    if upload.name:
                        upload.file.rename(self._store.offered(upload.name, run, node))
            except OSError:
                upload.have = -1  # it must begin again
                upload.file.unlink(missing_ok=True)
                raise
            return (upload.name or str(upload.have)).encode()

    def _write(self, upload: _Upload, content: bytes) -> None:
        descriptor = os.open(upload.file, os.O_WRONLY | os.O_NOFOLLOW)
        try:
            write_at(descriptor, upload.have, content)
            upload.digest.update(content)
            upload.have += len(content)
            if upload.name:  # not before: the file may have been used, and its pages are reused
                os.ftruncate(descriptor, upload.size)
        finally:
            os.close(descriptor)

    def announced(self, run: int, node: int) -> None:
        """Forget the finished uploads of a node, whose message has been announced."""
        with self._lock:
            own = self._open.get((run, node), OrderedDict())
            for number, upload in list(own.items()):
                if upload.name:  # its content may have been here already
                    self._store.offered(upload.name, run, node).unlink(missing_ok=True)
                    del own[number]
            if not own:
                self._open.pop((run, node), None)

    def _sweep(self) -> None:
        with self._lock:
            now = time.monotonic()
            if now - self._swept < SWEEP_S:
                return
            self._swept = now
            for key, own in list(self._open.items()):
                for number, upload in list(own.items()):
                    if now - upload.touched > LEFT_S:
                        del own[number]
                if not own:
                    del self._open[key]
        self._store.forget_unannounced()
