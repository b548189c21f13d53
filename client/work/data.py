"""A silo's data as training sees it: parts that provide batches on the device.

``Held`` has tensors on the device: a batch is an index into them, nothing is copied per step.
``Streamed`` is a map-style ``torch.utils.data.Dataset``, read sample by sample by a DataLoader, for
data that does not fit. Training draws the same from both.

Inputs and targets are nests: a tensor, or a dict, list or tuple of nests.
"""

from __future__ import annotations

import errno
import logging
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import repeat
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset, Sampler

from coterie.tasks.base import Nest, Persons, Samples, SiloData, StreamedData, leaves
from coterie.tasks.draws import split_by_class

log = logging.getLogger("coterie.silo")

Batch = tuple[Nest, Nest]
"""Inputs and targets."""
NO_SEMAPHORES = (errno.ENOSPC, errno.EACCES, errno.ENOSYS, errno.ENOENT, errno.EROFS)
SMALL_SHARED_MEMORY = (
    "/dev/shm is too small for workers = %d: they cannot pass on the samples that they read. "
    "This process reads the samples itself, more slowly, with the same result. Give the "
    "container more shared memory (docker run --shm-size 1g; sharedMemory in the Helm chart), "
    "or set workers = 0 under [compute] in silo.toml."
)


class Part(Protocol):
    """Training or test samples."""

    @property
    def device(self) -> torch.device:
        """The device of the batches."""

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample's inputs."""

    @property
    def persons(self) -> Persons | None:
        """(n,) person of each sample; None: every sample is from a different person."""

    @property
    def together(self) -> Persons | None:
        """(n,) numbers; samples with equal ones are on one side of every split. None: no two."""

    def __len__(self) -> int:
        """Number of samples."""

    def at(self, rows: torch.Tensor) -> Batch:
        """Return samples as one batch. ``rows``: int64 (n,), on any device."""

    def batches(self, order: torch.Tensor | None, size: int, *, seed: int = 0) -> Iterator[Batch]:
        """Yield samples, ``size`` at a time; the last batch may be smaller.

        ``order``: int64 (n,) row numbers, None for all. ``seed``: for a dataset's own transforms.
        """

    def take(self, rows: torch.Tensor) -> Part:
        """Return a part of these samples only."""

    def targets(self) -> Nest:
        """Return the targets of all samples, in order."""


def map_nest(change: Callable[[Any], Any], nest: Nest) -> Nest:
    """Return the nest with ``change`` applied to every leaf."""
    if isinstance(nest, dict):
        return {key: map_nest(change, value) for key, value in nest.items()}
    if isinstance(nest, list | tuple):
        return type(nest)([map_nest(change, value) for value in nest])
    return change(nest)


@dataclass(frozen=True)
class Held:
    """Samples on the device: nests of tensors whose first axis counts samples."""

    x: Nest
    y: Nest
    persons: Persons | None = None
    blocks: Persons | None = None
    """(n,) block of each sample, if whole blocks are held out; see ``SiloData``."""

    @property
    def together(self) -> Persons | None:
        return self.blocks if self.persons is None else self.persons

    @property
    def device(self) -> torch.device:
        device: torch.device = leaves(self.x)[0].device
        return device

    @property
    def sample_bytes(self) -> int:
        return sum(leaf[:1].nbytes for leaf in leaves(self.x))

    def __len__(self) -> int:
        return len(leaves(self.x)[0])

    def at(self, rows: torch.Tensor) -> Batch:
        rows = rows.to(self.device)
        if isinstance(self.x, torch.Tensor) and isinstance(self.y, torch.Tensor):
            return self.x[rows], self.y[rows]
        return _rows_of(self.x, rows), _rows_of(self.y, rows)

    def batches(self, order: torch.Tensor | None, size: int, *, seed: int = 0) -> Iterator[Batch]:
        if order is None:
            return map(self._from, range(0, len(self), size), repeat(size))
        return map(self.at, order.to(self.device).split(size))

    def _from(self, first: int, size: int) -> Batch:
        rows = slice(first, first + size)
        return _rows_of(self.x, rows), _rows_of(self.y, rows)

    def take(self, rows: torch.Tensor) -> Held:
        whose, blocks = (_persons_at(own, rows) for own in (self.persons, self.blocks))
        return Held(*self.at(rows), whose, blocks)

    def targets(self) -> Nest:
        return self.y


def _persons_at(persons: Persons | None, rows: torch.Tensor) -> Persons | None:
    return None if persons is None else persons[rows.cpu().numpy()]


def _rows_of(nest: Nest, rows: torch.Tensor | slice) -> Nest:
    return map_nest(lambda leaf: leaf[rows], nest)


