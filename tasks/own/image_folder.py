"""Own images in a folder with one sub-folder per class. See ``tasks.own.declared``."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field, field_validator, model_validator

from coterie.tasks.base import Option, Persons, Samples, SiloData, StreamedData, TaskError
from coterie.tasks.images.scale import Scale, read_scale
from coterie.tasks.options import place_of, read_options
from coterie.tasks.own import layout
from coterie.tasks.own.declared import OPTIONS, Declaration, DeclaredTask, Size, persons_of
from coterie.tasks.own.dialect import OPTIONS as WRITTEN
from coterie.tasks.own.dialect import Dialect, read_dialect
from coterie.tasks.own.folders import DICOM_ADVICE, MORE, Account, Walk, by_ending, plain
from coterie.tasks.own.layout import CLASS, MASK, VAL
from coterie.tasks.own.pictures import SUFFIXES, TRAITS, Opener, Picture, UnreadableError
from coterie.tasks.own.targets import MaskTarget, Target
from coterie.tasks.own.whose import keys_in_paths, repeated_in_paths
from coterie.tasks.problems import IGNORED

HELD_BYTES = 512 << 20
"""Larger sets of images are read on demand."""
IGNORE = "ignore"
"""Meaning of a mask code for pixels without a label."""


class ImageFolderDeclaration(Declaration):
    """The declaration of an image folder.

    ``shape`` is channels (1 grey, 3 colour), height, width; images are resized to it.
    ``normalise``: see ``coterie.tasks.images.scale.read_scale``.
    """

    kind: Literal["image-folder"]
    shape: tuple[Annotated[int, Field(ge=1, le=3)], Size, Size]
    normalise: str = "symmetric"
    target: MaskTarget | None = None

    @property
    def answer(self) -> Target | None:
        return self.target

    @field_validator("shape")
    @classmethod
    def _grey_or_colour(cls, shape: tuple[int, int, int]) -> tuple[int, int, int]:
        if shape[0] == 2:
            raise ValueError("the first number must be the channels: 1 (grey) or 3 (colour). Got 2")
        return shape

    @model_validator(mode="after")
    def _check_scale(self) -> ImageFolderDeclaration:
        try:
            self.scale()
        except TaskError as error:
            raise ValueError(str(error)) from None
        return self

    def scale(self) -> Scale:
        """Return the scale of an image with its channels last."""
        return read_scale(self.normalise, self.shape[0])


@dataclass(frozen=True)
class Files:
    """Image files and their targets: class numbers, or mask files.

    Attributes:
        labels: (n,) class numbers; zeros for masks.
        parts: ``train``, ``test`` or empty, for each image.
        masks: the mask file of each image; None: targets are classes.
        validation: files that the folder keeps for validation, or None.
    """

    paths: list[Path]
    labels: NDArray[np.int64]
    parts: list[str]
    masks: list[Path] | None = None
    account: Account = field(default_factory=lambda: Account(Path()), compare=False)
    validation: Files | None = None
    persons: Persons | None = None

    @property
    def y(self) -> NDArray[np.int64]:
        """(n,) Class numbers; zeros for masks, which are unknown before they are read."""
        return self.labels

    def take(self, rows: NDArray[np.intp]) -> Files:
        """Return only these rows."""
        return replace(
            self,
            paths=[self.paths[i] for i in rows],
            labels=self.labels[rows],
            parts=[self.parts[i] for i in rows],
            masks=None if self.masks is None else [self.masks[i] for i in rows],
            persons=None if self.persons is None else self.persons[rows],
        )

    def each(self) -> Iterable[tuple[Path, Path | None]]:
        """Iterate over the images, each with its mask or None."""
        return zip_longest(self.paths, self.masks or ())

    def files(self) -> set[Path]:
        """Return all images and masks."""
        return {*self.paths, *(self.masks or ())}


class Pictures:
    """A dataset of images that are opened on demand.

    Only classes are in ``targets``; masks are read with their images.
    """

    def __init__(self, files: Files, opener: Opener) -> None:
        self.paths, self.labels, self.masks = files.paths, files.labels, files.masks
        self.opener = opener
        if files.masks is None:
            self.targets = files.labels

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, row: int) -> tuple[NDArray[np.float32], Any]:
        if self.masks is None:
            return self.opener.pixels(self.paths[row]), self.labels[row]
        picture, mask = self.opener.pair(self.paths[row], self.masks[row])
        return picture.values, mask


class ImageFolder(DeclaredTask):
    """Images in ``DATA/<class>/*.png``, or ``DATA/train/<class>/…`` and ``DATA/test/<class>/…``.

    For masks, ``images/`` and ``masks/`` replace the class folders. Images in ``val``, next to
    ``train`` and ``test``, are for runs with validation. These options add to those of every
    declared task:

    Options of a silo:
        stream: read images on demand, even if they would fit in memory.
        skip-unreadable: leave out files and folders that cannot be read, and report how many.
        codes: ``class``: folder name → declared class; ``mask``: mask value → declared class, or
            ``ignore``.
        mask-names: the name of a mask, with ``*`` for its image's name.
    """

    declaration: ImageFolderDeclaration
    options: Mapping[str, Option] = {
        **OPTIONS,
        "stream": False,
        "skip-unreadable": False,
        "codes": "",
        "mask-names": "*",
    }
    _opener: Opener

    def __init__(self, declaration: ImageFolderDeclaration) -> None:
        super().__init__(declaration)
        self._accounts: list[Account] = []
        self._traits: dict[str, set[Path]] = defaultdict(set)

    @property
    def shape(self) -> tuple[int, ...]:
        """Channels, height, width."""
        return self.declaration.shape

    def expected(self) -> str:
        if self.declaration.target is not None:
            return (
                "a folder with the sub-folders images and masks, where masks has a PNG of "
                "class numbers for every image, with the same name"
            )
        return f"a folder with one sub-folder of images per class ({', '.join(self.classes)})"

    def load(self, options: Mapping[str, Option]) -> SiloData | StreamedData:
        """Load this silo's data, as datasets if memory should not hold the images."""
        chosen = read_options(self.name, options, self.options)
        self._begin(chosen)
        train, test = self.read_both(chosen)
        self._warn_of_both_sides(train, chosen)
        parts = [train, test, *([] if train.validation is None else [train.validation])]
        streamed = bool(chosen["stream"]) or sum(map(self._bytes, parts)) > HELD_BYTES
        skip = bool(chosen["skip-unreadable"])
        if streamed or skip:
            # What is held is decoded now, so that nothing is left that would fail later.
            look = self._opener.check if streamed else self._decoded
            parts = [self._readable(part, look, skip=skip) for part in parts]
        self._settle(parts)
        if streamed:
            self._notes.append("images are read as they are needed")
            made: list[Any] = [Pictures(part, self._opener) for part in parts]
            whose = persons_of(parts[0], parts[1])
            val = made[2] if made[2:] else None
            return StreamedData(made[0], made[1], val=val, persons=whose)
        data = self.held(parts[0], parts[1])
        if not parts[2:]:
            return data
        x_val, y_val = self._arrays(parts[2])
        return replace(data, x_val=x_val, y_val=y_val)

    def _warn_of_both_sides(self, train: Files, chosen: Mapping[str, Any]) -> None:
        """Warn about persons with images for both training and validation."""
        if train.validation is None or not chosen["group"]:
            return
        place = place_of(chosen["data"])
        own, apart = (
            set(self.keys(part, place, chosen, which))
            for part, which in ((train, layout.TRAIN), (train.validation, VAL))
        )
        if both := len(own & apart):
            are = "person has" if both == 1 else "persons have"
            self._warnings.append(
                f"{both} {are} images for both training and validation: the errors by which "
                "rounds are chosen are probably too small"
            )

    def _begin(self, chosen: Mapping[str, Any]) -> None:
        self._notes, self._warnings, self._accounts = [], [], []
        self._traits.clear()
        self._opener = self._opener_of(chosen)

    def _settle(self, parts: Sequence[Files]) -> None:
        """Close the accounts of the folders that these parts come from."""
        self._accounts = list({id(part.account): part.account for part in parts}.values())
        kept = set[Path]().union(*(part.files() for part in parts))
        for account in self._accounts:
            account.keep_only(kept)
        if parts[2:]:
            self._notes.append(
                f"{len(parts[2].paths)} images in the validation folder: no run trains on them. "
                "Runs that hold out samples for validation use these instead"
            )

    def held(self, train: Files, test: Files) -> SiloData:
        if train.masks is None or test.masks is None:
            return super().held(train, test)
        whose = persons_of(train, test)
        return SiloData(*self._arrays(train), *self._arrays(test), persons=whose)

    def samples(self, train: Files, test: Files) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
        """Open, convert and resize the images."""
        return self._arrays(train)[0], self._arrays(test)[0]

    def read(self, place: Path, options: Mapping[str, Any]) -> Files:
        """Find the images; they are opened later."""
        if not place.is_dir():
            raise TaskError(f"{str(place)!r} is not a folder. Expected {self.expected()}.")
        masks = self.declaration.target is not None
        own = self._dialect(options)
        names = ("images", "masks") if masks else (*self.classes, *own.codes.get(CLASS, ()))
        walk = Walk(Account(place), bool(options["skip-unreadable"]), names)
        roots = layout.roots_of(walk, place, names)
        if masks:
            found = layout.with_masks(walk, roots, layout.read_pattern(options["mask-names"]))
        else:
            found = layout.by_class(walk, roots, self.classes, own)
        if not found:
            raise self._no_images(walk.account, layout.hint_of_parts(roots[0][2]))
        used = _files([one for one in found if one.part != VAL], walk.account)
        apart = _files([one for one in found if one.part == VAL], walk.account)
        walk.account.used.update(used.files(), apart.files())
        return replace(used, validation=apart if apart.paths else None)

    def _no_images(self, account: Account, hint: str = "") -> TaskError:
        left = f" It contains: {'; '.join(account.reasons())}." if account.left else ""
        advice = f" {DICOM_ADVICE}." if account.has_dicom else ""
        return TaskError(
            f"there are no images in {str(account.place)!r}. Expected {self.expected()}; images "
            f"end in {', '.join(SUFFIXES)}.{left}{advice}{hint}"
        )

    def keys(self, of: Files, place: Path, options: Mapping[str, Any], which: str) -> Sequence[str]:
        """Return what the pattern ``group`` finds in each image's path."""
        paths, depth = _below(place, of)
        return keys_in_paths(paths, depth, options["group"])

    def look_for_persons(self, options: Mapping[str, Option]) -> list[str]:
        """Return hints on image or folder names that may identify persons."""
        chosen = read_options(self.name, options, self.options)
        if chosen["group"] or not chosen["data"]:
            return []
        place = place_of(chosen["data"])
        return repeated_in_paths(*_below(place, self.read(place, chosen)))

    def parts(self, whole: Files) -> tuple[Files, Files] | None:
        """Return ``train`` and ``test`` if the folder has both."""
        if not whole.parts or not whole.parts[0]:
            return None
        is_test = np.array([part == layout.TEST for part in whole.parts])
        return whole.take(np.flatnonzero(~is_test)), whole.take(np.flatnonzero(is_test))

    def inputs(self, file: Path, options: Mapping[str, Option]) -> Samples:
        """Read one image, or all in a folder and its sub-folders.

        Raises ``TaskError`` if an image cannot be read, or none is found.
        """
        chosen = read_options(self.name, options, self.options)
        self._begin(chosen)
        if not file.is_dir():
            x = self._arrays(_files([layout.Found(file, "")], Account(file.parent)))[0]
            return Samples(x, [plain(file.name)], self.notes())
        skip = bool(chosen["skip-unreadable"])
        account = Account(file)
        paths = by_ending(Walk(account, skip).files(file), SUFFIXES, account)
        if not paths:
            raise self._no_images(account)
        asked = _files([layout.Found(path, "") for path in paths], account)
        account.used.update(asked.files())
        if skip:
            asked = self._readable(asked, self._decoded, skip=True)
        self._settle([asked])
        x = self._arrays(asked)[0]
        notes = [*self.notes(), *self._warnings]
        return Samples(x, [account.called(path) for path in asked.paths], notes)

    def prepared(self, options: Mapping[str, Option]) -> Mapping[str, Any]:
        channels, height, width = self.shape
        return {
            "colour": "grey" if channels == 1 else "red, green, blue",
            "axes": "channels, height, width",
            "size": f"{height} × {width} pixels (height × width), resized bilinearly",
            "orientation": "upright, as the file's EXIF data say",
            "transparency": "in front of white",
            **self.declaration.scale().described(),
        }

    def notes(self) -> list[str]:
        """Return how the files were used, and how some had to be converted."""
        lines = [line for account in self._accounts for line in account.lines()]
        return [*lines, *map(self._trait_line, sorted(self._traits)), *self._notes]

    def counted(self) -> list[str]:
        return [account.total for account in self._accounts]

    def _trait_line(self, trait: str) -> str:
        found = self._traits[trait]
        what = "1 image has" if len(found) == 1 else f"{len(found)} images have"
        return f"{what} {TRAITS[trait]} ({plain(min(found).name)!r}{MORE * (len(found) > 1)})"

    def _opener_of(self, chosen: Mapping[str, Any]) -> Opener:
        codes = self._dialect(chosen).codes.get(MASK, {})
        numbers = layout.read_mask_codes(codes, self.classes, IGNORED)
        return Opener(self.shape, self.declaration.scale(), tuple(self.classes), numbers)

    def _dialect(self, chosen: Mapping[str, Any]) -> Dialect:
        masks = self.declaration.target is not None
        allowed = {MASK: (*self.classes, IGNORE)} if masks else {CLASS: self.classes}
        return read_dialect(self.name, allowed, {**WRITTEN, "codes": chosen["codes"]})

    def _arrays(self, part: Files) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
        """Return images (n, C, H, W), and classes (n,) or masks (n, H, W)."""
        pixels = np.empty((len(part.paths), *self.shape), np.float32)
        y = part.labels
        if part.masks is not None:
            y = np.empty((len(part.paths), *self.shape[1:]), np.int64)
        for row, (path, mask) in enumerate(part.each()):
            if mask is None:
                picture = self._opener.open(path)
            else:
                picture, y[row] = self._opener.pair(path, mask)
            pixels[row] = picture.values
            self._note_traits(path, picture)
        return pixels, y

    def _decoded(self, path: Path, mask: Path | None) -> Picture:
        return self._opener.open(path) if mask is None else self._opener.pair(path, mask)[0]

    def _note_traits(self, path: Path, picture: Picture) -> None:
        for trait in picture.traits:
            self._traits[trait].add(path)

    def _bytes(self, part: Files) -> int:
        """Return the memory that its images and masks would need, in bytes."""
        channels, height, width = self.shape
        return len(part.paths) * height * width * (4 * channels + 8 * (part.masks is not None))

    def _readable(
        self, part: Files, look: Callable[[Path, Path | None], Picture], *, skip: bool
    ) -> Files:
        """Return the part without unreadable images, and warn about their number.

        Raises ``TaskError`` if a mask does not fit, or without ``skip`` if an image is unreadable.
        """
        kept = []
        for row, (path, mask) in enumerate(part.each()):
            try:
                self._note_traits(path, look(path, mask))
                kept.append(row)
            except UnreadableError as error:
                if not skip:
                    raise
                last = str(error)
        if skipped := len(part.paths) - len(kept):
            said = "1 unreadable image was" if skipped == 1 else f"{skipped} unreadable images were"
            self._warnings.append(f"{said} left out; the last: {last}")
        return part.take(np.array(kept, np.intp)) if skipped else part


def _below(place: Path, files: Files) -> tuple[list[Path], int]:
    """Return paths below the data folder, and their number of folders down to the class folder."""
    return [path.relative_to(place) for path in files.paths], 2 if files.parts[0] else 1


def _files(found: Sequence[layout.Found], account: Account) -> Files:
    masks = [one.mask for one in found if one.mask is not None]
    return Files(
        [one.path for one in found],
        np.array([one.label for one in found], np.int64),
        [one.part for one in found],
        masks or None,
        account,
    )
