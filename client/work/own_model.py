"""What a silo makes of its group's model for itself: bases that every strategy can have.

*Fine-tuning*: the silo's own model is the one received, trained on for a few epochs on its own
data. It is made anew whenever it is wanted and never sent.

*Ditto* (Li, Hu, Beirami, Smith: "Ditto: Fair and Robust Federated Learning Through
Personalization", ICML 2021, https://arxiv.org/abs/2012.04221, Algorithm 1): beside its part in the
group's training the silo trains a model v of its own, with the proximal term λ/2·|v − w|² towards
the model w that it received. It is kept at the silo per run, survives a restart, and is never sent.

Either way what is evaluated, and what a silo keeps in the end, is its own model.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final, Literal

from coterie.client.home import rounds
from coterie.client.work.training import TrainPlan, load_weights, read_weights, seed_of, train
from coterie.client.work.workbench import Workbench
from coterie.wire import Model

FINETUNE: Final = "finetune"
DITTO: Final = "ditto"


@dataclass(frozen=True)
class Personalisation:
    """How, for one message.

    Attributes:
        kind: ``finetune`` or ``ditto``.
        plan: of the silo's own model; without a proximal term.
        strength: λ of Ditto, ≥ 0.
        run: whose own model it is.
        run_seed, round: for its randomness.
        before: Ditto's own model is the last one of a round before this.
    """

    kind: Literal["finetune", "ditto"]
    plan: TrainPlan
    strength: float
    run: str
    run_seed: int
    round: int
    before: int

    def seed(self, bench: Workbench) -> int:
        """Of this silo's training in this round."""
        return seed_of(self.run_seed, bench.settings.name, self.round, self.kind)


def make_own(bench: Workbench, how: Personalisation) -> None:
    """Turn the model received, in ``bench.model``, into the silo's own, in place."""
    if how.kind == FINETUNE:
        train(bench.task, bench.model, bench.data, how.plan, seed=how.seed(bench))
        return
    own = rounds.latest(bench.settings, DITTO, run=how.run, before=how.before)
    if own is not None:
        load_weights(bench.model, _in_order(own, bench))


def train_own(bench: Workbench, received: Model, how: Personalisation) -> None:
    """Ditto: one round of the silo's own model, which starts as the first one received.

    ``bench.model`` is overwritten.
    """
    if how.kind != DITTO:
        return
    load_weights(bench.model, received)
    make_own(bench, how)
    plan = replace(how.plan, proximal_mu=how.strength)
    train(bench.task, bench.model, bench.data, plan, seed=how.seed(bench), towards=received)
    rounds.keep(bench.settings, DITTO, read_weights(bench.model), run=how.run, round=how.round)


def _in_order(own: Model, bench: Workbench) -> Model:
    """A file lists arrays by name; a model has an order."""
    return {name: own[name] for name in bench.model.state_dict() if name in own}
