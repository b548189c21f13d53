"""From a name to a task: built-in ones, the plug-in point, and what a silo's data must be."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from coterie.tasks import BUILT_IN, SiloData, Task, TaskError, load_task
from coterie.tasks.options import read_options

OWN_TASK = '''
import numpy as np
from torch import nn
from tasks import SiloData, Task, TaskError


class Weights(Task):
    """Two classes told apart by the sign of a number."""

    name = "weights"
    num_classes = 2

    def model(self):
        return nn.Linear(1, 2)

    def load(self, options):
        x = np.linspace(-1, 1, 8, dtype=np.float32)[:, None]
        return SiloData(x, (x[:, 0] > 0).astype(np.int64), x, (x[:, 0] > 0).astype(np.int64), 2)


def make():
    return Weights()


ready = Weights()


class NoTask:
    name = "x"
    num_classes = 2


def broken():
    raise TaskError("the disk is gone")
'''

Write = Callable[[str, str], None]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Put a module on the path of this test alone."""
    monkeypatch.syspath_prepend(str(tmp_path))
    before = set(sys.modules)

    def put(module: str, text: str) -> None:
        (tmp_path / f"{module}.py").write_text(text)
        importlib.invalidate_caches()

    yield put
    for name in set(sys.modules) - before:
        if name.startswith("own_"):
            del sys.modules[name]


# ---------------------------------------------------------------- names


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_built_in_task_can_be_made_and_bears_its_name(name: str) -> None:
    task = load_task(name)
    assert isinstance(task, Task)
    assert task.name == name
    assert task.num_classes >= 2


@pytest.mark.parametrize("name", ["", "nonsense", "Digits", "own_module"])
def test_an_unknown_name_is_refused_with_what_there_is(name: str) -> None:
    with pytest.raises(TaskError, match=r"no task is called .* digits.*module:attribute"):
        load_task(name)


def test_a_module_that_is_not_there_is_refused() -> None:
    with pytest.raises(TaskError, match="'own_missing:Task' cannot be imported: No module named"):
        load_task("own_missing:Task")


def test_a_module_that_imports_what_is_missing_is_refused(write: Write) -> None:
    write("own_needy", "import a_package_that_nobody_has")
    with pytest.raises(TaskError, match="a_package_that_nobody_has"):
        load_task("own_needy:Task")


def test_an_attribute_that_is_not_there_is_refused(write: Write) -> None:
    write("own_tasks", OWN_TASK)
    with pytest.raises(TaskError, match="'own_tasks' has no attribute 'Nothing'"):
        load_task("own_tasks:Nothing")


def test_what_is_no_task_is_refused(write: Write) -> None:
    write("own_tasks", OWN_TASK)
    with pytest.raises(TaskError, match=r"must be a coterie\.tasks\.Task.*Got NoTask"):
        load_task("own_tasks:NoTask")


def test_a_task_that_refuses_says_so_itself(write: Write) -> None:
    write("own_tasks", OWN_TASK)
    with pytest.raises(TaskError, match="the disk is gone"):
        load_task("own_tasks:broken")


def test_a_model_that_a_task_does_not_have_is_refused() -> None:
    with pytest.raises(TaskError, match="no model 'huge'"):
        load_task("mnist/huge")
    with pytest.raises(TaskError, match="only 'digits' itself"):
        load_task("digits/huge")


# ---------------------------------------------------------------- the plug-in point


@pytest.mark.parametrize("attribute", ["Weights", "make", "ready"])
def test_a_task_of_ones_own_is_a_class_a_function_or_an_object(
    attribute: str, write: Write
) -> None:
    write("own_tasks", OWN_TASK)
    task = load_task(f"own_tasks:{attribute}")
    assert task.name == f"own_tasks:{attribute}"  # both sides name the same import
    data = task.load({})
    outputs = task.model()(torch.from_numpy(data.x_train))
    assert task.loss(outputs, torch.from_numpy(data.y_train)).ndim == 0


def test_the_loss_is_cross_entropy_unless_the_task_says_otherwise() -> None:
    logits = torch.tensor([[2.0, 0.0], [0.0, 1.0], [3.0, 0.0]])
    targets = torch.tensor([0, 0, 1])
    task = load_task("digits")
    expected = -torch.log_softmax(logits, dim=1)[torch.arange(3), targets].mean()
    torch.testing.assert_close(task.loss(logits, targets), expected)


# ---------------------------------------------------------------- data


def data(**changes: Any) -> SiloData:
    good: dict[str, Any] = {
        "x_train": np.zeros((4, 2), np.float32),
        "y_train": np.array([0, 1, 2, 1]),
        "x_test": np.zeros((3, 2), np.float32),
        "y_test": np.array([0, 1, 2]),
        "num_classes": 3,
    }
    return SiloData(**(good | changes))


def with_bad(value: float) -> np.ndarray:
    array = np.zeros((3, 2), np.float32)
    array[2, 1] = value
    return array


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"x_train": np.zeros((0, 2), np.float32), "y_train": np.zeros(0, int)},
         "training data is empty"),
        ({"x_test": np.zeros((0, 2), np.float32), "y_test": np.zeros(0, int)},
         "test data is empty"),
        ({"y_train": np.array([0, 1])}, "one label per sample. Got 4 samples and 2 labels"),
        ({"y_test": np.array([0])}, "test data must have one label"),
        ({"y_train": np.array([0, 1, 3, 1])}, r"must be in \[0, 2\]. Got labels from 0 to 3"),
        ({"y_test": np.array([-1, 1, 2])}, "Got labels from -1 to 2"),
        ({"x_test": with_bad(np.nan)}, "test data contains NaN or infinite"),
        ({"x_test": with_bad(-np.inf)}, "test data contains NaN or infinite"),
        ({"x_test": np.zeros((3, 5), np.float32)}, r"the same shape\. Got \(2,\) and \(5,\)"),
    ],
)  # fmt: skip
def test_data_that_cannot_be_trained_on_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(TaskError, match=said):
        data(**changes)


def test_options_take_the_type_of_their_defaults() -> None:
    filled = read_options("t", {"n": "3", "x": 2}, {"n": 1, "x": 0.5, "folder": ""})
    assert filled == {"n": 3, "x": 2.0, "folder": ""}
    assert [type(v) for v in filled.values()] == [int, float, str]
