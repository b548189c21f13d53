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
from typing import Any

import numpy as np
from pydantic import Field

from coterie import wire
from coterie.strategies.auto.candidates import (
    Candidate,
    between,
    nested,
    trivial,
    visible,
    with_proposal,
)
from coterie.strategies.auto.decision import decision
from coterie.strategies.auto.entries import (
    entrant_entry,
    placement_entry,
    verdict_entry,
    verdict_text,
)
from coterie.strategies.auto.evidence import (
    MEASURES,
    behind_alone,
    entrants_of,
    fits,
    gains_of,
    has_learned,
    judges_of,
    measurement,
    noted,
    standings_of,
    trials_of,
)
from coterie.strategies.auto.state import (
    AutoState,
    Entrant,
    Measured,
    Placement,
    Verdict,
    ending,
    group_of,
    handed_out,
    holding,
    share_of,
    trained_together,
    without,
)
from coterie.strategies.errors import EXIT_CONFIG, FederationError
from coterie.strategies.fedcollab.algorithm import FedCollab, FedCollabState
from coterie.strategies.fedcollab.discriminators import Discriminators
from coterie.strategies.partition.gram import gram
from coterie.strategies.plain import probes
from coterie.strategies.rounds.algorithm import (
    Algorithm,
    Compared,
    Exchanges,
    Order,
    Round,
    Update,
    Updates,
    catch_up,
    num_bytes,
)
from coterie.strategies.rounds.handles import Arrays, Model, is_seen
from coterie.strategies.rounds.members import Members, minimums_of, present_groups, staying
from coterie.strategies.rounds.models import comparable, difference, same_model, weighted_mean
from coterie.strategies.rounds.options import Config, Scalar, Seed
from coterie.strategies.rounds.policy import average
from coterie.strategies.rounds.replies import error_of
from coterie.strategies.rounds.reports import Group
from coterie.strategies.rounds.roster import Silo

log = logging.getLogger("coterie.run")

HOLDOUT = 0.2
"""Share of its training data that a silo holds out during look and race."""
FEWEST = 5
"""Training samples below which a silo holds nothing out and does not judge."""
LOOK_SHARE, MAX_LOOK = 1 / 3, 6
"""Most rounds of a look: as a share of the run's rounds, and in number."""
MAX_RACE = 4
"""Maximum rounds of a race; relevant differences show in fewer."""
UNDECIDED = 0.5
"""Share of the run up to which a race continues while all-alone is still in it."""
HOLD_SHARE = 0.2
"""Minimum share of the run's rounds left for the winner, which trains on all data."""
LEAST_ROUNDS = 6
"""Minimum rounds of a run, for look, race and hold."""
PROBATION = 2
"""Rounds that a newcomer trains with a group before its update counts there."""
EXTRA = 2
"""Rounds' worth of epochs in one round of the winner, while the budget allows."""
PAIRED_SHARE = 1 / 6
"""Discriminators' share of the byte limit: what races within the default training budget leave."""
FEWEST_ROUNDS = 5
"""Minimum discriminator rounds; after fewer, distances carry little information."""
MAX_PAIRED = 24
"""Maximum number of silos of which every pair is compared by a discriminator."""
CHURN = 0.25
"""Share of silos (at least two) that must have come, left or changed data for another race."""
AS_IT_IS = "as it is"
"""Source of the partition that is held when a race is run again."""
ALONE, GROUP = "alone", "group"
"""Purposes of a silo's trainings in addition to that of the model that it holds."""


