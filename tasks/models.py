"""Networks by name, as pairs (representation, head) that ``SplitModel`` joins."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from itertools import pairwise
from math import prod

import torch
from torch import nn


class SplitModel(nn.Module):
    """A model ``head(representation(x))``: the split that personal layers and generators need."""

    def __init__(self, representation: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.representation = representation
        self.head = head

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, shape (batch, classes)."""
        out: torch.Tensor = self.head(self.representation(x))
        return out


class TableNetwork(SplitModel):
    """A network for rows of a table: a linear model of the columns, plus hidden layers.

    Both start from zero, the hidden layers by their head, so that the network is a linear model
    until these are trained (Cheng et al.: "Wide & Deep Learning for Recommender Systems", 2016,
    https://arxiv.org/abs/1606.07792).
    """

    def __init__(self, representation: nn.Module, head: nn.Linear, *, width: int) -> None:
        effect = nn.Linear(head.in_features, head.out_features, bias=False)
        super().__init__(representation, effect)
        self.linear_part = nn.Linear(width, head.out_features)
        for parameter in (effect.weight, self.linear_part.weight, self.linear_part.bias):
            nn.init.zeros_(parameter)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return logits, shape (batch, classes), of rows (batch, width)."""
        return super().forward(x) + self.linear_part(x)  # type: ignore[no-any-return]


def of_head(model: nn.Module, head: str) -> tuple[str, ...]:
    """Return the prefixes of a model's head; ``head`` is that of the task.

    A linear part beside hidden layers, which also makes answers, belongs to it.
    """
    linear = getattr(model, "linear_part", None) if isinstance(model, TableNetwork) else None
    return (head, *(f"{name}." for name, own in model.named_children() if own is linear))


GROUP_NORM = "+groupnorm"
"""Suffix of a network's name that replaces BatchNorm by GroupNorm."""
BATCH_NORM = nn.modules.batchnorm._BatchNorm
"""Every batch normalisation is one."""
GROUP_WIDTH = 8
"""Minimum number of channels per group."""


