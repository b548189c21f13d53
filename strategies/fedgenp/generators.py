"""Generators in latent space, all trained at once.

Taghiyarrenani, Alabdallah, Nowaczyk, Pashami: "Heterogeneous Federated Learning via Personalized
Generative Networks", https://arxiv.org/abs/2308.13265, eqs. 9–13 and Algorithm 1, lines 12–15; and
the shared generator of Zhu, Hong, Zhou: "Data-Free Knowledge Distillation for Heterogeneous
Federated Learning" (FedGen), ICML 2021, https://arxiv.org/abs/2105.10056, eq. 4.

Shapes: R receivers, each with a head and a generator; B latents a step; C classes; n noise; d
latent width. Parameters of all generators are stacked, (R, in, out), so one batched product is one
step of all of them; a product over all heads gives every head's logits of every latent. No two
generators share a term of the sum of the R losses, and Adam and SGD work element by element, so
stacked training is R separate trainings. It runs in one CPU thread, or on the GPU, so that a run's
models depend on its seed alone.

Differs from the paper, unless the plan says so: J1 is the mean over the other heads, not their sum,
which would outweigh J2; J2 is unbounded above and maximised in a bounded way (``reversed_loss``);
Adam trains, not SGD.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, one_hot, softplus

from coterie import wire
from coterie.strategies.fedgenp.latent import Generator, GeneratorPlan, Reversal
from coterie.system.device import device_of
from coterie.wire import Layers, Model

_device = cache(device_of)  # what cannot be used is said once

BETAS, EPSILON = (0.9, 0.999), 1e-8
"""Parameters of Adam."""
PROBE = 128
"""Latents by which a generator's quality is judged."""
MAX_LOGITS = 2**24
"""Maximum logits of all heads in one step or in judging (64 MiB); beyond it heads are sampled."""

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "positive": softplus,
    "relu": torch.relu,
    "tanh": torch.tanh,
}
Weights = dict[str, Tensor]
Loss = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""(step, latents (R, B, d), labels (R, B), noise (R, B, n)) → losses (R,)."""


@dataclass(frozen=True)
class Quality:
    """Shares in [0, 1] of a generator's latents that heads give the intended label."""

    others: float
    own: float


