"""The run's configuration: every key with type, bounds and meaning, checked once at the edge.

The keys are the same in ``coterie run --set KEY=VALUE``, ``flwr run . --run-config "KEY=VALUE"``,
and ``[tool.flwr.app.config]`` in ``pyproject.toml``, which holds the defaults for Flower. The keys
of every run are here. Those of a strategy are in its options class, found by
``coterie.strategies.registry``. ``make config`` generates that list and the tables of the
documentation.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from difflib import get_close_matches
from functools import cache
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, InstanceOf, field_validator

from coterie import wire
from coterie.features.robust.keys import Influence, aggregate_problem
from coterie.features.secure.keys import insecure
from coterie.features.server_optimiser.keys import ServerOptimiser, server_optimiser_problem
from coterie.strategies.errors import FederationError, refused
from coterie.strategies.registry import DEFAULT, EVERY, STRATEGIES, Row, row_of
from coterie.strategies.rounds.algorithm import Algorithm
from coterie.strategies.rounds.churn import Churn
from coterie.strategies.rounds.options import Key, Options, Positive, Scalar, dashed, rows_of

GENERATORS = STRATEGIES["fedgenp"]
"""The strategy whose options accompany ``generators``."""
ALONE_BY_STEPS: Mapping[str, Any] = {"strategy": "independent"}
ALONE_WITH_TREES: Mapping[str, Any] = {"strategy": "trees", "given-groups": wire.EACH_ALONE}
"""Keys of runs in which every silo trains alone."""
COMMANDS = {name: Row(name, "Algorithm", "rounds.algorithm") for name in wire.UNTRAINED}
COMMANDS[wire.REGRESSION] = Row(
    wire.REGRESSION, "RegressionKeys", "coterie.features.sums.regression.keys", elsewhere=True
)
COMMANDS[wire.CONTRIBUTION] = Row(wire.CONTRIBUTION, "LeaveOneOut", "plain.leave_one_out")
"""Rows of the runs that commands start in place of a strategy; those that only ask once have no
options."""


class RunConfig(Options, wire.SiloKeys):
    """The configuration of one run, made by ``read``; keys are written with dashes."""

    strategy: str = Field(DEFAULT, description="Strategy, which decides who trains with whom.")
    task: str = Field(
        "digits", min_length=1, description="Name of the task, which every silo must serve."
    )
    label: str = Field(
        "", max_length=80, description="Name for the run's folder. Empty: the strategy's name."
    )
    min_silos: int = Field(
        2,
        ge=1,
        le=100_000,
        description="Number of silos that must be connected before round 1 starts.",
    )
    wait_for_silos: Positive = Field(
        120.0, description="Time to wait for silos before giving up, in seconds."
    )
    round_timeout: Positive = Field(
        600.0,
        description="Time to wait for replies in a round, in seconds. The round then continues "
        "without the missing ones.",
    )
    churn: str = Field(
        "",
        description="Scripted joins and leaves, `NAME+ROUND` and `NAME-ROUND`, separated by "
        "commas, for repeatable simulations. Empty: silos join and leave at any time.",
    )
    generators: Literal["off", "silos", "groups"] = Field(
        "off",
        description="FedGenP's generators with the `fedavg`, `hcct`, `fedgroup` or `fedcollab` "
        "strategy: one per silo (`silos`) or one per group (`groups`). The keys of `fedgenp` then "
        "apply as well. The `fedgenp` strategy is `fedavg` with one generator per silo.",
    )
    baseline_run: str = Field(
        "",
        description="Name, id or folder of a run of the `independent` strategy (local training) "
        "to compare with. The record then contains the gains over it. Empty: no comparison in the "
        "record.",
    )
    tracking: str = Field(
        "",
        description="Experiment trackers that also receive the metrics: `tensorboard`, `mlflow` "
        "or `wandb`, or several separated by commas. Empty: none.",
    )
    keep: Literal["last", "best"] = Field(
        "last",
        description="Model that each silo keeps at the end: that of the `last` round, or that of "
        "its `best` round on its validation data (needs `validation`). The record always contains "
        "the last round's results.",
    )
    evaluate_every: int = Field(
        1,
        ge=1,
        le=100_000,
        description="Rounds between two evaluations of the silos' models. The last round is "
        "always evaluated.",
    )
    patience: int = Field(
        0,
        ge=0,
        le=100_000,
        description="Number of rounds without an improvement of the silos' mean validation error "
        "after which the run stops early (needs `validation`). Test data are not used. 0: never.",
    )
    keep_every: int = Field(
        0,
        ge=0,
        le=100_000,
        description="Rounds between two saves of each silo's own model to its disk. 0: only after "
        "the last round.",
    )
    secure: bool = Field(
        False,
        description="Secure aggregation: a coordinator that runs the code unchanged sees only "
        "sketches of the updates, to compare them, and sums over groups. Available for the "
        "strategies `hcct`, `fedgroup`, `auto`, `fedavg`, `independent` and `trees`, with "
        "coterie's own silos.",
    )
    name_members: bool = Field(
        False,
        description="Whether silos learn the names of the members of their group, not only their "
        "number.",
    )
    runs_dir: str = Field(
        "", description="Folder of run records at the coordinator. Empty: its default folder."
    )
    resume: str = Field(
        "",
        pattern=r"^[A-Za-z0-9._-]*$",
        description="Name of a run's folder in `runs-dir`: continue that run after its last "
        "checkpoint, with its original keys. `coterie run resume RUN` sets this key. Empty: "
        "start a new run.",
    )
    more_rounds: int = Field(
        0,
        ge=0,
        le=100_000,
        description="With `resume`: number of rounds that a complete run gets in addition. "
        "`coterie run continue RUN --rounds N` sets this key. 0: the run is interrupted, and "
        "plays its remaining rounds.",
    )
    parent: str = Field(
        "",
        description="Run from which this one begins, with its groups, models and state: name, id "
        "or folder of a complete run of the same strategy and task; `rounds` are then played in "
        "addition. Or the `.safetensors` file of a model that replaces the random initial one. "
        "`coterie run --from` sets this key, and `coterie evaluate` for what it evaluates. Empty: "
        "a random initial model.",
    )
    influence: Influence = Field(default_factory=Influence)
    server_optimiser: ServerOptimiser = Field(default_factory=ServerOptimiser)
    algorithm: InstanceOf[Algorithm[Any]]
    task_keys: dict[str, Any] = Field(default_factory=dict)
    """``task.<name>`` → value; only the task at the silos knows which values are valid."""

    @field_validator("primary_metric")
    @classmethod
    def _metric_is_known(cls, name: str) -> str:
        if name and name not in wire.KNOWN_METRICS:
            raise ValueError(f"must be one of {', '.join(wire.KNOWN_METRICS)}")
        return name

    @field_validator("churn")
    @classmethod
    def _churn_is_readable(cls, text: str) -> str:
        Churn.parse(text)
        return text

    @field_validator("tracking")
    @classmethod
    def _trackers_are_known(cls, text: str) -> str:
        from coterie.server.runs.tracking import tracker_names  # what it loads, few runs need

        tracker_names(text)
        return text

    @classmethod
    def read(cls, values: Mapping[str, Any]) -> Self:
        """Check a run's keys.

        Raises ``FederationError`` with every problem: unknown keys, keys of another strategy,
        values out of bounds, and keys that do not fit together.
        """
        values = _of_ours(values)
        row = _row(values.get("strategy", DEFAULT))
        around = values.get("generators", "off") != "off"
        shared = {key: value for key, value in values.items() if key in cls.own_keys()}
        of_task = {key: value for key, value in values.items() if key.startswith(wire.TASK_KEYS)}
        own = {key: value for key, value in values.items() if key not in {*shared, *of_task}}
        problems = [*_foreign(own, row, around=around), *_generator_problems(values, row)]
        problems += _task_key_problems(of_task)
        own = {key: value for key, value in own.items() if key in keys_of(row, around=around)}
        algorithm = Algorithm[Any]()
        try:
            algorithm = _algorithm(row, own, values)
        except FederationError as error:
            problems.append(str(error).removesuffix("."))
        try:
            config = cls.build(shared, algorithm=algorithm, task_keys=of_task)
            problems += config.algorithm.problems(train_config(config, run=""))
            problems += _validation_problems(config)
            averages, name = config.algorithm.averages, config.strategy
            why = aggregate_problem(config.influence, averages=averages, strategy=name)
            problems += [why] if why else []
            why = server_optimiser_problem(config.server_optimiser, config.algorithm, name)
            problems += [why] if why else []
            how = {"aggregate": config.influence.aggregate, "wire_format": config.wire_format}
            why = insecure(config.algorithm, name=name, **how) if config.secure else ""
            problems += [why] if why else []
        except FederationError as error:
            problems.append(str(error).removesuffix("."))
        if problems:
            raise refused(f"the run's configuration is wrong: {'; '.join(problems)}.")
        return config

    @classmethod
    def read_from_flower(cls, values: Mapping[str, Any]) -> Self:
        """Check the keys from Flower; those of other strategies are ignored at their default."""
        usual = defaults()
        values = _of_ours(values)
        row = _row(values.get("strategy", DEFAULT))
        own = keys_of(row, around=values.get("generators", "off") != "off") | cls.own_keys()
        return cls.read({k: v for k, v in values.items() if k in own or v != usual.get(k)})

    def kept_by_silos(self) -> Iterator[str]:
        """Yield the keys with which silos hold models for this run alone."""
        if self.secure:
            yield "secure"
        for key, at in ((one.name, one.at) for one in wire.entries().values() if one.at.keeps):
            value = getattr(self, key)
            if value != at.default and at.keeps in ("any", value):
                yield f"{key} = {value}"
        if self.strategy == wire.APFL:
            yield f"strategy = {wire.APFL}"

    def of_training(self) -> dict[str, Any]:
        """Return task, local training and bounds on silos, for a run of several models in a round.

        Keys by which silos hold something of one model from round to round are left out.
        """
        one_model = {one.name for one in wire.entries().values() if one.at.keeps}
        one_model |= {"evaluate-trained", "keep-optimiser", "wire-format"}
        shared = {dashed(name) for name in wire.SiloKeys.model_fields} - one_model
        shared |= {*Influence.own_keys(), "task", "round-timeout", *self.task_keys}
        return {key: value for key, value in self.plain().items() if key in shared}

    def plain(self) -> dict[str, Any]:
        """Return all keys of this run and their values as written."""
        algorithm, row = self.algorithm, _row(self.strategy)
        own = algorithm.plain()
        base = getattr(algorithm, "base", None)
        if base is not None:
            own = {**base.plain(), **own}
        own = {k: v for k, v in own.items() if k not in _fixed(row)}
        return {**super().plain(), **own, **self.task_keys}


def keys_alone(*, trees: bool, family: str = "") -> dict[str, Any]:
    """Return the keys of local training; ``family``: that of trained models, if a task has both."""
    named = {f"task.{wire.FAMILY}": family} if family else {}
    return {**(ALONE_WITH_TREES if trees else ALONE_BY_STEPS), **named}


def trains_alone(keys: Mapping[str, Any]) -> bool:
    """Return whether every silo trains alone in a run with these keys."""
    return any(own.items() <= keys.items() for own in (ALONE_BY_STEPS, ALONE_WITH_TREES))


def train_config(config: RunConfig, *, run: str) -> dict[str, Scalar]:
    """Return the entries that every training message carries."""
    keys = {**Options.plain(config), wire.PERSONAL_LR: config.personal_lr or config.lr}
    sent = wire.training_entries(keys) | ({wire.KEEP_BEST: True} if config.keep == "best" else {})
    sent |= {wire.PARENT: Path(config.parent).name} if config.parent else {}
    sent |= {wire.TASK: config.task, wire.STRATEGY: config.strategy, wire.RUN: run}
    return sent | config.task_keys


def _of_ours(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return keys with the strategy under our name of it."""
    own = {"strategy": wire.strategy_of(values["strategy"])} if "strategy" in values else {}
    return {**values, **own}


