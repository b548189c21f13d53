"""What a silo makes of its group's model for itself, before it is evaluated or kept.

*Fine-tuning*: the silo's own model is the one received, trained on for a few epochs on its own
data. It is made anew whenever it is wanted and never sent. The steps that Per-FedAvg and pFedMe
take before a test are this too, along the gradient of all training data.

*Ditto* (Li, Hu, Beirami, Smith: "Ditto: Fair and Robust Federated Learning Through
Personalization", ICML 2021, https://arxiv.org/abs/2012.04221, Algorithm 1): beside its part in the
group's training the silo trains a model v of its own, with the proximal term λ/2·|v − w|² towards
the model w that it received. It is kept at the silo per run, survives a restart, and is never sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from coterie.client.home import rounds
from coterie.client.work.sgd import TrainPlan, train
from coterie.client.work.weights import load_weights, read_weights, travelling
from coterie.client.work.workbench import Workbench
from coterie.wire import Model

FINETUNE: Final = "finetune"
DITTO: Final = "ditto"


@dataclass(frozen=True)
class Ditto:
    """Which model of its own a silo has.

    Attributes:
        strength: λ, ≥ 0.
        run: whose own model it is.
        round: to train it in.
        before: it is the last one of a round before this.
    """

    strength: float
    run: str
    round: int
    before: int


@dataclass(frozen=True)
class Personalisation:
    """How, for one message: by Ditto, or by training on the model received.

    Attributes:
        plan: of the silo's own training.
        seed: of the same.
        ditto: None to train on the model received.
    """

    plan: TrainPlan
    seed: int
    ditto: Ditto | None = None


def personalise(bench: Workbench, how: Personalisation) -> None:
    """Turn the model received, in ``bench.model``, into the silo's own, in place."""
    if how.ditto is None:
        train(bench.task, bench.model, bench.data.train, how.plan, seed=how.seed)
        return
    own = rounds.latest(bench.settings, DITTO, run=how.ditto.run, before=how.ditto.before)
    if own is not None:
        load_weights(bench.model, _in_order(own, bench))


def train_own(bench: Workbench, received: Model, how: Personalisation) -> None:
    """Ditto: one round of the silo's own model, which starts as the first one received.

    ``bench.model`` is overwritten.
    """
    if (ditto := how.ditto) is None:
        return
    load_weights(bench.model, received)
    personalise(bench, how)
    plan = replace(how.plan, proximal_mu=ditto.strength)
    train(bench.task, bench.model, bench.data.train, plan, seed=how.seed, towards=received)
    rounds.keep(bench.settings, DITTO, read_weights(bench.model), run=ditto.run, number=ditto.round)


def _in_order(own: Model, bench: Workbench) -> Model:
    """A file lists arrays by name; a model has an order."""
    return {name: own[name] for name in travelling(bench.model) if name in own}
