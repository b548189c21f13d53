"""Read an image or mask file as the model sees it; images are opened only here.

Images may have 8 or 16 bits, grey or colour, a palette, transparency, CMYK or several pages. A
choice made in reading them is a *trait* of the file and is shown to the user.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from coterie.tasks.base import TaskError
from coterie.tasks.images.scale import Scale
from coterie.tasks.problems import IGNORED

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (
    *(".png", ".jpg", ".jpeg", ".jfif", ".jpe", ".bmp", ".tif", ".tiff", ".webp", ".pgm", ".ppm"),
)

ENDS = {"PNG": b"IEND", "JPEG": b"\xff\xd9", "MPO": b"\xff\xd9"}
"""Marker at the end of a complete file, by format; a few bytes may follow."""
END_BYTES = 64
ORIENTATION: Final = 0x0112
"""EXIF tag."""
BITS: Final = 0x0102
PHOTOMETRIC: Final = 0x0106
"""TIFF tag; 0: white is 0."""
TRAITS = {
    "transparent": "transparency: it is read on a white background",
    "cmyk": "CMYK colours: converted to RGB without a colour profile",
    "pages": "several pages: only the first one is read",
}
"""Trait → message to the user."""
SHOWN = 5
"""Mask values that an error lists."""


class UnreadableError(TaskError):
    """A file that cannot be read, which a silo may choose to leave out."""


@dataclass(frozen=True)
class Picture:
    """An image as it was read, with keys of ``TRAITS``.

    ``values`` are (C, H, W), or (0,) if only the header was read; ``size`` is width and height of
    the file's image when upright.
    """

    values: NDArray[np.float32]
    size: tuple[int, int]
    traits: frozenset[str]


@dataclass(frozen=True)
class Opener:
    """A reader of images and masks.

    ``shape`` is channels (1 or 3), height, width; ``scale`` is for pixels 0–255, channels last.
    ``codes`` maps a mask value to a class number, or ``IGNORED``; other values are class numbers.
    """

    shape: tuple[int, ...]
    scale: Scale
    classes: tuple[str, ...] = ()
    codes: Mapping[int, int] = field(default_factory=dict)

    def pixels(self, path: Path) -> NDArray[np.float32]:
        """Return an image (C, H, W), upright, converted, resized and scaled.

        Raises ``UnreadableError``, which names the file.
        """
        return self.open(path).values

    def open(self, path: Path) -> Picture:
        """Return the image of ``pixels`` with its size and traits."""

        def see(image: Image.Image) -> Picture:
            traits = _traits(image)
            image.load()
            upright = _turned(_from_0_to_255(image, self._mode), _orientation(image))
            values = self.scale(self._fitted(upright)).transpose(2, 0, 1)
            return Picture(np.ascontiguousarray(values, np.float32), upright.size, traits)

        found: Picture = self._read(path, see)
        return found

    @property
    def _mode(self) -> str:
        return "L" if self.shape[0] == 1 else "RGB"

    def _fitted(self, image: Image.Image) -> NDArray[np.float32]:
        """Resize to (H, W, C); channels of a grey image with more than 8 bits are identical."""
        from PIL import Image

        channels, height, width = self.shape
        if image.size != (width, height):
            image = image.resize((width, height), Image.Resampling.BILINEAR)
        values = np.asarray(image, np.float32).reshape(height, width, -1)
        return np.broadcast_to(values, (height, width, channels))

    def mask(self, path: Path) -> NDArray[np.int64]:
        """Return class numbers (H, W), resized without mixing them.

        Raises ``UnreadableError``, or ``TaskError`` for other numbers; both name the file.
        """
        return self._mask(path)[0]

    def _mask(self, path: Path) -> tuple[NDArray[np.int64], tuple[int, int]]:
        from PIL import Image

        _, height, width = self.shape

        def see(image: Image.Image) -> tuple[NDArray[Any], tuple[int, int]]:
            image.load()
            flat = _turned(_one_number_a_pixel(image), _orientation(image))
            size = flat.size
            if size != (width, height):
                flat = flat.resize((width, height), Image.Resampling.NEAREST)
            return np.asarray(flat).astype(np.int64), size

        found, size = self._read(path, see)
        return self._numbers(found, path), size

    def _numbers(self, found: NDArray[np.int64], path: Path) -> NDArray[np.int64]:
        """Convert mask values to class numbers."""
        count = len(self.classes)
        known = np.isin(found, [*range(count), *self.codes])
        if not known.all():
            odd = np.unique(found[~known])
            raise TaskError(
                f"mask {str(path)!r} contains "
                f"{', '.join(map(str, odd[:SHOWN]))}{', …' if len(odd) > SHOWN else ''}. Its "
                f"values must be the numbers of the declared classes, 0 to {count - 1} "
                f"({', '.join(self.classes)}). If a value means one of them, or pixels without "
                f"a label, set it under [data.codes.mask] in silo.toml: {odd[0]} = "
                f'"{self.classes[-1]}", or {odd[0]} = "ignore".'
            )
        numbers = found.copy()
        for code, number in self.codes.items():
            numbers[found == code] = number
        if (numbers == IGNORED).all():
            raise TaskError(
                f"all pixels of mask {str(path)!r} are to be ignored, so there is nothing to learn "
                "from its image. Remove both."
            )
        return numbers

    def pair(self, path: Path, mask: Path) -> tuple[Picture, NDArray[np.int64]]:
        """Return an image and its mask.

        Raises as ``pixels`` and ``mask``, and ``TaskError`` if their proportions differ.
        """
        picture, (numbers, size) = self.open(path), self._mask(mask)
        _check_fit(path, picture.size, mask, size)
        return picture, numbers

    def check(self, path: Path, mask: Path | None = None) -> Picture:
        """Check that an image is probably readable without decoding it; a mask is decoded.

        Raises ``UnreadableError`` if it is not, and ``TaskError`` as ``pair``.
        """

        def look(image: Image.Image) -> Picture:
            traits = _traits(image)
            if image.mode[0] in "IF":
                _from_0_to_255(image, "L")
            elif end := ENDS.get(image.format or ""):
                with path.open("rb") as file:
                    file.seek(-min(END_BYTES, path.stat().st_size), os.SEEK_END)
                    if end not in file.read():
                        image.load()  # it is cut off, or something was written behind it
            if mask is not None and image.format == "TIFF":
                image.load()  # Pillow turns a TIFF while it loads it
            width, height = image.size
            size = (height, width) if _orientation(image) in range(5, 9) else (width, height)
            return Picture(np.empty(0, np.float32), size, traits)

        found: Picture = self._read(path, look)
        if mask is not None:
            _check_fit(path, found.size, mask, self._mask(mask)[1])
        return found

    def _read(self, path: Path, see: Callable[[Image.Image], Any]) -> Any:
        from PIL import Image

        try:
            # Not by its name: Pillow would map a grey TIFF into memory, and turn it wrongly.
            with path.open("rb") as file, Image.open(file) as image:
                return see(image)
        except Image.DecompressionBombError as error:
            raise UnreadableError(
                f"image {str(path)!r} is too large: {error} Make it smaller; the task uses "
                f"{self.shape[2]}x{self.shape[1]} pixels of it."
            ) from None
        except Exception as error:  # of a damaged file Pillow raises all sorts of things
            said = str(error) or type(error).__name__
            raise UnreadableError(f"image {str(path)!r} cannot be read: {said}.") from None


def _check_fit(path: Path, size: tuple[int, int], mask: Path, mask_size: tuple[int, int]) -> None:
    """Check that mask and image have the same proportions, to within a pixel; sizes may differ."""
    (width, height), (wide, high) = size, mask_size
    if abs(width * high - wide * height) > max(width, height, wide, high):
        raise TaskError(
            f"mask {str(mask)!r} is {wide}x{high} pixels and its image {str(path)!r} "
            f"{width}x{height} (width x height, upright): their proportions differ, so they do "
            "not match. Export both again with the same orientation and the same crop."
        )


def _traits(image: Image.Image) -> frozenset[str]:
    """Return an image's traits, from its header only."""
    found = {
        "transparent": _has_transparency(image),
        "cmyk": image.mode == "CMYK",
        "pages": _pages(image) > 1,
    }
    return frozenset(trait for trait, has in found.items() if has)


