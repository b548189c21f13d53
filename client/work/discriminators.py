"""A silo's client discriminators: one for each other silo, all trained in one pass.

Bao, Wang, Wu, He: "Optimizing the Collaboration Structure in Cross-Silo Federated Learning", ICML
2023, step 1. Discriminator k distinguishes this silo's samples from those of one other silo. All
see the same mini-batches, so FedCollab's own architecture is trained as *one wide layer*: K hidden
layers side by side are one matrix product forward and one backward, and that product itself adds
the SGD step to the weights. Any other architecture runs under ``vmap``. Parameters are stacked:
every array has a first axis of K.

Differs from the paper, whose silos train one discriminator at a time, one mini-batch per round.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import ClassVar, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.func import functional_call, vmap
from torch.nn.functional import binary_cross_entropy_with_logits, one_hot

from coterie.client.work.data import Held, Part, draw
from coterie.client.work.measure import batch_size
from coterie.client.work.session import Session
from coterie.client.work.sgd import seed_of
from coterie.system.device import seed_torch
from coterie.tasks.base import Nest, Task, has_own
from coterie.tasks.draws import split_by_class
from coterie.tasks.models import Discriminator, LabelwiseDiscriminator
from coterie.tasks.problems import Classes, Numbers
from coterie.wire import HITS, Model

CHUNK = 1024
"""Held-out samples scored at once."""
MOST_READ = 4096
"""Samples read from a dataset, or twice the number to train with if that is more."""
LEAST_FEATURES, LEAST_HIDDEN = 32, 4
"""Smallest sizes of a discriminator that is reduced."""
MOST_TARGET = 5.0
"""Largest real target that a discriminator sees, in deviations."""
PHASE, PROJECTION = "discriminator", "projection"

Stack = dict[str, torch.Tensor]


class View(Protocol):
    """What discriminators see of rows instead of a task's own features.

    Attributes:
        num_classes: of real targets.
    """

    num_classes: ClassVar[int]

    def features(self, x: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return features (n, F) of rows (n, columns)."""

    def classes(self, y: NDArray[np.float32]) -> NDArray[np.int64]:
        """Return the class (n,) of real targets (n, K)."""


class DiscriminatorError(ValueError):
    """Discriminators that cannot be trained. The text gives the reason and reveals no data."""


@dataclass(frozen=True)
class DiscriminatorPlan:
    """The settings of a discriminator's SGD; ``steps`` counts mini-batches."""

    steps: int
    batch_size: int
    lr: float


@dataclass(frozen=True)
class Pool:
    """A silo's training data as discriminators see it, split into two fixed parts.

    ``x`` (n, F) and ``y`` (n,) are features and labels to train with, ``x_held`` and ``y_held``
    are held out; ``second`` (held out,) marks the second half of the latter.
    """

    x: torch.Tensor
    y: torch.Tensor
    x_held: torch.Tensor
    y_held: torch.Tensor
    num_classes: int
    second: torch.Tensor


@dataclass(frozen=True)
class Pairs:
    """A silo's discriminators and the samples that they use.

    Attributes:
        module: one discriminator; only its architecture matters.
        stack: the parameters of K of them.
        labels: (K,) float32, the label, 1 or 0, of this silo's samples in each pair.
        received: whether the stack came with the message; else it is K copies of the initial one.
        short: whether it is sent in 16-bit numbers.
    """

    module: nn.Module
    stack: Stack
    labels: torch.Tensor
    pool: Pool
    received: bool
    short: bool = False

    @property
    def bytes_each(self) -> int:
        """Bytes of one discriminator's parameters when sent."""
        return _num_bytes(self.module) // (2 if self.short else 1)

    def arrays(self) -> Model:
        kind = np.float16 if self.short else np.float32
        return {n: p.cpu().numpy().astype(kind, copy=False) for n, p in self.stack.items()}