def train_generators(
    generators: Sequence[Generator],
    heads: Sequence[Model],
    layers: Layers,
    *,
    plan: GeneratorPlan,
    rngs: Sequence[np.random.Generator],
    drawing: np.random.Generator,
    device: str = "auto",
) -> tuple[list[Generator], list[Quality]]:
    """Run one round of FedGenP's server stage.

    Time and memory are linear in R: if all heads' logits exceed ``MAX_LOGITS``, each step's J1 uses
    freshly sampled heads.

    Args:
        generators, heads: of the R ≥ 2 receivers, in the same order; heads have equal shapes.
        rngs: one per receiver, for all its randomness.
        drawing: samples heads if there are too many.
        device: ``auto`` takes a GPU if there is one.

    Returns:
        The trained generators and their quality, in the order of ``generators``. A generator that
        would not be finite is returned unchanged.
    """
    where = _device(device)
    stacked = _stack(heads, where)
    last = [names[0] for kind, *names in layers if kind == "linear"][-1]
    num_classes = len(heads[0][last])

    def some(latents: int) -> Tensor:
        most = max(2, MAX_LOGITS // (num_classes * latents))
        rows = np.arange(len(heads))
        if len(heads) > most:
            rows = np.sort(drawing.choice(len(heads), size=most, replace=False))
        return torch.from_numpy(rows).to(where)

    def taught(latents: Tensor, labels: Tensor) -> Tensor:
        mean = others_loss(stacked, layers, latents, labels, some(labels.numel()))
        return (len(heads) - 1) * mean if plan.objective == "sum" else mean

    def against(latents: Tensor, labels: Tensor) -> Tensor:
        own = predict(stacked, layers, latents.mT)
        return plan.reversal_weight * reversed_loss(own, labels, plan.reversal)

    def loss(step: int, latents: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        if plan.alternates:
            return against(latents, labels) if step % 2 else taught(latents, labels)
        alone = taught(latents, labels)
        return alone + against(latents, labels) if plan.reverses else alone

    with _one_thread(where):
        labels = [
            rng.integers(num_classes, size=(plan.steps, plan.batch), dtype=np.int64) for rng in rngs
        ]
        trained = _train(generators, np.stack(labels, axis=1), num_classes, plan, rngs, where, loss)
        judges = some(len(heads) * PROBE)
        quality = _judge(trained, stacked, layers, num_classes, rngs, where, judges)
    return trained, quality


def train_shared_generator(
    generator: Generator,
    heads: Sequence[Model],
    layers: Layers,
    counts: np.ndarray,
    *,
    plan: GeneratorPlan,
    rng: np.random.Generator,
    device: str = "auto",
) -> tuple[Generator, Quality]:
    """Run one round of FedGen's server stage: a generator that all heads agree with.

    Args:
        heads: of R ≥ 1 silos.
        counts: (R, C) label counts of the silos; every label is drawn as often as it occurs, and a
            head counts for a label by its silo's share of it.
        device: ``auto`` takes a GPU if there is one.
    """
    where = _device(device)
    stacked = _stack(heads, where)
    totals = counts.sum(axis=0)
    shares = torch.tensor(counts / np.maximum(totals, 1), dtype=torch.float32, device=where)

    def loss(step: int, latents: Tensor, labels: Tensor, noise: Tensor) -> Tensor:
        logits = _all_heads(stacked, layers, latents)
        wrong = cross_entropy(logits, labels.expand(len(logits), -1), reduction="none")
        return (wrong * shares[:, labels[0]]).sum(dim=0).mean()[None] + _sameness(latents, noise)

    with _one_thread(where):
        size = (plan.steps, 1, plan.batch)
        labels = rng.choice(len(totals), size=size, p=totals / totals.sum())
        (trained,) = _train([generator], labels, len(totals), plan, [rng], where, loss)
        latents, wanted, _ = _sample(trained, PROBE, len(totals), rng, where)
        hits = (_all_heads(stacked, layers, latents[None]).argmax(dim=1) == wanted).float()
    return trained, Quality(others=float(hits.mean()), own=float(hits.mean()))


# --- losses -----------------------------------------------------------------------------------


def others_loss(
    heads: Weights, layers: Layers, latents: Tensor, labels: Tensor, rows: Tensor
) -> Tensor:
    """Return J1 (eq. 12) as a mean: the other heads' cross entropy, shape (R,).

    Args:
        heads: stacked arrays of the R predictors.
        latents, labels: shapes (R, B, d) and (R, B).
        rows: indices of the heads used, at least two, sorted.
    """
    logits = _all_heads(_rows(heads, rows), layers, latents)
    wrong = cross_entropy(logits, labels.flatten().expand(len(rows), -1), reduction="none")
    others = _others(rows, len(labels))
    by_head: Tensor = wrong.unflatten(1, labels.shape).mean(dim=2)  # (heads, R)
    return (by_head * others).sum(dim=0) / others.sum(dim=0)


def reversed_loss(logits: Tensor, labels: Tensor, reversal: Reversal) -> Tensor:
    """Return the loss, shape (R,), whose minimisation raises J2 (eq. 13), the own head's error.

    Args:
        logits, labels: shapes (R, C, B), of every receiver's own head, and (R, B).
        reversal: ``log1mp``: −log(1 − p(y)). Its gradient is the plain one's times −p/(1−p): the
            gradient reversal layer with a factor that vanishes as the head is fooled, so that the
            loss is at least 0 and no logit's gradient is above 1. ``clip``: J2 counts up to log C
            per latent, the cost of guessing. ``unbounded``: the literal reversal, which diverges.
    """
    if reversal == "log1mp":
        answer = one_hot(labels, logits.shape[1]).bool().mT
        rest = logits.masked_fill(answer, -torch.inf).logsumexp(dim=1)
        return (logits.logsumexp(dim=1) - rest).mean(dim=1)
    wrong = cross_entropy(logits, labels, reduction="none")
    if reversal == "clip":
        wrong = wrong.clamp(max=float(np.log(logits.shape[1])))
    reversed_: Tensor = -wrong.mean(dim=1)
    return reversed_


def _sameness(latents: Tensor, noise: Tensor) -> Tensor:
    """Return FedGen's diversity term, exp(−mean |z_a − z_b|·|ε_a − ε_b|): 1 without any effect."""
    apart = torch.cdist(latents, latents, p=1) / latents.shape[-1]
    noise_apart = torch.cdist(noise, noise) / noise.shape[-1]
    return torch.exp(-(apart * noise_apart).mean(dim=(1, 2)))


# --- networks, stacked ------------------------------------------------------------------------


def generate(weights: Weights, inputs: Tensor, normal: Tensor) -> Tensor:
    """Return latents z = mean + exp(½ log-variance) · ε: the VAE-style output.

    Args:
        inputs: shape (R, B, C + n), one-hot labels and noise U[0, 1).
        normal: ε, shape (R, B, d), standard normal.
    """
    hidden = torch.baddbmm(weights["hidden.bias"][:, None], inputs, weights["hidden.weight"]).relu()
    mean = torch.baddbmm(weights["mean.bias"][:, None], hidden, weights["mean.weight"])
    spread = torch.baddbmm(weights["spread.bias"][:, None], hidden, weights["spread.weight"])
    return mean + torch.exp(0.5 * spread.clamp(max=wire.MAX_LOG_VARIANCE)) * normal


def predict(heads: Weights, layers: Layers, latents: Tensor) -> Tensor:
    """Return logits (H, C, N) of H stacked heads, head i on row i (or all on one row).

    Latents have shape (H or 1, d, N): as columns, for a fast softmax over classes.
    """
    for kind, *names in layers:
        if kind == "linear":
            latents = heads[names[0]] @ latents
            if names[1]:
                latents = latents + heads[names[1]][:, :, None]
        else:
            latents = ACTIVATIONS[kind](latents)
    return latents


def _rows(heads: Weights, rows: Tensor) -> Weights:
    count = len(next(iter(heads.values())))
    return heads if len(rows) == count else {name: stack[rows] for name, stack in heads.items()}


def _others(rows: Tensor, receivers: int) -> Tensor:
    """Return 1 where a head is not the receiver's own, shape (heads, R)."""
    return (rows[:, None] != torch.arange(receivers, device=rows.device)).float()


def _all_heads(heads: Weights, layers: Layers, latents: Tensor) -> Tensor:
    """Return logits (H, C, R·B) of every head on every generator's latents (R, B, d)."""
    return predict(heads, layers, latents.flatten(0, 1).mT[None])


# --- training ---------------------------------------------------------------------------------


def _train(
    generators: Sequence[Generator],
    labels: np.ndarray,
    num_classes: int,
    plan: GeneratorPlan,
    rngs: Sequence[np.random.Generator],
    device: torch.device,
    loss: Loss,
) -> list[Generator]:
    """Train all generators for ``plan.steps`` steps; labels of shape (steps, R, B)."""
    size = (plan.steps, plan.batch)
    latent = generators[0].weights["mean.bias"].shape[0]
    noise = _drawn([rng.random((*size, wire.NOISE), dtype=np.float32) for rng in rngs], device)
    normal = [rng.standard_normal((*size, latent), dtype=np.float32) for rng in rngs]
    epsilon, wanted = _drawn(normal, device), torch.from_numpy(labels).to(device)
    weights = _stack([g.weights for g in generators], device)
    weights = {name: tensor.requires_grad_() for name, tensor in weights.items()}
    mean = _stack([g.mean for g in generators], device)
    square = _stack([g.square for g in generators], device)
    taken = torch.tensor([g.steps for g in generators], device=device)
    for step in range(plan.steps):
        inputs = torch.cat([one_hot(wanted[step], num_classes).float(), noise[step]], dim=-1)
        latents = generate(weights, inputs, epsilon[step])
        objective = loss(step, latents, wanted[step], noise[step]).sum()
        gradients = torch.autograd.grad(objective, list(weights.values()))
        taken = taken + 1
        if plan.optimiser == "sgd":
            _sgd(weights, gradients, plan.lr)
        else:
            _adam(weights, gradients, mean, square, taken, plan.lr)
    done = [_unstack(stack, len(generators)) for stack in (weights, mean, square)]
    trained = [
        Generator(own, mean=first, square=second, steps=g.steps + plan.steps)
        for g, own, first, second in zip(generators, *done, strict=True)
    ]
    return [new if _finite(new) else old for old, new in zip(generators, trained, strict=True)]


def _finite(one: Generator) -> bool:
    parts = (one.weights, one.mean, one.square)
    return all(np.isfinite(array).all() for part in parts for array in part.values())


@torch.no_grad()
def _sgd(weights: Weights, gradients: Sequence[Tensor], lr: float) -> None:
    for weight, gradient in zip(weights.values(), gradients, strict=True):
        weight.sub_(gradient, alpha=lr)


@torch.no_grad()
def _adam(
    weights: Weights,
    gradients: Sequence[Tensor],
    mean: Weights,
    square: Weights,
    taken: Tensor,
    lr: float,
) -> None:
    """Take one step in place; unlike torch's Adam, every generator has its own step count."""
    corrections = [(1 - beta ** taken.double()).float() for beta in BETAS]
    for (name, weight), gradient in zip(weights.items(), gradients, strict=True):
        each = (-1,) + (1,) * (weight.ndim - 1)
        first, second = (correction.view(each) for correction in corrections)
        mean[name].lerp_(gradient, 1 - BETAS[0])
        square[name].mul_(BETAS[1]).addcmul_(gradient, gradient, value=1 - BETAS[1])
        root = (square[name] / second).sqrt_().add_(EPSILON)
        weight.addcdiv_(mean[name] / first, root, value=-lr)


@torch.no_grad()
def _judge(
    generators: Sequence[Generator],
    heads: Weights,
    layers: Layers,
    num_classes: int,
    rngs: Sequence[np.random.Generator],
    device: torch.device,
    judges: Tensor,
) -> list[Quality]:
    samples = [
        _sample(g, PROBE, num_classes, r, device) for g, r in zip(generators, rngs, strict=True)
    ]
    latents = torch.stack([sample[0] for sample in samples])
    wanted = torch.stack([sample[1] for sample in samples])
    answers = _all_heads(_rows(heads, judges), layers, latents).argmax(dim=1)
    hits = (answers.unflatten(1, wanted.shape) == wanted).float().mean(dim=2)  # (heads, R)
    mask = _others(judges, len(generators))
    others = (hits * mask).sum(dim=0) / mask.sum(dim=0)
    own = (predict(heads, layers, latents.mT).argmax(dim=1) == wanted).float().mean(dim=1)
    return [Quality(float(o), float(s)) for o, s in zip(others, own, strict=True)]


@torch.no_grad()
def _sample(
    generator: Generator,
    count: int,
    num_classes: int,
    rng: np.random.Generator,
    device: torch.device,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return latents (count, d), their uniform labels (count,) and noise (count, n)."""
    weights = _stack([generator.weights], device)
    labels = torch.from_numpy(rng.integers(num_classes, size=count)).to(device)
    noise = torch.from_numpy(rng.random((count, wire.NOISE), dtype=np.float32)).to(device)
    latent = generator.weights["mean.bias"].shape[0]
    normal = torch.from_numpy(rng.standard_normal((count, latent), dtype=np.float32)).to(device)
    inputs = torch.cat([one_hot(labels, num_classes).float(), noise], dim=-1)
    return generate(weights, inputs[None], normal[None])[0], labels, noise


def _drawn(parts: Sequence[np.ndarray], device: torch.device) -> Tensor:
    """Stack one draw (steps, …) per receiver to (steps, R, …)."""
    return torch.from_numpy(np.stack(parts, axis=1)).to(device)


def _stack(models: Sequence[Model], device: torch.device) -> Weights:
    """Stack models to one tensor per name; the first axis counts the models."""
    return {
        name: torch.from_numpy(np.stack([model[name] for model in models])).float().to(device)
        for name in models[0]
    }


def _unstack(weights: Weights, count: int) -> list[Model]:
    arrays = {name: tensor.detach().cpu().numpy() for name, tensor in weights.items()}
    return [{name: array[i].copy() for name, array in arrays.items()} for i in range(count)]


@contextmanager
def _one_thread(device: torch.device) -> Iterator[None]:
    """Limit torch to one CPU thread, so that sums do not depend on the number of cores."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
