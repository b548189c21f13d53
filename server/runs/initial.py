"""w⁰: the initial model of a run, which its silos derive from the run's seed.

Every silo makes the same model, so the server needs neither the task nor torch. It need not trust
one silo either: models of different silos are compared. A run may begin from a file instead.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict
from safetensors import SafetensorError
from safetensors.numpy import load_file

from coterie import wire
from coterie.engine.port import Engine
from coterie.server.runs.config import RunConfig
from coterie.strategies.errors import FederationError
from coterie.strategies.rounds.exchange import exchange
from coterie.strategies.rounds.roster import Silo
from coterie.wire import Model

log = logging.getLogger("coterie.run")

PAIR_DEADLINE_S, DEADLINE_S = 20.0, 60.0
"""Seconds for two silos to send w⁰ before two others are asked, and for all in total."""
SILENT = "it did not answer in time."
MOST_PAIRS = 3
MOST_NAMED = 5
"""Most arrays that an error names."""
MAX_VALUE = 1e6
"""Largest absolute value in an initial model; training could not start from larger ones."""


def initial_arrays(engine: Engine, silos: Sequence[Silo], config: RunConfig) -> ArrayRecord:
    """Return the model on which two silos agree, or that of the only silo.

    Silos are asked two at a time, in their order, then all that have not answered. Those that are
    silent, or send an unusable model, are skipped. All silos must have the same schema.

    Raises:
        FederationError: no silo sent a model, or three or more sent only different ones.
    """
    given: dict[str, tuple[str, Model]] = {}
    why: dict[str, str] = {}
    pairs = [silos[i : i + 2] for i in range(0, len(silos), 2)][:MOST_PAIRS]
    for asked in [*pairs, silos]:
        deadline_s = DEADLINE_S if asked is silos and not given else PAIR_DEADLINE_S
        left = [s for s in asked if s.name not in given and why.get(s.name, SILENT) == SILENT]
        messages = [_question(silo, config) for silo in left]
        for silo, reply in zip(
            left, exchange(engine, messages, deadline_s=deadline_s), strict=True
        ):
            try:
                model = _read(reply)
            except wire.WireError as error:
                why[silo.name] = str(error)
                log.warning("silo %s sent no initial model: %s", silo.name, error)
            else:
                given[silo.name] = wire.model_hash(model), model
        hashes = [digest for digest, _ in given.values()]
        for digest, model in given.values():
            if hashes.count(digest) >= min(2, len(silos)):
                odd = sorted(name for name, (other, _) in given.items() if other != digest)
                if odd:
                    log.warning("initial models that differ from the others': %s", odd)
                return wire.encode_arrays(model, packed=False)
    return _unconfirmed(given, why)


def _unconfirmed(given: dict[str, tuple[str, Model]], why: dict[str, str]) -> ArrayRecord:
    """Return the first model if at most two silos sent one; else raise ``FederationError``."""
    reasons = " ".join(f"{name}: {reason}" for name, reason in sorted(why.items()))
    if not given:
        raise FederationError(f"no silo sent an initial model. {reasons}")
    if len(given) > 2:
        raise FederationError(
            f"the silos {', '.join(sorted(given))} send different initial models for the same "
            "seed. Install the same releases of coterie and torch at all of them."
        )
    name = min(given)
    log.warning("only %s sent this initial model: no other silo sent the same one", name)
    return wire.encode_arrays(given[name][1], packed=False)


def _question(silo: Silo, config: RunConfig) -> Message:
    asked = ConfigRecord(
        {
            wire.PROTOCOL_KEY: silo.protocol,
            wire.TASK: config.task,
            wire.STRATEGY: config.strategy,
            wire.SEED: config.seed,
            wire.PERSONAL: config.personal,
            **config.task_keys,
        }
    )
    return Message(RecordDict({wire.CONFIG: asked}), silo.node_id, wire.INITIAL, group_id="0")


def started_from(file: Path, initial: ArrayRecord) -> ArrayRecord:
    """Return the model in a safetensors file, in place of the ``initial`` one of these silos.

    Raises:
        FederationError: it cannot be read, has other arrays than silos, or unusable values.
    """
    given = read_model(file)
    own = wire.decode_arrays(initial)
    odd = {**_unlike(given, own), **dict.fromkeys(own.keys() - given, "is not in the file")}
    if odd:
        listed = "; ".join(f"{name!r} {odd[name]}" for name in sorted(odd)[:MOST_NAMED])
        more = f"; and {len(odd) - MOST_NAMED} more" if len(odd) > MOST_NAMED else ""
        raise FederationError(
            f"the model {file} is not one of this task: array {listed}{more}. Name a model of "
            "the same declaration."
        )
    model = {name: given[name] for name in own}
    try:
        _check_values(model)
    except wire.WireError as error:
        raise FederationError(f"the model {file} cannot be used: {error}") from None
    return wire.encode_arrays(model, packed=False)


def read_model(file: Path) -> Model:
    """Return the arrays of a safetensors file; ``FederationError`` if it cannot be read."""
    try:
        return dict(load_file(file))
    except (OSError, SafetensorError) as error:
        raise FederationError(
            f"the model {file} cannot be read: {error}. Name a run, or a .safetensors file at the "
            "coordinator, such as one in a run's folder models/."
        ) from None


def _unlike(given: Model, own: Model) -> dict[str, str]:
    """Return array → how it differs from the silos' array of that name."""
    found = {}
    for name, array in given.items():
        if name not in own:
            found[name] = "is not the silos'"
        elif (array.shape, array.dtype) != (own[name].shape, own[name].dtype):
            theirs = f"{own[name].dtype} of shape {list(own[name].shape)}"
            found[name] = f"is {array.dtype} of shape {list(array.shape)}, the silos' {theirs}"
    return found


def _read(reply: Message | None) -> Model:
    """Return the model in an answer. Raises ``WireError`` if there is none, or it is unusable."""
    if reply is None:
        raise wire.WireError(SILENT)
    records = wire.array_records(wire.content_of(reply))
    if wire.ARRAYS not in records:
        raise wire.WireError("its answer has no arrays.")
    model = wire.decode_arrays(records[wire.ARRAYS])
    if not model:
        raise wire.WireError("its model has no arrays.")
    _check_values(model)
    return model


def _check_values(model: Model) -> None:
    """Raise ``WireError`` if training cannot start from these values."""
    for name, array in model.items():
        if array.dtype.kind not in "biuf":
            raise wire.WireError(f"array {name!r} must contain numbers. Got {array.dtype}.")
        if not np.isfinite(array).all():
            raise wire.WireError(f"array {name!r} contains NaN or infinity.")
        if wire.largest_of(array) > MAX_VALUE:
            raise wire.WireError(f"array {name!r} contains values beyond ±{MAX_VALUE:g}.")
