"""Simulation files and partitions: what they say, and that impossible ones are refused at once."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from coterie.tasks import SiloData, TaskError, load_task
from coterie.tasks.base import Option, Task
from coterie.tasks.simulation import Partitions, Simulation, load_silos

TEXT = """\
task = "digits"
silos = 5
seed = 4
[split]
kind = "dirichlet"
dirichlet-alpha = 0.5
test-share = 0.2
permutations = 2
[run]
rounds = 3
"""


def read(folder: Path, text: str) -> Simulation:
    file = folder / "some.toml"
    file.write_text(text)
    return Simulation.read(file)


def same(a: SiloData, b: SiloData) -> bool:
    return all(
        np.array_equal(getattr(a, part), getattr(b, part))
        for part in ("x_train", "y_train", "x_test", "y_test")
    )


@pytest.mark.parametrize(
    ("text", "total", "numbers"),
    [("0-249/1000", 0, range(250)), ("7/9", 0, range(7, 8)), ("1-2", 4, range(1, 3))],
)
def test_partitions_are_read(text: str, total: int, numbers: range) -> None:
    assert Partitions.parse(text, total=total).numbers == numbers


@pytest.mark.parametrize(
    ("text", "total", "said"),
    [
        ("0-9", 0, "must be FIRST-LAST/TOTAL"),
        ("a-b/3", 0, "must be FIRST-LAST/TOTAL"),
        ("-1/3", 0, "must be FIRST-LAST/TOTAL"),
        ("0-3/3", 0, "must be in 0-2,"),
        ("2-1/3", 0, "must be in 0-2,"),
        ("0-2/4", 5, "name 4 silos, but there are 5"),
        ("0/200000", 0, "must be in"),
    ],
)
def test_partitions_that_are_none_are_refused(text: str, total: int, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        Partitions.parse(text, total=total)


def test_a_file_gives_every_silo_its_name_and_its_share(tmp_path: Path) -> None:
    simulation = read(tmp_path, TEXT)
    silos = simulation.silos_of()
    assert [silo.name for silo in silos] == [f"silo-{i}" for i in range(5)]
    assert silos[3].options["silo"] == 3 and silos[3].options["silos"] == 5
    assert simulation.run_keys() == {"task": "digits", "seed": 4, "min-silos": 5, "rounds": 3}
    task = load_task("digits")
    together = load_silos(task, [silo.options for silo in silos])
    assert all(
        same(data, task.load(silo.options)) for data, silo in zip(together, silos, strict=True)
    )
    assert sum(len(d.y_train) + len(d.y_test) for d in together) == 1797


def test_names_are_padded_so_that_their_order_is_the_numbers(tmp_path: Path) -> None:
    names = [silo.name for silo in read(tmp_path, "silos = 11").silos_of()]
    assert names == sorted(names) and names[0] == "silo-00"


def test_some_silos_of_a_split_are_those_of_the_whole(tmp_path: Path) -> None:
    simulation = read(tmp_path, TEXT)
    task = load_task("digits")
    whole = load_silos(task, [silo.options for silo in simulation.silos_of()])
    part = simulation.silos_of(Partitions.parse("2-3", total=5))
    assert all(
        same(a, b)
        for a, b in zip(load_silos(task, [s.options for s in part]), whole[2:4], strict=True)
    )


def test_a_data_folder_is_relative_to_the_file(tmp_path: Path) -> None:
    assert read(tmp_path, 'silos = 2\ndata = "d"').task_options()["data"] == str(tmp_path / "d")
    assert read(tmp_path, 'silos = 2\ndata = "/d"').task_options()["data"] == "/d"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("silos = ", "is not TOML"),
        ("", "key 'silos' is missing"),
        ("silos = 0", "silos"),
        (
            "silos = 2\ncolour = 3",
            "unknown key 'colour': there are data, label-counts, names",
        ),
        ("silos = 2\nlabel_counts = true", "unknown key 'label_counts'"),
        ("silos = 2\nlabel-counts = 1", "label-counts: .*valid boolean"),
        ("silos = 2\n[split]\nkind = 'iid'\nshrads = 3", "no key 'shrads'"),
        ("silos = 2\n[split]\ndirichlet-alpha = 3.0", "to name its kind"),
        (
            "silos = 2\nnames = ['a', 'a']",
            "names must be 2 different names,.* Got 2, of which 1 differ",
        ),
        ("silos = 2\nnames = ['a', 'a', 'b']", "names must be 2 .* Got 3, of which 2 differ"),
        ("silos = 2\ndata = '~nobody-here/x'", "no home folder ~nobody-here"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(tmp_path: Path, text: str, said: str) -> None:
    with pytest.raises(TaskError, match=said):
        read(tmp_path, text)


def test_a_file_with_a_byte_order_mark_is_read(tmp_path: Path) -> None:
    assert read(tmp_path, "\ufeffsilos = 2").silos == 2


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"none\.toml"):
        Simulation.read(tmp_path / "none.toml")


def test_a_task_that_only_loads_one_silo_serves_as_well() -> None:
    class Points(Task):
        name, num_classes = "points", 2

        def model(self):  # type: ignore[no-untyped-def]
            raise NotImplementedError

        def load(self, options: Mapping[str, Option]) -> SiloData:
            x = np.full((4, 1), float(options["silo"]), np.float32)
            y = np.zeros(4, np.int64)
            return SiloData(x, y, x, y, 2)

    loaded = load_silos(Points(), [{"silos": 9, "silo": i} for i in (4, 6)])
    assert [float(data.x_train[0, 0]) for data in loaded] == [4.0, 6.0]


def test_silos_that_are_tested_on_the_whole_test_part_share_one_array(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    parts = {
        f"{axis}_{part}": values
        for part, count in (("train", 60), ("test", 20))
        for axis, values in (
            ("x", rng.integers(0, 256, (count, 28, 28), np.uint8)),
            ("y", np.arange(count) % 10),
        )
    }
    np.savez(tmp_path / "mnist.npz", **parts)
    options: dict[str, Option] = {
        "data": str(tmp_path), "split": "iid", "silos": 3, "split-test": "all",
    }  # fmt: skip
    task = load_task("mnist/mclr")
    first, second, third = task.load_all(options)
    assert first.x_test is second.x_test is third.x_test
    assert same(second, task.load({**options, "silo": 1}))
    capped = task.load_all({**options, "test": 5})
    assert len(capped[0].x_test) == 5 and not same(capped[0], capped[1])
    assert same(capped[1], task.load({**options, "test": 5, "silo": 1}))


def test_files_and_folders_of_options_are_relative_to_the_file(tmp_path: Path) -> None:
    found = read(tmp_path, 'silos = 2\n[options]\ntest-data = "f"\ndata = "/d"\ntest = 3\n').options
    assert found == {"test-data": str(tmp_path / "f"), "data": "/d", "test": 3}
