"""Auto: find during training which silos should train together.

Which strategy is best depends on how the silos differ, which is unknown in advance. The grouping
strategies differ only in a handful of partitions, so Auto races these.

- *Look.* Every silo trains alone from w⁰, with part of its training data held out, until the groups
  are visible or a third of the run is over.
- *Race.* Candidates are all silos alone, all together, the partitions that HCCT over all α and
  FedGroup over all numbers of groups form from the updates (``candidates``), and FedCollab's from
  the discriminators of silos that allow them. Every distinct group trains a model from the mean of
  its members' models; every silo measures the models it is offered on its held-out samples. A
  candidate that is worse beyond chance, by differences within silos, drops out. The race ends when
  one is left, or after a few rounds within a budget: of those as good as the best, the one with
  most data behind its models wins, but never with more held-out errors than all silos alone
  (``decision``).
- *Hold.* The winner's groups continue with all data. A silo whose group's model is expected to be
  worse for it, by its measurements shrunk towards those of all silos, keeps its own; it still
  trains with its group while the budget allows.
- A newcomer, or a silo that returns with different data, measures every group's model on its own
  data, trains some rounds with the nearest group and alone, and joins if the group is not worse. If
  many silos come, leave or change data, the race is run again.

A run that ends during a race keeps the best so far, or all silos alone if nothing is known. Only
models, discriminators (if the silo allows them), and the error, loss and number of held-out samples
leave a silo.

The design is this project's own. Side-by-side models are compared as in IFCA (Ghosh et al., NeurIPS
2020), and dropped as in successive halving (Jamieson and Talwalkar, AISTATS 2016).
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from pydantic import Field

from coterie import wire
from coterie.features.sums.trees.coordinator import Growth, is_trees, require_rounds
from coterie.strategies.auto import families, growing, hidden_layers, own_models, pairs
from coterie.strategies.auto.budget import Budget, holdout, planned
from coterie.strategies.auto.candidates import (
    Candidate,
    between,
    everybody_alone,
    nested,
    trivial,
    visible,
)
from coterie.strategies.auto.entries import details_of
from coterie.strategies.auto.evidence import (
    MEASURES,
    has_learned,
    judges_of,
    standings_of,
)
from coterie.strategies.auto.newcomers import after_probation, nearest
from coterie.strategies.auto.race import (
    decided,
    fell_behind,
    goes_on,
    race_orders,
    reduced,
    with_raced,
    would_leave,
)
from coterie.strategies.auto.state import (
    ALONE,
    GROUP,
    AutoState,
    at_home,
    ending,
    group_of,
    handed_out,
    held_of,
    holding,
    key_of,
    trained_together,
    without,
)
from coterie.strategies.auto.updates import (
    beginning,
    distinct_held,
    has_begun,
    products_of_alone,
    with_alone,
    with_held,
)
from coterie.strategies.errors import EXIT_CONFIG, FederationError
from coterie.strategies.partition.products import gram_of_rounds
from coterie.strategies.plain import hidden
from coterie.strategies.rounds.algorithm import (
    Algorithm,
    Compared,
    Exchanges,
    Order,
    Round,
    Updates,
    catch_up,
)
from coterie.strategies.rounds.handles import Arrays
from coterie.strategies.rounds.options import Config, Scalar, Seed
from coterie.strategies.rounds.reports import Group
from coterie.strategies.rounds.roster import Silo

log = logging.getLogger("coterie.run")

LOOK_SHARE, MAX_LOOK = 1 / 3, 6
"""Most rounds of a look: as a share of the run's rounds, and in number."""
LEAST_ROUNDS = 6
"""Minimum rounds of a run, for look, race and hold."""
CHURN = 0.25
"""Share of silos (at least two) that must have come, left or changed data for another race."""