def _validation_problems(config: RunConfig) -> Iterator[str]:
    for key, asked in (("keep = best", config.keep == "best"), ("patience", config.patience)):
        if asked and not config.validation:
            yield f"{key} needs validation data: set validation, to 0.1 for example"


def _task_key_problems(keys: Mapping[str, Any]) -> Iterator[str]:
    """Yield problems with the form of task keys; their meaning needs the task."""
    for key, value in keys.items():
        if not re.fullmatch(r"task\.[a-z][a-z0-9_-]{0,39}", key):
            yield (
                "a key of the task must be task. and a name of lower-case letters, digits, - "
                f"and _. Got {key!r}"
            )
        elif not isinstance(value, int | float | str) or not _is_short(value):
            yield f"{key} must be a number, true or false, or a short text. Got {value!r}"


def _is_short(value: float | str) -> bool:
    return len(value) <= 200 if isinstance(value, str) else abs(value) <= 1e9


@cache
def keys_of(row: Row, *, around: bool = False) -> dict[str, Key]:
    """Return the keys of a strategy and its base; with FedGenP's generators if ``around``."""
    base = keys_of(STRATEGIES[row.base]) if row.base else {}
    own = {key: value for key, value in row.load().own_keys().items() if key not in _fixed(row)}
    generators = GENERATORS.load().own_keys() if around and row.takes_generators else {}
    return {**base, **own, **generators}


