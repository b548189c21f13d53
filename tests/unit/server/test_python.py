"""``coterie`` from Python: silos as arrays, tasks and apps; results as tables; a notebook's bar."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import Context, Message
from flwr.clientapp import ClientApp

import coterie
from coterie.server.report.command import write_report
from coterie.server.report.final import learned_nothing
from coterie.server.report.shown import NOTHING, bar, in_notebook, is_notebook, shown_for
from coterie.server.runs.record import read_run
from coterie.server.runs.record.follow import Progress
from coterie.strategies import HCCT, FederationError
from tests.conftest import assert_equal_models, plain_app, plain_initial, plain_nodes
from tests.kit import nodes_of, run

INITIAL: dict[str, Any] = {"initial_arrays": plain_initial()}
QUICK: dict[str, Any] = {"rounds": 2, "local_epochs": 1, "progress": False}


@pytest.fixture(autouse=True)
def _runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COTERIE_RUNS", str(tmp_path / "runs"))


def arrays(kind: int, seed: int = 0, count: int = 40) -> tuple[Any, Any]:
    """Two classes, which silos of another kind have the other way round."""
    draw = np.random.default_rng(seed)
    y = draw.integers(0, 2, count)
    return draw.normal(size=(count, 3)) + 4 * (y[:, None] == kind), y


def four() -> dict[str, Any]:
    return {f"s{number}": arrays(number % 2, number) for number in range(4)}


# ---------------------------------------------------------------- silos


def test_arrays_are_grouped_and_a_result_is_loaded_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")  # as a notebook's kernel
    coterie.simulate(four(), strategy="independent", rounds=3, progress=False)
    result = coterie.simulate(four(), strategy="hcct", alpha=20, rounds=3, progress=False)
    assert result.groups == [["s0", "s2"], ["s1", "s3"]]
    rows = result.metrics()
    assert [row["silo"] for row in rows] == ["s0", "s1", "s2", "s3"]
    assert {row["group"] for row in rows} == {"A", "B"}
    assert all(row["training_samples"] == 32 and row["test_samples"] == 8 for row in rows)
    assert all(0 <= row["error"] <= 1 and "gain" in row and "auroc" in row for row in rows)
    history = result.history()
    assert [(row["round"], row["silo"]) for row in history[:2]] == [(1, "s0"), (1, "s1")]
    assert len(history) == 12 and history[-1]["error"] == rows[-1]["error"]
    assert "\x1b" not in result.explain()
    assert "group A" in result.explain() and "s1" not in result.explain("s0").split("━")[-1]
    assert "<iframe" in result.report()._repr_html_() and "<table>" in result._repr_html_()
    assert result.report().pictures()["groups"] == result.folder / "report" / "groups.png"
    again = coterie.load(result.save(tmp_path / "kept"))
    assert isinstance(again, coterie.Result) and again.history() == history
    assert [row | {"gain": 0} for row in again.metrics()] == [row | {"gain": 0} for row in rows]
    assert_equal_models(again.models["s0"], result.models["s2"])
    assert coterie.load(result.folder.name).folder == result.folder
    with pytest.raises(FederationError, match="already exists"):
        result.save(tmp_path / "kept")


def test_runs_of_other_arrays_are_not_compared(tmp_path: Path) -> None:
    coterie.simulate(four(), strategy="independent", **QUICK)
    other = {name: (x + 1, y) for name, (x, y) in four().items()}
    rows = coterie.simulate(other, strategy="fedavg", **QUICK).metrics()
    assert not any("gain" in row for row in rows)


def test_a_task_s_silos_train_as_in_a_federation_of_their_configs(tmp_path: Path) -> None:
    silos = {"a": {"train": 20, "test": 20}, "b": {"train": 30, "test": 20, "skip": 40}}
    keys = {"strategy": "fedavg", "rounds": 2, "seed": 3}
    result = coterie.simulate("digits", silos, local_epochs=1, progress=False, **keys)
    from coterie.server.machine.local import SiloSpec

    nodes = nodes_of([SiloSpec(name, options=own) for name, own in silos.items()])
    expected = run(tmp_path / "other", nodes, **keys, **{"local-epochs": 1})
    for name, array in expected.held["a"].items():
        np.testing.assert_array_equal(result.models["a"][name], array)


def test_real_targets_texts_and_images_are_learned() -> None:
    draw = np.random.default_rng(0)
    x = draw.normal(size=(30, 4))
    real = coterie.simulate({"a": (x, x[:, 0]), "b": (x, x[:, 1])}, strategy="fedavg", **QUICK)
    assert {"mae", "rmse", "r2"} <= set(real.metrics()[0])
    images, names = draw.random((30, 8, 8)), np.array(["cat", "dog", "eel"] * 10)
    told = {"a": (images, names), "b": (images[:20], names[:20], images[20:], names[20:])}
    named = coterie.simulate(told, strategy="fedavg", network="mclr", **QUICK)
    assert named.metrics()[1]["test_samples"] == 10
    assert named.models["a"]["head.weight"].shape == (3, 64)


@pytest.mark.parametrize(
    ("what", "silos", "more", "said"),
    [
        ({"a b": arrays(0)}, None, {}, "silos must have names of letters"),
        ({}, None, {}, "Got 'no silo'"),
        ({"a": arrays(0)[0]}, None, {}, r"silo 'a' must have arrays \(x, y\)"),
        ({"a": (np.zeros(3), np.zeros(3))}, None, {}, r"x of silo 'a' must be numbers of shape"),
        ({"a": arrays(0)}, 3, {}, "arrays are given by silo"),
        ("digits", None, {}, "a task needs silos"),
        ("digits", 3, {"split": {"kind": "none"}}, "split"),
        ("digits", {"a": {}}, {"processes": 2}, "processes must be at most the 1 silos"),
        ("digits", {"a": {}, "b": {}, "c": {}}, {"processes": 2}, "processes must be 0, or 3"),
        ("digits", {"a": {}}, {"alpha": 3.0, "strategy": "fedavg"}, "alpha belongs to hcct"),
        ("digits", {"a": {}}, {"run_config": {"x": 1}}, "are for a ClientApp"),
        ("digits", {"a": {}}, {"task": "mnist"}, "task must be digits, the task of the silos"),
        ("none.toml", None, {}, "none.toml cannot be read"),
        (plain_app(), None, {}, "a ClientApp needs silos"),
        (plain_app(), -2, INITIAL, "a ClientApp needs silos"),
        (plain_app(), 2, {}, "a ClientApp needs initial_arrays"),
        (plain_app(), 2, {"processes": 3}, "processes must be 0, or 2: one for each silo"),
        (plain_app(), 2, INITIAL | {"processes": 2}, "no imported module has this one under"),
        (plain_app(), 2, {"split": {"kind": "iid"}}, "a ClientApp has its own data"),
        (plain_app(), 2, {"strategy": "none"}, "strategy must be one of"),
        (plain_app(), 2, {"strategy": HCCT(), "alpha": 3.0}, "HCCT has its options already"),
        (plain_app(), 2, {"strategy": "hcct", "alhpa": 3.0}, "alhpa"),
    ],
)
def test_what_does_not_go_together_is_refused(
    what: Any, silos: Any, more: dict[str, Any], said: str
) -> None:
    with pytest.raises(FederationError, match=said):
        coterie.simulate(what, silos, progress=False, **more)


# ---------------------------------------------------------------- a ClientApp


def test_an_app_s_nodes_have_names_configs_and_a_record() -> None:
    seen: dict[str, Any] = {}

    class Watched(ClientApp):
        def __call__(self, message: Message, context: Context) -> Message:
            seen[str(context.node_config["noise"])] = dict(context.run_config)
            if message.metadata.message_type == "train":
                seen["lr"] = message.content["config"]["lr"]
            return super().__call__(message, context)

    watched = plain_app()
    watched.__class__ = Watched
    nodes = dict(zip(["north", "south", "east"], plain_nodes(0, 0, 1), strict=True))
    result = coterie.simulate(
        watched, nodes, strategy=HCCT(alpha=20.0), rounds=3, initial_arrays=plain_initial(),
        run_config={"batch-size": 16}, train_config={"lr": 0.5}, label="mine", progress=False,
    )  # fmt: skip
    assert seen == {**{key: {"batch-size": 16} for key in "012"}, "lr": 0.5}
    assert sorted(result.groups) == [["east"], ["north", "south"]]
    record = read_run(result.folder)
    assert (record.strategy, record.config["alpha"], record.config["lr"]) == ("hcct", 20.0, 0.5)
    assert record.config["task"] == "mine" and result.folder.name.startswith("mine-")
    assert {facts.num_examples for facts in record.silos.values()} == {100}
    assert "group A: north, south" in result.explain()
    assert result.report().path.exists()


def test_every_silo_may_have_its_own_app() -> None:
    apps = {"x": plain_app(), "y": plain_app()}
    result = coterie.simulate(
        apps, strategy="fedavg", rounds=1, initial_arrays=plain_initial(), progress=False
    )
    assert result.groups == [["x", "y"]]


def test_strategies_are_compared_over_an_app(tmp_path: Path) -> None:
    chosen = ["fedavg", {"strategy": "hcct", "alpha": 20.0, "name": "α 20"}]
    how: dict[str, Any] = {"initial_arrays": plain_initial(), "rounds": 3, "seeds": [0, 1]}
    how |= {"folder": tmp_path / "out", "progress": False, "run_config": {"batch-size": 16}}
    found = coterie.compare(plain_app(), chosen, plain_nodes(0, 0, 1, 1), **how)
    assert {row["name"] for row in found.table()} == {"local", "fedavg", "α 20"}
    assert found.table()[-1]["name"] == "fedavg" and not found.failed
    assert [len(one.groups) for one in found.runs["α 20"]] == [2, 2]
    assert read_run(found.runs["fedavg"][1].folder).config["seed"] == 1
    with pytest.raises(FederationError, match="batch does not belong to a ClientApp's runs"):
        coterie.compare(plain_app(), chosen, 4, batch=3, **how)
    named, more = [{"strategy": "fedavg", "name": "local"}], {"folder": tmp_path / "b", "rounds": 1}
    found = coterie.compare(plain_app(), named, 2, **{**how, **more})
    assert set(found.runs) == {"local (added)", "local"}
    wrong: list[tuple[Any, dict[str, Any], str]] = [
        (chosen, {"seeds": [1, 1]}, "the comparison is wrong: seeds must differ"),
        ([{"alpha": 20.0}], {}, "every strategy needs a 'strategy'"),
        (chosen, {"folds": 0}, "leave split, options and folds out"),
    ]
    for given, more, said in wrong:
        with pytest.raises(FederationError, match=said):
            coterie.compare(plain_app(), given, 4, **{**how, **more})


def test_arrays_are_compared_and_only_what_is_missing_is_run(tmp_path: Path) -> None:
    how: dict[str, Any] = {"seeds": [0], "folder": tmp_path / "out", **QUICK}
    coterie.compare(four(), ["fedavg"], **how)
    before = {p: p.stat().st_mtime_ns for p in (tmp_path / "out").rglob("run.json")}
    found = coterie.compare(four(), ["fedavg", "hcct"], **how)
    assert len(before) == 2 and all(p.stat().st_mtime_ns == at for p, at in before.items())
    assert set(found.runs) == {"local", "fedavg", "hcct"}
    assert coterie.load(tmp_path / "out").advice == found.advice  # type: ignore[union-attr]
    assert len(found.metrics()) == 12 and "<table>" in found._repr_html_()
    other = {name: (x + 1, y) for name, (x, y) in four().items()}
    with pytest.raises(FederationError, match="has a comparison over other silos"):
        coterie.compare(other, ["fedavg"], **how)


# ---------------------------------------------------------------- tables and the notebook's bar


def test_tables_are_data_frames_where_pandas_is(monkeypatch: pytest.MonkeyPatch) -> None:
    pandas = ModuleType("pandas")
    pandas.DataFrame = lambda rows: ("a frame", rows)  # type: ignore[attr-defined]
    result = coterie.simulate("digits", {"a": {}, "b": {"skip": 300}}, strategy="fedavg", **QUICK)
    rows = result.metrics()
    monkeypatch.setitem(sys.modules, "pandas", pandas)
    assert result.metrics() == ("a frame", rows)


def test_a_notebook_shows_a_bar_and_other_places_show_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    shown: list[str] = []

    class Handle:
        def update(self, html: Any) -> None:
            shown.append(html.data)

    import IPython.display

    assert not is_notebook() and shown_for(False) is NOTHING
    shell = SimpleNamespace(kernel=object())
    monkeypatch.setattr(sys.modules["IPython"], "get_ipython", lambda: shell)
    monkeypatch.setattr(IPython.display, "display", lambda html, display_id: Handle())
    assert is_notebook() and shown_for(True) is in_notebook
    silos = {"a": {"train": 20}, "b": {"skip": 300}}
    coterie.simulate("digits", silos, strategy="fedavg", rounds=2, local_epochs=1)
    assert any('value="1" max="2"' in html for html in shown)
    assert "completed" in shown[-1] and not capsys.readouterr().err
    monkeypatch.undo()
    coterie.simulate("digits", silos, strategy="fedavg", rounds=1, local_epochs=1)
    assert "round 1/1" in capsys.readouterr().err
    assert "&lt;b&gt;" in bar(Progress("<b>"), "")


def test_figures_are_the_metric_s_values_under_its_name(tmp_path: Path) -> None:
    keys = {"strategy": "fedavg", "primary_metric": "auroc"}
    result = coterie.simulate(four(), rounds=2, local_epochs=1, progress=False, **keys)
    stored = json.loads((result.folder / "run.json").read_text())
    values = [row["auroc"] for row in result.metrics()]
    assert "mean-accuracy" not in stored and stored["metric"] == "auroc"
    assert stored["mean-metric"] == pytest.approx(np.mean(values))
    (file,) = write_report(str(result.folder), kind="json")
    report = json.loads(file.read_text())
    assert report["metric"] == "auroc"
    for row in result.metrics():
        shown = report["silos"][row["silo"]]
        assert shown["value"] == pytest.approx(row["auroc"]) == pytest.approx(1 - shown["error"])


def test_a_run_s_end_names_silos_whose_models_learned_nothing() -> None:
    draw = np.random.default_rng(0)
    silos = {name: (draw.normal(size=(60, 3)), draw.normal(size=60)) for name in ("a", "b")}
    silos["c"] = (silos["a"][0], silos["a"][0].sum(axis=1))
    how: dict[str, Any] = {"strategy": "independent", "progress": False, "batch_size": 8}
    result = coterie.simulate(silos, rounds=10, lr=0.01, local_epochs=4, **how)
    assert learned_nothing(result.run) == {"R² is at most 0": ["a", "b"]}, result.metrics()
