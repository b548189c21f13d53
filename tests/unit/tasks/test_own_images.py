"""Folders of images that memory does not hold, masks beside images, and files that are damaged."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from coterie.client.cli.check import check
from coterie.client.home.settings import SiloSettings
from coterie.client.work.data import to_device
from coterie.tasks import TaskError
from coterie.tasks.base import SiloData, StreamedData
from coterie.tasks.own import image_folder
from tests.unit.tasks.test_declared import IMAGES, declared

MASKS = """
kind = "image-folder"
name = "study"
classes = ["background", "lesion"]
shape = [1, 16, 12]
network = "unet"
target = {kind = "mask"}
"""


def noise(file: Path, seed: int, size: tuple[int, int] = (24, 32)) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 256, (size[1], size[0]), np.uint8)
    Image.fromarray(pixels).save(file)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for i in range(12):
        noise(
            tmp_path / "data" / ("cat" if i % 3 else "dog") / f"{i:02}.{'jpg' if i % 2 else 'png'}",
            i,
        )
    return tmp_path / "data"


def parts(data: StreamedData | SiloData) -> list[tuple[torch.Tensor, torch.Tensor]]:
    moved = to_device(data, torch.device("cpu"))
    return [part.at(torch.arange(len(part))) for part in (moved.train, moved.test)]


def test_streamed_images_are_those_that_memory_would_hold(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = declared(folder.parent, IMAGES.format(channels=3))
    held = task.load({"data": str(folder)})
    streamed = task.load({"data": str(folder), "stream": "true"})
    assert isinstance(held, SiloData) and isinstance(streamed, StreamedData)
    for (x, y), (seen, known) in zip(parts(held), parts(streamed), strict=True):
        assert torch.equal(x, seen) and torch.equal(y, known) and y.dtype == known.dtype
    assert task.notes() == [
        "'data': 12 files, 12 used, 0 left out",
        "images are read as they are needed",
    ]
    assert np.array_equal(streamed.train.targets, held.y_train)  # type: ignore[attr-defined]
    monkeypatch.setattr(image_folder, "HELD_BYTES", 12 * 3 * 8 * 6 * 4)
    assert isinstance(task.load({"data": str(folder)}), SiloData), "exactly as much as is held"
    monkeypatch.setattr(image_folder, "HELD_BYTES", 12 * 3 * 8 * 6 * 4 - 1)
    assert isinstance(task.load({"data": str(folder)}), StreamedData)


def test_streamed_images_go_to_worker_processes(folder: Path) -> None:
    task = declared(folder.parent, IMAGES.format(channels=1))
    data: Any = task.load({"data": str(folder), "stream": True})
    again = pickle.loads(pickle.dumps(data.train))
    np.testing.assert_array_equal(again[3][0], data.train[3][0])
    text = "\n".join(
        check(
            SiloSettings(
                "a",
                task=str(folder.parent / "study.toml"),
                options={"data": str(folder), "stream": True},
                device="cpu",
            )
        )
    )
    assert "read as needed (cat: " in text and "one epoch in" in text


def damage(folder: Path, how: str) -> Path:
    file = folder / "cat" / "05.jpg" if how != "png" else folder / "cat" / "04.png"
    whole = file.read_bytes()
    file.write_bytes(b"no picture at all" if how == "text" else whole[: len(whole) // 2])
    return file


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["text", "jpg", "png"])
def test_an_image_that_cannot_be_read_is_named_or_left_out_before_training(
    how: str, stream: bool, folder: Path
) -> None:
    task = declared(folder.parent, IMAGES.format(channels=1))
    name = damage(folder, how).name
    options = {"data": str(folder), "stream": stream}
    with pytest.raises(TaskError, match=rf"{name}' cannot be read"):
        task.load(options)
    left = parts(task.load({**options, "skip-unreadable": True}))
    assert sum(len(x) for x, _ in left) == 11
    (warning,) = task.warnings()
    assert "1 unreadable image was left out" in warning and name in warning


def test_bytes_behind_an_image_do_no_harm(folder: Path) -> None:
    task = declared(folder.parent, IMAGES.format(channels=1))
    for file in (folder / "cat" / "05.jpg", folder / "cat" / "04.png"):
        file.write_bytes(file.read_bytes() + 500 * b"x")
    data = task.load({"data": str(folder), "stream": True})
    assert sum(len(x) for x, _ in parts(data)) == 12


def masked(folder: Path, *, count: int = 12) -> Path:
    for i in range(count):
        noise(folder / "images" / f"{i:02}.jpg", i)
        mask = np.zeros((32, 24), np.uint8)
        mask[: 8 + i, :10] = 1
        (folder / "masks").mkdir(exist_ok=True)
        Image.fromarray(mask).save(folder / "masks" / f"{i:02}.png")
    return folder


def test_masks_lie_beside_images(tmp_path: Path) -> None:
    task = declared(tmp_path, MASKS)
    options = {"data": str(masked(tmp_path / "data")), "test-share": 0.25}
    held = parts(task.load(options))
    assert held[0][1].shape == (9, 16, 12) and held[0][1].dtype == torch.int64
    assert {0, 1} == set(held[0][1].unique().tolist())
    for (x, y), (seen, known) in zip(
        held, parts(task.load({**options, "stream": True})), strict=True
    ):
        assert torch.equal(x, seen) and torch.equal(y, known)
    settings = SiloSettings("a", task=str(tmp_path / "study.toml"), options=options, device="cpu")
    text = "\n".join(check(settings))
    assert "9 samples of 1×16×12" in text and "Dice on own test data" in text


def test_masks_in_parts_are_kept_apart(tmp_path: Path) -> None:
    masked(tmp_path / "data" / "train", count=5)
    masked(tmp_path / "data" / "test", count=2)
    data = declared(tmp_path, MASKS).load({"data": str(tmp_path / "data")})
    assert isinstance(data, SiloData)
    assert (len(data.x_train), len(data.x_test)) == (5, 2)


def test_palettes_are_class_numbers_and_other_masks_are_refused(tmp_path: Path) -> None:
    folder = masked(tmp_path / "data")
    task, first = declared(tmp_path, MASKS), folder / "masks" / "00.png"
    same = parts(task.load({"data": str(folder)}))
    with Image.open(first) as grey:
        palette = Image.fromarray(np.asarray(grey))
        palette.putpalette([0, 0, 0, 255, 0, 0])
        palette.save(first)
        colours = palette.convert("RGB")
    for one, other in zip(same, parts(task.load({"data": str(folder)})), strict=True):
        assert torch.equal(one[1], other[1])
    colours.save(first)
    with pytest.raises(TaskError, match=r"00\.png' cannot be read: its mode is 'RGB'; a mask has"):
        task.load({"data": str(folder)})
    Image.fromarray(np.full((32, 24), 255, np.uint8)).save(first)
    with pytest.raises(
        TaskError, match=r"mask '.*00\.png' contains 255\. .* 0 to 1 \(background, les"
    ):
        task.load({"data": str(folder)})
    first.unlink()
    with pytest.raises(TaskError, match=r"00\.jpg' has no mask: there is no '.*masks/00\.png'"):
        task.load({"data": str(folder)})


def test_a_folder_without_images_says_what_masks_need(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    with pytest.raises(TaskError, match=r"no images in .* sub-folders images and masks"):
        declared(tmp_path, MASKS).load({"data": str(tmp_path / "data")})


def test_the_u_net_learns_to_mark_what_is_bright(tmp_path: Path) -> None:
    from coterie.client.work.measure import evaluate
    from coterie.client.work.sgd import TrainPlan, train

    rng = np.random.default_rng(0)
    task = declared(tmp_path, MASKS)
    for i in range(24):
        where = np.kron(rng.integers(0, 2, (4, 3)), np.ones((4, 4))).astype(np.uint8)
        for kind, values in (("images", 60 + 120 * where), ("masks", where)):
            (tmp_path / "data" / kind).mkdir(parents=True, exist_ok=True)
            grain = rng.integers(0, 50, where.shape) if kind == "images" else 0
            pixels = Image.fromarray((values + grain).astype(np.uint8))
            pixels.save(tmp_path / "data" / kind / f"{i}.png")
    data = to_device(task.load({"data": str(tmp_path / "data")}), torch.device("cpu"))
    torch.manual_seed(0)
    model = task.model()
    before = evaluate(task, model, data.test).error
    train(task, model, data.train, TrainPlan(epochs=8, batch_size=4, lr=0.1), seed=0)
    after = evaluate(task, model, data.test).error
    assert after < 0.15 < before, "1 − Dice"
