"""What every benchmark shares: a store of results, runs in this process, tables, a command line."""

from benchmarks.kit.command import read, typed, with_device
from benchmarks.kit.plots import panels
from benchmarks.kit.runs import (
    UNBOUNDED,
    App,
    Build,
    Node,
    Strategy,
    Trained,
    best_so_far,
    mean_error,
    nodes,
    numbered_groups,
    say,
    train,
)
from benchmarks.kit.silos import Remembering, Shared, Watched
from benchmarks.kit.store import RESULTS, Entry, Store, select
from benchmarks.kit.strategies import FixedGroups, Sampled
from benchmarks.kit.tables import Column, braces, columns, page, ranking, spread, table, unfinished

__all__ = [
    "RESULTS", "UNBOUNDED", "Entry", "Store", "read", "select",
    "App", "Build", "Node", "Strategy", "Trained",
    "best_so_far", "mean_error", "nodes", "numbered_groups", "say", "train",
    "FixedGroups", "Remembering", "Sampled", "Shared", "Watched",
    "Column", "braces", "columns", "page", "panels", "ranking", "spread", "table", "typed",
    "unfinished", "with_device",
]  # fmt: skip
