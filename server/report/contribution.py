"""The page of a run that measured what each group lost without each of its silos."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from statistics import fmean
from typing import Any

from coterie import wire
from coterie.features.evaluation.answers import Difference
from coterie.features.evaluation.coordinator import Given, Judgement
from coterie.features.evaluation.numbers import standard_error
from coterie.pictures.page import Page, Table
from coterie.server.report.story import NO_NUMBER
from coterie.server.runs.contribution import name_of
from coterie.server.runs.record import Run
from coterie.server.runs.record.metrics import Lead
from coterie.server.runs.record.values import plain
from coterie.strategies.plain.leave_one_out import TIMES

NOT_A_PAYMENT = (
    "Do not pay by these figures. They are what one group lost after these rounds on its other "
    "silos' data. Two silos with the same data each contribute nothing, although together they may "
    "contribute much; so figures change if silos join or leave."
)


@dataclass(frozen=True)
class Contribution:
    """What a group lost without a silo.

    Attributes:
        lost: mean over the other silos of the error without it less that with it: above 0, the
            silo brings something; NaN if unknown.
        low, high: 95% interval, of new test samples of these silos and of chance in training.
        measured_by: the silos whose test data it was measured on.
        if_left: another silo → what it would be if that one had left the group before.
        why: why it is unknown, or empty.
    """

    group: str
    silo: str
    lost: float = math.nan
    low: float = math.nan
    high: float = math.nan
    measured_by: tuple[str, ...] = ()
    if_left: Mapping[str, float] = field(default_factory=dict)
    why: str = ""

    @property
    def sure(self) -> bool:
        """Whether the interval is without zero."""
        return self.low > 0 or self.high < 0


@dataclass(frozen=True)
class Noise:
    """Chance in training: how much equal trainings of a group differ.

    Attributes:
        deviation: root mean square of the mean error of one less that of another, also by chance of
            the test samples; NaN if unknown.
        pairs: of equal trainings.
    """

    deviation: float
    pairs: int


def groups_of(judgement: Judgement) -> list[Given]:
    """Return the models of whole groups, trained the first time."""
    return [one for one in judgement.models if " " not in one.name]


def contributions(judgement: Judgement) -> list[Contribution]:
    """Return every silo's contribution to its group, by group and name."""
    found = []
    for base in groups_of(judgement):
        noise = training_noise(judgement, base)
        found += [_contribution(judgement, base, silo, noise) for silo in base.group]
    return found


def training_noise(judgement: Judgement, base: Given) -> Noise:
    """Return chance in training, from all equal trainings of a group and of its parts."""
    squares = []
    for left_out in ((), *((name,) for name in base.group)):
        names = [name_of(base.name, left_out, time) for time in range(TIMES)]
        for first, second in combinations(names, 2):
            if found := [one.value for _, one in _differences(judgement, first, second)]:
                squares.append(fmean(found) ** 2)
    return Noise(math.sqrt(fmean(squares)) if squares else math.nan, len(squares))


def _contribution(judgement: Judgement, base: Given, silo: str, noise: Noise) -> Contribution:
    letter, own = base.name, _lost(judgement, base.name, silo)
    if not own:
        silent = {name: why for name, why in judgement.silent.items() if name != silo}
        why = wire.reasons(silent) or "no other silo of the group shares its error (share_metrics)"
        return Contribution(letter, silo, why=why)
    lost = _mean(own)
    after = {one: _lost(judgement, letter, silo, one) for one in base.group if one != silo}
    if_left = {one: _mean(found) for one, found in after.items() if found}
    # A silo measures all trainings on the same samples: repeating does not make them more.
    rows = [fmean(standard_error(one.low, one.high) for one in found) for found in own.values()]
    deviation = math.hypot(math.hypot(*rows) / len(rows), noise.deviation / math.sqrt(TIMES))
    from scipy.special import stdtrit  # here, because every report loads this module

    half = float(stdtrit(noise.pairs, 0.975)) * deviation if noise.pairs else math.nan
    return Contribution(letter, silo, lost, lost - half, lost + half, tuple(sorted(own)), if_left)


