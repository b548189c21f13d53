"""The inter-group aggregation: every group's model takes a step along those of the others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from coterie.strategies.rounds.handles import Arrays, Model, arrays_of
from coterie.strategies.rounds.models import is_statistic


def inter_group(models: Sequence[Model], rate: float, buffers: Sequence[str]) -> list[Model]:
    """Return ``w_j + η_g · Σ_{l≠j} w_l / |w_l|`` of the old models (Algorithm 2, line 18)."""
    seen = [arrays_of(model) for model in models]
    units = [_unit(model, buffers) for model in seen]
    return [
        {
            name: _moved(array, [u[name] for u in units[:j] + units[j + 1 :] if name in u], rate)
            for name, array in model.items()
        }
        for j, model in enumerate(seen)
    ]


def _moved(array: Any, steps: Sequence[np.ndarray], rate: float) -> Any:
    return (array + rate * sum(steps)).astype(array.dtype) if steps else array


def _unit(model: Arrays, buffers: Sequence[str]) -> dict[str, np.ndarray]:
    """Return the parameters in float64, divided by their common norm; empty for a zero model."""
    wide = {
        name: array.astype(np.float64)
        for name, array in model.items()
        if np.issubdtype(array.dtype, np.floating) and not is_statistic(name, buffers)
    }
    norm = float(np.sqrt(sum(float(np.vdot(array, array)) for array in wide.values())))
    return {name: array / norm for name, array in wide.items()} if norm > 0 else {}
