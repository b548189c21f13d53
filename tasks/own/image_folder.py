"""Images of one's own in a folder with one sub-folder per class. See ``tasks.own.declared``."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, model_validator

from coterie.tasks.base import (
    Option,
    Persons,
    Samples,
    SiloData,
    StreamedData,
    TaskError,
    place_of,
    read_options,
)
from coterie.tasks.images.scale import Scale, read_scale
from coterie.tasks.own.declared import OPTIONS, Declaration, DeclaredTask, Size, persons_of
from coterie.tasks.own.targets import MaskTarget, Target
from coterie.tasks.own.whose import keys_in_paths, repeated_in_paths

if TYPE_CHECKING:
    from PIL import Image

SUFFIXES = (".png", ".jpg", ".jpeg", ".bmp", ".tif", ".tiff", ".webp", ".pgm", ".ppm")

DEEP = 257
"""What 16-bit grey values are divided by: 65535 becomes 255."""
HELD_BYTES = 512 << 20
"""Images that would take more are read as they are needed."""
ENDS = {"PNG": b"IEND", "JPEG": b"\xff\xd9"}
"""With what a whole file of a format ends, but for a few bytes."""
END_BYTES = 64


class ImageFolderDeclaration(Declaration):
    """``shape`` is channels (1 grey, 3 colour), height, width; images are resized to it.

    ``normalise`` is what ``coterie.tasks.images.scale.read_scale`` takes.
    """

    LATER: ClassVar[tuple[str, ...]] = (*Declaration.LATER, "target")

    kind: Literal["image-folder"]
    shape: tuple[Annotated[int, Field(ge=1, le=3)], Size, Size]
    normalise: str = "symmetric"
    target: MaskTarget | None = None

    @property
    def answer(self) -> Target | None:
        """See ``Declaration``."""
        return self.target

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
    """Image files and their targets: numbers of classes, or files of masks.

    ``part`` is ``train``, ``test`` or empty.
    """

    paths: list[Path]
    labels: NDArray[np.int64]
    parts: list[str]
    masks: list[Path] | None = None
    persons: Persons | None = None

    @property
    def y(self) -> NDArray[np.int64]:
        """(n,) Of classes; of masks zeros, of which nothing can be told before they are read."""
        return self.labels

    def take(self, rows: NDArray[np.intp]) -> Files:
        """These rows only."""
        return Files(
            [self.paths[i] for i in rows],
            self.labels[rows],
            [self.parts[i] for i in rows],
            None if self.masks is None else [self.masks[i] for i in rows],
            None if self.persons is None else self.persons[rows],
        )


@dataclass(frozen=True)
class Opener:
    """Opens images as the model sees them.

    Attributes:
        declaration: says how.
        shape: channels, height, width.
    """

    declaration: ImageFolderDeclaration
    shape: tuple[int, ...]

    @cached_property
    def _scale(self) -> Scale:
        return self.declaration.scale()

    def pixels(self, path: Path) -> NDArray[np.float32]:
        """(C, H, W) An image, converted, resized and scaled.

        Raises:
            TaskError: names the file that cannot be read.
        """
        from PIL import Image

        channels, height, width = self.shape

        def fitted(image: Image.Image) -> NDArray[Any]:
            known = _from_0_to_255(image, "L" if channels == 1 else "RGB")
            if known.size != (width, height):
                known = known.resize((width, height), Image.Resampling.BILINEAR)
            return np.asarray(known, np.float32)

        seen = self._scale(self._read(path, fitted))
        found: NDArray[np.float32] = seen[None] if seen.ndim == 2 else seen.transpose(2, 0, 1)
        return np.ascontiguousarray(found, np.float32)

    def mask(self, path: Path) -> NDArray[np.int64]:
        """(H, W) Numbers of classes, resized without mixing them.

        Raises:
            TaskError: names the file that cannot be read, or holds other numbers.
        """
        from PIL import Image

        _, height, width = self.shape

        def numbers(image: Image.Image) -> NDArray[Any]:
            if image.mode not in ("1", "L", "P", "I") and not image.mode.startswith("I;16"):
                raise ValueError(
                    f"its mode is {image.mode!r}; a mask has one number per pixel. Save it as a "
                    "grey or palette PNG"
                )
            if image.size != (width, height):
                image = image.resize((width, height), Image.Resampling.NEAREST)
            return np.asarray(image).astype(np.int64)

        found: NDArray[np.int64] = self._read(path, numbers)
        count = len(self.declaration.classes)
        if found.min() < 0 or found.max() >= count:
            odd = int(found[(found < 0) | (found >= count)][0])
            raise TaskError(
                f"mask {str(path)!r} holds {odd}. Its values must be the numbers of the declared "
                f"classes, 0 to {count - 1} ({', '.join(self.declaration.classes)})."
            )
        return found

    def check(self, path: Path) -> None:
        """See without decoding it whether an image can probably be read.

        Raises:
            TaskError: it cannot.
        """

        def look(image: Image.Image) -> None:
            if image.mode[0] in "IF":
                _from_0_to_255(image, "L")
            elif end := ENDS.get(image.format or ""):
                with path.open("rb") as file:
                    file.seek(-min(END_BYTES, path.stat().st_size), os.SEEK_END)
                    if end not in file.read():
                        image.load()  # it is cut off, or something was written behind it

        self._read(path, look)

    def _read(self, path: Path, see: Any) -> Any:
        from PIL import Image, UnidentifiedImageError

        try:
            with Image.open(path) as image:
                return see(image)
        except Image.DecompressionBombError as error:
            raise TaskError(
                f"image {str(path)!r} is too large: {error} Make it smaller; the task sees "
                f"{self.shape[2]}x{self.shape[1]} pixels of it."
            ) from None
        except (OSError, UnidentifiedImageError, ValueError, SyntaxError) as error:
            raise TaskError(f"image {str(path)!r} cannot be read: {error}.") from None


class Pictures:
    """A dataset of images that are opened when they are asked for.

    ``targets`` are there where they are classes; masks are read with their images.
    """

    def __init__(self, files: Files, opener: Opener) -> None:
        self.files = files
        self.opener = opener
        if files.masks is None:
            self.targets = files.labels

    def __len__(self) -> int:
        return len(self.files.paths)

    def __getitem__(self, row: int) -> tuple[NDArray[np.float32], Any]:
        pixels = self.opener.pixels(self.files.paths[row])
        masks = self.files.masks
        return pixels, self.files.labels[row] if masks is None else self.opener.mask(masks[row])


class ImageFolder(DeclaredTask):
    """``DATA/<class>/*.png``, or ``DATA/train/<class>/…`` and ``DATA/test/<class>/…``.

    For masks ``images/`` and ``masks/`` stand in place of the classes. Beside the options of every
    declared task:

    Options of a silo:
        stream: read images as they are needed, also where memory would hold them.
        skip-unreadable: leave out images that cannot be read, and say how many.
    """

    declaration: ImageFolderDeclaration
    options: Mapping[str, Option] = {**OPTIONS, "stream": False, "skip-unreadable": False}

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height, width."""
        channels = 1 if self.declaration.shape[0] == 1 else 3
        return (channels, *self.declaration.shape[1:])

    def expected(self) -> str:
        """See ``DeclaredTask``."""
        if self.declaration.target is not None:
            return (
                "a folder with the sub-folders images and masks, of which masks has a PNG of class "
                "numbers for every image, under the same name"
            )
        return f"a folder with one sub-folder of images per class ({', '.join(self.classes)})"

    def load(self, options: Mapping[str, Option]) -> SiloData | StreamedData:
        """See ``DeclaredTask``; datasets if memory should not hold the images.

        Raises:
            TaskError: names the file, and what was expected in it.
        """
        chosen = read_options(self.name, options, self.options)
        train, test = self.read_both(chosen)
        streamed = chosen["stream"] or self._bytes(train) + self._bytes(test) > HELD_BYTES
        if chosen["skip-unreadable"]:
            # What is held is decoded now, so that nothing is left that would fail later.
            train, test = (self._readable(part, decode=not streamed) for part in (train, test))
        elif streamed:
            for path in (*train.paths, *test.paths):
                self._opener.check(path)
        if not streamed:
            return self.held(train, test)
        self._notes.append("images are read as they are needed")
        opener = self._opener
        pictures = Pictures(train, opener), Pictures(test, opener)
        return StreamedData(*pictures, persons=persons_of(train, test))  # type: ignore[arg-type]

    def held(self, train: Files, test: Files) -> SiloData:
        """See ``DeclaredTask``."""
        if train.masks is None or test.masks is None:
            return super().held(train, test)
        x_train, x_test = self.samples(train, test)
        masks = (np.stack([self._opener.mask(path) for path in of]) for of in
                 (train.masks, test.masks))  # fmt: skip
        y_train, y_test = masks
        return SiloData(x_train, y_train, x_test, y_test, persons=persons_of(train, test))

    def read(self, place: Path, options: Mapping[str, Any]) -> Files:
        """Find the images; they are opened later."""
        if not place.is_dir():
            raise TaskError(f"{str(place)!r} is no folder. Expected {self.expected()}.")
        parted = (place / "train").is_dir() and (place / "test").is_dir()
        parts = [(place / part, part) for part in (("train", "test") if parted else ("",))]
        if self.declaration.target is not None:
            return self._with_masks(parts, place)
        found: list[tuple[Path, str, str]] = []
        for root, part in parts:
            for folder in sorted(p for p in root.iterdir() if p.is_dir()):
                found += [(path, folder.name, part) for path in _images(folder)]
        if not found:
            raise self._no_images(place)
        labels = self.labels([name for _, name, _ in found], str(place))
        return Files([path for path, _, _ in found], labels, [part for _, _, part in found])

    def _with_masks(self, parts: Sequence[tuple[Path, str]], place: Path) -> Files:
        found: list[tuple[Path, Path, str]] = []
        for root, part in parts:
            for path in _images(root / "images"):
                mask = (root / "masks" / path.relative_to(root / "images")).with_suffix(".png")
                if not mask.is_file():
                    raise TaskError(
                        f"image {str(path)!r} has no mask: there is no {str(mask)!r}. Expected "
                        f"{self.expected()}."
                    )
                found.append((path, mask, part))
        if not found:
            raise self._no_images(place)
        return Files(
            [path for path, _, _ in found],
            np.zeros(len(found), np.int64),
            [part for _, _, part in found],
            [mask for _, mask, _ in found],
        )

    def _no_images(self, place: Path) -> TaskError:
        return TaskError(
            f"there are no images in {str(place)!r}. Expected {self.expected()}; images end in "
            f"{', '.join(SUFFIXES)}."
        )

    def keys(self, of: Files, place: Path, options: Mapping[str, Any], which: str) -> Sequence[str]:
        """See ``DeclaredTask``: what the pattern ``group`` finds in the path of each image."""
        paths, depth = _below(place, of)
        return keys_in_paths(paths, depth, options["group"])

    def look_for_persons(self, options: Mapping[str, Option]) -> list[str]:
        """See ``DeclaredTask``: names of images, or of their folders, that begin alike."""
        chosen = read_options(self.name, options, self.options)
        if chosen["group"] or not chosen["data"]:
            return []
        place = place_of(chosen["data"])
        return repeated_in_paths(*_below(place, self.read(place, chosen)))

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

    @property
    def _opener(self) -> Opener:
        return Opener(self.declaration, self.shape)

    def _open(self, paths: Sequence[Path]) -> NDArray[np.float32]:
        opener = self._opener
        pixels = np.empty((len(paths), *self.shape), np.float32)
        for row, path in enumerate(paths):
            pixels[row] = opener.pixels(path)
        return pixels

    def _bytes(self, part: Files) -> int:
        """That its images, and masks, would take in memory."""
        channels, height, width = self.shape
        return len(part.paths) * height * width * (4 * channels + 8 * (part.masks is not None))

    def _readable(self, part: Files, *, decode: bool) -> Files:
        """Without the images that cannot be read; says how many they were."""
        opener, kept = self._opener, []
        for row, path in enumerate(part.paths):
            try:
                opener.pixels(path) if decode else opener.check(path)
                kept.append(row)
            except TaskError as error:
                last = str(error)
        if skipped := len(part.paths) - len(kept):
            said = "1 unreadable image was" if skipped == 1 else f"{skipped} unreadable images were"
            self._warnings.append(f"{said} left out; the last: {last}")
        return part.take(np.array(kept, np.intp)) if skipped else replace(part)


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


def _below(place: Path, files: Files) -> tuple[list[Path], int]:
    """Paths below the data folder, and how many folders of them lead to that of the class."""
    return [path.relative_to(place) for path in files.paths], 2 if files.parts[0] else 1


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
