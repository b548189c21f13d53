"""Only ``engine/`` knows Flower beyond its public names, and how little it takes of its inside."""

from __future__ import annotations

import ast
import re
from collections import Counter
from pathlib import Path

from tests.rules.test_imports import OURS, ROOT, imports, parsed, sources
from tests.rules.test_structure import nodes, private, texts

PUBLIC = ("flwr.app", "flwr.clientapp", "flwr.serverapp", "flwr.serverapp.strategy")

SQL = re.compile(r"\b(SELECT|DELETE|INSERT|UPDATE) ")

INSIDE = Counter(
    {
        "engine/flower.py: grid._addr": 1,
        "engine/flower.py: grid._cert": 1,
        "engine/flower.py: grid._insecure": 1,
        "engine/flower.py: grid._token": 1,
        "engine/flower.py: __dict__": 4,
        "engine/fast/superlink/quota.py: state._cleanup_push_session": 1,
        "engine/fast/superlink/long_polling.py: handler_call_details._replace": 1,  # public
        "engine/fast/superlink/carrying.py: handler_call_details._replace": 1,  # public
        "engine/fast/superlink/stores.py: SQL": 3,
        "engine/fast/superlink/executor.py: replace_in": 3,
        "engine/fast/superlink/serving.py: replace_in": 1,
    }
)
"""What the engine takes of the inside of Flower's objects, tables and modules. It only shrinks."""

KNOWS_ONLY = {
    "strategies": {"coterie.engine.port", "coterie.engine.plain"},
    "features": {"coterie.engine.port", "coterie.engine.saved"},
    "server/runs": {"coterie.engine.port"},
    "server/report": set(),
    "client/resident": {"coterie.engine.port", "coterie.engine.fast.silo.process"},  # of serve.py
    "client/work": set(),
    "client/home": set(),
}
"""Folder → modules of the engine that it may know. Others start a part of the engine."""


def imported(file: Path) -> set[str]:
    """Modules of Flower that a file imports and that are not public, also by their name in text."""
    found = {text for text in texts(file) if re.fullmatch(r"flwr(\.\w+)+", text)}
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            several = node.module in ("flwr.proto", "flwr")
            found |= {f"{node.module}.{alias.name}" for alias in node.names} if several else set()
            found |= set() if several else {str(node.module)}
    return {name for name in found if name.split(".")[0] == "flwr"} - set(PUBLIC)


def inside(file: Path) -> Counter[str]:
    """What a file takes of the inside of something."""
    found = Counter(sorted(private(file)))
    for node in nodes(file):
        found["__dict__"] += isinstance(node, ast.Attribute) and node.attr == "__dict__"
        if isinstance(node, ast.Call):
            found["replace_in"] += ast.unparse(node.func).endswith("replace_in")
    found["SQL"] += sum(
        bool(re.search(r"\b(SELECT|DELETE|INSERT|UPDATE) ", t)) for t in texts(file)
    )
    return +found


def test_only_the_engine_knows_the_inside_of_flower() -> None:
    """Its modules, private attributes, tables and replaced names."""
    for file in (file for package in OURS - {"engine"} for file in sources(package)):
        assert imported(file) == set(), file
        taken = {what for what in inside(file) if what in ("__dict__", "replace_in", "SQL")}
        assert taken == set(), file
    found = {
        f"{file.relative_to(ROOT)}: {what}": count
        for file in sources("engine")
        for what, count in inside(file).items()
    }
    assert Counter(found) == INSIDE


def test_who_plays_a_run_knows_only_the_port() -> None:
    for folder, allowed in KNOWS_ONLY.items():
        for file in sources(folder):
            known = {name for name in imports(file) if name.startswith("coterie.engine")}
            assert {name.rpartition(".")[0] for name in known} <= allowed, file


def test_the_rule_sees_every_form(tmp_path: Path) -> None:
    file = tmp_path / "some.py"
    file.write_text(
        "import flwr.common.logger\nfrom flwr.app import Message\nfrom flwr.app.message import x\n"
        "def f():\n    from flwr.supercore import y\n    from flwr import cli\n"
        "    import_module('flwr.cli.app')\n    import_module('flwr.proto.fleet_pb2')\n"
        "from flwr.proto.control_pb2_grpc import ControlStub\nfrom flwr.proto import run_pb2\n"
        "grid._token\nmessage.__dict__['_x']\ncommands.replace_in(m, x=1)\nq('DELETE FROM run')\n"
    )
    assert imported(file) == {
        *("flwr.common.logger", "flwr.app.message", "flwr.supercore", "flwr.cli", "flwr.cli.app"),
        *("flwr.proto.fleet_pb2", "flwr.proto.control_pb2_grpc", "flwr.proto.run_pb2"),
    }
    assert inside(file) == {"grid._token": 1, "__dict__": 1, "replace_in": 1, "SQL": 1}
