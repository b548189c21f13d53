"""The run's configuration: one list of keys, checked once."""

from __future__ import annotations

import math
import re
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import coterie.strategies
from coterie.server.runs.config import (
    GENERATORS,
    RunConfig,
    defaults,
    foreign_keys,
    keys_of,
    owners,
    require_silos,
    tables,
)
from coterie.server.runs.run import build_strategy, run_folder, terms
from coterie.strategies import FederationError
from coterie.strategies.errors import EXIT_CONFIG
from coterie.strategies.registry import EVERY
from coterie.strategies.rounds.nodes import NodeRoster
from coterie.strategies.rounds.options import Options, schema_of

ROOT = Path(__file__).parents[3]


NAMES, RUN = tuple(EVERY), RunConfig.own_keys()
TAKERS = tuple(name for name, row in EVERY.items() if row.takes_generators)


@pytest.mark.parametrize("name", ["run", *NAMES])
def test_every_key_has_help_and_bounds_and_is_in_its_table(name: str) -> None:
    keys = RUN if name == "run" else keys_of(EVERY[name])
    own = tables().get(name, "").splitlines()[2:]
    rows = tables()["several"].splitlines()
    shared = [row for row in rows if f"`{name}`" in row.partition(" Strategies: ")[2]]
    assert len(own) + len(shared) == len(keys)
    for key in keys.values():
        assert key.help.endswith("."), key.name
        (line,) = (line for line in own + shared if line.startswith(f"| `{key.name}` |"))
        assert key.help in line and f"| {key.bounds} |" in line
        if isinstance(key.default, int) and not isinstance(key.default, bool):
            assert "≥" in key.bounds and "≤" in key.bounds, key.name


def test_no_key_has_two_meanings() -> None:
    """A key of a strategy is none of every run's, and one that several have says one thing."""
    assert not set(owners()) & set(RUN)
    for key, names in owners().items():
        defaults_of = {repr(keys_of(EVERY[name])[key].default) for name in names}
        assert defaults_of == {repr(defaults()[key])}, key
    everything = {key for row in EVERY.values() for key in keys_of(row)}
    assert set(defaults()) == everything | set(RUN)


def test_flowers_list_of_keys_in_pyproject_equals_the_defaults() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    listed = project["tool"]["flwr"]["app"]["config"]
    assert listed == defaults()
    assert list(listed) and {k: type(v) for k, v in listed.items()} == {
        k: type(v) for k, v in defaults().items()
    }


def test_every_value_is_one_that_flower_can_carry() -> None:
    assert all(isinstance(v, str | int | float | bool) for v in defaults().values())


@pytest.mark.parametrize("name", NAMES)
def test_a_configuration_comes_back_from_its_plain_form(name: str) -> None:
    config = RunConfig.read({"strategy": name, "local-epochs": 3, "churn": "a+2"})
    assert RunConfig.read(config.plain()) == config
    assert config.local_epochs == 3 and config.plain()["churn"] == "a+2"
    assert set(config.plain()) == set(keys_of(EVERY[name])) | set(RUN)


@pytest.mark.parametrize("name", TAKERS)
def test_with_generators_the_plain_form_has_their_keys_too(name: str) -> None:
    config = RunConfig.read({"strategy": name, "generators": "silos", "generator-steps": 9})
    assert config.plain()["generator-steps"] == 9
    assert RunConfig.read(config.plain()) == config
    own = keys_of(EVERY[name], around=True)
    assert set(config.plain()) == set(own) | set(RUN)


# ---------------------------------------------------------------- keys of other strategies


@pytest.mark.parametrize("name", NAMES)
def test_keys_of_other_strategies_are_refused_with_whose_they_are(name: str) -> None:
    foreign = {k: defaults()[k] for k in owners() if k not in keys_of(EVERY[name])}
    assert foreign
    with pytest.raises(FederationError) as caught:
        RunConfig.read({"strategy": name, **foreign})
    for key in foreign:
        belongs = f"{key} belongs to {', '.join(owners()[key])}"
        assert belongs in str(caught.value)
    assert str(caught.value).count(f", and the strategy is {name}") == len(foreign)
    assert caught.value.exit_code == EXIT_CONFIG
    found = foreign_keys({"strategy": name, "rounds": 3, **foreign})
    assert set(found) == set(foreign)
    own = {k: v for k, v in defaults().items() if k not in foreign and k != "strategy"}
    assert foreign_keys({"strategy": name, **own}) == {}
    RunConfig.read({**own, "strategy": name})


