"""Bounds on how much one silo can do to the others.

Every checked update passes here before the algorithm sees it, so that no algorithm needs to handle
this and any ClientApp is covered:

- *Counts*. A silo weighs by the samples that it stated first, and at most ``max_share`` of those
  whose updates are averaged with its own.
- *Norms*. An update is clipped to ``clip_updates`` times the median norm of those it is compared
  with, up to twice that if the silo has more samples than most (Sun, Kairouz, Suresh, McMahan: "Can
  You Really Backdoor Federated Learning?", 2019, https://arxiv.org/abs/1911.07963, with the median
  instead of a fixed bound).
- *Zero*. In a group an update of length 0 does not count if others are longer: its silo trained
  nothing.
- *Directions*, of updates before clipping. If most members of a group agree, a silo whose updates
  keep away from the others' mean direction is quarantined: it trains alone, and returns on
  probation.

Without outliers the very same updates pass unchanged.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from coterie import wire
from coterie.features.robust.keys import Influence
from coterie.features.robust.reputation import Quarantined, Reputation
from coterie.strategies.partition._check import FloatArray
from coterie.strategies.partition.gram import gram
from coterie.strategies.rounds.algorithm import Update, Updates, num_bytes
from coterie.strategies.rounds.handles import Masked, Model, arrays_of, is_seen
from coterie.strategies.rounds.members import capped, minimums_of, staying
from coterie.strategies.rounds.models import difference, each, same_model
from coterie.strategies.rounds.reports import Group
from coterie.wire.updates import Limit, shortened, sketch_noise

log = logging.getLogger("coterie.run")

FEWEST, FEWEST_VOTES = 3, 4
"""Fewest updates from which a median norm, and a common direction, are meaningful."""
AGREEMENT = 0.25
"""Median cosine to the others' mean direction from which a group has a direction: more than half of
its members then have it, so outliers are always a minority."""
AGAINST = 0.05
"""Cosine below which an update is an outlier in such a group, if the others agree: in honest
federations small silos with noisy updates come near 0."""
SPREAD = 4.0
"""How far an outlier is also below the group's median, in median absolute deviations of its
cosines: where members have other labels cosines are spread, and some honest ones are negative."""
ELSEWHERE = 4.0
"""Factor on the limit of norms where silos that trained other models are compared."""
SHORT = 0.5
"""Multiple of the median norm below which an update is too small to matter."""
SHARE = 2**20
"""Values of each update that one thread multiplies with the others' before it takes more."""
AT_ONCE = 2**19
"""Values of all updates together multiplied at a time: they stay in the processor's cache."""
FEWEST_COLUMNS = 2**11
"""Fewest values of each update multiplied at a time, if there are very many updates."""
AWAY = 5
"""Rounds that a silo trains alone the first time; they double each further time."""


@dataclass(frozen=True)
class Bounded:
    """One exchange's updates as they count, in order; one within bounds is the same object.

    ``left_out``: silo → why none of its updates counts in this round: it is quarantined, or it
    trained nothing. ``details``: for the record, JSON.
    """

    updates: list[Update]
    reputation: Reputation
    left_out: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)


def bound(
    influence: Influence,
    reputation: Reputation,
    updates: Updates,
    *,
    number: int,
    groups: Sequence[Group] = (),
    crosses: bool = False,
) -> Bounded:
    """Return the updates of one exchange, each within the bounds on its influence.

    Args:
        groups: that train together; only silos in groups of several are judged by direction.
        crosses: models that started differently may be averaged.
    """
    counted, reputation = _with_first_counts(updates, reputation)
    started = _Starts()
    voting = _voting(counted, groups, started)
    norms = _norms(counted, voting)
    clipped = _clipped(counted, influence.clip_updates, started, norms)
    found = _directions(voting)
    reputation, moved_out = _judged(found, reputation, influence.quarantine_after, number)
    out = {**_idle(counted, norms, groups), **moved_out}
    kept = [u for u in clipped.updates if u.silo.name not in out]
    kept = _capped(kept, influence.max_share, lambda u: (u.purpose, started(u.start)))
    if crosses:
        kept = _capped(kept, influence.max_share, lambda u: u.purpose)
    if number == 1:
        _warn_of_caps(counted, kept)
    if influence.aggregate != "mean":
        kept = [replace(u, aggregate=influence.aggregate) for u in kept]
    more = {
        u.silo.name: u.num_examples
        for u, own in zip(updates, counted, strict=True)
        if own.num_examples < u.num_examples and not own.silo.described
    }
    details = {
        "clipped": clipped.factors,
        "claimed": more,
        "cosines": {one.update.silo.name: round(one.cosine, 4) for one in found},
        "norms": clipped.lengths,
        "apart": {name: apart.why for name, apart in sorted(reputation.apart.items())},
    }
    return Bounded(kept, reputation, out, {key: value for key, value in details.items() if value})


