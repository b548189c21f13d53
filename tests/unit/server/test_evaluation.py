"""Given models at every silo: what each says, what stays there, the tests, the page."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from flwr.app import ConfigRecord, Context, Message, RecordDict

from coterie import wire
from coterie.client.app import app
from coterie.client.home.approvals import decide, find
from coterie.client.home.subgroups import read_subgroup
from coterie.client.ledger import read
from coterie.engine.inprocess import InProcessGrid
from coterie.features.evaluation.answers import ANSWER, decode_answer
from coterie.features.evaluation.coordinator import FILE, read_judgement
from coterie.features.evaluation.numbers import (
    calibration_of_classes,
    calibration_of_numbers,
    discordant_p,
    holm,
)
from coterie.features.evaluation.silo import _intervals
from coterie.server.report.command import write_report
from coterie.server.report.evaluation import between, lead_sentence, paired, pooled
from coterie.server.runs.judged import _models
from coterie.server.runs.record import read_run
from coterie.strategies.errors import FederationError
from coterie.strategies.rounds import roster as rosters
from tests.commands import coterie
from tests.kit import (
    CutGrid,
    Node,
    Tap,
    ask,
    digits,
    initial,
    interrupted,
    reason,
    restart_silos,
    run,
)
from tests.tables import declaration, table_node, written
from tests.unit.server.test_json import documented, fields_of

TABLE = declaration("age", "dose", name="heart", sex="fmx")
SITES: Mapping[str, tuple[int, Node]] = {
    "a1": (1, {"subgroups": "sex,age < 55 < 65,dose,height"}),
    "a2": (1, {"min-group-size": 2}),
    "b1": (-1, {}),
    "b2": (-1, {"share-metrics": "loss,seconds"}),
    "lab": (1, {"role": "evaluate", "secure": "required"}),
    "shut": (-1, {"strategies": "fedgroup"}),
}
"""Silo → sign of the effect of the dose, and its settings."""
KEYS: dict[str, Any] = {
    "strategy": "fedgroup", "num-groups": 2, "task": "heart", "rounds": 2, "min-silos": 5,
    "lr": 0.5,
}  # fmt: skip


def sites(folder: Path, which: Mapping[str, tuple[int, Node]] = SITES, **more: Node) -> list[Node]:
    """Write the silos' tables, and return their nodes; ``more`` are settings of a silo."""
    task = written(folder / "heart.toml", TABLE)
    nodes: list[Node] = []
    for number, (name, (sign, own)) in enumerate(which.items()):
        rng, rows = np.random.default_rng(number), []
        for row in range(240):
            dose = rng.normal()
            ill = "yes" if sign * dose + 0.5 * rng.normal() > 0 else "no"
            sex = "x" if row % 60 == 7 else "fm"[row % 2]
            rows.append(f"{rng.normal(60, 12):.0f},{dose:.3f},{sex},{ill}")
        settings = {"home": str(folder / name), **own, **more.get(name, {})}
        nodes.append(table_node(task, name, "age,dose,sex,ill", rows, **settings))
    return nodes


def judge(folder: Path, who: InProcessGrid | list[Node], name: str = "judged", **keys: Any) -> Path:
    usual = {"strategy": "evaluation", "task": "heart", "parent": "trained", "min-silos": 5}
    run(folder / name, who, **{**usual, "wait-for-silos": 0.5, **keys})
    return folder / name / FILE


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    restart_silos()
    run(folder / "trained", sites(folder / "sites"), **KEYS)
    assert sorted(map(len, read_run(folder / "trained").final_groups)) == [2, 3]
    return folder


@pytest.fixture(scope="module")
def judged(trained: Path) -> Path:
    return judge(trained, sites(trained / "sites"))


