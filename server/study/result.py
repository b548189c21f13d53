"""What a run or a comparison left, for a notebook: groups, models, figures, reasons, the report.

Everything is read from the record in a folder, so that a result that was saved, or a run of a real
federation, is loaded like one that has just ended.
"""

from __future__ import annotations

import io
import json
import math
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from functools import cached_property
from html import escape
from pathlib import Path
from typing import Any

from rich.console import Console
from safetensors.numpy import load_file

from coterie.server.paths import place
from coterie.server.runs.letters import letters_of
from coterie.server.runs.record import Evaluations, Run, SiloFacts, find_run, read_run
from coterie.server.runs.record.metrics import Lead
from coterie.server.study.comparison import Row, by_error
from coterie.server.study.frames import Rows, frame, table
from coterie.strategies.errors import refused
from coterie.wire import Model

COMPARISON = "comparison.json"
HEIGHT = 900
"""Of a report in a notebook, in pixels."""


class Models(Mapping[str, Model]):
    """Silo → its final model, array by name; each is read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        self._files = {file.stem: file for file in sorted(folder.glob("*.safetensors"))}

    def __getitem__(self, name: str) -> Model:
        return load_file(self._files[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


@dataclass(frozen=True)
class Report:
    """A self-contained HTML page, which shows itself in a notebook."""

    path: Path

    def _repr_html_(self) -> str:
        page = escape(self.path.read_text(encoding="utf-8"), quote=True)
        # A frame of its own: the page's style and programs stay in it.
        return f'<iframe srcdoc="{page}" width="100%" height="{HEIGHT}" sandbox="allow-scripts">'

    def pictures(self) -> dict[str, Path]:
        """Draw the page's pictures as PNG files; return them by name, such as ``groups``."""
        from coterie.server.report.command import write_report  # draws: loaded late

        return {file.stem: file for file in write_report(str(self.path.parent), kind="png")}