# ---------------------------------------------------------------- counts


def _trains(update: Update) -> bool:
    return update.kind.split(".")[0] != wire.EVALUATE


def _with_first_counts(updates: Updates, reputation: Reputation) -> tuple[list[Update], Reputation]:
    """Limit samples to those stated first; a training that holds some out states fewer."""
    first = dict(reputation.counts)
    for update in updates:
        if _trains(update) and not update.purpose and not update.silo.described:
            first.setdefault(update.silo.name, update.num_examples)
    counted = []
    for update in updates:
        silo = update.silo
        most = silo.num_examples if silo.described else first.get(silo.name, math.inf)
        more = _trains(update) and update.num_examples > most
        counted.append(replace(update, num_examples=float(most)) if more else update)
    return counted, replace(reputation, counts=first)


class _Starts:
    """Numbers the models that silos trained from by value, whatever object holds them."""

    def __init__(self) -> None:
        self._by_id: dict[int, int] = {}
        self._by_sample: dict[bytes, list[tuple[int, Model]]] = {}

    def __call__(self, model: Model) -> int:
        if id(model) not in self._by_id:  # the updates hold the models, so ids stay their own
            alike = self._by_sample.setdefault(_sample(model), [])
            number = next((n for n, other in alike if same_model(model, other)), len(self._by_id))
            alike.append((number, model))
            self._by_id[id(model)] = number
        return self._by_id[id(model)]


