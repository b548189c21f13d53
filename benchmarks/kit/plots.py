"""Figures, drawn without a screen."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def panels(file: Path, rows: int, columns: int, **options: Any) -> Iterator[Any]:
    """Axes, shape (rows, columns), that are written to a file in the end.

    Args:
        file: a PNG.
        rows, columns: of panels.
        options: of ``matplotlib.pyplot.subplots``.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        rows, columns, squeeze=False, **{"layout": "constrained", **options}
    )
    yield axes
    figure.savefig(file, dpi=110)
    pyplot.close(figure)
