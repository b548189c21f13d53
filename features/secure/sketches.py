"""Sketches of updates, by which the coordinator forms groups without seeing an update.

Every parameter goes, with a random sign, into one of k sums (Charikar, Chen, Farach-Colton:
"Finding Frequent Items in Data Streams", ICALP 2002, https://doi.org/10.1007/3-540-45465-9_59).
Inner products of two sketches are those of the updates, with a standard error of at most √(2/k)
times the two norms (Weinberger et al., ICML 2009, https://arxiv.org/abs/0902.2206, Lemma 2).

Four rules limit what a sketch tells:

- Places and signs come from the silos' sealed seed and differ for every round and purpose. A silo
  sends at most ``MOST_UPDATES`` sketches of different updates by the same places and signs.
- Each number gets Gaussian noise with a standard deviation of 1/√k of the sketch's length, so that
  the noise is as long as the sketch. Inner products then have an error of at most √(5/k).
- An update needs at least k live parameters, by its participation ratio (Σ|u|)² / Σu² (1 if one
  parameter alone moves, P if all P move equally): of fewer, the sketch would be the update.
- The first seed by which a silo sketches stays the run's.

The norm that leaves beside a sketch has noise as well (``stated_norm``).
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from coterie.client.home.local_log import json_lines
from coterie.client.home.settings import SiloSettings
from coterie.system.files import append_line, make_folder
from coterie.wire import Model
from coterie.wire.updates import PIECE, SKETCH_NOISE, moved

NORM_NOISE = 0.2
"""Largest share by which a norm is overstated."""
MOST_KINDS = 2
"""Kinds of sketches in one run: of every module, then of the one that HCCT-E has chosen."""
MOST_UPDATES = 3
"""Different updates of a silo that are sketched by one projection: lost replies are repeated, and a
newcomer's place may be looked for more than once."""
FILE = "sketches.jsonl"

_memory: dict[tuple[str, str], list[Sketched]] = {}
"""(silo, home) → what was sketched."""


class Stream:
    """Pseudorandom numbers: AES-256 in counter mode."""

    _nothing = bytes(4 * PIECE)

    def __init__(self, key: bytes) -> None:
        self._encryptor = Cipher(algorithms.AES(key), modes.CTR(bytes(16))).encryptor()
        self._room = bytearray(4 * PIECE + 15)  # the library asks for a block more, less a byte

    def take(self, count: int) -> NDArray[np.uint32]:
        """Return the next ``count`` ≤ ``PIECE`` of them, which the next call overwrites."""
        self._encryptor.update_into(memoryview(self._nothing)[: 4 * count], self._room)
        return np.frombuffer(self._room, np.uint32, count)


class Sketch:
    """The sums of a sketch of size k ≥ 1, as parameters come; ``key`` may be any bytes.

    ``of`` names the arrays that belong to it; None takes any.
    """

    def __init__(self, key: bytes, size: int, of: Collection[str] | None = None) -> None:
        self._stream, self._sums = Stream(hashlib.sha256(key).digest()), np.zeros(size)
        self._size, self.of = np.uint32(size), of
        self._drawn = np.empty(PIECE, np.uint32)
        self._places, self._signed = np.empty(PIECE, np.intp), np.empty(PIECE)
        self._absolute = self._squares = 0.0

    def add(self, step: NDArray[np.float64], square: float) -> None:
        """Add the next parameters, ``PIECE`` at most: 31 bits say where each goes, one its sign.

        ``square``: the sum of their squares.
        """
        count, size, rest = len(step), self._size, self._size - np.uint32(1)
        drawn, place = self._stream.take(count), self._drawn[:count]
        places, signed = self._places[:count], self._signed[:count]
        self._absolute += float(np.abs(step, out=signed).sum())
        self._squares += square
        if size & rest:
            np.remainder(drawn, size, out=place)
        else:  # the same of a power of two, and five times as fast
            np.bitwise_and(drawn, rest, out=place)
        places[:] = place
        bits = signed.view(np.uint64)
        np.bitwise_and(drawn, np.uint32(2**31), out=place)
        np.left_shift(place, 32, out=bits, dtype=np.uint64)
        np.bitwise_xor(step.view(np.uint64), bits, out=bits)
        np.add.at(self._sums, places, signed)

    @property
    def exact(self) -> NDArray[np.float64]:
        """The sketch of what was added, without noise, shape (k,)."""
        return self._sums

    @property
    def live(self) -> float:
        """The participation ratio of what was added; infinite if nothing moved."""
        return self._absolute**2 / self._squares if self._squares else math.inf

    def noisy(self, secret: bytes) -> NDArray[np.float32]:
        """Return the sketch with noise.

        The noise follows from the secret and the exact sketch: the same update always gets the
        same, so that repetitions cannot be averaged, and no other update gets it.
        """
        key = hashlib.sha256(secret + self._sums.tobytes()).digest()
        deviation = SKETCH_NOISE * math.sqrt(float(np.einsum("i,i", self._sums, self._sums)))
        noise = normals(key, len(self._sums))
        noise *= deviation / math.sqrt(len(self._sums))
        return (self._sums + noise).astype(np.float32)


