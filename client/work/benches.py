"""The workbenches of this process, one for each silo that it is."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from threading import Lock

from flwr.app import Context

from coterie.client.home.personal import check_policy
from coterie.client.home.settings import SiloSettings
from coterie.client.work.training import warm_up
from coterie.client.work.workbench import Workbench, open_workbench, open_workbenches
from coterie.tasks.base import Option

_workbenches: dict[str, Workbench] = {}
_opening = Lock()


def workbench_of(context: Context) -> Workbench:
    """The workbench that belongs to this node's settings, opened once per process."""
    key = _key(context.node_config, context.node_id)
    with _opening:
        if key not in _workbenches:
            settings = SiloSettings.from_node_config(context.node_config, node_id=context.node_id)
            _workbenches[key] = open_workbench(settings)
        return _workbenches[key]


def prepare(settings: SiloSettings) -> None:
    """Open the workbench and warm it up before the silo joins, so that no round waits for it.

    Raises:
        TaskError, SettingsError: the silo cannot train as it is set up.
    """
    prepare_all([settings])


def prepare_all(settings: Sequence[SiloSettings]) -> None:
    """The same for silos of one simulation in this process, which share all but their data."""
    prepare_nodes([one.to_node_config() for one in settings])


def prepare_nodes(node_configs: Sequence[Mapping[str, Option]]) -> None:
    """``prepare_all`` by node configs, as a Grid in one process has them."""
    settings = [SiloSettings.from_node_config(own, node_id=0) for own in node_configs]
    benches = open_workbenches(settings)
    for bench in benches:
        check_policy(bench)
    # The largest: a simulation may go on without silos that are too small to train.
    largest = max(benches, key=lambda bench: len(bench.data.x_train))
    warm_up(largest.task, largest.model, largest.data)
    with _opening:
        for own, bench in zip(node_configs, benches, strict=True):
            _workbenches[_key(own, 0)] = bench


def _key(node_config: Mapping[str, Option], node_id: int) -> str:
    """A named silo is its settings; a node without a name is told apart by its id."""
    who = "" if "name" in node_config else node_id
    return json.dumps([who, dict(node_config)], sort_keys=True, default=str)
