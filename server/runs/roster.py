"""The roster of a run with enrolled silos: it names refusals, and ends hopeless waits."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from typing import Protocol

from flwr.app import Message

from coterie import wire
from coterie.engine.port import Engine
from coterie.strategies.errors import EXIT_NO_SILOS, FederationError
from coterie.strategies.rounds.reasons import MOST_REASONS, sentences
from coterie.strategies.rounds.roster import DescribedRoster, Silo

CHECK_AGAIN_S = 1.0
"""Interval of checks whether skipped silos must be asked after all."""
AWAY = "it is enrolled, but is not connected or does not answer."
"""Why such a silo takes no part."""
SERVES = re.compile(r"serves task ((?:'[^']{1,256}'(?:, )?)+)")
"""Matches the tasks in the reason of a silo that refuses because it serves others."""


class Known(Protocol):
    """Knowledge about silos from earlier runs."""

    def objection(self, node: int, name: str, task: str) -> str:
        """Return why a silo need not be asked whether it serves a task; empty if it must be."""
        ...

    def note(self, stated: Mapping[str, tuple[int, tuple[str, ...]]]) -> None:
        """Save silo → its node, and the tasks that it stated."""
        ...


@dataclass
class EnrolledRoster(DescribedRoster):
    """A ``DescribedRoster`` that identifies refusing silos by their keys.

    A federation may have several studies: a silo of another study is not an error, and is not asked
    if ``known`` has it from earlier runs. A run ends at once if too few enrolled silos are left
    that could take part. If no silo here serves its task, the run waits, because its silos may
    come.
    """

    known: Known | None = None
    _unasked: set[int] = field(default_factory=set)
    """Nodes that were not asked, because of earlier facts."""
    _heard: dict[int, tuple[str, tuple[str, ...]]] = field(default_factory=dict)
    """Node → the name and tasks that it has just stated."""
    _next_check: float = 0.0

    def _describe(self, engine: Engine, new: Sequence[int], deadline_s: float) -> None:
        names = self.enrolled() if self.enrolled is not None and new else {}
        asked = []
        for node in new:
            if why := self._elsewhere(node, names):
                self._unasked.add(node)
                self._refuse(node, names[node], why)
            else:
                asked.append(node)
        super()._describe(engine, asked, deadline_s)
        heard, self._heard = self._heard, {}
        if self.known is not None and heard:
            stated = {
                n: (node, tasks) for node, (n, tasks) in heard.items() if names.get(node) == n
            }
            self.known.note(stated)

    def _elsewhere(self, node: int, names: Mapping[int, str]) -> str:
        if self.known is None or node not in names:
            return ""
        return self.known.objection(node, names[node], self.task)

    def _read(self, node: int, answer: Message | None) -> wire.Description | None:
        described = super()._read(node, answer)
        if described is not None:
            self._heard[node] = described.name, described.tasks or (described.task,)
        return described

    def absent(self) -> dict[str, str]:
        """Return silo → why it takes no part: those that were refused, and all enrolled ones."""
        names = {} if self.enrolled is None else self.enrolled()
        here = {silo.name for silo in self._by_node.values()}
        away = {n: self._elsewhere(node, names) or AWAY for node, n in names.items()}
        found = {**away, **self.refused, **self.elsewhere}
        return {name: why for name, why in found.items() if name not in here}

    def _forget_what_is_old(self) -> None:
        """Have silos asked after all if earlier facts about them have expired."""
        if not self._unasked or time.monotonic() < self._next_check:
            return
        self._next_check = time.monotonic() + CHECK_AGAIN_S
        names = {} if self.enrolled is None else self.enrolled()
        for node in list(self._unasked):
            if not self._elsewhere(node, names):
                self._unasked.discard(node)
                self._refused_nodes.pop(node, None)
                self.elsewhere.pop(names.get(node, ""), None)

    def _look(self, engine: Engine, *, number: int) -> list[Silo]:
        self._forget_what_is_old()
        here = super()._look(engine, number=number)
        if number <= 1 and self.enrolled is not None:
            enrolled = self.enrolled()
            why = {
                node: self._refused_nodes[node] for node in enrolled if node in self._refused_nodes
            }
            # Of another task is for good; other refusals may be taken back while some are here.
            elsewhere = sum(wire.OTHER_TASK in reason for reason in why.values())
            could = len(enrolled) - elsewhere
            too_few = elsewhere and could < min(self.min_silos, len(enrolled))
            if too_few or (not here and why and len(why) == len(enrolled)):
                reasons = {enrolled[node]: reason for node, reason in why.items()}
                raise self._hopeless(reasons, could if len(why) < len(enrolled) else 0)
        return here

    def _refuse(self, node: int, who: str, reason: str) -> None:
        if who in ("", f"node {node}") and self.enrolled is not None:
            who = self.enrolled().get(node, "")
        super()._refuse(node, who, reason)

    def _called(self, node: int, reason: str) -> str:
        if self.enrolled is None:
            return super()._called(node, reason)
        return self.enrolled().get(node) or f"node {node}"

    def _hopeless(self, reasons: Mapping[str, str], could: int) -> FederationError:
        said = sentences(reasons)
        text = " ".join(said[:MOST_REASONS])
        more = len(said) - MOST_REASONS
        text += f" And {more} more." if more > 0 else ""
        who = f"only {could} of the enrolled silos can take part, and min-silos is {self.min_silos}"
        return FederationError(
            f"{who if could else 'every enrolled silo refuses the run'}: {text} "
            f"{self._advice(set(reasons.values()))}, and start another run.",
            exit_code=EXIT_NO_SILOS,
        )

    def _hint(self) -> str:
        near = "" if self._by_node else self._nearest(set(self.elsewhere.values()))
        return f". Did you mean --task {near}?" if near else ""

    def _after_waiting(self) -> str:
        reasons = set(self.elsewhere.values())
        if not reasons:
            return super()._after_waiting()
        return f"{self._advice(reasons)}, or start silos that serve {self.task!r}."

    def _advice(self, reasons: set[str]) -> str:
        """Return what to change; for a typo in the task, the nearest one that silos serve."""
        if not any(wire.OTHER_TASK in reason for reason in reasons):
            return "Change what they refuse"
        near = self._nearest(reasons)
        return f"Did you mean --task {near}? Correct it" if near else "Name their task with --task"

    def _nearest(self, reasons: set[str]) -> str:
        """Return the served task that was probably meant; empty if none is near."""
        served = {name for reason in reasons for listed in SERVES.findall(reason)
                  for name in re.findall("'([^']+)'", listed)}  # fmt: skip
        return next(iter(get_close_matches(self.task, sorted(served), n=1)), "")
