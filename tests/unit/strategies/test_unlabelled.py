"""A silo whose samples have no labels yet: placed by features alone, given a model, trains none."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict
from safetensors.numpy import load_file

from coterie import wire
from coterie.client.app import app
from coterie.client.ledger import read
from coterie.client.work.card import read_card
from coterie.client.work.session import close_all
from coterie.engine.inprocess import InProcessGrid
from coterie.features.unlabelled import placing as guests
from coterie.features.unlabelled.placing import UnlabelledSilo, UnlabelledSilos, place, shown
from coterie.server.runs.codec import decode, encode
from coterie.strategies import HCCT, Auto, FedAvg, FedCollab, FedGroup, Independent, RunResult
from coterie.strategies.partition.distance import Distance
from coterie.strategies.rounds.algorithm import Round
from coterie.strategies.rounds.checkpoint import Checkpoint
from coterie.strategies.rounds.reports import RoundReport
from coterie.strategies.rounds.roster import DescribedRoster, Silo
from coterie.strategies.strategy import GroupStrategy
from coterie.tasks import load_task
from coterie.wire import model_hash
from tests.conftest import assert_equal_models, digits_config, silo
from tests.kit import ask, initial

TRAINING = {"task": "digits", "local-epochs": 4, "batch-size": 16, "lr": 0.1, "run": "r", "seed": 0}
UPRIGHT, TURNED = (0, 1, 2), (3, 4, 5)
TWO = {"num_groups": 2, "cold_start_epochs": 6}


def silos() -> list[dict[str, Any]]:
    """Three upright, three turned."""
    return [
        digits_config(f"s{i}", i, **{"data.rotation": 0 if i in UPRIGHT else 90, **cut(i)})
        for i in range(6)
    ]


def cut(number: int) -> dict[str, int]:
    return {"data.train": 60, "data.test": 20, "data.skip": 80 * number}


def guest(folder: Path, *, rotation: int = 90, home: bool = True, **more: Any) -> dict[str, Any]:
    """Its samples have labels somewhere, which nobody at it knows."""
    options = {"skip": 700, "train": 80, "test": 1, "rotation": rotation}
    np.save(folder / "new.npy", load_task("digits").load(options).x_train)
    own = {"home": str(folder / "home")} if home else {}
    base = digits_config("new", 9)
    kept = {key: value for key, value in base.items() if not key.startswith("data.")}
    return {**kept, "unlabelled": str(folder / "new.npy"), **own, **more}


def start(
    strategy: type[GroupStrategy],
    nodes: Sequence[Mapping[str, Any]],
    *,
    rounds: int = 2,
    options: Mapping[str, Any] | None = None,
    after: Callable[[InProcessGrid, int], None] = lambda grid, number: None,
    client: Callable[[Message, Context], Message] = app,
    **more: Any,
) -> RunResult:
    """``after``: called when a round is over."""
    grid = InProcessGrid(client, nodes)
    arrays = wire.encode_arrays(initial(node=nodes[0]), packed=False)
    name = strategy.__name__.lower()

    def notify(report: RoundReport) -> None:
        if not report.final:
            after(grid, report.round)

    made = strategy(
        **(options or {}),
        roster=DescribedRoster("digits", min_silos=6, terms={"strategy": name}),
        train_config={**TRAINING, "rounds": rounds, "strategy": name},
        on_round=notify,
    )
    return made.start(grid=grid, initial_arrays=arrays, num_rounds=rounds, **more)


def placing_of(result: RunResult, name: str = "new") -> dict[str, Any]:
    return dict(result.rounds[-1].details["unlabelled"][name])


@pytest.fixture(autouse=True)
def _closed() -> None:
    close_all()


def watched(sent: dict[str, wire.Model]) -> Callable[[Message, Context], Message]:
    """Silos' app that keeps the discriminators of features that leave a silo."""

    def watching(message: Message, context: Context) -> Message:
        reply = app(message, context)
        if message.metadata.message_type == wire.TRAIN_PLACING:
            config = message.content.config_records[wire.CONFIG]
            key = f"{context.node_config['name']} {config[wire.PURPOSE]}"
            sent[key] = wire.decode_arrays(reply.content.array_records[wire.DISCRIMINATORS])
        return reply

    return watching


