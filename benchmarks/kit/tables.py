"""Markdown: tables, and pages of them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from benchmarks.kit.store import Entry

SEEDS = 3
"""Of every row of a table, at least."""

Column = str | Callable[[Any], str]
"""How an entry is shown: a format of its fields, or a function."""


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


def unfinished(done: Mapping[str, int], *, of: int = SEEDS) -> str:
    """A sentence that names what has fewer runs than it should; empty if nothing has.

    Args:
        done: what is shown → its runs of full length.
        of: how many each should have.
    """
    short: dict[int, list[str]] = {}
    for name, count in sorted(done.items(), key=lambda item: -item[1]):
        if count < of:
            short.setdefault(count, []).append(name)
    parts = (f"{count} of {of}: {'; '.join(names)}" for count, names in short.items())
    return f"**Not finished**, runs of full length: {'. '.join(parts)}." if short else ""


def braces(groups: Iterable[Iterable[int]]) -> str:
    """Groups of numbers: ``{1,2} {3}``."""
    return " ".join("{" + ",".join(map(str, group)) + "}" for group in groups)


def columns(
    entries: Iterable[Entry], shown: Mapping[str, Column], *, rule: str = "---"
) -> list[str]:
    """A table with a row per entry.

    Args:
        entries: of a store.
        shown: head → such as ``{seconds:.1f}``, see ``Column``.
        rule: see ``table``.
    """
    rows = (
        [how.format(**entry) if isinstance(how, str) else how(entry) for how in shown.values()]
        for entry in entries
    )
    return table(list(shown), rows, rule=rule)


def page(*blocks: str | Sequence[str]) -> str:
    """Blocks with an empty line after each: a text, or lines. Empty blocks are left out."""
    texts = (block if isinstance(block, str) else "\n".join(block) for block in blocks)
    return "\n".join(f"{text}\n" for text in texts if text)
