"""Everything that server and silo say to each other: message types, keys, encodings, version.

Both sides import this module and nothing else of each other. The ordinary conversation is
Flower's own (``arrays`` and ``config`` in; ``arrays`` and ``metrics`` with ``num-examples``
out), so that any Flower ClientApp can take part; what a coterie silo understands beyond that it
says itself in its answer to ``query.describe``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict
from numpy.typing import NDArray
from safetensors.numpy import load as unpack
from safetensors.numpy import save as pack

__all__ = [
    "PROTOCOL",
    "Description",
    "Layers",
    "Model",
    "Tensor",
    "WireError",
    "decode_arrays",
    "decode_description",
    "encode_arrays",
    "encode_description",
    "is_packed",
    "is_silo_name",
    "model_hash",
    "refusal",
    "tensors_of",
]

PROTOCOL: Final = 1
"""Version of this module's conversation. A silo refuses a run that speaks another one."""

# Message types. A phase of an algorithm is a type of its own, never a flag in a config.
DESCRIBE: Final = "query.describe"
INITIAL: Final = "query.initial"
LABEL_COUNTS: Final = "evaluate.label_counts"
"""How many training samples of each label (FedGen). Only a silo that consents answers."""
ENSEMBLE: Final = "evaluate.ensemble"
"""Error of the mean logits of the models sent as ``member-<i>`` (FedEnsemble)."""
TRAIN: Final = "train"
EVALUATE: Final = "evaluate"
COLD_START: Final = "train.cold_start"
"""A training from w⁰ whose update says where the silo belongs; nothing of it is kept there."""
EVALUATE_TRAINING: Final = "evaluate.training"
"""Loss and error of a model on the silo's training data: what a strategy may choose by."""
TRAIN_PER_FEDAVG: Final = "train.per_fedavg"
TRAIN_PFEDME: Final = "train.pfedme"
TRAIN_DISCRIMINATOR: Final = "train.discriminator"
EVALUATE_DISCRIMINATOR: Final = "evaluate.discriminator"

# Records of a message, named as in Flower's examples.
ARRAYS: Final = "arrays"
CONFIG: Final = "config"
METRICS: Final = "metrics"
DISCRIMINATORS: Final = "discriminators"
"""A silo's discriminators, stacked: every array has a first axis of pairs. Without this record a
silo starts from the run's initial one."""
HITS: Final = "hits"
"""``hits``, int64 (pairs, 2): right answers of the discriminators received on the two halves of the
silo's held-out samples; ``counts``, int64 (2,): those samples."""
GENERATOR: Final = "generator"
"""Arrays of a generator of latents, beside the model of a train message."""
GENERATOR_ARRAYS: Final = (
    "hidden.weight",
    "hidden.bias",
    "mean.weight",
    "mean.bias",
    "spread.weight",
    "spread.bias",
)
"""h = relu([one-hot label, noise U[0,1)] · hidden), z = (h · mean) + exp(½ h · spread) · N(0,1).

Weights are (inputs, outputs), unlike torch's Linear."""
NOISE: Final = 32
"""Width of the noise beside the one-hot label."""
LABELS: Final = "labels"
"""Label counts by class, an array; in a generator's record: shares by which labels are drawn."""
MAX_LOG_VARIANCE: Final = 4.0
"""Bound on ½-exponent ``h · spread`` of a generator, at both ends of the wire."""
MEMBER: Final = "member-"

