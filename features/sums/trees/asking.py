"""What the silos of a group are asked for its trees, tree by tree, and what is made of the answers.

A sum is always of the same silos: if one of a group does not answer, or wrongly, it is left out of
the round, and the group asks the others again for the tree that was growing.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie import wire
from coterie.features.sums.trees import questions
from coterie.features.sums.trees.bins import Columns, Ints, agreed
from coterie.features.sums.trees.ensemble import Ensemble, Floats
from coterie.features.sums.trees.growth import (
    Level,
    Settings,
    Sides,
    best_number,
    boosted,
    constant,
    for_silo,
)
from coterie.features.sums.trees.questions import AnswerError, Question
from coterie.strategies.rounds.algorithm import Exchanges, Order, Round, Update
from coterie.strategies.rounds.handles import Arrays
from coterie.strategies.rounds.members import staying
from coterie.strategies.rounds.options import Config
from coterie.strategies.rounds.reports import Group
from coterie.strategies.rounds.roster import Silo

log = logging.getLogger("coterie.run")

FEW = "its group is smaller than it accepts."

Asking = Generator[Question, Floats, Any]
"""Yields questions to a group; receives the sum of its silos' answers."""
NOBODY = "\0"
"""In the place of a silo: a name that none has."""
NODES = -3
"""Axis of the nodes in histograms, also in those by silo."""


@dataclass(frozen=True)
class Grown:
    """A group's trees so far.

    Attributes:
        trees: the model, with ``done`` trees per output.
        edges: of each column's bins; empty before the first tree.
        silos, sides: if trees may split by silo, the names, and the sides as in ``boosted``.
        most: the number of trees that is best on held-out rows; None while it is not known.
        gains: ``gain`` after 0, 1, … ``done`` trees, until ``most`` is known.
    """

    trees: Arrays
    done: int = 0
    edges: Columns = ()
    silos: Group = ()
    sides: Sides | None = None
    most: int | None = None
    gains: tuple[NDArray[np.float32], ...] = ()

    @property
    def whole(self) -> bool:
        """Whether no more trees grow."""
        most = len(self.trees["leaf"]) if self.most is None else self.most
        return bool(self.edges) and self.done >= most

    def of(self, name: str) -> Arrays:
        """Return the trees as a silo has them; one that is not among ``silos``, as any other."""
        if self.sides is None:
            return self.trees
        trees = for_silo(Ensemble.of(self.trees), self.sides, self.number_of(name))
        return {array: trees.arrays()[array] for array in self.trees}

    def number_of(self, name: str) -> int:
        """Return a silo's number among those that trees may split by, or −1."""
        return self.silos.index(name) if name in self.silos else -1

    def at_most(self, most: int) -> Grown:
        """Return the same with no more trees than ``most``, now and later."""
        if self.done <= most:
            return replace(self, most=most, gains=())
        arrays = Ensemble.of(self.trees).first(most).arrays() | {"gain": self.gains[most]}
        trees = {name: arrays[name] for name in self.trees}
        sides = None if self.sides is None else self.sides.copy()
        if sides is not None:
            sides[most:] = 0
        return replace(self, trees=trees, done=most, sides=sides, most=most, gains=())

    def forgetting(self, name: str) -> Grown:
        """Return the same trees, to which a silo is any other."""
        return replace(self, silos=tuple(NOBODY if one == name else one for one in self.silos))

    def split_by(self, silos: Group) -> Grown:
        """Return the same without a tree, for trees that may split by these silos."""
        nodes = self.trees["feature"].shape
        return replace(self, silos=silos, sides=np.zeros((*nodes, len(silos) + 1), np.int8))


