"""Pictures of how alike the silos are: the matrix, FedGroup's embedding, FedCollab's structure."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from coterie.pictures import charts
from coterie.pictures.page import Picture, Table
from coterie.pictures.style import LIGHT
from coterie.server.report.model import Round
from coterie.server.report.story import MANY, Story, two_digits


@dataclass(frozen=True)
class Compared:
    """A square matrix over silos, from the round that recorded it."""

    round: int
    names: list[str]
    values: NDArray[np.float64]


def recorded(story: Story, key: str) -> Compared | None:
    """The last matrix of that name that a round holds."""
    for one in reversed(story.run.rounds):
        found = square_of(one, key)
        if found is not None:
            return found
    return None


def square_of(one: Round, key: str) -> Compared | None:
    structure = one.details.get("structure")
    holder = structure if isinstance(structure, dict) and key in structure else one.details
    names, rows = holder.get("compared"), holder.get(key)
    if not isinstance(names, list) or not isinstance(rows, list) or not names:
        return None
    values = np.array(
        [[math.nan if v is None else float(v) for v in row] for row in rows], dtype=float
    )
    if values.shape != (len(names), len(names)):
        raise ValueError(f"{key} must be {len(names)} × {len(names)}, got {values.shape}")
    return Compared(one.number, [str(name) for name in names], values)


def matrix_picture(story: Story) -> Picture | str | None:
    """Similarities or distances, ordered by group."""
    for key, measure, limits in (
        ("distances", "distance of the silos' data, 0 is alike", (0.0, 1.0)),
        ("similarity", "cosine of the silos' updates, 1 is alike", (-1.0, 1.0)),
    ):
        found = recorded(story, key)
        if found is not None:
            return _matrix(story, found, key, measure, limits)
    if story.run.strategy in ("hcct", "fedgroup", "fedcollab"):
        return "no matrix of similarities or distances: the record holds none"
    return None


def _matrix(
    story: Story, found: Compared, key: str, measure: str, limits: tuple[float, float]
) -> Picture:
    names = story.order(found.names)
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
    title = "How alike the silos are"
    inside = np.zeros(values.shape, dtype=bool)
    for band in bands:
        inside[band.start : band.stop, band.start : band.stop] = True
    off = ~np.eye(len(names), dtype=bool)
    within, between = values[inside & off], values[~inside & off]
    caption = (
        f"{measure[0].upper()}{measure[1:]}; after round {found.round}, rows and columns by group,"
        " each group framed."
        + (f" Inside groups {np.nanmean(within):.2f} on average" if within.size else "")
        + (f", between them {np.nanmean(between):.2f}." if within.size and between.size else "")
        + (" Names are left out because there are many." if len(names) > MANY else "")
    )
    table = Table(
        ("silo", *names),
        [(n, *(two_digits(v) for v in row)) for n, row in zip(names, values, strict=True)],
    )
    return Picture(
        "matrix",
        title,
        caption,
        lambda layout: charts.matrix(
            values,
            names,
            bands,
            layout=layout,
            title=title,
            measure=key.rstrip("s") if key == "distances" else "cosine",
            limits=limits,
        ),
        table if len(names) <= MANY else None,
    )


def embedding_picture(story: Story) -> Picture | str | None:
    """FedGroup's embedding of the cold start."""
    if story.run.strategy != "fedgroup":
        return None
    if story.run.config.get("measure", "edc") != "edc":
        return None
    from coterie.strategies.partition.fedgroup import edc

    one = next((r for r in story.run.rounds if square_of(r, "similarity") is not None), None)
    found = None if one is None else square_of(one, "similarity")
    if one is None or found is None:
        return "no embedding: the record holds no updates that were compared"
    names = found.names
    norms = np.array(one.details["norms"], dtype=float)
    members = one.details.get("members")
    directions = len(members) if isinstance(members, list) else 2
    points = edc(
        found.values * np.outer(norms, norms), num_directions=max(1, min(directions, len(names)))
    )
    shares = ""
    axes = ("similarity with direction 1", "similarity with direction 2")
    if points.shape[1] > 2:
        centred = points - points.mean(axis=0)
        left, spread, _ = np.linalg.svd(centred, full_matrices=False)
        total = float((spread**2).sum()) or 1.0
        axes = ("first principal axis", "second principal axis")
        shares = (
            f" Of {points.shape[1]} directions, the two principal axes show"
            f" {100 * float((spread[:2] ** 2).sum()) / total:.0f} % of the spread."
        )
        points = left[:, :2] * spread[:2]
    elif points.shape[1] == 1:
        points = np.column_stack([points[:, 0], np.zeros(len(points))])
        axes = ("similarity with the one direction", "")
    separation = next(
        (
            o.details["separation"]
            for o in story.run.rounds
            if isinstance(o.details.get("separation"), float)
        ),
        None,
    )
    title = "Where the cold start put each silo"
    labels = [(name, *story.place(name)) for name in names]
    caption = (
        f"Every point is a silo's pre-training of round {one.number}, placed by its similarities"
        " with the main directions; near silos learnt alike."
        + shares
        + (
            f" Separation of the groups (silhouette): {separation:.2f}."
            if separation is not None
            else ""
        )
        + (" Letters mark the groups' middles." if len(names) > MANY else "")
    )
    plane = [(float(x), float(y)) for x, y in points]
    return Picture(
        "embedding",
        title,
        caption,
        lambda layout: charts.scatter(
            plane, labels, layout=layout, title=title, axes_names=axes, named=len(names) <= MANY
        ),
        Table(
            ("silo", "group", "x", "y"),
            [
                (n, g or "alone", f"{x:.3f}", f"{y:.3f}")
                for (n, g, _), (x, y) in zip(labels, plane, strict=True)
            ],
        ),
    )


