"""Pictures of a run's costs: seconds and bytes, per phase and per silo."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial

import numpy as np

from coterie.pictures import charts
from coterie.pictures.page import Picture, Table
from coterie.pictures.style import LIGHT
from coterie.server.report.story import Story, bytes_of, top_rows
from coterie.strategies.rounds.reports import PhaseReport, SiloReport


def seconds_picture(story: Story) -> Picture | None:
    rounds = [seconds for one in story.run.rounds if (seconds := one.phase_seconds)]
    if not rounds:
        return None
    totals = Counter[str]()
    for seconds in rounds:
        totals.update(seconds)
    phases = [phase for phase, _ in totals.most_common()]
    mean = sum(totals.values()) / len(rounds)
    title = "Time per round"
    caption = f"Wall time by phase, mean over rounds; a round took {mean:.2f} s on average."
    rows = [charts.Bar(p, LIGHT["g0"], {"seconds": totals[p] / len(rounds)}) for p in phases]
    table = Table(
        ("phase", "seconds in total", "per round"),
        [(p, f"{totals[p]:.2f}", f"{totals[p] / len(rounds):.3f}") for p in phases],
    )
    draw = partial(charts.bars, rows, title=title, unit="seconds")
    return Picture("seconds", title, caption, draw, table)


def _per_silo(
    story: Story, values: Callable[[SiloReport], Mapping[str, float]]
) -> dict[str, dict[str, float]]:
    """Return silo → part → sum of the known values over rounds."""
    totals: dict[str, dict[str, float]] = {}
    for one in story.run.rounds:
        for name, silo in one.silos.items():
            own = totals.setdefault(name, {})
            for part, value in values(silo).items():
                if math.isfinite(value):
                    own[part] = own.get(part, 0.0) + value
    return {name: own for name, own in totals.items() if sum(own.values()) > 0}


def _beside(
    story: Story, value: Callable[[PhaseReport], float], text: Callable[[float], str]
) -> str:
    """Format the costs of each kind of work apart from training, over all rounds and silos."""
    kinds: dict[str, float] = {}
    for one in story.run.rounds_to_end():
        for kind, cost in one.phases.items():
            kinds[kind] = kinds.get(kind, 0.0) + value(cost)
    return ", ".join(f"{kind} {text(total)}" for kind, total in kinds.items() if total)


def _silo_bars(
    story: Story,
    key: str,
    title: str,
    caption: str,
    totals: Mapping[str, Mapping[str, float]],
    unit: str,
) -> Picture | None:
    if not totals:
        return None
    order = story.history.order(totals)
    shown, note = top_rows(order, lambda n: -sum(totals[n].values()), "sites with the most")
    rows = [charts.Bar(n, story.place(n)[1], totals[n]) for n in shown]
    parts = list(dict.fromkeys(part for own in totals.values() for part in own))
    table = Table(
        ("silo", *(f"{p}, {unit}" for p in parts)),
        [(n, *(f"{totals[n].get(p, 0.0):.4g}" for p in parts)) for n in order],
    )
    draw = partial(charts.bars, rows, title=title, unit=unit)
    return Picture(key, title, caption + note, draw, table)


def silo_seconds_picture(story: Story) -> Picture | None:
    """Draw each site's own seconds of training."""
    totals = _per_silo(story, lambda silo: {"training": silo.seconds})
    beside = _beside(story, lambda cost: cost.silo_seconds, lambda total: f"{total:.1f} s")
    caption = "The sites' training time in all rounds, without waiting and transport." + (
        f" Other work of all sites: {beside}." if beside else ""
    )
    title = "Training time per site"
    return _silo_bars(story, "silo-seconds", title, caption, totals, "seconds")


def bytes_picture(story: Story) -> Picture | None:
    totals = _per_silo(
        story,
        lambda silo: {
            "from the site": silo.bytes_received / 1e6,
            "to the site": silo.bytes_sent / 1e6,
        },
    )
    beside = _beside(story, lambda cost: cost.bytes_sent + cost.bytes_received, bytes_of)
    caption = "Models and updates of all rounds, in megabytes (10⁶ bytes)." + (
        f" Other messages of all sites: {beside}." if beside else ""
    )
    caption += _rounded_away(story)
    return _silo_bars(story, "bytes", "Data transferred per site", caption, totals, "MB")


def _rounded_away(story: Story) -> str:
    """Describe the loss in updates from a smaller wire format."""
    shares = [own.update_lost for one in story.run.rounds for own in one.silos.values()]
    lost = [share for share in shares if math.isfinite(share)]
    if not lost:
        return ""
    return (
        f" Updates came as differences in {story.run.config.get('wire-format')}: rounding removed "
        f"{100 * float(np.mean(lost)):.2g}% of one on average, at most {100 * max(lost):.2g}%; "
        "the rest was sent with the next."
    )
