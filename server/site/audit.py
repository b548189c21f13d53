"""The audit log: ``audit.jsonl`` in the federation's folder, a hash chain with one act per line.

Each line has the SHA-256 of the line before it, so a changed, removed or moved line breaks the
chain. ``audit.head``, signed by the federation's CA, has the number of lines and the hash of the
last one, so truncation shows too. Every federation's log begins when it is made, so an empty one
was removed. A line is on disk before its act; then the head is written. A kill in between leaves
part of a line, which is noted, or one line more than the head covers. Anyone could have added that
line, so it is a finding until the next act, which signs it and names it.

Not detectable here: another history written with the CA's key, or an older log restored together
with its head. A head noted elsewhere helps against both (``coterie federation audit`` prints it,
``--verify --head`` checks it).
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from datetime import datetime

from coterie.server.site import certificates
from coterie.server.site.federation import Federation
from coterie.strategies.errors import refused
from coterie.system.files import LockedError, append_line, locked, write_atomically
from coterie.system.processes import account, utc_now

AUDIT, HEAD, LOCK = "audit.jsonl", "audit.head", "audit.lock"
LOCK_DEADLINE_S = 60.0
NOTHING = "0" * 64
"""The previous hash of the first line."""
MAX_TEXT = 2000
"""Most characters of one fact about an act."""


@dataclass(frozen=True)
class Act:
    """A line of the log; lines are numbered from 1.

    Attributes:
        at: ISO 8601, UTC.
        who: operator's name, or the account on the coordinator's machine.
        about: what it concerned.
        before: SHA-256 of the line before, hexadecimal.
        mended: what was wrong with the log when this line was written, if anything.
        torn: bytes of a line before this one that a crash cut off.
        adopted: number of a line that the head lacked when this one was written; 0: none.
    """

    number: int
    at: str
    who: str
    act: str
    about: Mapping[str, str] = field(default_factory=dict)
    before: str = NOTHING
    mended: str = ""
    torn: int = 0
    adopted: int = 0


@dataclass(frozen=True)
class Log:
    """The log as it was read.

    Attributes:
        findings: evidence of tampering, one sentence each.
        notes: traces of crashes.
        torn: bytes of incomplete lines at the end.
    """

    acts: list[Act]
    hashes: list[str]
    findings: list[str]
    notes: list[str]
    torn: int = 0

    def hash_of(self, number: int) -> str:
        """Return the hash of line ``number``; 0 is the start of the chain."""
        return self.hashes[number - 1] if number else NOTHING

    @property
    def last(self) -> str:
        return self.hash_of(len(self.hashes))

    @property
    def head(self) -> str:
        """The number of lines and the hash of the last, to note elsewhere."""
        return f"{len(self.acts)}:{self.last}"


def note(made: Federation, act: str, *, who: str = "", **about: object) -> None:
    """Write an act into the log, and to disk, before it is done.

    ``who`` is the operator; if empty, the account of this process. ``about`` are facts, as text.

    Raises ``FederationError`` if the log cannot be written; then the act must not be done.
    """
    try:
        with locked(made.folder, name=LOCK, deadline_s=LOCK_DEADLINE_S):
            log = _read(made)
            problem, adopted = _difference(made, log), 0
            if not problem and _num_signed(made) < len(log.acts):  # a kill came between the two
                adopted = len(log.acts)
                _write_head(made, adopted, log.last)
            line = Act(
                number=len(log.acts) + 1,
                at=utc_now(),
                who=who or account(),
                act=act,
                about={key: str(value)[:MAX_TEXT] for key, value in about.items()},
                before=log.last,
                mended=problem,
                torn=log.torn,
                adopted=adopted,
            )
            content = json.dumps(asdict(line), ensure_ascii=True).encode()
            append_line(made.folder / AUDIT, content, synced=True)
            _write_head(made, line.number, _hash(content))
    except (OSError, LockedError) as error:
        raise refused(
            f"the action could not be written to {made.folder / AUDIT}, so it was not done: {error}"
        ) from None


@contextmanager
def acting(made: Federation, act: str, *, who: str = "", **about: object) -> Iterator[None]:
    """Log an act before the block does it, and once more if the block fails."""
    note(made, act, who=who, **about)
    try:
        yield
    except Exception as error:
        note(made, f"{act} failed", who=who, **about, why=error)
        raise


def verify(made: Federation, *, head: str = "") -> Log:
    """Read the log and check its integrity; a noted ``head`` must be in the history.

    Raises ``FederationError`` if the head is not ``NUMBER:HASH``.
    """
    log = _read(made)
    log.notes.extend(
        f"line {a.adopted} was written, but audit.head was not updated until the next action: by a "
        "crash, or because someone added the line by hand."
        for a in log.acts
        if a.adopted
    )
    findings = [*log.findings, *(f"line {a.number}: {a.mended}" for a in log.acts if a.mended)]
    if problem := _difference(made, log):
        findings.append(problem)
    elif not log.acts:
        findings.append("the log is empty: it was removed, since `init` writes its first line.")
    elif _num_signed(made) < len(log.acts):
        findings.append(
            f"line {len(log.acts)} is not in audit.head: a crash came between the two, or someone "
            "added the line by hand. If nobody knows of this action, it did not happen."
        )
    if head and not _contains(log, head):
        findings.append(f"the history does not contain the noted head {head}.")
    return replace(log, findings=findings)


def who_started(made: Federation, run_id: int) -> str:
    """Return the operator who started a run, from the log; empty if it is not there."""
    acts = _read(made).acts
    found = [a.who for a in acts if a.act == BEGUN and a.about.get("run") == str(run_id)]
    return found[-1] if found else ""


BEGUN = "run begun"
"""The act that records the number of a started run."""


# ---------------------------------------------------------------- the files


def _read(made: Federation) -> Log:
    try:
        content = (made.folder / AUDIT).read_bytes()
    except FileNotFoundError:
        content = b""
    lines = content.split(b"\n")  # the last is empty, unless a crash cut it off
    log, torn = Log([], [], [], []), 0
    for line in lines:
        act = _parse(line)
        if act is None:  # of a crash, if the next line or the head says so
            torn += len(line)
            continue
        if torn and act.torn == torn:
            log.notes.append(f"before line {act.number}, a crash truncated a line to {torn} bytes.")
        elif torn:
            log.findings.append(f"before line {act.number}, {torn} bytes are not a valid line.")
        if act.number != len(log.acts) + 1 or act.before != log.last:
            log.findings.append(
                f"line {act.number} does not follow from the one before it: lines there were "
                "changed, removed, added or reordered."
            )
        log.acts.append(act)
        log.hashes.append(_hash(line))
        torn = 0
    if torn:
        log.notes.append(f"a crash truncated the last line to {torn} bytes.")
    return replace(log, torn=torn)


def _parse(line: bytes) -> Act | None:
    try:
        act = Act(**json.loads(line))
        datetime.fromisoformat(act.at)
        numbers = (act.number, act.torn, act.adopted)
        texts = (act.who, act.act, *act.about.values())
        fits = all(type(n) is int for n in numbers) and all(isinstance(t, str) for t in texts)
        return act if fits else None
    except (ValueError, TypeError, AttributeError, RecursionError):
        return None


def _difference(made: Federation, log: Log) -> str:
    """Return a mismatch between the head and the log's end; empty if there is none."""
    try:
        count, last, signed = _head(made)
    except FileNotFoundError:
        # Before the first head only the first line can be there.
        return "" if len(log.acts) <= 1 else "audit.head was removed."
    except (OSError, ValueError, KeyError, TypeError):
        return "audit.head cannot be read."
    if not signed:
        return "audit.head was changed: its signature is not the federation's."
    if not 0 <= count <= len(log.acts) or log.hash_of(count) != last:
        return (
            f"audit.head has {count} lines, the last with hash {last[:16]}…; the log has "
            f"{len(log.acts)} and a different end: lines were changed, or truncated at its end."
        )
    if len(log.acts) > count + 1:
        return f"audit.head has {count} lines, the log {len(log.acts)}: lines were added."
    return ""


