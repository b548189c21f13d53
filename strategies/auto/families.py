"""A network or boosted trees: which of them each silo uses, in one run.

The task leaves the choice open (``wire.FAMILIES``). Both are trained side by side in the same
rounds, and each has its look, its race and its groups. Networks of tables are linear models until
their hidden layers help, so the choice is between a linear model, a network and trees.

Trees are grown twice: first, by the round before whose training the hidden layers' share is chosen,
from rows that are not held out; then, if rounds are left, from all rows. In that round no model has
seen the held-out rows yet, and every silo measures its network and its first trees on them. Trees
are favoured if the mean difference of losses over silos exceeds its standard error. A silo uses the
other family if it is better for it by one standard error, by its own difference shrunk to all
silos' (``shrunken_gains``). Groups are then those of each family.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import TYPE_CHECKING, Any

import numpy as np

from coterie import wire
from coterie.features.sums.trees.coordinator import require_rounds
from coterie.strategies.auto import growing, own_models
from coterie.strategies.auto.budget import holdout
from coterie.strategies.auto.entries import details_of, plain
from coterie.strategies.auto.evidence import HOLDOUT
from coterie.strategies.auto.state import (
    AutoState,
    Boosted,
    Forest,
    Measured,
    holding,
    trained_together,
)
from coterie.strategies.errors import EXIT_CONFIG, FederationError
from coterie.strategies.partition.race import loss_variances, shrunken_gains
from coterie.strategies.plain import hidden
from coterie.strategies.rounds.algorithm import Exchanges, Order, Round, Update, Updates
from coterie.strategies.rounds.handles import Arrays, sent_for
from coterie.strategies.rounds.members import Members, enrol
from coterie.strategies.rounds.options import Config
from coterie.strategies.rounds.reports import Group

if TYPE_CHECKING:
    from coterie.strategies.auto.algorithm import Auto

log = logging.getLogger("coterie.run")

MEASURE = "family-"
"""Beginning of the purposes of the measurements, numbered as ``wire.FAMILIES``."""
OF_TREES = f"{wire.TREES} "
"""Beginning of the purposes of trees' trainings, which only measure."""


def parts_of(initial: Arrays) -> dict[str, Arrays]:
    """Return the family's name → its arrays, of the model of a task that leaves the choice open."""
    found: dict[str, Arrays] = {}
    for family in wire.FAMILIES:
        begin = f"{family}."
        own = {n.removeprefix(begin): a for n, a in initial.items() if n.startswith(begin)}
        found |= {family: own} if own else {}
    return found if len(found) == len(wire.FAMILIES) else {}


def first(initial: Arrays) -> AutoState:
    """Return the state before round 1."""
    parts = parts_of(initial)
    if not parts:
        return AutoState(Members(initial))
    trees = AutoState(Members(parts[wire.TREES]), trees=Forest(judging=True))
    return AutoState(Members(parts[wire.NETWORK]), boosted=Boosted(trees))


def require(auto: Auto, parts: Mapping[str, Arrays], rounds: int) -> None:
    """Require rounds enough to grow all trees before the choice.

    Raises:
        FederationError: there are too few, or no number of rounds would do.
    """
    trees = parts[wire.TREES]
    needed = growing.needed(auto, trees)
    most = _choice(hidden.PLANNED) - 1
    if needed > most:
        raise FederationError(
            f"{len(trees['leaf'])} trees need {needed} rounds, and auto compares them with a "
            f'network after {most}. Name fewer or smaller trees, such as network = "any-100x6".',
            exit_code=EXIT_CONFIG,
        )
    require_rounds(trees, rounds, next(n for n in count(needed) if _choice(n) > needed))


def _choice(rounds: int) -> int:
    """Return the round before whose training families are compared."""
    return hidden.ends_of(rounds)[1]


# ---------------------------------------------------------------- the two runs


def _network(state: AutoState) -> AutoState:
    return replace(state, boosted=None)


def _trees(state: AutoState) -> AutoState:
    """Return the trees' state, with what the silos state now."""
    assert state.boosted is not None
    trees, known = state.boosted.state, state.members
    sizes = {name: known.sizes.get(name, size) for name, size in trees.members.sizes.items()}
    members = replace(trees.members, sizes=sizes, minimums=known.minimums, data=known.data)
    return replace(trees, members=members)


