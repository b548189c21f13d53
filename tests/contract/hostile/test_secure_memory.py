"""Secure runs: no two sums can be subtracted until one silo's part is left.

Recovered by such differences before silos were in blocks: one silo's update with a relative error
of 4e-4, to which sums were rounded (another run, forgotten sums, a file name that two runs shared,
another round or purpose with a hardly different learning rate).
"""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie import wire
from coterie.client import ledger
from coterie.client.home.rounds import file_name
from coterie.wire import Model
from tests.contract.hostile.liars import STEP, Liar
from tests.kit import restart_silos

FOUR, THREE = "abcd", "bcd"
TOGETHER = "only together with all of"


@pytest.fixture
def liar(tmp_path: Path) -> Liar:
    """A coordinator that has the sum of four silos in round 1."""
    found = Liar(tmp_path)
    found.train(FOUR)
    assert found.refusal(found.describe(FOUR)) == ""
    return found


def moved(model: Model, by: float) -> Model:
    """Return a model in which one weight is changed that no sample reads."""
    changed = {name: np.array(array) for name, array in model.items()}
    next(iter(changed.values())).reshape(-1)[0] += by
    return changed


def test_the_same_sum_once_more_says_nothing_new(liar: Liar) -> None:
    assert liar.refusal(liar.describe(FOUR)) == ""
    assert TOGETHER in liar.refusal(liar.describe(THREE))
    restart_silos()
    assert liar.refusal(liar.describe(FOUR)) in ("", liar.refusal(liar.describe(FOUR)))


@pytest.mark.parametrize(
    "how",
    [
        {"number": 2, "lr": 0.1 * (1 + 1e-6)},
        {"number": 1, "purpose": "p"},
        {"number": 2, "lr": 5.0},
        {"number": 1, "run": "again"},
        {"number": 3, "run": "again", "lr": 0.1 * (1 + 1e-6), "purpose": "p"},
    ],
    ids=["next round", "purpose", "another rate", "another run", "all of them"],
)
def test_whatever_the_training_is_called_no_silo_is_left_over(
    how: dict[str, Any], liar: Liar
) -> None:
    number, lr = how.pop("number"), how.pop("lr", 0.1)
    liar.train(FOUR, number, lr=lr, **how)
    assert TOGETHER in liar.refusal(liar.describe(THREE, number, **how))
    assert TOGETHER in liar.refusal(liar.describe("abcdef"[1:4], number, **how))
    assert liar.refusal(liar.describe(FOUR, number, **how)) == ""


@pytest.mark.parametrize("by", [1e-6, 1e3])
def test_a_start_that_only_looks_different_helps_nothing_in_a_run(by: float, liar: Liar) -> None:
    liar.train(FOUR, 2, start=moved(liar.initial, by))
    assert TOGETHER in liar.refusal(liar.describe(THREE, 2))


def test_a_start_nearer_than_the_update_is_long_is_the_same_in_another_run(liar: Liar) -> None:
    start = moved(liar.initial, 1e-4)
    liar.train(FOUR, 1, start=start, run="again")
    assert TOGETHER in liar.refusal(liar.describe(THREE, run="again"))


def test_a_new_row_at_every_silo_frees_none_of_its_block(liar: Liar) -> None:
    """The difference of the two runs' sums had a correlation of 0.99 with one silo's update."""
    for node in liar.nodes.values():
        node["data.train"] += 1
    restart_silos()
    liar.train(FOUR, run="again")
    assert TOGETHER in liar.refusal(liar.describe(THREE, run="again"))


def test_another_run_from_another_start_may_have_other_groups(liar: Liar) -> None:
    """A study with other silos; from the same start in disguise it would show one silo's part."""
    liar.train(FOUR, 1, start=liar.model(2), run="again")
    assert liar.refusal(liar.describe(THREE, run="again")) == ""


def test_keys_for_other_runs_and_many_sums_make_no_silo_forget(liar: Liar) -> None:
    for number in range(6):
        for name in FOUR:
            assert not liar.ask(name, wire.SECURE_KEY, run=f"other-{number}").has_error()
    restart_silos()
    liar.train(FOUR)
    assert TOGETHER in liar.refusal(liar.describe(THREE))
    liar.train(FOUR, 1, run="other-7")
    assert TOGETHER in liar.refusal(liar.describe(THREE, run="other-7"))


def test_names_of_runs_share_no_file(tmp_path: Path) -> None:
    liar = Liar(tmp_path)
    for run, who in (("study_1", FOUR), ("study/1", THREE)):
        liar.train(FOUR, run=run)
        asked = liar.describe(who, run=run)
        assert (TOGETHER in liar.refusal(asked)) is (who == THREE)
        restart_silos()
    names = {
        file_name(run) for run in ("a/b", "a_b", "a~b", "a\\b", "ä", "..", "x" * 300, "x" * 301)
    }
    assert len(names) == 8 and all("/" not in name and len(name) < 110 for name in names)
    assert file_name("hcct-2026.1_x") == "hcct-2026.1_x"


