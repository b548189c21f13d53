"""What a silo makes of its group's model for itself, before it is evaluated or kept.

*Fine-tuning*: the silo's own model is the one received, trained on for a few epochs on its own
data. It is made again whenever it is wanted and never sent. The steps that Per-FedAvg and pFedMe
take before a test are this too, along the gradient of all training data.

*Ditto* (Li, Hu, Beirami, Smith: "Ditto: Fair and Robust Federated Learning Through
Personalization", ICML 2021, https://arxiv.org/abs/2012.04221, Algorithm 1): beside its part in the
group's training the silo trains a model v of its own, with the proximal term λ/2·|v − w|² towards
the model w that it received.

*APFL* (``coterie.client.work.mixture``): the silo's model is a mixture of the one received and of
one that it trains in the same steps as its part in the group's training.

What Ditto and APFL train is kept at the silo per run, survives a restart, and is never sent.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from coterie.client.home import rounds
from coterie.client.work.data import Part
from coterie.client.work.mixture import Mixture, mix_in
from coterie.client.work.sgd import TrainPlan
from coterie.client.work.training import train
from coterie.client.work.weights import load_weights, read_weights, travelling
from coterie.client.work.workbench import Workbench
from coterie.wire import Model

FINETUNE: Final = "finetune"
DITTO: Final = "ditto"
APFL: Final = "apfl"


@dataclass(frozen=True)
class Own:
    """Which model of its own a silo keeps from round to round.

    Attributes:
        kind: ``DITTO`` or ``APFL``.
        run: whose it is.
        round: to train it in.
        before: it is the last one of a round before this.
        strength: Ditto's λ, ≥ 0.
        share, share_lr: APFL's α before the first round, in [0, 1], and its learning rate, ≥ 0.
    """

    kind: str
    run: str
    round: int
    before: int
    strength: float = 0.0
    share: float = 0.0
    share_lr: float = 0.0

    def kept(self, bench: Workbench) -> Model | None:
        """What the silo has of it; None before its first round."""
        return rounds.latest(bench.settings, self.kind, run=self.run, before=self.before)

    def keep(self, bench: Workbench, arrays: Model) -> None:
        """Keep it as it is after its round."""
        rounds.keep(bench.settings, self.kind, arrays, run=self.run, number=self.round)


@dataclass(frozen=True)
class Personalisation:
    """How, for one message: by a model that the silo keeps, or by training on the one received.

    Attributes:
        plan: of the silo's own training; APFL's is the round's.
        seed: of the same.
        own: None to train on the model received.
    """

    plan: TrainPlan
    seed: int
    own: Own | None = None


def personalise(bench: Workbench, how: Personalisation) -> None:
    """Turn the model received, in ``bench.model``, into the silo's own, in place."""
    if how.own is None:
        train(bench, bench.data.train, how.plan, seed=how.seed)
        return
    kept = how.own.kept(bench)
    if kept is None:
        return
    if how.own.kind == APFL:
        mix_in(bench.model, kept)
    else:
        load_weights(bench.model, _in_order(kept, bench))


def train_own(bench: Workbench, received: Model, how: Personalisation) -> None:
    """Ditto: one round of the silo's own model, which starts as the first one received.

    ``bench.model`` is overwritten. Nothing is done for what is not Ditto.
    """
    if (ditto := how.own) is None or ditto.kind != DITTO:
        return
    load_weights(bench.model, received)
    personalise(bench, how)
    plan = replace(how.plan, proximal_mu=ditto.strength)
    train(bench, bench.data.train, plan, seed=how.seed, towards=received)
    ditto.keep(bench, read_weights(bench.model))


def train_mixed(
    bench: Workbench, own: Own, part: Part, plan: TrainPlan, *, seed: int, keep: bool
) -> float:
    """APFL: train the model received, in ``bench.model``, as always, and the silo's own beside it.

    Args:
        bench: of the silo.
        own: of kind ``APFL``.
        part, plan, seed: of the training.
        keep: whether the silo's own model is kept; the training for another purpose keeps nothing.

    Returns:
        The loss of the model received, as ``train`` returns it.
    """
    mixture = Mixture(
        bench.task,
        bench.model,
        part,
        plan,
        kept=own.kept(bench),
        share=own.share,
        lr=own.share_lr,
    )
    loss = train(bench, part, plan, seed=seed, beside=mixture)
    if keep:
        own.keep(bench, mixture.arrays())
    return loss


def _in_order(own: Model, bench: Workbench) -> Model:
    """A file lists arrays by name; a model has an order."""
    return {name: own[name] for name in travelling(bench.model) if name in own}
