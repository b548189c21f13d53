"""Pictures of the training: groups over rounds, gains, learning curves."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from coterie import wire
from coterie.pictures import charts, flow
from coterie.pictures.page import Picture, Table
from coterie.pictures.style import LIGHT, Drawing, Layout
from coterie.server.report.gains import grows_trees, mean_of
from coterie.server.report.story import (
    MOST_COLUMNS,
    MOST_COLUMNS_NARROW,
    Story,
    thin,
    thinned,
    top_rows,
)
from coterie.strategies.rounds.reports import SiloReport

Value = Callable[[SiloReport], float]
MOST_NAMED = 8
"""Largest number of silos whose curves are named in their groups too."""
MOST_NAMED_ALONE = 6
"""Largest number of silos alone whose curves are named; of more, only their mean is."""


def groups_picture(story: Story) -> Picture | str:
    history = story.history
    if not history.stretches:
        return "no groups over rounds: no round is recorded"
    title = "Who trained with whom"

    def draw(layout: Layout) -> Drawing:
        most = MOST_COLUMNS_NARROW if layout.narrow else MOST_COLUMNS
        columns, _ = history.columns(most)
        return flow.alluvial(columns, layout, title=title, threads=not story.many)

    count = len(history.stretches)
    line = "The thicker a stream, the more sites it has" if story.many else "Each line is a site"
    caption = (
        f"Time runs left to right. {line}; its colour and letter show the group, grey means it "
        "trained alone."
    )
    if count > MOST_COLUMNS:
        caption += (
            f" The groups changed {count - 1} times: of {count} stretches at most {MOST_COLUMNS}"
            " are drawn, the first, the last, and of every part of the run the one with the"
            " largest change."
        )
    if story.many:
        caption += " Figures below: sites that joined (+) and left (−)."
    rows = []
    for stretch in history.stretches[-300:]:
        when, blocks = f"{stretch.first}–{stretch.last}", history.blocks(stretch)
        rows += [(when, b.label, ", ".join(b.members)) for b in blocks if b.label]
        if alone := [b.members[0] for b in blocks if not b.label and b.members]:
            rows.append((when, "alone", ", ".join(alone)))
    rows = rows[-300:]
    return Picture("groups", title, caption, draw, Table(("rounds", "group", "silos"), rows))


def outcomes_picture(story: Story) -> Picture | str | None:
    """Draw the errors of local training, of the global model and of the group's."""
    gains = story.gains
    if not gains.together:
        return None  # said by the record's reader
    rows = [
        charts.Outcome(
            name,
            *story.place(name),
            gains.alone.get(name, math.nan) if name in gains.stayed else math.nan,
            gains.together[name],
            gains.common.get(name, math.nan),
        )
        for name in story.history.order(gains.together)
    ]
    lead = story.run.lead
    of_each = f"{lead.title[0].upper()}{lead.title[1:]} of each site"
    title = "Was it worth it for each silo?" if gains.gain else of_each
    caption = "Error on each site's own test data after its last round; smaller is better."
    if gains.gain:
        caption += f" The line is the gain over local training, in {lead.points}; dashed is a loss."
        caption += (
            " Local training used the run's settings; only linear models on tables have a penalty "
            "chosen for each site."
        )
    which = "sites that gain least" if gains.gain else "sites with the largest error"
    shown, note = top_rows(rows, lambda row: _or_last(row.gain, -row.together), which)
    draw = partial(charts.outcomes, shown, title=title, label=lead.label, scale=lead.scale)
    return Picture("outcomes", title, caption + note, draw)


def _or_last(gain: float, otherwise: float) -> float:
    return otherwise if math.isnan(gain) else gain