def test_every_silo_measures_every_groups_model_and_nothing_is_trained(judged: Path) -> None:
    found = read_judgement(judged)
    a, b = found.models
    errors = read_run(judged.parents[1] / "trained").final_errors
    assert {"a1", "b1"} <= errors.keys()
    assert (a.name, a.group, b.group) == ("A", ("a1", "a2"), ("b1", "b2", "shut"))
    for silo, own, other in (("a1", "A", "B"), ("b1", "B", "A"), ("lab", "A", "B")):
        answer = found.answers[silo]
        good, bad = (answer.models[name] for name in (own, other))
        assert good["error"].value < 0.25 < 0.6 < bad["error"].value
        assert good["error"].value == pytest.approx(errors.get(silo, good["error"].value))
        assert good["error"].low <= good["error"].value <= good["error"].high  # type: ignore[operator]
        assert {"loss", "auroc", "calibration-error", *wire.CALIBRATION} <= good.keys()
        (one,) = answer.differences
        assert one.value == pytest.approx(
            answer.models["B"]["error"].value - answer.models["A"]["error"].value
        )
        assert one.p is not None and one.p < 1e-4
    assert (
        read_run(judged.parent).status == "completed"
        and read_run(judged.parent).planned_rounds == 0
    )
    entries = [one for one in read(judged.parents[1] / "sites" / "a1") if one["run"] == "judged"]
    assert [one["type"] for one in entries] == [wire.EVALUATE_GIVEN]
    assert not entries[0]["tensors"]
    assert "error" in entries[0]["values"]["config"]["evaluation"]
    assert not (judged.parents[1] / "sites" / "a1" / "models" / "judged.safetensors").exists()


def test_what_a_silo_keeps_back_or_refuses_is_named_in_every_cell(judged: Path) -> None:
    found = read_judgement(judged)
    a, _ = found.models
    quiet = found.answers["b2"]
    assert set(quiet.models["A"]) == {"loss"} and not quiet.differences
    assert {"error", "auroc", *wire.CALIBRATION} <= {*quiet.kept_back}
    assert "kept back" in found.why_empty("b2", a) and not found.why_empty("b1", a)
    assert {"sensitivity", "f1"} <= {*found.answers["b1"].kept_back}, "they reveal frequencies"
    assert {*found.silent} == {"shut"}, "by its name, though silos are not enrolled"
    assert "silo 'shut' takes part in fedgroup" in found.silent["shut"]
    (page,) = write_report(str(judged.parent))
    text = page.read_text(encoding="utf-8")
    assert "mixed with λ) stays there and is not measured." in text
    assert "kept back by the silo" in text and "takes part in fedgroup" in text
    assert "nothing was trained" in text and "Calibration" in text and "Subgroups" in text
    (summary,) = write_report(str(judged.parent), kind="json")
    plain = json.loads(summary.read_text())
    assert fields_of(plain) == documented("evaluate RUN --json")
    assert len(plain["cells"]) == 12
    assert all(one["why"] or one["figures"] for one in plain["cells"])


def test_subgroups_are_those_that_the_silo_allows_and_small_ones_are_hidden(judged: Path) -> None:
    answers = read_judgement(judged).answers
    parts = {(one.column, one.value): one for one in answers["a1"].parts}
    ages = [parts["age", value].samples for value in ("below 55", "55 to 65", "65 or more")]
    assert None not in ages and sum(filter(None, ages)) == answers["a1"].samples
    assert parts["age", "55 to 65"].models["A"]["error"].value < 0.4
    assert parts["sex", "x"].samples is None, "at most four of 48"
    hidden = [one for one in parts.values() if one.samples is None]
    assert len([one for one in hidden if one.column == "sex"]) == 2, "else it could be computed"
    assert not any(one.models for one in hidden)
    assert "give limits" in answers["a1"].left_out["dose"]
    assert "cannot read" in answers["a1"].left_out["height"]
    assert not answers["b1"].parts


def test_the_tests_are_adjusted_for_their_number(judged: Path) -> None:
    found = read_judgement(judged)
    (all_of_them,) = pooled(found)
    differences = [one.differences[0] for one in found.answers.values() if one.differences]
    assert all_of_them.value == pytest.approx(np.mean([one.value for one in differences]))
    assert len(paired(found)) == 4 and all(one.adjusted >= one.p for one in paired(found))
    apart = between(found)["A"]
    assert len(apart) == 6
    assert {(one.first, one.second) for one in apart if one.found} == {
        ("a1", "b1"), ("a2", "b1"), ("b1", "lab"),
    }  # fmt: skip
    assert "At no silo where it could be tested is another model better" in lead_sentence(found)
    tested = {"a1", "a2", "b1"}
    models = tuple(replace(m, group=tuple(tested.intersection(m.group))) for m in found.models)
    assert "At no silo is another model better" in lead_sentence(replace(found, models=models))
    untested = replace(found, answers={"b2": found.answers["b2"]})
    assert lead_sentence(untested) == "2 models evaluated at 1 silo."


def test_limits_that_are_days_have_different_names() -> None:
    names = ["below 20240101", "20240101 to 20240131", "20240131 or more"]
    assert _intervals((20240101.0, 20240131.0)) == names


