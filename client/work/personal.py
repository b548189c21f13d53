"""Personal layers: arrays that never leave the silo, saved per run, and surviving a restart.

In FedPer (Arivazhagan, Aggarwal, Singh, Choudhary 2019, https://arxiv.org/abs/1912.00818) and
HCCT-P (Sun et al., §5.1) silos share the representation and keep the classifier. In FedRep
(Collins, Hassani, Mokhtari, Shakkottai: "Exploiting Shared Representations for Personalized
Federated Learning", ICML 2021, https://arxiv.org/abs/2102.07078, Algorithm 1) they also train the
classifier first, and then the representation with that classifier. In FedBN (Li, Jiang, Zhang,
Kamp, Dou: "FedBN: Federated Learning on Non-IID Features via Local Batch Normalization", ICLR 2021)
they keep batch normalisation. Here the run of any strategy names the layers; the silo adds its own
to models that it receives and removes them from those that it sends.
"""

from __future__ import annotations

import logging
from collections.abc import Collection
from typing import Any

from torch import nn

from coterie.client.home import rounds
from coterie.client.home.settings import SettingsError
from coterie.client.work.data import Part
from coterie.client.work.session import Session
from coterie.client.work.sgd import TrainPlan, frozen
from coterie.client.work.stage import Training
from coterie.client.work.weights import read_weights, travelling
from coterie.tasks.models import BATCH_NORM, of_head
from coterie.wire import Model

log = logging.getLogger("coterie.silo")

KIND = "personal"


class PersonalError(ValueError):
    """The named layers cannot be personal. The text gives the reason."""


def personal_names(session: Session, layers: str) -> tuple[str, ...]:
    """Return the names of the arrays that stay here.

    ``layers`` is ``head`` for the task's head, ``norm`` for batch normalisation with its running
    statistics, or a prefix of array names; empty for none.

    Raises:
        PersonalError: no array matches, or all do.
    """
    if not layers:
        return ()
    prefixes: tuple[str, ...] = (layers,)
    if layers == "head":
        prefixes = of_head(session.model, session.task.head)
    if layers == "norm":
        modules = session.model.named_modules()
        prefixes = tuple(f"{name}." for name, module in modules if isinstance(module, BATCH_NORM))
    names = list(travelling(session.model))
    chosen = tuple(name for name in names if name.startswith(prefixes))
    if not chosen:
        frozen = " Frozen arrays never leave." if session.frozen else ""
        raise PersonalError(
            f"{_wanted(layers, prefixes)}; the model has {', '.join(names[:6])}, ….{frozen}"
        )
    if len(chosen) == len(names):
        every = f"every array{' that is trained' if session.frozen else ''}"
        raise PersonalError(f"{prefixes[0]!r} matches {every}: nothing would be shared.")
    return chosen


def _wanted(layers: str, prefixes: tuple[str, ...]) -> str:
    if layers == "norm":
        return "no array belongs to batch normalisation that is trained"
    return f"no array is named {prefixes[0]}…"


def check_policy(session: Session) -> None:
    """Check that the silo's model has the layers that its policy names.

    Raises:
        SettingsError: ``keep_layers`` cannot be obeyed.
    """
    layers = session.settings.policy.keep_layers
    try:
        personal_names(session, layers)
    except PersonalError as error:
        raise SettingsError(
            f"keep_layers = {layers!r} cannot be kept: {error} Name the head as 'head', batch "
            "normalisation as 'norm', or give a prefix of array names."
        ) from None


def without(model: Model, names: tuple[str, ...]) -> Model:
    """Return the shared part of a model."""
    return {name: array for name, array in model.items() if name not in names}


def complete(
    session: Session, shared: Model, names: tuple[str, ...], *, run: str, seed: int, before: int
) -> Model:
    """Return the received model with this silo's personal arrays added.

    They come from the run's last round before ``before``; 0 takes the initial ones. A new run
    starts from ``seed``, that of its initial model.
    """
    if not names:
        return shared
    own = rounds.latest(session.settings, KIND, run=run, before=before)
    if own is None:
        own = read_weights(session.fresh_model(seed))
    return {
        name: own[name] if name in names else shared[name]
        for name in travelling(session.model)
        if name in names or name in shared
    }


def keep(session: Session, model: Model, names: tuple[str, ...], *, run: str, number: int) -> None:
    """Save the personal arrays of a trained model as those after a round."""
    if names:
        if (
            not session.settings.home
            and rounds.latest(session.settings, KIND, run=run, before=number) is None
        ):
            log.warning(
                "the layers of run %s that stay here (%s) are only in this process's memory: "
                "after a restart they start from scratch. Give the silo a folder with --home.",
                run,
                ", ".join(names),
            )
        own = {name: model[name] for name in names}
        rounds.keep(session.settings, KIND, own, run=run, number=number)


def head_first(training: Training, model: nn.Module, head: Collection[str], seed: int) -> Training:
    """Return a training of the head alone, with its own ``seed``, and then of the rest alone.

    What is not trained keeps its running statistics too. The loss returned is the second one's.
    """

    def train(part: Part, plan: TrainPlan, **how: Any) -> float:
        rest = {name for name, _ in model.named_parameters()} - set(head)
        with frozen(model, rest):
            training(part, plan, **{**how, "seed": seed})
        with frozen(model, head):
            return training(part, plan, **how)

    return train