def _sample(model: Model) -> bytes:
    """Return some of a model's values, in which most different models differ."""
    if not is_seen(model):
        return b"unseen"
    arrays = (array.ravel() for array in model.values())
    return b"".join(flat[:: max(flat.size // 4, 1)].tobytes() for flat in arrays)


def share_of(max_share: float, size: int) -> float:
    """Return the largest share of one silo in a group; in one of more than four it is smaller.

    ``max_share`` = 0.5 is twice an equal share there. 1: unlimited.
    """
    return max_share if max_share == 1 else max_share * min(1.0, FEWEST_VOTES / size)


def _capped(
    updates: list[Update], max_share: float, key: Callable[[Update], object]
) -> list[Update]:
    """Cap each silo's share among those with an equal key."""
    most: dict[int, float] = {}
    for group in _alike(updates, key):
        counts = {str(i): updates[i].num_examples for i in group}
        share = share_of(max_share, len(group))
        most |= {int(i): count for i, count in capped(counts, share).items()}
    return [
        replace(u, num_examples=most[i]) if most.get(i, u.num_examples) < u.num_examples else u
        for i, u in enumerate(updates)
    ]


def _warn_of_caps(stated: Updates, kept: Updates) -> None:
    """Warn of silos that weigh less than by the samples that they stated."""
    weighs = {u.silo.name: u.num_examples for u in kept if not u.purpose}
    for u in stated:
        if not u.purpose and weighs.get(u.silo.name, math.inf) < u.num_examples:
            log.warning(
                "silo %s states %s samples and weighs as much as %s, the most that max-share "
                "allows: set max-share to 1 if you trust its number",
                *(u.silo.name, wire.readable(u.num_examples), wire.readable(weighs[u.silo.name])),
            )


def _alike(updates: Updates, key: Callable[[Update], object]) -> list[list[int]]:
    """Return the positions of trainings with equal keys."""
    found: dict[object, list[int]] = {}
    for i, update in enumerate(updates):
        if _trains(update):
            found.setdefault(key(update), []).append(i)
    return list(found.values())


# ---------------------------------------------------------------- norms


@dataclass(frozen=True)
class _Clipped:
    """Updates within their limits.

    ``factors``: silo → what its update was multiplied by. ``lengths``: silo → its update's norm as
    a multiple of the median, of the round's own training.
    """

    updates: list[Update]
    factors: Mapping[str, float]
    lengths: Mapping[str, float]


def _norms(updates: Updates, voting: Sequence[_Voting]) -> dict[int, float]:
    norms = {i: n for group in voting for i, n in zip(group.positions, group.norms, strict=True)}
    rest = [i for i, u in enumerate(updates) if _trains(u) and i not in norms]
    largest = max((num_bytes(updates[i].start) for i in rest), default=0)
    found = each(update_norm, [updates[i] for i in rest], num_bytes=largest)
    return norms | dict(zip(rest, found, strict=True))


def _idle(updates: Updates, norms: Mapping[int, float], groups: Sequence[Group]) -> dict[str, str]:
    """Return silo → why its update of length 0 does not count, if others trained in the round.

    Only of silos in groups: a silo alone may have arrived at its minimum.
    """
    together = {name for group in groups if len(group) > 1 for name in group}
    own = {updates[i].silo.name: norm for i, norm in norms.items() if not updates[i].purpose}
    own = {name: norm for name, norm in own.items() if name in together}
    if not any(own.values()):
        return {}
    why = "it trained nothing: its update is zero, the model that it was sent."
    return {name: why for name, norm in own.items() if norm == 0}


def _clipped(
    updates: list[Update], most: float, started: _Starts, norms: Mapping[int, float]
) -> _Clipped:
    medians: dict[int, float] = {}
    limits: dict[int, Limit] = {}

    def compare(key: Callable[[Update], object], *, times: float = 1.0) -> None:
        for group in _alike(updates, key):
            silos = [updates[i].silo for i in group]
            # The limit shows nothing of a silo that accepts no group of this size.
            stay = staying([silo.name for silo in silos], minimums_of(silos))
            seen = [i for i in group if updates[i].silo.name in stay]
            if len(seen) >= FEWEST:
                median = float(np.median([norms[i] for i in seen]))
                usual = float(np.median([updates[i].num_examples for i in seen]))
                limit = Limit(most * times * median, usual)
                for i in group:
                    medians.setdefault(i, median)
                    limits.setdefault(i, limit)

    # Those that trained the same model; of smaller groups all that did the same work, some of which
    # may be nearly done where others have far to go.
    compare(lambda u: (u.purpose, u.kind, started(u.start)))
    compare(lambda u: (re.sub(r"-\d+$", "", u.purpose), u.kind), times=ELSEWHERE)
    shorter = list(updates)
    factors: dict[str, float] = {}
    lengths: dict[str, float] = {}
    reached: list[Limit] = []
    for i, median in medians.items():
        update = updates[i]
        if median <= 0:
            continue
        if not update.purpose:
            lengths[update.silo.name] = round(norms[i] / median, 3)
        longest = limits[i].of(update.num_examples)
        if most and norms[i] > longest:
            factor = longest / norms[i]
            if is_seen(update.model):
                short = shortened(update.model, arrays_of(update.start), factor)
                shorter[i] = replace(update, model=short)
            else:
                reached.append(limits[i])
            factors[update.silo.name] = min(factor, factors.get(update.silo.name, 1.0))
    # What nobody sees the silos shorten themselves, all that were compared by the same limit.
    for i, common in limits.items():
        if any(common is one for one in reached):
            shorter[i] = replace(updates[i], model=_masked(updates[i]).within(common))
    rounded = {name: float(f"{f:.4g}") for name, f in factors.items()}
    return _Clipped(shorter, rounded, lengths)


def _masked(update: Update) -> Masked:
    assert isinstance(update.model, Masked)
    return update.model


def update_norm(update: Update) -> float:
    """Return the Euclidean norm of an update, over all floating-point arrays."""
    if isinstance(update.model, Masked):
        return update.model.norm
    return math.sqrt(float(_products([update])[0, 0]))


def _products(updates: Sequence[Update]) -> FloatArray:
    """Return the inner products (n, n) of updates of one model; in a secure run, of their sketches.

    It works by columns of one array at a time, so that no copy of all updates is made.
    """
    total = np.zeros((len(updates), len(updates)))
    trained = [u.model for u in updates if is_seen(u.model)]
    if len(trained) < len(updates):
        sketches = [difference(u.model, u.start) for u in updates]
        return total + gram(sketches, noise=[sketch_noise(one) for one in sketches])
    model, started = trained[0], arrays_of(updates[0].start)
    sizes = {n: a.size for n, a in model.items() if np.issubdtype(a.dtype, np.floating)}

    columns = max(AT_ONCE // len(updates), FEWEST_COLUMNS)

    def of(span: tuple[str, int]) -> list[FloatArray]:
        name, first = span
        kind, found = np.result_type(model[name], np.float32), []
        models = [one[name].reshape(-1) for one in trained]
        start = started[name].reshape(-1)
        held, now, then = (np.empty((rows, columns), kind) for rows in (len(updates), 1, 1))
        for begin in range(first, min(first + SHARE, sizes[name]), columns):
            part = slice(begin, min(begin + columns, first + SHARE, sizes[name]))
            steps, old = held[:, : part.stop - begin], wire.widened(start[part], then[0])
            for step, new in zip(steps, models, strict=True):
                np.subtract(wire.widened(new[part], now[0]), old, out=step)
            found.append(gram(steps))
        return found

    spans = [(name, first) for name, size in sizes.items() for first in range(0, size, SHARE)]
    for found in each(of, spans, num_bytes=num_bytes(model)):
        for products in found:  # in their order, whichever came first
            total += products
    return total


# ---------------------------------------------------------------- directions


@dataclass(frozen=True)
class _Direction:
    """An update with its cosine to the mean direction of its group's other updates."""

    update: Update
    cosine: float
    out_of_line: bool


@dataclass(frozen=True)
class _Voting:
    """At least four silos of a group that trained the same model in the round's own training.

    ``products`` (n, n) are inner products of their updates before clipping, ``norms`` the norms.
    """

    positions: Sequence[int]
    updates: Updates
    products: FloatArray
    norms: Sequence[float]


def _voting(updates: Updates, groups: Sequence[Group], started: _Starts) -> list[_Voting]:
    """Return the silos whose directions are compared with each other."""
    together = {name for group in groups if len(group) > 1 for name in group}
    found = []
    for group in _alike(updates, lambda u: (u.purpose, started(u.start))):
        at = [i for i in group if not updates[i].purpose and updates[i].silo.name in together]
        if len(at) >= FEWEST_VOTES:
            own = [updates[i] for i in at]
            products = _products(own)
            norms = [float(norm) for norm in np.sqrt(products.diagonal())]
            if not all(is_seen(u.model) for u in own):  # products of sketches; lengths are reported
                norms = [update_norm(u) for u in own]
            found.append(_Voting(at, own, products, norms))
    return found


def _directions(voting: Sequence[_Voting]) -> list[_Direction]:
    """Return directions; each silo has one vote, so that a single one cannot turn the mean."""
    found = [one for group in voting for one in _beside_others(group)]
    return sorted(found, key=lambda one: one.update.silo.name)


def _beside_others(group: _Voting) -> list[_Direction]:
    norms = np.array(group.norms)
    scale = np.where(norms > 0, norms, 1.0)
    directions = group.products / np.outer(scale, scale)
    square = math.fsum(directions.ravel())
    cosines = []
    for norm, row in zip(norms, directions, strict=True):
        along, one = math.fsum(row), float(norm > 0)
        others = math.sqrt(max(square - 2 * along + one, 0.0))  # |total − own direction|
        cosines.append((along - one) / others if others > 0 else 0.0)
    usual, median = float(np.median(cosines)), float(np.median(norms))
    spread = float(np.median(np.abs(np.array(cosines) - usual)))
    least = min(AGAINST, usual - SPREAD * spread) if usual >= AGREEMENT else -math.inf
    return [
        _Direction(u, cosine, cosine < least and norm >= SHORT * median)
        for u, cosine, norm in zip(group.updates, cosines, norms, strict=True)
    ]


def _judged(
    found: Sequence[_Direction], reputation: Reputation, patience: int, number: int
) -> tuple[Reputation, dict[str, str]]:
    """Quarantine silos that were outliers too often, with the model that they were sent."""
    if not patience:
        return reputation, {}
    strikes, apart, times = dict(reputation.strikes), dict(reputation.apart), dict(reputation.times)
    cleared, moved_out = set(), {}
    for one in found:
        name = one.update.silo.name
        if not one.out_of_line:
            strikes.pop(name, None)
            cleared.add(name)
            continue
        strikes[name] = strikes.get(name, 0) + 1
        on_probation = name in reputation.probation
        if strikes[name] < patience and not on_probation:
            continue
        times[name] = times.get(name, 0) + 1
        until = number + 1 + AWAY * 2 ** (times[name] - 1)
        rounds = f"{wire.counted(strikes[name], 'round')} in a row"
        moved_out[name] = (
            f"its update pointed away from its group's {rounds} (cosine {one.cosine:.2f})"
            f"{', on probation' if on_probation else ''}: it trains alone until round {until}."
        )
        apart[name] = Quarantined(one.update.start, number, until, moved_out[name])
        strikes.pop(name)
    kept = replace(
        reputation,
        strikes=strikes,
        times=times,
        apart=apart,
        probation=reputation.probation - cleared - set(moved_out),
    )
    return kept, moved_out
