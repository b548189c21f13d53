"""A run's folder: everything about the run, written so that a crash leaves the last good state.

<runs>/<label>-<id>/
    run.json              configuration, versions, silos, every round, times, bytes, outcome
    events.jsonl          the same as it happens, one JSON object a line; the live view reads it
    run.log               what the coordinator logged
    models/<silo>.safetensors   each silo's final model
    checkpoints/          where the run stood after each of its last rounds
    lock                  held by the process that writes all this
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from safetensors.numpy import save

from coterie.server.runs.config import RunConfig
from coterie.server.paths import place
from coterie.system.files import make_folder, write_atomically
from coterie.server.runs.metrics import (collaboration, final_errors, ipr, mean_accuracy, not_worse)
from coterie.strategies.errors import (EXIT_CONFIG, FederationError)
from coterie.strategies.rounds.reports import (GuardReport, RoundReport)
from coterie.strategies.rounds.roster import (Silo)
from coterie.wire import (Model, model_hash)

FORMAT = 1
MATRICES = ("similarity", "norms", "alphas", "sizes", "distances", "standard-errors")
"""Details of a round that grow with the square of the silos, and what goes with them."""
VECTORS = ("norms", "alphas", "sizes")
"""Of these the ones that grow with the silos only."""
MOST_CELLS = 100_000
"""Of all matrices in ``run.json`` together: about 1 MB. The newest is always kept."""


def default_home() -> Path:
    """``$COTERIE_HOME``, by default ``~/.coterie``. Absolute: other processes are told of it."""
    return place(os.environ.get("COTERIE_HOME", "~/.coterie")).absolute()


def default_runs_dir() -> Path:
    """``$COTERIE_RUNS``, else ``$COTERIE_HOME/runs``, by default ``~/.coterie/runs``."""
    if os.environ.get("COTERIE_RUNS"):
        return place(os.environ["COTERIE_RUNS"]).absolute()
    return default_home() / "runs"


class RunRecord:
    """Writes a run's folder while the run goes on.

    Args:
        folder: made if it is not there.
        config: of the run.
        run_id: Flower's id; every resumption has one of its own.
        resumed_after: go on with the record that is there, after this round; None begins one.
    """

    def __init__(
        self, folder: Path, config: RunConfig, *, run_id: int, resumed_after: int | None = None
    ) -> None:
        self.folder = folder
        make_folder(folder / "models")
        self._started = time.time()
        _drop_torn_line(folder / "events.jsonl")
        self._events = (folder / "events.jsonl").open("a", encoding="utf-8")
        self._log = logging.FileHandler(folder / "run.log", encoding="utf-8")
        self._log.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logging.getLogger("coterie").addHandler(self._log)
        now = datetime.now(UTC).isoformat(timespec="seconds")
        if resumed_after is None:
            self.data = _new_record(config, run_id=run_id, now=now)
        else:
            self.data = _resumed_record(
                read_record(folder), run_id=run_id, after=resumed_after, now=now
            )
        self._commit()
        self.event(
            "start" if resumed_after is None else "resume",
            folder=str(folder),
            config=config.plain(),
            run_id=str(run_id),
            after=resumed_after or 0,
        )

    def event(self, kind: str, **fields: Any) -> None:
        """Append one line to ``events.jsonl``; the reader sees it at once."""
        line = json.dumps({"event": kind, "at": time.time(), **fields}, default=_plain)
        self._events.write(line + "\n")
        self._events.flush()

    def committed(self, round: int, *, bytes: int, seconds: float) -> None:
        """A round's checkpoint is on the disk."""
        self.event("commit", round=round, bytes=bytes, seconds=seconds)

    def ready(self, silos: Mapping[str, Silo]) -> None:
        """The first message to train goes out now."""
        self.data["status"] = "running"
        self.data["seconds-to-first-training"] = round(time.time() - self._started, 3)
        self._silos(silos)
        self._commit()
        self.event("ready", silos=sorted(silos))

    def round(
        self, report: RoundReport, silos: Mapping[str, Silo], refused: Mapping[str, str]
    ) -> None:
        """Commit a round."""
        self._silos(silos)
        self.data["refused"] = dict(refused)
        entry = _round_entry(report)
        if report.evaluation:
            self._evaluation(report, entry)
        if report.final:  # what came after the last round has no round to stand in
            self.data |= {"final-phases": entry["phases"]} if report.phases else {}
        else:
            self.data["rounds"].append(entry)
            _thin_matrices(self.data["rounds"])
        self._commit()
        told = _without_matrices(entry)
        self.event("final" if report.final else "round", refused=dict(refused), **told)

    def _evaluation(self, report: RoundReport, entry: dict[str, Any]) -> None:
        """File an evaluation with the round whose models it is of."""
        evaluation = {
            name: {"loss": _number(loss), "error": _number(error), "num-examples": count}
            for name, (loss, error, count) in report.evaluation.items()
        }
        entry["evaluated-round"], entry["evaluation"] = report.evaluated_round, evaluation
        if report.evaluated_round == 0:
            self.data["initial-evaluation"] = evaluation
        if report.final:
            self.data["final-evaluation"] = evaluation
            self.data["final-groups"] = entry["groups"]
        if report.guard:
            self.data["guard"] = _guard_entry(report.guard)
        for earlier in self.data["rounds"]:
            if earlier["round"] == report.evaluated_round:
                earlier["evaluation-after"] = evaluation

    def _silos(self, silos: Mapping[str, Silo]) -> None:
        for name, silo in silos.items():
            self.data["silos"][name] = {
                "num-examples": silo.num_examples,
                "alpha": silo.alpha,
                "node-id": str(silo.node_id),
            }

    def finish(
        self, models: Mapping[str, Model], *, alone: Mapping[str, float] | None = None
    ) -> None:
        """Write the final models, compare with training alone, and close the record.

        Args:
            models: silo → its final model.
            alone: silo → error of an independent run.
        """
        hashes = {}
        for name, model in sorted(models.items()):
            write_atomically(self.folder / "models" / f"{name}.safetensors", save(dict(model)))
            hashes[name] = model_hash(model)
        self.data["model-hashes"] = hashes
        errors = final_errors(self.data)
        if errors:
            self.data["mean-accuracy"] = mean_accuracy(errors)
        if alone is not None:
            figures = collaboration(errors, alone)
            self.data["collaboration"] = {k: _number(v) for k, v in figures.items()}
        self._close("completed")

    def fail(self, error: BaseException) -> None:
        """Close the record of a run that could not go on; what is there stays."""
        self.data["error"] = _in_words(error)
        try:
            self._close("failed")
        except OSError as unwritten:  # the disk is full: that is why it could not go on
            print(f"{self.folder} does not say that the run failed: {unwritten}", file=sys.stderr)

    def _close(self, status: str) -> None:
        self.data["status"] = status
        self.data["seconds"] = round(time.time() - self._started, 3)
        try:
            self._commit()
            self.event(
                "end", status=status, error=self.data.get("error"), seconds=self.data["seconds"]
            )
        finally:
            logging.getLogger("coterie").removeHandler(self._log)
            with suppress(OSError):  # what it could not write it tries again
                self._log.close()
            with suppress(OSError):
                self._events.close()

    def _commit(self) -> None:
        write_atomically(self.folder / "run.json", _by_line(self.data).encode())


