"""Simulate a Flower ClientApp of your own, in this process or in one for each silo; record it."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Context, Message
from flwr.clientapp import ClientApp

from coterie import wire
from coterie.engine.inprocess import InProcessGrid, NodeConfig
from coterie.engine.port import Engine
from coterie.server.machine.local import LocalFederation, SiloSpec
from coterie.server.paths import default_runs_dir, place
from coterie.server.report.shown import NOTHING, Shown
from coterie.server.runs.record import OWN_APP
from coterie.server.runs.run import folder_name
from coterie.server.study.comparison import Repeat
from coterie.server.study.comparison_file import ALONE as LOCAL
from coterie.server.study.comparison_file import CompareFile, Comparison, slug
from coterie.server.study.given import require_names
from coterie.server.study.playing import shown_here
from coterie.server.study.recorded import Recorded, strategy_name
from coterie.server.study.result import Result
from coterie.strategies.errors import refused
from coterie.strategies.registry import STRATEGIES, strategy_class
from coterie.strategies.rounds.nodes import NodeRoster
from coterie.strategies.rounds.options import underscored
from coterie.strategies.strategy import GroupStrategy
from coterie.tasks.toml import checked

ALONE = "independent"
ROUNDS = 20


App = ClientApp | Mapping[str, ClientApp]
Engines = Callable[[NodeConfig], AbstractContextManager[Engine]]
"""Provides the engine of a run with a run config, for one run at a time."""


def is_app(what: Any) -> TypeGuard[App]:
    """Return whether this is a ClientApp, or silo → its ClientApp."""
    apps = list(what.values()) if isinstance(what, Mapping) else [what]
    return bool(apps) and all(isinstance(app, ClientApp) for app in apps)


class Nodes:
    """The nodes of a simulation: one app for all, or one for each, and the nodes' configs."""

    def __init__(
        self, what: App, silos: int | Mapping[str, NodeConfig] | Sequence[NodeConfig] | None
    ) -> None:
        apart = isinstance(what, Mapping)
        if isinstance(what, Mapping) and silos is None:
            silos = len(what)
        if not silos or isinstance(silos, bool) or (isinstance(silos, int) and silos < 1):
            raise refused(
                "a ClientApp needs silos: their number, a list of node configs, or a mapping of "
                f"names to node configs. Got {silos!r}."
            )
        if isinstance(silos, int):
            configs: list[NodeConfig] = [
                {"partition-id": number, "num-partitions": silos} for number in range(silos)
            ]
        else:
            configs = list(silos.values() if isinstance(silos, Mapping) else silos)
        named = what if isinstance(what, Mapping) else silos if isinstance(silos, Mapping) else None
        if named is not None:
            require_names(named)
        names = list(named) if named is not None else [f"silo-{n}" for n in range(len(configs))]
        if apart and isinstance(silos, Mapping) and set(silos) != set(names):
            raise refused(f"apps and node configs must have the same silos. Got {names}, {silos}.")
        if isinstance(silos, Mapping):
            configs = [silos[name] for name in names]
        if len(configs) != len(names):
            raise refused(f"{len(names)} ClientApps need as many node configs. Got {len(configs)}.")
        self.configs = configs
        self.names = dict(enumerate(names, start=1))
        self._apps = list(what.values()) if isinstance(what, Mapping) else [what] * len(names)

    def called(self, run_config: NodeConfig) -> AbstractContextManager[Engine]:
        """Provide the nodes in this process, as at the start of a run."""
        return nullcontext(InProcessGrid(self._answer, self.configs, run_config=run_config))

    def _answer(self, message: Message, context: Context) -> Message:
        return self._apps[message.metadata.dst_node_id - 1](message, context)

    @contextmanager
    def started(self, home: Path) -> Iterator[Engines]:
        """Provide the nodes as resident silos, a process each; their logs are in ``home``.

        Raises:
            FederationError: another process cannot import an app, or a silo did not start.
        """
        found = list(map(importable, self._apps))
        path = {"PYTHONPATH": os.pathsep.join(place or str(Path.cwd()) for place in sys.path)}
        with LocalFederation(home, executes=False) as federation:
            for name, app, config in zip(self.names.values(), found, self.configs, strict=True):
                options = {key: json.dumps(value) for key, value in config.items()}
                federation.start_silo(SiloSpec(name, app=app, options=options), environment=path)
            federation.wait_for_silos(len(found))
            yield federation.run_app


