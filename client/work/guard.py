"""Never worse than alone: the silo also trains by itself, and keeps whichever model is better.

With ``guard`` a silo keeps a share of its training data out of every training, trains a model of
its own from w⁰ beside the federation's, with the same rounds, epochs, batches and learning rates,
and at the end compares the two on what it kept out. Nothing of it leaves but the errors.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from coterie.client.home import rounds
from coterie.client.work.data import Data, Part
from coterie.client.work.measure import Evaluation, evaluate
from coterie.client.work.sgd import TrainPlan, seed_of, train
from coterie.client.work.weights import load_weights, read_weights, travelling
from coterie.client.work.workbench import Workbench
from coterie.wire import Model

KIND = "alone"


@dataclass(frozen=True)
class Choice:
    """Which of two models a silo keeps.

    Attributes:
        alone: it is the one trained alone.
        model: the one kept.
        validation, validation_alone: of the federation's model and of the other, on what was kept
            out of both trainings.
        test_alone: of the model trained alone, on the silo's test data.
    """

    alone: bool
    model: Model
    validation: Evaluation
    validation_alone: Evaluation
    test_alone: Evaluation


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


def train_alone(
    bench: Workbench, plan: TrainPlan, *, run: str, run_seed: int, round_number: int
) -> None:
    """One more round of the silo's own model. The bench's model is overwritten.

    Its randomness is that of the federation's training, so it is the model that the strategy
    ``independent`` gives this silo.
    """
    own = _own(bench, run=run, before=round_number)
    load_weights(bench.model, read_weights(bench.fresh_model(run_seed)) if own is None else own)
    # There is no model of others to stay close to.
    alone = replace(plan, proximal_mu=0.0, cosine_lambda=0.0)
    seed = seed_of(run_seed, bench.settings.name, round_number, "")
    train(bench.task, bench.model, bench.data.train, alone, seed=seed)
    rounds.keep(bench.settings, KIND, read_weights(bench.model), run=run, number=round_number)


def choose(
    bench: Workbench,
    model: Model,
    share: float,
    *,
    run: str,
    run_seed: int,
    round_number: int,
    metric: str = "",
) -> Choice | None:
    """Compare the federation's model with the silo's own; None if it has none in this run.

    Args:
        bench: of the silo; its model is overwritten.
        model: the federation's, whole.
        share: of the training data, kept out for this.
        run, run_seed, round_number: whose own model, and that of which round at the latest.
        metric: that leads; empty: the task's.
    """
    own = _own(bench, run=run, before=round_number + 1)
    if own is None:
        return None
    kept_out = split_validation(bench, share, run_seed=run_seed)
    load_weights(bench.model, model)
    together = evaluate(bench.task, bench.model, kept_out.test, metric=metric)
    load_weights(bench.model, own)
    alone = evaluate(bench.task, bench.model, kept_out.test, metric=metric)
    better = (alone.error, alone.loss) < (together.error, together.loss)
    tested = evaluate(bench.task, bench.model, bench.data.test, metric=metric)
    return Choice(better, own if better else model, together, alone, tested)


def _own(bench: Workbench, *, run: str, before: int) -> Model | None:
    kept = rounds.latest(bench.settings, KIND, run=run, before=before)
    return None if kept is None else {name: kept[name] for name in travelling(bench.model)}
