"""The silo's ClientApp through messages: what it answers and what it refuses."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.app import Message
from safetensors.numpy import load_file

import coterie.client.work.session
from coterie import wire
from coterie.client.home.rounds import latest
from coterie.client.home.settings import SiloSettings
from coterie.client.ledger import read
from coterie.client.prepare import prepare, prepare_nodes
from coterie.client.work.session import session_of
from coterie.client.work.weights import read_weights
from coterie.tasks import BUILT_IN, TaskError
from coterie.tasks.base import SiloData
from coterie.tasks.images.digits import Digits
from coterie.wire import decode_description
from tests.conftest import assert_equal_models, digits_config, silo
from tests.kit import TRAINING, ask, context, initial, model_in, reason, restart_silos, train
from tests.unit.client.kinds import source
from tests.unit.client.models import Normed

# ---------------------------------------------------------------- describe


def test_a_silo_describes_itself() -> None:
    described = decode_description(ask(wire.DESCRIBE, digits_config("a", alpha=3.0)).content)
    assert (described.name, described.num_examples, described.task) == ("a", 20, "digits")
    assert (described.alpha, described.device) == (3.0, "cpu")
    assert described.protocol == wire.PROTOCOL
    assert described.buffers == ()
    assert set(described.versions or {}) == {"coterie", "torch"}


@pytest.fixture
def normed(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Node config of a silo whose model has BatchNorm."""
    monkeypatch.setitem(BUILT_IN, "normed", source(Normed))
    return digits_config("a", task="normed")


def test_running_statistics_are_described_as_buffers(normed: dict[str, Any]) -> None:
    described = decode_description(ask(wire.DESCRIBE, normed).content)
    assert described.buffers == ("1.running_mean", "1.running_var", "1.num_batches_tracked")


def test_another_model_is_another_schema(normed: dict[str, Any]) -> None:
    one = decode_description(ask(wire.DESCRIBE, normed).content).schema
    assert one != decode_description(ask(wire.DESCRIBE).content).schema


@pytest.mark.parametrize("packed", [True, False])
def test_a_model_with_batch_norm_goes_to_the_silo_and_back(
    normed: dict[str, Any], packed: bool
) -> None:
    reply = train(initial(node=normed), normed, packed=packed, task="normed")
    assert not reply.has_error(), reply.error.reason
    trained = model_in(reply)
    assert trained["1.num_batches_tracked"].shape == ()
    assert int(trained["1.num_batches_tracked"]) == 3  # 20 samples by 8


# ---------------------------------------------------------------- initial


def test_every_silo_gives_the_same_initial_model_for_a_seed() -> None:
    first = initial(5, digits_config("a"))
    train(first)
    assert_equal_models(initial(5, digits_config("b", 1)), first)
    assert_equal_models(initial(5, digits_config("a")), first)
    assert not np.array_equal(initial(6)["head.weight"], first["head.weight"])


# ---------------------------------------------------------------- train


def test_training_answers_with_weights_like_those_sent_and_its_metrics() -> None:
    start = initial()
    reply = train(start)
    trained = model_in(reply)
    metrics = wire.read_metrics(reply.content)
    assert list(trained) == list(start)
    assert not np.array_equal(trained["head.weight"], start["head.weight"])
    assert set(metrics) == {"num-examples", "train-loss", "seconds"}
    assert metrics["num-examples"] == 20
    assert metrics["train-loss"] > 0 and metrics["seconds"] > 0


def test_the_same_training_is_bit_identical_and_round_purpose_silo_and_seed_change_it() -> None:
    start = initial()

    def weights(**changes: Any) -> np.ndarray:
        return model_in(train(start, **changes))["head.weight"]

    first = weights()
    np.testing.assert_array_equal(weights(), first)
    same_data_other_name = digits_config("b", 0)
    for changes in (
        {"server_round": 2},
        {"purpose": "catch-up"},
        {"seed": 1},
        {"node": same_data_other_name},
    ):
        assert not np.array_equal(weights(**changes), first), changes