def normals(key: bytes, count: int) -> NDArray[np.float64]:
    """Return ``count`` ≤ ``PIECE`` independent standard normal numbers (Box and Muller 1958)."""
    half = (count + 1) // 2
    uniform = (Stream(key).take(2 * half) + 0.5) / 2.0**32
    length, angle = np.sqrt(-2 * np.log(uniform[:half])), 2 * np.pi * uniform[half:]
    return np.concatenate([length * np.cos(angle), length * np.sin(angle)])[:count]


def measure(received: Model, trained: Model, sketches: Mapping[str, Sketch]) -> float:
    """Sketch what training changed of floating-point arrays; return its Euclidean norm.

    It works piece by piece, in float64, without arrays of the model's size.
    """
    squares = []
    for name, step in moved(trained, received):
        # Not by BLAS, whose threads would wait for each other and keep other silos from theirs.
        squares.append(float(np.einsum("i,i", step, step)))
        for sketch in sketches.values():
            if sketch.of is None or name in sketch.of:
                sketch.add(step, squares[-1])
    return math.sqrt(math.fsum(squares))


def stated_norm(norm: float, secret: bytes) -> float:
    """Return a norm as it leaves: up to ``NORM_NOISE`` too long, in three digits, never too short.

    From ten exact norms of models made for the purpose all label counts would follow, and from ten
    in three digits as well. As in a sketch, the noise follows from the secret and the update.
    """
    if not norm:
        return norm
    drawn = hashlib.sha256(secret + np.float64(norm).tobytes()).digest()
    longer = norm * (1 + NORM_NOISE * int.from_bytes(drawn[:8], "big") / 2.0**64)
    near, last = float(f"{longer:.3g}"), 10.0 ** (math.floor(math.log10(longer)) - 2)
    return near if near >= longer else float(f"{near + last:.3g}")


def too_few(sketches: Mapping[str, Sketch]) -> str:
    """Return why a sketch would show the update; empty if none would."""
    for sketch in sketches.values():
        if sketch.live < len(sketch.exact):
            return (
                "sends no sketch of this update: too few parameters changed, and a sketch of "
                f"{len(sketch.exact)} numbers needs at least as many (participation ratio), or it "
                "would reveal them."
            )
    return ""


# ---------------------------------------------------------------- what was sketched before


@dataclass(frozen=True)
class Sketched:
    """One update that a silo has sketched, in digests of 16 hexadecimal digits.

    Attributes:
        seed: of the seed.
        name: of the projection's name, round and purpose.
        kind: of the arrays and layers.
        mark: of the exact sketches with the silo's secret.
    """

    run: str
    seed: str
    name: str
    kind: str
    mark: str


def digest_of(text: str) -> str:
    """Return 16 hexadecimal digits for a text of any length."""
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def mark_of(secret: bytes, sketches: Mapping[str, Sketch]) -> str:
    """Return a mark by which only this silo recognises an update."""
    found = hashlib.sha256(secret)
    for name, sketch in sketches.items():
        found.update(json.dumps(name).encode() + sketch.exact.tobytes())
    return found.hexdigest()[:16]


def remember(settings: SiloSettings, new: Sketched) -> str:
    """Note a sketch before it leaves; return why it must not, or nothing."""
    known = _known(settings)
    own = [one for one in known if one.run == new.run]
    if new in own:
        return ""
    if any(one.seed != new.seed for one in own):
        return (
            "has sketched updates of this run with another seed, and the first one stays: two "
            "sketches of alike updates tell more than one. Start the run under another name."
        )
    if len({new.kind, *(one.kind for one in own)}) > MOST_KINDS:
        return f"sends at most {MOST_KINDS} kinds of sketches in a run."
    marks = {one.mark for one in own if one.name == new.name}
    if new.mark not in marks and len(marks) >= MOST_UPDATES:
        return (
            f"has sketched {MOST_UPDATES} different updates by this projection already: from "
            "more, the projection could be computed."
        )
    if settings.home:
        file = _file(settings.home)
        make_folder(file.parent, private=True)
        append_line(file, json.dumps(vars(new)).encode(), synced=True)
    known.append(new)  # not before it is written: what is known leaves again
    return ""


def _known(settings: SiloSettings) -> list[Sketched]:
    key = (settings.name, settings.home)
    if key not in _memory:
        _memory[key] = _load(settings.home)
    return _memory[key]


def _load(home: str) -> list[Sketched]:
    found = []
    try:
        for row in json_lines(_file(home)) if home else ():
            if row is not None:
                found.append(Sketched(*(str(row.get(field.name)) for field in fields(Sketched))))
    except FileNotFoundError:
        pass
    return found


def _file(home: str) -> Path:
    return Path(home) / "secure" / FILE