def test_the_text_of_a_key_of_others_names_the_strategy_and_the_generators() -> None:
    for keys, said in (
        ({"strategy": "fedavg", "alpha": 3}, "alpha belongs to hcct, and the strategy is fedavg"),
        (
            {"strategy": "ifca", "soft-groups": 2},
            "soft-groups belongs to flsc, and the strategy is ifca",
        ),
        (
            {"strategy": "hcct", "generator-lr": 0.1},
            "generator-lr belongs to fedgenp, fedgen, and to generators = silos or groups, "
            "and the strategy is hcct",
        ),
    ):
        with pytest.raises(FederationError, match=f"configuration is wrong: {said}"):
            RunConfig.read(keys)


@pytest.mark.parametrize("name", TAKERS)
def test_generators_bring_their_keys_to_the_strategies_that_take_them(name: str) -> None:
    config = RunConfig.read({"strategy": name, "generators": "silos", "reversal-weight": 0.2})
    assert config.algorithm.plan.reversal_weight == 0.2  # type: ignore[attr-defined]
    assert foreign_keys({"strategy": name, "generators": "silos", "reversal-weight": 0.2}) == {}


# ---------------------------------------------------------------- what Flower gives


@pytest.mark.parametrize("name", NAMES)
def test_of_flowers_full_list_every_strategy_takes_its_own_keys(name: str) -> None:
    given = {**defaults(), "strategy": name}
    assert RunConfig.read_from_flower(given) == RunConfig.read({"strategy": name})
    assert RunConfig.read_from_flower({**given, "rounds": 9}).rounds == 9
    changed = {key: _another(key, e) for key, e in schemas(name).items() if key in owners()}
    for key, value in changed.items():
        try:
            config = RunConfig.read_from_flower({**given, key: value})
        except FederationError as error:  # it does not go with the defaults of others
            assert key in str(error)
        else:
            assert config.plain()[key] == value


def test_of_flowers_full_list_a_changed_key_of_another_strategy_is_refused() -> None:
    for name in NAMES:
        foreign = next(key for key in owners() if key not in keys_of(EVERY[name]))
        (owner, *_) = owners()[foreign]
        value = _another(foreign, schemas(owner)[foreign])
        with pytest.raises(FederationError, match=f"{foreign} belongs to .*strategy is {name}"):
            RunConfig.read_from_flower({**defaults(), "strategy": name, foreign: value})


def test_a_run_that_names_no_strategy_has_the_same_default_everywhere() -> None:
    read = (
        RunConfig.read({}),
        RunConfig.read_from_flower({}),
        RunConfig.read_from_flower(defaults()),
    )
    assert {config.strategy for config in read} == {"auto"}
    assert foreign_keys({"alpha": 5.0}) == {"alpha": "alpha belongs to hcct"}


def test_a_configuration_cannot_be_changed() -> None:
    config = RunConfig.read({"strategy": "hcct"})
    with pytest.raises(ValueError, match="frozen"):
        config.rounds = 3  # type: ignore[misc]
    with pytest.raises(ValueError, match="frozen"):
        config.algorithm.alpha = 3  # type: ignore[attr-defined]


# ---------------------------------------------------------------- values


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
        ("precision", "float8"),
        ("alpha", -1),
        ("alpha", math.inf),
        ("memory", 1.5),
        ("similarity", "labels"),
        ("solver", "magic"),
    ],
)
def test_a_value_out_of_bounds_is_refused_by_name(key: str, value: Any) -> None:
    with pytest.raises(FederationError) as caught:
        RunConfig.read({"strategy": "hcct", key: value})
    assert f"wrong: {key}" in str(caught.value)
    assert f"Got {value!r}" in str(caught.value)
    assert caught.value.exit_code == EXIT_CONFIG == 2


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("alhpa", "unknown key 'alhpa': the nearest is alpha"),
        ("num-grups", "unknown key 'num-grups': the nearest is num-groups"),
        (
            "colour",
            "unknown key 'colour': 'Configuration of a run' in the documentation lists the keys",
        ),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest(key: str, said: str) -> None:
    with pytest.raises(FederationError, match=re.escape(said)) as caught:
        RunConfig.read({key: 3})
    assert caught.value.exit_code == EXIT_CONFIG


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(FederationError) as caught:
        RunConfig.read({"rounds": 0, "lr": -1, "colour": "red"})
    for key in ("rounds", "lr", "colour"):
        assert key in str(caught.value)


@pytest.mark.parametrize("name", NAMES)
def test_every_strategy_can_be_built(name: str) -> None:
    config = RunConfig.read({"strategy": name, "round-timeout": 7})
    built = build_strategy(config, run="r", roster=NodeRoster(), on_round=lambda report: None)
    assert type(built.algorithm) is EVERY[name].load()
    assert built.round_timeout == 7
    in_python = getattr(coterie.strategies, EVERY[name].public)()
    assert built.algorithm == in_python.algorithm, "the same defaults in Python"