def test_a_cold_start_is_a_training_with_its_own_randomness_that_leaves_nothing_behind(
    tmp_path: Path,
) -> None:
    start, config = initial(), digits_config("a", home=str(tmp_path))
    entries = TRAINING | {"purpose": "cold-start", "local_steps": 3}
    reply = ask(wire.COLD_START, config, model=start, **entries)
    same = train(start, purpose="cold-start", local_steps=3)
    expected = model_in(same)
    assert_equal_models(model_in(reply), expected)
    assert reply.content[wire.METRICS][wire.NUM_EXAMPLES] == 20
    assert not list(tmp_path.rglob("*.safetensors"))
    refused = ask(wire.COLD_START, config, model=start, **(entries | {"protocol": 2}))
    assert refused.has_error() and "the run speaks 2" in refused.error.reason


def test_training_starts_from_the_model_sent_not_from_the_last_one() -> None:
    start = initial()
    first = model_in(train(start))
    train(first, server_round=2)
    assert_equal_models(model_in(train(start)), first)


def test_the_answer_is_packed_exactly_where_the_question_was() -> None:
    for packed in (True, False):
        reply = train(initial(), packed=packed)
        assert wire.is_packed(reply.content[wire.ARRAYS]) is packed


def test_a_train_message_can_ask_for_the_error_of_the_model_it_brought() -> None:
    start = initial()
    asked = train(start, evaluate_received=True)
    metrics = wire.read_metrics(asked.content)
    alone = wire.read_metrics(ask(wire.EVALUATE, model=start).content)
    assert metrics["received-error"] == alone["error"]
    assert metrics["received-loss"] == alone["loss"]
    assert metrics["received-num-examples"] == alone["num-examples"] == 20
    plain = train(start, evaluate_received=False)
    assert "received-error" not in wire.read_metrics(plain.content)
    assert_equal_models(model_in(asked), model_in(plain))


def test_a_flower_server_that_knows_nothing_of_coterie_is_answered() -> None:
    """Arrays and a round, nothing else: default training of one epoch."""
    reply = ask(wire.TRAIN, model=initial(), packed=False, server_round=1)
    assert not reply.has_error()
    assert not wire.is_packed(reply.content[wire.ARRAYS])


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"local_epochs": 0}, "local-epochs must be an integer of at least 1. Got 0"),
        ({"local_epochs": 1.5}, "local-epochs"),
        ({"local_epochs": True}, "local-epochs"),
        ({"local_steps": -1}, "local-steps must be an integer of at least 0. Got -1"),
        ({"batch_size": 0}, "batch-size"),
        ({"batch_size": "big"}, "batch-size"),
        ({"lr": -0.1}, "lr must be a number of at least 0"),
        ({"lr": math.nan}, "lr"),
        ({"lr": math.inf}, "lr"),
        ({"lr": "fast"}, "lr"),
        ({"momentum": -1.0}, "momentum"),
        ({"weight_decay": math.nan}, "weight-decay"),
        ({"proximal_mu": -1.0}, "proximal-mu"),
        ({"precision": "float8"}, "float32, bfloat16, float16. Got 'float8'"),
        ({"server_round": -1}, "server-round"),
        ({"server_round": "one"}, "server-round"),
        ({"seed": -1}, "seed"),
        ({"seed": 0.5}, "seed"),
    ],
)
def test_a_bad_value_is_refused_by_name(changes: dict[str, Any], said: str) -> None:
    reply = train(initial(), **changes)
    assert said in reason(reply)


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("kind", [wire.DESCRIBE, wire.INITIAL, wire.TRAIN, wire.EVALUATE])
@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"protocol": 2}, "the run speaks 2"),
        ({"protocol": "1"}, "the run speaks '1'"),
        ({"task": "mnist"}, "serves task 'digits', the run is of task 'mnist'"),
    ],
)
def test_another_protocol_or_task_is_refused_with_the_reason(
    kind: str, changes: dict[str, Any], said: str
) -> None:
    reply = ask(kind, model=initial(), **(TRAINING | changes))
    if kind == wire.DESCRIBE and "task" in changes:  # no error: it says which tasks it serves
        assert wire.decode_description(reply.content).tasks == ("digits",)
        return
    assert said in reason(reply) and "'a'" in reason(reply)


