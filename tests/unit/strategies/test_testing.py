"""A silo that only tests: it measures a group's model, is in no mean, and sends no update."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from flwr.app import ConfigRecord
from safetensors.numpy import load_file

from coterie import wire
from coterie.client.home.folder import Home
from coterie.client.home.settings import SettingsError, SiloSettings
from coterie.client.ledger import read
from coterie.client.work.card import card_of, keep_model, read_card
from coterie.client.work.measure import evaluate_in_full
from coterie.client.work.session import open_session
from coterie.client.work.weights import read_weights
from coterie.features.unlabelled.testing import Fit, words
from coterie.server.machine.local import SiloSpec
from coterie.server.report.command import write_report
from coterie.server.study import demo
from coterie.wire import model_hash
from tests.commands import coterie
from tests.kit import (
    CutGrid,
    Node,
    ask,
    digits,
    initial,
    nodes_of,
    reason,
    record_of,
    restart_silos,
    run,
)
from tests.unit.server.test_resume import go, interrupted, timeless

UPRIGHT = ("a", "b", "c")
KEYS: dict[str, Any] = {
    "strategy": "fedgroup", "num-groups": 2, "local-epochs": 8, "rounds": 2, "min-silos": 6,
}  # fmt: skip


def silos(home: Path, *, rotation: int = 90, **own: Any) -> list[Node]:
    """Three upright, three turned, and t, which only tests."""
    cut = {"data.train": 60, "data.test": 20}
    nodes: list[Node] = [
        {**one, **cut, "data.rotation": 0 if one["name"] in UPRIGHT else 90, "data.skip": 80 * i}
        for i, one in enumerate(digits("abcdeft", home))
    ]
    nodes[-1] = {**nodes[-1], "role": "evaluate", "data.rotation": rotation, **own}
    return nodes


def played(folder: Path, home: Path, *, rotation: int = 90, **keys: Any) -> dict[str, Any]:
    restart_silos()
    go(folder, silos(home, rotation=rotation), **{**KEYS, **keys})
    return record_of(folder)


@pytest.fixture(scope="module")
def tested(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    folder = tmp_path_factory.mktemp("tested")
    return played(folder / "run-1", folder / "homes"), folder


def test_it_measures_the_model_of_the_group_whose_errors_are_least(
    tested: tuple[dict[str, Any], Path],
) -> None:
    record, folder = tested
    place = record["final-details"]["testing"]["t"]
    assert place["group"] == ["d", "e", "f"] and "beyond chance" in place["why"]
    assert [one["samples"] for one in place["groups"]] == [60, 60]
    figures = record["final-details"]["tested"]["t"]
    assert figures["num-examples"] == 20 and figures["error"] < 0.5
    assert figures["error-low"] <= figures["error"] <= figures["error-high"]
    kept = folder / "homes" / "t" / "models" / "run-1.safetensors"
    assert model_hash(load_file(kept)) == record["model-hashes"]["d"]
    card = read_card(kept)
    assert card.placed == place["why"] and card.test_examples == 20 and card.group_size == 3


def test_it_is_in_no_mean_and_sends_no_update(tested: tuple[dict[str, Any], Path]) -> None:
    record, folder = tested
    restart_silos()
    go(folder / "run-2", silos(folder / "others")[:-1], **KEYS)
    without = record_of(folder / "run-2")
    assert record["model-hashes"] == without["model-hashes"]
    assert record["final-evaluation"] == without["final-evaluation"]
    assert record["mean-accuracy"] == without["mean-accuracy"]
    entries = list(read(folder / "homes" / "t"))
    assert not any(one["tensors"] for one in entries if one["type"] != wire.INITIAL)
    kinds = {one["type"] for one in entries}
    assert kinds <= {wire.DESCRIBE, wire.INITIAL, wire.EVALUATE_GROUP, wire.EVALUATE}


@pytest.mark.parametrize(
    "keys",
    [
        pytest.param({"strategy": "hcct", "alpha": 10.0, "rounds": 4}, marks=pytest.mark.nightly),
        {"secure": True},
    ],
)
def test_other_strategies_and_secure_runs_place_it_too(
    keys: dict[str, Any], tmp_path: Path
) -> None:
    own = {**KEYS, **keys}
    own = {k: v for k, v in own.items() if own["strategy"] == "fedgroup" or k != "num-groups"}
    restart_silos()
    go(tmp_path / "run-1", silos(tmp_path / "homes"), **own)
    record = record_of(tmp_path / "run-1")
    place = record["final-details"]["testing"]["t"]
    assert set(place["group"]) <= {"d", "e", "f"} and place["group"]
    assert record["final-details"]["tested"]["t"]["num-examples"] == 20


@pytest.mark.nightly
def test_with_one_group_nothing_is_chosen(tmp_path: Path) -> None:
    restart_silos()
    keys = {k: v for k, v in KEYS.items() if k != "num-groups"} | {"strategy": "fedavg"}
    go(tmp_path / "run-1", silos(tmp_path / "homes"), **keys)
    place = record_of(tmp_path / "run-1")["final-details"]["testing"]["t"]
    assert "the only group" in place["why"] and len(place["group"]) == 6
    kinds = {one["type"] for one in read(tmp_path / "homes" / "t")}
    assert wire.EVALUATE_GROUP not in kinds


@pytest.mark.nightly
def test_where_errors_stay_its_features_place_it(tmp_path: Path) -> None:
    restart_silos()
    nodes = silos(tmp_path / "homes", **{"share-metrics": "seconds"})
    go(tmp_path / "run-1", nodes, **KEYS)
    details = record_of(tmp_path / "run-1")["final-details"]
    assert details["testing"]["t"]["group"] == ["d", "e", "f"]
    assert "classifier" in details["testing"]["t"]["why"]
    assert details["tested"]["t"]["num-examples"] == 20
    assert not {"error", "loss", "error-low", "brier"} & set(details["tested"]["t"])


@pytest.mark.nightly
def test_a_run_with_it_that_is_killed_at_the_end_is_resumed(
    tested: tuple[dict[str, Any], Path], tmp_path: Path
) -> None:
    record, _ = tested
    restart_silos()
    folder, home = tmp_path / "run-1", tmp_path / "homes"
    cut = CutGrid(silos(home), at=(wire.EVALUATE_GROUP, 2), answered=1)
    interrupted(folder, cut, **KEYS)
    go(folder, silos(home), run_id=2, resume=folder.name)
    assert record_of(folder)["final-details"] == record["final-details"]
    assert timeless(record_of(folder)) == timeless(record)


def test_the_report_lists_it(tested: tuple[dict[str, Any], Path]) -> None:
    _, folder = tested
    (file,) = write_report(str(folder / "run-1"))
    page = file.read_text()
    assert "Sites that only test" in page and "d, e, f" in page


@pytest.mark.parametrize("kind", [wire.TRAIN, wire.COLD_START, wire.EVALUATE_TRAINING])
def test_it_refuses_every_training(kind: str, tmp_path: Path) -> None:
    node = silos(tmp_path)[-1]
    reply = ask(kind, node, model=initial(), server_round=1, task="digits", strategy="ifca")
    assert "it trains nothing" in reason(reply)


def test_a_silo_that_trains_measures_no_group(tmp_path: Path) -> None:
    node = silos(tmp_path)[0]
    reply = ask(wire.EVALUATE_GROUP, node, model=initial(), server_round=1, task="digits")
    assert "only a silo with role" in reason(reply)


def test_a_run_with_personal_layers_has_nothing_for_it_to_test(tmp_path: Path) -> None:
    reply = ask(wire.DESCRIBE, silos(tmp_path)[-1], personal="head", task="digits")
    assert "no whole model to test" in reason(reply)


def test_a_role_that_does_not_fit_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"leave out unlabelled"):
        SiloSettings("t", role="evaluate", unlabelled="new.npy")
    with pytest.raises(SettingsError, match=r"role"):
        SiloSettings.from_node_config({"name": "t", "role": "watch"}, node_id=1)


def test_a_table_needs_no_training_file(tmp_path: Path) -> None:
    (tmp_path / "t.toml").write_text(
        'kind = "table"\nname = "t"\ntarget = "y"\nclasses = ["0", "1", "2"]\nnumeric = ["x"]\n'
        'network = "mclr"\n'
    )
    rows = "".join(f"{i % 7},{i % 3}\n" for i in range(48))
    (tmp_path / "t.csv").write_text("x,y\n" + rows)
    home = tmp_path / "home"
    home.mkdir()
    (home / "silo.toml").write_text(
        f'name = "t"\ntask = "{tmp_path / "t.toml"}"\nrole = "evaluate"\n'
        f'[data]\ndata = "{tmp_path / "t.csv"}"\n'
    )
    said = coterie("silo", "check", "--home", str(home))
    assert said.returncode in (0, 1), said.stderr
    assert "it only tests" in said.stdout and "one epoch" not in said.stdout
    assert "24 samples" in said.stdout
    session = open_session(Home(home).settings())
    model = read_weights(session.model)
    tested = evaluate_in_full(session.task, session.model, session.data)
    config = ConfigRecord({wire.RUN: "run-1", wire.ROUND: 1, wire.ROUNDS: 1})
    keep_model(str(home), card_of(session, config, model, tested), model)
    answered = coterie("silo", "predict", "--home", str(home))
    assert answered.stderr.startswith("24 samples; ") and "changed since" not in answered.stderr
    asked = coterie("silo", "calibrate", "--home", str(home))
    assert "12 of the 24 test samples" in asked.stdout, asked.stderr


def test_the_reason_says_how_sure_a_place_is() -> None:
    best = Fit(("d",), 0.1, 0.4, 100)
    far = Fit(("a",), 0.5, 1.0, 100)
    assert "is beyond chance" in words([best, far], "error")
    assert "may be chance" in words([best, Fit(("a",), 0.12, 1.0, 100)], "error")
    assert "may be chance" in words([Fit(("d",), 0.0, 0.1, 1), Fit(("a",), 1.0, 9.0, 1)], "error")
    assert "its loss is lower" in words([best, Fit(("a",), 0.1, 1.0, 100)], "error")
    assert "loss is least" in words([Fit(("d",), loss=0.1), Fit(("a",), loss=0.2)], "error")
    assert all("chance" not in words([best, far], metric) for metric in wire.OF_NUMBERS)


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(10))
def test_on_the_demo_one_of_each_kind_is_placed_right(seed: int, tmp_path: Path) -> None:
    """By thirty samples, also where only the labels differ."""
    nodes = nodes_of(demo.silos(seed))
    for number, (kind, options) in enumerate(demo.KINDS.items()):
        cut = {"train": 30, "test": 70, "skip": 1320 + 100 * number, "split-seed": seed}
        spec = SiloSpec(f"test-{kind}", options={**cut, **options})
        nodes += [{**one, "role": "evaluate"} for one in nodes_of([spec])]
    keys = {"strategy": "hcct", "rounds": 4, "seed": seed, "alpha": 50.0, "min-silos": 9}
    keys["local-epochs"] = 5
    result = run(tmp_path / "hcct", nodes, **keys)
    details = result.rounds[-1].details
    groups = {name: own["group"] for name, own in details["testing"].items()}
    assert groups == {f"test-{kind}": [f"{kind}-{i}" for i in (1, 2, 3)] for kind in demo.KINDS}
    for name, own in details["testing"].items():
        assert details["tested"][name]["error"] < own["groups"][1]["error"], "on other samples"
