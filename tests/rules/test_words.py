"""Numbers as people read them, and phrases that they should not have to read."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from math import inf, nan

import pytest

from coterie import wire
from coterie.pictures.charts import gain_text
from coterie.server.runs.record.metrics import Lead
from tests.rules.test_imports import OURS, ROOT, parsed, sources


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (19_234.0, "19,200"),
        (-5_083.0, "-5,080"),
        (999.6, "1,000"),
        (123_456_789.0, "123,000,000"),
        (1.5e9, "1.5e+09"),
        (12.345, "12.3"),
        (0.0, "0"),
        (0.00012345, "0.000123"),
        (1.2e-7, "1.2e-07"),
        (nan, "not a number"),
        (-inf, "infinite"),
    ],
)
def test_a_number_has_three_figures_and_an_exponent_only_where_it_is_needed(
    value: float, text: str
) -> None:
    assert wire.readable(value) == text


def test_more_figures_and_a_sign_can_be_asked_for() -> None:
    assert wire.readable(19_234.0, figures=4) == "19,230"
    assert wire.readable(19_234.0, sign="+") == "+19,200"


def test_values_and_gains_of_a_metric_are_in_its_unit() -> None:
    lead = Lead("mae", "EUR")
    assert lead.text(19_234.0) == "19,200 EUR" and lead.number(19_234.0) == "19,200"
    assert lead.gain(-5_083.0) == "−5,080" and lead.gain(0.15, sign="") == "0.15"
    assert gain_text(1_234.0, 1.0) == "+1,234" and gain_text(-0.151, 1.0) == "−0.15"


@pytest.mark.parametrize(
    ("number", "text"), [(0, "0 silos"), (1, "1 silo"), (2, "2 silos"), (1200, "1,200 silos")]
)
def test_one_of_a_thing_is_no_plural(number: int, text: str) -> None:
    assert wire.counted(number, "silo") == text


# ---------------------------------------------------------------- phrases to avoid

AVOIDED = {
    "anew": (r"\b(?:anew|as ever|in words|goes before)\b", 0, 0, 0, 0, 28),
    "own": (r"\bof (?:its|their) own\b", 0, 5, 0, 0, 11),
    "told": (r"\btold\b", 0, 0, 0, 0, 85),
    "whoever": (r"\b[Ww]hoever\b", 0, 0, 0, 0, 3),
    "no": (r"(?<![Tt]here )\b(?:is|are) no (?!longer|more|one\b)\w", 0, 2, 0, 0, 41),
    "percent": (r"\d %", 2, 0, 0, 0, 0),
    "riddle": (r"(?:^|[.:;] )(?:Who|Whose) [^?\n]*$", 0, 0, 1, 0, 0),
}
"""Name → pattern, and how often pages, docstrings, texts, and the tests' docstrings and names have
it; the numbers only shrink."""


def pages() -> Iterator[str]:
    for file in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")):
        if file.name != "changelog.md":
            yield re.sub(r"```.*?```", "", file.read_text(encoding="utf-8"), flags=re.DOTALL)


def docstrings() -> Iterator[str]:
    for package in sorted(OURS):
        for file in sources(package):
            yield from docstrings_of(parsed(file))


def docstrings_of(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""


def docstrings_in_tests() -> Iterator[str]:
    for file in (ROOT / "tests").rglob("*.py"):
        yield from docstrings_of(parsed(file))


def names_in_tests() -> Iterator[str]:
    for file in (ROOT / "tests").rglob("*.py"):
        for node in ast.walk(parsed(file)):
            if isinstance(node, ast.ClassDef | ast.FunctionDef):
                yield node.name.replace("_", " ")


def texts() -> Iterator[str]:
    """What programs print: errors, logs, reasons, help."""
    for package in sorted(OURS):
        for file in sources(package):
            yield from texts_of(parsed(file))


def texts_of(tree: ast.AST) -> Iterator[str]:
    """Texts of several words, with an ellipsis for each value; no docstrings."""
    passed = set()
    for node in ast.walk(tree):  # parents come first
        if isinstance(node, ast.JoinedStr):
            passed |= {id(part) for part in node.values}
            yield "".join(p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
        elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            passed.add(id(node.value))
        elif id(node) not in passed and isinstance(node, ast.Constant) and " " in str(node.value):
            yield str(node.value)


@cache
def everything() -> tuple[tuple[str, ...], ...]:
    each = (pages(), docstrings(), texts(), docstrings_in_tests(), names_in_tests())
    return tuple(map(tuple, each))


@pytest.mark.parametrize("name", AVOIDED)
def test_no_more_texts_have_a_phrase_to_avoid(name: str) -> None:
    pattern, *allowed = AVOIDED[name]
    found = [
        sum(len(re.findall(pattern, text, re.MULTILINE)) for text in each) for each in everything()
    ]
    assert found == allowed, "CONTRIBUTING.md, Writing"


def test_texts_are_read_whole_and_docstrings_are_not_among_them() -> None:
    tree = ast.parse('"""Doc string."""\nraise ValueError(f"a {x!r} of its" " own")')
    assert list(texts_of(tree)) == ["a … of its own"]


# ---------------------------------------------------------------- pages that texts name


def test_texts_name_no_path_of_the_documentation() -> None:
    """On a machine with a wheel there is no such file."""
    assert not [text for text in texts() if re.search(r"\bdocs/[a-z-]+/", text)]


def titles_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(
                func=ast.Name("page") | ast.Attribute(attr="page"), args=[ast.Constant(t)]
            ):
                yield t


def test_every_page_that_a_text_names_exists() -> None:
    pages_there = {text.split("\n")[0].removeprefix("# ") for text in pages()}
    there = pages_there | {title.partition(":")[0] for title in pages_there}
    named = {t for package in OURS for file in sources(package) for t in titles_in(parsed(file))}
    assert named and not named - there
