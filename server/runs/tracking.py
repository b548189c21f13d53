"""A run's figures in TensorBoard, MLflow and Weights & Biases, its models in MLflow's registry.

All are optional: ``pip install 'coterie[tensorboard]'`` (tensorboardX, which needs no TensorFlow),
``pip install mlflow``, ``pip install wandb``. The key ``tracking`` writes figures during a run;
``coterie runs report RUN --format tensorboard`` exports a finished run.
"""

from __future__ import annotations

import importlib
import json
import logging
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar, Protocol

from coterie.server.runs.record import MODELS, Round, Run
from coterie.strategies.errors import FederationError, refused
from coterie.strategies.rounds.reports import RoundReport

log = logging.getLogger("coterie.run")

MOST_TAG = 5000
"""Most characters of a tag in MLflow's registry."""


class Tracker(Protocol):
    """A destination of figures; ``needs`` is a package and how to install it."""

    needs: ClassVar[tuple[str, str]]

    def __init__(
        self, module: Any, folder: Path, config: Mapping[str, Any], run_name: str
    ) -> None: ...

    def log(self, figures: Mapping[str, float], step: int) -> None:
        """Write the figures of a round."""

    def register(self, run: Run) -> None:
        """Register the models of a completed run; most destinations have no registry."""
        return

    def close(self, status: str) -> None:
        """Close it after the run."""


def scalars(one: Round) -> dict[str, float]:
    """Return the numbers of a round by name; infinite and NaN ones are left out.

    Names: ``error/mean``, ``error/<silo>``, ``train-loss/<silo>``, ``seconds/<phase>``,
    ``megabytes/to-silos``, ``megabytes/from-silos``, ``groups/several``, ``groups/alone``,
    ``silos/here``, ``silos/left-out``.
    """
    found: dict[str, float] = {f"error/{name}": error for name, error in one.errors.items()}
    if one.errors:
        found["error/mean"] = sum(one.errors.values()) / len(one.errors)
    if one.groups:
        together = sum(len(group) > 1 for group in one.groups)
        found["groups/several"] = together
        found["groups/alone"] = len(one.groups) - together
        found["silos/here"] = sum(len(group) for group in one.groups)
        found["silos/left-out"] = len(one.left_out)
    found |= {f"train-loss/{name}": silo.train_loss for name, silo in one.silos.items()}
    found |= {f"seconds/{phase}": seconds for phase, seconds in one.phase_seconds.items()}
    if one.silos:
        sent, received = one.num_bytes
        found |= {"megabytes/to-silos": sent / 1e6, "megabytes/from-silos": received / 1e6}
    return {name: float(value) for name, value in found.items() if math.isfinite(value)}


class Tracking:
    """The trackers of an active run, as a context manager.

    A tracker that fails is dropped with a warning, so that the run continues. Construction raises
    ``FederationError`` if one is not installed.
    """

    def __init__(self, names: str, folder: Path, config: Mapping[str, Any]) -> None:
        self._open = open_trackers(
            names, folder=folder / "tensorboard", config=config, run_name=folder.name
        )

    def __enter__(self) -> Tracking:
        return self

    def round(self, rounds: Sequence[Round], report: RoundReport) -> None:
        """Write a report's figures; its errors belong to an earlier one of the record's rounds."""
        for one in rounds[-2:]:
            figures = scalars(one)
            if one.round == report.evaluated_round and report.evaluation:
                self._log(_part(figures, errors=True), one.round)
            if one.round == report.round and not report.final:
                self._log(_part(figures, errors=False), one.round)

    def _log(self, figures: Mapping[str, float], step: int) -> None:
        self._each(lambda tracker: tracker.log(figures, step))

    def register(self, run: Run) -> None:
        self._each(lambda tracker: tracker.register(run))

    def _each(self, work: Callable[[Tracker], None]) -> None:
        for tracker in list(self._open):
            try:
                work(tracker)
            except Exception as error:  # of any tracker's own kinds
                log.warning("%s has stopped: %s", type(tracker).__name__.strip("_"), error)
                self._open.remove(tracker)

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        for tracker in self._open:
            with suppress(Exception):
                tracker.close(_end_of(kind))


def _end_of(kind: type[BaseException] | None) -> str:
    if kind is None:
        return "completed"
    return "failed" if issubclass(kind, Exception) else "stopped"


def _part(figures: Mapping[str, float], *, errors: bool) -> dict[str, float]:
    return {name: v for name, v in figures.items() if name.startswith("error/") == errors}