def _with(state: AutoState, boosted: Boosted | None, trees: AutoState) -> AutoState:
    assert boosted is not None
    return replace(state, boosted=replace(boosted, state=trees))


def _round(state: AutoState, now: Round) -> Round:
    """Return the round as trees see it: without silos whose sums would need noise (privacy).

    Until they are compared, it is one of a run that ends before that.
    """
    assert state.boosted is not None
    begin = f"{wire.TREES}."
    silos = tuple(
        replace(s, buffers=tuple(n.removeprefix(begin) for n in s.buffers if n.startswith(begin)))
        for s in now.silos
        if s.described and not s.private
    )
    rounds = _choice(now.rounds) - 1 if state.boosted.state.trees.judging else now.rounds
    return replace(now, silos=silos, config={**now.config, wire.ROUNDS: rounds})


def welcomed(auto: Auto, state: AutoState, new: frozenset[str], now: Round) -> AutoState:
    """Let new silos begin in both."""
    if now.number == 1 and not hidden.linear_first(state.members.initial, now.config):
        raise FederationError(
            'network = "any" compares trees with a network whose linear part silos train to its '
            f"minimum: leave {', '.join(hidden.GRADIENT_STEPS)} as they are, or name a network.",
            exit_code=EXIT_CONFIG,
        )
    boosted, trees, within = state.boosted, _trees(state), _round(state, now)
    begins = [silo for silo in within.silos if silo.name not in trees.members.sizes]
    trees = replace(trees, members=enrol(trees.members, begins, trees.members.initial))
    trees = auto.welcome(trees, frozenset(silo.name for silo in begins), within)
    return _with(auto.welcome(_network(state), new, now), boosted, trees)


def renewed(auto: Auto, state: AutoState, changed: frozenset[str], now: Round) -> AutoState:
    """Forget what is known of silos with other data in both, and which family suits them."""
    boosted, within = state.boosted, _round(state, now)
    assert boosted is not None
    trees = auto.renew(_trees(state), changed & within.here.keys(), within)
    kept = {n: own for n, own in boosted.measured.items() if n not in changed}
    uses = {n: own for n, own in boosted.uses.items() if n not in changed}
    boosted = replace(boosted, measured=kept, uses=uses)
    return _with(auto.renew(_network(state), changed, now), boosted, trees)


def prepared(auto: Auto, state: AutoState, now: Round) -> Exchanges[AutoState]:
    """Ask what both need before a training; trees grow."""
    network = yield from auto.prepare(_network(state), now)
    trees = yield from auto.prepare(_trees(state), _round(state, now))
    return _with(network, state.boosted, trees)


def ordered(auto: Auto, state: AutoState, now: Round) -> tuple[AutoState, list[Order]]:
    """Order what both need, and let silos measure both when they may be compared."""
    network, work = auto.orders(_network(state), now)
    trees, more = auto.orders(_trees(state), _round(state, now))
    work += [replace(order, purpose=OF_TREES + order.purpose) for order in more]
    found = _with(network, state.boosted, trees)
    if now.number >= _choice(now.rounds):
        work += _measurements(found, auto.own_entries(trees), now)
    return found, work


def _measurements(state: AutoState, own: Mapping[str, Config], now: Round) -> list[Order]:
    """Order measurements of both models, where neither has seen the held-out rows.

    These are all silos' in the round of the choice, and groups' that a newcomer is to train with.
    Of trees, each measures its own; ``own`` says how it makes these.
    """
    boosted, orders = state.boosted, list[Order]()
    assert boosted is not None
    trees = boosted.state
    new = {n for n in state.beside.keys() & trees.beside.keys() if not state.probation.get(n)}
    judged = {n: trees.members.models[n] for n in new}
    if now.number == _choice(now.rounds):
        judged |= trees.trees.judged
        if not judged:
            log.warning("auto: the trees are not complete in time, so all silos use the network")
    for silo in now.silos:
        if silo.name in boosted.measured or silo.name not in judged or not holdout(silo):
            continue
        both = state.members.models[silo.name], sent_for(judged[silo.name])
        for number, model in enumerate(both):
            config: Config = holdout(silo)
            if number:
                config = {**config, **own.get(silo.name, own_models.entries(0.0))}
            orders.append(Order(silo, model, f"{MEASURE}{number}", config, wire.EVALUATE_OWN))
    return orders


