"""HCCT in secure runs: silos share a sum only after two partitions in a row put them together."""

from __future__ import annotations

from pathlib import Path

import pytest

from coterie import wire
from coterie.features.secure.protocol import decode_sum
from coterie.strategies.hcct.twice import PATIENCE, twice_together
from tests.kit import Tap, digits, run


def groups(text: str) -> tuple[tuple[str, ...], ...]:
    """Return groups from words of one-letter silos."""
    return tuple(tuple(word) for word in text.split())


ALONE = "a b c d e f"


@pytest.mark.parametrize(
    ("now", "before", "trained", "waits", "expected"),
    [
        ("abc def", "", ALONE, 0, ALONE),
        ("abc def", "abc def", ALONE, 1, "abc def"),
        ("abc def", "abc de f", ALONE, 1, "abc d e f"),
        ("abc def", "abd cef", ALONE, PATIENCE - 1, ALONE),
        ("abc def", "abd cef", ALONE, PATIENCE, "ab c d ef"),
        ("abcdef", "abc def", "abc d e f", PATIENCE, "abc def"),
        ("abcd ef", "abcd ef", "abc d e f", 1, "abcd ef"),
        ("abcd ef", "abc def", "abc def", 0, "abcd ef"),
        ("abcde", "abc", "abc d e", PATIENCE, "abc d e"),
    ],
    ids=[
        "after one partition nobody is in a group",
        "after two equal ones all are",
        "a group that has grown waits, one that has not is formed",
        "groups that differ wait",
        "at last, parts that were together twice are formed",
        "two groups that were apart are not joined at once",
        "a silo that was placed twice joins",
        "silos of groups move at once",
        "newcomers that were in no partition are each alone",
    ],
)
def test_two_partitions_must_agree(
    now: str, before: str, trained: str, waits: int, expected: str
) -> None:
    found = twice_together(groups(now), groups(before), groups(trained), waits=waits)
    assert sorted(found) == sorted(groups(expected))


@pytest.mark.parametrize("every", [pytest.param(1, marks=pytest.mark.nightly), 3])
def test_no_sum_is_asked_for_after_the_first_partition(every: int, tmp_path: Path) -> None:
    nodes = [
        {**node, "data.train": 30, "data.skip": 60 * i, "data.rotation": 90 * (i % 2)}
        for i, node in enumerate(digits("abcdef"))
    ]
    grid = Tap(nodes)
    keys = {
        "rounds": 6,
        "local-epochs": 5,
        "batch-size": 10,
        "min-silos": 6,
        "regroup-every": every,
    }
    result = run(tmp_path / "run", grid, strategy="hcct", alpha=20.0, secure=True, **keys)
    asked = [decode_sum(str(config[wire.SUM])) for config in grid.asked(wire.MASKED_SUM)]
    assert min(one.round for one in asked) >= 2
    assert all(len({ord(n) % 2 for n in one.members}) == 1 for one in asked), "two kinds"
    sizes = [max(map(len, entry.groups)) for entry in result.rounds]
    assert sizes[:2] == [1, 1] and max(sizes) > 1
