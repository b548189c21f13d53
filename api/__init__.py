"""Federated learning that finds out who should train with whom, from Python.

    import coterie

    silos = {"north": (x_north, y_north), "south": (x_south, y_south)}
    result = coterie.simulate(silos, rounds=10)
    result.groups, result.metrics()

``simulate`` plays one run and ``compare`` several, on this machine. ``recorded`` keeps the record
of a run in a Flower app of your own. Names are imported on first use: ``import coterie`` alone
loads nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coterie.server.study.compare import compare as compare
    from coterie.server.study.recorded import recorded as recorded
    from coterie.server.study.result import ComparisonResult as ComparisonResult
    from coterie.server.study.result import Report as Report
    from coterie.server.study.result import Result as Result
    from coterie.server.study.result import load as load
    from coterie.server.study.simulate import simulate as simulate

MODULES = {
    "simulate": "coterie.server.study.simulate",
    "compare": "coterie.server.study.compare",
    "load": "coterie.server.study.result",
    "recorded": "coterie.server.study.recorded",
    "Result": "coterie.server.study.result",
    "ComparisonResult": "coterie.server.study.result",
    "Report": "coterie.server.study.result",
}
"""Name → the module that has it."""

__all__ = list(MODULES)


def __getattr__(name: str) -> Any:
    if name not in MODULES:
        raise AttributeError(f"module 'coterie' has no attribute {name!r}")
    return getattr(import_module(MODULES[name]), name)
