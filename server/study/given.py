"""The silos of an experiment, as a person gives them: in a simulation file, or in Python.

In Python, silos hold a task's data or arrays::

    given("digits", 6, split={"kind": "iid"})                 # one data set, cut into six silos
    given("blobs:Blobs", {"north": {"data": "north.npz"}})    # a task's options for each silo
    given({"north": (x, y), "south": (x, y, x_test, y_test)}) # arrays
"""

from __future__ import annotations

import hashlib
import json
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import tomli_w
from numpy.typing import NDArray

from coterie.server.machine.local import SiloSpec
from coterie.strategies.errors import refused
from coterie.system.files import write_atomically
from coterie.tasks.base import Option, TaskError
from coterie.tasks.own.declared import load_declared
from coterie.tasks.simulation import Simulation
from coterie.wire import is_silo_name

ARRAYS = "arrays"
"""Name of the task whose data are given as arrays."""
NETWORK = "mlp-64"


@dataclass(frozen=True)
class Given:
    """Silos, and what a run over them must have.

    Attributes:
        keys: of the run, its task among them.
        file: a simulation file that has the same silos; None if none has.
        cut: the silos differ only by their number, and share one data set.
        whose: name of the data in an error.
        label_counts: whether they share their numbers of samples per label.
        digest: of the sources of the data.
    """

    specs: tuple[SiloSpec, ...]
    keys: Mapping[str, Any]
    file: Path | None = None
    cut: bool = False
    whose: str = ""
    label_counts: bool = False
    digest: str = field(default="", compare=False)

    @property
    def names(self) -> list[str]:
        return [spec.name for spec in self.specs]


def of_file(file: Path) -> Given:
    """Read a simulation file; raise ``FederationError`` if it is wrong."""
    try:
        return _of_simulation(Simulation.read(file), file)
    except TaskError as error:
        raise refused(str(error)) from None


def _of_simulation(simulation: Simulation, file: Path | None) -> Given:
    silos = simulation.silos_of()
    counts = simulation.label_counts
    specs = [SiloSpec(s.name, simulation.task, s.options, label_counts=counts) for s in silos]
    return Given(
        tuple(specs),
        simulation.run_keys(),
        file,
        cut=True,
        label_counts=counts,
        digest=_digest([simulation.task, [(silo.name, silo.options) for silo in silos]]),
    )


def _digest(sources: Any) -> str:
    return hashlib.sha256(json.dumps(sources, sort_keys=True).encode()).hexdigest()[:16]


@contextmanager
def given(
    what: str | Mapping[str, Sequence[Any]],
    silos: int | Mapping[str, Mapping[str, Option]] | None,
    *,
    split: Mapping[str, Option] | None = None,
    options: Mapping[str, Option] | None = None,
    network: str = NETWORK,
    seed: int = 0,
) -> Iterator[Given]:
    """Provide the silos that are given in Python; arrays lie in a temporary folder meanwhile.

    Args:
        what: the task, or silo → its arrays ``(x, y)`` or ``(x, y, x_test, y_test)``.
        silos: of a task: a number, with ``split``; or silo → the task's options there.
        options: of the task, the same at every silo.
        network: for arrays, as in a task file.
        seed: of a split.

    Raises:
        FederationError: something is wrong, or does not go together.
    """
    if not isinstance(what, str):
        if silos is not None or split or options:
            raise refused("arrays are given by silo: leave silos, split and options out.")
        with tempfile.TemporaryDirectory(prefix="coterie-") as folder:
            yield of_arrays(what, Path(folder), network=network)
        return
    if isinstance(silos, int):
        with tempfile.TemporaryDirectory(prefix="coterie-") as folder:
            yield _cut(what, silos, Path(folder) / "simulation.toml", split, options, seed)
        return
    if not silos or split:
        raise refused(
            "a task needs silos: a number of them, with split={'kind': …}; or a mapping of each "
            f"silo's name to the task's options there, without split. Got {silos!r}."
        )
    yield _listed(what, silos, options or {})


def _cut(
    task: str,
    silos: int,
    file: Path,
    split: Mapping[str, Option] | None,
    options: Mapping[str, Option] | None,
    seed: int,
) -> Given:
    """Return silos cut from one data set, and write the simulation file that processes read."""
    found = {"task": task, "silos": silos, "seed": seed, "options": dict(options or {})}
    found |= {"split": dict(split)} if split else {}
    write_atomically(file, tomli_w.dumps(found).encode())
    try:
        return _of_simulation(Simulation.read(file), file)
    except TaskError as error:
        raise refused(str(error).removeprefix(f"{file}: ")) from None


