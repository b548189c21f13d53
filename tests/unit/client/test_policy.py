"""What a silo agrees to holds whatever a message asks for."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict

import coterie.client.app
from coterie import wire
from coterie.client import ledger
from coterie.client.home import request_counts
from coterie.client.home.policy import NAMES, REVEALING, Policy, permitted
from coterie.client.home.settings import SettingsError, SiloSettings
from coterie.client.work.session import open_session
from coterie.strategies import FederationError
from coterie.strategies.errors import EXIT_NO_SILOS
from coterie.strategies.hcct.algorithm import CATCH_UP
from coterie.wire import decode_description, read_metrics
from tests.conftest import digits_config
from tests.kit import (
    TRAINING,
    Tap,
    ask,
    context,
    dashed,
    digits,
    initial,
    model_in,
    reason,
    run,
    train,
)


def silo(**policy: Any) -> dict[str, Any]:
    return digits_config("a", **dashed(policy))


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
    policy = Policy(("hcct", "fedavg"), 3, "head", ("error",), False, True, max_rounds=20)
    for held in (policy, Policy(), Policy(share_metrics=())):
        settings = SiloSettings("a", policy=held)
        again = SiloSettings.from_node_config(settings.to_node_config(), node_id=1)
        assert again.policy == held
    with pytest.raises(SettingsError, match="metrics must be names with commas between them"):
        SiloSettings.from_node_config({"share-metrics": "my labels"}, node_id=1)


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
        assert (
            "does not send its layers 'head'; this run leaves only 'none' at the silos"
            in reason(reply)
        )
    shared = {name: array for name, array in initial().items() if not name.startswith("head")}
    reply = train(shared, keeping, personal="head")
    assert set(model_in(reply)) == set(shared)
    (first, *_) = shared
    partly = ask(wire.DESCRIBE, silo(keep_layers="head"), personal=first)
    assert "does not send its layers" in reason(partly), "another layer is not enough"


def test_more_epochs_or_rounds_than_agreed_are_refused() -> None:
    limited = silo(max_local_epochs=2, max_rounds=3)
    model = initial()
    assert not train(model, limited, local_epochs=2, server_round=3).has_error()
    for changes in ({"local_epochs": 3}, {"server_round": 4}, {"rounds": 4}, {"local_epochs": "9"}):
        assert "trains at most" in reason(train(model, limited, **changes))
    reply = ask(wire.DESCRIBE, limited, rounds=10)
    assert "at most 3 rounds; this run asks for 10" in reason(reply)


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        (wire.TRAIN, {"local_steps": 7}, "use its training samples 3 times"),
        (wire.TRAIN, {"local_steps": 300}, "use its training samples 100 times"),
        (wire.COLD_START, {"local_steps": 7}, "use its training samples 3 times"),
        (wire.TRAIN_PER_FEDAVG, {"local_steps": 7}, "use its training samples 3 times"),
        (wire.TRAIN_PFEDME, {"inner_steps": 3}, "use its training samples 3 times"),
        (wire.TRAIN_PFEDME, {"local_steps": 4, "inner_steps": 2}, "samples 4 times"),
        (wire.TRAIN, {"personal_epochs": 50}, "this run asks for 50 (personal-epochs)"),
        (wire.EVALUATE, {"personal_epochs": 50}, "this run asks for 50 (personal-epochs)"),
        (wire.EVALUATE, {"adapt_steps": 3}, "this run asks for 3 (adapt-steps)"),
        (wire.TRAIN, {"local_epochs": 3}, "this run asks for 3 (local-epochs)"),
    ],
)
def test_epochs_by_another_name_are_refused_too_and_when_the_silo_joins(
    kind: str, changes: dict[str, Any], said: str
) -> None:
    """20 samples in batches of 8: an epoch has 3 mini-batches."""
    limited = silo(max_local_epochs=2)
    asked = TRAINING | {"personalise": "finetune"} | changes
    for reply in (
        ask(kind, limited, model=initial(), **asked),
        ask(wire.DESCRIBE, limited, **asked),
    ):
        assert "silo 'a' trains at most 2 epochs a round; " in reason(reply)
        assert said in reason(reply)
    assert not ask(kind, silo(), model=initial(), **asked).has_error()


@pytest.mark.parametrize(
    "changes",
    [
        {"local_steps": 6},
        {"local_steps": 3, "local_epochs": 9},
        {"local_steps": 6, "validation": 0.25},
        {"personal_epochs": 2, "adapt_steps": 2},
        {"inner_steps": 2},
    ],
)
def test_as_many_epochs_as_agreed_are_served_however_they_are_counted(
    changes: dict[str, Any],
) -> None:
    for kind in (wire.DESCRIBE, wire.TRAIN, wire.TRAIN_PFEDME):
        reply = ask(kind, silo(max_local_epochs=2), model=initial(), **(TRAINING | changes))
        assert not reply.has_error(), reply.error.reason


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        (
            {"cold_start_epochs": 3},
            "trains at most 2 epochs a round; this run asks for 3 (cold-start-",
        ),
        ({"cold_start_epochs": "9"}, "trains at most 2 epochs a round; this run asks for 9"),
        ({"cold_start_steps": 7}, "(cold-start-steps) use its training samples 3 times"),
        ({"cold_start_steps": -1}, "cold-start-steps must be an integer of at least 0"),
        ({"label_counts": True}, "does not share its label counts. At the silo,"),
    ],
)
def test_what_a_later_message_would_ask_for_is_refused_when_the_silo_joins(
    asked: dict[str, Any], said: str
) -> None:
    """20 samples in batches of 8: an epoch has 3 mini-batches."""
    limited = silo(max_local_epochs=2)
    assert said in reason(ask(wire.DESCRIBE, limited, **(TRAINING | asked)))
    for kept in ({"cold_start_epochs": 2}, {"cold_start_steps": 6}, {"label_counts": False}):
        assert not ask(wire.DESCRIBE, limited, **(TRAINING | kept)).has_error()


def test_without_limits_and_with_consent_no_term_is_refused() -> None:
    asked = TRAINING | {"cold_start_epochs": 900, "cold_start_steps": 900, "label_counts": True}
    assert not ask(wire.DESCRIBE, silo(label_counts=True), **asked).has_error()


def test_a_newcomer_of_few_epochs_takes_part_in_hcct_with_a_short_catch_up(tmp_path: Path) -> None:
    """At round 4 it would catch up with four rounds' epochs, of which it allows two."""
    silos = [*digits("ab"), digits_config("c", 2, **{"max-local-epochs": 2})]
    grid = Tap(silos)
    keys = {"strategy": "hcct", "rounds": 4, "local_epochs": 1, "churn": "c+4"}
    result = run(tmp_path, grid, min_silos=2, **keys)
    (catch_up,) = [c for c in grid.asked(wire.TRAIN) if c.get(wire.PURPOSE) == CATCH_UP]
    assert catch_up[wire.LOCAL_EPOCHS] == 2
    last = result.rounds[3]
    assert sorted(last.silos) == ["a", "b", "c"] and not last.left_out
    assert last.phases[CATCH_UP].bytes_received > 0, "its answer counts"


