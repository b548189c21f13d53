"""Newcomers to groups that grow trees under ``auto``, and silos too small for a race."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.features.sums.trees.asking import Grown
from coterie.features.sums.trees.coordinator import Trees, TreesState
from coterie.features.sums.trees.ensemble import Ensemble
from coterie.features.sums.trees.growth import RIGHT
from coterie.strategies.auto import decision
from coterie.strategies.auto.candidates import Candidate
from coterie.strategies.rounds.members import Members
from tests.conftest import assert_equal_models
from tests.kit import run
from tests.tables import site, written
from tests.unit.strategies.test_grown_trees import FEW_BINS, STUDY, drawn

AUTO: dict[str, Any] = {**FEW_BINS, "strategy": "auto", "rounds": 9, "budget": 3.0}


def sites(folder: Path, rows: dict[str, int]) -> list[dict[str, Any]]:
    """Return silos with so many rows; labels of those called x… mean the opposite."""
    task = written(folder / "study.toml", STUDY.replace("trees-6x3", "trees-10x3"))
    found = []
    for seed, (name, count) in enumerate(rows.items()):
        x, y = drawn(seed, count)
        found.append(site(task, name, x, ill=np.where(y != name.startswith("x"), "yes", "no")))
    return found


def models_of(found: Any, *, names: Sequence[str]) -> list[dict[str, Any]]:
    return [{n: a.numpy() for n, a in found.models[name].items()} for name in names]


FIVE = {"a": 500, "b": 500, "xc": 300, "xd": 300, "e": 150}


def test_a_newcomer_joins_the_group_whose_trees_suit_it(tmp_path: Path) -> None:
    nodes = sites(tmp_path, FIVE)
    found = run(tmp_path / "auto", nodes, **AUTO, **{"min-silos": 4, "churn": "e+5"})
    (placed,) = (r.details["placed"]["e"] for r in found.rounds if "placed" in r.details)
    assert placed["group"] == ["a", "b"] and placed["joins"], placed
    assert found.rounds[-1].groups == (("a", "b", "e"), ("xc", "xd"))
    assert_equal_models(*models_of(found, names="ea"))


@pytest.mark.nightly
def test_a_newcomer_goes_with_most_rows_where_trees_split_by_silo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def split_first(candidates: Sequence[Candidate], *found: Any, **how: Any) -> list[int]:
        return sorted(range(len(candidates)), key=lambda n: not candidates[n].by_silo)

    seen: list[Grown] = []
    alike = Grown.of
    monkeypatch.setattr(Grown, "of", lambda grown, name: seen.append(grown) or alike(grown, name))
    monkeypatch.setattr(decision, "by_preference", split_first)
    monkeypatch.setattr(decision, "behind_alone", lambda state, candidate: False)
    nodes = sites(tmp_path, {"xa": 100, "b": 300, "d": 300, "e": 100})
    found = run(tmp_path / "auto", nodes, **AUTO, **{"min-silos": 3, "churn": "e+5"})
    assert found.rounds[-1].groups == (("b", "d", "e", "xa"),)
    (final,) = (own for own in seen[-1:] if own.silos and own.whole)
    assert final.sides is not None and (final.sides[..., -1] == RIGHT).any()
    (model,) = models_of(found, names="e")
    assert_equal_models(model, alike(final, "e"))
    assert (model["feature"] != final.trees["feature"]).any()


def test_a_silo_that_would_hold_out_too_few_rows_is_placed_after_the_race(tmp_path: Path) -> None:
    """Of 32 training rows, it would hold out 6."""
    nodes = sites(tmp_path, {"a": 300, "b": 300, "d": 40})
    found = run(tmp_path / "auto", nodes, **{**AUTO, "rounds": 6})
    why = found.rounds[0].details["not-summed"]
    assert list(why) == ["d"] and "few rows for a race: it would hold out 6, and sums" in why["d"]
    (verdict,) = (r.details["verdict"] for r in found.rounds if "verdict" in r.details)
    assert verdict["judges"] == ["a", "b"]
    (placed,) = (r.details["placed"]["d"] for r in found.rounds if "placed" in r.details)
    assert placed["group"] == ["a", "b"], placed
    assert placed["joins"] == (placed["grouped"] <= placed["alone"])
    assert found.rounds[-1].details["trees"] == {"a,b": 10}
    assert found.rounds[-1].details.get("at-home", []) == ([] if placed["joins"] else ["d"])


@pytest.mark.parametrize(
    "strategy", ["trees", pytest.param("fedcollab", marks=pytest.mark.nightly)]
)
def test_a_silo_without_labels_gets_the_trees_of_those_whose_rows_its_own_look_like(
    tmp_path: Path, strategy: str
) -> None:
    """Rows are as they are, with missing values and large numbers: their bins are compared."""
    nodes = sites(tmp_path, {"a": 300, "b": 300, "xc": 300, "xd": 300, "xe": 300})
    for node in nodes:
        table = Path(node["data.data"])
        head, *lines = (line.split(",") for line in table.read_text().splitlines())
        shift = 1.5 * node["name"].startswith("x")
        for cells in lines:
            cells[0] = cells[0] and str(float(cells[0]) + shift)
            cells[1] = cells[1] and str(1000 + 50 * float(cells[1]))
        table.write_text("\n".join(",".join(cells) for cells in (head, *lines)))
    new = tmp_path / "new.csv"
    new.write_text("\n".join(line.rpartition(",")[0] for line in table.read_text().splitlines()))
    kept = {key: value for key, value in nodes.pop().items() if key != "data.data"}
    nodes.append({**kept, "unlabelled": str(new), "home": str(tmp_path / "home")})
    groups = {"given-groups": "a,b;xc,xd"} if strategy == "trees" else {"c": 10.0}
    keys = {**FEW_BINS, **groups, "strategy": strategy, "min-silos": 4}
    found = run(tmp_path / "run", nodes, **keys).rounds[-1].details
    own = found["unlabelled"]["xe"]
    assert own["group"] == ["xc", "xd"] and own["why"].endswith("beyond chance"), own


def test_no_bins_of_a_silo_alone_are_shown_and_those_of_the_largest_group_are() -> None:
    empty = Ensemble.empty(4, 1, 2, 1).arrays()

    def of(**edges: float) -> list[float]:
        grown = {
            key.replace("_", ","): Grown(empty, edges=(np.array([edge], np.float32),))
            for key, edge in edges.items()
        }
        state = TreesState(Members({}), grown={**grown, "x,y,z,v": Grown(empty)})
        found = Trees().agreed_bins(state)
        return [float(edge) for edge in found.get("edges", ())]

    assert of(a=1.0) == [] and of(a=1.0, b_c=2.0) == [2.0]
    assert of(a=1.0, b_c=2.0, d_e_f=3.0) == [3.0], "a group without bins is passed over"
