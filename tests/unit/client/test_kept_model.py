"""What a silo keeps and what it writes down: its ledger, its model with a card."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Message, RecordDict
from safetensors.numpy import load_file, save_file

from coterie import wire
from coterie.client.app import app
from coterie.client.cli.predict import predict
from coterie.client.home.folder import create
from coterie.client.home.settings import SettingsError
from coterie.client.ledger import read, totals
from coterie.client.work.card import read_card, write_card
from coterie.client.work.discriminators import DiscriminatorPlan, open_pairs, train_stack
from coterie.client.work.hold_out import leave_out_validation
from coterie.client.work.measure import evaluate
from coterie.client.work.session import Session, session_of
from coterie.client.work.sgd import seed_of
from coterie.client.work.weights import load_weights, read_weights
from coterie.engine.inprocess import InProcessGrid
from coterie.strategies import FederationError
from coterie.tasks import TaskError, load_task
from coterie.wire import model_hash
from tests import commands
from tests.conftest import assert_equal_models, digits_config, silo
from tests.kit import Tap, answer, context, digits, record_of, run
from tests.tables import declaration

NAMES = "abc"


def play(home: Path, silos: Any = None, **keys: Any) -> dict[str, Any]:
    """Play a run of three silos of the digits; return its record."""
    folder = home / "runs" / "run-1"
    usual = {"local_epochs": 2, "batch_size": 10}
    run(folder, silos or digits(NAMES, home), **(usual | keys))
    return record_of(folder)


@pytest.fixture(scope="module")
def hospital(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A finished run of three silos, with a model kept after round 2 and members named."""
    home = tmp_path_factory.mktemp("silos")
    return home, play(home, strategy="hcct", keep_every=2, name_members=True)


# ---------------------------------------------------------------- ledger


def test_the_ledger_names_everything_that_went_over_the_wire(tmp_path: Path) -> None:
    grid = Tap(digits(NAMES, tmp_path))
    play(tmp_path, grid, strategy="hcct", personal="head", validation=0.2)
    for index, name in enumerate(NAMES, start=1):
        sent = [m for m in grid.got if m.metadata.src_node_id == index]
        entries = list(read(tmp_path / name))
        assert [e["type"] for e in entries] == [m.metadata.message_type for m in sent]
        for entry, message in zip(entries, sent, strict=True):
            arrays = {
                (record, key, str(a.dtype), a.shape, a.nbytes)
                for record, content in message.content.array_records.items()
                for key, a in wire.decode_arrays(content).items()
            }
            listed = {
                (t["record"], t["name"], _numpy(t["type"]), tuple(t["shape"]), t["bytes"])
                for t in entry["tensors"]
            }
            assert listed == arrays
            assert entry["bytes"] == sum(a[-1] for a in arrays)
            for records in (message.content.metric_records, message.content.config_records):
                for record, content in records.items():
                    assert entry["values"][record] == dict(content)
        assert [e["round"] for e in entries if e["type"] == wire.TRAIN] == [1, 2, 3]
        assert not any(t["name"].startswith("head.") for e in entries for t in e["tensors"])


def _numpy(name: str) -> str:
    return {"f32": "float32", "i64": "int64"}[name]


def test_refusals_and_failures_are_in_the_ledger_too(tmp_path: Path) -> None:
    home = tmp_path / "a"
    grid = InProcessGrid(app, [digits_config("a", home=str(home))])
    for changes in ({wire.TASK: "other"}, {}):
        content = RecordDict({wire.CONFIG: ConfigRecord(dict(changes))})
        list(grid.push_messages([Message(content, 1, "train", group_id="1")]))
    list(grid.push_messages([Message(RecordDict(), 1, "query.nothing", group_id="1")]))
    errors = [entry["error"] for entry in read(home)]
    assert "serves task 'digits'" in errors[0]
    assert "needs 'arrays'" in errors[1] or "server-round" in errors[1]


