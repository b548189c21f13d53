"""Masks as silos have them: other numbers, other names, other formats, pixels without a label."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unicodedata import normalize

import numpy as np
import pytest
import torch
from PIL import Image

from coterie.client.home.folder import Home
from coterie.client.home.settings import SiloSettings
from coterie.client.work.card import read_card
from coterie.client.work.data import to_device
from coterie.client.work.sgd import TrainPlan, train
from coterie.tasks import TaskError
from coterie.tasks.own.declared import DeclaredTask
from coterie.tasks.problems import IGNORED, Masks
from tests.kit import run
from tests.unit.tasks.test_declared import declared
from tests.unit.tasks.test_own_images import MASKS, masked, parts


def ask(task: DeclaredTask, folder: Path, **options: Any) -> Any:
    return [y for _, y in parts(task.load({"data": str(folder), **options}))]


def codes(**of: str) -> dict[str, str]:
    return {"codes": json.dumps({"mask": of})}


def change(folder: Path, name: str, values: Any) -> None:
    Image.fromarray(np.asarray(values, np.uint8)).save(folder / "masks" / name)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return masked(tmp_path / "data")


@pytest.fixture
def task(tmp_path: Path) -> DeclaredTask:
    return declared(tmp_path, MASKS)


@pytest.mark.parametrize("stream", [False, True])
def test_values_of_a_mask_may_have_codes(stream: bool, folder: Path, task: DeclaredTask) -> None:
    expected = ask(task, folder)
    for file in (folder / "masks").iterdir():
        with Image.open(file) as mask:
            change(folder, file.name, np.asarray(mask) * 255)
    with pytest.raises(TaskError, match=r'contains 255\. .*\[data.codes.mask\] .* 255 = "lesion"'):
        task.load({"data": str(folder), "stream": stream})
    found = ask(task, folder, stream=stream, **codes(**{"255": "lesion"}))
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))
    turned = ask(task, folder, stream=stream, **codes(**{"255": "background", "0": "lesion"}))
    assert all(torch.equal(1 - y, other) for y, other in zip(turned, expected, strict=True))


def test_codes_of_masks_stand_in_silo_toml(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "study.toml").write_text(MASKS)
    change(folder, "03.png", np.full((32, 24), 255))
    (tmp_path / "silo.toml").write_text(
        f'name = "a"\ntask = "study.toml"\n[data]\ndata = "{folder}"\n'
        '[data.codes.mask]\n255 = "lesion"\n'
    )
    options = Home(tmp_path).settings().options
    assert len(ask(declared(tmp_path, MASKS), folder, **options)) == 2


@pytest.mark.parametrize(
    ("of", "said"),
    [
        ({"255": "tumour"}, r"gives 'tumour' .* Declared: background, lesion, ignore"),
        ({"white": "lesion"}, "codes for masks must be whole numbers, at least 0. Got 'white'"),
    ],
)
def test_codes_that_cannot_be_are_refused(
    of: dict[str, str], said: str, folder: Path, task: DeclaredTask
) -> None:
    with pytest.raises(TaskError, match=said):
        task.load({"data": str(folder), **codes(**of)})


def test_all_odd_values_of_a_mask_are_named_at_once(folder: Path, task: DeclaredTask) -> None:
    change(folder, "00.png", np.arange(4).repeat(8)[:, None].repeat(24, 1))
    with pytest.raises(TaskError, match=r"00\.png' contains 2, 3\. Its values"):
        task.load({"data": str(folder)})


@pytest.mark.parametrize("mode", ["RGB", "RGBA", "LA", "1"])
def test_a_mask_in_several_bands_that_are_the_same_is_a_grey_one(
    mode: str, folder: Path, task: DeclaredTask
) -> None:
    expected = ask(task, folder)
    for file in (folder / "masks").iterdir():
        with Image.open(file) as mask:
            values = mask.point(lambda v: 255 * v) if mode == "1" else mask
            values.convert(mode).save(file)
    found = ask(task, folder)
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def test_a_mask_with_transparent_pixels_is_refused(folder: Path, task: DeclaredTask) -> None:
    Image.new("LA", (24, 32), (1, 90)).save(folder / "masks" / "00.png")
    with pytest.raises(TaskError, match=r"00\.png' cannot be read: its mode is 'LA'.*transparency"):
        task.load({"data": str(folder)})


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("pattern", ["*_mask", "seg-*", "*_mask.png"])
def test_masks_may_have_a_pattern_for_their_names(
    pattern: str, folder: Path, task: DeclaredTask
) -> None:
    expected = ask(task, folder)
    bare = pattern.removesuffix(".png")
    for file in [*(folder / "masks").iterdir()]:
        file.rename(file.with_stem(bare.replace("*", file.stem)))
    first = bare.replace("*", "00")
    said = rf"'{first}\.png' exists.* mask-names = \"{bare.replace('*', '[*]')}\""
    with pytest.raises(TaskError, match=said):
        task.load({"data": str(folder)})
    found = ask(task, folder, **{"mask-names": pattern})
    assert all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


@pytest.mark.parametrize("pattern", ["", "mask", "*_*", "masks/*"])
def test_what_is_no_pattern_is_refused(pattern: str, folder: Path, task: DeclaredTask) -> None:
    with pytest.raises(TaskError, match=r"one \* for the image's name"):
        task.load({"data": str(folder), "mask-names": pattern})


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("00.jpg", r"00\.jpg' is a JPEG file, whose compression.*must be PNG"),
        ("00.tif", r"00\.tif' is not a PNG.*must be PNG"),
        ("100.png", r"there is no .*Expected a PNG of class numbers"),
    ],
    ids=["a JPEG", "a TIFF", "the number of another image"],
)
def test_a_mask_in_another_format_or_by_another_name_is_named_with_the_reason(
    name: str, said: str, folder: Path, task: DeclaredTask
) -> None:
    (folder / "masks" / "00.png").rename(folder / "masks" / name)
    with pytest.raises(TaskError, match=rf"00\.jpg' has no mask: .*{said}"):
        task.load({"data": str(folder)})


def test_two_images_with_one_mask_are_refused(folder: Path, task: DeclaredTask) -> None:
    with Image.open(folder / "images" / "00.jpg") as image:
        image.save(folder / "images" / "00.png")
    with pytest.raises(TaskError, match=r"00\.jpg' and .*00\.png' have the same mask .*00\.png'"):
        ask(task, folder)


def test_masks_are_found_in_any_capitals_and_spelling_of_accents(
    folder: Path, task: DeclaredTask
) -> None:
    expected = ask(task, folder)
    (folder / "masks" / "00.png").rename(folder / "masks" / f"{normalize('NFD', 'ä')}.PNG")
    (folder / "images" / "00.jpg").rename(folder / "images" / f"{normalize('NFC', 'ä')}.JPG")
    (folder / "images").rename(folder / "Images")
    found = ask(task, folder)
    assert [len(y) for y in found] == [len(y) for y in expected]


@pytest.mark.parametrize("stream", [False, True])
def test_a_damaged_mask_is_left_out_with_its_image(
    stream: bool, folder: Path, task: DeclaredTask
) -> None:
    (folder / "masks" / "03.png").write_bytes(b"no picture")
    with pytest.raises(TaskError, match=r"03\.png' cannot be read"):
        task.load({"data": str(folder), "stream": stream})
    found = ask(task, folder, **{"stream": stream, "skip-unreadable": True})
    assert sum(map(len, found)) == 11 and "03.png" in task.warnings()[0]
    assert "'data': 24 files, 22 used, 2 left out" in task.notes()[0]


def test_images_and_masks_are_both_counted(folder: Path, task: DeclaredTask) -> None:
    change(folder, "spare.png", np.zeros((32, 24)))
    (folder / "masks" / "._00.png").write_bytes(b"")
    (folder / "images" / "list.csv").write_text("")
    (folder / "raw").mkdir()
    (folder / "raw" / "1.png").write_bytes(b"")
    ask(task, folder)
    notes = "\n".join(task.notes())
    assert "'data': 28 files, 24 used, 4 left out" in notes
    for said in ("masks without an image ('masks/spare.png')", "hidden", ".csv", "raw"):
        assert said in notes


def test_train_and_val_alone_are_named_for_masks_too(tmp_path: Path, task: DeclaredTask) -> None:
    for part in ("train", "val"):
        masked(tmp_path / "data" / part, count=2)
    with pytest.raises(TaskError, match=r"'train' and 'val' may be intended.*folder test,"):
        task.load({"data": str(tmp_path / "data")})
    masked(tmp_path / "data" / "test", count=2)
    data = task.load({"data": str(tmp_path / "data")})
    assert data.y_val.shape == (2, 16, 12)  # type: ignore[union-attr]


# ---------------------------------------------------------------- pixels without a label


def test_ignored_pixels_change_neither_the_loss_nor_the_metrics() -> None:
    torch.manual_seed(0)
    outputs, targets = torch.randn(3, 2, 4, 4), torch.randint(0, 2, (3, 4, 4))
    problem = Masks(2)
    hidden = targets.clone()
    hidden[:, 2:] = IGNORED
    cut = outputs[:, :, :2], targets[:, :2]
    torch.testing.assert_close(problem.loss(outputs, hidden), problem.loss(*cut))
    other = outputs.clone()
    other[:, :, 2:] = 99 * torch.randn(3, 2, 2, 4)
    assert torch.equal(problem.loss(other, hidden), problem.loss(outputs, hidden))
    for one in (outputs, other):
        assert (problem.evidence(one, hidden)[0] == problem.evidence(*cut)[0]).all()


def test_a_mask_without_any_label_is_refused(folder: Path, task: DeclaredTask) -> None:
    change(folder, "05.png", np.full((32, 24), 255))
    with pytest.raises(TaskError, match=r"all pixels of mask '.*05\.png' are to be ignored"):
        task.load({"data": str(folder), **codes(**{"255": "ignore"})})
    with pytest.raises(TaskError, match="all pixels of the mask of training sample 2"):
        Masks(2).check(np.array([[[0, IGNORED]], [[IGNORED, IGNORED]]]), "training")


def test_a_negative_value_is_not_taken_for_an_ignored_pixel(
    folder: Path, task: DeclaredTask
) -> None:
    values = np.zeros((32, 24), np.int32)
    values[:16] = IGNORED
    (folder / "masks" / "00.png").unlink()
    Image.fromarray(values).save(folder / "masks" / "00.png", "TIFF")
    with pytest.raises(TaskError, match=r"00\.png' contains -100\. Its values must"):
        task.load({"data": str(folder)})


@pytest.mark.parametrize("stream", [False, True])
def test_a_run_learns_from_masks_with_ignored_pixels(
    stream: bool, folder: Path, tmp_path: Path, task: DeclaredTask
) -> None:
    for file in (folder / "masks").iterdir():
        with Image.open(file) as mask:
            values = np.asarray(mask).copy()
        values[-4:] = 255
        change(folder, file.name, values)
    options = {"data": str(folder), "stream": stream, **codes(**{"255": "ignore"})}
    data = to_device(task.load(options), torch.device("cpu"))
    torch.manual_seed(0)
    assert (data.train.at(torch.arange(2))[1] == IGNORED).any()
    loss = train(task, task.model(), data.train, TrainPlan(epochs=1, batch_size=4, lr=0.1), seed=0)
    assert np.isfinite(loss)
    config = SiloSettings(
        "a", task=str(tmp_path / "study.toml"), options=options, device="cpu", home=str(tmp_path)
    ).to_node_config()
    run(tmp_path / "run-1", [config], task="study", local_epochs=2)
    card = read_card(tmp_path / "models" / "run-1.safetensors")
    assert card.counted == "24 of 24 files used, 0 left out" and 0 <= card.figures["dice"][0] <= 1
    assert card.counted in (tmp_path / "models" / "run-1.md").read_text()