class Result:
    """The result of one run, from the folder of its record.

    Attributes:
        folder: holds ``run.json``, models, checkpoints and logs.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @cached_property
    def run(self) -> Run:
        """The whole record, as typed values.

        Raises ``FederationError`` if nothing of it can be read.
        """
        return read_run(self.folder)

    @property
    def groups(self) -> list[list[str]]:
        """The groups of the last round; a silo that is alone is a group of one."""
        return [list(group) for group in self.run.final_groups]

    @cached_property
    def models(self) -> Mapping[str, Model]:
        """Silo → its final model: array by name."""
        return Models(self.folder / "models")

    def metrics(self) -> Any:
        """Return one row per silo, on its own test data.

        Columns: ``silo``; ``group``, a letter or "alone"; ``training_samples``, ``test_samples``;
        the primary metric by its name; ``loss``; what else the silo measured. Beside a run of the
        same silos with the strategy ``independent``: ``gain``, by how much the metric is better
        than with local training. A data frame where pandas is installed, else a list of dicts.
        """
        return frame(self.metric_rows)

    @property
    def metric_rows(self) -> Rows:
        """The rows of ``metrics``, as dicts."""
        run = self.run
        final: Evaluations = run.final.evaluation if run.final else {}
        more = run.final.metrics if run.final else {}
        letters, gain = letters_of(run.final_groups), self._gain()
        rows = []
        for name, (loss, error, count) in sorted(final.items()):
            row = {
                "silo": name,
                "group": letters.get(name) or "alone",
                "training_samples": run.silos.get(name, SiloFacts()).num_examples,
                "test_samples": count,
                _column(run.metric): run.lead.value(error),
                "loss": loss,
            }
            row |= {k: v for k, v in _columns(more.get(name, {})).items() if k not in row}
            rows.append(row | ({"gain": gain.get(name)} if gain else {}))
        return rows

    def _gain(self) -> Mapping[str, float]:
        from coterie.server.report.command import build_story  # draws: loaded late

        return build_story(self.run).gains.gain

    def history(self) -> Any:
        """Return one row per round and silo.

        Columns: ``round``, ``silo``, ``group``, the primary metric of the model that the silo held
        after the round, ``loss``, ``train_loss``, ``seconds`` of its training. As ``metrics``.
        """
        run, rows = self.run, []
        for one in run.rounds:
            letters = letters_of(one.groups)
            for name in sorted(letters):
                loss, error, _ = one.after.get(name, (float("nan"), float("nan"), 0))
                own = one.silos.get(name)
                rows.append(
                    {
                        "round": one.round,
                        "silo": name,
                        "group": letters[name] or "alone",
                        _column(run.metric): run.lead.value(error),
                        "loss": loss,
                        "train_loss": own.train_loss if own else float("nan"),
                        "seconds": own.seconds if own else float("nan"),
                    }
                )
        return frame(rows)

    def explain(self, silo: str | None = None) -> str:
        """Return why each silo, or one, is in its group, as ``coterie runs explain`` does.

        Raises:
            FederationError: the strategy's record has no reasons, or there is no such silo.
        """
        from coterie.server.report.explain import print_explanation

        # Plain text, also where a notebook's kernel asks for colours.
        console = Console(file=io.StringIO(), width=100, color_system=None)
        print_explanation(str(self.folder), silo=silo, number=None, root=None, console=console)
        assert isinstance(console.file, io.StringIO)
        return console.file.getvalue()

    def report(self) -> Report:
        """Draw the report of ``coterie runs report``, and return its page."""
        from coterie.server.report.command import write_report  # draws: loaded late

        (file,) = write_report(str(self.folder))
        return Report(file)

    def save(self, folder: str | Path) -> Path:
        """Copy everything to a new folder, which ``coterie.load`` reads; return it."""
        return _copied(self.folder, folder)

    def __repr__(self) -> str:
        run = self.run
        groups = " ".join("{" + ", ".join(group) + "}" for group in self.groups)
        mean = run.lead.text(run.mean_error)
        return (
            f"<{run.strategy or 'run'}, {run.status}: mean {run.lead.title} {mean}, "
            f"groups {groups or 'unknown'}; {self.folder}>"
        )

    def _repr_html_(self) -> str:
        return f"<p>{escape(repr(self))}</p>{table(self.metric_rows)}"


class ComparisonResult:
    """The result of a comparison, from its folder.

    Attributes:
        folder: holds ``comparison.json``, ``comparison.md`` and all records.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        try:
            self._content = json.loads((folder / COMPARISON).read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise refused(f"{folder / COMPARISON} cannot be read: {error}.") from None

    @property
    def advice(self) -> str:
        """Which strategy to use, as far as the figures tell."""
        return str(self._content["advice"]["text"])

    @property
    def lead(self) -> Lead:
        """The primary metric."""
        return Lead(self._content["metric"], self._content["unit"])

    @property
    def rows(self) -> list[Row]:
        """The table's rows, as typed values. Figures are errors: lower is better."""
        floats = {field.name for field in fields(Row) if field.type == "float"}
        found = []
        for row in map(_columns, self._content["table"]):
            unknown = {name: math.nan for name in floats if row[name] is None}
            found.append(Row(**{**row, **unknown}))
        return found

    @property
    def legend(self) -> str:
        """An explanation of the table's columns."""
        return str(self._content["legend"])

    @property
    def failed(self) -> dict[str, str]:
        """Strategy → why it could not be run."""
        return dict(self._content["failed"])

    def table(self) -> Any:
        """Return one row per strategy, the best first; errors and gains as in the JSON file.

        A data frame where pandas is installed, else a list of dicts.
        """
        return frame(self._table())

    def _table(self) -> Rows:
        rows = {row["name"]: _columns(row) for row in self._content["table"]}
        return [rows[row.name] for row in by_error(self.rows)]

    def metrics(self) -> Any:
        """Return one row per run and silo: ``strategy``, ``seed``, ``silo``, the primary metric.

        With folds also ``fold``.
        """
        found = []
        for one, result in self._results():
            run = {"strategy": one["name"], **{k: one[k] for k in ("seed", "fold") if k in one}}
            found += [{**run, **row} for row in result.metric_rows]
        return frame(found)

    @property
    def runs(self) -> dict[str, list[Result]]:
        """Strategy → the results of its runs, in the order of the seeds."""
        found: dict[str, list[Result]] = {}
        for one, result in self._results():
            found.setdefault(one["name"], []).append(result)
        return found

    def _results(self) -> Iterator[tuple[Mapping[str, Any], Result]]:
        for one in self._content["runs"]:
            yield one, Result(self.folder / one["record"])

    def save(self, folder: str | Path) -> Path:
        """Copy everything to a new folder, which ``coterie.load`` reads; return it."""
        return _copied(self.folder, folder)

    def __repr__(self) -> str:
        return f"<{self._content['title']}: {self.advice} {self.folder}>"

    def _repr_html_(self) -> str:
        columns = ("name", "error", "gain", "better", "compared", "num_groups", "p")
        return f"<p>{escape(self.advice)}</p>{table(self._table(), columns)}"


def _column(metric: str) -> str:
    return metric.replace("-", "_")


def _columns(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {_column(name): value for name, value in metrics.items()}


def _copied(source: Path, folder: str | Path) -> Path:
    target = place(folder)
    if target.exists():
        raise refused(f"{target} already exists. Name a new folder.")
    shutil.copytree(source, target, ignore=shutil.ignore_patterns("lock"))
    return target


def load(name: str | Path, *, runs_dir: str | Path | None = None) -> Result | ComparisonResult:
    """Load the result of a run, or of a comparison.

    Args:
        name: the folder; or a run's name or id in ``runs_dir``, by default ``~/.coterie/runs``.

    Raises:
        FederationError: there is none.
    """
    folder = place(name)
    if (folder / COMPARISON).exists():
        return ComparisonResult(folder)
    return Result(find_run(str(name), None if runs_dir is None else place(runs_dir)))
