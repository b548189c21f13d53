"""HCCT: hierarchical clustering-based collaborative training.

Sun, Kountouris, Zhang: "How to Collaborate: Towards Maximizing the Generalization Performance in
Cross-Silo Federated Learning", IEEE TMC 2024, https://arxiv.org/abs/2401.13236; Algorithms 1–2,
eqs. 8–17. The partition itself is ``coterie.strategies.partition.hcct``.

In round 1 every silo trains alone from the same w⁰. After every round the silos that answered are
partitioned again; each group trains the size-weighted mean of its members' current models, and is
aggregated size-weighted.

Differs from the paper:

- *Memory* (``memory=1``, the default). The paper compares the updates of the last round. Small
  silos' updates turn to noise as training goes on, and their groups flip. Here the accumulated own
  updates ``c_i ← memory · c_i + Δ_i`` are compared. ``memory=0`` is the paper. In a secure run the
  inner products of each round's updates are accumulated instead.
- *Secure runs* average silos that were twice put together (``coterie.strategies.hcct.twice``).
- *Solver* (``solver="best"``, the default). The paper's greedy merging joins small silos first,
  regardless of their kind, and never separates them. The same utility is maximised exactly for up
  to 16 silos and by a better search above. ``solver="agglomerative"`` is the paper, except that a
  merge needs a positive benefit (Algorithm 2 merges before it tests).
- α may be one number or stated by each silo. Its default, ``scaled``, is proportional to the silos'
  samples: eq. 9 compares ``α / D`` with a cosine, so one α in samples fits one size of silos only.
- *K* (``fixed_groups``, the paper's Figs. 5 and 6): merging continues to, or stops at, K groups;
  with ``solver="best"`` single silos then move while that gains. Newcomers that fit no group form
  additional groups until the next partition.
- A newcomer is placed by eqs. 15–16 against the existing groups, as in the paper's Section 7.3
  (Fig. 3), which does not say what it trains before. Here it trains one round from the mean of all
  current models, and in the same round from w⁰ for more epochs, up to its ``max_local_epochs``, so
  that its memory is comparable. Newcomers that join no group may form one among themselves.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from coterie import wire
from coterie.strategies.errors import refused
from coterie.strategies.hcct import alpha as trials
from coterie.strategies.hcct.by_choice import by_choice
from coterie.strategies.hcct.choosing_alpha import (
    alphas_of,
    continue_trial,
    found_alpha,
    goes_by_stated,
    nobody_judges,
    open_trial,
)
from coterie.strategies.hcct.memory import (
    accumulated,
    of_layer,
    products_of,
    remembered,
    remembered_noise,
)
from coterie.strategies.hcct.starts import common_starts, group_starts
from coterie.strategies.hcct.state import HCCTState
from coterie.strategies.hcct.twice import confirmed
from coterie.strategies.partition.hcct import layer_choice, place
from coterie.strategies.partition.objectives import HCCTUtility
from coterie.strategies.partition.solvers import agglomerative, best_partition, with_groups
from coterie.strategies.plain.within import Grouping, Within, WithinField
from coterie.strategies.rounds.algorithm import (
    Compared,
    Order,
    Round,
    Update,
    Updates,
    catch_up,
    orders_from,
)
from coterie.strategies.rounds.handles import Arrays, Change, Model, changed
from coterie.strategies.rounds.members import (
    comparison,
    cosine_matrix,
    mean_of_all,
    present_groups,
    stated_samples,
    with_absent,
)
from coterie.strategies.rounds.minimum_sizes import average_groups, form
from coterie.strategies.rounds.models import comparable, difference
from coterie.strategies.rounds.options import Config, Count, CountOrNone, NotNegative, Seed

log = logging.getLogger("coterie.run")

CATCH_UP = "catch-up"
"""Purpose of a newcomer's second training in its first round, from w⁰."""
MAX_CATCH_UP = 5
"""Rounds' worth of epochs in a catch-up: enough to separate the groups on the members' scale."""
MAX_CHURN = 1 / 3
"""Share of the silos behind a trial's winner whose coming or leaving triggers a new partition."""