def test_a_silo_without_a_folder_remembers_in_any_run_of_a_network(tmp_path: Path) -> None:
    """Also in run 0, a number that the SuperLink chooses."""
    liar = Liar(tmp_path, run_id=0)
    for node in liar.nodes.values():
        del node["home"], node["peers"]
    liar.vouched = dict.fromkeys(liar.nodes, (b"", b""))
    liar.train(FOUR)
    assert liar.refusal(liar.describe(FOUR)) == ""
    liar.train(FOUR, 2)
    assert TOGETHER in liar.refusal(liar.describe(THREE, 2))


def test_blocks_are_large_enough_and_count_in_fixed_proportions(liar: Liar) -> None:
    liar.train("abcdef", 2)
    small = liar.describe("abcdef", 2, blocks=[FOUR, "ef"])
    _, refused = liar.sum(small)
    assert set(refused) == {"e", "f"} and "in blocks of at least 3 silos" in refused["e"]
    asked = liar.describe(FOUR, 2)
    (block,) = asked.blocks
    lighter = tuple((name, count / 2 if name == "a" else count) for name, count in block)
    assert TOGETHER in liar.refusal(replace(asked, blocks=(lighter,)))
    halves = tuple((name, count / 2) for name, count in block)
    assert liar.refusal(replace(asked, blocks=(halves,))) == "", "the same proportions"


def test_an_own_model_is_shortened_in_one_way(tmp_path: Path) -> None:
    """Of two ways, the difference of the sums would be the update that is too long."""
    liar = Liar(tmp_path)
    liar.train(FOUR)
    longest = max(liar.stated["r", name, 1, ""].length for name in FOUR)
    limit = {"own_longest": 0.99 * longest, "own_longest_of": 1e9}
    liar.train(FOUR, 2, own_round=1, purpose="p", lr=1e-9)
    for again in (False, True):
        if again:
            restart_silos()
            liar.train(FOUR, group_size=1)
        reply = liar.ask(
            "a", wire.TRAIN, 2, secure=True, own_round=1, purpose="q", group_size=6, **limit, **STEP
        )
        assert "shortened it to another length" in reply.error.reason
    liar.train(FOUR, 2, own_round=1, purpose="q")


def test_no_silo_alone_begins_from_a_shortened_model(tmp_path: Path) -> None:
    """Each of two alike trainings is gone on from with one limit, one of which shortens one update.

    The difference of the sums had a correlation of 0.99999 with that update.
    """
    liar = Liar(tmp_path)
    for purpose in "pq":
        liar.train(FOUR, purpose=purpose)
    lengths = sorted(liar.stated["r", name, 1, "p"].length for name in FOUR)
    for purpose, longest in (("p", sum(lengths[-2:]) / 2), ("q", 2 * lengths[-1])):
        own = {"own_round": 1, "own_purpose": purpose, "own_longest": longest}
        liar.train(FOUR, 2, purpose=purpose, own_longest_of=1e9, **own)
    assert "trained differently before" in liar.refusal(liar.describe(FOUR, 2, purpose="p"))
    assert liar.refusal(liar.describe(FOUR, 2, purpose="q")) == ""


def test_statements_and_blocks_are_in_the_ledger(liar: Liar) -> None:
    entries = list(ledger.read(Path(str(liar.nodes["a"]["home"]))))
    (stated,) = (one["stated"] for one in entries if "stated" in one)
    assert stated == json.loads(json.dumps(asdict(liar.stated["r", "a", 1, ""])))
    (summed,) = (one["summed"] for one in entries if "summed" in one)
    assert summed == {"round": 1, "silos": list(FOUR), "blocks": [list(FOUR)]}


def test_a_memory_that_is_lost_ends_secure_runs(liar: Liar) -> None:
    home = Path(str(liar.nodes["a"]["home"]))
    (home / "secure" / "sums.key").unlink()
    restart_silos()
    model, entries = liar.initial, {"secure": True, "group_size": 6}
    reply = liar.ask("a", wire.TRAIN, 2, model, **entries, local_steps=1, batch_size=1000)
    assert "takes part in no secure run" in reply.error.reason
    assert "Restore its folder secure/ from a backup" in reply.error.reason


def test_a_sum_takes_about_100_bytes_of_memory_for_ever(liar: Liar) -> None:
    file = Path(str(liar.nodes["a"]["home"])) / "secure" / "sums.jsonl"
    before = file.stat().st_size
    for number in range(2, 6):
        liar.train(FOUR, number, start=moved(liar.initial, number))
        assert liar.refusal(liar.describe(FOUR, number)) == ""
    assert (file.stat().st_size - before) / 4 < 160
