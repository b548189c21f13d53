"""What a comparison says: figures of runs over the same silos and seeds, and which differ truly.

A *measure* is one run's outcome, read from its record. Measures of several strategies over the same
silos and seeds make one table.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from coterie.server.runs.metrics import ipr, rsd
from coterie.server.runs.record import Run


@dataclass(frozen=True)
class Measure:
    """One run.

    Attributes:
        errors: silo → error in [0, 1] of its final model on its own test data.
        curve: (round, mean error over silos after it), as far as measured.
        groups: who trained together in the last round.
        num_bytes: of arrays, both ways, training and what was exchanged before and beside it.
        seconds: wall, of the rounds.
        silo_seconds: the silos' own for all of that, added up, as far as they state them.
    """

    errors: Mapping[str, float]
    curve: tuple[tuple[int, float], ...]
    groups: tuple[tuple[str, ...], ...]
    num_bytes: int
    seconds: float
    silo_seconds: float

    @property
    def mean(self) -> float:
        """Mean error over silos; NaN if none tells its error."""
        return _mean(list(self.errors.values()))

    def rounds_to(self, target: float) -> int | None:
        """The first round after which the mean error is at most ``target``."""
        return next((number for number, error in self.curve if error <= target), None)


@dataclass(frozen=True)
class Row:
    """One strategy over all seeds. Errors, IPR and RSD are shares in [0, 1]; NaN where unknown.

    Attributes:
        name: as in the file.
        seeds: how many runs.
        error, error_std: mean over silos; mean and sample deviation over seeds.
        silo_std: deviation over the silos of one seed, mean over seeds.
        worst: the silo with the largest error, mean over seeds.
        ipr, rsd: beside training alone, mean over seeds.
        rounds_to_target: mean over the seeds that reached it; NaN if none did.
        reached: seeds that reached it; None without a target.
        num_groups: in the last round, mean over seeds.
        megabytes, seconds, silo_seconds: mean over seeds.
        p: of the difference to the best row, two-sided, Holm-corrected; NaN for the best itself.
    """

    name: str
    seeds: int
    error: float
    error_std: float
    silo_std: float
    worst: float
    ipr: float
    rsd: float
    rounds_to_target: float
    reached: int | None
    num_groups: float
    megabytes: float
    seconds: float
    silo_seconds: float
    p: float


def measure(run: Run) -> Measure:
    """What a completed run's record says."""
    rounds = run.rounds_to_end()
    own = [silo.seconds for one in rounds for silo in one.silos.values()]
    beside = [cost.silo_seconds for one in rounds for cost in one.phases.values()]
    return Measure(
        errors=run.final_errors,
        curve=tuple((one.round, _mean(list(one.errors.values()))) for one in rounds if one.errors),
        groups=run.final_groups,
        num_bytes=sum(sum(one.num_bytes) for one in rounds),
        seconds=sum(sum(one.seconds.values()) for one in rounds),
        silo_seconds=sum(s for s in own if math.isfinite(s)) + sum(beside),
    )


def rows(
    measures: Mapping[str, Mapping[int, Measure]], *, alone: str, target: float | None
) -> list[Row]:
    """One row per strategy, in the order given.

    Args:
        measures: name → seed → measure; every strategy over the same seeds and silos.
        alone: the name of training alone, for IPR and RSD.
        target: mean error to reach, in [0, 1], or None.
    """
    means = {name: _mean([m.mean for m in own.values()]) for name, own in measures.items()}
    best = min(means, key=lambda name: _nan_last(means[name]))
    others = [name for name in measures if name != best]
    corrected = holm([paired_p(measures[name], measures[best]) for name in others])
    p = {best: math.nan, **dict(zip(others, corrected, strict=True))}
    return [
        _row(name, own, measures.get(alone, {}), target, p[name]) for name, own in measures.items()
    ]


def _row(
    name: str,
    own: Mapping[int, Measure],
    alone: Mapping[int, Measure],
    target: float | None,
    p: float,
) -> Row:
    runs = list(own.values())
    told = [run for run in runs if run.errors]
    means = [run.mean for run in runs]
    beside = [(own[s].errors, alone[s].errors) for s in own if s in alone and own is not alone]
    reached = [run.rounds_to(target) for run in runs] if target is not None else []
    found = [number for number in reached if number is not None]
    return Row(
        name=name,
        seeds=len(runs),
        error=float(np.mean(means)),
        error_std=float(np.std(means, ddof=1)) if len(means) > 1 else math.nan,
        silo_std=_mean([float(np.std(list(run.errors.values()))) for run in told]),
        worst=_mean([max(run.errors.values()) for run in told]),
        ipr=_mean([ipr(errors, base) for errors, base in beside]),
        rsd=_mean([rsd(errors, base) for errors, base in beside]),
        rounds_to_target=_mean(found),
        reached=None if target is None else len(found),
        num_groups=_mean([len(run.groups) for run in runs]),
        megabytes=_mean([run.num_bytes / 1e6 for run in runs]),
        seconds=_mean([run.seconds for run in runs]),
        silo_seconds=_mean([run.silo_seconds for run in runs]),
        p=p,
    )


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


