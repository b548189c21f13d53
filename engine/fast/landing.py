"""Where the pieces of a message arrive at a silo."""

from __future__ import annotations

from collections.abc import Sequence
from threading import Lock

import numpy as np
from numpy.typing import NDArray

from coterie.engine.fast.bundles import PIECE_BYTES, body_of, is_bundle
from coterie.engine.fast.pulled import Content, Piece
from coterie.wire.buffers import FROM_BYTES, block_of


class Landing:
    """Contiguous memory for a message's pieces that arrive one by one.

    ``ids`` are those of its pieces, in order; ``most`` limits its size in bytes (0: no limit).
    """

    def __init__(self, ids: Sequence[str], most: int) -> None:
        places = min(len(ids), most // PIECE_BYTES + 1) if most else len(ids)
        self._places = {one: place for place, one in enumerate(ids[:places])}
        self._block: NDArray[np.uint8] | None = None
        self._lock = Lock()

    def lay(self, object_id: str, content: Content) -> Content:
        """Return the object, moved to its place if it is a large piece."""
        place = self._places.get(object_id)
        if place is None or len(content) < FROM_BYTES or not is_bundle(content):
            return content
        body = body_of(content)
        if len(body) > PIECE_BYTES or isinstance(content, Piece):
            return content
        with self._lock:
            if self._block is None:
                self._block = block_of(len(self._places) * PIECE_BYTES)
            if self._block is None:
                return content
        begin = place * PIECE_BYTES
        held = self._block[begin : begin + len(body)]
        held[:] = np.frombuffer(body, np.uint8)
        head = bytes(content[: len(content) - len(body)])
        return Piece(head, self._block.data[begin : begin + len(body)].toreadonly())