@pytest.fixture(scope="module")
def sent() -> dict[str, wire.Model]:
    """Discriminators that left the silos of ``placed``."""
    return {}


@pytest.fixture(scope="module")
def kept() -> dict[int, Any]:
    """Round → what ``placed`` committed."""
    return {}


@pytest.fixture(scope="module")
def placed(
    sent: dict[str, wire.Model], kept: dict[int, Any], tmp_path_factory: pytest.TempPathFactory
) -> tuple[RunResult, Path]:
    def commit(standing: Checkpoint[Any]) -> None:
        kept[standing.round] = encode(standing)

    folder = tmp_path_factory.mktemp("placed")
    nodes = [*silos(), guest(folder)]
    return start(FedGroup, nodes, options=TWO, client=watched(sent), commit=commit), folder


def test_a_silo_without_labels_gets_the_model_of_those_whose_data_its_own_look_like(
    placed: tuple[RunResult, Path],
) -> None:
    result, folder = placed
    placing = placing_of(result)
    assert placing["group"] == ["s3", "s4", "s5"]
    near, far = placing["groups"]
    assert near["compared"] == far["compared"] == 2
    assert near["distance"] + 0.3 < far["distance"]
    assert "beyond chance" in placing["why"]
    kept = load_file(folder / "home" / "models" / "r.safetensors")
    assert model_hash(kept) == model_hash(wire.decode_arrays(result.models["s4"]))
    card = read_card(folder / "home" / "models" / "r.safetensors")
    assert card.placed == placing["why"] and card.group_size == 3 and card.test_examples == 0
    assert not any(name in card.placed for name in placing["group"]), "name-members is off"
    assert not card.alone


def test_it_predicts_the_samples_that_it_joined_with(placed: tuple[RunResult, Path]) -> None:
    _, folder = placed
    home, out = folder / "home", folder / "out.csv"
    (home / "silo.toml").write_text(
        f'name = "new"\ntask = "digits"\nunlabelled = "{folder / "new.npy"}"\n'
    )
    assert silo(["predict", "--home", str(home), "--output", str(out)]) == 0
    answers = [line.split(",")[1] for line in out.read_text().splitlines()[1:]]
    true = load_task("digits").load({"skip": 700, "train": 80, "test": 1, "rotation": 90}).y_train
    assert len(answers) == 80
    assert np.mean([int(a) == y for a, y in zip(answers, true, strict=True)]) > 0.3


def test_it_trains_nothing_and_nobody_trains_otherwise_for_it(
    placed: tuple[RunResult, Path],
) -> None:
    result, _ = placed
    without = start(FedGroup, silos(), options=TWO)
    assert result.groups == without.groups
    assert "new" not in result.models and "new" not in result.rounds[-1].evaluation
    for name, model in without.models.items():
        assert_equal_models(result.models[name], model)


def test_what_leaves_it_is_in_its_ledger_and_holds_no_label(placed: tuple[RunResult, Path]) -> None:
    _, folder = placed
    entries = list(read(folder / "home"))
    assert {entry["type"] for entry in entries} == {
        *(wire.DESCRIBE, wire.TRAIN_PLACING, wire.EVALUATE_PLACING, wire.EVALUATE)
    }
    (last,) = [entry for entry in entries if entry["type"] == wire.EVALUATE]
    assert last["values"] == {"metrics": {wire.NUM_EXAMPLES: 0}} and not last["tensors"]


@pytest.mark.nightly
def test_discriminators_of_features_alone_do_not_depend_on_labels(
    placed: tuple[RunResult, Path], sent: dict[str, wire.Model], tmp_path: Path
) -> None:
    """What leaves the silos that have labels tells nothing of these."""
    other: dict[str, wire.Model] = {}
    nodes = [{**one, "data.label-shift": 4} for one in silos()]
    nodes.append(guest(tmp_path, home=False))
    start(FedGroup, nodes, options=TWO, client=watched(other))
    assert sent.keys() == other.keys() and sent
    for key, arrays in sent.items():
        assert_equal_models(arrays, other[key])


