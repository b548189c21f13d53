"""Digits drawn from fonts: a stand-in for the data set SynthDigits.

SynthDigits (Ganin, Lempitsky 2015) was made from fonts with varying position, orientation, colours
of background and stroke, neighbouring digits and blur. It is not freely at hand, so this draws its
like from the fonts that a machine has. Figures with it are not figures with SynthDigits, and other
fonts give other images: say so wherever they are shown, and name the fonts.

How hard they are, with the 22 faces of DejaVu: FedBN's network, trained on 185 of them for 50
epochs (batch 64, lr 0.1), errs on half of 400 others (0.50, one run).
"""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from coterie.tasks.base import TaskError
from coterie.tasks.images.image_files import Images
from coterie.tasks.options import place_of

if TYPE_CHECKING:
    from PIL.ImageFont import FreeTypeFont

SIDE = 28
CANVAS = 2 * SIDE  # drawn at twice the size and shrunk, for smooth edges
SIZES = (34, 38, 42, 46)  # of the font, in pixels of the canvas
MIN_CONTRAST = 80.0  # between the grey values of stroke and background, of 255
NOT_DIGITS = ("cmex", "cmsy", "stixsiz", "stixnonuni", "symbol", "dingbat", "emoji", "icon", "math")

SYSTEM_FOLDERS = (
    "/usr/share/fonts",
    "/usr/local/share/fonts",
    "~/.local/share/fonts",
    "~/.fonts",
    "/Library/Fonts",
    "/System/Library/Fonts",
    "C:/Windows/Fonts",
)


def find_fonts(folder: str = "") -> list[Path]:
    """TrueType and OpenType files, sorted by name: of ``folder``, or what the machine has.

    Without a folder: matplotlib's fonts, if it is installed, else the system's. Fonts of symbols
    are left out by name; others that draw no digits are left out by ``draw_digits``.

    Raises:
        TaskError: ``folder`` is given and holds no font.
    """
    if folder:
        found = _files(place_of(folder))
        if not found:
            raise TaskError(f"fonts must be a folder with .ttf or .otf files. Got {folder!r}.")
        return found
    spec = find_spec("matplotlib")
    if spec is not None and spec.origin is not None:
        found = _files(Path(spec.origin).parent / "mpl-data" / "fonts" / "ttf")
        if found:
            return found
    return [path for place in SYSTEM_FOLDERS for path in _files(Path(place).expanduser())]


def draw_digits(count: int, *, fonts: Sequence[Path], rng: np.random.Generator) -> Images:
    """Draw digits in colour.

    Args:
        count: how many.
        fonts: files; those without ten different digits are left out. If none is left, Pillow's
            own font is used.
        rng: decides everything. The same fonts and Pillow give the same images.

    Returns:
        Images of shape (count, 28, 28, 3), labels (count,).

    Raises:
        TaskError: Pillow is not installed.
    """
    usable = _load(fonts)
    labels = rng.integers(0, 10, size=count)
    images = np.empty((count, SIDE, SIDE, 3), dtype=np.uint8)
    for index, label in enumerate(labels):
        by_size = usable[rng.integers(len(usable))]
        mask = _mask(int(label), by_size[rng.integers(len(SIZES))], rng)
        images[index] = _paint(mask, rng)
    return Images(images, labels.astype(np.int64))


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    found = [p for p in folder.rglob("*") if p.suffix.lower() in (".ttf", ".otf")]
    found = [p for p in found if not any(word in p.name.lower() for word in NOT_DIGITS)]
    return sorted(found, key=lambda path: path.name)


def _load(fonts: Sequence[Path]) -> list[list[FreeTypeFont]]:
    """Each usable font in all sizes."""
    try:
        from PIL import ImageFont
    except ImportError:
        raise TaskError(
            "drawing digits needs Pillow, which comes with torchvision. Install it, put synth.npz "
            "into the data folder, or leave synth out of option domains."
        ) from None
    loaded: list[list[Any]] = []
    for path in fonts:
        try:
            sizes = [ImageFont.truetype(str(path), size) for size in SIZES]
        except OSError:  # a broken file, or a format that this FreeType does not know
            continue
        if _has_digits(sizes[0]):
            loaded.append(sizes)
    return loaded or [[ImageFont.load_default(size) for size in SIZES]]


def _has_digits(font: FreeTypeFont) -> bool:
    """Ten different, visible glyphs: a font without digits draws ten equal boxes."""
    glyphs = {bytes(font.getmask(str(digit))) for digit in range(10)}
    return len(glyphs) == 10 and all(any(glyph) for glyph in glyphs)


def _mask(label: int, font: FreeTypeFont, rng: np.random.Generator) -> NDArray[np.float32]:
    """Coverage in [0, 1] of the stroke, shape (28, 28): the digit, perhaps parts of neighbours."""
    from PIL import Image, ImageDraw, ImageFilter

    canvas = Image.new("L", (CANVAS, CANVAS))
    draw = ImageDraw.Draw(canvas)
    x, y = CANVAS / 2 + rng.uniform(-4, 4, size=2)
    draw.text((x, y), str(label), fill=255, font=font, anchor="mm")
    width = font.getlength(str(label))
    for side in (-1, 1):
        if rng.random() < 0.3:
            other = str(rng.integers(10))
            place = x + side * (width + font.getlength(other)) / 2
            draw.text((place, y), other, fill=255, font=font, anchor="mm")
    canvas = canvas.rotate(rng.uniform(-15, 15), resample=Image.Resampling.BILINEAR)
    canvas = canvas.filter(ImageFilter.GaussianBlur(rng.uniform(0.0, 2.0)))
    pixels = np.asarray(canvas, dtype=np.float32) / 255.0
    shrunk: NDArray[np.float32] = pixels.reshape(SIDE, 2, SIDE, 2).mean(axis=(1, 3))
    return shrunk


def _paint(mask: NDArray[np.float32], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Stroke and background in two random colours that can be told apart, with a little noise."""
    while True:
        stroke, ground = rng.uniform(0, 255, size=(2, 3))
        if abs(stroke.mean() - ground.mean()) >= MIN_CONTRAST:
            break
    image = ground + mask[..., None] * (stroke - ground) + rng.normal(0, 4, size=(SIDE, SIDE, 3))
    painted: NDArray[np.uint8] = image.clip(0, 255).astype(np.uint8)
    return painted
