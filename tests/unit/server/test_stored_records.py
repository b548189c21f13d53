"""Records that were stored once, whole and damaged.

``records``, beside this, was written with ``coterie simulate``: six silos, five rounds, one silo
that joins in the second; hcct, and fedcollab.
"""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from coterie.server.report.command import build_story
from coterie.server.report.explain import explain
from coterie.server.report.page import build_page, summary
from coterie.server.runs.going_on import recorded_config
from coterie.server.runs.record import Recorder, event_of, read_run, read_whole, run_of
from coterie.server.runs.record.format import json_of, line_of, plain_round
from coterie.strategies.errors import FederationError

RECORDS = Path(__file__).parent / "records"
HCCT = RECORDS / "hcct-1"
BAD: list[Any] = ["x", -7.5, True, None, [1, "a"], {"a": 1}, 10**400]


def raw(folder: Path) -> dict[str, Any]:
    read: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return read


def copied(tmp_path: Path) -> Path:
    return Path(shutil.copytree(HCCT, tmp_path / "hcct-1"))


@pytest.mark.parametrize("name", ["hcct-1", "fedcollab-1"])
def test_what_is_read_is_written_again_as_it_was(name: str) -> None:
    run = read_whole(RECORDS / name)
    text = json_of(run, [line_of(plain_round(one)) for one in run.rounds])
    stored = raw(RECORDS / name)
    stored["mean-accuracy"] = 1 - np.mean(list(run.final_errors.values()))
    stored["mean-metric"] = pytest.approx(np.mean(list(run.final_errors.values())))
    assert json.loads(text) == stored


def test_every_part_is_read() -> None:
    run, stored = read_run(HCCT), raw(HCCT)
    assert run.status == "completed" and run.planned_rounds == 5
    assert list(run.silos) == sorted(stored["silos"])
    errors = {n: e["error"] for n, e in stored["final-evaluation"].items()}
    assert run.final_errors == errors
    assert not run.missing
    assert [list(group) for group in run.final_groups] == stored["final-groups"]
    assert run.last_errors() == run.final_errors and "vale" in run.rounds[1].joined
    costs = [c for e in stored["rounds"] for k in ("silos", "phases") for c in e[k].values()]
    assert sum(one.num_bytes[0] for one in run.rounds) == sum(c["bytes-sent"] for c in costs)
    number, reasons = explain(run)
    assert number == 5 and {reason.silo for reason in reasons} == set(run.silos)


def test_fedcollabs_structure_is_read() -> None:
    structure = read_run(RECORDS / "fedcollab-1").rounds[-1].grouping.structure
    stored = raw(RECORDS / "fedcollab-1")["rounds"][-1]["structure"]
    assert structure is not None and structure.distances is not None
    assert structure.distances.values.tolist() == stored["distances"]
    assert list(structure.distances.names) == stored["compared"]
    assert structure.bounds == {k: v for k, v in stored["bound"].items() if v is not None}
    assert (structure.c, structure.kept) == (10.0, False)


def test_events_alone_give_the_same_but_for_matrices(tmp_path: Path) -> None:
    whole, folder = read_run(HCCT), copied(tmp_path)
    (folder / "run.json").unlink()
    run = read_run(folder)
    assert run.missing == ("run.json is missing",)
    assert (run.status, run.seconds, run.config) == (whole.status, whole.seconds, whole.config)
    assert run.final_errors == whole.final_errors
    assert run.final_groups == whole.final_groups
    for one, other in zip(run.rounds, whole.rounds, strict=True):
        assert (one.groups, one.silos, one.errors) == (other.groups, other.silos, other.errors)
        assert one.details == other.grouping.without_matrices()


def test_a_run_goes_on_after_a_round_of_its_record(tmp_path: Path) -> None:
    folder = copied(tmp_path)
    earlier = read_whole(folder)
    Recorder(folder, earlier.config, run_id=7, earlier=earlier, after=3).fail(KeyboardInterrupt())
    stored, before = raw(folder), raw(HCCT)
    assert stored["rounds"] == before["rounds"][:3]
    assert (stored["run-id"], stored["status"]) == ("7", "stopped")
    assert stored["resumed"][0]["previous-run-id"] == before["run-id"]
    assert stored["resumed"][0]["after-round"] == 3
    assert not {"final-evaluation", "final-groups", "model-hashes"} & stored.keys()
    for key in ("started", "silos", "initial-evaluation", "config"):
        assert stored[key] == before[key]


