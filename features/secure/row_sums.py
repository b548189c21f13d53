"""Exact sums over rows in a secure run: who is in them together, and what silos receive about each.

Every silo answers masked; only the sum over all silos that were asked together can be read.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from flwr.app import Message

from coterie import wire
from coterie.engine.port import Engine
from coterie.features.secure.protocol import FEWEST, encode_peers
from coterie.features.secure.sums import Enrolled, SecureRun
from coterie.features.secure.together import Member, Together, planned
from coterie.strategies.rounds.algorithm import Order
from coterie.strategies.rounds.exchange import exchange
from coterie.strategies.rounds.replies import ReplyError
from coterie.strategies.rounds.roster import Silo

log = logging.getLogger("coterie.run")


@dataclass
class RowSums:
    """The exact sums of one run.

    ``run`` has the silos' keys, and the blocks that they state.
    """

    run: SecureRun
    _waiting: list[tuple[Order, ReplyError]] = field(default_factory=list)

    def admit(self, silos: Sequence[Silo]) -> dict[str, str]:
        """Get the silos' keys; return silo → why it can be in no sum."""
        self.run.require_own(silos)
        return self.run.greet(silos, seed=False)

    def staying(self, silos: Sequence[Silo]) -> tuple[str, ...]:
        """Return the most of these silos that may be summed together."""
        return tuple(self._planned(silos).members)

    def waits(self, name: str, here: Collection[str]) -> str:
        """Return why a silo is not in the sum of silos that are here."""
        block, page = self.run.blocks.get(name, ()), wire.page("Secure runs")
        known = {peer.name for peer in self.run.keys_of(list(here))}
        if missing := sorted(set(block) - known):
            return (
                f"it waits for {', '.join(missing)}: its rows are only in sums with all of its "
                f"block, {', '.join(block)} (see {page})."
            )
        if block:
            return (
                f"other silos contradict its block, {', '.join(block)}, or it states far more rows "
                f"than they have (see {page})."
            )
        return (
            "it waits until enough silos without a block are here to form one with it, and none of "
            f"them has far more rows than the others together (see {page})."
        )

    def entries(self, silos: Sequence[Silo]) -> dict[str, Any]:
        """Return the entries that a question to these silos has, whose answers are summed."""
        asked = self._planned(silos)
        for block in asked.blocks:
            if any(self.run.blocks.get(name) != block for name in block):
                log.info("sums over the rows of %s always include all of them", ", ".join(block))
            self.run.blocks |= dict.fromkeys(block, block)
        return {
            wire.SECURE: True,
            wire.GROUP_SIZE: len(asked.members),
            wire.SUM: asked.encode(),
            wire.PEERS: encode_peers(self.run.keys_of(list(asked.members))),
        }

    def _planned(self, silos: Sequence[Silo]) -> Together:
        here = {peer.name for peer in self.run.keys_of([silo.name for silo in silos])}
        members = {silo.name: _member(silo) for silo in silos if silo.name in here}
        return planned(members, {n: block for n, block in self.run.blocks.items() if block})

    def asked(self, orders: Sequence[Order]) -> list[Order]:
        """Return the orders as they are sent: those with one question are summed together.

        A silo that must not be in the sum is not asked (``take_waiting``).
        """
        groups: dict[int, list[Order]] = {}
        for order in orders:
            groups.setdefault(id(order.model), []).append(order)
        found = []
        for own in groups.values():
            here = [order.silo.name for order in own]
            stay = self.staying([order.silo for order in own])
            entries = self.entries([o.silo for o in own if o.silo.name in stay]) if stay else {}
            for order in own:
                if order.silo.name in stay:
                    found.append(replace(order, config={**order.config, **entries}))
                else:
                    why = self.waits(order.silo.name, here)
                    self._waiting.append((order, ReplyError(why)))
        return found

    def take_waiting(self) -> list[tuple[Order, ReplyError]]:
        """Return the orders that were not sent since the last call, with why."""
        found, self._waiting = self._waiting, []
        return found


def masking_of(
    engine: Engine,
    silos: Mapping[str, Silo],
    terms: Mapping[str, Any],
    deadline_s: float,
    enrolled: Enrolled | None,
) -> tuple[RowSums, dict[str, str]]:
    """Return the exact sums of a run without rounds, and silo → why it can be in none.

    Args:
        terms: describe the run to the silos.
        enrolled: vouches for their keys; None in a federation without enrolment.
    """

    def ask(messages: Sequence[Message], within_s: float) -> list[Message | None]:
        return exchange(engine, messages, deadline_s=within_s)

    found = RowSums(SecureRun(ask, terms, deadline_s, enrolled))
    return found, found.admit([silo for silo in silos.values() if silo.trains])


def _member(silo: Silo) -> Member:
    return Member(max(FEWEST, silo.min_group_size), max(1, silo.num_examples))
