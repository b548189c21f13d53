"""A withdrawal as a signed statement: what was deleted, and what cannot be."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from coterie.server.site import certificates
from coterie.server.site.federation import Federation
from coterie.strategies.errors import FederationError, refused
from coterie.wire import counted

KIND = "coterie-withdrawal"
EXIT_NEGATIVE = 1


CANNOT = (
    "other silos' models, and means, that contain its averaged updates: see averaged",
    "copies at other silos, at operators and in backups, which the coordinator cannot delete",
    "lines about it in records, reports and logs of training, which contain numbers but no models",
    "disk blocks of deleted files, until they are overwritten",
)


@dataclass(frozen=True)
class Deleted:
    """A deleted file, with its path in the federation's folder."""

    file: str
    num_bytes: int
    sha256: str


@dataclass(frozen=True)
class Averaged:
    """Rounds ``first`` to ``last`` of a run, averaged in one group of the silo and others."""

    run: str
    first: int
    last: int
    group: Sequence[str]


@dataclass(frozen=True)
class Withdrawal:
    """The plan of a withdrawal, and at the end its result.

    Attributes:
        silo, keys: its name, and the fingerprints of all keys that it was enrolled with.
        asked, done: ISO 8601, UTC; done is empty until it is complete.
        runs: where it took part.
        stopped: active runs that were stopped for it.
        deleted: files that held its models, updates or statistics.
        averaged: where its updates are part of other models.
        restart: incomplete run → last round before it joined that still has a checkpoint; 0: none.
    """

    silo: str
    keys: Sequence[str] = ()
    asked: str = ""
    done: str = ""
    asked_by: str = ""
    runs: Sequence[str] = ()
    stopped: Sequence[str] = ()
    deleted: Sequence[Deleted] = ()
    averaged: Sequence[Averaged] = ()
    restart: Mapping[str, int] = field(default_factory=dict)
    cannot: Sequence[str] = CANNOT


def verified(text: str | bytes, ca: bytes) -> Withdrawal:
    """Check and read a statement that a federation has signed; ``ca`` is its CA's PEM.

    Raises ``FederationError`` if it was changed, is not a statement, or has another CA, or ``ca``
    is something else.
    """
    try:
        kept = json.loads(text)
        statement, signature = kept["statement"], bytes.fromhex(kept["signature"])
        read = from_fields(statement)
    except (ValueError, KeyError, TypeError, RecursionError):
        raise refused(
            "this file is not a withdrawal statement: expected a file written by `coterie "
            "members erase`."
        ) from None
    try:
        is_signed = certificates.signed_by(ca, _canonical(statement), signature)
    except ValueError:
        raise refused(
            "the file named as the CA's certificate contains none: expected the federation's "
            "tls/ca.pem."
        ) from None
    if not is_signed:
        raise FederationError(
            "the statement was altered, or belongs to another federation: its signature is not "
            "from this CA.",
            exit_code=EXIT_NEGATIVE,
        )
    return read


def lines_of(done: Withdrawal) -> Iterator[str]:
    """Yield the lines of a readable statement."""
    yield f"Silo {done.silo} withdrew. Asked {done.asked} by {done.asked_by}, complete {done.done}."
    yield f"It took part in {counted(len(done.runs), 'run')}: {', '.join(done.runs) or 'none'}."
    total = sum(one.num_bytes for one in done.deleted)
    if done.stopped:
        yield f"Stopped because they contained its models: {', '.join(done.stopped)}."
    yield (
        f"Deleted: {counted(len(done.deleted), 'file')} with its models, updates or statistics, "
        f"{total:,} bytes."
    )
    for one in done.deleted:
        yield f"  {one.file}  SHA-256 {one.sha256[:16]}…"
    yield (
        "Deleted in the SuperLink's database: all messages of ended runs; the file was then "
        "rewritten."
    )
    if done.averaged:
        yield "Not deleted, because they contain its updates averaged with others':"
    for mean in done.averaged:
        rounds = f"{mean.first}" if mean.first == mean.last else f"{mean.first} to {mean.last}"
        others = ", ".join(name for name in mean.group if name != done.silo)
        yield f"  run {mean.run}, round {rounds}: models of {others}"
    for run, number in done.restart.items():
        yield (
            f"Run {run} can be resumed after round {number}, before it joined."
            if number
            else f"Run {run} has no checkpoint from before it joined: start it again."
        )
    yield "Also not deleted:"
    yield from (f"  {what}" for what in done.cannot)


def signed(made: Federation, work: Withdrawal) -> bytes:
    statement = asdict(work)
    signature = certificates.sign(made.tls, _canonical(statement)).hex()
    kept = {"statement": statement, "signature": signature, "ca": made.ca.read_text()}
    return json.dumps(kept, indent=1).encode()


def _canonical(statement: Mapping[str, Any]) -> bytes:
    text = json.dumps(statement, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return f"{KIND} 1\n{text}".encode()


def from_fields(fields: Mapping[str, Any]) -> Withdrawal:
    deleted = [Deleted(**one) for one in fields["deleted"]]
    averaged = [Averaged(**one) for one in fields["averaged"]]
    texts = {key: tuple(fields.get(key, ())) for key in ("cannot", "stopped")}
    known = {key: fields[key] for key in Withdrawal.__dataclass_fields__ if key in fields}
    return Withdrawal(**{**known, "deleted": deleted, "averaged": averaged, **texts})
