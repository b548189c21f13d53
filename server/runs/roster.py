"""The roster of a run whose silos may be enrolled: refusals by name, and no wait without hope."""

from __future__ import annotations

import logging
import re
from difflib import get_close_matches

from flwr.serverapp import Grid

from coterie import wire
from coterie.strategies.errors import EXIT_NO_SILOS, FederationError
from coterie.strategies.rounds.roster import DescribedRoster, Silo

log = logging.getLogger("coterie.run")

MOST_REASONS = 5
SERVES = re.compile(r"serves task ((?:'[^']{1,256}'(?:, )?)+)")
"""In the reason of who refuses because it serves others."""


class EnrolledRoster(DescribedRoster):
    """A ``DescribedRoster`` that knows by their keys who refused.

    A federation may have several studies: that a silo is of another one is no error. A run that so
    many enrolled silos refuse that too few are left who could come ends at once.
    """

    def _look(self, grid: Grid, *, number: int) -> list[Silo]:
        here = super()._look(grid, number=number)
        if number <= 1 and self.enrolled is not None:
            enrolled = self.enrolled()
            why = {
                node: self.refused.get(name, self._refused_nodes[node])
                for node, name in enrolled.items()
                if node in self._refused_nodes
            }
            # Of another task is for good; other refusals may be taken back while some are here.
            elsewhere = sum(wire.OTHER_TASK in reason for reason in why.values())
            could = len(enrolled) - elsewhere
            too_few = elsewhere and could < min(self.min_silos, len(enrolled))
            if too_few or (not here and why and len(why) == len(enrolled)):
                raise self._hopeless(set(why.values()), could if len(why) < len(enrolled) else 0)
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

    def _hopeless(self, reasons: set[str], could: int) -> FederationError:
        told = " ".join(sorted(reasons)[:MOST_REASONS])
        more = len(reasons) - MOST_REASONS
        told += f" And {more} more." if more > 0 else ""
        who = f"only {could} of the enrolled silos can take part, and min-silos is {self.min_silos}"
        return FederationError(
            f"{who if could else 'every enrolled silo refuses the run'}: {told} "
            f"{self._advice(reasons)}, and start another run.",
            round_number=1,
            phase="roster",
            exit_code=EXIT_NO_SILOS,
        )

    def _after_waiting(self) -> str:
        reasons = {reason for reason in self.refused.values() if wire.OTHER_TASK in reason}
        if not reasons:
            return super()._after_waiting()
        return f"{self._advice(reasons)}, or start silos that serve {self.task!r}."

    def _advice(self, reasons: set[str]) -> str:
        """What to change; of a slip in the task's name the nearest that silos serve."""
        if not any(wire.OTHER_TASK in reason for reason in reasons):
            return "Change what they refuse"
        served = {name for reason in reasons for told in SERVES.findall(reason)
                  for name in re.findall("'([^']+)'", told)}  # fmt: skip
        near = get_close_matches(self.task, sorted(served), n=1)
        return (
            f"Did you mean --task {near[0]}? Correct it" if near else "Name their task with --task"
        )
