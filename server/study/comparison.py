"""Figures of a comparison over the same silos and seeds, their significance, and advice.

A *measure* is one run's outcome, read from its record. Measures of several strategies over the same
silos and *repeats* (a seed, or a seed and a fold) form one table. Figures are errors, whatever the
primary metric: lower is better (``runs.record.metrics.Lead``).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from coterie.server.runs.record import Run
from coterie.server.runs.record.metrics import Lead, gains, ipr, p_text, rsd

LEVEL = 0.05
"""Significance level: two strategies differ if p is below it."""


@dataclass(frozen=True)
class Repeat:
    """A seed, and a fold from 1, or 0 without folds."""

    seed: int
    fold: int = 0

    def __str__(self) -> str:
        return f"seed {self.seed}" + (f", fold {self.fold}" if self.fold else "")

    @property
    def suffix(self) -> str:
        """The suffix for names of folders and runs."""
        return f"seed{self.seed}" + (f"-fold{self.fold}" if self.fold else "")


@dataclass(frozen=True)
class Measure:
    """The outcome of one run.

    Attributes:
        errors: silo → error of its final model, on its own test data.
        curve: (round, mean error over silos after it), as far as measured.
        groups: of the last round.
        num_bytes: of arrays, in both directions, for training and all other exchanges.
        seconds: wall seconds of the rounds.
        silo_seconds: sum of the silos' own seconds for all of that, as far as they state them.
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
        """The mean error over silos; NaN if none is known."""
        return _mean(list(self.errors.values()))

    def rounds_to(self, target: float) -> int | None:
        """Return the first round after which the mean error is at most ``target``."""
        return next((number for number, error in self.curve if error <= target), None)


Measures = Mapping[Repeat, Measure]
"""Repeat → measure, for one strategy."""


@dataclass(frozen=True)
class Row:
    """One strategy over all repeats. Unknown figures are NaN.

    Attributes:
        seeds: number of runs.
        error, error_std: mean over silos; mean and sample deviation over runs.
        silo_std: deviation over the silos of one run, mean over runs.
        worst: the largest error of a silo, mean over runs.
        ipr, rsd: see ``runs.record.metrics``; mean over runs.
        gain: local error − error, mean over silos and runs.
        better, compared: number of silos whose mean gain over the runs is above 0; out of how many.
        rounds_to_target: mean over the runs that reached it; NaN if none did.
        reached: number of runs that reached it; None without a target.
        num_groups: in the last round, mean over runs.
        megabytes, seconds, silo_seconds: mean over runs.
        p: of the difference from the row with the smallest error, corrected; NaN for that row
            itself, and where it cannot be computed.
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
    """Return the figures in a completed run's record."""
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
    """Return one row per strategy, in the order given.

    Args:
        measures: name → repeat → measure; every strategy over the same repeats and silos.
        alone: the name of local training, for the gains.
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
    """Return the strategy with the smallest mean error."""
    means = {name: _mean([m.mean for m in own.values()]) for name, own in measures.items()}
    return min(means, key=lambda name: _nan_last(means[name]))


def _row(name: str, own: Measures, alone: Measures, target: float | None, p: float) -> Row:
    runs = list(own.values())
    evaluated = [run for run in runs if run.errors]
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
        silo_std=_mean([float(np.std(list(run.errors.values()))) for run in evaluated]),
        worst=_mean([max(run.errors.values()) for run in evaluated]),
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
    """Return silo → its mean gain, rounded so that equal errors gain nothing."""
    names = dict.fromkeys(name for one in found for name in one)
    return {n: round(_mean([one[n] for one in found if n in one]), 12) for n in names}


def _mean(values: Sequence[float]) -> float:
    return float(np.mean(values)) if values else math.nan


def _nan_last(value: float) -> float:
    return math.inf if math.isnan(value) else value


# --- significance ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Difference:
    """Difference of two strategies' errors: mean, 95% interval, two-sided p; NaN if unknown."""

    mean: float = math.nan
    low: float = math.nan
    high: float = math.nan
    p: float = math.nan


def difference(
    one: Measures, other: Measures, *, drawn: Collection[str] | None = None
) -> Difference:
    """Compute how much larger the errors of ``one`` are, paired over silos and repeats.

    Every repeat gives one figure, the mean over the silos. Repeats share training samples, and
    folds almost all of them, so the figures are not independent, and the ordinary t-test finds
    spurious differences. The corrected resampled t-test is used (C. Nadeau, Y. Bengio: "Inference
    for the Generalization Error", Machine Learning 52, 2003, section 4; for repeated
    cross-validation R. Bouckaert, E. Frank, PAKDD 2004): the variance of a mean of J repeats is
    (1/J + n_test/n_train) times theirs.

    If no silo redraws its test samples, repeats give no information on other samples. Then every
    silo counts once with its mean over the repeats, and the test is Wilcoxon's signed-rank test
    over silos (J. Demšar, JMLR 7, 2006), pairs without a difference counting half for either side
    (Pratt). It needs at least six silos to find a difference.

    ``drawn`` are the silos whose test samples every repeat redraws (None: all); the first test
    ignores the others.
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
    """Return p corrected for as many comparisons as there are other strategies (Bonferroni).

    All comparisons are with the best row, which the same figures chose. With a factor for every
    other strategy, the truly best one is declared worse than another with probability ``LEVEL`` at
    most (J. Hsu, "Multiple Comparisons", 1996, chapter 4); Holm's smaller factors do not guarantee
    it.
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


