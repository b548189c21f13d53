"""pFedGraph: every silo has its own mean, weighted by the similarity of the silos' updates.

Ye, Ni, Wu, Chen, Wang: "Personalized Federated Learning with Inferred Collaboration Graphs", ICML
2023, https://proceedings.mlr.press/v202/ye23b.html. After each round the server infers a directed
graph of weights w_ij, row by row, from the cosines of ``θ_j − w⁰`` and the silos' sizes
(``coterie.strategies.partition.pfedgraph``); silo i gets ``θ̃_i = Σ_j w_ij θ_j`` and continues from
it with ``−λ cos(θ, θ̃_i)`` added to its loss. There are no groups: two silos share a model only if
their rows are equal, as all are with a large α, which is FedAvg.

Differs from the paper in:

- *Sign of the pull.* It draws a model towards its aggregate, as the paper says; the authors' code
  adds the cosine with the opposite sign, which pushes it away.
- The pull is to the model that the silo received, not to a sum of normalised models.
- Cosines are used as they are; the authors' code takes any above 0.9 for 1.
- *Smallest groups.* A silo enters another's mean only if that has as many silos as it accepts; if
  too few are left for its own, it continues alone.
- *Newcomers*, which the paper does not have, start from the mean of all models, and are weighed
  like the others once they have trained. A silo that does not answer keeps its model.
- Distances are of parameters; BatchNorm's running statistics are averaged with the weights.

It uses FedAvg's messages at FedAvg's cost and works with any ClientApp. ClientApps that are not
coterie's train without the pull.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from pydantic import Field

from coterie import wire
from coterie.strategies.partition.gram import gram
from coterie.strategies.partition.pfedgraph import collaborators
from coterie.strategies.rounds.algorithm import Algorithm, Order, Round, Update, Updates
from coterie.strategies.rounds.handles import Arrays, Model
from coterie.strategies.rounds.members import (
    Members,
    comparison,
    cosine_matrix,
    mean_of_all,
    minimums_of,
    staying,
)
from coterie.strategies.rounds.models import comparable, difference, weighted_mean
from coterie.strategies.rounds.options import Config, NotNegative, Positive
from coterie.strategies.rounds.reports import Group
from coterie.strategies.rounds.roster import Silo


@dataclass(frozen=True)
class Graph:
    """pFedGraph's state between rounds.

    Attributes:
        members: each silo's θ̃ and size; groups are silos with the same row.
        weights: silo → silo → w_ij > 0, of the last round in which it was in the graph.
        compared: silos in the last round's graph, sorted.
        cosines, lengths: of their updates since w⁰.
    """

    members: Members
    weights: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    compared: tuple[str, ...] = ()
    cosines: tuple[tuple[float, ...], ...] = ()
    lengths: tuple[float, ...] = ()


class PFedGraph(Algorithm[Graph]):
    """A separate mean for every silo, by the cosines of the updates."""

    graph_alpha: Positive = Field(
        0.8,
        le=1e6,
        description="α: large values weight silos by their samples (as FedAvg does), small values "
        "by how similar their updates are.",
    )
    graph_lambda: NotNegative = Field(
        0.01,
        le=1e6,
        description="λ, strength of the pull of local training towards the received model.",
    )

    @property
    def averages(self) -> bool:
        return False

    @property
    def crosses(self) -> bool:
        return True

    remembers = Graph

    def newcomer_model(self, state: Graph) -> Model:
        return mean_of_all(state.members)

    def orders(self, state: Graph, now: Round) -> tuple[Graph, list[Order]]:
        """Order training of each silo's own mean, in the group of all present or alone."""
        members = state.members.grouped((name,) for name in now.names)
        orders = [
            Order(silo, members.models[silo.name], config=self._config(state, silo, now))
            for silo in now.silos
        ]
        return replace(state, members=members), orders

    def absorb(self, state: Graph, updates: Updates, now: Round) -> Graph:
        """Compute a row of the graph, and its mean, for every silo that answered."""
        if not updates:
            return state
        names = tuple(u.silo.name for u in updates)
        matrix = gram([list(_moved(state, u).values()) for u in updates])
        cosines = cosine_matrix(matrix)
        sizes = np.array([u.num_examples for u in updates])
        minimums = minimums_of(u.silo for u in updates)
        rows = [
            _row(i, names, np.array(cosines[i]), sizes, minimums, alpha=self.graph_alpha)
            for i in range(len(names))
        ]
        means: dict[tuple[float, ...], Model] = {}  # equal rows share a model
        for row in map(tuple, rows):
            if row not in means:
                means[row] = _mean(updates, row)
        held = {name: means[tuple(row)] for name, row in zip(names, rows, strict=True)}
        members = state.members.holding(held)
        groups: dict[tuple[float, ...] | str, list[str]] = {}
        by_name = dict(zip(names, rows, strict=True))
        for name in members.here:
            groups.setdefault(tuple(by_name[name]) if name in by_name else name, []).append(name)
        weights = {
            name: {other: w for other, w in zip(names, row, strict=True) if w > 0}
            for name, row in by_name.items()
        }
        return Graph(
            members.grouped(sorted(tuple(sorted(group)) for group in groups.values())),
            {**state.weights, **weights},
            names,
            cosines,
            tuple(np.sqrt(matrix.diagonal()).tolist()),
        )

    def sharing(self, state: Graph) -> Sequence[Group]:
        """Return the silos of every mean of several."""
        rows = [tuple(state.weights[name]) for name in state.compared]
        return [row for row in rows if len(row) > 1]

    def details(self, state: Graph) -> Mapping[str, Any]:
        return {
            "weights": {
                name: {other: round(w, 6) for other, w in state.weights[name].items()}
                for name in state.compared
            },
            **comparison(state.compared, state.cosines, state.lengths),
        }

    def _config(self, state: Graph, silo: Silo, now: Round) -> Config:
        """Return the entries; a silo that accepts no group as small as all present stays alone."""
        largest = len(now.silos)
        size = largest if silo.min_group_size <= largest else 1
        pulled = self.graph_lambda and silo.name in state.weights  # to a mean, so not to w⁰
        return {wire.GROUP_SIZE: size} | ({wire.COSINE_LAMBDA: self.graph_lambda} if pulled else {})


def _row(
    own: int,
    names: Sequence[str],
    cosines: np.ndarray,
    sizes: np.ndarray,
    minimums: Mapping[str, int],
    *,
    alpha: float,
) -> list[float]:
    """Return w_i over all names, excluding silos that do not accept a mean of so few."""
    allowed = list(range(len(names)))
    while True:  # each time there is one less
        row = np.zeros(len(names))
        row[allowed] = collaborators(cosines[allowed], sizes[allowed], alpha=alpha)
        inside = [names[i] for i in allowed if row[i] > 0]
        stay = staying(inside, minimums)
        if len(stay) == len(inside):
            break
        if names[own] in inside and names[own] not in stay:
            row = np.zeros(len(names))
            row[own] = 1.0
            break
        allowed = [i for i in allowed if names[i] not in inside or names[i] in stay]
    return [float(weight) for weight in row]


def _mean(updates: Updates, row: Sequence[float]) -> Model:
    used = [(u.model, weight) for u, weight in zip(updates, row, strict=True) if weight > 0]
    return weighted_mean([model for model, _ in used], [weight for _, weight in used])


def _moved(state: Graph, update: Update) -> Arrays:
    """Return the compared arrays, relative to w⁰."""
    delta = difference(update.model, state.members.initial)
    return comparable(delta, similarity="parameters", buffers=update.silo.buffers)
