"""A silo's settings, which it never takes from the coordinator.

They arrive as Flower's ``node_config``, in the same form from the resident silo, a stock
``flower-supernode --node-config`` and the simulation engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field

from coterie.client.home.policy import Policy
from coterie.client.home.privacy import Privacy
from coterie.client.home.schema import In, read_all, settings_of
from coterie.system.ports import listen_address
from coterie.tasks.base import Option
from coterie.wire import is_silo_name

DATA_PREFIX = "data."
ALSO = re.compile(r"also-(\d{1,2})\.(task|data\..+)")
"""A key of a node config that belongs to one of a silo's further tasks."""
PRIVACY = "privacy-"
"""Prefix of the node config keys that are settings of ``Privacy``."""
MAX_WORKERS = 64
MAX_THREADS = 4096
"""More than any machine has; with many more, libgomp ends the process."""


class SettingsError(ValueError):
    """A silo's setting cannot be used. The text names it and what is expected."""


@dataclass(frozen=True)
class Study:
    """A further task that a silo serves, with the task's options."""

    task: str
    options: Mapping[str, Option] = field(default_factory=dict)


def _listened(text: str) -> str:
    return text and listen_address(text)


@dataclass(frozen=True)
class Process:
    """Settings that only the process of a silo's folder uses."""

    gpu_memory: Annotated[
        float,
        Field(gt=0, le=1),
        In("compute", "Share of the GPU's memory that may be used, above 0 and at most 1."),
    ] = 1.0
    nice: Annotated[
        int,
        Field(ge=0, le=19),
        In(
            "compute",
            "Niceness of this silo's process, 0 to 19: the higher, the more other work on this "
            "machine takes precedence.",
        ),
    ] = 0
    metrics_address: Annotated[
        str,
        AfterValidator(_listened),
        In(
            "monitoring",
            "Address at which Prometheus reads /metrics: PORT (for this machine only) or "
            "HOST:PORT. Empty: metrics are not served.",
        ),
    ] = ""
    watch_labelled: Annotated[
        str,
        In(
            "monitoring",
            "New samples with labels, on which `coterie silo watch-model` measures the model in "
            "use: a file or folder like data. Empty: none.",
        ),
    ] = ""
    watch_inputs: Annotated[
        str,
        In(
            "monitoring",
            "New samples without labels, whose inputs `coterie silo watch-model` compares with "
            "earlier ones. Empty: those with labels.",
        ),
    ] = ""
    log_format: Annotated[
        Literal["text", "json"],
        In("monitoring", 'Log format: "text", or "json" (one object per line).'),
    ] = "text"


