"""What α would do with training updates: looked at while silos train alone, and while HCCT runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.kit import App, Trained, Watched
from benchmarks.papers.hcct.experiments import Experiment
from coterie.strategies.partition.gram import gram
from coterie.strategies.partition.hcct import Stretch, alpha_path
from coterie.strategies.partition.solvers import Solver
from coterie.strategies.rounds.models import accumulate, comparable, difference, is_statistic
from coterie.strategies.rounds.reports import RoundReport
from coterie.wire import Model

OBSERVED = (1, 2, 3, 5, 10, 20, 50)
"""Rounds after which updates are looked at."""
EXACT = 12
"""Up to so many silos the best partition is found exactly, as the strategy does."""
VIEWS = {
    "memory 1, parameters": (1.0, "parameters"),
    "memory 1, parameters+buffers": (1.0, "parameters+buffers"),
    "memory 0, parameters": (0.0, "parameters"),
    "memory 0, parameters+buffers": (0.0, "parameters+buffers"),
}
"""What silos may be compared by."""
RULE = "memory 1, parameters"
ENDLESS = 1e12
"""Stands for infinity in the stored figures."""


class Observer:
    """Notes what α would do with the updates of silos that train alone.

    Args:
        experiment: whose silos these are.
        app: the silos'.

    Attributes:
        app: to run them with.
        seen: round → view → what ``_persistence`` says.
    """

    def __init__(self, experiment: Experiment, app: App) -> None:
        self.experiment, self.app = experiment, Watched(app)
        self.seen: dict[str, dict[str, Any]] = {}
        self._sums: dict[str, Model] = {}

    def look(self, report: RoundReport) -> None:
        """After a round."""
        if report.final:
            return
        deltas = {name: difference(new, old) for name, (old, new) in self.app.trained.items()}
        for name, delta in deltas.items():
            self._sums[name] = accumulate(self._sums.get(name), delta, decay=1.0)
        if report.round not in OBSERVED:
            return
        sizes = [report.silos[name].num_examples for name in self.experiment.silos]
        statistics = any(is_statistic(name) for name in deltas[self.experiment.silos[0]])
        self.seen[str(report.round)] = {
            view: self._compared(self._sums if memory else deltas, similarity, sizes)
            for view, (memory, similarity) in VIEWS.items()
            if similarity == "parameters" or statistics
        }

    def _compared(
        self, vectors: Mapping[str, Model], similarity: str, sizes: Sequence[float]
    ) -> dict[str, Any]:
        rows = [
            list(comparable(vectors[name], similarity=similarity).values())
            for name in self.experiment.silos
        ]
        return _persistence(gram(rows), sizes, self.experiment.truth)


def _persistence(
    matrix: np.ndarray, sizes: Sequence[float], truth: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """The α that persists, its groups, and where along α the right partition holds."""
    solver: Solver = "optimal" if len(sizes) <= EXACT else "agglomerative"
    choice = choose_alpha(matrix, sizes, solver=solver)
    right = [s for s in choice.path if s.groups == [sorted(group) for group in truth]]
    return {
        "alpha": choice.alpha,
        "ratio": _short(choice.ratio),
        "groups": choice.groups,
        "right": [[_short(s.alpha_low), _short(s.alpha_high)] for s in right],
    }


@dataclass(frozen=True)
class AlphaChoice:
    """The alpha chosen by persistence, or None with the reason.

    groups: the partition at that alpha; None where there is no choice.
    ratio: length (high / low) of the longest stretch of a non-trivial partition, 1.0 if none.
    """

    alpha: float | None
    groups: list[list[int]] | None
    ratio: float
    reason: str
    path: tuple[Stretch, ...]


def choose_alpha(
    gram: np.ndarray,
    sizes: Sequence[float],
    *,
    threshold: float = 2.0,
    solver: Solver = "agglomerative",
) -> AlphaChoice:
    """Choose alpha by persistence: where one non-trivial partition lasts longest in log alpha.

    Non-trivial is neither all alone nor all together. If its stretch is at least `threshold`
    long (alpha_high / alpha_low), the answer is the geometric mean of its ends; otherwise None,
    and the caller has to decide by other means, e.g. validation errors of the partitions on the
    path. On the project's three-group digits silos the true partition lasts a factor 3.2-4.7
    once updates are informative, every other less than 1.7; hence the default 2.

    A stretch that begins at alpha = 0 (two silos with equal updates) has infinite length; its
    alpha is ``alpha_high / threshold``. N <= 2 has no non-trivial partition.
    """
    path = alpha_path(gram, sizes, solver=solver)
    candidates = [stretch for stretch in path if 1 < len(stretch.groups) < len(sizes)]
    longest = max(candidates, key=lambda stretch: stretch.ratio, default=None)
    if longest is None or longest.ratio < threshold:
        ratio = 1.0 if longest is None else longest.ratio
        reason = (
            f"nothing non-trivial persists: the longest stretch is a factor {ratio:.2f}, "
            f"{threshold:g} is needed"
        )
        return AlphaChoice(None, None, ratio, reason, path)
    low = longest.alpha_low or longest.alpha_high / threshold**2
    alpha = float(np.sqrt(low * longest.alpha_high))
    reason = f"{len(longest.groups)} groups persist over a factor {longest.ratio:.2f} of alpha"
    return AlphaChoice(alpha, longest.groups, longest.ratio, reason, path)


def _short(value: float) -> float:
    return float(f"{min(value, ENDLESS):.6g}")


def during(done: Trained, experiment: Experiment) -> dict[str, Any]:
    """Round → what ``_persistence`` says of the vectors that HCCT itself compared."""
    seen = {}
    for report in done.result.rounds:
        compared = report.details.get("compared", [])
        if report.final or report.round not in OBSERVED or len(compared) < len(experiment.silos):
            continue
        rows = [compared.index(name) for name in experiment.silos]
        lengths = np.array(report.details["norms"])
        matrix = np.array(report.details["similarity"]) * np.outer(lengths, lengths)
        sizes = [report.silos[name].num_examples for name in experiment.silos]
        seen[str(report.round)] = _persistence(matrix[np.ix_(rows, rows)], sizes, experiment.truth)
    return seen


def persistent_alpha(seen: Mapping[str, Any]) -> tuple[float, int] | None:
    """α of the first observed round whose training updates have a partition that persists.

    Persists: over a factor of 2 of α, by ``choose_alpha``. No test data is looked at.
    """
    for number in sorted(map(int, seen)):
        alpha = seen[str(number)][RULE]["alpha"]
        if alpha is not None:
            return float(alpha), number
    return None
