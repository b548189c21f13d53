"""What ``coterie silo --partitions`` and ``--simulation`` ask for, as the settings of each silo."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path

from coterie.client.home.policy import Policy
from coterie.client.home.settings import SettingsError, SiloSettings
from coterie.tasks.base import Option
from coterie.tasks.simulation import Partitions, Simulation, virtual_silos


def settings_of(given: argparse.Namespace, options: Mapping[str, Option]) -> list[SiloSettings]:
    """One silo's settings each, in the order of their numbers.

    Args:
        given: the command line.
        options: of the task, as given there.

    Raises:
        SettingsError, TaskError: something is missing, given twice, or cannot be.
    """
    if given.name is not None:
        raise SettingsError(
            "--name is for one silo; those of a simulation are called silo-<number>."
        )
    if given.parallel < 1:
        raise SettingsError(f"--parallel must be at least 1. Got {given.parallel}.")
    task, shares = given.task, given.share_label_counts
    if given.simulation is None:
        silos = list(virtual_silos(options, Partitions.parse(given.partitions)))
    else:
        if options:
            raise SettingsError("with --simulation, options of the task belong into its file.")
        simulation = Simulation.read(given.simulation)
        wanted = given.partitions or f"0-{simulation.silos - 1}"
        silos = simulation.silos_of(Partitions.parse(wanted, total=simulation.silos))
        task, shares = simulation.task, shares or simulation.label_counts
    return [
        SiloSettings(
            name=silo.name,
            task=task,
            options=silo.options,
            alpha=given.alpha,
            device=given.device,
            threads=given.threads,
            home=_home(given.home, silo.name),
            policy=Policy(label_counts=shares),
        )
        for silo in silos
    ]


def _home(folder: str, name: str) -> str:
    """A silo's own folder in the one that all have."""
    return str(Path(folder) / name) if folder else ""
