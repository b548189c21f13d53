"""FedGroup and FedGrouProx: static groups from one pre-training, and newcomers placed by it.

Duan, Liu, Ji, Liu, Liang, Chen, Tan: "FedGroup: Efficient Federated Learning via Decomposed
Similarity-Based Clustering", 2021, https://arxiv.org/abs/2010.06870; Algorithms 2–3, eqs.
4–9. The clustering itself is ``coterie.strategies.partition.fedgroup``.

Group cold start (Algorithm 3), round 1: the pre-training silos train from w⁰; their updates are
clustered (EDC or MADC); group j starts at ``w⁰ + mean(Δ_i)``, equal weights, and keeps
``mean(Δ_i)``, frozen, as its direction. From round 2 on every group is a FedAvg of its own
(Algorithm 2; with ``proximal-mu`` in the training configuration FedProx: FedGrouProx). A silo in
no group is *cold*: in its first round, whichever that is, it trains from w⁰ and goes to the group
whose direction has the largest cosine with its update (eq. 9). No group model is sent to it to be
compared.

Silos that described themselves are cold-started by the phase ``train.cold_start`` before the
round's training, and then train what is left of the round's E epochs from their group's model, as
in the paper. All else is ordinary ``train`` messages, which any ClientApp understands.

Differs from the paper in:

- *Whole rounds.* A cold start that is not shorter than a round leaves nothing to go on with, and a
  plain ClientApp cannot be told to: then it is the silo's work of its first round. In round 1 that
  is what FedAvg's silos do as well, so with the default length it costs no round. A newcomer holds
  its group's model after its first round, and its data count from the next on; sampled silos are
  cold-started one round before their turn.
- *Which arrays.* Directions are of parameters; BatchNorm's running statistics are averaged with
  the models, but neither compared nor moved by the inter-group aggregation.
- ``num_groups="auto"``, the separation of the groups, and ``min_similarity``, which lets a
  newcomer that is like no group open one, are not in the paper.
- Algorithm 3 line 16 as printed makes the mean update the group's model; w⁰ is added here.
- *RCC* is not spelled out: here m random pre-training silos are the centres, and the others are
  placed by eq. 9.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Unpack

import numpy as np

from coterie import wire
from coterie.strategies.errors import EXIT_NO_SILOS, FederationError, require
from coterie.strategies.partition.fedgroup import (
    Measure,
    assign,
    choose_num_groups,
    cold_start,
    direction_norms,
    silhouette,
    similarities,
)
from coterie.strategies.partition.gram import cross, gram
from coterie.strategies.rounds.grouping import (
    Members,
    averaged,
    comparison,
    cosine_matrix,
    drawn,
    enrol,
    num_batches,
)
from coterie.strategies.rounds.loop import Group, GroupStrategy, LoopOptions, Order, Update
from coterie.strategies.rounds.models import comparable, difference, is_statistic, weighted_mean
from coterie.strategies.rounds.roster import Silo
from coterie.wire import Model

log = logging.getLogger("coterie.run")

COLD_START = "cold-start"
"""Purpose of a training from w⁰, unless it is round 1 itself."""
LOW_SEPARATION = 0.6
"""Silhouette of the MADC distances below which groups are doubtful; see ``choose_num_groups``."""
MAX_AUTO_GROUPS = 32
"""``num_groups="auto"`` tries no more."""
_PRETRAIN, _CLUSTER, _SAMPLE, _ASSIGN = range(4)  # purposes of the strategy's own randomness


@dataclass(frozen=True)
class FedGroupState:
    """What FedGroup knows between two rounds. Groups are numbered from 0 and never renumbered.

    Attributes:
        members: every silo's model and size; ``groups`` are the members that are here.
        group_of: silo → number of its group, for good. Who is not in it is cold.
        group_models: w^(g_j).
        directions: Δw₀^(g_j), frozen: mean pre-training updates (the compared arrays only).
        norms: their lengths.
        pretraining: the silos whose updates form the groups; None before they are chosen.
        separation: silhouette of the groups that were formed, where there is one.
        here: silos of the last round, sorted.
        begun: silos whose cold start was the beginning of the last round's training.
        similarity: silo placed in the last round → its cosine with every direction.
        opened: silos that opened a group in the last round.
        compared: silos whose updates formed groups in the last round, or nobody; ``cosines`` and
            ``lengths`` are of those updates.
    """

    members: Members
    group_of: Mapping[str, int] = field(default_factory=dict)
    group_models: tuple[Model, ...] = ()
    directions: tuple[Model, ...] = ()
    norms: tuple[float, ...] = ()
    pretraining: tuple[str, ...] | None = None
    separation: float | None = None
    here: tuple[str, ...] = ()
    begun: tuple[str, ...] = ()
    similarity: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    opened: tuple[str, ...] = ()
    compared: tuple[str, ...] = ()
    cosines: tuple[tuple[float, ...], ...] = ()
    lengths: tuple[float, ...] = ()


class FedGroup(GroupStrategy[FedGroupState]):
    """Groups by the direction of a pre-training, each with a FedAvg or FedProx of its own.

    Args:
        num_groups: m, at least 1; ``auto`` takes the number of best silhouette in round 1.
        measure: ``edc`` (k-means++ on m directions) or ``madc`` (complete linkage).
        pretrain_epochs: local epochs of every cold start; 0 takes those of a round, which
            ``train_config`` states. Longer ones separate small silos better. Needs silos that heed
            ``local-epochs``.
        pretrain_steps: mini-batches of every cold start in place of epochs; 0 takes epochs. Needs
            silos that heed ``local-steps``.
        pretrain_silos: α·m, how many silos, drawn by seed, form the groups; 0 takes all that are
            here in round 1. The others are placed like newcomers.
        min_similarity: a newcomer whose largest cosine is below opens a new group with its own
            model, unless it accepts no group of one. −1, the default, never does.
        sample: K, silos a round, drawn by seed; 0 takes all. Round 1 is not sampled.
        inter_group_lr: η_g ≥ 0 of the inter-group aggregation (Algorithm 2, line 18); 0 is off.
        assign: ``cosine`` (eq. 9), or ``random`` for the ablation RAC.
        centres: ``clustered``, or ``random`` for the ablation RCC.
        seed: of the draws and of k-means++.

    The other arguments are those of ``GroupStrategy``.
    """

    def __init__(
        self,
        *,
        num_groups: int | Literal["auto"] = 3,
        measure: Measure = "edc",
        pretrain_epochs: int = 0,
        pretrain_steps: int = 0,
        pretrain_silos: int = 0,
        min_similarity: float = -1.0,
        sample: int = 0,
        inter_group_lr: float = 0.0,
        assign: Literal["cosine", "random"] = "cosine",
        centres: Literal["clustered", "random"] = "clustered",
        seed: int = 0,
        **options: Unpack[LoopOptions],
    ) -> None:
        super().__init__(**options)
        _require_num_groups(num_groups)
        _require_one_of("measure", measure, ("edc", "madc"))
        _require_one_of("assign", assign, ("cosine", "random"))
        _require_one_of("centres", centres, ("clustered", "random"))
        counts = {"pretrain_epochs": pretrain_epochs, "sample": sample, "seed": seed}
        counts |= {"pretrain_steps": pretrain_steps, "pretrain_silos": pretrain_silos}
        for name, count in counts.items():
            require(count >= 0, f"{name} must be at least 0. Got {count}.")
        require(
            not (pretrain_epochs and pretrain_steps),
            "a cold start has pretrain_epochs or pretrain_steps, not both. "
            f"Got {pretrain_epochs} and {pretrain_steps}.",
        )
        least = 1 if num_groups == "auto" else int(num_groups)
        require(
            pretrain_silos == 0 or pretrain_silos >= least,
            f"pretrain_silos must be 0 or at least num_groups = {least}. Got {pretrain_silos}.",
        )
        require(
            -1 <= min_similarity <= 1, f"min_similarity must be in [-1, 1]. Got {min_similarity}."
        )
        require(
            bool(np.isfinite(inter_group_lr)) and inter_group_lr >= 0,
            f"inter_group_lr must be finite and at least 0. Got {inter_group_lr}.",
        )
        self.num_groups, self.measure = num_groups, measure
        self.pretrain_epochs, self.pretrain_steps = int(pretrain_epochs), int(pretrain_steps)
        self.pretrain_silos, self.sample = int(pretrain_silos), int(sample)
        self.min_similarity = float(min_similarity)
        self.inter_group_lr = float(inter_group_lr)
        self.assign, self.centres, self.seed = assign, centres, int(seed)

    def _rng(self, round: int, purpose: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, round, purpose])

    @property
    def _least(self) -> int:
        """Silos without which there are no groups."""
        return 1 if self.num_groups == "auto" else int(self.num_groups)

    def demands(self) -> Mapping[str, int | float | str | bool]:
        """The length of a cold start, if it is not a round's."""
        lengths = {
            wire.PRETRAIN_EPOCHS: self.pretrain_epochs,
            wire.PRETRAIN_STEPS: self.pretrain_steps,
        }
        return {key: length for key, length in lengths.items() if length}

    # ---------------------------------------------------------------- before a round

    def first(self, initial: Model) -> FedGroupState:
        """Nobody yet."""
        return FedGroupState(Members(initial))

    def admit(self, state: FedGroupState, silos: Sequence[Silo], *, round: int) -> FedGroupState:
        """Everybody comes cold, with w⁰."""
        members = enrol(state.members, silos, state.members.initial)
        placed: dict[str, Any] = {"begun": (), "similarity": {}, "opened": ()}
        return replace(state, members=members, **placed, compared=(), cosines=(), lengths=())

    def prepare(
        self, state: FedGroupState, silos: Sequence[Silo], *, round: int
    ) -> Generator[Sequence[Order], list[Update], FedGroupState]:
        """The cold starts that the round's training goes on from: of the groups, then of silos."""
        here = {silo.name: silo for silo in silos}
        state = self._gathered(state, here, round)
        if not state.group_models:
            first = [here[name] for name in state.pretraining or ()]
            if not all(self._goes_on(silo) for silo in first):
                return state
            updates = yield [self._cold_start(state, silo, COLD_START) for silo in first]
            state = self._formed(_counted(state, updates), updates, round)
            rest = [u for u in updates if u.silo.name not in state.group_of]
            state = self._placed(state, rest, round)
            tried = {silo.name for silo in first}
            state = replace(state, begun=tuple(sorted(state.group_of)))
        else:
            tried = set()
        turn = self._turn(state.here, round) - set(state.group_of) - tried
        cold = [here[name] for name in sorted(turn) if self._goes_on(here[name])]
        if cold:
            updates = yield [self._cold_start(state, silo, COLD_START) for silo in cold]
            state = self._placed(_counted(state, updates), updates, round)
            begun = {*state.begun, *(update.silo.name for update in updates)}
            state = replace(state, begun=tuple(sorted(begun)))
        return state

    def orders(
        self, state: FedGroupState, silos: Sequence[Silo], *, round: int
    ) -> tuple[FedGroupState, list[Order]]:
        """The sampled train their group's model; cold ones whose turn it is, or is next, w⁰."""
        here = {silo.name: silo for silo in silos}
        state = self._gathered(state, here, round)
        now, soon = self._turn(state.here, round), self._turn(state.here, round + 1)
        due = soon | (now if state.group_models else set(state.pretraining or ()))
        orders = []
        for name, silo in sorted(here.items()):
            if name in state.group_of and name in now:
                orders += self._training(state, silo, round)
            elif name not in state.group_of and name in due:
                # Round 1 is its silos' ordinary training. Later, w⁰ is nobody's model of the round
                # before, so it is not evaluated as such.
                if not state.group_models:
                    orders.append(self._cold_start(state, silo, ""))
                elif not self._goes_on(silo):
                    orders.append(self._cold_start(state, silo, COLD_START))
        return state, orders

    def _gathered(
        self, state: FedGroupState, here: Mapping[str, Silo], round: int
    ) -> FedGroupState:
        """Who is here; and once, Algorithm 3, line 2: the α·m silos that pre-train."""
        state = replace(state, here=tuple(sorted(here)))
        if state.pretraining is not None:
            return state
        self._require_enough(len(here), "are here", round)
        chosen = drawn(state.here, self.pretrain_silos, self._rng(round, _PRETRAIN))
        return replace(state, pretraining=tuple(sorted(chosen)))

    def _turn(self, here: Sequence[str], round: int) -> frozenset[str]:
        """Algorithm 2, line 4: S_t, known ahead so that cold silos can be warm by their turn."""
        return drawn(here, self.sample, self._rng(round, _SAMPLE))

    def _cold_start(self, state: FedGroupState, silo: Silo, purpose: str) -> Order:
        """Pre-training from w⁰, the same in every round: ClientUpdate of Algorithm 1."""
        config: dict[str, int | float | str | bool] = {wire.LR_DECAY: 1.0}
        if self.pretrain_epochs:  # a silo that is told steps does not count epochs
            config |= {wire.LOCAL_EPOCHS: self.pretrain_epochs, wire.LOCAL_STEPS: 0}
        if self.pretrain_steps:
            config[wire.LOCAL_STEPS] = self.pretrain_steps
        if self.train_config.get(wire.PROXIMAL_MU):
            config[wire.PROXIMAL_MU] = 0.0
        kind = wire.COLD_START if purpose and self._goes_on(silo) else wire.TRAIN
        return Order(silo, state.members.initial, purpose=purpose, config=config, kind=kind)

    def _goes_on(self, silo: Silo) -> bool:
        """Whether its cold start is the beginning of a round's training."""
        if not silo.described:
            return False
        return self.pretrain_steps > 0 or 0 < self._cold_steps(silo) < self._round_steps(silo)

    @property
    def _local_epochs(self) -> int:
        """E; one, as at any silo that is told nothing."""
        return int(self.train_config.get(wire.LOCAL_EPOCHS, 1))

    @property
    def _local_steps(self) -> int:
        """Mini-batches of a round in place of E epochs; 0 counts epochs."""
        return int(self.train_config.get(wire.LOCAL_STEPS, 0))

    def _round_steps(self, silo: Silo) -> int:
        return self._local_steps or self._local_epochs * num_batches(silo, self.train_config)

    def _cold_steps(self, silo: Silo) -> int:
        """Mini-batches of a cold start whose length is given; 0 if it is that of a round."""
        return self.pretrain_steps or self.pretrain_epochs * num_batches(silo, self.train_config)

    def _training(self, state: FedGroupState, silo: Silo, round: int) -> list[Order]:
        """A round of the group's model, less what a cold start in this round has taken of it."""
        model = state.group_models[state.group_of[silo.name]]
        if silo.name not in state.begun:
            return [Order(silo, model)]
        config: dict[str, int | float | str | bool] = {}
        if self.pretrain_steps or self._local_steps:
            config[wire.LOCAL_STEPS] = left = self._round_steps(silo) - self._cold_steps(silo)
        else:
            config[wire.LOCAL_EPOCHS] = left = self._local_epochs - self.pretrain_epochs
        if round == 1:  # its group's model is not w⁰, which round 0 would report
            config[wire.EVALUATE_RECEIVED] = False
        return [Order(silo, model, config=config)] if left > 0 else []

    # ---------------------------------------------------------------- after a round

    def absorb(
        self, state: FedGroupState, updates: Sequence[Update], *, round: int
    ) -> FedGroupState:
        """Form the groups or train them, then place the cold ones that answered."""
        state = _counted(state, updates)
        if state.group_models:
            state = self._trained(state, [u for u in updates if u.silo.name in state.group_of])
        else:
            chosen = state.pretraining or ()
            state = self._formed(state, [u for u in updates if u.silo.name in chosen], round)
        cold = [u for u in updates if u.silo.name not in state.group_of]
        return _handed_out(self._placed(state, cold, round))

    def _formed(self, state: FedGroupState, updates: Sequence[Update], round: int) -> FedGroupState:
        """Algorithm 3, from line 6: groups, their models and directions."""
        self._require_enough(len(updates), "answered", round)
        deltas = [_compared(update) for update in updates]
        matrix = gram([list(delta.values()) for delta in deltas])
        with _numerics_unheard():
            found = self._clusters(matrix, [u.silo.name for u in updates], round)
        groups = _accepted(found, updates)
        if not groups:
            raise FederationError(
                "the cold start made no group as large as its silos accept. Take a smaller "
                "num_groups, or wait for more silos.",
                round=round,
                phase="cold start",
                exit_code=EXIT_NO_SILOS,
            )
        pairs = enumerate(groups)
        state = replace(
            state,
            group_of={updates[i].silo.name: number for number, group in pairs for i in group},
            group_models=tuple(
                _first_model([updates[i] for i in group], state.members.initial) for group in groups
            ),
            directions=tuple(_mean([deltas[i] for i in group]) for group in groups),
            norms=tuple(direction_norms(matrix, groups).tolist()),
            compared=tuple(update.silo.name for update in updates),
            cosines=cosine_matrix(matrix),
            lengths=tuple(np.sqrt(matrix.diagonal()).tolist()),
        )
        if self.centres == "random" or len(found) in (1, len(updates)):
            return state
        return replace(state, separation=self._separation(matrix, found))

    def _clusters(self, matrix: np.ndarray, names: Sequence[str], round: int) -> list[list[int]]:
        for row in np.flatnonzero(matrix.diagonal() == 0).tolist():
            log.warning("silo %s sent a zero update: its group means nothing", names[row])
        rng = self._rng(round, _CLUSTER)
        wanted = self._count(matrix, rng)
        if self.centres == "random":
            picked = rng.choice(len(matrix), size=wanted, replace=False)
            return [[row] for row in sorted(picked.tolist())]
        groups = cold_start(matrix, num_groups=wanted, measure=self.measure, rng=rng)
        if len(groups) < wanted:
            log.warning(
                "the updates have only %d different directions: %d group(s), not %d",
                len(groups),
                len(groups),
                wanted,
            )
        return groups

    def _count(self, matrix: np.ndarray, rng: np.random.Generator) -> int:
        if self.num_groups != "auto":
            return int(self.num_groups)
        highest = min(MAX_AUTO_GROUPS, len(matrix))
        found = choose_num_groups(matrix, measure=self.measure, rng=rng, max_groups=highest)
        log.info("num-groups: %d, by silhouettes %s", found.num_groups, found.silhouettes)
        return found.num_groups

    def _separation(self, matrix: np.ndarray, groups: list[list[int]]) -> float:
        """Always judged by MADC: EDC sees groups even where there are none."""
        with _numerics_unheard():
            separation = silhouette(matrix, groups, measure="madc")
        if separation < LOW_SEPARATION:
            log.warning(
                "the groups are badly separated: silhouette %.2f, below %.1f. More pretrain-epochs "
                "or another num-groups may help.",
                separation,
                LOW_SEPARATION,
            )
        return separation

    def _trained(self, state: FedGroupState, updates: Sequence[Update]) -> FedGroupState:
        """Algorithm 2, lines 5–10: every group's FedAvg, then the inter-group aggregation."""
        models = list(state.group_models)
        for number in range(len(models)):
            answered = averaged([u for u in updates if state.group_of[u.silo.name] == number])
            if answered:  # otherwise an empty group, line 12: it keeps its model
                weights = [u.num_examples for u in answered]
                models[number] = weighted_mean([u.model for u in answered], weights)
        if self.inter_group_lr and updates:
            buffers = {name for update in updates for name in update.silo.buffers}
            models = _inter_group(models, self.inter_group_lr, sorted(buffers))
        return replace(state, group_models=tuple(models))

    def _placed(self, state: FedGroupState, updates: Sequence[Update], round: int) -> FedGroupState:
        """Every cold silo that answered has a group."""
        rng = self._rng(round, _ASSIGN)
        for update in updates:
            state = self._assigned(state, update, rng)
        return state

    def _assigned(
        self, state: FedGroupState, update: Update, rng: np.random.Generator
    ) -> FedGroupState:
        """Client cold start, eq. 9; or RAC; or a group of its own."""
        name, delta = update.silo.name, _compared(update)
        cosines = _cosines(state, delta)
        if not any(array.any() for array in delta.values()):
            log.warning("silo %s sent a zero update: its group means nothing", name)
        state = replace(state, similarity={**state.similarity, name: tuple(cosines.tolist())})
        if self.assign == "random":
            number = int(rng.integers(len(cosines)))
        elif cosines.max() < self.min_similarity and update.silo.min_group_size == 1:
            log.warning(
                "silo %s is like no group (largest cosine %.2f): it opens group %d",
                name,
                cosines.max(),
                len(cosines),
            )
            state, number = _opened(state, update, delta), len(cosines)
        else:
            number = assign(cosines, np.ones(len(cosines)), 1.0)  # of unit vectors
        return replace(state, group_of={**state.group_of, name: number})

    def _require_enough(self, num_silos: int, what: str, round: int) -> None:
        if num_silos < self._least:
            raise FederationError(
                f"the group cold start needs at least {self._least} silos "
                f"(num_groups = {self.num_groups}). Only {num_silos} {what}.",
                round=round,
                phase="cold start",
                exit_code=EXIT_NO_SILOS,
            )

    # ---------------------------------------------------------------- views

    def models(self, state: FedGroupState) -> Mapping[str, Model]:
        """Silo → its group's model; who left, the last that it had; who is cold has none."""
        return {n: model for n, model in state.members.models.items() if n in state.group_of}

    def global_model(self) -> Model:
        """The auxiliary global model (Algorithm 2, line 11): the plain mean of the groups' models.

        Of the present state: after ``start``, the final one. w⁰ while there are no groups.

        Raises:
            FederationError: nothing has been started.
        """
        if self._state is None:
            raise FederationError("there is no global model before the run has started.")
        models = self._state.group_models
        return _mean(models) if models else self._state.members.initial

    def groups(self, state: FedGroupState) -> Sequence[Group]:
        """The members of every group that are here; cold silos are in none."""
        return state.members.groups

    def sharing(self, state: FedGroupState) -> Sequence[Group]:
        """Those of one silo too: newcomers get the group's model."""
        return self.groups(state)

    def sizes(self, state: FedGroupState) -> Mapping[str, float]:
        """Silo → training samples."""
        return state.members.sizes

    def details(self, state: FedGroupState) -> Mapping[str, Any]:
        """Groups by number, empty ones too; who is cold; how the last were placed, and by what."""
        members = _by_number(state)
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