def _listed(
    task: str, silos: Mapping[str, Mapping[str, Option]], options: Mapping[str, Option]
) -> Given:
    require_names(silos)
    name = task
    if task.endswith(".toml"):
        try:
            task = str(Path(task).resolve())
            name = load_declared(Path(task)).name
        except TaskError as error:
            raise refused(str(error)) from None
    specs = [SiloSpec(silo, task, {**options, **own}, sums=True) for silo, own in silos.items()]
    sources = [name, [(spec.name, dict(spec.options)) for spec in specs]]
    return Given(tuple(specs), {"task": name, "min-silos": len(specs)}, digest=_digest(sources))


def require_names(names: Mapping[str, Any]) -> None:
    """Raise ``FederationError`` unless all are names of silos, and there is at least one."""
    wrong = [name for name in names if not isinstance(name, str) or not is_silo_name(name)]
    if wrong or not names:
        raise refused(
            "silos must have names of letters, digits, '.', '_' and '-'. "
            f"Got {wrong[0] if wrong else 'no silo'!r}."
        )


# ---------------------------------------------------------------- arrays


def of_arrays(silos: Mapping[str, Sequence[Any]], folder: Path, *, network: str) -> Given:
    """Write each silo's arrays and a task file into a folder, and return the silos.

    Whole numbers, texts and truth values are classes; other numbers, (n,) or (n, count), are real
    targets. Images may lack the axis of their one channel.

    Raises:
        FederationError: arrays do not fit each other.
    """
    require_names(silos)
    read = {name: _parts(name, arrays) for name, arrays in silos.items()}
    first = next(iter(read.values()))
    shape = first["x"].shape[1:] if "x" in first else first["x_train"].shape[1:]
    answers = [a for own in read.values() for key, a in own.items() if key.startswith("y")]
    declaration: dict[str, Any] = {
        "kind": "npz",
        "name": ARRAYS,
        "shape": list(shape),
        "network": network,
    }
    if any(y.dtype.kind == "f" for y in answers):
        count = int(np.prod(answers[0].shape[1:], dtype=int))
        declaration["target"] = {"kind": "number", "count": count}
    else:
        declaration["classes"] = _classes(answers)
        read = {name: {k: _named(k, a) for k, a in own.items()} for name, own in read.items()}
    file, digest = folder / "task.toml", hashlib.sha256(network.encode())
    write_atomically(file, tomli_w.dumps(declaration).encode())
    specs = []
    for name, own in read.items():
        np.savez(folder / f"{name}.npz", **own)  # type: ignore[arg-type]
        specs.append(SiloSpec(name, str(file), {"data": str(folder / f"{name}.npz")}, sums=True))
        digest.update(name.encode())
        for array in own.values():
            digest.update(np.ascontiguousarray(array).tobytes())
    keys = {"task": ARRAYS, "min-silos": len(specs)}
    return Given(tuple(specs), keys, whose="the arrays", digest=digest.hexdigest()[:16])


def _parts(name: str, arrays: Sequence[Any]) -> dict[str, NDArray[Any]]:
    keys: dict[int, tuple[str, ...]] = {
        2: ("x", "y"),
        4: ("x_train", "y_train", "x_test", "y_test"),
    }
    if not isinstance(arrays, Sequence) or isinstance(arrays, str) or len(arrays) not in keys:
        raise refused(
            f"silo {name!r} must have arrays (x, y) or (x, y, x_test, y_test). "
            f"Got {type(arrays).__name__}."
        )
    found = {key: np.asarray(a) for key, a in zip(keys[len(arrays)], arrays, strict=True)}
    for key, array in found.items():
        if key.startswith("x"):
            if array.ndim < 2 or array.dtype.kind not in "fiub":
                raise refused(
                    f"{key} of silo {name!r} must be numbers of shape (samples, …). "
                    f"Got {array.dtype} of shape {array.shape}."
                )
            found[key] = array[:, None] if array.ndim == 3 else array
        elif array.dtype.kind not in "fiubU" or not array.ndim:
            raise refused(
                f"{key} of silo {name!r} must be numbers or texts, one per sample. "
                f"Got {array.dtype} of shape {array.shape}."
            )
    return found


def _classes(answers: Sequence[NDArray[Any]]) -> list[str]:
    values = sorted({value for y in answers for value in np.unique(y).tolist()}, key=_by_value)
    return [str(value) for value in values]


def _by_value(value: Any) -> tuple[bool, Any, str]:
    return isinstance(value, str), 0 if isinstance(value, str) else value, str(value)


def _named(key: str, array: NDArray[Any]) -> NDArray[Any]:
    """Return the classes of a silo by name, as a task file has them; samples are unchanged."""
    if key.startswith("x"):
        return array
    return np.array([str(value) for value in array.ravel().tolist()]).reshape(array.shape)
