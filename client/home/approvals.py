"""Runs that wait until a person at the silo has approved them (``approve = "ask"`` in silo.toml).

A run announces itself before it joins (``query.describe``). The silo stores the announcement,
replies that it waits, and answers nothing else from that run until `coterie silo approve RUN`. The
approval covers the run's name and a digest of the whole announcement: a run that announces
something different waits again, and work that differs from the announcement is refused. Each run is
a file in ``approvals/``, replaced atomically.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

from coterie import wire
from coterie.client.home import hours
from coterie.client.home.policy import Policy
from coterie.client.home.settings import SettingsError, SiloSettings
from coterie.system.files import LockedError, locked, make_folder, sync, write_atomically
from coterie.system.processes import account, utc_now

log = logging.getLogger("coterie.silo")

FOLDER, LOCK = "approvals", "lock"
LOCK_DEADLINE_S = 10.0
MAX_WAITING = 100
"""The most runs that may wait at one silo: a coordinator must not fill its disk."""
MAX_TERMS, MAX_VALUE, MAX_SUMS = 200, 1000, 50_000
"""Most entries of a run's description, and most characters of one, and of that of sums."""
CODE = 8
"""Characters of a digest that a person compares."""
OUTSIDE_TERMS = (
    *(wire.SCHEMA, wire.SCHEMA_PARTS, wire.RUN, wire.OF_RUN),
    *(wire.PROTOCOL_KEY, wire.NEWEST_PROTOCOL, wire.BUNDLES, wire.HOSTED),
)
"""Entries outside a run's terms: its name, entries for misfit silos, and how messages travel."""
KEPT = (wire.TASK, wire.STRATEGY, wire.ROUNDS, wire.PERSONAL, wire.SUMS_OF, wire.ALSO_ALONE)
KEPT_KEYS = (wire.TASK_KEYS, wire.GIVEN_HASH)
"""Entries that every training of a run must have as announced, by name or its beginning. Values
that vary within a run, such as its steps, are bounded by [limits]."""

State = Literal["waits", "approved", "refused"]
Value = str | int | float | bool


class Later(NamedTuple):
    """The reason for not answering a message now, and the error code; empty if it is answered."""

    why: str = ""
    code: int = wire.REFUSED


@dataclass(frozen=True)
class Approval:
    """A run as it announced itself, and the decision of a person at the silo.

    Attributes:
        terms: the run's announcement.
        asked, decided: ISO 8601, UTC.
        by: account of the person who decided.
        flower_run: the SuperLink's number of the run, which changes when the run is resumed.
        over: when the silo noticed that the run had ended, ISO 8601, UTC. It may be resumed.
    """

    run: str
    terms: Mapping[str, Value] = field(default_factory=dict)
    state: State = "waits"
    asked: str = ""
    decided: str = ""
    by: str = ""
    flower_run: str = ""
    over: str = ""

    @property
    def digest(self) -> str:
        """The SHA-256 of name and terms, hexadecimal, independent of who resumes the run."""
        terms = {key: value for key, value in self.terms.items() if key != wire.ASKED_BY}
        said = json.dumps([self.run, sorted(terms.items())], ensure_ascii=True)
        return hashlib.sha256(said.encode()).hexdigest()

    @property
    def code(self) -> str:
        """The digest's first characters, for a person."""
        return self.digest[:CODE]


def not_now(
    settings: SiloSettings,
    kind: str,
    config: Mapping[str, Any],
    flower_run: str,
    *,
    terms: Mapping[str, Any] | None = None,
    begun: bool = False,
) -> Later:
    """Return why a message waits for a person or the silo's hours, or differs from the approval.

    A run that announces itself is stored at any hour. ``flower_run``, the SuperLink's number,
    identifies a run without a name; ``terms`` are the run's if they come from a source outside its
    messages. ``begun`` is as in ``hours.objection``.
    """
    later = Later()
    if settings.policy.approve and kind != wire.INITIAL:  # in that there is nothing of the silo's
        name = str(config.get(wire.RUN) or config.get(wire.OF_RUN) or f"flower-{flower_run}")
        later = _unapproved(settings, kind, name, config, flower_run, terms)
    if later.why:
        return later
    closed = hours.objection(kind, settings.policy.hours, settings.policy.days, begun=begun)
    return Later(closed, wire.CLOSED) if closed else Later()