def grow(growing: Sequence[Growing], now: Round, minimums: Mapping[str, int]) -> Exchanges[None]:
    """Put the questions of all groups, one of each in an exchange."""
    while asking := [(i, one) for i, one in enumerate(growing) if one.here and not one.over]:
        answers = yield [
            Order(
                now.here[name],
                one.question_for(name).arrays,
                purpose=_purpose(one, i, len(growing)),
                config={wire.GROUP_SIZE: len(one.here), **one.config(now.here[name])},
                kind=wire.EVALUATE_HISTOGRAMS,
            )
            for i, one in asking
            for name in one.here
        ]
        for i, one in asking:
            mine = _purpose(one, i, len(growing))
            found = {update.silo.name: update for update in answers if update.purpose == mine}
            one.receive(found, answers.missing, minimums)
        del answers, found  # need not be there beside those to come
    for name, why in sorted({n: w for one in growing for n, w in one.lost.items()}.items()):
        log.warning("round %d: trees grow without silo %s: %s", now.number, name, why)


def _purpose(one: Growing, i: int, count: int) -> str:
    """Return the purpose of a group's present question, another one in every exchange."""
    return f"{one.question.kind}-{one.number * count + i}"


class Growing:
    """The trees of one group in one round.

    Args:
        until: number of trees after the round.
        judged: number of trees after which held-out rows tell how many of them are best; the
            others are then taken away. 0: never.
        config: entries of the messages to each silo.

    Attributes:
        here: silos whose answers are added up.
        grown: the trees that are complete.
        lost: silo → why it is not among them any more.
        grew: trees that have grown in the round, also those taken away.
        question, number: the present one, and how many there were.
        over: nothing more is asked.
    """

    def __init__(
        self,
        settings: Settings,
        bins: int,
        here: Group,
        own: Grown,
        until: int,
        *,
        judged: int = 0,
        config: Callable[[Silo], Config] = lambda silo: {},
        masked: bool = False,
    ) -> None:
        self.settings, self.bins = settings, bins
        self.judged, self.config = judged, config
        self.here, self.grown = here, own
        self.until = until if own.most is None else min(until, own.most)
        self.grew, self._sides = 0, own.sides
        self.lost: dict[str, str] = {}
        self.masked = masked
        self.question, self.number, self.over = Question(), 0, False
        self._asking = self._course()
        self._step(None)

    def question_for(self, name: str) -> Question:
        """Return the present question as it is put to a silo."""
        if self._sides is None or self.question.kind not in ("level", "losses"):
            return self.question
        return questions.for_silo(self.question, self._sides, self.grown.number_of(name))

    def receive(
        self, updates: Mapping[str, Update], missing: Mapping[str, str], minimums: Mapping[str, int]
    ) -> None:
        """Add the answers up and go on; without a silo that gave none, ask the others again."""
        parts, lost = list[Any](), {}
        for name in self.here:
            try:
                if name not in updates:
                    raise AnswerError(missing.get(name, "it did not answer."))
                parts.append(self._part(updates[name]))
            except AnswerError as error:
                lost[name] = str(error)
        if not lost:
            samples = sum(int(updates[name].num_examples) for name in self.here)
            try:
                self._step(self._sum(parts, samples))
            except AnswerError as error:
                self._end(f"the sum over its group cannot be: {error} One of them has lied.")
            return
        here = tuple(name for name in self.here if name not in lost)
        stay = staying(here, minimums)
        lost |= dict.fromkeys(set(here) - set(stay), FEW)
        self.lost |= lost
        self.here = stay
        self._asking = self._course()
        self._step(None)

    def _part(self, update: Update) -> Any:
        """Return a silo's answer; raise ``AnswerError`` if it is none."""
        if self.masked:
            return questions.read_masked(self.question, update.extras.get(wire.MASKED, {}))
        arrays = update.extras.get(questions.RECORD, {})
        return questions.read_answer(self.question, arrays, int(update.num_examples))

    def _sum(self, parts: Sequence[Any], samples: int) -> Floats:
        """Return the sum over silos; by silo, the last of them any other, where trees need that."""
        if self.masked:
            return questions.read_sum(self.question, parts, samples)
        if self._sides is None or self.question.kind != "level":
            return reduce(np.add, parts)
        by_silo = np.zeros((len(self.grown.silos) + 1, *parts[0].shape))
        for name, part in zip(self.here, parts, strict=True):
            by_silo[self.grown.number_of(name)] += part
        return by_silo

    def _step(self, total: Floats | None) -> None:
        self.number += 1
        try:
            self.question = next(self._asking) if total is None else self._asking.send(total)
        except StopIteration:
            self.over = True
        except ValueError as error:  # of sums over too few rows
            self._end(f"{error}.")

    def _end(self, why: str) -> None:
        self.over = True
        self.lost |= dict.fromkeys(self.here, why)

    def _course(self) -> Asking:
        """Yield the questions for the trees that this round still lacks."""
        if not self.grown.edges:
            yield from self._begin()
        while self.grown.done < self.until:
            own = self.grown
            self._sides = None if own.sides is None else own.sides.copy()
            growing = boosted(
                Ensemble.of(own.trees), own.done, own.edges, self.settings, self._sides
            )
            trees = yield from _put(growing, partial(questions.levels, edges=own.edges))
            self.grown = self._with(trees.arrays(), own.done + 1, own.edges, self._sides)
            self.grew += 1
        own = self.grown
        if own.most is None and own.done == self.judged > 0:
            losses = yield questions.losses(Ensemble.of(own.trees), own.done)
            self.grown = own.at_most(best_number(losses))

    def _begin(self) -> Asking:
        """Find the constant answer and the bins."""
        arrays = self.grown.trees
        base = yield from _put(constant(len(arrays["base"])), lambda at: [questions.base(at)])
        dividing = agreed(len(arrays["gain"]), self.bins)
        edges = yield from _put(dividing, lambda at: [questions.cells(at)], _by_column)
        self.grown = self._with({**arrays, "base": base}, 0, edges, self.grown.sides)

    def _with(self, arrays: Arrays, done: int, edges: Columns, sides: Sides | None) -> Grown:
        """Return what has grown, with the arrays in the model's order."""
        trees = {name: arrays[name] for name in self.grown.trees}
        known = self.grown.most is not None
        gains = () if known else (*self.grown.gains, np.asarray(trees["gain"], np.float32))
        return replace(self.grown, trees=trees, done=done, edges=edges, sides=sides, gains=gains)


