"""The strategies that others are compared with, from a run's configuration."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from coterie.server.runs.config import RunConfig
from coterie.strategies.baselines.cfl import CFL
from coterie.strategies.baselines.fedfa import FedFA
from coterie.strategies.baselines.fednova import FedNova
from coterie.strategies.baselines.fesem import FeSEM
from coterie.strategies.baselines.flhc import FLHC
from coterie.strategies.baselines.flsc import FLSC
from coterie.strategies.baselines.ifca import IFCA
from coterie.strategies.baselines.kmeans import KMeans
from coterie.strategies.rounds.loop import GroupStrategy
from coterie.strategies.baselines.maxfl import MAXFL
from coterie.strategies.baselines.perfedavg import PerFedAvg
from coterie.strategies.baselines.pfedme import PFedMe

Common = Mapping[str, Any]
Build = Callable[[RunConfig, Common], GroupStrategy[Any]]


BASELINES: dict[str, Build] = {
    "maxfl": lambda config, common: MAXFL(
        threshold=config.threshold,
        warm_up=config.warm_up,
        own_rounds=config.own_rounds,
        **common,
    ),
    "fedfa": lambda config, common: FedFA(**common),
    "ifca": lambda config, common: IFCA(
        num_groups=int(config.num_groups), sample=config.sample, seed=config.seed, **common
    ),
    "flsc": lambda config, common: FLSC(
        num_groups=int(config.num_groups),
        soft_groups=config.soft_groups,
        sample=config.sample,
        seed=config.seed,
        **common,
    ),
    "fesem": lambda config, common: FeSEM(
        num_groups=int(config.num_groups), sample=config.sample, seed=config.seed, **common
    ),
    "cfl": lambda config, common: CFL(
        eps_mean=config.eps_mean,
        eps_largest=config.eps_largest,
        first_split=config.first_split,
        **common,
    ),
    "flhc": lambda config, common: FLHC(
        rounds_before=config.rounds_before,
        max_distance=config.max_distance,
        metric=config.metric,
        linkage=config.linkage,
        **common,
    ),
    "kmeans": lambda config, common: KMeans(
        num_groups=int(config.num_groups),
        pretrain_epochs=config.pretrain_epochs,
        seed=config.seed,
        **common,
    ),
    "fednova": lambda config, common: FedNova(**common),
    "perfedavg": lambda config, common: PerFedAvg(
        meta_lr=config.meta_lr, adapt_steps=config.adapt_steps or 1, **common
    ),
    "pfedme": lambda config, common: PFedMe(
        moreau_lambda=config.moreau_lambda,
        moreau_lr=config.moreau_lr,
        inner_steps=config.inner_steps,
        server_lr=config.server_lr,
        adapt_steps=config.adapt_steps or 20,
        **common,
    ),
}
"""Name → how it is built."""