def test_the_same_question_has_the_same_answer_also_after_a_crash(
    judged: Path, tmp_path: Path
) -> None:
    folder = judged.parents[1]
    restart_silos()
    cut = CutGrid(sites(folder / "sites"), at=(wire.EVALUATE_GIVEN, 0), answered=2)
    interrupted(folder / "cut", cut, play=lambda run, who: judge(run.parent, who, run.name))
    run(folder / "cut", sites(folder / "sites"), run_id=2, strategy="evaluation", resume="cut",
        runs_dir=str(folder))  # fmt: skip
    assert (folder / "cut" / FILE).read_bytes() == judged.read_bytes()


def test_a_file_is_sent_to_all_and_a_foreign_one_refused_by_name(trained: Path) -> None:
    file = trained / "trained" / "models" / "b1.safetensors"
    found = read_judgement(judge(trained, sites(trained / "sites"), "file", parent=str(file)))
    assert [one.name for one in found.models] == ["b1"] and not found.models[0].group
    assert set(found.answers) == {"a1", "a2", "b1", "b2", "lab"}
    with pytest.raises(FederationError, match=r"is a run of task heart .*, not of digits"):
        judge(trained, sites(trained / "sites"), "other", task="digits")


def test_a_silo_that_is_called_like_a_group_has_a_model_of_another_name() -> None:
    models = {name: {"w": np.zeros(2)} for name in "ABC"}
    algorithm = SimpleNamespace(
        members=lambda state: SimpleNamespace(minimums={}, sizes=dict.fromkeys("ABC", 1.0)),
        models=lambda state: models,
        groups=lambda state: [("A",), ("B", "C")],
    )
    standing = SimpleNamespace(checkpoint=SimpleNamespace(state=None, apart={}))
    config: Any = SimpleNamespace(algorithm=algorithm)
    found = [(given.name, given.group) for given, _ in _models(config, standing)]
    assert found == [("A", ("B", "C")), ("A alone", ("A",))]


@pytest.mark.parametrize(
    ("kind", "strategy", "why"),
    [
        (wire.EVALUATE_GIVEN, "hcct", "only in runs with strategy evaluation, contribution"),
        (wire.TRAIN, wire.ONLY_EVALUATION, "in a run of evaluation alone"),
        (wire.STATISTICS, wire.ONLY_EVALUATION, "in a run of evaluation alone"),
        (wire.EVALUATE_GIVEN, None, "only in runs with strategy evaluation, contribution, not one"),
    ],
)
def test_such_a_run_gets_nothing_else_and_no_other_run_gets_it(
    kind: str, strategy: str | None, why: str
) -> None:
    assert why in reason(ask(kind, digits("a")[0], strategy=strategy))


@pytest.mark.parametrize(
    ("strategy", "decision"),
    [("evaluation", "approved"), ("evaluation", "refused"), ("contribution", "approved")],
)
def test_a_silo_answers_once_a_person_there_has_approved(
    strategy: str, decision: Any, trained: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rosters, "ASKED_AGAIN_S", 0.0)
    monkeypatch.setattr(rosters, "MOST_LATER_S", 0.0)
    name, home = f"{decision}-{strategy}", trained / "sites" / "a1"

    def decided(messages: list[Message]) -> None:
        known = find(home, name)
        if known is not None and known.state == "waits":
            assert not [one for one in read(home) if one["run"] == name and "error" not in one]
            decide(home, name, decision)

    keys = {"strategy": strategy, "min-silos": 5 if strategy == "evaluation" else 4, "rounds": 1}
    restart_silos()
    nodes = sites(trained / "sites", a1={"approve": "ask", "share-metrics": "error"})
    if decision == "refused":
        with pytest.raises(FederationError, match="'a1' refuses this run: an approver refused it"):
            judge(trained, Tap(nodes, before=decided), name, **keys)
        restart_silos()
        return
    folder = judge(trained, Tap(nodes, before=decided), name, **keys).parent
    restart_silos()
    found = read_judgement(folder / (FILE if strategy == "evaluation" else "contribution.json"))
    assert {*found.answers["a1"].models["A"]} == {"error"}
    assert {"a2", "b1", "b2"} <= found.answers.keys()


def test_a_silo_that_nobody_approved_for_is_named(trained: Path) -> None:
    nodes = sites(trained / "sites", a1={"approve": "ask"})
    found = read_judgement(judge(trained, nodes, "unasked", **{"min-silos": 4}))
    restart_silos()
    assert {*found.silent} == {"a1", "shut"} and "waits for an approver" in found.silent["a1"]


