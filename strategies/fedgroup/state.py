"""FedGroup's state between rounds, and the global model in it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from coterie.strategies.rounds.handles import Arrays, Model
from coterie.strategies.rounds.members import Members
from coterie.strategies.rounds.models import plain_mean


@dataclass(frozen=True)
class FedGroupState:
    """FedGroup's state between rounds. Groups are numbered from 0 and never renumbered.

    Attributes:
        group_of: silo → number of its group, permanently; silos not in it are cold.
        group_models: w^(g_j).
        directions: Δw₀^(g_j), frozen: mean pre-training updates (the compared arrays only).
        norms: the lengths of ``directions``.
        formed: round and purpose of the trainings that formed the groups.
        pretraining: the silos whose updates form the groups; None before they are chosen.
        separation: silhouette of the groups formed, if there is one.
        here: silos of the last round, sorted.
        begun: silos whose cold start was the beginning of the last round's training.
        similarity: silo placed in the last round → its cosine with every direction.
        opened: silos that opened a group in the last round.
        compared: silos whose updates formed groups in the last round; ``cosines`` and ``lengths``
            are of those updates.
    """

    members: Members
    group_of: Mapping[str, int] = field(default_factory=dict)
    group_models: tuple[Model, ...] = ()
    directions: tuple[Arrays, ...] = ()
    norms: tuple[float, ...] = ()
    formed: tuple[int, str] | None = None
    pretraining: tuple[str, ...] | None = None
    separation: float | None = None
    here: tuple[str, ...] = ()
    begun: tuple[str, ...] = ()
    similarity: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    opened: tuple[str, ...] = ()
    compared: tuple[str, ...] = ()
    cosines: tuple[tuple[float, ...], ...] = ()
    lengths: tuple[float, ...] = ()


def global_model(state: FedGroupState) -> Model:
    """Return the auxiliary global model (Algorithm 2, line 11): the plain mean of group models.

    It is w⁰ without groups. After a run, call ``global_model(result.state)``.
    """
    return plain_mean(state.group_models) if state.group_models else state.members.initial
