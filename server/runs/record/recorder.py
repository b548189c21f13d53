"""Write a run's folder during the run, so that a crash leaves the last good state.

<runs>/<label>-<id>/
    run.json              configuration, versions, silos, every round, times, bytes, outcome
    events.jsonl          the same as it happens, one JSON object per line, for the live view
    run.log               the coordinator's log
    models/<silo>.safetensors   each silo's final model
    global.safetensors          FedGroup's global model, of silos without a group
    checkpoints/          the state of the run after each of its last rounds
    lock                  held by the writing process
"""

from __future__ import annotations

import logging
import math
import os
import platform
import sys
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import save_file

from coterie.server.runs.record.contents import Round, Run, SiloFacts
from coterie.server.runs.record.format import json_of, line_of, plain_round
from coterie.server.runs.record.metrics import collaboration
from coterie.server.runs.record.reading import EVENTS, RECORD
from coterie.strategies.rounds.reports import RoundReport
from coterie.strategies.rounds.roster import Silo
from coterie.system import logs
from coterie.system.files import replacing, write_atomically
from coterie.system.processes import utc_now
from coterie.wire import Model, model_hash

GLOBAL, MODELS = "global.safetensors", "models"
LARGE_BYTES, WRITING_SHARE = 4_000_000, 0.05
"""Size beyond which ``run.json`` is not rewritten after every round, and the largest share of the
time spent rewriting it. What it lacks is in ``events.jsonl``."""
MOST_CELLS = 100_000
"""Most cells of all matrices in ``run.json``, about 1 MB. The newest matrix is always kept."""


class Recorder:
    """Writer of a run's folder, which is created if it does not exist.

    Args:
        config: of the run, as plain values.
        run_id: Flower's id; every resumption has a new one.
        earlier: continue this record; None starts a new one.
        after, added: with ``earlier``: the round to continue after, and the rounds that a complete
            run gets in addition.

    Attributes:
        run: the record so far.
    """

    def __init__(
        self,
        folder: Path,
        config: Mapping[str, Any],
        *,
        run_id: int,
        earlier: Run | None = None,
        after: int = 0,
        added: int = 0,
    ) -> None:
        self.folder = folder
        (folder / MODELS).mkdir(parents=True, exist_ok=True)
        self._began = time.time()
        _drop_torn_line(folder / EVENTS)
        self._events = (folder / EVENTS).open("a", encoding="utf-8")
        self._log = logging.FileHandler(folder / "run.log", encoding="utf-8")
        self._log.setFormatter(logs.formatter("run", logs.chosen(), run=folder.name))
        logging.getLogger("coterie").addHandler(self._log)
        self._lines: dict[int, tuple[Round, str]] = {}
        self._due = 0.0
        now = utc_now()
        begun = Run(started=now, config=dict(config))
        begun = earlier.until(after, now, added=added) if earlier else begun
        about: dict[str, Any] = {"started": begun.started or now, "versions": _versions()}
        self.run = replace(begun, run_id=str(run_id), status="starting", **about)
        self._commit()
        self.event(
            "start" if earlier is None else "resume",
            folder=str(folder),
            config=dict(config),
            run_id=str(run_id),
            after=after,
        )

    def event(self, kind: str, **fields: Any) -> None:
        """Append one line to ``events.jsonl``, visible to readers at once."""
        self._events.write(line_of({"event": kind, "at": time.time(), **fields}) + "\n")
        self._events.flush()

    def committed(self, number: int, *, num_bytes: int, seconds: float) -> None:
        """Record that a round's checkpoint is on the disk."""
        self.event("commit", round=number, bytes=num_bytes, seconds=seconds)

    def ready(self, silos: Mapping[str, Silo]) -> None:
        """Record that the first training message is about to be sent."""
        self._note(
            status="running",
            silos=self._with(silos),
            seconds_to_first_training=self._elapsed(),
            **self._lead(silos),
        )
        lead = {"metric": self.run.metric, "unit": self.run.unit}
        self.event("ready", silos=sorted(silos), **lead)

    def round(
        self, report: RoundReport, silos: Mapping[str, Silo], refused: Mapping[str, str]
    ) -> None:
        one = Round.of(report)
        rounds = [_evaluated(earlier, report) for earlier in self.run.rounds]
        changes: dict[str, Any] = {"final": one} if report.final else {}
        if not report.final:
            rounds = _thinned([*rounds, one])
        if report.evaluation and report.evaluated_round == 0:
            changes["initial"] = report.evaluation
        changes |= {"silos": self._with(silos), "refused": dict(refused)}
        self.run = replace(self.run, rounds=tuple(rounds), **changes)
        written = time.monotonic() >= self._due
        if written:
            self._commit()
        entry = plain_round(replace(one, details=one.grouping.without_matrices()))
        self.event("final" if report.final else "round", refused=dict(refused), **entry)
        if not written:
            os.fsync(self._events.fileno())

    def finish(
        self,
        models: Mapping[str, Model],
        *,
        global_model: Model | None = None,
        alone: Mapping[str, float] | None = None,
    ) -> None:
        """Write the final models, compare with local training, and close the record.

        Args:
            global_model: of silos without their own, if there is one.
            alone: silo → error of an independent run.
        """
        hashes = {}
        for name, model in sorted(models.items()):
            _write_model(self.folder / MODELS / f"{name}.safetensors", model)
            hashes[name] = model_hash(model)
        if global_model is not None:
            _write_model(self.folder / GLOBAL, global_model)
        beside = None if alone is None else collaboration(self.run.final_errors, alone)
        self._close(status="completed", model_hashes=hashes, collaboration=beside)

    def fail(self, error: BaseException) -> None:
        """Close the record of a run that failed or was stopped; its contents stay."""
        status = "stopped" if _is_a_wish(error) else "failed"
        try:
            self._close(status=status, error=_in_words(error))
        except OSError as unwritten:  # the disk is full: that is why it could not go on
            print(
                f"{self.folder} does not record that the run failed: {unwritten}", file=sys.stderr
            )

    def _close(self, *, status: str, error: str = "", **changes: Any) -> None:
        seconds = self._elapsed()
        try:
            self._note(status=status, error=error, seconds=seconds, **changes)
            self.event("end", status=status, error=error or None, seconds=seconds)
        finally:
            logging.getLogger("coterie").removeHandler(self._log)
            with suppress(OSError):  # what it could not write it tries again
                self._log.close()
            with suppress(OSError):
                self._events.close()

    def _elapsed(self) -> float:
        return round(time.time() - self._began, 3)

    def _with(self, silos: Mapping[str, Silo]) -> dict[str, SiloFacts]:
        facts = dict(self.run.silos)
        for name, silo in silos.items():
            alpha = math.nan if silo.alpha is None else silo.alpha
            facts[name] = SiloFacts(
                silo.num_examples,
                alpha,
                str(silo.node_id),
                private=silo.private,
                release=silo.release,
            )
        return facts

    def _lead(self, silos: Mapping[str, Silo]) -> dict[str, str]:
        """Return the primary metric, which all silos share, and the unit that most state."""
        described = [silo for silo in silos.values() if silo.described]
        if not described:
            return {}
        metric = str(self.run.config.get("primary-metric") or described[0].metric)
        unit = Counter(silo.unit for silo in described).most_common(1)[0][0]
        return {"metric": metric, "unit": unit if metric in ("mae", "rmse") else ""}

    def _note(self, **changes: Any) -> None:
        self.run = replace(self.run, **changes)
        self._commit()

    def _commit(self) -> None:
        """Write the record; a round that has not changed keeps its line."""
        started = time.monotonic()
        for one in self.run.rounds:
            if one.round not in self._lines or self._lines[one.round][0] is not one:
                self._lines[one.round] = one, line_of(plain_round(one))
        text = json_of(self.run, [self._lines[one.round][1] for one in self.run.rounds])
        write_atomically(self.folder / RECORD, text.encode())
        ended = time.monotonic()
        wait_s = (ended - started) / WRITING_SHARE if len(text) > LARGE_BYTES else 0.0
        self._due = ended + wait_s


