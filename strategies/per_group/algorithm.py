"""Groups for any Flower strategy: each group runs its own, on its own nodes.

The groups are given: by hand, from an earlier run, or from a first stage. The strategy inside a
group makes the training messages and the next model; the engine does the rest as for every
algorithm: deadlines, newcomers, leavers, evaluation and reports. Replies reach the strategy whole,
so that models may change their shape, as trees do.

A silo in none of the given groups waits until the groups have models. It evaluates each of them,
and joins the group with the smallest loss. If its app states neither loss nor error, it opens one.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flwr.app import MetricRecord, RecordDict
from flwr.serverapp.strategy import Strategy

from coterie import wire
from coterie.strategies.errors import FederationError, refused
from coterie.strategies.per_group.inner import (
    Factory,
    aggregated,
    memory_of,
    nodes_needed,
    seeded,
    training_of,
    with_memory,
)
from coterie.strategies.rounds.algorithm import Algorithm, Exchanges, Order, Round, Update, Updates
from coterie.strategies.rounds.handles import Arrays, arrays_of
from coterie.strategies.rounds.members import Members, staying
from coterie.strategies.rounds.options import Seed
from coterie.strategies.rounds.replies import error_of
from coterie.strategies.rounds.reports import Group

log = logging.getLogger("coterie.run")

PLACE = "place"
"""Purpose of a newcomer's evaluation of a group's model."""


@dataclass(frozen=True)
class Inner:
    """A group between rounds: its model, what its strategy remembers, its first round.

    ``metrics`` are those that the strategy returned last.
    """

    model: Arrays
    born: int = 1
    memory: Mapping[str, Any] = field(default_factory=dict)
    trained: bool = False
    metrics: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class PerGroupState:
    """The state between rounds.

    Attributes:
        groups: the group of each number, by its strategy.
        group_of: silo → number of its group, permanently.
        nodes: silo → the number by which strategies know it, permanently.
        losses: silo placed in the last round → group → its loss there.
        failed: number of a group → why its strategy made no model of the last replies.
    """

    members: Members
    groups: tuple[Inner, ...] = ()
    group_of: Mapping[str, int] = field(default_factory=dict)
    nodes: Mapping[str, int] = field(default_factory=dict)
    losses: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    failed: Mapping[str, str] = field(default_factory=dict)


class InGroups(Algorithm[PerGroupState]):
    """The algorithm of ``PerGroup``."""

    groups_given: tuple[Group, ...] = ()
    inner: Any
    """The ``Factory`` of the groups' strategies."""
    seed: Seed = 0
    whole = True

    @property
    def averages(self) -> bool:
        return False

    def first(self, initial: Arrays) -> PerGroupState:
        own = {name: number for number, group in enumerate(self.groups_given) for name in group}
        groups = tuple(Inner(initial) for _ in self.groups_given)
        return PerGroupState(Members(initial), groups, own)

    def welcome(self, state: PerGroupState, new: frozenset[str], now: Round) -> PerGroupState:
        """Number newcomers, and give those that were expected their group's model."""
        if own := [silo.name for silo in now.silos if silo.described]:
            raise refused(
                f"PerGroup is for ClientApps of your own, and {own[0]} is one of coterie's silos. "
                "For these use hcct, fedgroup or fedcollab with within, aggregate or "
                "server_optimiser."
            )
        nodes = dict(state.nodes)
        for name in sorted(new):
            nodes.setdefault(name, len(nodes) + 1)
        return replace(state, nodes=nodes, losses={}, failed={})

    # ---------------------------------------------------------------- newcomers of no group

    def prepare(self, state: PerGroupState, now: Round) -> Exchanges[PerGroupState]:
        """Let silos of no group evaluate the groups' models, and join the best group."""
        waiting = [silo for silo in now.silos if silo.name not in state.group_of]
        ready = [number for number, own in enumerate(state.groups) if own.trained]
        if not waiting or not ready:
            return state
        answers = yield [
            Order(silo, state.groups[number].model, f"{PLACE}-{number}", kind=wire.EVALUATE)
            for silo in waiting
            for number in ready
        ]
        for silo in waiting:
            found = {u.purpose: _loss(u) for u in answers if u.silo.name == silo.name}
            measured = {purpose: loss for purpose, loss in found.items() if math.isfinite(loss)}
            if not found:
                log.warning("silo %s waits: it evaluated no group's model", silo.name)
                continue
            if measured:
                best = min(measured, key=lambda purpose: (measured[purpose], _number(purpose)))
                number = _number(best)
            else:
                log.warning(
                    "silo %s opens a group: its app states no loss, error or accuracy of the "
                    "groups' models (see metric_names)",
                    silo.name,
                )
                number = len(state.groups)
                fresh = Inner(state.members.initial, now.number)
                state = replace(state, groups=(*state.groups, fresh))
            losses = {purpose.removeprefix(f"{PLACE}-"): v for purpose, v in measured.items()}
            state = replace(
                state,
                group_of={**state.group_of, silo.name: number},
                losses={**state.losses, silo.name: losses},
            )
        return state

    # ---------------------------------------------------------------- a round

    def orders(self, state: PerGroupState, now: Round) -> tuple[PerGroupState, list[Order]]:
        """Let every group's strategy make the messages of its silos."""
        orders: list[Order] = []
        groups, present, waits = list(state.groups), [], []
        sent = {key: value for key, value in now.config.items() if key != wire.LR_DECAY}
        for number, names in _present(state, now.names).items():
            group = staying(names, state.members.minimums)
            inner = self._strategy(state, number)
            if len(group) < max(nodes_needed(inner), 1):
                waits.append(f"{', '.join(names)} ({nodes_needed(inner)} silos)")
                continue
            own = groups[number]
            silos = {state.nodes[name]: now.here[name] for name in group}
            with seeded(self.seed, now.number, number, 0):
                messages = training_of(
                    *(inner, sorted(silos), own.model, sent),
                    number=now.number - own.born + 1,
                    group=", ".join(group),
                )
            groups[number] = replace(own, memory=memory_of(inner))
            orders += [
                Order(silos[node], own.model, kind=m.metadata.message_type, content=m.content)
                for node, m in sorted(messages.items())
            ]
            present.append(group)
        if waits:
            log.info("round %d: groups that wait for more silos: %s", now.number, "; ".join(waits))
        if not orders and now.silos and not present:
            raise FederationError(
                "no group has the silos that its strategy waits for: "
                f"{'; '.join(waits) or 'no silo is in a group'}. Give the strategies smaller "
                "numbers, such as min_train_nodes and min_available_nodes."
            )
        held = {
            name: groups[number].model
            for name, number in state.group_of.items()
            if name in state.nodes
        }
        members = state.members.holding(held).grouped(present)
        return replace(state, members=members, groups=tuple(groups)), orders

    def absorb(self, state: PerGroupState, updates: Updates, now: Round) -> PerGroupState:
        """Let every group's strategy make the next model of its silos' replies."""
        groups, failed = list(state.groups), {}
        by_group: dict[int, dict[int, RecordDict]] = {}
        for update in updates:
            if update.reply is not None and not update.purpose:
                number = state.group_of[update.silo.name]
                by_group.setdefault(number, {})[state.nodes[update.silo.name]] = update.reply
        names = {node: name for name, node in state.nodes.items()}
        for number, replies in sorted(by_group.items()):
            try:
                groups[number] = self._aggregated(state, number, replies, names, now)
            except _UnusableError as error:
                failed[str(number)] = str(error)
                log.warning("round %d: %s", now.number, error)
        held = {n: groups[number].model for n, number in state.group_of.items() if n in state.nodes}
        return replace(
            state, members=state.members.holding(held), groups=tuple(groups), failed=failed
        )

    def _strategy(self, state: PerGroupState, number: int) -> Strategy:
        factory: Factory = self.inner
        names = tuple(sorted(name for name, own in state.group_of.items() if own == number))
        return with_memory(factory(names), state.groups[number].memory)

    def _aggregated(
        self,
        state: PerGroupState,
        number: int,
        replies: Mapping[int, RecordDict],
        names: Mapping[int, str],
        now: Round,
    ) -> Inner:
        """Return a group after its strategy's step, without one reply if that makes it fail.

        Raises:
            _UnusableError: it fails without any one of them as well.
        """
        own = state.groups[number]
        sets: list[tuple[str, Mapping[int, RecordDict]]] = [("", replies)]
        if len(replies) > 1:
            sets += [
                (names[out], {node: r for node, r in replies.items() if node != out})
                for out in sorted(replies)
            ]
        why = ""
        for left_out, used in sets:
            inner = self._strategy(state, number)
            try:
                with seeded(self.seed, now.number, number, 1):
                    at = now.number - own.born + 1
                    model, metrics = aggregated(inner, used, number=at)
                _require_finite(model or {})
            except Exception as error:  # of someone else's code, about what silos sent
                why = why or f"{type(error).__name__}: {wire.plain_text(error)}"
                continue
            if left_out:
                log.warning(
                    "round %d: the reply of %s is left out: its group's strategy cannot use it: %s",
                    *(now.number, left_out, why),
                )
            return replace(
                own,
                model=own.model if model is None else model,
                memory=memory_of(inner),
                trained=own.trained or model is not None,
                metrics=_numbers(metrics),
            )
        among = ", ".join(names[node] for node in sorted(replies))
        raise _UnusableError(f"the strategy of {among} made no model, and the last stays: {why}")

    def details(self, state: PerGroupState) -> Mapping[str, Any]:
        members: dict[str, list[str]] = {}
        for name in sorted(state.nodes):
            if name in state.group_of:
                members.setdefault(str(state.group_of[name]), []).append(name)
        found: dict[str, Any] = {"members": members}
        metrics = {str(n): dict(own.metrics) for n, own in enumerate(state.groups) if own.metrics}
        found |= {"inner": metrics} if metrics else {}
        found |= {"placed": {n: dict(own) for n, own in state.losses.items()}}
        return found | ({"failed": dict(state.failed)} if state.failed else {})

    def models(self, state: PerGroupState) -> Mapping[str, Arrays]:
        """Return silo → its group's model; silos that wait for a place have none."""
        held = state.members.models.items()
        return {name: arrays_of(model) for name, model in held if name in state.group_of}


