"""FedGroup and FedGrouProx: static groups from one pre-training, by which newcomers are placed too.

Duan, Liu, Ji, Liu, Liang, Chen, Tan: "FedGroup: Efficient Federated Learning via Decomposed
Similarity-Based Clustering", 2021, https://arxiv.org/abs/2010.06870; Algorithms 2–3, eqs. 4–9. The
clustering itself is ``coterie.strategies.partition.fedgroup``.

Group cold start (Algorithm 3), round 1: the pre-training silos train from w⁰; their updates are
clustered (EDC or MADC); group j starts at ``w⁰ + mean(Δ_i)``, equal weights, and keeps
``mean(Δ_i)``, frozen, as its direction. From round 2 on every group runs its own FedAvg (Algorithm
2; with ``proximal-mu`` in the training configuration FedProx: FedGrouProx). A silo without a group
is *cold*: in its first round it trains from w⁰ and joins the group whose direction has the largest
cosine with its update (eq. 9), without seeing any group's model.

Silos that described themselves are cold-started by the phase ``train.cold_start`` before the
round's training, and then train the rest of the round's E epochs from their group's model, as in
the paper. All else is ordinary ``train`` messages, which any ClientApp understands.

Differs from the paper in:

- *Whole rounds.* A cold start at least as long as a round, or at a plain ClientApp, is the silo's
  entire first round. In round 1 FedAvg's silos do the same, so the default length costs no round. A
  newcomer holds its group's model after its first round, and its data count from the next; sampled
  silos are cold-started one round before their turn.
- *Which arrays.* Directions are of parameters; BatchNorm's running statistics are averaged with the
  models, but neither compared nor moved by the inter-group aggregation.
- ``num_groups="auto"``, the separation of the groups, and ``min_similarity``, by which a newcomer
  unlike any group opens one, are not in the paper.
- Algorithm 3 line 16 as printed makes the mean update the group's model; w⁰ is added here.
- *RCC* is not spelled out: here m random pre-training silos are the centres, and the others are
  placed by eq. 9.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import numpy as np
from pydantic import Field

from coterie import wire
from coterie.strategies.errors import EXIT_NO_SILOS, FederationError
from coterie.strategies.fedgroup.clustering import clusters, separation_of, warnings_by_name
from coterie.strategies.fedgroup.inter_group import inter_group
from coterie.strategies.fedgroup.state import FedGroupState, global_model
from coterie.strategies.partition import fedgroup
from coterie.strategies.partition.gram import cross, gram
from coterie.strategies.plain.placing import compared
from coterie.strategies.plain.within import Grouping, Within, WithinField
from coterie.strategies.rounds.algorithm import (
    Compared,
    Exchanges,
    Order,
    Round,
    Update,
    Updates,
    num_batches,
)
from coterie.strategies.rounds.handles import Model, is_seen
from coterie.strategies.rounds.members import by_number, comparison, cosine_matrix, give_out
from coterie.strategies.rounds.minimum_sizes import accepted, average
from coterie.strategies.rounds.models import plain_mean
from coterie.strategies.rounds.options import (
    Config,
    Count,
    CountOrNone,
    NotNegative,
    Sample,
    Scalar,
    Seed,
    TimesOrNone,
)
from coterie.strategies.rounds.roster import Silo
from coterie.strategies.rounds.sampling import drawn

log = logging.getLogger("coterie.run")

COLD_START = "cold-start"
"""Purpose of a training from w⁰, unless it is round 1 itself."""
_PRETRAIN, _CLUSTER, _SAMPLE, _ASSIGN = range(4)  # purposes of the strategy's own randomness


class FedGroup(Grouping[FedGroupState]):
    """Groups by the direction of a pre-training update, each with its own FedAvg or FedProx.

    A silo without a group at the end keeps the auxiliary global model.
    """

    num_groups: Count | Literal["auto"] = Field(
        3, description="m, number of groups. `auto`: the number with the best separation."
    )
    measure: fedgroup.Measure = Field(
        "edc",
        description="Method for comparing updates: `edc` (k-means++ on `num-groups` directions) "
        "or `madc` (complete linkage).",
    )
    cold_start_epochs: TimesOrNone = Field(
        0,
        description="Epochs of the cold start. With fewer epochs than `local-epochs`, the cold "
        "start is the first part of a normal round; with more, small silos are separated better. "
        "0: `local-epochs`.",
    )
    cold_start_steps: int = Field(
        0,
        ge=0,
        le=1_000_000,
        description="Mini-batches of the cold start, instead of `cold-start-epochs`, which must "
        "then be 0. 0: epochs apply.",
    )
    cold_start_silos: CountOrNone = Field(
        0,
        description="Number of silos, drawn using the seed, that form the groups (in the paper, α "
        "times `num-groups`); at least `num-groups`. The others are placed like newcomers. 0: all.",
    )
    min_similarity: float = Field(
        -1.0,
        ge=-1,
        le=1,
        description="Smallest cosine at which a newcomer joins an existing group. If its largest "
        "cosine is smaller, it opens a new group with its own model. -1: never.",
    )
    sample: Sample = 0
    inter_group_lr: NotNegative = Field(
        0.0,
        le=1000,
        description="η_g, learning rate of the inter-group aggregation. 0: no such aggregation.",
    )
    assign: Literal["cosine", "random"] = Field(
        "cosine",
        description="How a silo without a group is placed: by `cosine`, or at `random` (the "
        "paper's ablation RAC).",
    )
    centres: Literal["clustered", "random"] = Field(
        "clustered",
        description="How groups are formed: by clustering (`clustered`), or around `random` silos "
        "(the paper's ablation RCC).",
    )
    within: WithinField = Within()
    seed: Seed = 0
    remembers = FedGroupState
    hands_on = True
    works_unseen = True
    takes_steps = True
    models_in = ("group_models",)

    def problems(self, training: Config) -> Iterator[str]:
        yield from self.within.problems(training)
        if self.cold_start_epochs and self.cold_start_steps:
            yield (
                "a cold start uses cold-start-epochs or cold-start-steps, not both: one must be 0. "
                f"Got {self.cold_start_epochs} and {self.cold_start_steps}"
            )
        if 0 < self.cold_start_silos < self._least:
            yield (
                f"cold-start-silos must be 0, for all, or at least num-groups = {self._least}. "
                f"Got {self.cold_start_silos}"
            )

    def insecure(self) -> str:
        """Return why options are refused in a secure run: they need to see a group's model."""
        if self.cold_start_steps:
            return (
                "with cold-start-steps, silos of different sizes train for different numbers of "
                "epochs, and a secure run sums only silos that train alike: use cold-start-epochs"
            )
        if self.inter_group_lr:
            return (
                "inter-group-lr needs every group's model, and in a secure run the coordinator "
                "does not see the model of a single silo: it must be 0"
            )
        return self.within.insecure()

    def compared(self, state: FedGroupState) -> Compared | None:
        return Compared()

    def _rng(self, number: int, purpose: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, number, purpose])

    @property
    def _least(self) -> int:
        return 1 if self.num_groups == "auto" else int(self.num_groups)

    def demands(self) -> Config:
        lengths = {
            wire.COLD_START_EPOCHS: self.cold_start_epochs,
            wire.COLD_START_STEPS: self.cold_start_steps,
        }
        return {key: length for key, length in lengths.items() if length}

    # ---------------------------------------------------------------- before a round

    def welcome(self, state: FedGroupState, new: frozenset[str], now: Round) -> FedGroupState:
        """Start new silos cold, and clear the notes of the previous round."""
        placed: dict[str, Any] = {"begun": (), "similarity": {}, "opened": ()}
        state = replace(state, **placed, compared=(), cosines=(), lengths=())
        return self._gathered(state, now)

    def renew(self, state: FedGroupState, changed: frozenset[str], now: Round) -> FedGroupState:
        """Make silos with changed data cold again; the groups' directions stay."""
        group_of = {name: own for name, own in state.group_of.items() if name not in changed}
        return replace(state, group_of=group_of)

    def prepare(self, state: FedGroupState, now: Round) -> Exchanges[FedGroupState]:
        """Run the cold starts that the round's training continues: the groups', then silos'."""
        tried: set[str] = set()
        if not state.group_models:
            first = [now.here[name] for name in state.pretraining or ()]
            if not all(self._goes_on(silo, now) for silo in first):
                return state
            updates = yield [self._cold_start(state, silo, COLD_START, now) for silo in first]
            state = self._formed(state, updates, now)
            rest = [u for u in updates if u.silo.name not in state.group_of]
            state = self._placed(state, rest, now)
            tried = {silo.name for silo in first}
            state = replace(state, begun=tuple(sorted(state.group_of)))
        turn = self._turn(state.here, now.number) - set(state.group_of) - tried
        cold = [now.here[name] for name in sorted(turn) if self._goes_on(now.here[name], now)]
        if cold:
            updates = yield [self._cold_start(state, silo, COLD_START, now) for silo in cold]
            state = self._placed(state, updates, now)
            begun = {*state.begun, *(update.silo.name for update in updates)}
            state = replace(state, begun=tuple(sorted(begun)))
        return state

    def orders(self, state: FedGroupState, now: Round) -> tuple[FedGroupState, list[Order]]:
        """Order group training for sampled silos; w⁰ for cold ones due this round or the next."""
        turn, soon = (self._turn(state.here, now.number + ahead) for ahead in (0, 1))
        due = soon | (turn if state.group_models else set(state.pretraining or ()))
        orders = []
        for name, silo in sorted(now.here.items()):
            if name in state.group_of and name in turn:
                orders += self._training(state, silo, now)
            elif name not in state.group_of and name in due:
                # Round 1 is its silos' ordinary training. Later, w⁰ is nobody's model of the round
                # before, so it is not evaluated as such.
                if not state.group_models:
                    orders.append(self._cold_start(state, silo, "", now))
                elif not self._goes_on(silo, now):
                    orders.append(self._cold_start(state, silo, COLD_START, now))
        return state, orders

    def _gathered(self, state: FedGroupState, now: Round) -> FedGroupState:
        """Note the silos present; once, choose those that pre-train (Algorithm 3, line 2)."""
        state = replace(state, here=tuple(sorted(now.names)))
        if state.pretraining is not None:
            return state
        self._require_enough(len(state.here), "are here")
        chosen = drawn(state.here, self.cold_start_silos, self._rng(now.number, _PRETRAIN))
        return replace(state, pretraining=tuple(sorted(chosen)))

    def _turn(self, here: Sequence[str], number: int) -> frozenset[str]:
        """Return S_t (Algorithm 2, line 4), known ahead so that cold silos are placed in time."""
        return drawn(here, self.sample, self._rng(number, _SAMPLE))

    def _cold_start(self, state: FedGroupState, silo: Silo, purpose: str, now: Round) -> Order:
        """Order a pre-training from w⁰, the same in every round: Algorithm 1's ClientUpdate."""
        config: dict[str, Scalar] = {wire.LR_DECAY: 1.0}
        if self.cold_start_epochs:  # a silo with a number of steps does not count epochs
            config |= {wire.LOCAL_EPOCHS: self.cold_start_epochs, wire.LOCAL_STEPS: 0}
        if self.cold_start_steps:
            config[wire.LOCAL_STEPS] = self.cold_start_steps
        if now.config.get(wire.PROXIMAL_MU):
            config[wire.PROXIMAL_MU] = 0.0
        kind = wire.COLD_START if purpose and self._goes_on(silo, now) else wire.TRAIN
        initial, beside = state.members.initial, state.formed
        return Order(silo, initial, purpose, config, kind, beside=beside)

    def _goes_on(self, silo: Silo, now: Round) -> bool:
        """Return whether the silo's cold start is the beginning of a round's training."""
        if not silo.described:
            return False
        steps = self._cold_steps(silo, now)
        return self.cold_start_steps > 0 or 0 < steps < _round_steps(silo, now)

    def _cold_steps(self, silo: Silo, now: Round) -> int:
        """Return the mini-batches of a cold start; 0 if it is as long as a round."""
        return self.cold_start_steps or self.cold_start_epochs * num_batches(silo, now.config)

    def _training(self, state: FedGroupState, silo: Silo, now: Round) -> list[Order]:
        """Order a round of the group's model, minus the silo's cold start in this round."""
        model, kind = state.group_models[state.group_of[silo.name]], self.within.inside.kind
        if silo.name not in state.begun:
            return [Order(silo, model, kind=kind)]
        config = self._rest(silo, now)
        if not all(left > 0 for left in config.values()):
            return []
        if now.number == 1:  # its group's model is not w⁰, which round 0 would report
            config |= {wire.EVALUATE_RECEIVED: False}
        return [Order(silo, model, config=config, kind=kind)]

    def _rest(self, silo: Silo, now: Round) -> dict[str, int]:
        if self.cold_start_steps or now.config.get(wire.LOCAL_STEPS):
            return {wire.LOCAL_STEPS: _round_steps(silo, now) - self._cold_steps(silo, now)}
        return {wire.LOCAL_EPOCHS: _local_epochs(now) - self.cold_start_epochs}

    # ---------------------------------------------------------------- after a round

    def absorb(self, state: FedGroupState, updates: Updates, now: Round) -> FedGroupState:
        """Form the groups or train them, then place the cold silos that answered."""
        state = replace(state, here=tuple(sorted(now.names)))  # less who diverged meanwhile
        if state.group_models:
            old = [u for u in updates if u.silo.name in state.group_of]
            state = self._trained(state, old, now)
        else:
            chosen = state.pretraining or ()
            state = self._formed(state, [u for u in updates if u.silo.name in chosen], now)
        cold = [u for u in updates if u.silo.name not in state.group_of]
        return _handed_out(self._placed(state, cold, now))

    def _formed(self, state: FedGroupState, updates: Updates, now: Round) -> FedGroupState:
        """Form groups, their models and directions (Algorithm 3, from line 6)."""
        self._require_enough(len(updates), "answered")
        deltas = [compared(update) for update in updates]
        noise = [u.noise_in(delta) for u, delta in zip(updates, deltas, strict=True)]
        matrix = gram([list(delta.values()) for delta in deltas], noise=noise)
        with warnings_by_name():
            found = clusters(
                matrix,
                [u.silo.name for u in updates],
                self._rng(now.number, _CLUSTER),
                num_groups=self.num_groups,
                measure=self.measure,
                centres=self.centres,
            )
        groups = _accepted(found, updates)
        if not groups:
            raise FederationError(
                "the cold start formed no group that is large enough for its silos' "
                "min_group_size. Use a smaller num_groups, or wait for more silos.",
                exit_code=EXIT_NO_SILOS,
            )
        pairs = enumerate(groups)
        counting = [_counting(updates, group) for group in groups]
        initial = state.members.initial
        state = replace(
            state,
            group_of={updates[i].silo.name: number for number, group in pairs for i in group},
            # Equal weights, as in Algorithm 3, line 16: ``w⁰ + mean(Δ_i)``. w⁰ where a group's
            # silos accept none so small.
            group_models=tuple(
                plain_mean([u.model for u in own]) if own else initial for own in counting
            ),
            directions=tuple(plain_mean([deltas[i] for i in group]) for group in groups),
            norms=tuple(fedgroup.direction_norms(matrix, groups).tolist()),
            formed=(now.number, updates[0].purpose),
            compared=tuple(update.silo.name for update in updates),
            cosines=cosine_matrix(matrix),
            lengths=tuple(np.sqrt(matrix.diagonal()).tolist()),
        )
        if self.centres == "random" or len(found) in (1, len(updates)):
            return state
        return replace(state, separation=separation_of(matrix, found))

    def _trained(self, state: FedGroupState, updates: Updates, now: Round) -> FedGroupState:
        """Run every group's FedAvg, then the inter-group aggregation (Algorithm 2, lines 5–10)."""
        models = list(state.group_models)
        rest = {u.silo.name: self._rest(u.silo, now) for u in updates if u.silo.name in state.begun}
        combine = partial(self.within.inside.combine, now=now, settings=rest)
        members = by_number(state.here, state.group_of, len(models))
        for number in range(len(models)):
            own = [u for u in updates if state.group_of[u.silo.name] == number]
            mean = average(own, members[number], combine=combine)
            if mean is not None:  # otherwise an empty group, line 12: it keeps its model
                models[number] = mean
        if self.inter_group_lr and updates:
            buffers = {name for update in updates for name in update.silo.buffers}
            models = inter_group(models, self.inter_group_lr, sorted(buffers))
        return replace(state, group_models=tuple(models))

    def _placed(self, state: FedGroupState, updates: Updates, now: Round) -> FedGroupState:
        rng = self._rng(now.number, _ASSIGN)
        for update in updates:
            state = self._assigned(state, update, rng)
        return state

    def _assigned(
        self, state: FedGroupState, update: Update, rng: np.random.Generator
    ) -> FedGroupState:
        """Place a cold silo by eq. 9, at random (RAC), or in a new group."""
        name, delta = update.silo.name, compared(update)
        row = [list(delta.values())]
        inner = cross(row, [list(direction.values()) for direction in state.directions])[0]
        norm = float(np.sqrt(gram(row, noise=[update.noise_in(delta)])[0, 0]))
        with warnings_by_name():
            cosines = fedgroup.similarities(inner, state.norms, norm)
        if not any(array.any() for array in delta.values()):
            log.warning("silo %s sent an all-zero update, so its group is arbitrary", name)
        state = replace(state, similarity={**state.similarity, name: tuple(cosines.tolist())})
        if self.assign == "random":
            number = int(rng.integers(len(cosines)))
        elif cosines.max() < self.min_similarity and accepted([update], [name]):
            log.warning(
                "silo %s resembles no group (largest cosine %.2f): it starts group %d",
                name,
                cosines.max(),
                len(cosines),
            )
            number = len(cosines)
            state = replace(  # its model and direction are those of the silo that opens it
                state,
                group_models=(*state.group_models, update.model),
                directions=(*state.directions, delta),
                norms=(*state.norms, norm),
                opened=(*state.opened, name),
            )
        else:
            number = fedgroup.assign(cosines)
        return replace(state, group_of={**state.group_of, name: number})

    def _require_enough(self, num_silos: int, what: str) -> None:
        if num_silos < self._least:
            raise FederationError(
                f"the group cold start needs at least {self._least} silos "
                f"(num_groups = {self.num_groups}). Only {num_silos} {what}.",
                exit_code=EXIT_NO_SILOS,
            )

    # ---------------------------------------------------------------- views

    def models(self, state: FedGroupState) -> Mapping[str, Model]:
        """Return silo → its group's model (for absent silos the last one); cold silos have none."""
        return {n: model for n, model in state.members.models.items() if n in state.group_of}

    def global_model(self, state: FedGroupState) -> Model | None:
        """Return the auxiliary global model; None without groups or if not seen (secure runs)."""
        seen = state.group_models and all(map(is_seen, state.group_models))
        return global_model(state) if seen else None

    def details(self, state: FedGroupState) -> Mapping[str, Any]:
        members = by_number(state.here, state.group_of, len(state.group_models))
        return {
            "members": members,
            "empty-groups": [number for number, names in enumerate(members) if not names],
            "cold": [name for name in state.here if name not in state.group_of],
            "separation": None if state.separation is None else round(state.separation, 4),
            "placed": {
                name: {"group": state.group_of[name], "cosines": [round(c, 6) for c in cosines]}
                for name, cosines in state.similarity.items()
            },
            "opened": list(state.opened),
            **comparison(state.compared, state.cosines, state.lengths),
        }


