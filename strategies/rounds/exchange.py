"""One exchange with the silos: push, then pull with a short, growing pause, until a deadline.

Replies become harmless here: one that cannot be read, or is too large, becomes an error reply of
its silo; reasons become one plain line.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol, runtime_checkable

from flwr.app import Error, Message
from flwr.serverapp import Grid

from coterie import wire

log = logging.getLogger("coterie.run")

PAUSE_SHARE = 0.02
"""The pause between two pulls, as a share of the time waited so far: a round of a second is
answered within 20 ms, and a round of an hour costs the SuperLink next to nothing."""
SILENT_S = 60.0
"""Seconds that a SuperLink waits for a silo's heartbeat: twice the interval that silos announce."""
MIN_PAUSE_S, MAX_PAUSE_S = 0.005, 1.0
PULL_SHARE = 0.25
"""Largest share of the time spent on pulls that return nothing: asking for a thousand messages
takes capacity that the SuperLink needs to forward them."""

BY_SUPERLINK = {
    3: "it took too long, or was removed: the SuperLink has deleted what it was sent.",
    4: "its reply came too late: the SuperLink has deleted it.",
    5: f"it has not been in contact for {SILENT_S:.0f} s.",
}
BY_SUPERNODE = {
    0: "it answered with an error",
    1: "it cannot load its app",
    2: "it failed in its app",
    6: "it lacks something that a mod of its app needs",
    7: "it does not accept the run's app",
    8: "it lost its app before it answered",
}
"""The meanings of Flower's error codes: those that its SuperLink sets for a silo, without details
(``BY_SUPERLINK``), and those from a SuperNode, with its reason."""


@runtime_checkable
class Holding(Protocol):
    """A Grid whose pulls wait for a moment if there is nothing."""

    def holds(self, count: int) -> bool:
        """Return whether a pull for this many replies waits."""


def exchange(
    grid: Grid,
    messages: Sequence[Message],
    *,
    deadline_s: float,
    seconds: dict[int, float] | None = None,
) -> list[Message | None]:
    """Send messages and collect their replies.

    Args:
        messages: each with its destination.
        deadline_s: seconds after which missing replies are given up. Flower answers for a silo that
            is gone, with an error reply, after about a minute.
        seconds: filled with node → seconds until its last reply came or was given up.

    Returns:
        One entry per message, in order: the reply, possibly an error, or None if none came. Replies
        to older messages are left out.
    """
    if not messages:
        return []
    ids: list[str | None] = list(grid.push_messages(list(messages)))
    ids += [None] * (len(messages) - len(ids))  # what Flower gives for messages that are too large
    asked = {message_id: m for message_id, m in zip(ids, messages, strict=True) if message_id}
    replies: dict[str, Message] = {}
    waiting = set(asked)
    started = time.monotonic()
    while waiting:
        pulled_at, before = time.monotonic(), len(waiting)
        for reply in _pull(grid, {name: asked[name] for name in sorted(waiting)}):
            message_id = reply.metadata.reply_to_message_id
            if message_id in waiting:
                waiting.discard(message_id)
                replies[message_id] = admit(reply, asked[message_id])
                if seconds is not None:
                    seconds[asked[message_id].metadata.dst_node_id] = time.monotonic() - started
        waited = time.monotonic() - started
        if not waiting or waited >= deadline_s:
            break
        in_vain = time.monotonic() - pulled_at if len(waiting) == before else 0.0
        pause = max(PAUSE_SHARE * waited, MIN_PAUSE_S, in_vain / PULL_SHARE)
        if isinstance(grid, Holding) and grid.holds(len(waiting)):
            pause = MIN_PAUSE_S  # it waits itself, until there is more
        time.sleep(min(pause, MAX_PAUSE_S, deadline_s - waited))
    if seconds is not None:
        for message_id in waiting:
            seconds[asked[message_id].metadata.dst_node_id] = waited
    if waiting:
        log.warning(
            "%d of %d replies did not arrive within %.0f s", len(waiting), len(ids), deadline_s
        )
    return [replies.get(message_id or "") for message_id in ids]


def _pull(grid: Grid, asked: Mapping[str, Message]) -> Iterator[Message]:
    """Yield the replies that are there, one by one if Flower cannot read one of them."""
    try:
        yield from list(grid.pull_messages(list(asked)))
    except Exception as error:
        log.warning("fetching replies one by one: %s", wire.plain_text(error))
        for message_id, message in asked.items():
            try:
                yield from list(grid.pull_messages([message_id]))
            except Exception as broken:
                yield _unreadable(message, wire.plain_text(broken))


def admit(reply: Message, message: Message) -> Message:
    """Return the reply, or an error reply in its place if its content cannot be used."""
    try:
        if reply.has_error():
            code = int(reply.error.code)
            reply.error = Error(code, wire.plain_text(_why(code, reply.error.reason or "")))
            return reply
        most = wire.most_bytes(message.metadata.message_type, wire.num_array_bytes(message.content))
        objection = wire.content_objection(reply.content, max_bytes=most)
    except Exception as error:  # made of what came from elsewhere: of any kind
        objection = wire.plain_text(error)
    return _unreadable(message, objection) if objection else reply


def _why(code: int, reason: str) -> str:
    if code in BY_SUPERLINK:
        return BY_SUPERLINK[code]
    if code in BY_SUPERNODE:
        return f"{BY_SUPERNODE[code]}: {reason}" if reason else f"{BY_SUPERNODE[code]}."
    return reason or "it answered with an error."


def _unreadable(message: Message, why: str) -> Message:
    return Message(Error(wire.UNREADABLE, f"its reply cannot be read: {why}"), reply_to=message)
