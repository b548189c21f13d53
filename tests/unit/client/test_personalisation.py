"""Fine-tuning, Ditto and APFL at the silo, through messages."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message
from safetensors.numpy import load_file

import coterie.client.home.rounds
from coterie import wire
from coterie.client.work.hold_out import split_validation
from coterie.client.work.measure import evaluate
from coterie.client.work.session import Session, session_of
from coterie.client.work.sgd import TrainPlan, seed_of, train
from coterie.client.work.weights import load_weights, read_weights
from coterie.wire import Model
from tests import kit
from tests.conftest import assert_equal_models, digits_config
from tests.kit import answer, context, model_in, restart_silos

PLAN = TrainPlan(epochs=2, batch_size=8, lr=0.05)
KEYS: dict[str, Any] = {
    "task": "digits",
    "run": "one",
    "seed": 4,
    "local_epochs": 1,
    "batch_size": 8,
    "lr": 0.1,
    "personal_epochs": 2,
    "personal_lr": 0.05,
    "ditto_lambda": 0.7,
}


def ditto(round: int, home: str = "") -> Model:
    """The silo's own model after a round, as its process remembers it."""
    return coterie.client.home.rounds._memory[("a", home, "ditto", "one")][round]


def ask(kind: str, model: Model, *, home: str = "", **config: Any) -> Message:
    return answer(kind, digits_config("a", home=home), model=model, **(KEYS | config))


def session() -> Session:
    return session_of(context())


def start(seed: int = 9) -> Model:
    return read_weights(session().fresh_model(seed))


def by_hand(model: Model, round: int, kind: str, **more: Any) -> Model:
    """The silo's own model after one training, with the same functions."""
    own = session()
    load_weights(own.model, model)
    plan = PLAN if not more else TrainPlan(epochs=2, batch_size=8, lr=0.05, proximal_mu=0.7)
    train(own.task, own.model, own.data.train, plan, seed=seed_of(4, "a", round, kind), **more)
    return read_weights(own.model)


def error_of(model: Model) -> float:
    own = session()
    load_weights(own.model, model)
    return evaluate(own.task, own.model, own.data.test).error


def test_fine_tuning_evaluates_the_model_trained_on_and_leaves_the_round_s_training_alone() -> None:
    model = start()
    plain = ask(wire.TRAIN, model, server_round=3, evaluate_received=True)
    tuned = ask(wire.TRAIN, model, server_round=3, evaluate_received=True, personalise="finetune")
    assert_equal_models(model_in(tuned), model_in(plain))
    expected = error_of(by_hand(model, 3, "finetune"))
    assert wire.read_metrics(tuned.content)[wire.RECEIVED_ERROR] == pytest.approx(expected)
    assert expected != wire.read_metrics(plain.content)[wire.RECEIVED_ERROR]


def test_the_model_that_a_silo_keeps_is_the_one_it_made_for_itself(tmp_path: Path) -> None:
    model = start()
    home = str(tmp_path)
    ask(wire.EVALUATE, model, home=home, server_round=5, personalise="finetune", keep=True)
    kept = load_file(tmp_path / "models" / "one.safetensors")
    for name, array in by_hand(model, 5, "finetune").items():
        np.testing.assert_array_equal(kept[name], array)


def test_ditto_s_own_model_is_pulled_towards_each_model_received_and_never_sent() -> None:
    first, second = start(1), start(2)
    shared = ask(wire.TRAIN, first, server_round=1, personalise="ditto")
    plain = ask(wire.TRAIN, first, server_round=1)
    assert_equal_models(model_in(shared), model_in(plain))
    assert set(shared.content) == {wire.ARRAYS, wire.METRICS}
    own = by_hand(first, 1, "ditto", towards=first)
    ask(wire.TRAIN, second, server_round=2, personalise="ditto")
    own = by_hand(own, 2, "ditto", towards=second)
    reply = ask(wire.EVALUATE, second, server_round=2, personalise="ditto")
    assert wire.read_metrics(reply.content)[wire.ERROR] == pytest.approx(error_of(own))
    assert_equal_models(ditto(2), own)


