"""A run that fits models by sums: its groups, and its file, from which it goes on after a crash."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter

from coterie import wire
from coterie.engine.port import Engine
from coterie.features.sums.contract import settings_text
from coterie.features.sums.coordinator import Asking, Fit, Fits, Masking, fit_all
from coterie.features.sums.regression.keys import RegressionKeys
from coterie.server.runs.config import RunConfig
from coterie.server.runs.contribution import SUMS
from coterie.server.runs.going_on import complete
from coterie.server.runs.letters import letters_of
from coterie.server.runs.record import Run, reading
from coterie.strategies import stored
from coterie.strategies.errors import FederationError, refused
from coterie.strategies.rounds.roster import Silo

ALL, ALONE = "all", "alone "
"""Name of a fit of all silos, and the beginning of that of one silo."""


@dataclass(frozen=True)
class Fitted:
    """The fits of a run.

    Attributes:
        family, settings: what was fitted.
        parent: the run whose groups these are; empty: all silos together.
        silent: silo → why it is in no fit.
        masked: only sums over several silos were seen.
    """

    task: str
    family: str
    settings: Mapping[str, Any]
    parent: str
    fits: Fits
    silent: Mapping[str, str] = field(default_factory=dict)
    masked: bool = False

    @property
    def groups(self) -> tuple[Fit, ...]:
        return tuple(fit for fit in self.fits.fits if not fit.name.startswith(ALONE))

    @property
    def alone(self) -> dict[str, Fit]:
        fits = (fit for fit in self.fits.fits if fit.name.startswith(ALONE))
        return {fit.name.removeprefix(ALONE): fit for fit in fits}


_FITTED = TypeAdapter(Fitted)


def algorithm_of(config: RunConfig) -> RegressionKeys:
    """Return the keys of a run of a family."""
    assert isinstance(config.algorithm, RegressionKeys), "its row names such a class"
    return config.algorithm


def groups_run(config: RunConfig, root: Path) -> Run:
    """Return the complete run whose groups are fitted.

    Raises:
        FederationError: it is not recorded in ``root``, not complete, or of another task.
    """
    run = complete(reading.find_run(config.parent, root))
    if (task := run.config.get("task")) != config.task:
        raise refused(
            f"{run.folder.name} is a run of task {task}, not of {config.task}. The groups of a run "
            "can be used only for its own task: leave out --task, or name a run of "
            f"{config.task} in --groups."
        )
    return run


def terms_of(config: RunConfig) -> dict[str, wire.Scalar]:
    """Return what silos learn of the fit, before they join and with every question."""
    algorithm = algorithm_of(config)
    alone: dict[str, wire.Scalar] = {wire.ALSO_ALONE: True} if algorithm.each_alone else {}
    return {wire.SUMS_OF: settings_text(algorithm.settings()), **alone}


def fit_by_sums(
    engine: Engine,
    config: RunConfig,
    folder: Path,
    silos: Mapping[str, Silo],
    absent: Mapping[str, str],
    terms: Mapping[str, wire.Scalar],
    masking: Masking | None = None,
) -> Fitted:
    """Fit all models of a run, or go on with those that its file has.

    Args:
        absent: silo → why it did not join.
        masking: of a secure run.

    Raises:
        FederationError: the groups cannot be read, or no model could be fitted.
    """
    algorithm = algorithm_of(config)
    training = {name: silo for name, silo in silos.items() if silo.trains}
    file = folder / SUMS
    fitted = (
        read_fitted(file)
        if file.exists()
        else _begun(config, folder, training, masked=masking is not None)
    )
    idle = dict.fromkeys(silos.keys() - training.keys(), "it trains nothing.")
    in_fits = {name for fit in fitted.fits.fits for name in (*fit.members, *fit.left_out)}
    others = dict.fromkeys(training.keys() - in_fits, _why_in_no_fit(fitted))
    fitted = replace(fitted, silent={**absent, **idle, **others})

    def save(fits: Fits) -> None:
        write_fitted(file, replace(fitted, fits=fits))

    save(fitted.fits)
    asking = Asking(
        *(engine, algorithm.family(), algorithm.settings()),
        *(training, terms, config.round_timeout),
        masking,
    )
    fitted = replace(fitted, fits=fit_all(asking, fitted.fits, save))
    save(fitted.fits)
    if not any(fit.state.done for fit in fitted.fits.fits):
        reasons = {fit.name: fit.failed for fit in fitted.fits.fits}
        raise FederationError(
            f"no {algorithm.noun()} could be computed. {wire.reasons({**reasons, **fitted.silent})}"
        )
    return fitted


def _why_in_no_fit(fitted: Fitted) -> str:
    if not fitted.parent:
        return "it joined after the fit had begun."
    return f"it is in no group {'of several silos ' * fitted.masked}of {fitted.parent}."


def _begun(config: RunConfig, folder: Path, silos: Mapping[str, Silo], *, masked: bool) -> Fitted:
    parent, single = "", set[str]()
    groups = {ALL: tuple(sorted(silos))}
    if config.parent:
        run = groups_run(config, folder.parent)
        parent = run.folder.name
        letters = letters_of(run.final_groups)
        groups = {letters[group[0]]: tuple(group) for group in run.final_groups if len(group) > 1}
        single = {name for group in run.final_groups if len(group) == 1 for name in group}
    algorithm = algorithm_of(config)
    fits = [Fit(name, tuple(sorted(members))) for name, members in sorted(groups.items())]
    if masked:
        single = set()  # a sum over one silo would be its own
    if algorithm.each_alone:
        single |= {name for members in groups.values() for name in members}
    fits += [Fit(f"{ALONE}{name}", (name,)) for name in sorted(single & silos.keys())]
    settings = algorithm.settings()
    fitted = Fitted(config.task, config.strategy, settings, parent, Fits(tuple(fits)))
    return replace(fitted, masked=masked)


# ---------------------------------------------------------------- the file


def write_fitted(file: Path, fitted: Fitted) -> None:
    """Write the fits, atomically."""
    stored.write(file, _FITTED, fitted)


def read_fitted(file: Path) -> Fitted:
    """Read what ``write_fitted`` wrote; ``FederationError`` if there is none, or it is damaged."""
    return stored.read(file, _FITTED, "Start a new run.")
