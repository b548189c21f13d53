"""Fits of models by sums over silos, several at a time: one for each group of silos.

A silo that does not answer, or answers wrongly, is left out of the whole fit, by name and with the
reason; all others are then asked again, so that a sum is always of the fit's silos and of no other.
If a silo answers that a step went too far for it, all are asked again after half of the step:
another silo's wrong sums may have led there, so it is left out only if few silos refuse even the
smallest steps.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

from flwr.app import ConfigRecord, Message

from coterie import wire
from coterie.engine.port import Engine
from coterie.features.sums.contract import (
    Answer,
    Arrays,
    Family,
    FitError,
    Masked,
    Question,
    State,
    added,
    decode_answer,
    decode_masked,
    encode_question,
    unmasked,
)
from coterie.strategies.rounds.exchange import exchange
from coterie.strategies.rounds.members import minimums_of, staying
from coterie.strategies.rounds.roster import Silo

log = logging.getLogger("coterie.run")

MOST_EXCHANGES = 100_000


class _TooFarError(wire.WireError):
    """A silo answered that the last step went too far for it."""


@dataclass(frozen=True)
class Fit:
    """A model of some silos, so far.

    Attributes:
        name: unique in the run: a group's letter, or the name of a silo that is alone.
        members: the silos whose answers are added up.
        left_out: silo → why it is not, or no longer, among them.
        failed: why there is no result; empty unless the fit has failed.
        samples: the members' training rows, also those that lack a value.
    """

    name: str
    members: tuple[str, ...]
    state: State = field(default_factory=State)
    left_out: Mapping[str, str] = field(default_factory=dict)
    failed: str = ""
    samples: int = 0

    @property
    def done(self) -> bool:
        """Whether nothing more is asked for this fit."""
        return bool(self.failed) or self.state.done


@dataclass(frozen=True)
class Fits:
    """All fits of a run after a number of exchanges, as they are saved."""

    fits: tuple[Fit, ...]
    exchanges: int = 0


class Masking(Protocol):
    """What decides in a secure run who is summed together (``coterie.features.secure``)."""

    def waits(self, name: str, here: Collection[str]) -> str:
        """Return why a silo is not in the sum of silos that are here."""

    def staying(self, silos: Sequence[Silo]) -> tuple[str, ...]:
        """Return the most of these silos that may be summed together."""

    def entries(self, silos: Sequence[Silo]) -> dict[str, Any]:
        """Return the entries that a question to these silos has, whose answers are summed."""


@dataclass(frozen=True)
class Asking:
    """What all fits of a run have in common.

    Attributes:
        settings: of the family, as JSON values; the terms have them too.
        terms: describe the run to the silos.
        deadline_s: seconds for the answers of one exchange.
        masking: of a secure run, in which answers are masked; None in others.
    """

    engine: Engine
    family: Family
    settings: Mapping[str, Any]
    silos: Mapping[str, Silo]
    terms: Mapping[str, wire.Scalar]
    deadline_s: float
    masking: Masking | None = None


def fit_all(asking: Asking, fits: Fits, save: Callable[[Fits], None]) -> Fits:
    """Ask and add up until every fit has its result or has failed; ``save`` after every exchange.

    A fit that began in an earlier process goes on with its members; one that is not here any more
    is left out.
    """
    fits = replace(fits, fits=tuple(_with_enough(asking, fit, {}) for fit in fits.fits))
    while (waiting := [fit for fit in fits.fits if not fit.done]) and (
        fits.exchanges < MOST_EXCHANGES
    ):
        number = fits.exchanges + 1
        new = {one.name: one for one in _exchange(asking, waiting, number)}
        fits = Fits(tuple(new.get(fit.name, fit) for fit in fits.fits), number)
        save(fits)
    return fits


def _exchange(asking: Asking, fits: Sequence[Fit], number: int) -> list[Fit]:
    """Return the fits after one exchange with the silos of all of them."""
    asked = [
        (fit, question, name)
        for fit in fits
        for question in [_question(asking, fit)]
        for name in fit.members
    ]
    entries = {fit.name: _entries(asking, fit) for fit in fits}
    messages = [
        _message(asking, fit, question, name, {**entries[fit.name], wire.ROUND: number})
        for fit, question, name in asked
    ]
    replies = exchange(asking.engine, messages, deadline_s=asking.deadline_s)
    answers: dict[str, dict[str, Answer | Masked]] = {fit.name: {} for fit in fits}
    errors: dict[str, dict[str, wire.WireError]] = {fit.name: {} for fit in fits}
    for (fit, question, name), reply in zip(asked, replies, strict=True):
        try:
            answers[fit.name][name] = _read(asking, question, reply, name)
        except wire.WireError as error:
            errors[fit.name][name] = error
    questions = {fit.name: question for fit, question, _ in asked}
    return [
        _after(asking, fit, questions[fit.name], answers[fit.name], errors[fit.name])
        for fit in fits
    ]


def _question(asking: Asking, fit: Fit) -> Question:
    arrays = asking.family.asked(asking.settings, fit.state)
    return Question(asking.family.name, asking.settings, arrays)


def _entries(asking: Asking, fit: Fit) -> dict[str, Any]:
    if asking.masking is None:
        return {wire.GROUP_SIZE: len(fit.members)}
    return asking.masking.entries([asking.silos[name] for name in fit.members])


def _message(
    asking: Asking, fit: Fit, question: Question, name: str, entries: Mapping[str, Any]
) -> Message:
    silo = asking.silos[name]
    config: dict[str, Any] = {
        **asking.terms,
        **entries,
        wire.PROTOCOL_KEY: silo.protocol,
        wire.PURPOSE: fit.name,
    }
    content = encode_question(question)
    content[wire.CONFIG] = ConfigRecord(config)
    return Message(content, silo.node_id, wire.TRAIN_SUMS, group_id=str(entries[wire.ROUND]))


def _read(asking: Asking, question: Question, reply: Message | None, name: str) -> Answer | Masked:
    if reply is None:
        raise wire.WireError("it did not answer in time.")
    if reply.has_error():
        kind = _TooFarError if reply.error.code == wire.TOO_FAR else wire.WireError
        raise kind(str(reply.error.reason).removeprefix(f"silo {name!r} "))
    if asking.masking is not None:
        return decode_masked(asking.family, question, reply.content)
    samples = asking.silos[name].num_examples
    return decode_answer(asking.family, question, reply.content, samples)


def _after(
    asking: Asking,
    fit: Fit,
    question: Question,
    answers: Mapping[str, Answer | Masked],
    errors: Mapping[str, wire.WireError],
) -> Fit:
    """Return a fit after its silos' answers: one step further, half one back, or without some."""
    wrong = {n: one for n, one in errors.items() if not isinstance(one, _TooFarError)}
    if lost := {n: str(one) for n, one in wrong.items()} | _of_others(fit, answers):
        return _with_enough(asking, fit, lost)
    if errors:
        return _halved(asking, fit, {n: str(one) for n, one in errors.items()})
    words = answers[fit.members[0]].words
    state = replace(fit.state, words=words, step=fit.state.step + 1)
    try:
        total = _total(asking, question, answers)
        state = asking.family.next(asking.settings, state, total)
    except FitError as error:
        return _failed(fit, str(error))
    return replace(fit, state=state, samples=sum(asking.silos[n].num_examples for n in fit.members))


