"""Flower's own apps as ``flwr new`` wrote them, but for the strategy's line and the data.

They are templates in a wheel of Flower's (``flower.txt``), which ``make setup-dev`` downloads.
"""

from __future__ import annotations

import ast
import importlib
import re
import sys
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from string import Template
from types import SimpleNamespace
from typing import Any

import pytest
from flwr.app import Context, RecordDict
from flwr.common.config import flatten_dict
from threadpoolctl import threadpool_limits

from coterie.engine.inprocess import InProcessGrid
from coterie.server.study.result import Result

HERE = Path(__file__).parent
STANDIN = HERE / "standin"
"""To be put on the path of an app."""
PIN = (HERE / "flower.txt").read_text("utf-8")
WHEEL = Path(sys.prefix, "flower", f"flwr-{re.findall('flwr==(.+?) ', PIN)[0]}-py3-none-any.whl")
needs_apps = pytest.mark.skipif(
    not WHEEL.exists(), reason=f"{WHEEL} is missing. With a network, `make setup-dev` downloads it."
)

SILOS = 4
KINDS = [[0, 2], [1, 3]]
"""Partitions whose labels agree."""
ALONE = [[number] for number in range(SILOS)]
BY_HAND = [[f"silo-{number}" for number in kind] for kind in KINDS]

AVERAGING = {
    "hcct": "HCCT(min_silos=4)",
    "fedgroup": "FedGroup(num_groups=2, min_silos=4)",
    "ifca": "IFCA(num_groups=2, min_silos=4)",
    "auto": "Auto(min_silos=4)",
    "pergroup": "PerGroup(FirstStage(HCCT(min_silos=4), arrays, num_rounds=3{train}), "
    "lambda group: FedAvg(fraction_train=1.0, min_available_nodes=1))",
}
TREES = {
    "pergroup": "PerGroup({groups}, lambda group: FedXgbBagging(), min_silos=4, ask_names=True)"
}


@dataclass(frozen=True, eq=False)
class Example:
    """An app of Flower's.

    Attributes:
        framework: as its templates are called.
        metrics: columns of its ClientApp's metrics in a result.
        strategies: a strategy's name → its line in the ServerApp.
        train: further arguments of a first stage.
    """

    framework: str
    metrics: tuple[str, ...]
    strategies: Mapping[str, str]
    train: str = ""

    @property
    def name(self) -> str:
        """Of its package."""
        return f"quickstart_{self.framework}"

    def template(self, name: str) -> str:
        """A file of the app, filled in as ``flwr new`` did."""
        with zipfile.ZipFile(WHEEL) as wheel:
            found = wheel.read(f"flwr/cli/new/templates/app/{name}.tpl").decode()
        app = self.name.replace("_", "-")
        return Template(found).substitute(
            project_name=app,
            package_name=app,
            import_name=self.name,
            framework_str=self.framework,
            username="tests",
        )

    def manifest(self, strategy: str) -> dict[str, Any]:
        """Its ``pyproject.toml``. ``auto`` needs six rounds, and two cores not sixteen threads."""
        found = tomllib.loads(self.template(f"pyproject.{self.framework}.toml"))
        app = found["tool"]["flwr"]["app"]
        more = {"num-server-rounds": 6} if strategy == "auto" else {}
        more |= {"params.nthread": 1} if self.framework == "xgboost" else {}
        app["config"] = flatten_dict(app["config"]) | more
        return found

    def files(self, strategy: str, **filled: Any) -> dict[str, bytes]:
        """Its files, with a line for another strategy, in which ``filled`` is filled in."""
        found = {
            f"{self.name}/{file}.py": self.template(f"code/{part}.py")
            for file, part in {
                "__init__": "__init__",
                "client_app": f"client.{self.framework}",
                "server_app": f"server.{self.framework}",
                "task": f"task.{self.framework}",
            }.items()
        }
        server = f"{self.name}/server_app.py"
        line = self.strategies[strategy].format(train=self.train, **filled)
        found[server] = with_strategy(found[server], line)
        return {name: text.encode() for name, text in found.items()}

    def write(self, folder: Path, strategy: str, **filled: Any) -> None:
        """Write its files into a folder."""
        for name, content in self.files(strategy, **filled).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


SKLEARN = Example("sklearn", ("accuracy", "test_logloss", "loss"), AVERAGING)
PYTORCH = Example(
    "pytorch",
    ("eval_loss", "eval_acc", "loss", "error"),
    AVERAGING,
    ', train_config=ConfigRecord({"lr": lr})',
)
XGBOOST = Example("xgboost", ("auc",), TREES)
CASES = [(app, strategy) for app in (SKLEARN, XGBOOST, PYTORCH) for strategy in app.strategies]


def with_strategy(source: str, line: str) -> str:
    """Return a ServerApp with another strategy."""
    (old,) = (
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "strategy"
    )
    assert old.end_lineno
    names = "HCCT, IFCA, Auto, FedGroup, FirstStage, PerGroup"
    new = f"{' ' * old.col_offset}from coterie.strategies import {names}; strategy = {line}"
    lines = source.splitlines()
    return "\n".join([*lines[: old.lineno - 1], new, *lines[old.end_lineno :], ""])


# ---------------------------------------------------------------- in this process


class FlowersRun(InProcessGrid):
    """A grid of ``flwr run``, which has started run 7."""

    run = SimpleNamespace(run_id=7)  # type: ignore[assignment]


def forget_modules() -> None:
    """Let the next app import its own modules."""
    for name in [*sys.modules]:
        if name.startswith(("quickstart_", "flwr_datasets")):
            del sys.modules[name]


def in_process(
    example: Example,
    strategy: str,
    folder: Path,
    patch: pytest.MonkeyPatch,
    *,
    partitions: Sequence[int] = tuple(range(SILOS)),
    **filled: Any,
) -> Result:
    """Run an app here; ``partitions`` are those of its nodes, in order."""
    example.write(folder, strategy, **filled)
    app = example.manifest(strategy)["tool"]["flwr"]["app"]
    with patch.context() as here, threadpool_limits(1):
        here.setenv("COTERIE_RUNS", str(folder / "runs"))
        here.chdir(folder)
        here.syspath_prepend(STANDIN)
        here.syspath_prepend(folder)
        forget_modules()
        try:
            server, client = (
                getattr(importlib.import_module(module), name)
                for module, name in (
                    app["components"][part].split(":") for part in ("serverapp", "clientapp")
                )
            )
            nodes = [{"partition-id": one, "num-partitions": SILOS} for one in partitions]
            grid = FlowersRun(client, nodes, run_config=app["config"])
            server(grid, Context(7, 0, {}, RecordDict(), app["config"]))
        finally:
            forget_modules()
    (found,) = (folder / "runs").iterdir()
    return Result(found)


def partition(result: Result, name: str) -> int:
    """Which partition a silo has: its number of training rows tells."""
    return (round(result.run.silos[name].num_examples / 0.8) - 100) // 10


def check(result: Result, example: Example, strategy: str) -> None:
    """Every silo is with its kind and has its app's metrics; ``auto`` has no evidence here."""
    assert result.run.status == "completed", result.run.error
    groups = sorted(sorted(partition(result, name) for name in group) for group in result.groups)
    assert groups == (ALONE if strategy == "auto" else KINDS), (example.name, strategy)
    rows = result.metric_rows
    assert len(rows) == SILOS
    for row in rows:
        assert all(row[name] == row[name] for name in example.metrics), (example.name, row)
