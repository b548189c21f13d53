"""One exchange with the silos: push, then pull until a deadline.

Replies become harmless here: one that cannot be read, or is too large, becomes an error reply of
its silo; reasons become one plain line.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence

from flwr.app import Error, Message

from coterie import wire
from coterie.engine.port import Engine

log = logging.getLogger("coterie.run")

SILENT_S = 60.0
"""Seconds that a SuperLink waits for a silo's heartbeat: twice the interval that silos announce."""

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


def exchange(
    engine: Engine,
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
    ids = engine.push(messages)
    asked = {message_id: m for message_id, m in zip(ids, messages, strict=True) if message_id}
    replies: dict[str, Message] = {}
    waiting = set(asked)
    started = time.monotonic()
    while waiting:
        left = deadline_s - (time.monotonic() - started)
        for reply in _pull(engine, {name: asked[name] for name in sorted(waiting)}, left):
            message_id = reply.metadata.reply_to_message_id
            if message_id in waiting:
                waiting.discard(message_id)
                replies[message_id] = admit(reply, asked[message_id])
                if seconds is not None:
                    seconds[asked[message_id].metadata.dst_node_id] = time.monotonic() - started
        waited = time.monotonic() - started
        if not waiting or waited >= deadline_s:
            break
    if seconds is not None:
        for message_id in waiting:
            seconds[asked[message_id].metadata.dst_node_id] = waited
    if waiting:
        log.warning(
            "%d of %d replies did not arrive within %.0f s", len(waiting), len(ids), deadline_s
        )
    return [replies.get(message_id) for message_id in ids]


def _pull(engine: Engine, asked: Mapping[str, Message], wait_s: float) -> Iterator[Message]:
    """Yield the replies that are there, one by one if the engine cannot read one of them."""
    try:
        yield from engine.pull(list(asked), wait_s)
    except Exception as error:
        log.warning("fetching replies one by one: %s", wire.plain_text(error))
        for message_id, message in asked.items():
            try:
                yield from engine.pull([message_id], 0.0)
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
