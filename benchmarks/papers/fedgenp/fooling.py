"""Can a generator fool its receiver's head and not the others'? What eq. 10 of FedGenP does.

    python -m benchmarks.papers.fedgenp.fooling [--seeds 3] [--parts iid] [--only ROWS]

Silos of scikit-learn's digits train alike (FedAvg) for some rounds; the heads that they then have
of their own are those that FedGenP's server would see. On these, generators are trained for 2,000
steps from scratch in several ways, and asked how many of their latents the other heads, and the
receiver's own, answer as meant. Minutes on one thread.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.functional import one_hot

from benchmarks.kit import Entry, Store, Watched, page, read, select, spread, table, train
from coterie import wire
from coterie.server.study import compare
from coterie.server.study.comparison import Repeat
from coterie.strategies.fedgenp import generators as of
from coterie.strategies.fedgenp.latent import fresh_generator, predictor_arrays, predictor_shape

FILES = Path(__file__).parents[2] / "compare"
STEPS, BATCH, ROUNDS, HIDDEN = 2000, 32, 5, 256
SETTINGS: dict[str, Mapping[str, Any]] = {
    "no reversal": {"reversal": "none"},
    "λ 0.1 (default)": {},
    "λ 0.5": {"weight": 0.5},
    "λ 0.9": {"weight": 0.9},
    "λ 1": {"weight": 1.0},
    "λ 3": {"weight": 3.0},
    "λ 1, J1 a sum": {"weight": 1.0, "sum": True},
    "λ 3, J1 a sum": {"weight": 3.0, "sum": True},
    "λ 1, both in one step": {"weight": 1.0, "together": True},
    "λ 1, own head first": {"weight": 1.0, "first": "own"},
    "λ 1, SGD 0.01": {"weight": 1.0, "sgd": 0.01},
    "clip, λ 1": {"reversal": "clip", "weight": 1.0},
    "unbounded, λ 0.1": {"reversal": "unbounded"},
}
SHIFTS = {
    "agreeing": "one kind of data, one epoch at a learning rate of 0.01: heads hardly differ",
    "iid": "one kind of data",
    "feature": "turned images",
    "concept": "other labels",
}


@cache
def heads_of(shift: str, seed: int) -> tuple[list[wire.Model], wire.Layers]:
    """The heads that silos send after some rounds of FedAvg, and what they compute."""
    file = "iid" if shift == "agreeing" else shift
    given = compare.read(FILES / f"{file}.toml", data=None)
    nodes = [{**silo.node_config(), "threads": 1} for silo in given.silos(Repeat(seed))]
    watched = Watched()
    keys = {"strategy": "fedavg", "seed": seed, "rounds": ROUNDS, "local-epochs": 3}
    keys |= {"local-epochs": 1, "lr": 0.01, "rounds": 10} if shift == "agreeing" else {}
    done = train(nodes, keys, app=watched, evaluate=False)
    layers = done.silos[0].head
    return [predictor_arrays(new, layers) for _, new in watched.trained.values()], layers


def measure(shift: str, setting: str, seed: int) -> Entry:
    """Shares in % of latents that the others' heads, and the own, answer as meant; and p(y)."""
    torch.set_num_threads(1)
    heads, layers = heads_of(shift, seed)
    own = {"reversal": "log1mp", "weight": 0.1, "sum": False, "together": False, "first": "others"}
    how = {**own, "sgd": 0.0, **SETTINGS[setting]}
    named = {str(i): head for i, head in enumerate(heads)}
    latent, classes = predictor_shape(named, layers)
    rng = np.random.default_rng([seed, 1])
    made = [
        fresh_generator(num_classes=classes, latent=latent, hidden=HIDDEN, rng=rng) for _ in heads
    ]
    stacked = of._stack(heads, torch.device("cpu"))
    weights = of._stack([g.weights for g in made], torch.device("cpu"))
    weights = {name: tensor.requires_grad_() for name, tensor in weights.items()}
    torch.manual_seed(seed)
    kind: Any = torch.optim.SGD if how["sgd"] else torch.optim.Adam
    optimiser = kind(list(weights.values()), lr=how["sgd"] or 3e-4)
    rows, count = torch.arange(len(heads)), len(heads)

    def drawn(size: int) -> tuple[torch.Tensor, torch.Tensor]:
        labels = torch.randint(classes, (count, size))
        inputs = torch.cat(
            [one_hot(labels, classes).float(), torch.rand(count, size, wire.NOISE)], -1
        )
        return of.generate(weights, inputs, torch.randn(count, size, latent)), labels

    for step in range(STEPS):
        latents, labels = drawn(BATCH)
        taught = of.others_loss(stacked, layers, latents, labels, rows).sum()
        taught = taught * (count - 1 if how["sum"] else 1)
        loss, odd = taught, (step % 2 == 1) == (how["first"] == "others")
        if how["reversal"] != "none" and (odd or how["together"]):
            logits = of.predict(stacked, layers, latents.mT)
            against = how["weight"] * of.reversed_loss(logits, labels, how["reversal"]).sum()
            loss = taught + against if how["together"] else against
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        latents, labels = drawn(500)
        logits = of._all_heads(stacked, layers, latents).unflatten(2, labels.shape)
        right = (logits.argmax(1) == labels).float().mean(2)  # (heads, receivers)
        wanted = labels.expand(count, 1, -1, -1)
        sure = logits.softmax(1).gather(1, wanted)[:, 0].mean(2)
        mine = torch.eye(count)
        return {
            "others": float(100 * ((right * (1 - mine)).sum() / (1 - mine).sum())),
            "own": float(100 * (right * mine).sum() / count),
            "p others": float((sure * (1 - mine)).sum() / (1 - mine).sum()),
            "p own": float((sure * mine).sum() / count),
        }


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    parts = []
    for shift, what in SHIFTS.items():
        rows = []
        for name in SETTINGS:
            if runs := select(entries, shift=shift, setting=name):
                shares = [spread([r[k] for r in runs], 1) for k in ("others", "own")]
                sure = [f"{np.mean([r[k] for r in runs]):.2f}" for k in ("p others", "p own")]
                rows.append([name, *shares, *sure, str(len(runs))])
        heads = ("", "others right, %", "own right, %", "p(y) of others", "p(y) of own", "seeds")
        if rows:
            parts.append(f"## {shift}: {what}\n\n" + "\n".join(table(heads, rows)))
    return page(
        "# Can a generator fool its receiver's head and not the others'?",
        f"Heads after {ROUNDS} rounds of FedAvg on scikit-learn's digits, generators of {STEPS:,} "
        "steps from scratch. Shares of latents\nanswered as meant, mean over receivers ± deviation "
        "over seeds; p(y): the probability of the label that was meant.\nMade by `python -m "
        "benchmarks.papers.fedgenp.fooling`. Rows of fewer than three seeds were not run again for "
        "want of hours.",
        *parts,
    )


STORE = Store("fooling", document, keys=("shift", "setting", "seed"))


def main() -> None:
    """Measure what is not stored yet."""
    given = read(STORE, __doc__, parts=SHIFTS, rows=SETTINGS, seeds=3)
    cells = (
        {"shift": s, "setting": name, "seed": i}
        for i, s, name in product(range(given.seeds), given.parts, given.only)
    )
    given.store.fill(cells, measure)
    print(given.store.text())


if __name__ == "__main__":
    main()
