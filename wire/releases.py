"""Which releases of coterie talk with each other, and in which version of the conversation.

A release talks with the one before it and the one after it, so that a federation is upgraded one
machine at a time. The coordinator asks a new silo in the oldest protocol that it speaks and says
which is its newest; the silo answers with the newest that both speak, and in that one they go on.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from coterie.wire.names import NEWEST_PROTOCOL, OLDEST_PROTOCOL, PROTOCOL, PROTOCOL_KEY


def offer() -> dict[str, int]:
    """What a coordinator says of the protocols that it speaks."""
    return {PROTOCOL_KEY: OLDEST_PROTOCOL, NEWEST_PROTOCOL: PROTOCOL}


def is_spoken(protocol: object) -> bool:
    """Whether this release speaks a version of the conversation."""
    return type(protocol) is int and OLDEST_PROTOCOL <= protocol <= PROTOCOL


def agreed(config: Mapping[str, Any]) -> int:
    """The protocol in which to answer an offer that is spoken here.

    Args:
        config: of a message; one of an earlier release says only in which it is.
    """
    asked = config.get(PROTOCOL_KEY, PROTOCOL)
    newest = config.get(NEWEST_PROTOCOL, asked)
    return min(PROTOCOL, newest) if type(newest) is int and newest >= asked else int(asked)


def numbers(release: str) -> tuple[int, int] | None:
    """The two numbers of a release that matter here; None: it does not say."""
    found = re.match(r"(\d{1,6})\.(\d{1,6})(?!\d)", release)
    return None if found is None else (int(found[1]), int(found[2]))


def talk(one: str, other: str) -> bool:
    """Whether two releases do: their second numbers differ by one at most.

    Of one that does not say what it is nothing is held against it: its protocol decides.
    """
    first, second = numbers(one), numbers(other)
    if first is None or second is None:
        return True
    return first[0] == second[0] and abs(first[1] - second[1]) <= 1