@dataclass(frozen=True)
class SiloSettings:
    """One silo's settings. A field without a section is written differently in ``silo.toml``.

    Attributes:
        name: unique in the federation: letters, digits, ``.``, ``_``, ``-``.
        task: built-in name, a file that declares one, or ``module:attribute``.
        options: the task's options, ``data.KEY=VALUE`` in a node config.
        home: the silo's folder; empty saves nothing.
        privacy: the terms of differential privacy; None disables it.
        also: further tasks, under the same policy.
        unlabelled: file or folder of samples, as for predictions, if they have no labels yet.
        role: ``evaluate`` for a silo that measures a model and trains none.
    """

    name: Annotated[str, In("", "")]
    task: Annotated[str, In("", "")] = "digits"
    options: Mapping[str, Option] = field(default_factory=dict)
    alpha: Annotated[
        float | None,
        Field(ge=0),
        In(
            "policy",
            "This silo's own preference for more data (α of HCCT). Without this line: the run's.",
            example="50.0",
        ),
    ] = None
    device: Annotated[
        str,
        In(
            "compute",
            "Device on which this silo trains: auto, cpu, cuda or cuda:N. auto takes a GPU on "
            "which PyTorch can compute, otherwise the CPU, with a warning that gives the reason. "
            "A named GPU that cannot be used is refused.",
        ),
    ] = "auto"
    threads: Annotated[
        int,
        Field(ge=0, le=MAX_THREADS),
        In(
            "compute",
            "CPU threads. Results are bit-identical only between runs with the same number. 0: "
            "PyTorch's choice.",
        ),
    ] = 1
    workers: Annotated[
        int,
        Field(ge=0, le=MAX_WORKERS),
        In(
            "compute",
            "Processes that read images or other data not held in memory. 0: the silo's own "
            "process reads them.",
        ),
    ] = 0
    home: Annotated[str, In("", "")] = ""
    policy: Policy = field(default_factory=Policy)
    privacy: Privacy | None = None
    also: tuple[Study, ...] = ()
    unlabelled: Annotated[str, In("", "")] = ""
    role: Annotated[Literal["train", "evaluate"], In("", "")] = "train"

    def __post_init__(self) -> None:
        check_name(self.name)
        if self.alpha is not None and not 0 <= self.alpha < float("inf"):
            raise SettingsError(f"alpha must be finite and at least 0. Got {self.alpha}.")
        if not 0 <= self.threads <= MAX_THREADS:
            raise SettingsError(f"threads must be 0 to {MAX_THREADS}. Got {self.threads}.")
        if not 0 <= self.workers <= MAX_WORKERS:
            raise SettingsError(f"workers must be 0 to {MAX_WORKERS}. Got {self.workers}.")
        if self.policy.approve and not self.home:
            raise SettingsError(
                'approve = "ask" needs a folder in which approvals are saved: name one with --home.'
            )
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise SettingsError(f"device must be auto, cpu, cuda or cuda:N. Got {self.device!r}.")
        if self.also and self.privacy is not None:
            raise SettingsError(
                "[privacy] needs a silo with one task: a budget counts what is revealed about "
                "one data set. Give each task its own silo, or leave [privacy] out."
            )
        if self.tests and (self.unlabelled or self.privacy is not None):
            key = "unlabelled" if self.unlabelled else "[privacy]"
            raise SettingsError(
                f'role = "evaluate" measures a model on labels and trains none: leave out {key}.'
            )
        if self.also and self.unlabelled:
            raise SettingsError(
                "unlabelled needs a silo with one task, because it names that task's samples. "
                "Give each task its own silo."
            )

    @property
    def tests(self) -> bool:
        """Whether the silo only tests."""
        return self.role == "evaluate"

    @property
    def trains(self) -> bool:
        return not (self.unlabelled or self.tests)

    def studies(self) -> list[SiloSettings]:
        """Return these settings once for each task: as ``task``, with the others in ``also``."""
        every = [Study(self.task, self.options), *self.also]
        return [
            replace(self, task=one.task, options=one.options, also=(*every[:i], *every[i + 1 :]))
            for i, one in enumerate(every)
        ]

    @classmethod
    def from_node_config(cls, config: Mapping[str, Option], *, node_id: int) -> SiloSettings:
        """Read Flower's node config.

        A node without a name is called ``silo-<partition>`` in a simulation, where Flower gives
        ``partition-id``, else ``node-<id>``. Only in a simulation, the digits are cut by partition,
        so that the simulation engine works without further settings.

        Raises:
            SettingsError: an unknown key or a value out of bounds.
        """
        given = {k: v for k, v in config.items() if k not in ("partition-id", "num-partitions")}
        also = _also({k: given.pop(k) for k in [*given] if ALSO.fullmatch(k)})
        options = {
            k.removeprefix(DATA_PREFIX): given.pop(k) for k in [*given] if k.startswith(DATA_PREFIX)
        }
        known = {one.key for kind in (cls, Policy) for one in settings_of(kind)}
        known |= {PRIVACY + one.key for one in settings_of(Privacy)}
        if unknown := sorted(given.keys() - known):
            raise SettingsError(
                f"unknown setting {unknown[0]!r}. A silo has: {', '.join(sorted(known))} "
                f"and {DATA_PREFIX}KEY for its task."
            )
        partition = config.get("partition-id")
        if "name" not in given:
            given["name"] = f"node-{node_id}" if partition is None else f"silo-{partition}"
            if partition is not None and not options and given.get("task", "digits") == "digits":
                options = {"skip": int(partition) * 110, "train": 80, "test": 30}
        private = _read(given, Privacy, prefix=PRIVACY)
        if private and "epsilon" not in private:
            raise SettingsError("privacy-epsilon is missing: differential privacy needs a budget.")
        return cls(
            **_read(given, cls),
            options=options,
            policy=Policy(**_read(given, Policy)),
            privacy=privacy_of(private) if private else None,
            also=also,
        )

    def to_node_config(self) -> dict[str, Option]:
        """Return the node config; the inverse of ``from_node_config``."""
        config: dict[str, Option] = {
            prefix + one.key: ",".join(value) if isinstance(value, tuple) else value
            for part, prefix in ((self, ""), (self.policy, ""), (self.privacy, PRIVACY))
            if part is not None
            for one in settings_of(type(part))
            if (value := getattr(part, one.name)) is not None
        }
        for number, one in enumerate(self.also):
            config[f"also-{number}.task"] = one.task
            options = {f"also-{number}.{DATA_PREFIX}{k}": v for k, v in one.options.items()}
            config |= options
        return config | {DATA_PREFIX + key: value for key, value in self.options.items()}


def check_name(name: str) -> None:
    """Raise ``SettingsError`` if this is not a valid name for a silo."""
    if not is_silo_name(name):
        raise SettingsError(
            "a silo's name must have 1 to 64 letters, digits, '.', '_' or '-' and start with a "
            f"letter or digit. Got {name!r}."
        )


def options_of(pairs: Sequence[str]) -> dict[str, str]:
    """Return a task's options from command line pairs, ``KEY=VALUE``.

    Raises:
        SettingsError: a pair has another form.
    """
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise SettingsError(f"--set takes KEY=VALUE. Got {pair!r}.")
        options[key] = value
    return options


def _read(config: Mapping[str, Option], kind: type, *, prefix: str = "") -> dict[str, Any]:
    found, why = read_all(config, kind, prefix=prefix)
    if why:
        raise SettingsError(why)
    return found


def _also(config: Mapping[str, Option]) -> tuple[Study, ...]:
    found: dict[int, Study] = {}
    for key, value in sorted(config.items()):
        number, _, rest = key.removeprefix("also-").partition(".")
        one = found.get(int(number), Study(""))
        if rest == "task":
            found[int(number)] = replace(one, task=str(value))
        else:
            options = {**one.options, rest.removeprefix(DATA_PREFIX): value}
            found[int(number)] = replace(one, options=options)
    if nameless := [number for number, one in found.items() if not one.task]:
        raise SettingsError(f"also-{nameless[0]}.task is missing: name the task of these data.")
    return tuple(one for _, one in sorted(found.items()))


def privacy_of(values: Mapping[str, Any]) -> Privacy:
    """Return ``Privacy`` with these fields.

    Raises:
        SettingsError: a field is out of bounds.
    """
    try:
        return Privacy(**values)
    except ValueError as error:
        raise SettingsError(f"in [privacy], {error}") from None
