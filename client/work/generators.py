"""A silo's side of generators in latent space: where its model splits, and the loss on latents.

A generator arrives as arrays in a train message. Every mini-batch then adds the loss on as many
generated latents as it has samples (FedGenP, Algorithm 1, line 20) and, if asked, the divergence
of the model's answers from its head's answers to latents generated for the same labels (FedGen's
latent loss). Random draws depend only on the training's seed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import inf
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import kl_div, log_softmax, one_hot, softmax, softplus
from torch.nn.functional import linear as linear_map

from coterie import wire
from coterie.tasks.base import Task
from coterie.tasks.models import SplitModel
from coterie.wire import Layers, Model

KEEPING = (nn.MaxPool2d, nn.AvgPool2d, nn.Flatten, nn.Dropout, nn.Identity)
"""Modules after which the output of a ReLU is still at least 0."""

PROBES = 8
"""Noise samples by which a network's latents are tested: thousands of numbers."""
_never_negatives: WeakKeyDictionary[nn.Module, bool] = WeakKeyDictionary()

AddedLoss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def describe_head(task: Task, model: nn.Module) -> Layers:
    """Return the layers of the task's head; empty if there is no latent split to describe.

    The representation must have parameters (else latents are the data itself). The head must be
    Linear, or a Sequential of Linear, ReLU, Tanh and Dropout, with an output for every class;
    all of it is trained, so the server sees it. A first layer ``positive`` states that latents
    are at least 0, as behind a ReLU; for networks of torchvision or timm this is tested. So is
    that the described layers compute what the head does, with random weights, because a diverged
    run's weights show nothing.
    """
    prefix = task.head.rstrip(".")
    parameters = dict(model.named_parameters())
    if all(n.startswith(prefix) for n in parameters) or prefix not in dict(model.named_modules()):
        return ()
    names = [name for name, parameter in parameters.items() if parameter.requires_grad]
    head = model.get_submodule(prefix)
    positive = _behind_relu(model, prefix) or _never_negative(task, model, head)
    layers: list[tuple[str, ...]] = [("positive",)] if positive else []
    # Not named_children, which leaves out a module that comes a second time.
    parts = head._modules.items() if isinstance(head, nn.Sequential) else [("", head)]
    for name, module in parts:
        where = f"{prefix}.{name}" if name else prefix
        if type(module) is nn.Linear and f"{where}.weight" in names:
            bias = f"{where}.bias" if module.bias is not None else ""
            layers.append(("linear", f"{where}.weight", bias))
        elif isinstance(module, nn.ReLU | nn.Tanh):
            layers.append((type(module).__name__.lower(),))
        elif not isinstance(module, nn.Dropout | nn.Identity):
            return ()
    found = tuple(layers)
    return found if _is_head(task, model, head, found) else ()


@torch.no_grad()
def _is_head(task: Task, model: nn.Module, head: nn.Module, layers: Layers) -> bool:
    """Return whether the layers compute what the head does, with one logit per class."""
    named = dict(model.named_parameters())
    shapes = [named[names[0]].shape for kind, *names in layers if kind == "linear"]
    if not shapes or shapes[-1][0] != task.num_classes:
        return False
    like = named[next(names[0] for kind, *names in layers if kind == "linear")]
    tried = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        values: torch.Tensor = torch.randn(shape, generator=tried) / shape[-1] ** 0.5
        return values.to(like.device, like.dtype)

    weights = {id(parameter): drawn(*parameter.shape) for parameter in head.parameters()}
    latents = described = drawn(3, shapes[0][1])
    trains = head.training
    head.eval()
    try:
        own = {name: weights[id(parameter)] for name, parameter in head.named_parameters()}
        answer = functional_call(head, own, (latents,))
    except Exception:  # a head of somebody's own may raise anything on what it does not expect
        return False
    finally:
        head.train(trains)
    for kind, *names in layers:
        if kind == "linear":
            weight, *bias = (weights[id(named[name])] for name in names if name)
            described = linear_map(described, weight, *bias)
        elif kind != "positive":
            described = described.relu() if kind == "relu" else described.tanh()
    return answer.shape == described.shape and torch.allclose(answer, described, 1e-2, 1e-3)


def _behind_relu(model: nn.Module, prefix: str) -> bool:
    before = getattr(model, "representation", None)
    if prefix != "head" or not isinstance(before, nn.Sequential):
        return False
    modules = list(before)
    while modules and isinstance(modules[-1], KEEPING):
        modules.pop()
    return bool(modules) and isinstance(modules[-1], nn.ReLU)


def _never_negative(task: Task, model: nn.Module, head: nn.Module) -> bool:
    """Return whether a library network's latents are at least 0, whatever its input.

    It is tested once per model, with its initial weights: two silos must report the same.
    """
    shape = getattr(task, "shape", None)  # of a declared task
    if isinstance(model, SplitModel) or not isinstance(shape, tuple):
        return False
    if model not in _never_negatives:
        _never_negatives[model] = _lowest_latent(model, head, shape) >= 0
    return _never_negatives[model]


