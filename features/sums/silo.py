"""A silo's answers to models that are trained by sums: what leaves is a sum over its rows.

Every answer is checked as the coordinator checks it. No two answers may be of nearly the same rows:
their difference would describe the few rows between them (``coterie.client.work.answered``).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from flwr.app import RecordDict
from numpy.typing import NDArray

from coterie import wire
from coterie.client.work.request import RefusedError, Request
from coterie.features.sums.contract import (
    Answer,
    Family,
    FitError,
    May,
    Question,
    TooFarError,
    check_answer,
    decode_question,
    encode_answer,
)
from coterie.features.sums.rows import Rows, objection, rows_of
from coterie.tasks.base import TaskError

log = logging.getLogger("coterie.silo")

FEWEST_USED = 4
"""A masked sum must use at least one in so many of a silo's rows."""
ADVICE = (
    "Name the same columns, or times, as in an earlier run. Survival curves use all rows: make "
    "them before a fit that leaves out rows without a value"
)


class Side(Protocol):
    """The silo's side of a family."""

    def family(self, settings: Mapping[str, Any]) -> Family:
        """Return the coordinator's side, which knows the layout of answers."""

    def answer(self, question: Question, rows: Rows, least: int, may: May) -> Answer:
        """Return the answer.

        ``least`` is the silo's smallest count: fewer rows (persons, if they have several rows) must
        not be recognisable. ``may`` decides about every set of rows before sums over it.

        Raises:
            FitError: the question cannot be answered with these rows; the text goes to the
                coordinator.
        """


def _may(request: Request, rows: Rows, least: int) -> May:
    """Return the function that decides about sums over sets of rows (``May``)."""
    whole = list[NDArray[np.bool_]]()

    def may(used: NDArray[np.bool_]) -> str:
        whole.append(used)
        # Of masked sums only the numbers of all training rows have been compared before.
        if request.config.get(wire.SUM) and whole[0].sum() * FEWEST_USED < len(rows):
            return (
                f"fewer than 1 in {FEWEST_USED} of its rows have a value in all columns, so that "
                "the sum could be nearly another silo's. Name fewer columns"
            )
        why = objection(request.session, rows, used, least, repeated=True)
        return why and f"it {why} {ADVICE}"

    return may


def answer_sums(sides: Mapping[str, Side]) -> Callable[[Request], RecordDict]:
    """Return the handler of questions to these families, by name."""

    def work(request: Request) -> RecordDict:
        session, policy = request.session, request.session.settings.policy
        try:
            question = decode_question(request.message.content, request.config)
        except wire.WireError as error:
            raise RefusedError(str(error)) from None
        side = sides.get(question.family)
        if side is None:
            raise RefusedError(f"there is no family of models {question.family[:40]!r}.")
        size = request.integer(wire.GROUP_SIZE, minimum=1)
        request.refuse_for(policy.sums_objection(question.family, alone=size == 1))
        request.refuse_for(policy.group_objection(request.config))
        least = policy.smallest_count
        try:
            rows = rows_of(session)
            with np.errstate(over="ignore", invalid="ignore"):  # the check names what is too large
                answer = side.answer(question, rows, least, _may(request, rows, least))
            check_answer(side.family(question.settings), question, answer, len(rows))
        except TooFarError as error:
            request.refuse_for(f"cannot take part: {error}", code=wire.TOO_FAR)
        except FitError as error:
            request.refuse_for(f"cannot take part: {error}")
        except wire.WireError as error:
            request.refuse_for(f"cannot take part, because of {error}", code=wire.TOO_FAR)
        except TaskError as error:  # its text may name a file, or quote what stands in it
            log.error("the rows cannot be read: %s", error)
            request.refuse_for("can no longer read its data; see the silo's log.")
        return encode_answer(answer)

    work.__name__ = work.__qualname__ = "answer_sums"
    return work
