"""A silo's privacy budget: what is counted, that nothing is forgotten, and what is refused."""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opacus.accountants import RDPAccountant

from coterie import wire
from coterie.client.app import ANSWERS
from coterie.client.cli.check import check
from coterie.client.cli.report import read_silo
from coterie.client.home.folder import Home, create
from coterie.client.home.privacy import Privacy
from coterie.client.home.settings import SettingsError, SiloSettings
from coterie.client.ledger import read
from coterie.client.prepare import prepare_nodes
from coterie.client.resident.foreign import check_policy
from coterie.client.work.card import read_card
from coterie.engine.flower import message_to_proto
from coterie.features.privacy import budget, dp_sgd
from coterie.features.privacy.budget import Budget, BudgetError, Charge, read_charges
from coterie.features.privacy.silo import CANNOT_DO_WITHOUT, REFUSED, STAYING
from coterie.server.runs.config import RunConfig
from coterie.server.runs.record.reading import read_whole
from coterie.server.runs.run import terms
from coterie.strategies import FederationError
from coterie.strategies.registry import EVERY
from coterie.tasks import TaskError
from tests.conftest import digits_config
from tests.kit import TRAINING, ask, dashed, initial, model_in, reason, restart_silos, run, train
from tests.unit.client.kinds import source
from tests.unit.client.models import Normed

SIXTEEN = {"data.train": 160, "data.test": 20}


def silo(home: Path | str, epsilon: float = 8.0, **more: Any) -> dict[str, Any]:
    own = {"privacy-epsilon": epsilon, "home": str(home), **SIXTEEN}
    return digits_config("a", **own | dashed(more))


def of(node: dict[str, Any]) -> Budget:
    settings = SiloSettings.from_node_config(node, node_id=1)
    return Budget(settings, 160, "run")


# ---------------------------------------------------------------- what is counted