def schemas(name: str, *, around: bool = False) -> dict[str, Mapping[str, Any]]:
    """What each key that a run with this strategy has may be, as a JSON schema."""
    row = EVERY[name]
    kinds: list[type[Options]] = [RunConfig, row.load()]
    kinds += [EVERY[row.base].load()] if row.base else []
    kinds += [GENERATORS.load()] if around else []
    own = {**RUN, **keys_of(row, around=around)}
    return {
        key: _schema(kind, key) for kind in kinds for key in dict(kind.own_keys()) if key in own
    }


def _schema(kind: Any, key: str) -> Mapping[str, Any]:
    *path, last = kind.own_keys()[key].path
    for step in path:
        kind = kind.model_fields[step].annotation
    return schema_of(kind.model_fields[last])


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


def _another(key: str, entry: Mapping[str, Any]) -> Any:
    """A value that is not the default."""
    return next(value for value in extremes(entry)[::-1] if value != defaults()[key])


FREE = (
    "strategy",
    "task",
    "optimiser",
    "label",
    "churn",
    "baseline-run",
    "tracking",
    "runs-dir",
    "resume",
)


@pytest.mark.parametrize(
    ("name", "around"), [*((n, False) for n in NAMES), *((n, True) for n in TAKERS)]
)
def test_what_passes_as_a_configuration_is_what_its_strategy_takes(name: str, around: bool) -> None:
    """Whatever legal values meet: nothing is left for the ServerApp to refuse."""
    built = 0
    found = schemas(name, around=around)
    assert {*keys_of(EVERY[name]), *RUN} <= set(found)
    values = {k: st.sampled_from(extremes(entry)) for k, entry in found.items() if k not in FREE}
    if around:
        values["generators"] = st.sampled_from(["silos", "groups"])

    @settings(max_examples=30)
    @given(st.fixed_dictionaries({}, optional=values))
    def build(keys: dict[str, Any]) -> None:
        nonlocal built
        keys = {"generators": "silos", **keys} if around else keys
        try:
            config = RunConfig.read({**keys, "strategy": name})
        except FederationError:
            return
        build_strategy(config, run="r", roster=NodeRoster(), on_round=lambda report: None)
        assert RunConfig.read(config.plain()) == config
        built += 1

    build()
    assert built > 2


@pytest.mark.parametrize("name", NAMES)
def test_every_end_of_what_a_key_may_be_is_taken_and_what_is_beyond_is_refused(name: str) -> None:
    for key, entry in schemas(name).items():
        if key in (*FREE, "generators") or (key in RUN and name != "fedavg"):
            continue
        for value in extremes(entry):
            try:
                config = RunConfig.read({"strategy": name, key: value})
            except FederationError as error:  # by itself it may be so, with the defaults not
                assert f"{key} must be" not in str(error) or key in FITTING, (key, value)
            else:
                assert config.plain()[key] == value
        for value in beyond(entry):
            with pytest.raises(FederationError) as caught:
                RunConfig.read({"strategy": name, key: value})
            said = str(caught.value)
            assert f"{key} must be" in said and f"Got {value!r}" in said, (key, value)


FITTING = (
    "soft-groups", "cold-start-silos", "rounds", "personal", "moreau-lambda", "proximal-mu",
    "generator-steps",
)  # fmt: skip
"""Keys that other keys bound too."""


