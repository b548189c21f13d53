"""Where the state came from that a silo keeps between rounds: optimiser, personal layers, mixtures.

Trainings that start from one model with one message still differ if one silo adds a state with
which it learns nothing. So the digest of a training that adds a state covers the training that left
it, and by that all before it. Every training counts that leaves a state, also in a run that is not
secure but has the same name.
"""

from __future__ import annotations

import numpy as np

from coterie import wire
from coterie.client.home import rounds
from coterie.client.work.diverged import odd_array
from coterie.client.work.stage import Work
from coterie.wire import Model

KIND, NAME = "lineage", "trained-as"


def leaves_state(work: Work) -> bool:
    """Return whether a training adds a state that earlier rounds left, and leaves one."""
    request = work.request
    if request.purpose:  # such a training begins afresh and leaves nothing
        return False
    mixes = request.message.metadata.message_type == wire.TRAIN_APFL
    return bool(work.staying or mixes or request.value(wire.KEEP_OPTIMISER))


def behind(work: Work) -> str:
    """Return the digest of the training that left the state; empty if this training adds none."""
    if not leaves_state(work):
        return ""
    request = work.request
    found = rounds.latest(
        request.session.settings, KIND, run=request.run, before=request.round_number()
    )
    return "" if found is None else found[NAME].tobytes().hex()


def remember(work: Work, trained_as: str) -> None:
    """Remember the digest of a training; before its state is kept, in case of a crash."""
    request = work.request
    if odd_array(work.trained):  # then no state is kept either
        return
    arrays: Model = {NAME: np.frombuffer(bytes.fromhex(trained_as), np.uint8)}
    rounds.keep(
        request.session.settings,
        KIND,
        arrays,
        run=request.run,
        number=request.round_number(),
        passing=not work.staying,  # as the state itself
    )
