"""``coterie runs explain`` for FedCollab and FedGroup: the sentences agree with values by hand."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coterie.server.report.explain import print_explanation
from coterie.server.report.explain_groups import explain_groups
from coterie.server.runs.record import run_of
from coterie.strategies.errors import FederationError
from tests.kit import digits, run

SILOS = {name: {"num-examples": 100.0} for name in "abcd"}
DISTANCES = [[0, 0.1, 0.9], [0.1, 0, 0.8], [0.9, 0.8, 0]]


def fedcollab(**changes: Any) -> dict[str, Any]:
    """A run of one round: a and b together, c alone, and d, whose distances are unknown."""
    structure = {
        "compared": ["a", "b", "c"],
        "alone": ["d"],
        "c": 4.0,
        "bound": {"chosen": 1.0, "alone": 1.2, "together": 2.0},
        "distances": DISTANCES,
        "c-interval": [1.0, 9.0],
    }
    entry = {"round": 1, "groups": [["a", "b"], ["c"], ["d"]], "structure": structure | changes}
    return {"config": {"strategy": "fedcollab"}, "silos": SILOS, "rounds": [entry]}


def test_fedcollabs_bounds_are_those_of_the_definition() -> None:
    found = explain_groups(run_of(fedcollab()))
    # c / sqrt(D) + the mean distance over the coalition's samples, with itself at distance 0
    inside, alone = 4 / 200**0.5 + 0.1 / 2, 4 / 100**0.5
    beside = 4 / 200**0.5 + 0.9 / 2
    assert found.silos["a"] == (
        f"its bound is {inside:.3g} with b (distance 0.10), {alone:.3g} alone, and it would be "
        f"{beside:.3g} with c (distance 0.90)."
    )
    third = 4 / 300**0.5 + (0.9 + 0.8) / 3
    assert f"it would be {third:.3g} with a, b (distance 0.80 to 0.90)" in found.silos["c"]
    assert "are unknown" in found.silos["d"]
    assert "c from 1 to 9; this run has c = 4" in found.whole[0]


def fedgroup() -> dict[str, Any]:
    """Three silos form two groups in round 1; d is placed in round 2."""
    first = {
        "round": 1,
        "groups": [["a", "b"], ["c"]],
        "members": [["a", "b"], ["c"]],
        "compared": ["a", "b", "c"],
        "similarity": [[1, 0.8, 0.1], [0.8, 1, 0.3], [0.1, 0.3, 1]],
        "norms": [1.0, 1.0, 1.0],
        "placed": {},
    }
    second = {
        "round": 2,
        "groups": [["a", "b", "d"], ["c"]],
        "members": [["a", "b", "d"], ["c"]],
        "placed": {"d": {"group": 0, "cosines": [0.7, 0.2]}},
    }
    return {"config": {"strategy": "fedgroup"}, "silos": SILOS, "rounds": [first, second]}


def test_fedgroups_cosines_are_those_of_the_record() -> None:
    found = explain_groups(run_of(fedgroup()))
    assert found.silos["a"].endswith("others is 0.80, with the nearest other group's 0.10.")
    assert found.silos["c"] == "it is alone in its group, with the nearest other group's 0.20."
    assert found.silos["d"] == (
        "it was placed in round 2, with a, b: the cosine of its update with that group's "
        "direction is 0.70, with the next one's 0.20."
    )
    assert "d" not in explain_groups(run_of(fedgroup()), number=1).silos


@pytest.mark.parametrize("strategy", ["fedcollab", "fedgroup"])
def test_a_recorded_run_is_explained_as_text_and_as_json(
    strategy: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keys = {"fedgroup": {"num-groups": 2}, "fedcollab": {}}[strategy]
    run(tmp_path / "r", digits("abc"), strategy=strategy, rounds=2, **keys)
    print_explanation("r", silo=None, number=None, root=tmp_path)
    said = " ".join(capsys.readouterr().out.split())
    assert all(f" {name}: " in f" {said}" for name in "abc")
    print_explanation("r", silo="b", number=None, root=tmp_path, as_json=True)
    document = json.loads(capsys.readouterr().out)
    assert list(document["silos"]) == ["b"] and document["race"][0] in said


def test_what_the_record_does_not_hold_is_said() -> None:
    with pytest.raises(FederationError, match="no groups were formed yet"):
        explain_groups(run_of(fedcollab(distances=None)))
    with pytest.raises(FederationError, match=r"round must be in \[1, 2\]. Got 3"):
        explain_groups(run_of(fedgroup()), number=3)