# Keys of a config, server to silo.
ROUND: Final = "server-round"
PROTOCOL_KEY: Final = "protocol"
TASK: Final = "task"
SEED: Final = "seed"
LOCAL_EPOCHS: Final = "local-epochs"
LOCAL_STEPS: Final = "local-steps"
"""Mini-batches of a training, however many epochs that takes; 0 or missing: whole epochs."""
BATCH_SIZE: Final = "batch-size"
LR: Final = "lr"
LR_DECAY: Final = "lr-decay"
MOMENTUM: Final = "momentum"
WEIGHT_DECAY: Final = "weight-decay"
PROXIMAL_MU: Final = "proximal-mu"
PRECISION: Final = "precision"
META_LR: Final = "meta-lr"
MOREAU_LAMBDA: Final = "moreau-lambda"
MOREAU_LR: Final = "moreau-lr"
INNER_STEPS: Final = "inner-steps"
ADAPT_STEPS: Final = "adapt-steps"
"""Steps along the gradient of all training data that a silo takes before it tests a model."""
ADAPT_LR: Final = "adapt-lr"
ADAPT_MU: Final = "adapt-mu"
EVALUATE_RECEIVED: Final = "evaluate-received"
"""Ask a train message to be answered with the error of the model it brought as well."""
HOLDOUT: Final = "holdout"
"""Share of the training data to keep out of this training, and to measure the received model on."""
EVALUATE_TRAINED: Final = "evaluate-trained"
"""The model as this silo trained it is of use by itself: it is evaluated, and kept by the silo."""
GENERATED_WEIGHT: Final = "generated-weight"
"""Weight of the loss on generated latents."""
DISTIL_WEIGHT: Final = "distil-weight"
"""Weight of the divergence from the head's answers on latents generated for the own labels."""
PURPOSE: Final = "purpose"
"""Distinguishes messages of one type to one silo in one round; part of the silo's seed."""
KEEP: Final = "keep"
"""The evaluated model is the silo's own from now on: it writes it to its disk."""
PERSONAL: Final = "personal"
"""Layers that stay at the silo: ``head``, or a prefix of array names. Never sent either way."""
PAIR_LABELS: Final = "pair-labels"
"""One character per discriminator: the label, 1 or 0, of this silo's samples in its pair."""
STEPS: Final = "steps"
SAMPLES: Final = "samples"
"""At most so many samples train discriminators; at least half of a silo's are held out."""
PERSONALISE: Final = "personalise"
"""What a silo makes of its group's model for itself: ``finetune`` or ``ditto``."""
PERSONAL_EPOCHS: Final = "personal-epochs"
PERSONAL_LR: Final = "personal-lr"
DITTO_LAMBDA: Final = "ditto-lambda"
STRATEGY: Final = "strategy"
"""The run's strategy, by name: a silo may take part in some only."""
ROUNDS: Final = "rounds"
"""How many rounds the run has."""
GROUP: Final = "group"
"""Number of the silo's group, from 1."""
GROUP_SIZE: Final = "group-size"
"""Silos whose updates will be averaged with the one asked for, that one included."""
MEMBERS: Final = "members"
"""Their names, where the run tells them."""
PRETRAIN_EPOCHS: Final = "pretrain-epochs"
PRETRAIN_STEPS: Final = "pretrain-steps"
"""Length of a run's cold starts, where it has one of its own; told before a silo joins."""
ASKS_LABEL_COUNTS: Final = "label-counts"
"""Whether the run asks for ``LABEL_COUNTS``; told before a silo joins."""
GUARD: Final = "guard"
"""Share of the training data kept out of it, to compare with a model trained alone; 0 is off."""
RUN: Final = "run"
"""The run's name, for the files that the silo keeps."""

# Keys of metrics, silo to server.
NUM_EXAMPLES: Final = "num-examples"
TRAIN_LOSS: Final = "train-loss"
LOSS: Final = "loss"
ERROR: Final = "error"
SECONDS: Final = "seconds"
"""The silo's own time for the work, in seconds, without transport."""
HELD_OUT: Final = "held-out"
"""Samples that a silo can hold out of discriminators' training."""
DISCRIMINATOR_BYTES: Final = "discriminator-bytes"
HOLDOUT_ERROR: Final = "holdout-error"
RECEIVED_LOSS: Final = "received-loss"
RECEIVED_ERROR: Final = "received-error"
RECEIVED_EXAMPLES: Final = "received-num-examples"
ALONE_ERROR: Final = "alone-error"
"""On test data, of the model that the silo trained alone."""
VALIDATION_ERROR: Final = "validation-error"
ALONE_VALIDATION_ERROR: Final = "alone-validation-error"
KEPT_ALONE: Final = "kept-alone"
"""1 if the silo keeps the model that it trained alone, else 0."""
TRAINED_LOSS: Final = "trained-loss"
TRAINED_ERROR: Final = "trained-error"

PACKED_NAME: Final = "safetensors"
"""Name of the one array, and its ``stype``, in a packed ArrayRecord."""

REFUSED: Final = 200
"""Error code of a silo that will not take part, with the reason in words."""
FAILED: Final = 201
"""Error code of a silo whose app raised."""

