"""The command line that benchmarks share."""

from __future__ import annotations

import logging
import os
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.kit.runs import DEVICE
from benchmarks.kit.store import RESULTS, Entry, Store


def read(
    store: Store | None,
    doc: str | None,
    *,
    data: bool | None = False,
    parts: Iterable[str] = (),
    chosen: str = "",
    rows: Iterable[str] = (),
    seeds: int = 0,
    rounds: int | None = None,
    **own: Any,
) -> Namespace:
    """Read the command line; with ``--table-only`` write the tables from the store and end.

    Args:
        store: where results are kept; None of a benchmark that keeps none.
        doc: of the benchmark, whose first line is the help's.
        data: a folder with data sets is needed; None: it may be given.
        parts: names for ``--parts``; ``chosen`` of them if not given, by default all.
        rows: names for ``--only``.
        seeds: default of ``--seeds``; 0 leaves the option out.
        rounds: default of ``--rounds``; 0 stands for the paper's. None leaves the option out.
        own: further options of this benchmark, by name: arguments of ``add_argument``.

    Returns:
        The options given: ``store`` in the folder chosen; ``parts`` and ``only`` as lists.
    """
    parts, rows = list(parts), list(rows)
    summary, usage, *_ = [*(doc or "").split("\n\n"), ""]
    parser = ArgumentParser(description=summary, epilog=usage.strip())
    if data is not False:
        parser.add_argument("--data", default="", metavar="FOLDER", help="with the data sets")
        parser.add_argument("--device", default="cpu", help="on which silos train, such as cuda")
    if parts:
        names = ",".join(parts)
        parser.add_argument(
            "--parts", default=chosen or names, help=f"of {names}".replace("%", "%%")
        )
    if rows:
        parser.add_argument("--only", default="", help="names of rows, separated by ';'")
    if seeds:
        parser.add_argument("--seeds", type=int, default=seeds, help="how many, from 0")
    if rounds is not None:
        papers = "" if rounds else "; 0: each part's usual number"
        parser.add_argument("--rounds", type=int, default=rounds, help=f"of a run{papers}")
    for name, arguments in own.items():
        parser.add_argument(f"--{name.replace('_', '-')}", **arguments)
    if store is not None:
        parser.add_argument("--results", type=Path, default=RESULTS, help="folder for the results")
        parser.add_argument("--table-only", action="store_true", help="measure nothing")
    given = parser.parse_args()
    if data is not False:
        os.environ[DEVICE] = given.device
    logging.getLogger("coterie").setLevel(logging.ERROR)
    if store is not None:
        given.store = store.at(given.results)
        if given.table_only:
            given.store.write()
            parser.exit(0, given.store.text())
    if data and not given.data:
        parser.error("name the folder with the data sets: --data FOLDER")
    if parts:
        given.parts = _names(parser, given.parts, ",", parts)
    if rows:
        given.only = _names(parser, given.only, ";", rows) or rows
    return given


def typed(module: str, part: str, runs: Sequence[Entry], *, rounds: int) -> str:
    """What to type for these runs of one part; ``rounds``: of the paper, which need not be said."""
    options = f'--parts "{part}" --seeds {1 + max(run["seed"] for run in runs)}'
    other = next((run["rounds"] for run in runs if run["rounds"] != rounds), 0)
    options += f" --rounds {other}" if other else ""
    return with_device(f"python -m benchmarks.papers.{module} --data FOLDER {options}", runs)


def with_device(command: str, runs: Sequence[Entry]) -> str:
    """The command as Markdown; of runs on a GPU with ``--device``, followed by the GPU's name."""
    on = [run["device"] for run in runs if "device" in run]
    if not on:
        return f"`{command}`"
    share = "" if len(on) == len(runs) else f"{len(on)} of {len(runs)} runs: "
    return f"`{command} --device cuda` ({share}{', '.join(sorted(set(on)))})"


def _names(parser: ArgumentParser, text: str, separator: str, known: list[str]) -> list[str]:
    names = [name.strip() for name in text.split(separator) if name.strip()]
    for name in names:
        if name not in known:
            parser.error(f"there is no {name!r}. There are: {', '.join(known)}.")
    return names