def _unapproved(
    settings: SiloSettings,
    kind: str,
    name: str,
    config: Mapping[str, Any],
    flower_run: str,
    terms: Mapping[str, Any] | None,
) -> Later:
    if not wire.is_plain_name(name):
        return Later("asks its approvers about runs, and cannot show them this run's name.")
    home = Path(settings.home)
    try:
        known = find(home, name)
        if kind == wire.DESCRIBE or terms is not None or known is None:
            whole = kind == wire.DESCRIBE or terms is not None
            said = _terms(config if terms is None else terms, whole=whole)
            announced = Approval(name, said, asked=utc_now(), flower_run=flower_run)
            if known is None or known.digest != announced.digest:
                known = _ask(home, announced, changed=known is not None)
        if known.over or known.flower_run != flower_run:
            known = _goes_on(home, known, flower_run)
    except ApprovalError as error:
        return Later(str(error))
    if known.state == "refused":
        return Later("refuses this run: an approver refused it.")
    if known.state == "waits":
        return Later(
            f"waits for an approver: `coterie silo pending` there lists run {name}.",
            wire.UNAPPROVED,
        )
    return Later(_difference(kind, config, known.terms) if terms is None else "")


class ApprovalError(SettingsError):
    """A run cannot be put to a person, or a decision cannot be made."""


def _terms(config: Mapping[str, Any], *, whole: bool) -> dict[str, Value]:
    """Return a run's announcement; of a message with work, only the entries that must match it."""
    said = {
        key: value
        for key, value in config.items()
        if key not in OUTSIDE_TERMS
        and (whole or key in (*KEPT, wire.SECURE) or key.startswith(KEPT_KEYS))
    }
    for key, value in said.items():
        most = MAX_SUMS if key == wire.SUMS_OF else MAX_VALUE  # it may name many columns
        if type(value) not in (str, int, float, bool) or len(f"{key}{value}") > most:
            raise ApprovalError(
                "asks its approvers about runs, and cannot show them this one: its "
                f"{wire.plain_text(key, wire.MAX_WORD)} is not a number or a short text."
            )
    if len(said) > MAX_TERMS:
        raise ApprovalError(
            f"asks its approvers about runs, and this one announces {len(said)} entries, more "
            f"than {MAX_TERMS}."
        )
    return said


def _difference(kind: str, config: Mapping[str, Any], terms: Mapping[str, Value]) -> str:
    """Return how work differs from the approved terms; empty if it matches."""
    trains = kind.startswith(wire.TRAIN) and kind != wire.MASKED_SUM
    shared = {k for k in (*config, *terms) if k in KEPT or k.startswith(KEPT_KEYS)}
    for key in sorted(shared):
        stated = trains or key in config or key == wire.STRATEGY  # it decides what is answered
        if stated and config.get(key, "") != terms.get(key, ""):
            return (
                f"approved this run with {key} = {terms.get(key, '')!r}, and this message asks "
                f"for {wire.plain_text(repr(config.get(key, '')), wire.MAX_WORD)}."
            )
    if kind == wire.LABEL_COUNTS and not terms.get(wire.ASKS_LABEL_COUNTS):
        return "approved a run without label counts, and this message asks for them."
    alone = wire.SUMS_OF in terms and config.get(wire.GROUP_SIZE) == 1
    if alone and not (terms.get(wire.ALSO_ALONE) or wire.PARENT in terms):
        return "approved models of several silos, and this message asks for one of this silo alone."
    hidden = wire.kind_of(kind).hidden
    if terms.get(wire.SECURE) and hidden and config.get(wire.SECURE) is not True:
        return "approved a secure run, and this message asks for a plain update, or plain sums."
    rounds = terms.get(wire.ROUNDS)
    if trains and rounds and wire.whole(config.get(wire.ROUND)) > int(rounds):
        return f"approved {rounds} rounds, and this message is for round {config.get(wire.ROUND)}."
    return ""


# ---------------------------------------------------------------- files


def find(home: Path, run: str) -> Approval | None:
    """Return the stored approval of a run, or None.

    Raises:
        ApprovalError: its file is damaged.
    """
    file = _file(home, run)
    try:
        found = _read(file)
    except FileNotFoundError:
        return None
    return found if found.run == run else None


