"""Entries of messages to silos, each declared only here.

A field of ``SiloKeys`` is also a key of a run, with bounds, help and a default. These declarations
decide which entries training and evaluation messages carry, what a silo may refuse before it joins,
which default a silo uses if a message lacks the entry, and how a silo checks its value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, Field

from coterie.wire import names
from coterie.wire.formats import WireFormat

Scalar = int | float | str | bool
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]

LOOP = ("train",)
"""The method with which a task replaces the common training loop."""


@dataclass(frozen=True)
class AtSilo:
    """How an entry reaches silos, and how they treat it.

    Attributes:
        default: the value that a silo uses if a message lacks the entry.
        sent: when training messages carry it: ``always``; only if the run's value differs from
            ``default`` (``changed``); only together with another key (that key's name); or only
            if an algorithm or the run adds it (``asked``).
        evaluates: whether evaluation messages carry it: never (empty), ``always``, or only if silos
            train a model of their ``own`` before they evaluate.
        term: whether silos learn it before they join, so that they can refuse the run.
        loop: whether only the common training loop supports it, so that an algorithm with its own
            training steps cannot be combined with it.
        without: methods of a task that replace ours and make the entry ineffective or wrong.
        idle: the value at which it has no effect in such a task.
        keeps: the value with which a silo keeps models or layers for the run alone; ``any`` value
            but the default.
    """

    default: Scalar
    sent: str = "changed"
    evaluates: Literal["", "own", "always"] = ""
    term: bool = True
    loop: bool = False
    without: tuple[str, ...] = ()
    idle: Scalar | None = None
    keeps: str = ""


class SiloKeys(BaseModel):
    """Keys of a run that silos read, written with dashes outside Python: ``local-epochs``."""

    rounds: Annotated[int, AtSilo(0, sent="always", evaluates="always")] = Field(
        20, ge=1, le=100_000, description="Number of rounds."
    )
    seed: Annotated[int, AtSilo(0, sent="always", evaluates="always", term=False)] = Field(
        0, ge=0, le=2**31 - 1, description="Random seed. The same seed gives the same models."
    )
    local_epochs: Annotated[int, AtSilo(1, sent="always")] = Field(
        5, ge=1, le=10_000, description="Epochs of local training per round."
    )
    local_steps: Annotated[int, AtSilo(0)] = Field(
        0,
        ge=0,
        le=1_000_000,
        description="Mini-batches of local training per round, instead of `local-epochs`. 0: "
        "`local-epochs` applies.",
    )
    batch_size: Annotated[int, AtSilo(32, sent="always", evaluates="own")] = Field(
        16, ge=1, le=1_000_000, description="Samples per mini-batch."
    )
    lr: Annotated[Positive, AtSilo(0.01, sent="always", term=False)] = Field(
        0.1, le=1000, description="Learning rate of local training in round 1."
    )
    lr_decay: Annotated[Positive, AtSilo(1.0, sent="always", term=False)] = Field(
        0.995,
        le=1,
        description="Factor by which the learning rate is multiplied after every round.",
    )
    momentum: Annotated[
        NotNegative, AtSilo(0.0, sent="always", evaluates="own", without=LOOP, idle=0)
    ] = Field(0.0, lt=1, description="Momentum of local SGD.")
    weight_decay: Annotated[
        NotNegative, AtSilo(0.0, sent="always", evaluates="own", without=LOOP, idle=0)
    ] = Field(0.0, le=10, description="Weight decay in local training.")
    proximal_mu: Annotated[NotNegative, AtSilo(0.0, sent="always", without=LOOP, idle=0)] = Field(
        0.0,
        le=1e6,
        description="μ, weight of FedProx's proximal term in local training. With FedNova, lr·μ "
        "must be below 1. 0: no such term.",
    )
    precision: Annotated[
        Literal["float32", "bfloat16", "float16"],
        AtSilo("float32", sent="always", evaluates="own", without=LOOP, idle="float32"),
    ] = Field(
        "float32",
        description="Arithmetic of local training. `bfloat16` and `float16` use autocast (mixed "
        "precision).",
    )
    wire_format: Annotated[WireFormat, AtSilo("float32")] = Field(
        "float32",
        description="Format of what silos send: `float32` is the whole model; `delta-fp16` and "
        "`delta-int8` are the update, rounded to 16 or 8 bits per number, and models are then "
        "sent to silos in 16 bits. Secure runs allow only `float32`.",
    )
    optimiser: Annotated[
        str, AtSilo("auto", evaluates="own", loop=True, without=LOOP, idle="auto")
    ] = Field(
        "auto",
        min_length=1,
        description="Optimiser of local training: `sgd`, `adamw`, or the name of another one in "
        "`torch.optim`. `auto` is `sgd`, except for a linear model on a table: silos then minimise "
        "exactly, without a learning rate, and averages reach the minimum over all rows.",
    )
    keep_optimiser: Annotated[bool, AtSilo(False, loop=True, without=LOOP, idle=False)] = Field(
        False,
        description="Whether each silo keeps its optimiser's state from round to round. The state "
        "stays at the silo. Otherwise every round starts with a new optimiser.",
    )
    schedule: Annotated[
        Literal["constant", "cosine", "step"], AtSilo("constant", evaluates="own", loop=True)
    ] = Field(
        "constant",
        description="Learning-rate schedule over the whole run, in addition to `lr-decay`: "
        "`constant`; `cosine`, which falls to 0; or `step`, which divides the rate by 10 after "
        "half and again after three quarters of the run.",
    )
    lr_warm_up: Annotated[NotNegative, AtSilo(0.0, evaluates="own", loop=True)] = Field(
        0.0,
        lt=1,
        description="Share of the run in which the learning rate rises linearly from 0. 0: no "
        "warm-up.",
    )
    clip_norm: Annotated[
        NotNegative, AtSilo(0.0, evaluates="own", loop=True, without=LOOP, idle=0)
    ] = Field(
        0.0,
        le=1e9,
        description="Largest norm of a step's gradient; a longer gradient is scaled down to it. "
        "0: no limit.",
    )
    accumulate: Annotated[int, AtSilo(1, evaluates="own", loop=True, without=LOOP, idle=1)] = Field(
        1, ge=1, le=10_000, description="Mini-batches whose gradients are averaged for one step."
    )
    balance: Annotated[
        Literal["none", "weights", "sampling"], AtSilo("none", evaluates="own", loop=True)
    ] = Field(
        "none",
        description="Compensation for class imbalance at each silo: `none`, `weights` (class "
        "weights in the loss) or `sampling` (every class is drawn equally often).",
    )
    primary_metric: Annotated[str, AtSilo("", evaluates="always")] = Field(
        "",
        pattern=r"^[a-z0-9-]*$",
        description="Primary metric, by which models and silos are compared. Empty: the task's "
        "own.",
    )
    evaluate_trained: Annotated[bool, AtSilo(False, term=False)] = Field(
        False,
        description="Whether silos also evaluate and keep the model as they trained it "
        "themselves. With the strategies `fedgenp` and `fedgen`, and with `generators`, they "
        "always do.",
    )
    personal: Annotated[str, AtSilo("", evaluates="always", keeps="any")] = Field(
        "",
        description="Layers that never leave a silo: `head` (FedPer, HCCT-P); `head-first` "
        "(FedRep), also the head, which is trained first, and then the rest with it, for "
        "`local-epochs` each; `norm` (FedBN); or a prefix of array names. Empty: none.",
    )
    personalise: Annotated[
        Literal["none", "partial", "finetune", "ditto"],
        AtSilo("none", evaluates="own", keeps="ditto"),
    ] = Field(
        "none",
        description="How each silo personalises its group's model: `none`; `partial` (partial "
        "pooling) trains that model on the silo's own data with a penalty for leaving it, and with "
        "its own intercept (of trees: with own leaf values and a few own trees); `finetune` "
        "trains it without a penalty; `ditto` trains a separate model from round to round that is "
        "pulled towards it.",
    )
    own_penalty: Annotated[NotNegative, AtSilo(0.0, sent="personalise", evaluates="own")] = Field(
        0.0,
        le=1e9,
        description="λ of partial pooling: the penalty λ/2·‖w − group's‖² is added to the sum of a "
        "silo's losses; for leaves of trees, times the number of trees. 0: chosen in half of the "
        "run, or by the trial of trees, by losses on held-out samples.",
    )
    personal_epochs: Annotated[int, AtSilo(1, sent="personalise", evaluates="own")] = Field(
        1,
        ge=1,
        le=10_000,
        description="Epochs of partial pooling or fine-tuning, or of Ditto's separate model per "
        "round.",
    )
    personal_lr: Annotated[
        NotNegative, AtSilo(0.01, sent="personalise", evaluates="own", term=False)
    ] = Field(0.0, le=1000, description="Learning rate of the personalised model. 0: `lr`.")
    ditto_lambda: Annotated[NotNegative, AtSilo(0.0, sent="personalise", evaluates="own")] = Field(
        1.0, le=1e6, description="λ, strength of Ditto's pull towards the group's model."
    )
    validation: Annotated[NotNegative, AtSilo(0.0, evaluates="always")] = Field(
        0.0,
        le=0.5,
        description="Share of its training data that each silo withholds from all training, for "
        "`keep = best` and `patience`. 0: none.",
    )


def _asked(default: Scalar, *, term: bool = False, **more: Any) -> AtSilo:
    return AtSilo(default, sent="asked", term=term, **more)


ASKED: Mapping[str, AtSilo] = {
    names.TASK: _asked("", evaluates="always"),
    names.STRATEGY: _asked("", evaluates="always", term=True),
    names.RUN: _asked("", evaluates="always"),
    names.PARENT: _asked("", evaluates="always", term=True),
    names.SCALE: _asked("", evaluates="always"),
    names.KEEP_BEST: _asked(False, evaluates="always"),
    names.PLAIN_STEPS: _asked(
        False, term=True, without=("train", "optimiser", "lr_factor"), idle=False
    ),
    names.COSINE_LAMBDA: _asked(0.0, without=LOOP, idle=0),
    names.PENALTY: _asked(0.0, without=LOOP, idle=0),
    names.GENERATED_WEIGHT: _asked(1.0, without=("train", "training_step"), idle=0),
    names.DISTIL_WEIGHT: _asked(0.0),
    names.MIXTURE: _asked(0.5, without=("train", "training_step")),
    names.MIXTURE_LR: _asked(0.0),
    names.META_LR: _asked(0.03, term=True),
    names.MOREAU_LAMBDA: _asked(15.0, term=True),
    names.MOREAU_LR: _asked(0.005),
    names.INNER_STEPS: _asked(1, term=True),
    names.ADAPT_STEPS: _asked(0, evaluates="always", term=True),
    names.ADAPT_LR: _asked(0.0, evaluates="always"),
    names.ADAPT_MU: _asked(0.0, evaluates="always"),
    names.HOLDOUT: _asked(0.0),
    names.CONSENSUS: _asked(0.0),
    names.PART: _asked(""),
    names.HIDDEN_SHARE: _asked(1.0),
    names.SAMPLES: _asked(500),
    names.MOST_BYTES: _asked(0),
    names.GROUP_SIZE: _asked(1),
    names.GROWING: _asked("", evaluates="always"),
    names.AT_HOME: _asked("", evaluates="always"),
    names.COLD_START_EPOCHS: _asked(0),
    names.COLD_START_STEPS: _asked(0),
}
"""Entries that are not keys of every run: an algorithm or the run itself adds them."""


@dataclass(frozen=True)
class Entry:
    """A declared entry, ready for use.

    Attributes:
        name: in messages, with dashes; also of the key of a run that it carries.
        kind: ``int``, ``float``, ``str`` or ``bool``.
        choices: the allowed values; empty: any value of that kind.
        least: the smallest whole number that a silo accepts.
        at: its declaration.
    """

    name: str
    kind: type
    choices: tuple[str, ...]
    least: int
    at: AtSilo


@cache
def entries() -> Mapping[str, Entry]:
    """Return every declared entry by its name in messages, keys of a run first."""
    found = {}
    for field_name, field in SiloKeys.model_fields.items():
        name = field_name.replace("_", "-")
        at = next(one for one in field.metadata if isinstance(one, AtSilo))
        choices = get_args(field.annotation) if get_origin(field.annotation) is Literal else ()
        kind: Any = type(at.default) if choices else field.annotation
        # A message may say less than a run: plain Flower servers send no number of rounds.
        least = min((one.ge for one in field.metadata if hasattr(one, "ge")), default=0)
        found[name] = Entry(name, kind, choices, min(int(least), _whole(at.default)), at)
    for name, at in ASKED.items():
        found[name] = Entry(name, type(at.default), (), min(1, _whole(at.default)), at)
    return found


def _whole(default: Scalar) -> int:
    return default if isinstance(default, int) else 0


def training_entries(values: Mapping[str, Scalar]) -> dict[str, Scalar]:
    """Return the entries of a run's training messages, from the values of its keys."""
    sent = {}
    for name, entry in entries().items():
        how = entry.at.sent
        other = how == "changed" and values[name] != entry.at.default
        if other or how == "always" or how in sent:
            sent[name] = values[name]
    return sent


@cache
def terms() -> frozenset[str]:
    """Return the names of entries that silos learn before they join and may refuse a run for."""
    return frozenset(name for name, entry in entries().items() if entry.at.term)


def evaluation_entries(*messages: Mapping[str, object]) -> frozenset[str]:
    """Return the names of training entries that evaluation messages carry as well.

    They are more if one of ``messages``, by its entries, lets a silo train an own model first.
    """
    trains = any(names.PERSONALISE in entries for entries in messages)
    wanted = ("always", "own") if trains else ("always",)
    return frozenset(name for name, entry in entries().items() if entry.at.evaluates in wanted)


def personal_layers(config: Mapping[str, object]) -> str:
    """Return the layers that stay at a silo by a run's configuration."""
    layers = str(config.get(names.PERSONAL, ""))
    return "head" if layers == names.HEAD_FIRST else layers


@cache
def loop_entries() -> tuple[str, ...]:
    """Return the names of entries that only the common training loop supports."""
    return tuple(name for name, entry in entries().items() if entry.at.loop)