def _lost(judgement: Judgement, letter: str, silo: str, *gone: str) -> dict[str, list[Difference]]:
    """Return each other silo's differences of the group without a silo less that with it.

    ``gone`` have left the group, in both.
    """
    own: dict[str, list[Difference]] = {}
    for time in range(TIMES):
        without = name_of(letter, (silo, *gone), 0 if gone else time)
        for name, one in _differences(judgement, name_of(letter, gone, time), without):
            if name not in (silo, *gone):
                own.setdefault(name, []).append(one)
    return own


def _mean(own: Mapping[str, Sequence[Difference]]) -> float:
    return fmean(fmean(one.value for one in found) for found in own.values())


def _differences(judgement: Judgement, first: str, second: str) -> Iterator[tuple[str, Difference]]:
    """Yield each silo's difference of the models ``second`` less ``first``, with an interval."""
    for silo, answer in sorted(judgement.answers.items()):
        for one in answer.differences:
            known = one.low is not None and one.high is not None
            if known and (one.first, one.second) == (first, second):
                yield silo, one


def contribution_summary(judgement: Judgement, run: Run) -> dict[str, Any]:
    """Return the figures, for JSON."""
    return {
        "task": judgement.task,
        "parent": judgement.parent,
        "rounds": run.planned_rounds,
        "metric": run.lead.metric,
        "unit": run.lead.unit,
        "groups": [
            {
                "group": one.name,
                "members": list(one.group),
                "noise": training_noise(judgement, one).deviation,
            }
            for one in groups_of(judgement)
        ],
        "contributions": [plain(one) for one in contributions(judgement)],
        "silent": dict(judgement.silent),
    }


def build_contribution_page(judgement: Judgement, run: Run) -> Page:
    """Return the complete page, ready to be rendered."""
    lead, found = run.lead, contributions(judgement)
    rows = [
        (
            *(one.silo, one.group),
            lead.gain(one.lost),
            NO_NUMBER if one.why else f"{lead.gain(one.low)} to {lead.gain(one.high)}",
            _if_left(one, lead),
            ", ".join(one.measured_by) or one.why,
        )
        for one in found
    ]
    head = (
        *("silo", "group", f"lost without it ({lead.points})", "95%"),
        *("if another had left", "measured on the data of"),
    )
    noise = {one.name: training_noise(judgement, one) for one in groups_of(judgement)}
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
                [(name, lead.gain(one.deviation, sign="")) for name, one in sorted(noise.items())],
            ),
        },
        notes=[
            f"Every group was trained by FedAvg for {run.planned_rounds} rounds from the initial "
            "model, as a whole and without each silo. A figure above 0 is what the remaining silos "
            "lost on average on their test data. The interval is for new samples of these silos, "
            "and includes chance in training. Intervals are not adjusted for the number of silos. "
            "If another silo had left the group before, the figure would be between those of the "
            "next column, which also differ by chance; silos that join change it as much.",
        ],
        commands={"Measure again": f"coterie contribution {judgement.parent}"},
    )


def _if_left(one: Contribution, lead: Lead) -> str:
    """Return the smallest and the largest figure if another silo had left, and which one."""
    ordered = sorted(one.if_left, key=lambda name: one.if_left[name])
    ends = dict.fromkeys([*ordered[:1], *ordered[-1:]])
    said = " to ".join(f"{lead.gain(one.if_left[name])} ({name})" for name in ends)
    return said or NO_NUMBER


def _lead(found: list[Contribution]) -> str:
    bring = [one.silo for one in found if one.sure and one.lost > 0]
    harm = [one.silo for one in found if one.sure and one.lost < 0]
    text = (
        f"Without {', '.join(bring)}, the other silos of its group lost beyond chance."
        if bring
        else "No group lost beyond chance without any one of its silos."
    )
    return text + (f" They gained without {', '.join(harm)}." if harm else "")