def test_a_person_approves_these_models_and_no_others(tmp_path: Path) -> None:
    (node,) = sites(tmp_path, {"a": (1, {"approve": "ask"})})
    model, other = initial(node=node), initial(1, node)
    terms = {"strategy": "evaluation", "task": "heart", "run": "r-1", "of-run": "r-1"}
    ask(wire.DESCRIBE, node, **terms, **{"model.m0": wire.model_hash(model)})
    decide(tmp_path / "a", "r-1", "approved")
    assert not asked(node, model, run="r-1").has_error()
    assert "approved this run with model.m0 = " in reason(asked(node, other, run="r-1"))
    for lie in ({"model.m0": wire.model_hash(model)}, {}):
        said = reason(asked(node, other, hashes=False, run="r-1", **lie))
        assert "was not announced the model 'm0'" in said
    nameless = {"task": "heart", "run": "r-1", "server_round": 1, "strategy": None}
    said = reason(ask(wire.EVALUATE, node, model=other, **nameless))
    assert "approved this run with strategy = 'evaluation', and this message asks for ''" in said


def asked(node: Node, *models: wire.Model, hashes: bool = True, **more: Any) -> Message:
    """Send a silo models by hand."""
    names = [f"m{number}" for number in range(len(models))]
    config = {wire.GIVEN: names, "strategy": wire.ONLY_EVALUATION, "task": "heart", **more}
    if hashes:
        config |= {f"model.{n}": wire.model_hash(m) for n, m in zip(names, models, strict=True)}
    arrays = (wire.encode_arrays(model, packed=True) for model in models)
    records = {f"{wire.MEMBER}{number}": one for number, one in enumerate(arrays)}
    return ask(wire.EVALUATE_GIVEN, node, records=records, **config)


def test_answers_about_rows_that_differ_by_few_never_both_leave(tmp_path: Path) -> None:
    """Else their difference describes the patient that came between."""
    file = tmp_path / "test.csv"
    own = {"subgroups": "sex,dose < 0", "data.test-data": str(file)}
    (node,) = sites(tmp_path, {"a": (1, own)})

    def found(rows: list[str], model: wire.Model | None = None) -> Any:
        file.write_text("\n".join(["age,dose,sex,ill", *rows]))
        restart_silos()
        reply = asked(node, initial(node=node) if model is None else model)
        return reason(reply) if reply.has_error() else decode_answer(reply.content, ["m0"])

    rows = [f"{50 + i},{-1 if i < 37 else 1},{'f' if i < 40 else 'm'},no" for i in range(80)]
    first = found(rows)
    assert first.samples == 80 and {one.column for one in first.parts} == {"sex"}
    assert "fewer than 10" in first.left_out["dose"], "nearly the same parts"
    other = initial(1, node)
    for few in (rows[1:], rows[:71], [*rows, rows[0]]):
        assert found(few) == first, "the stored answer"
        assert "differ from rows that it has answered about by fewer" in found(few, other)
    assert found(rows, other).samples == 80, "the same rows"
    more = found([*rows[10:], *["40,0,m,yes"] * 4])
    assert more.samples == 74 and not more.parts, "four more men"
    assert "fewer than 10" in more.left_out["sex"]


def test_a_silos_own_model_goes_to_nobody_else(trained: Path) -> None:
    nodes = sites(trained / "sites")
    run(trained / "alone", nodes, strategy="independent", task="heart", min_silos=4, rounds=1)
    found = read_judgement(judge(trained, nodes, "own", parent="alone"))
    assert {name: list(one.models) for name, one in found.answers.items()} == {
        name: [name] for name in ("a1", "a2", "b1", "b2")
    }
    assert "no model that it may be sent" in found.silent["lab"]
    assert "too few silos" in found.why_empty("a1", found.models[1])


def test_models_of_a_common_scale_are_evaluated_in_it(tmp_path: Path) -> None:
    nodes = [{**one, "column-sums": True} for one in sites(tmp_path)[:3]]
    file = tmp_path / "heart.toml"
    file.write_text(
        file.read_text().replace("[categorical]", 'scale = "federation"\n[categorical]')
    )
    restart_silos()
    run(tmp_path / "trained", nodes, strategy="fedavg", task="heart", rounds=1)
    found = read_judgement(judge(tmp_path, nodes, **{"min-silos": 3}))
    errors = read_run(tmp_path / "trained").final_errors
    measured = {name: one.models["A"]["error"].value for name, one in found.answers.items()}
    assert measured == pytest.approx(errors)


