"""The part of a silo's training data that a run holds out, the same in every round."""

from __future__ import annotations

from dataclasses import replace

from coterie.client.work.data import Data, Part
from coterie.client.work.sgd import seed_of
from coterie.client.work.workbench import Workbench


def split_validation(bench: Workbench, share: float, *, run_seed: int) -> Data:
    """Return the training data less its validation part, which takes the place of the test data."""
    return _split(bench.data, share, silo=bench.settings.name, run_seed=run_seed)


def held_out(data: Data, share: float, *, silo: str, seed: int) -> Part:
    """Return the validation part of a silo's data in a run with this seed."""
    return _split(data, share, silo=silo, run_seed=seed).test


def leave_out_validation(bench: Workbench, share: float, *, run_seed: int) -> Workbench:
    """Return the bench without its validation part; unchanged if the share is 0."""
    if not share:
        return bench
    spared = split_validation(bench, share, run_seed=run_seed)
    return replace(bench, data=replace(bench.data, train=spared.train))


def _split(data: Data, share: float, *, silo: str, run_seed: int) -> Data:
    return data.hold_out(share, seed=seed_of(run_seed, silo, 0, "holdout"))