@pytest.mark.parametrize("kind", [wire.TRAIN, wire.EVALUATE])
def test_a_message_without_arrays_is_refused(kind: str) -> None:
    reply = ask(kind, **TRAINING)
    assert reply.error.reason == f"a {kind} message needs 'arrays'."


@pytest.mark.parametrize("kind", [wire.TRAIN, wire.EVALUATE])
def test_another_model_is_refused_and_the_next_message_is_answered(kind: str) -> None:
    good = initial()
    for bad in (
        {k: v for k, v in good.items() if k != "head.bias"},
        good | {"head.bias": np.zeros(11, np.float32)},
    ):
        reply = ask(kind, model=bad, **TRAINING)
        assert "head.bias" in reason(reply)
    assert not ask(kind, model=good, **TRAINING).has_error()


@pytest.mark.parametrize(
    ("samples", "shares", "said"),
    [
        (1, {"validation": 0.2}, "has too few training samples for validation: 1 remains,"),
        (1, {"holdout": 0.2}, "has too few training samples for holdout: 1 remains,"),
        (
            2,
            {"validation": 0.2, "holdout": 0.2},
            "has too few training samples for holdout: 1 remains,",
        ),
        (
            3,
            {"validation": 0.5, "holdout": 0.2},
            "has too few training samples for holdout: 1 remains,",
        ),
        (20, {"validation": 0.6}, "validation must be in [0, 0.5]. Got 0.6"),
    ],
)
def test_what_leaves_nothing_to_train_with_is_refused_with_the_reason(
    samples: int, shares: dict[str, Any], said: str
) -> None:
    reply = train(initial(), digits_config("a", **{"data.train": samples}), **shares)
    assert said in reason(reply)


@pytest.mark.parametrize(
    ("samples", "shares"),
    [(2, {"validation": 0.2}), (2, {"holdout": 0.2}), (3, {"validation": 0.2, "holdout": 0.2})],
)
def test_one_sample_that_is_left_is_trained_with(samples: int, shares: dict[str, Any]) -> None:
    config = digits_config("a", **{"data.train": samples})
    reply = train(initial(), config, evaluate_received=True, **shares)
    assert not reply.has_error(), reply.error.reason


def test_one_sample_that_is_left_is_too_few_for_batch_norm(normed: dict[str, Any]) -> None:
    two, one = (normed | {"data.train": samples} for samples in (2, 1))
    start = initial(node=normed)
    assert not train(start, two, task="normed").has_error()
    for config, shares in ((one, {}), (two, {"validation": 0.2}), (two, {"holdout": 0.5})):
        reply = train(start, config, task="normed", **shares)
        assert "BatchNorm cannot be trained on one sample" in reason(reply)
    tuned = {"personalise": "finetune", "personal_epochs": 1, "validation": 0.2}
    reply = ask(wire.EVALUATE, two, model=start, **(TRAINING | tuned | {"task": "normed"}))
    assert "BatchNorm cannot be trained on one sample" in reply.error.reason
    reply = ask(wire.EVALUATE, normed, model=start, personalise="finetune", batch_size=1,
                server_round=1)  # fmt: skip
    assert "cannot be trained with batch-size 1" in reply.error.reason