def beyond(entry: Mapping[str, Any]) -> list[Any]:
    """Values that a key may not be, by itself."""
    kinds = {one.get("type") for one in entry.get("anyOf", [entry])}
    if not kinds & {"integer", "number"}:
        words = ["none of these"] if "enum" in entry else []
        return [17, None, *words] if "boolean" not in kinds else [17]
    found: list[Any] = [math.nan, math.inf, -math.inf, "many", None]
    for one in entry.get("anyOf", [entry]):
        found += [one["minimum"] - 1] if "minimum" in one else []
        found += [one["maximum"] + 1] if "maximum" in one else []
        found += [one[end] for end in ("exclusiveMinimum", "exclusiveMaximum") if end in one]
    return found


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        (
            {"strategy": "fedgroup", "cold-start-epochs": 2, "cold-start-steps": 7},
            "cold-start-epochs or cold-start-steps, not both: one must be 0. Got 2 and 7",
        ),
        (
            {"strategy": "fedgroup", "cold-start-silos": 2},
            "cold-start-silos must be 0, for all, or at least num-groups = 3. Got 2",
        ),
        (
            {"strategy": "pfedme", "lr": 0.2, "moreau-lambda": 10},
            "be below 2, otherwise .* Got 0.2 · 10",
        ),
        ({"strategy": "pfedme", "moreau-lr": 0.1}, "moreau-lambda must be at most 1. Got 0.1 · 15"),
        ({"strategy": "fednova", "proximal-mu": 10}, "proximal-mu must be below 1 with fednova"),
        ({"strategy": "flhc", "linkage": "ward"}, "ward needs metric = euclidean. Got 'cosine'"),
        ({"strategy": "flsc", "num-groups": 1}, "soft-groups must be at most num-groups = 1. Got"),
        (
            {"strategy": "kmeans", "num-groups": "auto"},
            "num-groups must be a whole number, at least 1 .* 'auto'",
        ),
        ({"strategy": "hcct", "alpha": "auto", "rounds": 5}, "rounds must be at least 6. Got 5"),
        ({"strategy": "hcct", "alpha": True}, "alpha must be .* Got 'True'"),
    ],
)
def test_keys_that_do_not_fit_together_are_refused_where_the_strategy_uses_them(
    keys: dict[str, Any], said: str
) -> None:
    with pytest.raises(FederationError, match=f"the run's configuration is wrong: .*{said}") as at:
        RunConfig.read(keys)
    assert at.value.exit_code == EXIT_CONFIG
    shared = {key: value for key, value in keys.items() if key in RUN}
    assert RunConfig.read({**shared, "strategy": "fedavg"})


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
            r"min-silos must be at most 2, the .* \(churn adds .* Got 3",
        ),
        ({"strategy": "fedgroup", "num-groups": 4}, "num-groups must be at most 3, .* Got 4"),
        ({"strategy": "fedgroup", "churn": "c+2"}, "num-groups must be at most 2, .* Got 3"),
        ({"churn": "d+2"}, "churn waits for d to join, but there is no such silo"),
        ({"churn": "a-3, c-2"}, "churn waits for a, c to leave, but here silos stay until the end"),
        ({"strategy": "fedgen"}, "fedgen needs the label counts of every silo, so the file needs"),
    ],
)
def test_a_run_that_its_known_silos_cannot_go_through_is_refused(
    keys: dict[str, Any], said: str
) -> None:
    with pytest.raises(FederationError, match=f"does not fit its silos: {said}") as caught:
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


def test_a_silo_is_told_all_that_it_may_refuse_before_it_joins() -> None:
    entries = terms(RunConfig.read({"strategy": "fedavg", "local-epochs": 3, "rounds": 7}))
    assert entries == {
        "strategy": "fedavg", "rounds": 7, "local-epochs": 3, "batch-size": 16,
        "momentum": 0.0, "weight-decay": 0.0, "proximal-mu": 0.0, "precision": "float32",
    }  # fmt: skip
    keys = {"strategy": "hcct", "local-steps": 300, "personal-epochs": 4, "personal": "head"}
    assert keys.items() <= terms(RunConfig.read({**keys, "personalise": "ditto"})).items()
    steps = terms(RunConfig.read({"strategy": "pfedme", "inner-steps": 3}))
    assert (steps["inner-steps"], steps["adapt-steps"]) == (3, 20)


def test_a_silo_is_told_what_messages_beside_the_training_will_ask_for() -> None:
    def demands(**keys: Any) -> dict[str, Any]:
        read = RunConfig.read({key.replace("_", "-"): value for key, value in keys.items()})
        asked = ("cold-start-epochs", "cold-start-steps", "label-counts")
        return {key: value for key, value in terms(read).items() if key in asked}

    assert demands(strategy="fedgroup", cold_start_epochs=30) == {"cold-start-epochs": 30}
    assert demands(strategy="fedgroup", cold_start_steps=7) == {"cold-start-steps": 7}
    assert demands(strategy="fedgroup", cold_start_epochs=30, generators="groups") == {
        "cold-start-epochs": 30
    }
    assert demands(strategy="kmeans", cold_start_epochs=30) == {"cold-start-epochs": 30}
    assert demands(strategy="fedgen") == {"label-counts": True}
    for name in ("fedgroup", "kmeans", "hcct", "fedgenp", "fedcollab"):
        assert demands(strategy=name) == {}


def test_a_runs_folder_is_its_label_and_id_and_stays_where_runs_are(tmp_path: Path) -> None:
    config = RunConfig.read({"runs-dir": str(tmp_path), "label": "../../a b/ü"})
    folder = run_folder(config, run_id=7)
    assert folder.parent == tmp_path
    assert folder.name.endswith("-7")
    assert "/" not in folder.name and " " not in folder.name
    plain = RunConfig.read({"runs-dir": str(tmp_path), "strategy": "fedavg"})
    assert run_folder(plain, run_id=8) == tmp_path / "fedavg-8"
