"""Federations that are played in one process, without a network.

A silo without a folder remembers some things only as long as such a game lasts. It recognises a
game by the context that it is called with, never by a number: a SuperLink chooses its numbers.
"""

from __future__ import annotations

from typing import Any

from flwr.app import Context


class Game:
    """One federation in one process; ``memories`` belong to its silos, by name."""

    def __init__(self) -> None:
        self.memories: dict[str, Any] = {}


class PlayedContext(Context):
    """The context of a ClientApp that is called in a game."""

    def __init__(self, game: Game, *args: Any, **how: Any) -> None:
        super().__init__(*args, **how)
        self.game = game


def game_of(context: Context) -> Game | None:
    """Return the game in which a ClientApp is called; None if a network is between."""
    return context.game if isinstance(context, PlayedContext) else None