def tracker_names(text: str) -> list[str]:
    """Split a comma-separated list of trackers. Raises ``ValueError`` if one is unknown."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    for name in names:
        if name not in TRACKERS:
            *most, last = TRACKERS
            known = f"{', '.join(most)} or {last}"
            raise ValueError(f"must be {known}, or several separated by commas")
    return names


def open_trackers(
    names: str, *, folder: Path, config: Mapping[str, Any], run_name: str
) -> list[Tracker]:
    """Open the trackers of a comma-separated list.

    Raises ``FederationError`` if the package of one is not installed.
    """
    wanted = [(TRACKERS[name], _module(name)) for name in tracker_names(names)]
    return [kind(module, folder, config, run_name) for kind, module in wanted]


def export(kind: str, run: Run, out: Path | None) -> list[Path]:
    """Write a recorded run; return the paths.

    Raises ``FederationError`` without its package, or if the tracker does not take the run.
    """
    folder = out or run.folder / "tensorboard"
    try:
        (tracker,) = open_trackers(kind, folder=folder, config=run.config, run_name=run.name)
        for one in run.rounds_to_end():
            tracker.log(scalars(one), one.round)
        if run.status == "completed":
            tracker.register(run)
        tracker.close(run.status)
    except FederationError:
        raise
    except Exception as error:  # of any tracker's own kinds
        raise FederationError(f"{kind} does not take {run.name}: {error}") from error
    return [folder] if kind == "tensorboard" else []


def _module(name: str) -> Any:
    package, remedy = TRACKERS[name].needs
    try:
        return importlib.import_module(package)
    except ImportError as error:
        raise refused(
            f"{name} needs the package {package}, which is not installed ({error}). At the "
            f"coordinator: {remedy}"
        ) from None


class _TensorBoard(Tracker):
    """Event files in a folder."""

    needs = ("tensorboardX", "pip install 'coterie[tensorboard]'")

    def __init__(self, module: Any, folder: Path, config: Mapping[str, Any], run_name: str) -> None:
        self._writer = module.SummaryWriter(logdir=str(folder))
        rows = "\n".join(f"| {key} | {value} |" for key, value in sorted(config.items()))
        self._writer.add_text("configuration", f"| key | {run_name} |\n|---|---|\n{rows}")

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def close(self, status: str) -> None:
        self._writer.add_text("status", status)
        self._writer.close()


class _MLflow(Tracker):
    """A run at the tracking server in ``MLFLOW_TRACKING_URI``, else in ``./mlruns``."""

    needs = ("mlflow", "pip install mlflow")

    def __init__(self, module: Any, folder: Path, config: Mapping[str, Any], run_name: str) -> None:
        client = module.MlflowClient()
        experiment = client.get_experiment_by_name("coterie")
        number = (
            client.create_experiment("coterie") if experiment is None else experiment.experiment_id
        )
        self._client = client
        self._id = client.create_run(number, run_name=run_name).info.run_id
        for key, value in sorted(config.items()):
            client.log_param(self._id, key, value if isinstance(value, str) else json.dumps(value))

    def log(self, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            self._client.log_metric(self._id, name, value, step=step)

    def register(self, run: Run) -> None:
        """Register each model of the last round once, as a version of ``coterie-TASK``."""
        task = str(run.config.get("task", ""))
        name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"coterie-{task}")
        if not self._client.search_registered_models(filter_string=f"name = '{name}'"):
            self._client.create_registered_model(name)
        members: dict[str, list[str]] = {}
        for silo, digest in sorted(run.model_hashes.items()):
            members.setdefault(digest, []).append(silo)
        for digest, silos in members.items():
            file = run.folder / MODELS / f"{silos[0]}.safetensors"
            folder = f"{MODELS}/{file.stem}"  # the source of a version is a folder
            self._client.log_artifact(self._id, str(file), folder)
            self._client.create_model_version(
                name,
                source=f"runs:/{self._id}/{folder}",
                run_id=self._id,
                tags={
                    "run": run.name,
                    "strategy": run.strategy,
                    "silos": ", ".join(silos)[:MOST_TAG],
                    "sha256": digest,
                    "error": json.dumps(
                        {silo: run.final_errors[silo] for silo in silos if silo in run.final_errors}
                    )[:MOST_TAG],
                },
            )

    def close(self, status: str) -> None:
        ended = {"completed": "FINISHED", "failed": "FAILED"}.get(status, "KILLED")
        self._client.set_terminated(self._id, ended)


class _Wandb(Tracker):
    """A run in the project ``coterie`` of Weights & Biases, set up by its environment."""

    needs = ("wandb", "pip install wandb")

    def __init__(self, module: Any, folder: Path, config: Mapping[str, Any], run_name: str) -> None:
        own = {"project": "coterie", "name": run_name, "config": dict(config)}
        self._run = module.init(dir=str(folder.parent), **own)
        self._run.define_metric("round")
        self._run.define_metric("*", step_metric="round")  # errors are of an earlier round

    def log(self, figures: Mapping[str, float], step: int) -> None:
        if figures:
            self._run.log({"round": step, **figures})

    def close(self, status: str) -> None:
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == "completed" else 1)


TRACKERS: dict[str, type[Tracker]] = {
    "tensorboard": _TensorBoard,
    "mlflow": _MLflow,
    "wandb": _Wandb,
}