class Auto(Algorithm[AutoState]):
    """A race between the partitions that other strategies would form; the best one is held."""

    budget: float = Field(
        2.0,
        ge=1.2,
        le=20,
        description="Largest number of trainings per silo, as a multiple of FedAvg's in the same "
        "number of rounds.",
    )
    byte_budget: float = Field(
        3.0,
        ge=1.5,
        le=1e6,
        description="Largest total traffic of models and discriminators, as a multiple of "
        "FedAvg's bytes in the same number of rounds.",
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
                f"auto looks, races and then trains the winner: rounds must be at least "
                f"{LEAST_ROUNDS}. Got {rounds}"
            )
        if training.get(wire.PERSONAL):
            yield (
                "auto trains several models side by side, and of layers that stay at a silo there "
                "is one version. Leave personal empty, or name a strategy"
            )

    def compared(self, state: AutoState) -> Compared | None:
        return Compared()

    # ---------------------------------------------------------------- before a round

    def welcome(self, state: AutoState, new: frozenset[str], now: Round) -> AutoState:
        """Start new silos alone from w⁰; raise FederationError if none measures held-out data."""
        if now.silos and not any(silo.described for silo in now.silos):
            raise FederationError(
                "auto needs silos that measure models on data they hold out, as coterie's own do "
                "(`coterie silo`). The ClientApps here do not: name a strategy, such as hcct "
                "(docs/how-to/choose-a-strategy.md).",
                round_number=now.number,
                phase="auto",
                exit_code=EXIT_CONFIG,
            )
        return self._begun(state, new, now)

    def renew(self, state: AutoState, changed: frozenset[str], now: Round) -> AutoState:
        """Treat silos with changed data as newcomers, once there are groups."""
        if not state.held:
            return state
        for name in sorted(changed):
            state = without(state, name)
        return self._begun(replace(state, drifted=state.drifted | changed), changed, now)

    def _begun(self, state: AutoState, new: frozenset[str], now: Round) -> AutoState:
        begun = dict.fromkeys(sorted(new), state.members.initial)
        noise = {name: own for name, own in state.noise.items() if name not in begun}
        state = replace(state, alone={**state.alone, **begun}, noise=noise)
        if state.held:
            state = replace(state, probation={**state.probation, **dict.fromkeys(sorted(new), 0)})
            state = self._again(state, now)
        return state

    def _most_bytes(self, state: AutoState, now: Round) -> float:
        """Return the byte limit: ``byte_budget`` times FedAvg's bytes, past and still to come."""
        each = state.each or _bytes_each(state.members.initial, now)
        ahead = (now.rounds - state.number) * len(now.silos) * each
        return self.byte_budget * (state.usual + ahead)

    def _within_bytes(self, state: AutoState, now: Round, exchanges: float) -> bool:
        return state.moved + exchanges * state.each <= self._most_bytes(state, now)

    def _again(self, state: AutoState, now: Round) -> AutoState:
        """Start another look if many silos changed and time and budget allow it."""
        here = frozenset(now.names)
        changed = len(here ^ state.raced | here & state.drifted)
        least = max(2, CHURN * len(state.raced))
        rounds_left = now.rounds - now.number + 1
        if state.phase != "hold" or changed < least or rounds_left < LEAST_ROUNDS:
            return state
        most = max((state.trainings.get(name, 0) for name in here), default=0)
        if most + rounds_left + 2 * LEAST_ROUNDS > self.budget * now.rounds:
            return state
        if not self._within_bytes(state, now, (rounds_left + 2 * LEAST_ROUNDS) * len(here)):
            return state
        log.info(
            "auto: %d silos came, went or have other data since the race: it is run again", changed
        )
        return replace(
            state, phase="look", since=now.number - 1, candidates=(), models={}, measured={}
        )

    def prepare(self, state: AutoState, now: Round) -> Exchanges[AutoState]:
        """Compare pairs of silos; let newcomers measure every group's model on their own data."""
        asks = self.discriminators and not now.unseen  # they are models of a silo's data
        if state.phase == "look" and asks and 2 < len(now.silos) <= MAX_PAIRED:
            before = state.pairs or FedCollabState(state.members)
            before = replace(before, members=state.members)
            most = PAIRED_SHARE * self._most_bytes(state, now) - state.paired
            if most > 0:
                limit = Discriminators(gigabytes=most / 1e9, fewest=FEWEST_ROUNDS)
                fedcollab = FedCollab(c="auto", seed=self.seed, discriminators=limit)
                compared = yield from fedcollab.prepare(before, now)
                state = _with_pairs(state, compared, now)
        offered = sorted(group for group in state.held if group in state.group_models)
        new = [s for s in now.silos if s.name in state.probation and s.name not in state.beside]
        new = [silo for silo in new if silo.described]
        if not new or not offered:
            return state
        found = yield from probes.ask(new, [state.group_models[group] for group in offered])
        moved = sum(_bytes_of(answer) for own in found.values() for answer in own.values())
        state = replace(state, moved=state.moved + moved)
        beside = dict(state.beside)
        for name, answers in found.items():
            own = [
                (error_of(a.metrics), probes.loss_of(a), number)
                for number, a in answers.items()
                if np.isfinite(probes.loss_of(a))
            ]
            least = state.members.minimums.get(name, 1)
            accepted = [entry for entry in own if len(offered[entry[2]]) + 1 >= least]
            if accepted:
                beside[name] = offered[min(accepted)[2]]
        return replace(state, beside=beside)

    # ---------------------------------------------------------------- a round

    def orders(self, state: AutoState, now: Round) -> tuple[AutoState, list[Order]]:
        """Order training of the held model, then the silo's own, then the raced ones."""
        state = replace(state, members=state.members.holding(holding(state)))
        state = replace(state, members=state.members.grouped(trained_together(state, now.names)))
        work: list[Order] = []
        for silo in now.silos:
            work += self._orders_of(state, silo, now)
        return state, work

    def _orders_of(self, state: AutoState, silo: Silo, now: Round) -> list[Order]:
        name, kept_out = silo.name, _holdout(silo)
        racing = state.phase != "hold"
        own = Order(silo, state.alone[name], config={**kept_out, wire.GROUP_SIZE: 1})
        if not state.held:
            work = [own]
        else:
            work = self._held_orders(state, silo, now)
            if racing and len(group_of(state.held, name)) > 1 and name not in state.own:
                work.append(replace(own, purpose=ALONE))
        if state.phase == "race":
            work += _race_orders(state, silo, now)
        return work

    def _held_orders(self, state: AutoState, silo: Silo, now: Round) -> list[Order]:
        """Order the training of a placed silo; of two models for a silo on probation."""
        name, group = silo.name, group_of(state.held, silo.name)
        kept_out = _holdout(silo) if state.phase != "hold" or name in state.probation else {}
        alone = Order(silo, state.alone[name], config={**kept_out, wire.GROUP_SIZE: 1})
        if name in state.probation:
            beside = state.beside.get(name)
            if beside is None:
                return [alone]
            told: dict[str, Scalar] = {
                **_holdout(silo),
                wire.GROUP_SIZE: _size_here(beside, now) + 1,
            }
            new = not state.probation[name]
            longer = catch_up(silo, now, most=MAX_LOOK) if new else {}
            return [
                Order(silo, state.group_models[beside], config=told),
                replace(alone, purpose=ALONE, config={**alone.config, **longer}),
            ]
        longer = self._longer(state, name, now)
        alone = replace(alone, config={**alone.config, **longer})
        if len(group) == 1:
            return [alone]
        size: dict[str, Scalar] = {wire.GROUP_SIZE: _size_here(group, now), **longer}
        shared = Order(silo, state.group_models[group], config=size)
        if name not in state.own:
            return [shared]
        left = now.rounds - now.number + 1
        affordable = self._within_bytes(state, now, (len(now.silos) + len(state.own)) * left)
        if affordable and state.trainings.get(name, 0) + 2 * left <= self.budget * now.rounds:
            return [alone, replace(shared, purpose=GROUP)]
        return [alone]

    def absorb(self, state: AutoState, updates: Updates, now: Round) -> AutoState:
        state = self._with_cost(replace(state, number=now.number), updates, now)
        state = _with_alone(state, updates)
        state = _with_held(state, updates)
        if state.phase == "race":
            state = _with_raced(state, updates)
        state = self._placed(state, now)
        if state.phase == "look":
            state = self._after_look(state, now)
        elif state.phase == "race":
            state = self._after_race_round(state, now)
        return handed_out(state, now)

    def _with_cost(self, state: AutoState, updates: Updates, now: Round) -> AutoState:
        """Add the round's trainings, in passes over a silo's samples, and its bytes."""
        done, moved, usual, trained = dict(state.trainings), 0, 0, 0
        for update in updates:
            name = update.silo.name
            comparing = state.phase != "hold" or name in state.probation
            times = _pass(update.silo) if comparing else float(self._times(state, name, now))
            done[name] = done.get(name, 0.0) + times
            moved += _bytes_of(update)
            if not update.purpose:
                usual, trained = usual + _bytes_of(update), trained + 1
        return replace(
            state,
            trainings=done,
            moved=state.moved + moved,
            usual=state.usual + usual,
            each=usual / trained if trained else state.each,
        )

    def _longer(self, state: AutoState, name: str, now: Round) -> dict[str, Scalar]:
        times, key = self._times(state, name, now), wire.LOCAL_EPOCHS
        if now.config.get(wire.LOCAL_STEPS):
            key = wire.LOCAL_STEPS
        return {} if times == 1 else {key: times * int(now.config.get(key, 1))}

    def _times(self, state: AutoState, name: str, now: Round) -> int:
        """Return how many rounds' worth of epochs a group trains in this round of a hold.

        The remaining budget, spent early and equally for all members, makes up for the passes that
        held-out samples missed and for the race.
        """
        if state.phase != "hold":
            return 1
        group = [n for n in group_of(state.held, name) if n in now.here]
        epochs, left = int(now.config.get(wire.LOCAL_EPOCHS, 1)), now.rounds - now.number + 1
        for member in group:
            most = now.here[member].max_local_epochs
            if most and (most < EXTRA * epochs or now.config.get(wire.LOCAL_STEPS)):
                return 1
            if state.trainings.get(member, 0.0) + EXTRA + left - 1 > self.budget * now.rounds:
                return 1
        return EXTRA

    def _after_look(self, state: AutoState, now: Round) -> AutoState:
        names = sorted(n for n in now.names if n in state.alone and _has_begun(state, n))
        if len(names) < 2:
            return state
        looked = now.number - state.since
        longest = min(MAX_LOOK, max(1, int(LOOK_SHARE * now.rounds)))
        found = self._suggested(state, names, now)
        if looked < longest and not (has_learned(state) and visible(found, state.candidates)):
            return replace(state, candidates=found)
        if now.rounds - now.number < 2:
            return state  # no time is left to train anything else
        candidates = _distinct_held(state, (*trivial(names, state.members.minimums), *found), names)
        if now.unseen:
            candidates = nested(candidates, state.members.minimums)
        if state.pairs is not None and (structure := state.pairs.structure) is not None:
            candidates = with_proposal(
                candidates,
                names,
                state.pairs.planned,
                "FedCollab, c auto",
                whole=not structure.alone and set(names) <= set(structure.silos),
            )
        candidates = self._affordable(state, candidates, now)
        groups = {group for c in candidates for group in c.groups if len(group) > 1}
        models = {group: _mean_alone(state, group) for group in sorted(groups)}
        log.info("auto races %s", "; ".join(c.source for c in candidates))
        return replace(
            state,
            phase="race",
            since=now.number,
            candidates=candidates,
            dropped=(),
            models=models,
            measured={},
            raced=frozenset(names),
            drifted=frozenset(),
        )

    def _affordable(
        self, state: AutoState, found: Sequence[Candidate], now: Round
    ) -> tuple[Candidate, ...]:
        """Drop the weakest candidates, not trivial or held ones, until a race is affordable."""
        left = now.rounds - now.number - MEASURES
        kept = list(found)
        while True:
            groups = {group for c in kept for group in c.groups if len(group) > 1}
            arms = {n: 1 + sum(n in group for group in groups) for n in now.names}
            fits = self._within_bytes(
                state, now, MEASURES * sum(arms.values()) + left * len(now.names)
            ) and all(
                state.trainings.get(n, 0.0) + MEASURES * arms[n] * _pass(now.here[n]) + left
                <= self.budget * now.rounds
                for n in now.names
            )
            spare = [c for c in kept if not (c.is_trivial or c.source == AS_IT_IS)]
            if fits or not spare:
                return tuple(kept)
            weakest = min(spare, key=lambda c: (c.supported, c.num_sources, -kept.index(c)))
            kept.remove(weakest)
            log.info("auto does not race %s: the budget does not allow it", weakest.source)

    def _suggested(
        self, state: AutoState, names: Sequence[str], now: Round
    ) -> tuple[Candidate, ...]:
        buffers = {name for silo in now.silos for name in silo.buffers}
        moved = [
            comparable(
                difference(state.alone[name], state.members.initial),
                similarity="parameters",
                buffers=sorted(buffers),
            )
            for name in names
        ]
        noise = [state.noise.get(name, 0.0) for name in names]
        matrix = gram([list(one.values()) for one in moved], noise=noise)
        sizes = np.array([max(state.members.sizes[name], 1.0) for name in names])
        rng = np.random.default_rng([self.seed, now.number])
        return between(names, matrix, sizes, state.members.minimums, rng)

    def _after_race_round(self, state: AutoState, now: Round) -> AutoState:
        raced = now.number - state.since
        if raced < MEASURES:
            return state
        if raced == MEASURES and not judges_of(state):
            log.warning(
                "auto: no silo says how good models are on data that it holds out, so nobody can "
                "judge the race. Policies may keep it back (metrics in silo.toml)"
            )
        found = standings_of(state)
        kept = [c for c, s in zip(state.candidates, found, strict=True) if not s.out]
        undecided = len(kept) > 1 or (now.unseen and _would_leave(state, kept[0]))
        if undecided and self._goes_on(state, kept, raced, now):
            return _reduced(state, now)
        return self._decided(state, now, complete=True)

    def _goes_on(self, state: AutoState, kept: Sequence[Candidate], raced: int, now: Round) -> bool:
        left = now.rounds - now.number
        if left <= max(1, round(HOLD_SHARE * now.rounds)):
            return False
        # Groups are still learning when a silo by itself has learned what it can: whether they are
        # better than alone takes longer to see than which of them is.
        alone = kept[0].groups == trivial(now.names, {})[0].groups
        if raced >= MAX_RACE and not (alone and now.number < UNDECIDED * now.rounds):
            return False
        if raced > MEASURES and not judges_of(state):
            return False
        groups = {group for c in kept for group in c.groups if len(group) > 1}
        all_arms = 0
        for name in now.names:
            arms = 1 + sum(name in group for group in groups)
            cost, all_arms = arms * _pass(now.here[name]) + left - 1, all_arms + arms
            if state.trainings.get(name, 0.0) + cost > self.budget * now.rounds:
                return False
        return self._within_bytes(state, now, all_arms + (left - 1) * len(now.names))

    def _decided(self, state: AutoState, now: Round, *, complete: bool) -> AutoState:
        found = decision(state, unseen=now.unseen)
        raced = (*_with_dropped(entrants_of(state), now), *state.dropped)
        verdict = Verdict(
            state.since,
            now.number,
            raced,
            tuple(sorted(judges_of(state))),
            next(n for n, one in enumerate(raced) if one.candidate.groups == found.winner.groups),
            found.gains,
            trials=trials_of(state, [entrant.candidate for entrant in raced]),
            shares=all(m.share for of in state.measured.values() for n in of for m in of[n]),
            complete=complete,
            left=found.left,
        )
        log.info("auto: %s", verdict_text(verdict, found.keeping))
        away = [n for g in state.held for n in g if n not in state.raced]
        single = state.raced.difference(*found.groups).union(away)
        models = {group: self._model_to_hold(state, group) for group in found.groups}
        return replace(
            state,
            phase="hold",
            since=now.number,
            verdict=verdict,
            held=tuple(sorted((*found.groups, *((name,) for name in single)))),
            group_models=models,
            own=found.own,
            models={},
            measured={},
            candidates=(),
            dropped=(),
            probation={n: 0 for n in now.names if n not in state.raced},
            beside={},
        )

    def _model_to_hold(self, state: AutoState, group: Group) -> Model:
        """Return a group's model; a new group starts from its members', trained for longer."""
        if group in state.group_models:
            return state.group_models[group]
        if not state.held:
            return state.models[group]
        held = holding(state)
        return weighted_mean(
            [held[n] for n in group], [max(state.members.sizes[n], 1.0) for n in group]
        )

    def _placed(self, state: AutoState, now: Round) -> AutoState:
        if not state.held:
            return state
        rounds = {name: count + (name in now.names) for name, count in state.probation.items()}
        held, models = list(state.held), dict(state.group_models)
        placed = {name: own for name, own in state.placed.items() if name not in rounds}
        over = [n for n, count in rounds.items() if count >= PROBATION]
        for name in over:
            beside = state.beside.get(name)
            group = next((g for g in held if beside and set(beside) <= set(g)), None)
            measured = state.measured.get((ALONE, name), {}), state.measured.get((GROUP, name), {})
            alone, grouped = (own.get(name, ()) for own in measured)
            held = [g for g in held if name not in g or len(g) > 1]
            joins = group is not None and fits(alone, grouped)
            placed[name] = _placement(now, group or (), alone, grouped, joins=joins)
            log.info(
                "auto: newcomer %s %s",
                name,
                "joins " + ", ".join(group) if joins and group else "stays alone",
            )
            if joins and group is not None:
                larger = tuple(sorted((*group, name)))
                models[larger] = models.pop(group)
                held = [larger if g == group else g for g in held]
            else:
                held.append((name,))
        return replace(
            state,
            held=tuple(sorted(held)),
            group_models=models,
            placed=placed,
            probation={n: c for n, c in rounds.items() if n not in over},
            beside={n: _now_in(g, held) for n, g in state.beside.items() if n not in over},
        )

    def finish(self, state: AutoState, now: Round) -> Exchanges[AutoState]:
        """End an open race with the best so far; mix their own model in for silos in doubt."""
        if state.phase == "hold" or (state.held and not _fell_behind(state)):
            return replace(state, members=state.members.holding(ending(state)))
        if state.phase == "race" and judges_of(state):
            state = handed_out(self._decided(state, now, complete=False), now)
        log.warning(
            "auto: the run ended before its %s did. %s",
            "race" if state.models or state.held else "look",
            "It ends with the best so far" if state.held else "Everybody keeps its own model",
        )
        return state
        yield

    # ---------------------------------------------------------------- views

    def comparing(self, state: AutoState, now: Round) -> bool:
        return state.phase != "hold"

    def details(self, state: AutoState) -> Mapping[str, Any]:
        told: dict[str, Any] = {
            "phase": state.phase,
            "trainings": {name: round(n, 1) for name, n in sorted(state.trainings.items())},
            "bytes": {
                "moved": state.moved,
                "usual": state.usual,
                "discriminators": state.paired,
                "budget": self.byte_budget,
            },
        }
        if state.pairs is not None and state.paired_in == state.number:
            told |= FedCollab().details(replace(state.pairs, structure=None))
        if state.phase == "race":
            told["began"] = state.since
            told["candidates"] = [entrant_entry(one) for one in entrants_of(state)]
            told["judges"] = sorted(judges_of(state))
        dropped = [one for one in state.dropped if one.dropped == state.number]
        told |= {"dropped": [entrant_entry(one) for one in dropped]} if dropped else {}
        if state.verdict is not None and state.verdict.round == state.number:
            told["verdict"] = verdict_entry(state.verdict)
        if state.drifted:
            told["other-data"] = sorted(state.drifted)
        if state.probation:
            told["probation"] = {n: list(state.beside.get(n, ())) for n in sorted(state.probation)}
        if fresh := {n: p for n, p in state.placed.items() if p.round == state.number}:
            told["placed"] = {name: placement_entry(fresh[name]) for name in sorted(fresh)}
        return told