class _Order(Sampler[list[tuple[int, int]]]):
    """Batches of (row, seed) for a DataLoader to fetch next; replaced before every pass."""

    def __init__(self) -> None:
        self.coming: list[list[tuple[int, int]]] = []

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        return iter(self.coming)

    def __len__(self) -> int:
        return len(self.coming)


@dataclass(frozen=True)
class _Seeded(Dataset[Batch]):
    """A dataset whose random transforms are seeded by (seed, row).

    A sample is the same whichever worker reads it, and its draws do not disturb those of training.
    """

    dataset: Dataset[Any]

    def __getitem__(self, place: tuple[int, int]) -> Batch:
        (sample,) = self.__getitems__([place])
        return sample

    def __getitems__(self, places: Sequence[tuple[int, int]]) -> list[Batch]:
        numpy_state = np.random.get_state()  # noqa: NPY002 — transforms of others draw from it
        before = torch.get_rng_state(), random.getstate()
        try:
            return [self._drawn(row, (seed * 1_000_003 + row) % 2**32) for row, seed in places]
        finally:
            torch.set_rng_state(before[0])
            np.random.set_state(numpy_state)  # noqa: NPY002
            random.setstate(before[1])

    def _drawn(self, row: int, seed: int) -> Batch:
        torch.default_generator.manual_seed(seed)
        np.random.seed(seed)  # noqa: NPY002
        random.seed(seed)
        x, y = self.dataset[row]
        return x, y


@dataclass(frozen=True)
class Streamed:
    """Samples of a dataset, read on demand.

    ``dataset`` returns (inputs, targets) of one sample; ``rows``, int64 (n,), are the samples of
    this part. ``workers`` is the number of reading processes; with 0 this process reads.
    """

    dataset: Dataset[Any]
    rows: torch.Tensor
    device: torch.device
    workers: int = 0
    persons: Persons | None = None
    _loaders: dict[int, tuple[DataLoader[Batch], _Order]] = field(
        default_factory=dict, repr=False, compare=False
    )
    """The loader shared by all parts of a dataset, so that its workers start once."""

    @property
    def together(self) -> Persons | None:
        return self.persons

    @cached_property
    def sample_bytes(self) -> int:
        return sum(leaf.nbytes for leaf in leaves(self.at(torch.zeros(1, dtype=torch.int64))[0]))

    def __len__(self) -> int:
        return len(self.rows)

    def at(self, rows: torch.Tensor) -> Batch:
        (batch,) = self.batches(rows, max(len(rows), 1))
        return batch

    def batches(self, order: torch.Tensor | None, size: int, *, seed: int = 0) -> Iterator[Batch]:
        rows = (self.rows if order is None else self.rows[order.cpu()]).split(size)
        coming = [[(row, seed) for row in batch.tolist()] for batch in rows]
        for batch in self._read(coming):
            yield map_nest(lambda leaf: leaf.to(self.device, non_blocking=True), tuple(batch))

    def _read(self, coming: list[list[tuple[int, int]]]) -> Iterator[Batch]:
        """Yield the batches; read them in this process if workers lack shared memory."""
        loader, sampler = self._loader()
        sampler.coming, done = coming, 0
        try:
            for batch in loader:
                done += 1
                yield batch
        except (RuntimeError, OSError) as error:
            if not (loader.num_workers and _lacks_shared_memory(error)):
                raise
            log.warning(SMALL_SHARED_MEMORY, loader.num_workers)
            self._loaders[0] = self._open(workers=0)
            yield from self._read(coming[done:])

    def take(self, rows: torch.Tensor) -> Streamed:
        kept = self.rows[rows.cpu()]
        persons = _persons_at(self.persons, rows)
        return Streamed(self.dataset, kept, self.device, self.workers, persons, self._loaders)

    def targets(self) -> Nest:
        """Return all targets; a dataset's ``targets``, as in torchvision, avoids reading it."""
        known = getattr(self.dataset, "targets", None)
        if known is not None:
            return torch.as_tensor(np.asarray(known))[self.rows].to(self.device)
        found = [y for _, y in self.batches(None, 64)]
        return _joined(found)

    def _loader(self) -> tuple[DataLoader[Batch], _Order]:
        if 0 not in self._loaders:
            self._loaders[0] = self._open(self.workers)
        return self._loaders[0]

    def _open(self, workers: int) -> tuple[DataLoader[Batch], _Order]:
        sampler = _Order()
        # Not forked: this process has threads of gRPC's, whose locks a fork may copy locked.
        how = {"multiprocessing_context": "forkserver", "persistent_workers": True}
        loader: DataLoader[Batch] = DataLoader(
            _Seeded(self.dataset),
            batch_sampler=sampler,
            num_workers=workers,
            pin_memory=self.device.type == "cuda",
            generator=torch.Generator(),  # else a pass draws from the training's randomness
            **(how if workers else {}),  # type: ignore[arg-type]
        )
        return loader, sampler