class Roots(Growing):
    """Silos' histograms of the root of a first tree, in common bins.

    Attributes:
        roots: silo → (outputs · bins,) its sums of gradients, divided by its rows.
    """

    roots: Mapping[str, Floats] = {}

    def _course(self) -> Asking:
        yield from self._begin()
        trees = Ensemble.of(self.grown.trees)
        outputs = len(trees.base)
        nodes = np.stack([np.arange(outputs), np.zeros(outputs, np.int64)], axis=1)
        at = Level(trees, 0, 0, nodes, self.grown.sides)
        sums = yield from _answers(questions.levels(at, self.grown.edges))
        width = len(self.grown.edges[0]) + 2
        rows = sums[:, 0, :width, 2].sum(axis=1)
        self.roots = {
            name: (sums[i, ..., 0] / rows[i]).ravel()
            for i, name in enumerate(self.grown.silos)
            if name in self.here and rows[i]
        }


def _put(
    asking: Generator[Any, Any, Any],
    questions_of: Callable[[Any], Sequence[Question]],
    read: Callable[[Any, Floats], Any] = lambda at, sums: sums,
) -> Generator[Question, Floats, Any]:
    """Put what ``asking`` yields as questions, send it the sums as ``read``, return its result."""
    at = next(asking)
    while True:
        sums = yield from _answers(questions_of(at))
        try:
            at = asking.send(read(at, sums))
        except StopIteration as end:
            return end.value


def _answers(parts: Sequence[Question]) -> Asking:
    """Put the parts of a question one after another; return the sums as if it had been one."""
    found = list[Floats]()
    for part in parts:
        found.append((yield part))
    return found[0] if len(found) == 1 else np.concatenate(found, axis=NODES)


def _by_column(cells: Sequence[Ints], counts: Floats) -> list[Ints]:
    ends = np.cumsum([len(own) for own in cells])[:-1]
    return [own.astype(np.int64) for own in np.split(counts, ends)]
