"""``coterie runs explain``: the reasons for each silo's group, from a run's record.

HCCT's groups maximise the silos' utilities. Its explanation is each silo's utility alone, in its
group and in the best other group, its cosines, and the interval of α in which it would stay. For
``auto``, it is a text about the raced partitions and every silo's measurements (``race``).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
from rich.console import Console
from rich.table import Table
from rich.text import Text

from coterie.server.report.race import COLUMNS as COLUMNS_OF_RACE
from coterie.server.report.race import Explanation, explain_race
from coterie.server.runs.letters import letters_of
from coterie.server.runs.record import (
    FloatArray,
    Round,
    Run,
    Square,
    Unlabelled,
    find_run,
    read_run,
)
from coterie.strategies.errors import refused
from coterie.strategies.partition.evaluation import evaluate
from coterie.strategies.partition.hcct import stay_intervals
from coterie.strategies.partition.objectives import HCCTUtility
from coterie.system.commandline import print_json
from coterie.system.terminal import wide

Said = TypeVar("Said")

IN_SENTENCES = ("fedcollab", "fedgroup")
EXPLAINED = ("auto", "hcct", *IN_SENTENCES)
"""Strategies whose records contain the reasons for the groups."""
COLUMNS = (
    *("silo", "group", "cosine", "alone", "in group", "best other", "total if moved"),
    "stays for α",
)
"""Columns for HCCT: utilities of each silo, and the interval of α in which it stays."""


@dataclass(frozen=True)
class Reason:
    """The reason for one silo's place after a round.

    Attributes:
        group: the others in its group.
        alone, inside: its utility alone and in its group.
        elsewhere, outside: the best other group, or empty, and its utility there.
        gain: change of the total utility of all silos by its best move; ≤ 0 if no move is better.
        cosine: of its update with its group's mean update.
        stay: interval of α (the silo's, if it stated one, else the run's) in which no move of this
            silo alone would be better; NaN if there is none.
        alpha: the α that applied to it.
    """

    silo: str
    group: tuple[str, ...]
    alone: float
    inside: float
    elsewhere: tuple[str, ...]
    outside: float
    gain: float
    cosine: float
    stay: tuple[float, float]
    alpha: float


def explain(run: Run, *, number: int | None = None) -> tuple[int, list[Reason]]:
    """Return a round, by default the last, and the reasons of all silos after it.

    Raises:
        FederationError: the run has another strategy, or the record has no similarities.
    """
    one, similarity = _compared(run, number)
    names, grouping = similarity.names, one.grouping
    alphas, sizes = grouping.alphas, grouping.sizes
    gram = similarity.values * np.outer(grouping.norms, grouping.norms)
    groups = [[names.index(n) for n in group if n in names] for group in grouping.planned]
    groups = sorted(group for group in groups if group)
    objective = HCCTUtility.from_gram(gram, sizes, alpha=alphas)
    chosen = evaluate(objective, groups)
    own = [i for i, name in enumerate(names) if name in grouping.own_alpha]
    stays = stay_intervals(gram, sizes, groups, alpha=alphas, own=own)
    beside = objective.values_beside(groups)
    of = {i: group for group in groups for i in group}
    reasons = []
    for i, name in enumerate(names):
        own, move = of[i], chosen.alternatives[i]
        best = groups[int(np.nanargmax(beside[i]))] if len(groups) > 1 else []
        reasons.append(
            Reason(
                silo=name,
                group=tuple(names[j] for j in own if j != i),
                alone=_utility(objective, [i], i),
                inside=chosen.values[i],
                elsewhere=tuple(names[j] for j in best),
                outside=float(np.nanmax(beside[i])) if best else float("nan"),
                gain=move.gain,
                cosine=chosen.values[i] + float(alphas[i] / sizes[own].sum()),
                stay=stays[i],
                alpha=float(alphas[i]),
            )
        )
    return one.round, reasons


def _compared(run: Run, number: int | None) -> tuple[Round, Square]:
    if run.strategy != "hcct":
        raise refused(f"explain is for {', '.join(EXPLAINED)}; this run is {run.strategy}.")
    found = [one for one in run.rounds if number in (None, one.round)]
    if not found:
        raise refused(f"round must be in [1, {len(run.rounds)}]. Got {number}.")
    one = found[-1]
    similarity = one.grouping.similarity
    if similarity is not None:
        return one, similarity
    why = (
        f"the record holds no similarities of round {one.round}: of many silos only those of "
        "the last rounds are kept."
    )
    if run.config.get("alpha") == "auto" and not one.grouping.compared:
        why = (
            f"in round {one.round} no groups were formed: alpha = auto was still looking for "
            "α. Name a later round with --round."
        )
    raise refused(why)


def alpha_of(run: Run, one: Round) -> float:
    """Return the run's α in a round: found by ``auto`` or as configured; NaN if unknown."""
    given = run.config.get("alpha")
    found = one.grouping.alpha
    return float(given) if math.isnan(found) and isinstance(given, int | float) else found


def _utility(objective: HCCTUtility, members: list[int], silo: int) -> float:
    values: FloatArray = objective.member_values(members)
    return float(values[members.index(silo)])