def read_all(home: Path) -> list[Approval]:
    """Return every run that asked, oldest first.

    Raises:
        ApprovalError: a file is damaged.
    """
    found = [_read(file) for file in (home / FOLDER).glob("*.json")]
    return sorted(found, key=lambda one: (one.asked, one.run))


def waiting_in(home: Path) -> list[Approval]:
    """Return the undecided runs, oldest first; raises as ``read_all``."""
    return [one for one in read_all(home) if one.state == "waits" and not one.over]


def settle(home: Path, is_over: Callable[[str], bool]) -> None:
    """Mark ended runs as over, and delete those that were never decided.

    ``is_over`` returns whether the run with a SuperLink number has ended.

    Raises:
        ApprovalError: a file is damaged, or the lock stays taken for too long.
        OSError: nothing can be written.
    """
    for one in read_all(home):
        if one.over or not one.flower_run.strip("0") or not is_over(one.flower_run):
            continue
        with _held(home):
            now = find(home, one.run)
            if now is None or now.flower_run != one.flower_run:
                continue  # it was resumed meanwhile
            if now.state == "waits":
                _file(home, now.run).unlink(missing_ok=True)
                sync(home / FOLDER)
                log.info("run %s has ended without approval", wire.plain_text(now.run, 80))
            else:
                _write(home, replace(now, over=utc_now()))


def decide(home: Path, run: str, state: State, *, code: str = "") -> Approval:
    """Approve or refuse a run as last announced.

    ``code`` is the beginning of the digest that the person has seen; empty skips the check.

    Raises:
        ApprovalError: no such run has asked, or its announcement has changed since.
    """
    with _held(home):
        known = find(home, run)
        if known is None:
            waiting = [one.run for one in waiting_in(home)]
            raise ApprovalError(
                f"no run {run!r} is known here. Waiting: {', '.join(waiting) or 'none'}."
            )
        if code and not (len(code) >= CODE and known.digest.startswith(code)):
            raise ApprovalError(
                f"run {run} has changed its settings since: its code is {known.code}, not "
                f"{code}. Look at it again with `coterie silo pending`."
            )
        if known.over and state == "approved":
            raise ApprovalError(
                f"run {run} has ended. If it is resumed, it must be approved again."
            )
        decided = replace(known, state=state, decided=utc_now(), by=account())
        _write(home, decided)
        return decided


def _ask(home: Path, announced: Approval, *, changed: bool) -> Approval:
    with _held(home):
        waiting = waiting_in(home)
        others = [one for one in waiting if one.run != announced.run]
        if len(others) >= MAX_WAITING:
            raise ApprovalError(
                f"has {len(others)} runs that wait for approval already, and accepts no more."
            )
        _write(home, announced)
    name = wire.plain_text(announced.run, wire.MAX_WORD)
    what = "has changed its settings and waits" if changed else "waits"
    log.warning("run %s %s for your approval: coterie silo approve %s", name, what, name)
    return announced


def _goes_on(home: Path, known: Approval, flower_run: str) -> Approval:
    with _held(home):
        now = find(home, known.run) or known
        noted = replace(now, flower_run=flower_run, over="")
        _write(home, noted)
    return noted


@contextmanager
def _held(home: Path) -> Iterator[None]:
    make_folder(home / FOLDER, private=True)
    try:
        with locked(home / FOLDER, name=LOCK, deadline_s=LOCK_DEADLINE_S):
            yield
    except LockedError as error:
        raise ApprovalError(f"approvals cannot be changed now: {error}.") from None


def _file(home: Path, run: str) -> Path:
    """Hash the name, which the coordinator chooses: it must not escape the folder."""
    return home / FOLDER / f"{hashlib.sha256(run.encode(errors='replace')).hexdigest()[:32]}.json"


def _write(home: Path, one: Approval) -> None:
    write_atomically(_file(home, one.run), json.dumps(asdict(one), indent=1).encode(), private=True)


def _read(file: Path) -> Approval:
    try:
        found = Approval(**json.loads(file.read_bytes()))
        if found.state in ("waits", "approved", "refused") and isinstance(found.terms, dict):
            return found
    except FileNotFoundError:
        raise
    except (OSError, ValueError, TypeError):
        pass
    raise ApprovalError(
        f"cannot read {file.name} in its folder {FOLDER}/. Remove that file at the silo: the "
        "run then waits for approval again."
    )