def test_an_own_model_that_diverges_is_not_kept() -> None:
    ask(wire.TRAIN, start(), server_round=1, personalise="ditto")
    wild = {"personal_lr": 1e8, "ditto_lambda": 1e6}
    assert not ask(wire.TRAIN, start(), server_round=2, personalise="ditto", **wild).has_error()
    reply = ask(wire.EVALUATE, start(), server_round=2, personalise="ditto")
    assert np.isfinite(float(reply.content["metrics"]["loss"]))  # type: ignore[arg-type]


def test_ditto_s_own_model_survives_a_restart_and_belongs_to_its_run(tmp_path: Path) -> None:
    home = str(tmp_path)
    model = start()
    ask(wire.TRAIN, model, home=home, server_round=1, personalise="ditto")
    own = ditto(1, home)
    restart_silos()
    reply = ask(wire.EVALUATE, model, home=home, server_round=1, personalise="ditto")
    assert wire.read_metrics(reply.content)[wire.ERROR] == pytest.approx(error_of(own))
    other = ask(wire.EVALUATE, model, home=home, server_round=1, personalise="ditto", run="two")
    assert wire.read_metrics(other.content)[wire.ERROR] == pytest.approx(error_of(model))


def test_another_word_is_refused() -> None:
    reply = kit.ask(wire.EVALUATE, model=start(), server_round=1, personalise="magic")
    assert (
        reply.has_error()
        and "personalise must be partial, finetune, ditto or apfl" in reply.error.reason
    )


PARTIAL: dict[str, Any] = {"personalise": "partial", "own_penalty": 30.0}


def test_partial_pooling_pulls_to_the_model_received_but_for_the_last_bias() -> None:
    """The more samples a silo has, the less: λ stands beside the sum of its losses."""
    model, own = start(), session()
    reply = ask(wire.EVALUATE, model, server_round=3, **PARTIAL)
    load_weights(own.model, model)
    plan = TrainPlan(epochs=2, batch_size=8, lr=0.05, penalty=30.0 / len(own.data.train))
    seed = seed_of(4, "a", 3, "partial")
    train(own.task, own.model, own.data.train, plan, seed=seed, centre=model)
    expected = error_of(read_weights(own.model))
    assert wire.read_metrics(reply.content)[wire.ERROR] == pytest.approx(expected)
    load_weights(own.model, model)
    plan = TrainPlan(epochs=2, batch_size=8, lr=0.05, penalty=1e9)
    train(own.task, own.model, own.data.train, plan, seed=seed, centre=model)
    kept = {n: float(np.abs(a - model[n]).max()) for n, a in read_weights(own.model).items()}
    last = list(model)[-1]
    assert kept.pop(last) > 1e-3 and max(kept.values()) < 1e-6


def test_without_a_strength_the_model_received_stays_as_it_is() -> None:
    model = start()
    reply = ask(wire.EVALUATE, model, server_round=3, personalise="partial")
    assert wire.read_metrics(reply.content)[wire.ERROR] == pytest.approx(error_of(model))


def test_a_silo_s_own_model_is_measured_on_samples_that_it_was_not_made_of() -> None:
    model, own = start(), session()
    reply = ask(wire.EVALUATE_OWN, model, server_round=3, holdout=0.2, **PARTIAL)
    found = wire.read_metrics(reply.content)
    parts = split_validation(own, 0.2, run_seed=4)
    load_weights(own.model, model)
    plan = TrainPlan(epochs=2, batch_size=8, lr=0.05, penalty=30.0 / len(parts.train))
    seed = seed_of(4, "a", 3, "partial")
    train(own.task, own.model, parts.train, plan, seed=seed, centre=model)
    expected = evaluate(own.task, own.model, parts.test)
    assert found[wire.HOLDOUT_LOSS] == pytest.approx(expected.loss)
    assert found[wire.HOLDOUT_EXAMPLES] == len(parts.test)
    for entries, why in ((PARTIAL, "without holdout"), ({"holdout": 0.2}, "is not partial")):
        reply = kit.ask(wire.EVALUATE_OWN, model=model, server_round=3, **entries)
        assert why in kit.reason(reply)