def open_pairs(
    session: Session,
    received: Model | None,
    labels: Sequence[int],
    *,
    samples: int,
    seed: int,
    labelled: bool = True,
    most_bytes: int = 0,
    seen: View | None = None,
) -> Pairs:
    """Prepare the discriminators that a message asks for.

    Raises ``DiscriminatorError`` if the arrays are not ``len(labels)`` discriminators of this task,
    or if the task's own have buffers, which cannot be stacked and averaged blindly.

    Args:
        received: the stacked discriminators, or None to start from the run's initial one.
        labels: label of this silo's samples for each discriminator.
        samples: most samples to train with; at least half of the silo's are held out.
        seed: of the run; determines the initial discriminator and what is held out.
        labelled: whether discriminators see the samples' labels; else every label is 0.
        most_bytes: limit for one discriminator, which is made smaller to fit if it can be; 0: none.
        seen: how discriminators see rows, such as those whose model is trees.
    """
    drawn = seed_of(seed, session.settings.name, 0, PHASE)
    pool = _pool(session, samples=samples, seed=drawn, labelled=labelled, seen=seen)
    seed_torch(seed_of(seed, "", 0, PHASE))
    make = session.task.discriminator
    if seen is not None:
        make = partial(LabelwiseDiscriminator, num_classes=pool.num_classes)
    module, num_features, short = _fitting(make, pool, most_bytes)
    module = module.to(session.device)
    pool = _projected(pool, num_features, seed=seed_of(seed, "", 0, PROJECTION))
    if any(True for _ in module.buffers()):
        raise DiscriminatorError(
            "a task's discriminator must not have buffers, such as BatchNorm's."
        )
    return Pairs(
        module,
        _stack(module, received, len(labels), short=short),
        torch.tensor(labels, dtype=torch.float32, device=session.device),
        pool,
        received=received is not None,
        short=short,
    )