def test_a_silo_that_is_moved_out_of_its_group_says_so_once_and_in_its_ledger(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    home = tmp_path / "a"
    grid = InProcessGrid(app, [digits_config("a", home=str(home))])
    entries = [
        {},
        {wire.APART: "it \x1b[2J points away."},
        {wire.APART: "it \x1b[2J points away."},
        {},
    ]
    with caplog.at_level("INFO", "coterie.silo"):
        for number, more in enumerate(entries, 1):
            config = ConfigRecord({wire.RUN: "r", wire.ROUND: number, **more})
            content = RecordDict({wire.CONFIG: config})
            list(grid.push_messages([Message(content, 1, wire.TRAIN, group_id="1")]))
    said = [r.getMessage() for r in caplog.records if " silo a " in r.getMessage()]
    assert said == [
        r"run r, round 2: silo a was quarantined: it \x1b[2J points away.",
        "run r, round 4: silo a is out of quarantine",
    ]
    found = totals(read(home))
    assert found["r", wire.TRAIN].apart == {r"it \x1b[2J points away.": (2, 3)}
    shown = commands.coterie("silo", "ledger", "--home", str(home)).stdout
    assert r"r, rounds 2–3: quarantined: it \x1b[2J points away." in shown


def test_without_room_for_its_ledger_a_silo_sends_nothing(tmp_path: Path) -> None:
    home = tmp_path / "a"
    (home / "ledger.jsonl").mkdir(parents=True)  # cannot be appended to
    with pytest.raises(FederationError, match="0 of at least 1 have joined"):
        play(tmp_path, digits("a", tmp_path), strategy="hcct")


def test_a_line_cut_off_by_a_crash_does_not_spoil_the_next(tmp_path: Path) -> None:
    home = tmp_path / "a"
    grid = InProcessGrid(app, [digits_config("a", home=str(home))])
    ask = Message(RecordDict(), 1, wire.DESCRIBE, group_id="1")
    list(grid.push_messages([ask]))
    with (home / "ledger.jsonl").open("a") as file:
        file.write('{"at": "2026')
    list(grid.push_messages([ask]))
    assert [entry["type"] for entry in read(home)] == [wire.DESCRIBE] * 2


def test_the_ledger_command_totals_what_left(
    hospital: tuple[Path, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    home = hospital[0] / "a"
    found = totals(read(home, run="run-1"))
    trained = found[("run-1", wire.TRAIN)]
    assert (trained.messages, trained.rounds, trained.refused) == (3, (1, 3), 0)
    assert trained.bytes == sum(e["bytes"] for e in read(home) if e["type"] == wire.TRAIN) > 0
    assert silo(["ledger", "--home", str(home)]) == 0
    said = capsys.readouterr().out
    assert f"{sum(e.get('bytes', 0) for e in read(home)):,} bytes" in said
    assert "train" in said and "query.describe" in said
    assert silo(["ledger", "--home", str(home), "--json", "--run", "run-1"]) == 0
    assert json.loads(capsys.readouterr().out) == list(read(home, run="run-1"))
    assert silo(["ledger", "--home", str(home / "nowhere")]) == 2
    assert "nothing has left this silo yet" in capsys.readouterr().err


def test_the_ledger_s_table_loses_nothing_in_a_pipe_or_on_a_terminal(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    name, values = "a-run-with-a-name-of-some-length" * 2, [f"measured-{i}" for i in range(30)]
    entry = {"run": name, "type": "query.evaluate-training", "round": 3, "bytes": 123_456_789}
    entry["values"] = {"metrics": dict.fromkeys(values, 0.5)}
    (tmp_path / "ledger.jsonl").write_text(json.dumps(entry) + "\n")
    monkeypatch.setenv("COLUMNS", "80")
    assert silo(["ledger", "--home", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in (name, "query.evaluate-training", "123,456,789", *values))
    assert max(map(len, shown.splitlines())) <= 260, "the names of 30 values take four lines"
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert silo(["ledger", "--home", str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()[1:-1]
    assert "123,456,789" in lines[0] and max(map(len, lines)) <= 80
    run_name, shown = lines[0].index("a-run"), lines[0].rindex("measured")
    assert "".join(line[run_name:].split(" ")[0] for line in lines) == name
    folded = "".join(line[shown:].strip() for line in lines)
    assert all(value in folded for value in values)


# ---------------------------------------------------------------- model and card


def test_every_silo_keeps_its_final_model_with_a_card(
    hospital: tuple[Path, dict[str, Any]],
) -> None:
    home, record = hospital
    for name in NAMES:
        file = home / name / "models" / "run-1.safetensors"
        card = read_card(file)
        assert model_hash(load_file(file)) == card.sha256 == record["model-hashes"][name]
        assert (card.silo, card.task, card.run, card.strategy) == (name, "digits", "run-1", "hcct")
        assert (card.round, card.rounds, card.trained) == (3, 3, "together")
        assert list(card.members) == record["final-groups"][card.group - 1]
        assert card.group_size == len(card.members) and name in card.members
        assert card.test_error == record["final-evaluation"][name]["error"]
        assert card.num_examples == 20
        text = file.with_suffix(".md").read_text(encoding="utf-8")
        assert card.sha256 in text and ", ".join(card.members) in text
        trained = "together" if card.group_size > 1 else "alone: no other silo was in its group"
        assert f"| Trained | {trained} |" in text and card.alone == (card.group_size == 1)


def test_a_model_of_an_earlier_round_is_kept_where_the_run_asks_for_it(
    hospital: tuple[Path, dict[str, Any]],
) -> None:
    home, record = hospital
    file = home / "a" / "models" / "run-1-round-000002.safetensors"
    card = read_card(file)
    assert (card.round, card.rounds) == (2, 3)
    assert model_hash(load_file(file)) == card.sha256 != record["model-hashes"]["a"]
    assert [f.name for f in file.parent.glob("*.safetensors")].count(file.name) == 1


def test_members_are_not_named_unless_the_run_says_so(tmp_path: Path) -> None:
    play(tmp_path, rounds=1)
    file = tmp_path / "a" / "models" / "run-1.safetensors"
    card = read_card(file)
    assert (card.group, card.group_size, card.members) == (1, 3, ())
    everything = file.read_bytes() + file.with_suffix(".md").read_bytes()
    assert b'"b"' not in everything and b"their names are not shared" in everything
    # Alone, and with the scale that trees have.
    write_card(file, replace(card, group_size=1, scale=[(0.0, 1.0)]), load_file(file))
    text = file.with_suffix(".md").read_text()
    assert "| Group | 1 |" in text and "mean and deviation" not in text
    out = tmp_path / "m.pt2"
    assert silo(["export", "--home", str(tmp_path / "a"), "--output", str(out)]) == 0
    text = out.with_name("m.pt2.md").read_text()
    assert "- trained: alone" in text and "mean and deviation" not in text


# ---------------------------------------------------------------- predict


def test_predict_answers_as_the_silo_measured(
    hospital: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home, record = hospital
    options = ["--set", "train=20", "--set", "test=20", "--set", "skip=40"]
    out = tmp_path / "out.csv"
    assert silo(["predict", "--home", str(home / "b"), *options, "--output", str(out)]) == 0
    error = record["final-evaluation"]["b"]["error"]
    assert f"error on this silo's own test data {100 * error:.2f}%" in capsys.readouterr().err
    rows = [line.split(",") for line in out.read_text().splitlines()]
    assert rows[0] == ["sample", "class", *(f"p{i}" for i in range(10)), "label"]
    wrong = sum(row[1] != row[-1] for row in rows[1:])
    assert wrong / 20 == pytest.approx(error)
    for row in rows[1:]:
        chances = [float(p) for p in row[2:-1]]
        assert sum(chances) == pytest.approx(1, abs=1e-4) and np.argmax(chances) == int(row[1])


def test_predict_knows_task_and_data_of_the_silos_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A declared task: classes have names, and silo.toml says where the data is."""
    task = tmp_path / "study.toml"
    task.write_text(
        'kind = "npz"\nname = "study"\nclasses = ["no", "yes"]\nshape = [3]\nnetwork = "mclr"\n'
    )
    rng = np.random.default_rng(0)
    x = rng.normal(size=(60, 3)).astype(np.float32)
    np.savez(tmp_path / "own.npz", x=x, y=(x[:, 0] > 0).astype(int))
    home = create(tmp_path / "a", "a", task=str(task), data=tmp_path / "own.npz")
    config = home.settings().to_node_config()
    play(tmp_path, [config], task="study")
    assert silo(["predict", "--home", str(home.folder), "--output", str(tmp_path / "o.csv")]) == 0
    assert "own test data" in capsys.readouterr().err
    rows = [line.split(",") for line in (tmp_path / "o.csv").read_text().splitlines()]
    assert rows[0] == ["sample", "class", "p_no", "p_yes", "label"]
    assert {row[1] for row in rows[1:]} | {row[-1] for row in rows[1:]} <= {"no", "yes"}
    assert silo(["predict", "--home", str(home.folder), "--set", "test-share=2"]) == 2
    assert "test-share must be above 0" in capsys.readouterr().err


def table_of(rows: int, *, ages_from: int = 20) -> str:
    return "age,bmi,ill\n" + "".join(
        f"{ages_from + i},{20 + i % 7},{'yes' if i % 3 else 'no'}\n" for i in range(rows)
    )


def test_a_kept_model_answers_as_on_the_day_it_was_trained(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whatever has become of the silo's data and of the file that declares the task."""
    task, data, new = tmp_path / "study.toml", tmp_path / "own.csv", tmp_path / "new.csv"
    task.write_text(declaration("age", "bmi"))
    data.write_text(table_of(40))
    new.write_text("age,bmi\n30,21\n50,26\n")
    home = create(tmp_path / "a", "a", task=str(task), data=data)
    config = home.settings().to_node_config()
    play(tmp_path, [config], task="study")
    model = home.folder / "models" / "run-1.safetensors"
    text = model.with_suffix(".md").read_text()
    assert "mean and deviation of this silo's numbers: share it only" in text

    def asked(*more: str) -> tuple[int, str, str]:
        status = silo(["predict", "--home", str(home.folder), *more])
        return status, *capsys.readouterr()

    _, answers, _ = asked("--input", str(new))
    status, _, said = asked()
    assert status == 0 and "Note:" not in said
    data.write_text(table_of(60, ages_from=50))
    assert asked("--input", str(new))[:2] == (0, answers), "the scale of the training"
    status, _, said = asked()
    assert status == 0 and "The model may have been trained on some of these test samples" in said
    data.unlink()
    assert asked("--input", str(new))[:2] == (0, answers)
    for before, after in (('"no", "yes"', '"yes", "no"'), ('"age", "bmi"', '"bmi", "age"')):
        task.write_text(declaration("age", "bmi").replace(before, after))
        status, out, said = asked("--input", str(new))
        assert (status, out) == (2, "") and "has changed since the model was trained" in said


def test_the_model_of_a_silos_own_training_has_a_card_and_answers(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = play(tmp_path, strategy="fedgenp", generator_steps=2, generator_hidden=4)
    home, model = tmp_path / "b", "personalised/run-1"
    card = read_card(home / f"{model}.safetensors")
    error = record["rounds"][-1]["personalised"]["b"]["error"]
    assert (card.trained, card.round, card.group_size) == ("here", 3, 3)
    assert card.test_error == error
    text = (home / f"{model}.md").read_text()
    assert f"coterie silo predict --model {model}\n" in text and "| Group | of 3 silos |" in text
    out = str(tmp_path / "out.csv")
    asked = ["predict", "--home", str(home), "--output", out]
    for option in ("train=20", "test=20", "skip=40"):
        asked += ["--set", option]
    assert silo([*asked, "--model", model]) == 0
    said = capsys.readouterr().err
    assert "trained here" in said and f"test data {100 * error:.2f}%" in said
    assert silo(asked) == 0
    assert "trained together" in capsys.readouterr().err  # the newest of models/, as ever
    assert silo([*asked, "--model", "run-2"]) == 2
    assert "Its models: run-1, personalised/run-1." in capsys.readouterr().err


@pytest.mark.parametrize("kind", ["npz", "npy"])
def test_predict_reads_samples_from_a_file(
    kind: str, hospital: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    own = {"train": 20, "test": 20, "skip": 40}
    data = load_task("digits").load(own)
    file = tmp_path / f"new.{kind}"
    if kind == "npz":
        np.savez(file, x=data.x_test)
    else:
        np.save(file, data.x_test)
    model = hospital[0] / "b" / "models" / "run-1.safetensors"
    answers, known = (predict(model, source, options=own) for source in (file, None))
    assert answers.labels is None and known.labels is not None
    np.testing.assert_array_equal(answers.classes, known.classes)


def test_predict_says_what_is_wrong(
    hospital: tuple[Path, dict[str, Any]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = hospital[0] / "a"
    model = home / "models" / "run-1.safetensors"
    np.savez(tmp_path / "odd.npz", x=np.zeros((3, 7), np.float32))
    with pytest.raises(TaskError, match=r"do not fit the model: they have shape \(3, 7\)"):
        predict(model, tmp_path / "odd.npz", options={})
    with pytest.raises(TaskError, match=r"there is no .*none\.npz to predict from"):
        predict(model, tmp_path / "none.npz", options={})
    x = np.zeros((9, 1, 8, 8))
    x[2, 0, 0, 0], x[4:, 0, 3, 3] = np.nan, 1e300
    np.savez(tmp_path / "nan.npz", x=x)
    with pytest.raises(
        TaskError, match=r"sample 2 .*, 4 .*, 5 .* and 3 more cannot be predicted: .* are NaN"
    ):
        predict(model, tmp_path / "nan.npz", options={})
    np.savez(tmp_path / "large.npz", x=np.full((1, 1, 8, 8), 3e38))
    with pytest.raises(
        TaskError, match=r"sample 0 .* cannot be predicted: the model's scores are not numbers"
    ):
        predict(model, tmp_path / "large.npz", options={})
    (tmp_path / "text.npy").write_text("1, 2, 3")
    with pytest.raises(TaskError, match=r"must be an .npy file"):
        predict(model, tmp_path / "text.npy", options={})
    with pytest.raises(TaskError, match="no task is called"):
        predict(model, None, source="nonsense", options={})
    weights = load_file(model)
    save_file(weights, tmp_path / "plain.safetensors")
    with pytest.raises(SettingsError, match="not a model saved by a silo:"):
        predict(tmp_path / "plain.safetensors", None, options={})
    damaged = bytearray(model.read_bytes())
    damaged[-2] ^= 4
    (tmp_path / "damaged.safetensors").write_bytes(damaged)
    with pytest.raises(SettingsError, match="damaged"):
        predict(tmp_path / "damaged.safetensors", None, options={})
    assert silo(["predict", "--home", str(home), "--model", "other-7"]) == 2
    assert "no model 'other-7'. Its models:" in capsys.readouterr().err


# ---------------------------------------------------------------- validation data


def test_validation_data_are_in_no_training(tmp_path: Path) -> None:
    """With ``validation`` a silo trains as one that never had those samples."""
    from coterie.client.home.settings import SiloSettings
    from coterie.client.work.hold_out import split_validation
    from coterie.client.work.session import open_session

    session = open_session(SiloSettings("a", options={"train": 20, "test": 20}))
    kept = split_validation(session, 0.25, run_seed=0)
    everything = {row.cpu().numpy().tobytes() for row in session.data.train.x}
    train, validation = (
        {row.cpu().numpy().tobytes() for row in part} for part in (kept.train.x, kept.test.x)
    )
    assert (len(train), len(validation)) == (15, 5)
    assert not train & validation and train | validation == everything


@pytest.mark.parametrize(
    ("strategy", "kind", "keys"),
    [
        ("ifca", wire.EVALUATE_TRAINING, {"num_groups": 2}),
        ("fedfa", wire.EVALUATE_TRAINING, {}),
        ("flsc", wire.EVALUATE_TRAINING, {"num_groups": 2}),
        ("fedcollab", wire.EVALUATE_DISCRIMINATOR, {"discriminator_rounds": 1}),
        ("fedcollab", wire.TRAIN_DISCRIMINATOR, {"discriminator_rounds": 1}),
    ],
)
def test_silos_are_told_of_validation_wherever_a_strategy_chooses(
    strategy: str, kind: str, keys: dict[str, Any], tmp_path: Path
) -> None:
    grid = Tap(digits(NAMES, tmp_path))
    play(tmp_path, grid, strategy=strategy, validation=0.25, rounds=1, **keys)
    fractions = [config.get(wire.VALIDATION) for config in grid.asked(kind)]
    assert fractions and set(fractions) == {0.25}


def spared_session() -> tuple[Session, Session]:
    """A silo of 20 training samples, and what validation leaves of it."""
    session = session_of(context())
    return session, leave_out_validation(session, 0.25, run_seed=4)


VALIDATION = {"validation": 0.25, "seed": 4, "server_round": 1, "steps": 3, "pair_labels": "1"}


def test_what_a_strategy_chooses_by_is_without_the_validation_data() -> None:
    session, spared = spared_session()
    model = read_weights(session.fresh_model(0))
    reply = answer(wire.EVALUATE_TRAINING, model=model, **VALIDATION)
    load_weights(session.model, model)
    on_kept = spared.data.train
    expected = evaluate(session.task, session.model, on_kept)
    metrics = wire.read_metrics(reply.content)
    assert (metrics[wire.NUM_EXAMPLES], expected.num_examples) == (15, 15)
    assert metrics[wire.LOSS] == pytest.approx(expected.loss)


def test_discriminators_are_trained_and_scored_without_the_validation_data() -> None:
    _, spared = spared_session()
    plan = DiscriminatorPlan(steps=3, batch_size=32, lr=0.01)
    reply = answer(wire.TRAIN_DISCRIMINATOR, **VALIDATION)
    assert wire.read_metrics(reply.content)[wire.HELD_OUT] == 8, "of 15, not of 20"
    pairs = open_pairs(spared, None, [1], samples=500, seed=4)
    train_stack(pairs, plan, seed=seed_of(4, "a", 1, ""))
    assert_equal_models(wire.decode_arrays(reply.content[wire.DISCRIMINATORS]), pairs.arrays())