def _bytes_each(model: Arrays, now: Round) -> float:
    """Return the bytes of a model to a silo and back, in the run's wire format."""
    how = now.config.get(wire.WIRE_FORMAT, wire.FLOAT32)
    if how == wire.FLOAT32:
        return 2 * num_bytes(model)
    return 2 * wire.num_rounded_bytes(model) * (0.75 if how == "delta-int8" else 1)


def _bytes_of(update: Update) -> int:
    return update.bytes_sent + update.bytes_received


def _with_pairs(state: AutoState, compared: FedCollabState, now: Round) -> AutoState:
    state = replace(state, pairs=replace(compared, members=Members({})))
    if (found := compared.measured) is None:
        return state
    total = state.paired + found.bytes
    return replace(state, paired=total, paired_in=now.number, moved=state.moved + found.bytes)


def _size_here(group: Group, now: Round) -> int:
    return max(sum(name in now.here for name in group), 1)


def _has_begun(state: AutoState, name: str) -> bool:
    return state.alone[name] is not state.members.initial and not same_model(
        state.alone[name], state.members.initial
    )


def _mean_alone(state: AutoState, group: Group) -> Model:
    sizes = [max(state.members.sizes[name], 1.0) for name in group]
    return weighted_mean([state.alone[name] for name in group], sizes)


