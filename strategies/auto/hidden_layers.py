"""Hidden layers of a table's network: every silo trains its own beside its group's.

A race compares linear parts. Hidden layers may need more rows than a silo has, or differ from silo
to silo where slopes do not. So while a group trains hidden layers, its silos also train those of
the models that they trained by themselves, as far as the budgets allow. The stage of
``coterie.features.hidden_layers`` lets them measure both.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from coterie.strategies.auto.budget import Budget, planned
from coterie.strategies.auto.state import ALONE, AutoState, handed_out
from coterie.strategies.plain import hidden
from coterie.strategies.rounds.algorithm import Order, Round
from coterie.strategies.rounds.handles import Model


def orders(state: AutoState, alone: Order, limits: Budget, now: Round) -> list[Order]:
    """Return the order of a grouped silo's own training beside its group's, if there is one."""
    if not hidden.compares(state.linear_first, now):
        return []
    left, arms = planned(now) - now.number + 1, hidden.ends_of(now.rounds)[1] - now.number
    if not limits.allows(
        state, {alone.silo.name: left + arms}, (left + arms) * len(now.names), now
    ):
        return []
    return [replace(alone, purpose=ALONE, beside=(now.number, ""))]


def apart(state: AutoState) -> Mapping[str, Model]:
    """Return grouped silo → the model that it trained by itself, with hidden layers."""
    grouped = {n for g in state.held if len(g) > 1 for n in g} - state.own
    return {n: state.alone[n] for n in sorted(grouped) if hidden.have_effect(state.alone.get(n))}


def left_apart(state: AutoState, now: Round) -> AutoState:
    """Return the state in which every silo goes on with the model that it trained by itself."""
    held = tuple(sorted((name,) for group in state.held for name in group))
    state = replace(state, held=held, group_models={}, own=frozenset(), penalty=0.0, latest={})
    return handed_out(replace(state, probation={}, beside={}), now)
