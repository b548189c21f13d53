"""Write every table anew from what is stored: ``python -m benchmarks.kit``. Nothing is measured."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator
from importlib import import_module

import benchmarks
from benchmarks.kit.store import Store


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