def _now_in(group: Group, held: Sequence[Group]) -> Group:
    return next((g for g in held if set(group) <= set(g)), group)


# --- a round's work and its outcome ---------------------------------------------------------------


def _holdout(silo: Silo) -> dict[str, Scalar]:
    """Return the entry that holds samples out; empty for a silo with too few."""
    return {wire.HOLDOUT: HOLDOUT} if silo.num_examples >= FEWEST else {}


def _pass(silo: Silo) -> float:
    """Return the cost of a look or race training, as a share of one with all samples."""
    return 1 - HOLDOUT if _holdout(silo) else 1.0


def _race_orders(state: AutoState, silo: Silo, now: Round) -> list[Order]:
    """Order a training of every raced group that the silo is in and accepts."""
    minimums, work = minimums_of(now.silos), []
    for number, group in enumerate(sorted(state.models)):
        taking_part = staying([name for name in group if name in now.here], minimums)
        if silo.name in taking_part:
            told: dict[str, Scalar] = {**_holdout(silo), wire.GROUP_SIZE: len(taking_part)}
            work.append(Order(silo, state.models[group], purpose=f"race-{number}", config=told))
    return work


def _with_alone(state: AutoState, updates: Updates) -> AutoState:
    for update in updates:
        name = update.silo.name
        by_itself = update.purpose == ALONE or (not update.purpose and (_holds_own(state, name)))
        if not by_itself:
            continue
        key = (ALONE, name) if name in state.probation else (name,)
        if (found := measurement(update)) and update.start is state.members.initial:
            state = replace(state, untrained={**state.untrained, name: found.error})
        measured = noted(state, key, [update])
        state = replace(state, alone={**state.alone, name: update.model}, measured=measured)
        if own := update.noise_in():
            before = state.noise.get(name, 0.0)
            state = replace(state, noise={**state.noise, name: before + own})
    return state


