"""The long form of the fuzzing of replies: 5,000 answers."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings

from tests.contract.test_fuzz import check_reply_is_harmless, hostile_replies


@pytest.mark.nightly
@pytest.mark.timeout(1800)
@settings(max_examples=5000)
@given(hostile_replies())
def test_5000_replies_that_do_not_hold_disturb_nobody(hostile: Any) -> None:
    check_reply_is_harmless(hostile)