def importable(app: ClientApp) -> str:
    """Return ``module:attribute`` by which another process imports an app.

    Raises:
        FederationError: no module has it, but a notebook or the program itself.
    """
    for name, module in sorted(sys.modules.items()):
        if name not in ("__main__", "__mp_main__"):
            for attribute, value in list(getattr(module, "__dict__", {}).items()):
                if value is app:
                    return f"{name}:{attribute}"
    raise refused(
        "a silo's process imports its ClientApp, and no imported module has this one under a name. "
        "Move it from the notebook, program or function that makes it into a module's top level, "
        "and import it from there; or leave processes out."
    )


def simulate_app(
    what: App,
    silos: int | Mapping[str, NodeConfig] | Sequence[NodeConfig] | None,
    *,
    strategy: str | GroupStrategy,
    initial_arrays: ArrayRecord | wire.Model | None,
    run_config: NodeConfig,
    train_config: NodeConfig,
    runs_dir: str | Path | None,
    processes: int,
    home: Path | None,
    shown: Shown,
    rounds: int = ROUNDS,
    label: str = "",
    **options: Any,
) -> Result:
    """Run a strategy over apps and return the result; see ``coterie.simulate``.

    ``home`` is for the logs of processes; ``options`` are those of the strategy's class.
    """
    nodes, made = Nodes(what, silos), strategy_of_app(strategy, options)
    if processes not in (0, len(nodes.names)):
        raise refused(
            f"processes must be 0, or {len(nodes.names)}: one for each silo. Got {processes}."
        )
    root, name = place(runs_dir) if runs_dir else default_runs_dir(), strategy_name(made)
    folder = root / folder_name(label or name, time.time_ns() // 1000)
    initial = arrays_of(initial_arrays)
    home = home or root.parent / time.strftime("simulation-%Y%m%d-%H%M%S")
    with nodes.started(home) if processes else nullcontext(nodes.called) as engines:
        _play(
            *(nodes, engines, made, initial, rounds, run_config, train_config),
            folder=folder,
            label=label,
            shown=shown,
        )
    return Result(folder)


def _play(
    nodes: Nodes,
    engines: Engines,
    strategy: GroupStrategy,
    initial: ArrayRecord,
    rounds: int,
    run_config: NodeConfig,
    train_config: NodeConfig,
    *,
    folder: Path,
    label: str,
    shown: Shown,
) -> None:
    made = copy(strategy)
    made.on_round = made.on_round or (lambda report: None)  # ``shown`` shows the run
    shows = shown_here(shown, label or strategy_name(made), folder)
    with engines(run_config) as engine, shows:
        if isinstance(made.roster, NodeRoster):
            here = isinstance(engine, InProcessGrid)  # a silo's process states its name
            names = dict(nodes.names) if here else {}
            made.roster = NodeRoster(min_silos=len(nodes.names), names=names, ask=not here)
        run = Recorded(made, folder.parent, label=label, folder=folder)
        run.start(
            engine,
            initial,
            num_rounds=rounds,
            train_config=ConfigRecord(dict(train_config)) if train_config else None,
        )


@dataclass(frozen=True)
class AppComparison(Comparison):
    """A comparison over ClientApps, whose test data are the same in every run."""

    nodes: Nodes | None = None
    initial: ArrayRecord | None = None
    run_config: NodeConfig = field(default_factory=dict)
    train_config: NodeConfig = field(default_factory=dict)
    made: Mapping[str, GroupStrategy] = field(default_factory=dict)
    rounds: int = ROUNDS

    @classmethod
    def of(
        cls,
        content: Mapping[str, Any],
        what: App,
        silos: int | Mapping[str, NodeConfig] | Sequence[NodeConfig] | None,
        strategies: Sequence[Any],
        *,
        initial_arrays: ArrayRecord | wire.Model | None,
        run_config: NodeConfig,
        train_config: NodeConfig,
        rounds: int = ROUNDS,
        **options: Any,
    ) -> AppComparison:
        """Return the comparison of these strategies; arguments as of ``coterie.compare``."""
        if options:
            raise refused(
                f"{sorted(options)[0]} does not belong to a ClientApp's runs. Give a strategy's "
                'options with it, as in {"strategy": "hcct", "alpha": 50}, and the app\'s as '
                "train_config."
            )
        nodes, initial = Nodes(what, silos), arrays_of(initial_arrays)
        names = [{"name": name} for name in nodes.names.values()]
        shown = {**content, "task": OWN_APP, "silos": names}
        file = checked(CompareFile, shown, "the comparison", refused)
        made: dict[str, GroupStrategy] = {}
        runs: dict[str, dict[str, Any]] = {}
        for chosen, entry in zip(strategies, content["strategies"], strict=True):
            own = {key: value for key, value in entry.items() if key not in ("name", "strategy")}
            given = chosen if isinstance(chosen, GroupStrategy) else str(entry["strategy"])
            one = strategy_of_app(given, own)
            name = str(entry.get("name") or entry["strategy"])
            if name in made:
                raise refused(f"two strategies are called {name!r}. Give each a name.")
            made[name] = one
            runs[name] = {"strategy": strategy_name(one), **one.algorithm.plain()}
        if not any(keys["strategy"] == ALONE for keys in runs.values()):
            added = f"{LOCAL} (added)" if LOCAL in made else LOCAL
            made = {added: strategy_of_app(ALONE, {}), **made}
            runs = {added: {"strategy": ALONE}, **runs}
        for keys in runs.values():
            keys |= {"rounds": rounds, **run_config, **train_config}
        return cls(
            file,
            runs,
            OWN_APP,
            digest=wire.model_hash(wire.decode_arrays(initial))[:16],
            nodes=nodes,
            initial=initial,
            run_config=run_config,
            train_config=train_config,
            made=made,
            rounds=rounds,
        )

    def drawn(self) -> set[str]:
        return set()

    @contextmanager
    def playing(self, repeat: Repeat, home: Path | None) -> Iterator[Callable[[str, Path], None]]:
        """Provide what plays a strategy of a repeat and keeps its record in a folder.

        ``home`` is for the logs of processes; None: the apps are called in this process.
        """
        assert self.nodes is not None
        started = nullcontext(self.nodes.called) if home is None else self.nodes.started(home)
        with started as engines:
            yield partial(self._play, repeat, engines)

    def _play(self, repeat: Repeat, engines: Engines, name: str, folder: Path) -> None:
        assert self.nodes is not None and self.initial is not None
        _play(
            self.nodes,
            engines,
            self.made[name],
            self.initial,
            self.rounds,
            self.run_config,
            {**self.train_config, wire.SEED: repeat.seed},
            folder=folder,
            label=f"{slug(name)}-{repeat.suffix}",
            shown=NOTHING,
        )


def strategy_of_app(strategy: str | GroupStrategy, options: Mapping[str, Any]) -> GroupStrategy:
    """Return a strategy by its name and options, or the one that is given.

    Raises:
        FederationError: there is no such strategy, or an option is unknown or out of bounds.
    """
    if isinstance(strategy, GroupStrategy):
        if options:
            raise refused(
                f"{type(strategy).__name__} has its options already: leave "
                f"{', '.join(sorted(options))} out, or name the strategy."
            )
        return strategy
    name = wire.strategy_of(strategy)
    if name not in STRATEGIES:
        raise refused(f"strategy must be one of {', '.join(STRATEGIES)}. Got {strategy!r}.")
    return strategy_class(STRATEGIES[name].public)(
        **{underscored(key): value for key, value in options.items()}
    )


def arrays_of(initial: ArrayRecord | wire.Model | None) -> ArrayRecord:
    """Return the initial model as Flower sends it."""
    if isinstance(initial, ArrayRecord):
        return initial
    if not isinstance(initial, Mapping) or not initial:
        raise refused(
            "a ClientApp needs initial_arrays: an ArrayRecord, or a mapping of names to arrays, "
            f"such as a model's state_dict(). Got {type(initial).__name__}."
        )
    model = {name: np.asarray(array) for name, array in initial.items()}
    return wire.encode_arrays(model, packed=False)