Layers = tuple[tuple[str, ...], ...]
"""A predictor from latents to logits: ``("linear", weight, bias or "")``, ``("relu",)``,
``("tanh",)`` in order, with the names of the model's arrays. ``("positive",)`` at the beginning
says that latents are at least 0: generated ones pass a softplus (a ReLU would starve them of
gradient)."""

Model = dict[str, NDArray[np.generic]]
"""A model or an update: parameter and buffer names to arrays, in the model's own order."""


class WireError(ValueError):
    """A message that does not follow this module. Says what was expected."""


@dataclass(frozen=True)
class Description:
    """What a silo says of itself. Sizes and policy; no labels and no statistics of its data.

    Attributes:
        name: the silo's name, unique in a federation.
        num_examples: number of training samples, > 0.
        task: name of the task that the silo serves.
        schema: fingerprint of the model's arrays and of the task's classes.
        alpha: the silo's own hunger for data (HCCT), or None to take the run's.
        device: what it trains on, for the operator's eyes.
        versions: e.g. ``{"coterie": "0.1.0", "torch": "2.6"}``.
        buffers: names of arrays of the model that are statistics, not parameters.
        min_group_size: the fewest silos, itself included, whose updates may be averaged with its.
        max_local_epochs: the most epochs of one training that it does; 0 sets no limit.
        head: the layers of the model's predictor, or empty if it has no latent split.
        protocol: the version that the silo speaks.
    """

    name: str
    num_examples: int
    task: str
    schema: str
    alpha: float | None = None
    device: str = ""
    versions: Mapping[str, str] | None = None
    buffers: tuple[str, ...] = ()
    min_group_size: int = 1
    max_local_epochs: int = 0
    head: Layers = ()
    protocol: int = PROTOCOL


def is_silo_name(name: str) -> bool:
    """A name that can be a file and a word in a log: letters, digits, ``.``, ``_``, ``-``."""
    return re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}", name) is not None


def encode_description(description: Description) -> RecordDict:
    """Return the content of the answer to ``query.describe``."""
    config = ConfigRecord(
        {
            "name": description.name,
            NUM_EXAMPLES: description.num_examples,
            TASK: description.task,
            "schema": description.schema,
            "device": description.device,
            "versions": json.dumps(dict(description.versions or {}), sort_keys=True),
            "buffers": json.dumps(list(description.buffers)),
            "min-group-size": description.min_group_size,
            "max-local-epochs": description.max_local_epochs,
            "head": json.dumps(description.head),
            PROTOCOL_KEY: description.protocol,
        }
    )
    if description.alpha is not None:
        config["alpha"] = float(description.alpha)
    return RecordDict({CONFIG: config})


def decode_description(content: RecordDict) -> Description:
    """Read the answer to ``query.describe``.

    Raises:
        WireError: a field is missing or of the wrong kind.
    """
    config = content.get(CONFIG)
    if not isinstance(config, ConfigRecord):
        raise WireError(f"a description needs a ConfigRecord {CONFIG!r}.")
    try:
        alpha = config.get("alpha")
        described = Description(
            name=_text(config["name"]),
            num_examples=int(_number(config[NUM_EXAMPLES])),
            task=_text(config[TASK]),
            schema=_text(config["schema"]),
            alpha=None if alpha is None else float(_number(alpha)),
            device=_text(config["device"]),
            versions={str(k): str(v) for k, v in json.loads(_text(config["versions"])).items()},
            buffers=tuple(str(name) for name in json.loads(_text(config["buffers"]))),
            min_group_size=int(_number(config.get("min-group-size", 1))),
            max_local_epochs=int(_number(config.get("max-local-epochs", 0))),
            head=_layers(json.loads(_text(config.get("head", "[]")))),
            protocol=int(_number(config[PROTOCOL_KEY])),
        )
    except KeyError as missing:
        raise WireError(f"a description needs {missing}.") from None
    except Exception as error:  # values from elsewhere, of any kind
        raise WireError(f"a description cannot be read: {error}") from None
    return described


def _layers(value: Any) -> Layers:
    layers = tuple(tuple(_text(word) for word in layer) for layer in value)
    arguments = {"positive": 0, "linear": 2, "relu": 0, "tanh": 0}
    for kind, *names in layers:
        if arguments.get(kind) != len(names):
            raise ValueError(f"no layer of a head is {kind!r} with {len(names)} arrays")
    return layers


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"expected text, got {type(value).__name__}")
    return value


