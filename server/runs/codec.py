"""A codec for immutable values: a tree in JSON and a table of arrays.

A strategy's state is plain data: dataclasses, tuples, mappings, sets, numbers, texts, models. So
one codec makes every strategy resumable without its own code. An object that occurs twice is stored
once, and is one object again after decoding: a model of many silos takes the space of one.
"""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any

import numpy as np
from numpy.typing import NDArray

Arrays = dict[str, NDArray[Any]]

NODE = "#"
"""Key of a reference to a node of the table; other values stand for themselves."""
PLAIN = (str, int, float, bool, type(None))
SEQUENCES: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "list": list,
    "set": set,
    "frozenset": frozenset,
}


class CodecError(ValueError):
    """A value cannot be stored, or a stored value cannot be read. The message names it."""


def encode(value: Any) -> tuple[str, Arrays]:
    """Encode a value as a tree in JSON, and the C-contiguous arrays that it names.

    Raises:
        CodecError: names the place of a value that cannot be stored, and its type.
    """
    writer = _Writer()
    root = writer.put(value, "the value")
    return json.dumps([root, writer.nodes]), writer.arrays


def decode(tree: str, arrays: Mapping[str, NDArray[Any]]) -> Any:
    """Decode a value. Its classes must already be imported: none is loaded for it.

    Raises ``CodecError`` if the tree is damaged, or of another version of the code.
    """
    try:
        root, nodes = json.loads(tree)
        values: list[Any] = []
        for node in nodes:  # parts come before the whole
            values.append(_read(node, values, arrays))
        return _value(root, values)
    except CodecError:
        raise
    except (ValueError, KeyError, IndexError, TypeError, AttributeError) as error:
        raise CodecError(f"the stored value is damaged: {type(error).__name__}: {error}") from None


class _Writer:
    """A writer that numbers every object once, parts first."""

    def __init__(self) -> None:
        self.nodes: list[list[Any]] = []
        self.arrays: Arrays = {}
        self._numbers: dict[int, tuple[int, Any]] = {}
        self._open: set[int] = set()

    def put(self, value: Any, path: str) -> Any:
        if type(value) in PLAIN:
            return value
        if id(value) not in self._numbers:
            if id(value) in self._open:
                raise CodecError(f"{path} contains itself.")
            self._open.add(id(value))
            node = self._node(value, path)
            self._open.discard(id(value))
            self.nodes.append(node)
            # The value is kept, so that its id stays its own.
            self._numbers[id(value)] = (len(self.nodes) - 1, value)
        return {NODE: self._numbers[id(value)][0]}

    def _node(self, value: Any, path: str) -> list[Any]:
        if isinstance(value, Enum):
            return ["enum", _class_name(value, path), self.put(value.value, path)]
        if isinstance(value, bytes):
            return ["bytes", self._array(np.frombuffer(value, np.uint8), path)[1]]
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value, path)
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            names = [field.name for field in dataclasses.fields(value)]
            parts = [[n, self.put(getattr(value, n), f"{path}.{n}")] for n in names]
            return ["data", _class_name(value, path), parts]
        if isinstance(value, tuple) and type(value) is not tuple:
            return ["named", _class_name(value, path), self._items(value, path)]
        if isinstance(value, Mapping):
            places = [(f"{path}[{key!r}]", key, part) for key, part in value.items()]
            return ["map", [[self.put(k, at), self.put(part, at)] for at, k, part in places]]
        for kind in SEQUENCES:
            if type(value).__name__ == kind:
                ordered = sorted(value, key=repr) if "set" in kind else value
                return [kind, self._items(ordered, path)]
        raise CodecError(
            f"{path} is of type {type(value).__name__}, which cannot be stored. A state may "
            "contain dataclasses, tuples, lists, sets, mappings, arrays, numbers, texts and bytes."
        )

    def _items(self, values: Any, path: str) -> list[Any]:
        return [self.put(part, f"{path}[{i}]") for i, part in enumerate(values)]

    def _array(self, value: Any, path: str) -> list[Any]:
        if isinstance(value, np.str_):
            return ["text", str(value)]
        array = np.asarray(value)
        if array.dtype.kind not in "biuf" or array.dtype.itemsize > 8:
            raise CodecError(f"{path} is an array of type {array.dtype}, which cannot be stored.")
        turned = array.flags.f_contiguous and not array.flags.c_contiguous
        name = str(len(self.arrays))
        self.arrays[name] = np.asarray(array.T if turned else array, order="C")
        kind = "scalar" if isinstance(value, np.generic) else "turned" if turned else "array"
        return [kind, name]


def _read(node: list[Any], values: list[Any], arrays: Mapping[str, NDArray[Any]]) -> Any:
    kind = node[0]
    if kind in SEQUENCES:
        return SEQUENCES[kind]([_value(part, values) for part in node[1]])
    if kind == "map":
        return {_value(key, values): _value(part, values) for key, part in node[1]}
    if kind == "array":
        return arrays[node[1]]
    if kind == "turned":
        return arrays[node[1]].T
    if kind == "scalar":
        return arrays[node[1]][()]
    if kind == "bytes":
        return arrays[node[1]].tobytes()
    if kind == "text":
        return np.str_(node[1])
    if kind == "enum":
        return _class(node[1])(_value(node[2], values))
    if kind == "named":
        return _class(node[1])(*(_value(part, values) for part in node[2]))
    if kind == "data":
        return _dataclass(_class(node[1]), {n: _value(part, values) for n, part in node[2]})
    raise CodecError(f"the stored value contains an unknown kind of node, {kind!r}.")


def _value(part: Any, values: list[Any]) -> Any:
    return values[part[NODE]] if isinstance(part, dict) else part


def _dataclass(kind: type, parts: Mapping[str, Any]) -> Any:
    fields = {field.name for field in dataclasses.fields(kind)}
    later = {f.name: _usual(f) for f in dataclasses.fields(kind) if f.name not in parts}
    if not set(parts) <= fields or dataclasses.MISSING in later.values():
        raise CodecError(
            f"{kind.__name__} was stored by another version: it had "
            f"{', '.join(sorted(parts))}; now it has {', '.join(sorted(fields))}."
        )
    made: Any = object.__new__(kind)
    for name, part in {**later, **parts}.items():
        object.__setattr__(made, name, part)
    return made


def _usual(field: dataclasses.Field[Any]) -> Any:
    """Return the default of a field, or ``MISSING``."""
    made = field.default_factory
    return field.default if made is dataclasses.MISSING else made()


def _class_name(value: Any, path: str) -> str:
    kind = type(value)
    name = f"{kind.__module__}:{kind.__qualname__}"
    try:
        found = _class(name)
    except CodecError:
        found = None
    if found is not kind:
        raise CodecError(f"{path} is of type {name}, which cannot be imported by its name.")
    return name


def _class(name: str) -> Any:
    """Find a class by name in a loaded module only: reading a file must not run code."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = getattr(found, part, None)
    storable = isinstance(found, type) and (
        dataclasses.is_dataclass(found) or issubclass(found, Enum | tuple)
    )
    if not storable:
        raise CodecError(f"the type {name} is unknown here. Was the run made by another version?")
    return found