def _halved(asking: Asking, fit: Fit, why: Mapping[str, str]) -> Fit:
    """Return a fit after half its last step; without these silos if that does not help.

    If half of all silos refuse even the smallest steps, another's sums are to blame: then it fails.
    """
    try:
        state = asking.family.halved(asking.settings, fit.state)
    except FitError as error:
        if 2 * len(why) >= len(fit.members):
            return _failed(fit, f"{error}. {wire.reasons(dict(why))}")
        state = None
    if state is None:
        return _with_enough(asking, fit, why)
    log.info("%s: half the step. %s", fit.name, wire.reasons(dict(why)))
    return replace(fit, state=state)


def _failed(fit: Fit, why: str) -> Fit:
    if fit.left_out:
        why = f"{why.rstrip('.')}. The fit was of {wire.some(fit.members)} only. Left out: "
        why += wire.reasons(fit.left_out)
    log.warning("%s: %s", fit.name, why)
    return replace(fit, failed=why)


def _total(asking: Asking, question: Question, answers: Mapping[str, Answer | Masked]) -> Arrays:
    """Return the sum of answers; raise ``FitError`` if masked ones have an impossible sum."""
    masked = [one for one in answers.values() if isinstance(one, Masked)]
    if not masked:
        return added({name: one for name, one in answers.items() if isinstance(one, Answer)})
    samples = sum(asking.silos[name].num_examples for name in answers)
    try:
        return unmasked(asking.family, question, masked, samples)
    except wire.WireError as error:
        raise FitError(f"the sum over its silos cannot be: {error} One has lied") from None


def _of_others(fit: Fit, answers: Mapping[str, Answer | Masked]) -> dict[str, str]:
    """Return silo → why its numbers do not belong to what those of the others belong to."""
    counts = Counter(answers[name].words for name in sorted(answers))
    if not counts:
        return {}
    usual = fit.state.words or counts.most_common(1)[0][0]
    return {
        name: "its columns differ from the other silos'."
        for name, one in answers.items()
        if one.words != usual
    }


def _with_enough(asking: Asking, fit: Fit, lost: Mapping[str, str]) -> Fit:
    """Return a fit without lost silos, and without those that then have too few others."""
    if fit.done:
        return fit
    away = {n: "it is not connected." for n in fit.members if n not in asking.silos}
    lost = {**away, **lost}
    here = tuple(sorted(name for name in fit.members if name not in lost))
    silos, alone = [asking.silos[name] for name in here], len(fit.members) == 1
    if (masking := asking.masking) is not None:
        stay = masking.staying(silos)
        few = {name: masking.waits(name, here) for name in set(here) - set(stay)}
    else:  # a silo's policy allows models of it alone separately
        stay = here if alone else staying(here, minimums_of(silos))
        why = "its group is smaller than its min_group_size."
        few = dict.fromkeys(set(here) - set(stay), why)
    if not (lost or few):
        return replace(fit, members=here)
    for name, why in sorted({**lost, **few}.items()):
        log.warning("%s continues without silo %s: %s", fit.name, name, why)
    left_out = {**fit.left_out, **lost, **few}
    if not stay:
        failed = f"No silo takes part: {wire.reasons(left_out)}"
        return replace(fit, members=(), left_out=left_out, failed=failed)
    state = asking.family.without(asking.settings, fit.state)
    return replace(fit, members=stay, left_out=left_out, state=state)
