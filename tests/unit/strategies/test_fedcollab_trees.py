"""FedCollab whose model is trees: coalitions by discriminators, and trees in them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from coterie import wire
from coterie.features.sums.trees.asking import Grown
from coterie.features.sums.trees.coordinator import TreesState
from coterie.features.sums.trees.ensemble import Ensemble
from coterie.strategies.errors import FederationError
from coterie.strategies.fedcollab import trees
from coterie.strategies.rounds.members import Members
from tests.conftest import assert_equal_models
from tests.kit import CutGrid, assert_same_models, interrupted, mean_error, restart_silos, run
from tests.unit.strategies.test_arriving_trees import models_of, sites

KEYS: dict[str, Any] = {"task": "study", "strategy": "fedcollab", "c": "auto", "rounds": 4}
FOUR = {"a": 300, "b": 300, "xc": 300, "xd": 300}
KINDS = (("a", "b"), ("xc", "xd"))


def test_silos_of_one_kind_grow_trees_together_and_a_run_that_was_cut_ends_the_same(
    tmp_path: Path,
) -> None:
    nodes = sites(tmp_path, FOUR)
    whole = run(tmp_path / "whole", nodes, **KEYS)
    assert whole.rounds[-1].groups == KINDS and mean_error(whole) < 0.35
    first = whole.rounds[0].details
    assert first["discriminators"]["pairs"] == 6 and not first["discriminators"]["missing"]
    assert set(whole.rounds[-1].details["trees"]) == {"a,b", "xc,xd"}
    given = {**KEYS, "strategy": "trees", "given-groups": "a,b;xc,xd"}
    del given["c"]
    same = run(tmp_path / "given", nodes, **given)
    restart_silos()
    interrupted(tmp_path / "cut", CutGrid(nodes, (wire.EVALUATE_HISTOGRAMS, 2), 1), **KEYS)
    again = run(tmp_path / "cut", nodes, run_id=2, resume="cut", **KEYS)
    for mine in (again, same):
        assert_same_models(whole, mine, FOUR)


@pytest.mark.nightly
def test_a_newcomer_is_measured_in_the_same_bins_and_gets_its_coalition_s_trees(
    tmp_path: Path,
) -> None:
    nodes = sites(tmp_path, {**FOUR, "xe": 300})
    found = run(tmp_path / "run", nodes, **KEYS, **{"min-silos": 4, "churn": "xe+3"})
    assert found.rounds[1].groups == KINDS
    assert found.rounds[2].details["discriminators"]["pairs"] == 4
    assert found.rounds[-1].groups == (("a", "b"), ("xc", "xd", "xe"))
    assert_equal_models(*models_of(found, names=["xc", "xe"]))
    counts = [r.details["trees"] for r in found.rounds]
    assert counts[-1]["xc,xd,xe"] >= counts[1]["xc,xd"] > 0


def test_silos_that_share_no_discriminator_grow_alone_or_wait_for_larger_groups(
    tmp_path: Path,
) -> None:
    nodes = sites(tmp_path, FOUR)
    nodes[0] |= {"auxiliary": False}
    nodes[2] |= {"min-group-size": 3}
    found = run(tmp_path / "run", nodes, **KEYS)
    assert found.rounds[-1].groups == (("a",), ("b",), ("xc",), ("xd",))
    missing = found.rounds[0].details["discriminators"]["missing"]
    assert "no model except" in missing["a"] and "groups of at least 3" in missing["xc"]
    assert found.rounds[0].details["at-home"] == sorted(FOUR) and not found.models
    assert mean_error(found) < 0.4


@pytest.mark.parametrize(
    ("keys", "why"),
    [
        ({"within": "fednova"}, "within is for networks"),
        ({"server-optimiser": "fedavgm"}, "server-optimiser = fedavgm is for networks"),
        ({"aggregate": "median"}, "aggregate = median is for networks"),
        ({"rounds": 1, "c": 10.0}, ""),
    ],
)
def test_what_is_for_means_of_models_is_refused(
    keys: dict[str, Any], why: str, tmp_path: Path
) -> None:
    nodes = sites(tmp_path, {"a": 120, "b": 120})
    if not why:
        assert run(tmp_path / "run", nodes, **KEYS | keys).rounds[-1].details["trees"]
        return
    with pytest.raises(FederationError, match=why):
        run(tmp_path / "run", nodes, **KEYS | keys)


def test_a_coalition_keeps_the_trees_that_most_of_its_silos_with_trees_had() -> None:
    empty = Ensemble.empty(4, 1, 2, 3).arrays()
    grown = {key: Grown(empty, done=n) for n, key in enumerate(("a,b,c", "d,e", "f"))}
    state = TreesState(Members({}), grown=grown)

    def of(*groups: str) -> dict[str, int]:
        planned = [tuple(group.split(",")) for group in groups]
        found = trees.regrouped(state, planned, Members({}))
        return {key: own.done for key, own in found.grown.items()}

    assert of("a,b,c", "d,e", "f") == {"a,b,c": 0, "d,e": 1, "f": 2}
    assert of("a,b", "c,d,e") == {"f": 2, "a,b": 0, "c,d,e": 1}, "f is away"
    assert of("f,g", "d") == {"a,b,c": 0, "f,g": 2, "d": 1}, "newcomers take what there is"
    assert of("a,d", "f,g") == {"f,g": 2}, "half is not most"