# ---------------------------------------------------------------- for people


def leaving(
    terms: Mapping[str, Value],
    policy: Policy,
    columns: Sequence[str] = (),
    targets: Sequence[str] = (),
) -> Iterator[str]:
    """Yield what a run with these terms would take from this silo, one line each.

    ``columns`` and ``targets`` are those of the run's task, if it declares them.
    """
    itself = "the silo's name and description: `coterie silo check` lists them"
    if terms.get(wire.STRATEGY) == wire.ONLY_STATISTICS:
        counted = " and ".join(one for one in policy.statistics if one != "model")
        yield (
            f"how many training samples are in each interval or category of {counted}, no "
            f"number below {policy.statistics_from}"
            if counted
            else "no counts of its data: silo.toml allows none"
        )
        if policy.of_model:
            yield "what `coterie silo watch-model` last found about the model in use"
        yield itself
        return
    metrics = (
        "all that the run needs"
        if policy.share_metrics is None
        else ", ".join(policy.share_metrics) or "none"
    )
    if (family := terms.get(wire.STRATEGY)) in wire.BY_SUMS:
        if family in policy.sums:
            seen = (
                "are only added to other silos'"
                if terms.get(wire.SECURE)
                else "the coordinator sees"
            )
            of = wire.asked_sums(terms.get(wire.SUMS_OF, ""), columns, targets)
            yield f"sums over its training rows, which {seen}, for this model: {of}"
            yield from _together(terms)
        else:
            yield f"no sums for a {family}: silo.toml allows none"
        yield itself
        return
    if terms.get(wire.STRATEGY) == wire.ONLY_EVALUATION:
        of = f"the models of {parent}" if (parent := _parent(terms)) else "given models"
        yield f"how many test samples it has, and metrics of {of} on them: {metrics}"
        if policy.subgroups:
            yield (
                f"the same by {', '.join(policy.subgroups)}, of no fewer than "
                f"{policy.statistics_from} samples"
            )
        yield itself
        return
    kept = wire.personal_layers(terms)
    yield _of_training(terms, policy, f", less the layers {kept!r}" if kept else "")
    if terms.get(wire.STRATEGY) == wire.CONTRIBUTION:
        yield (
            "its updates to its group without each other silo in turn, and without two; the silos "
            "of the group can compute its updates"
        )
    if terms.get(wire.STRATEGY) in ("fedcollab", "auto") and policy.auxiliary:
        yield "discriminators trained on its data, which reveal its labels"
    if terms.get(wire.ASKS_LABEL_COUNTS):
        yield "how many training samples of each label it has"
    if policy.column_sums:
        yield (
            "count, mean and deviation of numeric columns and real targets, if its task scales by "
            "the federation"
        )
    yield f"how many samples it has, and metrics: {metrics}"
    yield itself


def _together(terms: Mapping[str, Value]) -> Iterator[str]:
    """Yield with which other silos the sums are added."""
    if parent := _parent(terms):
        yield f"a model of this silo's group in {parent}, or of this silo alone if it has none"
    if terms.get(wire.ALSO_ALONE):
        yield "also a model of this silo alone"


def _parent(terms: Mapping[str, Value]) -> str:
    """Return the run that this one begins from, escaped; empty if it begins from none."""
    return wire.plain_text(terms.get(wire.PARENT, ""), wire.MAX_WORD)


def _of_training(terms: Mapping[str, Value], policy: Policy, less: str) -> str:
    """Return what each round takes, besides figures."""
    rows = f"sums over its rows by column and bin, over no fewer than {policy.statistics_from}"
    if terms.get(wire.STRATEGY) == wire.TREES:
        masked = "seen only added to other silos'"
        return f"{rows}, {masked if terms.get(wire.SECURE) else 'which the coordinator sees'}"
    if terms.get(wire.SECURE):
        return f"sketches of its updates, and its part of sums over groups{less}"
    if terms.get(wire.STRATEGY) == "auto" and wire.TREES in policy.sums:
        seen = "; the coordinator sees both"
        return f"its update in each round{less}, or for boosted trees {rows}{seen}"
    return f"its update in each round, which the coordinator sees{less}"
