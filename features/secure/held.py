"""Models that a silo has trained in a secure run and keeps back: the coordinator has no copy.

Each is stored with what its training started from, by which it can be shortened; what the silo has
stated of it; the last model from the coordinator as the silo's memory knows it, with the largest
value of each array; and the silo's key of the run.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from coterie.client.home import rounds
from coterie.client.home.settings import SiloSettings
from coterie.features.secure.memory import Place
from coterie.wire import Model
from coterie.wire.statements import Statement, decode_statement

KIND = "held"
DIGESTS, START = "digests ", " start"
"""Name of the digests among the arrays (array names have no spaces), and the suffix of the arrays
that the training began from."""
STATED, PLACED, LARGEST = "stated ", "placed ", "largest "
"""Names of the statement, of the start's numbers, and of its largest values among the arrays."""


@dataclass(frozen=True)
class Held:
    """A model, what it started and came from and how.

    Attributes:
        received: the last model from the coordinator, by its hash; 64 hexadecimal digits.
        place: that model as the silo's memory knows it.
        largest: of that model, by array.
        key: the silo's of the run, 64 hexadecimal digits.
    """

    model: Model
    start: Model
    received: str
    place: Place
    largest: tuple[float, ...]
    stated: Statement
    key: str

    @property
    def trained_as(self) -> str:
        return self.stated.trained_as


def hold(
    settings: SiloSettings, kept: Held, *, run: str, number: int, purpose: str, on_disk: bool
) -> None:
    """Keep the outcome of a training; only in memory unless ``on_disk``."""
    arrays = {name + START: array for name, array in kept.start.items()}
    arrays |= {**kept.model, PLACED: kept.place.numbers, LARGEST: np.array(kept.largest)}
    arrays[DIGESTS] = np.frombuffer(
        bytes.fromhex(kept.received + kept.key + kept.place.start), np.uint8
    )
    arrays[STATED] = np.frombuffer(kept.stated.encode().encode(), np.uint8)
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
    if found is None or found[0] != number:
        return None
    arrays = dict(found[1])
    digests, numbers, largest = (arrays.pop(n) for n in (DIGESTS, PLACED, LARGEST))
    text = digests.tobytes().hex()
    stated = decode_statement(arrays.pop(STATED).tobytes().decode())
    start = {n.removesuffix(START): arrays.pop(n) for n in list(arrays) if n.endswith(START)}
    place = Place(text[128:144], numbers.astype(np.float32))
    return Held(
        *(arrays, start, text[:64], place, tuple(map(float, largest)), stated, text[64:128])
    )


def _kind(purpose: str) -> str:
    return f"{KIND}-{rounds.file_name(purpose)}" if purpose else KIND