@pytest.mark.parametrize(
    ("strategy", "options", "rounds"),
    [
        (HCCT, {"alpha": 30.0}, 3),
        pytest.param(FedCollab, {"c": "auto"}, 2, marks=pytest.mark.nightly),
        pytest.param(Auto, {}, 8, marks=pytest.mark.nightly),
    ],
)
def test_it_is_one_mechanism_for_all_that_form_groups(
    tmp_path: Path, strategy: type[GroupStrategy], options: dict[str, Any], rounds: int
) -> None:
    result = start(strategy, [*silos(), guest(tmp_path)], options=options, rounds=rounds)
    placing = placing_of(result)
    assert set(placing["group"]) == {"s3", "s4", "s5"} or len(result.rounds[-1].groups) != 2
    assert placing["group"]
    group = tuple(placing["group"])
    assert group in result.rounds[-1].groups
    kept = load_file(tmp_path / "home" / "models" / "r.safetensors")
    held = [wire.decode_arrays(result.models[name]) for name in group]  # of silos of one size
    for name, array in kept.items():
        mean = np.mean([one[name] for one in held], axis=0, dtype=np.float64)
        np.testing.assert_allclose(array, mean, rtol=1e-5, atol=1e-7, err_msg=name)


def test_where_there_is_one_group_nothing_is_compared(tmp_path: Path) -> None:
    result = start(FedAvg, [*silos(), guest(tmp_path)], rounds=2)
    assert placing_of(result)["group"] == [f"s{i}" for i in range(6)]
    kinds = {entry["type"] for entry in read(tmp_path / "home")}
    assert kinds == {wire.DESCRIBE, wire.EVALUATE}


def test_where_everybody_is_alone_nobody_s_model_is_shown(tmp_path: Path) -> None:
    result = start(Independent, [*silos(), guest(tmp_path)], rounds=2)
    assert placing_of(result)["group"] == []
    assert "shares its model with no other" in placing_of(result)["why"]
    assert not list((tmp_path / "home").glob("models/*"))


def test_when_labels_come_it_trains(tmp_path: Path) -> None:
    """Its silo is started again, with labels, in the middle of the run."""
    labelled = digits_config("new", 9, **{"data.rotation": 90, **cut(8)})

    def after(grid: InProcessGrid, number: int) -> None:
        if number == 2:
            grid.disconnect(7)
        if number == 3:
            grid.connect(labelled)

    nodes = [*silos(), guest(tmp_path)]
    result = start(FedGroup, nodes, options=TWO, rounds=5, after=after)
    seen = {r.round: r for r in result.rounds if not r.final}
    assert "new" in seen[2].details["unlabelled"] and "new" not in seen[2].silos
    assert "unlabelled" not in seen[4].details and seen[4].joined == ("new",)
    assert "new" in seen[5].silos
    assert ("new", "s3", "s4", "s5") in result.rounds[-1].groups
    assert "new" in result.models


def test_a_run_that_stops_goes_on_with_the_same_places(
    placed: tuple[RunResult, Path], kept: dict[int, Any], tmp_path: Path
) -> None:
    whole, folder = placed
    nodes = [*silos(), guest(tmp_path)]
    first = load_file(folder / "home" / "models" / "r.safetensors")
    again = start(FedGroup, nodes, options=TWO, resume=decode(*kept[1]))
    assert placing_of(again) == placing_of(whole)
    assert_equal_models(load_file(tmp_path / "home" / "models" / "r.safetensors"), first)
    assert decode(*kept[2]).kept["unlabelled"].of["new"].distances


@pytest.mark.parametrize(
    ("setting", "why"),
    [
        ({"auxiliary": False}, "sends no model except the task's"),
        pytest.param(
            {"min-group-size": 3}, "it accepts groups of at least 3", marks=pytest.mark.nightly
        ),
        pytest.param(
            {"privacy-epsilon": 8.0}, "trains with differential privacy", marks=pytest.mark.nightly
        ),
    ],
)
def test_a_silo_whose_policy_refuses_is_not_compared_and_the_record_says_why(
    tmp_path: Path, setting: dict[str, Any], why: str
) -> None:
    if "privacy-epsilon" in setting:
        pytest.importorskip("opacus")
    result = start(FedGroup, [*silos(), guest(tmp_path, **setting)], options=TWO)
    placing = placing_of(result)
    assert placing["group"] == [] and why in placing["why"]
    assert not list((tmp_path / "home").glob("models/*"))


