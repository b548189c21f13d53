"""Progress messages of a run, of ``auto`` and of trees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from coterie.server.report.race import lead_of_race
from coterie.server.report.race_words import groups_text, listed, titles
from coterie.server.runs.record import Entrant, Round, Verdict
from coterie.server.runs.record.metrics import Lead


def activity(phase: str, racing: int) -> str:
    """Describe the work of a round."""
    return {
        "look": "looking for groups, all train alone",
        "race": f"racing {racing} partitions",
    }.get(phase, "")


def news(one: Round, before: str, lead: Lead) -> list[str]:
    """Return the news of a round, one line each: a race, dropped partitions, a verdict, newcomers.

    ``one`` may be the report that follows the last round; ``before`` is the previous phase.
    """
    grouping, lines, lead = one.grouping, [], lead_of_race(lead, one)
    if grouping.phase == "race" and before != "race":
        names = ", ".join(titles(grouping.entrants))
        lines.append(f"a race opens between {len(grouping.entrants)} partitions: {names}")
    if out := grouping.dropped:
        lines.append(f"out of the race, worse beyond chance: {_standing_list(out, lead)}")
    if verdict := grouping.verdict:
        lines.append(_verdict_line(verdict, lead))
    for name, own in grouping.placed.items():
        joins = f"joins {listed(own.group)}" if own.joins else "stays alone"
        lines.append(f"newcomer {name} {joins}")
    return lines


def of_trees(one: Round, unsummed: Mapping[str, str]) -> list[str]:
    """Return the news of trees, one line each; ``unsummed`` is new: silo → why it is in no sum."""
    return [f"{name} is in no sum of trees: {why}" for name, why in unsummed.items()] + [
        f"trees of {group}: {count} have grown, because the group lost rounds or began late. "
        "`coterie run continue` adds rounds for the others"
        for group, count in one.grouping.unfinished.items()
        if not one.final
    ]


def _verdict_line(verdict: Verdict, lead: Lead) -> str:
    title = titles(verdict.entrants)[verdict.winner]
    text = f"the race is {'over' if verdict.complete else 'ended early'}: {title}"
    if not verdict.judges:
        return f"{text}, as no silo sent held-out errors"
    others = [
        e for e in verdict.entrants if e is not verdict.chosen and e.dropped in (0, verdict.round)
    ]
    text += f" {groups_text(verdict)}, held-out {lead.title} {lead.text(verdict.chosen.error)}"
    text += f"; others: {_standing_list(others, lead)}" if others else ""
    own = verdict.own
    return text + (f"; keeping the model trained alone: {listed(own)}" if own else "")


def _standing_list(entrants: Sequence[Entrant], lead: Lead) -> str:
    names = titles(entrants)
    return ", ".join(f"{n} {lead.text(e.error)}" for n, e in zip(names, entrants, strict=True))
