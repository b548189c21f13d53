"""Convert a run and its events to and from JSON: ``run.json`` and the lines of ``events.jsonl``.

Input may be damaged: each invalid value is added to a list of losses, its field has the default,
and everything else is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from coterie import wire
from coterie.server.runs.record.contents import Budget, Evaluations, Event, Round, Run, SiloFacts
from coterie.server.runs.record.metrics import mean_accuracy
from coterie.server.runs.record.values import Fields, clean_within, known, plain
from coterie.strategies.rounds.reports import PhaseReport, SiloReport

FORMAT = 1
ROUND_KEYS = frozenset(
    {
        "round", "groups", "joined", "left", "left-out", "seconds", "phases", "silos",
        "evaluation", "evaluation-after", "evaluated-round", "event", "at", "refused",
        "personalised", "metrics", "train-metrics", "ended-early",
    }
)  # fmt: skip
"""Keys of a round that belong to the loop; all others are the strategy's."""
OF_UPDATES = ("update-norm", "update-lost", "discrepancy")
FINAL_KEYS = frozenset(
    {"final-evaluation", "final-groups", "final-phases", "final-details", "ended-early"}
)
"""Keys of a run; at least one is present if anything followed its last round."""


# ---------------------------------------------------------------- a round


def _round_of(fields: Fields, *, final: bool = False) -> Round:
    fields.place = f"round {fields.whole('round')}: "
    return fields.read(
        Round,
        personalised={name: own[:2] for name, own in fields.evaluation("personalised").items()},
        details={k: clean_within(v) for k, v in fields.values.items() if k not in ROUND_KEYS},
        final=final,
        after=fields.evaluation("evaluation-after"),
    )


def plain_round(one: Round) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "round": one.round,
        "groups": one.groups,
        "joined": one.joined,
        "left": one.left,
        "left-out": dict(one.left_out),
        "seconds": dict(one.seconds),
        "phases": plain(one.phases),
        "silos": {name: _plain_silo(own) for name, own in one.silos.items()},
    }
    if one.personalised:
        items = one.personalised.items()
        entry["personalised"] = {n: {"loss": known(x), "error": known(e)} for n, (x, e) in items}
    entry |= {"ended-early": one.ended_early} if one.ended_early else {}
    entry |= one.details
    if one.evaluation:
        entry["evaluated-round"] = one.evaluated_round
        entry["evaluation"] = _plain_evaluation(one.evaluation)
    for key, by_silo in (("train-metrics", one.train_metrics), ("metrics", one.metrics)):
        entry |= {key: {name: dict(own) for name, own in by_silo.items()}} if by_silo else {}
    return entry | ({"evaluation-after": _plain_evaluation(one.after)} if one.after else {})


def _plain_silo(own: SiloReport) -> dict[str, Any]:
    values: dict[str, Any] = plain(own)
    return {k: v for k, v in values.items() if v is not None or k not in OF_UPDATES}


def _plain_evaluation(evaluation: Evaluations) -> dict[str, Any]:
    return {
        name: {"loss": known(loss), "error": known(error), "num-examples": count}
        for name, (loss, error, count) in evaluation.items()
    }


# ---------------------------------------------------------------- a run


def run_of(record: object, *, folder: Path = Path(), lost: list[str] | None = None) -> Run:
    """Parse a run from the content of its ``run.json``.

    Descriptions of damaged values are added to ``lost``.
    """
    fields = Fields(record, "", [] if lost is None else lost)
    rounds = tuple(_rounds(fields))
    return fields.read(
        Run,
        folder=folder,
        status=fields.text("status") or "unknown",
        metric=fields.text("metric") or "error",
        rounds=rounds,
        initial=fields.evaluation("initial-evaluation"),
        final=_final_of(fields, max((one.round for one in rounds), default=0)),
    )


def _rounds(fields: Fields) -> Iterator[Round]:
    for entry in fields.of("rounds", list):
        number = entry.get("round") if isinstance(entry, dict) else None
        if type(number) is int and number >= 1:
            yield _round_of(Fields(entry, "", fields.lost))
        else:
            fields.lost.append("a damaged entry of a round was left out")


