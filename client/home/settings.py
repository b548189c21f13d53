"""What a silo is told when it starts: its own settings, never the server's.

They arrive as Flower's ``node_config``, the same under the resident silo, a stock
``flower-supernode --node-config`` and the simulation engine.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from coterie.client.home.policy import METRICS, Policy
from coterie.tasks.base import Option
from coterie.wire import is_silo_name

DATA_PREFIX = "data."
MAX_WORKERS = 64
MAX_THREADS = 4096
"""More than any machine has; with many more, libgomp ends the process."""
POLICY_KEYS = (
    "strategies",
    "min-group-size",
    "keep-layers",
    "metrics",
    "auxiliary",
    "label-counts",
    "max-local-epochs",
    "max-rounds",
)


class SettingsError(ValueError):
    """A setting of the silo that cannot be used. The text says which and what is expected."""


@dataclass(frozen=True)
class SiloSettings:
    """One silo's settings.

    Attributes:
        name: unique in the federation: letters, digits, ``.``, ``_``, ``-``.
        task: built-in name or ``module:attribute``.
        options: the task's data options, ``data.KEY=VALUE`` in a node config.
        alpha: the silo's own α for HCCT, or None.
        device: ``auto``, ``cpu``, ``cuda`` or ``cuda:N``.
        threads: CPU threads of torch; 0 leaves torch's own choice. Results are bit-identical
            only between runs with the same number.
        workers: processes that read a dataset that is not kept in memory; 0 reads in the silo's.
        home: folder in which the silo keeps what is its own; empty keeps nothing.
        policy: what the silo agrees to.
    """

    name: str
    task: str = "digits"
    options: Mapping[str, Option] = field(default_factory=dict)
    alpha: float | None = None
    device: str = "auto"
    threads: int = 1
    workers: int = 0
    home: str = ""
    policy: Policy = field(default_factory=Policy)

    def __post_init__(self) -> None:
        if not is_silo_name(self.name):
            raise SettingsError(
                "a silo's name must have 1 to 64 letters, digits, '.', '_' or '-' and start "
                f"with a letter or digit. Got {self.name!r}."
            )
        if self.alpha is not None and not 0 <= self.alpha < float("inf"):
            raise SettingsError(f"alpha must be finite and at least 0. Got {self.alpha}.")
        if not 0 <= self.threads <= MAX_THREADS:
            raise SettingsError(f"threads must be 0 to {MAX_THREADS}. Got {self.threads}.")
        if not 0 <= self.workers <= MAX_WORKERS:
            raise SettingsError(f"workers must be 0 to {MAX_WORKERS}. Got {self.workers}.")
        if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", self.device):
            raise SettingsError(f"device must be auto, cpu, cuda or cuda:N. Got {self.device!r}.")

    @classmethod
    def from_node_config(cls, config: Mapping[str, Option], *, node_id: int) -> SiloSettings:
        """Read Flower's node config.

        A node without a name is called ``silo-<partition>`` in a simulation, where Flower gives
        ``partition-id``, else ``node-<id>``. There, and only there, the digits are cut by
        partition so that the simulation engine works without further settings.

        Raises:
            SettingsError: an unknown key or a value out of bounds.
        """
        known = {"name", "task", "alpha", "device", "threads", "workers", "home", *POLICY_KEYS}
        own = {k: v for k, v in config.items() if k in known}
        options = {
            k.removeprefix(DATA_PREFIX): v for k, v in config.items() if k.startswith(DATA_PREFIX)
        }
        unknown = [
            k
            for k in config
            if k not in known
            and not k.startswith(DATA_PREFIX)
            and k not in ("partition-id", "num-partitions")
        ]
        if unknown:
            raise SettingsError(
                f"unknown setting {sorted(unknown)[0]!r}. A silo has: {', '.join(sorted(known))} "
                f"and {DATA_PREFIX}KEY for its task."
            )
        partition = config.get("partition-id")
        if "name" not in own:
            own["name"] = f"node-{node_id}" if partition is None else f"silo-{partition}"
            if partition is not None and not options and own.get("task", "digits") == "digits":
                options = {"skip": int(partition) * 110, "train": 80, "test": 30}
        alpha = own.get("alpha")
        return cls(
            name=str(own["name"]),
            task=str(own.get("task", "digits")),
            options=options,
            alpha=None if alpha is None else _number("alpha", alpha, float),
            device=str(own.get("device", "auto")),
            threads=_number("threads", own.get("threads", 1), int),
            workers=_number("workers", own.get("workers", 0), int),
            home=str(own.get("home", "")),
            policy=_policy(own),
        )

    def to_node_config(self) -> dict[str, Option]:
        """The inverse of ``from_node_config``."""
        config: dict[str, Option] = {
            "name": self.name,
            "task": self.task,
            "device": self.device,
            "threads": self.threads,
            "home": self.home,
        }
        if self.workers:
            config["workers"] = self.workers
        if self.alpha is not None:
            config["alpha"] = self.alpha
        config |= _policy_config(self.policy)
        return config | {DATA_PREFIX + key: value for key, value in self.options.items()}


def options_of(pairs: Sequence[str]) -> dict[str, str]:
    """Options of a task as a command line gives them, ``KEY=VALUE``.

    Raises:
        SettingsError: one has another form.
    """
    options = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not key:
            raise SettingsError(f"--set takes KEY=VALUE. Got {pair!r}.")
        options[key] = value
    return options


def _policy(own: Mapping[str, Option]) -> Policy:
    """Lists are written with commas; ``metrics`` left out allows all, empty allows none."""
    metrics = _words(own["metrics"]) if "metrics" in own else None
    unknown = sorted(set(metrics or ()) - set(METRICS))
    if unknown:
        raise SettingsError(f"metrics must be of {', '.join(METRICS)}. Got {unknown[0]!r}.")
    return Policy(
        strategies=_words(own.get("strategies", "")),
        min_group_size=_number("min-group-size", own.get("min-group-size", 1), int),
        keep_layers=str(own.get("keep-layers", "")),
        metrics=metrics,
        auxiliary=_flag("auxiliary", own.get("auxiliary", True)),
        label_counts=_flag("label-counts", own.get("label-counts", False)),
        max_local_epochs=_number("max-local-epochs", own.get("max-local-epochs", 0), int),
        max_rounds=_number("max-rounds", own.get("max-rounds", 0), int),
    )


def _policy_config(policy: Policy) -> dict[str, Option]:
    config: dict[str, Option] = {
        "strategies": ",".join(policy.strategies),
        "min-group-size": policy.min_group_size,
        "keep-layers": policy.keep_layers,
        "auxiliary": policy.auxiliary,
        "label-counts": policy.label_counts,
        "max-local-epochs": policy.max_local_epochs,
        "max-rounds": policy.max_rounds,
    }
    return config if policy.metrics is None else config | {"metrics": ",".join(policy.metrics)}


def _flag(name: str, value: Option) -> bool:
    if str(value).lower() not in ("true", "false"):
        raise SettingsError(f"{name} must be true or false. Got {value!r}.")
    return str(value).lower() == "true"


def _words(text: Option) -> tuple[str, ...]:
    return tuple(word.strip() for word in str(text).split(",") if word.strip())


Number = TypeVar("Number", int, float)


def _number(name: str, value: Option, kind: type[Number]) -> Number:
    try:
        return kind(value)
    except (ValueError, OverflowError):
        raise SettingsError(f"{name} must be a number. Got {value!r}.") from None
