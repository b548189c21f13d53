"""DP-SGD at the silo: clipped per-sample gradients with Gaussian noise, on Poisson samples.

Abadi, Chu, Goodfellow, McMahan, Mironov, Talwar, Zhang: "Deep Learning with Differential Privacy",
CCS 2016, https://arxiv.org/abs/1607.00133, Algorithm 1. A step with expected batch size B = q·n:

    g ← (Σ_i ∇ℓ_i · min(1, C/‖∇ℓ_i‖) + N(0, σ²C²·1)) / B,   each sample in it with probability q

Later operations on g (momentum, Adam, a proximal term, a penalty, a clipped norm) touch no data.
One sample's loss is the task's loss of a batch of one, so any model and task works whose loss is a
mean over samples. Gradients come from ``torch.func``, or from one sample at a time if it fails.

Samples and noise are drawn from a ChaCha20 stream. Every training has a new key, which comes from
the operating system: no two trainings have any noise in common, whatever was asked. A silo without
a folder is simulated; its key derives from its name and the training's seed, so that the same seed
gives the same result.
"""

from __future__ import annotations

import hashlib
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from numpy.typing import NDArray
from torch import nn
from torch.func import functional_call, grad_and_value, vmap

from coterie.client.home.privacy import Privacy
from coterie.client.work.data import Part, map_nest
from coterie.client.work.optimisers import PLAIN, Slots, optimiser_of
from coterie.client.work.penalty import Penalty
from coterie.client.work.sgd import (
    TrainPlan,
    add_cosine_gradient,
    add_proximal_gradient,
    anchor_of,
    autocast,
    has_batch_norm,
    steps_of_a_pass,
)
from coterie.client.work.weights import set_training
from coterie.features.privacy.budget import Budget, Charge, warn_of_a_simulation
from coterie.system.device import seed_torch
from coterie.tasks.base import Nest, Task, TaskError, has_own, leaves
from coterie.wire import Model

GRADIENT_BYTES = 1 << 28
"""Most bytes for the gradients of samples that are handled at once."""
MOST_AT_ONCE = 256

Gradients = list[torch.Tensor]


@dataclass(frozen=True)
class Private:
    """A request's differential privacy: the budget to charge, and its run, round and purpose.

    Attributes:
        digest: of the request, as hexadecimal digits.
        charged: the keys of its trainings so far.
    """

    budget: Budget
    run: str = ""
    round: int = 0
    purpose: str = ""
    digest: str = ""
    charged: list[str] = field(default_factory=list)

    @property
    def terms(self) -> Privacy:
        """The silo's privacy settings."""
        return self.budget.terms

    def planned(self, model: nn.Module, part: Part, plan: TrainPlan) -> Charge:
        """Return what training this model on this part costs, as a charge without a key."""
        rate, steps = _sampling(model, part, plan)
        noise = self.terms.noise
        return Charge("", noise, rate, steps, self.run, self.round, self.purpose)

    def charge(self, planned: Charge, *, seed: int) -> bytes:
        """Charge the request's next training; return the key of its noise, 32 bytes.

        ``seed`` is the training's, for a simulation. Raises as ``Budget.charge``.
        """
        one = f"{self.digest}/{len(self.charged)}"
        self.budget.charge(replace(planned, key=one))
        self.charged.append(one)
        settings = self.budget.settings
        if settings.home:
            return os.urandom(32)
        warn_of_a_simulation(settings.name)
        return hashlib.sha256(f"simulation/{settings.name}/{seed}".encode()).digest()


def require_private(task: Task, model: nn.Module) -> None:
    """Check that a task's training can be made private.

    Raises ``TaskError`` for BatchNorm, a task with its own training loop, or a loss that is not
    a mean over samples.
    """
    why = ""
    if has_batch_norm(model):
        why = (
            "its model has BatchNorm, which mixes samples. Use a network with GroupNorm, such "
            'as network = "NAME+groupnorm"'
        )
    elif has_own(task, "train"):
        why = "it has its own train, whose gradients are not clipped"
    elif task.problem.whole:
        why = (
            f"its loss ({task.problem.kind}) is computed over all samples together and is not a "
            "mean over them"
        )
    if why:
        raise TaskError(
            f"task {task.name!r} cannot be trained with differential privacy ([privacy] in "
            f"silo.toml): {why}."
        )


def train_privately(
    task: Task,
    model: nn.Module,
    part: Part,
    plan: TrainPlan,
    private: Private,
    *,
    seed: int,
    towards: Model | None = None,
    centre: Model | None = None,
    slots: Slots | None = None,
) -> float:
    """Train in place with DP-SGD, charging the budget first; arguments as ``sgd.train``.

    The mean loss over the last pass's samples is returned. It is not private: it must not leave.
    Raises ``SpentError`` if the budget does not allow it, ``TaskError`` as ``require_private``.
    """
    require_private(task, model)
    key = private.charge(private.planned(model, part, plan), seed=seed)
    return _train(
        task,
        model,
        part,
        plan,
        private.terms,
        key=key,
        seed=seed,
        towards=towards,
        centre=centre,
        slots=slots,
    )