def _write_model(file: Path, model: Model) -> None:
    """Write a model atomically, without a copy in memory. Raises ``OSError``."""
    # Of an array that is not C-contiguous safetensors would write the memory as it lies.
    arrays = {name: np.asarray(array, order="C") for name, array in model.items()}
    with replacing(file) as unfinished:
        try:
            save_file(arrays, unfinished)
        except SafetensorError as error:  # also of a full disk
            raise OSError(str(error)) from error


def _evaluated(one: Round, report: RoundReport) -> Round:
    """Return a round, with a report's evaluation if that covers the models held after it."""
    if not report.evaluation or one.round != report.evaluated_round:
        return one
    return replace(one, after=report.evaluation)


def _thinned(rounds: list[Round]) -> list[Round]:
    """Remove the oldest matrices until the others are small together."""
    cells = [one.grouping.num_cells for one in rounds]
    total = sum(cells)
    kept = list(rounds)
    for i in [i for i, own in enumerate(cells) if own][:-1]:
        if total <= MOST_CELLS:
            break
        kept[i] = replace(rounds[i], details=rounds[i].grouping.without_matrices())
        total -= cells[i]
    return kept


def _is_a_wish(error: BaseException) -> bool:
    """Return whether a person stopped the run: not an ``Exception``, and without a message.

    Flower ends a ServerApp with ``SystemExit(0)`` whether its run was stopped at the SuperLink or
    its process received a signal.
    """
    return not isinstance(error, Exception) and str(error) in ("", "0", "None")


def _in_words(error: BaseException) -> str:
    if isinstance(error, KeyboardInterrupt):
        return "stopped by Ctrl-C (SIGINT)"
    if _is_a_wish(error):
        return "stopped by `coterie runs stop`, or by SIGTERM or SIGINT"
    return str(error) or type(error).__name__


def _drop_torn_line(file: Path) -> None:
    """Truncate a file after its last whole line: a crash may have cut one off."""
    if file.exists():
        content = file.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(file, whole)


@cache
def _versions() -> Mapping[str, str]:
    found = {"python": platform.python_version()}
    for package in ("coterie", "flwr", "numpy", "torch"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found
