"""The structure of an image folder: parts, classes, images and their masks."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coterie.tasks.base import TaskError
from coterie.tasks.own.declared import in_nfc
from coterie.tasks.own.dialect import Dialect
from coterie.tasks.own.folders import NOT_READ, Walk, by_ending, plain
from coterie.tasks.own.pictures import SUFFIXES

TRAIN, TEST, VAL = "train", "test", "val"
PARTS = {
    **dict.fromkeys(("train", "training"), TRAIN),
    **dict.fromkeys(("test", "testing"), TEST),
    **dict.fromkeys(("val", "valid", "validation"), VAL),
}
"""Folder name, in any capitals → the part of the data that it holds."""
CLASS, MASK = "class", "mask"
"""Uses of ``codes``."""
MASK_ENDING = ".png"
NO_IMAGE = "masks without an image"
LOSSY = (".jpg", ".jpeg", ".jpe", ".jfif")


@dataclass(frozen=True)
class Found:
    """An image, its part (empty: none), and its class or mask."""

    path: Path
    part: str
    label: int = 0
    mask: Path | None = None


def roots_of(walk: Walk, place: Path, names: Sequence[str]) -> list[tuple[str, Path, list[Path]]]:
    """Return parts with their folders and the folders in them; one unnamed part if there are none.

    Folders named in ``names`` are never parts. Raises ``TaskError`` if two folders are the same
    part, or one cannot be read.
    """
    inner, loose = walk.inside(place)
    walk.account.leave_all(NOT_READ, loose)
    parts: dict[str, Path] = {}
    for folder in inner:
        part = PARTS.get(folder.name.lower())
        if part is None or in_nfc(folder.name) in names:
            continue
        if part in parts:
            raise TaskError(
                f"{str(place)!r} has two folders for the same part of the data: "
                f"{parts[part].name!r} and {folder.name!r}. Join them, or rename one."
            )
        parts[part] = folder
    if not {TRAIN, TEST} <= parts.keys():
        return [("", place, inner)]
    for folder in inner:
        if folder not in parts.values():
            walk.leave_folder(folder)
    found = []
    for part in (part for part in (TRAIN, TEST, VAL) if part in parts):
        folders, loose = walk.inside(parts[part])
        walk.account.leave_all(NOT_READ, loose)
        found.append((part, parts[part], folders))
    return found


def hint_of_parts(folders: Sequence[Path]) -> str:
    """Return advice if folders are named like parts but are incomplete; else empty."""
    named = [folder.name for folder in folders if folder.name.lower() in PARTS]
    if not named:
        return ""
    return (
        f" {' and '.join(map(repr, named))} may be intended as a part of the data: that needs "
        "both a folder train and a folder test, each with one sub-folder per class (for masks, "
        "with images and masks); a folder val is then used for validation. If the test data "
        "has another name, rename it to test, or name both folders with the silo's options "
        "data and test-data."
    )


def by_class(
    walk: Walk, roots: Sequence[tuple[str, Path, list[Path]]], classes: Sequence[str], own: Dialect
) -> list[Found]:
    """Return all images in the class folders.

    Raises ``TaskError`` if a folder with images is not a declared class.
    """
    found: list[Found] = []
    unknown: list[Path] = []
    for part, _, folders in roots:
        for folder in folders:
            paths = by_ending(walk.files(folder), SUFFIXES, walk.account)
            label = _class_of(folder.name, classes, own, walk) if paths else 0
            if label is None:
                unknown.append(folder)
            else:
                found += [Found(path, part, label) for path in paths]
    if unknown:
        raise _unknown_class(unknown, walk.account.place, classes)
    return found


def _class_of(name: str, classes: Sequence[str], own: Dialect, walk: Walk) -> int | None:
    means = own.meant(CLASS, name) or name
    if (exact := own.placing(classes)(means)) is not None:
        return exact
    folded = [i for i, known in enumerate(classes) if known.casefold() == in_nfc(means).casefold()]
    if len(folded) != 1:
        return None
    note = f"folder {plain(name)!r} is read as class {classes[folded[0]]!r}"
    walk.account.said += [note] if note not in walk.account.said else []
    return folded[0]


def _unknown_class(unknown: Sequence[Path], place: Path, classes: Sequence[str]) -> TaskError:
    names = list(dict.fromkeys(plain(folder.name) for folder in unknown))
    others = f" So are {', '.join(map(repr, names[1:]))}." if names[1:] else ""
    advice = hint_of_parts(unknown) or (
        " If a folder means one of them, map it under [data.codes.class] in silo.toml: "
        f'"{names[0]}" = "{classes[0]}".'
    )
    return TaskError(
        f"{str(place)!r} has class {names[0]!r}, which is not declared.{others} Declared: "
        f"{', '.join(classes)}.{advice}"
    )


def with_masks(
    walk: Walk, roots: Sequence[tuple[str, Path, list[Path]]], pattern: str
) -> list[Found]:
    """Return all images in ``images``, each with its mask in ``masks``.

    ``pattern`` is a mask's name without ending, with ``*`` for its image's name. Raises
    ``TaskError`` if an image has no mask, or two have the same.
    """
    found: list[Found] = []
    for part, root, folders in roots:
        named = {folder.name.lower(): folder for folder in folders}
        images = named.pop("images", root / "images")
        masks = named.pop("masks", root / "masks")
        for folder in named.values():
            walk.leave_folder(folder)
        beside = walk.files(masks) if masks in folders else []
        inside = walk.files(images) if images in folders else []
        paths = by_ending(inside, SUFFIXES, walk.account)
        flat = by_ending(beside, (MASK_ENDING,), walk.account)
        known = {_key(mask, masks, mask.stem): mask for mask in reversed(flat)}
        used: dict[Path, Path] = {}
        for path in paths:
            name = pattern.replace("*", path.stem)
            mask = known.get(_key(path, images, name))
            if mask is None:
                wanted = masks / path.relative_to(images).with_name(name + MASK_ENDING)
                raise TaskError(_no_mask(path, wanted, beside))
            if (other := used.setdefault(mask, path)) is not path:
                raise TaskError(
                    f"images {str(other)!r} and {str(path)!r} have the same mask {str(mask)!r}. "
                    "Remove or rename one of them."
                )
            found.append(Found(path, part, mask=mask))
        walk.account.leave_all(NO_IMAGE, (mask for mask in flat if mask not in used))
    return found


def _key(path: Path, root: Path, name: str) -> tuple[str, str]:
    """Return the key that links image and mask: the folder, and the mask's expected name."""
    return in_nfc(str(path.relative_to(root).parent)), in_nfc(name)