# --- significance ---------------------------------------------------------------------------------


def paired_p(one: Mapping[int, Measure], other: Mapping[int, Measure]) -> float:
    """Two-sided p of Wilcoxon's signed-rank test over the pairs (seed, silo).

    Pairs without a difference count half for either side (Pratt). 1 where no pair differs.
    Equal differences, 0.3 − 0.2 and 0.2 − 0.1, count as equal whatever their last bits.
    Silos of one seed share models, so their differences are not independent, and p is rather too
    small than too large: read it as a warning not to believe a difference, not as a proof of one.
    """
    differences = np.array(
        [
            round(one[seed].errors[silo] - other[seed].errors[silo], 12)
            for seed in sorted(set(one) & set(other))
            for silo in sorted(set(one[seed].errors) & set(other[seed].errors))
        ]
    )
    if not len(differences) or not differences.any():
        return 1.0
    from scipy.stats import wilcoxon

    return float(wilcoxon(differences, zero_method="pratt").pvalue)


def holm(values: Sequence[float]) -> list[float]:
    """p values corrected for so many comparisons (Holm 1979), in the order given."""
    order = np.argsort(values, kind="stable")
    corrected, largest = [0.0] * len(values), 0.0
    for rank, index in enumerate(order.tolist()):
        largest = max(largest, min(1.0, (len(values) - rank) * values[index]))
        corrected[index] = largest
    return corrected


# --- the table ------------------------------------------------------------------------------------


def _text(value: float, form: str) -> str:
    return "–" if math.isnan(value) else format(value, form)


def _error(row: Row) -> str:
    spread = "" if math.isnan(row.error_std) else f" ± {100 * row.error_std:.1f}"
    return _text(100 * row.error, ".1f") + spread


def _reached(row: Row) -> str:
    if not row.reached:
        return "–"
    some = "" if row.reached == row.seeds else f" ({row.reached} of {row.seeds})"
    return f"{row.rounds_to_target:.0f}{some}"


def _p(row: Row) -> str:
    if math.isnan(row.p):
        return "best"
    return "< 0.001" if row.p < 0.001 else f"{row.p:.3f}"


COLUMNS: Mapping[str, Callable[[Row], str]] = {
    "strategy": lambda row: row.name,
    "error %": _error,
    "over silos": lambda row: _text(100 * row.silo_std, ".1f"),
    "worst silo": lambda row: _text(100 * row.worst, ".1f"),
    "IPR %": lambda row: _text(100 * row.ipr, ".0f"),
    "RSD %": lambda row: _text(100 * row.rsd, ".1f"),
    "groups": lambda row: _text(row.num_groups, ".1f"),
    "rounds to target": _reached,
    "MB": lambda row: _text(row.megabytes, ".1f"),
    "s": lambda row: _text(row.seconds, ".1f"),
    "silo s": lambda row: _text(row.silo_seconds, ".1f"),
    "p": _p,
}
"""Name of a column → what it says of a row."""


def cells(row: Row) -> list[str]:
    """A row as text, under ``COLUMNS``."""
    return [text(row) for text in COLUMNS.values()]


def by_error(table: Sequence[Row]) -> list[Row]:
    """Best first; last where no silo tells its error."""
    return sorted(table, key=lambda row: _nan_last(row.error))


def markdown(table: Sequence[Row]) -> str:
    """The table as Markdown, best error first."""
    ordered = by_error(table)
    lines = ["| " + " | ".join(COLUMNS) + " |", "|---|" + "---:|" * (len(COLUMNS) - 1)]
    lines += ["| " + " | ".join(cells(row)) + " |" for row in ordered]
    return "\n".join(lines) + "\n"


def plain(row: Row) -> dict[str, Any]:
    """A row for JSON: NaN becomes null."""
    return {
        key.replace("_", "-"): None if isinstance(value, float) and math.isnan(value) else value
        for key, value in asdict(row).items()
    }
