"""Gradient inversion: training images worked out from an update, by the methods published for it.

- *analytic*: a row of a linear first layer's gradient, divided by its bias's, is a mean of the
  inputs, weighted by what came back to that unit; of one sample it is the input (Phong, Aono,
  Hayashi, Wang and Moriai 2017, §III).
- *imprint*: the same by a server that is not curious but hostile, and sends a model made for it:
  units sort the samples by brightness, and neighbouring rows differ by the few that lie between
  (Fowl, Geiping, Czaja, Goldblum and Goldstein 2022, "Robbing the Fed", §3).
- *matching*: images whose training would give the same update (Zhu, Liu and Han 2019, "Deep leakage
  from gradients"), by the cosine of updates with total variation as the prior, and through all
  local steps (Geiping, Bauermeister, Dröge and Moeller 2020, "Inverting gradients", eq. 4 and §6).

The attacker is the strongest that the product allows: the server knows the network, the model sent,
the learning rate and the number of samples, and with the run's seed also the order of the samples
in the mini-batches. Labels it is given, too: Zhao, Mopuri and Bilen 2020 (iDLG) read that of one
sample from the update's signs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.functional import cross_entropy, normalize

Images = NDArray[np.float64]
"""(number, height, width), from 0 to 1."""


@dataclass(frozen=True)
class Clipped:
    """DP-SGD's step: gradients of samples clipped to one length, their sum with noise.

    Attributes:
        norm: C.
        noise: σ, of which the sum has σC per coordinate; 0 to an attacker, who cannot know it.
    """

    norm: float
    noise: float = 0.0


@dataclass(frozen=True)
class Training:
    """A silo's local training, as whoever knows its settings can repeat it; a batch of trials.

    Attributes:
        net: whose parameters are given apart.
        start: the model sent; each array (trials, ...).
        y: labels, (trials, n).
        order: rows of every mini-batch, (trials, steps, batch).
        lr: learning rate of SGD.
        clipped: None: ordinary SGD.
    """

    net: nn.Module
    start: dict[str, Tensor]
    y: Tensor
    order: Tensor
    lr: float
    clipped: Clipped | None = None

    def update(self, x: Tensor) -> Tensor:
        """What training with x, (trials, n, ...), subtracts from the model, (trials, P), per lr."""
        return vmap(self._update, randomness="different")(self.start, x, self.y, self.order)

    def _update(self, start: dict[str, Tensor], x: Tensor, y: Tensor, order: Tensor) -> Tensor:
        now = start
        for rows in order:
            slope = self._slope(now, x[rows], y[rows])
            now = {name: now[name] - self.lr * slope[name] for name in now}
        return torch.cat([((start[name] - now[name]) / self.lr).flatten() for name in now])

    def _slope(self, model: dict[str, Tensor], x: Tensor, y: Tensor) -> dict[str, Tensor]:
        if self.clipped is None:
            slope: dict[str, Tensor] = grad(self._loss)(model, x, y)
            return slope
        each = vmap(grad(self._loss), in_dims=(None, 0, 0))(model, x[:, None], y[:, None])
        length = torch.sqrt(sum((g.flatten(1) ** 2).sum(1) for g in each.values()))
        factor = (self.clipped.norm / length).clamp(max=1)
        found = {}
        for name, g in each.items():
            total = torch.tensordot(factor, g, dims=1)
            if self.clipped.noise:
                total = total + self.clipped.noise * self.clipped.norm * torch.randn_like(total)
            found[name] = total / len(y)
        return found

    def _loss(self, model: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return cross_entropy(functional_call(self.net, model, (x,)), y)


View = Callable[[Tensor], Tensor]
"""Updates (trials, P) → what of them is seen, (trials, numbers)."""


def whole(updates: Tensor) -> Tensor:
    """All of it."""
    return updates


def sketch_of(num: int, size: int, *, seed: int) -> View:
    """A CountSketch: every coordinate goes with a random sign into one of ``size`` buckets."""
    rng = np.random.default_rng(seed)
    bucket = torch.from_numpy(rng.integers(0, size, num))
    sign = torch.from_numpy(rng.choice([-1.0, 1.0], num))

    def view(updates: Tensor) -> Tensor:
        signed = updates * sign.to(updates.dtype)
        return torch.zeros(len(updates), size, dtype=updates.dtype).index_add(1, bucket, signed)

    return view


def match(
    trainings: Sequence[Training],
    seen: Tensor,
    view: View,
    *,
    shape: Sequence[int],
    steps: int,
    tv: float = 1e-3,
    rate: float = 0.3,
    seed: int = 0,
) -> Tensor:
    """Images whose training gives what was seen.

    Args:
        trainings: of the silos whose mean update was seen; one: that silo's own.
        seen: (trials, numbers).
        view: what of a mean update is seen.
        shape: of an image.
        steps: of Adam.
        tv: weight of the total variation.
        rate: Adam's, falling to nothing along a cosine. This and ``tv`` did best of 0.03, 0.1, 0.3
            and of 0, 1e-4, 1e-3, 1e-2 on single samples and on eight.
        seed: of the images that it begins with.

    Returns:
        Images of every silo after another, (trials, silos · n, ...).
    """
    draw = torch.Generator().manual_seed(seed)
    dtype = seen.dtype
    sizes = [training.y.shape[1] for training in trainings]
    x = torch.rand(len(seen), sum(sizes), *shape, generator=draw, dtype=dtype).requires_grad_()
    target = normalize(seen, dim=1)
    adam = torch.optim.Adam([x], lr=rate)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(adam, steps)
    for _ in range(steps):
        parts = zip(trainings, x.split(sizes, dim=1), strict=True)
        updates = [training.update(part) for training, part in parts]
        found = normalize(view(torch.stack(updates).mean(0)), dim=1)
        loss = (1 - (found * target).sum(1)).sum() + tv * _total_variation(x)
        adam.zero_grad()
        loss.backward()
        adam.step()
        falling.step()
        with torch.no_grad():
            x.clamp_(0, 1)
    return x.detach()


def _total_variation(x: Tensor) -> Tensor:
    """Mean over pixels, summed over trials."""
    down, along = (x.diff(dim=dim).abs().mean(dim=(1, 2, 3, 4)) for dim in (-1, -2))
    return (down + along).sum()


def imprint(model: dict[str, Tensor], brightness: Tensor) -> dict[str, Tensor]:
    """A model with one hidden layer whose gradient keeps samples apart ("Robbing the Fed", §3).

    Args:
        model: w1 (units, pixels), b1 (units,), w2 (classes, units), b2, in this order.
        brightness: of images of this kind, from anywhere, (images,).

    Returns:
        Unit i answers to images brighter than the i-th quantile; what comes back is alike for all.
    """
    (w1, rows), (b1, _), (w2, head), *_ = model.items()
    units, pixels = rows.shape
    edges = torch.quantile(brightness, torch.linspace(0, 1, units + 2)[1:-1])
    alike = head[:, :1].expand(-1, units) * 0.1
    return model | {w1: torch.full_like(rows, 1 / pixels), b1: -edges, w2: alike.contiguous()}


def rows_of(
    updates: Tensor, net: nn.Module, *, pixels: int, apart: bool = False
) -> list[Images] | None:
    """What the rows of a linear first layer say: per trial an image for every unit that saw any.

    A row counts if it can be an image: every pixel from 0 to 1, but for rounding. None: the network
    does not begin with a linear layer that has a bias. ``apart``: a unit's row is meant less the
    next one's, see ``imprint``.
    """
    names = {name: parameter.shape for name, parameter in net.named_parameters()}
    (weight, shape), (bias, _), *_ = names.items()
    if len(shape) != 2 or shape[1] != pixels or bias != weight.replace("weight", "bias"):
        return None
    units, side = shape[0], round(pixels**0.5)
    found = []
    for update in updates.double().numpy():
        slopes = update[: units * pixels].reshape(units, pixels)
        own = update[units * pixels : units * (pixels + 1)]
        if apart:
            slopes, own = (-np.diff(part, axis=0, append=0.0) for part in (slopes, own))
        with np.errstate(divide="ignore", invalid="ignore"):
            rows = slopes / own[:, None]
        seen = np.abs(own) > 1e-6 * np.abs(own).max()
        near = np.abs(np.nan_to_num(rows, nan=9.0) - 0.5).max(axis=1) <= 0.5 + 1e-2
        found.append(rows[seen & near].clip(0, 1).reshape(-1, side, side))
    return found


@dataclass(frozen=True)
class Found:
    """How good reconstructions are.

    Attributes:
        psnr: of every true image with the reconstruction it is matched with, in dB, at most 60; 0
            of those that nothing is left for. All are matched together for the least error, which
            flatters the attacker.
        recognised: of every true image, whether it is the one of the candidates that correlates
            most with some reconstruction. That takes no knowledge of what is true.
        matched: the reconstruction of every true image; zeros where there is none.
    """

    psnr: NDArray[np.float64]
    recognised: NDArray[np.bool_]
    matched: Images


def judge(true: Images, found: Images, others: Images) -> Found:
    """Compare one trial's reconstructions with the truth.

    Args:
        true: of all silos whose training was seen together.
        found: reconstructions, any number.
        others: that no silo has, (true, candidates − 1, height, width): beside each true image.
    """
    pixels = true[0].size
    flat, images = true.reshape(-1, pixels), found.reshape(-1, pixels)
    matched, psnr = np.zeros_like(flat), np.zeros(len(flat))
    if not len(images):
        return Found(psnr, np.zeros(len(flat), bool), matched.reshape(true.shape))
    errors = ((flat[:, None] - images[None]) ** 2).mean(axis=2)
    rows, columns = linear_sum_assignment(errors)
    matched[rows] = images[columns]
    psnr[rows] = -10 * np.log10(np.maximum(errors[rows, columns], 1e-6))
    of_images = _standard(images)
    best = (_standard(flat) @ of_images.T).max(axis=1)
    beside = _standard(others.reshape(-1, pixels)) @ of_images.T
    best_beside = beside.max(axis=1).reshape(len(flat), -1).max(axis=1)
    return Found(psnr, best > best_beside, matched.reshape(true.shape))


def _standard(images: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean 0 and length 1, so that a product is a correlation; of one grey zeros."""
    centred = images - images.mean(axis=1, keepdims=True)
    length = np.linalg.norm(centred, axis=1, keepdims=True)
    return np.asarray(centred / np.maximum(length, 1e-9))
