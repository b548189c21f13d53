"""Which package may import which, read from the source, and what importing a part really loads."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
OURS = {
    *("api", "client", "engine", "features", "pictures", "server", "strategies", "system", "tasks"),
    "wire",
}
MOUNTS = {
    *("server/cli/main.py: client", "server/study/silos.py: client"),
    "strategies/strategy.py: recorded",
}
"""The imports against the direction: ``coterie`` takes in the commands of a silo, and plays all
silos in its own process; a strategy of ``flwr run`` keeps a record by ``coterie.recorded``."""


@cache
def sources(package: str) -> list[Path]:
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"no source in {package}"
    return found


@cache
def parsed(file: Path) -> ast.Module:
    return ast.parse(file.read_text(encoding="utf-8"))


@cache
def imports(file: Path, *, lazy: bool = True) -> tuple[str, ...]:
    """Full names that a file imports, wherever it does so.

    Args:
        lazy: also imports inside functions. Imports for type checkers alone always count:
            they couple two packages as well.
    """
    return tuple(_imports(file, lazy=lazy))


def _imports(file: Path, *, lazy: bool) -> Iterator[str]:
    tree = parsed(file)
    functions = () if lazy else ast.walk(tree)
    inside = {
        id(node)
        for function in functions
        if isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef)
        for node in ast.walk(function)
    }
    for node in ast.walk(tree):
        if id(node) in inside:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file}: relative imports hide where a name comes from"
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


def roots(file: Path, *, lazy: bool = True) -> set[str]:
    """Packages of others that a file imports."""
    found = {name.split(".")[0] for name in imports(file, lazy=lazy)}
    return found - {"coterie"}


def ours(file: Path) -> set[str]:
    """Packages of ours that a file imports."""
    names = [name.split(".") for name in imports(file)]
    return {parts[1] for parts in names if parts[0] == "coterie"}


def breaches(package: str, allowed: set[str]) -> list[str]:
    """``file: package`` for every import of ours that is not allowed."""
    return [
        f"{file.relative_to(ROOT)}: {other}"
        for file in sources(package)
        for other in sorted(ours(file) - allowed)
    ]


@pytest.mark.parametrize(
    ("package", "allowed"),
    [
        ("api", {"server"}),
        ("wire", {"wire"}),
        ("engine", {"engine", "system", "wire"}),
        ("system", {"system"}),
        ("features", {"client", "engine", "features", "strategies", "system", "tasks", "wire"}),
        ("strategies", {"engine", "features", "strategies", "system", "wire"}),
        ("tasks", {"system", "tasks"}),
        ("pictures", {"pictures"}),
        ("client", {"client", "engine", "features", "pictures", "system", "tasks", "wire"}),
        ("server", OURS - {"api", "client"}),
    ],
)
def test_packages_import_one_way(package: str, allowed: set[str]) -> None:
    assert set(breaches(package, allowed)) - MOUNTS == set()


def test_every_folder_with_modules_is_a_package_of_the_wheel() -> None:
    manifest = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    folders = {file.parent.relative_to(ROOT) for package in OURS for file in sources(package)}
    names = {".".join(("coterie", *folder.parts)) for folder in folders - {Path("api")}}
    names.add("coterie")  # the package itself lies in api
    assert set(manifest["tool"]["setuptools"]["packages"]) == names


@cache
def module_file(name: str) -> Path | None:
    """The file of a module of ours, of a full name that may go on inside it."""
    parts = name.split(".")[1:]
    for count in range(len(parts), 0, -1):
        file = ROOT.joinpath(*parts[:count]).with_suffix(".py")
        if file.is_file():
            return file
    return None


@cache
def of_features(file: Path) -> set[Path]:
    """A file of a feature, and all files of features that it imports, directly or not."""
    found, left = set[Path](), [file]
    while left:
        one = left.pop()
        found.add(one)
        named = {module_file(name) for name in imports(one) if name.startswith("coterie.features.")}
        left += [other for other in named if other is not None and other not in found]
    return found


@pytest.mark.parametrize("file", sources("features"), ids=str)
def test_a_feature_has_two_halves_which_know_nothing_of_each_other(file: Path) -> None:
    known = {package for one in of_features(file) for package in ours(one)}
    assert not {"client", "strategies"} <= known
    assert not {"tasks", "strategies"} <= known


def test_who_imports_features_gets_its_own_half() -> None:
    for package, other in (
        ("client", "strategies"),
        ("server", "client"),
        ("strategies", "client"),
    ):
        for file in sources(package):
            named = {module_file(n) for n in imports(file) if n.startswith("coterie.features.")}
            for half in filter(None, named):
                known = {found for one in of_features(half) for found in ours(one)}
                assert other not in known, f"{file} imports {half}"


@pytest.mark.parametrize("engine", ["server/runs", "server/site", "server/machine"])
def test_the_engine_of_the_server_knows_no_presentation(engine: str) -> None:
    shown = ("coterie.server.report", "coterie.server.cli", "coterie.server.study")
    for file in sources(engine):
        names = {name for name in imports(file) if name.startswith((*shown, "coterie.pictures"))}
        assert names == set(), file


def keys_read(file: Path, keys: set[str]) -> set[str]:
    """Of these keys, what a file reads from any mapping that is not a run's configuration."""
    found = set()
    for node in ast.walk(parsed(file)):
        key: ast.expr | None = None
        if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load):
            key, holder = node.slice, node.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args:
            if node.func.attr in ("get", "pop", "setdefault"):
                key, holder = node.args[0], node.func.value
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], ast.In | ast.NotIn):
            key, holder = node.left, node.comparators[0]
        known = isinstance(key, ast.Constant) and key.value in keys
        if known and not ast.unparse(holder).endswith(("config", "keys")):
            found.add(ast.unparse(node))
    return found