A_TO_B = {"first": "A", "second": "B", "value": 0.1, "low": 0.0, "high": 0.2, "p": 0.5}


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"answer": "nonsense"}, "cannot be read"),
        ({"models": {}}, "must be of the models A, B"),
        ({"samples": 10**12}, "cannot be read"),
        ({"differences": [A_TO_B, A_TO_B]}, "at most once"),
        ({"differences": [{**A_TO_B, "first": "B", "second": "A"}]}, "at most once"),
    ],
)
def test_a_silo_that_answers_nonsense_is_named_and_the_others_are_read(
    trained: Path, changed: dict[str, Any], why: str
) -> None:
    def lying(message: Message, context: Context) -> Message:
        reply = app(message, context)
        lies = message.metadata.message_type == wire.EVALUATE_GIVEN
        if lies and message.metadata.dst_node_id == 1:
            config = reply.content[wire.CONFIG]
            own = json.loads(str(config["evaluation"])) | changed
            config["evaluation"] = "x" if "answer" in changed else json.dumps(own)
        return reply

    grid = InProcessGrid(lying, sites(trained / "sites"))
    found = read_judgement(judge(trained, grid, f"lie-{why[:2]}-{len(str(changed))}"))
    assert why in found.silent["a1"] and "b1" in found.answers


def test_texts_of_any_length_and_with_escape_sequences_are_shown_cut_and_as_they_are() -> None:
    part = {"column": "\x1b[2J", "value": "a category that a form spells out " * 9}
    told = {
        **{"samples": 9, "models": {"A": {}}, "parts": [part]},
        **{"kept_back": ["\x1b[2J"], "left_out": {"\x1b[2J": "\x1b[2J" * 9}},
    }
    content = RecordDict({wire.CONFIG: ConfigRecord({ANSWER: json.dumps(told)})})
    found = decode_answer(content, ["A"])
    (one,), left_out = found.parts, found.left_out
    texts = [one.column, one.value, *found.kept_back, *left_out, *left_out.values()]
    assert all(text.isprintable() and len(text) < 150 for text in texts)


def test_without_a_run_that_is_known_here_the_task_must_be_named(tmp_path: Path) -> None:
    done = coterie("evaluate", "hcct-1", "--runs-dir", str(tmp_path))
    assert done.returncode == 2 and "--task is missing: 'hcct-1'" in done.stderr


def test_calibration_is_that_of_a_logistic_regression() -> None:
    rng = np.random.default_rng(0)
    odds = rng.normal(size=4000)
    y = (rng.random(4000) < 1 / (1 + np.exp(-(0.5 + odds)))).astype(np.int64)
    extreme = 1 / (1 + np.exp(-2 * odds))  # says twice the log odds, and 0.5 too little
    weights = np.stack([np.ones(4000), rng.integers(0, 3, 4000).astype(float)])
    intercept, slope = calibration_of_classes(extreme, y, weights)
    from sklearn.linear_model import LogisticRegression

    for i, own in enumerate(weights):
        fitted = LogisticRegression(C=np.inf).fit(2 * odds[:, None], y, sample_weight=own)
        assert slope[i] == pytest.approx(fitted.coef_[0, 0], abs=1e-3)
    assert slope[0] == pytest.approx(0.5, abs=0.05) and intercept[0] > 0.3
    alone = calibration_of_classes(extreme, np.ones(4000, np.int64), weights)
    assert np.isnan(alone).all(), "one class has no calibration"
    shift = calibration_of_numbers(odds, 3 + 2 * odds, weights)
    assert shift[1] == pytest.approx([2, 2]) and shift[0, 0] == pytest.approx(3 + odds.mean())
    for constant in (0.1, 0.3, 1e9 / 3):
        equal = calibration_of_numbers(np.full(4000, constant), odds, weights)
        assert np.isnan(equal[1]).all(), "what rounding leaves is no slope"


def test_holm_and_mcnemar_are_those_of_the_textbook() -> None:
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([]) == [] and discordant_p(0, 0) == 1.0
    assert discordant_p(1, 9) == pytest.approx(2 * 11 / 1024)


@pytest.mark.parametrize("text", ["", "< 5", "a < 7 < 5", "age < x", "age < nan", "a, cm < 5"])
def test_a_subgroup_that_cannot_be_read_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="ascending limits"):
        read_subgroup(text)
    assert read_subgroup("age < 50 < 70.5") == ("age", (50.0, 70.5))