def _fitting(
    make: Callable[[int], nn.Module], pool: Pool, most_bytes: int
) -> tuple[nn.Module, int, bool]:
    """Return a discriminator for ``most_bytes``, its feature count, and if it is in 16 bits."""
    num_features = number = pool.x.shape[1]
    own = make(num_features)
    if not most_bytes or _num_bytes(own) <= most_bytes:
        return own, number, False
    if type(own) is Discriminator and _num_bytes(own) > 2 * most_bytes:
        classes, most = pool.num_classes, most_bytes // 2 - 1
        least = min(LEAST_FEATURES, num_features)
        hidden = min(own.output.in_features, max(most // (least + classes + 3), LEAST_HIDDEN))
        number = min(num_features, max(most // hidden - classes - 3, least))
        return Discriminator(number, classes, hidden=hidden), number, True
    while _num_bytes(own) > 2 * most_bytes and number > LEAST_FEATURES:
        number = max(number // 2, LEAST_FEATURES)
        own = make(number)
    return own, number, True


def _projected(pool: Pool, num_features: int, *, seed: int) -> Pool:
    """Project features onto random directions, which are the same at every silo.

    Their scale, and so their weight against the label, stays (Johnson and Lindenstrauss, 1984).
    """
    if num_features == pool.x.shape[1]:
        return pool
    draw = torch.Generator().manual_seed(seed)
    along = torch.randn(pool.x.shape[1], num_features, generator=draw) / pool.x.shape[1] ** 0.5
    along = along.to(pool.x.device)
    return replace(pool, x=pool.x @ along, x_held=pool.x_held @ along)


def _num_bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def _pool(session: Session, *, samples: int, seed: int, labelled: bool, seen: View | None) -> Pool:
    """Split the silo's training data: min(half, ``samples``) to train with, the rest held out."""
    part = session.data.train
    # Of what is not in memory, no more is read than discriminators need.
    most = len(part) if isinstance(part, Held) else 2 * max(samples, MOST_READ // 2)
    count = min(min(len(part), most) // 2, samples)
    used, held = draw(part, count, seed=seed)
    used, held = used[:count], held[: most - count]
    second = torch.from_numpy(_second_half(part, held))
    if isinstance(part, Held):
        x, y = _seen(session.task, part.x, part.y, labelled=labelled, view=seen)
    else:
        batches = part.batches(torch.cat([used, held]), batch_size(part))
        read = [_seen(session.task, x, y, labelled=labelled) for x, y in batches]
        x, y = torch.cat([x for x, _ in read]), torch.cat([y for _, y in read])
        used, held = torch.arange(len(x)).tensor_split([len(used)])
    used, held, second = (rows.to(session.device) for rows in (used, held, second))
    classes = max(session.task.num_classes, 1)
    if seen is not None and isinstance(session.task.problem, Numbers):
        classes = seen.num_classes
    return Pool(x[used], y[used], x[held], y[held], classes, second)


def _second_half(part: Part, held: torch.Tensor) -> NDArray[np.bool_]:
    """Mark the second half of the held-out samples (n,); those of a person or block together."""
    second: NDArray[np.bool_] = np.arange(len(held)) % 2 == 1
    if part.together is not None and len(held):
        whose, alike = part.together[held.numpy()], np.zeros(len(held), np.int64)
        second[:] = False
        second[split_by_class(alike, 0.5, seed=0, persons=whose)[1]] = True
    return second


@torch.no_grad()
def _seen(
    task: Task, x: Nest, y: Nest, *, labelled: bool, view: View | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what discriminators see of samples: features (n, F), and labels (n,).

    Labels are classes, and otherwise zeros. Real targets are further features, scaled as for the
    loss and bounded, because one of millions would make the training diverge; not for a task's own
    discriminator, which may be made for its features. With ``view``, they are classes.
    """
    problem = task.problem
    if view is None:
        found = task.discriminator_features(x)
    else:
        found = torch.from_numpy(view.features(x.cpu().numpy())).to(x.device)
    if labelled and isinstance(problem, Classes):
        return found, y
    if labelled and isinstance(problem, Numbers) and view is not None:
        return found, torch.from_numpy(view.classes(y.cpu().numpy())).to(y.device)
    if labelled and isinstance(problem, Numbers) and not has_own(task, "discriminator"):
        targets = problem.scaled(y).clamp(-MOST_TARGET, MOST_TARGET)
        found = torch.cat([found, targets], dim=1)
    return found, torch.zeros(len(found), dtype=torch.int64, device=found.device)


def _stack(module: nn.Module, received: Model | None, num_pairs: int, *, short: bool) -> Stack:
    own = {name: parameter.detach() for name, parameter in module.named_parameters()}
    if received is None:
        return {n: p.expand(num_pairs, *p.shape).clone() for n, p in own.items()}
    if set(received) != set(own):
        odd = sorted(set(received) ^ set(own))[:3]
        raise DiscriminatorError(
            f"the arrays of the discriminators received differ from the task's: {odd}"
        )
    stack, kind = {}, np.dtype(np.float16 if short else np.float32)
    for name, parameter in own.items():
        array, shape = received[name], (num_pairs, *parameter.shape)
        if array.shape != shape or array.dtype != kind:
            raise DiscriminatorError(
                f"discriminator array {name!r} must be {kind} of shape {shape}. "
                f"Got {array.dtype} of shape {array.shape}."
            )
        stack[name] = torch.from_numpy(array.astype(np.float32)).to(parameter.device)
    return stack


def train_stack(pairs: Pairs, plan: DiscriminatorPlan, *, seed: int) -> None:
    """Train in place with SGD on binary cross-entropy; ``seed``: of batches and modules."""
    seed_torch(seed)
    module, stack, pool, labels = pairs.module, pairs.stack, pairs.pool, pairs.labels
    module.train()
    wide = _Wide(module, stack, plan.lr) if type(module) is Discriminator else None
    for batch in _batches(len(pool.x), plan, seed):
        rows = batch.to(pool.x.device)
        x, y = pool.x[rows], pool.y[rows]
        if wide is not None:
            wide.step(x, y, labels)
        else:
            _vmap_step(module, stack, x, one_hot(y, pool.num_classes).float(), labels, plan.lr)
    if wide is not None:
        wide.write_back()


def _batches(num_samples: int, plan: DiscriminatorPlan, seed: int) -> Iterator[torch.Tensor]:
    """Yield ``steps`` mini-batches from shuffled epochs; an epoch's short rest is used too."""
    shuffle = torch.Generator().manual_seed(seed)
    done = 0
    while done < plan.steps:
        for batch in torch.randperm(num_samples, generator=shuffle).split(plan.batch_size):
            yield batch
            done += 1
            if done == plan.steps:
                return


def _vmap_step(
    module: nn.Module,
    stack: Stack,
    x: torch.Tensor,
    labels_one_hot: torch.Tensor,
    labels: torch.Tensor,
    lr: float,
) -> None:
    """Take one SGD step of any architecture: K forward passes as one, the gradient of their sum."""
    leaves = {name: parameter.requires_grad_() for name, parameter in stack.items()}
    logits = _vmap_logits(module, leaves, x, labels_one_hot)
    targets = labels[:, None].expand_as(logits)
    loss = binary_cross_entropy_with_logits(logits, targets, reduction="none").mean(dim=1).sum()
    gradients = torch.autograd.grad(loss, list(leaves.values()))
    with torch.no_grad():
        for parameter, gradient in zip(leaves.values(), gradients, strict=True):
            parameter.requires_grad_(False).sub_(gradient, alpha=lr)


def _vmap_logits(
    module: nn.Module, stack: Mapping[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor
) -> torch.Tensor:
    """Return the logits (K, n) of one batch."""

    def one(parameters: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional_call(module, parameters, (x, y))  # type: ignore[no-any-return]

    out: torch.Tensor = vmap(one, randomness="different")(dict(stack))
    return out


class _Wide:
    """K discriminators of FedCollab's architecture as one layer of K·hidden units.

    The backward pass is written out: all of a silo's samples have one label per pair, the input
    needs no gradient, and ``addmm_`` adds the step into the weights without a gradient in memory.
    """

    def __init__(self, module: Discriminator, stack: Stack, lr: float) -> None:
        self.stack, self.lr = stack, lr
        self.num_pairs, self.hidden, features = stack["features.weight"].shape
        self.scale = 2 * module.label_scale
        self.weight = stack["features.weight"].view(-1, features)
        self.bias = (stack["features.bias"] + 2 * stack["label.bias"]).view(-1)
        # Labels by row, so that looking one up and adding to it touch adjacent memory.
        self.label = stack["label.weight"].view(len(self.weight), -1).t().contiguous()
        self.out, self.out_bias = stack["output.weight"][:, 0], stack["output.bias"][:, 0]
        self.moved = torch.zeros_like(self.bias)

    def hidden_of(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the hidden layer (n, K, hidden) after ReLU."""
        hidden = torch.addmm(self.bias, x, self.weight.t())
        hidden.add_(self.label[y], alpha=self.scale).relu_()
        return hidden.view(len(x), self.num_pairs, self.hidden)

    def logits(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Return the logits (n, K)."""
        return self._logits(self.hidden_of(x, y))

    def _logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden * self.out).sum(dim=2) + self.out_bias

    def step(self, x: torch.Tensor, y: torch.Tensor, labels: torch.Tensor) -> None:
        hidden = self.hidden_of(x, y)
        slope = (self._logits(hidden).sigmoid() - labels) / len(x)  # d loss / d logits
        back = (slope[:, :, None] * self.out).mul_(hidden > 0).view(len(x), -1)
        self.out.sub_(torch.einsum("nk,nkh->kh", slope, hidden), alpha=self.lr)
        self.out_bias.sub_(slope.sum(0), alpha=self.lr)
        self.weight.addmm_(back.t(), x, alpha=-self.lr)
        self.label.index_add_(0, y, back, alpha=-self.lr * self.scale)
        step = back.sum(0).mul_(-self.lr)
        self.moved.add_(step)
        self.bias.add_(step, alpha=5.0)  # features.bias moves by a step, twice label.bias by four

    def write_back(self) -> None:
        """Copy the parameters that were trained in a different layout back into the stack."""
        shape = self.stack["features.bias"].shape
        self.stack["label.weight"].copy_(self.label.t().view_as(self.stack["label.weight"]))
        self.stack["features.bias"].add_(self.moved.view(shape))
        self.stack["label.bias"].add_(self.moved.view(shape), alpha=2.0)


@torch.no_grad()
def count_hits(pairs: Pairs) -> Model:
    """Count right answers on both held-out halves: ``hits`` (K, 2) and ``counts`` (2,), int64."""
    module, stack, pool = pairs.module, pairs.stack, pairs.pool
    module.eval()
    wide = _Wide(module, stack, 0.0) if type(module) is Discriminator else None
    right = []
    for x, y in zip(pool.x_held.split(CHUNK), pool.y_held.split(CHUNK), strict=True):
        if wide is not None:
            logits = wide.logits(x, y).t()
        else:
            logits = _vmap_logits(module, stack, x, one_hot(y, pool.num_classes).float())
        right.append((logits > 0) == (pairs.labels[:, None] > 0.5))
    whole = torch.cat(right, dim=1)
    halves = [whole[:, ~pool.second], whole[:, pool.second]]
    return {
        HITS: torch.stack([half.sum(dim=1) for half in halves], dim=1).cpu().numpy(),
        "counts": np.array([half.shape[1] for half in halves], dtype=np.int64),
    }
