"""Pictures of the similarity between silos: the matrix, and FedCollab's structure."""

from __future__ import annotations

import math
from functools import partial

import numpy as np

from coterie.pictures import charts
from coterie.pictures.page import Picture, Table
from coterie.pictures.style import LIGHT
from coterie.server.report.explain import end_text
from coterie.server.report.story import MANY, Story, decimals
from coterie.server.runs.record import Round, Run, Square, Structure


def last_similarity(run: Run) -> tuple[Round, Square] | None:
    """Return the last round that holds cosines of updates, and these cosines."""
    found = ((one, one.grouping.similarity) for one in reversed(run.rounds))
    return next(((one, square) for one, square in found if square is not None), None)


def matrix_picture(story: Story) -> Picture | str | None:
    """Draw similarities or distances, ordered by group."""
    structures = [one.grouping.structure for one in reversed(story.run.rounds)]
    distances = [one.distances for one in structures if one and one.distances is not None]
    if distances:
        what = "Distance of the sites' data (0 = alike)"
        return _matrix(story, distances[0], what=what, measure="distance", limits=(0.0, 1.0))
    if found := last_similarity(story.run):
        what = "Cosine similarity of the sites' updates (1 = same direction)"
        return _matrix(story, found[1], what=what, measure="cosine", limits=(-1.0, 1.0))
    if story.run.strategy in ("hcct", "fedgroup", "fedcollab"):
        return "no matrix of similarities or distances: the record holds none"
    return None


def _matrix(
    story: Story, found: Square, *, what: str, measure: str, limits: tuple[float, float]
) -> Picture:
    names = story.history.order(found.names)
    rows = [found.names.index(name) for name in names]
    values = found.values[np.ix_(rows, rows)]
    bands, start = [], 0
    while start < len(names):
        letter, colour = story.place(names[start])
        stop = start + 1
        while letter and stop < len(names) and story.place(names[stop])[0] == letter:
            stop += 1
        if letter:
            bands.append(charts.Band(letter, colour, start, stop))
        start = stop
    title = "How similar the sites are"
    inside = np.zeros(values.shape, dtype=bool)
    for band in bands:
        inside[band.start : band.stop, band.start : band.stop] = True
    off = ~np.eye(len(names), dtype=bool)
    within, between = values[inside & off], values[~inside & off]
    caption = (
        f"{what}."
        + (f" Outlined: groups. {np.nanmean(within):.2f} within groups" if within.size else "")
        + (f", {np.nanmean(between):.2f} between" if within.size and between.size else "")
        + ("." if within.size else "")
        + (" Names are left out because there are many." if len(names) > MANY else "")
    )
    table = Table(
        ("silo", *names),
        [(n, *(decimals(v, 2) for v in row)) for n, row in zip(names, values, strict=True)],
    )
    draw = partial(charts.matrix, values, names, bands, title=title, measure=measure, limits=limits)
    return Picture("matrix", title, caption, draw, table if len(names) <= MANY else None)


def structure_picture(story: Story) -> Picture | str | None:
    """Draw FedCollab's bound of the chosen structure and of others, and give the interval of c."""
    if story.run.strategy != "fedcollab":
        return None
    structure = _last_structure(story.run)
    if structure is None:
        return "no bounds of other structures and no interval of c: the record holds none"
    names = {"chosen": "chosen", "second-best": "next best"}
    names |= {"alone": "all alone", "together": "all together"}
    bounds = structure.bounds
    values = {label: bounds[key] for key, label in names.items() if key in bounds}
    rows = [
        charts.Bar(label, LIGHT["g0"] if label == "chosen" else LIGHT["alone"], {"L": value})
        for label, value in sorted(values.items(), key=lambda item: item[1])
    ]
    text = interval_text(structure)
    if structure.second_groups:
        text += f" The next best: {' | '.join(map(', '.join, structure.second_groups))}."
    title = "The chosen groups and others"
    caption = (
        "FedCollab's error bound L of the chosen groups, of the next best, of all alone and of all"
        f" together; smaller is better.{text}"
    )
    draw = partial(charts.bars, rows, title=title, unit="error bound L")
    table = Table(("structure", "L"), [(name, f"{value:.6g}") for name, value in values.items()])
    return Picture("structure", title, caption, draw, table)


def _last_structure(run: Run) -> Structure | None:
    found = (one.grouping.structure for one in reversed(run.rounds))
    return next((structure for structure in found if structure and structure.bounds), None)


def interval_text(structure: Structure) -> str:
    """Return for which c FedCollab finds the same groups; empty if unknown."""
    if structure.kept:
        return " Another structure now has a smaller bound; other silos stay (newcomers=keep)."
    if structure.c_interval is None:
        return ""
    low, high = structure.c_interval
    text = f" The answer stays the same for c from {low:.3g} to {end_text(high)}"
    return text + (f"; this run has c = {structure.c:g}." if math.isfinite(structure.c) else ".")
