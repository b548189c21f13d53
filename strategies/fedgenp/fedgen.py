"""FedGen: one generator for all silos, from what their predictors agree on.

Zhu, Hong, Zhou: "Data-Free Knowledge Distillation for Heterogeneous Federated Learning", ICML 2021,
https://arxiv.org/abs/2105.10056; eqs. 4–5, Algorithm 1. A baseline of FedGenP.

By design it needs every silo's **label counts**: labels are drawn as often as they occur, and a
predictor counts for a label by its silo's share of it. A silo gives them only if its own
configuration allows it (``label_counts`` in ``silo.toml``), never because a server asks. Their sum
over all silos goes to every silo, as shares: with two silos, each knows the other's by subtraction.

Differs from the paper: the generator is FedGenP's (VAE-style output, no BatchNorm), the predictors
are weighed label by label as in the authors' code instead of averaging their logits, and
aggregation is size-weighted.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from coterie import wire
from coterie.strategies.errors import EXIT_CONFIG, FederationError
from coterie.strategies.fedgenp.generative import (
    Generative,
    GenerativeState,
    rng_of,
    teaching,
    without_teachers,
)
from coterie.strategies.fedgenp.latent import predictor_arrays, predictor_shape
from coterie.strategies.rounds.algorithm import Exchanges, Order, Round, Update, Updates
from coterie.strategies.rounds.handles import Arrays
from coterie.strategies.rounds.members import minimums_of
from coterie.strategies.rounds.options import Config
from coterie.strategies.rounds.replies import ReplyError

log = logging.getLogger("coterie.run")

EVERYBODY = "everybody"
"""The only receiver."""
LEAST, FEWEST = 2, 3
"""Fewest silos that teach before the generator is sent, if that many shared their counts: it only
knows the labels of these."""
_TRAIN = 1  # the purpose of the generator's randomness


class FedGen(Generative):
    """One shared generator, from label counts that every silo must consent to give.

    The option ``reversal`` has no effect.
    """

    def renew(self, state: GenerativeState, changed: frozenset[str], now: Round) -> GenerativeState:
        """Ask silos with changed data for their label counts again."""
        counts = {name: own for name, own in state.counts.items() if name not in changed}
        renewed: GenerativeState = super().renew(state, changed, now)
        return replace(renewed, counts=counts)

    def demands(self) -> Config:
        return {**super().demands(), wire.ASKS_LABEL_COUNTS: True}

    def prepare(self, state: GenerativeState, now: Round) -> Exchanges[GenerativeState]:
        """Ask for the unknown label counts.

        An answer, or a refusal, holds while the silo is present. A silo without a valid answer is
        asked again in the next round and has no part in the generator until then.

        Raises:
            FederationError: in round 1 silos refused, and fewer than two gave theirs.
        """
        state = yield from super().prepare(state, now)
        asked = [s for s in now.silos if s.name not in state.counts and s.name not in state.other]
        if not asked:
            return state
        _, num_classes = predictor_shape(
            {"w⁰": predictor_arrays(state.initial, state.layers)}, state.layers
        )
        log.warning(
            "FedGen asks %s for their label counts. Only silos whose settings allow it answer; "
            "FedGenP needs none.",
            wire.counted(len(asked), "silo"),
        )
        answers = yield [
            Order(silo, {}, purpose="label counts", kind=wire.LABEL_COUNTS) for silo in asked
        ]
        refused = [silo.name for silo in asked if silo.name in answers.refused]
        counts = {**state.counts, **dict.fromkeys(refused), **_given_counts(answers, num_classes)}
        num_reported = sum(of is not None for of in counts.values())
        if refused and num_reported < LEAST and now.number == 1:
            raise FederationError(
                f"FedGen needs the label counts of at least {LEAST} silos. Refused by: "
                f"{', '.join(refused)}. At a silo, `label_counts = true` in silo.toml or "
                "`--share-label-counts` allows it; in a simulation or comparison, "
                "`label-counts = true` in its file. FedGenP needs no label counts.",
                exit_code=EXIT_CONFIG,
            )
        if refused:
            log.warning(
                "%s refused to share label counts: the generator learns nothing from them.",
                ", ".join(refused),
            )
        return replace(state, counts=counts)

    def generated(
        self, state: GenerativeState, orders: Sequence[Order], now: Round
    ) -> GenerativeState:
        """Train the shared generator on the predictors of silos that gave label counts."""
        known = [name for name in state.heads if state.counts.get(name) is not None]
        own = {name: (name,) for name in known}
        heads = {name: state.heads[name] for name in known}
        names = teaching(heads, own, own, minimums_of(now.silos))
        given = sum(counts is not None for counts in state.counts.values())
        if len(names) < max(LEAST, min(given, FEWEST)):
            return without_teachers(state, now)
        from coterie.strategies.fedgenp.generators import train_shared_generator

        started = time.perf_counter()
        heads = {name: heads[name] for name in names}
        predictor_shape(heads, state.layers)  # refuses heads of different shapes
        trained, quality = train_shared_generator(
            state.generators.get(EVERYBODY) or self.fresh(EVERYBODY, heads, state.layers),
            list(heads.values()),
            state.layers,
            _table(state, names),
            plan=self.plan,
            rng=rng_of(self.seed, now.number, EVERYBODY, _TRAIN),
            device=self.device,
        )
        return replace(
            state,
            generators={EVERYBODY: trained},
            members={EVERYBODY: now.names},
            receiving=(EVERYBODY,),
            teachers=names,
            quality={EVERYBODY: (quality.others, quality.own)},
            seconds=time.perf_counter() - started,
            alone=False,
        )

    def sent(self, state: GenerativeState, receiver: str) -> Arrays:
        """Return the generator, and the shares by which labels are drawn (p̂(y) of the federation).

        The shares are of all silos present, whether they train in this round or not: sums over
        changing silos would reveal a silo's counts. Labels that no teacher has are left out, as
        their latents mean nothing.
        """
        here = [name for name, counts in state.counts.items() if counts is not None]
        taught = _table(state, state.teachers).sum(axis=0) > 0
        totals = _table(state, sorted(here)).sum(axis=0) * taught
        return {**state.generators[receiver].weights, wire.LABELS: totals / totals.sum()}


def _table(state: GenerativeState, names: Sequence[str]) -> np.ndarray:
    """Return label counts, shape (silos, classes)."""
    rows: list[Any] = [state.counts[name] for name in names]
    return np.stack(rows).astype(np.float64)


def _given_counts(answers: Updates, num_classes: int) -> dict[str, np.ndarray]:
    """Return silo → its label counts, for valid answers; log why the others are not."""
    given = {}
    for update in answers:
        try:
            given[update.silo.name] = _counts(update, num_classes)
        except ReplyError as error:
            log.warning("%s: its label counts are left out: %s", update.silo.name, error)
    return given


def _counts(update: Update, num_classes: int) -> np.ndarray:
    """Return the label counts of an answer, shape (classes,).

    Raises:
        ReplyError: they are missing, not one per class, or not counts.
    """
    counts = update.extras.get(wire.LABELS, {}).get(wire.LABELS)
    if counts is None:
        raise ReplyError(f"its reply has no array {wire.LABELS!r} in a record of that name.")
    if counts.shape != (num_classes,) or not np.issubdtype(counts.dtype, np.integer):
        raise ReplyError(
            f"label counts must be {num_classes} integers. Got {counts.dtype} of shape "
            f"{counts.shape}."
        )
    if counts.min() < 0 or counts.sum() <= 0:
        raise ReplyError("label counts must be at least 0, and at least one must be above 0.")
    return counts
