"""Learning problems: their losses, valid targets, and how answers are measured.

``Classes`` (one of K), ``Labels`` (any of K), ``Numbers`` (real targets), ``Survival`` (time and
event, by Cox's partial likelihood), ``Masks`` (a class per pixel). A task names one as its
``problem``; a declared task by ``target = {kind = "number"}`` and so on.

Answers are kept per sample as *evidence*, small enough for a whole test set; metrics and their
intervals are computed from it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from coterie.tasks.errors import TaskError

if TYPE_CHECKING:
    import torch

Array = NDArray[Any]
Evidence = tuple[Array, ...]
"""Arrays (n, …), one row per sample."""

IGNORED = -100
"""Mask value of a pixel without a label. It counts neither in the loss nor in the metrics."""


class Problem(ABC):
    """A learning problem.

    Attributes:
        kind: its name in a declaration.
        metrics: available metrics; the first is primary unless a task or a run names another.
        whole: the loss of a test set is not the mean of its batches' losses.
    """

    kind: ClassVar[str]
    metrics: ClassVar[tuple[str, ...]]
    whole: ClassVar[bool] = False

    @abstractmethod
    def loss(
        self, outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the mean loss of a batch; ``weights`` are class weights, if there are classes."""

    @abstractmethod
    def check(self, targets: Array, part: str) -> None:
        """Check targets (n, …) of ``part``, training or test; raise ``TaskError`` if invalid."""

    @abstractmethod
    def evidence(self, outputs: torch.Tensor, targets: torch.Tensor) -> Evidence:
        """Return what is kept of a batch of answers to compute metrics from."""

    @abstractmethod
    def trivial(self, training: Array, evidence: Evidence, metric: str) -> Evidence | None:
        """Return the evidence of the best constant answer for the training targets by this metric.

        None: no constant answer is worth comparing with.
        """

    def answers(self, outputs: torch.Tensor) -> torch.Tensor:
        """Return outputs in the unit of the targets. By default unchanged."""
        return outputs


