"""Never worse than alone: the silo also trains by itself, and keeps whichever model is better.

With ``guard`` a silo keeps a share of its training data out of the federation's training, and
trains two models of its own from w⁰ beside it, round by round as the strategy ``independent``
would: one on all its data, to keep if the federation does it harm, and one without that share, to
compare with. They are compared once, after three quarters of the run (``guarded_until``), on what
both were trained without. Then the share is released: the federation's model goes on training on
all data, and so was the silo's own from the beginning. Nothing of it leaves but the errors.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from math import sqrt

import numpy as np

from coterie.client.home import rounds
from coterie.client.work.data import Data, Part
from coterie.client.work.measure import Evaluation, evaluate
from coterie.client.work.sgd import TrainPlan, seed_of
from coterie.client.work.training import train
from coterie.client.work.weights import load_weights, read_weights, travelling
from coterie.client.work.workbench import Workbench
from coterie.wire import Model

ALONE = "alone"
"""Of a silo's files: its own model, trained on all its data."""
COMPARED = "alone-compared"
"""The other one, trained without what is held out."""
COMPARISON = "guard"
"""What was found when the share was released."""
NEVER = 2**31
MARGIN = 1.0
"""Standard errors by which the federation's model must be better (docs/how-to/keep-models.md)."""


@dataclass(frozen=True)
class Guard:
    """What a silo does to end no worse than alone.

    Attributes:
        share: of its training data that it holds out.
        run, run_seed: of the run.
        since: the round in which the silo first took part.
        until: the last round that is trained without the share.
        plan: round → how to train alone in it.
    """

    share: float
    run: str
    run_seed: int
    since: int
    until: int
    plan: Callable[[int], TrainPlan] = field(repr=False)


@dataclass(frozen=True)
class Choice:
    """Which of two models a silo keeps.

    Attributes:
        alone: it is the one trained alone.
        model: the one kept.
        validation, validation_alone: of the federation's model and of the other, on what was kept
            out of both trainings.
        test_alone: of the model trained alone on all data, on the silo's test data.
        held_out: share of the training data that the kept model was not trained on.
    """

    alone: bool
    model: Model
    validation: Evaluation
    validation_alone: Evaluation
    test_alone: Evaluation
    held_out: float


