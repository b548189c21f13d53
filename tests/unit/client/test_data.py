"""Datasets that are read sample by sample train as arrays do, however many workers read them."""

from __future__ import annotations

import gc
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset

from coterie.client.work.data import Data, Held, Streamed, _lacks_shared_memory, to_device
from coterie.client.work.measure import batch_size, evaluate
from coterie.client.work.sgd import TrainPlan, train
from coterie.client.work.weights import read_weights
from coterie.tasks.base import SiloData, StreamedData, TaskError
from tests.unit.client.models import fresh, some_data

CPU = torch.device("cpu")
PLAN = TrainPlan(epochs=2, batch_size=4, lr=0.1)


@pytest.fixture(autouse=True)
def ended() -> Iterator[None]:
    """Workers end here: where the garbage collector finds them, their end may take seconds."""
    yield
    gc.collect()


class Listed(Dataset):
    """The samples of a ``Held`` part, one by one; ``noisy`` ones draw from all random sources."""

    def __init__(self, part: Held, *, noisy: bool = False) -> None:
        self.part, self.noisy = part, noisy

    def __len__(self) -> int:
        return len(self.part)

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        x = self.part.x[row]
        if self.noisy:
            x = x + torch.rand(()) + float(np.random.rand()) + random.random()  # noqa: NPY002
        return x, self.part.y[row]


def streamed(part: Held, *, workers: int = 0, noisy: bool = False) -> Streamed:
    return Streamed(Listed(part, noisy=noisy), torch.arange(len(part)), CPU, workers)


def trained(part: Held | Streamed) -> dict[str, np.ndarray]:
    task, model = fresh()
    train(task, model, part, PLAN, seed=7)
    return read_weights(model)


def same(one: dict[str, np.ndarray], other: dict[str, np.ndarray]) -> bool:
    return all(np.array_equal(one[name], other[name]) for name in one)


def test_a_dataset_trains_and_evaluates_bit_for_bit_as_its_arrays_do() -> None:
    held = some_data(11, 9)
    assert same(trained(held.train), trained(streamed(held.train)))
    task, model = fresh()
    assert evaluate(task, model, held.test) == evaluate(task, model, streamed(held.test))


@pytest.mark.nightly
def test_workers_do_not_change_what_is_trained() -> None:
    part = some_data(11).train
    noisy = trained(streamed(part, noisy=True))
    assert same(noisy, trained(streamed(part, workers=2, noisy=True)))


class Crowded(Listed):
    """Fails in a worker as where /dev/shm is full, from the second batch on."""

    text = "unable to allocate shared memory(shm) for file </torch_1_2_0>: No space left (28)"

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        if row > 3 and torch.utils.data.get_worker_info() is not None:
            raise RuntimeError(self.text)
        return super().__getitem__(row)


class Broken(Crowded):
    """Fails for its own reason."""

    text = "this sample cannot be read"


def test_without_shared_memory_a_silo_reads_by_itself_and_says_so_once(
    caplog: pytest.LogCaptureFixture,
) -> None:
    held = some_data(9).train
    part = Streamed(Crowded(held), torch.arange(9), CPU, workers=1)
    taken = part.take(torch.tensor([8, 0]))
    for one, rows in ((part, torch.arange(9)), (taken, torch.tensor([8, 0])), (part, None)):
        seen = torch.cat([x for x, _ in one.batches(None, 2)])
        assert torch.equal(seen, held.x if rows is None else held.x[rows])
    (said,) = [r.getMessage() for r in caplog.records]
    assert "/dev/shm is too small for workers = 1" in said
    assert "--shm-size" in said and "workers = 0" in said


def test_a_sample_that_a_worker_cannot_read_is_no_want_of_shared_memory() -> None:
    part = Streamed(Broken(some_data(9).train), torch.arange(9), CPU, workers=1)
    with pytest.raises(RuntimeError, match="this sample cannot be read"):
        list(part.batches(None, 2))


@pytest.mark.parametrize(
    ("error", "lacks"),
    [
        (OSError(28, "No space left on device"), True),
        (PermissionError(13, "Permission denied"), True),
        (PermissionError(13, "Permission denied", "ward/1.png"), False),
        (OSError("Caught OSError in DataLoader worker process 0."), False),
        (RuntimeError("DataLoader worker is killed by signal: Bus error. … shared memory"), True),
        (RuntimeError("unable to write to file </torch_9_1_0>: No space left"), True),
        (RuntimeError("CUDA error: out of memory"), False),
    ],
)
def test_want_of_shared_memory_is_known_by_its_errors(error: Exception, lacks: bool) -> None:
    assert _lacks_shared_memory(error) is lacks


