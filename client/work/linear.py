"""Training of linear models on tables: a minimum, instead of steps at a learning rate.

A gradient step with rate η diverges if η times the loss's curvature exceeds 2. A table's columns
are correlated and have long tails, so the curvature differs from silo to silo by factors of a
hundred, also after scaling, and no rate suits all. A training of a linear model is therefore one
step of the proximal point algorithm (Rockafellar, SIAM J. Control Optim. 14, 1976)

    w ← argmin f(w) + |w − w_received|² / (2s),

which is stable for every length s. s is the learning rate times the number of mini-batches, the
length of the path that gradient descent would take, unless the plan has a ``length``. f is the mean
loss of all training rows, with the plan's penalties. It is minimised by L-BFGS in 64 bits. Nothing
is drawn at random.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from hashlib import sha256
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.functional import linear

from coterie import wire
from coterie.client.work.data import Held, Part
from coterie.client.work.optimisers import AUTO
from coterie.client.work.penalty import free_bias
from coterie.tasks.base import Task, has_own
from coterie.tasks.models import TableNetwork
from coterie.tasks.problems import Classes, Labels, Numbers
from coterie.wire import Model

if TYPE_CHECKING:
    from coterie.client.work.sgd import TrainPlan

Arrays = dict[str, NDArray[np.float64]]
OWN_HOOKS = ("train", "training_step", "loss", "optimiser", "lr_factor")
MOST_STEPS = 200
"""Most steps of L-BFGS: a training that has not arrived goes on in the next round."""
TOLERANCE = 1e-7
"""Largest entry of the gradient at which L-BFGS has arrived."""
PRIOR = 1.0
"""Without a penalty or weight decay, λ is this divided by the number of rows, as by default in
scikit-learn's classification. Otherwise two classes that a plane separates have no minimum."""
OF_BIAS = 0.1
"""Share of it that always holds the last bias of classes: one that a silo lacks stays possible."""

GRID = tuple(10.0**power for power in range(3, -3, -1))
"""Penalties that are tried, beside the sum of the rows' losses; the strongest first, from which
the others are soon found."""
FOLDS, TRIED = 3, 1e-4
"""Parts of the rows that are held out in turn, and the gradient at which a trial has arrived."""
MOST_TUNED = 1024
"""Data sets whose penalty is remembered in this process."""
_tuned: dict[bytes, float] = {}
"""Hash of a data set → its penalty."""


def linear_layer(task: Task, model: nn.Module, part: Part, plan: TrainPlan) -> nn.Linear | None:
    """Return the layer that a training by this plan minimises exactly; otherwise None.

    It is the model's only one, or the linear part of a table's network, if the plan trains that. It
    is for a loss of ours, rows of numbers (n, p), and a plan that asks for nothing that belongs to
    gradient steps.
    """
    steps = plan.momentum or plan.clip_norm or plan.accumulate > 1 or plan.cosine_lambda
    if plan.optimiser != AUTO or steps or plan.precision != "float32" or plan.schedule is not None:
        return None
    if plan.balance != "none" or any(has_own(task, hook) for hook in OWN_HOOKS):
        return None
    if not isinstance(task.problem, Classes | Labels | Numbers) or not isinstance(part, Held):
        return None
    x, layers = part.x, [m for m in model.modules() if isinstance(m, nn.Linear)]
    if not isinstance(x, torch.Tensor) or x.ndim != 2 or not x.is_floating_point():
        return None
    if isinstance(model, TableNetwork):
        return model.linear_part if plan.part in (wire.LINEAR_PART, wire.BOTH_PARTS) else None
    own = [p for layer in layers for p in layer.parameters() if p.requires_grad]
    if len(layers) != 1 or len(own) != len(list(model.parameters())) or list(model.buffers()):
        return None
    layer = layers[0]
    return layer if layer.in_features == x.shape[1] and _is_only(layer, model, x[:4]) else None