def test_what_the_silo_refuses_it_refuses_when_it_joins(tmp_path: Path) -> None:
    """The server's own terms: no round is begun."""
    for keys in (
        {"strategy": "fedgroup", "num-groups": 1, "cold-start-epochs": 9},
        {"strategy": "fedgroup", "num-groups": 1, "cold-start-steps": 300},
        {"strategy": "fedgroup", "num-groups": 1, "cold-start-epochs": 9, "generators": "silos"},
        {"strategy": "kmeans", "cold-start-epochs": 9},
        {"local-steps": 300},
        {"personalise": "finetune", "personal-epochs": 50},
        {"strategy": "pfedme"},
        {"strategy": "perfedavg", "adapt-steps": 9},
    ):
        with pytest.raises(FederationError, match="trains at most 1 epochs a round") as caught:
            usual = {"local-epochs": 1, "wait-for-silos": 0.2}
            run(tmp_path / "-".join(keys), [silo(max_local_epochs=1)], **(usual | keys))
        assert caught.value.exit_code == EXIT_NO_SILOS
    with pytest.raises(FederationError, match=r"'a' does not share its label counts.*silo.toml"):
        run(tmp_path / "fedgen", [silo()], strategy="fedgen", **{"wait-for-silos": 0.2})


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
    assert "does not state the size of its groups." in reason(reply)
    described = decode_description(ask(wire.DESCRIBE, silo(min_group_size=3)).content)
    assert described.min_group_size == 3


