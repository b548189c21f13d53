"""The outbound ledger: what left this silo, one JSON line per reply, written before it is sent.

Every reply of the silo's app passes through here, under any engine. If the line cannot be
written, only the kind of that error is sent. Values of metrics are recorded; for arrays the
name, type, shape and bytes. No exception passes: an engine would send its text, which may quote
the silo's data.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message

from coterie import wire
from coterie.client.home.files import LEDGER
from coterie.client.home.local_log import json_lines
from coterie.client.home.request_counts import asked_by, question_of
from coterie.client.home.settings import SiloSettings
from coterie.features.privacy.budget import read_spent
from coterie.features.secure.protocol import decode_sum
from coterie.features.secure.together import decode_together
from coterie.system.files import append_line, make_folder
from coterie.wire.games import game_of
from coterie.wire.limits import MAX_NAME
from coterie.wire.statements import decode_statement

log = logging.getLogger("coterie.silo")

_logged: dict[str, tuple[str, str]] = {}
"""Silo → a run and why the silo trains alone in it, as logged last."""


def outbound(
    message: Message, context: Context, call_next: Callable[[Message, Context], Message]
) -> Message:
    """Call the app and record its reply: a Flower mod."""
    name = str(context.node_config.get("name", f"node-{context.node_id}"))
    try:
        settings = SiloSettings.from_node_config(context.node_config, node_id=context.node_id)
        try:
            reply = call_next(message, context)
        except (Exception, SystemExit) as error:
            reply = _failure(settings.name, error, message)
        except (
            BaseException
        ) as error:  # the process ends: the code that ended it answers for the app
            _append(settings, _entry(message) | {"error": type(error).__name__})
            raise
        entry = _entry(message) | _content(reply) | _privacy(settings)
        _say_apart(settings.name, entry)
        # Before it is in the ledger: a reader that counts first must not find it there as well.
        asked = asked_by(settings, entry["run"], entry["flower-run"], game_of(context))
        _append(settings, entry)
        if "error" not in entry:
            asked.add(entry["type"], entry)
    except (Exception, SystemExit) as error:  # wrong settings, or no room for the ledger
        return _failure(name, error, message)
    return reply


def _failure(silo: str, error: BaseException, message: Message) -> Message:
    log.error("the app failed on a %s message", message.metadata.message_type, exc_info=error)
    return wire.failure(silo, error, message)


def _say_apart(silo: str, entry: Mapping[str, Any]) -> None:
    """Log, once, that a silo was moved out of its group, and that it is back."""
    run, why = str(entry["run"]), str(entry.get("apart", ""))
    before = _logged.get(silo, ("", ""))
    if entry["type"] != wire.TRAIN or entry["purpose"] or (run, why) == before:
        return
    where = f"run {wire.plain_text(run, wire.MAX_WORD)}, round {entry['round']}"
    if why:
        log.warning("%s: silo %s was quarantined: %s", where, silo, why)
    elif before[1] and before[0] == run:
        log.info("%s: silo %s is out of quarantine", where, silo)
    _logged[silo] = run, why


def _entry(message: Message) -> dict[str, Any]:
    meta = message.metadata
    records = wire.config_records(message.content) if message.has_content() else {}
    config = records.get(wire.CONFIG)
    apart = None if config is None else config.get(wire.APART)
    return {
        "at": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "run": "" if config is None else str(config.get(wire.RUN, ""))[:MAX_NAME],
        "flower-run": str(meta.run_id),
        "round": 0 if config is None else wire.whole(config.get(wire.ROUND)),
        "type": meta.message_type,
        "purpose": "" if config is None else str(config.get(wire.PURPOSE, ""))[:64],
        "strategy": "" if config is None else str(config.get(wire.STRATEGY, ""))[:64],
        **({"apart": wire.plain_text(apart)} if apart else {}),
        **({"question": question} if (question := question_of(message)) else {}),
        **_summed(message, config),
    }


def _summed(message: Message, config: ConfigRecord | None) -> dict[str, Any]:
    """Return the model of a fit by sums, and a masked sum's round, silos and their blocks."""
    kind = message.metadata.message_type
    if config is None:
        return {}
    asks = kind == wire.TRAIN_SUMS and wire.SUMS_OF in config
    of: dict[str, Any] = {"asked": wire.asked_sums(config[wire.SUMS_OF])} if asks else {}
    if wire.SUM not in config:
        return of
    try:
        if wire.kind_of(kind).summed:
            found = decode_together(config[wire.SUM])
            number, names = wire.whole(config.get(wire.ROUND)), list(found.members)
            return of | {"summed": {"round": number, "silos": names, "blocks": list(found.blocks)}}
        if kind != wire.MASKED_SUM:
            return {}
        asked = decode_sum(config.get(wire.SUM))
    except wire.WireError:
        return of  # refused
    blocks = [[name for name, _ in block] for block in asked.blocks]
    return {"summed": {"round": asked.round, "silos": list(asked.members), "blocks": blocks}}