def rehearse(
    task: Task, model: nn.Module, part: Part, plan: TrainPlan, private: Private, *, seed: int
) -> float:
    """Train as ``train_privately``, with fresh noise and no charge: nothing of it may leave."""
    require_private(task, model)
    return _train(task, model, part, plan, private.terms, key=os.urandom(32), seed=seed)


def _train(
    task: Task,
    model: nn.Module,
    part: Part,
    plan: TrainPlan,
    terms: Privacy,
    *,
    key: bytes,
    seed: int,
    towards: Model | None = None,
    centre: Model | None = None,
    slots: Slots | None = None,
) -> float:
    seed_torch(seed)
    set_training(model)
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parameters = list(named.values())
    pulled = plan.proximal_mu > 0 or plan.cosine_lambda > 0
    anchor = anchor_of(named, towards) if pulled else []
    penalty = Penalty(named, plan.penalty, centre)
    optimiser = optimiser_of(plan, task, model, named, {} if slots is None else slots)
    stream = Stream(key)
    rate, steps = _sampling(model, part, plan)
    expected = rate * len(part)
    sums = _Sums(task, model, named, terms.clip, plan.precision, part.device)
    of_a_pass = max(1, round(1 / rate))
    loss, seen = 0.0, 0
    for done in range(steps):
        if done % of_a_pass == 0:
            loss, seen = 0.0, 0
        rows = torch.from_numpy(np.flatnonzero(stream.uniform(len(part)) <= rate))
        total, losses = sums.of(part, rows, seed=seed + done)
        loss, seen = loss + losses, seen + len(rows)
        for parameter, gradient in zip(parameters, total, strict=True):
            noise = torch.from_numpy(stream.normal(parameter.numel())).view(parameter.shape)
            noised = gradient.double() + terms.noise * terms.clip * noise.to(part.device)
            parameter.grad = (noised / expected).to(parameter.dtype)
        optimiser.finish_gradients(parameters)
        if plan.proximal_mu > 0:
            add_proximal_gradient(parameters, anchor, plan.proximal_mu)
        if plan.cosine_lambda > 0:
            add_cosine_gradient(parameters, anchor, plan.cosine_lambda)
        rate_now = plan.rate(done / steps)
        optimiser.step(rate_now)
        penalty.step(rate_now)
    with torch.no_grad():
        for buffer, before in buffers:  # whatever a module noted of the data
            buffer.copy_(before)
    if slots is not None:
        optimiser.remember(slots)
    return loss / max(seen, 1)


def _sampling(model: nn.Module, part: Part, plan: TrainPlan) -> tuple[float, int]:
    """Return each sample's probability of being in a step, and the number of steps."""
    planned = plan.steps or plan.epochs * steps_of_a_pass(model, part, plan)
    rate = min(1.0, plan.batch_size * plan.accumulate / len(part))
    return rate, math.ceil(planned / plan.accumulate)


# ---------------------------------------------------------------- clipped sums


