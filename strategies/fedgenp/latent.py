"""Generators and predictors as plain arrays; the arithmetic is in ``generators``.

A model is a representation x → z and a predictor p: z → y (Taghiyarrenani et al., "Heterogeneous
Federated Learning via Personalized Generative Networks", https://arxiv.org/abs/2308.13265). A silo
describes p as a list of layers, so that the server computes it from the model's arrays without the
silo's code. This module does not import torch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

import numpy as np
from pydantic import Field

from coterie import wire
from coterie.strategies.errors import refused
from coterie.strategies.rounds.options import Count, NotNegative, Options, Positive
from coterie.wire import Layers, Model

Reversal = Literal["log1mp", "clip", "unbounded", "none"]
Objective = Literal["mean", "sum", "both"]
Optimiser = Literal["adam", "sgd"]
MAX_TIMES = 10.0
"""Factor over the usual norm above which a predictor is an outlier."""
HOW_TO_ADD = (
    "In a declaration, use a network whose name begins with mlp or cnn: mclr has only a head. "
    "Your own model must be tasks.models.SplitModel(representation, head), with a head of one "
    "Linear layer, or a Sequential of Linear, ReLU, Tanh and Dropout; see "
    f"{wire.page('FedGenP, FedGen and FedEnsemble')}."
)


class GeneratorPlan(Options):
    """Options of the generators' training on the server.

    J1 and the reversed J2 alternate, so a plan with reversal needs two steps, unless every step has
    both. If all heads agree, as when they start every round from one model, the two terms settle at
    p = 1 / (1 + λ): with λ = 1, every latent lies on the border between two classes, and training
    on such latents broke down for some rounds after a hundred.

    The paper to the letter is ``objective = "sum"``, ``optimiser = "sgd"``, ``lr = 0.01``,
    ``reversal = "unbounded"`` and ``reversal_weight = 1``.
    """

    steps: Count = Field(
        50,
        alias="generator-steps",
        description="Optimiser steps of the generators per round; at least 2 if every second step "
        "is used for `reversal`.",
    )
    optimiser: Optimiser = Field(
        "adam",
        alias="generator-optimiser",
        description="Optimiser of the generators. The paper uses `sgd` with `generator-lr` 0.01.",
    )
    lr: Positive = Field(
        3e-4, le=1, alias="generator-lr", description="Learning rate of the generators' optimiser."
    )
    objective: Objective = Field(
        "mean",
        alias="generator-objective",
        description="What FedGenP's steps minimise: alternately the `mean` (or, as in the paper, "
        "the `sum`) of the other heads' losses and the term against the receiver's own head; or "
        "`both`, the mean and that term in every step.",
    )
    hidden: int = Field(
        256,
        ge=1,
        le=65_536,
        alias="generator-hidden",
        description="Width of the generators' hidden layer. The paper uses 256, and 128 for "
        "CelebA.",
    )
    reversal: Reversal = Field(
        "log1mp",
        description="Form of the term against the receiver's own head. `none`: no such term. "
        "`unbounded`, the paper's form, diverges.",
    )
    reversal_weight: NotNegative = Field(
        0.1, le=1e6, description="λ, weight of the term against the receiver's own head."
    )
    batch: int = Field(32, ge=1)

    @property
    def reverses(self) -> bool:
        """Whether there is a term against the own head."""
        return self.reversal != "none" and self.reversal_weight > 0

    @property
    def alternates(self) -> bool:
        """Whether every second step is against the own head."""
        return self.reverses and self.objective != "both"


@dataclass(frozen=True)
class Generator:
    """G(z | y) of one receiver, with Adam's state.

    Attributes:
        weights: as on the wire (``wire.GENERATOR_ARRAYS``).
        mean, square: Adam's moments, same names and shapes; plain SGD leaves them at 0.
        steps: steps taken so far.
    """

    weights: Model
    mean: Model = field(default_factory=dict)
    square: Model = field(default_factory=dict)
    steps: int = 0


def fresh_generator(
    *, num_classes: int, latent: int, hidden: int, rng: np.random.Generator
) -> Generator:
    """Return an untrained generator; weights uniform in ±1/√fan-in, as torch's Linear."""
    widths = {"hidden": (num_classes + wire.NOISE, hidden), "mean": (hidden, latent)}
    widths["spread"] = widths["mean"]
    weights: Model = {}
    for layer, (inputs, outputs) in widths.items():
        bound = 1 / np.sqrt(inputs)
        weights[f"{layer}.weight"] = rng.uniform(-bound, bound, (inputs, outputs))
        weights[f"{layer}.bias"] = rng.uniform(-bound, bound, outputs)
    weights = {name: weights[name].astype(np.float32) for name in wire.GENERATOR_ARRAYS}
    zeros = {name: np.zeros_like(array) for name, array in weights.items()}
    return Generator(weights, mean=zeros, square=dict(zeros))


