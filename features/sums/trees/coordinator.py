"""The strategy ``trees``: every group grows its own boosted trees, by sums over its silos.

Groups are given: all silos together, or the groups of an earlier run; ``auto`` finds them
(``coterie.strategies.auto.growing``). A round grows the same number of trees in every group, and
the last round the rest. A level of a tree is one exchange with the silos of all groups.

A sum is always of the same silos: if one of a group does not answer, or wrongly, it is left out of
the round, and the group asks the others again for the tree that was growing.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Annotated, Any

import numpy as np
from pydantic import Field

from coterie import wire
from coterie.features.sums.trees import questions
from coterie.features.sums.trees.bins import Columns, Ints, agreed
from coterie.features.sums.trees.ensemble import Ensemble, Floats
from coterie.features.sums.trees.growth import (
    Level,
    Settings,
    Sides,
    boosted,
    constant,
    for_silo,
)
from coterie.features.sums.trees.questions import AnswerError, Question
from coterie.strategies.errors import EXIT_CONFIG, FederationError
from coterie.strategies.rounds.algorithm import (
    Algorithm,
    Exchanges,
    Order,
    Round,
    Update,
    Updates,
)
from coterie.strategies.rounds.handles import Arrays
from coterie.strategies.rounds.members import Members, present_groups, staying
from coterie.strategies.rounds.options import Config, Options
from coterie.strategies.rounds.reports import Group
from coterie.strategies.rounds.roster import Silo

log = logging.getLogger("coterie.run")

MOST_EXCHANGES = 180
"""Most exchanges of a round: silos answer no more than 200 times."""
FEW = "its group is smaller than it accepts."
FIRST = 12
"""Exchanges before the first tree, at most."""

Asking = Generator[Question, Floats, None]
"""Yields questions to a group; receives the sum of its silos' answers."""


@dataclass(frozen=True)
class Grown:
    """A group's trees so far.

    Attributes:
        trees: the model, with ``done`` trees per output.
        edges: of each column's bins; empty before the first tree.
        silos, sides: if trees may split by silo, the names, and the sides as in ``boosted``.
    """

    trees: Arrays
    done: int = 0
    edges: Columns = ()
    silos: Group = ()
    sides: Sides | None = None

    def of(self, name: str) -> Arrays:
        """Return the trees as a silo has them; one that is not among ``silos``, as any other."""
        if self.sides is None:
            return self.trees
        trees = for_silo(Ensemble.of(self.trees), self.sides, self.number_of(name))
        return {array: trees.arrays()[array] for array in self.trees}

    def number_of(self, name: str) -> int:
        """Return a silo's number among those that trees may split by, or −1."""
        return self.silos.index(name) if name in self.silos else -1

    def split_by(self, silos: Group) -> Grown:
        """Return the same without a tree, for trees that may split by these silos."""
        nodes = self.trees["feature"].shape
        return replace(self, silos=silos, sides=np.zeros((*nodes, len(silos) + 1), np.int8))


@dataclass(frozen=True)
class TreesState:
    """The state between rounds.

    Attributes:
        grown: a group, by the names of its silos with commas between them → its trees.
        lost: silo → why it is left out of this round.
    """

    members: Members
    grown: Mapping[str, Grown] = field(default_factory=dict)
    lost: Mapping[str, str] = field(default_factory=dict)


class Growth(Options):
    """How trees grow; the keys of every strategy that grows some."""

    tree_rate: Annotated[float, Field(gt=0, le=1)] = Field(
        0.1, description="Learning rate of the trees: the factor on every leaf."
    )
    leaf_penalty: Annotated[float, Field(ge=0, le=1e6)] = Field(
        1.0, description="Penalty on squared leaves (λ)."
    )
    leaf_rows: Annotated[int, Field(ge=1, le=1_000_000)] = Field(
        20, description="Fewest rows of a leaf, over all silos of its group."
    )
    column_bins: Annotated[int, Field(ge=2, le=1024)] = Field(
        64, description="Most bins per column, besides the one for missing values."
    )

    @property
    def growth(self) -> Settings:
        """Return the settings of the trees."""
        return Settings(self.tree_rate, self.leaf_penalty, self.leaf_rows)


