"""Follow a run from its record: read events as they are written, and accumulate them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from coterie import wire
from coterie.server.runs.record.contents import Event, Round, Run, errors_of
from coterie.server.runs.record.format import event_of
from coterie.server.runs.record.metrics import Lead
from coterie.server.runs.record.reading import EVENTS
from coterie.server.runs.record.values import Groups
from coterie.strategies.errors import FederationError

POLL_S = 0.05
CHECK_S = 2.0


def events(
    folder: Path,
    *,
    start_deadline_s: float,
    ended: Callable[[], str | None],
    run_id: int | None = None,
) -> Iterator[Event]:
    """Yield the events of a run, until its last.

    Args:
        folder: the run's folder; it need not exist yet.
        start_deadline_s: seconds to wait for the first event.
        run_id: stop at the first end after the beginning of this run: the record of a resumed run
            holds earlier ends. None stops at the first end after which no event written so far
            resumes the run.
        ended: called every two seconds; returns a text if the run is over without a final event.

    Raises:
        FederationError: no event arrived in time, or the run ended without a final event.
    """
    path = folder / EVENTS
    deadline, checked = time.monotonic() + start_deadline_s, time.monotonic()
    position, rest = 0, b""
    begun = run_id is None
    while True:
        if path.exists():
            with path.open("rb") as file:
                if (
                    os.fstat(file.fileno()).st_size < position
                ):  # it was cut off: what is left counts
                    position, rest = os.fstat(file.fileno()).st_size, b""
                file.seek(position)
                content = file.read()
                position += len(content)
            lines = (rest + content).split(b"\n")
            rest = lines.pop()  # a line that is still being written
            # A damaged line costs itself.
            texts = [line.decode(errors="replace") for line in lines]
            found = [event for text in texts if (event := event_of(text)) is not None]
            resumed = [i for i, event in enumerate(found) if event.kind == "resume"]
            past = max(resumed, default=-1) if run_id is None else -1
            for i, event in enumerate(found):
                begun = begun or event.run_id == str(run_id)
                yield event
                if begun and i > past and event.kind == "end":
                    return
        now = time.monotonic()
        if (position == 0 or not begun) and now > deadline:
            raise FederationError(
                f"the run has not begun after {start_deadline_s:.0f} s: {folder} has no events. "
                "Is the SuperLink's executor running?"
            )
        if now - checked > CHECK_S:
            checked = now
            reason = ended()
            if reason is not None:
                raise FederationError(
                    f"the run has ended, but its record does not show how: {reason}"
                )
        time.sleep(POLL_S)


@dataclass
class Progress:
    """The accumulated events of a run; the live view draws nothing else.

    ``waits`` lists the missing silos and those that are connected. ``phase`` and ``racing`` are the
    present phase of ``auto`` and the number of raced partitions; ``spent_on`` has both for the last
    round.
    """

    title: str
    rounds: int = 0
    round: int = 0
    status: str = "waiting"
    waits: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    groups: Groups = ()
    regrouped: bool = False
    joined: dict[str, int] = field(default_factory=dict)
    left: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    unsummed: dict[str, str] = field(default_factory=dict)
    unsummed_now: Mapping[str, str] = field(default_factory=dict)
    errors: dict[str, float] = field(default_factory=dict)
    evaluated: int = 0
    samples: dict[str, float] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    round_seconds: list[float] = field(default_factory=list)
    bytes: int = 0
    states: dict[str, str] = field(default_factory=dict)
    phase: str = ""
    racing: int = 0
    spent_on: tuple[str, int] = ("", 0)
    error: str = ""
    lead: Lead = field(default_factory=Lead)
    started: float = field(default_factory=time.monotonic)
    elapsed: float = 0.0

    def feed(self, event: Event) -> None:
        self.elapsed = time.monotonic() - self.started
        match event.kind:
            case "start":
                self.config = event.config
                self.rounds = Run(config=event.config).planned_rounds
                self.status = "waiting for silos"
            case "resume":
                self.config = event.config or self.config
                self.rounds = Run(config=self.config).planned_rounds
                self.status, self.error = "waiting for silos", ""
                self.round = event.number
            case "look" if event.number > 1:
                self.status = f"round {event.number}"
            case "waits":
                self.waits = event.text
            case "here":
                self.waits, asked = "", "awaited" if self._asks else "training"
                known = {n for n, s in self.states.items() if s == asked or not self._asks}
                gone = dict.fromkeys(known - {*event.silos}, "left")
                self.states |= gone | dict.fromkeys(event.silos, asked)
            case "answer" if event.work.startswith("train") or self._asks:
                self.states |= dict.fromkeys(event.silos, "answered")
            case "ready":
                self.status = "asking" if self._asks else "training"
                self.lead = Lead(event.metric or wire.ERROR, event.unit)
            case "end":
                self.waits = ""
                self.states = {n: "done" if s == "answered" else s for n, s in self.states.items()}
                self.status, self.error = event.status, event.error
        if event.report:
            self._feed_round(event.report, event.refused)

    @property
    def _asks(self) -> bool:
        return self.config.get("strategy") in wire.UNTRAINED

    def _feed_round(self, report: Round, refused: Mapping[str, str]) -> None:
        self.round, self.seconds = report.round, report.seconds
        self.regrouped, self.groups = report.groups != self.groups, report.groups
        for name in report.joined:
            self.joined.setdefault(name, self.round)
            self.left.pop(name, None)
        self.left |= dict.fromkeys(report.left, self.round)
        self.states |= dict.fromkeys(report.left_out, "left out")
        self.states |= dict.fromkeys(refused, "not let in")
        self.left_out += [f"round {self.round}: {n}: {why}" for n, why in report.left_out.items()]
        if report.evaluation:
            self.errors |= errors_of(report.evaluation)
            self.evaluated = report.evaluated_round
        self._feed_phase(report)
        self.samples |= {name: silo.num_examples for name, silo in report.silos.items()}
        self.bytes += sum(report.num_bytes)
        if not report.final:
            self.round_seconds.append(sum(self.seconds.values()))

    def _feed_phase(self, report: Round) -> None:
        with suppress(FederationError):  # a damaged record costs only these words
            grouping = report.grouping
            new = grouping.not_summed.items() - self.unsummed.items()
            self.unsummed_now = dict(sorted(new))
            self.unsummed |= self.unsummed_now
            if grouping.phase:
                self.spent_on = self.phase or "look", self.racing
                self.phase, self.racing = grouping.phase, len(grouping.entrants)

    @property
    def mean_error(self) -> float | None:
        """The mean error in [0, 1] over the silos that are in groups now; None if there is none."""
        here = {name for group in self.groups for name in group}
        values = [error for name, error in self.errors.items() if name in here]
        return sum(values) / len(values) if values else None