def curves_picture(story: Story) -> Picture | None:
    points = {one.round: one.errors for one in story.run.rounds if one.errors}
    if not points:
        return None
    title, lead = "Learning curves", story.run.lead
    lines = _lines(story, points, scale=lead.scale)
    others = (("local", story.alone), ("global", story.common))
    for label, other in others:
        if other is not None:
            known = [one for one in other.rounds if one.errors]
            means = [lead.scale * mean_of(one.errors.values()) for one in known]
            x, y = thin([one.round for one in known], means)
            lines.append(charts.Curve(x, y, LIGHT["muted"], label, dashed=True))
    caption = (
        "Error after every round on the sites' own test data. Thick lines: means of the groups at"
        " the end. "
    )
    bands = "Bands: 10th to 90th percentile of their sites."
    caption += bands if story.many else "Thin lines: sites."
    names = [name for name, other in others if other is not None]
    caption += f" Dashed: means of {' and '.join(names)}." if names else ""
    caption += thinned(len(points))
    draw = partial(charts.curves, lines, title=title, unit=lead.label)
    table = _mean_table(points, f"mean {lead.label}", scale=lead.scale)
    return Picture("curves", title, caption, draw, table)


def loss_picture(story: Story) -> Picture | None:
    caption = "Mean loss of local training in every round, by group."
    return _by_group(story, "loss", "Training loss", caption, "loss", lambda s: s.train_loss)


def discrepancy_picture(story: Story) -> Picture | None:
    """Draw the distance between silos' trained models and their groups' models.

    Boosted trees have none: a difference of their arrays says nothing about their answers.
    """
    if grows_trees(story.run):
        return None
    caption = (
        "Distance of each site's trained model to its group's model after the round, mean by "
        "group; large if the sites of a group differ. Sites alone have none."
    )
    title = "Distance to group model"
    return _by_group(story, "discrepancy", title, caption, "distance", lambda s: s.discrepancy)


def _by_group(
    story: Story, key: str, title: str, caption: str, unit: str, value: Value
) -> Picture | None:
    points = {
        one.round: {n: v for n, silo in one.silos.items() if math.isfinite(v := value(silo))}
        for one in story.run.rounds
    }
    points = {number: values for number, values in points.items() if values}
    if not points:
        return None
    draw = partial(charts.curves, _lines(story, points, scale=1.0), title=title, unit=unit)
    table = _mean_table(points, f"mean {title.lower()}", scale=1.0)
    return Picture(key, title, caption + thinned(len(points)), draw, table)


def _lines(
    story: Story, points: Mapping[int, Mapping[str, float]], scale: float = 100.0
) -> list[charts.Curve]:
    rounds = sorted(points)
    members: dict[tuple[str, str], list[str]] = {}
    for name in story.history.order({n for values in points.values() for n in values}):
        members.setdefault(story.place(name), []).append(name)
    lines = []
    for (letter, colour), names in members.items():
        values = np.array([[points[r].get(n, math.nan) for n in names] for r in rounds]) * scale
        known = np.flatnonzero(np.isfinite(values).any(axis=1))
        kept, rows = [rounds[i] for i in known.tolist()], values[known]
        if not kept:
            continue
        few = len(names) > 1 and sum(map(len, members.values())) <= MOST_NAMED
        named = (bool(letter) and few) or (not letter and 1 < len(names) <= MOST_NAMED_ALONE)
        if not story.many and (letter or len(names) > 1):
            for column, name in enumerate(names):
                one = [(r, v) for r, v in zip(kept, rows[:, column], strict=True) if np.isfinite(v)]
                x, y = thin([r for r, _ in one], [v for _, v in one])
                label = name if named else ""
                lines.append(charts.Curve(x, y, colour, label, tip=name, thin=bool(letter)))
        if named and not letter and not story.many:
            continue
        x, y = thin(kept, np.nanmean(rows, axis=1))
        band = None
        if story.many and len(names) > 1:
            band = tuple(thin(kept, np.nanpercentile(rows, q, axis=1))[1] for q in (10, 90))
        label = (
            f"group {letter}"
            if letter
            else (names[0] if len(names) == 1 else "mean of those alone")
        )
        lines.append(charts.Curve(x, y, colour, label, band=band))  # type: ignore[arg-type]
    return lines


def _mean_table(
    points: Mapping[int, Mapping[str, float]], what: str, scale: float = 100.0
) -> Table:
    rounds = sorted(points)
    rows = np.unique(np.linspace(0, len(rounds) - 1, min(len(rounds), 40)).round().astype(int))
    shown = [(rounds[i], points[rounds[i]]) for i in rows.tolist()]
    return Table(
        ("after round", "silos", what),
        [(str(n), str(len(own)), wire.readable(scale * mean_of(own.values()))) for n, own in shown],
    )