class _OfOne(nn.Module):
    """A task's training step as a module, so that parameters can be passed in."""

    def __init__(self, task: Task, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self._step = task.training_step

    def forward(self, x: Nest, y: Nest) -> torch.Tensor:
        return self._step(self.model, x, y)


class _Sums:
    def __init__(
        self,
        task: Task,
        model: nn.Module,
        named: Mapping[str, nn.Parameter],
        clip: float,
        precision: str,
        device: torch.device,
    ) -> None:
        self.named, self.clip, self.precision, self.device = dict(named), clip, precision, device
        self._whole = _OfOne(task, model)
        num_bytes = sum(4 * p.numel() for p in named.values())
        self.at_once = max(1, min(MOST_AT_ONCE, GRADIENT_BYTES // max(num_bytes, 1)))
        self._each = vmap(grad_and_value(self._loss), in_dims=(None, 0, 0), randomness="different")
        self._one_by_one = False

    def of(self, part: Part, rows: torch.Tensor, *, seed: int) -> tuple[Gradients, float]:
        """Return Σ_i ∇ℓ_i · min(1, C/‖∇ℓ_i‖) over these samples, by parameter, and Σ_i ℓ_i."""
        total = [torch.zeros_like(p, requires_grad=False) for p in self.named.values()]
        losses = 0.0
        if len(rows):
            for x, y in part.batches(rows, self.at_once, seed=seed):
                gradients, loss = self._gradients(x, y)
                losses += float(loss.sum())
                with torch.no_grad():
                    for own, clipped in zip(total, self._clipped_sum(gradients), strict=True):
                        own.add_(clipped)
        return total, losses

    def _loss(self, parameters: dict[str, torch.Tensor], x: Nest, y: Nest) -> torch.Tensor:
        alone = [map_nest(lambda leaf: leaf.unsqueeze(0), nest) for nest in (x, y)]
        given = {f"model.{name}": tensor for name, tensor in parameters.items()}
        with autocast(self.precision, self.device):
            loss: torch.Tensor = functional_call(self._whole, given, tuple(alone))
        return loss.float()

    def _gradients(self, x: Nest, y: Nest) -> tuple[Gradients, torch.Tensor]:
        """Compute per-sample gradients, each (n, …), and losses (n,)."""
        held = {name: p.detach() for name, p in self.named.items()}
        if not self._one_by_one:
            try:
                gradients, losses = self._each(held, x, y)
                return [gradients[name] for name in self.named], losses
            except (RuntimeError, NotImplementedError, TypeError, ValueError):
                self._one_by_one = True  # steps that depend on what the model sees, and the like
        rows = range(len(leaves(y)[0]))
        found = [self._of_one(_row(x, i), _row(y, i)) for i in rows]
        stacked = [torch.stack(own) for own in zip(*(own for own, _ in found), strict=True)]
        return stacked, torch.stack([loss for _, loss in found])

    def _of_one(self, x: Nest, y: Nest) -> tuple[Gradients, torch.Tensor]:
        parameters = list(self.named.values())
        with autocast(self.precision, self.device):
            loss: torch.Tensor = self._whole(x, y)
        found = torch.autograd.grad(loss, parameters, allow_unused=True)
        pairs = zip(found, parameters, strict=True)
        return [torch.zeros_like(p) if g is None else g for g, p in pairs], loss.detach()

    def _clipped_sum(self, gradients: Gradients) -> Gradients:
        """Sum clipped gradients; entries that are not finite count as 0: no sample exceeds C."""
        norms = _norms(gradients)
        if not torch.isfinite(norms).all():
            gradients = [torch.nan_to_num(g, nan=0.0, posinf=0.0, neginf=0.0) for g in gradients]
            norms = _norms(gradients)  # still infinite where its square is: then all of it is 0
        factors = self.clip / norms.clamp(min=self.clip)
        return [torch.tensordot(factors, g, dims=([0], [0])) for g in gradients]


def _norms(gradients: Gradients) -> torch.Tensor:
    """Return the norm (n,) of every sample's gradient as one vector."""
    each = [torch.linalg.vector_norm(g.flatten(1), dim=1) for g in gradients]
    norms: torch.Tensor = torch.linalg.vector_norm(torch.stack(each, dim=1), dim=1)
    return norms


def _row(nest: Nest, i: int) -> Nest:
    return map_nest(lambda leaf: leaf[i : i + 1], nest)


# ---------------------------------------------------------------- what nobody can foresee


class Stream:
    """An unpredictable random stream: ChaCha20 (RFC 7539) with a 32-byte key that is used once."""

    def __init__(self, key: bytes) -> None:
        self._cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()

    def uniform(self, count: int) -> NDArray[np.float64]:
        """Draw (count,) multiples of 2⁻⁵³ in (0, 1]."""
        words = np.frombuffer(self._cipher.update(bytes(8 * count)), dtype="<u8")
        return ((words >> np.uint64(11)) + np.uint64(1)).astype(np.float64) * 2.0**-53

    def normal(self, count: int) -> NDArray[np.float64]:
        """Draw (count,) standard normal numbers by the Box-Muller transform."""
        half = -(-count // 2)
        radius = np.sqrt(-2 * np.log(self.uniform(half)))
        angle = 2 * np.pi * self.uniform(half)
        both = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
        return np.asarray(both[:count])


# ---------------------------------------------------------------- how much noise an update has


def noise_per_number(
    task: Task, model: nn.Module, part: Part, plan: TrainPlan, terms: Privacy
) -> float | None:
    """Return the expected square of the noise in every trained number of an update, or None.

    The noise that a step adds to a number's gradient has deviation s = σC/(q·n). SGD is linear in
    it, so with momentum m and weight decay λ (to which FedProx's μ is added) the covariance V of
    (number, momentum) changes with every step of rate η by

        V ← A V Aᵀ + s² b bᵀ,   A = [[1 − ηλ, −ηm], [λ, m]],   b = (−η, 1)

    and its first entry is returned; a penalty then divides the number by 1 + η·penalty. Left out
    are the loss's curvature on earlier noise, momentum from earlier rounds, and that a penalty
    spares the last bias. None: unknown, for any optimiser but SGD, and if the
    run clips the gradient's norm or has a cosine term.
    """
    plain = plan.optimiser in PLAIN and task.optimiser(model, plan.lr) is None
    if not plain or plan.clip_norm or plan.cosine_lambda:
        return None
    rate, steps = _sampling(model, part, plan)
    deviation = terms.noise * terms.clip / (rate * len(part))
    decay, momentum = plan.weight_decay + plan.proximal_mu, plan.momentum
    covariance = np.zeros((2, 2))
    for done in range(steps):
        lr = plan.rate(done / steps)
        moves = np.array([[1 - lr * decay, -lr * momentum], [decay, momentum]])
        new = deviation * np.array([-lr, 1.0])
        shrinks = np.diag([1 / (1 + lr * plan.penalty), 1.0])
        covariance = shrinks @ (moves @ covariance @ moves.T + np.outer(new, new)) @ shrinks
    return float(covariance[0, 0])


def num_trained(model: nn.Module, staying: Sequence[str] = ()) -> int:
    """Count the trained numbers of a model that leave; ``staying`` names the arrays that do not."""
    return sum(
        parameter.numel()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name not in staying
    )
