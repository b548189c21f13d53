"""Whatever one silo of six says or sends, with every strategy the run ends with the others' models.

Where ``test_in_process`` has every way to break a message, with one strategy, this has every
strategy, with what it alone asks for. `make test` takes some pairs, `make nightly` all of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Error, Message

from coterie import wire
from coterie.client.app import app
from coterie.engine.inprocess import InProcessGrid
from coterie.strategies.registry import STRATEGIES
from coterie.tasks import load_task
from tests.conftest import arrays_of
from tests.kit import digits, run

HONEST, LIAR = "bcdef", "a"
"""The liar is first wherever silos are taken by name."""
Lie = Callable[[Message], None]


def says(**fields: Any) -> Lie:
    """Describe itself so."""

    def change(reply: Message) -> None:
        config = reply.content.config_records.get(wire.CONFIG)
        if config is not None and wire.SCHEMA in config:
            config.update({name.replace("_", "-"): value for name, value in fields.items()})

    return change


def sends(change: Callable[[np.ndarray], np.ndarray], prefix: str = "") -> Lie:
    """Reply with arrays that are so."""

    def changed(reply: Message) -> None:
        for name, record in list(reply.content.array_records.items()):
            arrays = wire.decode_arrays(record)
            found = {prefix + name: change(array) for name, array in arrays.items()}
            reply.content[name] = wire.encode_arrays(found, packed=True)

    return changed


def reports(change: Callable[[Any], Any]) -> Lie:
    """Reply with metrics that are so."""

    def changed(reply: Message) -> None:
        for record in reply.content.metric_records.values():
            record.update({name: change(value) for name, value in record.items()})

    return changed


def is_empty(reply: Message) -> None:
    for name in list(reply.content):
        del reply.content[name]


def refuses(reply: Message) -> None:
    reply.__dict__["_error"] = Error(wire.REFUSED, "not this")
    reply.__dict__["_content"] = None


ARRAYS = list(load_task("digits").model().state_dict())
DESCRIBED: Mapping[str, Lie] = {
    "calls all arrays statistics": says(buffers=json.dumps(ARRAYS)),
    "calls one array a statistic": says(buffers=json.dumps(ARRAYS[:1])),
    "has no head": says(head="[]"),
    "has a head of nothing": says(head=json.dumps([["linear", "nowhere", ""]])),
    "wants columns scaled": says(pooled_columns=3),
    "has another metric": says(metric="rmse"),
    "wants a billion silos": says(min_group_size=10**9),
    "has one sample": says(num_examples=1),
    "has 10¹⁵ samples": says(num_examples=10**15),
    "prefers data without end": says(alpha=1e300),
    "does one epoch": says(max_local_epochs=1),
    "has no labels": says(unlabelled=True),
    "is private": says(private=True),
}
REPLIED: Mapping[str, Lie] = {
    "sends NaN": sends(lambda a: np.full_like(a, np.nan if a.dtype.kind == "f" else 0)),
    "sends huge numbers": sends(lambda a: np.full_like(a, 1e38 if a.dtype.kind == "f" else 1)),
    "sends zeros": sends(np.zeros_like),
    "sends other shapes": sends(lambda a: np.zeros(3, a.dtype)),
    "sends another type": sends(lambda a: np.ones(a.shape, np.int64)),
    "sends nothing in arrays": sends(lambda a: a[..., :0] if a.ndim else a),
    "sends other names": sends(lambda a: a, "other."),
    "sends nothing": is_empty,
    "refuses everything": refuses,
    "reports NaN": reports(lambda _: float("nan")),
    "reports less than nothing": reports(lambda v: -1 if isinstance(v, int) else -1.0),
    "reports 10³⁰⁸": reports(lambda v: 2**62 if isinstance(v, int) else 1e308),
    "reports nothing but 0": reports(lambda v: 0 if isinstance(v, int) else 0.0),
}
OPTIONS: Mapping[str, Mapping[str, Any]] = {
    "fedgroup": {"num-groups": 2, "cold-start-epochs": 1},
    **{name: {"num-groups": 2} for name in ("ifca", "flsc", "fesem", "kmeans")},
    **{name: {"generator-steps": 3, "generator-hidden": 8} for name in ("fedgenp", "fedgen")},
}
ALWAYS = {
    ("hcct", "calls all arrays statistics"),
    ("hcct", "calls one array a statistic"),
    ("fedavg", "wants columns scaled"),
    ("fedgenp", "has no head"),
    ("fedgen", "refuses everything"),
}
"""Which once ended a run."""


def pairs() -> list[Any]:
    return [
        pytest.param(
            *pair,
            id=f"{pair[0]}, which {pair[1]}",
            marks=() if pair in ALWAYS else (pytest.mark.nightly, pytest.mark.timeout(120)),
        )
        for pair in ((name, lie) for name in STRATEGIES for lie in {**DESCRIBED, **REPLIED})
    ]


@pytest.mark.parametrize(("strategy", "lie"), pairs())
def test_no_silo_ends_the_run_of_any_strategy(strategy: str, lie: str, tmp_path: Path) -> None:
    def lying(message: Message, context: Context) -> Message:
        reply = app(message, context)
        described = message.metadata.message_type == wire.DESCRIBE
        change = (DESCRIBED if described else REPLIED).get(lie)
        if change and context.node_config["name"] == LIAR and not reply.has_error():
            change(reply)
        return reply

    names = [LIAR, *HONEST]
    keys = {"rounds": 7, "min-silos": 3, "local-epochs": 1, "round-timeout": 5}
    keys |= {"strategy": strategy, **OPTIONS.get(strategy, {})}
    grid = InProcessGrid(lying, digits(names, **{"label-counts": True}))
    result = run(tmp_path, grid, **keys)
    assert result.rounds[-1].round >= 7
    for name in HONEST:
        arrays = arrays_of(result.models[name]).values()
        assert all(np.isfinite(array).all() for array in arrays), name