@cache
def owners() -> dict[str, list[str]]:
    """Return key → strategies that have it."""
    found: dict[str, list[str]] = {}
    for row in EVERY.values():
        for key in keys_of(row):
            found.setdefault(key, []).append(row.name)
    return found


@cache
def all_keys() -> dict[str, Key]:
    """Return every key; one shared by several strategies as the first of them has it."""
    own = [key for row in EVERY.values() for key in keys_of(row).values()]
    return {key.name: key for key in [*reversed(own), *RunConfig.own_keys().values()]}


def key_named(name: str, strategy: str) -> Key | None:
    """Return a key by its name; looks at other strategies only if necessary."""
    row = row_of(strategy)
    near = RunConfig.own_keys() | ({} if row is None else keys_of(row))
    return near.get(name) or all_keys().get(name)


def defaults() -> dict[str, Scalar]:
    """Return every key with its default, which Flower needs in advance."""
    shared = RunConfig.own_keys()
    return {name: all_keys()[name].default for name in [*shared, *owners()]}


def tables() -> dict[str, str]:
    """Return Markdown tables of keys: of every ``run``, of ``several`` strategies, of each."""
    takers: dict[str, list[str]] = {}
    for one in EVERY.values():
        for row in rows_of(keys_of(one)):
            takers.setdefault(row, []).append(one.name)
    found = {"run": rows_of(RunConfig.own_keys()), "several": list[str]()}
    for row, names in takers.items():
        if names[1:]:
            strategies = ", ".join(f"`{name}`" for name in names)
            found["several"].append(f"{row.removesuffix(' |')} Strategies: {strategies}. |")
        else:
            found.setdefault(names[0], []).append(row)
    head = ["| key | default | bounds | meaning |", "|---|---|---|---|"]
    return {name: "\n".join([*head, *rows, ""]) for name, rows in found.items()}


