"""Local training of one silo.

The loop is plain PyTorch. Arrays lie on the device and a batch is an index into them: nothing is
copied per step; datasets come through a DataLoader. Randomness depends only on (run seed, silo,
round, purpose), so the order in which silos train does not matter.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass, replace
from functools import partial
from math import sqrt
from typing import Any, Protocol

import numpy as np
import torch
from torch import nn

from coterie import wire
from coterie.client.work.data import Batch, Part
from coterie.client.work.linear import linear_layer, train_linear
from coterie.client.work.optimisers import Schedule, Slots, optimiser_of
from coterie.client.work.penalty import Penalty
from coterie.client.work.weights import frozen_parts, set_training
from coterie.system.device import seed_torch
from coterie.tasks.base import Nest, Task, TaskError, has_own, leaves
from coterie.tasks.models import BATCH_NORM
from coterie.tasks.problems import Classes
from coterie.wire import Model

HIDDEN_CLIP = 5.0
"""Largest gradient norm of hidden layers beside a linear part, which has no steps to bound."""


class TooFewError(TaskError):
    """Too few samples to train this model. The text reveals nothing about the data."""


@dataclass(frozen=True)
class TrainPlan:
    """The length and settings of a training. Anyone who reads it from a message checks the bounds.

    Attributes:
        epochs: passes over the training data, ≥ 1.
        batch_size: ≥ 1; the last batch of an epoch may be smaller.
        lr: learning rate, > 0.
        momentum, weight_decay: ≥ 0; momentum is only for SGD and RMSprop.
        proximal_mu: μ of FedProx's μ/2·|w − w_received|², ≥ 0.
        cosine_lambda: λ of pFedGraph's −λ·cos(w, w_received), ≥ 0.
        penalty: λ ≥ 0 of λ/2·|w − centre|², without the last bias (``Penalty``).
        precision: ``float32``, or ``bfloat16`` or ``float16`` for autocast.
        steps: exact number of mini-batches, instead of ``epochs``; 0: whole epochs.
        optimiser: ``auto`` (``linear_layer``), ``sgd``, or a name in ``torch.optim``.
        length: of an exact step (``linear``); 0: learning rate times mini-batches.
        schedule: learning rate over the run; None: constant.
        clip_norm: largest gradient norm; 0: no limit.
        accumulate: mini-batches per optimiser step.
        balance: ``weights`` or ``sampling`` compensates for class imbalance; ``none`` does not.
        part: of a table's network (``wire.PART``): the others stay as they are.
    """

    epochs: int
    batch_size: int
    lr: float
    momentum: float = 0.0
    weight_decay: float = 0.0
    proximal_mu: float = 0.0
    cosine_lambda: float = 0.0
    penalty: float = 0.0
    precision: str = "float32"
    steps: int = 0
    optimiser: str = "sgd"
    length: float = 0.0
    schedule: Schedule | None = None
    clip_norm: float = 0.0
    accumulate: int = 1
    balance: str = "none"
    part: str = ""

    def rate(self, done: float) -> float:
        """Return the learning rate after this share of the training."""
        return self.lr if self.schedule is None else self.lr * self.schedule.factor(done)


class Beside(Protocol):
    """A second model that learns from a training's mini-batches without affecting it."""

    def backward(self, x: Nest, y: Nest) -> None:
        """Add the second model's gradient of a mini-batch."""
        ...

    def step(self, lr: float) -> None:
        """Apply the gradients since the last step; the trained model takes its step afterwards."""
        ...


def seed_of(run_seed: int, silo: str, round_number: int, purpose: str) -> int:
    """Return a 63-bit seed that depends only on its arguments."""
    text = f"{run_seed}/{silo}/{round_number}/{purpose}"
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


def train(task: Task, model: nn.Module, part: Part, plan: TrainPlan, **how: Any) -> float:
    """Train in place what the plan names, one part after the other; see ``train_all``."""
    if not plan.part:
        return train_all(task, model, part, plan, **how)
    trained = (wire.LINEAR_PART, wire.HIDDEN_PART) if plan.part == wire.BOTH_PARTS else (plan.part,)
    for one in trained:
        own = replace(plan, part=one)
        if one == wire.HIDDEN_PART:  # a penalty is on the slopes
            own = replace(own, penalty=0.0, clip_norm=plan.clip_norm or HIDDEN_CLIP)
        with frozen(model, [n for n, _ in model.named_parameters() if not is_of(n, one)]):
            loss = train_all(task, model, part, own, **how)
    return loss


