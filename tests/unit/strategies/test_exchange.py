"""What is made of replies as they come in."""

from __future__ import annotations

import pytest
from flwr.app import Error, Message, RecordDict
from flwr.common.constant import HEARTBEAT_PATIENCE, ErrorCode

from coterie import wire
from coterie.engine.fast.silo.calls import HEARTBEAT_INTERVAL_S
from coterie.strategies.rounds.exchange import BY_SUPERLINK, BY_SUPERNODE, SILENT_S, admit

FLOWERS = {value for name, value in vars(ErrorCode).items() if name.isupper()}
ASKED = Message(RecordDict(), dst_node_id=1, message_type=wire.TRAIN, group_id="1")


def reason(code: int, text: str) -> str:
    return str(admit(Message(Error(code, text), reply_to=ASKED), ASKED).error.reason)


@pytest.mark.parametrize("code", sorted(FLOWERS))
def test_an_error_of_flower_s_own_is_said_in_words_of_ours(code: int) -> None:
    text = "Error: Node Unavailable — within 2 × its interval."
    assert code in BY_SUPERLINK.keys() | BY_SUPERNODE.keys()
    assert reason(code, text).startswith("it")
    assert (text in reason(code, text)) == (code in BY_SUPERNODE)
    assert reason(code, "").endswith(".")


def test_who_is_silent_was_so_for_as_long_as_a_superlink_waits() -> None:
    assert reason(ErrorCode.NODE_UNAVAILABLE, "Error: …") == "it has not been in contact for 60 s."
    assert SILENT_S == HEARTBEAT_PATIENCE * HEARTBEAT_INTERVAL_S


@pytest.mark.parametrize("code", [wire.REFUSED, wire.FAILED, wire.SPENT, wire.UNREADABLE])
def test_what_a_silo_of_ours_says_stays_as_it_is(code: int) -> None:
    assert reason(code, "the disk is full") == "the disk is full"
