"""Compatibility of coterie's releases, and the choice of a protocol version.

A release talks with the ones before and after it, so that a federation can be upgraded one machine
at a time. The coordinator asks a new silo in its oldest protocol and states its newest; the silo
answers with the newest that both speak, which both then use.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from coterie.wire.names import NEWEST_PROTOCOL, OLDEST_PROTOCOL, PROTOCOL, PROTOCOL_KEY


def offer() -> dict[str, int]:
    """Return the protocols that the coordinator offers."""
    return {PROTOCOL_KEY: OLDEST_PROTOCOL, NEWEST_PROTOCOL: PROTOCOL}


def is_spoken(protocol: object) -> bool:
    """Return whether this release supports a protocol version."""
    return type(protocol) is int and OLDEST_PROTOCOL <= protocol <= PROTOCOL


def agreed(config: Mapping[str, Any]) -> int:
    """Return the protocol in which to answer a supported offer.

    The config of a message from an earlier release states only the protocol it uses.
    """
    asked = config.get(PROTOCOL_KEY, PROTOCOL)
    newest = config.get(NEWEST_PROTOCOL, asked)
    return min(PROTOCOL, newest) if type(newest) is int and newest >= asked else int(asked)


def numbers(release: str) -> tuple[int, int] | None:
    """Return the first two numbers of a release; None if it has another form."""
    found = re.match(r"(\d{1,6})\.(\d{1,6})(?!\d)", release)
    return None if found is None else (int(found[1]), int(found[2]))


def talk(one: str, other: str) -> bool:
    """Return whether two releases are compatible: their second numbers differ by at most one.

    A release of unknown form counts as compatible: its protocol decides.
    """
    first, second = numbers(one), numbers(other)
    if first is None or second is None:
        return True
    return first[0] == second[0] and abs(first[1] - second[1]) <= 1
