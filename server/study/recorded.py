"""The record of a run in a Flower app of your own, as coterie's own runs have it.

A run that ``flwr run`` starts has one, unless its strategy has ``record=False``. To choose its
place, to go on after an interruption, or without a SuperLink::

    strategy = coterie.recorded(HCCT(alpha=50.0), label="cnn")
    result = strategy.start(grid=grid, initial_arrays=arrays, num_rounds=20)

``coterie runs``, ``runs report`` and ``runs explain`` read the record, ``coterie.load`` as well. It
has the committed state of the last rounds too, from which the app can go on.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid

from coterie.engine.plain import engine_of, run_of
from coterie.engine.port import Engine
from coterie.server.paths import default_runs_dir, place
from coterie.server.runs.checkpoint import Checkpoints
from coterie.server.runs.going_on import CHECKPOINTS
from coterie.server.runs.record import OWN_APP, Recorder, Run, reading
from coterie.server.runs.record.format import line_of
from coterie.server.runs.run import RecordingRoster, folder_name, locked_run
from coterie.strategies.errors import refused
from coterie.strategies.registry import PUBLIC
from coterie.strategies.rounds import spoken
from coterie.strategies.rounds.checkpoint import Checkpoint
from coterie.strategies.rounds.reports import RoundReport
from coterie.strategies.rounds.result import RunResult
from coterie.strategies.strategy import EvaluateGroup, GroupStrategy, roster_of_run
from coterie.system.files import make_folder


def recorded(
    strategy: GroupStrategy,
    *,
    label: str = "",
    runs_dir: str | Path | None = None,
    resume: str = "",
) -> Recorded:
    """Return the strategy with a record of its run.

    Args:
        label: name for the record's folder, by default the strategy's. Runs with the same label
            are compared with each other in reports.
        runs_dir: where the record goes, by default ``$COTERIE_RUNS``, else ``~/.coterie/runs``.
        resume: name of an unfinished run in ``runs_dir``, which goes on after its last round.

    Raises:
        FederationError: there is no such run, or it is complete.
        OSError: the folder cannot be made.
    """
    root = place(runs_dir) if runs_dir else default_runs_dir()
    make_folder(root)
    return Recorded(strategy, root, label=label, resume=resume)


class Recorded:
    """A strategy whose run is recorded in a folder; see ``recorded``.

    Attributes:
        folder: of the record, once the run has started.
    """

    def __init__(
        self,
        strategy: GroupStrategy,
        root: Path,
        *,
        label: str = "",
        resume: str = "",
        folder: Path | None = None,
    ) -> None:
        self.strategy, self.label = strategy, label
        self._root = root
        self.folder = reading.find_run(resume, root) if resume else folder
        self._resumes = bool(resume)
        if self._resumes and self.folder is not None:
            reading.read_unfinished(self.folder)

    def start(
        self,
        grid: Grid | Engine,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float | None = None,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Callable[[int, ArrayRecord], MetricRecord | None] | None = None,
        *,
        evaluate_group_fn: EvaluateGroup | None = None,
    ) -> RunResult:
        """Run the federation as the strategy's own ``start`` does, and keep its record.

        Raises:
            FederationError: as ``GroupStrategy.start``; the record has the reason. A run that goes
                on had another strategy or other options, and nothing is written.
        """
        name = strategy_name(self.strategy)
        run_id = run_of(grid) or time.time_ns() // 1000
        folder = self.folder or self._root / folder_name(self.label or name, run_id)
        self.folder = folder
        make_folder(folder)
        with locked_run(folder):
            checkpoints = Checkpoints(folder / CHECKPOINTS)
            earlier: Run | None = reading.read_unfinished(folder) if self._resumes else None
            after, standing = (checkpoints.load() or (0, None)) if earlier else (0, None)
            config = {
                "strategy": name,
                "task": self.label or OWN_APP,
                "label": self.label,
                "rounds": num_rounds,
                **self.strategy.algorithm.plain(),
                **self.strategy.train_config,
                **(train_config or {}),
                OWN_APP: True,
            }
            if earlier is not None:
                _require_same(folder, earlier.config, json.loads(line_of(config)))
            record = Recorder(folder, config, run_id=run_id, earlier=earlier, after=after)
            try:
                with spoken.heard() if self.strategy.on_round is None else nullcontext():
                    result = self._start(grid, record, checkpoints, standing, num_rounds)(
                        initial_arrays=initial_arrays,
                        num_rounds=num_rounds,
                        timeout=timeout,
                        train_config=train_config,
                        evaluate_config=evaluate_config,
                        evaluate_fn=evaluate_fn,
                        evaluate_group_fn=evaluate_group_fn,
                    )
                record.finish(result.held, global_model=result.global_model)
            except BaseException as error:
                record.fail(error)
                raise
        return result

    def _start(
        self,
        grid: Grid | Engine,
        record: Recorder,
        checkpoints: Checkpoints,
        standing: Checkpoint[Any] | None,
        rounds: int,
    ) -> Callable[..., RunResult]:
        """Return the strategy's ``start`` with the record's hooks, when its silos are here."""
        strategy, engine = copy(self.strategy), engine_of(grid)
        own_round, own_event = strategy.on_round, strategy.on_event
        say = own_round or partial(spoken.say, rounds=rounds)
        named = roster_of_run(strategy.roster, strategy.algorithm, standing)
        roster = RecordingRoster(named, record)

        sizes: dict[str, int] = {}

        def on_round(report: RoundReport) -> None:
            sizes.update({name: int(own.num_examples) for name, own in report.silos.items()})
            silos = {
                name: replace(silo, num_examples=sizes.get(name, silo.num_examples))
                for name, silo in roster.silos.items()
            }
            record.round(report, silos, {})
            say(report)

        def on_event(kind: str, fields: Mapping[str, Any]) -> None:
            record.event(kind, **fields)
            own_event(kind, fields)

        def commit(checkpoint: Checkpoint[Any]) -> None:
            started = time.perf_counter()
            size = checkpoints.save(checkpoint.round, checkpoint)
            record.committed(
                checkpoint.round, num_bytes=size, seconds=time.perf_counter() - started
            )

        strategy.on_round, strategy.on_event, strategy.roster = on_round, on_event, roster
        done = 0 if standing is None else standing.round
        roster.present(engine, number=min(done + 1, rounds))
        record.ready(roster.silos)
        return partial(strategy.start, engine, commit=commit, resume=standing)


def _require_same(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    for key in ("strategy", *sorted({*before, *now} - {"label", "task", "rounds"})):
        if before.get(key) != now.get(key):
            raise refused(
                f"{folder.name} had {key} = {before.get(key)!r}. Got {now.get(key)!r}: resume it "
                "with the strategy and options that it had, or start a new run."
            )


def strategy_name(strategy: GroupStrategy) -> str:
    """Return a strategy's name in files, or its class in lower case."""
    names = [cls.__name__ for cls in type(strategy).__mro__]
    row = next((PUBLIC[name] for name in names if name in PUBLIC), None)
    own = strategy if strategy.kind is not None else strategy.algorithm
    return row.name if row else type(own).__name__.lower()
