"""A silo's description of itself before it joins: sizes and policy, no labels or statistics."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from flwr.app import ConfigRecord, RecordDict

from coterie.wire.errors import WireError
from coterie.wire.limits import (
    MAX_ANSWER_BYTES,
    MAX_ARRAYS,
    MAX_NAME,
    MAX_WORD,
    is_plain_name,
    plain_text,
)
from coterie.wire.metrics import KNOWN_METRICS
from coterie.wire.names import (
    CONFIG,
    METRIC,
    NUM_EXAMPLES,
    PROTOCOL,
    PROTOCOL_KEY,
    SCHEMA,
    SCHEMA_PARTS,
    TASK,
)

Layers = tuple[tuple[str, ...], ...]
"""A predictor from latents to logits: ``("linear", weight, bias or "")``, ``("relu",)``,
``("tanh",)`` in order, with the names of the model's arrays. ``("positive",)`` at the beginning
means that latents are at least 0: generated ones pass a softplus (a ReLU would starve them of
gradient)."""


Parts = Mapping[str, str]
"""Parts that silos must have in common → a digest of each."""
IN_ORDER = "the order of "
"""Prefix of a part's name: for a list whose order alone differs."""
FOLLOWING = ("the arrays of the model", "the shape of a sample")
"""Parts that follow from others."""
MAX_PARTS = 64

MAX_UNIT = 32
"""Characters of a unit."""
MAX_TASKS = 32
"""The most tasks of one silo."""


@dataclass(frozen=True)
class Description:
    """A silo's description of itself: sizes and policy, no labels or statistics of its data.

    Attributes:
        name: the silo's name, unique in a federation.
        num_examples: number of training samples, > 0; without labels, if the silo has only such; of
            test samples, if it only tests.
        schema: fingerprint of the model's arrays and of the task's classes.
        parts: the parts of the schema, to show people how two of them differ.
        alpha: the silo's own preference for more data (HCCT), or None to take the run's.
        device: the training device, for the operator.
        versions: e.g. ``{"coterie": "0.1.0", "torch": "2.6"}``.
        buffers: names of the model's arrays that are statistics, not parameters.
        min_group_size: the fewest silos, itself included, whose updates may be averaged with its.
        max_local_epochs: the most epochs of one training; 0 sets no limit.
        pooled_columns: number of numeric columns that need the run's scale.
        metric, unit: the task's primary metric; the unit of real targets, for people.
        head: the layers of the model's predictor, or empty if it has no latent split.
        private: whether it trains with differential privacy.
        unlabelled: its samples have no labels yet: it receives a model, and trains none.
        tests: it measures a model on its data, and trains none.
        tasks: all tasks of the silo, ``task`` among them; empty if it states only ``task``.
        mark: fingerprint of its training data, 16 hexadecimal digits, that reveals only whether
            they have changed; empty if the silo gives none.
    """

    name: str
    num_examples: int
    task: str
    schema: str
    parts: Parts = field(default_factory=dict)
    alpha: float | None = None
    device: str = ""
    versions: Mapping[str, str] | None = None
    buffers: tuple[str, ...] = ()
    min_group_size: int = 1
    max_local_epochs: int = 0
    pooled_columns: int = 0
    metric: str = "error"
    unit: str = ""
    head: Layers = ()
    private: bool = False
    unlabelled: bool = False
    tests: bool = False
    tasks: tuple[str, ...] = ()
    protocol: int = PROTOCOL
    mark: str = ""

    @property
    def common(self) -> tuple[object, ...]:
        """The values that depend only on the task, and so are equal at all silos of a run."""
        return self.schema, self.buffers, self.pooled_columns, self.metric

    @property
    def counted(self) -> str:
        """What ``num_examples`` counts, for people."""
        if self.unlabelled:
            return "samples without labels"
        return "test samples; it only tests" if self.tests else "training samples"


