"""Trees that a silo grows from its own rows alone, at home.

A silo that is alone has no sums to hide in, so it is not asked for any: it grows its trees itself,
from exact rows, and they never leave it. A silo of a group grows some at the end of a run of
``trees``, to compare them with the group's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from math import sqrt

from coterie import wire
from coterie.client.home.rounds import MAX_RUNS
from coterie.client.work.data import Data
from coterie.client.work.measure import sample_losses
from coterie.client.work.request import RefusedError, Request
from coterie.client.work.session import Session
from coterie.client.work.weights import load_weights, read_weights, travelling
from coterie.features.sums.trees.alone import Alone
from coterie.features.sums.trees.ensemble import Ensemble
from coterie.features.sums.trees.growth import HOLDOUT
from coterie.features.sums.trees.rows import ANY, rows_of
from coterie.features.sums.trees.together import grown_alone, tried_alone
from coterie.tasks.toml import checked
from coterie.tasks.trees import Trees
from coterie.wire import Model

CHANCE = 2.0
"""Standard errors beyond which a difference is not chance."""

_grown: dict[tuple[str, str, str, str], tuple[Data, Alone, int, Model]] = {}
"""(silo, home, task, run) → the data, how trees grow, from how many rows, and the trees; of a silo
those of its last ``MAX_RUNS`` runs."""


@dataclass(frozen=True)
class AtHome:
    """Trees of a silo's rows, which a message asks it to use in place of those received.

    Attributes:
        data: the silo's, before anything is held out of it.
    """

    how: Alone
    data: Data
    run: str

    def put(self, session: Session) -> None:
        """Replace the session's model by trees of its training rows, grown once in a run."""
        key = session.settings.name, session.settings.home, session.task.name, self.run
        asked, known = (self.how, len(session.data.train)), _grown.get(key)
        if known is None or known[0] is not self.data or known[1:3] != asked:
            known = _grown[key] = self.data, *asked, grown_here(session, self.how)
            for old in [one for one in _grown if one[:3] == key[:3]][:-MAX_RUNS]:
                del _grown[old]
        load_weights(session.model, known[3])


def at_home(request: Request) -> AtHome | None:
    """Return the trees that a message asks for; None if it asks for none."""
    if not (text := request.value(wire.AT_HOME)):
        return None
    session = request.session
    if not isinstance(session.model, Trees):
        request.refuse_for('does not have network = "trees" in its task.')
    try:
        table = json.loads(text)
    except (ValueError, RecursionError):
        raise RefusedError(f"{wire.AT_HOME} must be JSON. Got {text[:100]!r}.") from None
    return AtHome(checked(Alone, table, wire.AT_HOME, RefusedError), session.data, request.run)


def grown_here(session: Session, how: Alone) -> Model:
    """Return trees of the session's training rows; of no row, none.

    How many are used is chosen on a part of the rows, or on those held out of the session's. On
    trial they grow as those of groups do, so that only rows differ: with the smallest count, unless
    there are fewer rows.
    """
    like = Ensemble.of(read_weights(session.model))
    trees = Ensemble.empty(len(like.leaf), len(like.base), like.depth, len(like.gain))
    if len(session.data.train):
        split = session.data.hold_out(HOLDOUT, seed=0)
        tried = 0 < how.trees <= len(trees.leaf)
        least = session.settings.policy.smallest_count
        if not tried or len(split.train) < least:
            least = ANY
        rows, kept, held = (
            rows_of(session, replace(session.data, train=part), least)
            for part in (session.data.train, split.train, split.test)
        )
        if tried:
            trees = tried_alone(kept, held, trees, how.settings, bins=how.bins, most=how.trees)
        else:
            trees = grown_alone(rows, kept, held, trees, how.settings, bins=how.bins)
    return as_model(trees, session)


def as_model(trees: Ensemble, session: Session) -> Model:
    """Return the arrays of trees in the order of the session's model."""
    arrays = trees.arrays()
    return {name: arrays[name] for name in travelling(session.model)}


def beside_alone(session: Session, how: Alone) -> str:
    """Return how the model in the session and trees of this silo alone compare on its test data."""
    group = read_weights(session.model)
    losses = sample_losses(session.task, session.model, session.data.test)
    load_weights(session.model, grown_here(session, how))
    own = sample_losses(session.task, session.model, session.data.test)
    load_weights(session.model, group)
    apart = losses - own
    error = float(apart.std(ddof=1)) / sqrt(len(apart)) if len(apart) > 1 else float("inf")
    said = (
        f"on {len(apart)} test samples the loss of the group's trees is {losses.mean():.4g}, that "
        f"of trees of this silo's rows alone {own.mean():.4g}"
    )
    if apart.mean() > CHANCE * error:
        return f"{said}: alone is better here, beyond chance"
    if -apart.mean() > CHANCE * error:
        return f"{said}: the group's are better here, beyond chance"
    return f"{said}: the difference may be chance"
