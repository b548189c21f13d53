"""Rows as a data frame where pandas is installed, otherwise as a list of dicts."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import import_module
from typing import Any

Rows = list[dict[str, Any]]


def frame(rows: Rows) -> Any:
    """Return a ``pandas.DataFrame`` of the rows if pandas is installed, else the rows."""
    try:
        pandas = import_module("pandas")
    except ImportError:
        return rows
    return pandas.DataFrame(rows)


def table(rows: Rows, columns: Sequence[str] = ()) -> str:
    """Return rows as an HTML table. Floats have four figures."""
    columns = columns or (list(rows[0]) if rows else ())
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = [f"<tr>{''.join(_cell(row.get(column)) for column in columns)}</tr>" for row in rows]
    return f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(lines)}</tbody></table>"


def _cell(value: Any) -> str:
    text = "" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)
    return f"<td>{escape(text)}</td>"