def _holds_own(state: AutoState, name: str) -> bool:
    if name in state.probation:
        return name not in state.beside
    return name in state.own or len(group_of(state.held, name)) == 1


def _with_held(state: AutoState, updates: Updates) -> AutoState:
    """Average every held group's updates, without silos on probation."""
    models = dict(state.group_models)
    for group in state.group_models:
        mine = [u for u in updates if u.silo.name in group and _of_group(state, u)]
        mean = average(mine)
        if mean is not None:
            models[group] = mean
    latest = {
        u.silo.name: u.model
        for u in updates
        if state.phase == "hold" and is_seen(u.model) and _of_group(state, u)
        if share_of(state, u.silo.name) > 0 and group_of(state.held, u.silo.name) in models
    }
    state = replace(state, group_models=models, latest=latest)
    for update in updates:
        name = update.silo.name
        if name in state.probation and name in state.beside and not update.purpose:
            state = replace(state, measured=noted(state, (GROUP, name), [update]))
    return state


def _of_group(state: AutoState, update: Update) -> bool:
    if update.silo.name in state.probation:
        return False
    if update.silo.name in state.own:
        return update.purpose == GROUP
    return not update.purpose


def _with_raced(state: AutoState, updates: Updates) -> AutoState:
    models, measured = dict(state.models), state.measured
    for number, group in enumerate(sorted(state.models)):
        mine = [u for u in updates if u.purpose == f"race-{number}" and u.silo.name in group]
        mean = average(mine)
        if mean is not None:
            models[group] = mean
        measured = noted(replace(state, measured=measured), group, mine)
    return replace(state, models=models, measured=measured)


