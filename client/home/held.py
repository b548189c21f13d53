"""What a silo has trained in a secure run and keeps back: the coordinator has no copy of it."""

from __future__ import annotations

from coterie.client.home import rounds
from coterie.client.home.settings import SiloSettings
from coterie.wire import Model

KIND = "held"


def hold(
    settings: SiloSettings, model: Model, *, run: str, number: int, purpose: str, on_disk: bool
) -> None:
    """Keep a model as the outcome of a training; in memory alone unless ``on_disk``."""
    rounds.keep(settings, _kind(purpose), model, run=run, number=number, on_disk=on_disk)


def held(settings: SiloSettings, *, run: str, number: int, purpose: str) -> Model | None:
    """The outcome of exactly that training; None if it is not here any more."""
    found = rounds.newest(settings, _kind(purpose), run=run, before=number + 1)
    return found[1] if found is not None and found[0] == number else None


def _kind(purpose: str) -> str:
    safe = "".join(c if c.isalnum() or c in "-_" else "_" for c in purpose[:64])
    return f"{KIND}-{safe}" if safe else KIND