def columns(lead: Lead) -> dict[str, Callable[[Row], str]]:
    """Return head of a column → function that formats a row's cell, for a primary metric."""
    return {
        "strategy": lambda row: row.name,
        lead.head: lambda row: _value(row, lead),
        "over silos": lambda row: "–" if math.isnan(row.silo_std) else lead.spread(row.silo_std),
        "worst silo": lambda row: lead.number(row.worst),
        "better than local": lambda row: f"{row.better} of {row.compared}" if row.compared else "–",
        f"gain ({lead.points})": lambda row: _gain(row, lead),
        "groups": lambda row: _text(row.num_groups, ".1f"),
        "rounds to target": _reached,
        "MB": lambda row: _text(row.megabytes, ".1f"),
        "s": lambda row: _text(row.seconds, ".1f"),
        "silo s": lambda row: _text(row.silo_seconds, ".1f"),
        "p": lambda row: p_text(row.p),
    }


def cells(row: Row, lead: Lead) -> list[str]:
    """Return a row as text, under ``columns``."""
    return [text(row) for text in columns(lead).values()]


def by_error(table: Sequence[Row]) -> list[Row]:
    """Sort rows by mean error, the smallest first and unknown ones last."""
    return sorted(table, key=lambda row: _nan_last(row.error))


def markdown(table: Sequence[Row], lead: Lead) -> str:
    """Return the table as Markdown, smallest mean error first."""
    heads = columns(lead)
    lines = ["| " + " | ".join(heads) + " |", "|---|" + "---:|" * (len(heads) - 1)]
    lines += ["| " + " | ".join(cells(row, lead)) + " |" for row in by_error(table)]
    return "\n".join(lines) + "\n"


# --- the advice -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Advice:
    """The advice from a comparison; ``strategy`` is empty if there is none.

    ``apart`` is true if that strategy differs significantly from all others.
    """

    strategy: str
    apart: bool
    text: str


def advise(table: Sequence[Row], *, alone: str, over_alone: Difference, lead: Lead) -> Advice:
    """Advise on a strategy, and state the certainty.

    Local training needs no federation, so another strategy is advised only if it is shown to be
    better. Among strategies that cannot be distinguished, the one with the best mean is as good a
    choice as any; the text also names the one that moves the fewest bytes.

    Args:
        alone: the name of local training.
        over_alone: how much larger its errors are than those of the best row.
    """
    ranked = [row for row in by_error(table) if math.isfinite(row.error)]
    if len(ranked) < 2:
        return Advice("", False, "No recommendation: fewer than two strategies have results.")
    best, *others = ranked
    if all(math.isnan(row.p) for row in others):
        text = (
            f"No recommendation. {best.name} has the best mean, but so few runs cannot show "
            "whether that is more than chance: add seeds or folds."
        )
        return Advice("", False, text)
    close = [row for row in others if not row.p < LEVEL]
    names = _listed([row.name for row in close])
    if best.name == alone:
        text = (
            f"Recommendation: {alone}. No strategy has a better mean {lead.title} than local "
            "training"
        )
        text += (
            f"; the difference from {names} is not significant."
            if close
            else "; all others are worse."
        )
        return Advice(alone, not close, text)
    gained = f"{best.name} gains {lead.gain(over_alone.mean)} {lead.points} over local training"
    if math.isfinite(over_alone.low):
        ends = (lead.gain(over_alone.low), lead.gain(over_alone.high))
        gained += f" (95% interval {ends[0]} to {ends[1]})"
    gained += f", and is better at {best.better} of {best.compared} silos"
    base = next((row for row in others if row.name == alone), None)
    if base in close and base is not None:
        text = (
            f"Recommendation: {alone}. {gained}, but it does not differ significantly from "
            f"local training (p {_equals(base.p)}), which needs no federation. More seeds, "
            "folds or test samples may decide it."
        )
        return Advice(alone, False, text)
    if not close:
        largest = max(row.p for row in others)
        text = (
            f"Recommendation: {best.name}. It differs from every other strategy (p "
            f"{_most(largest)}). "
        )
        return Advice(best.name, True, f"{text}{gained}.")
    cheapest = min([best, *close], key=lambda row: row.megabytes)
    text = (
        f"Recommendation: {best.name}. {gained}. It does not differ significantly from {names}: "
        "use any of them. "
    )
    return Advice(best.name, False, f"{text}{cheapest.name} transfers the fewest bytes.")


def _equals(p: float) -> str:
    return "unknown" if math.isnan(p) else f"= {p:.2g}"


def _most(p: float) -> str:
    return "< 0.001" if p < 0.001 else f"≤ {math.ceil(1000 * p) / 1000:.3f}"


def _listed(names: Sequence[str]) -> str:
    return " and ".join(part for part in (", ".join(names[:-1]), *names[-1:]) if part)
