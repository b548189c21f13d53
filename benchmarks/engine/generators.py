"""FedGenP's server stage: all generators at once beside loops, and 300 rounds of it.

    python -m benchmarks.engine.generators [--silos 20] [--repeats 5] [--rounds 300]

Side by side in one run, the least CPU seconds of some repeats, each on as many threads as it likes:

- *stacked*: ``coterie.strategies.fedgenp.generators.train_generators``, batched products;
- *vmap*: the same arithmetic for one receiver under ``torch.func.vmap``;
- *one by one*: a generator after the other, all heads in one product;
- *sequential*: a generator after the other and a head after the other, as an nn.Module with
  torch's Adam.

Then a run of 300 rounds: nothing may become infinite, and memory may not grow.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn.functional import cross_entropy, one_hot, softplus

from benchmarks.kit import Column, Entry, Store, columns, page, read, select, train
from coterie import wire
from coterie.strategies.fedgenp.generators import reversed_loss, train_generators
from coterie.strategies.fedgenp.latent import Generator, GeneratorPlan, fresh_generator
from coterie.strategies.rounds.reports import RoundReport
from coterie.wire import Layers, Model

CLASSES, LATENT = 10, 32  # FedGenP's MNIST
LAYERS: Layers = (("positive",), ("linear", "weight", "bias"))


def heads_of(silos: int) -> list[Model]:
    """Predictors that differ a little, as after some rounds."""
    rng = np.random.default_rng(0)
    common = rng.normal(size=(CLASSES, LATENT))
    return [
        {
            "weight": (common + 0.3 * rng.normal(size=common.shape)).astype(np.float32),
            "bias": rng.normal(size=CLASSES).astype(np.float32),
        }
        for _ in range(silos)
    ]


def fresh(silos: int, plan: GeneratorPlan) -> list[Generator]:
    """Untrained generators."""
    return [
        fresh_generator(
            num_classes=CLASSES, latent=LATENT, hidden=plan.hidden, rng=np.random.default_rng(i)
        )
        for i in range(silos)
    ]


def rngs_of(silos: int) -> list[np.random.Generator]:
    """Their randomness."""
    return [np.random.default_rng([1, i]) for i in range(silos)]


def stacked(heads: Sequence[Model], plan: GeneratorPlan) -> None:
    """What the server does."""
    silos = len(heads)
    train_generators(
        fresh(silos, plan),
        heads,
        LAYERS,
        plan=plan,
        rngs=rngs_of(silos),
        drawing=np.random.default_rng(0),
    )


def one_by_one(heads: Sequence[Model], plan: GeneratorPlan) -> None:
    """A receiver after the other, each against all heads in one product."""
    for k, (generator, rng) in enumerate(
        zip(fresh(len(heads), plan), rngs_of(len(heads)), strict=True)
    ):
        _Plain(generator, heads, k).train(plan, rng, batched=True)


def sequential(heads: Sequence[Model], plan: GeneratorPlan) -> None:
    """Loops over receivers, and in every step over heads."""
    for k, (generator, rng) in enumerate(
        zip(fresh(len(heads), plan), rngs_of(len(heads)), strict=True)
    ):
        _Plain(generator, heads, k).train(plan, rng, batched=False)


class _Plain(nn.Module):
    """One generator as a module, trained against heads one after the other or stacked."""

    def __init__(self, generator: Generator, heads: Sequence[Model], own: int) -> None:
        super().__init__()
        self.weights = nn.ParameterDict(
            {n.replace(".", "_"): torch.tensor(generator.weights[n]) for n in wire.GENERATOR_ARRAYS}
        )
        self.heads = [{n: torch.from_numpy(a) for n, a in head.items()} for head in heads]
        self.others = [head for i, head in enumerate(self.heads) if i != own]
        self.own = self.heads[own]
        self.stack = {n: torch.stack([h[n] for h in self.others]) for n in self.own}

    def forward(self, inputs: Tensor, normal: Tensor) -> Tensor:
        """Latents."""
        w = self.weights
        hidden = (inputs @ w["hidden_weight"] + w["hidden_bias"]).relu()
        mean = hidden @ w["mean_weight"] + w["mean_bias"]
        spread = hidden @ w["spread_weight"] + w["spread_bias"]
        return softplus(mean + torch.exp(0.5 * spread.clamp(max=4)) * normal)

    def train(  # type: ignore[override]
        self, plan: GeneratorPlan, rng: np.random.Generator, *, batched: bool
    ) -> None:
        """A round's steps."""
        optimiser = torch.optim.Adam(self.parameters(), lr=plan.lr)
        for step in range(plan.steps):
            labels = torch.from_numpy(rng.integers(CLASSES, size=plan.batch))
            noise = torch.from_numpy(rng.random((plan.batch, wire.NOISE), dtype=np.float32))
            normal = rng.standard_normal((plan.batch, LATENT), dtype=np.float32)
            inputs = torch.cat([one_hot(labels, CLASSES).float(), noise], dim=1)
            latents = self(inputs, torch.from_numpy(normal))
            if step % 2:
                logits = latents @ self.own["weight"].T + self.own["bias"]
                loss = reversed_loss(logits.T[None], labels[None], "log1mp").sum()
            elif batched:
                all_logits = self.stack["weight"] @ latents.T + self.stack["bias"][..., None]
                loss = cross_entropy(all_logits, labels.expand(len(all_logits), -1))
            else:
                losses = [
                    cross_entropy(latents @ head["weight"].T + head["bias"], labels)
                    for head in self.others
                ]
                loss = torch.stack(losses).mean()
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()


