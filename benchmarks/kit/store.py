"""Results of a benchmark: a line of JSON per measurement, and the Markdown that is made of them.

A measurement is stored as soon as it is done, so that a benchmark that was interrupted goes on
where it stood. Both files are written whole or not at all.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from benchmarks.kit.runs import device
from coterie.system.files import write_atomically

RESULTS = Path(__file__).parents[1] / "results"

Entry = Mapping[str, Any]
"""A measurement: what was measured, by the store's keys, and what was found."""


def select(entries: Iterable[Entry], **values: Any) -> list[Any]:
    """The entries with these values."""
    return [e for e in entries if all(e.get(key) == value for key, value in values.items())]


class Store:
    """The measurements of one benchmark.

    Args:
        name: of ``NAME.json`` and ``NAME.md``.
        document: entries → Markdown.
        keys: fields that tell what was measured; a new entry with the same values replaces the old.
        folder: of both files.
    """

    def __init__(
        self,
        name: str,
        document: Callable[[Sequence[Entry]], str],
        *,
        keys: Sequence[str],
        folder: Path = RESULTS,
    ) -> None:
        self.name, self.document, self.keys, self.folder = name, document, tuple(keys), folder

    def at(self, folder: Path) -> Store:
        """The same benchmark's results in another folder."""
        return Store(self.name, self.document, keys=self.keys, folder=folder)

    @property
    def file(self) -> Path:
        """The JSON file."""
        return self.folder / f"{self.name}.json"

    @cached_property
    def entries(self) -> list[Entry]:
        """All measurements so far, in the order in which they were first made."""
        found: list[Entry] = json.loads(self.file.read_text("utf-8")) if self.file.exists() else []
        return found

    def find(self, **values: Any) -> Any | None:
        """The first entry with these values."""
        return next(iter(select(self.entries, **values)), None)

    def put(self, entry: Entry) -> None:
        """Keep a measurement, with the GPU that it was made on, and write both files."""
        if device() != "cpu":
            entry = {**entry, "device": torch.cuda.get_device_name(device())}
        same = self.find(**{key: entry.get(key) for key in self.keys})
        if same is None:
            self.entries.append(entry)
        else:
            self.entries[self.entries.index(same)] = entry
        self.write()

    def write(self) -> None:
        """Write both files from the entries."""
        self.folder.mkdir(parents=True, exist_ok=True)
        write_atomically(self.file, self.json().encode())
        write_atomically(self.folder / f"{self.name}.md", self.text().encode())

    def json(self) -> str:
        """Everything stored, a line per measurement."""
        lines = ",\n".join(json.dumps(entry, ensure_ascii=False) for entry in self.entries)
        return f"[\n{lines}\n]\n"

    def text(self) -> str:
        """Everything stored, as Markdown."""
        return self.document(self.entries)

    def has(self, cell: Entry) -> bool:
        """Whether this is stored: of the same ``rules``, of as many ``rounds`` if no key."""
        found = self.find(**{key: cell.get(key) for key in self.keys})
        if found is None or found.get("rules") != cell.get("rules"):
            return False
        return bool(found.get("rounds", 0) >= cell.get("rounds", 0))

    def keep(self, wanted: Callable[[Entry], bool]) -> None:
        """Forget all other entries: what was measured is no more what would be."""
        kept = [entry for entry in self.entries if wanted(entry)]
        if len(kept) < len(self.entries):
            self.entries[:] = kept
            self.write()

    def fill(
        self,
        cells: Iterable[Entry],
        measure: Callable[..., Entry | None],
        *,
        workers: int = 1,
    ) -> None:
        """Measure what is not stored yet, and store each as soon as it is done.

        Args:
            cells: what to measure: the store's keys and what else ``measure`` takes.
            measure: called with a cell's fields; returns what it found, or None if nothing.
            workers: processes that measure; of more than one, ``measure`` is a module's own.
        """
        if workers > 1:
            self._fill_at_once([cell for cell in cells if not self.has(cell)], measure, workers)
            return
        for cell in cells:
            if self.has(cell):
                continue
            print(self.name, *cell.values(), sep=" · ", flush=True)
            found = measure(**cell)
            if found is not None:
                self.put({**cell, **found})

    def _fill_at_once(
        self, cells: Sequence[Entry], measure: Callable[..., Entry | None], workers: int
    ) -> None:
        pool = ProcessPoolExecutor(workers, mp_context=get_context("spawn"))
        try:
            asked = {pool.submit(measure, **cell): cell for cell in cells}
            for number, done in enumerate(as_completed(asked), 1):
                cell, found = asked[done], done.result()
                print(f"{self.name} {number}/{len(cells)}", *cell.values(), sep=" · ", flush=True)
                if found is not None:
                    self.put({**cell, **found})
        finally:  # also when it is interrupted
            pool.shutdown(wait=False, cancel_futures=True)
