"""A reply that is fetched: its objects, or its bundle and the contents that this names."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from mmap import ACCESS_READ, mmap
from pathlib import Path
from tempfile import TemporaryFile

from coterie.system.files import why_unwritten

log = logging.getLogger("coterie.run")

LARGE_BYTES = 2**26
"""Size above which a content that arrives by calls goes to a file: it need not fit in memory."""


@dataclass
class Announced:
    """A reply that the SuperLink has announced.

    Attributes:
        message_id: id of the message or bundle that it answers.
        wanted: objects that have not been fetched; the reply's own object comes first.
        most: byte limit.
        why: reason for rejecting it.
        received: all objects came with the announcement, and the SuperLink knows it.
        blobs: contents that its bundle names.
    """

    message_id: str
    object_id: str
    wanted: list[str]
    contents: dict[str, bytes] = field(default_factory=dict)
    most: int = 0
    num_bytes: int = 0
    why: str = ""
    received: bool = False
    blobs: dict[str, memoryview] = field(default_factory=dict)

    @property
    def root(self) -> bytes:
        """Its own object; empty while it has not been fetched."""
        return self.contents.get(self.object_id, b"")

    def take(self, object_id: str, content: bytes) -> None:
        """Add a fetched object."""
        self.num_bytes += len(content)
        self.contents[object_id] = content

    def take_along(self, came: Mapping[str, bytes]) -> None:
        """Store those of its objects that came with the announcement."""
        own = [name for name in self.wanted if name in came and not self.why]
        for name in own:
            self.take(name, came[name])
        self.wanted = [name for name in self.wanted if name not in own]
        self.received = not self.wanted


def gathered(fetch: Callable[[], Iterable[bytes]], size: int, folder: Path | None) -> memoryview:
    """Return the content that consists of these parts; a large one is in an unnamed file.

    Args:
        fetch: yields the parts.
        folder: of the file; None keeps all in memory.
    """
    if folder is not None and size > LARGE_BYTES:
        try:
            # Without a buffer, a full disk shows at once. The file lives as long as the map.
            with TemporaryFile(dir=folder, buffering=0) as file:
                for part in fetch():
                    while part:
                        part = part[file.write(part) :]
                return memoryview(mmap(file.fileno(), size, access=ACCESS_READ))
        except OSError as error:
            log.warning("a large reply is kept in memory: %s", why_unwritten(error))
    return memoryview(b"".join(fetch()))