class _UnusableError(Exception):
    """A group's strategy made no model of its silos' replies."""


def groups_of(given: Iterable[Iterable[str]]) -> tuple[Group, ...]:
    """Return groups given by hand, sorted.

    Raises:
        FederationError: there is none, one is empty, or a silo is in two.
    """
    groups = [tuple(sorted({*map(str, group)})) for group in given]
    names = [name for group in groups for name in group]
    if not groups or not all(groups):
        raise refused(f"groups: at least one is needed, and none may be empty. Got {groups}.")
    if double := sorted({name for name in names if names.count(name) > 1}):
        raise refused(f"groups: every silo is in one. {double[0]} is in several.")
    return tuple(sorted(groups))


def _present(state: PerGroupState, here: Sequence[str]) -> dict[int, Group]:
    """Return number of a group → its silos that are connected."""
    found: dict[int, list[str]] = {}
    for name in sorted(here):
        if name in state.group_of:
            found.setdefault(state.group_of[name], []).append(name)
    return {number: tuple(names) for number, names in sorted(found.items())}


def _loss(update: Update) -> float:
    loss = update.metrics.get(wire.LOSS, math.nan)
    return loss if math.isfinite(loss) else error_of(update.metrics)


def _number(purpose: str) -> int:
    return int(purpose.rpartition("-")[2])


def _require_finite(model: Arrays) -> None:
    for name, array in model.items():
        if not math.isfinite(wire.largest_of(array)):
            raise ValueError(f"array {name!r} of its model contains NaN or infinity")


def _numbers(metrics: MetricRecord | None) -> dict[str, float]:
    if metrics is None:
        return {}
    return {
        str(key): float(value)
        for key, value in metrics.items()
        if isinstance(value, int | float) and math.isfinite(value)
    }
