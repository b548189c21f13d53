"""Consensus at the silo: averaged linear models reach the minimum over all rows of their group.

The mean of models that are trained for long is not the model of all rows: each silo moves towards
its own minimum. The alternating direction method of multipliers corrects this (Boyd, Parikh, Chu,
Peleato, Eckstein: "Distributed Optimization and Statistical Learning via the Alternating Direction
Method of Multipliers", Foundations and Trends in Machine Learning 3(1), 2011, §7.1 in scaled form,
with the over-relaxation α of §3.4.3). With z the group's model, v the arrays that this silo sent in
the round before, and s the length of the step:

    u ← v − z,   w ← argmin f(w) + |w − (z − u)|²/(2s),   v ← α w + (1 − α) z + u,

and v is sent in place of w. The coordinator's mean of v is the method's next z, so it does what it
does without. At the end u = −s ∇f(z): the silo's pull, which the others' pulls balance.

s is one over the loss's curvature along one scaled column, times the factor of the coordinator,
which balances primal against dual residuals (``coterie.features.consensus.coordinator``). If the
factor changes, u changes by the same factor.

A silo that trains alone goes to its minimum in its second round, with a penalty chosen by
cross-validation of its rows. Its first step is bounded: strategies that look for groups compare it
with others', and it tells more of what they share than a minimum, which follows noise.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial

import numpy as np
from numpy.typing import NDArray
from torch import nn

from coterie import wire
from coterie.client.home import rounds
from coterie.client.work.data import Held, Part
from coterie.client.work.diverged import odd_array
from coterie.client.work.linear import linear_layer, named_of, tuned_penalty
from coterie.client.work.personal import without
from coterie.client.work.request import Request
from coterie.client.work.sgd import TrainPlan
from coterie.client.work.stage import Stage, Training, Work
from coterie.client.work.weights import load_weights, read_weights
from coterie.features.consensus import MOST_FACTOR
from coterie.tasks.problems import Classes, Labels, Numbers, Problem
from coterie.wire import Model

KIND = "consensus"
LENGTHS: Mapping[type[Problem], float] = {Numbers: 0.5, Classes: 4.0, Labels: 4.0}
"""s before any factor: the curvature of squared error is 2, that of log loss at most 1/4."""
RELAXATION = 1.7
"""α; Boyd et al. recommend 1.5 to 1.8."""
SIDE_BY_SIDE = re.compile(r"(race-\d{1,2})?")
"""Purposes of trainings that go on from round to round; empty: the run's own."""
SENT, RECEIVED, LENGTH = "sent/", "received/", "length"
"""Names of what is kept of a round."""


@dataclass
class Pull:
    """One training's u, with what it is computed from; empty ``received``: not for this training.

    ``moved``: the norm of z's last change.
    """

    received: Model = field(default_factory=dict)
    u: Model = field(default_factory=dict)
    length: float = 0.0
    moved: float = 0.0


class Consensus(Stage):
    """The stage for linear models of a group."""

    name = "consensus"

    def begin(self, request: Request, *, before: int, packed: bool) -> Pull:
        """Return a pull, which the training fills."""
        return Pull()

    def before(self, mine: Pull, work: Work) -> None:
        """Train alone to the minimum, or with others from z − u."""
        request, kind = work.request, work.request.message.metadata.message_type
        if kind != wire.TRAIN or work.session.loop.train is not None:
            return
        if wire.GENERATOR in wire.array_records(request.message.content):
            return
        session = work.session
        layer = linear_layer(session.task, session.model, work.data.train, work.plan)
        if layer is None:
            if work.plan.part == wire.HIDDEN_PART and not request.purpose:
                _carry(request)
            return
        usual = LENGTHS[type(session.task.problem)]
        if request.value(wire.GROUP_SIZE) == 1:
            work.plan = _alone(work, layer, usual)
            return
        factor = request.value(wire.CONSENSUS)
        if not factor or not SIDE_BY_SIDE.fullmatch(request.purpose):
            return
        received = read_weights(session.model)
        own = named_of(session.model, layer)
        mine.received = without({n: received[n] for n in own}, work.staying)
        mine.length = usual * min(max(factor, 1 / MOST_FACTOR), MOST_FACTOR)
        _read(mine, request)
        work.plan = replace(work.plan, length=mine.length)
        start = {**received, **_sum((1.0, mine.received), (-1.0, mine.u))}
        work.training = partial(_from, work, start, work.training)

    def leave(self, mine: Pull, work: Work) -> None:
        """Send v, keep it for the next round, and report how the residuals compare."""
        if not mine.received or odd_array(work.trained):
            return
        request, z = work.request, mine.received
        trained = {n: work.leaving[wire.ARRAYS][n] for n in z}
        if balance := _balance(mine, trained):
            work.metrics[wire.CONSENSUS_BALANCE] = balance
        sent = _sum((RELAXATION, trained), (1 - RELAXATION, z), (1.0, mine.u))
        work.leaving[wire.ARRAYS] = {**work.leaving[wire.ARRAYS], **sent}
        kept = {LENGTH: np.array([mine.length])}
        kept |= {SENT + n: array for n, array in sent.items()}
        kept |= {RECEIVED + n: array for n, array in z.items()}
        rounds.keep(
            request.session.settings,
            _kind(request.purpose),
            kept,
            run=request.run,
            number=request.round_number(),
            passing=True,
        )

    def end(self, request: Request) -> None:
        """Keep only what was sent last: more rounds may be added to the run."""
        settings = request.session.settings
        for kind in rounds.kinds(settings, request.run):
            if kind == KIND:
                rounds.keep_newest(settings, kind, run=request.run)
            elif kind.startswith(f"{KIND}-"):
                rounds.forget(settings, kind, run=request.run)