def mapped(heads: Sequence[Model], plan: GeneratorPlan) -> None:
    """The same steps, written for one receiver and mapped over all by ``torch.func.vmap``."""
    silos = len(heads)
    weights = {
        name: torch.stack([torch.from_numpy(g.weights[name]) for g in fresh(silos, plan)])
        for name in wire.GENERATOR_ARRAYS
    }
    mean = {name: torch.zeros_like(w) for name, w in weights.items()}
    square = {name: torch.zeros_like(w) for name, w in weights.items()}
    weight = torch.from_numpy(np.stack([h["weight"] for h in heads]))
    bias = torch.from_numpy(np.stack([h["bias"] for h in heads]))[..., None]
    rows, classes = torch.arange(silos), torch.arange(CLASSES)
    rng = np.random.default_rng(1)

    def latents_of(w: dict[str, Tensor], inputs: Tensor, normal: Tensor) -> Tensor:
        hidden = (inputs @ w["hidden.weight"] + w["hidden.bias"]).relu()
        spread = hidden @ w["spread.weight"] + w["spread.bias"]
        deviation = torch.exp(0.5 * spread.clamp(max=4))
        return softplus(hidden @ w["mean.weight"] + w["mean.bias"] + deviation * normal)

    def others(w: Any, own: Any, labels: Tensor, inputs: Tensor, normal: Tensor) -> Tensor:
        logits = weight @ latents_of(w, inputs, normal).T + bias
        wrong = cross_entropy(logits, labels.expand(silos, -1), reduction="none").mean(dim=1)
        loss: Tensor = (wrong * (rows != own[0])).sum() / (silos - 1)
        return loss

    def against(w: Any, own: Any, labels: Tensor, inputs: Tensor, normal: Tensor) -> Tensor:
        logits = own[1] @ latents_of(w, inputs, normal).T + own[2]
        answer = labels[None] == classes[:, None]  # one_hot cannot be mapped
        rest = logits.masked_fill(answer, -torch.inf).logsumexp(dim=0)
        loss: Tensor = (logits.logsumexp(dim=0) - rest).mean()
        return loss

    slopes = [vmap(grad(loss)) for loss in (others, against)]
    for step in range(plan.steps):
        labels = torch.from_numpy(rng.integers(CLASSES, size=(silos, plan.batch)))
        noise = torch.from_numpy(rng.random((silos, plan.batch, wire.NOISE), dtype=np.float32))
        normal = rng.standard_normal((silos, plan.batch, LATENT), dtype=np.float32)
        inputs = torch.cat([one_hot(labels, CLASSES).float(), noise], dim=-1)
        slope = slopes[step % 2](
            weights, (rows, weight, bias), labels, inputs, torch.from_numpy(normal)
        )
        for name, w in weights.items():
            mean[name].lerp_(slope[name], 0.1)
            square[name].mul_(0.999).addcmul_(slope[name], slope[name], value=0.001)
            root = (square[name] / (1 - 0.999 ** (step + 1))).sqrt_().add_(1e-8)
            w.addcdiv_(mean[name] / (1 - 0.9 ** (step + 1)), root, value=-plan.lr)


