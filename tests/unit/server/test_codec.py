"""A state comes back as it was: values, types, order, and what is shared."""

from __future__ import annotations

import sys
from collections import namedtuple
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from coterie.server.runs.checkpoint import CheckpointError, Checkpoints
from coterie.server.runs.codec import CodecError, decode, encode

Point = namedtuple("Point", ["x", "y"])


class Colour(Enum):
    RED = "red"


@dataclass(frozen=True)
class Inner:
    models: Mapping[str, dict[str, Any]]
    groups: tuple[tuple[str, ...], ...] = ()


@dataclass(frozen=True)
class Outer:
    inner: Inner
    names: frozenset[str] = frozenset()
    anything: Any = None
    derived: int = field(default=7, init=False)


def again(value: Any) -> Any:
    return decode(*encode(value))


def test_dataclasses_mappings_sets_and_models_come_back() -> None:
    model = {"w": np.arange(6, dtype=np.float32).reshape(2, 3), "n": np.array(3)}
    value = Outer(
        Inner(MappingProxyType({"a": model}), (("a",), ("b", "c"))),
        names=frozenset({"b", "a"}),
        anything={("a", "b"): [1, 2.5, None, True], 7: {"x"}, Colour.RED: Point(1, (2,))},
    )
    got = again(value)
    assert isinstance(got, Outer) and got.derived == 7
    assert got.inner.groups == value.inner.groups and got.names == value.names
    assert got.anything == value.anything
    assert type(got.anything[Colour.RED]) is Point
    assert list(got.inner.models["a"]) == ["w", "n"]
    for name, array in model.items():
        assert got.inner.models["a"][name].dtype == array.dtype
        assert got.inner.models["a"][name].shape == array.shape
        np.testing.assert_array_equal(got.inner.models["a"][name], array)


def test_what_is_shared_is_shared_again_and_what_is_equal_is_not() -> None:
    one, twin = {"w": np.ones(3)}, {"w": np.ones(3)}
    got = again({"a": one, "b": one, "c": twin, "d": {"w": one["w"]}})
    assert got["a"] is got["b"]
    assert got["a"] is not got["c"]
    assert got["d"]["w"] is got["a"]["w"]
    assert len(encode({"a": one, "b": one})[1]) == 1


@pytest.mark.parametrize(
    "array",
    [
        np.zeros((0, 3), np.float32),
        np.array(2.5),
        np.array([True, False]),
        np.arange(24, dtype=np.int16).reshape(2, 3, 4)[:, ::2],
        np.asfortranarray(np.arange(12, dtype=np.float64).reshape(3, 4)),
        np.array([np.nan, -0.0, np.inf, np.finfo(np.float32).tiny], np.float32),
        np.arange(3, dtype=np.uint64),
        np.ones(2, np.float16),
    ],
)
def test_arrays_keep_type_shape_layout_and_every_bit(array: np.ndarray) -> None:
    got = again(array)
    assert got.dtype == array.dtype and got.shape == array.shape
    assert got.tobytes() == array.tobytes()
    if array.flags.f_contiguous and not array.flags.c_contiguous:
        assert got.flags.f_contiguous


@pytest.mark.parametrize("value", [np.float64(0.1), np.int64(3), np.bool_(True), np.str_("a")])
def test_numpy_s_scalars_keep_their_type(value: Any) -> None:
    assert type(again(value)) is type(value) and again(value) == value


plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text()
keys = st.text() | st.integers() | st.tuples(st.text(), st.integers())
values = st.recursive(
    plain,
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.dictionaries(keys, inner)
        | st.frozensets(st.text())
    ),
    max_leaves=20,
)


@given(values)
def test_any_tree_of_plain_values_comes_back(value: Any) -> None:
    assert repr(again(value)) == repr(value) or again(value) == value


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ({"rng": np.random.default_rng(0)}, r"the value\['rng'\] is of type Generator"),
        (Outer(Inner({}), anything=open), r"the value\.anything is of type"),
        ([np.array(["a"])], r"the value\[0\] is an array of type <U1"),
        ([np.array([object()])], "an array of type object"),
        ([1 + 2j], "of type complex"),
    ],
)
def test_what_cannot_be_stored_is_named_with_its_place(value: Any, said: str) -> None:
    with pytest.raises(CodecError, match=said):
        encode(value)


def test_a_class_that_could_not_be_found_again_is_refused_at_once() -> None:
    @dataclass(frozen=True)
    class Local:
        x: int = 1

    with pytest.raises(CodecError, match="cannot be imported"):
        encode(Local())


def test_a_value_that_contains_itself_is_refused() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(CodecError, match="contains itself"):
        encode(loop)


def test_a_state_of_another_version_is_refused_with_the_difference() -> None:
    tree, arrays = encode(Outer(Inner({})))
    with pytest.raises(CodecError, match=r"another version: it had .*; now it has"):
        decode(tree.replace('"derived"', '"forgotten"'), arrays)
    with pytest.raises(CodecError, match=r"type .*:Missing is unknown here"):
        decode(tree.replace(":Inner", ":Missing"), arrays)


@pytest.mark.parametrize("name", ["os:system", "subprocess:Popen", "builtins:eval", "nowhere:X"])
def test_reading_makes_no_object_but_plain_data(name: str) -> None:
    assert "subprocess" in sys.modules
    with pytest.raises(CodecError, match="unknown here"):
        decode(f'[{{"#": 0}}, [["named", "{name}", ["true"]]]]', {})


@pytest.mark.parametrize(
    "tree", ["", "[]", "{}", '[{"#": 5}, []]', '[1, [["array", "0"]]]', '[1, [["what"]]]']
)
def test_a_damaged_tree_is_refused(tree: str) -> None:
    with pytest.raises(CodecError):
        decode(tree, {})


def test_a_state_that_cannot_be_stored_ends_the_run_with_its_name(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="round 2 cannot be committed: the value is of type"):
        Checkpoints(tmp_path).save(2, object())
    assert list(tmp_path.iterdir()) == []


def test_a_round_that_finds_no_folder_is_named_with_what_to_do(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("a file, where the folder would be")
    problem = r"round 3 cannot be committed to .*checkpoints: .*`coterie run resume`"
    with pytest.raises(CheckpointError, match=problem):
        Checkpoints(tmp_path / "checkpoints").save(3, {"a": 1})
