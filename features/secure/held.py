"""Models that a silo has trained in a secure run and keeps back: the coordinator has no copy.

Each is stored with what its training started from, by which it can be shortened; the digest of what
the silo was sent for that (``protocol.training_digest``); the hash of the last model from the
coordinator; and the silo's key of the run: if that has changed, it is unknown which sums the model
was in.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coterie.client.home import rounds
from coterie.client.home.settings import SiloSettings
from coterie.wire import Model

KIND = "held"
DIGESTS, START = "digests ", " start"
"""Name of the digests among the arrays (array names have no spaces), and the suffix of the arrays
that the training began from."""


@dataclass(frozen=True)
class Held:
    """A model, what it started and came from and how; digests are 64 hexadecimal digits."""

    model: Model
    start: Model
    received: str
    trained_as: str
    key: str


def hold(
    settings: SiloSettings, kept: Held, *, run: str, number: int, purpose: str, on_disk: bool
) -> None:
    """Keep the outcome of a training; only in memory unless ``on_disk``."""
    digests = np.frombuffer(bytes.fromhex(kept.received + kept.trained_as + kept.key), np.uint8)
    start = {name + START: array for name, array in kept.start.items()}
    arrays = {**kept.model, **start, DIGESTS: digests}
    kind, where = _kind(purpose), {"on_disk": on_disk, "passing": True}
    rounds.keep(settings, kind, arrays, run=run, number=number, **where)


def forget(settings: SiloSettings, run: str, *, but: tuple[int, str] | None = None) -> None:
    """Remove everything of a finished run except one training's outcome (round and purpose)."""
    for kind in rounds.kinds(settings, run):
        if kind == KIND or kind.startswith(f"{KIND}-"):
            stays = but[0] if but is not None and _kind(but[1]) == kind else None
            rounds.forget(settings, kind, run=run, but=stays)


def held(settings: SiloSettings, *, run: str, number: int, purpose: str) -> Held | None:
    """Return the outcome of exactly that training; None if it is gone."""
    found = rounds.newest(settings, _kind(purpose), run=run, before=number + 1)
    if found is None or found[0] != number or DIGESTS not in found[1]:
        return None
    arrays = dict(found[1])
    digests = arrays.pop(DIGESTS).tobytes().hex()
    start = {n.removesuffix(START): arrays.pop(n) for n in list(arrays) if n.endswith(START)}
    if start.keys() != arrays.keys():  # an earlier release kept it
        return None
    return Held(arrays, start, digests[:64], digests[64:128], digests[128:])


def _kind(purpose: str) -> str:
    safe = "".join(c if c.isalnum() or c in "-_" else "_" for c in purpose[:64])
    return f"{KIND}-{safe}" if safe else KIND