def test_only_permitted_metrics_leave() -> None:
    model = initial()
    all_of_them = read_metrics(train(model, evaluate_received=True).content)
    assert {wire.TRAIN_LOSS, wire.RECEIVED_ERROR, wire.SECONDS} <= set(all_of_them)
    some = read_metrics(train(model, silo(share_metrics="error"), evaluate_received=True).content)
    assert set(some) == {wire.NUM_EXAMPLES, wire.RECEIVED_ERROR, wire.RECEIVED_EXAMPLES}
    none = ask(wire.EVALUATE, silo(share_metrics=""), model=model, **TRAINING)
    assert set(read_metrics(none.content)) == {wire.NUM_EXAMPLES}


FIGURES = {
    f"{name}{end}": 0.5
    for name in (*wire.KNOWN_METRICS, wire.TRIVIAL, "mine")
    for end in ("", wire.LOW, wire.HIGH)
} | {wire.NUM_EXAMPLES: 7, wire.RECEIVED_ERROR: 0.5}
"""Of every metric that silos know, and one that they do not, with the ends of their intervals."""


def leaving(policy: Policy) -> set[str]:
    return set(permitted(FIGURES, policy)) - {wire.NUM_EXAMPLES}


def test_metrics_that_tell_class_frequencies_and_unknown_ones_stay_unless_they_are_named() -> None:
    by_default = leaving(Policy())
    for name in ("error", "auroc", "brier", "loss", "calibration-error", "rmse", "dice"):
        assert {name, f"{name}-low", f"{name}-high"} <= by_default
    assert {
        *("sensitivity", "specificity", "balanced-accuracy", "average-precision", "f1", "trivial")
    } == REVEALING
    for name in (*REVEALING, "mine"):
        ends = {name, f"{name}-low", f"{name}-high"}
        assert not ends & by_default
        assert leaving(Policy(share_metrics=(name,))) == ends, "named, and nothing else is"
    everything = Policy(share_metrics=(*NAMES, "mine"))
    assert leaving(everything) == set(FIGURES) - {wire.NUM_EXAMPLES}
    assert permitted(FIGURES, Policy(share_metrics=()))[wire.NUM_EXAMPLES] == 7


def test_of_a_full_evaluation_what_reveals_leaves_only_if_it_is_named() -> None:
    """Of the digits' ten classes: what the silo really answers."""
    asked = TRAINING | {"keep": True}
    by_default, named = (
        set(read_metrics(ask(wire.EVALUATE, node, model=initial(), **asked).content))
        for node in (silo(), silo(share_metrics="balanced-accuracy,trivial"))
    )
    assert {"error", "error-low", "error-high", "brier", "brier-low"} <= by_default
    assert not {"balanced-accuracy", "balanced-accuracy-low", "f1", "trivial"} & by_default
    assert named == {wire.NUM_EXAMPLES, "balanced-accuracy", "trivial"}, (
        "ends: of classes that all are there"
    )


def test_a_metric_that_no_task_has_is_refused_unless_an_app_of_one_s_own_serves() -> None:
    with pytest.raises(SettingsError, match="names 'eror', which no task has"):
        open_session(SiloSettings.from_node_config(silo(share_metrics="error,eror"), node_id=1))


def test_models_beside_the_task_s_leave_only_if_the_silo_lets_them() -> None:
    assert not ask("evaluate.discriminator", silo(), seed=0).has_error()
    for kind in ("evaluate.discriminator", "train.discriminator"):
        reply = ask(kind, silo(auxiliary=False), seed=0, steps=1)
        assert "sends no model except the task's" in reason(reply)


def test_there_is_no_kind_of_message_that_the_policy_does_not_cover() -> None:
    """A handler that is added later must check it too."""
    model = initial()
    kinds = [kind.removesuffix(".default") for kind in coterie.client.app.app._registered_funcs]
    assert {wire.DESCRIBE, wire.INITIAL, wire.TRAIN, wire.EVALUATE} <= set(kinds)
    for kind in kinds:
        reply = ask(kind, silo(strategies="hcct"), model=model, strategy="fedavg", **TRAINING)
        assert "takes part in hcct; this run's strategy is fedavg" in reason(reply), kind


# ---------------------------------------------------------------- what a hostile server asks for