def structure_picture(story: Story) -> Picture | str | None:
    """FedCollab's bound of the chosen structure beside others, and the interval of c."""
    if story.run.strategy != "fedcollab":
        return None
    found = [one.details.get("structure") for one in story.run.rounds]
    structures = [one for one in found if isinstance(one, dict) and one.get("bound")]
    if not structures:
        return "no bounds of other structures and no interval of c: the record holds none"
    structure = structures[-1]
    names = {
        "chosen": "chosen",
        "second-best": "next best",
        "alone": "all alone",
        "together": "all together",
    }
    values = {
        label: float(structure["bound"][key])
        for key, label in names.items()
        if structure["bound"].get(key) is not None
    }
    rows = [
        charts.Bar(label, LIGHT["g0"] if label == "chosen" else LIGHT["alone"], {"L": value})
        for label, value in sorted(values.items(), key=lambda item: item[1])
    ]
    text = _interval_text(structure)
    second = structure.get("second-groups")
    if isinstance(second, list):
        text += (
            " The next best: " + " | ".join(", ".join(map(str, group)) for group in second) + "."
        )
    title = "The structure beside others"
    return Picture(
        "structure",
        title,
        "FedCollab's error bound L of the chosen groups, of the next best, of all alone and of all"
        " together; smaller is better." + text,
        lambda layout: charts.bars(rows, layout=layout, title=title, unit="error bound L"),
        Table(("structure", "L"), [(label, f"{value:.6g}") for label, value in values.items()]),
    )


def _interval_text(structure: Mapping[str, Any]) -> str:
    """In which c the answer stays the same."""
    interval, c = structure.get("c-interval"), structure.get("c")
    if structure.get("kept") is True:
        return " Another structure has a smaller bound now; nobody else moves (newcomers=keep)."
    if not isinstance(interval, list) or len(interval) != 2:
        return ""
    if interval[0] is None:  # older records: there was none
        return ""
    low, high = (math.inf if end is None else float(end) for end in interval)
    text = " The answer stays the same for c from"
    text += f" {low:.3g} to {'∞' if math.isinf(high) else f'{high:.3g}'}"
    return text + (f"; this run has c = {c:g}." if isinstance(c, int | float) else ".")
