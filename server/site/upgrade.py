"""Checks whether this coordinator or its silos may be upgraded now, and in which order.

The release of a silo is known from the record of the last run in which it took part.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from coterie import wire
from coterie.server.runs.record import RECORD, reading
from coterie.server.site import enrolled
from coterie.server.site.federation import Federation
from coterie.strategies.errors import FederationError, refused
from coterie.strategies.rounds.admission import own_release
from coterie.system.files import held_by
from coterie.wire.releases import numbers

MAX_RUNS = 200
"""Limit on records that are read, the newest first."""


@dataclass(frozen=True)
class Known:
    """An enrolled silo.

    Attributes:
        release: of coterie in the last run that recorded it; empty if none did.
        seen: start of that run, ISO 8601; empty with the release.
        talks: whether that release is compatible with the target; None if not known.
    """

    name: str
    release: str = ""
    seen: str = ""
    talks: bool | None = None


@dataclass(frozen=True)
class Outlook:
    """The conditions of an upgrade of this coordinator from ``now`` to ``to``.

    ``silos`` are those enrolled now, by name; ``running`` are names of active runs.
    """

    now: str
    to: str
    silos: tuple[Known, ...]
    running: tuple[str, ...]

    @property
    def is_step(self) -> bool:
        """Whether the two releases are neighbours, or the same."""
        return wire.talk(self.now, self.to)

    @property
    def behind(self) -> list[Known]:
        """Silos that are incompatible with the target release."""
        return [silo for silo in self.silos if silo.talks is False]

    @property
    def unknown(self) -> list[Known]:
        """Silos whose compatibility is not known."""
        return [silo for silo in self.silos if silo.talks is None]

    @property
    def is_safe(self) -> bool:
        """Whether there is no known obstacle."""
        return self.is_step and not self.behind and not self.running


def look(federation: Federation, to: str = "") -> Outlook:
    """Return the conditions of an upgrade to ``to``, by default the installed release.

    Raises ``FederationError`` if ``to`` is not a release, or the roster cannot be read.
    """
    now = own_release()
    if numbers(to or now) is None:
        raise refused(
            f"{to or now!r} is not a release of coterie. Expected a release such as 0.2.0."
        )
    names = sorted(entry.name for entry in enrolled.read(federation.roster) if not entry.removed)
    seen = _last_seen(federation.runs, set(names))
    silos = []
    for name in names:
        release, when = seen.get(name, ("", ""))
        known = numbers(release) is not None
        silos.append(Known(name, release, when, wire.talk(release, to or now) if known else None))
    running = (one.name for one in _newest(federation.runs) if held_by(one) is not None)
    return Outlook(now, to or now, tuple(silos), tuple(running))


def lines(outlook: Outlook) -> Iterator[str]:
    """Yield a readable verdict with the steps to take."""
    newest = f"protocol {wire.OLDEST_PROTOCOL} to {wire.PROTOCOL}"
    yield f"This coordinator has coterie {outlook.now} ({newest}). Upgrade to: {outlook.to}."
    if not outlook.is_step:
        yield (
            f"Not safe: {outlook.now} and {outlook.to} are not consecutive. Each release works "
            "with the previous and the next one: upgrade in steps, silos and coordinator "
            "together."
        )
    for silo in outlook.behind:
        yield (
            f"Not safe: silo {silo.name} has {silo.release}, which does not work with "
            f"{outlook.to}. Upgrade it first, to a release between the two."
        )
    for run in outlook.running:
        yield (
            f"Not now: run {run} is active. Wait for its end, or stop it with `coterie runs stop "
            f"{run}` and continue afterwards with `coterie run resume {run}`."
        )
    if outlook.unknown:
        names = ", ".join(silo.name for silo in outlook.unknown)
        yield (
            f"Unknown: {names}. No recorded run names their release; run `coterie --version` there."
        )
    if outlook.is_safe:
        yield "Safe now, and silos may be upgraded one by one, before or after the coordinator:"
        yield "  1. Back up tls/, roster.json and coterie.toml."
        yield f"  2. Stop the coordinator, install {outlook.to}, start it."
        yield "  3. Each silo at any time before the next release: stop, install, start."


def _last_seen(runs: Path, names: set[str]) -> dict[str, tuple[str, str]]:
    """Return silo → its release and start of that run, from the newest records that have it."""
    found: dict[str, tuple[str, str]] = {}
    for folder in _newest(runs):
        if names <= found.keys():
            break
        try:
            run = reading.read_run(folder, brief=True)
        except FederationError:  # a damaged record tells nothing
            continue
        for name in names - found.keys():
            facts = run.silos.get(name)
            if facts is not None and facts.release:
                found[name] = wire.plain_text(facts.release), run.started
    return found


def _newest(runs: Path) -> list[Path]:
    files = sorted(runs.glob(f"*/{RECORD}"), key=lambda file: file.stat().st_mtime, reverse=True)
    return [file.parent for file in files[:MAX_RUNS]]
