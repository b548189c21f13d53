"""The roster for any ClientApp: a node is a silo, numbered or by a name that its app states."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

from flwr.app import ConfigRecord, Message, RecordDict

from coterie import wire
from coterie.engine.port import Engine
from coterie.strategies.errors import EXIT_NO_SILOS, FederationError
from coterie.strategies.rounds.exchange import exchange
from coterie.strategies.rounds.roster import POLL_S, SAY_AGAIN_S, Silo

log = logging.getLogger("coterie.run")

NAME_S = 120.0
"""Seconds for nodes to state their names; a SuperNode may start a process to answer."""


@dataclass
class NodeRoster:
    """A roster for any ClientApp, on which every connected node is a silo.

    A node keeps its name for the whole run. It is called ``silo-0``, ``silo-1``, … in the order in
    which nodes come, those that come together by their ids, unless its name is known.

    Attributes:
        min_silos: silos that round 1 waits for.
        deadline_s: seconds to wait for them.
        names: node → its name, as far as known.
        ask: ask new nodes for their names (``query.name``), which the ClientApp must answer. A
            resident silo answers for its app.
    """

    min_silos: int = 1
    deadline_s: float = 300.0
    names: dict[int, str] = field(default_factory=dict)
    ask: bool = False
    _taken: set[str] = field(default_factory=set)
    _of_run: bool = False

    def for_a_run(self) -> NodeRoster:
        """Return a roster that knows the same names and learns others; itself if made for a run."""
        if self._of_run:
            return self
        return replace(self, names=dict(self.names), _taken=set(self._taken), _of_run=True)

    def recall(self, silos: Sequence[Silo], names: Iterable[str]) -> None:
        """Use the names of a run that goes on.

        Args:
            silos: that were connected.
            names: of all silos that ever took part; a new node gets none of them.
        """
        self.names |= {silo.node_id: silo.name for silo in silos}
        self._taken |= set(names)

    def present(self, engine: Engine, *, number: int) -> list[Silo]:
        enough = self.min_silos if number <= 1 else 1
        deadline, said = time.monotonic() + self.deadline_s, 0.0
        while len(nodes := sorted(engine.nodes())) < enough:
            now = time.monotonic()
            if now >= deadline:
                raise FederationError(
                    f"timed out after {self.deadline_s:.0f} s: {len(nodes)} of at least "
                    f"{enough} nodes are connected. Start more, or lower min_silos.",
                    exit_code=EXIT_NO_SILOS,
                )
            if now - said >= SAY_AGAIN_S:
                said = now
                log.info("waiting for nodes: %d of at least %d connected", len(nodes), enough)
            time.sleep(POLL_S)
        self._name(engine, [node for node in nodes if node not in self.names])
        return sorted((Silo(self.names[node], node) for node in nodes), key=lambda one: one.name)

    def _name(self, engine: Engine, new: Sequence[int]) -> None:
        """Give new nodes the names that they state, or else the next numbers."""
        stated = self._stated(engine, new) if self.ask and new else {}
        number = len(self.names)
        for node in new:
            taken = self._taken | set(self.names.values())
            name = stated.get(node, "")
            if name in taken:
                log.warning("node %d reports the name %s, which another node has", node, name)
                name = ""
            while not name or name in taken:
                name, number = f"silo-{number}", number + 1
            self.names[node] = name

    def _stated(self, engine: Engine, new: Sequence[int]) -> dict[int, str]:
        messages = [
            Message(RecordDict(), dst_node_id=node, message_type=wire.NAME, group_id="0")
            for node in new
        ]
        found = {}
        for node, answer in zip(new, exchange(engine, messages, deadline_s=NAME_S), strict=True):
            if answer is None or answer.has_error():
                why = "it did not answer in time" if answer is None else answer.error.reason
                log.warning("node %d states no name: %s", node, why)
                continue
            config = wire.config_records(answer.content).get(wire.CONFIG, ConfigRecord())
            name = config.get(wire.SILO)
            if isinstance(name, str) and wire.is_silo_name(name):
                found[node] = name
            else:
                log.warning("node %d states an invalid name: %.100r", node, name)
        return found
