"""HCCT's state between rounds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from coterie.strategies.hcct.alpha import Found, Trial
from coterie.strategies.partition.products import Products
from coterie.strategies.rounds.handles import Arrays, Model
from coterie.strategies.rounds.members import Members
from coterie.strategies.rounds.reports import Group


@dataclass(frozen=True)
class HCCTState:
    """HCCT's state between rounds.

    Attributes:
        memory: silo → c_i, its accumulated own updates (the compared arrays only).
        products: in a secure run in place of ``memory`` and ``noise``.
        noise: silo → expected squared norm of the noise in that, if it states one (privacy).
        alphas: silo → its own α, if it stated one.
        planned: groups of the next round.
        proposed: the last partition. ``planned`` differs in a secure run, and by absent silos.
        waits: in a secure run, partitions in a row that have left silos waiting for the next.
        starts: silo → the model that its group of the next round starts from.
        newcomers: silos that have not been placed yet.
        layer: prefix of the array names that are compared (HCCT-E); empty compares all.
        unchanged: how often in a row the partition came out the same.
        alpha: the choice of ``auto``.
        trial: the ongoing trial of ``auto``.
        untrained: silo → its measurement of w⁰ on the samples held out for ``auto``.
        verdict: the trial's outcome, for the record of that round.
        held: silos present when the partition that ``auto`` keeps was formed.
        similarity: cosines between ``compared`` silos after the last round.
        norms: lengths of the compared vectors.
        alphas_used, sizes_used: α and training samples of ``compared`` at that time.
    """

    members: Members
    memory: Mapping[str, Arrays] = field(default_factory=dict)
    products: Products = field(default_factory=Products)
    noise: Mapping[str, float] = field(default_factory=dict)
    alphas: Mapping[str, float] = field(default_factory=dict)
    planned: tuple[Group, ...] = ()
    proposed: tuple[Group, ...] = ()
    waits: int = 0
    starts: Mapping[str, Model] = field(default_factory=dict)
    newcomers: frozenset[str] = frozenset()
    layer: str = ""
    unchanged: int = 0
    alpha: float | None = None
    trial: Trial | None = None
    untrained: Mapping[str, Found] = field(default_factory=dict)
    verdict: Mapping[str, Any] = field(default_factory=dict)
    held: Group = ()
    compared: tuple[str, ...] = ()
    similarity: tuple[tuple[float, ...], ...] = ()
    norms: tuple[float, ...] = ()
    alphas_used: tuple[float, ...] = ()
    sizes_used: tuple[float, ...] = ()