def _is_only(layer: nn.Linear, model: nn.Module, x: torch.Tensor) -> bool:
    """Return whether the model computes this layer and nothing else, at some weights and rows."""
    before = {name: p.detach().clone() for name, p in layer.named_parameters()}
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.linspace(-1, 1, p.numel(), device=p.device).view(p.shape))
        outputs, expected = model(x), layer(x)
        for name, p in layer.named_parameters():
            p.copy_(before[name])
    same = isinstance(outputs, torch.Tensor) and outputs.shape == expected.shape
    return same and torch.allclose(outputs, expected)


def named_of(model: nn.Module, layer: nn.Linear) -> dict[str, nn.Parameter]:
    """Return the parameters of one of a model's layers, by their names in the model."""
    own = {id(p) for p in layer.parameters()}
    return {name: p for name, p in model.named_parameters() if id(p) in own}


def _beside(model: nn.Module, part: Part) -> torch.Tensor | float:
    """Return (n, K), in 64 bits, what hidden layers add to the linear part's answers; or 0."""
    if not isinstance(model, TableNetwork):
        return 0.0
    x, _ = part.at(torch.arange(len(part)))
    training = model.training
    model.eval()
    with torch.no_grad():
        added: torch.Tensor = model.head(model.representation(x))
    model.train(training)
    return added.cpu().double()


def train_linear(
    task: Task,
    model: nn.Module,
    layer: nn.Linear,
    part: Part,
    plan: TrainPlan,
    *,
    length: float,
    own: Sequence[str] = (),
    towards: Model | None,
    centre: Model | None,
) -> float:
    """Train a model's layer in place, as the module says; what else it has is constant.

    Return the mean loss of all rows afterwards.

    Args:
        length: s > 0; ``math.inf``: no pull to the model received.
        own: names of arrays without this pull.
        towards: the model that FedProx's term of the plan pulls to; None: the one received.
        centre: of the plan's penalty; None: 0.
    """
    named = named_of(model, layer)
    free = free_bias(named)
    start: Arrays = {name: _wide(p) for name, p in named.items()}
    prior = PRIOR / len(part)
    usual = 0.0 if plan.penalty or plan.weight_decay else prior
    # Pulls: strength, centre or 0, and the arrays that are spared.
    pulls: list[tuple[float, Mapping[str, NDArray[Any]] | None, Sequence[str]]] = [
        (plan.penalty, centre, [free]),
        (usual, None, [free]),
        (_of_bias(task) * prior, centre, [n for n in named if n != free]),
        (plan.weight_decay, None, []),
        (plan.proximal_mu, start if towards is None else towards, []),
        (1 / length, start, own),
    ]
    strength = {n: sum(s for s, _, spared in pulls if n not in spared) for n in named}
    middle = {
        n: sum(s * _wide(c[n]) for s, c, spared in pulls if c is not None and n not in spared)
        for n in named
    }
    loss_at = _loss_of(task, part, _beside(model, part))
    arrays = minimum(loss_at, start, strength, middle)
    with torch.no_grad():
        for n, p in named.items():
            p.copy_(torch.from_numpy(arrays[n]))
    return float(loss_at({n: torch.from_numpy(a) for n, a in arrays.items()}))


def _of_bias(task: Task) -> float:
    return 0.0 if isinstance(task.problem, Numbers) else OF_BIAS


def tuned_penalty(task: Task, model: nn.Module, layer: nn.Linear, part: Held) -> float:
    """Return the λ of λ/2·|w|² beside the mean loss that suits these rows best.

    Every λ of a grid is tried on rows that are held out in turn (cross-validation); rows of one
    person or block are held out together. Too few rows: scikit-learn's default.
    """
    digest = sha256()
    for tensor in (part.x, part.y):
        assert isinstance(tensor, torch.Tensor)
        digest.update(tensor.cpu().numpy().tobytes())
    digest.update(b"" if part.together is None else repr(part.together.tolist()).encode())
    key = digest.digest()
    if key not in _tuned:
        while len(_tuned) >= MOST_TUNED:
            del _tuned[next(iter(_tuned))]
        _tuned[key] = _best_of_grid(task, named_of(model, layer), part)
    return _tuned[key] / len(part)