def _content(reply: Message) -> dict[str, Any]:
    if reply.has_error():
        return {"error": reply.error.reason}
    tensors: list[dict[str, Any]] = [
        {"record": name, "name": t.name, "type": t.dtype, "shape": list(t.shape), "bytes": t.bytes}
        for name, record in wire.array_records(reply.content).items()
        for t in wire.tensors_of(record)
    ]
    values = {
        record: {k: v.hex() if isinstance(v, bytes) else v for k, v in entries.items()}
        for records in (wire.metric_records(reply.content), wire.config_records(reply.content))
        for record, entries in records.items()
    }
    size = sum(t["bytes"] for t in tensors)
    return {"tensors": tensors, "values": values, "bytes": size, **_stated(reply)}


def _stated(reply: Message) -> dict[str, Any]:
    """Return what the silo has stated of its training in a secure run, if it has."""
    record = wire.array_records(reply.content).get(wire.SKETCH)
    sketch = {} if record is None else wire.decode_arrays(record)
    if wire.STATEMENT not in sketch:
        return {}
    stated = decode_statement(sketch[wire.STATEMENT].tobytes().decode("ascii"))
    return {"stated": asdict(stated)}


def _privacy(settings: SiloSettings) -> dict[str, Any]:
    spent = read_spent(settings.home) if settings.privacy is not None and settings.home else None
    if spent is None:
        return {}
    return {"privacy": {"epsilon": spent.epsilon, "of": spent.of, "delta": spent.delta}}


def _append(settings: SiloSettings, entry: Mapping[str, Any]) -> None:
    if not settings.home:
        return
    file, line = ledger_of(Path(settings.home)), json.dumps(entry).encode()
    try:
        append_line(file, line, synced=True)
    except FileNotFoundError:
        make_folder(file.parent)
        append_line(file, line, synced=True)


def ledger_of(home: Path) -> Path:
    """Return the ledger's path in a silo's folder."""
    return home / LEDGER


def read(home: Path, *, run: str = "") -> Iterator[dict[str, Any]]:
    """Yield a ledger's entries, oldest first, or only a run's; ``OSError`` without a ledger."""
    for entry in json_lines(ledger_of(home)):
        # What a crash cut off has not left.
        if entry is not None and (not run or entry.get("run") == run):
            yield entry


@dataclass
class Total:
    """The total that left in all messages of one type in one run.

    Attributes:
        messages, bytes: number of messages, and bytes of their arrays.
        refused: number of messages with only a refusal or an error.
        rounds: first and last.
        tensors: names of arrays → shapes as text.
        values: names of metrics and other entries, as keys.
        apart: why the silo was moved out of its group → first and last round of that.
        asked: model that was fitted by sums → groups, or silos alone, in which it was.
    """

    rounds: tuple[int, int]
    messages: int = 0
    bytes: int = 0
    refused: int = 0
    tensors: dict[str, str] = field(default_factory=dict)
    values: dict[str, None] = field(default_factory=dict)
    apart: dict[str, tuple[int, int]] = field(default_factory=dict)
    asked: dict[str, dict[str, None]] = field(default_factory=dict)


def totals(entries: Iterable[Mapping[str, Any]]) -> dict[tuple[str, str], Total]:
    """Return (run, message type) → what left, in order of first appearance.

    Entries may lack anything: a person may have edited the file.
    """
    found: dict[tuple[str, str], Total] = {}
    for entry in entries:
        key = (wire.plain_text(entry.get("run", "")), wire.plain_text(entry.get("type", "?")))
        number = wire.whole(entry.get("round"))
        total = found.setdefault(key, Total((number, number)))
        total.messages += 1
        total.bytes += wire.whole(entry.get("bytes"))
        total.refused += "error" in entry
        total.rounds = (min(total.rounds[0], number), max(total.rounds[1], number))
        if why := str(entry.get("apart", "")):
            first, last = total.apart.get(why, (number, number))
            total.apart[why] = (min(first, number), max(last, number))
        if asked := str(entry.get("asked", "")):
            total.asked.setdefault(asked, {})[wire.plain_text(entry.get("purpose", ""))] = None
        tensors, values = entry.get("tensors"), entry.get("values")
        for one in tensors if isinstance(tensors, list) else ():
            if isinstance(one, dict):
                shape = one.get("shape")
                text = "×".join(map(str, shape)) if isinstance(shape, list) else "?"
                total.tensors[str(one.get("name", "?"))] = text or "one number"
        for record in values.values() if isinstance(values, dict) else ():
            total.values |= dict.fromkeys(record) if isinstance(record, dict) else {}
    return found