def _has_transparency(image: Image.Image) -> bool:
    return image.mode in ("LA", "La", "PA", "RGBA", "RGBa") or "transparency" in image.info


def _pages(image: Image.Image) -> int:
    try:
        return int(getattr(image, "n_frames", 1))
    except Exception:  # a later page is damaged, which is not read anyway
        return 1


def _orientation(image: Image.Image) -> int:
    """Return the EXIF orientation, 1–8; 1 is upright, as is a TIFF that Pillow has loaded."""
    from PIL.Image import Image as Plain

    try:
        # Not the method of a PNG, which would decode the whole image.
        return int(Plain.getexif(image).get(ORIENTATION, 1))
    except Exception:  # an image whose EXIF data are damaged says nothing of how it was held
        return 1


def _turned(image: Image.Image, orientation: int) -> Image.Image:
    """Return the image upright. ``ImageOps.exif_transpose`` fails on odd EXIF tags."""
    from PIL.Image import Transpose

    turns = {
        2: Transpose.FLIP_LEFT_RIGHT,
        3: Transpose.ROTATE_180,
        4: Transpose.FLIP_TOP_BOTTOM,
        5: Transpose.TRANSPOSE,
        6: Transpose.ROTATE_270,
        7: Transpose.TRANSVERSE,
        8: Transpose.ROTATE_90,
    }
    return image.transpose(turns[orientation]) if orientation in turns else image