def is_silo_name(name: str) -> bool:
    """Return whether the name is valid as a file name and in a log: letters, digits, ``._-``."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) is not None


def encode_description(description: Description) -> RecordDict:
    """Return the content of the answer to ``query.describe``."""
    config = ConfigRecord(
        {
            "name": description.name,
            NUM_EXAMPLES: description.num_examples,
            TASK: description.task,
            SCHEMA: description.schema,
            SCHEMA_PARTS: encode_parts(description.parts),
            "device": description.device,
            "versions": json.dumps(dict(description.versions or {}), sort_keys=True),
            "buffers": json.dumps(list(description.buffers)),
            "min-group-size": description.min_group_size,
            "max-local-epochs": description.max_local_epochs,
            "pooled-columns": description.pooled_columns,
            METRIC: description.metric,
            "unit": description.unit,
            "head": json.dumps(description.head),
            **({"private": True} if description.private else {}),
            **({"unlabelled": True} if description.unlabelled else {}),
            **({"tests": True} if description.tests else {}),
            **({"tasks": json.dumps(description.tasks)} if description.tasks else {}),
            **({"data-mark": description.mark} if description.mark else {}),
            PROTOCOL_KEY: description.protocol,
        }
    )
    if description.alpha is not None:
        config["alpha"] = float(description.alpha)
    return RecordDict({CONFIG: config})


def decode_description(content: RecordDict) -> Description:
    """Read the answer to ``query.describe``.

    Raises:
        WireError: a field is missing or of the wrong kind.
    """
    config = content.get(CONFIG)
    if not isinstance(config, ConfigRecord):
        raise WireError(f"a description needs a ConfigRecord {CONFIG!r}.")
    try:
        alpha = config.get("alpha")
        described = Description(
            name=_text(config["name"]),
            num_examples=int(_number(config[NUM_EXAMPLES])),
            task=_text(config[TASK]),
            schema=plain_text(_text(config[SCHEMA]), MAX_NAME),
            parts=decode_parts(config.get(SCHEMA_PARTS, "{}")),
            alpha=None if alpha is None else float(_number(alpha)),
            device=plain_text(_text(config["device"]), MAX_WORD),
            versions=_versions(json.loads(_text(config["versions"]))),
            buffers=_names(json.loads(_text(config["buffers"]))),
            min_group_size=int(_number(config.get("min-group-size", 1))),
            max_local_epochs=int(_number(config.get("max-local-epochs", 0))),
            pooled_columns=int(_number(config.get("pooled-columns", 0))),
            metric=_metric(config.get(METRIC, "error")),
            unit=plain_text(_text(config.get("unit", ""))[:MAX_UNIT]),
            head=_layers(json.loads(_text(config.get("head", "[]")))),
            private=config.get("private") is True,
            unlabelled=config.get("unlabelled") is True,
            tests=config.get("tests") is True,
            tasks=_tasks(json.loads(_text(config.get("tasks", "[]")))),
            protocol=int(_number(config[PROTOCOL_KEY])),
            mark=_mark(config.get("data-mark", "")),
        )
    except KeyError as missing:
        raise WireError(f"a description needs {missing}.") from None
    except Exception as error:  # values from elsewhere, of any kind
        raise WireError(f"a description cannot be read: {error}") from None
    return described


def encode_parts(parts: Parts) -> str:
    """Return the parts in their wire format."""
    return json.dumps(dict(parts), sort_keys=True)


def decode_parts(text: object) -> Parts:
    """Return the parts from their wire format.

    Raises:
        ValueError, TypeError: it is something else.
    """
    parts = json.loads(_text(text))
    if not isinstance(parts, dict) or len(parts) > MAX_PARTS:
        raise ValueError(f"{SCHEMA_PARTS} must be at most {MAX_PARTS} names with digests")
    for name, digest in parts.items():
        if not re.fullmatch(r"[a-z][a-z -]{0,63}", name) or not re.fullmatch(
            r"[0-9a-f]{16}", _text(digest)
        ):
            raise ValueError(f"{SCHEMA_PARTS} has an invalid entry, {name[:64]!r}")
    return parts


def differences(ours: Parts, theirs: Parts) -> list[str]:
    """Return the names of the parts that differ, often one, without those that follow."""
    differ = [part for part in sorted({*ours, *theirs}) if ours.get(part) != theirs.get(part)]
    whole = [part for part in differ if not part.startswith(IN_ORDER)]
    found = whole + [p for p in differ if p not in whole and p.removeprefix(IN_ORDER) not in whole]
    return [part for part in found if part not in FOLLOWING] or found


def _versions(value: Any) -> Mapping[str, str]:
    if len(value) > MAX_PARTS:
        raise ValueError(f"at most {MAX_PARTS} versions may be stated")
    return {plain_text(k, MAX_WORD): plain_text(v, MAX_WORD) for k, v in value.items()}


def _names(value: Any) -> tuple[str, ...]:
    if len(value) > MAX_ARRAYS or not all(map(is_plain_name, value)):
        raise ValueError("buffers must be names of arrays")
    return tuple(value)


def _tasks(value: Any) -> tuple[str, ...]:
    if not isinstance(value, list) or len(value) > MAX_TASKS or not all(map(is_plain_name, value)):
        raise ValueError(f"tasks must be at most {MAX_TASKS} names")
    return tuple(value)


def _layers(value: Any) -> Layers:
    layers = tuple(tuple(_text(word) for word in layer) for layer in value)
    if len(layers) > MAX_PARTS:
        raise ValueError(f"a head has at most {MAX_PARTS} layers")
    arguments = {"positive": 0, "linear": 2, "relu": 0, "tanh": 0}
    for kind, *names in layers:
        if arguments.get(kind) != len(names):
            raise ValueError(f"a head cannot have a layer {kind!r} with {len(names)} arrays")
    return layers


def _mark(value: object) -> str:
    if not re.fullmatch(r"([0-9a-f]{16})?", _text(value)):
        raise ValueError("a data fingerprint must be 16 hexadecimal digits")
    return _text(value)


def _metric(value: object) -> str:
    if value not in KNOWN_METRICS:
        raise ValueError(f"there is no metric {str(value)[:64]!r}")
    return str(value)


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {type(value).__name__}")
    if len(value) > MAX_ANSWER_BYTES:
        raise ValueError(f"a text has {len(value):,} characters, more than {MAX_ANSWER_BYTES:,}")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"expected a number, got {type(value).__name__}")
    return value