@torch.no_grad()
def _lowest_latent(model: nn.Module, head: nn.Module, shape: tuple[int, ...]) -> float:
    """Return the lowest latent of noise samples; -inf if they are not vectors or all 0."""
    seen: list[torch.Tensor] = []
    hook = head.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    training = {module: module.training for module in model.modules()}
    like = next(model.parameters())
    noise = torch.randn((PROBES, *shape), generator=torch.Generator().manual_seed(0))
    try:
        model.eval()(noise.to(like.device, like.dtype))
    finally:
        hook.remove()
        for module, was in training.items():
            module.training = was
    vectors = len(seen) == 1 and seen[0].ndim == 2 and bool(seen[0].any())
    return float(seen[0].min()) if vectors else -inf


def latent_loss(
    task: Task,
    model: nn.Module,
    generator: Model,
    *,
    seed: int,
    device: torch.device,
    generated_weight: float,
    distil_weight: float,
) -> AddedLoss | None:
    """Return what a generator adds to a mini-batch's loss; None if both weights are 0.

    Raises ``ValueError`` if there is no latent split, or the generator does not fit it.

    Args:
        model: its head is trained on the latents.
        generator: arrays named as in ``wire.GENERATOR_ARRAYS``; with ``labels``, the shares by
            which labels are drawn (FedGen), else uniformly.
        seed: of all random draws.
        generated_weight: of the loss on latents.
        distil_weight: of the divergence on the mini-batch's labels.
    """
    if not generated_weight and not distil_weight:
        return None  # not even randomness is used up: with such a generator training is FedAvg's
    layers = describe_head(task, model)
    if not layers:
        raise ValueError(f"task {task.name!r} has no latent split, so it cannot use a generator.")
    sample = _sampler(task, model, generator, layers, device)
    head, positive = model.get_submodule(task.head.rstrip(".")), layers[0][0] == "positive"
    shares = generator.get(wire.LABELS, np.full(task.num_classes, 1 / task.num_classes))
    rng = np.random.default_rng(seed)

    dtype = next(head.parameters()).dtype

    def answer(labels: torch.Tensor) -> torch.Tensor:
        latents = sample(labels, rng).to(dtype)
        logits: torch.Tensor = head(softplus(latents) if positive else latents)
        return logits

    def added(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        drawn = rng.choice(len(shares), size=len(targets), p=shares / shares.sum())
        labels = torch.from_numpy(drawn).to(device)
        loss = generated_weight * task.loss(answer(labels), labels)
        if distil_weight:
            with torch.no_grad():
                wanted = softmax(answer(targets), dim=1)
            divergence = kl_div(log_softmax(outputs, dim=1), wanted, reduction="batchmean")
            loss = loss + distil_weight * divergence
        return loss

    return added


def _sampler(
    task: Task, model: nn.Module, generator: Model, layers: Layers, device: torch.device
) -> Callable[[torch.Tensor, np.random.Generator], torch.Tensor]:
    """Return G(z | y), which maps labels to one latent each."""
    weights = {name: _tensor(generator, name, device) for name in wire.GENERATOR_ARRAYS}
    first = next(names[0] for kind, *names in layers if kind == "linear")
    latent = model.state_dict()[first].shape[1]
    hidden = weights["hidden.bias"].numel()
    expected = {
        "hidden.weight": (task.num_classes + wire.NOISE, hidden),
        "hidden.bias": (hidden,),
        **{f"{part}.weight": (hidden, latent) for part in ("mean", "spread")},
        **{f"{part}.bias": (latent,) for part in ("mean", "spread")},
    }
    for name, shape in expected.items():
        if tuple(weights[name].shape) != shape:
            raise ValueError(
                f"the generator's array {name!r} must have shape {shape}. "
                f"Got {tuple(weights[name].shape)}."
            )
    if (shares := generator.get(wire.LABELS)) is not None:
        _numbers(wire.LABELS, shares)
        if shares.shape != (task.num_classes,) or shares.min() < 0 or not shares.sum() > 0:
            raise ValueError(f"the generator's {wire.LABELS!r} must be {task.num_classes} shares.")

    @torch.no_grad()
    def sample(labels: torch.Tensor, rng: np.random.Generator) -> torch.Tensor:
        drawn = rng.random((len(labels), wire.NOISE), dtype=np.float32)
        uniform = torch.from_numpy(drawn).to(device)
        normal = rng.standard_normal((len(labels), latent), dtype=np.float32)
        inputs = torch.cat([one_hot(labels, task.num_classes).float(), uniform], dim=1)
        h = (inputs @ weights["hidden.weight"] + weights["hidden.bias"]).relu()
        mean = h @ weights["mean.weight"] + weights["mean.bias"]
        spread = h @ weights["spread.weight"] + weights["spread.bias"]
        deviation = torch.exp(0.5 * spread.clamp(max=wire.MAX_LOG_VARIANCE))
        return mean + deviation * torch.from_numpy(normal).to(device)

    return sample


def _tensor(generator: Mapping[str, np.ndarray], name: str, device: torch.device) -> torch.Tensor:
    if name not in generator:
        raise ValueError(f"the generator has no array {name!r}.")
    _numbers(name, generator[name])
    return torch.from_numpy(np.array(generator[name], dtype=np.float32, copy=True)).to(device)


def _numbers(name: str, array: np.ndarray) -> None:
    if array.dtype.kind not in "biuf" or not np.isfinite(array).all():
        raise ValueError(f"the generator's array {name!r} must contain only finite numbers.")