def foreign_keys(values: Mapping[str, Any]) -> dict[str, str]:
    """Return keys of other strategies → an explanation: "alpha belongs to hcct"."""
    row = row_of(str(values.get("strategy", DEFAULT)))
    if row is None:
        return {}
    around = values.get("generators", "off") != "off"
    own = keys_of(row, around=around) | RunConfig.own_keys()
    return {key: _belongs(key) for key in values if key not in own and key in owners()}


def _belongs(key: str) -> str:
    names = owners()[key]
    text = f"{key} belongs to {', '.join(names)}"
    around = key in GENERATORS.load().own_keys()
    return f"{text}, and to generators = silos or groups" if around else text


def _row(name: Any) -> Row:
    if name in COMMANDS:
        return COMMANDS[name]
    row = row_of(str(name))
    if row is None:
        raise refused(
            "the run's configuration is wrong: strategy must be one of "
            f"{', '.join(EVERY)}, or module:Class. Got {name!r}."
        )
    return row


def _fixed(row: Row) -> set[str]:
    return {name.replace("_", "-") for name in row.fixed}


def _foreign(own: Mapping[str, Any], row: Row, *, around: bool) -> Iterator[str]:
    """Yield problems with keys that are unknown or belong to another strategy."""
    mine = keys_of(row, around=around)
    for key in own:
        if key in mine:
            continue
        if key in owners():
            yield f"{_belongs(key)}, and the strategy is {row.name}"
        else:
            near = get_close_matches(key, [*mine, *RunConfig.own_keys(), *owners()], n=1)
            advice = (
                f"the nearest is {near[0]}"
                if near
                else f"{wire.page('Configuration of a run')} lists the keys"
            )
            yield f"unknown key {key!r}: {advice}"