def _carry(request: Request) -> None:
    """Keep v and z over a round that leaves the linear part as it is: u is the same after it."""
    settings, number = request.session.settings, request.round_number()
    found = rounds.newest(settings, KIND, run=request.run, before=number)
    if found is not None and found[0] == number - 1:
        rounds.keep(settings, KIND, found[1], run=request.run, number=number, passing=True)


def _alone(work: Work, layer: nn.Linear, usual: float) -> TrainPlan:
    """Return the plan of a silo alone: with the penalty that suits its rows, unless one is set."""
    plan, part, session = work.plan, work.data.train, work.session
    if work.request.round_number() == 1:
        return replace(plan, length=usual)
    if not (plan.penalty or plan.weight_decay):
        assert isinstance(part, Held)
        plan = replace(plan, penalty=tuned_penalty(session.task, session.model, layer, part))
    return replace(plan, length=math.inf)


def _kind(purpose: str) -> str:
    return f"{KIND}-{purpose}" if purpose else KIND


def _read(mine: Pull, request: Request) -> None:
    """Set u and z's last change by what this silo kept of the round before; 0 without that."""
    z = mine.received
    mine.u = {n: np.zeros_like(array) for n, array in z.items()}
    number = request.round_number()
    settings, kind = request.session.settings, _kind(request.purpose)
    found = rounds.newest(settings, kind, run=request.run, before=number)
    if found is None or found[0] != number - 1:
        return
    kept = found[1]
    if kept.keys() != {LENGTH, *(at + n for at in (SENT, RECEIVED) for n in z)}:
        return
    factor = mine.length / float(kept[LENGTH][0])
    mine.u = _sum((factor, {n: kept[SENT + n] for n in z}), (-factor, z))
    mine.moved = _norm(_sum((1.0, z), (-1.0, {n: kept[RECEIVED + n] for n in z})))


def _balance(mine: Pull, trained: Model) -> float:
    """Return the dual residual over the primal one, both relative; 0 if one of them is zero.

    They are |z − z_before|/|u| and |w − z|/max(|w|, |z|), which have no unit (Wohlberg: "ADMM
    Penalty Parameter Selection by Residual Balancing", 2017, https://arxiv.org/abs/1704.06209).
    """
    apart = _norm(_sum((1.0, trained), (-1.0, mine.received)))
    size, pull = max(_norm(trained), _norm(mine.received)), _norm(mine.u)
    if not apart * pull:
        return 0.0
    return mine.moved * size / (apart * pull)


def _sum(*terms: tuple[float, Model]) -> Model:
    """Return the sum of models times factors, with the first one's types."""
    found = {}
    for name, first in terms[0][1].items():
        total = np.zeros(first.shape)
        for factor, model in terms:
            total += factor * np.asarray(model[name], np.float64)
        found[name] = total.astype(first.dtype)
    return found


def _norm(arrays: Mapping[str, NDArray[np.generic]]) -> float:
    return math.sqrt(sum(float((a.astype(np.float64) ** 2).sum()) for a in arrays.values()))


def _from(
    work: Work, start: Model, training: Training, part: Part, plan: TrainPlan, *, seed: int
) -> float:
    received = read_weights(work.session.model)
    load_weights(work.session.model, start)
    return training(part, plan, seed=seed, own=work.staying, towards=received)
