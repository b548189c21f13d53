"""A list of those whose keys are accepted, in one JSON file that one process changes at a time.

A removed key stays in the list: it is never accepted again.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar

from coterie.strategies.errors import refused
from coterie.system.files import LockedError, locked, write_atomically
from coterie.wire.enrolment import fingerprint_of_key

LOCK_DEADLINE_S = 60.0
"""Time limit of one change of a list, including calls to the SuperLink."""


@dataclass(frozen=True)
class Keyed:
    """Somebody who is, or was, enrolled; ``name`` is bound to ``key`` (public, PEM).

    ``enrolled`` and ``removed`` are ISO 8601, UTC; ``removed`` is empty while enrolled.
    """

    name: str
    key: str
    enrolled: str
    removed: str = ""

    @property
    def fingerprint(self) -> str:
        return fingerprint_of_key(self.key.encode())


Kept = TypeVar("Kept", bound=Keyed)


@dataclass(frozen=True)
class Register(Generic[Kept]):
    """The list in a file.

    Attributes:
        kind: the class of its entries.
        called: what an entry is called, for people.
    """

    file: Path
    kind: type[Kept]
    called: str

    def read(self) -> list[Kept]:
        """Return all entries by name, including removed ones.

        Raises ``FederationError`` if the file is damaged.
        """
        try:
            found = [self.kind(**one) for one in json.loads(self.file.read_text(encoding="utf-8"))]
        except FileNotFoundError:
            return []
        except (OSError, ValueError, TypeError) as error:
            raise refused(
                f"{self.file} cannot be read: {error}. Restore it from a backup."
            ) from None
        return sorted(found, key=lambda one: (one.name, one.enrolled))

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Allow one writer at a time; the lock ends with its process.

        Raises ``FederationError`` if another process holds it for longer than the deadline.
        """
        name = f"{self.file.stem}.lock"
        try:
            with locked(self.file.parent, name=name, deadline_s=LOCK_DEADLINE_S):
                yield
        except LockedError as error:
            raise refused(
                f"{self.file} cannot be changed: another command has been changing it for more "
                f"than {LOCK_DEADLINE_S:.0f} s ({error}). Stop that process, and try again."
            ) from None

    @contextmanager
    def changing(self) -> Iterator[list[Kept]]:
        """Yield the entries; write them when the block ends without an error."""
        with self.locked():
            entries = self.read()
            before = list(entries)
            yield entries
            if entries != before:
                content = json.dumps([asdict(one) for one in entries], indent=1)
                write_atomically(self.file, content.encode())

    def change(self, name: str, **changes: Any) -> Kept:
        """Change an enrolled entry. Raises ``FederationError`` if none has this name."""
        with self.changing() as entries:
            here = [i for i, one in enumerate(entries) if one.name == name and not one.removed]
            if not here:
                known = ", ".join(one.name for one in entries if not one.removed) or "none"
                raise refused(f"no {self.called} {name!r} is enrolled. Enrolled: {known}.")
            entries[here[0]] = changed = replace(entries[here[0]], **changes)
        return changed