def _require_num_groups(num_groups: object) -> None:
    whole = isinstance(num_groups, int) and not isinstance(num_groups, bool) and num_groups >= 1
    require(
        whole or num_groups == "auto",
        f"num_groups must be an integer of at least 1, or 'auto'. Got {num_groups!r}.",
    )


def _require_one_of(name: str, value: str, allowed: tuple[str, str]) -> None:
    require(value in allowed, f"{name} must be {' or '.join(allowed)}. Got {value!r}.")


@contextmanager
def _numerics_unheard() -> Iterator[None]:
    """The numerics warn of silos by row; here the same is logged by name."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"Zero update|Only \d+ different", RuntimeWarning)
        yield


def _first_model(updates: Sequence[Update], initial: Model) -> Model:
    """The mean of a new group's models; w⁰ if its silos accept no group so small."""
    counting = averaged(updates)
    return _mean([u.model for u in counting]) if counting else initial


def _counted(state: FedGroupState, updates: Sequence[Update]) -> FedGroupState:
    """The sizes that the silos state now."""
    sizes = {**state.members.sizes, **{u.silo.name: u.num_examples for u in updates}}
    return replace(state, members=replace(state.members, sizes=sizes))


def _accepted(groups: Sequence[Sequence[int]], updates: Sequence[Update]) -> list[list[int]]:
    """The groups without those to whom theirs is too small; they are placed like newcomers."""
    kept = []
    for group in groups:
        stay = {update.silo.name for update in averaged([updates[i] for i in group])}
        kept.append([i for i in group if updates[i].silo.name in stay])
    return [group for group in kept if group]