@dataclass(frozen=True)
class Classes(Problem):
    """One of K classes: logits (n, K), targets int64 (n,). Cross-entropy."""

    num_classes: int
    kind: ClassVar[str] = "class"
    metrics: ClassVar[tuple[str, ...]] = (
        *("error", "balanced-accuracy", "auroc", "average-precision", "f1"),
        *("sensitivity", "specificity", "brier", "calibration-error"),
    )

    def loss(
        self, outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        from torch.nn.functional import cross_entropy

        return cross_entropy(outputs, targets, weight=weights)

    def check(self, targets: Array, part: str) -> None:
        if targets.ndim != 1 or targets.dtype.kind not in "iu":
            raise TaskError(
                f"{part} labels must be whole numbers, one per sample. "
                f"Got {targets.dtype} of shape {targets.shape}."
            )
        check_range(targets, part, self.num_classes)

    def evidence(self, outputs: torch.Tensor, targets: torch.Tensor) -> Evidence:
        """Return probabilities (n, K) and classes (n,)."""
        return outputs.double().softmax(dim=1).cpu().numpy(), targets.cpu().numpy()

    def trivial(self, training: Array, evidence: Evidence, metric: str) -> Evidence | None:
        """Return the shares of the training labels for every sample."""
        shares = np.bincount(training, minlength=self.num_classes) / len(training)
        return np.tile(shares, (len(evidence[1]), 1)), evidence[1]


@dataclass(frozen=True)
class Labels(Problem):
    """Any of K labels: logits (n, K), targets 0 or 1, float32 (n, K). Binary cross-entropy."""

    num_labels: int
    kind: ClassVar[str] = "labels"
    metrics: ClassVar[tuple[str, ...]] = (
        *("auroc", "error", "balanced-accuracy", "average-precision", "f1"),
        *("sensitivity", "specificity", "brier"),
    )

    def loss(
        self, outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Return the loss; ``weights`` weight a label's positives against its negatives."""
        from torch.nn.functional import binary_cross_entropy_with_logits

        return binary_cross_entropy_with_logits(outputs, targets, pos_weight=weights)

    def check(self, targets: Array, part: str) -> None:
        if targets.shape[1:] != (self.num_labels,) or not np.isin(targets, (0, 1)).all():
            raise TaskError(
                f"{part} labels must be 0 or 1, {self.num_labels} per sample. "
                f"Got {targets.dtype} of shape {targets.shape}."
            )

    def evidence(self, outputs: torch.Tensor, targets: torch.Tensor) -> Evidence:
        """Return probabilities (n, K) and labels (n, K)."""
        return outputs.double().sigmoid().cpu().numpy(), targets.double().cpu().numpy()

    def trivial(self, training: Array, evidence: Evidence, metric: str) -> Evidence | None:
        """Return each label's frequency in the training data for every sample."""
        return np.tile(training.mean(axis=0), (len(evidence[1]), 1)), evidence[1]


@dataclass(frozen=True)
class Numbers(Problem):
    """Real targets: outputs and targets float32 (n, K). Mean squared error.

    ``unit`` is that of the targets, such as ``days``. With ``scale``, (K, 2) means and deviations,
    outputs are (target − mean) / deviation and the loss is computed on these; targets, answers and
    metrics keep their unit. Empty: no scaling.
    """

    num_targets: int = 1
    unit: str = ""
    scale: Sequence[Sequence[float]] = ()
    kind: ClassVar[str] = "number"
    metrics: ClassVar[tuple[str, ...]] = ("mae", "rmse", "r2")

    def loss(
        self, outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        from torch.nn.functional import mse_loss

        return mse_loss(outputs, self.scaled(targets))

    def scaled(self, targets: torch.Tensor) -> torch.Tensor:
        """Return targets as outputs are compared with them."""
        if not self.scale:
            return targets
        mean, deviation = self._scale_like(targets)
        found: torch.Tensor = (targets - mean) / deviation
        return found

    def answers(self, outputs: torch.Tensor) -> torch.Tensor:
        if not self.scale:
            return outputs
        mean, deviation = self._scale_like(outputs)
        answers: torch.Tensor = outputs * deviation + mean
        return answers

    def _scale_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return (2, K) means and deviations with the tensor's dtype and device."""
        import torch

        return torch.tensor(self.scale, dtype=tensor.dtype, device=tensor.device).T

    def check(self, targets: Array, part: str) -> None:
        if targets.shape[1:] != (self.num_targets,) or targets.dtype.kind != "f":
            raise TaskError(
                f"{part} targets must be real numbers, {self.num_targets} per sample. "
                f"Got {targets.dtype} of shape {targets.shape}."
            )
        check_finite_targets(targets, part)

    def evidence(self, outputs: torch.Tensor, targets: torch.Tensor) -> Evidence:
        """Return answers (n, K) and targets (n, K)."""
        return self.answers(outputs.double()).cpu().numpy(), targets.double().cpu().numpy()

    def trivial(self, training: Array, evidence: Evidence, metric: str) -> Evidence | None:
        """Return the training targets' median for the MAE, otherwise their mean."""
        best = np.median if metric == "mae" else np.mean
        return np.tile(best(training, axis=0), (len(evidence[1]), 1)), evidence[1]


@dataclass(frozen=True)
class Survival(Problem):
    """Time until an event: outputs (n, 1) are log risks, targets float32 (n, 2) time and event.

    An event is 1 if it happened at that time, 0 if nothing is known after it. The loss is Cox's
    negative partial log-likelihood per event, with Breslow's method for ties (Cox, "Regression
    models and life-tables", J. R. Stat. Soc. B 1972). Risk sets are formed per batch: a larger
    batch approximates the likelihood of all samples better.
    """

    kind: ClassVar[str] = "survival"
    metrics: ClassVar[tuple[str, ...]] = ("concordance",)
    whole: ClassVar[bool] = True

    def loss(
        self, outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        import torch

        return self._weighted(outputs, targets, torch.zeros_like(outputs.reshape(-1)))

    def losses(self, outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        """Return a value of each sample (n,): their mean is the loss, their spread tells its error.

        They are the jackknife's pseudo-values, by derivatives (Efron: "The jackknife, the bootstrap
        and other resampling plans", 1982, chapter 6): a sample also counts in others' risk sets.
        """
        import torch

        with torch.enable_grad():
            logs = torch.zeros(len(targets), dtype=torch.float64, requires_grad=True)
            loss = self._weighted(outputs.detach().double().cpu(), targets.double().cpu(), logs)
            (slope,) = torch.autograd.grad(loss, logs)
        return loss.detach() + len(targets) * (slope - slope.mean())

    def _weighted(
        self, outputs: torch.Tensor, targets: torch.Tensor, logs: torch.Tensor
    ) -> torch.Tensor:
        """Return the loss if each sample counts exp(``logs``) times, (n,)."""
        import torch

        time, event = targets.unbind(dim=1)
        order = torch.argsort(time, descending=True, stable=True)
        risk, time, logs = outputs.reshape(-1)[order], time[order], logs[order]
        event = event[order] * logs.exp()
        # Who is at risk at a time: all whose time is not earlier, equal ones included.
        at_risk = torch.logcumsumexp(risk + logs, dim=0)
        last = torch.searchsorted(-time, -time, right=True) - 1
        return -((risk - at_risk[last]) * event).sum() / event.sum().clamp(min=1)

    def check(self, targets: Array, part: str) -> None:
        if targets.shape[1:] != (2,) or targets.dtype.kind != "f":
            raise TaskError(
                f"{part} targets must be time and event, two real numbers per sample. "
                f"Got {targets.dtype} of shape {targets.shape}."
            )
        check_finite_targets(targets, part)
        if (targets[:, 0] < 0).any() or not np.isin(targets[:, 1], (0, 1)).all():
            raise TaskError(f"{part} times must be at least 0, and events 0 or 1.")

    def evidence(self, outputs: torch.Tensor, targets: torch.Tensor) -> Evidence:
        """Return log risks (n,), times (n,) and events (n,)."""
        time, event = targets.double().cpu().numpy().T
        return outputs.double().reshape(-1).cpu().numpy(), time, event

    def trivial(self, training: Array, evidence: Evidence, metric: str) -> Evidence | None:
        """Return the same risk for every sample."""
        return np.zeros(len(evidence[0])), *evidence[1:]


@dataclass(frozen=True)
class Masks(Problem):
    """A class per pixel: logits (n, K, …), targets int64 (n, …).

    Class 0 is the background; ``IGNORED`` pixels have no class. The loss is cross-entropy plus 1 −
    soft Dice over the foreground classes, so that small structures are not lost (Isensee et al.,
    "nnU-Net", Nature Methods 2021).
    """

    num_classes: int
    kind: ClassVar[str] = "mask"
    metrics: ClassVar[tuple[str, ...]] = ("dice", "iou")

    def loss(
        self, outputs: torch.Tensor, targets: torch.Tensor, weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        from torch.nn.functional import cross_entropy, one_hot

        labelled = (targets != IGNORED).flatten(1)
        classes = targets.flatten(1).clamp(min=0)
        chances = outputs.softmax(dim=1).flatten(2) * labelled[:, None]
        true = one_hot(classes, self.num_classes).movedim(2, 1).to(chances.dtype)
        true = true * labelled[:, None]
        both = (chances * true).sum(dim=(0, 2))[1:]
        dice = (2 * both + 1) / ((chances + true).sum(dim=(0, 2))[1:] + 1)
        # Rows, not images: a GPU adds images' pixels in any order, and the last bits differ.
        pixels = outputs.movedim(1, -1).flatten(0, -2)
        entropy = cross_entropy(pixels, targets.flatten(), weight=weights, ignore_index=IGNORED)
        return entropy + 1 - dice.mean()

    def check(self, targets: Array, part: str) -> None:
        if targets.ndim < 2 or targets.dtype.kind not in "iu":
            raise TaskError(
                f"{part} masks must contain whole numbers, one per pixel. Got {targets.dtype} "
                f"of shape {targets.shape}."
            )
        labelled = targets != IGNORED
        if not (some := labelled.reshape(len(targets), -1).any(axis=1)).all():
            raise TaskError(
                f"all pixels of the mask of {part} sample {int(some.argmin()) + 1} are to be "
                f"ignored ({IGNORED}), so there is nothing to learn from it. Remove it."
            )
        check_range(targets[labelled], part, self.num_classes)

    def evidence(self, outputs: torch.Tensor, targets: torch.Tensor) -> Evidence:
        """Return pixel counts, float64 (n, K − 1, 3): in both, answer only, target only."""
        import torch
        from torch.nn.functional import one_hot

        labelled = (targets != IGNORED).flatten(1)[..., None]
        answer = one_hot(outputs.argmax(dim=1).flatten(1), self.num_classes)[..., 1:].bool()
        target = one_hot(targets.flatten(1).clamp(min=0), self.num_classes)[..., 1:].bool()
        answer, target = answer & labelled, target & labelled
        counts = [answer & target, answer & ~target, ~answer & target]
        return (torch.stack([c.sum(dim=1) for c in counts], dim=2).double().cpu().numpy(),)

    def trivial(self, training: Array, evidence: Evidence, metric: str) -> Evidence | None:
        """Return None: an empty mask finds nothing and is not a useful baseline."""
        return None


KINDS: Mapping[str, type[Problem]] = {
    kind.kind: kind for kind in (Classes, Labels, Numbers, Survival, Masks)
}


def check_range(targets: Array, part: str, num_classes: int) -> None:
    """Raise ``TaskError`` unless all class numbers are in [0, num_classes)."""
    if targets.min() < 0 or targets.max() >= num_classes:
        raise TaskError(
            f"{part} labels must be in [0, {num_classes - 1}]. "
            f"Got labels from {targets.min()} to {targets.max()}."
        )


def check_finite_targets(targets: Array, part: str) -> None:
    """Raise ``TaskError`` naming the first sample, from 1, with a NaN or infinite target."""
    if not (finite := np.isfinite(targets).reshape(len(targets), -1).all(axis=1)).all():
        raise TaskError(
            f"{part} targets contain NaN or infinite values, in sample "
            f"{int(finite.argmin()) + 1} (and {int((~finite).sum()) - 1} others). Correct them, "
            "or leave such samples out."
        )