def test_only_the_record_knows_the_keys_of_its_json() -> None:
    folder = ROOT / "tests/unit/server/records/hcct-1"
    record = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    events = [json.loads(x) for x in (folder / "events.jsonl").read_text("utf-8").splitlines()]
    keys = {key for entry in [record, *record["rounds"], *events] for key in entry} - {"format"}
    assert {"rounds", "similarity", "left-out", "final-evaluation", "event"} <= keys
    own = sources("server/runs/record")
    assert len({key for file in own for key in keys_read(file, keys)}) > 1, "it would be seen"
    for file in sorted(set(sources("server")) - set(own)):
        assert keys_read(file, keys) == set(), file


def test_nothing_is_imported_by_the_name_of_its_folder() -> None:
    """A ``server.py`` of the user's own on the path must never be taken for ours."""
    for package in sorted(OURS):
        for file in sources(package):
            assert roots(file) & OURS == set(), file


def test_the_rules_see_imports_in_functions_and_for_type_checkers(tmp_path: Path) -> None:
    """The reader of imports itself: it must not overlook any form."""
    file = tmp_path / "some.py"
    file.write_text(
        "import a.b\nfrom c import d\n"
        "if TYPE_CHECKING:\n    from e.f import g\n"
        "def h():\n    import i\n    from j.k import l\n"
    )
    assert set(imports(file)) == {"a.b", "c.d", "e.f.g", "i", "j.k.l"}
    assert roots(file, lazy=False) == {"a", "c", "e"}


def test_partition_is_pure_numerics() -> None:
    """strategies.partition needs numpy; scikit-learn only inside the functions that use it."""
    standard = set(sys.stdlib_module_names)
    in_functions = {"numpy", "sklearn", "scipy", "threadpoolctl"}  # the last two come with sklearn
    for file in sources("strategies/partition"):
        own = {name for name in imports(file) if name.startswith("coterie")}
        assert all(name.startswith("coterie.strategies.partition") for name in own), file
        assert roots(file) - standard <= in_functions, file
        assert roots(file, lazy=False) - standard <= {"numpy"}, file


