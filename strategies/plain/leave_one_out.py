"""Groups trained again, each as a whole and without each of its silos, to see what a silo brings.

Every group of two or more silos is trained by FedAvg from w⁰ for the run's rounds: with all its
silos, and without each silo in turn. Every such training is played ``TIMES`` times, with other
random draws, so that chance in training shows. The models are compared afterwards on the remaining
silos' test data (``coterie.server.runs.contribution``). This is the leave-one-out value of a silo
for its group (see Ghorbani, Zou: "Data Shapley", ICML 2019, section 2), by retraining within a
budget of rounds.

A group of up to ``MOST_IN_PAIRS`` silos is also trained without every two: what would a silo bring
if another one had left?

A silo of a group of m trains ``TIMES`` · m models in a round, and (m − 1)(m − 2)/2 without two
others. Every silo of a group can compute the updates of the others from the models that it
receives, so silos that accept no group of two refuse.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import combinations

from pydantic import Field

from coterie import wire
from coterie.strategies.rounds.algorithm import Algorithm, Order, Round, Updates, orders_from
from coterie.strategies.rounds.handles import Model
from coterie.strategies.rounds.members import Members, present_groups
from coterie.strategies.rounds.minimum_sizes import average, average_groups
from coterie.strategies.rounds.reports import Group

TIMES = 2
"""Equal trainings of a group, and of a group without a silo."""
MOST_IN_PAIRS = 9
"""Largest group that is trained without every two silos; of a larger one, a silo would have more
models to measure than one message takes."""


@dataclass(frozen=True)
class Variant:
    """A training of some silos of a group beside that of the whole group.

    ``left_out`` are the missing silos, at most two. ``time`` numbers equal trainings from 0.
    """

    purpose: str
    silos: Group
    left_out: Group
    time: int


@dataclass(frozen=True)
class State:
    """The members, whose models are those of whole groups, and variants' models by purpose."""

    members: Members
    variants: Mapping[str, Model] = field(default_factory=dict)


class LeaveOneOut(Algorithm[State]):
    """FedAvg in given groups, and the same without each silo."""

    remembers = State
    models_in = ("variants",)

    given_groups: str = Field(
        "", description="Groups: silos with commas between them, groups with semicolons."
    )

    @property
    def given(self) -> tuple[Group, ...]:
        groups = (text.split(",") for text in self.given_groups.split(";"))
        return tuple(tuple(sorted(group)) for group in groups if len(group) > 1)

    def variants(self) -> Iterator[Variant]:
        for time in range(TIMES):
            number = 0
            for place, group in enumerate(self.given):
                if time:  # the first is that of the run's own rounds
                    yield Variant(f"whole-{place}-{time}", group, (), time)
                for name in group:
                    yield _without(f"without-{number}-{time}", group, (name,), time)
                    number += 1
        for place, group in enumerate(self.given):
            pairs = combinations(group, 2) if 2 < len(group) <= MOST_IN_PAIRS else ()
            for number, pair in enumerate(pairs):
                yield _without(f"without-two-{place}-{number}", group, pair)

    def orders(self, state: State, now: Round) -> tuple[State, list[Order]]:
        """Let every silo train its group's model, and each variant that it is in."""
        known = {name for group in self.given for name in group}
        here = [silo for silo in now.silos if silo.name in known]
        groups = present_groups(self.given, [silo.name for silo in here])
        state = replace(state, members=state.members.grouped(groups))
        orders = orders_from(state.members.models, here)
        for one in self.variants():
            training = [silo for silo in here if silo.name in one.silos]
            model = state.variants.get(one.purpose, state.members.initial)
            config = {wire.GROUP_SIZE: len(training)}
            orders += [Order(s, model, purpose=one.purpose, config=config) for s in training]
        return state, orders

    def absorb(self, state: State, updates: Updates, now: Round) -> State:
        """Average every group, and every variant; one that nobody trained keeps its model."""
        members = average_groups(state.members, [u for u in updates if not u.purpose])
        found = dict(state.variants)
        for one in self.variants():
            mean = average([u for u in updates if u.purpose == one.purpose])
            if mean is not None:
                found[one.purpose] = mean
        return State(members, found)


def _without(purpose: str, group: Group, left_out: Group, time: int = 0) -> Variant:
    return Variant(purpose, tuple(n for n in group if n not in left_out), left_out, time)


def as_text(groups: Iterable[Group]) -> str:
    """Return groups as ``given_groups`` has them."""
    return ";".join(",".join(group) for group in groups)
