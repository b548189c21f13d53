"""What a silo remembers of its sums, for ever: the silos with which it is in them.

All silos of a block are in a sum, or none of them is, and they count in fixed proportions. So
whatever sums a coordinator combines, it learns no more than the weighted sum over each block. The
block of a run holds for the whole run, whatever model, learning rate, round or purpose a training
has. In another run the silo may be in another block, unless it trains from a start that was summed
before, or from one that is nearer than its update is long: with a few other rows the update would
be nearly the same.

Exact sums over rows do not depend on a start: for these the silo has one block for ever, by the
task and by the place of its data (``coterie.features.secure.together``).

A silo with a folder appends a line of about 100 bytes per sum to ``secure/sums.jsonl``, and never
removes one. A silo without a folder remembers as long as its process, or its game, lasts.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from coterie import wire
from coterie.client.home.files import LEDGER
from coterie.client.home.local_log import json_lines
from coterie.client.home.settings import SiloSettings
from coterie.features.secure.together import Names
from coterie.system.files import append_line, make_folder, write_atomically
from coterie.wire import Model
from coterie.wire.games import Game
from coterie.wire.statements import Block, read_block
from coterie.wire.updates import pieces

FILE, KEY = "secure/sums.jsonl", "secure/sums.key"
PLACES = 8
"""Numbers by which a start is known again: a random projection with a key of the folder."""
SIGNS = 1.0 - 2.0 * np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1)
"""Random byte → the signs of ``PLACES`` numbers."""
NEAR = 2.0
"""Estimated distance of two starts, relative to the update's length, below which they are near: the
estimate is within a factor of two with eight numbers, nearly always."""


@dataclass(frozen=True)
class Place:
    """A start of trainings: its hash, and ``PLACES`` numbers of it."""

    start: str
    numbers: NDArray[np.float32]

    def is_near(self, other: Place, length: float) -> bool:
        """Return whether two starts are not farther apart than a length."""
        if self.start == other.start:
            return True
        return self.numbers.shape == other.numbers.shape and (
            float(np.linalg.norm(self.numbers - other.numbers)) < NEAR * length
        )


@dataclass
class Memory:
    """The sums of one silo: run → its block, and where trainings began that were summed.

    Attributes:
        limits: own model that the silo went on from → the limit to which it was shortened.
        over_rows: mark of rows → the block of silos for exact sums over them.
        masked: run → digest of what decided a mask → mark of the answer that it hides.
    """

    home: str
    key: bytes
    blocks: dict[str, Block] = field(default_factory=dict)
    known: list[tuple[str, Place]] = field(default_factory=list)
    limits: dict[str, list[float]] = field(default_factory=dict)
    over_rows: dict[str, Names] = field(default_factory=dict)
    masked: dict[str, dict[str, str]] = field(default_factory=dict)

    def block_of(self, run: str, place: Place, length: float) -> Block:
        """Return the block to which a training is bound; empty if it is free.

        Raises:
            ValueError: it is bound to two, by this run and by a start of another one.
        """
        found = {
            mark: self.blocks[mark] for mark, other in self.known if other.is_near(place, length)
        }
        if _mark(run) in self.blocks:
            found[_mark(run)] = self.blocks[_mark(run)]
        by_names = {tuple(name for name, _ in block): block for block in found.values()}
        if len(by_names) > 1:
            both = " and of ".join(sorted(", ".join(names) for names in by_names))
            raise ValueError(
                "trained from this start, or one hardly different, in another run, and was in sums "
                f"with other silos then: blocks of {both}"
            )
        return found.get(_mark(run)) or next(iter(by_names.values()), ())

    def bind(self, run: str, place: Place, block: Block) -> None:
        """Remember that a training was in a sum, in this block."""
        mark = _mark(run)
        if self.blocks.get(mark) == block and any(
            known == mark and other.start == place.start for known, other in self.known
        ):
            return
        self._append(
            {
                "run": mark,
                "start": place.start,
                "at": base64.b64encode(place.numbers.astype("<f4").tobytes()).decode(),
                **({} if self.blocks.get(mark) == block else {"block": block}),
            }
        )
        self.blocks[mark] = block
        self.known.append((mark, place))

    def go_on(self, run: str, number: int, purpose: str, limit: tuple[float, float]) -> None:
        """Remember to what limit (0: none) an own model was shortened that a training begins from.

        Raises:
            ValueError: another training began from it with another limit. In the difference of
                sums of both, only the updates that were too long would be left.
        """
        mark = _mark(json.dumps([run, number, purpose]))
        before = self.limits.get(mark)
        if before is None:
            self._append({"own": mark, "limit": limit})
            self.limits[mark] = list(limit)
        elif before != list(limit):
            raise ValueError(
                f"has gone on from its own model of round {number} already, and shortened it to "
                "another length"
            )

    def block_over(self, rows: Sequence[str]) -> Names:
        """Return the block for exact sums over rows with one of these marks; empty if free.

        Raises:
            ValueError: there are two, of the task and of the data.
        """
        found = {self.over_rows[mark] for mark in rows if mark in self.over_rows}
        if len(found) > 1:
            both = " and of ".join(sorted(", ".join(names) for names in found))
            raise ValueError(
                "was in sums over this task's rows, and over these data in another task, with "
                f"different silos: blocks of {both}"
            )
        return next(iter(found), ())

    def bind_over(self, rows: Sequence[str], block: Names) -> None:
        """Remember the block for exact sums over rows."""
        new = [mark for mark in rows if mark not in self.over_rows]
        if new:
            self._append({"rows": new, "block": block})
            self.over_rows |= dict.fromkeys(new, block)

    def masked_in(self, run: str) -> dict[str, str]:
        """Return what the masks of a run hide; a silo with a folder reads it from its ledger."""
        if run not in self.masked:
            found, ledger = dict[str, str](), Path(self.home) / LEDGER
            for line in json_lines(ledger) if self.home and ledger.exists() else ():
                if line is not None and line.get("run") == run and "error" not in line:
                    said = line.get("values", {}).get(wire.CONFIG, {}).get(wire.MASKED_AS, "")
                    digest, _, mark = str(said).partition(" ")
                    found[digest] = mark
            self.masked[run] = found  # not before all has been read
        return self.masked[run]

    def _append(self, line: dict[str, Any]) -> None:
        if self.home:
            append_line(Path(self.home) / FILE, json.dumps(line).encode(), synced=True)

    def place_of(self, model: Model, start: str) -> Place:
        """Return what is remembered of a start.

        Every parameter goes, with a random sign, into one of ``PLACES`` sums in turn: the distance
        of two such vectors is that of the starts, on average. ``start`` is the model's hash.
        """
        signs = Cipher(algorithms.AES(self.key), modes.CTR(bytes(16))).encryptor()
        sums = np.zeros(PLACES)
        for array in model.values():
            if not np.issubdtype(array.dtype, np.floating):
                continue
            for piece in pieces(array.reshape(-1)):
                drawn = np.frombuffer(signs.update(bytes(-(-piece.size // PLACES))), np.uint8)
                wide = np.take(SIGNS, drawn, axis=0)
                wide.reshape(-1)[: piece.size] *= piece
                wide.reshape(-1)[piece.size :] = 0.0
                sums += np.einsum("ij->j", wide)
        return Place(_short(start), sums.astype(np.float32))


_memories: dict[tuple[str, str], Memory] = {}
"""(silo, home) → its memory."""


def memory_of(settings: SiloSettings, game: Game | None) -> Memory:
    """Return what a silo remembers; a silo without a folder in a game remembers it for that game.

    Raises:
        ValueError: the folder's file cannot be read; without it a silo is in no sum.
    """
    if game is not None and not settings.home:
        found = game.memories.setdefault(settings.name, Memory("", os.urandom(32)))
        assert isinstance(found, Memory)
        return found
    key = (settings.name, settings.home)
    if key not in _memories:
        _memories[key] = _read(settings.home) if settings.home else Memory("", os.urandom(32))
    return _memories[key]


def _read(home: str) -> Memory:
    make_folder(Path(home) / "secure", private=True)
    key_file, file = Path(home) / KEY, Path(home) / FILE
    if not key_file.exists():
        if file.exists():
            raise ValueError(f"{key_file} is missing, so earlier sums cannot be recognised")
        write_atomically(key_file, os.urandom(32), private=True)
    found = Memory(home, key_file.read_bytes())
    if not file.exists():
        return found
    for number, line in enumerate(json_lines(file), start=1):
        if line is None:
            continue  # cut off by a crash, before the sum left
        try:
            if "own" in line:
                found.limits[str(line["own"])] = [float(n) for n in line["limit"]]
                continue
            if "rows" in line:
                block = tuple(map(str, line["block"]))
                found.over_rows |= dict.fromkeys(map(str, line["rows"]), block)
                continue
            if "block" in line:
                found.blocks[line["run"]] = read_block(line["block"])
            numbers = np.frombuffer(base64.b64decode(line["at"]), "<f4")
            found.blocks[line["run"]]  # its block was in this line or an earlier one
            place = Place(str(line["start"]), numbers)
            found.known.append((str(line["run"]), place))
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(f"line {number} of {file} is damaged: {error}") from None
    return found


def rows_of(task: str, options: Mapping[str, object]) -> list[str]:
    """Return marks of a task's rows: one of the task, and one of where its data are."""
    where = json.dumps(sorted(options.items()), default=str)
    return [_mark(f"task {task}"), *([_mark(f"data {where}")] if options else [])]


def _mark(text: str) -> str:
    return _short(hashlib.sha256(text.encode()).hexdigest())


def _short(digest: str) -> str:
    return digest[:16]
