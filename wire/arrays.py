"""Models as records of a message: one Flower array a layer, or all packed into one object."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

import numpy as np
from flwr.app import Array, ArrayRecord
from numpy.typing import NDArray
from safetensors.numpy import load as unpack
from safetensors.numpy import save as pack

from coterie.wire.errors import WireError
from coterie.wire.limits import MAX_ARRAYS, MAX_NAME, is_plain_name
from coterie.wire.names import PACKED_NAME

Model = dict[str, NDArray[np.generic]]
"""A model or an update: parameter and buffer names to arrays, in the model's own order."""


def encode_arrays(model: Model, *, packed: bool) -> ArrayRecord:
    """Encode a model.

    Args:
        model: names to arrays.
        packed: one safetensors blob instead of one Flower array per layer. Every object of a
            message costs a round trip on both legs, so a model of eight layers takes a third of
            the time when packed. Only silos that described themselves understand it.
    """
    if not packed:
        return ArrayRecord({name: Array(np.asarray(a, order="C")) for name, a in model.items()})
    blob = pack({name: np.asarray(array, order="C") for name, array in model.items()})
    order = json.dumps(list(model)).encode()
    return ArrayRecord(
        {PACKED_NAME: Array("uint8", (len(blob),), PACKED_NAME, _with_order(order, blob))}
    )


def _with_order(order: bytes, blob: bytes) -> bytes:
    """safetensors sorts by type and name; the model's own order goes before the blob."""
    return len(order).to_bytes(8, "little") + order + blob


def is_packed(record: ArrayRecord) -> bool:
    """Tell whether ``encode_arrays(..., packed=True)`` made this record."""
    return len(record) == 1 and PACKED_NAME in record and record[PACKED_NAME].stype == PACKED_NAME


def decode_arrays(record: ArrayRecord) -> Model:
    """Decode a model, packed or one array per layer.

    Raises:
        WireError: the bytes are not what they say they are.
    """
    try:
        if not is_packed(record):
            return {name: _plain_array(name, array) for name, array in record.items()}
        data = record[PACKED_NAME].data
        length = int.from_bytes(data[:8], "little")
        order = json.loads(data[8 : 8 + length])
        arrays = unpack(data[8 + length :])
        if sorted(order) != sorted(arrays):
            raise WireError("a packed model names other arrays than it holds.")
        if len(arrays) > MAX_ARRAYS or not all(map(is_plain_name, arrays)):
            raise WireError(
                f"a packed model has at most {MAX_ARRAYS:,} arrays, with names of at most "
                f"{MAX_NAME} letters that can be seen."
            )
        return {name: arrays[name] for name in order}
    except WireError:
        raise
    except Exception as error:  # bytes from elsewhere: numpy and json raise all sorts of things
        raise WireError(f"arrays cannot be decoded: {error}") from None


def _plain_array(name: str, array: Array) -> NDArray[np.generic]:
    decoded = array.numpy()
    if not isinstance(decoded, np.ndarray):  # numpy also opens archives of arrays
        raise WireError(f"{name!r} is not one array.")
    return decoded


@dataclass(frozen=True)
class Tensor:
    """What an array record holds of one array: all but its values."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


def tensors_of(record: ArrayRecord) -> list[Tensor]:
    """The arrays of a record of our own making, packed or not, without decoding their values."""
    if not is_packed(record):
        return [Tensor(n, a.dtype, tuple(a.shape), len(a.data)) for n, a in record.items()]
    data = record[PACKED_NAME].data
    start = 8 + int.from_bytes(data[:8], "little")
    length = int.from_bytes(data[start : start + 8], "little")
    header = json.loads(data[start + 8 : start + 8 + length])
    return [
        Tensor(
            name,
            header[name]["dtype"].lower(),
            tuple(header[name]["shape"]),
            header[name]["data_offsets"][1] - header[name]["data_offsets"][0],
        )
        for name in json.loads(data[8:start])
    ]


def model_hash(model: Model) -> str:
    """SHA-256 over names, types, shapes and bytes: equal hashes, bit-identical models."""
    digest = hashlib.sha256()
    for name, array in sorted(model.items()):
        digest.update(f"{name}|{array.dtype}|{array.shape}|".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()