def _number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"expected a number, got {type(value).__name__}")
    return value


def encode_arrays(model: Model, *, packed: bool) -> ArrayRecord:
    """Encode a model.

    Args:
        model: names to arrays.
        packed: one safetensors blob instead of one Flower array per layer. Every object of a
            message costs a round trip on both legs, so a model of eight layers takes a third of
            the time when packed. Only silos that described themselves understand it.
    """
    if not packed:
        return ArrayRecord({name: Array(np.asarray(a, order="C")) for name, a in model.items()})
    blob = pack({name: np.asarray(array, order="C") for name, array in model.items()})
    order = json.dumps(list(model)).encode()
    return ArrayRecord(
        {PACKED_NAME: Array("uint8", (len(blob),), PACKED_NAME, _with_order(order, blob))}
    )


def _with_order(order: bytes, blob: bytes) -> bytes:
    """safetensors sorts by type and name; the model's own order goes before the blob."""
    return len(order).to_bytes(8, "little") + order + blob


def is_packed(record: ArrayRecord) -> bool:
    """Tell whether ``encode_arrays(..., packed=True)`` made this record."""
    return len(record) == 1 and PACKED_NAME in record and record[PACKED_NAME].stype == PACKED_NAME


def decode_arrays(record: ArrayRecord) -> Model:
    """Decode a model, packed or one array per layer.

    Raises:
        WireError: the bytes are not what they say they are.
    """
    try:
        if not is_packed(record):
            return {name: _plain_array(name, array) for name, array in record.items()}
        data = record[PACKED_NAME].data
        length = int.from_bytes(data[:8], "little")
        order = json.loads(data[8 : 8 + length])
        arrays = unpack(data[8 + length :])
        if sorted(order) != sorted(arrays):
            raise WireError("a packed model names other arrays than it holds.")
        return {name: arrays[name] for name in order}
    except WireError:
        raise
    except Exception as error:  # bytes from elsewhere: numpy and json raise all sorts of things
        raise WireError(f"arrays cannot be decoded: {error}") from None


def _plain_array(name: str, array: Array) -> NDArray[np.generic]:
    decoded = array.numpy()
    if not isinstance(decoded, np.ndarray):  # numpy also opens archives of arrays
        raise WireError(f"{name!r} is not one array.")
    return decoded


@dataclass(frozen=True)
class Tensor:
    """What an array record holds of one array: all but its values."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    bytes: int


def tensors_of(record: ArrayRecord) -> list[Tensor]:
    """The arrays of a record of our own making, packed or not, without decoding their values."""
    if not is_packed(record):
        return [Tensor(n, a.dtype, tuple(a.shape), len(a.data)) for n, a in record.items()]
    data = record[PACKED_NAME].data
    start = 8 + int.from_bytes(data[:8], "little")
    length = int.from_bytes(data[start : start + 8], "little")
    header = json.loads(data[start + 8 : start + 8 + length])
    return [
        Tensor(
            name,
            header[name]["dtype"].lower(),
            tuple(header[name]["shape"]),
            header[name]["data_offsets"][1] - header[name]["data_offsets"][0],
        )
        for name in json.loads(data[8:start])
    ]


def model_hash(model: Model) -> str:
    """SHA-256 over names, types, shapes and bytes: equal hashes, bit-identical models."""
    digest = hashlib.sha256()
    for name, array in sorted(model.items()):
        digest.update(f"{name}|{array.dtype}|{array.shape}|".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def refusal(reason: str, message: Message) -> Message:
    """An error reply of a silo that will not do what was asked."""
    return Message(Error(REFUSED, reason), reply_to=message)


def failure(silo: str, error: BaseException, message: Message) -> Message:
    """An error reply of a silo whose app raised: what the error says may quote the silo's data."""
    kind = type(error).__name__
    reason = f"silo {silo!r} failed: {kind}; see the silo's log."
    return Message(Error(FAILED, reason), reply_to=message)


def read_metrics(content: RecordDict) -> dict[str, float]:
    """Scalar metrics of a reply, by key; lists of numbers are left out."""
    metrics = content.get(METRICS)
    if not isinstance(metrics, MetricRecord):
        return {}
    return {
        key: value
        for key, value in metrics.items()
        if isinstance(value, int | float) and not isinstance(value, bool)
    }