def _in_words(error: BaseException) -> str:
    """Why a run could not go on. What is no ``Exception`` and says nothing is a person's wish.

    Flower ends a ServerApp with ``SystemExit(0)`` whether its run was stopped at the SuperLink or
    its process was sent a signal.
    """
    if isinstance(error, KeyboardInterrupt):
        return "stopped by Ctrl-C (SIGINT)"
    if not isinstance(error, Exception) and str(error) in ("", "0", "None"):
        return "stopped by `coterie stop`, or by SIGTERM or SIGINT to its process"
    return str(error) or type(error).__name__


def _thin_matrices(rounds: list[dict[str, Any]]) -> None:
    """Take the oldest matrices out until the others are small together."""
    holding = [(i, cells) for i, entry in enumerate(rounds) if (cells := _num_cells(entry))]
    total = sum(cells for _, cells in holding)
    for i, cells in holding[:-1]:
        if total <= MOST_CELLS:
            return
        rounds[i] = _without_matrices(rounds[i])
        total -= cells


def _num_cells(entry: Mapping[str, Any]) -> int:
    nested = entry.get("structure") or {}
    return sum(
        len(holder[key]) ** 2
        for holder in (entry, nested)
        for key in MATRICES
        if key not in VECTORS and key in holder
    )


def _without_matrices(entry: Mapping[str, Any]) -> dict[str, Any]:
    """An entry, and the structure in it, without what is large."""
    kept = {key: value for key, value in entry.items() if key not in MATRICES}
    if isinstance(kept.get("structure"), dict):
        kept["structure"] = {k: v for k, v in kept["structure"].items() if k not in MATRICES}
    return kept


def read_record(folder: Path) -> dict[str, Any]:
    """A run's record.

    Raises:
        FederationError: there is none, or it cannot be read.
    """
    try:
        record: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FederationError(
            f"no run is recorded in {folder}: {error}. `coterie runs` lists those that are.",
            exit_code=EXIT_CONFIG,
        ) from None
    return record


