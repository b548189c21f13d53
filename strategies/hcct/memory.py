"""What HCCT keeps of earlier rounds' updates, and the inner products that it forms groups by."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from coterie.strategies.hcct.state import HCCTState
from coterie.strategies.partition.gram import gram
from coterie.strategies.partition.products import Products, gram_of_rounds, with_round
from coterie.strategies.rounds.handles import Arrays
from coterie.strategies.rounds.models import accumulate


def of_layer(update: Arrays, layer: str) -> Arrays:
    """Return the arrays whose names begin with ``layer``."""
    return {name: array for name, array in update.items() if name.startswith(layer)}


def remembered(
    state: HCCTState, deltas: Mapping[str, Arrays], probes: Mapping[str, Arrays], *, decay: float
) -> dict[str, Arrays]:
    """Return the accumulated updates; a newcomer's is that of its catch-up, if it answered."""
    memory = dict(state.memory)
    for name, delta in deltas.items():
        if name in state.newcomers:
            memory[name] = probes.get(name, delta)
        else:
            memory[name] = accumulate(memory.get(name), delta, decay=decay)
    return memory


def remembered_noise(
    state: HCCTState, noisy: Mapping[str, float], probes: Mapping[str, float], *, decay: float
) -> dict[str, float]:
    """Accumulate the updates' noise likewise: independent noise adds up in squares."""
    noise = dict(state.noise)
    for name, own in noisy.items():
        if name in state.newcomers:
            noise[name] = probes.get(name, own)
        else:
            noise[name] = decay**2 * noise.get(name, 0.0) + own
    return {name: found for name, found in noise.items() if found}


def products_of(
    products: Products, deltas: Mapping[str, Arrays], noisy: Mapping[str, float], *, decay: float
) -> Products:
    """Add up inner products in place of updates, whose sketches differ from round to round."""
    names = sorted(deltas)
    if not names:
        return products
    matrix = gram([list(deltas[name].values()) for name in names])
    width = sum(array.size for array in deltas[names[0]].values())
    noise = [noisy[name] for name in names]
    return with_round(products, names, matrix, noise, num_parameters=width, decay=decay)


def accumulated(
    state: HCCTState,
    settled: Sequence[str],
    new: Sequence[str],
    deltas: Mapping[str, Arrays],
    noisy: Mapping[str, float],
) -> NDArray[np.float64]:
    """Return inner products of accumulated updates, and of newcomers' updates of this round."""
    if state.products.names:
        return gram_of_rounds(state.products, [*settled, *new])
    vectors = [state.memory[n] for n in settled]
    vectors += [deltas[n] if n in state.newcomers else state.memory[n] for n in new]
    noise = [state.noise.get(name, 0.0) for name in settled]
    noise += [noisy[n] if n in state.newcomers else state.noise.get(n, 0.0) for n in new]
    return gram([list(vector.values()) for vector in vectors], noise=noise)