def guarded_until(num_rounds: int) -> int:
    """The last round trained without the share; ``NEVER`` of one round or an unknown number."""
    return num_rounds - max(1, num_rounds // 4) if num_rounds > 1 else NEVER


def is_alone_better(together: Evaluation, alone: Evaluation) -> bool:
    """The rule: alone is kept unless the other is better by ``MARGIN`` standard errors.

    The standard error is that of the difference of two error rates on the same n samples, as if
    the models erred independently of each other. Other figures than error rates, which have none,
    are compared as they are; of equals the smaller loss decides.
    """
    gain, n = alone.error - together.error, together.num_examples
    rates = all(0 <= one.error <= 1 for one in (together, alone))
    apart = together.error * (1 - alone.error) + alone.error * (1 - together.error)
    error = sqrt(max(apart - gain**2, 0.0) / n) if rates else 0.0
    return (gain, alone.loss) < (MARGIN * error, together.loss)


def split_validation(bench: Workbench, share: float, *, run_seed: int) -> Data:
    """The training data less its validation part, which is where the test data were."""
    return _split(bench.data, share, silo=bench.settings.name, run_seed=run_seed)


def held_out(data: Data, share: float, *, silo: str, seed: int) -> Part:
    """The validation part of a silo's data in a run with this seed."""
    return _split(data, share, silo=silo, run_seed=seed).test


def _split(data: Data, share: float, *, silo: str, run_seed: int) -> Data:
    return data.hold_out(share, seed=seed_of(run_seed, silo, 0, "holdout"))


def leave_out_validation(bench: Workbench, share: float, *, run_seed: int) -> Workbench:
    """The bench without the validation part of its training data; as it is if the guard is off."""
    if not share:
        return bench
    spared = split_validation(bench, share, run_seed=run_seed)
    return replace(bench, data=replace(bench.data, train=spared.train))


def guarded(bench: Workbench, guard: Guard | None, *, before: int) -> Workbench:
    """The bench with what may be trained on after a round before this one.

    That is all data once the models have been compared.
    """
    if guard is None or _compared(bench, guard, before=before) is not None:
        return bench
    return leave_out_validation(bench, guard.share, run_seed=guard.run_seed)


def train_alone(bench: Workbench, guard: Guard, *, round_number: int) -> Model:
    """The silo's own model after this round, trained on all its data; the bench's is overwritten.

    Rounds in which the silo was not asked to train are caught up. The randomness is that of the
    federation's training, so it is the model that the strategy ``independent`` gives this silo.
    """
    return _train_until(bench, guard, ALONE, round_number)


def compare(
    bench: Workbench,
    guard: Guard,
    model: Model,
    *,
    round_number: int,
    metric: str = "",
    keep: bool = True,
) -> tuple[Evaluation, Evaluation]:
    """How the federation's model and the silo's own are on what both were trained without.

    Found once and kept, as of the round that the model comes from. Overwrites the bench's model.

    Args:
        bench: of the silo, with all its data.
        guard: of the run.
        model: the federation's after round ``round_number``, whole.
        round_number: 0 is w⁰.
        metric: that leads; empty: the task's.
        keep: whether the share is released by it.
    """
    known = _compared(bench, guard, before=round_number + 1)
    if known is not None:
        return known
    spared = split_validation(bench, guard.share, run_seed=guard.run_seed)
    load_weights(bench.model, model)
    together = evaluate(bench.task, bench.model, spared.test, metric=metric)
    _train_until(_with(bench, spared.train), guard, COMPARED, round_number)
    alone = evaluate(bench.task, bench.model, spared.test, metric=metric)
    if keep:
        found = np.array([[one.error, one.loss, one.num_examples] for one in (together, alone)])
        kept = {COMPARISON: found}
        rounds.keep(bench.settings, COMPARISON, kept, run=guard.run, number=round_number)
    return together, alone


def choose(
    bench: Workbench, guard: Guard, model: Model, *, round_number: int, metric: str = ""
) -> Choice:
    """The model to keep after this round: the federation's or the silo's own.

    Args:
        bench: of the silo, with all its data; its model is overwritten.
        guard: of the run.
        model: the federation's after this round, whole.
        round_number: of the last round.
        metric: that leads; empty: the task's.
    """
    released = _compared(bench, guard, before=round_number + 1) is not None
    together, alone = compare(
        bench, guard, model, round_number=round_number, metric=metric, keep=False
    )
    better = is_alone_better(together, alone)
    own = train_alone(bench, guard, round_number=round_number)
    tested = evaluate(bench.task, bench.model, bench.data.test, metric=metric)
    missed = 0.0 if better or released else guard.share
    return Choice(better, own if better else model, together, alone, tested, missed)


def _with(bench: Workbench, part: Part) -> Workbench:
    return replace(bench, data=replace(bench.data, train=part))


def _train_until(bench: Workbench, guard: Guard, kind: str, last: int) -> Model:
    """Train on from the newest kept model of this kind, or w⁰; leave the last in the bench."""
    kept = rounds.newest(bench.settings, kind, run=guard.run, before=last + 1)
    if kept is None:
        done, begun = guard.since - 1, read_weights(bench.fresh_model(guard.run_seed))
    else:
        done, begun = kept[0], {name: kept[1][name] for name in travelling(bench.model)}
    load_weights(bench.model, begun)
    for number in range(done + 1, last + 1):
        seed = seed_of(guard.run_seed, bench.settings.name, number, "")
        train(bench, bench.data.train, guard.plan(number), seed=seed)
    own = read_weights(bench.model)
    if last > done:
        rounds.keep(bench.settings, kind, own, run=guard.run, number=last)
    return own


def _compared(
    bench: Workbench, guard: Guard, *, before: int
) -> tuple[Evaluation, Evaluation] | None:
    kept = rounds.latest(bench.settings, COMPARISON, run=guard.run, before=before)
    if kept is None:
        return None
    together, alone = (
        Evaluation(loss, error, int(n)) for error, loss, n in kept[COMPARISON].tolist()
    )
    return together, alone
