"""What a comparison says: figures of runs over the same silos and seeds, which of them differ
truly, and what that advises.

A *measure* is one run's outcome, read from its record. Measures of several strategies over the same
silos and *repeats* (a seed, or a seed and a fold) make one table. Figures are errors, whatever
metric leads: lower is better (``runs.metrics.Lead``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np

from coterie.server.runs.record import Run
from coterie.server.runs.record.metrics import Lead, gains, ipr, rsd

LEVEL = 0.05
"""Below it a p says that two strategies differ."""


@dataclass(frozen=True)
class Repeat:
    """A seed, and which fold: from 1; 0 where there are none."""

    seed: int
    fold: int = 0

    def __str__(self) -> str:
        return f"seed {self.seed}" + (f", fold {self.fold}" if self.fold else "")

    @property
    def suffix(self) -> str:
        """Of names of folders and runs."""
        return f"seed{self.seed}" + (f"-fold{self.fold}" if self.fold else "")


@dataclass(frozen=True)
class Measure:
    """One run.

    Attributes:
        errors: silo → error of the model that it has at the end, on its own test data.
        curve: (round, mean error over silos after it), as far as measured.
        groups: who trained together in the last round.
        num_bytes: of arrays, both ways, training and what was exchanged before and beside it.
        seconds: wall, of the rounds.
        silo_seconds: the silos' own for all of that, added up, as far as they state them.
        lead: in what errors are counted.
        trained, tested: silo → samples, as far as known.
    """

    errors: Mapping[str, float]
    curve: tuple[tuple[int, float], ...]
    groups: tuple[tuple[str, ...], ...]
    num_bytes: int
    seconds: float
    silo_seconds: float
    lead: Lead = field(default_factory=Lead)
    trained: Mapping[str, float] = field(default_factory=dict)
    tested: Mapping[str, int] = field(default_factory=dict)

    @property
    def mean(self) -> float:
        """Mean error over silos; NaN if none tells its error."""
        return _mean(list(self.errors.values()))

    def rounds_to(self, target: float) -> int | None:
        """The first round after which the mean error is at most ``target``."""
        return next((number for number, error in self.curve if error <= target), None)


Measures = Mapping[Repeat, Measure]
"""Repeat → measure, of one strategy."""


@dataclass(frozen=True)
class Row:
    """One strategy over all repeats. NaN where a figure is unknown.

    Attributes:
        name: as in the file.
        seeds: how many runs.
        error, error_std: mean over silos; mean and sample deviation over runs.
        silo_std: deviation over the silos of one run, mean over runs.
        worst: the silo with the largest error, mean over runs.
        ipr, rsd: as ``runs.metrics`` has them, mean over runs.
        gain: error alone − error, mean over silos and runs.
        better, compared: silos whose mean gain over the runs is above 0, of how many.
        rounds_to_target: mean over the runs that reached it; NaN if none did.
        reached: runs that reached it; None without a target.
        num_groups: in the last round, mean over runs.
        megabytes, seconds, silo_seconds: mean over runs.
        p: of the difference to the row with the smallest error, corrected; NaN for that row itself,
            and where nothing can be said.
    """

    name: str
    seeds: int
    error: float
    error_std: float
    silo_std: float
    worst: float
    ipr: float
    rsd: float
    gain: float
    better: int
    compared: int
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
        lead=run.lead,
        trained={name: silo.num_examples for name, silo in run.silos.items()},
        tested=run.test_counts(),
    )


def rows(
    measures: Mapping[str, Measures],
    *,
    alone: str,
    target: float | None,
    drawn: Collection[str] | None = None,
) -> list[Row]:
    """One row per strategy, in the order given.

    Args:
        measures: name → repeat → measure; every strategy over the same repeats and silos.
        alone: the name of training alone, for the gains.
        target: mean error to reach, or None.
        drawn: see ``difference``.
    """
    best = best_of(measures)
    others = len(measures) - 1
    return [
        _row(
            name,
            own,
            measures.get(alone, {}),
            target,
            corrected(difference(own, measures[best], drawn=drawn).p, others)
            if name != best
            else math.nan,
        )
        for name, own in measures.items()
    ]


def best_of(measures: Mapping[str, Measures]) -> str:
    """The strategy with the smallest mean error."""
    means = {name: _mean([m.mean for m in own.values()]) for name, own in measures.items()}
    return min(means, key=lambda name: _nan_last(means[name]))


def _row(name: str, own: Measures, alone: Measures, target: float | None, p: float) -> Row:
    runs = list(own.values())
    told = [run for run in runs if run.errors]
    means = [run.mean for run in runs]
    beside = [(own[k].errors, alone[k].errors) for k in own if k in alone and own is not alone]
    gained = _gains([gains(*pair) for pair in beside])
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
        gain=_mean(list(gained.values())),
        better=sum(gain > 0 for gain in gained.values()),
        compared=len(gained),
        rounds_to_target=_mean(found),
        reached=None if target is None else len(found),
        num_groups=_mean([len(run.groups) for run in runs]),
        megabytes=_mean([run.num_bytes / 1e6 for run in runs]),
        seconds=_mean([run.seconds for run in runs]),
        silo_seconds=_mean([run.silo_seconds for run in runs]),
        p=p,
    )


def _gains(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Silo → its mean gain. Equal errors gain nothing, whatever their last bits."""
    names = dict.fromkeys(name for one in found for name in one)
    return {n: round(_mean([one[n] for one in found if n in one]), 12) for n in names}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