def print_explanation(
    name: str,
    *,
    silo: str | None,
    number: int | None,
    root: Path | None,
    as_json: bool = False,
    console: Console | None = None,
) -> None:
    """Print the reasons: a table for HCCT, sentences for the others."""
    folder = find_run(name, root)
    run, console = read_run(folder), wide(console or Console())
    unlabelled = unlabelled_in(run, number)
    if as_json:
        print_json(_document(run, silo, number, unlabelled))
        return
    if silo in unlabelled:
        _print_unlabelled(console, {silo: unlabelled[silo]} if silo else {})
        return
    _print_unlabelled(console, {} if silo else unlabelled)
    if unlabelled and run.strategy not in EXPLAINED:
        return
    if (found := _in_sentences(run, number)) is not None:
        _print_sentences(console, run, found, silo)
        return
    at, reasons = explain(run, number=number)
    shown = _only(silo, at, {reason.silo: reason for reason in reasons}).values()
    console.print(
        f"{folder.name}: groups formed after round {at}, α = {_alphas(reasons)}. "
        "Utility is −α/D + cosine; silos are where the total over all of them is largest.",
        markup=False,
        soft_wrap=True,
    )
    letters = _letters(reasons)
    for group in sorted({tuple(sorted((r.silo, *r.group))) for r in reasons}):
        called = f"group {letters[group[0]]}" if len(group) > 1 else "alone"
        console.print(f"  {called}: {', '.join(group)}", markup=False, soft_wrap=True)
    table = Table()
    for column in COLUMNS:
        table.add_column(column, justify="left" if column == "silo" else "right", no_wrap=True)
    for reason in shown:
        table.add_row(*map(Text, _cells(reason, letters)))
    console.print(table)


def rows(reasons: Sequence[Reason]) -> list[tuple[str, ...]]:
    """Return the table rows of HCCT's reasons, under ``COLUMNS``."""
    letters = _letters(reasons)
    return [_cells(reason, letters) for reason in reasons]


def _letters(reasons: Sequence[Reason]) -> dict[str, str]:
    return letters_of({tuple(sorted((r.silo, *r.group))) for r in reasons})


def unlabelled_in(run: Run, number: int | None = None) -> Mapping[str, Unlabelled]:
    """Return the silos without labels after a round, by default the last."""
    last = run.rounds[-1].round if run.rounds and number is None else number
    rounds = [one for one in (*run.rounds, run.final) if one and last in (None, one.round)]
    # The entry after the last round has only what changed since that round.
    return next(
        (one.grouping.unlabelled for one in reversed(rounds) if one.grouping.unlabelled), {}
    )


def _print_unlabelled(console: Console, unlabelled: Mapping[str, Unlabelled]) -> None:
    for name, one in unlabelled.items():
        has = f"has the model of {', '.join(one.group)}: " if one.group else ""
        text = f": its samples have no labels yet; {has}{one.why}."
        console.print(Text.assemble((name, "bold"), text), soft_wrap=True)


def _in_sentences(run: Run, number: int | None) -> Explanation | None:
    """Return the reasons of a strategy that has them as sentences; None for any other."""
    if run.strategy == "auto":
        return explain_race(run, number=number)
    if run.strategy in IN_SENTENCES:
        from coterie.server.report.explain_groups import explain_groups  # draws: loaded late

        return explain_groups(run, number=number)
    return None


def _print_sentences(console: Console, run: Run, found: Explanation, silo: str | None) -> None:
    shown = _only(silo, found.round, found.silos)
    what = "after" if run.strategy == "auto" else "groups of"
    heading = [f"{run.name}, {what} round {found.round}:"]
    for title, race in found.races.items():
        heading += [f"{title}:"] if title else []
        for sentence in (*heading, *race.whole):
            console.print(sentence, markup=False, highlight=False, soft_wrap=True)
        heading = []
        if race.rows:
            table = Table(*COLUMNS_OF_RACE[: len(race.rows[0])], title=title or None)
            for row in race.rows:
                table.add_row(*map(Text, row))
            console.print(table)
    for name, text in shown.items():
        console.print(Text.assemble((name, "bold"), f": {text}"), soft_wrap=True)


def _only(silo: str | None, number: int, known: Mapping[str, Said]) -> Mapping[str, Said]:
    if silo is not None and silo not in known:
        raise refused(f"no silo {silo!r} in round {number}. There are: {', '.join(known)}.")
    return known if silo is None else {silo: known[silo]}


def _document(
    run: Run, silo: str | None, number: int | None, unlabelled: Mapping[str, Unlabelled]
) -> Mapping[str, object]:
    """Return the reasons as an object: by silo an object for HCCT, a sentence for the others."""
    apart = {name: one.why for name, one in unlabelled.items() if silo in (None, name)}
    document = {"run": run.name, "strategy": run.strategy, "unlabelled": apart}
    if silo in unlabelled or (unlabelled and run.strategy not in EXPLAINED):
        return document | {"round": number, "silos": {}, "race": []}
    if (found := _in_sentences(run, number)) is not None:
        own = _only(silo, found.round, found.silos)
        return document | {"round": found.round, "silos": own, "race": found.whole}
    at, reasons = explain(run, number=number)
    chosen = _only(silo, at, {reason.silo: reason for reason in reasons})
    return document | {"round": at, "silos": chosen, "race": []}


def _alphas(reasons: list[Reason]) -> str:
    counts = Counter(reason.alpha for reason in reasons)
    usual = counts.most_common(1)[0][0]
    own = [f"{r.silo} {r.alpha:.3g}" for r in reasons if r.alpha != usual]
    return f"{usual:.3g}" + (f" ({', '.join(own)})" if own else "")


def _cells(reason: Reason, letters: Mapping[str, str]) -> tuple[str, ...]:
    low, high = reason.stay
    stay = "–" if np.isnan(low) else f"{low:.3g} – {end_text(high)}"
    other = next((letters[name] or name for name in reason.elsewhere), "")
    return (
        reason.silo,
        letters[reason.silo] or "alone",
        f"{reason.cosine:.2f}",
        f"{reason.alone:.2f}",
        f"{reason.inside:.2f}",
        f"{reason.outside:.2f} ({other})" if other else "–",
        f"{reason.gain:+.2f}",
        stay,
    )


def end_text(value: float) -> str:
    return "∞" if math.isinf(value) else f"{value:.3g}"
