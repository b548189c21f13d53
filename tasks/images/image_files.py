"""Readers of image data sets in the user's folder, with NumPy only.

Three layouts: one ``.npz`` with ``x_train, y_train, x_test, y_test``; idx files as torchvision
stores them (``MNIST/raw/train-images-idx3-ubyte.gz``, compressed or not); CIFAR-10's python batches
as torchvision unpacks them. torchvision is imported only to download, on request.
"""

from __future__ import annotations

import gzip
import pickle
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from zipfile import BadZipFile

import numpy as np
from numpy.typing import NDArray

from coterie.tasks.base import TaskError
from coterie.tasks.npy import read_npy
from coterie.tasks.options import place_of

Pixels = NDArray[np.uint8]
Labels = NDArray[np.int64]

PARTS = ("x_train", "y_train", "x_test", "y_test")
UNREADABLE = (OSError, EOFError, ValueError, KeyError, BadZipFile, zlib.error, pickle.PickleError)


class Images(NamedTuple):
    """Images, uint8 (n, H, W) or (n, H, W, C), and their labels, int64 (n,)."""

    x: Pixels
    y: Labels


@dataclass(frozen=True)
class RawImages:
    """A whole data set as stored, with the files' labels.

    ``extra`` holds other arrays of an ``.npz``, e.g. ``i_train`` or ``src_train``.
    """

    train: Images
    test: Images
    extra: Mapping[str, NDArray[Any]] = field(default_factory=dict)


@dataclass(frozen=True)
class ImageFiles:
    """Where a data set may be in a folder.

    Attributes:
        npz: file names; the first that exists is read.
        shape: of one image, (H, W) or (H, W, C); None: any.
        idx_folder: sub-folder of the idx files; empty: none.
        idx_names: (training, test) prefixes of the idx files.
        transposed: idx images have rows and columns exchanged (EMNIST).
        batches: folder of CIFAR-10's python batches; empty: none.
        torchvision: class and arguments for downloading; None: no download.
    """

    npz: tuple[str, ...]
    shape: tuple[int, ...] | None
    idx_folder: str = ""
    idx_names: tuple[str, str] = ("train", "t10k")
    transposed: bool = False
    batches: str = ""
    torchvision: tuple[str, Mapping[str, Any]] | None = None

    def expected(self) -> str:
        """Describe what a folder should hold, for messages."""
        layouts = [f"{' or '.join(self.npz)} with the arrays {', '.join(PARTS)}"]
        if self.idx_folder:
            layouts.append(
                f"{self.idx_folder}/{self.idx_names[0]}-images-idx3-ubyte.gz and the three files "
                "beside it, as torchvision keeps them"
            )
        if self.batches:
            layouts.append(f"{self.batches}/data_batch_1 to 5 and test_batch, as torchvision does")
        return "; or ".join(layouts)


def read_images(task: str, folder: str, files: ImageFiles, *, download: bool = False) -> RawImages:
    """Read a data set.

    Args:
        folder: the user's folder, or an ``.npz`` file.
        files: possible places; ``.npz``, idx files and batches are tried in this order.
        download: fetch missing data through torchvision.

    Raises:
        TaskError: no folder is given, or it is missing, empty or unreadable.
    """
    if not folder:
        raise TaskError(f"task {task!r} needs option 'data': a folder with {files.expected()}.")
    root = place_of(folder)
    try:
        found = _find(root, files)
        if found is None and download:
            _download(task, root, files)
            found = _find(root, files)
        if found is None:
            raise TaskError(_missing(task, root, files))
    except OSError as error:
        raise _unreadable(root, error) from error
    raw = _read(found, files)
    train = _checked(found, "train", raw.train, files)
    return RawImages(train, _checked(found, "test", raw.test, files), raw.extra)


def read_npz(path: Path) -> RawImages:
    """Read an ``.npz`` with the arrays ``PARTS``, none pickled; otherwise raise ``TaskError``."""
    try:
        found = read_npy(path)
        arrays = {} if isinstance(found, np.ndarray) else found
        absent = [name for name in PARTS if name not in arrays]
        if absent:
            raise TaskError(f"{path} must hold {', '.join(PARTS)}. Missing: {', '.join(absent)}.")
    except Exception as error:  # of a damaged file numpy and zipfile raise all sorts of things
        raise _unreadable(path, error) from error
    train = Images(arrays.pop("x_train"), arrays.pop("y_train"))
    return RawImages(train, Images(arrays.pop("x_test"), arrays.pop("y_test")), arrays)


def _find(root: Path, files: ImageFiles) -> Path | None:
    """Return the ``.npz``, or the folder of idx files or batches; None if there is none."""
    if root.is_file():
        return root
    for name in files.npz:
        if (root / name).is_file():
            return root / name
    if files.idx_folder:
        for place in (root / files.idx_folder, root / "raw", root):
            if _idx(place, f"{files.idx_names[0]}-images-idx3-ubyte") is not None:
                return place
    if files.batches:
        for place in (root / files.batches, root):
            if (place / "data_batch_1").is_file():
                return place
    return None


