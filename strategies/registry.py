"""Every strategy by name, one row each; its behaviour and options are in its own module.

A new strategy is an algorithm in its own module and a row here; its keys in files and on the
command line, their bounds, help and documentation come from its class. One outside the project is
named ``module:Class``, or by an entry point of the group ``coterie.strategies``.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, Any

from coterie.strategies.errors import refused

if TYPE_CHECKING:
    from coterie.strategies.rounds.algorithm import Algorithm
    from coterie.strategies.strategy import GroupStrategy


@dataclass(frozen=True)
class Row:
    """One strategy, by its name in files and on the command line.

    Attributes:
        public: ``from coterie.strategies import <public>``.
        module: of its algorithm, below ``coterie.strategies`` unless it is ``elsewhere``.
        algorithm: name of the algorithm's class; empty if it is ``public``.
        fixed: options that cannot be set in this strategy.
        base: name of the strategy that it wraps, whose keys it also has.
        takes_generators: whether FedGenP's generators can wrap it.
    """

    name: str
    public: str
    module: str
    algorithm: str = ""
    fixed: Mapping[str, Any] = field(default_factory=dict, compare=False)
    base: str = ""
    takes_generators: bool = False
    elsewhere: bool = False

    def load(self) -> type[Algorithm[Any]]:
        """Return the algorithm's class.

        Raises:
            FederationError: one from elsewhere cannot be imported, or is of another type.
        """
        if self.elsewhere:
            return _from_elsewhere(self)
        module = import_module(f"coterie.strategies.{self.module}")
        algorithm: type[Algorithm[Any]] = getattr(module, self.algorithm or self.public)
        return algorithm


def _from_elsewhere(row: Row) -> type[Algorithm[Any]]:
    from coterie.strategies.rounds.algorithm import Algorithm

    try:
        found = getattr(import_module(row.module), row.public, None)
    except Exception as error:  # of somebody else's code
        raise refused(
            f"strategy {row.name!r} cannot be imported: {type(error).__name__}: {error}. It must "
            "be installed, or in a folder of PYTHONPATH, where the coordinator runs."
        ) from None
    if not (isinstance(found, type) and issubclass(found, Algorithm)):
        raise refused(
            f"strategy {row.name!r} must be a class derived from coterie.strategies.own.Algorithm. "
            f"Got {found!r}."
        )
    return found


ROWS = (
    Row("independent", "Independent", "plain.fedavg"),
    Row("fedavg", "FedAvg", "plain.fedavg", takes_generators=True),
    Row("auto", "Auto", "auto.algorithm"),
    Row("hcct", "HCCT", "hcct.algorithm", takes_generators=True),
    Row("fedgroup", "FedGroup", "fedgroup.algorithm", takes_generators=True),
    Row("fedcollab", "FedCollab", "fedcollab.algorithm", takes_generators=True),
    Row("maxfl", "MAXFL", "rivals.maxfl"),
    Row("fedfa", "FedFA", "rivals.one_model"),
    Row("ifca", "IFCA", "rivals.flsc", algorithm="FLSC", fixed={"soft_groups": 1}),
    Row("flsc", "FLSC", "rivals.flsc"),
    Row("fesem", "FeSEM", "rivals.fesem"),
    Row("cfl", "CFL", "rivals.cfl"),
    Row("flhc", "FLHC", "rivals.one_shot"),
    Row("kmeans", "KMeans", "rivals.one_shot"),
    Row("fednova", "FedNova", "rivals.one_model"),
    Row("perfedavg", "PerFedAvg", "rivals.one_model"),
    Row("pfedme", "PFedMe", "rivals.one_model"),
    Row("apfl", "APFL", "rivals.one_model"),
    Row("pfedgraph", "PFedGraph", "rivals.pfedgraph"),
    Row("fedgenp", "FedGenP", "fedgenp.algorithm", base="fedavg", takes_generators=True),
    Row("fedgen", "FedGen", "fedgenp.fedgen", base="fedavg"),
    Row("fedensemble", "FedEnsemble", "rivals.fedensemble", base="fedavg"),
)
TREES = Row("trees", "Trees", "coterie.features.sums.trees.coordinator", elsewhere=True)
"""The strategy for networks of trees, which otherwise only ``auto`` trains."""
ENTRY_POINTS = "coterie.strategies"
"""Group of the entry points by which other packages name their strategies."""
STRATEGIES = {row.name: row for row in ROWS}
"""Name → row, of strategies that train any network."""
EVERY = {**STRATEGIES, TREES.name: TREES}
"""Name → row, of all strategies."""
DEFAULT = "auto"
"""Name of the strategy of a run that names none."""
PUBLIC = {row.public: row for row in EVERY.values()}
"""Name of the class → row."""


@cache
def row_of(name: str) -> Row | None:
    """Return the row of a built-in strategy, of ``module:Class``, or of an entry point; or None."""
    if name in EVERY:
        return EVERY[name]
    found = [point.value for point in entry_points(group=ENTRY_POINTS) if point.name == name]
    module, colon, public = (found[0] if found else name).partition(":")
    return Row(name, public, module, elsewhere=True) if module and colon and public else None


@cache
def strategy_class(public: str) -> type[GroupStrategy]:
    """Return the Flower strategy ``public``, as ``coterie.strategies`` exports it."""
    row = PUBLIC[public]
    return _strategy_of(row.load(), name=public, fixed=row.fixed)


def _strategy_of(
    algorithm: type[Algorithm[Any]], *, name: str, fixed: Mapping[str, Any]
) -> type[GroupStrategy]:
    """Return the Flower strategy class of an algorithm: ``HCCT(alpha=50, round_timeout=60)``.

    Args:
        algorithm: its fields become the strategy's arguments.
        fixed: fields that cannot be set.
    """

    from coterie.strategies.rounds.options import wrong_options
    from coterie.strategies.strategy import GroupStrategy

    def make(**options: Any) -> Algorithm[Any]:
        if stray := sorted(fixed.keys() & options.keys()):
            raise wrong_options([f"unknown key {key!r}: {name} sets it" for key in stray])
        return algorithm(**fixed, **options)

    made = type(
        name,
        (GroupStrategy,),
        {
            "kind": staticmethod(make),
            "__doc__": algorithm.__doc__,
            "__module__": "coterie.strategies",
        },
    )
    engine = inspect.signature(GroupStrategy.__init__).parameters.values()
    own = [
        inspect.Parameter(field, inspect.Parameter.KEYWORD_ONLY, default=info.default)
        for field, info in algorithm.model_fields.items()
        if field not in fixed
    ]
    loop = [p for p in engine if p.kind is p.KEYWORD_ONLY]
    made.__signature__ = inspect.Signature([*own, *loop])  # type: ignore[attr-defined]
    return made