@pytest.mark.parametrize(
    ("steps", "batch", "said"),
    [
        (1, 1, "would use 1"),
        (1, 63, "would use 63"),
        (9, 7, "would use 63"),
        (1, 64, ""),
        (8, 8, ""),
        (64, 1, ""),
    ],
)
def test_no_update_leaves_that_few_samples_are_behind(steps: int, batch: int, said: str) -> None:
    asked_for = {**TRAINING, wire.LOCAL_STEPS: steps, wire.BATCH_SIZE: batch}
    own = digits_config("a", **{"data.train": 100})
    replies = [train(initial(), own, **asked_for), ask(wire.DESCRIBE, own, **asked_for)]
    for reply in replies:
        if said:
            assert f"fewer than 64 samples (min_samples); this run's {said}" in reason(reply)
        else:
            assert not reply.has_error()


def test_a_step_has_as_many_samples_as_the_silo_wants() -> None:
    wants = silo(min_batch=4)
    assert "at least 4 samples a step (min_batch)" in reason(
        train(initial(), wants, **{**TRAINING, wire.BATCH_SIZE: 3})
    )
    assert not train(initial(), wants, **{**TRAINING, wire.BATCH_SIZE: 4}).has_error()


def test_a_server_that_calls_every_round_the_first_is_refused(tmp_path: Path) -> None:
    wants = digits_config("a", home=str(tmp_path), **{"max-rounds": 5})
    settings = {**TRAINING, wire.RUN: "attack", wire.ROUND: 1, wire.LOCAL_STEPS: 3}
    replies = [train(initial(), wants, **settings) for _ in range(request_counts.MAX_REPEATS + 1)]
    assert not any(reply.has_error() for reply in replies)
    assert "has trained for round 1 of this run 21 times already" in reason(
        train(initial(), wants, **settings)
    )
    request_counts._memory.clear()  # a new process reads them from the ledger
    assert "21 times already" in reason(train(initial(), wants, **settings))
    for number in range(2, 6):
        assert not train(initial(), wants, **{**settings, wire.ROUND: number}).has_error()
    assert "trains at most 5 rounds; it has trained 25 times" in reason(
        train(initial(), wants, **{**settings, wire.ROUND: 5})
    )
    assert not train(initial(), wants, **{**settings, wire.RUN: "another"}).has_error()


def test_evaluations_in_a_round_are_counted(tmp_path: Path) -> None:
    wants, settings = (
        silo(max_evaluations=2, home=str(tmp_path)),
        {wire.RUN: "attack", wire.ROUND: 1},
    )
    replies = [ask(wire.EVALUATE, wants, model=initial(), **settings) for _ in range(3)]
    assert [reply.has_error() for reply in replies] == [False, False, True]
    assert "at most 2 times a round (max_evaluations)" in reason(replies[2])
    later = {**settings, wire.ROUND: 2}
    assert not ask(wire.EVALUATE, wants, model=initial(), **later).has_error()


def test_a_question_about_histograms_counts_once_however_often_it_is_put(tmp_path: Path) -> None:
    def put(number: int, base: float, **more: Any) -> str:
        """Return why the silo would refuse a question, and let it answer, if it would not."""
        entries = {wire.RUN: "r", wire.ROUND: number, wire.STRATEGY: "trees", **more}
        content = RecordDict({wire.CONFIG: ConfigRecord(entries)})
        arrays = {"base": np.array([base], np.float32)}
        content[wire.ARRAYS] = wire.encode_arrays(arrays, packed=True)
        message = Message(content, 1, wire.EVALUATE_HISTOGRAMS)
        asked = request_counts.asked_by(own, "r", "")
        question = partial(request_counts.question_of, message)
        why = asked.objection(wire.EVALUATE_HISTOGRAMS, content[wire.CONFIG], own.policy, question)
        if not why:
            ledger.outbound(
                message, context(silo(**kept)), lambda m, c: Message(RecordDict(), reply_to=m)
            )
        return why

    kept = {"max_evaluations": 2, "home": str(tmp_path)}
    own = SiloSettings.from_node_config(context(silo(**kept)).node_config, node_id=1)
    assert [put(1, value) for value in (0.0, 0.5, 0.0, 0.5)] == [""] * 4
    for changed in ({"base": 1.0}, {"base": 0.5, "holdout": 0.1}):
        assert "at most 2 times a round (max_evaluations)" in put(1, **changed)
    request_counts._memory.clear()  # a new process reads them from the ledger
    assert not put(1, 0.5) and put(1, 1.0)
    assert not put(2, 0.5) and put(1, 0.5), "only the last round is repeated"