def _from_0_to_255(image: Image.Image, mode: str) -> Image.Image:
    """Convert to this mode; with more than 8 bits to mode ``F``, which keeps the precision.

    Raises ``ValueError`` if it is unknown which values are black and white.
    """
    from PIL import Image

    # Which of the two a 16-bit PNG is depends on the version of Pillow; in a PGM, Pillow has scaled
    # what the file calls white to 65535.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        values = np.asarray(image).astype(np.float32)
        if isinstance(clear := image.info.get("transparency"), int):
            values = np.where(values == clear, np.float32(65535), values)
        # Pillow returns the stored numbers of a TIFF with more than 8 bits.
        tags: Mapping[int, Any] = getattr(image, "tag_v2", {})
        white = 2 ** tags.get(BITS, (16,))[0] - 1
        values = white - values if tags.get(PHOTOMETRIC) == 0 else values
        return Image.fromarray(values / np.float32(white / 255))
    if image.mode[0] in "IF":
        raise ValueError(
            f"image mode {image.mode!r} is not supported (no defined black and white). Save it "
            "with 8 bits, or as a 16-bit grey PNG in which 65535 is white"
        )
    return (_on_white(image) if _has_transparency(image) else image).convert(mode)


def _on_white(image: Image.Image) -> Image.Image:
    """Return the image in front of white, or unchanged if nothing is transparent."""
    from PIL import Image

    layers = image.convert("RGBA")
    if layers.getchannel("A").getextrema() == (255, 255):
        return image
    return Image.alpha_composite(Image.new("RGBA", layers.size, "white"), layers).convert("RGB")


def _one_number_a_pixel(image: Image.Image) -> Image.Image:
    """Return a mask's one band, or one of identical bands; else raise ``ValueError``."""
    if image.mode in ("1", "L", "P", "I") or image.mode.startswith("I;16"):
        return image
    if image.mode in ("LA", "RGB", "RGBA"):
        bands = image.split()
        colours = bands[: 3 if image.mode.startswith("RGB") else 1]
        opaque = all(band.getextrema() == (255, 255) for band in bands[len(colours) :])
        if opaque and all(band.tobytes() == colours[0].tobytes() for band in colours):
            return colours[0]
    raise ValueError(
        f"its mode is {image.mode!r}; a mask has one number per pixel, and this one has colours "
        "or transparency. Save it as a grey or palette PNG"
    )