WAYS: dict[str, Callable[[Sequence[Model], GeneratorPlan], None]] = {
    "stacked": stacked,
    "vmap": mapped,
    "one by one, heads stacked": one_by_one,
    "sequential": sequential,
}


def timed(silos: int, repeats: int) -> dict[str, tuple[float, float]]:
    """Way → least wall and CPU seconds of a round's stage."""
    heads, plan = heads_of(silos), GeneratorPlan()
    best = dict.fromkeys(WAYS, (np.inf, np.inf))
    for _ in range(repeats + 1):  # the first is a warm-up like any other
        for way, run in WAYS.items():
            wall, cpu = time.perf_counter(), time.process_time()
            run(heads, plan)
            spent = time.perf_counter() - wall, time.process_time() - cpu
            best[way] = min(best[way][0], spent[0]), min(best[way][1], spent[1])
    return best


def long_run(rounds: int) -> Entry:
    """FedGenP on nine digits silos; memory in MB after a tenth of the rounds and at the end."""
    keys = {"strategy": "fedgenp", "rounds": rounds, "local-steps": 2}
    keys |= {"generator-steps": 10, "generator-hidden": 64}
    silos: list[dict[str, Any]] = [
        {
            **{"name": f"silo-{i}", "device": "cpu", "threads": 1},
            **{"data.train": 40, "data.test": 30, "data.skip": 70 * i},
            "data.rotation": 90 * (i % 3),
        }
        for i in range(9)
    ]
    memory: dict[int, int] = {}
    agreed: list[float] = []
    generators: list[Generator] = []

    def watch(report: RoundReport) -> None:
        memory[report.round] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        receivers = report.details["generators"]["receivers"].values()
        if receivers:
            agreed.append(float(np.mean([r["others-agree"] for r in receivers])))

    def keep(number: int, state: Any) -> None:
        generators[:] = state.generators.values()

    done = train(silos, keys, on_round=watch, after_round=keep)
    models = [wire.decode_arrays(arrays) for arrays in done.result.models.values()]
    models += [generator.weights for generator in generators]
    return {
        "what": "long run",
        "rounds": rounds,
        "finite": all(bool(np.isfinite(a).all()) for m in models for a in m.values()),
        "early": memory[rounds // 10],
        "end": memory[rounds],
        "latents": 100 * agreed[-1],
        "error": 100 * float(np.mean(list(done.errors.values()))),
    }


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    ways = [entry for entry in entries if entry["what"] in WAYS]
    (slow,) = select(ways, what="sequential")
    shown: dict[str, Column] = {
        "way": "{what}",
        "wall s": "{wall:.3f}",
        "CPU s": "{cpu:.3f}",
        "sequential / it, wall": lambda way: f"{slow['wall'] / way['wall']:.1f}",
        "CPU": lambda way: f"{slow['cpu'] / way['cpu']:.1f}",
    }
    return page(
        "## The server's stage: all generators at once",
        f"{slow['silos']} receivers, 50 steps of 32 latents, hidden 256, latent 32, {CLASSES} "
        "classes; least of some repeats, all ways in one run. *Stacked* uses one thread, so that "
        "results do not depend on the machine; the others may use all.",
        columns(ways, shown),
        *(
            f"A run of {long['rounds']} rounds (nine digits silos, turned by 0°, 90°, 180°): "
            f"{'every value is finite' if long['finite'] else 'NOT FINITE'}; peak memory "
            f"{long['early']} MB after a tenth of the rounds, {long['end']} MB at the end; latents "
            f"that the other heads label as meant at the end: {long['latents']:.0f} %; error "
            f"{long['error']:.1f} %."
            for long in select(entries, what="long run")
        ),
    )


STORE = Store("generators", document, keys=("what",))


def main() -> None:
    """Measure, store, print."""
    given = read(
        STORE,
        __doc__,
        silos={"type": int, "default": 20},
        repeats={"type": int, "default": 5},
        rounds=300,
    )
    for way, (wall, cpu) in timed(given.silos, given.repeats).items():
        given.store.put({"what": way, "silos": given.silos, "wall": wall, "cpu": cpu})
    if given.rounds:
        given.store.put(long_run(given.rounds))
    print(given.store.text())


if __name__ == "__main__":
    main()
