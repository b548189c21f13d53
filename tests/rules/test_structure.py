"""The structure that is wanted, and what is still owed to it.

Each debt is listed with the place that owes it. A new one fails, and so does one that is paid but
still listed: these lists only become shorter.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from tests.mutations import MUTATIONS, Mutation, files_with
from tests.rules.test_imports import OURS, ROOT, imports, parsed, sources

BY_STRING = {"server/machine/local.py": {"coterie.client"}}
"""Modules that a file may not import and names in a text: a silo's process is started by it."""

PRIVATE = {
    "client/work/generators.py": {"head._modules"},
    "client/work/request.py": {"request._check_now", "request._check_terms"},
    "client/work/weights.py": {"module._modules"},
    "system/processes.py": {"os._exit"},
    "tasks/models.py": {"nn.modules.batchnorm._BatchNorm"},
}
"""Private attributes of something else; of Flower's see test_engine.py."""

MOST_BODY = 60
"""Lines of a function after its docstring."""
MOST_LINES = 500
LONG: dict[str, int] = {}
"""Files that are longer, and their lines at most."""

FEATURES = {
    "secure": (15, "features/secure"),
    "unlabelled": (18, "features/unlabelled"),
    "influence": (6, "features/robust"),
    "personalise": (10, "features/personal"),
    "statistics": (16, "features/statistics"),
    "privacy": (11, "features/privacy"),
    "validation": (19, "features/validation"),
}
"""Files whose code has the name of a feature, outside its folder. Only a registry should."""


def part_of(file: Path) -> str:
    """The folder of a file; a file that lies directly in a package is a separate part."""
    inside = file.relative_to(ROOT)
    return ".".join((inside.parent if len(inside.parts) > 2 else inside.with_suffix("")).parts)


def imported_part(name: str) -> str:
    place = ROOT
    for part in name.split(".")[1:]:
        if (place / part).is_dir():
            place /= part
        else:
            module = place / f"{part}.py"
            return part_of(module if module.is_file() else place / "__init__.py")
    return part_of(place / "__init__.py")


@cache
def arrows() -> dict[tuple[str, str], set[str]]:
    """Which part imports which, and the files that do."""
    found: dict[tuple[str, str], set[str]] = {}
    for file in every_source():
        for name in imports(file):
            arrow = (part_of(file), imported_part(name))
            if name.startswith("coterie.") and arrow[0] != arrow[1]:
                found.setdefault(arrow, set()).add(str(file.relative_to(ROOT)))
    return found


def every_source() -> Iterator[Path]:
    for package in sorted(OURS):
        yield from sources(package)


def in_order(found: set[tuple[str, str]]) -> None:
    """Raises CycleError where arrows lead back."""
    graph: dict[str, set[str]] = {}
    for start, end in found:
        graph.setdefault(start, set()).add(end)
    TopologicalSorter(graph).prepare()


def test_imports_between_folders_go_one_way() -> None:
    in_order(set(arrows()))


def test_a_circle_would_be_found() -> None:
    start, end = min(arrows())
    with pytest.raises(CycleError):
        in_order({*arrows(), (end, start)})


def test_what_runs_inside_the_groups_comes_from_no_rival() -> None:
    users = {start for start, end in arrows() if end == "strategies.rivals"}
    assert users <= {"strategies.registry", "strategies"}


USERS = (
    *("strategies.strategy", "strategies.__init__", "strategies.auto", "strategies.fedcollab"),
    *("client.app", "client.prepare", "client.ledger", "client.cli", "server."),
)
"""The lists of stages, what is exported, ``auto`` and ``fedcollab``, whose groups also have models
that a feature grows, what starts and checks silos, the ledger, and commands."""


def test_a_feature_imports_the_core_and_no_other_feature_and_the_core_imports_none() -> None:
    for start, end in arrows():
        same = start.split(".")[:2] == end.split(".")[:2]  # a family in a folder of its feature
        if end.startswith("features.") and not same:
            allowed = start in USERS or start.startswith(USERS[-1])
            assert allowed, f"{start} imports {end}"