def _lacks_shared_memory(error: Exception) -> bool:
    """Return whether a DataLoader failed because /dev/shm is missing or too small.

    PyTorch reports it only in the error's text, also for workers that died of it. Semaphores of
    the standard library, which lie there too, raise an ``OSError`` without a file name.
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.filename is None and error.errno in NO_SEMAPHORES
    return "shared memory" in str(error) or "file </torch_" in str(error)


def _joined(nests: Sequence[Nest]) -> Nest:
    first = nests[0]
    if isinstance(first, dict):
        return {key: _joined([nest[key] for nest in nests]) for key in first}
    if isinstance(first, list | tuple):
        return type(first)([_joined(parts) for parts in zip(*nests, strict=True)])
    return torch.cat(list(nests))


@dataclass(frozen=True)
class Data:
    """A silo's training and test samples, and its own validation samples if it has any."""

    train: Part
    test: Part
    validation: Part | None = None

    def hold_out(self, share: float, *, seed: int) -> Data:
        """Return the training data less a ``share``, which takes the place of the test data.

        The share is in (0, 0.5]; at least one of at least 2 samples, persons or blocks is, and none
        of 1. The same seed holds out the same samples. A silo's own validation samples are held out
        instead.
        """
        if self.validation is not None:
            return Data(self.train, self.validation)
        count = min(max(1, round(share * len(self.train))), len(self.train) - 1)
        held, kept = draw(self.train, count, seed=seed)
        return Data(self.train.take(kept), self.train.take(held))


def draw(part: Part, count: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return ``count`` random rows and all other rows, both in random order.

    Of persons with several samples, or of blocks, whole ones are drawn: about ``count`` samples,
    with about the class shares of all samples if the classes need not be read for that. With a
    single one, none is drawn.
    """
    order = torch.randperm(len(part), generator=torch.Generator().manual_seed(seed))
    if part.together is None:
        return order[:count], order[count:]
    share = count / len(part)
    _, rows = split_by_class(_known_classes(part), share, seed=seed, persons=part.together)
    drawn = torch.zeros(len(part), dtype=torch.bool)
    drawn[rows] = True
    return order[drawn[order]], order[~drawn[order]]


def _known_classes(part: Part) -> NDArray[np.int64]:
    """Return the class of each sample (n,); zeros for other targets or if they must be read."""
    known = isinstance(part, Held) or hasattr(getattr(part, "dataset", None), "targets")
    y = part.targets() if known else None
    if isinstance(y, torch.Tensor) and y.ndim == 1 and not y.is_floating_point():
        found: NDArray[np.int64] = y.cpu().numpy()
        return found
    return np.zeros(len(part), np.int64)


def to_device(
    data: SiloData | StreamedData | Samples,
    device: torch.device,
    moved: dict[int, torch.Tensor] | None = None,
    *,
    workers: int = 0,
) -> Data:
    """Move a silo's data to the device; ``workers`` processes read a dataset.

    Samples without labels all become training data, with an empty nest as targets. ``moved`` has
    the tensors moved before, by the array's ``id``, so that silos share one copy on the device.
    """
    if isinstance(data, StreamedData):
        parts = [
            Streamed(part, torch.arange(len(part)), device, workers, persons)  # type: ignore[arg-type]
            for part, persons in zip(
                (data.train, data.test, data.val), (*_persons_of(data), None), strict=True
            )
            if part is not None
        ]
        return Data(*parts)
    known = {} if moved is None else moved

    def move(array: Any) -> torch.Tensor:
        if id(array) not in known:
            known[id(array)] = torch.as_tensor(array).to(device)
        return known[id(array)]

    def part(x: Nest, y: Nest, *whose: Persons | None) -> Held:
        return Held(map_nest(move, x), map_nest(move, y), *whose)

    if isinstance(data, Samples):
        own = part(map_nest(np.asarray, data.x), ())
        return Data(own, own.take(torch.arange(0)))
    of_train, of_test = _persons_of(data)
    return Data(
        part(data.x_train, data.y_train, of_train, data.blocks),
        part(data.x_test, data.y_test, of_test),
        None if data.x_val is None else part(data.x_val, data.y_val, None),
    )


def _persons_of(data: SiloData | StreamedData) -> Sequence[Persons | None]:
    if data.persons is None:
        return None, None
    return [np.asarray(own, np.int64) for own in data.persons]