def _compared(update: Update) -> Model:
    """Δ_i: what a pre-training changed, parameters only."""
    delta = difference(update.model, update.start)
    return comparable(delta, similarity="parameters", buffers=update.silo.buffers)


def _mean(models: Sequence[Model]) -> Model:
    """Equal weights, as in Algorithm 3, line 16. Of models ``w⁰ + Δ_i``: ``w⁰ + mean(Δ_i)``."""
    return weighted_mean(models, [1.0] * len(models))


def _cosines(state: FedGroupState, delta: Model) -> np.ndarray:
    """(m,) cosines of an update with the frozen directions."""
    row = [list(delta.values())]
    inner = cross(row, [list(direction.values()) for direction in state.directions])[0]
    with _numerics_unheard():
        return similarities(inner, state.norms, float(np.sqrt(gram(row)[0, 0])))


def _opened(state: FedGroupState, update: Update, delta: Model) -> FedGroupState:
    """One group more: its model and direction are those of the silo that opens it."""
    norm = float(np.sqrt(gram([list(delta.values())])[0, 0]))
    return replace(
        state,
        group_models=(*state.group_models, update.model),
        directions=(*state.directions, delta),
        norms=(*state.norms, norm),
        opened=(*state.opened, update.silo.name),
    )


def _handed_out(state: FedGroupState) -> FedGroupState:
    """Everybody here gets its group's model. Who is away keeps the one that it left with."""
    own = {n: state.group_models[state.group_of[n]] for n in state.here if n in state.group_of}
    present = tuple(sorted(tuple(names) for names in _by_number(state) if names))
    members = replace(state.members, models={**state.members.models, **own}, groups=present)
    return replace(state, members=members)


