"""Settings of the silos that ``coterie silo serve --partitions`` and ``--simulation`` ask for."""

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
    """Return each silo's settings, in the order of their numbers.

    Raises ``SettingsError`` or ``TaskError`` if something is missing, given twice, or impossible.

    Args:
        common: what they share; ``home`` is the folder that holds theirs.
        partitions: ``FIRST-LAST/TOTAL``; empty: all silos of the simulation.
        simulation: file that describes the silos; without it, the options of ``common`` do.
        for_app: the silos serve a ClientApp, which gets its partition in Flower's form.
    """
    task, shares = common.task, common.policy.label_counts
    if simulation is None:
        silos = list(virtual_silos(common.options, Partitions.parse(partitions)))
    else:
        if common.options:
            raise SettingsError(
                "with --simulation, give the task's options in the simulation file."
            )
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
    """Return options with the silo's number and count under the keys of Flower's node config."""
    names = {"silo": "partition-id", "silos": "num-partitions"}
    return {names.get(key, key): value for key, value in options.items()}
