"""Flower's examples as they are, but for the strategy's line and a stand-in for their data sets.

``COTERIE_FLOWER_EXAMPLES`` names the folder ``examples`` of a checkout of Flower.
"""

from __future__ import annotations

import ast
import os
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.common.config import flatten_dict

FOLDER = os.environ.get("COTERIE_FLOWER_EXAMPLES", "")
STANDIN = Path(__file__).parent / "standin"
"""To be put on the path of an example."""
SILOS = 4
KINDS = [[0, 2], [1, 3]]
"""Partitions whose labels agree."""

IN_GROUPS = (
    "PerGroup(FirstStage(HCCT(min_silos=4), arrays, num_rounds=3, {train}), "
    "lambda group: FedAvg(min_available_nodes=1, min_train_nodes=1, min_evaluate_nodes=1))"
)
STRATEGIES = {
    "hcct": "HCCT(min_silos=4)",
    "fedgroup": "FedGroup(num_groups=2, min_silos=4)",
    "ifca": "IFCA(num_groups=2, min_silos=4)",
    "auto": "Auto(min_silos=4)",
    "pergroup": IN_GROUPS,
}
"""A strategy's name → its line in a ServerApp."""


@dataclass(frozen=True, eq=False)
class Example:
    """An app of Flower's.

    Attributes:
        name: of its folder.
        metrics: columns of its ClientApp's metrics in a result.
        config: what is changed of its run config.
        train: the first stage's training configuration, where the app needs one.
    """

    name: str
    metrics: tuple[str, ...]
    config: dict[str, Any]
    train: str = ""

    def manifest(self, strategy: str) -> dict[str, Any]:
        """Its ``pyproject.toml``, with the run config that these tests need."""
        found = tomllib.loads(Path(FOLDER, self.name, "pyproject.toml").read_text("utf-8"))
        app = found["tool"]["flwr"]["app"]
        rounds = {"num-server-rounds": 6 if strategy == "auto" else 3}
        app["config"] = {**flatten_dict(app["config"]), **self.config, **rounds}
        return found

    def files(self, line: str) -> dict[str, bytes]:
        """Its files, with another line for the strategy."""
        root = Path(FOLDER, self.name)
        found = {str(file.relative_to(root)): file.read_bytes() for file in root.rglob("*.py")}
        server = next(name for name in found if name.endswith("server_app.py"))
        line = line.format(train=self.train)
        found[server] = with_strategy(found[server].decode(), line).encode()
        return found

    def write(self, folder: Path, line: str) -> None:
        """Write its files into a folder."""
        for name, content in self.files(line).items():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_bytes(content)


SKLEARN = Example("quickstart-sklearn-tabular", ("accuracy", "test_logloss"), {})
PYTORCH = Example(
    "quickstart-pytorch",
    ("error", "loss"),
    {"learning-rate": 0.01, "local-epochs": 2},
    'train_config=ConfigRecord({"lr": lr})',
)
XGBOOST = Example("quickstart-xgboost", ("auc",), {"params.nthread": 1})


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