class Auto(Growth, Algorithm[AutoState]):
    """A race between the partitions that other strategies would form; the best one is held."""

    budget: float = Field(
        2.0,
        ge=1.2,
        le=20,
        description="Largest number of trainings per silo, as a multiple of FedAvg's in the same "
        "number of rounds (above 20: in the next multiple of 20).",
    )
    byte_budget: float = Field(
        3.0,
        ge=1.5,
        le=1e6,
        description="Largest total traffic of models and discriminators, as a multiple of "
        "FedAvg's bytes in the same number of rounds. Linear models: at least 1 MB per silo.",
    )
    discriminators: bool = Field(
        True,
        description="Whether silos that allow it (`auxiliary` in silo.toml) also train "
        "FedCollab's discriminators, for up to 24 silos, which adds one candidate. Their size is "
        "chosen so that they use one sixth of the run's byte limit.",
    )
    seed: Seed = 0
    remembers = AutoState
    works_unseen = True
    models_in = ("alone", "models", "group_models", "latest")

    def problems(self, training: Config) -> Iterator[str]:
        rounds = int(training.get(wire.ROUNDS, 0))
        if 0 < rounds < LEAST_ROUNDS:
            yield (
                "auto measures, races and then trains the winner: rounds must be at least "
                f"{LEAST_ROUNDS}. Got {rounds}. For fewer, name a strategy"
            )
        if training.get(wire.PERSONAL):
            yield (
                "auto trains several models side by side, but a silo has only one version of "
                "its personal layers. Leave personal empty, or name a strategy"
            )

    def check(self, initial: Arrays, rounds: int) -> None:
        if parts := families.parts_of(initial):
            families.require(self, parts, rounds)
        if is_trees(initial):
            least = max(growing.needed(self, initial), LEAST_ROUNDS)
            require_rounds(initial, rounds, least)

    def first(self, initial: Arrays) -> AutoState:
        return families.first(initial)

    def own_trees(self, state: AutoState) -> Mapping[str, Config] | None:
        if state.boosted is None:
            return None
        return self.own_entries(state.boosted.state)

    def agreed_bins(self, state: AutoState) -> Arrays | None:
        return state.trees.bins if is_trees(state.members.initial) else None

    def compared(self, state: AutoState) -> Compared | None:
        if state.boosted is not None or is_trees(state.members.initial):
            raise FederationError(
                "auto compares what each silo's rows say about trees, which a secure run hides. "
                "Give the groups (strategy trees with given-groups or groups-of). If the task has "
                'network = "any", also set task.family to trees, or keep auto and set it to '
                "network.",
                exit_code=EXIT_CONFIG,
            )
        return Compared()

    @property
    def _limits(self) -> Budget:
        return Budget(self.budget, self.byte_budget)

    # ---------------------------------------------------------------- before a round

    def welcome(self, state: AutoState, new: frozenset[str], now: Round) -> AutoState:
        """Start new silos alone from w⁰; say what ClientApps of others must measure."""
        if state.boosted is not None:
            return families.welcomed(self, state, new, now)
        if now.number == 1:
            first = hidden.linear_first(state.members.initial, now.config) and not now.unseen
            state = replace(state, linear_first=first)
        if now.number == 1 and not all(silo.described for silo in now.silos):
            log.info(
                "auto compares models by what silos measure on training data that they hold out. "
                "A ClientApp does that if it answers the entry holdout of a training message with "
                "holdout-error (see %s). Without that no group can be shown to be better than "
                "training alone, and every silo keeps its own model; hcct and fedgroup need no "
                "such measurement.",
                wire.page("Use the strategies in your own Flower app"),
            )
        return self._begun(state, new, now)

    def renew(self, state: AutoState, changed: frozenset[str], now: Round) -> AutoState:
        """Treat silos with changed data as newcomers, once there are groups."""
        if state.boosted is not None:
            return families.renewed(self, state, changed, now)
        if not state.held:
            return state
        for name in sorted(changed):
            state = without(state, name)
        return self._begun(replace(state, drifted=state.drifted | changed), changed, now)

    def _begun(self, state: AutoState, new: frozenset[str], now: Round) -> AutoState:
        begun = dict.fromkeys(sorted(new), state.members.initial)
        noise = {name: own for name, own in state.noise.items() if name not in begun}
        products = state.products.without(begun)
        state = replace(state, alone={**state.alone, **begun}, noise=noise, products=products)
        if state.held:
            state = replace(state, probation={**state.probation, **dict.fromkeys(sorted(new), 0)})
            state = self._again(state, now)
        return state

    def _again(self, state: AutoState, now: Round) -> AutoState:
        """Start another look if many silos changed and time and budget allow it."""
        here = frozenset(now.names)
        changed = len(here ^ state.raced | here & state.drifted)
        least = max(2, CHURN * len(state.raced))
        rounds_left = planned(now) - now.number + 1
        if state.phase != "hold" or changed < least or rounds_left < LEAST_ROUNDS:
            return state
        most = max((state.trainings.get(name, 0) for name in here), default=0)
        if most + rounds_left + 2 * LEAST_ROUNDS > self.budget * planned(now):
            return state
        if not self._limits.allows_bytes(state, now, (rounds_left + 2 * LEAST_ROUNDS) * len(here)):
            return state
        log.info(
            "auto: %d silos joined, left or changed their data since the race: running it again",
            changed,
        )
        return replace(
            state, phase="look", since=now.number - 1, candidates=(), models={}, measured={}
        )

    def prepare(self, state: AutoState, now: Round) -> Exchanges[AutoState]:
        """Compare pairs; end a race by own models; let newcomers measure groups' models."""
        if state.boosted is not None:
            return (yield from families.prepared(self, state, now))
        state = yield from self._with_own_models(state, now)
        if is_trees(state.members.initial):
            state = yield from growing.grown(state, self, self._limits, now)
        state = yield from pairs.measured(self, state, self._limits, now)
        state = yield from nearest(state, now)
        return (yield from own_models.of_newcomers(state, now))

    def _with_own_models(self, state: AutoState, now: Round) -> Exchanges[AutoState]:
        if not state.measures_own:
            return state
        measured = yield from own_models.measured(state, self._limits, now)
        return handed_out(decided(measured, now, complete=True), now)

    # ---------------------------------------------------------------- a round

    def orders(self, state: AutoState, now: Round) -> tuple[AutoState, list[Order]]:
        """Order training of the held model, then the silo's own, then the raced ones."""
        if state.boosted is not None:
            return families.ordered(self, state, now)
        state = replace(state, members=state.members.holding(holding(state)))
        state = replace(state, members=state.members.grouped(trained_together(state, now.names)))
        work: list[Order] = []
        for silo in now.silos:
            work += self._orders_of(state, silo, now)
        return state, work

    def _orders_of(self, state: AutoState, silo: Silo, now: Round) -> list[Order]:
        name, kept_out = silo.name, _kept_out(state, silo)
        racing = state.phase != "hold"
        own = Order(silo, state.alone[name], config={**kept_out, wire.GROUP_SIZE: 1})
        if not state.held:
            work = [own]
        else:
            work = self._held_orders(state, silo, now)
            grouped = len(group_of(state.held, name)) > 1 and name not in state.own
            if racing and grouped and not is_trees(state.members.initial):
                work.append(replace(own, purpose=ALONE, beside=(now.number, "")))
        if state.phase == "race" and name not in state.trees.lost:
            work += race_orders(state, silo, now)
        return work

    def _held_orders(self, state: AutoState, silo: Silo, now: Round) -> list[Order]:
        """Order the training of a placed silo; of two models for a silo on probation."""
        name, group = silo.name, group_of(state.held, silo.name)
        kept_out = _kept_out(state, silo)
        alone = Order(silo, state.alone[name], config={**kept_out, wire.GROUP_SIZE: 1})
        if name in state.probation:
            beside = state.beside.get(name)
            if beside is None:
                return [alone]
            config: dict[str, Scalar] = {
                **holdout(silo),
                wire.GROUP_SIZE: _size_here(beside, now) + 1,
            }
            new = not state.probation[name]
            longer = catch_up(silo, now, most=MAX_LOOK) if new else {}
            shared = Order(silo, state.group_models[beside], config=config)
            if is_trees(state.members.initial):
                return [shared]
            return [
                shared,
                replace(
                    alone,
                    purpose=ALONE,
                    beside=(now.number, ""),
                    config={**alone.config, **longer},
                ),
            ]
        longer = self._limits.longer(state, name, now)
        alone = replace(alone, config={**alone.config, **longer})
        if len(group) == 1:
            return [alone]
        size: dict[str, Scalar] = {wire.GROUP_SIZE: _size_here(group, now), **longer}
        shared = Order(silo, held_of(state, group, name), config=size)
        if name not in state.own:
            return [shared, *hidden_layers.orders(state, alone, self._limits, now)]
        left = planned(now) - now.number + 1
        affordable = self._limits.allows_bytes(state, now, (len(now.silos) + len(state.own)) * left)
        if affordable and state.trainings.get(name, 0) + 2 * left <= self.budget * planned(now):
            return [alone, replace(shared, purpose=GROUP)]
        return [alone]

    def absorb(self, state: AutoState, updates: Updates, now: Round) -> AutoState:
        if state.boosted is not None:
            return families.absorbed(self, state, updates, now)
        state = self._limits.charged(replace(state, number=now.number), updates, now)
        state = with_alone(state, updates, unseen=now.unseen)
        state = with_held(state, updates)
        if state.phase == "race":
            state = with_raced(state, updates)
        state = after_probation(state, now)
        if state.phase == "look":
            state = self._after_look(state, now)
        elif state.phase == "race":
            state = self._after_race_round(state, now)
        return handed_out(state, now)

    def _after_look(self, state: AutoState, now: Round) -> AutoState:
        names = sorted(n for n in now.names if has_begun(state, n))
        if len(names) < 2:
            return state
        looked = now.number - state.since
        trees = is_trees(state.members.initial)
        longest = 1 if trees else min(MAX_LOOK, max(1, int(LOOK_SHARE * planned(now))))
        found = self._suggested(state, names, now)
        if looked < longest and not (has_learned(state) and visible(found, state.candidates)):
            return replace(state, candidates=found)
        if planned(now) - now.number < 2:
            return state  # no time is left to train anything else
        candidates = distinct_held(state, (*trivial(names, state.members.minimums), *found), names)
        if now.unseen:
            candidates = nested(candidates, state.members.minimums)
        candidates = pairs.proposed(state, candidates, names)
        if trees:
            candidates = growing.with_split(candidates)
        candidates = self._limits.affordable(candidates, partial(self._affords, state, now))
        groups = {key_of(c, group[0]) for c in candidates for group in c.groups}
        models = {group: beginning(state, group) for group in sorted(groups) if len(group) > 1}
        log.info("auto races %s", "; ".join(c.source for c in candidates))
        return replace(
            state,
            phase="race",
            since=now.number,
            candidates=candidates,
            dropped=(),
            models=models,
            measured={},
            trees=replace(state.trees, arms={}, raced=False),
            raced=frozenset(names),
            drifted=frozenset(),
        )

    def _affords(self, state: AutoState, now: Round, found: Sequence[Candidate]) -> bool:
        if is_trees(state.members.initial):
            return growing.fits(state, found, self._limits, self, now)
        return self._limits.allows_race(state, found, now)

    def _suggested(
        self, state: AutoState, names: Sequence[str], now: Round
    ) -> tuple[Candidate, ...]:
        if state.trees.roots:
            matrix = growing.compared(state, names)
        elif now.unseen:
            matrix = gram_of_rounds(state.products, names)
        else:
            matrix = products_of_alone(state, names, now)
        sizes = np.array([max(state.members.sizes[name], 1.0) for name in names])
        rng = np.random.default_rng([self.seed, now.number])
        return between(names, matrix, sizes, state.members.minimums, rng)

    def _after_race_round(self, state: AutoState, now: Round) -> AutoState:
        if is_trees(state.members.initial):
            if state.trees.raced and own_models.tried(state, now):
                return replace(state, measures_own=True)
            return decided(state, now, complete=True) if state.trees.raced else state
        raced = now.number - state.since
        if raced < MEASURES:
            return state
        if raced == MEASURES and not judges_of(state):
            log.warning(
                "auto: no silo reports errors on held-out data, so the race cannot be decided. "
                "Policies may forbid it (share_metrics in silo.toml)"
            )
        found = standings_of(state)
        spared = own_models.tried(state, now)
        kept = [c for c, s in zip(state.candidates, found, strict=True) if not s.out or c in spared]
        undecided = len(kept) > 1 or (now.unseen and would_leave(state, kept[0]))
        ahead = own_models.cost(state, spared, now)
        if undecided and goes_on(state, kept, self._limits, now, ahead):
            return reduced(state, now, spared)
        if spared and now.number < planned(now):
            return replace(state, measures_own=True)
        return decided(state, now, complete=True)

    def finish(self, state: AutoState, now: Round) -> Exchanges[AutoState]:
        """End an open race with the best so far; mix their own model in for silos in doubt."""
        if state.boosted is not None:
            return (yield from families.ended(self, state, now))
        if state.phase == "race" and judges_of(state):
            state = yield from own_models.measured(state, self._limits, now)
        if state.phase == "hold" or (state.held and not fell_behind(state)):
            return replace(state, members=state.members.holding(ending(state)))
        if state.phase == "race" and judges_of(state):
            state = handed_out(decided(state, now, complete=False), now)
        log.warning(
            "auto: the run ended before its %s. %s",
            "race" if state.models or state.held else "look",
            "It keeps the best so far" if state.held else "Every silo keeps its own model",
        )
        if is_trees(state.members.initial) and not state.held:  # each grows its own at home
            state = handed_out(replace(state, held=everybody_alone(state.alone).groups), now)
        return state

    # ---------------------------------------------------------------- views

    def own_entries(self, state: AutoState) -> Mapping[str, Config]:
        """Return λ for silos that hold a group's model, and of trees the entry for those alone."""
        found: dict[str, Config] = dict.fromkeys(sorted(at_home(state)), self.entry_at_home())
        if not state.penalty:
            return found
        grouped = {n for group in state.held if len(group) > 1 for n in group}
        grouped |= {name for name in state.probation if name in state.beside}
        grouped -= state.own | state.noise.keys()
        return {**found, **dict.fromkeys(sorted(grouped), own_models.entries(state.penalty))}

    def apart(self, state: AutoState) -> Mapping[str, Any]:
        return hidden_layers.apart(state)

    def left_apart(self, state: AutoState, now: Round) -> AutoState:
        return hidden_layers.left_apart(state, now)

    def comparing(self, state: AutoState, now: Round) -> bool:
        grows = is_trees(state.members.initial)
        return state.phase != "hold" or (grows and growing.incomplete(state))

    def details(self, state: AutoState) -> Mapping[str, Any]:
        how = details_of if state.boosted is None else families.details
        return how(state, self.byte_budget)


def _size_here(group: Group, now: Round) -> int:
    return max(sum(name in now.here for name in group), 1)


def _kept_out(state: AutoState, silo: Silo) -> Config:
    """Return the entry that holds samples out where the model that a silo holds is measured."""
    measured = silo.name in state.probation or state.phase != "hold"
    return holdout(silo) if measured and not is_trees(state.members.initial) else {}
