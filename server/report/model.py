"""A run's folder as one typed value, read so that damage costs only what is damaged.

``run.json`` is the record; what it lacks, because the run was cut off while it was written or
because it is damaged, is taken from ``events.jsonl``. Whatever cannot be read is named in
``Run.missing`` and the rest goes on.
"""

from __future__ import annotations

import json
import math
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Any

from coterie.strategies.errors import EXIT_CONFIG, FederationError

Groups = tuple[tuple[str, ...], ...]
OWN_KEYS = frozenset(
    {
        "round", "groups", "joined", "left", "left-out", "seconds", "phases", "silos",
        "evaluation", "evaluation-after", "evaluated-round", "event", "at", "refused",
        "personalised",
    }
)  # fmt: skip
"""Keys of a round that belong to the loop; every other one is the strategy's."""


@dataclass(frozen=True)
class SiloFacts:
    """What is known of a silo: samples and its own α, NaN where unknown or not set."""

    num_examples: float = math.nan
    alpha: float = math.nan
    num_test_examples: float = math.nan


@dataclass(frozen=True)
class SiloWork:
    """One silo in one round: loss of its training, its own seconds, bytes of arrays."""

    train_loss: float = math.nan
    seconds: float = math.nan
    bytes_sent: float = 0.0
    bytes_received: float = 0.0


@dataclass(frozen=True)
class Round:
    """One round.

    Attributes:
        number: from 1.
        groups: who trained together.
        joined, left: since the round before.
        left_out: silo → why its update does not count.
        seconds: phase → wall seconds; what came before the training by its message type.
        phase_bytes: message type, or purpose → bytes of arrays (to silos, from silos) before or
            beside the round's training.
        phase_silo_seconds: the same → the silos' own seconds, added up.
        work: per silo that answered.
        errors: silo → error of the model that it held after the round, share in [0, 1].
        personal: silo → error of the model as it trained it in the round, before the averaging.
        details: what the strategy adds.
    """

    number: int
    groups: Groups = ()
    joined: tuple[str, ...] = ()
    left: tuple[str, ...] = ()
    left_out: Mapping[str, str] = field(default_factory=dict)
    seconds: Mapping[str, float] = field(default_factory=dict)
    phase_bytes: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    phase_silo_seconds: Mapping[str, float] = field(default_factory=dict)
    work: Mapping[str, SiloWork] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    personal: Mapping[str, float] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Run:
    """Everything that a run's folder says.

    Attributes:
        folder: where it is.
        status: ``starting``, ``running``, ``completed``, ``failed`` or ``unknown``.
        error: why it failed, or empty.
        started: date and time as written, or empty.
        seconds: wall seconds of the whole run, NaN while unknown.
        config, versions: as recorded.
        silos: by name, sorted.
        refused: silo → why it was not let in.
        rounds: ascending.
        initial: silo → error of the initial model.
        missing: what is damaged or not there, in words.
    """

    folder: Path
    status: str = "unknown"
    error: str = ""
    started: str = ""
    seconds: float = math.nan
    config: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    silos: Mapping[str, SiloFacts] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    rounds: tuple[Round, ...] = ()
    initial: Mapping[str, float] = field(default_factory=dict)
    missing: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """Of its folder."""
        return _clean(self.folder.name)

    @property
    def strategy(self) -> str:
        """As configured; empty if unknown."""
        return str(self.config.get("strategy", ""))

    @property
    def planned_rounds(self) -> int:
        """How many the configuration asks for; 0 if unknown."""
        rounds = self.config.get("rounds", 0)
        return rounds if isinstance(rounds, int) and not isinstance(rounds, bool) else 0

    def last_errors(self) -> dict[str, float]:
        """Every silo's error when it was last measured; who left keeps its last."""
        found = dict(self.initial) if not self.rounds else {}
        for one in self.rounds:
            found |= one.errors
        return found

    def last_personal(self) -> dict[str, float]:
        """Every silo's error with the model that it trained itself last, where that was asked."""
        found: dict[str, float] = {}
        for one in self.rounds:
            found |= one.personal
        return found


