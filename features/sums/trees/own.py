"""What a silo makes of its group's trees: own leaf values, and some trees from its rows alone.

Leaf values (``leaves``) follow the level of a silo's rows. Where its columns also relate to the
target differently, other splits help: so it grows a few trees more, behind the group's. They are
small, as few rows are behind them, and each leaf has the penalty λ k/2, for k own trees at most, as
the group's leaves have. A part of the rows says how many of them help, which may be none. Nothing
of this leaves the silo.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from coterie.client.work.data import Part
from coterie.client.work.session import Session
from coterie.client.work.weights import load_weights, read_weights
from coterie.features.sums.trees.at_home import as_model
from coterie.features.sums.trees.ensemble import Ensemble
from coterie.features.sums.trees.growth import HOLDOUT, Settings, best_number
from coterie.features.sums.trees.leaves import train_leaves
from coterie.features.sums.trees.rows import ANY, rows_of
from coterie.features.sums.trees.together import continued, edges_of
from coterie.tasks.trees import Trees

SHARE = 0.1
"""Own trees, at most, as a share of a model's trees. If no place is left, the group's last go."""
RATE, BINS = 0.1, 64
"""How they grow: learning rate, and most bins of a column."""
LEAST, LEAST_SHARE = 20, 0.1
"""Fewest rows of a leaf: a number, and a share of the rows."""
LEAST_GAIN = 1e-3
"""Share of the loss on the silo's held-out rows that own trees must save."""

_last: dict[tuple[str, str, str], tuple[Part, float, Ensemble, Ensemble]] = {}
"""(silo, home, task) → rows, λ, and the group's trees that it used last, and what it made."""


@dataclass(frozen=True)
class OwnOfGroup:
    """How a silo makes its own of its group's trees; λ is ``penalty`` > 0 (``leaves``)."""

    penalty: float

    def put(self, session: Session) -> None:
        """Turn the group's trees, which are the session's model, into the silo's own."""
        key = session.settings.name, session.settings.home, session.task.name
        group, rows = Ensemble.of(read_weights(session.model)), session.data.train
        known = _last.get(key)
        same = known is not None and known[0] is rows and known[1] == self.penalty
        if known is None or not (same and known[2].equals(group)):
            number = self._best(session, group) if len(rows) > 2 * LEAST else 0
            trees = self._made(session, group, rows, number)
            known = _last[key] = rows, self.penalty, group, trees
        load_weights(session.model, as_model(known[3], session))

    def _best(self, session: Session, group: Ensemble) -> int:
        """Return how many own trees help on rows that are held out of the silo's."""
        most, split = int(SHARE * len(group.leaf)), session.data.hold_out(HOLDOUT, seed=0)
        trees = self._made(session, group, split.train, most)
        held = rows_of(session, replace(session.data, train=split.test), ANY)
        first = _first(group, most)
        losses = held.losses(trees)[first:][: most + 1]
        whole = losses[0, 0]
        if first < _first(group, 0):  # some of the group's have made room
            whole = held.losses(self._made(session, group, split.train, 0))[-1, 0]
        saved = whole - losses[:, 0].min()
        return best_number(losses) if saved > LEAST_GAIN * whole else 0

    def _made(self, session: Session, group: Ensemble, part: Part, number: int) -> Ensemble:
        """Return the silo's own trees from a part of its rows, ``number`` grown by itself."""
        first, model = _first(group, number), session.model
        assert isinstance(model, Trees)
        load_weights(model, as_model(group.first(first), session))
        train_leaves(session.task, model, part, self.penalty)
        trees = Ensemble.of(read_weights(model))
        if not number:
            return trees
        rows = rows_of(session, replace(session.data, train=part), ANY)
        penalty = self.penalty * int(SHARE * len(trees.leaf))
        how = Settings(RATE, penalty, max(LEAST, int(LEAST_SHARE * len(part))))
        edges = edges_of([rows], len(trees.gain), bins=BINS)
        return continued([rows], trees, range(first, first + number), how, edges)


def _first(group: Ensemble, number: int) -> int:
    """Return the place of the first of so many own trees: behind the group's, of which the last
    make room."""
    used = (group.leaf != 0).any(axis=(1, 2)) | (group.feature >= 0).any(axis=(1, 2))
    done = len(used) - int(used[::-1].argmax()) if used.any() else 0
    return min(done, len(used) - number)
