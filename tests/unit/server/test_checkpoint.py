"""Checkpoints write what changed, and each of those kept is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.server.runs.checkpoint import KEPT, LASTING, CheckpointError, Checkpoints

HEADERS = 2_000
"""Bytes of a file here that are no arrays, at most."""


def arrays(*numbers: int) -> dict[str, Any]:
    """One array of 8 kB a number, all different."""
    return {str(n): np.random.default_rng(n).normal(size=1000) for n in numbers}


def num_bytes(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def loaded(folder: Path) -> tuple[int, dict[str, Any]]:
    found = Checkpoints(folder).load()
    assert found is not None
    return found


def assert_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert list(found) == list(expected)
    for name, array in expected.items():
        np.testing.assert_array_equal(found[name], array)


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-5] ^= 1
    file.write_bytes(content)


def test_what_did_not_change_is_not_written_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    assert checkpoints.save(1, arrays(*range(8))) > 64_000
    assert checkpoints.save(2, arrays(*range(7), 100)) < 8_000 + HEADERS
    assert checkpoints.save(3, arrays(*range(7), 100)) < HEADERS
    assert_same(loaded(tmp_path)[1], arrays(*range(7), 100))


def test_the_same_values_in_two_places_are_one_array(tmp_path: Path) -> None:
    one = arrays(1)
    assert Checkpoints(tmp_path).save(1, {"a": one, "b": arrays(1)}) < 8_000 + HEADERS
    found = loaded(tmp_path)[1]
    assert_same(found["a"], one)
    assert_same(found["b"], one)


def test_types_and_shapes_set_equal_bytes_apart(tmp_path: Path) -> None:
    value = {
        "a": np.zeros((2, 3), np.float32),
        "b": np.zeros((3, 2), np.float32),
        "c": np.zeros(6, np.int32),
        "d": np.zeros((), np.float64),
        "e": np.zeros((0, 4)),
        "f": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
    }
    Checkpoints(tmp_path).save(1, value)
    for name, array in loaded(tmp_path)[1].items():
        assert (array.dtype, array.shape) == (value[name].dtype, value[name].shape)
        np.testing.assert_array_equal(array, value[name])


@pytest.mark.parametrize("seed", range(4))
def test_whatever_changes_each_of_the_last_is_whole_and_the_disk_stays_small(
    seed: int, tmp_path: Path
) -> None:
    """Written at most twice over the run, and at most twice as much on the disk as is needed."""
    rng, checkpoints = np.random.default_rng(seed), Checkpoints(tmp_path)
    state, ever, written, last = set(range(20)), set[int](), 0, list[set[int]]()
    for number in range(1, 31):
        if rng.random() < 0.2:  # a run that is resumed
            checkpoints = Checkpoints(tmp_path)
            checkpoints.load()
        share = (0.05, 0.3, 1.0)[seed % 3]
        gone = {n for n in state if n and rng.random() < share}  # 0 never changes
        state = state - gone | {1000 * number + i for i in range(len(gone))}
        written += checkpoints.save(number, arrays(*sorted(state)))
        ever |= state
        last = [*last, state][-KEPT:]
        assert_same(loaded(tmp_path)[1], arrays(*sorted(state)))
        # The others of the last few, as if the newer ones were damaged.
        newest = tmp_path / f"round-{number:06d}.safetensors"
        content = newest.read_bytes()
        newest.write_bytes(b"")
        assert number == 1 or loaded(tmp_path)[0] == number - 1
        newest.write_bytes(content)
        needed = 8_000 * len(set[int]().union(*last))
        files = len(list(tmp_path.iterdir()))
        assert num_bytes(tmp_path) <= 2 * needed + 20 * HEADERS * files
    assert written <= 2 * 8_000 * len(ever) + 30 * 20 * HEADERS


def test_what_lasts_is_moved_once_and_not_every_round(tmp_path: Path) -> None:
    """The initial model is a small part of the first round's file, which it must not keep."""
    checkpoints = Checkpoints(tmp_path)
    sizes = [checkpoints.save(n, arrays(0, *range(10 * n, 10 * n + 7))) for n in range(1, 8)]
    assert sizes[1] > 64_000 and all(size < 56_000 + 2 * HEADERS for size in sizes[2:])
    names = sorted(file.name for file in tmp_path.iterdir())
    assert names[1:] == [f"round-{n:06d}.safetensors" for n in (5, 6, 7)]
    assert names[0].startswith(LASTING)


def test_a_round_that_is_repeated_replaces_what_it_was(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, arrays(1, 2))
    for state in ((1, 3), (1, 3), (2, 4)):
        checkpoints.save(2, arrays(*state))
        assert_same(loaded(tmp_path)[1], arrays(*state))
    (tmp_path / "round-000003.safetensors").write_bytes(b"of a past that ended")
    checkpoints.save(2, arrays(1, 3))
    assert loaded(tmp_path)[0] == 2


def test_of_a_damaged_file_nothing_is_used_again(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, arrays(1, 2))
    checkpoints.save(2, arrays(1, 2, 3, 4))
    flip(tmp_path / "round-000002.safetensors")
    checkpoints = Checkpoints(tmp_path)
    found = checkpoints.load()
    assert found is not None and found[0] == 1
    assert "round-000002.safetensors does not match its SHA-256" in checkpoints.damaged[0]
    assert checkpoints.save(2, arrays(1, 2, 3, 4)) > 16_000
    assert_same(loaded(tmp_path)[1], arrays(1, 2, 3, 4))


def test_a_file_that_all_checkpoints_need_is_the_end_of_them(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    for number in range(1, 6):
        checkpoints.save(number, arrays(1, 2, 3, 4, 10 * number))
    flip(tmp_path / "round-000001.safetensors")
    with pytest.raises(CheckpointError, match="none of the 3 checkpoints can be read"):
        Checkpoints(tmp_path).load()


def test_a_file_that_is_gone_is_named(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(1, arrays(1, 2))
    checkpoints.save(2, arrays(1, 2, 3))
    (tmp_path / "round-000001.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"round-000001\.safetensors"):
        Checkpoints(tmp_path).load()
