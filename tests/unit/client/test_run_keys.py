"""Keys of a run that are for the task at the silos, and a task's own schedule."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from torch import nn

from coterie import wire
from coterie.client.cli.predict import load_kept
from coterie.client.work.card import read_card
from coterie.client.work.optimisers import Schedule
from coterie.server.runs.config import RunConfig
from coterie.server.runs.record import read_run
from coterie.server.study.compare import read as read_comparison
from coterie.strategies import FederationError
from coterie.tasks.base import RunKey, TaskError
from coterie.tasks.options import with_task_keys
from coterie.tasks.simulation import Simulation
from tests.commands import coterie
from tests.conftest import arrays_of, assert_equal_models
from tests.kit import ask, reason
from tests.unit.client.kinds import Kinds, nodes_of, play, refusal, source


class Tuned(Kinds):
    """Its model and its loss have keys."""

    name = "tuned"
    run_keys: Mapping[str, RunKey] = {
        "hidden": RunKey(8, low=1, high=64, help="Width of the hidden layer."),
        "smoothing": RunKey(0.0, low=0, high=0.5),
        "activation": RunKey("tanh", choices=("tanh", "relu")),
        "note": RunKey(""),
        "halve": RunKey(False),
    }

    def model(self) -> nn.Module:
        own = self.run_values
        between = nn.Tanh() if own["activation"] == "tanh" else nn.ReLU()
        return nn.Sequential(nn.Linear(4, own["hidden"]), between, nn.Linear(own["hidden"], 3))

    def loss(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        smoothing = self.run_values["smoothing"]
        return nn.functional.cross_entropy(outputs, targets, label_smoothing=smoothing)


class Falling(Kinds):
    """Half the learning rate from the middle of the run on."""

    name = "falling"

    def lr_factor(self, done: float) -> float:
        return 1.0 if done < 0.5 else 0.5


class Wrong(Kinds):
    """Its factor is not a number."""

    name = "wrong"

    def lr_factor(self, done: float) -> float:
        return math.nan


# ---------------------------------------------------------------- keys of the task


def test_a_runs_keys_reach_model_and_loss_at_every_silo_and_the_kept_model(tmp_path: Path) -> None:
    keys = {"task.hidden": 5, "task.smoothing": 0.2}
    found = play(tmp_path / "keys", Tuned, **keys)
    model = arrays_of(found.models["b"])
    assert model["0.weight"].shape == (5, 4)
    plain = arrays_of(play(tmp_path / "hard", Tuned, **{"task.hidden": 5}).models["b"])
    assert not np.array_equal(model["2.bias"], plain["2.bias"]), "the loss has the key too"
    file = tmp_path / "keys" / "b" / "models" / "run.safetensors"
    card = read_card(file)
    assert card.task_values == dict(Tuned().run_values) | {"hidden": 5, "smoothing": 0.2}
    kept = load_kept(file)
    assert_equal_models({k: v.numpy() for k, v in kept.model.state_dict().items()}, model)
    assert "task.hidden = 5" in file.with_suffix(".md").read_text(encoding="utf-8")
    recorded = read_run(tmp_path / "keys" / "run").config
    assert recorded.items() >= keys.items()
    assert RunConfig.read(recorded).plain() == recorded


def test_the_default_of_a_key_is_the_task_without_it(tmp_path: Path) -> None:
    one = play(tmp_path / "one", Tuned, **{"task.hidden": 8, "task.halve": False})
    assert_equal_models(
        arrays_of(one.models["a"]), arrays_of(play(tmp_path / "other", Tuned).models["a"])
    )


def describe(values: Mapping[str, Any], task: type[Kinds] = Tuned) -> Message:
    """Ask a silo what it answers to a run with these keys before it joins."""
    node = {**nodes_of(task, Path())[0], "home": ""}
    return ask(wire.DESCRIBE, node, task=source(task), protocol=wire.PROTOCOL, **values)


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        ("task.depth", 3, "has no run key 'task.depth'. It has: task.activation, task.halve, "),
        ("task.hidden", 65, "task.hidden .* must be a whole number from 1 to 64. Got 65"),
        ("task.hidden", 8.5, "must be a whole number from 1 to 64. Got 8.5"),
        ("task.hidden", True, "must be a whole number from 1 to 64. Got True"),
        ("task.hidden", [8, 8], r"must be a whole number from 1 to 64. Got \[8, 8\]"),
        ("task.smoothing", math.nan, "must be a number from 0 to 0.5. Got nan"),
        ("task.smoothing", math.inf, "must be a number from 0 to 0.5. Got inf"),
        ("task.smoothing", "0.1", "must be a number from 0 to 0.5. Got '0.1'"),
        ("task.activation", "__import__('os')", "must be one of tanh, relu. Got"),
        ("task.note", "x" * 100_000, r"text of at most 200 characters. Got 'x{59}…\.$"),
        ("task.note", b"\x00", "must be a text of at most 200 characters"),
        ("task.halve", 1, "must be true or false. Got 1"),
        ("task." + "y" * 500, 1, r"has no run key 'task\.y{54}…\. It has"),
        ("task.", 1, r"has no run key 'task\.'"),
        ("task._given", "x", r"has no run key 'task\._given'"),
    ],
)
def test_a_silo_refuses_what_its_task_does_not_allow(key: str, value: Any, problem: str) -> None:
    assert re.search(problem, reason(describe({key: value})))


def test_the_schema_is_that_of_the_model_that_the_keys_make() -> None:
    schemas = [
        wire.decode_description(describe(values).content).schema
        for values in ({}, {"task.hidden": 8}, {"task.hidden": 9}, {"task.smoothing": 0.1})
    ]
    assert schemas[0] == schemas[1] == schemas[3] != schemas[2]


def test_a_task_without_keys_says_so_to_the_coordinator(tmp_path: Path) -> None:
    problem = refusal(tmp_path, Kinds, **{"task.dropout": 0.1})
    assert "has no run key 'task.dropout'. It has: none." in problem


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        ({"task.Hidden": 1}, "a key of the task must be task. and a name of lower-case letters"),
        ({"task.hidden": [1]}, "task.hidden must be a number, true or false, or a short text"),
        ({"task.hidden": math.nan}, "Got nan"),
        ({"task.note": "x" * 201}, "or a short text"),
    ],
)
def test_the_coordinator_refuses_what_no_task_can_have(keys: dict[str, Any], problem: str) -> None:
    with pytest.raises(FederationError, match=problem):
        RunConfig.read(keys)


def test_the_keys_that_flower_gives_are_read_alike() -> None:
    assert RunConfig.read_from_flower({"task.hidden": 7}).task_keys == {"task.hidden": 7}


def test_files_have_the_keys_as_a_table(tmp_path: Path) -> None:
    assert with_task_keys({"lr": 1, "task": {"a": 2}}) == {"lr": 1, "task.a": 2}
    file = tmp_path / "simulation.toml"
    file.write_text("silos = 2\n[run]\nstrategy = 'hcct'\nrounds = 3\n[run.task]\nhidden = 4\n")
    simulation = Simulation.read(file)
    config = RunConfig.read(simulation.run_keys())
    assert (config.task, config.task_keys) == ("digits", {"task.hidden": 4})
    file.write_text(
        'seeds = [0]\nsilos = [{ name = "a" }, { name = "b" }]\n[run]\ntask.hidden = 4\n'
        '[[strategies]]\nstrategy = "fedavg"\n'
        '[[strategies]]\nname = "wide"\nstrategy = "fedavg"\ntask.hidden = 9\n',
        encoding="utf-8",
    )
    runs = read_comparison(file).runs
    assert {name: keys["task.hidden"] for name, keys in runs.items()} == {
        **{"local": 4, "fedavg": 4, "wide": 9}
    }


def test_a_command_line_has_the_keys_as_options(tmp_path: Path) -> None:
    file = tmp_path / "simulation.toml"
    file.write_text("silos = 2\n[split]\nkind = 'iid'\n[run]\nstrategy = 'fedavg'\nrounds = 1\n")
    for given in (["--task.hidden", "4"], ["--task.hidden=4"], ["--set", "task.hidden=4"]):
        done = coterie("simulate", str(file), *given, "--set", "wait-for-silos=0.05")
        assert done.returncode != 0
        assert "task 'digits' has no run key 'task.hidden'" in done.stdout + done.stderr
    done = coterie("simulate", str(file), "--task.hidden")
    assert done.returncode == 2 and "--task.hidden needs a value" in done.stderr


# ---------------------------------------------------------------- a task's own schedule


def test_the_tasks_factor_goes_beside_the_runs_schedule() -> None:
    for kind in ("constant", "cosine", "step"):
        plain = Schedule(kind, 0.1, 0.4, 0.2)
        own = replace(plain, own=Falling().lr_factor)
        assert own.factor(0.2) == plain.factor(0.2)
        assert own.factor(0.8) == plain.factor(0.8) / 2


def test_a_run_takes_the_tasks_factor_over_all_its_rounds(tmp_path: Path) -> None:
    falling = play(tmp_path / "falling", Falling, lr_decay=1.0)
    decayed = play(tmp_path / "decayed", Kinds, lr_decay=0.5)  # half of it in round 2 of 2
    assert_equal_models(arrays_of(falling.models["a"]), arrays_of(decayed.models["a"]))


def test_a_factor_that_is_no_number_and_fednova_with_one_are_refused(tmp_path: Path) -> None:
    problem = refusal(tmp_path / "wrong", Wrong)
    assert "lr_factor of the task must give a finite number of at least 0. Got nan" in problem
    problem = refusal(tmp_path / "nova", Falling, "fednova")
    assert (
        "has its own lr_factor, which cannot be combined with this run's plain-steps = True."
        in problem
    )


def test_a_key_of_the_wrong_type_is_named_in_python_too() -> None:
    with pytest.raises(TaskError, match=r"task\.hidden of task 'tuned' must be a whole number"):
        Tuned().of_run({"hidden": "wide"})