@pytest.mark.parametrize(("name", "key"), [("hcct-1", "alpha"), ("fedcollab-1", "c")])
def test_its_configuration_is_taken(name: str, key: str) -> None:
    run = read_whole(RECORDS / name)
    config = recorded_config(run).plain()
    assert config[key] == run.config[key]
    assert run.config.items() <= config.items()


# ---------------------------------------------------------------- damage


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value, of long lists and objects only the first two."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        large = {"silos", "evaluation", "evaluation-after", "config", "model-hashes", "refused"}
        items = list(value.items())[: 2 if path and path[-1] in large else None]
    elif isinstance(value, list):
        items = list(enumerate(value))[-2:]
    for key, one in items:
        yield (*path, key)
        yield from places(one, (*path, key))


def with_bad(record: dict[str, Any], path: tuple[Any, ...], bad: Any) -> dict[str, Any]:
    changed: Any = json.loads(json.dumps(record))
    holder = changed
    for key in path[:-1]:
        holder = holder[key]
    holder[path[-1]] = bad
    return changed  # type: ignore[no-any-return]


def test_damage_anywhere_costs_only_what_is_damaged() -> None:
    """Every value of the record in turn is replaced by what it must not be."""
    record = raw(HCCT)
    whole = run_of(record)
    tried = 0
    for path in places(record):
        for bad in BAD:
            run = run_of(with_bad(record, path, bad))
            tried += 1
            for name in vars(whole).keys() - {"rounds", "final"}:
                if name.replace("_", "-") != path[0] and path[0] != f"{name}-evaluation":
                    assert getattr(run, name) == getattr(whole, name), (path, bad, name)
            if path[0] != "rounds":
                assert run.rounds == whole.rounds, (path, bad)
            elif len(path) > 2 and path[2] != "round":
                numbers = [one.round for one in run.rounds]
                assert numbers == [1, 2, 3, 4, 5], (path, bad)
                others = [one for one in run.rounds if one.round != path[1] + 1]
                assert others == [w for w in whole.rounds if w.round != path[1] + 1], (path, bad)
    assert tried > 1000


@pytest.mark.parametrize(
    ("path", "bad", "said"),
    [
        (("rounds", 4, "groups"), "x", "round 5: groups is damaged"),
        (("rounds", 4, "silos", "north", "seconds"), "x", "round 5: silos: seconds is damaged"),
        (("rounds", 4, "silos", "north"), 3, "round 5: silos: an entry is damaged"),
        (("rounds", 1), "x", "a damaged entry of a round was left out"),
        (("versions",), [1], "versions is damaged"),
        (("final-evaluation", "north", "error"), "x", "final-evaluation: error is damaged"),
    ],
)
def test_what_is_damaged_is_named_and_what_must_be_whole_is_refused(
    path: tuple[Any, ...], bad: Any, said: str, tmp_path: Path
) -> None:
    folder = copied(tmp_path)
    (folder / "run.json").write_text(json.dumps(with_bad(raw(HCCT), path, bad)))
    run = read_run(folder)
    assert said in run.missing
    assert [one.round for one in run.rounds] == [1, 2, 3, 4, 5], "events have what is left out"
    assert said in build_page(build_story(run)).missing and summary(build_story(run))["rounds"] == 5
    with pytest.raises(FederationError, match=f"run.json is damaged: {said}"):
        read_whole(folder)


@pytest.mark.parametrize("line", ["", "{", "[]", "3", '{"event": 3, "round": "x"}', "\x00", "{}"])
def test_a_damaged_line_is_no_event_or_an_empty_one(line: str) -> None:
    event = event_of(line)
    assert event is None or (event.number == 0 and math.isnan(event.seconds))
