"""The reference engine: Flower's public Grid, as any SuperLink has it."""

from __future__ import annotations

import time
from collections.abc import Sequence

from flwr.app import Message
from flwr.serverapp import Grid

from coterie.engine.pauses import Pauses
from coterie.engine.port import Engine


class Plain:
    """An engine over Flower's Grid.

    Flower raises if it cannot read one of the replies. Nothing is lost: they are fetched again.
    """

    def __init__(self, grid: Grid) -> None:
        self._grid, self._pauses = grid, Pauses()

    def nodes(self) -> list[int]:
        return list(self._grid.get_node_ids())

    def push(self, messages: Sequence[Message]) -> list[str]:
        ids = [one or "" for one in self._grid.push_messages(list(messages))]
        self._pauses.begin()
        return ids + [""] * (len(messages) - len(ids))  # Flower gives none for one too large

    def pull(self, ids: Sequence[str], wait_s: float) -> list[Message]:
        self._pauses.rest(wait_s)
        began = time.monotonic()
        replies = list(self._grid.pull_messages(list(ids)))
        self._pauses.looked(time.monotonic() - began, found=bool(replies))
        return replies

    def close(self) -> None:
        pass


def engine_of(grid: Grid | Engine) -> Engine:
    """Return an engine for a strategy that is started as Flower's are: with a Grid."""
    return grid if isinstance(grid, Engine) else Plain(grid)


def run_of(grid: Grid | Engine) -> int | None:
    """Return Flower's id of the run; None if no SuperLink started it."""
    try:
        return int(grid.run.run_id)  # type: ignore[union-attr]
    except (AttributeError, NotImplementedError):
        return None
