"""Bundles with the contents beside them, and models, for tests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from flwr.app import Array, Message

from coterie.engine.fast import bundles
from coterie.engine.fast.superlink import blob_store

NUMBERS = 5_000_000
"""Of a model: three parts of 8 MB and less."""


class Made:
    """Messages as they travel; arguments as of ``bundles.bundle``.

    Attributes:
        root: id of the bundle.
        blobs: contents that it names.
        contents: these and the bundle.
    """

    def __init__(self, messages: Sequence[Message], to: Any = None, **how: Any) -> None:
        self.blobs: dict[str, memoryview] = {}
        made = bundles.bundle(messages, self.put, to, **how)
        self.content, self.root = made.content, bundles.object_id(made.content)
        self.tree = made.tree(self.root)

    @property
    def contents(self) -> dict[str, bytes]:
        return {name: bytes(one) for name, one in self.blobs.items()} | {self.root: self.content}

    def put(self, array: Array) -> str:
        name = bundles.object_id(array.data)
        self.blobs[name] = memoryview(array.data)
        return name

    def read(self, max_bytes: int = 0) -> tuple[list[Message], list[int] | None]:
        return bundles.unbundle(self.root, self.content, self.blobs, max_bytes=max_bytes)


def names(on: blob_store.BlobStore) -> set[str]:
    """Of the objects in the folder."""
    return {file.name for file in on.folder.iterdir()} - {
        blob_store.TOKEN,
        "lock",
        blob_store.SPARE,
    }


def numbers(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(NUMBERS, np.float32)
