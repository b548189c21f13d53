"""Rosters: which silos are connected, are new, or have left.

Flower knows nodes; a federation knows silos by name. ``DescribedRoster`` asks every new node for
its description (``query.describe``), binds names to nodes, and refuses silos that cannot take part,
with the reason. ``nodes.NodeRoster`` serves any ClientApp.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from flwr.app import ConfigRecord, Message, RecordDict

from coterie import wire
from coterie.engine.port import Engine
from coterie.strategies.errors import EXIT_NO_SILOS, FederationError
from coterie.strategies.rounds.admission import difference, objection, own_release, release_of
from coterie.strategies.rounds.churn import Churn
from coterie.strategies.rounds.exchange import exchange
from coterie.strategies.rounds.reasons import (
    by_reason,
    first_of,
    own_name,
    sentences,
    waiting_text,
)

log = logging.getLogger("coterie.run")

DESCRIBE_DEADLINE_S, DESCRIBE_MORE_S = 20.0, 0.1
"""Seconds for silos to describe themselves, and additional seconds per silo: a loaded SuperLink
forwards about ten messages a second."""
ASKED_AGAIN_S, MOST_ASKED_AGAIN_S = 2.0, 64.0
"""Seconds until a node that did not describe itself is asked again, doubled each time, and their
maximum. It then has ``SHORT_DEADLINE_S`` to answer, for which the others wait."""
MOST_LATER_S = 30.0
"""Longest such pause for a silo that replies that it cannot take part yet."""
SHORT_DEADLINE_S = 5.0
"""Seconds for silos that do not fit to note the difference, and for nodes that are asked again."""
REFUSED_S = 10.0
"""Seconds after which a run ends that every silo here has refused, if they were enough for it."""
POLL_S = 0.05
SAY_AGAIN_S = 10.0


@dataclass(frozen=True)
class Silo:
    """A silo that is connected.

    Attributes:
        node_id: Flower's id of its present connection.
        num_examples: training samples it stated, 0 if it stated none.
        alpha: its own α for HCCT, or None.
        described: it answered ``query.describe``: it understands packed models and answers a train
            message with the error of the model received.
        buffers: names of arrays that are statistics.
        min_group_size: the smallest group, itself included, in which its update may be averaged.
        max_local_epochs: the most epochs of one training; 0 = no limit.
        pooled_columns: numeric columns that the run's scale must cover.
        head: layers of the model's predictor; empty if it described no latent split.
        metric, unit: the task's primary metric, and the unit of real targets.
        private: it states that it trains with differential privacy.
        unlabelled: its samples have no labels yet: it gets a model and trains none.
        tests: it measures a model on its data, and trains none.
        protocol, release: the protocol version used with it, and its coterie version, if stated.
        mark: of its training data, see ``wire.Description``; empty if it gives none.
    """

    name: str
    node_id: int
    num_examples: int = 0
    alpha: float | None = None
    described: bool = False
    buffers: tuple[str, ...] = ()
    min_group_size: int = 1
    max_local_epochs: int = 0
    pooled_columns: int = 0
    head: wire.Layers = ()
    metric: str = "error"
    unit: str = ""
    private: bool = False
    unlabelled: bool = False
    tests: bool = False
    protocol: int = wire.PROTOCOL
    release: str = ""
    mark: str = ""

    @property
    def data(self) -> tuple[int, str]:
        """The statements about its data; if they change, its data have changed."""
        return self.num_examples, self.mark

    @property
    def trains(self) -> bool:
        """Whether its samples have labels, and it does not only test."""
        return not (self.unlabelled or self.tests)


class Roster(Protocol):
    """The interface that the round loop requires of a roster."""

    def present(self, engine: Engine, *, number: int) -> list[Silo]:
        """Return the connected silos, sorted by name; wait if the run needs more to continue.

        Raises:
            FederationError: too few came within the deadline.
        """
        ...


@dataclass
class DescribedRoster:
    """A roster of silos by stated name; the first node with a name keeps it while connected.

    A node with a registered key has a permanent id. Its description is valid while it is connected;
    when it returns it is asked again, because it may have restarted with different terms or data.

    Attributes:
        task: the run's task; silos of another are refused.
        min_silos, deadline_s: as in ``NodeRoster``.
        terms: what the run requires of a silo, e.g. its strategy, so that it can refuse at once.
        enrolled: returns node id → the name bound to its key; None if keys are not bound. Called
            for every newcomer, so that silos can be enrolled during a run.
        awaited: silos of a resumed run: the first round waits for them as well, and starts without
            those that are not back by the deadline.
        patience_s: seconds to wait for enough silos of a resumed run, if longer.
        schema: fingerprint of the run's model; empty takes the one that most of the first
            ``min_silos`` state.
        on_wait: called with what the roster waits for, and why connected silos do not take part,
            when that changes and every ``SAY_AGAIN_S`` seconds.
    """

    task: str
    min_silos: int = 1
    deadline_s: float = 300.0
    churn: Churn = field(default_factory=Churn)
    terms: Mapping[str, str | int | float | bool] = field(default_factory=dict)
    enrolled: Callable[[], Mapping[int, str]] | None = None
    awaited: frozenset[str] = frozenset()
    patience_s: float = 0.0
    schema: str = ""
    on_wait: Callable[[str], None] = lambda _: None
    refused: dict[str, str] = field(default_factory=dict)
    """Silo or node → why it does not take part, as far as known."""
    elsewhere: dict[str, str] = field(default_factory=dict)
    """Silo or node → its statement that it serves other tasks, as is usual with several studies."""
    _parts: wire.Parts = field(default_factory=dict)
    """Parts of the schema, from the first silo that has it."""
    _agreed: wire.Description | None = None
    """Description of a silo that states what most silos state of the task."""
    _described: dict[int, wire.Description] = field(default_factory=dict)
    """Node → its description, until the run begins."""
    _begun: bool = False
    _several: set[int] = field(default_factory=set)
    """Nodes that have just stated that they stand for several silos."""
    _silent: dict[int, tuple[float, float]] = field(default_factory=dict)
    """Node without a description → when it is asked again, and the pause after that."""
    _later: dict[int, str] = field(default_factory=dict)
    """Node among these → why it does not take part yet."""
    _others: list[int] = field(default_factory=list)
    """Nodes of another schema that have not been informed."""
    _by_node: dict[int, Silo] = field(default_factory=dict)
    _refused_nodes: dict[int, str] = field(default_factory=dict)
    _doubles: dict[int, str] = field(default_factory=dict)
    _said: float = 0.0

    def __post_init__(self) -> None:
        self._given = bool(self.schema)

    def present(self, engine: Engine, *, number: int) -> list[Silo]:
        due = {name for name, at in self.churn.joins.items() if at <= number}
        gone = {name for name, at in self.churn.leaves.items() if at <= number}
        due -= gone

        started, most, known, refused_at = time.monotonic(), 0, "", 0.0
        deadline = started + self.deadline_s
        patience_s = max(self.deadline_s, self.patience_s if self.awaited else 0.0)
        while True:
            here = self._look(engine, number=number)
            if self._described and len(self._described) >= (self.min_silos if number <= 1 else 1):
                self._settle_task(engine)
                here = self._here(number)
            names = {silo.name for silo in here}
            missing, lingering = sorted(due - names), sorted(gone & names)
            away = sorted(self.awaited - names - gone - due)
            now = time.monotonic()
            untrained = self.terms.get(wire.STRATEGY) in wire.UNTRAINED
            training = sum(silo.trains or (untrained and silo.tests) for silo in here)
            if self.awaited and len(here) > most:  # they are coming back: the others may as well
                most = len(here)
                deadline = max(deadline, min(now + self.deadline_s, started + patience_s))
            late = now >= deadline
            back = min(self.min_silos, len(self.awaited - gone))
            enough = training >= (self.min_silos if number <= 1 else max(1, back))
            if enough and not missing and not lingering and (late or not away):
                if away:
                    log.warning("the run continues without %s", ", ".join(away))
                self.awaited = frozenset()
                self._described.clear()
                self._begun = True
                return sorted(here, key=lambda silo: silo.name)
            text = waiting_text(training, self.min_silos, missing + away, lingering, number)
            reasons = self._reasons()
            text += reasons
            news = reasons + self._refusals()
            if news != known or time.monotonic() - self._said >= SAY_AGAIN_S:
                self._said, known = time.monotonic(), news
                said = text + self._refusals() + self._hint()
                log.info("%s", said)
                self.on_wait(said)
            refused_at = (refused_at or now) if number <= 1 and self._all_refuse(here) else 0.0
            if refused_at and now - refused_at >= REFUSED_S:
                why = f"every silo that is connected refuses the run{self._refusals()}. Change"
                text = f"{why} what they refuse, and start another run."
                raise FederationError(text, exit_code=EXIT_NO_SILOS)
            if now >= started + patience_s:
                later = self._later.values()  # reported already
                unreported = {who: why for who, why in self.refused.items() if why not in later}
                refused = "".join(
                    f" {wire.some(names)} {'was' if len(names) == 1 else 'were'} refused: {why}"
                    for why, names in by_reason(unreported).items()
                )
                why = f"timed out after {patience_s:.0f} s while {text}.{refused}"
                change = "Change what they refuse. " * bool(refused)
                text = f"{why} {change}{self._after_waiting()}"
                raise FederationError(text, exit_code=EXIT_NO_SILOS)
            time.sleep(POLL_S)

    def _reasons(self) -> str:
        return first_of([*self._later.values(), *sentences(self.elsewhere)])

    def _refusals(self) -> str:
        """Return why silos have refused the run for good."""
        later = self._later.values()
        unreported = {who: why for who, why in self.refused.items() if why not in later}
        return first_of(sentences(unreported))

    def _all_refuse(self, here: Sequence[Silo]) -> bool:
        """Return whether enough silos for the run are connected, and all have refused it for good.

        Where silos are enrolled, others may still come.
        """
        undecided = here or self._silent or self._later or self._doubles or self.elsewhere
        enough = len(self._refused_nodes) >= self.min_silos
        return self.enrolled is None and not self.awaited and not undecided and enough

    def _hint(self) -> str:
        """Return what to add to the message while too few silos are connected."""
        return ""

    def _after_waiting(self) -> str:
        if self._refusals():
            return "Then start another run."
        asks = self.terms.get(wire.STRATEGY) in (*wire.UNTRAINED, wire.CONTRIBUTION)
        longer = "--wait" if asks else "wait-for-silos"
        return f"Start silos with `coterie silo serve`, or raise {longer}."

    def _look(self, engine: Engine, *, number: int) -> list[Silo]:
        """Describe new nodes and return the silos that are here and due."""
        nodes = set(engine.nodes())
        for node in (set(self._by_node) | set(self._refused_nodes) | set(self._silent)) - nodes:
            self._by_node.pop(node, None)
            self._described.pop(node, None)
            self._silent.pop(node, None)
            self._later.pop(node, None)
            self._refused_nodes.pop(node, None)
            self._doubles.pop(node, None)
        held = {silo.name for silo in self._by_node.values()}
        for node in [n for n, name in self._doubles.items() if name not in held]:
            del self._doubles[node]
            self._refused_nodes.pop(node, None)
        now = time.monotonic()
        resting = {node for node, (at, _) in self._silent.items() if now < at}
        new = sorted(nodes - set(self._by_node) - set(self._refused_nodes) - resting)
        known = [node for node in new if node in self._silent]
        self._describe(engine, [n for n in new if n not in self._silent], DESCRIBE_DEADLINE_S)
        self._describe(engine, known, SHORT_DEADLINE_S)
        if self._several:
            said, self._several = self._several, set()
            for node in said & set(engine.nodes()):  # the engine has put nobody in its place
                self._refuse(node, "", "it claims to be several silos, which is not possible here.")
            if said - self._refused_nodes.keys():
                return self._look(engine, number=number)
        return self._here(number)

    def _here(self, number: int) -> list[Silo]:
        return [
            silo for silo in self._by_node.values() if self.churn.joins.get(silo.name, 0) <= number
        ]

    def _settle_task(self, engine: Engine) -> None:
        """Adopt what most connected silos state of the task, and refuse the others.

        This covers the schema, unless it is given, and whatever else must be the same for a task:
        no single silo may decide which arrays are compared. In a tie, the silo whose name comes
        first wins. Until the run begins every silo that arrives has a vote, so the order of arrival
        does not matter.
        """
        stated = sorted((described.name, node) for node, described in self._described.items())
        votes = Counter(self._described[node].common for _, node in stated)
        common = votes.most_common(1)[0][0]
        same = [node for _, node in stated if self._described[node].common == common]
        if self._agreed is None or common != self._agreed.common:
            self._agreed, self._parts = self._described[same[0]], {}
            self.schema = self._agreed.schema
            for node in same:
                self._parts = self._parts or self._described[node].parts
                if node in self._refused_nodes:
                    del self._refused_nodes[node]
                    self._let_in(self._described[node], node)
        for node in self._described.keys() - set(same):
            self._by_node.pop(node, None)
        for name, node in stated:
            if node not in same and node not in self._refused_nodes:
                self._refuse(node, name, self._difference(self._described[node]))
                self._others.append(node)
        self._notify_others(engine)

    def _describe(self, engine: Engine, new: Sequence[int], deadline_s: float) -> None:
        config: Any = {**self.terms, **wire.offer(), wire.TASK: self.task}
        messages = [_describe(node, config) for node in new]
        deadline_s += DESCRIBE_MORE_S * len(new)
        answers = exchange(engine, messages, deadline_s=deadline_s)
        read = []
        for node, answer in zip(new, answers, strict=True):
            described = self._read(node, answer)
            if described is not None:
                read.append((described, node))
        # By name, so that which of two nodes comes first does not depend on random node ids.
        for described, node in sorted(read, key=lambda pair: (pair[0].name, pair[1])):
            self._admit(described, node)
        self._notify_others(engine)

    def _notify_others(self, engine: Engine) -> None:
        """Send silos of another schema the run's, so that their logs state the difference."""
        config: Any = {
            **wire.offer(),
            wire.TASK: self.task,
            **self.terms,
            wire.SCHEMA: self.schema,
            wire.SCHEMA_PARTS: wire.encode_parts(self._parts),
        }
        others, self._others = self._others, []
        messages = [_describe(node, config) for node in others]
        exchange(engine, messages, deadline_s=SHORT_DEADLINE_S)

    def _read(self, node: int, answer: Message | None) -> wire.Description | None:
        if answer is None:
            _, pause = self._silent.get(node, (0.0, ASKED_AGAIN_S))
            self._silent[node] = time.monotonic() + pause, min(2 * pause, MOST_ASKED_AGAIN_S)
            log.warning("node %s did not identify itself; retrying in %.0f s", node, pause)
            return None
        if answer.has_error() and answer.error.code in wire.NOT_NOW:
            self.later(node, str(answer.error.reason))
            return None
        self._silent.pop(node, None)
        self._later.pop(node, None)
        if answer.has_error() and answer.error.code == wire.HOSTS:
            self._several.add(node)
            return None
        if answer.has_error():
            reason = str(answer.error.reason)
            self._refuse(node, self._called(node, reason), reason)
            return None
        try:
            return wire.decode_description(answer.content)
        except wire.WireError as error:
            self._refuse(node, f"node {node}", str(error))
            return None

    def later(self, node: int, reason: str) -> None:
        """Treat a silo that cannot take part now as away, and ask it again soon.

        It may wait for a person's approval, or for its working hours.
        """
        reason, known = wire.plain_text(reason), self._by_node.pop(node, None)
        _, pause = self._silent.get(node, (0.0, ASKED_AGAIN_S))
        self._silent[node] = time.monotonic() + pause, min(2 * pause, MOST_LATER_S)
        if self._later.get(node) != reason:
            log.info("%s", reason)
        self._later[node] = reason
        self._described.pop(node, None)
        self.refused[known.name if known else self._called(node, reason)] = reason

    def _called(self, node: int, reason: str) -> str:
        name = own_name(reason)
        taken = any(silo.name == name for silo in self._by_node.values())
        return f"node {node}" if taken or not name else name

    def _admit(self, described: wire.Description, node: int) -> None:
        if self.enrolled is not None:  # a name belongs to its key
            bound = self.enrolled().get(node, "")
            if bound != described.name:
                key = f"its key is enrolled as {bound!r}" if bound else "its key is not enrolled"
                self._refuse(node, bound, f"it claims the name {described.name!r}, but {key}.")
                return
        reason = self._objection(described)
        if reason:
            self._refuse(node, described.name if wire.is_silo_name(described.name) else "", reason)
            if self._is_other(described) and described.task == self.task:
                self._others.append(node)
            return
        if any(silo.name == described.name for silo in self._by_node.values()):
            # Not for good: a silo that was killed and came back waits until its old node is gone.
            self._doubles[node] = described.name
            reason = (
                "another silo with that name is already connected. Give every silo its own name."
            )
            self._refuse(node, described.name, reason)
            return
        if not self._begun:
            self._described[node] = described
        if self._begun or self._given:
            self._parts = self._parts or described.parts
        self._let_in(described, node)

    def _is_other(self, described: wire.Description) -> bool:
        """Return whether its statements about the task differ from those that hold in the run."""
        if self._given and described.schema != self.schema:
            return True
        agreed = self._agreed if self._begun else None
        return agreed is not None and described.common != agreed.common

    def _let_in(self, described: wire.Description, node: int) -> None:
        for who in (described.name, f"node {node}"):
            self.refused.pop(who, None)
            self.elsewhere.pop(who, None)
        self._by_node[node] = Silo(
            name=described.name,
            node_id=node,
            num_examples=described.num_examples,
            alpha=described.alpha,
            described=True,
            buffers=described.buffers,
            min_group_size=described.min_group_size,
            max_local_epochs=described.max_local_epochs,
            pooled_columns=described.pooled_columns,
            head=described.head,
            metric=described.metric,
            unit=described.unit,
            private=described.private,
            unlabelled=described.unlabelled,
            tests=described.tests,
            protocol=described.protocol,
            release=release_of(described),
            mark=described.mark,
        )
        log.info(
            "silo %s joined: %d %s, %s%s",
            described.name,
            described.num_examples,
            described.counted,
            described.device,
            _other_release(release_of(described)),
        )

    def _objection(self, described: wire.Description) -> str:
        reason = objection(described, self.task)
        if reason or not self._is_other(described):
            return reason
        return self._difference(described)

    def _difference(self, described: wire.Description) -> str:
        names = [silo.name for silo in self._by_node.values()]
        return difference(described, self.schema, self._parts, self._agreed, names)

    def _refuse(self, node: int, who: str, reason: str) -> None:
        who = who or f"node {node}"
        self._refused_nodes[node] = reason = wire.plain_text(reason)
        if wire.OTHER_TASK in reason:
            self.elsewhere[who] = reason
            log.debug("silo %s serves another task: %s", who, reason)
            return
        self.refused[who] = reason
        log.error("silo %s does not take part: %s", who, reason)


def _describe(node: int, config: Mapping[str, Any]) -> Message:
    content = RecordDict({wire.CONFIG: ConfigRecord(dict(config))})
    return Message(content, dst_node_id=node, message_type=wire.DESCRIBE, group_id="0")


def _other_release(theirs: str) -> str:
    """Return a note on a silo whose release is not the coordinator's."""
    own = own_release()
    return f", coterie {theirs} (here {own}; compatible)" if own and theirs not in ("", own) else ""