def test_epsilon_is_that_of_opacus_accountant_on_the_same_steps(tmp_path: Path) -> None:
    node, model = silo(tmp_path, epsilon=100.0), initial()
    accountant = RDPAccountant()
    for number, batch, epochs in ((1, 16, 2), (2, 16, 1), (3, 40, 1), (4, 16, 1)):
        settings = {"server_round": number, "batch_size": batch, "local_epochs": epochs}
        assert not train(model, node, **settings).has_error()
        for _ in range(epochs * (160 // batch)):
            accountant.step(noise_multiplier=1.0, sample_rate=batch / 160)
    spent = of(node).spent()
    assert spent.epsilon == pytest.approx(accountant.get_epsilon(1 / 1600), rel=1e-12)
    assert (spent.of, spent.delta, spent.charges) == (100.0, 1 / 1600, 4)


def test_a_silo_says_whether_it_trains_with_differential_privacy(tmp_path: Path) -> None:
    for node, private in ((silo(tmp_path), True), (digits_config("a"), False)):
        assert wire.decode_description(ask(wire.DESCRIBE, node).content).private is private


def test_the_same_training_costs_once_and_another_purpose_again(tmp_path: Path) -> None:
    node, model = silo(tmp_path), initial()
    first = train(model, node)
    restart_silos()
    again = train(model, node)
    contents = [message_to_proto(reply).content for reply in (first, again)]
    assert contents[1] == contents[0], "byte for byte, also seconds"
    assert of(node).spent().charges == 1
    assert not train(model, node, purpose="trial-1").has_error()
    assert of(node).spent().charges == 2


def test_restarts_do_not_reset_a_budget(tmp_path: Path) -> None:
    node, model = silo(tmp_path, epsilon=100.0), initial()
    for number in range(1, 8):
        restart_silos()
        assert not train(model, node, server_round=number, run=f"run-{number}").has_error()
        assert of(node).spent().charges == number
    accountant = RDPAccountant()
    accountant.history = [(1.0, 8 / 160, 7 * 20)]
    assert of(node).spent().epsilon == pytest.approx(accountant.get_epsilon(1 / 1600), rel=1e-12)


def test_a_kill_between_charge_and_reply_loses_no_charge(tmp_path: Path) -> None:
    model = initial()
    child = os.fork()
    if child == 0:
        dp_sgd._train = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        try:
            train(model, silo(tmp_path))
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
    node = silo(tmp_path)
    (charge,) = read_charges(str(tmp_path))
    assert (charge.noise, charge.rate, charge.steps, charge.round) == (1.0, 0.05, 20, 1)
    assert not train(initial(), node).has_error()
    assert of(node).spent().charges == 2, "nothing of the first has left, but who can know"


def test_the_replies_and_the_budget_are_for_the_silo_s_eyes_alone(tmp_path: Path) -> None:
    train(initial(), silo(tmp_path))
    (reply,) = (tmp_path / "privacy" / "replies").iterdir()
    for path in (reply, tmp_path / "privacy" / "budget.json", tmp_path / "privacy"):
        assert path.stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("text", ["", "{}", '{"charges": [{"key": "x"}]}', "[1]"])
def test_a_damaged_budget_trains_nothing(tmp_path: Path, text: str) -> None:
    node = silo(tmp_path)
    train(initial(), node)
    (tmp_path / "privacy" / "budget.json").write_text(text)
    reply = train(initial(), node, server_round=2)
    assert reply.has_error() and reply.error.code == wire.FAILED
    with pytest.raises(BudgetError, match=r"budget\.json is damaged, so the spent"):
        of(node).spent()


def test_who_charges_at_the_same_time_loses_no_charge_of_the_other_s(tmp_path: Path) -> None:
    """The lock is of open files: two threads hold it from each other as two processes do."""
    one = of(silo(tmp_path, epsilon=1000.0))

    def charge(who: str) -> None:
        for i in range(10):
            one.charge(replace(a_round(), key=f"{who}-{i}"))

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(charge, "ab"))
    assert len({charged.key for charged in read_charges(str(tmp_path))}) == 20


# ---------------------------------------------------------------- what is refused


def a_round(steps: int = 10) -> Charge:
    return Charge("", 1.0, 0.1, steps, "", 0, "")


def test_a_training_that_would_go_over_the_budget_is_not_charged_and_not_done(
    tmp_path: Path,
) -> None:
    node, model = silo(tmp_path, epsilon=4.0), initial()
    replies = []
    for number in range(1, 30):
        replies.append(train(model, node, server_round=number, batch_size=16))
        if replies[-1].has_error():
            break
    said = reason(replies[-1], wire.SPENT)
    assert (
        "silo 'a' has used up its privacy budget: ε 3." in said
        and "of 4 at δ 0.000625 (if one row is" in said
    )
    spent = of(node).spent()
    assert spent.charges == len(replies) - 1 > 2 and spent.epsilon <= 4.0
    assert of(node).epsilon_with(a_round()) > 4.0
    assert not ask(wire.EVALUATE, node, model=model, server_round=30).has_error()


def test_how_many_rounds_are_left_is_how_many_are_trained(tmp_path: Path) -> None:
    node, model = silo(tmp_path, epsilon=5.0), initial()
    left = of(node).rounds_left(a_round())
    done = 0
    while not train(model, node, server_round=done + 1, batch_size=16).has_error():
        done += 1
        assert of(node).rounds_left(a_round()) == left - done
    assert done == left > 2


JOINING = {"protocol": wire.PROTOCOL, "task": "digits", "batch_size": 16, "local_epochs": 1}


def test_a_run_that_would_go_over_the_budget_is_refused_at_the_join(tmp_path: Path) -> None:
    node = silo(tmp_path, epsilon=4.0)
    most = of(node).rounds_left(a_round())
    assert not ask(wire.DESCRIBE, node, rounds=most, **JOINING).has_error()
    said = reason(ask(wire.DESCRIBE, node, rounds=most + 1, **JOINING), wire.SPENT)
    assert (
        "has a privacy budget of ε 4 at δ 0.000625, if one row is added or removed, of which"
        in said
    )
    own: dict[str, Any] = {"personalise": "partial", "own_penalty": 3.0}
    first = {"personal": "head-first"}
    for beside in (own, {"personalise": "ditto"}, {"cold_start_epochs": 3}, first):
        assert ask(wire.DESCRIBE, node, rounds=most, **JOINING, **beside).has_error(), beside


def test_who_comes_back_to_a_run_is_not_refused_for_what_it_has_paid_already(
    tmp_path: Path,
) -> None:
    node, model = silo(tmp_path, epsilon=4.0), initial()
    most = of(node).rounds_left(a_round())
    for number in range(1, most):
        settings = {"server_round": number, "batch_size": 16, "run": "first"}
        assert not train(model, node, **settings).has_error()
    settings = {**JOINING, "rounds": most}
    assert not ask(wire.DESCRIBE, node, of_run="first", **settings).has_error()
    assert "is spent by other runs" in reason(
        ask(wire.DESCRIBE, node, of_run="second", **settings), wire.SPENT
    )


@pytest.mark.parametrize("kind", sorted(REFUSED))
def test_types_of_messages_that_are_not_private_are_refused(kind: str, tmp_path: Path) -> None:
    node = silo(tmp_path, label_counts=True, column_sums=True, sums="regression")
    alone = {"strategy": wire.ONLY_STATISTICS} if kind == wire.STATISTICS else {}
    said = reason(ask(kind, node, model=initial(), **TRAINING | alone))
    assert (
        f"silo 'a' trains with differential privacy ([privacy] in silo.toml), and {REFUSED[kind]}"
        in said
    )
    assert kind in said
    assert not (tmp_path / "privacy" / "budget.json").exists()


@pytest.mark.parametrize("strategy", sorted(CANNOT_DO_WITHOUT))
def test_strategies_that_cannot_do_without_these_are_refused_at_the_join(
    strategy: str, tmp_path: Path
) -> None:
    said = reason(ask(wire.DESCRIBE, silo(tmp_path), strategy=strategy, **JOINING))
    assert "cannot be made private here (strategy = " in said


@pytest.mark.parametrize("strategy", ["hcct", "fedgroup", "fedcollab"])
@pytest.mark.parametrize(
    ("within", "what"), [("perfedavg", "Per-FedAvg's"), ("pfedme", "pFedMe's"), ("fednova", "")]
)
def test_an_algorithm_within_groups_that_is_not_private_is_refused_at_the_join(
    strategy: str, within: str, what: str, tmp_path: Path
) -> None:
    entries = terms(RunConfig.read({"strategy": strategy, "within": within, "rounds": 2}))
    asked = {key.replace("-", "_"): value for key, value in entries.items()}
    reply = ask(wire.DESCRIBE, silo(tmp_path, epsilon=100.0), **{**JOINING, **asked})
    if what:
        assert f"{what} training cannot be made private here" in reason(reply)
    else:
        assert not reply.has_error()


@pytest.mark.parametrize(
    "entry",
    [
        {"balance": "weights"},
        {"balance": "sampling"},
        {"precision": "float16"},
        {"adapt_steps": 1},
        {"generated_weight": 0.5},
        {"distil_weight": 0.5},
        {"label_counts": True},
    ],
    ids=str,
)
def test_entries_that_are_not_private_are_refused_at_the_join_and_later(
    entry: dict[str, Any], tmp_path: Path
) -> None:
    node = silo(tmp_path, label_counts=True)
    for reply in (ask(wire.DESCRIBE, node, **entry), train(initial(), node, **entry)):
        assert "cannot be made private here" in reason(reply)


def test_every_strategy_and_type_of_message_is_known_to_exist() -> None:
    assert set(REFUSED) <= set(ANSWERS) and set(CANNOT_DO_WITHOUT) <= {*EVERY, *wire.UNTRAINED}
    assert set(CANNOT_DO_WITHOUT.values()) <= set(REFUSED)


def test_every_strategy_that_makes_a_silo_answer_what_it_refuses_is_refused_or_can_do_without() -> (
    None
):
    """FedCollab places silos without discriminators, auto races without them; and groups train
    otherwise unless the run asks for Per-FedAvg or pFedMe within them."""
    bound = {name for kind in REFUSED for name in wire.kind_of(kind).strategies}
    assert bound - set(CANNOT_DO_WITHOUT) == {"fedcollab", "auto", "hcct", "fedgroup"}


def test_metrics_of_training_data_do_not_leave(tmp_path: Path) -> None:
    settings = {"holdout": 0.2, "validation": 0.2, "rounds": 4, "evaluate_received": True}
    plain = train(initial(), digits_config("a", **SIXTEEN), **settings).content[wire.METRICS]
    of_training = {wire.TRAIN_LOSS, wire.HOLDOUT_ERROR, wire.HOLDOUT_LOSS}
    assert set(plain) & STAYING == of_training | {wire.RECEIVED_VALIDATION_ERROR}
    node = silo(tmp_path, epsilon=100.0)
    own = train(initial(), node, **settings).content[wire.METRICS]
    assert set(own) == (set(plain) - STAYING) | {wire.UPDATE_NOISE}
    assert own[wire.UPDATE_NOISE] > 0
    end = {"keep": True, "server_round": 1, "rounds": 1, "validation": 0.2}
    kept = ask(wire.EVALUATE, node, model=initial(), **end).content[wire.METRICS]
    assert not set(kept) & STAYING and wire.ERROR in kept


def test_everything_that_is_trained_is_charged(tmp_path: Path) -> None:
    """The round's model, a cold start, a trial, Ditto's own, and both parts of FedRep's."""
    node, model = silo(tmp_path, epsilon=1000.0), initial()

    def charges(kind: str, **settings: Any) -> int:
        before = of(node).spent().charges
        assert not ask(kind, node, model=model, **{**TRAINING, **settings}).has_error()
        return of(node).spent().charges - before

    assert charges(wire.TRAIN) == 1
    assert charges(wire.COLD_START, purpose="cold start") == 1
    assert charges(wire.TRAIN, purpose="trial-1") == 1
    assert charges(wire.TRAIN, server_round=2, personalise="ditto", ditto_lambda=0.1) == 2
    assert charges(wire.TRAIN, server_round=5, personal="head-first") == 2
    assert charges(wire.EVALUATE, personalise="finetune", server_round=3) == 1
    partial = {"personalise": "partial", "own_penalty": 3.0}
    assert charges(wire.EVALUATE, server_round=4, **partial) == 1


def test_batch_norm_is_refused_before_the_silo_joins(tmp_path: Path) -> None:
    node = {**silo(tmp_path), "task": source(Normed)}
    with pytest.raises(TaskError, match=r"BatchNorm, which mixes samples.*GroupNorm"):
        prepare_nodes([node])


def test_an_app_of_one_s_own_cannot_be_private() -> None:
    with pytest.raises(
        SettingsError, match=r"\[privacy\] in silo\.toml cannot be enforced for an app:"
    ):
        check_policy(SiloSettings("a", privacy=Privacy(1.0)))


def test_without_opacus_the_silo_says_what_to_install(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "opacus.accountants", None)
    with pytest.raises(SettingsError, match=r"pip install 'coterie\[privacy\]'"):
        prepare_nodes([silo(tmp_path)])
    assert not ask(wire.DESCRIBE, digits_config("b")).has_error(), "others do not need it"


# ---------------------------------------------------------------- silo.toml and what people read


def test_the_section_of_silo_toml_is_read_and_survives_the_node_config(tmp_path: Path) -> None:
    home = create(tmp_path, "a")
    assert home.settings().privacy is None
    file = tmp_path / "silo.toml"
    text = file.read_text()
    file.write_text(text + "\n[privacy]\nepsilon = 2.0\ndelta = 1e-4\nnoise = 1.5\nclip = 0.5\n")
    settings = Home(tmp_path).settings()
    assert settings.privacy == Privacy(2.0, 1e-4, 1.5, 0.5)
    again = SiloSettings.from_node_config(settings.to_node_config(), node_id=1)
    assert again.privacy == settings.privacy
    for line, said in (
        ("epsilon = 0", "epsilon must be above 0"),
        ("noise = 1.0", "key .privacy.epsilon. is missing"),
        ("epsilon = 1\nsigma = 2", "unknown key .privacy.sigma"),
        ("epsilon = 1\nnoise = 0.01", "noise must be at least 0.1"),
    ):
        file.write_text(f"{text}\n[privacy]\n{line}\n")
        with pytest.raises(SettingsError, match=said):
            Home(tmp_path).settings()


def test_silo_check_says_what_is_spent_what_a_round_costs_and_how_many_are_left(
    tmp_path: Path,
) -> None:
    node = silo(tmp_path, epsilon=20.0)
    train(initial(), node, batch_size=16, local_epochs=5)
    settings = SiloSettings.from_node_config(node, node_id=1)
    before = of(node).spent()
    text = " ".join("\n".join(check(settings)).split())
    costs = of(node).epsilon_with(a_round(50)) - before.epsilon
    left = of(node).rounds_left(a_round(50))
    assert f"privacy {before.text()} spent, in 1 trainings; noise 1, clip 1." in text
    assert f"5 epochs with batches of 16 costs ε {costs:.3g}; {left} such rounds remain." in text
    assert "train-loss" not in text and "discriminators: none leave" in text
    assert of(node).spent() == before, "looking costs nothing"


def test_ledger_report_and_card_say_what_was_spent(tmp_path: Path) -> None:
    node = silo(tmp_path)
    assert not train(initial(), node, run="north").has_error()
    settings = {"keep": True, "server_round": 1, "rounds": 1, "run": "north", "seed": 0}
    assert not ask(wire.EVALUATE, node, model=initial(), **settings).has_error()
    spent = of(node).spent()
    entry = [*read(tmp_path)][-1]
    assert entry["privacy"] == {"epsilon": spent.epsilon, "of": 8.0, "delta": 1 / 1600}
    card = read_card(tmp_path / "models" / "north.safetensors")
    assert card.privacy == {
        "epsilon": spent.epsilon, "delta": 1 / 1600, "noise": 1.0, "clip": 1.0,
    }  # fmt: skip
    text = (tmp_path / "models" / "north.md").read_text()
    assert f"ε {spent.epsilon:.3g} at δ 0.000625" in text
    assert f"{spent.text()} of its privacy budget, in 1 trainings" in read_silo(tmp_path).privacy


def test_a_silo_without_a_folder_says_that_its_privacy_is_a_simulation(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "_warned", set())
    with caplog.at_level(logging.WARNING):
        train(initial(), silo(""))
    assert "its privacy is only simulated:" in caplog.text


# ---------------------------------------------------------------- whole runs


def play(folder: Path, nodes: list[dict[str, Any]]) -> Any:
    """Six rounds of one epoch."""
    return run(folder, nodes, rounds=6, local_epochs=1, batch_size=16)


def two(tmp_path: Path, first: float, second: float | None) -> list[dict[str, Any]]:
    own = digits_config("b", 1, home=str(tmp_path / "b"), **SIXTEEN)
    if second is not None:
        own["privacy-epsilon"] = second
    return [silo(tmp_path / "a", epsilon=first), own]


def test_runs_with_differential_privacy_repeat_themselves_and_are_recorded(tmp_path: Path) -> None:
    results = []
    for name in ("one", "two"):
        restart_silos()
        nodes = [{**node, "home": ""} for node in two(tmp_path, 50.0, None)]
        results.append(play(tmp_path / name, nodes))
    models = [{n: wire.decode_arrays(m)["head.bias"] for n, m in r.models.items()} for r in results]
    np.testing.assert_equal(models[0], models[1])
    silos = json.loads((tmp_path / "one" / "run.json").read_text())["silos"]
    assert silos["a"]["private"] is True and "private" not in silos["b"]
    facts = read_whole(tmp_path / "one").silos
    assert (facts["a"].private, facts["b"].private) == (True, False)


@pytest.fixture
def unplanned(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that does not say before the join how long it is, as when it has trials."""
    monkeypatch.setattr("coterie.features.privacy.silo._check_budget", lambda *_: None)


def test_a_run_goes_on_without_who_has_spent_its_budget_which_keeps_the_last_model(
    tmp_path: Path, unplanned: None
) -> None:
    nodes = two(tmp_path, 3.5, None)
    done = play(tmp_path / "run", nodes)
    kept = of(nodes[0]).spent()
    trained = [r.round for r in done.rounds if "a" in r.silos and not r.final]
    assert trained == list(range(1, kept.charges + 1)) and 1 < kept.charges < 6
    for report in done.rounds[kept.charges : -1]:
        assert "has used up its privacy budget: ε 3." in report.left_out["a"]
    card = read_card(tmp_path / "a" / "models" / "run.safetensors")
    assert card.round == 6, "it is given its group's model to the end, which costs nothing"
    assert "spent" not in (tmp_path / "b" / "models" / "run.md").read_text()


def test_a_run_ends_when_all_budgets_are_spent_and_everybody_has_the_last_model(
    tmp_path: Path, unplanned: None
) -> None:
    nodes = two(tmp_path, 3.5, 3.5)
    done = play(tmp_path / "run", nodes)
    last = of(nodes[0]).spent().charges
    assert 1 < last < 6 and done.rounds[-1].final and done.rounds[-1].round == last
    record = read_whole(tmp_path / "run")
    assert record.status == "completed"
    assert (
        "no silo's privacy budget allows another round: a: silo 'a' has used" in record.ended_early
    )
    for name in "ab":
        assert read_card(tmp_path / name / "models" / "run.safetensors").round == last


def test_a_silo_keeps_the_last_model_even_if_the_server_never_speaks_again(
    tmp_path: Path, unplanned: None
) -> None:
    node = silo(tmp_path, epsilon=2.9)
    model, number = initial(), 1
    settings = {"batch_size": 16, "run": "r", "rounds": 9}
    while not (reply := train(model, node, server_round=number, **settings)).has_error():
        model, number = model_in(reply), number + 1
    assert number > 1
    card = read_card(tmp_path / "models" / "r.safetensors")
    assert (card.round, card.rounds) == (number - 1, 9)


def test_a_run_whose_silos_are_refused_at_the_join_says_why(tmp_path: Path) -> None:
    with pytest.raises(FederationError, match=r"has a privacy budget of ε 3 at δ 0\.000625"):
        play(tmp_path / "run", two(tmp_path, 3.0, 3.0))


def test_a_run_tells_before_the_join_what_a_budget_goes_by() -> None:
    entries = terms(RunConfig.read({"validation": 0.1, "rounds": 7, "local-epochs": 3}))
    assert (entries["validation"], entries["rounds"], entries["local-epochs"]) == (0.1, 7, 3)
