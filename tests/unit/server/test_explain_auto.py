"""``coterie runs explain`` of ``auto``: the partitions raced and measured, by silo."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.server.report.command import build_story, write_report
from coterie.server.report.page import make_pictures
from coterie.server.report.race import Explanation, explain_race, thin_evidence
from coterie.server.report.race_words import titles
from coterie.server.report.view import line_of
from coterie.server.runs.record import EVENTS, Run, event_of, read_run, run_of
from coterie.server.runs.record.follow import Progress
from coterie.server.runs.record.format import json_of, plain_round
from coterie.server.runs.record.format import line_of as line_of_json
from coterie.strategies.auto.candidates import Candidate
from coterie.strategies.auto.entries import entrant_entry, placement_entry, verdict_entry
from coterie.strategies.auto.evidence import by_preference
from coterie.strategies.auto.state import Entrant, Placement, Trial, Verdict
from coterie.strategies.errors import FederationError
from coterie.strategies.partition.race import Standing, shrunken_gains, standings
from coterie.strategies.rounds.reports import Group
from tests.commands import coterie
from tests.conftest import digits_config
from tests.kit import run

NAMES = ("a", "b", "c", "d")
ALONE: tuple[Group, ...] = (("a",), ("b",), ("c",), ("d",))
PAIRS: tuple[Group, ...] = (("a", "b"), ("c", "d"))
ALL: tuple[Group, ...] = (NAMES,)
COUNTS = (20.0, 20.0, 40.0, 40.0)
SAMPLES = {ALONE: 100.0, PAIRS: 200.0, ALL: 400.0}
Partition = tuple[Group, ...]
Errors = Mapping[Partition, Sequence[float]]


def verdict(
    errors: Errors,
    *,
    winner: Partition,
    judges: Sequence[str] = NAMES,
    dropped: Mapping[Partition, int] | None = None,
    **more: Any,
) -> dict[str, Any]:
    """What the record has of a race: errors of partition → one for each silo."""
    rows = [NAMES.index(name) for name in judges]
    shares = bool(more.get("shares", True))
    table, counts = np.array([errors[p] for p in errors])[:, rows], np.array(COUNTS)[rows]
    if rows:
        found = standings(table, counts, table, shares=shares)
    entrants = tuple(
        Entrant(Candidate(p, "x"), found[i], found[i], SAMPLES[p], _out(found[i], p, dropped or {}))
        for i, p in enumerate(errors)
    )
    grouped = errors[winner]
    gains = shrunken_gains(
        [errors[ALONE][i] for i in rows], [grouped[i] for i in rows], counts, shares=shares
    )
    trials = {NAMES[i]: Trial(COUNTS[i], tuple(own[i] for own in errors.values())) for i in rows}
    return verdict_entry(
        Verdict(
            2, 4, entrants, tuple(judges), list(errors).index(winner),
            dict(zip(judges, gains, strict=True)), trials, **more,
        )
    )  # fmt: skip


def _out(standing: Standing, partition: Partition, dropped: Mapping[Partition, int]) -> int:
    """A silo that is out in the last round is named as well."""
    return dropped.get(partition, 4 if standing.out else 0)


def run_with(decided: dict[str, Any] | None, **more: Any) -> Run:
    """Two rounds of a look, two of a race, and one after it."""
    rounds: list[dict[str, Any]] = [
        {
            "round": number,
            "phase": phase,
            "groups": [list(g) for g in (PAIRS if number > 3 else ALONE)],
            "trainings": dict.fromkeys(NAMES, 1.5 * number),
            "bytes": {
                "moved": 5_000_000 * number,
                "usual": 2_000_000 * number,
                "discriminators": 2_000_000,
                "budget": 3.0,
            },
            "silos": {name: {} for name in NAMES},
        }
        for number, phase in enumerate(("look", "race", "race", "hold", "hold"), start=1)
    ]
    for one in rounds[1:3]:
        one |= {"candidates": decided["candidates"] if decided else [], "judges": []}
    rounds[3] |= {"verdict": decided} if decided else {}
    for number, keys in more.pop("rounds", {}).items():
        rounds[number - 1] |= keys
    config = {"strategy": "auto", "rounds": 5, "budget": 2.0}
    return run_of({"config": config, "rounds": rounds, **more}, folder=Path("auto-1"))


CLEAR: Errors = {
    ALONE: (0.40, 0.45, 0.35, 0.40),
    PAIRS: (0.10, 0.15, 0.05, 0.10),
    ALL: (0.80, 0.75, 0.85, 0.80),
}


def test_a_silo_is_told_what_it_measured_and_how_sure_that_is() -> None:
    found = explain_race(run_with(verdict(CLEAR, winner=PAIRS, dropped={ALL: 3})))
    text = found.silos["a"]
    assert text.startswith("grouped with b, and holds its model. On 20 samples that no model had")
    measured = re.search(
        r"it erred 30\.0 ± ([\d.]+) points less often in its group than alone", text
    )
    assert measured and 5 < float(measured[1]) < 15
    assert "(10.0% against 40.0%)" in text
    assert "expected difference is 30.0 ± " in text and "points: its group is better" in text


def test_a_silo_in_doubt_is_told_of_which_two_models_it_ends_with_a_mean() -> None:
    close: Errors = {ALONE: (0.3, 0.3, 0.3, 0.3), PAIRS: (0.25, 0.25, 0.25, 0.25)}
    decided = verdict(close, winner=PAIRS)
    share = decided["gains"]["a"]["share"]
    assert 0.05 < share < 0.5
    text = explain_race(run_with(decided)).silos["a"]
    said = re.search(r"a mean of two models: (\d+)% that of its group, (\d+)% its own", text)
    assert said and int(said[2]) == round(100 * share) == 100 - int(said[1])
    assert "and holds its model" not in text


def test_the_race_is_told_with_who_was_out_when_and_what_it_cost() -> None:
    found = explain_race(run_with(verdict(CLEAR, winner=PAIRS, dropped={ALL: 3})))
    text = " ".join(found.whole)
    assert "A race of 3 partitions in rounds 3–4 decided, judged by 4 silos on 20 to 40" in text
    assert "Chosen: 2 groups: {a, b} {c, d}. It had 10.0% on average over silos; all oth" in text
    assert "1.5 times FedAvg's passes over a silo's samples (budget: 2)" in text
    assert "Bytes so far: 25 MB, 2.5 times FedAvg's (budget for the whole run: 3); " in text
    assert "2 MB of them for discriminators." in text
    rows = {row[0]: row for row in found.rows}
    assert list(rows) == [
        "2 groups – chosen",
        "everybody alone – dropped after round 4",
        "all together – dropped after round 3",
    ]
    lone = rows["everybody alone – dropped after round 4"]
    assert lone[1] == "40.0%" and lone[2].startswith("30.0 ± ")


def test_trees_are_said_to_cost_histograms_and_not_passes_over_samples() -> None:
    rounds: dict[int, dict[str, Any]] = {
        number: {"phases": {"evaluate.histograms": {"bytes-sent": 2e6, "bytes-received": 3e6}}}
        for number in (1, 2)
    }
    decided = run_with(verdict(CLEAR, winner=PAIRS), rounds=rounds | {5: {"trees": {}}})
    text = " ".join(explain_race(decided).whole)
    assert "FedAvg's" not in text and "Histograms moved 10 MB so far, which no budget" in text


def test_who_is_left_behind_by_most_of_its_group_is_told_so() -> None:
    decided = verdict(CLEAR, winner=ALL, left=("c", "d"))
    found = explain_race(run_with(decided))
    assert "Alone because most of their group are: c and d." in found.whole
    why = "trains alone, as most of its group with a, b and d keep their own models. On 40 samples"
    assert found.silos["c"].startswith(why)
    assert "a mean of two models" not in found.silos["c"]
    del decided["trials"]["d"]
    silent = explain_race(run_with(decided)).silos["d"]
    assert silent.startswith("trains alone, as most of its group with a, b and c keep their own")


def test_discriminators_that_were_left_out_are_said_to_be_with_the_reason() -> None:
    why = "the budget of bytes does not allow the 5 rounds that they take."
    work = {"pairs": 0, "rounds": 0, "bytes": 0, "missing": dict.fromkeys(NAMES, why)}
    text = " ".join(
        explain_race(
            run_with(verdict(CLEAR, winner=PAIRS), rounds={1: {"discriminators": work}})
        ).whole
    )
    assert f"FedCollab's discriminators were left out in round 1: {why}" in text


def test_as_good_as_the_best_with_more_data_is_said_and_is_what_the_rule_does() -> None:
    close: Errors = {
        ALONE: (0.42, 0.42, 0.42, 0.42),
        PAIRS: (0.30, 0.30, 0.30, 0.30),
        ALL: (0.35, 0.25, 0.325, 0.325),
    }
    rows = np.array(list(close.values()))
    standing = standings(rows, np.array(COUNTS), rows, shares=True)
    sizes = dict.fromkeys(NAMES, 100.0)
    assert by_preference([Candidate(p, "x") for p in close], standing, sizes) == [2, 1]
    found = explain_race(run_with(verdict(close, winner=ALL)))
    text = " ".join(found.whole)
    assert "behind the best (2 groups), which a few samples cannot tell apart" in text
    assert "(400 samples against 200)" in text
    decided = verdict(close, winner=ALL, shares=False, converged=True)
    exact = {5: {"score": "loss"}}
    for source, rule in (
        ("all together", "all together is chosen, as more"),
        ("x", "the best one"),
    ):
        decided["candidates"][2]["source"] = source
        text = " ".join(explain_race(run_with(decided, rounds=exact)).whole)
        assert f"which a few samples cannot tell apart; of equally good partitions {rule}" in text


def test_a_partition_that_is_not_held_as_it_is_behind_alone_is_told_so() -> None:
    ahead: Errors = {
        ALONE: (0.30, 0.30, 0.30, 0.30),
        PAIRS: (0.20, 0.20, 0.20, 0.20),
        ALL: (0.62, 0.22, 0.30, 0.42),
    }
    left = explain_race(run_with(verdict(ahead, winner=ALONE)))
    assert "in which most silos would have stayed, was behind everybody" in left.whole[1]


def test_a_record_of_a_race_that_went_by_another_rule_is_told_as_it_was() -> None:
    close: Errors = {ALONE: (0.30, 0.30, 0.30, 0.30), PAIRS: (0.35, 0.25, 0.325, 0.325)}
    found = explain_race(run_with(verdict(close, winner=PAIRS)))
    assert "behind the best (everybody alone), which a few samples" in " ".join(found.whole)


def test_thin_evidence_is_what_does_not_tell_the_result_from_training_alone() -> None:
    close: Errors = {
        ALONE: (0.30, 0.30, 0.30, 0.30),
        PAIRS: (0.35, 0.20, 0.325, 0.325),
        ALL: [1] * 4,
    }
    grouped = thin_evidence(run_with(verdict(close, winner=PAIRS, dropped={ALL: 3})))
    assert grouped.startswith(
        "the evidence for the groups is thin: with 4 silos, 2 groups may be no better than "
        "everybody alone."
    )
    alone = thin_evidence(run_with(verdict(close, winner=ALONE, dropped={ALL: 3})))
    assert "for training alone is thin" in alone and "may be no better than 2 groups." in alone
    clear: Errors = {ALONE: [0.9] * 4, PAIRS: [0.1] * 4, ALL: [0.12] * 4}
    assert thin_evidence(run_with(verdict(clear, winner=PAIRS))) == ""
    assert thin_evidence(run_with(None)) == ""


def test_a_silo_that_keeps_its_own_model_is_told_why() -> None:
    one: Errors = {
        ALONE: (0.05, 0.60, 0.60, 0.60),
        PAIRS: (0.90, 0.20, 0.20, 0.20),
        ALL: (0.90, 0.60, 0.90, 0.90),
    }
    found = explain_race(run_with(verdict(one, winner=PAIRS)))
    assert found.silos["a"].startswith("grouped with b, but keeps the model that it trained alone.")
    assert "points more often in its group than alone" in found.silos["a"]
    assert "Keeping the model trained alone: a." in found.whole


def test_a_silo_that_is_alone_is_told_of_the_best_group_that_was_tried_for_it() -> None:
    apart: Errors = {
        ALONE: (0.10, 0.10, 0.10, 0.10),
        PAIRS: (0.25, 0.20, 0.15, 0.15),
        ALL: (0.80, 0.75, 0.85, 0.80),
    }
    found = explain_race(run_with(verdict(apart, winner=ALONE, dropped={ALL: 3})))
    assert found.silos["c"].startswith(
        "trains alone. The best group that was tried for it was with"
    )
    assert "with d (2 groups): on 40 samples" in found.silos["c"]
    assert (
        "it erred 5.0 ±" in found.silos["c"] and "more often there than alone" in found.silos["c"]
    )


def test_the_metric_that_leads_has_its_name_unit_and_direction() -> None:
    days: Errors = {p: [10 * error for error in own] for p, own in CLEAR.items()}
    decided = verdict(days, winner=PAIRS, shares=False)
    found = explain_race(run_with(decided, metric="mae", unit="days"))
    assert "its MAE was 3 ± " in found.silos["a"] and "days lower in its group" in found.silos["a"]
    assert "MAE: lower is better" in found.whole[0]
    found = explain_race(run_with(verdict(CLEAR, winner=PAIRS), metric="auroc"))
    assert "its AUROC was 30.0 ± " in found.silos["a"] and "points higher" in found.silos["a"]
    assert "AUROC: higher is better" in found.whole[0]


def test_who_did_not_judge_is_placed_by_the_others() -> None:
    found = explain_race(run_with(verdict(CLEAR, winner=PAIRS, judges=["a", "b", "c"])))
    assert "It did not measure the two models, so it is placed by the others'" in found.silos["d"]
    assert any(sentence.startswith("d did not measure every partition") for sentence in found.whole)


def test_a_race_without_judges_and_one_that_was_cut_off_say_so() -> None:
    decided = verdict(CLEAR, winner=PAIRS, complete=False)
    assert "The run ended before the race, so the best partition so far was chosen" in " ".join(
        explain_race(run_with(decided)).whole
    )
    nothing = {"error": None, "behind": None, "standard-error": None}
    for one in decided["candidates"]:
        one |= nothing | {"latest": nothing}
    decided |= {"judges": [], "trials": {}, "gains": {}, "winner": 0}
    found = explain_race(run_with(decided))
    assert any("the race could not be decided" in sentence for sentence in found.whole)
    assert found.silos["a"].startswith("trains alone. It did not measure the models")
    assert "there is no evidence for the groups" in thin_evidence(run_with(decided))


def test_newcomers_are_told_of_what_they_measured_or_that_they_are_on_probation() -> None:
    joined = placement_entry(Placement(5, ("a", "b"), True, 8.0, 0.5, 0.25))
    alone = placement_entry(Placement(5, ("a", "b"), False, 8.0, 0.25, 0.5))
    later = {5: {"placed": {"n1": joined, "n2": alone}, "probation": {"n3": ["c", "d"]}}}
    later[5]["groups"] = [["a", "b", "n1"], ["c", "d"], ["n2"], ["n3"]]  # type: ignore[assignment]
    found = explain_race(run_with(verdict(CLEAR, winner=PAIRS), rounds=later))
    assert "on probation with a and b until round 5: on 8 samples" in found.silos["n1"]
    assert "it erred 25.0 ± " in found.silos["n1"] and "so it joined" in found.silos["n1"]
    assert "more often" in found.silos["n2"] and "so it trains alone" in found.silos["n2"]
    assert "on probation: it trains with c and d and alone" in found.silos["n3"]
    assert "Newcomers on probation: n3." in found.whole


def test_before_the_verdict_the_look_and_the_race_are_told() -> None:
    run = run_with(verdict(CLEAR, winner=PAIRS))
    assert "trained alone from the common initial model" in explain_race(run, number=1).whole[0]
    racing = explain_race(run, number=3)
    assert "a race between 3 partitions was under way" in racing.whole[0]
    assert racing.verdict is None and explain_race(run, number=4).verdict is not None
    with pytest.raises(FederationError, match=r"round must be in \[1, 5\]\. Got 9"):
        explain_race(run, number=9)


def test_partitions_that_would_be_called_the_same_are_told_apart() -> None:
    other = (("a", "c"), ("b", "d"))
    entries = [
        entrant_entry(Entrant(Candidate(p, "clusters, 2 groups"), STILL, STILL, 200.0))
        for p in (PAIRS, other)
    ]
    run = run_with(None, rounds={3: {"candidates": entries}})
    names = titles(run.rounds[2].grouping.entrants)
    assert names == ["2 groups (by clustering) no. 1", "2 groups (by clustering) no. 2"]


def test_a_partition_names_fedcollab_as_its_source() -> None:
    one = Candidate(PAIRS, "HCCT, α 0.5; FedCollab, c auto")
    entries = [entrant_entry(Entrant(one, STILL, STILL, 200.0))]
    run = run_with(None, rounds={3: {"candidates": entries}})
    (name,) = titles(run.rounds[2].grouping.entrants)
    assert name == "2 groups (by HCCT, α = 0.5; by FedCollab)"


def test_both_families_have_their_race_on_the_page() -> None:
    own = run_with(verdict(CLEAR, winner=ALL)).rounds
    trees = {number: {"boosted": dict(one.details)} for number, one in enumerate(own, start=1)}
    both = run_with(verdict(CLEAR, winner=PAIRS), rounds=trees)
    networks, boosted = explain_race(both).races.values()
    assert (networks.rows[0][0], boosted.rows[0][0]) == (
        "2 groups – chosen",
        "all together – chosen",
    )
    pictures = {one.key: one for one in make_pictures(build_story(both))[0]}
    assert pictures["race"].table.rows == networks.rows  # type: ignore[union-attr]
    of_trees = pictures["race-of-trees"]
    assert of_trees.title == "Which groups of boosted trees were tried, and which won"
    assert of_trees.table and of_trees.table.rows == boosted.rows


STILL = standings(np.zeros((1, 1)), np.ones(1), np.zeros((1, 1)), shares=True)[0]


def test_a_damaged_verdict_is_named() -> None:
    decided = verdict(CLEAR, winner=PAIRS)
    for damage in ({"winner": 7}, {"candidates": "x"}, {"trials": {"a": {"errors": [1.0]}}}):
        with pytest.raises(FederationError, match="the record's verdict is damaged"):
            explain_race(run_with(decided | damage))


# ---------------------------------------------------------------- a real run


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two kinds of silos, as coterie runs them."""
    silos = [
        digits_config(
            f"{'ab'[number // 2]}{number}",
            **{
                "data.train": 60,
                "data.test": 20,
                "data.skip": 80 * number,
                "data.label-shift": 5 * (number // 2),
            },
        )
        for number in range(4)
    ]
    folder = tmp_path_factory.mktemp("runs") / "auto-7"
    keys = {"strategy": "auto", "rounds": 6, "local-epochs": 4, "lr": 0.1, "batch-size": 16}
    run(folder, silos, run_id=7, seed=0, **keys)
    return folder


def explained(folder: Path) -> Explanation:
    return explain_race(read_run(folder))


def test_the_command_prints_the_race_and_one_silo(recorded: Path) -> None:
    done = coterie("runs", "explain", "auto-7", "--runs-dir", str(recorded.parent), "--silo", "a1")
    found = explained(recorded)
    assert found.verdict is not None and found.verdict.trials.keys() == {"a0", "a1", "b2", "b3"}
    for sentence in found.whole:
        assert sentence in done.stdout
    assert f"a1: {found.silos['a1']}" in done.stdout and "b2: " not in done.stdout
    done = coterie("runs", "explain", "auto-7", "--runs-dir", str(recorded.parent), "--silo", "z")
    assert done.returncode and "no silo 'z' in round 6. There are: a0, a1, b2, b3." in done.stderr


def test_the_report_has_the_reasons_and_a_picture_of_the_race(recorded: Path) -> None:
    found = explained(recorded)
    (page,) = write_report(str(recorded))
    text = page.read_text(encoding="utf-8")
    assert "Why each site is in its group" in text and "Which groups were tried" in text
    assert found.silos["a0"].split(".")[0] in text
    pictures, gaps = make_pictures(build_story(read_run(recorded)))
    assert "race" in [picture.key for picture in pictures]
    assert not any("race" in gap for gap in gaps)


def test_the_console_says_what_rounds_are_spent_on_and_what_the_race_brought(
    recorded: Path,
) -> None:
    progress, lines = Progress("auto"), []
    for line in (recorded / EVENTS).read_text(encoding="utf-8").splitlines():
        event = event_of(line)
        assert event is not None
        progress.feed(event)
        lines += line_of(progress, event).splitlines()
    found = explained(recorded).verdict
    assert found is not None
    at = {
        number: next(one for one in lines if f"round {number}/6" in one) for number in range(1, 7)
    }
    assert "looking for groups" in at[1] and "looking for groups" in at[found.began]
    assert "racing" in at[found.began + 1] and "racing" in at[found.round]
    if found.round < 6:
        assert "racing" not in at[6] and "looking" not in at[6]
    opened = lines[lines.index(at[found.began]) + 1]
    assert opened.startswith(f"auto: a race opens between {len(found.entrants)} partitions: every")
    over = [line for line in lines if "the race is over: " in line]
    assert len(over) == 1 and f"{100 * found.chosen.error:.1f}%" in over[0]


def test_only_what_is_new_after_the_last_round_is_recorded_once_more(recorded: Path) -> None:
    run = read_run(recorded)
    assert run.final is not None and not run.final.details
    details = {**run.rounds[-1].details, "verdict": {"round": 6}}
    ended = replace(run, final=replace(run.final, details=details))
    text = json_of(ended, [line_of_json(plain_round(one)) for one in run.rounds])
    again = run_of(json.loads(text)).final
    assert again is not None and again.details == {"verdict": {"round": 6}}


def test_what_is_said_after_the_last_round_is_in_the_record(recorded: Path) -> None:
    """A race that the end of the run cuts off is decided there."""
    record = json.loads((recorded / "run.json").read_text(encoding="utf-8"))
    number = explained(recorded).round
    last = next(one for one in record["rounds"] if "verdict" in one)
    ending = {"final-details": {"verdict": last.pop("verdict")}, "final-groups": [["a0"]]}
    moved = explain_race(run_of(record | ending))
    assert moved.round == number and moved.verdict == explained(recorded).verdict
    assert explain_race(run_of(record | ending), number=2).verdict is None