def read_unfinished(folder: Path) -> dict[str, Any]:
    """The record of a run that can be resumed.

    Raises:
        FederationError: there is none, or the run is complete.
    """
    record = read_record(folder)
    if record.get("status") == "completed":
        raise FederationError(
            f"the run in {folder} is complete: there is nothing to resume. Start another one with "
            "`coterie run STRATEGY`.",
            exit_code=EXIT_CONFIG,
        )
    return record


def _new_record(config: RunConfig, *, run_id: int, now: str) -> dict[str, Any]:
    return {
        "format": FORMAT,
        "run-id": str(run_id),
        "status": "starting",
        "started": now,
        "config": config.plain(),
        "versions": _versions(),
        "silos": {},
        "refused": {},
        "rounds": [],
    }


def _resumed_record(record: dict[str, Any], *, run_id: int, after: int, now: str) -> dict[str, Any]:
    """The record as it was after a round; what was done beyond it is done again."""
    outcome = (
        *("error", "seconds", "final-evaluation", "final-groups", "final-phases"),
        *("guard", "model-hashes"),
    )
    kept = {key: value for key, value in record.items() if key not in outcome}
    before = {"after-round": after, "at": now, "previous-run-id": record["run-id"]}
    return kept | {
        "run-id": str(run_id),
        "status": "starting",
        "versions": _versions(),
        "resumed": [*record.get("resumed", []), before],
        "rounds": [entry for entry in record["rounds"] if entry["round"] <= after],
    }


def _drop_torn_line(file: Path) -> None:
    """End a file of lines after its last whole line: a crash may have cut one off."""
    if file.exists():
        content = file.read_bytes()
        whole = content.rfind(b"\n") + 1
        if whole < len(content):
            os.truncate(file, whole)


def _round_entry(report: RoundReport) -> dict[str, Any]:
    return {
        "round": report.round,
        "groups": [list(group) for group in report.groups],
        "joined": list(report.joined),
        "left": list(report.left),
        "left-out": dict(report.left_out),
        "seconds": dict(report.seconds),
        "phases": {
            kind: {key.replace("_", "-"): value for key, value in asdict(cost).items()}
            for kind, cost in report.phases.items()
        },
        "silos": {
            name: {
                "num-examples": silo.num_examples,
                "train-loss": _number(silo.train_loss),
                "seconds": _number(silo.seconds),
                "bytes-sent": silo.bytes_sent,
                "bytes-received": silo.bytes_received,
            }
            for name, silo in report.silos.items()
        },
        **_personalised(report),
        **report.details,
    }


def _guard_entry(guard: Mapping[str, GuardReport]) -> dict[str, Any]:
    """How often silos keep their own model, and IPR with and without.

    IPR is the share of silos strictly better than alone. A silo that keeps its own model is exactly
    as good as alone, so the guard shows in ``not-worse``, the share of silos no worse than alone.
    """
    alone = {name: entry.alone_error for name, entry in guard.items()}
    without = {name: entry.error for name, entry in guard.items()}
    kept = {n: e.alone_error if e.kept_alone else e.error for n, e in guard.items()}
    return {
        "kept-alone": [name for name, entry in guard.items() if entry.kept_alone],
        "ipr": ipr(without, alone),
        "ipr-with-guard": ipr(kept, alone),
        "not-worse": not_worse(without, alone),
        "not-worse-with-guard": not_worse(kept, alone),
        "silos": {
            name: {
                "error": entry.error,
                "alone-error": entry.alone_error,
                "validation-error": entry.validation_error,
                "alone-validation-error": entry.alone_validation_error,
                "kept-alone": entry.kept_alone,
            }
            for name, entry in guard.items()
        },
    }


def _personalised(report: RoundReport) -> dict[str, Any]:
    if not report.personalised:
        return {}
    return {
        "personalised": {
            name: {"loss": _number(loss), "error": _number(error)}
            for name, (loss, error) in report.personalised.items()
        }
    }


def _by_line(record: Mapping[str, Any]) -> str:
    """JSON with a line for every key and for every round: a long run stays small and readable."""

    def plain(value: Any) -> str:
        return json.dumps(value, default=_plain)

    rounds = ",\n".join(plain(entry) for entry in record["rounds"])
    lines = [
        f"{plain(key)}: " + (f"[\n{rounds}\n]" if key == "rounds" else plain(value))
        for key, value in record.items()
    ]
    return "{\n" + ",\n".join(lines) + "\n}\n"


def _number(value: float) -> float | None:
    """JSON has no NaN."""
    return value if math.isfinite(value) else None


def _plain(value: Any) -> Any:
    if hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in ("coterie", "flwr", "numpy"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "unknown"
    return found
