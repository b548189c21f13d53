"""Every entry of messages that silos read is declared once: what is made of the declarations."""

from __future__ import annotations

from typing import Any, cast

import pytest
from flwr.app import ConfigRecord

from coterie import wire
from coterie.client.app import ANSWERS
from coterie.client.work.request import COMMON, RefusedError, Request
from coterie.server.runs.config import RunConfig, train_config
from coterie.server.runs.run import terms

RUN = {"personalise": "ditto", "strategy": "fedavg"}
OTHER: dict[str, Any] = {
    **{"optimiser": "adamw", "primary-metric": "auroc", "personal": "head"},
    **{"precision": "bfloat16", "personalise": "finetune", "wire-format": "delta-fp16"},
    **{"schedule": "cosine", "balance": "weights"},
}
"""Values that no rule gives."""
KEYS = [
    one
    for one in wire.entries().values()
    if one.name.replace("-", "_") in wire.SiloKeys.model_fields
]


def other(key: wire.Entry) -> Any:
    """A value of a run that is not what a silo takes for granted."""
    return OTHER.get(key.name, {int: 3, float: 0.25, bool: True}.get(key.kind))


def reading(**config: Any) -> Request:
    return Request(cast(Any, None), cast(Any, None), ConfigRecord(config))


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_a_key_goes_where_it_is_declared_to_go(key: wire.Entry) -> None:
    config = RunConfig.read({**RUN, key.name: other(key)})
    sent = train_config(config, run="r")
    assert sent[key.name] == other(key)
    assert (key.name in terms(config)) == key.at.term
    assert reading(**{key.name: sent[key.name]}).value(key.name) == other(key)


@pytest.mark.parametrize("key", KEYS, ids=lambda key: key.name)
def test_a_key_that_says_what_silos_take_for_granted_is_not_sent(key: wire.Entry) -> None:
    keys = {key.name: key.at.default} if key.at.sent == "changed" else {}
    sent = train_config(RunConfig.read({"strategy": "fedavg", **keys}), run="r")
    assert (key.name in sent) == (key.at.sent == "always")
    assert reading().value(key.name) == key.at.default


@pytest.mark.parametrize(
    "key", [one for one in wire.entries().values() if one.kind in (int, float) or one.choices],
    ids=lambda key: key.name,
)  # fmt: skip
@pytest.mark.parametrize("odd", ["odd", -1])
def test_a_silo_refuses_what_a_key_cannot_be_by_its_name(key: wire.Entry, odd: Any) -> None:
    with pytest.raises(RefusedError, match=rf"^{key.name} must be .* Got '?{odd}'?\.$"):
        reading(**{key.name: odd}).value(key.name)


def test_a_plan_of_training_has_all_that_trainings_have_in_common() -> None:
    assert {"momentum", "clip_norm", "batch_size", "balance"} <= COMMON
    assert not COMMON & {"lr", "schedule", "proximal_mu"}, "each training has its own"


def test_every_type_of_message_that_a_silo_answers_is_declared() -> None:
    assert set(wire.KINDS) == set(ANSWERS)