# --- significance ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Of two strategies' errors: the mean, its 95 % interval and a two-sided p; NaN if unknown."""

    mean: float = math.nan
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan


def difference(
    one: Measures, other: Measures, *, drawn: Collection[str] | None = None
) -> Difference:
    """How much larger the errors of ``one`` are, paired over silos and repeats.

    Every repeat gives one figure, the mean over the silos. Repeats share training samples, and
    folds almost all of them, so that the figures are not independent, and the ordinary t-test finds
    differences that are none. Therefore the corrected resampled t-test (C. Nadeau, Y. Bengio:
    "Inference for the Generalization Error", Machine Learning 52, 2003, section 4; for repeated
    cross-validation R. Bouckaert, E. Frank, PAKDD 2004): the variance of a mean of J repeats is
    (1/J + n_test/n_train) times theirs.

    Where no silo's test samples are drawn, repeats say nothing of other samples. Then every silo
    counts once with its mean over the repeats, and the test is Wilcoxon's signed-rank test over
    silos (J. Demšar, JMLR 7, 2006), pairs without a difference counting half for either side
    (Pratt). It needs six silos to find anything.

    Args:
        one, other: of two strategies.
        drawn: silos whose test samples every repeat draws anew; None: all. Others have no part in
            the first test.
    """
    if drawn is not None and not drawn:
        return _over_silos(one, other)
    pairs = [(one[key], other[key]) for key in one if key in other]
    means, ratios = [], []
    for mine, its in pairs:
        names = [n for n in mine.errors if n in its.errors and (drawn is None or n in drawn)]
        if names:
            means.append(_mean([mine.errors[n] - its.errors[n] for n in names]))
            known = [n for n in names if mine.trained.get(n, 0) > 0 and n in mine.tested]
            ratios.append(_mean([mine.tested[n] / mine.trained[n] for n in known]))
    values = np.round(means, 12)  # equal differences count as equal, whatever their last bits
    if not len(values):
        return Difference()
    middle = float(values.mean())
    if len(values) == 1:
        return Difference(middle)
    if not values.any():
        return Difference(0.0, 0.0, 0.0, 1.0)
    spread = float(values.std(ddof=1))
    if spread == 0:  # by chance, on few test samples: it says nothing of the true spread
        return Difference(middle)
    from scipy.stats import t

    error = spread * math.sqrt(1 / len(values) + _mean(ratios))
    reach = error * float(t.ppf(0.975, len(values) - 1))
    p = 2 * float(t.sf(abs(middle) / error, len(values) - 1))
    return Difference(middle, middle - reach, middle + reach, p)


def _over_silos(one: Measures, other: Measures) -> Difference:
    found = [gains(one[key].errors, other[key].errors) for key in one if key in other]
    values = -np.array(list(_gains(found).values()))
    if not len(values):
        return Difference()
    if not values.any():
        return Difference(0.0, p=1.0)
    from scipy.stats import wilcoxon

    return Difference(float(values.mean()), p=float(wilcoxon(values, zero_method="pratt").pvalue))


def corrected(p: float, others: int) -> float:
    """p for as many comparisons as there are other strategies (Bonferroni).

    They all are with the best row, which the same figures chose: with a factor for every other
    strategy, whichever truly is best is said to be worse than another with probability ``LEVEL`` at
    most (J. Hsu, "Multiple Comparisons", 1996, chapter 4), which Holm's smaller factors do not
    promise.
    """
    return min(1.0, others * p) if math.isfinite(p) else p


# --- the table ------------------------------------------------------------------------------------


def _text(value: float, form: str) -> str:
    return "–" if math.isnan(value) else format(value, form)


def _with_spread(text: str, spread: str) -> str:
    return f"{text} ± {spread}" if spread else text


def _value(row: Row, lead: Lead) -> str:
    spread = "" if math.isnan(row.error_std) else lead.spread(row.error_std)
    return _with_spread(lead.number(row.error), spread)


def _gain(row: Row, lead: Lead) -> str:
    known = not math.isnan(row.gain)
    return _with_spread(lead.gain(row.gain), lead.gain(row.rsd, sign="") if known else "")


def _reached(row: Row) -> str:
    if not row.reached:
        return "–"
    some = "" if row.reached == row.seeds else f" ({row.reached} of {row.seeds})"
    return f"{row.rounds_to_target:.0f}{some}"