class Trees(Growth, Algorithm[TreesState]):
    """Boosted trees by summed histograms, in every group its own."""

    remembers = TreesState
    works_unseen = True

    given_groups: str = Field(
        "",
        description="Groups: silos with commas between them, groups with semicolons. A silo in "
        "none is alone. Empty: all silos together.",
    )
    groups_of: str = Field(
        "", description="A complete run whose last groups are these groups: its name or folder."
    )

    def problems(self, training: Config) -> Iterator[str]:
        names = [name for group in self.given for name in group]
        if double := sorted({name for name in names if names.count(name) > 1}):
            yield f"given-groups: every silo is in one group. {double[0]} is in several"

    @property
    def averages(self) -> bool:
        return False

    def entries(self, training: Config) -> Config:
        """Silos grow trees alone by the same settings, and compare."""
        return {wire.GROWING: json.dumps(asdict(self.growth) | {"bins": self.column_bins})}

    @property
    def given(self) -> tuple[Group, ...]:
        """The groups that are given."""
        groups = (text.split(",") for text in self.given_groups.split(";") if text)
        return tuple(tuple(sorted(group)) for group in groups)

    def check(self, initial: Arrays, rounds: int) -> None:
        if not is_trees(initial):
            raise FederationError(
                "strategy trees grows boosted trees, and the task's network is another. Its file "
                'must have network = "trees".',
                exit_code=EXIT_CONFIG,
            )
        depth = depth_of(initial)
        require_rounds(initial, rounds, -(-len(initial["leaf"]) // (room(1) // depth)))

    # ---------------------------------------------------------------- a round

    def prepare(self, state: TreesState, now: Round) -> Exchanges[TreesState]:
        """Grow the round's trees in all groups, level by level."""
        growing = {}
        for group in present_groups(self.given or (now.names,), now.names):
            own = self._of(state, group)
            stay = staying(group, state.members.minimums)
            one = Growing(
                *(self.growth, self.column_bins, stay, own, self._until(own, now)),
                masked=now.unseen,
            )
            one.lost |= dict.fromkeys(set(group) - set(stay), FEW)
            growing[self._key(group)] = one
        yield from grow(list(growing.values()), now, state.members.minimums)
        lost = {name: why for one in growing.values() for name, why in one.lost.items()}
        new = {key: one.grown for key, one in growing.items()}
        return replace(state, grown={**state.grown, **new}, lost=lost)

    def orders(self, state: TreesState, now: Round) -> tuple[TreesState, list[Order]]:
        """Let every silo measure the trees that it held before the round."""
        groups = present_groups(self.given or (now.names,), now.names)
        members = state.members.grouped(groups)
        orders = [Order(s, members.models[s.name]) for s in now.silos if s.name not in state.lost]
        return replace(state, members=members), orders

    def absorb(self, state: TreesState, updates: Updates, now: Round) -> TreesState:
        """Give every silo its group's trees; what it sent back is not used."""
        held = {
            name: self._of(state, group).trees for group in state.members.groups for name in group
        }
        return replace(state, members=state.members.holding(held))

    def details(self, state: TreesState) -> Mapping[str, Any]:
        """Return the number of trees of each group, and which silos were left out."""
        counts = {key: own.done for key, own in state.grown.items()}
        return {"trees": counts} | ({"not-summed": dict(state.lost)} if state.lost else {})

    def _key(self, group: Group) -> str:
        """Return the name of a group: its given silos, or ``*`` for all."""
        if not self.given:
            return "*"
        own = next((given for given in self.given if set(group) <= set(given)), group)
        return ",".join(own)

    def _of(self, state: TreesState, group: Group) -> Grown:
        return state.grown.get(self._key(group), Grown(state.members.initial))

    def _until(self, own: Grown, now: Round) -> int:
        """Return the number of trees that a group has after this round."""
        trees, rounds = len(own.trees["leaf"]), max(now.rounds, 1)
        most = -(-trees // rounds)
        return min(trees * min(now.number, rounds) // rounds, own.done + most)


def is_trees(model: Arrays) -> bool:
    """Return whether a model is trees."""
    try:
        Ensemble.of(model)
    except (KeyError, ValueError):
        return False
    return True


def room(groups: int) -> int:
    """Return the exchanges left for trees in a round in which so many groups begin at a silo."""
    return MOST_EXCHANGES - groups * FIRST


def require_rounds(trees: Arrays, rounds: int, least: int) -> None:
    """Require rounds enough for the exchanges of all trees.

    Raises:
        FederationError: they need more exchanges than silos answer in a round.
    """
    if rounds < least:
        raise FederationError(
            f"{len(trees['leaf'])} trees of depth {depth_of(trees)} in "
            f"{wire.counted(rounds, 'round')} need more than {MOST_EXCHANGES} exchanges a round, "
            f"which silos refuse. Set rounds to at least {least}.",
            exit_code=EXIT_CONFIG,
        )


def depth_of(trees: Arrays) -> int:
    """Return the depth of a model's trees: exchanges for one tree of each of its outputs."""
    return int(trees["leaf"].shape[2]).bit_length() - 1


def grow(
    growing: Sequence[Growing],
    now: Round,
    minimums: Mapping[str, int],
    config: Callable[[Silo], Config] = lambda silo: {},
) -> Exchanges[None]:
    """Put the questions of all groups, one of each in an exchange, with entries of each silo."""
    while asking := [(i, one) for i, one in enumerate(growing) if one.here and not one.over]:
        answers = yield [
            Order(
                now.here[name],
                one.question_for(name).arrays,
                purpose=_purpose(one, i, len(growing)),
                config={wire.GROUP_SIZE: len(one.here), **config(now.here[name])},
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

    Attributes:
        here: silos whose answers are added up.
        grown: the trees that are complete.
        lost: silo → why it is not among them any more.
        began: how many were complete before.
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
        masked: bool = False,
    ) -> None:
        self.settings, self.bins = settings, bins
        self.here, self.grown, self.until = here, own, until
        self.began, self._sides = own.done, own.sides
        self.lost: dict[str, str] = {}
        self.masked = masked
        self.question, self.number, self.over = Question(), 0, False
        self._asking = self._course()
        self._step(None)

    def question_for(self, name: str) -> Question:
        """Return the present question as it is put to a silo."""
        if self._sides is None or self.question.kind != "level":
            return self.question
        return questions.for_silo(self.question, self._sides, self.grown.number_of(name))

    def receive(
        self,
        updates: Mapping[str, Update],
        missing: Mapping[str, str],
        minimums: Mapping[str, int],
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
            total: Floats = np.sum(parts, axis=0)
            return total
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
        if self.grown.done < self.until and not self.grown.edges:
            yield from self._begin()
        while self.grown.done < self.until:
            own = self.grown
            self._sides = None if own.sides is None else own.sides.copy()
            growing = boosted(
                Ensemble.of(own.trees), own.done, own.edges, self.settings, self._sides
            )
            trees = yield from _put(growing, partial(questions.level, edges=own.edges))
            self.grown = self._with(trees.arrays(), own.done + 1, own.edges, self._sides)

    def _begin(self) -> Asking:
        """Find the constant answer and the bins."""
        arrays = self.grown.trees
        base = yield from _put(constant(len(arrays["base"])), questions.base)
        dividing = agreed(len(arrays["gain"]), self.bins)
        edges = yield from _put(dividing, questions.cells, _by_column)
        self.grown = self._with({**arrays, "base": base}, 0, edges, self.grown.sides)

    def _with(self, arrays: Arrays, done: int, edges: Columns, sides: Sides | None) -> Grown:
        """Return what has grown, with the arrays in the model's order."""
        trees = {name: arrays[name] for name in self.grown.trees}
        return replace(self.grown, trees=trees, done=done, edges=edges, sides=sides)


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
        sums = yield questions.level(at, self.grown.edges)
        width = len(self.grown.edges[0]) + 2
        rows = sums[:, 0, :width, 2].sum(axis=1)
        self.roots = {
            name: (sums[i, ..., 0] / rows[i]).ravel()
            for i, name in enumerate(self.grown.silos)
            if name in self.here and rows[i]
        }


def _put(
    asking: Generator[Any, Any, Any],
    question: Callable[[Any], Question],
    read: Callable[[Any, Floats], Any] = lambda at, sums: sums,
) -> Generator[Question, Floats, Any]:
    """Put what ``asking`` yields as questions, send it the sums as ``read``, return its result."""
    at = next(asking)
    while True:
        sums = yield question(at)
        try:
            at = asking.send(read(at, sums))
        except StopIteration as end:
            return end.value


def _by_column(cells: Sequence[Ints], counts: Floats) -> list[Ints]:
    ends = np.cumsum([len(own) for own in cells])[:-1]
    return [own.astype(np.int64) for own in np.split(counts, ends)]
