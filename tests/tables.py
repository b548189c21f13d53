"""The declarations of tables that many tests train on, and silos that have them."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any


def declaration(
    *numeric: str,
    name: str = "study",
    target: str = "ill",
    network: str = "mclr",
    scale: str = "",
    **categorical: Iterable[str],
) -> str:
    """Return the task file of a table with the classes no and yes; columns by their names."""
    text = f'kind = "table"\nname = "{name}"\ntarget = "{target}"\nclasses = ["no", "yes"]\n'
    text += f'numeric = {_listed(numeric)}\nnetwork = "{network}"\n'
    text += f'scale = "{scale}"\n' if scale else ""
    text += "[categorical]\n" if categorical else ""
    return text + "".join(f"{column} = {_listed(own)}\n" for column, own in categorical.items())


def written(file: Path, text: str) -> Path:
    """Write a task file, in a new folder where there is none; return where it is."""
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def table_node(
    task: Path, name: str, header: str, rows: Iterable[str], **settings: Any
) -> dict[str, Any]:
    """Write a table next to its task file; return the node of a silo that has it.

    Args:
        header: names of the columns with commas between them; so are the cells of each row.
        settings: of the silo, beyond its name, task, data and device.
    """
    data = task.with_name(f"{name}.csv")
    data.write_text("\n".join([header, *rows]))
    own = {"name": name, "task": str(task), "data.data": str(data)}
    return {**own, "device": "cpu", "threads": 1, **settings}


def site(task: Path, name: str, x: Any, **targets: Iterable[object]) -> dict[str, Any]:
    """Write a table next to its task file; return the node of a silo that grows trees of it.

    Args:
        x: (n, columns): x0, x1 and so on; NaN is an empty cell.
        targets: (n,) each, by the names of their columns.
    """
    header, rows = ",".join([*(f"x{i}" for i in range(x.shape[1])), *targets]), []
    for row, *own in zip(x.tolist(), *targets.values(), strict=True):
        rows.append(",".join(["" if v != v else str(v) for v in row] + [str(v) for v in own]))
    return table_node(task, name, header, rows, sums="trees")


def _listed(words: Iterable[str]) -> str:
    return json.dumps(list(words), ensure_ascii=False)
