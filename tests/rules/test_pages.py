"""Figures that a page of docs/evidence quotes from a stored table are those of the table."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from benchmarks.kit.store import RESULTS
from tests.rules.test_imports import ROOT

NUMBER = re.compile(r"[-+]?\d+(?:\.\d+)?")


@dataclass(frozen=True)
class Quoted:
    """A table of a page, and where its figures are from.

    Attributes:
        page: of docs/evidence, without ``.md``.
        heading: above the table, the first one below it.
        store: of benchmarks/results.
        section: heading in the store's Markdown.
        columns: of the page's table → of the stored ones: (which table below the heading, column).
        names: of rows → their names in the store, if they differ.
    """

    page: str
    heading: str
    store: str
    section: str
    columns: Mapping[int, Sequence[tuple[int, int]]]
    names: Mapping[str, str] = field(default_factory=dict)


def tables(text: str, heading: str) -> list[list[list[str]]]:
    """Rows of cells of every table between this heading and the next."""
    after = re.split(rf"(?m)^#+ {re.escape(heading)}$", text)
    assert len(after) == 2, f"{len(after) - 1} headings {heading!r}"
    body = re.split(r"(?m)^#+ ", after[1])[0]
    found = re.findall(r"(?m)(?:^\|.*\n)+", body)
    return [[[c.strip() for c in row[1:-1].split("|")] for row in t.splitlines()] for t in found]


def numbers(cells: str) -> list[str]:
    """The numbers, as they are written, with an ASCII minus."""
    return NUMBER.findall(cells.replace("−", "-"))


def differences(quoted: Quoted, page: str, stored: str) -> list[str]:
    """What the page's table says and the stored ones do not."""
    kept = [
        {row[0].strip("* †"): row for row in reversed(rows)}
        for rows in tables(stored, quoted.section)
    ]
    found = []
    for row in tables(page, quoted.heading)[0][2:]:
        name = quoted.names.get(row[0], row[0])
        for here, there in quoted.columns.items():
            ours = numbers(row[here])
            theirs = numbers(" ".join(kept[table][name][column] for table, column in there))
            same = len(ours) == len(theirs) and all(map(_rounded, ours, theirs))
            if not same:
                found.append(f"{row[0]}: {row[here]}, stored: {' '.join(theirs)}")
    return found


def _rounded(short: str, long: str) -> bool:
    """Whether one number is the other with fewer digits; both may be rounded."""
    half = [10.0 ** -len(text.partition(".")[2]) / 2 for text in (short, long)]
    return abs(float(short) - float(long)) <= sum(half) + 1e-9


FEDGROUP = {
    "FedGroup, EDC": "FG-EDC",
    "FedGroup, MADC": "FG-MADC",
    "FedGrouProx, EDC": "FGP-EDC",
    "FedGrouProx, MADC": "FGP-MADC",
    "FedGroup, EDC, all 1,000 silos pre-train": "FG-EDC, all pre-train",
    "FedGroup, EDC, m = 5": "FG-EDC, m = 5",
    "FedGroup, EDC, m = 10": "FG-EDC, m = 10",
}
SCORED = {1: [(0, 2)], 2: [(0, 3)], 3: [(0, 4)], 4: [(1, 2)]}
COALITIONS = {n: [(0, n)] for n in range(1, 10)}
COALITION_NAMES = {"local": "Local", "with fine-tuning": "Finetune + FedCollab"}
QUOTED = (
    Quoted(
        "papers-fedgroup",
        "The paper's experiment",
        "fedgroup",
        "mnist-mclr",
        SCORED | {5: [(0, 5)]},
        FEDGROUP,
    ),
    *(
        Quoted("papers-fedgroup", heading, "fedgroup", section, SCORED, FEDGROUP)
        for heading, section in (
            ("FEMNIST", "femnist-mclr"),
            ("FEMNIST with the MLP", "femnist-mlp"),
            ("MNIST with the MLP", "mnist-mlp"),
            ("Synthetic(1,1)", "synthetic-mclr"),
        )
    ),
    Quoted(
        "papers-fedgroup",
        "Discrepancy",
        "fedgroup_discrepancy",
        "Table I: FedAvg, by classes of a silo",
        {n: [(0, n + 2)] for n in (1, 2, 3)} | {n: [(0, n + 8)] for n in (4, 5, 6)},
    ),
    Quoted(
        "papers-fedcollab",
        "FashionMNIST, label shift",
        "fedcollab",
        "FashionMNIST, label shift, one set of silos",
        COALITIONS,
        COALITION_NAMES,
    ),
    Quoted(
        "papers-fedcollab",
        "Other samples of the small silos",
        "fedcollab",
        "FashionMNIST, label shift",
        COALITIONS,
        COALITION_NAMES,
    ),
    Quoted(
        "papers-fedcollab",
        "CIFAR-10 with rotated images",
        "fedcollab",
        "CIFAR-10, feature shift",
        COALITIONS,
        COALITION_NAMES,
    ),
    Quoted(
        "papers-hcct",
        "Digits: automatic alpha against a tuned alpha",
        "auto",
        "Auto beside the others",
        {1: [(0, 2)], 2: [(0, 3)], 3: [(0, 4)], 4: [(0, 5)], 5: [(0, 1)]},
        {"local": "alone", "α = 50": "HCCT, α 50", "α = auto": "HCCT, α auto"},
    ),
    Quoted(
        "strategies",
        "FedCollab's FashionMNIST column",
        "baselines",
        "FedCollab's FashionMNIST column (label shift)",
        {1: [(0, 2), (0, 3), (0, 4)], 2: [(0, 5), (0, 6), (0, 7)]},
        {"local": "Local", "CFL": "FedCluster (CFL)", "k-means": "KMeans"},
    ),
)


@pytest.mark.parametrize("quoted", QUOTED, ids=lambda q: f"{q.page}: {q.heading}")
def test_a_page_quotes_what_is_stored(quoted: Quoted) -> None:
    page = (ROOT / "docs" / "evidence" / f"{quoted.page}.md").read_text("utf-8")
    stored = (RESULTS / f"{quoted.store}.md").read_text("utf-8")
    assert not differences(quoted, page, stored)


def test_a_wrong_figure_a_missing_deviation_and_another_row_would_be_found() -> None:
    stored = (
        "## Kept\n\n| | a | b |\n|---|---|---|\n| one | 95.24 ± 0.41 | -0.75 |\n| two | 88 | |\n"
    )
    page = "# Page\n\n| | |\n|---|---|\n| {} |\n"
    quoted = Quoted("", "Page", "", "Kept", {1: [(0, 1), (0, 2)]}, {"eins": "one"})
    for right in ("one | 95.2 ± 0.4 (−0.8)", "eins | 95.24 ± 0.41 (−0.75)", "two | 88"):
        assert not differences(quoted, page.format(right), stored)
    for wrong in ("one | 95.3 ± 0.4 (−0.8)", "one | 95.2 (−0.8)", "one | 95.2 ± 0.4 (0.8)"):
        assert differences(quoted, page.format(wrong), stored)
    assert differences(quoted, page.format("two | 95.2 ± 0.4 (−0.8)"), stored)
