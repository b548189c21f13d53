"""A simulation as a file: many silos that share one data set, and the run over them.

``coterie silo serve --simulation`` (real processes) and ``coterie simulate`` (one process) read the
same file, so that both train the same silos. TOML:

    task = "mnist/mclr"
    data = "data"                # folder, relative to this file; not needed for digits
    silos = 100
    names = []                   # of the silos; by default silo-00, silo-01, …
    seed = 0                     # of the split, and of the run unless [run] sets it
    label-counts = false         # whether silos share their number of samples per label
    [split]
    kind = "power-law"           # one of coterie.tasks.splits, with its keys
    test-share = 0.1
    [options]                    # more task options, the same at every silo; paths are relative
    normalise = "per-pixel"      # to this file
    [run]                        # run keys
    strategy = "fedgroup"
    rounds = 20
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from coterie.tasks.base import Option, SiloData, StreamedData, Task, TaskError
from coterie.tasks.options import as_option, place_of, with_task_keys
from coterie.tasks.splits.options import SPLIT_KEYS
from coterie.tasks.toml import checked, read_table

MAX_SILOS = 100_000
PLACES = ("data", "test-data")
"""Task options that name a file or folder."""


@dataclass(frozen=True)
class Partitions:
    """Selected silos of a simulation: ``numbers`` out of [0, total)."""

    numbers: range
    total: int

    @classmethod
    def parse(cls, text: str, *, total: int = 0) -> Partitions:
        """Parse ``"0-249/1000"`` or ``"7/1000"``: first and last number, inclusive, and total.

        The text may omit the total if ``total`` gives it (0: unknown). Raises ``TaskError`` if the
        text is malformed, the totals differ, or such silos do not exist.
        """
        match = re.fullmatch(r"(\d+)(?:-(\d+))?(?:/(\d+))?", text.strip())
        if match is None or not (match[3] or total):
            form = "FIRST-LAST" if total else "FIRST-LAST/TOTAL, e.g. 0-249/1000"
            raise TaskError(f"partitions must be {form}. Got {text!r}.")
        first, last = int(match[1]), int(match[2] or match[1])
        stated = int(match[3] or total)
        if total and stated != total:
            raise TaskError(f"partitions {text!r} name {stated} silos, but there are {total}.")
        if not first <= last < stated <= MAX_SILOS:
            raise TaskError(
                f"partitions must be in 0-{stated - 1}, in ascending order. Got {text!r}."
            )
        return cls(range(first, last + 1), stated)


@dataclass(frozen=True)
class VirtualSilo:
    """One silo of a simulation: its name and its task options."""

    name: str
    options: dict[str, Option]


def virtual_silos(
    options: Mapping[str, Option], partitions: Partitions, names: Sequence[str] = ()
) -> list[VirtualSilo]:
    """Return the silos of these partitions, by default named ``silo-000``, ``silo-001``, ….

    All share ``options``; ``names`` are those of all silos, by number.
    """
    width = len(str(partitions.total - 1))
    return [
        VirtualSilo(
            names[number] if names else f"silo-{number:0{width}d}",
            {**options, "silos": partitions.total, "silo": number},
        )
        for number in partitions.numbers
    ]


def load_silos(
    task: Task, options: Sequence[Mapping[str, Option]]
) -> Sequence[SiloData | StreamedData]:
    """Load silos that differ only in the option ``silo``, reading their common data once."""
    numbers = [int(own["silo"]) for own in options]
    shared = {key: value for key, value in options[0].items() if key != "silo"}
    return task.load_all(shared, numbers)


class Simulation(BaseModel):
    """A simulation file. See the module's docstring."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, alias_generator=lambda name: name.replace("_", "-")
    )

    task: str = Field("digits", min_length=1)
    data: str = ""
    silos: int = Field(ge=1, le=MAX_SILOS)
    names: tuple[str, ...] = ()
    seed: int = Field(0, ge=0, le=2**31 - 1)
    label_counts: bool = Field(False, strict=True)
    split: dict[str, Option] = Field(default_factory=dict)
    options: dict[str, Annotated[Option, BeforeValidator(as_option)]] = Field(default_factory=dict)
    run: Annotated[dict[str, Any], BeforeValidator(with_task_keys)] = Field(default_factory=dict)

    @classmethod
    def read(cls, file: Path) -> Simulation:
        """Read a file; paths in it are relative to it.

        Raises ``TaskError`` if it is unreadable or not TOML, a key is unknown or out of bounds, or
        a home folder is unknown.
        """
        read = checked(cls, read_table(file, TaskError), file, TaskError)
        if problem := split_problem(read.split):
            raise TaskError(f"{file}: {problem}.")
        if read.names and not len({*read.names}) == len(read.names) == read.silos:
            raise TaskError(
                f"{file}: names must be {read.silos} different names, or none. Got "
                f"{len(read.names)}, of which {len({*read.names})} differ."
            )
        if read.data and not place_of(read.data).is_absolute():
            read = read.model_copy(update={"data": str(file.resolve().parent / read.data)})
        return read.model_copy(update={"options": placed(read.options, file)})

    def task_options(self) -> dict[str, Option]:
        """Return the task options that all silos share."""
        own_names = {"kind": "split", "test-share": "test-share"}
        split = {own_names.get(key, f"split-{key}"): value for key, value in self.split.items()}
        seed: dict[str, Option] = {"split-seed": self.seed} if self.split else {}
        data: dict[str, Option] = {"data": self.data} if self.data else {}
        return {**data, **seed, **split, **self.options}

    def silos_of(self, partitions: Partitions | None = None) -> list[VirtualSilo]:
        """Return these silos, by default all."""
        chosen = partitions or Partitions(range(self.silos), self.silos)
        return virtual_silos(self.task_options(), chosen, self.names)

    def run_keys(self) -> dict[str, Any]:
        """Return the run's keys: the file's own, and those derived from the rest of it."""
        own = {"task": self.task, "seed": self.seed, "min-silos": self.silos}
        return {**own, **self.run}


def placed(options: Mapping[str, Option], where: Path) -> dict[str, Option]:
    """Return task options with paths relative to the file ``where``.

    Raises ``TaskError`` if a home folder is unknown.
    """
    found = dict(options)
    for key in PLACES:
        value = found.get(key)
        if isinstance(value, str) and value:
            found[key] = str(where.resolve().parent / place_of(value))
    return found


def split_problem(split: Mapping[str, Option]) -> str:
    """Return what is wrong with a ``[split]``, or an empty text."""
    unknown = [key for key in split if key != "kind" and key not in _SPLIT_NAMES]
    if not unknown and (not split or "kind" in split):
        return ""
    what = f"no key {unknown[0]!r}" if unknown else "to name its kind"
    return f"[split] has {what}. It has kind, {', '.join(sorted(_SPLIT_NAMES))}"


_SPLIT_NAMES = {key.removeprefix("split-") for key in SPLIT_KEYS} | {"test-share"}