def absorbed(auto: Auto, state: AutoState, updates: Updates, now: Round) -> AutoState:
    """Give both their updates, choose families once both are measured, and hand models out."""
    mine = [u for u in updates if not u.purpose.startswith((OF_TREES, MEASURE))]
    theirs = [
        replace(u, purpose=u.purpose.removeprefix(OF_TREES))
        for u in updates
        if u.purpose.startswith(OF_TREES)
    ]
    trees = auto.absorb(_trees(state), theirs, _round(state, now))
    found = _with(auto.absorb(_network(state), mine, now), state.boosted, trees)
    if now.number >= _choice(now.rounds):
        found = _chosen(found, [u for u in updates if u.purpose.startswith(MEASURE)], now)
    found, boosted = handed_out(found), found.boosted
    assert boosted is not None
    for name in sorted(boosted.fresh if now.number >= _choice(now.rounds) else ()):
        log.info("auto: %s %s", name, sentence(entries_of(found)[name]))
    return found


def ended(auto: Auto, state: AutoState, now: Round) -> Exchanges[AutoState]:
    """Return the state after the last exchanges of both."""
    network = yield from auto.finish(_network(state), now)
    trees = yield from auto.finish(_trees(state), _round(state, now))
    return handed_out(_with(network, state.boosted, trees))


# ---------------------------------------------------------------- the choice


def _chosen(state: AutoState, updates: Updates, now: Round) -> AutoState:
    boosted = state.boosted
    assert boosted is not None
    fresh = compared(updates)
    measured = {**boosted.measured, **fresh}
    suited = suiting(measured)
    favoured = boosted.favoured or favourite(measured)
    have_trees = boosted.state.members.sizes.keys() & now.here.keys()
    uses = dict(boosted.uses)
    for name in now.names:
        usual = favoured if name in have_trees and boosted.state.trees.judged else wire.NETWORK
        if name in fresh or name not in uses:
            uses[name] = suited.get(name, usual)
    new = frozenset(uses.keys() - boosted.uses.keys() | fresh.keys())
    boosted = replace(
        boosted,
        measured=measured,
        uses=uses,
        favoured=favoured,
        round=boosted.round or now.number,
        fresh=new,
    )
    return replace(state, boosted=boosted)


def compared(updates: Sequence[Update]) -> dict[str, tuple[Measured, Measured]]:
    """Return silo → what it measured of both families, if that says anything.

    Survival without an event held out does not.
    """
    network, trees = (values_of(updates, number) for number in range(len(wire.FAMILIES)))
    both = {name: (network[name], trees[name]) for name in sorted(network.keys() & trees.keys())}
    return {name: own for name, own in both.items() if own[0].noise or own[1].noise}


def values_of(updates: Iterable[Update], number: int) -> dict[str, Measured]:
    """Return silo → its held-out loss of one family, or error where losses are in other units.

    Such a loss is a mean square. The error is a multiple of it (R²'s), or about of its root, which
    has half of its relative noise.
    """
    found = {}
    for update in updates:
        if update.purpose != f"{MEASURE}{number}" or not update.held_out(HOLDOUT) > 0:
            continue
        loss = value = update.metrics.get(wire.HOLDOUT_LOSS, float("nan"))
        noise = update.metrics.get(wire.HOLDOUT_LOSS_ERROR, float("nan"))
        if (metric := update.silo.metric) in wire.OF_NUMBERS:
            value = update.metrics.get(wire.HOLDOUT_ERROR, float("nan"))
            times = 1.0 if metric == "r2" else 0.5
            noise, loss = times * noise * value / loss if loss > 0 else float("nan"), float("nan")
        if np.isfinite(value):
            found[update.silo.name] = Measured(value, loss, update.held_out(HOLDOUT), False, noise)
    return found


