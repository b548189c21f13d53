"""The roster of a run whose silos may be enrolled: refusals by name, and no wait without hope."""

from __future__ import annotations

import logging

from flwr.serverapp import Grid

from coterie import wire
from coterie.strategies.errors import EXIT_NO_SILOS, FederationError
from coterie.strategies.rounds.roster import DescribedRoster, Silo

log = logging.getLogger("coterie.run")

MOST_REASONS = 5


class EnrolledRoster(DescribedRoster):
    """A ``DescribedRoster`` that knows by their keys who refused.

    A federation may have several studies: that a silo is of another one is no error. A run that
    every enrolled silo refuses ends at once, for nobody is left who could come.
    """

    def _look(self, grid: Grid, *, number: int) -> list[Silo]:
        here = super()._look(grid, number=number)
        if number <= 1 and not here and self.enrolled is not None:
            enrolled = self.enrolled()
            if enrolled and enrolled.keys() <= self._refused_nodes.keys():
                told = {
                    self.refused.get(name, self._refused_nodes[node])
                    for node, name in enrolled.items()
                }
                raise self._hopeless(told)
        return here

    def _refuse(self, node: int, who: str, reason: str) -> None:
        if who in ("", f"node {node}") and self.enrolled is not None:
            who = self.enrolled().get(node, "")
        if wire.OTHER_TASK not in reason:
            super()._refuse(node, who, reason)
            return
        who = who or f"node {node}"
        self._refused_nodes[node] = self.refused[who] = reason = wire.plain_text(reason)
        log.info("silo %s is of another study: %s", who, reason)

    def _called(self, node: int) -> str:
        return (self.enrolled() if self.enrolled is not None else {}).get(node) or f"node {node}"

    def _hopeless(self, reasons: set[str]) -> FederationError:
        told = " ".join(sorted(reasons)[:MOST_REASONS])
        more = len(reasons) - MOST_REASONS
        told += f" And {more} more." if more > 0 else ""
        other = any(wire.OTHER_TASK in reason for reason in reasons)
        change = "Name their task with --task" if other else "Change what they refuse"
        return FederationError(
            f"every enrolled silo refuses the run: {told} {change}, and start another run.",
            round_number=1,
            phase="roster",
            exit_code=EXIT_NO_SILOS,
        )