SMALL = """
import sys
import torch
from coterie.client.work.data import Streamed
from tests.unit.client.test_data import Large
if __name__ == "__main__":
    part = Streamed(Large(), torch.arange(12), torch.device("cpu"), 2)
    assert [int(y) for _, ys in part.batches(None, 4) for y in ys] == list(range(12))
"""


class Large(Dataset):
    """Samples of 3 MB."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, row: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full((3, 512, 512), float(row)), torch.tensor(row)


@pytest.mark.nightly
@pytest.mark.parametrize("option", ["size=4m", "ro", "nr_inodes=1"])
def test_workers_with_little_room_in_dev_shm_cost_time_alone(option: str, tmp_path: Path) -> None:
    mounting = ["unshare", "--mount", "sh", "-c"]
    small = f"mount -t tmpfs -o {option} none /dev/shm"
    if os.geteuid() != 0 or subprocess.run([*mounting, small], check=False).returncode:
        pytest.skip("this account may not mount a file system over /dev/shm")
    (tmp_path / "reads.py").write_text(SMALL)
    done = subprocess.run(
        [*mounting, f'{small} && exec "$0" "$@"', sys.executable, str(tmp_path / "reads.py")],
        env=os.environ | {"PYTHONPATH": f"{Path.cwd()}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("/dev/shm is too small for workers = 2") == 1


def test_random_transforms_draw_by_their_own_seed_and_disturb_nothing() -> None:
    part = streamed(some_data(5).train, noisy=True)
    rows = torch.arange(5)
    before = torch.get_rng_state(), random.getstate()
    (one,), (again,), (other,) = (list(part.batches(rows, 5, seed=s)) for s in (1, 1, 2))
    assert torch.equal(one[0], again[0]) and not torch.equal(one[0], other[0])
    assert torch.equal(before[0], torch.get_rng_state()) and before[1] == random.getstate()


def test_parts_of_a_dataset_are_its_rows() -> None:
    held = some_data(10)
    kept = Data(streamed(held.train), streamed(held.test)).hold_out(0.3, seed=5)
    plain = held.hold_out(0.3, seed=5)
    assert torch.equal(kept.train.targets(), plain.train.targets())
    assert torch.equal(kept.test.at(torch.arange(len(kept.test)))[0], plain.test.x)


def test_inputs_may_be_any_nest() -> None:
    ids, mask = np.arange(12).reshape(6, 2), np.ones((6, 2), np.float32)
    x, y = {"ids": ids, "more": (mask, [mask])}, np.array([0, 1, 0, 1, 0, 1])
    data = to_device(SiloData(x, y, x, y, 2), CPU)
    (first, labels), *_ = data.train.batches(torch.tensor([3, 1]), 2)
    assert first["ids"].tolist() == [[6, 7], [2, 3]] and labels.tolist() == [1, 1]
    assert first["more"][1][0].shape == (2, 2) and len(data.train) == 6
    (_, later), *_ = list(data.train.batches(None, 4))[1:]
    assert later.tolist() == [0, 1]


def test_arrays_of_unlike_length_are_refused() -> None:
    x, y = {"a": np.zeros((3, 1)), "b": np.zeros((2, 1))}, np.zeros(3, np.int64)
    with pytest.raises(TaskError, match=r"one row per sample\. Got 2 and 3 rows"):
        SiloData(x, y, x, y, 1)


def test_a_dataset_without_length_or_samples_is_refused() -> None:
    class Endless(IterableDataset):
        def __iter__(self) -> None: ...

    full, empty = Listed(some_data(3).train), Listed(Held(torch.zeros(0), torch.zeros(0)))
    with pytest.raises(TaskError, match="must have a length"):
        StreamedData(Endless(), full)
    with pytest.raises(TaskError, match="test data is empty"):
        StreamedData(full, empty)


def test_the_evaluation_batch_fits_the_samples() -> None:
    small, large = torch.zeros(4, 1, 28, 28), torch.zeros(2, 3, 224, 224)
    assert batch_size(Held(small, torch.zeros(4))) == 1024
    assert batch_size(Held(large, torch.zeros(2))) == 16


def test_one_model_takes_several_inputs() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(3, 2)

        def forward(self, x: dict[str, torch.Tensor]) -> torch.Tensor:
            return self.linear(x["a"] + x["b"])

    task, _ = fresh()
    x = {"a": torch.randn(9, 3), "b": torch.randn(9, 3)}
    part = Held(x, torch.arange(9) % 2)
    model = Two()
    before = evaluate(task, model, part).loss
    train(task, model, part, TrainPlan(epochs=5, batch_size=3, lr=0.1), seed=0)
    assert evaluate(task, model, part).loss < before
