"""Images of one's own in a folder with one sub-folder per class. See ``tasks.own.declared``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from coterie.tasks.base import Option, Samples, TaskError, read_options
from coterie.tasks.images.scale import Scale, read_scale
from coterie.tasks.own.declared import Declaration, DeclaredTask, Size

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".pgm", ".ppm")

DEEP = 257
"""What 16-bit grey values are divided by: 65535 becomes 255."""


class ImageFolderDeclaration(Declaration):
    """``shape`` is channels (1 grey, 3 colour), height, width; images are resized to it.

    ``normalise`` is what ``coterie.tasks.images.scale.read_scale`` takes.
    """

    kind: Literal["image-folder"]
    shape: tuple[Annotated[int, Field(ge=1, le=3)], Size, Size]
    normalise: str = "symmetric"

    @model_validator(mode="after")
    def _check_scale(self) -> ImageFolderDeclaration:
        try:
            self.scale()
        except TaskError as error:
            raise ValueError(str(error)) from None
        return self

    def scale(self) -> Scale:
        """Of an image with its channels last."""
        return read_scale(self.normalise, 1 if self.shape[0] == 1 else 3)


@dataclass(frozen=True)
class Files:
    """Image files and their labels; ``part`` is ``train``, ``test`` or empty."""

    paths: list[Path]
    y: NDArray[np.int64]
    parts: list[str]

    def take(self, rows: NDArray[np.intp]) -> Files:
        """These rows only."""
        return Files([self.paths[i] for i in rows], self.y[rows], [self.parts[i] for i in rows])


class ImageFolder(DeclaredTask):
    """``DATA/<class>/*.png``, or ``DATA/train/<class>/…`` and ``DATA/test/<class>/…``."""

    declaration: ImageFolderDeclaration

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height, width."""
        channels = 1 if self.declaration.shape[0] == 1 else 3
        return (channels, *self.declaration.shape[1:])

    def expected(self) -> str:
        """See ``DeclaredTask``."""
        return f"a folder with one sub-folder of images per class ({', '.join(self.classes)})"

    def read(self, place: Path, options: Mapping[str, Any]) -> Files:
        """Find the images; they are opened later."""
        if not place.is_dir():
            raise TaskError(f"{str(place)!r} is no folder. Expected {self.expected()}.")
        parted = (place / "train").is_dir() and (place / "test").is_dir()
        found: list[tuple[Path, str, str]] = []
        for part in ("train", "test") if parted else ("",):
            root = place / part
            for folder in sorted(p for p in root.iterdir() if p.is_dir()):
                found += [(path, folder.name, part) for path in _images(folder)]
        if not found:
            raise TaskError(
                f"there are no images in {str(place)!r}. Expected {self.expected()}; images end in "
                f"{', '.join(SUFFIXES)}."
            )
        labels = self.labels([name for _, name, _ in found], str(place))
        return Files([path for path, _, _ in found], labels, [part for _, _, part in found])

    def parts(self, whole: Files) -> tuple[Files, Files] | None:
        """``train`` and ``test``, where the folder has both."""
        if not whole.parts[0]:
            return None
        is_test = np.array([part == "test" for part in whole.parts])
        return whole.take(np.flatnonzero(~is_test)), whole.take(np.flatnonzero(is_test))

    def samples(self, train: Files, test: Files) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Open, convert and resize."""
        return self._open(train.paths), self._open(test.paths)

    def inputs(self, file: Path, options: Mapping[str, Option]) -> Samples:
        """One image, or all in a folder and its sub-folders, whatever these are called.

        Raises:
            TaskError: there is none, or one cannot be read.
        """
        read_options(self.name, options, self.options)
        if not file.is_dir():
            return Samples(self._open([file]), [file.name])
        paths = _images(file)
        if not paths:
            raise TaskError(f"there are no images in {file}; they end in {', '.join(SUFFIXES)}.")
        return Samples(self._open(paths), [str(path.relative_to(file)) for path in paths])

    def prepared(self, options: Mapping[str, Option]) -> Mapping[str, Any]:
        """See ``Task``."""
        channels, height, width = self.shape
        return {
            "colour": "grey" if channels == 1 else "red, green, blue",
            "axes": "channels, height, width",
            "size": f"{height} × {width} pixels (height × width), resized bilinearly",
            **self.declaration.scale().described(),
        }

    def _open(self, paths: list[Path]) -> NDArray[np.float32]:
        from PIL import Image, UnidentifiedImageError

        channels, height, width = self.shape
        scale = self.declaration.scale()
        pixels = np.empty((len(paths), channels, height, width), np.float32)
        for row, path in enumerate(paths):
            try:
                with Image.open(path) as image:
                    fitted = _from_0_to_255(image, "L" if channels == 1 else "RGB")
                    if fitted.size != (width, height):
                        fitted = fitted.resize((width, height), Image.Resampling.BILINEAR)
                    array = np.asarray(fitted, np.float32)
            except Image.DecompressionBombError as error:
                raise TaskError(
                    f"image {str(path)!r} is too large: {error} Make it smaller; the task sees "
                    f"{width}x{height} pixels of it."
                ) from None
            except (OSError, UnidentifiedImageError, ValueError, SyntaxError) as error:
                raise TaskError(f"image {str(path)!r} cannot be read: {error}.") from None
            seen = scale(array)
            pixels[row] = seen if seen.ndim == 2 else seen.transpose(2, 0, 1)
        return pixels


def _from_0_to_255(image: Image.Image, mode: str) -> Image.Image:
    """The image in this mode; one of more than 8 bits in mode ``F``, with what 8 bits would lose.

    Raises:
        ValueError: nothing says which of its values are black and white.
    """
    from PIL import Image

    # Which of the two a 16-bit PNG is depends on the version of Pillow; in a PGM, Pillow has scaled
    # what the file calls white to 65535.
    if image.mode.startswith("I;16") or (image.mode == "I" and image.format in ("PNG", "PPM")):
        return Image.fromarray(np.asarray(image).astype(np.float32) / np.float32(DEEP))
    if image.mode[0] in "IF":
        raise ValueError(
            f"its mode is {image.mode!r}, of which nothing says what is black and what is white. "
            "Save it with 8 bits, or as a 16-bit grey PNG in which 65535 is white"
        )
    return image.convert(mode)


def _images(folder: Path) -> list[Path]:
    """All in a folder and its sub-folders, also in those that are links; in each folder once."""
    found: list[Path] = []
    seen: set[str] = set()
    for place, inner, names in os.walk(folder, followlinks=True):
        if (real := os.path.realpath(place)) in seen:
            inner.clear()  # a link that leads back
            continue
        seen.add(real)
        inner.sort()
        found += [Path(place, name) for name in names]
    return sorted(p for p in found if p.suffix.lower() in SUFFIXES and p.is_file())
