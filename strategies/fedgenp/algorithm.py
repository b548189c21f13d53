"""FedGenP: a generator shows each receiver, in latent space, what the other receivers know.

Taghiyarrenani, Alabdallah, Nowaczyk, Pashami: "Heterogeneous Federated Learning via Personalized
Generative Networks", https://arxiv.org/abs/2308.13265; eqs. 9–13, Algorithm 1. The generators'
arithmetic is ``coterie.strategies.fedgenp.generators``.

Every round the server trains, for every receiver, a generator of latents that the other receivers'
predictors classify as intended and its own does not, and sends it with the model. Silos train on
their data and on generated latents. The aggregated model is the global one; each silo's own after
its training with the generator is its personalised one ("Per"). Labels are drawn uniformly, so
silos reveal nothing about theirs.

Differs from the paper:

- J1 is a mean, J2 is maximised in a bounded way, Adam trains; ``GeneratorPlan`` gives the settings
  for the paper's sum, plain reversal and SGD.
- *Receivers* may be groups (the paper's future work): around a strategy that groups, a group's
  generator learns from the other groups' heads, so that grouping does not cut knowledge off.
- Aggregation is size-weighted, as in every strategy here; the paper writes a plain mean.
- The released code does not reverse the gradient, and its silos weigh their losses by
  10·0.98^round; ``Given(weight=10, distil=10, decay=0.98)`` does the latter.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from coterie.strategies.fedgenp.generative import (
    Generative,
    GenerativeState,
    rng_of,
    teaching,
    without_teachers,
)
from coterie.strategies.fedgenp.latent import Generator, predictor_arrays, predictor_shape
from coterie.strategies.rounds.algorithm import Order, Round
from coterie.strategies.rounds.handles import Arrays, arrays_of
from coterie.strategies.rounds.members import minimums_of
from coterie.strategies.rounds.models import holders
from coterie.strategies.rounds.options import Config
from coterie.strategies.rounds.reports import Group

log = logging.getLogger("coterie.run")

_TRAIN, _DRAW = 1, 2  # purposes of a receiver's randomness, the last of all of them; 0 is fresh


class FedGenP(Generative):
    """A generator per silo or per group, around another algorithm.

    ``reversal = "unbounded"`` diverges sooner or later.
    """

    receivers: Annotated[
        Literal["silos", "groups"],
        Field(
            title="`groups`: silos that start a round from one model share a generator, which "
            "learns from the other groups' models."
        ),
    ] = "silos"

    def problems(self, training: Config) -> Iterator[str]:
        yield from super().problems(training)
        if self.plan.steps < 2 and self.plan.alternates:
            yield (
                f"every second step of a generator is reversal = {self.plan.reversal}, so "
                f"generator-steps must be at least 2. Got {self.plan.steps}. Or take "
                "reversal = none"
            )
        if self.plan.reversal == "unbounded":
            log.warning("reversal = unbounded: latents lose their labels and may become infinite")

    def generated(
        self, state: GenerativeState, orders: Sequence[Order], now: Round
    ) -> GenerativeState:
        """Train each receiver's generator against its own head and for the others' (eqs. 9–13)."""
        heads, members = self._receivers(state, orders, now)
        names = teaching(heads, members, _behind(state, members), minimums_of(now.silos))
        if len(names) < 2:
            return without_teachers(state, now)
        from coterie.strategies.fedgenp.generators import train_generators

        started = time.perf_counter()
        heads = {name: heads[name] for name in names}
        predictor_shape(heads, state.layers)  # refuses heads of different shapes
        trained, quality = train_generators(
            [
                _inherited(state, members[name]) or self.fresh(name, heads, state.layers)
                for name in names
            ],
            list(heads.values()),
            state.layers,
            plan=self.plan,
            rngs=[rng_of(self.seed, now.number, name, _TRAIN) for name in names],
            drawing=rng_of(self.seed, now.number, "", _DRAW),
            device=self.device,
        )
        return replace(
            state,
            generators=dict(zip(names, trained, strict=True)),
            members={name: members[name] for name in names},
            receiving=names,
            teachers=names,
            quality={n: (q.others, q.own) for n, q in zip(names, quality, strict=True)},
            seconds=time.perf_counter() - started,
            alone=False,
        )

    def _receivers(
        self, state: GenerativeState, orders: Sequence[Order], now: Round
    ) -> tuple[dict[str, Arrays], dict[str, Group]]:
        """Return receiver → its head, and → its silos, for receivers with a trained predictor."""
        if self.receivers == "silos":
            return dict(state.heads), {name: (name,) for name in state.heads}
        models = self.base.next_models(state.base)
        # Also those whose turn it is not start from their group's model. Who is in no group has
        # only just come (back): its model is nobody's, or an old one.
        grouped = {name for group in self.base.groups(state.base) for name in group}
        starts = {name: models[name] for name in grouped & set(now.names) & set(models)}
        starts |= {order.silo.name: order.model for order in orders}
        trained = state.trained - state.other
        sharing = [names for _, names in holders(starts)]
        groups = {"+".join(g): tuple(g) for g in sharing if trained.intersection(g)}
        heads = {
            receiver: predictor_arrays(arrays_of(starts[group[0]]), state.layers)
            for receiver, group in groups.items()
        }
        return heads, groups


def _behind(state: GenerativeState, members: Mapping[str, Group]) -> dict[str, Group]:
    """Return receiver → the silos whose updates its head averages."""
    if all(len(group) == 1 for group in members.values()):
        return dict(members)
    return {
        receiver: tuple(sorted({n for name in group for n in state.sources.get(name, ())}))
        for receiver, group in members.items()
    }


def _inherited(state: GenerativeState, members: Group) -> Generator | None:
    """Return the generator of the previous receiver that shared most silos with these."""
    shared = {receiver: len(set(members) & set(names)) for receiver, names in state.members.items()}
    best = max(sorted(shared), key=lambda receiver: shared[receiver], default=None)
    return state.generators[best] if best is not None and shared[best] else None
