"""Personal layers: arrays that never leave the silo, saved per run, and surviving a restart.

In HCCT-P (Sun et al., §5.1) silos share the representation and keep the classifier. Here the run of
any strategy names the layers; the silo adds its own to models that it receives and removes them
from those that it sends.
"""

from __future__ import annotations

import logging

from coterie.client.home import rounds
from coterie.client.home.settings import SettingsError
from coterie.client.work.session import Session
from coterie.client.work.weights import read_weights, travelling
from coterie.wire import Model

log = logging.getLogger("coterie.silo")

KIND = "personal"


class PersonalError(ValueError):
    """The named layers cannot be personal. The text gives the reason."""


def personal_names(session: Session, layers: str) -> tuple[str, ...]:
    """Return the names of the arrays that stay here.

    ``layers`` is ``head`` for the task's head, or a prefix of array names; empty for none.

    Raises:
        PersonalError: no array matches, or all do.
    """
    if not layers:
        return ()
    prefix = session.task.head if layers == "head" else layers
    names = list(travelling(session.model))
    chosen = tuple(name for name in names if name.startswith(prefix))
    if not chosen:
        frozen = " Frozen arrays never leave." if session.frozen else ""
        raise PersonalError(
            f"no array is named {prefix}…; the model has {', '.join(names[:6])}, ….{frozen}"
        )
    if len(chosen) == len(names):
        trained = " that is trained" if session.frozen else ""
        raise PersonalError(f"{prefix!r} matches every array{trained}: nothing would be shared.")
    return chosen


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
            f"keep_layers = {layers!r} cannot be kept: {error} Name the head as 'head', or give "
            "a prefix of array names."
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