def _final_of(fields: Fields, last: int) -> Round | None:
    if not FINAL_KEYS & fields.values.keys():
        return None
    return Round(
        round=last,
        groups=fields.groups("final-groups"),
        evaluated_round=last,
        evaluation=fields.evaluation("final-evaluation"),
        metrics=fields.figures("final-metrics"),
        phases=fields.named("final-phases", PhaseReport),
        details=clean_within(fields.of("final-details", dict)),
        ended_early=fields.text("ended-early"),
        final=True,
    )


def json_of(run: Run, rounds: Iterable[str]) -> str:
    """Return a record with one line per key and per round: long runs stay readable.

    ``rounds`` has the JSON of the run's rounds, from ``line_of``.
    """
    lines = [f"{line_of(key)}: {line_of(value)}" for key, value in _plain(run).items()]
    lines.append('"rounds": [\n' + ",\n".join(rounds) + "\n]")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def line_of(value: Any) -> str:
    """Return a value as JSON in one line, including numpy values from a strategy."""
    return json.dumps(value, default=_plain_scalar)


def _plain_scalar(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _plain(run: Run) -> dict[str, Any]:
    final, completed = run.final or Round(0), run.status == "completed"
    errors = run.final_errors if completed else {}
    always = {
        "format": FORMAT,
        "run-id": run.run_id,
        "status": run.status,
        "started": run.started,
        "config": dict(run.config),
        "versions": dict(run.versions),
        "silos": {name: _plain_facts(facts) for name, facts in run.silos.items()},
        "refused": dict(run.refused),
    }
    where_known = {
        "metric": run.metric if run.metric != wire.ERROR else None,
        "unit": run.unit or None,
        "resumed": plain(run.resumed) or None,
        "seconds-to-first-training": known(run.seconds_to_first_training),
        "initial-evaluation": _plain_evaluation(run.initial) or None,
        "final-phases": plain(final.phases) or None,
        "final-evaluation": _plain_evaluation(final.evaluation) or None,
        "final-metrics": {name: dict(own) for name, own in final.metrics.items()} or None,
        "final-groups": final.groups if final.evaluation else None,
        "final-details": _news(final, run.rounds[-1:]) or None,
        "ended-early": final.ended_early or None,
        "error": run.error or None,
        "seconds": known(run.seconds),
        "model-hashes": dict(run.model_hashes) if completed else None,
        "mean-accuracy": mean_accuracy(errors) if errors and run.metric == wire.ERROR else None,
        "mean-metric": run.lead.value(1 - mean_accuracy(errors)) if errors else None,
        "collaboration": plain(run.collaboration),
    }
    return always | {key: value for key, value in where_known.items() if value is not None}


def _plain_facts(facts: SiloFacts) -> dict[str, Any]:
    """Return JSON values; ``private`` and ``release`` only if set."""
    return {k: v for k, v in plain(facts).items() if v or k not in ("private", "release")}


def _news(final: Round, last: Iterable[Round]) -> dict[str, Any]:
    """Return details after the last round that are new or changed, without matrices."""
    before: dict[str, Any] = {}
    for one in last:
        before |= one.grouping.without_matrices()
    now = final.grouping.without_matrices()
    return {key: value for key, value in now.items() if key not in before or before[key] != value}


# ---------------------------------------------------------------- events


def event_of(line: str) -> Event | None:
    """Parse one line of ``events.jsonl``; None if it is not an event."""
    try:
        fields = Fields(json.loads(line), "", [])
    except (ValueError, RecursionError):
        return None
    kind = fields.text("event")
    if not kind:
        return None
    return fields.read(
        Event,
        kind=kind,
        number=fields.whole("after" if kind == "resume" else "round"),
        run_id=fields.text("run_id"),
        silos=fields.names("silos") if kind in ("here", "ready", "answer") else (),
        budget=fields.read(Budget) if kind == "budget" else None,
        report=_round_of(fields, final=kind == "final") if kind in ("round", "final") else None,
        seconds=fields.number("seconds") if kind == "end" else math.nan,
    )
