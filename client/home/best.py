"""The best model of a run so far, by the silo's validation data, on its disk.

With ``keep = best`` a silo saves at the end the model of its best round. A coordinator that
recovers from a crash repeats a few rounds, so the best model is chosen from the rounds *before* the
present one: every recent improvement stays, and one older model; after the run, only the best.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import load_file

from coterie.client.home.rounds import KEPT, files_of, folder_of, make_room, write_model
from coterie.client.home.settings import SiloSettings
from coterie.wire import Model

log = logging.getLogger("coterie.silo")

KIND = "best"
"""The silo's folder for these models."""


@dataclass(frozen=True, order=True)
class Best:
    """The result of a model on validation data; smaller is better.

    Attributes:
        error: of the primary metric (``Metric.shortfall``).
        loss: mean; it decides between equal errors.
        round: after which the silo held it; the earliest wins a tie.
        samples: of the validation data.
    """

    error: float
    loss: float
    round: int
    samples: int


def consider(settings: SiloSettings, model: Model, found: Best, *, run: str) -> Best | None:
    """Save a model if no earlier round's was as good; return the best so far, None without any.

    Saved models of this round or later ones are deleted: the run restarted before them. So are
    those of the runs that were idle longest, as a stopped run never asks to delete its own.
    ``settings`` must have a home; ``model`` is the whole model that the silo held after the round.
    """
    folder = folder_of(settings.home, KIND, run)
    make_room(folder)
    for number, file in files_of(folder).items():
        if number >= found.round:
            file.unlink()
    best = max(_kept(folder), key=lambda one: one.round, default=None)
    finite = all(np.isfinite(array).all() for array in model.values())
    if finite and math.isfinite(found.error) and (best is None or found < best):
        write_model(_file(folder, found.round), model, metadata={KIND: json.dumps(vars(found))})
        best = found
    older = [n for n in files_of(folder) if n <= found.round - KEPT]
    for number in older[:-1]:
        _file(folder, number).unlink()
    return best


def load(settings: SiloSettings, best: Best, *, run: str) -> Model:
    """Return the arrays of a saved model, by name in alphabetical order."""
    return dict(load_file(_file(folder_of(settings.home, KIND, run), best.round)))


def keep_only(settings: SiloSettings, best: Best, *, run: str) -> None:
    """Delete all models of an ended run but this one, which a repeated end of the run needs."""
    for number, file in files_of(folder_of(settings.home, KIND, run)).items():
        if number != best.round:
            file.unlink()


def _kept(folder: Path) -> Iterator[Best]:
    for file in files_of(folder).values():
        try:
            with safe_open(file, framework="np") as opened:
                yield Best(**json.loads(opened.metadata()[KIND]))
        except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
            log.error("%s is damaged (%s): it is not used as the best", file, error)


def _file(folder: Path, number: int) -> Path:
    return folder / f"round-{number:06d}.safetensors"
