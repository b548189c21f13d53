"""What a silo agrees to holds whatever a message asks for."""

from __future__ import annotations

from typing import Any

import pytest
from flwr.app import Message

import client.app
import wire
from client.policy import Policy
from client.settings import SettingsError, SiloSettings
from tests.client.test_app import TRAINING, ask, initial, train
from tests.conftest import digits_config
from wire import decode_arrays, decode_description, read_metrics


@pytest.fixture(autouse=True)
def fresh_workbenches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client.benches, "_workbenches", {})


def silo(**policy: Any) -> dict[str, Any]:
    return digits_config("a", **{key.replace("_", "-"): value for key, value in policy.items()})


def reason(reply: Message) -> str:
    assert reply.has_error(), "it was not refused"
    assert reply.error.code == wire.REFUSED
    return str(reply.error.reason)


def every_kind(node_config: dict[str, Any], **config: Any) -> list[Message]:
    """What a silo answers to each kind of message."""
    model = initial()
    return [
        ask(wire.DESCRIBE, node_config, **config),
        ask(wire.INITIAL, node_config, seed=0, **config),
        train(model, node_config, **config),
        ask(wire.EVALUATE, node_config, model=model, **config),
    ]


def test_settings_survive_flower_s_node_config() -> None:
    policy = Policy(("hcct", "fedavg"), 3, "head", ("error",), False, 5, 20, True)
    for held in (policy, Policy(), Policy(metrics=())):
        settings = SiloSettings("a", policy=held)
        again = SiloSettings.from_node_config(settings.to_node_config(), node_id=1)
        assert again.policy == held
    with pytest.raises(SettingsError, match="metrics must be of"):
        SiloSettings.from_node_config({"metrics": "labels"}, node_id=1)


def test_without_a_policy_everything_is_allowed() -> None:
    assert not any(reply.has_error() for reply in every_kind(silo()))


@pytest.mark.parametrize("said", [{"strategy": "fedgroup"}, {}])
def test_a_run_of_another_strategy_is_refused_at_every_message(said: dict[str, str]) -> None:
    for reply in every_kind(silo(strategies="hcct,fedavg"), **said):
        assert "silo 'a' takes part in hcct, fedavg" in reason(reply)


def test_a_run_of_an_agreed_strategy_is_served() -> None:
    replies = every_kind(silo(strategies="hcct,fedavg"), strategy="fedavg")
    assert not any(reply.has_error() for reply in replies)


def test_layers_that_the_silo_keeps_never_leave() -> None:
    keeping = silo(keep_layers="head")
    for reply in every_kind(keeping):
        assert "keeps its layers 'head'; this run leaves 'none' there" in reason(reply)
    shared = {name: array for name, array in initial().items() if not name.startswith("head")}
    reply = train(shared, keeping, personal="head")
    assert set(decode_arrays(reply.content[wire.ARRAYS])) == set(shared)
    (first, *_) = shared
    partly = ask(wire.DESCRIBE, silo(keep_layers="head"), personal=first)
    assert "keeps its layers" in reason(partly), "another layer is not enough"


def test_more_epochs_or_rounds_than_agreed_are_refused() -> None:
    limited = silo(max_local_epochs=2, max_rounds=3)
    model = initial()
    assert not train(model, limited, local_epochs=2, server_round=3).has_error()
    for changes in ({"local_epochs": 3}, {"server_round": 4}, {"rounds": 4}, {"local_epochs": "9"}):
        assert "trains at most" in reason(train(model, limited, **changes))
    reply = ask(wire.DESCRIBE, limited, rounds=10)
    assert "at most 3 rounds; this run asks for 10" in reason(reply)


@pytest.mark.parametrize(("size", "refused"), [(1, False), (2, True), (3, False), (9, False)])
def test_a_group_that_is_too_small_is_refused_and_alone_is_not_a_group(
    size: int, refused: bool
) -> None:
    reply = train(initial(), silo(min_group_size=3), group_size=size)
    assert reply.has_error() == refused
    if refused:
        assert "needs groups of at least 3 silos; its group in this round has 2" in reason(reply)


def test_a_server_that_does_not_say_its_group_sizes_is_refused() -> None:
    reply = train(initial(), silo(min_group_size=3))
    assert "does not say how large its groups are" in reason(reply)
    described = decode_description(ask(wire.DESCRIBE, silo(min_group_size=3)).content)
    assert described.min_group_size == 3


def test_only_permitted_metrics_leave() -> None:
    model = initial()
    all_of_them = read_metrics(train(model, evaluate_received=True).content)
    assert {wire.TRAIN_LOSS, wire.RECEIVED_ERROR, wire.SECONDS} <= set(all_of_them)
    some = read_metrics(train(model, silo(metrics="error"), evaluate_received=True).content)
    assert set(some) == {wire.NUM_EXAMPLES, wire.RECEIVED_ERROR, wire.RECEIVED_EXAMPLES}
    none = ask(wire.EVALUATE, silo(metrics=""), model=model, **TRAINING)
    assert set(read_metrics(none.content)) == {wire.NUM_EXAMPLES}


def test_models_beside_the_task_s_leave_only_if_the_silo_lets_them() -> None:
    assert not ask("evaluate.discriminator", silo(), seed=0).has_error()
    for kind in ("evaluate.discriminator", "train.discriminator"):
        reply = ask(kind, silo(auxiliary=False), seed=0, steps=1)
        assert "lets no model leave beside the task's" in reason(reply)


def test_there_is_no_kind_of_message_that_the_policy_does_not_cover() -> None:
    """A handler that is added later must check it too."""
    model = initial()
    kinds = [kind.removesuffix(".default") for kind in client.app.app._registered_funcs]
    assert {wire.DESCRIBE, wire.INITIAL, wire.TRAIN, wire.EVALUATE} <= set(kinds)
    for kind in kinds:
        reply = ask(kind, silo(strategies="hcct"), model=model, strategy="fedavg", **TRAINING)
        assert "takes part in hcct; this run's strategy is fedavg" in reason(reply), kind
