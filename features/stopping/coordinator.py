"""Stop a run early when models are complete, or the mean validation error has stopped improving.

With each training reply, silos report the validation error of the model that they held after the
previous round. One that is far from the others' counts as half or twice their median. A run never
stops while the algorithm still compares partitions.
"""

from __future__ import annotations

import logging
import math
from dataclasses import dataclass

import numpy as np

from coterie import wire
from coterie.strategies.rounds.stage import Outcome, Played, Stage

log = logging.getLogger("coterie.run")


@dataclass(frozen=True)
class Best:
    """The round with the lowest mean validation error so far, and that error."""

    round: int = 0
    error: float = math.inf


class Stopping(Stage):
    """Early stopping.

    Args:
        patience: rounds without improvement before the run stops; 0 never stops it.
        evaluate_every: rounds between two evaluations.
    """

    name = "stopping"
    first = Best()

    def __init__(self, patience: int, evaluate_every: int) -> None:
        self.patience, self.evaluate_every = patience, evaluate_every

    def after(self, mine: Best, played: Played) -> tuple[Best, Outcome]:
        """Update the best round, and stop the run if it is too long ago."""
        now, before = played.now, played.now.number - 1
        if now.number < now.rounds and (why := played.algorithm.complete(played.state)):
            log.info("round %d: the run ends: %s", now.number, why)
            return mine, Outcome(ended_early=why)
        if not self.patience or before % self.evaluate_every:
            return mine, Outcome()
        reported = [
            u.metrics.get(wire.RECEIVED_VALIDATION_ERROR, math.nan) for u in played.came.trained
        ]
        errors = [error for error in reported if math.isfinite(error) and error >= 0]
        if not errors:
            log.warning(
                "round %d: no silo reported its error on validation data, so patience has no "
                "effect. Silos report it if the run has validation and their policy allows "
                "errors to leave",
                now.number,
            )
            return mine, Outcome()
        usual = float(np.median(errors))  # a silo that lies must not stop the run
        mean = math.fsum(min(max(e, usual / 2), 2 * usual) for e in errors) / len(errors)
        if mean < mine.error:
            return Best(before, mean), Outcome()
        waited = before - mine.round
        goes_on = waited < self.patience or now.number >= now.rounds
        if goes_on or played.algorithm.comparing(played.state, now):
            return mine, Outcome()
        why = (
            f"the mean error on validation data has not improved for {waited} rounds; it was "
            f"lowest after round {mine.round}"
        )
        log.info("round %d: the run stops early: %s", now.number, why)
        return mine, Outcome(ended_early=why)