def _best_of_grid(task: Task, named: Mapping[str, nn.Parameter], part: Held) -> float:
    numbers = np.arange(len(part))
    if part.together is not None:
        numbers = np.unique(part.together, return_inverse=True)[1].reshape(-1)
    folds = np.random.default_rng(0).permutation(numbers.max() + 1)[numbers] % FOLDS
    if len(np.unique(folds)) < FOLDS:
        return PRIOR
    free, losses = free_bias(named), np.zeros(len(GRID))
    for fold in range(FOLDS):
        inside, outside = (
            part.take(torch.from_numpy(np.flatnonzero(rows)))
            for rows in (folds != fold, folds == fold)
        )
        loss_inside, loss_outside = _loss_of(task, inside), _loss_of(task, outside)
        arrays: Arrays = {n: np.zeros(tuple(p.shape)) for n, p in named.items()}
        for place, penalty in enumerate(GRID):
            strength = {
                n: (penalty if n != free else PRIOR * _of_bias(task)) / len(inside) for n in named
            }
            zero = dict.fromkeys(named, 0.0)
            arrays = minimum(loss_inside, arrays, strength, zero, gradient=TRIED)
            values = {n: torch.from_numpy(a) for n, a in arrays.items()}
            losses[place] += float(loss_outside(values)) * len(outside)
    return GRID[int(np.argmin(losses))]


def _loss_of(
    task: Task, part: Part, beside: torch.Tensor | float = 0.0
) -> Callable[[Mapping[str, torch.Tensor]], torch.Tensor]:
    """Return the function from 64-bit weights and bias to the mean loss of a part's rows.

    ``beside`` (n, K) is added to the answers.
    """
    x, y = part.at(torch.arange(len(part)))
    assert isinstance(x, torch.Tensor) and isinstance(y, torch.Tensor)
    x, y = x.cpu().double(), y.cpu().double() if y.is_floating_point() else y.cpu()

    def loss_at(values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        by_kind = {n.rsplit(".", 1)[-1]: value for n, value in values.items()}
        return task.loss(linear(x, by_kind["weight"], by_kind.get("bias")) + beside, y)

    return loss_at


def minimum(
    loss_at: Callable[[Mapping[str, torch.Tensor]], torch.Tensor],
    start: Arrays,
    strength: Mapping[str, float],
    middle: Mapping[str, Any],
    *,
    gradient: float = TOLERANCE,
) -> Arrays:
    """Return the minimum of a loss plus λ/2·|w|² − m·w of each array, from ``start``."""
    from scipy.optimize import minimize

    shapes = {n: array.shape for n, array in start.items()}

    def objective(vector: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        arrays = _split(vector, shapes)
        values = {n: torch.from_numpy(a).requires_grad_() for n, a in arrays.items()}
        loss = loss_at(values)
        found = torch.autograd.grad(loss, list(values.values()))
        total, slopes = loss.item(), []
        for (n, array), gradient in zip(arrays.items(), found, strict=True):
            total += float(strength[n] / 2 * (array**2).sum() - (array * middle[n]).sum())
            slopes.append((gradient.numpy() + strength[n] * array - middle[n]).ravel())
        return total, np.concatenate(slopes)

    found = minimize(
        objective,
        np.concatenate([array.ravel() for array in start.values()]),
        jac=True,
        method="L-BFGS-B",
        options={"maxiter": MOST_STEPS, "gtol": gradient, "ftol": 1e-14},
    )
    return _split(found.x, shapes)


def _wide(array: object) -> NDArray[np.float64]:
    given = array.detach().cpu().numpy() if isinstance(array, torch.Tensor) else array
    return np.array(given, np.float64)


def _split(vector: NDArray[np.float64], shapes: Mapping[str, tuple[int, ...]]) -> Arrays:
    parts, at = {}, 0
    for name, shape in shapes.items():
        size = math.prod(shape)
        parts[name] = vector[at : at + size].reshape(shape)
        at += size
    return parts
