"""Pictures of HCCT: utilities, the α in which silos stay, the partitions along α."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import numpy as np

from coterie import wire
from coterie.pictures import charts
from coterie.pictures.page import Picture, Table
from coterie.pictures.style import LIGHT, Drawing, Layout
from coterie.server.report.explain import Reason, alpha_of, end_text, explain
from coterie.server.report.similarity import last_similarity
from coterie.server.report.story import MANY, Story, decimals, most_telling


def _reasons(story: Story) -> tuple[int, dict[str, Reason]] | None:
    """What ``coterie explain`` knows, after the last round that holds similarities."""
    found = last_similarity(story.run) if story.run.strategy == "hcct" else None
    if found is None:
        return None
    number, reasons = explain(story.run, number=found[0].round)
    by_name = {reason.silo: reason for reason in reasons}
    return number, {name: by_name[name] for name in story.history.order(by_name)}


def utilities_picture(story: Story) -> Picture | str | None:
    """HCCT's utilities."""
    found = _reasons(story)
    if found is None:
        missing = "no utilities: the record holds no similarities"
        return missing if story.run.strategy == "hcct" else None
    number, reasons = found
    which = "silos for which another place would cost least"
    shown, note = most_telling(list(reasons.values()), lambda r: -r.gain, which)
    rows = [
        (
            r.silo,
            story.place(r.silo)[1],
            {"alone": r.alone, "in its group": r.inside, "best other": r.outside},
        )
        for r in shown
    ]
    title = "Why each silo is where it is"
    caption = (
        f"HCCT's utility of every silo after round {number}, −α/D + cosine: alone, in its group,"
        " and in the best other group. Groups are chosen for the largest total, so a single silo"
        f" may prefer another.{note}"
    )
    table = Table(
        ("silo", "group", "cosine", "alone", "in its group", "best other", "total if moved"),
        [
            (
                n,
                story.place(n)[0] or "alone",
                *(decimals(v, 2) for v in (r.cosine, r.alone, r.inside, r.outside, r.gain)),
            )
            for n, r in reasons.items()
        ],
    )
    draw = partial(charts.dots, rows, title=title, unit="utility", kept="in its group")
    return Picture("utilities", title, caption, draw, table)


def stay_picture(story: Story) -> Picture | None:
    """The interval of α in which each silo would stay."""
    found = _reasons(story)
    if found is None:
        return None
    number, reasons = found
    rows = [charts.Span(n, story.place(n)[1], *r.stay, r.alpha) for n, r in reasons.items()]
    table = Table(
        ("silo", "stays from α", "to α", "α now"),
        [(r.silo, f"{r.low:.3g}", end_text(r.high), f"{r.at:.3g}") for r in rows],
    )
    rows, note = most_telling(rows, _margin, "that are nearest to an end")
    title = "How firm each silo's place is"
    caption = (
        "The interval of α, the preference for more data, in which no move of this silo alone"
        f" would be better, after round {number}. The mark is the present α: near an end, a small"
        f" change moves the silo.{note}"
    )
    return Picture("stay", title, caption, _spans(rows, title), table)


def _spans(rows: list[charts.Span], title: str) -> Callable[[Layout], Drawing]:
    return partial(charts.spans, rows, title=title, unit="α (logarithmic)", place="α")


def _margin(row: charts.Span) -> float:
    """How many times α can change before the silo moves, as a logarithm."""
    if math.isnan(row.low) or row.at <= 0:
        return -1.0
    ends = [abs(math.log(end / row.at)) for end in (row.low, row.high) if 0 < end < math.inf]
    return min(ends, default=math.inf)


def path_picture(story: Story) -> Picture | None:
    """The partitions along α."""
    from coterie.strategies.partition.coalition import Solver
    from coterie.strategies.partition.hcct import alpha_path

    found = last_similarity(story.run) if story.run.strategy == "hcct" else None
    if found is None or len(found[1].names) > MANY:
        return None
    one, (names, cosines) = found[0], (found[1].names, found[1].values)
    norms = one.grouping.norms
    sizes = [story.run.silos[name].num_examples for name in names]
    solver: Solver = "optimal" if len(names) <= 12 else "agglomerative"
    path = alpha_path(cosines * np.outer(norms, norms), sizes, solver=solver)
    lasting = [s for s in path if s.ratio >= 1.15 or len(s.groups) in (1, len(sizes))]
    at = alpha_of(story.run, one)
    rows = [
        charts.Span(
            wire.counted(len(s.groups), "group"),
            LIGHT["g0"] if s.alpha_low <= at <= s.alpha_high else LIGHT["alone"],
            s.alpha_low,
            s.alpha_high,
            at,
        )
        for s in lasting
    ]
    title = "What other α would give"
    caption = (
        f"The groups that the updates of round {one.round} give, from all alone (small α) to all"
        " together (large α), without those that only a narrow range of α gives."
    )
    table = Table(
        ("groups", "from α", "to α", "who"),
        [
            (
                str(len(s.groups)),
                f"{s.alpha_low:.3g}",
                end_text(s.alpha_high),
                " | ".join(", ".join(names[i] for i in g) for g in s.groups),
            )
            for s in lasting
        ],
    )
    return Picture("path", title, caption, _spans(rows, title), table)
