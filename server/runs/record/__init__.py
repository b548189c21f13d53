"""The record of a run: a typed value, written during the run and read by all other code.

Only this folder knows the keys of ``run.json`` and ``events.jsonl``.
"""

from coterie.server.runs.record.contents import (
    ENDS,
    OWN_APP,
    Budget,
    Evaluations,
    Event,
    Round,
    Run,
    SiloFacts,
    errors_of,
)
from coterie.server.runs.record.format import event_of, run_of
from coterie.server.runs.record.grouping import FloatArray, Grouping, Square, Structure, Unlabelled
from coterie.server.runs.record.race import Entrant, Placement, Verdict
from coterie.server.runs.record.reading import (
    EVENTS,
    RECORD,
    find_run,
    newest_run,
    read_run,
    read_unfinished,
    read_whole,
)
from coterie.server.runs.record.recorder import MODELS, Recorder
from coterie.server.runs.record.values import Groups
