"""The choice of α in a run: its scale; when its trial opens, and what follows from the verdict.

The trial itself is ``coterie.strategies.hcct.alpha``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence, Set
from dataclasses import replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.strategies.errors import FederationError, refused
from coterie.strategies.hcct import alpha as trials
from coterie.strategies.hcct.alpha import Landscape
from coterie.strategies.hcct.state import HCCTState
from coterie.strategies.partition.gram import gram
from coterie.strategies.rounds.algorithm import Round, Updates
from coterie.strategies.rounds.members import mean_of_all, present_groups, stated_samples

log = logging.getLogger("coterie.run")

SCALE = 2 / 3
"""α of ``scaled``, as a multiple of the median silo's samples.

Eq. 9 weighs ``α / D`` against cosines, which have no unit: of N silos with D samples each, K groups
of equal updates beat all-alone and all-together for the same α / D whatever D is. The factor is
within the right range in all cases of ``benchmarks/papers/hcct/scaled.py``."""
MAX_WAIT = 4
"""Round at whose end ``auto`` stops waiting for silos that have never answered."""
PATH_SEARCH = {"num_restarts": 2, "exact": 12}
"""Restarts of the search at each α of a path, and the most silos for an exact search; a path has a
hundred values of α."""

Solve: TypeAlias = Callable[..., list[list[int]]]
"""The run's own search: utility and options → groups."""


def alphas_of(
    alpha: float | str, state: HCCTState, names: Sequence[str], sizes: ArrayLike
) -> NDArray[np.float64]:
    """Return the α of silos that are compared, in samples: their own, or the run's.

    Args:
        alpha: the option's value.
        names: the silos.
        sizes: (N,) their training samples, which set the scale.
    """
    run = _alpha_of_run(alpha, state, sizes)
    return np.array([state.alphas.get(name, run) for name in names])


def _alpha_of_run(alpha: float | str, state: HCCTState, sizes: ArrayLike) -> float:
    if alpha == "scaled":
        return SCALE * float(np.median(np.asarray(sizes, np.float64)))
    if alpha != "auto":
        return float(alpha)
    if state.alpha is None:  # one silo among some with their own α: their mean
        return float(np.mean(sorted(state.alphas.values())))
    return state.alpha


def found_alpha(alpha: float | str, state: HCCTState) -> dict[str, Any]:
    """Return entries of the record: the α that ``scaled`` or ``auto`` has found, and its trial."""
    if not isinstance(alpha, str):
        return {}
    known = state.alpha is not None if alpha == "auto" else bool(state.compared)
    found: dict[str, Any] = {"trial": dict(state.verdict)} if state.verdict else {}
    return {"alpha": _alpha_of_run(alpha, state, state.sizes_used) if known else None, **found}


def goes_by_stated(state: HCCTState, here: Sequence[str]) -> bool:
    """Return whether ``auto`` tries nothing, as all silos here but at most one state their own α.

    Groups formed that way are not dissolved for a trial when more silos without α come.
    """
    undecided = [name for name in here if name not in state.alphas]
    few = len(undecided) < 2 and len(undecided) < len(here)
    return bool(state.alphas) and (few or bool(state.compared))


def nobody_judges() -> FederationError:
    return refused(
        "alpha = auto needs silos' errors on held-out data, and no silo reported one. "
        "ClientApps other than coterie's do not hold out data, and a silo's policy may forbid "
        "sending its error (share_metrics in silo.toml). Give alpha as a number."
    )


def _is_time(now: Round) -> bool:
    """Return whether a trial that begins now leaves a round for its groups."""
    rounds = now.rounds
    last = trials.last_to_begin(rounds)
    if rounds and now.number == max(last + 1, 1):
        log.warning(
            "alpha = auto needs %d more rounds than remain to find its groups: every silo "
            "stays alone. Give alpha as a number, or set more rounds",
            max(now.number, trials.MIN_LOOK) - last,
        )
    return not rounds or now.number <= last


def open_trial(
    state: HCCTState, here: Sequence[str], answered: Set[str], now: Round, *, solve: Solve
) -> HCCTState:
    """Open the trial for α once the first updates allow it.

    Until then all silos continue alone; a silo whose first answer was lost is waited for. A
    silo that states its own α has no part in the trial and trains alone until it is over.
    """
    waiting = replace(
        state,
        planned=tuple((name,) for name in here),
        starts={**state.starts, **{name: state.members.models[name] for name in here}},
        newcomers=state.newcomers - answered,
        compared=(),
        similarity=(),
        norms=(),
        alphas_used=(),
        sizes_used=(),
    )
    undecided = [name for name in here if name not in state.alphas]
    names = sorted(name for name in undecided if name in state.memory)
    heard = len(names) == len(undecided) or now.number >= MAX_WAIT
    time_for_it = _is_time(now)
    if now.number < trials.MIN_LOOK or not names or not heard or not time_for_it:
        return waiting
    landscape, rounds = _landscape(state, names, now, solve), now.rounds
    found = trials.candidates(landscape)
    if len(found) == 1:
        return waiting
    if now.number < trials.look_until(rounds) and not trials.is_visible(found, landscape):
        return waiting
    opened = trials.open_trial(
        found,
        state.members,
        untrained=state.untrained,
        rounds_left=trials.budget(rounds, now.number),
    )
    return replace(waiting, trial=opened)


def _landscape(state: HCCTState, names: Sequence[str], now: Round, solve: Solve) -> Landscape:
    return Landscape(
        names=names,
        gram=gram(
            [list(state.memory[name].values()) for name in names],
            noise=[state.noise.get(name, 0.0) for name in names],
        ),
        sizes=np.array(stated_samples(state.members, names, now.max_share)),
        minimums=state.members.minimums,
        solve=partial(solve, **PATH_SEARCH),
    )


def continue_trial(state: HCCTState, updates: Updates, now: Round, *, solve: Solve) -> HCCTState:
    """Take the trial's round in; at its end hold the winner's groups, or look again."""
    assert state.trial is not None
    trial = trials.continue_trial(state.trial, updates)
    models = dict(state.members.models)
    last = now.number == now.rounds
    if not (trials.is_decided(trial) or trial.rounds_left <= 0 or last):
        return replace(state, trial=trial, starts={**state.starts, **models})
    here = set(state.members.here)
    tried = {name for group in trial.groups for name in group}
    gone = not tried & here or (trial.leader is None and tried - here)
    if gone and not last:
        log.warning(
            "alpha = auto: %s left, and no silo could compare all partitions: starting again "
            "with the remaining silos",
            ", ".join(sorted(tried - here)),
        )
        alone = tuple((name,) for name in sorted(here))
        return replace(state, trial=None, planned=alone, starts={**state.starts, **models})
    best = trial.candidates[trial.leader or 0]
    verdict = trials.verdict(trial, last=last)
    for group in best.groups:
        models |= dict.fromkeys(group, trial.models[group])
    names = sorted(tried & set(state.memory))  # who is away just now belongs to the groups too
    groups = present_groups(best.groups, here)
    members = state.members.holding(models).grouped(groups)
    placed = tuple(group for group in groups if not state.newcomers & set(group))
    mean = mean_of_all(members.grouped(placed))
    landscape = _landscape(state, names, now, solve) if names else None
    return replace(
        state,
        trial=None,
        verdict=verdict,
        alpha=best.alpha if landscape is None else trials.alpha_of(best, landscape),
        members=members,
        planned=best.groups,
        held=tuple(sorted(tried)),
        # Who came meanwhile is placed now, by a round from the mean of all.
        starts={**state.starts, **models, **dict.fromkeys(sorted(state.newcomers), mean)},
    )