def _reduced(state: AutoState, now: Round) -> AutoState:
    entrants = _with_dropped(entrants_of(state), now)
    kept = tuple(one.candidate for one in entrants if not one.dropped)
    groups = {group for candidate in kept for group in candidate.groups}
    return replace(
        state,
        candidates=kept,
        dropped=(*state.dropped, *(one for one in entrants if one.dropped)),
        models={group: model for group, model in state.models.items() if group in groups},
    )


def _would_leave(state: AutoState, winner: Candidate) -> bool:
    """Return whether a silo would keep its own model, by the measurements so far.

    Secure runs do not race groups that differ by one silo. Elsewhere such groups keep a race open,
    so that groups have trained longer by its end, and fewer silos seem to lose.
    """
    return any(gain.own for gain in gains_of(state, winner).values())


def _with_dropped(entrants: Sequence[Entrant], now: Round) -> tuple[Entrant, ...]:
    return tuple(replace(e, dropped=now.number) if e.standing.out else e for e in entrants)


def _fell_behind(state: AutoState) -> bool:
    """Return whether the held groups are behind all-alone in a repeated race."""
    groups = present_groups(state.held, sorted(state.raced))
    raced = (*state.candidates, *(one.candidate for one in state.dropped))
    measured = bool(judges_of(state)) and groups in {candidate.groups for candidate in raced}
    return measured and behind_alone(state, groups)


def _placement(
    now: Round,
    group: Group,
    alone: Sequence[Measured],
    grouped: Sequence[Measured],
    *,
    joins: bool,
) -> Placement:
    last = [own[-1].error if own else float("nan") for own in (alone, grouped)]
    count = next((own[-1].count for own in (alone, grouped) if own), 0.0)
    return Placement(now.number, group, joins, count, *last)


def _distinct_held(
    state: AutoState, found: Sequence[Candidate], names: Sequence[str]
) -> tuple[Candidate, ...]:
    if state.held:
        now = present_groups(state.held, names)
        if now not in {c.groups for c in found}:
            found = (*found, Candidate(now, AS_IT_IS))
    return tuple(found)