def _algorithm(row: Row, own: Mapping[str, Any], values: Mapping[str, Any]) -> Algorithm[Any]:
    """Return the algorithm of a strategy, with its base and any generators around it."""
    seed = values.get("seed", 0)
    around = values.get("generators", "off")
    base = _built(STRATEGIES[row.base], own, seed) if row.base else None
    made = _built(row, own, seed, base=base)
    if around == "off" or row is GENERATORS or not row.takes_generators:
        return made
    return _built(GENERATORS, own, seed, base=made, receivers=around)


def _built(row: Row, own: Mapping[str, Any], seed: Any, **fields: Any) -> Algorithm[Any]:
    kind = row.load()
    fields = {name: value for name, value in fields.items() if value is not None}
    fields |= {"seed": seed} if "seed" in kind.model_fields else {}
    keys = {key: value for key, value in own.items() if key in kind.own_keys()}
    return kind.build(keys, **row.fixed, **fields)


def _generator_problems(values: Mapping[str, Any], row: Row) -> Iterator[str]:
    around = values.get("generators", "off")
    if around != "off" and not row.takes_generators:
        takers = ", ".join(other.name for other in STRATEGIES.values() if other.takes_generators)
        yield f"generators cannot be combined with strategy {row.name}, only with {takers}"
    if around == "groups" and row.name in ("fedgenp", "fedavg"):
        yield (
            f"{row.name} has only one group, so there is no other to learn from; use "
            "generators=silos, or another strategy"
        )


def require_silos(config: RunConfig, names: Sequence[str], *, label_counts: bool) -> None:
    """Reject a run that does not fit its silos, where these are known in advance.

    Args:
        names: of all its silos, which stay until the end.
        label_counts: whether they share their label counts.

    Raises:
        FederationError: every problem is named.
    """
    problems = list(_silo_problems(config, names, label_counts=label_counts))
    if problems:
        raise refused(f"the run does not fit its silos: {'; '.join(problems)}.")


def _silo_problems(config: RunConfig, names: Sequence[str], *, label_counts: bool) -> Iterator[str]:
    churn = Churn.parse(config.churn)
    first = [name for name in names if churn.joins.get(name, 0) <= 1]
    here = f"{len(first)}, the silos of round 1" + (
        "" if len(first) == len(names) else " (churn adds the others later)"
    )
    if config.min_silos > len(first):
        yield f"min-silos must be at most {here}. Got {config.min_silos}"
    groups = config.plain().get("num-groups") if config.strategy == "fedgroup" else None
    if isinstance(groups, int) and groups > len(first):
        yield f"num-groups must be at most {here}. Got {groups}"
    unknown = [n for n, at in churn.joins.items() if n not in names and at <= config.rounds]
    if unknown:
        yield f"churn waits for {', '.join(unknown)} to join, but there is no such silo"
    leaving = [
        name
        for name, at in churn.leaves.items()
        if name in names and max(at, churn.joins.get(name, 0)) <= config.rounds
    ]
    if leaving:
        yield f"churn waits for {', '.join(leaving)} to leave, but here silos stay until the end"
    if config.strategy == "fedgen" and not label_counts:
        yield (
            "fedgen needs the label counts of every silo, so the file needs `label-counts = true`; "
            "fedgenp needs none"
        )