def test_a_run_stays_of_one_strategy_and_sends_what_that_sends(tmp_path: Path) -> None:
    own = silo(home=str(tmp_path))
    settings = {**TRAINING, wire.RUN: "attack", wire.STRATEGY: "fedavg"}
    assert not train(initial(), own, **settings).has_error()
    assert "with strategy fedavg; now the run names hcct" in reason(
        train(initial(), own, **{**settings, wire.STRATEGY: "hcct"})
    )
    assert "train.pfedme messages only in runs with strategy pfedme, hcct" in reason(
        ask(wire.TRAIN_PFEDME, own, model=initial(), **settings)
    )


def test_a_silo_without_a_folder_knows_a_run_by_its_number_at_the_superlink() -> None:
    own, entry = SiloSettings("a"), {"round": 1, "strategy": "fedavg"}
    request_counts.asked_by(own, "run", "7").add(wire.EVALUATE, entry)
    assert request_counts.asked_by(own, "run", "7").evaluated[1] == 1
    for other in ("8", "0"):  # 0: a run in this process, which is played by whoever asks
        assert not request_counts.asked_by(own, "run", other).evaluated


def test_models_of_so_many_runs_are_kept_and_no_more(tmp_path: Path) -> None:
    wants = digits_config("a", home=str(tmp_path), **{"max-kept-runs": 2})

    def keep(run: str) -> Message:
        settings = {wire.RUN: run, wire.ROUND: 1, wire.ROUNDS: 2, wire.KEEP: True, wire.SEED: 0}
        return ask(wire.EVALUATE, wants, model=initial(), **settings)

    assert not keep("one").has_error() and not keep("two").has_error()
    assert "models of at most 2 runs (max_kept_runs), and has models of 2" in reason(keep("three"))
    assert not keep("one").has_error(), "one that is there goes on"
    assert len({file.stem for file in (tmp_path / "models").glob("*.safetensors")}) == 2


def test_texts_of_a_coordinator_appear_escaped_in_card_and_ledger(tmp_path: Path) -> None:
    wants, odd = digits_config("a", home=str(tmp_path)), "\x1b[2J\n"
    settings = {wire.RUN: "r", wire.ROUND: 1, wire.ROUNDS: 1, wire.KEEP: True, wire.SEED: 0}
    settings |= {wire.STRATEGY: odd, wire.MEMBERS: [odd], wire.GROUP: 1, wire.GROUP_SIZE: 2}
    assert not ask(wire.EVALUATE, wants, model=initial(), **settings).has_error()
    assert ask(wire.EVALUATE, wants, model=initial(), **{**settings, wire.RUN: odd}).has_error()
    (card,) = (tmp_path / "models").glob("*.md")
    assert card.read_text().count("\\x1b[2J ") == 2
    runs = {run for run, _ in ledger.totals(ledger.read(tmp_path))}
    assert runs == {"r", "\\x1b[2J "}


def test_what_a_server_calls_a_round_does_not_break_the_ledger(tmp_path: Path) -> None:
    wants = digits_config("a", home=str(tmp_path))
    for number in ("x", -3, 2.5, True):
        ask(wire.EVALUATE, wants, model=initial(), **{wire.ROUND: number, wire.RUN: "r"})
    entries = list(ledger.read(tmp_path))
    assert [entry["round"] for entry in entries] == [0, 0, 0, 0]
    old = [{"run": "r", "type": "evaluate", "round": "x"}, {"type": "train", "round": 2}]
    found = ledger.totals([*entries, *old])
    assert found["r", "evaluate"].rounds == (0, 0)


def test_a_repeated_training_of_a_round_counts_once() -> None:
    asked, most = request_counts.Asked(), request_counts.MAX_TRAININGS
    entries = [{"round": 1, "purpose": f"without-{number}"} for number in range(most)]
    for entry in entries * 2:
        assert not asked.objection(wire.TRAIN, {wire.ROUND: 1, **entry}, Policy())
        asked.add(wire.TRAIN, entry)
    other = {wire.ROUND: 1, wire.PURPOSE: "another"}
    assert "at most 200 times a round" in asked.objection(wire.TRAIN, other, Policy())