def predictor_arrays(model: Model, layers: Layers) -> Model:
    """Return the arrays of p from a model.

    Raises:
        FederationError: an array that the layers name is not in the model.
    """
    names = [name for kind, *names in layers for name in names if name]
    missing = [name for name in names if name not in model]
    if missing:
        raise refused(
            f"the predictor's array {missing[0]!r} is not in the model that silos send. Is the "
            "head personal? Generators need the predictors: leave `personal` empty."
        )
    return {name: model[name] for name in names}


def predictor_shape(heads: Mapping[str, Model], layers: Layers) -> tuple[int, int]:
    """Return the latent width and the number of classes, the same for all heads (at least one).

    Raises:
        FederationError: heads of different shapes, layers that do not fit together, or fewer than
            two classes.
    """
    first_name, first = next(iter(heads.items()))
    for name, head in heads.items():
        for array, value in first.items():
            if head[array].shape != value.shape:
                raise refused(
                    f"all silos' heads must have the same shape: {array!r} is {value.shape} at "
                    f"{first_name} and {head[array].shape} at {name}."
                )
    weights = [first[names[0]] for kind, *names in layers if kind == "linear"]
    if not weights or any(weight.ndim != 2 for weight in weights):
        raise refused(f"a head needs a linear layer with a weight of two axes. {HOW_TO_ADD}")
    if any(a.shape[0] != b.shape[1] for a, b in pairwise(weights)):
        raise refused(f"the head's linear layers do not follow on each other. {HOW_TO_ADD}")
    latent, num_classes = weights[0].shape[1], weights[-1].shape[0]
    if num_classes < 2:
        raise refused(
            f"generators need at least 2 classes. The head has {num_classes}: run without "
            "generators."
        )
    return latent, num_classes


def out_of_line(heads: Mapping[str, Model]) -> dict[str, float]:
    """Return outlier receivers, with far larger predictors than the others → the factor.

    An outlier's loss would outweigh all others', and Adam would remember it for a thousand steps.
    The usual norm is the (lower) median; of two, the smaller.
    """
    norms = {
        name: float(
            np.sqrt(sum(float(np.square(a, dtype=np.float64).sum()) for a in head.values()))
        )
        for name, head in heads.items()
    }
    usual = sorted(norms.values())[(len(norms) - 1) // 2] if norms else 0.0
    return {n: norm / usual for n, norm in norms.items() if usual and norm > MAX_TIMES * usual}


def linear_head(model: Model, prefix: str) -> Layers:
    """Return the layers of a linear head by prefix, for silos that do not describe theirs.

    Raises:
        FederationError: the prefix does not name one weight and at most one bias.
    """
    named = [name for name in model if name.startswith(prefix)]
    weights = [name for name in named if model[name].ndim == 2]
    biases = [name for name in named if model[name].ndim == 1]
    if len(weights) != 1 or len(biases) > 1 or len(named) != len(weights) + len(biases):
        raise refused(
            f"head = {prefix!r} must name one weight and at most one bias. It names: "
            f"{', '.join(named) or 'nothing'}."
        )
    return (("linear", weights[0], biases[0] if biases else ""),)


def common_layers(described: Sequence[tuple[str, Layers]], *, task: str = "") -> Layers:
    """Return the predictor's layers that most silos describe, so that no single silo decides.

    Ties go to the layers named first; an empty description (no latent split) comes last.

    Raises:
        FederationError: most describe none: their task has no latent split.
    """
    votes = Counter(layers for _, layers in described)
    layers = max(votes, key=lambda layers: (votes[layers], bool(layers)))
    if not layers:
        name = next(name for name, layers in described if not layers)
        of_task = f": task {task!r} has none" if task else ""
        raise refused(f"silo {name} reports no latent split of its model{of_task}. {HOW_TO_ADD}")
    return layers
