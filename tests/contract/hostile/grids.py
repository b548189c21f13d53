"""Flower's Grid, before a SuperLink that a test plays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flwr.serverapp import Grid
from flwr.supercore.run import Run
from flwr.superlink.grid.grpc_grid import GrpcGrid

from coterie.engine.fast.run import pulling


def grid_before(store: Any, *, hosts: bool = False, folder: Path | None = None) -> Grid:
    """Calls go to the methods of ``store``, which has those of Flower's Runtime API."""
    inner: Any = GrpcGrid("127.0.0.1:1", insecure=True, token="t")
    inner._channel, inner._grpc_stub = object(), store
    inner.set_run(Run.create_empty(1))
    grid: Any = pulling.fast_engine(inner, hosts=hosts, folder=folder)
    grid._stub = grid._objects = store
    return grid  # type: ignore[no-any-return]
