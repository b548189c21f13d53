"""Colours that can be read, and drawings that become SVG for a page."""

from __future__ import annotations

import itertools
import re
import xml.etree.ElementTree as ET

import pytest

from coterie.pictures import charts
from coterie.pictures.page import Page, Picture, Table, render, save
from coterie.pictures.parts import ROUND, over_time
from coterie.pictures.style import DARK, GROUPS, LIGHT, NARROW, WIDE, Layout, shorten

HOSTILE = '<script>alert("x")</script> & $\\alpha$'


def luminance(colour: str) -> float:
    """Relative luminance of WCAG 2.2."""
    shares = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(one: str, other: str) -> float:
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_contrast_is_that_of_the_definition() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.01)


@pytest.mark.parametrize("colours", [LIGHT, DARK])
def test_text_and_marks_stand_out_from_the_page(colours: dict[str, str]) -> None:
    """WCAG AA: 4.5 for text, which groups' letters are too, 3 for marks."""
    for name in ("ink", "muted", "loss", *GROUPS):
        assert contrast(colours[name], colours["paper"]) >= 4.5, name
    assert contrast(colours["alone"], colours["paper"]) >= 3


def simulated(colour: str, kind: str) -> tuple[float, ...]:
    """What a dichromat sees of a colour, linear RGB (Viénot, Brettel, Mollon 1999)."""
    matrices = {
        "protan": ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0)),
        "deutan": ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0)),
    }
    linear = [(int(colour[i : i + 2], 16) / 255) ** 2.2 for i in (1, 3, 5)]
    seen = [sum(m * s for m, s in zip(row, linear, strict=True)) for row in matrices[kind]]
    return tuple(max(0.0, value) ** (1 / 2.2) for value in seen)


@pytest.mark.parametrize("kind", ["protan", "deutan"])
@pytest.mark.parametrize("colours", [LIGHT, DARK])
def test_the_first_groups_differ_to_the_colour_blind(colours: dict[str, str], kind: str) -> None:
    for one, other in itertools.combinations(GROUPS[:4], 2):
        a, b = simulated(colours[one], kind), simulated(colours[other], kind)
        distance = sum((x - y) ** 2 for x, y in zip(a, b, strict=True)) ** 0.5
        assert distance > 0.1, (one, other)


def test_every_light_colour_is_a_variable_of_its_own() -> None:
    assert len(set(LIGHT.values())) == len(LIGHT)
    assert set(LIGHT) == set(DARK)


def test_names_are_cut_in_their_middle() -> None:
    assert shorten("hospital", 8) == "hospital"
    assert shorten("hospital-north-17", 9) == "hosp…h-17" and len(shorten("x" * 99, 12)) == 12


def test_labels_at_the_end_keep_their_distance() -> None:
    assert charts.spread([1.0, 1.1, 9.9], 1.0, 0.0, 10.0) == pytest.approx([1.0, 2.0, 9.9])
    places = charts.spread([9.0, 9.5, 9.6], 1.0, 0.0, 10.0)
    assert places == pytest.approx([8.0, 9.0, 10.0])


@pytest.fixture(scope="module")
def hostile() -> Picture:
    rows = [charts.Bar(HOSTILE, LIGHT["g0"], {HOSTILE: 1.0, "other": 2.0})]
    return Picture(
        "bars",
        HOSTILE,
        HOSTILE,
        lambda layout: charts.bars(rows, layout=layout, title=HOSTILE, unit="MB"),
        Table((HOSTILE, "b"), [(HOSTILE, HOSTILE)]),
    )


def test_a_hostile_name_is_text_everywhere(hostile: Picture) -> None:
    page = Page(
        HOSTILE, HOSTILE, HOSTILE, {HOSTILE: HOSTILE}, [HOSTILE], [HOSTILE], [hostile],
        {HOSTILE: Table(("a",), [(HOSTILE,)])}, {HOSTILE: HOSTILE},
    )  # fmt: skip
    html = render(page)
    assert "<script" not in html
    assert html.count("&lt;script&gt;") >= 13
    assert b"<script" not in save(hostile, "svg")


def test_a_page_asks_for_nothing_and_has_both_widths(hostile: Picture) -> None:
    html = render(Page("t", "s", "l", pictures=[hostile]))
    assert "default-src 'none'" in html and "script-src" not in html
    assert html.count("<svg") == 2 and html.count('role="img"') == 2
    assert "#0b63a5" not in html.partition("</style>")[2], "colours are variables"
    ids = [part.split('"')[0] for part in html.split(' id="')[1:]]
    assert len(ids) == len(set(ids)), "no id twice"


@pytest.mark.parametrize("layout", [WIDE, NARROW, Layout(1000, titled=True)])
def test_a_file_of_its_own_is_whole(hostile: Picture, layout: Layout) -> None:
    tree = ET.fromstring(save(hostile, "svg"))
    assert HOSTILE in "".join(tree.itertext())
    assert save(hostile, "png").startswith(b"\x89PNG")


def strips(**how: object) -> Picture:
    rows = [
        charts.Strip("a", LIGHT["g0"], [(0, 1, 0.25), (1, 2, None), (2, 3, 0.75)]),
        charts.Strip("b", LIGHT["g1"], [(0, 1, None), (1, 2, 1.0), (2, 3, 0.0)]),
    ]
    return Picture(
        "column", "ward", "Shares.",
        lambda layout: charts.strips(rows, layout, title="ward", unit="ward", **how),  # type: ignore[arg-type]
    )  # fmt: skip


def test_whatever_a_picture_refers_to_is_in_the_page() -> None:
    """A hatch whose pattern is not there is drawn as nothing: what is hidden would look empty."""
    html = render(Page("title", "", "", pictures=[strips()]))
    referred = set(re.findall(r"(?:url\(#|href=\"#)([\w-]+)", html))
    ids = set(re.findall(r'id="([\w-]+)"', html))
    assert referred <= ids
    assert any("-h" in name for name in referred), "of what is hidden"


def test_shares_of_categories_are_written_out_unless_they_are_many() -> None:
    html = render(Page("title", "", "", pictures=[strips(categories=["x", "y", "z"])]))
    for share in ("25%", "75%", "100%", "0%"):
        assert f">{share}<" in html
    assert ">25%<" not in render(Page("title", "", "", pictures=[strips()]))


@pytest.mark.parametrize("rounds", [[1], [1, 2]])
def test_rounds_are_whole_numbers_also_of_a_short_run(rounds: list[int]) -> None:
    _, axes = over_time(WIDE, "Error", 100, "%", x=ROUND, right=10, top=10)
    axes.plot(rounds, rounds)
    ticks = axes.get_xticks()
    assert len(ticks) and (ticks == ticks.round()).all(), ticks