def read_run(folder: Path) -> Run:
    """Read a run's folder.

    Raises:
        FederationError: there is nothing in it that could be read.
    """
    missing: list[str] = []
    record = _read_record(folder / "run.json", missing)
    rounds = {one.number: one for one in _rounds(_list(record.get("rounds")), missing)}
    closed = record.get("status") in ("completed", "failed")
    whole = closed and 0 < len(rounds) == max(rounds, default=0)
    events = [] if whole else _read_events(folder / "events.jsonl", missing)
    if not record and not events:
        raise FederationError(
            f"{folder} holds no record of a run: expected run.json or events.jsonl that can be "
            f"read ({'; '.join(missing) or 'both are empty'}).",
            exit_code=EXIT_CONFIG,
        )
    if not record:
        record = _record_of(events)
    late = [e for e in _standing(events) if e.get("round") not in rounds]
    found = {one.number: one for one in _rounds(late, missing)}
    if found and closed:
        missing.append(f"run.json lacks {len(found)} round(s), which were taken from events.jsonl")
    rounds |= found
    _attach_errors(rounds, events)
    run = Run(
        folder=folder,
        status=_text(record.get("status")) or "unknown",
        error=_text(record.get("error")),
        started=_text(record.get("started")),
        seconds=_number(record.get("seconds")),
        config=_mapping(record.get("config")),
        versions={_clean(k): _text(v) for k, v in _mapping(record.get("versions")).items()},
        silos=_silos(record, rounds.values()),
        refused=_texts(record.get("refused")),
        rounds=tuple(rounds[number] for number in sorted(rounds)),
        initial=_errors(record.get("initial-evaluation")),
    )
    _attach_final(run, record)
    return _complete(run, missing)