def is_of(name: str, part: str) -> bool:
    """Return whether an array belongs to this part of a table's network."""
    return name.startswith(wire.LINEAR_LAYER) is (part == wire.LINEAR_PART)


@contextmanager
def frozen(model: nn.Module, names: Collection[str]) -> Iterator[None]:
    """Freeze these parameters, without a gradient by which an optimiser would move them."""
    own = [p for name, p in model.named_parameters() if name in names and p.requires_grad]
    for parameter in own:
        parameter.requires_grad, parameter.grad = False, None
    try:
        yield
    finally:
        for parameter in own:
            parameter.requires_grad = True


def train_all(
    task: Task,
    model: nn.Module,
    part: Part,
    plan: TrainPlan,
    *,
    seed: int,
    towards: Model | None = None,
    centre: Model | None = None,
    added: Callable[[torch.Tensor, Nest], torch.Tensor] | None = None,
    slots: Slots | None = None,
    beside: Beside | None = None,
    own: Sequence[str] = (),
) -> float:
    """Train in place; return the mean loss over the last epoch's samples.

    Raises ``TooFewError`` as ``require_enough``, and ``TaskError`` if the task cannot do what the
    plan asks.

    Args:
        seed: of the shuffling and of the model's own randomness (dropout).
        towards: model that the plan's proximal and cosine terms pull to; None: the initial one.
        centre: of the plan's penalty; None: 0.
        added: (outputs, targets) of a mini-batch → term added to its loss, but not to the result.
        slots: optimiser state to start from, updated at the end; None: start without one.
        beside: second model that learns from the same mini-batches.
        own: names of arrays that an exact step does not hold near their start.
    """
    require_enough(model, part)
    seed_torch(seed)
    passes = _Passes(model, part, plan, seed)
    set_training(model)
    if has_own(task, "train"):
        return _train_by_task(task, model, passes)
    layer = linear_layer(task, model, part, plan) if added is None and beside is None else None
    if layer is not None:
        length = plan.length or plan.lr * passes.planned
        return train_linear(
            task, model, layer, part, plan, length=length, own=own, towards=towards, centre=centre
        )
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    parameters = list(named.values())
    pulled = plan.proximal_mu > 0 or plan.cosine_lambda > 0
    anchor = anchor_of(named, towards) if pulled else []
    penalty = Penalty(named, plan.penalty, centre)
    known = {} if slots is None else slots
    optimiser = optimiser_of(plan, task, model, named, known)
    step = _step_of(task, part, plan, added)
    total = torch.zeros((), device=part.device)
    done = 0
    for batches in passes:
        total.zero_()
        seen = 0
        for x, y in batches:
            if done % plan.accumulate == 0:
                for parameter in parameters:
                    parameter.grad = None
            with autocast(plan.precision, part.device):
                loss, objective = step(model, x, y)
            optimiser.backward(objective)
            if beside is not None:
                beside.backward(x, y)
            total += loss.detach() * len(leaves(y)[0])
            seen += len(leaves(y)[0])
            done += 1
            if done % plan.accumulate == 0 or done == passes.planned:
                optimiser.finish_gradients(parameters)
                if plan.proximal_mu > 0:
                    add_proximal_gradient(parameters, anchor, plan.proximal_mu)
                if plan.cosine_lambda > 0:
                    add_cosine_gradient(parameters, anchor, plan.cosine_lambda)
                rate = plan.rate((done - 1) / passes.planned)
                if beside is not None:
                    beside.step(rate)
                optimiser.step(rate)
                penalty.step(rate)
    if slots is not None:
        optimiser.remember(slots)
    return float(total) / seen


