"""The run's configuration: one list of keys, checked once."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coterie import wire
from coterie.server.runs.config import RunConfig, require_silos
from coterie.server.runs.run import build_strategy, run_folder, terms, train_config
from coterie.strategies import HCCT, FederationError
from coterie.strategies.errors import EXIT_CONFIG
from coterie.strategies.rounds.roster import NodeRoster

ROOT = Path(__file__).parents[2]


def test_every_key_has_a_description_and_is_in_the_table() -> None:
    table = RunConfig.table()
    for name, field in RunConfig.model_fields.items():
        assert field.description, name
        assert f"| `{name.replace('_', '-')}` |" in table
        assert field.description in table
    assert len(table.splitlines()) == 2 + len(RunConfig.model_fields)


def test_flowers_list_of_keys_in_pyproject_equals_the_defaults() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = project["tool"]["flwr"]["app"]["config"]
    assert listed == RunConfig().plain()
    assert list(listed) and {k: type(v) for k, v in listed.items()} == {
        k: type(v) for k, v in RunConfig().plain().items()
    }


def test_every_value_is_one_that_flower_can_carry() -> None:
    assert all(isinstance(v, str | int | float | bool) for v in RunConfig().plain().values())


def test_a_configuration_comes_back_from_its_plain_form() -> None:
    config = RunConfig.read({"strategy": "fedavg", "local-epochs": 3, "churn": "a+2"})
    assert RunConfig.read(config.plain()) == config
    assert config.local_epochs == 3


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(ValueError, match="frozen"):
        RunConfig().rounds = 3  # type: ignore[misc]


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("strategy", "magic"),
        ("strategy", "HCCT"),
        ("task", ""),
        ("rounds", 0),
        ("rounds", 2.5),
        ("rounds", "many"),
        ("seed", -1),
        ("seed", 2**31),
        ("label", "x" * 81),
        ("min-silos", 0),
        ("wait-for-silos", 0),
        ("wait-for-silos", math.nan),
        ("round-timeout", -1),
        ("round-timeout", math.inf),
        ("churn", "late"),
        ("local-epochs", 0),
        ("batch-size", 0),
        ("lr", 0),
        ("lr", math.nan),
        ("lr-decay", 0),
        ("lr-decay", 1.01),
        ("momentum", 1),
        ("momentum", -0.1),
        ("weight-decay", -1),
        ("proximal-mu", math.inf),
        ("precision", "float16"),
        ("alpha", -1),
        ("alpha", math.inf),
        ("memory", 1.5),
        ("similarity", "labels"),
        ("solver", "magic"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(FederationError) as caught:
        RunConfig.read({key: value})
    assert f"wrong: {key}" in str(caught.value)
    assert f"Got {value!r}" in str(caught.value)
    assert (caught.value.exit_code, caught.value.phase) == (EXIT_CONFIG, "configuration")
    assert EXIT_CONFIG == 2


def test_an_unknown_key_is_refused_with_what_there_is() -> None:
    known = r"unknown key 'alhpa' \(known: adapt-steps, alone, alpha, "
    with pytest.raises(FederationError, match=known) as caught:
        RunConfig.read({"alhpa": 3})
    assert caught.value.exit_code == EXIT_CONFIG


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(FederationError) as caught:
        RunConfig.read({"rounds": 0, "lr": -1, "colour": "red"})
    for key in ("rounds", "lr", "colour"):
        assert key in str(caught.value)


@pytest.mark.parametrize("name", get_args(RunConfig.model_fields["strategy"].annotation))
def test_every_strategy_can_be_built(name: str) -> None:
    config = RunConfig.read({"strategy": name, "round-timeout": 7})
    built = build_strategy(config, run="r", roster=NodeRoster(), on_round=lambda report: None)
    assert type(built).__name__.lower() == name
    assert built.round_timeout == 7


def extremes(entry: Mapping[str, Any]) -> list[Any]:
    """The ends of what a key may be, by itself."""
    found: list[Any] = []
    for one in entry.get("anyOf", [entry]):
        if one.get("type") == "boolean":
            found += [True, False]
        elif one.get("type") == "integer":
            found += [one["minimum"], one["minimum"] + 1, one["maximum"]]
        elif one.get("type") == "number":
            found += [one.get("minimum", one.get("exclusiveMinimum", 0) + 1e-9)]
            found += [one.get("maximum", one.get("exclusiveMaximum", 1e300) * (1 - 1e-9))]
        else:
            found += one.get("enum", [one["const"]] if "const" in one else ["", "head"])
    return found


FREE = ("strategy", "task", "label", "churn", "alone", "tracking", "runs-dir", "resume")
EXTREMES = {
    key: st.sampled_from(extremes(entry))
    for key, entry in RunConfig.model_json_schema(by_alias=True)["properties"].items()
    if key not in FREE
}


@pytest.mark.parametrize("name", get_args(RunConfig.model_fields["strategy"].annotation))
def test_what_passes_as_a_configuration_is_what_its_strategy_takes(name: str) -> None:
    """Whatever legal values meet: nothing is left for the ServerApp to refuse."""
    built = 0

    @settings(max_examples=150)
    @given(st.fixed_dictionaries({}, optional=EXTREMES))
    def build(keys: dict[str, Any]) -> None:
        nonlocal built
        try:
            config = RunConfig.read({**keys, "strategy": name})
        except FederationError:
            return
        build_strategy(config, run="r", roster=NodeRoster(), on_round=lambda report: None)
        built += 1

    build()
    assert built > 10


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"strategy": "fedgroup", "pretrain-epochs": 2, "pretrain-steps": 7},
            "pretrain-epochs or pretrain-steps, not both: one of them must be 0. Got 2 and 7",
        ),
        (
            {"strategy": "fedgroup", "pretrain-silos": 2},
            "pretrain-silos must be 0, for all, or at least num-groups = 3. Got 2",
        ),
        ({"strategy": "pfedme", "lr": 0.2, "moreau-lambda": 10}, "be below 2, or .* Got 0.2 · 10"),
        ({"strategy": "pfedme", "moreau-lr": 0.1}, "moreau-lambda must be at most 1. Got 0.1 · 15"),
        ({"strategy": "fednova", "proximal-mu": 10}, "proximal-mu must be below 1 with fednova"),
        ({"strategy": "flhc", "linkage": "ward"}, "ward needs metric = euclidean. Got 'cosine'"),
        ({"strategy": "flsc", "num-groups": 1}, "soft-groups must be at most num-groups = 1. Got"),
        ({"strategy": "kmeans", "num-groups": "auto"}, "a number with strategy kmeans; only fedgr"),
    ],
)
def test_keys_that_do_not_fit_together_are_refused_where_the_strategy_uses_them(
    keys: dict[str, Any], said: str
) -> None:
    with pytest.raises(FederationError, match=f"the run's configuration is wrong: .*{said}") as at:
        RunConfig.read(keys)
    assert (at.value.exit_code, at.value.phase) == (EXIT_CONFIG, "configuration")
    assert RunConfig.read({**keys, "strategy": "fedavg"})


def test_all_that_does_not_fit_together_is_named_at_once() -> None:
    keys = {"strategy": "pfedme", "lr": 1, "moreau-lr": 1, "generators": "silos"}
    with pytest.raises(FederationError) as caught:
        RunConfig.read(keys)
    for said in ("generators cannot be combined", "lr · moreau-lambda", "moreau-lr · moreau-lamb"):
        assert said in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"min-silos": 4}, "min-silos must be at most 3, the silos of round 1. Got 4"),
        (
            {"min-silos": 3, "churn": "c+2"},
            r"min-silos must be at most 2, the .* \(churn lets .* Got 3",
        ),
        ({"strategy": "fedgroup", "num-groups": 4}, "num-groups must be at most 3, .* Got 4"),
        ({"strategy": "fedgroup", "churn": "c+2"}, "num-groups must be at most 2, .* Got 3"),
        ({"churn": "d+2"}, "churn waits for d to join, but there is no such silo"),
        ({"churn": "a-3, c-2"}, "churn waits for a, c to leave, but silos stay to the end here"),
        ({"strategy": "fedgen"}, "fedgen needs the label counts of every silo, so the file needs"),
    ],
)
def test_a_run_that_its_known_silos_cannot_go_through_is_refused(
    keys: dict[str, Any], said: str
) -> None:
    with pytest.raises(FederationError, match=f"does not go with its silos: {said}") as caught:
        require_silos(RunConfig.read(keys), ["a", "b", "c"], label_counts=False)
    assert caught.value.exit_code == EXIT_CONFIG


@pytest.mark.parametrize(
    "keys",
    [
        {"min-silos": 3},
        {"min-silos": 2, "churn": "c+2, d+21, a-21, e-3"},
        {"min-silos": 2, "churn": "c+21, c-3"},
        {"strategy": "fedgroup", "num-groups": "auto"},
        {"strategy": "ifca", "num-groups": 9},
    ],
)
def test_a_run_that_its_known_silos_can_go_through_is_not(keys: dict[str, Any]) -> None:
    require_silos(RunConfig.read({"rounds": 20, **keys}), ["a", "b", "c"], label_counts=False)


def test_hcct_is_built_with_what_the_configuration_says() -> None:
    config = RunConfig.read(
        {"alpha": 3.5, "memory": 0.25, "similarity": "parameters+buffers",
         "solver": "agglomerative", "seed": 11}
    )  # fmt: skip
    built = build_strategy(config, run="r", roster=NodeRoster(), on_round=lambda report: None)
    assert isinstance(built, HCCT)
    assert (built.alpha, built.memory, built.seed) == (3.5, 0.25, 11)
    assert (built.similarity, built.solver) == ("parameters+buffers", "agglomerative")


def test_training_messages_carry_every_key_of_local_training() -> None:
    keys = ["seed", "local-epochs", "batch-size", "lr", "lr-decay", "momentum", "weight-decay",
            "proximal-mu", "precision", "task"]  # fmt: skip
    changed = {"seed": 3, "local-epochs": 2, "batch-size": 4, "lr": 0.7, "lr-decay": 0.9,
               "momentum": 0.1, "weight-decay": 0.2, "proximal-mu": 0.3, "precision": "bfloat16",
               "task": "mnist"}  # fmt: skip
    sent = train_config(RunConfig.read(changed), run="name-7")
    assert {key: sent[key] for key in keys} == changed
    assert sent[wire.RUN] == "name-7"


def test_a_silo_is_told_all_that_it_may_refuse_before_it_joins() -> None:
    told = terms(RunConfig.read({"strategy": "fedavg", "local-epochs": 3, "rounds": 7}))
    assert told == {
        "strategy": "fedavg", "rounds": 7, "local-epochs": 3, "batch-size": 16
    }  # fmt: skip
    keys = {"local-steps": 300, "personalise": "ditto", "personal-epochs": 4, "personal": "head"}
    assert keys.items() - {("personalise", "ditto")} <= terms(RunConfig.read(keys)).items()
    steps = terms(RunConfig.read({"strategy": "pfedme", "inner-steps": 3}))
    assert (steps["inner-steps"], steps["adapt-steps"]) == (3, 20)


def test_a_silo_is_told_what_messages_beside_the_training_will_ask_for() -> None:
    def told(**keys: Any) -> dict[str, Any]:
        read = RunConfig.read({key.replace("_", "-"): value for key, value in keys.items()})
        asked = ("pretrain-epochs", "pretrain-steps", "label-counts")
        return {key: value for key, value in terms(read).items() if key in asked}

    assert told(strategy="fedgroup", pretrain_epochs=30) == {"pretrain-epochs": 30}
    assert told(strategy="fedgroup", pretrain_steps=7) == {"pretrain-steps": 7}
    assert told(strategy="fedgroup", pretrain_epochs=30, generators="groups") == {
        "pretrain-epochs": 30
    }
    assert told(strategy="kmeans", pretrain_epochs=30) == {"pretrain-epochs": 30}
    assert told(strategy="fedgen") == {"label-counts": True}
    for name in ("fedgroup", "kmeans", "hcct", "fedgenp", "fedcollab"):
        assert told(strategy=name) == {}


def test_a_runs_folder_is_its_label_and_id_and_stays_where_runs_are(tmp_path: Path) -> None:
    config = RunConfig.read({"runs-dir": str(tmp_path), "label": "../../a b/ü"})
    folder = run_folder(config, run_id=7)
    assert folder.parent == tmp_path
    assert folder.name.endswith("-7")
    assert "/" not in folder.name and " " not in folder.name
    plain = RunConfig.read({"runs-dir": str(tmp_path), "strategy": "fedavg"})
    assert run_folder(plain, run_id=8) == tmp_path / "fedavg-8"