@cache
def nodes(file: Path) -> list[ast.AST]:
    return list(ast.walk(parsed(file)))


def texts(file: Path) -> Iterator[str]:
    for node in nodes(file):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_no_module_is_loaded_by_its_name_around_the_rule_but_for_the_debts() -> None:
    found: dict[str, set[str]] = {}
    for package in sorted(OURS - {"client"}):
        for file in sources(package):
            named = {one for one in texts(file) if re.fullmatch(r"coterie\.client[a-z_.]*", one)}
            if named:
                found[str(file.relative_to(ROOT))] = named
    assert found == BY_STRING


OWN = ("self", "cls", "super()")


def private(file: Path) -> set[str]:
    """Private attributes of something that is not the object or class itself."""
    found = set()
    for node in nodes(file):
        if isinstance(node, ast.Attribute) and re.match(r"_[^_]", node.attr):
            found |= {ast.unparse(node)} - {f"{own}.{node.attr}" for own in OWN}
    return found


def test_no_file_uses_what_is_private_elsewhere_but_for_the_debts() -> None:
    found = {
        str(file.relative_to(ROOT)): private(file)
        for package in sorted(OURS - {"engine"})
        for file in sources(package)
    }
    assert {file: names for file, names in found.items() if names} == PRIVATE


def words(node: ast.AST) -> set[str]:
    """What a piece of code calls by name, split at underscores: ``column_sums_from`` is three."""
    names = [getattr(node, one, None) for one in ("id", "attr", "arg", "name", "value")]
    texts = [one for one in names if isinstance(one, str) and re.fullmatch(r"[\w.-]+", one)]
    return {word.lower() for text in texts for word in re.findall(r"[A-Z]?[a-z]+|[A-Z]+", text)}


@cache
def vocabulary(file: Path) -> set[str]:
    return {word for node in nodes(file) for word in words(node)}


def named(feature: str, folder: str) -> int:
    outside = [file for file in every_source() if not file.is_relative_to(ROOT / folder)]
    return sum(feature in vocabulary(file) for file in outside)


def test_no_file_is_too_long_but_for_the_debts_and_these_do_not_grow() -> None:
    lines = {
        str(f.relative_to(ROOT)): len(f.read_text("utf-8").splitlines()) for f in every_source()
    }
    found = {file: count for file, count in lines.items() if count > MOST_LINES}
    assert found.keys() == LONG.keys()
    assert not [file for file, count in found.items() if count > LONG[file]]


def lines_of(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines of the body, without the docstring."""
    body = function.body
    if ast.get_docstring(function) is not None and body[1:]:
        body = body[1:]
    return (body[-1].end_lineno or 0) - body[0].lineno + 1


def test_no_body_is_longer_than_a_screen() -> None:
    bodies = {
        f"{file.relative_to(ROOT)} {node.name}": lines_of(node)
        for file in every_source()
        for node in ast.walk(parsed(file))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert bodies["strategies/rounds/play.py play"] <= 45, "the round reads like the paper's"
    assert not {name: lines for name, lines in bodies.items() if lines > MOST_BODY}


@pytest.mark.parametrize("feature", FEATURES)
def test_no_more_files_name_a_feature(feature: str) -> None:
    most, folder = FEATURES[feature]
    assert named(feature, folder) == most


def test_what_the_page_of_the_architecture_names_is_there() -> None:
    text = (ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`([a-z_]+/[a-z_/]*(?:\.py)?)`", text))
    assert len(named) > 25
    assert not [name for name in named if not (ROOT / name).exists()]
    assert len(text.splitlines()) <= 80, "two screens"


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.title)
def test_a_deliberate_defect_replaces_text_that_is_there(mutation: Mutation) -> None:
    assert files_with(mutation, ROOT), f"{mutation.old!r} is in no source: update the mutation"
    missing = [file for file in mutation.tests.split() if not (ROOT / file).exists()]
    assert not missing
