"""What the boosted trees of each group split by: columns' shares of the reduction of the loss."""

from __future__ import annotations

from functools import partial

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open

from coterie.pictures import charts
from coterie.pictures.page import Picture, Table
from coterie.server.report.story import Story
from coterie.server.runs.record import MODELS, Run

MOST_DRAWN = 24
"""Most bars."""


def importance_picture(story: Story) -> Picture | None:
    """Draw the inputs by which each group's trees have reduced the loss most."""
    found: dict[str, tuple[str, NDArray[np.float64]]] = {}
    for name in story.history.order(story.run.model_hashes):
        letter, colour = story.place(name)
        label = f"group {letter}" if letter else name
        if label not in found and (shares := _shares(story.run, name)) is not None:
            found[label] = colour, shares
    if not found:
        return None
    each = max(MOST_DRAWN // len(found), 1)
    rows: list[charts.Bar] = []
    cells = []
    for label, (colour, shares) in found.items():
        for place, column in enumerate(np.argsort(-shares, kind="stable").tolist()):
            if not shares[column]:
                break
            cells.append((label, f"input {column + 1}", f"{100 * shares[column]:.1f}"))
            if place < each and len(rows) < MOST_DRAWN:
                parts = {"share": 100 * float(shares[column])}
                rows.append(charts.Bar(f"{label}: input {column + 1}", colour, parts))
    details = story.run.rounds[-1].details
    title, unit = "What trees split by", "share of the reduction of the loss, %"
    caption = (
        "Inputs in the model's order; the coordinator does not know their names, each site's "
        "model card has them."
    )
    if any("at-home" in one for one in (details, details.get("boosted", {}))):
        caption += (
            " Trees of a site that is alone stay there: its model card has what they split by."
        )
    draw = partial(charts.bars, rows, title=title, unit=unit)
    return Picture("importance", title, caption, draw, Table(("trees of", "input", unit), cells))


def _shares(run: Run, silo: str) -> NDArray[np.float64] | None:
    """Return the shares (columns,) in a silo's model; None without trees that split."""
    try:
        with safe_open(run.folder / MODELS / f"{silo}.safetensors", framework="np") as file:
            if not {"gain", "feature", "missing_left"} <= set(file.keys()):
                return None
            gain = np.asarray(file.get_tensor("gain"), np.float64)
    except (OSError, SafetensorError):
        return None
    total = float(gain.sum())
    return gain / total if gain.ndim == 1 and 0 < total < np.inf else None
