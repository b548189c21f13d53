"""One reader for images of every kind: held, streamed, by workers and to predict from."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from coterie.client.work.data import to_device
from coterie.tasks import TaskError
from coterie.tasks.base import SiloData, StreamedData
from tests.unit.tasks.test_declared import IMAGES, declared
from tests.unit.tasks.test_own_images import MASKS, masked, parts

RNG = np.random.default_rng(0)
GREY = RNG.integers(0, 256, (8, 6), np.uint8)
COLOUR = RNG.integers(0, 256, (8, 6, 3), np.uint8)
MEANS, DEVIATIONS = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
PER_CHANNEL = 'normalise = "0.485,0.456,0.406/0.229,0.224,0.225"\n'


def colour(width: int = 6) -> str:
    return IMAGES.format(channels=3).replace("[3, 8, 6]", f"[3, 8, {width}]")


def read(file: Path, *, channels: int = 3) -> Any:
    return declared(file.parent, IMAGES.format(channels=channels)).inputs(file, {}).x[0]


def seen(file: Path, text: str) -> Any:
    return declared(file.parent, text).inputs(file, {}).x[0]


def of_pixels(pixels: Any) -> Any:
    """What a declaration with ``symmetric`` makes of (H, W) or (H, W, 3) from 0 to 255."""
    values = np.asarray(pixels, np.float32) / np.float32(127.5) - np.float32(1)
    values = np.broadcast_to(values.reshape(*values.shape[:2], -1), (*values.shape[:2], 3))
    return values.transpose(2, 0, 1)


@pytest.mark.parametrize("width", [6, 3, 1])
@pytest.mark.parametrize("deep", [False, True])
def test_grey_images_have_three_channels_each_scaled_by_its_own_numbers(
    deep: bool, width: int, tmp_path: Path
) -> None:
    white = np.full((8, width), 65535, np.uint16) if deep else np.full((8, width), 255, np.uint8)
    Image.fromarray(white).save(tmp_path / "1.png")
    found = seen(tmp_path / "1.png", colour(width) + PER_CHANNEL)
    assert found.shape == (3, 8, width)
    for channel, (mean, deviation) in enumerate(zip(MEANS, DEVIATIONS, strict=True)):
        np.testing.assert_allclose(found[channel], (1 - mean) / deviation, rtol=1e-5)


def palette(clear: bytes | int | None = None) -> Image.Image:
    image = Image.fromarray(COLOUR).quantize(16)
    if clear is not None:
        image.info["transparency"] = clear
    return image


def alpha(image: Image.Image, opaque: int) -> Image.Image:
    image.putalpha(opaque)
    return image


MODES: dict[str, tuple[str, Callable[[], Image.Image]]] = {
    "8-bit grey": ("png", lambda: Image.fromarray(GREY)),
    "1-bit": ("png", lambda: Image.fromarray(GREY > 127)),
    "16-bit grey": ("png", lambda: Image.fromarray(GREY.astype(np.uint16) * 257)),
    "16-bit TIFF": ("tif", lambda: Image.fromarray(GREY.astype(np.uint16) * 257)),
    "colour": ("png", lambda: Image.fromarray(COLOUR)),
    "JPEG": ("jfif", lambda: Image.fromarray(COLOUR)),
    "palette": ("png", palette),
    "CMYK": ("tif", lambda: Image.fromarray(COLOUR).convert("CMYK")),
    "CMYK JPEG": ("jpg", lambda: Image.fromarray(COLOUR).convert("CMYK")),
    "opaque": ("png", lambda: alpha(Image.fromarray(COLOUR), 255)),
    "half clear": ("png", lambda: alpha(Image.fromarray(COLOUR), 128)),
    "grey and clear": ("png", lambda: alpha(Image.fromarray(GREY).convert("LA"), 0)),
    "clear palette": ("png", lambda: palette(3)),
    "turned": ("jpg", lambda: Image.fromarray(COLOUR)),
}


@pytest.mark.parametrize("channels", [pytest.param(1, marks=pytest.mark.nightly), 3])
def test_a_mixed_folder_is_the_same_held_streamed_by_workers_and_to_predict_from(
    channels: int, tmp_path: Path
) -> None:
    for i, (ending, make) in enumerate(MODES.values()):
        file = tmp_path / "data" / ("cat" if i % 2 else "dog") / f"{i:02}.{ending}"
        file.parent.mkdir(parents=True, exist_ok=True)
        format_ = "JPEG" if ending == "jfif" else None
        make().save(file, format_, **({"exif": tagged(6)} if i == len(MODES) - 1 else {}))
    task = declared(tmp_path, IMAGES.format(channels=channels))
    options = {"data": str(tmp_path / "data")}
    held, streamed = task.load(options), task.load({**options, "stream": True})
    assert isinstance(held, SiloData) and isinstance(streamed, StreamedData)
    assert held.x_train[0].shape == streamed.train[0][0].shape == task.shape
    for (x, y), (also, known) in zip(parts(held), parts(streamed), strict=True):
        assert torch.equal(x, also) and torch.equal(y, known)
    worked = to_device(streamed, torch.device("cpu"), workers=2).train
    assert torch.equal(worked.at(torch.arange(len(worked)))[0], parts(held)[0][0])  # type: ignore[arg-type]
    asked = {x.tobytes() for x in task.inputs(tmp_path / "data", {}).x}
    assert asked == {x.tobytes() for x in (*held.x_train, *held.x_test)}


def test_what_is_transparent_is_in_front_of_white_whatever_lies_below(tmp_path: Path) -> None:
    for below in (0, 90, 255):
        image = alpha(Image.new("RGB", (6, 8), (below, below, below)), 0)
        image.save(tmp_path / "1.png")
        assert (read(tmp_path / "1.png") == 1).all()
        assert (read(tmp_path / "1.png", channels=1) == 1).all()


def test_one_clear_value_of_a_16_bit_image_is_white(tmp_path: Path) -> None:
    values = np.array([[0, 1000], [1000, 65535]], np.uint16).repeat(4, 0).repeat(3, 1)
    Image.fromarray(values).save(tmp_path / "1.png", transparency=1000)
    expected = np.where(values == 1000, 65535, values) / 257
    np.testing.assert_allclose(read(tmp_path / "1.png"), of_pixels(expected), atol=1e-6)


@pytest.mark.parametrize("compression", [None, "tiff_lzw"])
@pytest.mark.parametrize(("tag", "was", "now"), [(262, 1, 0), (258, 16, 12)])
def test_a_deep_tiff_says_what_is_white(
    tag: int, was: int, now: int, compression: str | None, tmp_path: Path
) -> None:
    stored = np.full((8, 6), 0 if tag == 262 else 65535, np.uint16)
    Image.fromarray(stored).save(tmp_path / "1.tif", compression=compression)
    before, after = (struct.pack("<HHIH", tag, 3, 1, value) for value in (was, now))
    written = (tmp_path / "1.tif").read_bytes()
    assert written.count(before) == 1
    (tmp_path / "1.tif").write_bytes(written.replace(before, after))
    np.testing.assert_allclose(read(tmp_path / "1.tif"), 1, atol=1e-6)


@pytest.mark.parametrize("name", ["opaque", "colour", "8-bit grey", "palette", "16-bit grey"])
@pytest.mark.parametrize("mode", ["L", "RGB"])
def test_what_has_nothing_transparent_is_converted_as_pillow_converts_it(
    name: str, mode: str, tmp_path: Path
) -> None:
    ending, make = MODES[name]
    make().save(tmp_path / f"1.{ending}")
    with Image.open(tmp_path / f"1.{ending}") as image:
        plain = Image.fromarray(GREY) if name == "16-bit grey" else image.convert(mode)
    found = read(tmp_path / f"1.{ending}", channels=1 if mode == "L" else 3)
    np.testing.assert_allclose(found, of_pixels(plain)[: len(found)], atol=1e-6)


def tagged(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


TURNED_BACK = {
    1: lambda a: a,
    2: np.fliplr,
    3: lambda a: np.rot90(a, 2),
    4: np.flipud,
    5: lambda a: a.swapaxes(0, 1),
    6: lambda a: np.rot90(a, 1),
    7: lambda a: np.rot90(a, 2).swapaxes(0, 1),
    8: lambda a: np.rot90(a, -1),
}
"""Orientation → how a file with this tag holds an upright image."""


@pytest.mark.parametrize(
    "kind", ["png", "tif", "webp", "grey png", "grey tif", "deep png", "deep tif"]
)
@pytest.mark.parametrize("orientation", TURNED_BACK)
def test_images_are_read_upright(orientation: int, kind: str, tmp_path: Path) -> None:
    ending = kind.split()[-1]
    pixels = GREY if " " in kind else COLOUR
    values = pixels.astype(np.uint16) * 257 if "deep" in kind else pixels
    stored = Image.fromarray(np.ascontiguousarray(TURNED_BACK[orientation](values)))
    lossless = {"lossless": True} if ending == "webp" else {}
    stored.save(tmp_path / f"1.{ending}", exif=tagged(orientation), **lossless)
    np.testing.assert_allclose(read(tmp_path / f"1.{ending}"), of_pixels(pixels), atol=1e-6)


@pytest.mark.filterwarnings("ignore:Corrupt EXIF data")
def test_damaged_exif_data_do_not_make_an_image_unreadable(tmp_path: Path) -> None:
    Image.fromarray(COLOUR).save(tmp_path / "1.png", exif=b"Exif\0\0II*\0\xff\xff\xff\xffrubbish")
    np.testing.assert_allclose(read(tmp_path / "1.png"), of_pixels(COLOUR), atol=1e-6)


@pytest.mark.parametrize("stream", [False, True])
def test_a_person_is_told_of_transparency_cmyk_and_pages_with_their_numbers(
    stream: bool, tmp_path: Path
) -> None:
    folder = tmp_path / "data" / "cat"
    folder.mkdir(parents=True)
    for i in range(3):
        alpha(Image.fromarray(COLOUR), 100).save(folder / f"clear{i}.png")
    Image.fromarray(COLOUR).convert("CMYK").save(folder / "print.jpg")
    pages = [Image.fromarray(GREY), Image.fromarray(GREY[::-1])]
    pages[0].save(folder / "stack.tif", save_all=True, append_images=pages[1:])
    task = declared(tmp_path, IMAGES.format(channels=3))
    task.load({"data": str(tmp_path / "data"), "stream": stream})
    notes = "\n".join(task.notes())
    assert "3 images have transparency: it is read on a white background ('clear0.png' and" in notes
    assert (
        "1 image has CMYK colours: converted to RGB without a colour profile ('print.jpg')" in notes
    )
    assert "1 image has several pages: only the first one is read" in notes
    asked = task.inputs(folder / "stack.tif", {})
    assert any("several pages" in note for note in asked.notes)
    np.testing.assert_allclose(asked.x[0], of_pixels(GREY), atol=1e-6)


def test_two_channels_are_refused_with_those_that_there_are(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"shape: .*channels: 1 \(grey\) or 3 \(colour\). Got 2"):
        declared(tmp_path, IMAGES.format(channels=2))


@pytest.mark.parametrize("error", [IndexError("x"), KeyError("tag"), EOFError(), TypeError("y")])
def test_whatever_a_damaged_file_makes_pillow_raise_names_the_file(
    error: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    Image.fromarray(GREY).save(tmp_path / "1.png")

    def fail(*_: Any) -> None:
        raise error

    monkeypatch.setattr("PIL.PngImagePlugin.PngImageFile.load", fail)
    with pytest.raises(TaskError, match=r"1\.png' cannot be read: .+"):
        read(tmp_path / "1.png")


# ---------------------------------------------------------------- masks on their images


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("skip", [False, True])
def test_a_mask_of_other_proportions_is_refused_with_both_names(
    skip: bool, stream: bool, tmp_path: Path
) -> None:
    folder = masked(tmp_path / "data")
    Image.fromarray(np.ones((24, 32), np.uint8)).save(folder / "masks" / "03.png")
    task = declared(tmp_path, MASKS)
    options = {"data": str(folder), "stream": stream, "skip-unreadable": skip}
    said = r"03\.png' is 32x24 pixels and its image '.*03\.jpg' 24x32 .*proportions differ"
    with pytest.raises(TaskError, match=said):
        task.load(options)


@pytest.mark.parametrize(
    ("size", "fits"), [((48, 64), True), ((12, 16), True), ((25, 32), True), ((24, 30), False)]
)
def test_a_mask_may_have_another_size_with_the_same_proportions(
    size: tuple[int, int], fits: bool, tmp_path: Path
) -> None:
    folder = masked(tmp_path / "data")
    Image.fromarray(np.ones(size[::-1], np.uint8)).save(folder / "masks" / "03.png")
    task = declared(tmp_path, MASKS)
    if fits:
        task.load({"data": str(folder)})
    else:
        with pytest.raises(TaskError, match="proportions differ"):
            task.load({"data": str(folder)})


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("ending", ["jpg", "png", "tif"])
def test_images_and_masks_lie_on_each_other_however_they_are_turned(
    ending: str, stream: bool, tmp_path: Path
) -> None:
    shape = np.zeros((32, 24), np.uint8)
    shape[:16, :12] = 1
    for i in range(4):
        for kind, values in (("images", 200 * shape), ("masks", shape)):
            (tmp_path / "data" / kind).mkdir(parents=True, exist_ok=True)
            file = tmp_path / "data" / kind / f"{i}.{ending if kind == 'images' else 'png'}"
            turned = (i + (kind == "masks")) % 2  # one of the two is stored sideways
            stored = np.ascontiguousarray(np.rot90(values)) if turned else values
            Image.fromarray(stored).save(file, exif=tagged(6 if turned else 1))
    data = declared(tmp_path, MASKS).load({"data": str(tmp_path / "data"), "stream": stream})
    for x, y in parts(data):
        assert torch.equal(x[:, 0] > 0, y == 1)
