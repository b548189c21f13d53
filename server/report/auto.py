"""Report parts for ``auto``: a picture of its race, and the reasons for its groups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import partial
from itertools import cycle

from coterie.pictures import charts
from coterie.pictures.page import Picture, Table
from coterie.pictures.style import GROUPS, LIGHT
from coterie.server.report.explain import COLUMNS as HCCT_COLUMNS
from coterie.server.report.explain import end_text, explain, rows
from coterie.server.report.families import of_trees
from coterie.server.report.race import COLUMNS, Explanation, explain_race, lead_of_race
from coterie.server.report.race_words import titles
from coterie.server.report.similarity import last_similarity
from coterie.server.report.story import Story
from coterie.server.runs.record import Entrant, Groups, Round, Run, Verdict
from coterie.server.runs.record.metrics import Lead

REASONS = "Why each site is in its group"


def _explained(story: Story) -> Explanation | None:
    auto = story.run.strategy == "auto" and story.run.rounds
    return explain_race(story.run) if auto else None


def race_picture(story: Story) -> Picture | str | None:
    """Draw the held-out error of every partition over the rounds of the last race."""
    return _picture(story.run, _races(story)[:1], "race")


def race_of_trees_picture(story: Story) -> Picture | str | None:
    """Draw the same of the race of trees, if the run has one beside that of networks."""
    return _picture(of_trees(story.run), _races(story)[1:], "race-of-trees")


def _races(story: Story) -> list[tuple[str, Explanation]]:
    found = _explained(story)
    return list(found.races.items()) if found else []


def _picture(run: Run, races: Sequence[tuple[str, Explanation]], key: str) -> Picture | str | None:
    """Draw the first of these races, which are of this record."""
    if not races:
        return None
    family, found = races[0]
    of_family = f" of {family.lower()}" if family else ""
    if found.verdict is None:
        return f"no picture of the race{of_family}: it was not decided"
    if not found.verdict.judges:
        return f"no picture of the race{of_family}: {found.whole[1]}"
    rounds = [*run.rounds, *([run.final] if run.final else [])]
    lead = lead_of_race(run.lead, run.rounds[-1])
    lines = list(_lines(found.verdict, rounds, lead))
    title = f"Which groups{of_family} were tried, and which won"
    caption = (
        f"{' '.join(found.whole)} Lines are means over silos of what they measured in each round "
        "of the race, on the models that they received in it. A band is one standard error of the "
        "distance to the best partition; a cross ends a partition that was out."
    )
    draw = partial(charts.curves, lines, title=title, unit=f"held-out {lead.label}")
    return Picture(key, title, caption, draw, Table(COLUMNS, found.rows))


def _lines(verdict: Verdict, rounds: Iterable[Round], lead: Lead) -> Iterable[charts.Curve]:
    places = _places(verdict, rounds)
    colours = cycle(LIGHT[name] for name in GROUPS)
    names = titles(verdict.entrants, short=True)
    for number, (entrant, name) in enumerate(zip(verdict.entrants, names, strict=True)):
        alone = number == verdict.alone
        colour = LIGHT["alone"] if alone else next(colours)
        points = [(at, e.latest) for at, e in places[_key(entrant)]]
        points = [(at, one) for at, one in points if math.isfinite(one.error)]
        spread = [e if math.isfinite(e := one.standard_error) else 0.0 for _, one in points]
        means = [lead.scale * one.error for _, one in points]
        band = (
            [m - lead.scale * s for m, s in zip(means, spread, strict=True)],
            [m + lead.scale * s for m, s in zip(means, spread, strict=True)],
        )
        won = number == verdict.winner
        yield charts.Curve(
            [at for at, _ in points],
            means,
            colour,
            f"{name}, chosen" if won else name,
            tip=f"{name}: {lead.text(entrant.error)}",
            dashed=alone,
            band=band if any(spread) else None,
            stops=bool(entrant.dropped),
        )


def _key(entrant: Entrant) -> tuple[Groups, float, bool]:
    return entrant.groups, entrant.own_penalty, entrant.by_silo


def _places(
    verdict: Verdict, rounds: Iterable[Round]
) -> dict[tuple[Groups, float, bool], list[tuple[int, Entrant]]]:
    """Return partition and kind of model → its standing after each round of measurements."""
    found: dict[tuple[Groups, float, bool], list[tuple[int, Entrant]]]
    found = {_key(e): [] for e in verdict.entrants}
    for one in rounds:
        if verdict.began < one.round < verdict.round and not one.final:
            for entrant in (*one.grouping.entrants, *one.grouping.dropped):
                found.get(_key(entrant), []).append((one.round, entrant))
    for entrant in verdict.entrants:
        if entrant.dropped in (0, verdict.round):
            known = found[_key(entrant)]
            if not known or known[-1][0] < verdict.round:
                known.append((verdict.round, entrant))
    return found


def utilities(story: Story) -> tuple[str, dict[str, Table]]:
    """Return a sentence on how firm HCCT's groups are, and its reasons; empty for others."""
    found = last_similarity(story.run) if story.run.strategy == "hcct" else None
    text = "How firmly each site belongs to its group, and how the training went."
    with suppress(Exception):  # damaged values, as in ``reasons_table``
        reasons = explain(story.run, number=found[0].round)[1] if found else []
        if known := [r for r in reasons if math.isfinite(r.stay[0]) and r.alpha > 0]:
            one = min(known, key=lambda r: min(r.alpha - r.stay[0], r.stay[1] - r.alpha) / r.alpha)
            text += (
                f" The least firm: {one.silo} would stay in its group for α from {one.stay[0]:.3g} "
                f"to {end_text(one.stay[1])}; this run used {one.alpha:.3g}."
            )
        return (text, {REASONS: Table(HCCT_COLUMNS, rows(reasons))}) if reasons else ("", {})
    return "", {}


def reasons_table(story: Story) -> Table:
    """Return each silo's reason for its group, for ``auto``; no rows otherwise."""
    try:
        explained = _explained(story)
    except Exception:  # damaged values of a record from elsewhere: the picture's gap names them
        explained = None
    return Table(("silo", "why"), [] if explained is None else list(explained.silos.items()))