class HCCT(Grouping[HCCTState]):
    """Groups that maximise the silos' utility ``−α/D + cos(own update, group's update)``."""

    alpha: NotNegative | Literal["scaled", "auto"] = Field(
        "scaled",
        description="α, preference for more data. `scaled`: two thirds of the median silo's "
        "training samples. `auto`: found in a short trial. A number is in samples, as in the "
        "paper: 0 lets every silo train alone, small values keep silos apart, large values put "
        "all together. A silo's own α takes precedence.",
    )
    memory: NotNegative = Field(
        1.0,
        le=1,
        description="γ, weight of earlier rounds in the accumulated updates that are compared. 0: "
        "only the last round, as in the paper.",
    )
    similarity: Literal["parameters", "parameters+buffers"] = Field(
        "parameters",
        description="Arrays that are compared: `parameters` only, or running statistics as well.",
    )
    solver: Literal["best", "agglomerative"] = Field(
        "best",
        description="Search for the groups. `best`: exact for up to 16 silos, a heuristic search "
        "for more. `agglomerative`: greedy merging, as in the paper's Algorithm 2.",
    )
    layers: str = Field(
        "all",
        description="Layers that are compared: `all`; `auto` (HCCT-E: the layer with the largest "
        "relative variance after round 1); or a prefix of array names.",
    )
    fixed_groups: CountOrNone = Field(
        0, description="K, fixed number of groups. 0: the utility decides."
    )
    regroup_every: Count = Field(1, description="Rounds from one grouping to the next.")
    settle_after: CountOrNone = Field(
        0,
        description="Number of consecutive identical groupings after which the groups are kept "
        "and only newcomers are placed. 0: never.",
    )
    within: WithinField = Within()
    seed: Seed = 0
    remembers = HCCTState
    works_unseen = True
    takes_steps = True
    models_in = ("starts",)

    def problems(self, training: Config) -> Iterator[str]:
        yield from self.within.problems(training)
        if self.alpha != "auto":
            return
        if self.fixed_groups:
            yield (
                "alpha = auto finds the number of groups, so fixed-groups must be 0. "
                f"Got {self.fixed_groups}. Or give alpha as a number"
            )
        if self.within.algorithm != "fedavg":
            yield (
                "alpha = auto compares models as their groups average them, so within must be "
                f"fedavg. Got {self.within.algorithm}. Or give alpha as a number"
            )
        least = trials.LEAST_ROUNDS
        if 0 < int(training.get(wire.ROUNDS, 0)) < least:
            yield (
                f"alpha = auto finds its groups after {least - 1} rounds, so rounds must be at "
                f"least {least}. Got {training[wire.ROUNDS]}. Or give alpha as a number"
            )
        if training.get(wire.PERSONAL):
            yield (
                "alpha = auto trains several models side by side, but a silo has only one "
                "version of its personal layers. Give alpha as a number, or leave personal "
                "empty"
            )

    def insecure(self) -> str:
        """Return why ``auto`` is refused in a secure run: overlapping groups reveal updates."""
        if self.alpha != "auto":
            return self.within.insecure()
        return (
            "alpha = auto tries overlapping groups, whose sums together would reveal single "
            "updates: give alpha as a number in a secure run, or use the strategy auto"
        )

    def compared(self, state: HCCTState) -> Compared | None:
        chosen = state.layer or {"auto": "each"}.get(self.layers, self.layers)
        return Compared(self.similarity, chosen)

    def newcomer_model(self, state: HCCTState) -> Model:
        """Return the mean of all models; in round 1 that is w⁰."""
        return mean_of_all(state.members)

    def welcome(self, state: HCCTState, new: frozenset[str], now: Round) -> HCCTState:
        """Register newcomers, to be placed after their first round, and the silos' current α."""
        models = dict(state.members.models)
        if self._looks(state, now):  # everybody begins alone
            models |= dict.fromkeys(new, state.members.initial)
        others = {n: a for n, a in state.alphas.items() if n not in now.here}
        stated = {silo.name: silo.alpha for silo in now.silos if silo.alpha is not None}
        return replace(
            state,
            alphas={**others, **stated},
            starts={**state.starts, **{name: models[name] for name in sorted(new)}},
            newcomers=state.newcomers | (new if now.number > 1 else frozenset()),
        )

    def renew(self, state: HCCTState, changed: frozenset[str], now: Round) -> HCCTState:
        """Treat silos with changed data as newcomers, once there are groups."""
        state = replace(
            state,
            memory={name: own for name, own in state.memory.items() if name not in changed},
            products=state.products.without(changed),
            noise={name: own for name, own in state.noise.items() if name not in changed},
            untrained={name: own for name, own in state.untrained.items() if name not in changed},
        )
        if now.number == 1 or self._finds_alpha(state):
            return state
        mean = mean_of_all(state.members)
        kept = [tuple(n for n in group if n not in changed) for group in state.planned]
        return replace(
            state,
            planned=tuple(group for group in kept if group),
            starts={**state.starts, **dict.fromkeys(sorted(changed), mean)},
            newcomers=state.newcomers | changed,
        )

    def orders(self, state: HCCTState, now: Round) -> tuple[HCCTState, list[Order]]:
        """Order each silo's training of its group's model; for newcomers also one from w⁰."""
        present = present_groups(state.planned, now.here)
        groups = tuple(sorted(form(present, state.members.minimums)))
        # Who is alone only because its group became too small for it has no part in their mean.
        parted = {name for group in set(groups) - set(present) for name in group if len(group) == 1}
        starts = {**state.starts, **{name: state.members.models[name] for name in parted}}
        if state.trial is None:
            starts |= common_starts(starts, groups, before=state.members)
        state = replace(state, members=state.members.grouped(groups), starts=starts)
        if state.trial is not None:
            tried = {name for group in state.trial.groups for name in group}
            others = [silo for silo in now.silos if silo.name not in tried]
            return state, trials.orders(state.trial, now.silos) + orders_from(starts, others)
        new = [now.here[name] for name in sorted(state.newcomers & set(now.names))]
        kind = self.within.inside.kind
        own = orders_from(starts, now.silos, kind)
        if self._looks(state, now):
            hold_out = {wire.HOLDOUT: trials.HOLDOUT}
            own = [o if o.silo.name in state.alphas else replace(o, config=hold_out) for o in own]
        if now.unseen:  # a sketch of that could only be compared with those of this round
            return state, own
        missed = {s.name: catch_up(s, now, most=MAX_CATCH_UP) for s in new}
        return state, own + [
            Order(s, state.members.initial, CATCH_UP, missed[s.name], kind) for s in new
        ]

    def absorb(self, state: HCCTState, updates: Updates, now: Round) -> HCCTState:
        """Aggregate the groups, accumulate the updates, and form the next round's groups."""
        trained = [u for u in updates if not u.purpose]
        looks = self._looks(state, now)
        if looks:
            first = [u for u in trained if u.silo.name not in {*state.memory, *state.alphas}]
            state = replace(state, untrained={**state.untrained, **trials.held_out(first)})
            if first and not state.untrained:
                raise nobody_judges()
        state = self._choose_layer(state, trained)
        probes = {u.silo.name: u for u in updates if u.purpose == CATCH_UP}
        deltas = {u.silo.name: self._compared(u, state.layer) for u in trained}
        noisy = {u.silo.name: u.noise_in(deltas[u.silo.name]) for u in trained}
        state = self._remember(state, deltas, noisy, probes, now)
        state = replace(
            state,
            members=average_groups(
                state.members, trained, combine=partial(self.within.inside.combine, now=now)
            ),
            verdict={},
        )
        here = state.members.here
        solve = partial(self._solve, now=now)
        if state.trial is not None:
            return continue_trial(state, updates, now, solve=solve)
        if self.alpha == "auto" and state.alpha is None and not goes_by_stated(state, here):
            return open_trial(state, here, set(deltas), now, solve=solve)
        state = self._partition(state, here, deltas, noisy, now)
        return replace(state, newcomers=state.newcomers - set(deltas))

    def _choose_layer(self, state: HCCTState, trained: Updates) -> HCCTState:
        """Choose in the first round which arrays are compared (HCCT-E, eq. 19)."""
        if self.layers == "all" or state.layer or not trained:
            return state
        if self.layers != "auto":
            return replace(state, layer=self.layers)
        if len(trained) < 2:  # one update has no variance: wait for another
            return state
        choice = layer_choice([self._compared(update, "") for update in trained])
        scores = ", ".join(f"{name} {score:.3g}" for name, score in choice.scores.items())
        log.info("HCCT-E compares layer %s; relative variances: %s", choice.layer, scores)
        names = self._compared(trained[0], "")
        dotted = choice.layer + "."  # the module's arrays, not those of another with a longer name
        layer = dotted if any(name.startswith(dotted) for name in names) else choice.layer
        memory = {name: of_layer(own, layer) for name, own in state.memory.items()}
        return replace(state, layer=layer, memory=memory)

    def _compared(self, update: Update, layer: str) -> Arrays:
        delta = difference(update.model, update.start)
        kept = comparable(delta, similarity=self.similarity, buffers=update.silo.buffers)
        kept = of_layer(kept, layer)
        if not kept:
            raise refused(
                f"layers = {layer!r} names no array that can be compared. The update has: "
                f"{', '.join(list(delta)[:6])}."
            )
        return kept

    def _remember(
        self,
        state: HCCTState,
        deltas: Mapping[str, Arrays],
        noisy: Mapping[str, float],
        probes: Mapping[str, Update],
        now: Round,
    ) -> HCCTState:
        known = state.products.names if now.unseen else state.memory
        for name in sorted(deltas.keys() - set(known)):  # later it may be at its minimum
            if not any(array.any() for array in deltas[name].values()):
                log.warning("silo %s sent an all-zero update, so it resembles no other silo", name)
        if now.unseen:
            products = products_of(state.products, deltas, noisy, decay=self.memory)
            return replace(state, products=products)
        caught = {name: self._compared(probe, state.layer) for name, probe in probes.items()}
        noise = {name: probes[name].noise_in(own) for name, own in caught.items()}
        return replace(
            state,
            memory=remembered(state, deltas, caught, decay=self.memory),
            noise=remembered_noise(state, noisy, noise, decay=self.memory),
        )

    def _partition(
        self,
        state: HCCTState,
        here: Sequence[str],
        deltas: Mapping[str, Arrays],
        noisy: Mapping[str, float],
        now: Round,
    ) -> HCCTState:
        """Form the next round's groups: repartition the settled silos, then place newcomers.

        If the groups are kept, a silo without a place (absent when they were formed) is placed like
        a newcomer, and an absent silo keeps its place.
        """
        known = state.products.names if now.unseen else state.memory
        settled = sorted(n for n in here if n in known and n not in state.newcomers)
        new = sorted(n for n in state.newcomers if n in deltas)
        stand = self._groups_stand(state, set(here), now)
        if stand:
            placed_before = {name for group in state.planned for name in group}
            new += [n for n in settled if n not in placed_before and n in deltas]
            settled = [n for n in settled if n in placed_before or n not in deltas]
        compared = [*settled, *new]
        if not compared:
            return state
        matrix = accumulated(state, settled, new, deltas, noisy)
        sizes = np.array(stated_samples(state.members, compared, now.max_share))
        alphas = alphas_of(self.alpha, state, compared, sizes)
        n = len(settled)
        before = present_groups(state.planned, settled)
        found: list[list[int]] = []
        if stand:
            rows = {name: row for row, name in enumerate(settled)}
            found = [[rows[name] for name in group] for group in before]
        elif n:
            utility = HCCTUtility.from_gram(matrix[:n, :n], sizes[:n], alpha=alphas[:n])
            found = self._solve_all(utility, now)
        formed = form([tuple(settled[i] for i in group) for group in found], state.members.minimums)
        # Before the first partition everybody was alone; that confirms nothing.
        last = state.proposed if now.unseen else state.planned
        again = bool(last) and tuple(sorted(formed)) == present_groups(last, settled)
        unchanged = state.unchanged + 1 if again else 0
        placed = self._placed(matrix, sizes, alphas, found, range(n, len(compared)), now)
        planned = form(
            [tuple(sorted(compared[i] for i in group)) for group in placed], state.members.minimums
        )
        proposed, waits = tuple(sorted(planned)), 0
        if now.unseen:
            planned, waits = confirmed(state, proposed)
        starts = {**state.members.models, **group_starts(state.members, planned)}
        if stand:
            planned = with_absent(planned, state.planned, here)
        return replace(
            state,
            planned=tuple(sorted(planned)),
            proposed=proposed,
            waits=waits,
            starts=starts,
            unchanged=state.unchanged if stand else unchanged,
            held=() if not state.held else state.held if stand else tuple(sorted(here)),
            compared=tuple(compared),
            similarity=cosine_matrix(matrix),
            norms=tuple(np.sqrt(np.diag(matrix)).tolist()),
            alphas_used=tuple(alphas.tolist()),
            sizes_used=tuple(sizes.tolist()),
        )

    def _groups_stand(self, state: HCCTState, present: set[str], now: Round) -> bool:
        """Return whether the groups are kept: they have settled, or none are due in this round."""
        due = (now.number - 1) % self.regroup_every == 0 or state.waits > 0
        settled_down = 0 < self.settle_after <= state.unchanged
        held = set(state.held)
        changed = len(held ^ present) > MAX_CHURN * len(held)
        if held and changed and held & present:
            log.info("HCCT: %d silos joined or left: forming new groups", len(held ^ present))
        keeps = bool(held) and not changed
        return bool(state.planned) and (settled_down or not due or keeps)

    def _placed(
        self,
        matrix: NDArray[np.float64],
        sizes: NDArray[np.float64],
        alphas: NDArray[np.float64],
        found: list[list[int]],
        newcomers: Iterable[int],
        now: Round,
    ) -> list[list[int]]:
        """Return the groups with each newcomer's row in the best one (eqs. 15-16).

        Newcomers that join no group may form some among themselves.
        """
        placed, strangers = [list(group) for group in found], []
        for row in newcomers:
            target = place(matrix, sizes, found, alpha=alphas, newcomer=row) if found else None
            if target is None:
                strangers.append(row)
            else:
                placed[target].append(row)
        if not strangers:
            return placed
        theirs = np.ix_(strangers, strangers)
        utility = HCCTUtility.from_gram(matrix[theirs], sizes[strangers], alpha=alphas[strangers])
        return placed + [[strangers[i] for i in group] for group in self._solve(utility, now=now)]

    def _solve_all(self, utility: HCCTUtility, now: Round) -> list[list[int]]:
        if not self.fixed_groups:
            return self._solve(utility, now=now)
        if self.solver == "agglomerative":
            return agglomerative(utility, num_groups=self.fixed_groups).groups
        return with_groups(utility, self.fixed_groups).groups

    def _solve(self, utility: HCCTUtility, *, now: Round, **search: int) -> list[list[int]]:
        """Partition into any number of groups, for the path of ``auto`` and for strangers."""
        if self.solver == "agglomerative":
            return agglomerative(utility).groups
        rng = np.random.default_rng([self.seed, now.number])
        return best_partition(utility, rng=rng, **search).groups

    def with_models(self, state: HCCTState, change: Change) -> HCCTState:
        state = super().with_models(state, change)
        if state.trial is None:
            return state
        trial = replace(state.trial, models=changed(state.trial.models, change))
        return replace(state, trial=trial)

    def next_models(self, state: HCCTState) -> Mapping[str, Model]:
        return state.starts

    def _finds_alpha(self, state: HCCTState) -> bool:
        """Return whether ``auto`` has yet to choose α and can still do so."""
        decided = self.alpha != "auto" or state.alpha is not None
        return not decided and not goes_by_stated(state, state.members.here)

    def comparing(self, state: HCCTState, now: Round) -> bool:
        """Return whether ``auto`` looks for α, and is neither too late nor replaced by stated α."""
        if not self._finds_alpha(state):
            return False
        last = trials.last_to_begin(now.rounds)
        return state.trial is not None or not now.rounds or now.number <= last

    def _looks(self, state: HCCTState, now: Round) -> bool:
        """Return whether all silos train alone, with a fold held out, for a coming trial."""
        return state.trial is None and self.comparing(state, now)

    def by_choice(self, state: HCCTState) -> str:
        by_alpha = self.alpha != "auto" and not self.fixed_groups
        return by_choice(state, self.solver) if by_alpha else ""

    def details(self, state: HCCTState) -> Mapping[str, Any]:
        details: dict[str, Any] = {"planned": list(map(list, state.planned))}
        details |= found_alpha(self.alpha, state)
        details |= {"layer": state.layer} if state.layer else {}
        if state.compared:
            details["alphas"] = list(state.alphas_used)
            details["sizes"] = list(state.sizes_used)
            own = [name for name in state.compared if name in state.alphas]
            details |= {"own-alpha": own} if own else {}
        return details | comparison(state.compared, state.similarity, state.norms)