def _missing(task: str, root: Path, files: ImageFiles) -> str:
    if not root.exists():
        state = "does not exist"
    elif not any(root.iterdir()):
        state = "is empty"
    else:
        state = "has no such files"
    hint = " Or set download=true to fetch it through torchvision." if files.torchvision else ""
    return (
        f"data folder {str(root)!r} of task {task!r} {state}. Expected: {files.expected()}.{hint}"
    )


def _read(found: Path, files: ImageFiles) -> RawImages:
    if found.is_file():
        return read_npz(found)
    if files.batches:
        return _read_batches(found)
    parts = []
    for name in files.idx_names:
        images = _read_idx(found, f"{name}-images-idx3-ubyte")
        if files.transposed and images.ndim == 3:
            images = images.transpose(0, 2, 1)
        labels = _read_idx(found, f"{name}-labels-idx1-ubyte")
        parts.append(Images(images, labels.astype(np.int64)))
    return RawImages(parts[0], parts[1])


def _checked(found: Path, part: str, images: Images, files: ImageFiles) -> Images:
    """Drop a grey channel axis, or raise ``TaskError`` if the arrays do not fit."""
    x, y = images
    if files.shape is not None and x.shape[1:] == (*files.shape, 1):
        x = x[..., 0]
    coloured = x.ndim == 4 and x.shape[3] in (1, 3)
    fits = x.ndim == 3 or coloured if files.shape is None else x.shape[1:] == files.shape
    if x.dtype != np.uint8 or not fits:
        shape = "(n, H, W) or (n, H, W, 3)" if files.shape is None else ("n", *files.shape)
        raise TaskError(
            f"x_{part} in {found} must be uint8 of shape {shape}. Got {x.dtype} {x.shape}."
        )
    if y.dtype.kind not in "iu" or y.shape != x.shape[:1]:
        raise TaskError(
            f"y_{part} in {found} must be integers of shape {x.shape[:1]}, one label per image. "
            f"Got {y.dtype} {y.shape}."
        )
    return Images(x, y.astype(np.int64, copy=False))


def _unreadable(path: Path, error: Exception) -> TaskError:
    if isinstance(error, TaskError):
        return error
    return TaskError(
        f"{path} cannot be read: {error or type(error).__name__}. Check its permissions, or "
        "download it again."
    )


# --- idx ------------------------------------------------------------------------------------------


def _idx(folder: Path, name: str) -> Path | None:
    for path in (folder / f"{name}.gz", folder / name):
        if path.is_file():
            return path
    return None


def _read_idx(folder: Path, name: str) -> Pixels:
    """Read an idx file: bytes 0, 0, type 8, number of axes, their lengths as big-endian int32."""
    path = _idx(folder, name)
    if path is None:
        raise TaskError(f"{folder} has no {name} or {name}.gz. Copy the missing file there.")
    try:
        data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        if data[:3] != b"\x00\x00\x08":
            raise ValueError("not an idx file of bytes")
        axes = data[3]
        shape = np.frombuffer(data, dtype=">i4", count=axes, offset=4)
        return np.frombuffer(data, dtype=np.uint8, offset=4 + 4 * axes).reshape(shape)
    except (*UNREADABLE, IndexError) as error:
        raise _unreadable(path, error) from error


# --- CIFAR-10's python batches --------------------------------------------------------------------


class _ArraysOnly(pickle.Unpickler):
    """An unpickler of numpy arrays and plain values only: a pickle could otherwise run any code."""

    ALLOWED = frozenset(
        {("numpy", "ndarray"), ("numpy", "dtype"), ("_codecs", "encode")}
        | {(f"numpy.{core}.multiarray", "_reconstruct") for core in ("core", "_core")}
    )

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self.ALLOWED:
            raise pickle.UnpicklingError(f"it contains a {module}.{name}, not only arrays")
        # numpy 2 moved numpy.core and warns about the old name
        return super().find_class(module.replace("numpy.core", "numpy._core"), name)


def _read_batches(folder: Path) -> RawImages:
    batches = [_read_batch(folder / f"data_batch_{number}") for number in range(1, 6)]
    train = Images(*(np.concatenate(part) for part in zip(*batches, strict=True)))
    return RawImages(train, _read_batch(folder / "test_batch"))


def _read_batch(path: Path) -> Images:
    try:
        with path.open("rb") as file:
            batch = _ArraysOnly(file, encoding="bytes").load()
        images = np.asarray(batch[b"data"], dtype=np.uint8).reshape(-1, 3, 32, 32)
        return Images(images.transpose(0, 2, 3, 1), np.asarray(batch[b"labels"], dtype=np.int64))
    except UNREADABLE as error:
        raise _unreadable(path, error) from error


# --- download -------------------------------------------------------------------------------------


def _download(task: str, root: Path, files: ImageFiles) -> None:
    if files.torchvision is None:
        raise TaskError(f"task {task!r} cannot be downloaded. Expected: {files.expected()}.")
    import torchvision

    name, arguments = files.torchvision
    try:
        getattr(torchvision.datasets, name)(root=str(root), download=True, **arguments)
    except (OSError, RuntimeError) as error:
        raise TaskError(
            f"task {task!r} could not be downloaded to {str(root)!r}: {error}. Copy it there "
            f"yourself: {files.expected()}."
        ) from error
