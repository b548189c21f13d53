"""The same sets in a federation: every strategy over the silos that the data came with."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from benchmarks.kit import nodes, train
from benchmarks.natural.data import CALENDAR, fold, registered
from benchmarks.natural.scores import secondary
from coterie.tasks.base import Option
from coterie.wire.names import LINEAR_LAYER

RUN: Mapping[str, Any] = {"rounds": 20, "local-epochs": 3, "batch-size": 16, "lr": 0.05}
"""Of every method: the defaults' optimiser with a learning rate that suits scaled columns."""
METHODS: Mapping[str, Mapping[str, Any]] = {
    "alone": {"strategy": "independent"},
    "FedAvg": {"strategy": "fedavg"},
    "FedAdam": {"strategy": "fedavg", "server-optimiser": "fedadam"},
    "FedAvg + own intercept": {"strategy": "fedavg", "personal": "head.bias"},
    "FedAvg, partial pooling": {
        "strategy": "fedavg",
        "personalise": "partial",
        "personal-epochs": RUN["local-epochs"],
    },
    "FedAvg, fine-tuned": {"strategy": "fedavg", "personalise": "finetune"},
    "Ditto": {"strategy": "fedavg", "personalise": "ditto"},
    "APFL": {"strategy": "apfl"},
    "pFedGraph": {"strategy": "pfedgraph"},
    "HCCT": {"strategy": "hcct", "alpha": 50.0},
    "FedGroup auto": {"strategy": "fedgroup", "num-groups": "auto"},
    "FedCollab auto": {"strategy": "fedcollab", "c": "auto"},
    "auto": {"strategy": "auto"},
    "auto, secure": {"strategy": "auto", "secure": True},
    "FedAvg, secure": {"strategy": "fedavg", "secure": True},
    "trees, auto": {"strategy": "auto"},
    "trees, auto, blocks": {"strategy": "auto"},
    "any, auto": {"strategy": "auto"},
    "trees by sums": {"strategy": "trees"},
    "trees by sums, alone": {"strategy": "trees", "given-groups": "each"},
    "trees by sums, own leaves": {"strategy": "trees", "personalise": "partial"},
}
"""Name → keys of the run."""
BLOCKS = ", blocks"
"""End of the names of methods whose silos hold out whole blocks of days."""
RATES = {"trees-100x3": 0.05, "trees-100x6": 0.1}
"""Network of trees → their learning rate."""
ANY = {f"any-{size}": rate for size, rate in (("100x3", 0.05), ("100x6", 0.1))}
"""Network that leaves the choice to ``auto`` → the learning rate of its trees."""
NETWORKS = ("linear", "mlp-64", *RATES, *ANY)


def fits(method: str, network: str, dataset: str) -> bool:
    """Return whether a method trains such a network on a set."""
    if method.endswith(BLOCKS) and dataset not in CALENDAR:
        return False
    kinds = {"trees": RATES, "any": ANY}
    fitting = next((of for kind, of in kinds.items() if method.startswith(kind)), None)
    return network in fitting if fitting else network not in {**RATES, **ANY}


def measured(
    method: str, file: Path, network: str, number: int, seed: int
) -> tuple[dict[str, dict[str, float]], dict[str, Any]]:
    """Return silo → scores, and what is known of the run: its groups, its seconds."""
    found = fold(file, number, seed)
    names = list(found.silos)
    data: dict[str, Option] = {"file": str(file), "fold": number, "seed": seed}
    data["blocks"] = method.endswith(BLOCKS)
    keys = {**RUN, **METHODS[method], "seed": seed}
    if network in (rates := {**RATES, **ANY}):
        keys["tree-rate"] = rates[network]
    elif network != "linear" and keys.get("personal") == "head.bias":
        keys["personal"] = f"{LINEAR_LAYER}bias"
    trained = train(
        nodes(registered(file, network), names, data, auxiliary=True, sums="trees"),
        keys,
        run=f"{network}-{list(METHODS).index(method)}-{number}-{seed}",
    )
    last = trained.result.rounds[-1]
    scores = {
        name: {
            "loss": float(loss),
            **secondary({k: float(v) for k, v in last.metrics.get(name, {}).items()}),  # type: ignore[arg-type]
        }
        for name, (loss, _, _) in last.evaluation.items()
    }
    groups = [list(g) for g in trained.result.rounds[-2 if last.final else -1].groups]
    return scores, {"groups": groups, "seconds": round(trained.seconds, 1)}
