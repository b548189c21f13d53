"""What ``coterie silo --partitions`` and ``--simulation`` ask for, as the settings of each silo."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from coterie.client.home.policy import Policy
from coterie.client.home.settings import SettingsError, SiloSettings
from coterie.tasks.base import Option
from coterie.tasks.simulation import Partitions, Simulation, virtual_silos


def settings_of(
    common: SiloSettings,
    partitions: str,
    simulation: Path | None = None,
    *,
    for_app: bool = False,
) -> list[SiloSettings]:
    """One silo's settings each, in the order of their numbers.

    Args:
        common: what they share; ``home`` is the folder in which each has its own.
        partitions: which silos, ``FIRST-LAST/TOTAL``; empty takes all of the simulation.
        simulation: the file that says what they are; without it, the options of ``common`` do.
        for_app: the silos of a ClientApp, which is told its partition as Flower tells it.

    Raises:
        SettingsError, TaskError: something is missing, given twice, or cannot be.
    """
    task, shares = common.task, common.policy.label_counts
    if simulation is None:
        silos = list(virtual_silos(common.options, Partitions.parse(partitions)))
    else:
        if common.options:
            raise SettingsError("with --simulation, options of the task belong in its file.")
        read = Simulation.read(simulation)
        wanted = partitions or f"0-{read.silos - 1}"
        silos = read.silos_of(Partitions.parse(wanted, total=read.silos))
        task, shares = read.task, shares or read.label_counts
    return [
        replace(
            common,
            name=silo.name,
            task=task,
            options=as_flower(silo.options) if for_app else silo.options,
            home=str(Path(common.home) / silo.name) if common.home else "",
            policy=Policy(label_counts=shares),
        )
        for silo in silos
    ]


def as_flower(options: Mapping[str, Option]) -> dict[str, Option]:
    """Options with the silo's number and how many there are as Flower's node config has them."""
    names = {"silo": "partition-id", "silos": "num-partitions"}
    return {names.get(key, key): value for key, value in options.items()}
