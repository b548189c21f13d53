"""``coterie runs explain``: the reasons agree with the utilities by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.server.report.explain import Reason, print_explanation
from coterie.server.report.explain import explain as explain_run
from coterie.server.runs.record import find_run, run_of
from coterie.strategies.errors import FederationError

ALPHA, SIZES = 20.0, {"a": 100, "b": 100, "c": 50}
COSINES = [[1.0, 0.8, 0.1], [0.8, 1.0, 0.0], [0.1, 0.0, 1.0]]


def record(**changes: Any) -> dict[str, Any]:
    """A run of one round: a and b together, c alone, all updates of length 1."""
    entry = {
        "round": 1,
        "planned": [["a", "b"], ["c"]],
        "compared": ["a", "b", "c"],
        "similarity": COSINES,
        "norms": [1.0, 1.0, 1.0],
        "alphas": [ALPHA] * 3,
        "sizes": list(SIZES.values()),
    }
    return {"config": {"strategy": "hcct", "alpha": ALPHA}, "rounds": [entry | changes]}


def explain(entries: dict[str, Any]) -> tuple[int, list[Reason]]:
    return explain_run(run_of(entries))


def test_utilities_are_those_of_the_definition() -> None:
    _, (a, _, c) = explain(record())
    mean = np.sqrt((1 + 1 + 2 * 0.8) / 4)  # length of the mean of two unit updates
    cosine = (1 + 0.8) / 2 / mean
    assert a.alone == pytest.approx(-ALPHA / 100 + 1)
    assert a.inside == pytest.approx(-ALPHA / 200 + cosine)
    assert a.cosine == pytest.approx(cosine)
    assert (a.group, a.elsewhere) == (("b",), ("c",))
    assert (c.group, c.inside, c.elsewhere) == ((), pytest.approx(-ALPHA / 50 + 1), ("a", "b"))
    assert c.gain < 0, "c is better alone"
    low, high = c.stay
    assert low <= ALPHA <= high


def test_a_silos_own_alpha_goes_before_the_runs() -> None:
    own = record(alphas=[ALPHA, ALPHA, 1000.0], **{"own-alpha": ["c"]})
    assert explain(own)[1][2].gain > 0, "hungry enough to join"
    assert explain(own)[1][2].stay[1] < 1000, "and its interval is of its own α"


def test_the_interval_of_the_runs_alpha_holds_with_what_others_state() -> None:
    """Where c is so hungry that it would draw a in, no α of a's keeps c out of its way."""
    for own in (0.0, 30.0, 300.0, 3000.0):
        given = record(**{"own-alpha": ["c"]})
        low, high = explain(given | {"rounds": [given["rounds"][0] | {"alphas": [1.0, 1.0, own]}]})[
            1
        ][0].stay
        for alpha in (0.1, 1.0, 10.0, 30.0, 100.0, 1000.0):
            entry = given["rounds"][0] | {"alphas": [alpha, alpha, own]}
            stays = explain(given | {"rounds": [entry]})[1][0].gain <= 0
            assert (low <= alpha <= high) == stays, (own, alpha)


def test_the_alpha_that_auto_found_is_used() -> None:
    found = record(alpha=0.0, alphas=[0.0] * 3)
    found["config"]["alpha"] = "auto"
    assert explain(found)[1][0].alone == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            {"config": {"strategy": "fedavg"}},
            "explain is for auto, hcct, fedcollab, fedgroup; this run is fedavg",
        ),
        ({"rounds": []}, "round must be in"),
    ],
)
def test_what_cannot_be_explained_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(FederationError, match=said):
        explain(record() | change)


def test_a_round_without_similarities_says_why() -> None:
    without = record()
    del without["rounds"][0]["similarity"]
    with pytest.raises(FederationError, match=r"no similarities of round 1: of many silos"):
        explain(without)
    without["config"]["alpha"] = "auto"
    del without["rounds"][0]["compared"]
    with pytest.raises(FederationError, match=r"still looking for α\. Name a later round"):
        explain(without)


def test_runs_are_found_by_folder_name_or_id(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "hcct-123"
    folder.mkdir()
    (folder / "run.json").write_text(json.dumps(record()))
    assert find_run(str(folder), None) == find_run("123", tmp_path) == folder
    with pytest.raises(FederationError, match="there is no run"):
        find_run("999", tmp_path)
    (longer := tmp_path / "of-hcct-123").mkdir()
    (longer / "run.json").write_text(json.dumps(record()))
    assert find_run("hcct-123", tmp_path) == folder, "a whole name goes first"
    with pytest.raises(FederationError, match="'123' is ambiguous"):
        find_run("123", tmp_path)
    (longer / "run.json").unlink()
    print_explanation("123", silo="a", number=1, root=tmp_path)
    assert "group A: a, b" in capsys.readouterr().out
    (folder / "events.jsonl").write_text("")
    (folder / "run.json").write_text("{")
    with pytest.raises(FederationError, match="has no record of a run"):
        print_explanation("123", silo=None, number=None, root=tmp_path)
    (folder / "run.json").write_text(json.dumps(record()))
    with pytest.raises(FederationError, match="no silo 'z'"):
        print_explanation("123", silo="z", number=None, root=tmp_path)