@pytest.mark.nightly
def test_silos_whose_policy_refuses_are_not_compared_with(tmp_path: Path) -> None:
    nodes = [{**one, "auxiliary": i in (0, 4)} for i, one in enumerate(silos())]
    result = start(FedGroup, [*nodes, guest(tmp_path)], options=TWO)
    placing = placing_of(result)
    assert placing["group"] == ["s3", "s4", "s5"]
    assert [near["compared"] for near in placing["groups"]] == [1, 1]


@pytest.mark.parametrize(
    ("settings", "why"),
    [({"personal": "head"}, "leaves layers at the silos"), ({"secure": True}, "secure run")],
)
def test_runs_that_would_leave_it_without_a_use_are_refused(
    tmp_path: Path, settings: dict[str, Any], why: str
) -> None:
    node = guest(tmp_path)
    grid = InProcessGrid(app, [node])
    config = wire.offer() | {wire.TASK: "digits", **settings}
    (reply,) = grid.send_and_receive([described(config)])
    assert reply.has_error() and why in reply.error.reason


def described(config: Mapping[str, Any]) -> Message:
    content = RecordDict({wire.CONFIG: ConfigRecord(dict(config))})
    return Message(content, dst_node_id=1, message_type=wire.DESCRIBE, group_id="0")


def test_it_answers_no_training_and_no_evaluation(tmp_path: Path) -> None:
    node = guest(tmp_path)
    for kind in (wire.TRAIN, wire.EVALUATE_TRAINING, wire.TRAIN_DISCRIMINATOR, wire.EVALUATE):
        reply = ask(kind, node, model=initial(), server_round=1, task="digits")
        assert reply.has_error() and "no labels yet" in reply.error.reason, kind


def test_a_model_of_fewer_silos_than_accept_it_is_shown_to_no_guest() -> None:
    groups = [("a",), ("b", "c"), ("d", "e", "f")]
    assert shown(groups, {}) == [("b", "c"), ("d", "e", "f")]
    assert shown(groups, {"c": 3, "d": 3}) == [("d", "e", "f")]


def test_how_sure_a_place_is_is_said_in_words() -> None:
    groups = [("a", "b"), ("c", "d")]

    def words(near: float, far: float, error: float) -> str:
        distances = {
            **dict.fromkeys("ab", Distance(near, error, 5)),
            **dict.fromkeys("cd", Distance(far, error, 5)),
        }
        found = place(UnlabelledSilo(distances), groups, alone=False)
        assert found.groups[0].group == ("a", "b")
        return found.why

    assert "is beyond chance" in words(0.1, 0.6, 0.05)
    assert "may be chance" in words(0.1, 0.19, 0.05)
    assert "the choice is a guess" in words(0.1, 0.11, 0.05)
    assert "no group's data" in words(0.9, 0.95, 0.05)


def test_a_guest_is_compared_with_some_of_each_group_and_each_pair_once() -> None:
    known = UnlabelledSilo({"a": Distance(0.1, 0.1, 5)}, tried=frozenset({"d"}))
    groups = [("a", "b"), ("c", "d", "e")]
    here = tuple(Silo(n, i, 10 + i, described=True) for i, n in enumerate("abcde"))
    now = Round(2, here)
    assert guests._due(known, groups, now) == ["c", "e"]
    guest = Silo("x", 9, 5, described=True, unlabelled=True, mark="new")
    whole = replace(known, distances=dict.fromkeys("ac", Distance(0.1, 0.1, 5)), data=guest.data)
    for data, asks in ((guest.data, False), ((5, "old"), True)):
        of = UnlabelledSilos({"x": replace(whole, data=data)})
        asked = next(guests.look(of, [guest], groups, now, None), [])
        assert {order.silo.name for order in asked} == (
            {"x", "b", "a", "e", "d"} if asks else set()
        )
    assert guests._due(replace(known, refused="no"), groups, now) == []
    assert list(UnlabelledSilos({"x": known}).of) == ["x"]
