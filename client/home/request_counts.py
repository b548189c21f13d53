"""Counts of a run's requests to this silo, kept by the silo, whatever the coordinator reports.

They bound a coordinator that calls every round the first: one update from a few samples reveals
little, hundreds reveal everything. With a folder, the counts are restored from the ledger.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from flwr.app import Message

from coterie import wire
from coterie.client.home.files import LEDGER
from coterie.client.home.local_log import json_lines
from coterie.client.home.policy import Policy
from coterie.client.home.rounds import folder_of
from coterie.client.home.settings import SiloSettings
from coterie.wire.games import Game

MAX_RUNS = 64
"""Runs whose counts a process caches for one silo; other counts are read again."""
MAX_REPEATS = 20
"""Times that a round may be repeated: a coordinator that recovers from a crash repeats a few."""
MAX_TRAININGS = 200
"""Different trainings in one round, including trials and races."""


@dataclass
class Asked:
    """The answered requests of one run.

    Attributes:
        strategy: named by the run's first message.
        trained: (type, purpose, round) → answered trainings.
        evaluated: round → answered evaluations. In the last round a question about histograms
            counts once, however often it is put: its answer is the same.
        questions: those of the last round, by ``question_of``.
    """

    strategy: str = ""
    trained: Counter[tuple[str, str, int]] = field(default_factory=Counter)
    evaluated: Counter[int] = field(default_factory=Counter)
    questions: set[str] = field(default_factory=set)
    _last: int = 0

    def add(self, kind: str, entry: Mapping[str, Any]) -> None:
        """Count an answered message of this type; ``entry`` as in the ledger."""
        number = wire.whole(entry.get("round"))
        if kind.startswith((wire.TRAIN, wire.EVALUATE)):
            self.strategy = self.strategy or str(entry.get("strategy", ""))
        if kind.startswith(wire.TRAIN) and kind != wire.MASKED_SUM:
            self.trained[kind, str(entry.get("purpose", "")), number] += 1
        elif kind.startswith(wire.EVALUATE):
            if number != self._last:
                self._last, self.questions = number, set()
            question = str(entry.get("question", ""))
            self.evaluated[number] += question not in self.questions
            self.questions |= {question} - {""}

    def objection(
        self,
        kind: str,
        config: Mapping[str, Any],
        policy: Policy,
        question: Callable[[], str] = str,
    ) -> str:
        """Return why a further message is refused; empty if it is accepted."""
        number, named = wire.whole(config.get(wire.ROUND)), str(config.get(wire.STRATEGY, ""))[:64]
        if self.strategy and named and named != self.strategy:
            return (
                f"takes part in this run with strategy {self.strategy}; now the run names {named}."
            )
        if kind.startswith(wire.TRAIN) and kind != wire.MASKED_SUM:
            return self._training_objection(
                kind, str(config.get(wire.PURPOSE, ""))[:64], number, policy
            )
        if kind.startswith(wire.EVALUATE):
            most = policy.max_evaluations
            full = most and self.evaluated[number] >= most
            if full and not (number == self._last and question() in self.questions):
                return (
                    f"evaluates at most {most} times a round (max_evaluations); this run asks for "
                    f"more in round {number}."
                )
        return ""

    def _training_objection(self, kind: str, purpose: str, number: int, policy: Policy) -> str:
        if self.trained[kind, purpose, number] > MAX_REPEATS:
            return f"has trained for round {number} of this run {MAX_REPEATS + 1} times already."
        different = sum(one == number for _, _, one in self.trained)
        if different >= MAX_TRAININGS and (kind, purpose, number) not in self.trained:
            return f"trains at most {MAX_TRAININGS} times a round; this run asks for more."
        if policy.max_rounds and not purpose:
            done = sum(n for (_, other, _), n in self.trained.items() if not other)
            if done >= policy.max_rounds + MAX_REPEATS:
                return (
                    f"trains at most {policy.max_rounds} rounds; it has trained {done} times "
                    "for this run already, however the run numbers its rounds."
                )
        return ""


def question_of(message: Message) -> str:
    """Return a digest of a question about histograms; empty for other messages.

    A coordinator that recovers from a crash puts up to a round's questions once more.
    """
    if message.metadata.message_type != wire.EVALUATE_HISTOGRAMS or not message.has_content():
        return ""
    found, content = hashlib.sha256(), message.content
    for name, config in sorted(wire.config_records(content).items()):
        found.update(repr((name, sorted(config.items()))).encode())
    for name, record in sorted(wire.array_records(content).items()):
        for key, array in record.items():
            found.update(repr((name, key, array.dtype, array.shape, len(array.data))).encode())
            found.update(array.data)
    return found.hexdigest()[:32]


_memory: dict[tuple[str, str, str, str], Asked] = {}
"""(silo, home, run, Flower's run) → its requests."""


def asked_by(settings: SiloSettings, run: str, flower_run: str, game: Game | None = None) -> Asked:
    """Return the requests of a run to a silo so far.

    Args:
        run: its name, which stays the same when it is resumed; empty if it has none.
        flower_run: its SuperLink number.
        game: of silos that are played in this process; there nothing is counted for a silo without
            a folder, as the caller simulates it.
    """
    if game is not None and not (run and settings.home):
        return Asked()
    key = (settings.name, settings.home, run, "" if run and settings.home else flower_run)
    if key not in _memory:
        for old in [k for k in _memory if k[:2] == key[:2]][: -MAX_RUNS + 1]:
            del _memory[old]
        _memory[key] = _from_ledger(settings.home, run, flower_run)
    return _memory[key]


def _from_ledger(home: str, run: str, flower_run: str) -> Asked:
    asked = Asked()
    if not home:
        return asked
    try:
        for entry in json_lines(Path(home) / LEDGER):
            if entry is None or entry.get("run") != run or "error" in entry:
                continue
            if run or entry.get("flower-run") == flower_run:
                asked.add(str(entry.get("type", "")), entry)
    except FileNotFoundError:
        pass
    return asked


def quota_objection(home: str, run: str, most: int) -> str:
    """Return why models of more than ``most`` runs (0: no limit) are not saved; else empty."""
    if not home or not run or not most:
        return ""
    own = folder_of(home, "models", run).name
    files = (Path(home) / "models").glob("*.safetensors")
    kept = {file.stem.partition("-round-")[0] for file in files}
    if own.partition("-round-")[0] in kept or len(kept) < most:
        return ""
    return (
        f"saves models of at most {most} runs (max_kept_runs), and has models of {len(kept)}. "
        "At the silo, move some out of its folder models/, or allow more in silo.toml."
    )
