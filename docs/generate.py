"""Write what is made from the classes of options: ``make config``.

The defaults of all keys in ``pyproject.toml``, for Flower, the tables of keys in
``docs/reference/configuration.md``, of a silo's settings in ``docs/reference/silo-toml.md``, and of
metrics in ``docs/how-to/monitor.md``. A test says when they are out of date.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import tomli_w

from coterie.client.home.folder import SECTIONS
from coterie.client.home.schema import table
from coterie.client.resident.vital import METRICS as metrics_of_silo
from coterie.server.runs.config import defaults, tables
from coterie.server.site.metrics import METRICS as metrics_of_coordinator
from coterie.strategies.registry import EVERY

ROOT = Path(__file__).parents[1]
TITLES = {
    "run": "Every run",
    "several": "Several strategies",
    **{name: f"`{name}`" for name in EVERY},
}


def with_defaults(text: str) -> str:
    """``pyproject.toml`` with the defaults of today."""
    head, mark, rest = text.partition("[tool.flwr.app.config]\n")
    _, end, tail = rest.partition("\n[")
    return head + mark + tomli_w.dumps(defaults()) + end + tail


def with_tables(text: str) -> str:
    """A page with the tables of today between its two marks."""
    parts = [f"## {TITLES[name]}\n\n{table}" for name, table in tables().items()]
    made = "<!-- keys: made by make config -->\n\n" + "\n".join(parts) + "\n<!-- end of keys -->"
    return re.sub(r"<!-- keys: .*?<!-- end of keys -->", lambda _: made, text, count=1, flags=re.S)


def with_metrics(text: str) -> str:
    """A page with the metrics of today between its marks."""
    for whose, metrics in (
        ("the coordinator", metrics_of_coordinator),
        ("a silo", metrics_of_silo),
    ):
        rows = "\n".join(f"| `{one.name}` | {one.kind} | {one.help} |" for one in metrics)
        mark = f"<!-- metrics of {whose}: made by make config -->"
        table = f"{mark}\n\n| name | kind | |\n|---|---|---|\n{rows}\n\n<!-- end of metrics -->"
        pattern = f"{mark}.*?<!-- end of metrics -->"
        text = re.sub(pattern, lambda _, table=table: table, text, count=1, flags=re.S)
    return text


def with_settings(text: str) -> str:
    """A page with the table of a silo's settings between its two marks."""
    made = f"<!-- settings: made by make config -->\n\n{table(SECTIONS)}\n<!-- end of settings -->"
    pattern = "<!-- settings: .*?<!-- end of settings -->"
    return re.sub(pattern, lambda _: made, text, count=1, flags=re.S)


FILES: dict[Path, Callable[[str], str]] = {
    ROOT / "pyproject.toml": with_defaults,
    ROOT / "docs" / "reference" / "configuration.md": with_tables,
    ROOT / "docs" / "how-to" / "monitor.md": with_metrics,
    ROOT / "docs" / "reference" / "silo-toml.md": with_settings,
}


def stale() -> dict[Path, str]:
    """Files that are out of date → what they should hold."""
    found = {}
    for file, made in FILES.items():
        text = file.read_text(encoding="utf-8")
        if made(text) != text:
            found[file] = made(text)
    return found


if __name__ == "__main__":
    for file, text in stale().items():
        file.write_text(text, encoding="utf-8")
        print(f"{file.relative_to(ROOT)} is up to date now")