def _num_signed(made: Federation) -> int:
    """Return the number of lines that a readable head covers; 0 without one."""
    return _head(made)[0] if (made.folder / HEAD).exists() else 0


def _head(made: Federation) -> tuple[int, str, bool]:
    """Return the number of lines, the last hash, and whether the federation's CA signed them."""
    head = json.loads((made.folder / HEAD).read_bytes())
    count, last, signature = int(head["lines"]), str(head["hash"]), bytes.fromhex(head["signature"])
    return count, last, certificates.signed(made.tls, _signed(count, last), signature)


def _write_head(made: Federation, count: int, last: str) -> None:
    signature = certificates.sign(made.tls, _signed(count, last)).hex()
    head = {"lines": count, "hash": last, "signature": signature}
    write_atomically(made.folder / HEAD, json.dumps(head, indent=1).encode())


def _contains(log: Log, head: str) -> bool:
    number, _, digest = head.partition(":")
    if not number.isdecimal() or len(digest) != 64:
        raise refused(
            f"a head must be NUMBER:HASH, as `coterie federation audit` prints it. Got {head!r}."
        )
    return int(number) <= len(log.acts) and log.hash_of(int(number)) == digest


def _signed(count: int, last: str) -> bytes:
    return f"coterie-audit {count} {last}".encode()


def _hash(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()