class _Passes:
    """The passes of a training, each of one mini-batch or more; ``planned`` counts them all."""

    def __init__(self, model: nn.Module, part: Part, plan: TrainPlan, seed: int) -> None:
        self._part, self.plan, self._seed = part, plan, seed
        self._a_pass = steps_of_a_pass(model, part, plan)
        self.planned = plan.steps or plan.epochs * self._a_pass

    def __iter__(self) -> Iterator[Iterator[Batch]]:
        shuffle = torch.Generator().manual_seed(self._seed)
        for done in range(0, self.planned, self._a_pass):
            steps = min(self.planned - done, self._a_pass)
            order = _order(self._part, self.plan, shuffle)[: steps * self.plan.batch_size]
            yield self._part.batches(order, self.plan.batch_size, seed=self._seed + done)


class _PassesForTask:
    """The passes for a task's own loop, with the current learning rate."""

    def __init__(self, passes: _Passes) -> None:
        self._passes, self._given = passes, 0

    def __iter__(self) -> Iterator[Iterator[Batch]]:
        if self._given:
            raise TaskError("passes can be used only once.")
        return map(self._counted, self._passes)

    def _counted(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        for batch in batches:
            self._given += 1
            yield batch

    @property
    def lr(self) -> float:
        return self._passes.plan.rate(max(self._given - 1, 0) / self._passes.planned)

    @property
    def left(self) -> int:
        return self._passes.planned - self._given


def _train_by_task(task: Task, model: nn.Module, passes: _Passes) -> float:
    """Run the task's own loop; check that it took every mini-batch and returned a number."""
    given = _PassesForTask(passes)
    loss = task.train(model, given)
    if given.left:
        raise TaskError(
            f"train of task {task.name!r} must use every mini-batch that it receives: the run "
            f"decides how much is trained. It left out {given.left} of {passes.planned}."
        )
    if isinstance(loss, torch.Tensor) and loss.numel() == 1:
        loss = float(loss)
    if isinstance(loss, bool) or not isinstance(loss, int | float):
        raise TaskError(
            f"train of task {task.name!r} must return the mean loss of the last pass, a number. "
            f"Got {type(loss).__name__}."
        )
    return float(loss)


def steps_of_a_pass(model: nn.Module, part: Part, plan: TrainPlan) -> int:
    """Return the mini-batches per pass; BatchNorm excludes a last one of a single sample."""
    whole, rest = divmod(len(part), plan.batch_size)
    if rest == 1 and whole and has_batch_norm(model):
        return whole  # batch statistics of one sample do not exist
    return whole + (rest > 0)


def _order(part: Part, plan: TrainPlan, shuffle: torch.Generator) -> torch.Tensor:
    if plan.balance != "sampling":
        return torch.randperm(len(part), generator=shuffle)
    y = part.targets().cpu()
    chances = 1 / torch.bincount(y)[y].double()
    return torch.multinomial(chances, len(part), replacement=True, generator=shuffle)


Step = Callable[[nn.Module, Nest, Nest], tuple[torch.Tensor, torch.Tensor]]
"""(model, inputs, targets) → the mini-batch's loss, and the objective to minimise."""


def _step_of(
    task: Task,
    part: Part,
    plan: TrainPlan,
    added: Callable[[torch.Tensor, Nest], torch.Tensor] | None,
) -> Step:
    """Return the task's training step, or one built from its loss if the plan needs more."""
    loss_of = loss_for(task, part, plan)
    if added is None and plan.balance != "weights":

        def own(model: nn.Module, x: Nest, y: Nest) -> tuple[torch.Tensor, torch.Tensor]:
            loss = task.training_step(model, x, y)
            return loss, loss

        return own

    def step(model: nn.Module, x: Nest, y: Nest) -> tuple[torch.Tensor, torch.Tensor]:
        outputs = model(x)
        loss = loss_of(outputs, y)
        return loss, loss if added is None else loss + added(outputs, y)

    return step


def require_balance(task: Task, balance: str) -> None:
    """Check that a task can compensate for class imbalance in this way.

    Raises ``TaskError`` if it has no classes or, for class weights, its own loss or training step.
    """
    if balance == "none":
        return
    own = [hook for hook in ("loss", "training_step") if has_own(task, hook)]
    if not isinstance(task.problem, Classes) or (balance == "weights" and own):
        why = "has no classes" if not own else f"has its own {own[0]}"
        raise TaskError(
            f"balance = {balance!r} cannot be used for task {task.name!r}, which {why}."
        )


def loss_for(
    task: Task, part: Part, plan: TrainPlan
) -> Callable[[torch.Tensor, Nest], torch.Tensor]:
    """Return the task's loss, with class weights n / (K · n_k) of this silo's labels if asked.

    Raises ``TaskError`` as ``require_balance``.
    """
    require_balance(task, plan.balance)
    if plan.balance != "weights":
        return task.loss
    problem = task.problem
    assert isinstance(problem, Classes)
    counts = torch.bincount(part.targets(), minlength=problem.num_classes)
    weights = len(part) / (counts.clamp(min=1) * (counts > 0).sum())
    return partial(problem.loss, weights=weights.float())


def anchor_of(named: Mapping[str, nn.Parameter], towards: Model | None) -> list[torch.Tensor]:
    """Return the tensors that a plan pulls to, by parameter; default: the current values."""
    if towards is None:
        return [p.detach().clone() for p in named.values()]
    return [torch.from_numpy(np.array(towards[name])).to(p.device) for name, p in named.items()]


def add_proximal_gradient(
    parameters: list[nn.Parameter], anchor: list[torch.Tensor], mu: float
) -> None:
    """Add the gradient μ·(w − w_received) of FedProx's term, without building its graph."""
    with torch.no_grad():
        for parameter, start in zip(parameters, anchor, strict=True):
            if parameter.grad is not None:
                parameter.grad.add_(parameter - start, alpha=mu)


def add_cosine_gradient(
    parameters: list[nn.Parameter], anchor: list[torch.Tensor], strength: float
) -> None:
    """Add the gradient of −λ·cos(w, w_received), with all parameters as one vector.

    It is −λ/|w| · (r − cos·w/|w|) with r = w_received/|w_received|; 0 where either is zero.
    """
    with torch.no_grad():
        length, other = (_length(vector) for vector in (parameters, anchor))
        if not (length > 0 and other > 0):
            return
        pairs = list(zip(parameters, anchor, strict=True))
        cosine = sum(float(torch.sum(p * a)) for p, a in pairs) / (length * other)
        for parameter, start in pairs:
            if parameter.grad is not None:
                parameter.grad.add_(start, alpha=-strength / (length * other))
                parameter.grad.add_(parameter, alpha=strength * cosine / length**2)


def _length(tensors: Sequence[torch.Tensor]) -> float:
    return sqrt(sum(float(torch.linalg.vector_norm(tensor)) ** 2 for tensor in tensors))


def has_batch_norm(model: nn.Module) -> bool:
    """Return whether training uses batch statistics, which a single sample does not have.

    A frozen BatchNorm does not count: it keeps its running statistics.
    """
    frozen = {id(module) for _, part in frozen_parts(model) for module in part.modules()}
    return any(isinstance(m, BATCH_NORM) and id(m) not in frozen for m in model.modules())


def require_enough(model: nn.Module, part: Part) -> None:
    """Raise ``TooFewError`` if the model has BatchNorm without statistics of the only sample.

    BatchNorm that normalises over an image's pixels has them.
    """
    if len(part) > 1 or not has_batch_norm(model):
        return
    try:
        with torch.no_grad():
            tried = deepcopy(model)  # its running statistics would change
            set_training(tried)
            tried(part.at(torch.zeros(1, dtype=torch.int64))[0])
    except ValueError:
        raise TooFewError(
            "a model with BatchNorm cannot be trained on one sample. Give the silo more "
            "training data, hold out less of it (validation, alpha = auto), or use a network "
            "without BatchNorm."
        ) from None


def autocast(precision: str, device: torch.device) -> AbstractContextManager[object]:
    """Return a mixed-precision context for the precision; none for ``float32``."""
    if precision == "float32":
        return nullcontext()
    return torch.autocast(device.type, dtype=getattr(torch, precision))


class Stopwatch(AbstractContextManager["Stopwatch"]):
    """A stopwatch: ``seconds`` holds the time between enter and exit."""

    seconds = 0.0

    def __enter__(self) -> Stopwatch:
        self._start = time.perf_counter()
        return self

    def __exit__(self, *_: object) -> None:
        self.seconds = time.perf_counter() - self._start
