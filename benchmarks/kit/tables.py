"""Markdown tables; ``python -m benchmarks.kit.tables`` writes all of them anew from stored JSON.

Nothing is measured: ``results/NAME.md`` is made of ``results/NAME.json`` alone.
"""

from __future__ import annotations

import pkgutil
from collections.abc import Iterable, Iterator, Sequence
from importlib import import_module

import numpy as np

import benchmarks
from benchmarks.kit.store import Store


def table(head: Sequence[str], rows: Iterable[Sequence[str]], *, rule: str = "---") -> list[str]:
    """Lines of a Markdown table.

    Args:
        head: of the columns.
        rows: cells, as many as heads.
        rule: under every head; ``---:`` aligns to the right.
    """
    titles = "|" + "".join(f" {title} |" if title else " |" for title in head)
    return [titles, f"|{rule}" * len(head) + "|", *("| " + " | ".join(row) + " |" for row in rows)]


def spread(values: Iterable[float], digits: int = 2, *, sign: str = "", missing: str = "–") -> str:
    """Mean ± sample deviation; the value alone if there is one, ``missing`` if none is a number."""
    known = [value for value in values if value == value]
    if not known:
        return missing
    mean = f"{np.mean(known):{sign}.{digits}f}"
    return f"{mean} ± {np.std(known, ddof=1):.{digits}f}" if len(known) > 1 else mean


def ranking(scores: dict[str, float], digits: int | None = None) -> str:
    """Names, the best first, with their scores if ``digits`` are given."""
    ordered = sorted(scores, key=lambda name: -scores[name])
    shown = "" if digits is None else f" {{:.{digits}f}}"
    return " > ".join(name + shown.format(scores[name]) for name in ordered)


def braces(groups: Iterable[Iterable[int]]) -> str:
    """Groups of numbers: ``{1,2} {3}``."""
    return " ".join("{" + ",".join(map(str, group)) + "}" for group in groups)


def stores() -> Iterator[Store]:
    """The store of every benchmark, by the attribute ``STORE`` of its module."""
    for module in pkgutil.walk_packages(benchmarks.__path__, "benchmarks."):
        if not module.name.endswith("__main__"):
            store = getattr(import_module(module.name), "STORE", None)
            if isinstance(store, Store):
                yield store


def main() -> None:
    """Write every table from what is stored."""
    for store in stores():
        store.write()
        print(store.file.with_suffix(".md"))


if __name__ == "__main__":
    main()