def _no_mask(path: Path, wanted: Path, beside: Sequence[Path]) -> str:
    said = f"image {str(path)!r} has no mask: there is no {str(wanted)!r}."
    here = [mask for mask in beside if mask.parent == wanted.parent]
    if same := [mask for mask in here if in_nfc(mask.stem) == in_nfc(wanted.stem)]:
        why = (
            "is a JPEG file, whose compression changes the class numbers"
            if same[0].suffix.lower() in LOSSY
            else "is not a PNG file"
        )
        return f"{said} {str(same[0])!r} {why}. Masks must be PNG files: export it again as one."
    whole = re.compile(rf"(?<![^\W_]){re.escape(path.stem)}(?![^\W_])")
    if near := [mask for mask in here if whole.search(mask.stem)]:
        pattern = whole.sub("*", near[0].stem, count=1)
        return (
            f"{said} {near[0].name!r} exists. If masks are named like this, set the silo's "
            f'option mask-names = "{pattern}".'
        )
    return (
        f"{said} Expected a PNG of class numbers in the folder masks for every image, with the "
        "same name, or named by the silo's option mask-names."
    )


def read_pattern(text: str) -> str:
    """Read the silo's option mask-names, or raise ``TaskError`` if it is not a pattern."""
    pattern = text.removesuffix(MASK_ENDING)
    if pattern.count("*") != 1 or "/" in pattern or "\\" in pattern:
        raise TaskError(
            'mask-names must be a name with one * for the image\'s name, such as "*_mask". '
            f"Got {text!r}."
        )
    return pattern


def read_mask_codes(
    codes: Mapping[str, str], classes: Sequence[str], ignored: int
) -> dict[int, int]:
    """Return mask value → class number, or ``ignored`` for pixels without a label.

    ``codes`` maps a value as text to a declared class or ``ignore``. Raises ``TaskError`` if a
    value is not a whole number.
    """
    found = {}
    for code, means in codes.items():
        if not re.fullmatch(r"\d{1,9}", code):
            raise TaskError(f"codes for masks must be whole numbers, at least 0. Got {code!r}.")
        found[int(code)] = classes.index(means) if means in classes else ignored
    return found