def _standing(events: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """The round events that count: a resumed run does again what came after its checkpoint."""
    standing: list[Mapping[str, Any]] = []
    for event in events:
        after = event.get("after")
        if event.get("event") == "round":
            standing.append(event)
        elif event.get("event") == "resume" and _is_int(after):
            standing = [e for e in standing if _is_int(e.get("round")) and e["round"] <= after]
    return standing


def _attach_final(run: Run, record: Mapping[str, Any]) -> None:
    """The last round's models are evaluated, and perhaps handed on, after it."""
    after = round_of({"round": 1, "phases": record.get("final-phases")})
    if run.rounds:
        _add_to(run.rounds[-1], after)
    errors = _errors(record.get("final-evaluation"))
    if errors and run.rounds:
        dict_of = run.rounds[-1].errors
        assert isinstance(dict_of, dict)
        dict_of |= errors


def _add_to(last: Round, after: Round) -> None:
    """The cost of what came after the last round, to that round."""
    assert isinstance(last.phase_bytes, dict) and isinstance(last.phase_silo_seconds, dict)
    for kind, (sent, received) in after.phase_bytes.items():
        before = last.phase_bytes.get(kind, (0.0, 0.0))
        last.phase_bytes[kind] = (before[0] + sent, before[1] + received)
    for kind, seconds in after.phase_silo_seconds.items():
        before_s = last.phase_silo_seconds.get(kind, 0.0)
        last.phase_silo_seconds[kind] = before_s + seconds


def _complete(run: Run, missing: list[str]) -> Run:
    """Say what is not there."""
    numbers = [one.number for one in run.rounds]
    gaps = sorted(set(range(1, max(numbers, default=0) + 1)) - set(numbers))
    if gaps:
        missing.append(f"round(s) {_ranges(gaps)} cannot be read")
    if run.status != "completed":
        done = f"{max(numbers, default=0)} of {run.planned_rounds or '?'} rounds"
        words = {
            "failed": f"the run failed after {done}: {run.error or 'no reason is recorded'}",
            "running": f"the run is going on or was cut off: {done} are recorded",
            "starting": "the run had not begun to train when this was written",
        }
        missing.append(words.get(run.status, f"how the run ended is not recorded: {done}"))
    if not run.config:
        missing.append("the configuration is not readable")
    if run.rounds and not any(one.errors for one in run.rounds):
        missing.append("no silo ever said its error: no gains and no learning curves")
    return Run(**{**run.__dict__, "missing": tuple(dict.fromkeys(missing))})


def _ranges(numbers: list[int]) -> str:
    """``1–3, 7`` of ascending numbers."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{r[0]}–{r[-1]}" if len(r) > 1 else str(r[0]) for r in runs)


# ---------------------------------------------------------------- files


def _read_record(path: Path, missing: list[str]) -> dict[str, Any]:
    try:
        read = json.loads(path.read_text(encoding="utf-8", errors="replace"))
    except FileNotFoundError:
        missing.append("run.json is not there")
        return {}
    except (OSError, ValueError, RecursionError) as error:
        missing.append(f"run.json is damaged ({_short(error)}); what follows is from events.jsonl")
        return {}
    if not isinstance(read, dict):
        missing.append("run.json is damaged (not an object); what follows is from events.jsonl")
        return {}
    return read


def _read_events(path: Path, missing: list[str]) -> list[dict[str, Any]]:
    events: list[dict[str, Any]] = []
    damaged = 0
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").split("\n")
    except FileNotFoundError:
        missing.append("events.jsonl is not there")
        return []
    except OSError as error:
        missing.append(f"events.jsonl cannot be read ({_short(error)})")
        return []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            event = json.loads(line)
        except (ValueError, RecursionError):
            damaged += number < len(lines)  # the last may still be in the writing
            continue
        if isinstance(event, dict):
            events.append(event)
        else:
            damaged += 1
    if damaged:
        missing.append(f"{damaged} line(s) of events.jsonl are damaged")
    return events


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error)[:80]}"


def _record_of(events: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """As much of a record as events can give."""
    record: dict[str, Any] = {"status": "starting", "rounds": []}
    for event in events:
        kind = event.get("event")
        if kind in ("start", "resume"):
            record["config"] = event.get("config")
        elif kind == "ready":
            record["status"] = "running"
        elif kind == "final":
            record["final-evaluation"] = event.get("evaluation")
            record["final-phases"] = event.get("phases")
        elif kind == "end":
            record |= {key: event.get(key) for key in ("status", "error", "seconds")}
        if kind in ("round", "final"):
            record["refused"] = event.get("refused")
        if kind == "round" and event.get("evaluated-round") == 0:
            record["initial-evaluation"] = event.get("evaluation")
    return record


def _attach_errors(rounds: Mapping[int, Round], events: Iterable[Mapping[str, Any]]) -> None:
    """The error after round t comes with a later event."""
    for event in events:
        if event.get("event") not in ("round", "final"):
            continue
        of = rounds.get(event["evaluated-round"]) if _is_int(event.get("evaluated-round")) else None
        if of is not None and isinstance(of.errors, dict):
            for name, error in _errors(event.get("evaluation")).items():
                of.errors.setdefault(name, error)


# ---------------------------------------------------------------- values


def _rounds(entries: Iterable[Any], missing: list[str]) -> list[Round]:
    found = []
    for entry in entries:
        if not isinstance(entry, dict) or not _is_int(entry.get("round")) or entry["round"] < 1:
            missing.append("a round's entry is damaged and left out")
            continue
        found.append(round_of(entry))
    return found


def round_of(entry: Mapping[str, Any]) -> Round:
    """A round's entry of the record as a value; its number must be there."""
    phases = {_clean(k): _mapping(v) for k, v in _mapping(entry.get("phases")).items()}
    seconds = {_clean(k): _number(v) for k, v in _mapping(entry.get("seconds")).items()}
    for kind, cost in phases.items():
        spent = _number(cost.get("seconds"))
        if math.isfinite(spent) and spent > 0:
            seconds[kind] = seconds.get(kind, 0.0) + spent
            seconds["prepare"] = max(seconds.get("prepare", spent) - spent, 0.0)
    return Round(
        number=entry["round"],
        groups=_groups(entry.get("groups")),
        joined=_names(entry.get("joined")),
        left=_names(entry.get("left")),
        left_out=_texts(entry.get("left-out")),
        seconds={k: v for k, v in seconds.items() if math.isfinite(v) and v >= 0},
        phase_bytes={
            kind: (_amount(cost.get("bytes-sent")), _amount(cost.get("bytes-received")))
            for kind, cost in phases.items()
        },
        phase_silo_seconds={k: _amount(cost.get("silo-seconds")) for k, cost in phases.items()},
        work={
            _clean(name): SiloWork(
                train_loss=_number(one.get("train-loss")),
                seconds=_number(one.get("seconds")),
                bytes_sent=_amount(one.get("bytes-sent")),
                bytes_received=_amount(one.get("bytes-received")),
            )
            for name, one in ((n, _mapping(o)) for n, o in _mapping(entry.get("silos")).items())
        },
        errors=_errors(entry.get("evaluation-after")),
        personal=_errors(entry.get("personalised")),
        details={k: _clean_within(v) for k, v in entry.items() if k not in OWN_KEYS},
    )


def _silos(record: Mapping[str, Any], rounds: Iterable[Round]) -> dict[str, SiloFacts]:
    tested = _test_counts(record)
    found = {
        name: SiloFacts(
            _number(one.get("num-examples")),
            _number(one.get("alpha")),
            tested.get(name, math.nan),
        )
        for name, one in (
            (_clean(n), _mapping(o)) for n, o in _mapping(record.get("silos")).items()
        )
    }
    for one in rounds:
        for name in [*one.work, *(n for group in one.groups for n in group)]:
            found.setdefault(name, SiloFacts())
    return dict(sorted(found.items()))


def _test_counts(record: Mapping[str, Any]) -> dict[str, float]:
    """Silo → samples that it was last tested on."""
    rounds = [_mapping(entry).get("evaluation-after") for entry in _list(record.get("rounds"))]
    found: dict[str, float] = {}
    for one in (record.get("initial-evaluation"), *rounds, record.get("final-evaluation")):
        found |= {
            _clean(n): _number(_mapping(e).get("num-examples")) for n, e in _mapping(one).items()
        }
    return found


def _clean(text: object) -> str:
    """Text without what neither a page nor a picture can hold."""
    return _cleaned(str(text))


@lru_cache(maxsize=100_000)
def _cleaned(text: str) -> str:
    if text.isprintable():
        return text
    return "".join("\ufffd" if unicodedata.category(c)[0] == "C" else c for c in text)


def _clean_within(value: Any) -> Any:
    """The same for every text in a JSON value."""
    if isinstance(value, str):
        return _cleaned(value)
    if isinstance(value, list):
        return [_clean_within(one) for one in value]
    if isinstance(value, dict):
        return {_clean(key): _clean_within(one) for key, one in value.items()}
    return value


def _text(value: object) -> str:
    return "" if value is None else _clean(value)


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _list(value: object) -> list[Any]:
    return value if isinstance(value, list) else []


def _names(value: object) -> tuple[str, ...]:
    return tuple(_clean(name) for name in _list(value) if isinstance(name, str))


def _texts(value: object) -> dict[str, str]:
    return {_clean(k): _text(v) for k, v in _mapping(value).items()}


def _groups(value: object) -> Groups:
    """Disjoint groups; a silo that is named twice counts once."""
    seen: set[str] = set()
    groups = []
    for group in _list(value):
        names = tuple(name for name in dict.fromkeys(_names(group)) if name not in seen)
        seen |= set(names)
        if names:
            groups.append(names)
    return tuple(groups)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    return float(value) if abs(value) < 1e300 or math.isinf(value) else math.nan


def _amount(value: object) -> float:
    number = _number(value)
    return number if math.isfinite(number) and number >= 0 else 0.0


def _errors(value: object) -> dict[str, float]:
    found = {_clean(n): _number(_mapping(one).get("error")) for n, one in _mapping(value).items()}
    return {name: error for name, error in found.items() if math.isfinite(error)}