def loaded(*statements: str) -> list[set[str]]:
    """Modules and top-level packages in a fresh interpreter after each of these statements."""
    code = "import sys\ndef found():\n    parts = {n.split('.')[0] for n in sys.modules}\n"
    code += "    print('loaded', *parts, *sys.modules)\n" + "\nfound()\n".join([*statements, ""])
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("loaded ")]
    assert len(lines) == len(statements)
    return [set(line) for line in lines]


HELP = """
from coterie.server.cli.main import app
for line in ["--help"], ["silo", "--help"], ["silo", "serve", "--help"]:
    try:
        app(line, prog_name="coterie")
    except SystemExit:
        pass
"""


@pytest.mark.parametrize(
    "without",
    [
        {
            "import coterie": {"numpy", "torch", "flwr", "coterie.server"},
            "import coterie.client.cli.main":
            {"torch", "flwr", "numpy", "coterie.server", "coterie.strategies"},
            "import coterie.client.resident.serve":
            {"torchvision", "sklearn", "coterie.server", "coterie.strategies", "matplotlib"},
            "import coterie.client.app":
            {"torchvision", "sklearn", "coterie.server", "coterie.strategies", "matplotlib"},
        },
        {
            "import coterie.tasks.images.digits": {"torch", "torchvision", "sklearn", "flwr"},
            "import coterie.strategies.partition.hcct, coterie.strategies.partition.cfl":
            {"torch", "flwr", "sklearn", "grpc"},
            "from coterie.strategies import FedAvg, HCCT, Independent":
            {"torch", "torchvision", "sklearn"},
            "import coterie.server.app":
            {"torch", "torchvision", "sklearn", "coterie.client", "matplotlib"},
        },
        {
            "import coterie.server.cli.main": {"torch", "torchvision", "flwr", "sklearn"},
            HELP: {"torch", "flwr", "pydantic"},
        },
    ],
    ids=["silo", "strategies", "help"],
)  # fmt: skip
def test_a_part_loads_only_what_it_needs(without: dict[str, set[str]]) -> None:
    """One process imports several parts: whatever it has loaded by then counts."""
    for (statement, unwanted), names in zip(without.items(), loaded(*without), strict=True):
        assert names & unwanted == set(), statement


UNTIL_SUBMITTED = """
from contextlib import nullcontext
from coterie.server.machine import link
class Calls:
    def submit(self, config):
        assert link.bundle_of(config)
        raise SystemExit(77)
link.control = lambda *_, **__: nullcontext(Calls())
from coterie.server.cli.main import app
for line in {lines}:
    try:
        app([*line, "--runs-dir", {folder!r}], prog_name="coterie")
    except SystemExit as end:
        assert end.code == 77, end.code
"""
SUBMITTED = [
    ["run"],
    ["run", "hcct", "--alpha", "50", "--set", "lr=0.1"],
    ["stats", "--task", "heart"],
]


def test_a_run_is_submitted_before_what_shows_it_is_loaded(tmp_path: Path) -> None:
    """It begins that much earlier: loading all of these takes longer than the submission."""
    (names,) = loaded(UNTIL_SUBMITTED.format(lines=SUBMITTED, folder=str(tmp_path)))
    shows = {"torch", "sklearn", "scipy", "matplotlib", "fastapi", "httpx", "flwr.cli"}
    shows |= {"coterie.server.report", "coterie.server.cli.commands", "coterie.server.runs.record"}
    shows |= {"coterie.server.site.coordinator", "coterie.strategies.strategy", "safetensors"}
    assert names & (shows | {"coterie.strategies.fedgenp.algorithm"}) == set()


def test_the_process_that_becomes_each_run_knows_the_keys_of_all_strategies() -> None:
    statement = (
        "from coterie.server.executor import prepare\nprepare()\n"
        "from coterie.server.runs.config import all_keys\n"
        "assert all_keys.cache_info().currsize"
    )
    (names,) = loaded(statement)
    assert {"coterie.server.app", "coterie.strategies.fedgenp.algorithm"} <= names