def _local_epochs(now: Round) -> int:
    """Return E; 1 by default, as at the silos."""
    return int(now.config.get(wire.LOCAL_EPOCHS, 1))


def _round_steps(silo: Silo, now: Round) -> int:
    """Return the mini-batches of a round's training at a silo that described itself."""
    steps = int(now.config.get(wire.LOCAL_STEPS, 0))
    return steps or _local_epochs(now) * num_batches(silo, now.config)


def _accepted(groups: Sequence[Sequence[int]], updates: Updates) -> list[list[int]]:
    """Return the groups without silos that accept none so small; those become newcomers."""
    kept = []
    for group in groups:
        stay = {update.silo.name for update in _counting(updates, group)}
        kept.append([i for i in group if updates[i].silo.name in stay])
    return [group for group in kept if group]


def _counting(updates: Updates, group: Sequence[int]) -> list[Update]:
    """Return those updates of a group, given as rows, that may be averaged."""
    own = [updates[i] for i in group]
    return accepted(own, [u.silo.name for u in own])


def _handed_out(state: FedGroupState) -> FedGroupState:
    """Give present silos their group's model; absent ones keep their last."""
    here = [name for name in state.here if name in state.group_of]
    members = give_out(state.members, here, state.group_of, state.group_models)
    return replace(state, members=members)
