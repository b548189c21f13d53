"""Log lines about the runs that a silo works for, and counts of them.

There is one line when the silo is first asked to work for a run, and one for each of its rounds,
with the time of the work and what was sent since the line before.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from flwr.app import ConfigRecord, Message

from coterie import wire

log = logging.getLogger("coterie.silo")

SAID = (wire.TASK, wire.STRATEGY, wire.ROUNDS)
"""Entries of a run's first message that its log line shows."""
MAX_RUNS = 8
"""Runs whose rounds are remembered."""


@dataclass
class Tally:
    """Counts of a process since it started; they only grow."""

    runs: int = 0
    rounds: int = 0
    seconds: float = 0.0
    errors: int = 0


@dataclass
class _Run:
    """The round of a run's last log line, and totals since then."""

    round: str = ""
    seconds: float = 0.0
    bytes: int = 0


class ActivityLog:
    """Logs and counts the messages that a process answers, with lines of this ``level``."""

    def __init__(self, level: int = logging.INFO) -> None:
        self.tally = Tally()
        self._level = level
        self._runs: dict[int, _Run] = {}

    def answered(self, message: Message, reply: Message, seconds: float) -> None:
        """Log and count a message that was answered in ``seconds``."""
        if reply.has_error():
            self.tally.errors += 1
            return
        config = wire.config_records(message.content).get(wire.CONFIG, ConfigRecord())
        if message.metadata.message_type == wire.DESCRIBE and _is_of_another_study(config, reply):
            log.debug("a run of task %.80r asked which silos are connected", config[wire.TASK])
            return
        run = self._run_of(message, config)
        if wire.LEFT_OUT in config:
            why = wire.plain_text(config[wire.LEFT_OUT])
            log.warning("run %s: the last reply did not count: %s", _name_of(message, config), why)
        run.seconds += seconds
        run.bytes += wire.num_array_bytes(reply.content)
        self.tally.seconds += seconds
        kind, number = message.metadata.message_type, message.metadata.group_id
        if kind.split(".")[0] == wire.TRAIN and run.round != number:
            self.tally.rounds += 1
            self._log_round(message, config, run)
            self._runs[message.metadata.run_id] = _Run(number)

    def _run_of(self, message: Message, config: ConfigRecord) -> _Run:
        run_id = message.metadata.run_id
        if run_id not in self._runs:
            while len(self._runs) >= MAX_RUNS:
                del self._runs[next(iter(self._runs))]
            self._runs[run_id] = _Run()
            self.tally.runs += 1
            terms = ", ".join(f"{key} {config[key]!r:.40}" for key in SAID if key in config)
            name = _name_of(message, config)
            text = f"takes part in run {name}" + (f": {terms}" if terms else "")
            log.log(self._level, "%s", text, extra={"run": name, **_strategy(config)})
        return self._runs[run_id]

    def _log_round(self, message: Message, config: ConfigRecord, run: _Run) -> None:
        name, size = _name_of(message, config), wire.whole(config.get(wire.GROUP_SIZE))
        fields: dict[str, Any] = {
            "run": name,
            "round": wire.plain_text(message.metadata.group_id, wire.MAX_WORD),
            **_strategy(config),
            **({"group": size} if size else {}),
            "seconds": round(run.seconds, 3),
            "bytes": run.bytes,
        }
        log.log(
            self._level,
            "run %s round %s:%s%s %s in %.2f s, %s sent",
            *(name, fields["round"]),
            f" {fields['strategy']}," if "strategy" in fields else "",
            f" group of {size}," if size else "",
            "answered" if fields.get("strategy") in wire.UNTRAINED else "trained",
            *(run.seconds, _size(run.bytes)),
            extra=fields,
        )


def _size(num_bytes: int) -> str:
    return f"{num_bytes / 1e6:.2f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.1f} kB"


def _is_of_another_study(asked: ConfigRecord, reply: Message) -> bool:
    """Return whether the silo has only listed the tasks that it serves."""
    said = wire.config_records(reply.content).get(wire.CONFIG, ConfigRecord())
    return wire.TASK in asked and said.get(wire.TASK, asked[wire.TASK]) != asked[wire.TASK]


def _name_of(message: Message, config: ConfigRecord) -> str:
    """Return the run's own name, which stays when it is resumed; else Flower's number."""
    name = config.get(wire.RUN) or config.get(wire.OF_RUN) or message.metadata.run_id
    return wire.plain_text(name, wire.MAX_WORD)


def _strategy(config: ConfigRecord) -> dict[str, str]:
    named = config.get(wire.STRATEGY)
    return {"strategy": wire.plain_text(named, wire.MAX_WORD)} if named else {}
