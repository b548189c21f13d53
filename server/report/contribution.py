"""The page of a run that measured what each group lost without each of its silos."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass

from coterie import wire
from coterie.features.evaluation.answers import Difference
from coterie.features.evaluation.coordinator import Judgement
from coterie.features.evaluation.numbers import HALF_WIDTH, standard_error
from coterie.pictures.page import Page, Table
from coterie.server.report.story import NO_NUMBER
from coterie.server.runs.contribution import AGAIN
from coterie.server.runs.record import Run

NOT_A_PAYMENT = (
    "Do not pay by these figures. They are what one group lost after these rounds on its other "
    "silos' data. Two silos with the same data each contribute nothing, although together they may "
    "contribute much."
)


@dataclass(frozen=True)
class Contribution:
    """What a group lost without a silo.

    Attributes:
        lost: mean over the other silos of the error without it less that with it: above 0, the
            silo brings something; NaN if unknown.
        low, high: 95% interval, of new test samples of these silos and of chance in training.
        measured_by: the silos whose test data it was measured on.
        why: why it is unknown, or empty.
    """

    group: str
    silo: str
    lost: float = math.nan
    low: float = math.nan
    high: float = math.nan
    measured_by: tuple[str, ...] = ()
    why: str = ""

    @property
    def sure(self) -> bool:
        """Whether the interval is without zero."""
        return self.low > 0 or self.high < 0


def contributions(judgement: Judgement) -> list[Contribution]:
    """Return every silo's contribution to its group, by group and name."""
    found = []
    for base in judgement.models:
        if base.name.partition(" ")[2]:
            continue
        noise = training_noise(judgement, base.name)
        for silo in base.group:
            found.append(_contribution(judgement, base.name, silo, noise))
    return found


def training_noise(judgement: Judgement, group: str) -> float:
    """Return the deviation that other random draws in training give a difference of two errors.

    It is that between the group's two trainings, less what the test samples explain: the root mean
    square over silos; NaN if no silo measured both.
    """
    squares = [
        max(0.0, one.value**2 - standard_error(one.low, one.high) ** 2)
        for _, one in _differences(judgement, group, f"{group} {AGAIN}")
    ]
    return math.sqrt(sum(squares) / len(squares)) if squares else math.nan


def _contribution(judgement: Judgement, group: str, silo: str, noise: float) -> Contribution:
    own = [
        (name, one)
        for name, one in _differences(judgement, group, f"{group} without {silo}")
        if name != silo
    ]
    if not own:
        silent = {name: why for name, why in judgement.silent.items() if name != silo}
        why = wire.reasons(silent) or "no other silo of the group shares its error (share_metrics)"
        return Contribution(group, silo, why=why)
    lost = sum(one.value for _, one in own) / len(own)
    rows = math.sqrt(sum(standard_error(one.low, one.high) ** 2 for _, one in own)) / len(own)
    half = HALF_WIDTH * math.hypot(rows, noise)
    names = tuple(name for name, _ in own)
    return Contribution(group, silo, lost, lost - half, lost + half, names)


def _differences(judgement: Judgement, first: str, second: str) -> Iterator[tuple[str, Difference]]:
    """Yield each silo's difference of the models ``second`` less ``first``, with an interval."""
    for silo, answer in sorted(judgement.answers.items()):
        for one in answer.differences:
            known = one.low is not None and one.high is not None
            if known and (one.first, one.second) == (first, second):
                yield silo, one


def contribution_summary(judgement: Judgement, run: Run) -> str:
    """Return the figures as JSON text."""
    groups = [one for one in judgement.models if not one.name.partition(" ")[2]]
    found = {
        "task": judgement.task,
        "parent": judgement.parent,
        "rounds": run.planned_rounds,
        "metric": run.lead.metric,
        "unit": run.lead.unit,
        "groups": [
            {
                "group": one.name,
                "members": list(one.group),
                "noise": _number(training_noise(judgement, one.name)),
            }
            for one in groups
        ],
        "contributions": [
            {
                "silo": one.silo,
                "group": one.group,
                "lost": _number(one.lost),
                "low": _number(one.low),
                "high": _number(one.high),
                "measured-by": list(one.measured_by),
                "why": one.why,
            }
            for one in contributions(judgement)
        ],
        "silent": dict(judgement.silent),
    }
    return json.dumps(found, indent=1, ensure_ascii=False) + "\n"


def _number(value: float) -> float | None:
    return value if math.isfinite(value) else None


def build_contribution_page(judgement: Judgement, run: Run) -> Page:
    """Return the complete page, ready to be rendered."""
    lead, found = run.lead, contributions(judgement)
    rows = [
        (
            *(one.silo, one.group),
            lead.gain(one.lost),
            NO_NUMBER if one.why else f"{lead.gain(one.low)} to {lead.gain(one.high)}",
            ", ".join(one.measured_by) or one.why,
        )
        for one in found
    ]
    head = ("silo", "group", f"lost without it ({lead.points})", "95%", "measured on the data of")
    noise = {one.group: training_noise(judgement, one.group) for one in found}
    return Page(
        title=f"What each silo contributes to {judgement.parent}",
        subtitle=f"run {run.name} · task {judgement.task} · {run.planned_rounds} rounds",
        lead=_lead(found),
        detail=NOT_A_PAYMENT,
        figures={"silos": str(len(found)), "groups": str(len(noise))},
        tables={
            "Lost without the silo": Table(head, rows, cards=True),
            "Chance in training": Table(
                ("group", f"deviation between two equal trainings ({lead.points})"),
                [(group, lead.gain(value, sign="")) for group, value in sorted(noise.items())],
            ),
        },
        notes=[
            f"Every group was trained by FedAvg for {run.planned_rounds} rounds from the initial "
            "model, as a whole and without each silo. A figure above 0 is what the remaining silos "
            "lost on average on their test data. The interval is for new samples of these silos, "
            "and includes chance in training. Intervals are not adjusted for the number of silos.",
        ],
        commands={"Measure again": f"coterie contribution {judgement.parent}"},
    )


def _lead(found: list[Contribution]) -> str:
    bring = [one.silo for one in found if one.sure and one.lost > 0]
    harm = [one.silo for one in found if one.sure and one.lost < 0]
    text = (
        f"Without {', '.join(bring)}, the other silos of its group lost beyond chance."
        if bring
        else "No group lost beyond chance without any one of its silos."
    )
    return text + (f" They gained without {', '.join(harm)}." if harm else "")