def favourite(measured: Mapping[str, tuple[Measured, Measured]]) -> str:
    """Return trees if they are better by more than the standard error over silos."""
    losses = [{n: (own[i].error, own[i].count) for n, own in measured.items()} for i in range(2)]
    return wire.TREES if hidden.is_better(losses[1], losses[0]) else wire.NETWORK


def suiting(measured: Mapping[str, tuple[Measured, Measured]]) -> dict[str, str]:
    """Return silo → the family that suits it, of those that measured both."""
    if not measured:
        return {}
    usual = favourite(measured)
    base = wire.FAMILIES.index(usual)
    other = wire.FAMILIES[1 - base]
    noises = np.array([[one.noise, two.noise] for one, two in measured.values()])
    gains = shrunken_gains(
        [own[1 - base].error for own in measured.values()],
        [own[base].error for own in measured.values()],
        [own[0].count for own in measured.values()],
        shares=False,
        variances=loss_variances(noises),
    )
    return {n: other if gain.own else usual for n, gain in zip(measured, gains, strict=True)}


def handed_out(state: AutoState) -> AutoState:
    """Return the state in which every silo holds the model of its family, in that's groups."""
    boosted = state.boosted
    assert boosted is not None
    use = {n for n, family in boosted.uses.items() if family == wire.TREES}
    own = boosted.state.members
    use &= own.models.keys()
    both = [*_of(state.members.groups, lambda n: n not in use), *_of(own.groups, use.__contains__)]
    held = {name: own.models[name] for name in sorted(use)}
    return replace(state, members=state.members.holding(held).grouped(sorted(both)))


def _of(groups: Iterable[Group], uses: Any) -> list[Group]:
    return [kept for group in groups if (kept := tuple(n for n in group if uses(n)))]


# ---------------------------------------------------------------- the record


def details(state: AutoState, byte_budget: float) -> dict[str, Any]:
    """Return what the record of a round has: of the network, of trees, and of the choice."""
    boosted = state.boosted
    assert boosted is not None
    found = details_of(state, byte_budget) | {"boosted": details_of(boosted.state, byte_budget)}
    if boosted.round:
        found["families"] = entries_of(state)
    return found


def entries_of(state: AutoState) -> dict[str, dict[str, Any]]:
    """Return silo → its family and what it measured, as JSON values."""
    boosted = state.boosted
    assert boosted is not None
    found: dict[str, dict[str, Any]] = {}
    trained = {
        wire.NETWORK: trained_together(state, state.members.here),
        wire.TREES: boosted.state.members.groups,
    }
    for name, family in sorted(boosted.uses.items()):
        network = holding(state).get(name)
        found[name] = {"family": family, "hidden-layers": hidden.have_effect(network)}
        found[name]["with"] = _others(trained[family], name)
        if own := boosted.measured.get(name):
            found[name] |= {"count": plain(own[0].count), "loss": np.isfinite(own[0].loss).item()}
            found[name] |= {"measured": [plain(one.error) for one in own]}
    return found


def _others(groups: Iterable[Group], name: str) -> list[str]:
    return next((sorted(set(group) - {name}) for group in groups if name in group), [])


def sentence(entry: Mapping[str, Any]) -> str:
    """Say which family a silo uses, with which silos it was trained, and why.

    Args:
        entry: one of ``entries_of``.
    """
    others = entry["with"]
    network = "network" if entry["hidden-layers"] else "linear model"
    names = dict(zip(wire.FAMILIES, (f"a {network}", "boosted trees"), strict=True))
    made = ("trained", "grown")[wire.FAMILIES.index(entry["family"])]
    text = f"uses {names[entry['family']]}, {made} "
    text += f"with {', '.join(others)}" if others else "alone"
    if "measured" not in entry:
        return f"{text}: it did not measure both on held-out samples."
    values = dict(zip(wire.FAMILIES, map(wire.readable, entry["measured"]), strict=True))
    mine, other = values.pop(entry["family"]), values.popitem()
    what = "loss" if entry["loss"] else "error"
    return (
        f"{text}: held-out {what} {mine} against {other[1]} of {names[other[0]]} "
        f"({entry['count']:.0f} samples)."
    )
