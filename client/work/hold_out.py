"""The part of a silo's training data that a run holds out, the same in every round."""

from __future__ import annotations

from dataclasses import replace

from coterie.client.work.data import Data, Part
from coterie.client.work.session import Session
from coterie.client.work.sgd import seed_of


def split_validation(session: Session, share: float, *, run_seed: int) -> Data:
    """Return the training data less its validation part, which takes the place of the test data."""
    return _split(session.data, share, silo=session.settings.name, run_seed=run_seed)


def held_out(data: Data, share: float, *, silo: str, seed: int) -> Part:
    """Return the validation part of a silo's data in a run with this seed."""
    return _split(data, share, silo=silo, run_seed=seed).test


def leave_out_validation(session: Session, share: float, *, run_seed: int) -> Session:
    """Return the session without its validation part; unchanged if the share is 0."""
    if not share:
        return session
    spared = split_validation(session, share, run_seed=run_seed)
    return replace(session, data=replace(session.data, train=spared.train))


def held_apart(session: Session, share: float, *, run_seed: int) -> tuple[Session, Part]:
    """Return the session without what one training of the run holds out, and that part.

    The part is the session's validation data.
    """
    data = split_validation(session, share, run_seed=run_seed)
    spared = replace(session.data, train=data.train, validation=data.test)
    return replace(session, data=spared), data.test


def _split(data: Data, share: float, *, silo: str, run_seed: int) -> Data:
    return data.hold_out(share, seed=seed_of(run_seed, silo, 0, "holdout"))
