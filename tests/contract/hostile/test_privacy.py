"""A coordinator that lies asks a silo with differential privacy: noise, charges, stored replies."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

import coterie.client.home.rounds
from coterie import wire
from coterie.client.home.settings import SiloSettings
from coterie.engine.flower import message_to_proto
from coterie.features.privacy import dp_sgd
from coterie.features.privacy.budget import Budget, read_charges
from coterie.wire import Model
from tests.conftest import digits_config
from tests.kit import TRAINING, ask, initial, model_in, reason, train, varied_requests

FORTY = {"data.train": 40, "data.test": 10}
STEPS = 24


def private(home: Path, *, epsilon: float = 1000.0, noise: float = 4.0) -> dict[str, Any]:
    terms = {"privacy-epsilon": epsilon, "privacy-noise": noise, "home": str(home)}
    return digits_config("a", **terms, **FORTY)


def update(reply: Message, start: Model) -> np.ndarray:
    found = model_in(reply)
    return np.concatenate([(found[name] - start[name]).ravel() for name in start])


def bytes_in(reply: Message) -> bytes:
    return message_to_proto(reply).content.SerializeToString(deterministic=True)


LONG = pytest.mark.nightly


@pytest.mark.parametrize(
    ("one", "other"),
    [
        pytest.param({"lr_warm_up": 2.2 / STEPS}, {"lr_warm_up": 2.8 / STEPS}, marks=LONG),
        ({"lr": 0.05}, {"lr": 0.05000001}),
        pytest.param({"purpose": "a"}, {"purpose": "b"}, marks=LONG),
        pytest.param({"lr_decay": 0.99}, {"lr_decay": 0.98}, marks=LONG),
        pytest.param({}, {"an_entry_of_tomorrow": 1}, marks=LONG),
    ],
    ids=["warm-up", "rate", "purpose", "no effect", "unknown"],
)
def test_two_requests_share_no_noise_and_have_two_charges(
    one: dict[str, Any], other: dict[str, Any], tmp_path: Path
) -> None:
    """With the same noise, the difference of two updates is that of their gradients."""
    node, start = private(tmp_path), initial()
    usual = {"local_steps": STEPS, "rounds": 1}
    updates = [update(train(start, node, **usual, **entry), start) for entry in (one, other)]
    apart = np.linalg.norm(updates[0] - updates[1]) / np.linalg.norm(updates[0])
    assert apart > 1, f"{apart:.4f} of the update: the noise is subtracted"
    assert len(read_charges(str(tmp_path))) == 2


def test_a_repeated_request_is_not_computed_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    node, start = private(tmp_path), initial()
    asked = {"evaluate_received": True, "personalise": "ditto", "ditto_lambda": 0.1}
    first = train(start, node, **asked)
    monkeypatch.setattr(dp_sgd, "_train", None)
    assert bytes_in(train(start, node, **asked)) == bytes_in(first)
    assert float(first.content[wire.METRICS][wire.SECONDS]) % 1 == 0
    evaluated = ask(wire.EVALUATE, node, model=start, server_round=2)
    assert float(evaluated.content[wire.METRICS][wire.SECONDS]) % 1 == 0


def test_after_the_budget_is_spent_only_stored_replies_leave(tmp_path: Path) -> None:
    node, start = private(tmp_path, epsilon=1.0), initial()
    first = train(start, node, local_steps=30)
    (charge,) = read_charges(str(tmp_path))
    settings = SiloSettings.from_node_config(node, node_id=1)
    budget = Budget(settings, 40)
    while budget.spent().epsilon + 0.05 < 1.0:
        budget.charge(replace(charge, key="x", steps=2))
    for entry in ({"lr_warm_up": 0.001}, {"server_round": 2}, {"nothing": 1}):
        reason(train(start, node, local_steps=30, rounds=4, **entry), wire.SPENT)
    finetuned = {**TRAINING, "personalise": "finetune", "personal_epochs": 9}
    errors = [
        ask(wire.EVALUATE, node, model=start, **how).content[wire.METRICS][wire.LOSS]
        for how in (TRAINING, finetuned)
    ]
    assert errors[0] == errors[1], "the received model is evaluated, on test data, as it came"
    assert bytes_in(train(start, node, local_steps=30)) == bytes_in(first)


def test_a_reply_of_a_past_that_was_rolled_back_is_not_given_again(tmp_path: Path) -> None:
    node, start = private(tmp_path), initial()
    later = bytes_in(train(start, node, server_round=2))
    train(start, node, server_round=1, lr=0.06)  # another way to round 2
    assert bytes_in(train(start, node, server_round=2)) != later
    assert len(read_charges(str(tmp_path))) == 3


def test_a_damaged_or_missing_reply_is_made_and_charged_again(tmp_path: Path) -> None:
    node, start = private(tmp_path), initial()
    for damage in (b"\x00", b""):
        first = bytes_in(train(start, node))
        (kept,) = (tmp_path / "privacy" / "replies").iterdir()
        kept.write_bytes(damage)
        assert bytes_in(train(start, node)) != first
    assert len(read_charges(str(tmp_path))) == 3


def test_a_reply_that_was_cut_off_by_a_crash_stops_nothing(tmp_path: Path) -> None:
    node, start = private(tmp_path), initial()
    train(start, node)
    (kept,) = (tmp_path / "privacy" / "replies").iterdir()
    kept.rename(kept.with_name(kept.name + ".tmp"))
    second = bytes_in(train(start, node))
    assert bytes_in(train(start, node)) == second
    assert len(read_charges(str(tmp_path))) == 2


def test_only_the_latest_replies_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("coterie.features.privacy.replies.MOST", 2)
    node, start = private(tmp_path), initial()
    for number in (1, 2, 3, 2):
        train(start, node, server_round=number, purpose="trial")
    assert len(read_charges(str(tmp_path))) == 3, "that of round 2 is still there"
    train(start, node, server_round=1, purpose="trial")
    assert len(read_charges(str(tmp_path))) == 4


@pytest.mark.parametrize("cases", [25, pytest.param(500, marks=pytest.mark.nightly)])
def test_requests_with_different_outcomes_have_different_charges(
    cases: int, tmp_path: Path
) -> None:
    """The same silo without noise says which outcomes differ, be it by one bit."""
    plain, noisy, start = digits_config("a", **FORTY), private(tmp_path, noise=100.0), initial()
    compared = set()
    for name, one, other in varied_requests(cases, seed=cases):
        outcomes = []
        for config in (one, other):
            coterie.client.home.rounds._memory.clear()
            outcomes.append(ask(wire.TRAIN, plain, model=start, **config))
        replies, charges = [], []
        for config in (one, other):
            replies.append(ask(wire.TRAIN, noisy, model=start, **config))
            charges.append(len(read_charges(str(tmp_path))))
        if any(reply.has_error() for reply in (*outcomes, *replies)):
            continue
        for reply in outcomes:
            del reply.content[wire.METRICS][wire.SECONDS]
        if bytes_in(outcomes[0]) != bytes_in(outcomes[1]):
            compared.add(name)
            assert charges[1] > charges[0], name
        if charges[1] == charges[0]:
            assert bytes_in(replies[1]) == bytes_in(replies[0]), name
    assert len(compared) >= 12, compared
