"""What the columns of a comparison's table mean, and what differed between its runs."""

from __future__ import annotations

from coterie.server.runs.record.metrics import Lead
from coterie.server.study.comparison_file import Comparison


def legend(comparison: Comparison, lead: Lead, drawn: set[str]) -> str:
    """Return an explanation of the columns, in a paragraph."""
    file = comparison.file
    reach = "no target was set"
    if file.target is not None:
        value = lead.text(lead.error_of(file.target))
        reach = f"the first with a mean {lead.title} of {value} or better"
    return (
        f"{lead.head}: {lead.direction}; on each silo's own test data, mean over silos. "
        f"{_spread_text(comparison, drawn)} Over silos: standard deviation. Better than local: "
        "silos whose mean over all runs is better than with local training. Gain: over local "
        f"training, with its standard deviation over silos. Rounds to target: {reach}. MB: arrays "
        "sent both ways. s: wall clock of the rounds; silo s: the silos' own training, added up. "
        f"p: of the difference to the first row, {_test_text(comparison, drawn)}"
    )


def _spread_text(comparison: Comparison, drawn: set[str]) -> str:
    file = comparison.file
    fixed = [
        silo.name for silo in comparison.silos(comparison.repeats[0]) if silo.name not in drawn
    ]
    count = len(comparison.repeats)
    if count == 1:
        return "There was one run of each strategy, so the effect of chance is unknown."
    if not drawn:
        return (
            f"±: standard deviation over {count} seeds, which change the initial model and the "
            "order of training. The test samples were the same in all, so it does not cover "
            "the choice of test samples."
        )
    others = (
        f" The test samples of {', '.join(fixed[:4])}{' …' * (len(fixed) > 4)} stay the same."
        if fixed
        else ""
    )
    if file.folds:
        seeds = f" for each of {len(file.seeds)} seeds" if len(file.seeds) > 1 else ""
        return (
            f"±: standard deviation over {count} runs: {file.folds} folds{seeds}, so that every "
            f"sample is tested once{' a seed' if seeds else ''}.{others}"
        )
    return (
        f"±: standard deviation over {count} seeds, each with different test samples, a "
        f"different initial model and a different order of training.{others}"
    )


def _test_text(comparison: Comparison, drawn: set[str]) -> str:
    times = "corrected for the number of strategies (Bonferroni)."
    if not drawn:
        return (
            "by Wilcoxon's signed-rank test over the silos' means, because the test samples were "
            f"the same in all runs (with fewer than six silos it cannot be small); {times}"
        )
    if len(comparison.repeats) == 1:
        return "which needs more than one run."
    return (
        "by Nadeau and Bengio's corrected resampled t-test, which allows for runs that share "
        f"training samples, paired over silos and runs; {times}"
    )