def test_a_silo_with_one_sample_for_batch_norm_says_so_before_it_joins(
    normed: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert (
        silo(["serve", "--name", "a", "--task", "normed", "--set", "train=1", "--set", "test=5"])
        == 2
    )
    assert "coterie: a model with BatchNorm cannot be trained on one sample" in (
        capsys.readouterr().err
    )


@pytest.mark.parametrize(("sizes", "trains"), [((1, 9), [False, True]), ((1, 1), None)])
def test_a_simulation_goes_on_without_silos_that_are_too_small(
    sizes: tuple[int, ...],
    trains: list[bool] | None,
    normed: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load_all(self: Normed, options: Any, silos: Any) -> list[SiloData]:
        return [Digits.load(self, {"train": sizes[silo], "test": 5}) for silo in silos]

    monkeypatch.setattr(Normed, "load_all", load_all)
    one, two = (
        {"name": name, "task": "normed", "device": "cpu", "threads": 1, "data.silo": i}
        for i, name in enumerate("ab")
    )
    if trains is None:
        with pytest.raises(TaskError, match="cannot be trained on one sample"):
            prepare_nodes([one, two])
        return
    prepare_nodes([one, two])
    start = initial(node=normed)
    replies = [ask(wire.TRAIN, node, model=start, server_round=1) for node in (one, two)]
    assert [not reply.has_error() for reply in replies] == trains


# ---------------------------------------------------------------- evaluate, keep


def test_evaluation_is_on_the_silos_test_data() -> None:
    own = digits_config("a", **{"data.train": 30, "data.test": 20})
    metrics = wire.read_metrics(ask(wire.EVALUATE, own, model=initial()).content)
    assert set(metrics) == {"num-examples", "loss", "error", "seconds"}
    assert metrics["num-examples"] == 20
    data, model = Digits().load({"train": 30, "test": 20}), Digits().model()
    model.load_state_dict({k: torch.as_tensor(v) for k, v in initial().items()}, strict=False)
    answers = model.eval()(torch.as_tensor(data.x_test)).argmax(dim=1).numpy()
    assert metrics["error"] == pytest.approx(float((answers != data.y_test).mean()))


def test_a_model_to_keep_is_written_to_the_silos_home(tmp_path: Path) -> None:
    config = digits_config("a", home=str(tmp_path / "home"))
    model = initial()
    assert not ask(wire.EVALUATE, config, model=model, keep=True, run="hcct-7").has_error()
    kept = tmp_path / "home" / "models" / "hcct-7.safetensors"
    loaded = load_file(kept)
    assert set(loaded) == set(model)
    for name, array in model.items():
        np.testing.assert_array_equal(loaded[name], array)
    names = sorted(file.name for file in kept.parent.iterdir())
    assert names == ["hcct-7.md", "hcct-7.safetensors"]


def test_a_runs_name_cannot_lead_out_of_the_silos_home(tmp_path: Path) -> None:
    config = digits_config("a", home=str(tmp_path / "home"))
    ask(wire.EVALUATE, config, model=initial(), keep=True, run="../../out/side")
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    home = tmp_path / "home"
    assert {file.parent for file in files} == {home / "models", home}
    own = {file.name for file in files if file.parent == home}
    assert own == {"data-mark.key", "journal.jsonl", "ledger.jsonl"}


def test_nothing_is_kept_without_being_told_or_without_a_home(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    ask(wire.EVALUATE, digits_config("a", home=str(tmp_path / "home")), model=initial(), run="r")
    ask(wire.EVALUATE, digits_config("b", 1), model=initial(), keep=True, run="r")
    files = {file.relative_to(tmp_path) for file in tmp_path.rglob("*") if file.is_file()}
    assert files == {Path("home/journal.jsonl"), Path("home/ledger.jsonl")}, "and no model"


# ---------------------------------------------------------------- errors


OWN = 'name = "study"\nclasses = ["no", "yes"]\nnetwork = "mclr"\n'
OWN_TABLE = OWN + 'kind = "table"\ntarget = "dx"\nnumeric = ["age"]\n'


def broken(folder: Path, declaration: str, **node: Any) -> dict[str, Any]:
    (folder / "study.toml").write_text(declaration)
    config = {"name": "north", "device": "cpu", "threads": 1, "home": str(folder)}
    return {**config, "task": str(folder / "study.toml"), "data.data": str(folder / "data"), **node}


def assert_only_the_kind_left(reply: Message, home: Path, kind: str) -> None:
    said = f"silo 'north' failed: {kind}; see the silo's log."
    assert (reply.error.code, reply.error.reason) == (wire.FAILED, said)
    (entry,) = read(home)
    assert entry["error"] == said and "values" not in entry


@pytest.mark.parametrize("row", ["42,HIV+ (Mueller, Hans)", "Mueller,no", "42,Mueller"])
def test_what_a_row_says_does_not_leave_with_the_error_it_makes(
    row: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "data.csv").write_text(f"age,dx\n41,no\n{row}\n")
    node = broken(tmp_path, OWN_TABLE, **{"data.data": str(tmp_path / "data.csv")})
    assert_only_the_kind_left(ask(wire.DESCRIBE, node), tmp_path, "TaskError")
    assert "row 2" in caplog.text, "who runs the silo is told where to look"


def test_labels_do_not_leave_with_the_error_they_make(tmp_path: Path) -> None:
    np.savez(tmp_path / "data.npz", x=np.zeros((8, 3)), y=np.arange(8))
    node = broken(tmp_path, OWN + 'kind = "npz"\nshape = [3]\n')
    reply = ask(wire.DESCRIBE, node | {"data.data": str(tmp_path / "data.npz")})
    assert_only_the_kind_left(reply, tmp_path, "TaskError")


@pytest.mark.parametrize("error", [KeyError, SystemExit])
def test_an_error_in_training_leaves_with_its_kind_only(
    error: type[BaseException], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def loss(*_: Any) -> Any:
        raise error("Mueller, Hans")

    start = initial()
    monkeypatch.setattr(Digits, "loss", loss)
    reply = train(start, digits_config("north", home=str(tmp_path)))
    assert_only_the_kind_left(reply, tmp_path, error.__name__)


def test_wrong_settings_and_a_full_disk_are_answered_with_the_kind_of_error_too(
    tmp_path: Path,
) -> None:
    reply = ask(wire.DESCRIBE, digits_config("north", threads="Mueller"))
    assert reply.error.reason == "silo 'north' failed: SettingsError; see the silo's log."
    (tmp_path / "ledger.jsonl").mkdir()
    reply = ask(wire.DESCRIBE, digits_config("north", home=str(tmp_path)))
    assert reply.error.reason == "silo 'north' failed: IsADirectoryError; see the silo's log."


# ---------------------------------------------------------------- session


def test_a_named_silo_opens_its_session_once_and_an_unnamed_one_per_node() -> None:
    named, plain = digits_config("a"), {"data.train": 5, "data.test": 5, "device": "cpu"}
    assert session_of(context(named, 1)) is session_of(context(dict(named), 2))
    assert session_of(context(plain, 1)) is session_of(context(plain, 1))
    first, second = session_of(context(plain, 1)), session_of(context(plain, 2))
    assert (first.settings.name, second.settings.name) == ("node-1", "node-2")


def test_a_prepared_silo_is_the_one_that_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = SiloSettings("a", options={"train": "5", "test": "5"}, device="cpu")
    prepare([settings])
    monkeypatch.setattr(
        coterie.client.work.session, "open_session", lambda _: pytest.fail("opened twice")
    )
    described = decode_description(ask(wire.DESCRIBE, settings.to_node_config()).content)
    assert (described.name, described.num_examples) == ("a", 5)


def test_warming_up_leaves_no_trace_in_what_is_trained() -> None:
    config = digits_config("a")
    cold = model_in(train(initial(), config))
    restart_silos()
    prepare([SiloSettings.from_node_config(config, node_id=3)])
    assert_equal_models(model_in(train(initial(), config)), cold)


def test_opening_a_session_leaves_torchs_random_state_alone() -> None:
    torch.manual_seed(4)
    expected = torch.rand(1)
    torch.manual_seed(4)
    session = session_of(context(digits_config("a")))
    assert torch.rand(1) == expected
    assert list(read_weights(session.model)) == list(initial())


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    yield
    assert torch.get_num_threads() == 1


# ---------------------------------------------------------------- personal layers


HEAD = {"head.weight", "head.bias"}


@pytest.mark.parametrize("restart", [False, True])
def test_personal_layers_go_on_from_round_to_round_also_after_a_restart(
    restart: bool, tmp_path: Path
) -> None:
    """The second round's answer is that of a silo that trained its whole model on."""
    config = digits_config("a", home=str(tmp_path))
    shared = model_in(train(initial(personal="head"), config, personal="head", run="r"))
    if restart:
        restart_silos()
    second = train(shared, config, server_round=2, personal="head", run="r")
    whole = model_in(train(initial(), config))
    plain = model_in(train(whole, config, server_round=2))
    expected = {name: array for name, array in plain.items() if name not in HEAD}
    assert_equal_models(model_in(second), expected)


@pytest.mark.parametrize("home", [False, True])
def test_personal_layers_without_a_folder_are_warned_about_once(
    home: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = digits_config("a", home=str(tmp_path)) if home else digits_config("a")
    for number in (1, 2):
        train(initial(personal="head"), config, server_round=number, personal="head", run="r")
    said = [r.getMessage() for r in caplog.records if "process's memory" in r.getMessage()]
    assert len(said) == (0 if home else 1)
    assert home or "head.weight" in said[0]


def test_personal_layers_are_of_one_run() -> None:
    shared = initial(personal="head")
    first = train(shared, personal="head", run="one")
    other = train(shared, personal="head", run="two")
    assert_equal_models(model_in(other), model_in(first))


def test_the_head_is_trained_first_and_then_the_rest_with_it(tmp_path: Path) -> None:
    """FedRep, Algorithm 1, by its gradients: one step of all samples for each."""
    config = digits_config("a", home=str(tmp_path))
    start, lr = initial(), TRAINING["lr"]
    session = session_of(context(config))
    x, y = session.data.train.at(torch.arange(20))
    state = {name: torch.tensor(array, requires_grad=True) for name, array in start.items()}
    for part in (HEAD, start.keys() - HEAD):
        loss = session.task.loss(torch.func.functional_call(session.model, state, (x,)), y)
        names = sorted(part)
        slopes = torch.autograd.grad(loss, [state[name] for name in names])
        state |= {n: state[n] - lr * slope for n, slope in zip(names, slopes, strict=True)}
    keys = {"personal": "head-first", "run": "r", "batch_size": 20}
    shared = model_in(train(start, config, **keys))
    kept = latest(session.settings, "personal", run="r", before=2)
    assert kept is not None and shared.keys() == start.keys() - HEAD
    for name, array in {**shared, **kept}.items():
        np.testing.assert_allclose(array, state[name].detach(), rtol=1e-5, atol=1e-7)
    momentum = {**keys, "keep_optimiser": True, "momentum": 0.9, "server_round": 2}
    second = model_in(train(shared, config, **momentum))
    restart_silos()
    assert_equal_models(model_in(train(shared, config, **momentum)), second)


def test_what_is_held_keeps_its_running_statistics(
    normed: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Normed, "head", "2.")
    keys = {"personal": "head-first", "task": "normed"}
    trained = model_in(train(initial(node=normed), normed, **keys))
    assert int(trained["1.num_batches_tracked"]) == 3, "of the training of the rest alone"


def test_batch_normalisation_stays_with_its_statistics(normed: dict[str, Any]) -> None:
    """FedBN: the silo's own goes on from round to round; all else is sent."""
    keys = {"task": "normed", "run": "r"}
    start = initial(node=normed)
    shared = {name: array for name, array in start.items() if not name.startswith("1.")}
    first = model_in(train(shared, normed, personal="norm", **keys))
    second = model_in(train(first, normed, server_round=2, personal="norm", **keys))
    whole = model_in(train(start, normed, **keys))
    plain = model_in(train(whole, normed, server_round=2, **keys))
    assert_equal_models(second, {name: plain[name] for name in ("2.weight", "2.bias")})


@pytest.mark.parametrize(
    ("layers", "said"),
    [("tail", "no array is named tail"), ("norm", "no array belongs to batch norm"), ("", "")],
)
def test_personal_layers_that_are_not_there_are_refused(layers: str, said: str) -> None:
    reply = train(initial(), personal=layers)
    assert reply.has_error() is bool(said)
    if said:
        assert said in reason(reply)