def p_text(p: float) -> str:
    """A p for people."""
    if math.isnan(p):
        return "–"
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def columns(lead: Lead) -> dict[str, Callable[[Row], str]]:
    """Head of a column → what it says of a row, where this metric leads."""
    return {
        "strategy": lambda row: row.name,
        lead.head: lambda row: _value(row, lead),
        "over silos": lambda row: "–" if math.isnan(row.silo_std) else lead.spread(row.silo_std),
        "worst silo": lambda row: lead.number(row.worst),
        "better than alone": lambda row: f"{row.better} of {row.compared}" if row.compared else "–",
        f"gain ({lead.points})": lambda row: _gain(row, lead),
        "groups": lambda row: _text(row.num_groups, ".1f"),
        "rounds to target": _reached,
        "MB": lambda row: _text(row.megabytes, ".1f"),
        "s": lambda row: _text(row.seconds, ".1f"),
        "silo s": lambda row: _text(row.silo_seconds, ".1f"),
        "p": lambda row: p_text(row.p),
    }


def cells(row: Row, lead: Lead) -> list[str]:
    """A row as text, under ``columns``."""
    return [text(row) for text in columns(lead).values()]


def by_error(table: Sequence[Row]) -> list[Row]:
    """Smallest mean error first; last where no silo tells its error."""
    return sorted(table, key=lambda row: _nan_last(row.error))


def markdown(table: Sequence[Row], lead: Lead) -> str:
    """The table as Markdown, smallest mean error first."""
    heads = columns(lead)
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    lines += ["| " + " | ".join(cells(row, lead)) + " |" for row in by_error(table)]
    return "\n".join(lines) + "\n"


def plain(row: Row) -> dict[str, Any]:
    """A row for JSON: NaN becomes null."""
    return {
        key.replace("_", "-"): None if isinstance(value, float) and math.isnan(value) else value
        for key, value in asdict(row).items()
    }


# --- the advice -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Advice:
    """What a comparison advises.

    Attributes:
        strategy: its name; empty where nothing can be advised.
        apart: whether it is told apart from every other strategy.
        text: it and its reasons, for people.
    """

    strategy: str
    apart: bool
    text: str


def advise(table: Sequence[Row], *, alone: str, over_alone: Difference, lead: Lead) -> Advice:
    """Which strategy to take, and how sure that is.

    Training alone needs no federation, so another strategy is advised only if it is shown to be
    better. Of those that cannot be told apart, the one with the best mean is as good a choice as
    any; which of them moves the fewest bytes is said, too.

    Args:
        table: of ``rows``.
        alone: the name of training alone.
        over_alone: how much larger its errors are than those of the best row.
        lead: in what errors are counted.
    """
    ranked = [row for row in by_error(table) if math.isfinite(row.error)]
    if len(ranked) < 2:
        return Advice("", False, "No advice: there are no two strategies with known figures.")
    best, *others = ranked
    if all(math.isnan(row.p) for row in others):
        text = (
            f"No advice. {best.name} has the best mean, but whether that is more than chance "
            "cannot be said of so few runs: add seeds or folds."
        )
        return Advice("", False, text)
    close = [row for row in others if not row.p < LEVEL]
    names = _listed([row.name for row in close])
    if best.name == alone:
        text = f"Advice: {alone}. No strategy has a better mean {lead.title} than training alone"
        text += f"; {names} cannot be told apart from it." if close else "; all others are worse."
        return Advice(alone, not close, text)
    gained = f"{best.name} gains {lead.gain(over_alone.mean)} {lead.points} over alone"
    if math.isfinite(over_alone.low):
        ends = (lead.gain(over_alone.low), lead.gain(over_alone.high))
        gained += f" (95 % interval {ends[0]} to {ends[1]})"
    gained += f", and is better than alone at {best.better} of {best.compared} silos"
    base = next((row for row in others if row.name == alone), None)
    if base in close and base is not None:
        text = (
            f"Advice: {alone}. {gained}, but it cannot be told apart from training alone (p "
            f"{_equals(base.p)}), which needs no federation. More seeds, folds or test samples may "
            "decide it."
        )
        return Advice(alone, False, text)
    if not close:
        largest = max(row.p for row in others)
        text = f"Advice: {best.name}. It differs from every other strategy (p {_most(largest)}). "
        return Advice(best.name, True, f"{text}{gained}.")
    cheapest = min([best, *close], key=lambda row: row.megabytes)
    text = (
        f"Advice: {best.name}. {gained}. It cannot be told apart from {names}: take any of them. "
    )
    return Advice(best.name, False, f"{text}{cheapest.name} moves the fewest bytes of them.")


def _equals(p: float) -> str:
    return "unknown" if math.isnan(p) else f"= {p:.2g}"


def _most(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"≤ {math.ceil(1000 * p) / 1000:.3f}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)