def with_group_norm(model: nn.Module) -> nn.Module:
    """Replace every BatchNorm by GroupNorm in the model itself, and return the model.

    Wu and He, "Group Normalization", ECCV 2018. It normalises each sample separately, as
    differential privacy requires, and has no running statistics for silos to average. The number of
    groups divides the channels and is at most the paper's 32. A group has at least 8 channels: in a
    layer without pixels, a group of one channel would always be 0.
    """
    for name, module in list(model.named_children()):
        if isinstance(module, BATCH_NORM):
            channels = module.num_features
            fits = (n for n in range(32, 0, -1) if channels % n == 0)
            groups = next(n for n in fits if n == 1 or channels // n >= GROUP_WIDTH)
            norm = nn.GroupNorm(groups, channels, eps=module.eps, affine=module.affine)
            setattr(model, name, norm)
        else:
            with_group_norm(module)
    return model


class Discriminator(nn.Module):
    """FedCollab's client discriminator: a linear layer of the features plus one of the label.

    The label's branch counts twice, and its one-hot vector is scaled by K / sqrt(K − 1), so that
    few classes weigh as much as many pixels.
    """

    def __init__(self, num_features: int, num_classes: int, *, hidden: int = 200) -> None:
        super().__init__()
        self.features = nn.Linear(num_features, hidden)
        self.label = nn.Linear(num_classes, hidden)
        self.output = nn.Linear(hidden, 1)
        self.label_scale = num_classes / max(num_classes - 1, 1) ** 0.5

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return logits (n,) for "it is the first silo's"; labels are one-hot."""
        label = self.label(labels * self.label_scale)
        out: torch.Tensor = self.output(torch.relu(self.features(features) + 2 * label))
        return out.squeeze(-1)


class LabelwiseDiscriminator(nn.Module):
    """A client discriminator with one linear model of the features per label.

    It learns from a few dozen samples that labels mean different things at two silos (concept
    shift); a sum of a feature and a label branch needs thousands. It starts at zero.
    """

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.by_label = nn.Linear(num_features, num_classes)
        nn.init.zeros_(self.by_label.weight)
        nn.init.zeros_(self.by_label.bias)

    def forward(self, features: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """Return logits (n,) for "it is the first silo's"; labels are one-hot."""
        out: torch.Tensor = (self.by_label(features) * labels).sum(dim=1)
        return out


def small_cnn(*, num_classes: int) -> tuple[nn.Module, nn.Module]:
    """Return a network for 1×8×8: conv 16, conv 32 (3×3), both pooled by 2; linear head, 128 in."""
    representation = nn.Sequential(
        *_conv(1, 16), nn.MaxPool2d(2), *_conv(16, 32), nn.MaxPool2d(2), nn.Flatten()
    )
    return representation, nn.Linear(32 * 2 * 2, num_classes)


def mclr(*, shape: tuple[int, int, int], num_classes: int) -> tuple[nn.Module, nn.Module]:
    """Return one softmax layer (FedGroup Table II: 7,850 parameters on MNIST)."""
    return nn.Flatten(), nn.Linear(prod(shape), num_classes)


def mlp(
    *, shape: tuple[int, int, int], num_classes: int, hidden: tuple[int, ...], dropout: float = 0.0
) -> tuple[nn.Module, nn.Module]:
    """Return fully connected layers with ReLU between; ``dropout`` on each hidden layer."""
    layers: list[nn.Module] = [nn.Flatten()]
    width = prod(shape)
    for units in hidden:
        layers += [nn.Linear(width, units), nn.ReLU()]
        if dropout:
            layers.append(nn.Dropout(dropout))
        width = units
    return nn.Sequential(*layers), nn.Linear(width, num_classes)


def cnn_fedbn(*, shape: tuple[int, int, int], num_classes: int) -> tuple[nn.Module, nn.Module]:
    """Return FedBN's DigitModel, as in HCCT for Digit: three convolutions, BatchNorm throughout."""
    channels, height, width = shape
    representation = nn.Sequential(
        *_conv_bn(channels, 64),
        nn.MaxPool2d(2),
        *_conv_bn(64, 64),
        nn.MaxPool2d(2),
        *_conv_bn(64, 128),
        nn.Flatten(),
        *_linear_bn(128 * (height // 4) * (width // 4), 2048),
        *_linear_bn(2048, 512),
    )
    return representation, nn.Linear(512, num_classes)


def cnn_hcct(*, shape: tuple[int, int, int], num_classes: int) -> tuple[nn.Module, nn.Module]:
    """Return HCCT's network for CIFAR-10: conv 16, 32, 64, 128 (3×3), fc 500, dropout 0.25."""
    channels, height, width = shape
    representation = nn.Sequential(
        *_conv(channels, 16),
        *_conv(16, 32),
        nn.MaxPool2d(2),
        *_conv(32, 64),
        nn.MaxPool2d(2),
        *_conv(64, 128),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(128 * (height // 8) * (width // 8), 500),
        nn.ReLU(),
        nn.Dropout(0.25),
    )
    return representation, nn.Linear(500, num_classes)


def cnn_fedcollab(*, shape: tuple[int, int, int], num_classes: int) -> tuple[nn.Module, nn.Module]:
    """Return FedCollab's network for CIFAR-10: conv 32, 64, 64 (3×3, no padding), fc 64.

    Padding and pooling are not stated; this is the common tutorial network of these widths.
    """
    channels, height, width = shape
    representation = nn.Sequential(
        *_conv(channels, 32, padding=0),
        nn.MaxPool2d(2),
        *_conv(32, 64, padding=0),
        nn.MaxPool2d(2),
        *_conv(64, 64, padding=0),
        nn.Flatten(),
        nn.Linear(64 * _after_valid(height) * _after_valid(width), 64),
        nn.ReLU(),
    )
    return representation, nn.Linear(64, num_classes)


def cnn_fedgenp(*, shape: tuple[int, int, int], num_classes: int) -> tuple[nn.Module, nn.Module]:
    """Return FedGenP's network (Table 2): conv 6, conv 16, fc 784, fc 32 (the latent space).

    Kernel and stride are not stated; 3×3 with stride 2, as in FedGen, turns 28×28 images into
    16×7×7, the table's 784.
    """
    channels, height, width = shape
    flat = 16 * ((height + 3) // 4) * ((width + 3) // 4)
    representation = nn.Sequential(
        *_conv(channels, 6, stride=2),
        *_conv(6, 16, stride=2),
        nn.Flatten(),
        nn.Linear(flat, 784),
        nn.ReLU(),
        nn.Linear(784, 32),
        nn.ReLU(),
    )
    return representation, nn.Linear(32, num_classes)


def cnn_fedgen(*, shape: tuple[int, int, int], num_classes: int) -> tuple[nn.Module, nn.Module]:
    """Return FedGen's published network: conv 6, conv 16, each with BatchNorm, fc 32 (no ReLU).

    The 32 are the latent space. 28×28 images leave 784 numbers after the convolutions; FedGenP's
    table, which starts from this network, lists the same numbers: 6, 16, 784, 32.
    """
    channels, height, width = shape
    flat = 16 * ((height + 3) // 4) * ((width + 3) // 4)
    representation = nn.Sequential(
        *_conv_bn(channels, 6, kernel=3, stride=2),
        *_conv_bn(6, 16, kernel=3, stride=2),
        nn.Flatten(),
        nn.Linear(flat, 32),
    )
    return representation, nn.Linear(32, num_classes)


class UNet(nn.Module):
    """A U-Net that gives features of every pixel.

    Ronneberger, Fischer and Brox, "U-Net: Convolutional networks for biomedical image
    segmentation", MICCAI 2015. Differs from the paper: a quarter of its widths, one level less,
    padded convolutions, GroupNorm (independent of the batch, no buffers), and upsampling by
    repetition, so that any height and width from 8 on works.
    """

    def __init__(self, channels: int, widths: tuple[int, ...] = (16, 32, 64, 128)) -> None:
        super().__init__()
        inputs = (channels, *widths[:-1])
        self.down = nn.ModuleList(map(_conv_gn, inputs, widths))
        rising = widths[::-1]
        both = [below + beside for below, beside in pairwise(rising)]
        self.up = nn.ModuleList(map(_conv_gn, both, rising[1:]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (n, C, H, W) to (n, 16, H, W)."""
        from torch.nn.functional import interpolate, max_pool2d

        seen: list[torch.Tensor] = []
        for level, block in enumerate(self.down):
            x = block(max_pool2d(x, 2) if level else x)
            seen.append(x)
        for block, beside in zip(self.up, seen[-2::-1], strict=True):
            x = block(torch.cat([interpolate(x, beside.shape[2:]), beside], dim=1))
        return x


def unet(*, shape: tuple[int, int, int], num_classes: int) -> tuple[nn.Module, nn.Module]:
    """Return a U-Net with a 1×1 convolution as its head, for a class per pixel."""
    channels, height, width = shape
    if min(height, width) < 8:
        raise ValueError("three poolings leave nothing of less than 8 pixels")
    return UNet(channels), nn.Conv2d(16, num_classes, 1)


def _conv_gn(inputs: int, outputs: int) -> nn.Sequential:
    """Return two 3×3 convolutions, each with GroupNorm of 8 channels per group."""
    layers: list[nn.Module] = []
    for before in (inputs, outputs):
        conv = nn.Conv2d(before, outputs, 3, padding=1, bias=False)
        layers += [conv, nn.GroupNorm(outputs // 8, outputs), nn.ReLU()]
    return nn.Sequential(*layers)


def _conv(inputs: int, outputs: int, *, padding: int = 1, stride: int = 1) -> list[nn.Module]:
    return [nn.Conv2d(inputs, outputs, 3, stride=stride, padding=padding), nn.ReLU()]


def _conv_bn(inputs: int, outputs: int, *, kernel: int = 5, stride: int = 1) -> list[nn.Module]:
    conv = nn.Conv2d(inputs, outputs, kernel, stride=stride, padding=kernel // 2)
    return [conv, nn.BatchNorm2d(outputs), nn.ReLU()]


def _linear_bn(inputs: int, outputs: int) -> list[nn.Module]:
    return [nn.Linear(inputs, outputs), nn.BatchNorm1d(outputs), nn.ReLU()]


def _after_valid(side: int) -> int:
    """Return the side after conv, pool, conv, pool, conv with 3×3 kernels and no padding."""
    return ((side - 2) // 2 - 2) // 2 - 2


NETWORKS: dict[str, Callable[..., tuple[nn.Module, nn.Module]]] = {
    "mclr": mclr,
    "mlp-64": partial(mlp, hidden=(64,), dropout=0.5),
    "mlp-128": partial(mlp, hidden=(128,)),
    "mlp-512": partial(mlp, hidden=(512,)),
    "mlp-200": partial(mlp, hidden=(200, 200)),
    "cnn-fedbn": cnn_fedbn,
    "cnn-hcct": cnn_hcct,
    "cnn-fedcollab": cnn_fedcollab,
    "cnn-fedgenp": cnn_fedgenp,
    "cnn-fedgen": cnn_fedgen,
    "unet": unet,
}
"""The papers' networks by name (see ``named``), called with ``shape=(C, H, W), num_classes=``.

mclr, mlp-128 and mlp-512: FedGroup (MNIST, FEMNIST). mlp-64: HCCT (FMNIST). mlp-200 and
cnn-fedcollab: FedCollab (FashionMNIST, CIFAR-10). cnn-fedbn and cnn-hcct: HCCT (Digit, CIFAR-10).
cnn-fedgenp and cnn-fedgen: FedGenP (MNIST, EMNIST), by its table and by FedGen's code. unet: masks;
it gives ``num_classes`` numbers per pixel."""


def named(name: str, *, shape: tuple[int, ...], num_classes: int) -> SplitModel:
    """Return a new network of ``NETWORKS``; ``NAME+groupnorm`` has no BatchNorm.

    With hidden layers and rows of numbers it is a ``TableNetwork``. Raises ``KeyError`` if the name
    is unknown.
    """
    plain = name.removesuffix(GROUP_NORM)
    representation, head = NETWORKS[plain](shape=shape, num_classes=num_classes)
    made = SplitModel(representation, head)
    hidden = len(list(representation.parameters())) > 0
    if len(shape) == 1 and hidden and isinstance(head, nn.Linear):
        made = TableNetwork(representation, head, width=shape[0])
    if plain != name:
        with_group_norm(made)
    return made