def _by_number(state: FedGroupState) -> list[list[str]]:
    """Group number → its members that are here."""
    members: list[list[str]] = [[] for _ in state.group_models]
    for name in state.here:
        if name in state.group_of:
            members[state.group_of[name]].append(name)
    return members


def _inter_group(models: Sequence[Model], rate: float, buffers: Sequence[str]) -> list[Model]:
    """Algorithm 2, line 18, from the snapshot: ``w_j + η_g · Σ_{l≠j} w_l / |w_l|``."""
    units = [_unit(model, buffers) for model in models]
    return [
        {
            name: _moved(array, [u[name] for u in units[:j] + units[j + 1 :] if name in u], rate)
            for name, array in model.items()
        }
        for j, model in enumerate(models)
    ]


def _moved(array: Any, steps: Sequence[np.ndarray], rate: float) -> Any:
    return (array + rate * sum(steps)).astype(array.dtype) if steps else array


def _unit(model: Model, buffers: Sequence[str]) -> dict[str, np.ndarray]:
    """The model's parameters in float64, divided by their common norm; nothing for a zero model."""
    wide = {
        name: array.astype(np.float64)
        for name, array in model.items()
        if np.issubdtype(array.dtype, np.floating) and not is_statistic(name, buffers)
    }
    norm = float(np.sqrt(sum(float(np.vdot(array, array)) for array in wide.values())))
    return {name: array / norm for name, array in wide.items()} if norm > 0 else {}
