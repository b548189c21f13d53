"""One exchange with the silos: push, then pull with a short, growing pause, until a deadline."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

from flwr.app import Message
from flwr.serverapp import Grid

log = logging.getLogger("coterie.run")

PAUSE_SHARE = 0.02
"""The pause between two pulls, as a share of the time waited so far: a round of a second is
answered within 20 ms, a round of an hour costs the SuperLink next to nothing."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.005, 1.0
PULL_SHARE = 0.25
"""Most of the time that may go into pulls which bring nothing: asking after a thousand messages
costs the SuperLink what it needs to pass them on."""


def exchange(grid: Grid, messages: Sequence[Message], *, deadline_s: float) -> list[Message | None]:
    """Send messages and collect their replies.

    Args:
        grid: any Flower Grid.
        messages: each with its destination.
        deadline_s: seconds after which what has not come is given up. A silo that is gone is
            answered for by Flower, with an error reply, after about a minute.

    Returns:
        One entry per message, in order: the reply, possibly an error, or None if none came.
        Replies to older messages are not among them.
    """
    if not messages:
        return []
    ids = list(grid.push_messages(list(messages)))
    position = {message_id: i for i, message_id in enumerate(ids) if message_id}
    replies: list[Message | None] = [None] * len(messages)
    waiting = set(position)
    started = time.monotonic()
    while waiting:
        asked, before = time.monotonic(), len(waiting)
        for reply in grid.pull_messages(sorted(waiting)):
            message_id = reply.metadata.reply_to_message_id
            if message_id in waiting:
                waiting.discard(message_id)
                replies[position[message_id]] = reply
        waited = time.monotonic() - started
        if not waiting or waited >= deadline_s:
            break
        in_vain = time.monotonic() - asked if len(waiting) == before else 0.0
        pause = max(PAUSE_SHARE * waited, MIN_PAUSE_S, in_vain / PULL_SHARE)
        time.sleep(min(pause, MAX_PAUSE_S, deadline_s - waited))
    if waiting:
        log.warning("%d of %d replies did not come in %.0f s", len(waiting), len(ids), deadline_s)
    return replies
