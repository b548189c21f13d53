"""A silo's policy: read from its ``silo.toml`` and enforced here, whatever the coordinator sends.

Every message is checked before any work. A run that asks for too much is refused with a reason; so
is a run that omits information that the silo needs.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Annotated, Literal

from flwr.app import MetricRecord
from pydantic import AfterValidator, Field

from coterie import wire
from coterie.client.home.hours import read_days, read_hours
from coterie.client.home.schema import In
from coterie.client.home.subgroups import readable_subgroup

METRICS = {
    "train-loss": (wire.TRAIN_LOSS,),
    "loss": (wire.LOSS, wire.RECEIVED_LOSS, wire.TRAINED_LOSS, *wire.HOLDOUT_LOSSES),
    "error": (
        *(wire.ERROR, wire.RECEIVED_ERROR, wire.TRAINED_ERROR, wire.HOLDOUT_ERROR),
        wire.RECEIVED_VALIDATION_ERROR,
    ),
    "seconds": (wire.SECONDS,),
    "trivial": (wire.TRIVIAL,),
    "calibration": wire.CALIBRATION,
}
"""Name in ``silo.toml`` → keys on the wire. Sample counts are the weights and are always sent."""
TRAINING = "train-loss"
"""Leaves a silo that requires secure runs only if ``silo.toml`` names it: label counts, even
gradients, follow from it for anyone who chooses the models."""
ON_TRAINING_DATA = (wire.EVALUATE_TRAINING, wire.EVALUATE_DISCRIMINATOR, wire.EVALUATE_PLACING)
"""Messages that ask to score any model on training data; the same holds for their answers."""
REVEALING_WORDS = frozenset({"f1", "precision", "recall", "sensitivity", "specificity"})
REVEALING = REVEALING_WORDS & {*wire.KNOWN_METRICS} | {"balanced-accuracy", "average-precision"}
REVEALING |= {"trivial"}  # the primary metric of the best constant answer
"""They leave only if ``silo.toml`` names them: together they give a class's share in the test data.
With accuracy a, recall r and precision p, it is (1 − a) / (1 − r + r (1 − p) / p)."""
NAMES = (*METRICS, *(name for name in wire.KNOWN_METRICS if name not in METRICS))
"""Metric names in ``silo.toml``. ``error`` is the primary metric, whichever it is."""
METRIC_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,63}$"
"""Allowed names in ``silo.toml`` for the metrics of any Flower app."""

PEER_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63} [0-9a-f]{4}(-[0-9a-f]{4}){7}$"
"""A silo's name and the fingerprint of its key."""

STATISTICS: tuple[Literal["inputs", "targets", "model"], ...] = ("inputs", "targets", "model")
LEAST_CELL = 3
"""Lower bound of ``statistics_from``: in a cell of two, each person knows the other."""

ALWAYS = (
    *(wire.NUM_EXAMPLES, wire.RECEIVED_EXAMPLES, wire.HOLDOUT_EXAMPLES, wire.HELD_OUT),
    *(wire.DISCRIMINATOR_BYTES, wire.UPDATE_NORM, wire.UPDATE_NOISE, wire.UPDATE_LOST),
    wire.CONSENSUS_BALANCE,
)
"""Metrics without which a silo cannot take part: counts of samples and of a discriminator's bytes,
the norm of an update that stays at the silo, and the noise in an update. The norm of an update that
is sent, its rounding loss and the residuals of consensus reveal nothing that updates do not."""


UNSHARED = {
    "label_counts": "does not share its label counts. At the silo, `label_counts = true` in "
    "silo.toml or `--share-label-counts` allows it.",
    "column_sums": "does not share sums of its columns. At the silo, `column_sums = true` in "
    "silo.toml or `--share-column-sums` allows it.",
    "statistics": 'does not share statistics of its data. At the silo, `statistics = ["inputs", '
    '"targets"]` in silo.toml or `--share-statistics` allows it.',
    "auxiliary": "sends no model except the task's; this run trains discriminators.",
}
"""Setting → the reason for refusing a run that asks for it, where it is not set."""


@dataclass(frozen=True)
class Policy:
    """A silo's conditions, read from its ``silo.toml``; each field documents its meaning."""

    strategies: Annotated[
        tuple[Annotated[str, AfterValidator(wire.strategy_of)], ...],
        In(
            "policy",
            "Strategies in whose runs this silo takes part. An empty list: all strategies.",
        ),
    ] = ()
    min_group_size: Annotated[
        int,
        Field(ge=1, le=100_000),
        In(
            "policy",
            "Smallest group of silos, including this one, in which this silo's updates may be "
            "averaged. In a group of two, each silo can compute the other's update; from three on "
            "it cannot. In a smaller group this silo is left out, or trains alone (HCCT, "
            "FedCollab, auto).",
        ),
    ] = 1
    keep_layers: Annotated[
        str,
        In(
            "policy",
            'Layers that never leave: "head", "norm" (batch normalisation), or a prefix of array '
            "names. A run that does not keep these layers here (its key personal) is refused. "
            "Empty: the whole model may leave.",
        ),
    ] = ""
    share_metrics: Annotated[
        tuple[Annotated[str, Field(pattern=METRIC_PATTERN)], ...] | None,
        In(
            "policy",
            "Metrics that may leave: train-loss, loss, error (the primary metric), seconds, "
            "trivial (the error of the best constant answer), calibration (intercept and slope, "
            "in runs that evaluate given models), metrics of the task, and those of your own app. "
            "Without this line: all except those that reveal how frequent the classes are "
            'and, with secure = "required", train-loss. []: none.',
            example='["train-loss", "loss", "error", "seconds"]',
        ),
    ] = None
    auxiliary: Annotated[
        bool,
        In(
            "policy",
            "Whether models besides the task's may leave: FedCollab's discriminators, and those "
            "that place unlabelled silos and see only features. From FedCollab's, the coordinator "
            "and the other silo of each pair can read which labels this silo has, and estimate "
            "how many.",
        ),
    ] = True
    label_counts: Annotated[
        bool,
        In(
            "policy",
            "Whether the coordinator may learn how many training samples this silo has of each "
            "label. Only FedGen needs it. Every silo learns the share of each label over all "
            "silos: with two silos, each can compute the other's counts; when a silo joins or "
            "leaves, all others can compute its counts.",
        ),
    ] = False
    column_sums: Annotated[
        bool,
        In(
            "policy",
            "Whether the coordinator may learn the count, mean and standard deviation of each "
            "numeric column of the training data, and of real-valued targets, in runs of a task "
            'with scale = "federation". Every silo learns them over all silos that allow it: with '
            "two silos, each can compute the other's.",
        ),
    ] = False
    column_sums_from: Annotated[
        int,
        Field(ge=1),
        In("policy", "Fewest numbers in a column for its count, mean and deviation to leave."),
    ] = 20
    statistics: Annotated[
        tuple[Literal["inputs", "targets", "model"], ...],
        In(
            "policy",
            "What the coordinator may learn when a run asks for statistics and trains nothing "
            '(coterie stats): how many training samples of "inputs" and "targets" lie in each '
            'interval or category, and how many have no value; of the "model" in use, what '
            "coterie silo watch-model last found. Empty: nothing.",
        ),
    ] = ()
    statistics_from: Annotated[
        int,
        Field(ge=LEAST_CELL, le=1_000_000),
        In(
            "policy",
            "Smallest count above 0 that statistics show. A smaller one is hidden, together with "
            f"others, so that it cannot be computed. At least {LEAST_CELL}. Sums by which models "
            "are fitted show no smaller one either (but for counts of pairs of categories in a "
            "regression): such a fit is refused.",
        ),
    ] = 10
    sums: Annotated[
        tuple[Literal["regression", "trees", "alone"], ...],
        In(
            "policy",
            "Models that may be fitted by exact sums over this silo's training rows, which the "
            'coordinator sees (in secure runs, only over groups): "regression" (coterie regress); '
            '"trees" (strategy trees: in bins of every column, rows and derivatives of the loss, '
            "from which labels follow). "
            '"alone": also a regression of this silo alone, to compare silos. Empty: none.',
        ),
    ] = ()
    subgroups: Annotated[
        tuple[Annotated[str, AfterValidator(readable_subgroup)], ...],
        In(
            "policy",
            "Columns by which a given model may be measured in parts of the test data, when a run "
            'evaluates models and trains nothing (coterie evaluate): "sex" for each category, '
            '"age < 50 < 70" for numbers below, between and above these limits. Parts of fewer '
            "samples than statistics_from, and others by which they could be computed, are hidden.",
            example='["sex", "age < 50 < 70"]',
        ),
    ] = ()
    min_samples: Annotated[
        int,
        Field(ge=1),
        In(
            "policy",
            "Fewest training samples behind an update. Samples can be reconstructed from an "
            "update that only a few of them produced, however many steps it took. A silo that has "
            "fewer trains on all of them.",
        ),
    ] = 64
    min_batch: Annotated[int, Field(ge=1), In("policy", "Fewest samples in one training step.")] = 1
    secure: Annotated[
        Literal["", "required"],
        In(
            "policy",
            '"required": take part only in secure runs, in which the coordinator sees sketches of '
            "this silo's updates and sums over groups, but none of its models. A coordinator that "
            "lies can still get them. Empty: take part in other runs as well.",
        ),
    ] = ""
    approve: Annotated[
        Literal["", "ask"],
        In(
            "policy",
            '"ask": a run waits until a person here has looked at it and run coterie silo approve '
            "RUN. Empty: no approval is needed for what the other settings allow.",
        ),
    ] = ""
    peers: Annotated[
        tuple[Annotated[str, Field(pattern=PEER_PATTERN)], ...],
        In(
            "policy",
            'In secure runs: silos with which this one adds up updates, each as "NAME '
            'FINGERPRINT", as that silo shows it. Empty: all silos for which the coordinator '
            "vouches.",
        ),
    ] = ()
    max_local_epochs: Annotated[
        int,
        Field(ge=0),
        In(
            "limits",
            "Most epochs of one training: of the round's model, of the silo's own model, and "
            "before a test. A run that asks for more is refused. 0: no limit.",
        ),
    ] = 1000
    max_rounds: Annotated[int, Field(ge=0), In("limits", "Most rounds of a run. 0: no limit.")] = (
        10_000
    )
    max_evaluations: Annotated[
        int, Field(ge=0), In("limits", "Most evaluations in one round. 0: no limit.")
    ] = 200
    max_minutes: Annotated[
        float,
        Field(ge=0),
        In(
            "limits",
            "Longest work on one message, in minutes. Work that takes longer is stopped, and the "
            "silo continues with the next message. 0: no limit.",
        ),
    ] = 720.0
    max_message_mb: Annotated[
        float,
        Field(ge=0),
        In(
            "limits",
            "Largest message, in MB. A larger one is refused before it is unpacked. 0: no limit.",
        ),
    ] = 2000.0
    max_kept_runs: Annotated[
        int,
        Field(ge=0),
        In(
            "limits",
            "Most runs whose models are kept here. A further run is refused until some models are "
            "moved away. 0: no limit.",
        ),
    ] = 100
    hours: Annotated[
        str,
        AfterValidator(read_hours),
        In(
            "compute",
            "Hours in which this silo joins runs and trains, by this machine's clock, for example "
            '"20:00-06:00". Empty: always.',
        ),
    ] = ""
    days: Annotated[
        str,
        AfterValidator(read_days),
        In(
            "compute",
            'Days on which this silo joins runs and trains, for example "Mon-Fri". Hours past '
            "midnight belong to the day on which they begin. Empty: every day.",
        ),
    ] = ""

    @property
    def withheld(self) -> frozenset[str]:
        """Metrics that leave only if ``silo.toml`` names them."""
        return REVEALING | {TRAINING} if self.secure else REVEALING

    @property
    def smallest_count(self) -> int:
        """Fewest rows, or persons, that sums over rows may show."""
        return self.statistics_from

    @property
    def of_model(self) -> int:
        """Fewest samples, or persons, of which a figure of the model in use may leave; 0: none."""
        return self.statistics_from if "model" in self.statistics else 0

    def unknown_metrics(self) -> tuple[str, ...]:
        """Return metrics named in ``silo.toml`` that only another Flower app can have."""
        return tuple(name for name in self.share_metrics or () if name not in NAMES)

    def objection(self, config: Mapping[str, object]) -> str:
        """Return why a message with this configuration is refused; empty if it is accepted."""
        named = config.get(wire.STRATEGY)
        if self.strategies and named not in (*self.strategies, wire.ONLY_STATISTICS):
            said = named or "one that the run does not name"
            return f"takes part in {', '.join(self.strategies)}; this run's strategy is {said}."
        if named == wire.CONTRIBUTION and self.min_group_size > 2:
            return (
                f"needs groups of at least {self.min_group_size} silos; in a run of {named} every "
                "silo of its group can compute its updates."
            )
        epochs = "epochs a round"
        for key, most, what in (
            (wire.LOCAL_EPOCHS, self.max_local_epochs, epochs),
            (wire.COLD_START_EPOCHS, self.max_local_epochs, epochs),
            (wire.PERSONAL_EPOCHS, self.max_local_epochs, epochs),
            (wire.ADAPT_STEPS, self.max_local_epochs, epochs),  # each on all training data
            (wire.ROUND, self.max_rounds, "rounds"),
            (wire.ROUNDS, self.max_rounds, "rounds"),
        ):
            if key == wire.LOCAL_EPOCHS and config.get(wire.LOCAL_STEPS):
                continue  # they take its place: passes_objection
            asked = config.get(key, 0)
            if most and not number(asked) <= most:  # also what is no number
                asks = f"{asked} ({key})"
                return f"trains at most {most} {what}; this run asks for {asks}."
        return self.unshared("label_counts") if config.get(wire.ASKS_LABEL_COUNTS) else ""

    def type_objection(self, kind: str, config: Mapping[str, object]) -> str:
        """Return why a message of this type is refused: only runs of some strategies send it.

        Without a strategy's name, a message is answered only if any run may send it.
        """
        strategies, named = wire.kind_of(kind).strategies, config.get(wire.STRATEGY)
        only = wire.UNTRAINED.get(str(named))
        keys = (wire.SECURE_KEY,) if named in wire.BY_SUMS else ()
        if only and kind not in (wire.DESCRIBE, only, *keys):
            return f"answers no {kind} message in a run of {named} alone."
        if kind == wire.STATISTICS and not only:
            return "shares statistics only in a run that asks for nothing else."
        if not strategies or named in strategies:
            return ""
        said = named or "one that names none"
        return (
            f"answers {kind} messages only in runs with strategy {', '.join(strategies)}, not "
            f"{said}."
        )

    def secure_objection(self, kind: str, config: Mapping[str, object]) -> str:
        """Return why a message that would reveal an update is refused; empty if it is accepted."""
        trains = kind.startswith(wire.TRAIN) and kind != wire.MASKED_SUM
        named = config.get(wire.STRATEGY, wire.ONLY_STATISTICS)
        joins = kind == wire.DESCRIBE and (named not in wire.UNTRAINED or named in wire.BY_SUMS)
        hidden = config.get(wire.SECURE) is True and (joins or wire.kind_of(kind).hidden)
        if self.secure != "required":
            return ""
        if kind in ON_TRAINING_DATA and TRAINING not in (self.share_metrics or ()):
            return (
                "does not measure models on its training data, as the answers would reveal these "
                f'(secure = "required" and no "{TRAINING}" among the metrics in silo.toml).'
            )
        if not (trains or joins or wire.kind_of(kind).summed) or hidden:
            return ""
        return (
            'takes part only in secure runs (secure = "required" in silo.toml); in this one '
            "the coordinator would see its updates, or its sums. Start the run with secure = true."
        )

    def peer_objection(self, name: str, fingerprint: str) -> str:
        """Return why this silo refuses to add up updates with another; empty if it accepts."""
        if not self.peers or f"{name} {fingerprint}" in self.peers:
            return ""
        return (
            f"takes part in sums only with the silos in its peers (silo.toml), and {name!r} "
            f"with {f'key {fingerprint}' if fingerprint else 'an unknown key'} is not one of them."
        )

    def samples_objection(
        self, samples: int, batch: int, *, of: int, persons: tuple[int, int] | None = None
    ) -> str:
        """Return why a training with too few samples is refused; empty if it is accepted.

        Args:
            samples: the most distinct samples that the training can see, of ``of`` in total.
            batch: samples per step.
            persons: if a person may have several samples: the fewest persons that these samples can
                belong to, and all persons of the silo. Then ``min_samples`` counts persons.
        """
        (behind, all_of), what = (samples, of), "samples"
        if persons is not None:
            (behind, all_of), what = persons, "persons"
        least = min(self.min_samples, all_of)
        if behind < least:
            return (
                f"sends no update made from fewer than {least} {what} (min_samples); this run's "
                f"would use {behind}. Raise local-steps or batch-size."
            )
        if batch < min(self.min_batch, of):
            return (
                f"trains with at least {self.min_batch} samples a step (min_batch); this run asks "
                f"for {batch} (batch-size)."
            )
        return ""

    def unshared(self, what: str) -> str:
        """Return why a run that asks for this is refused; empty if the silo shares it.

        ``what``: a key of ``UNSHARED``.
        """
        return "" if getattr(self, what) else UNSHARED[what]

    def sums_objection(self, family: str, *, alone: bool = False) -> str:
        """Return why sums for a model of this family are refused; empty if they are accepted."""
        if family not in self.sums:
            return (
                f"sends no sums for {family}. At the silo, `sums = "
                f'["{family}"]` in silo.toml or `--share-sums` allows it.'
            )
        if alone and "alone" not in self.sums:
            return (
                'sends no sums for a model of this silo alone. At the silo, `"alone"` in the '
                "list sums of silo.toml allows it."
            )
        return ""

    def passes_objection(self, passes: int, key: str) -> str:
        """Return why training with this number of passes over the data is refused; else empty.

        ``key`` is the entry of the message that asks for them.
        """
        if not self.max_local_epochs or passes <= self.max_local_epochs:
            return ""
        return (
            f"trains at most {self.max_local_epochs} epochs a round; the steps of this run "
            f"({key}) use its training samples {passes} times."
        )

    def group_objection(self, config: Mapping[str, object]) -> str:
        """Return why a training message is refused for its group; a group of 1 is allowed."""
        if self.min_group_size <= 1:
            return ""
        size = config.get(wire.GROUP_SIZE)
        if size is None:
            found = "this run does not state the size of its groups."
        elif number(size) != 1 and number(size) < self.min_group_size:
            found = f"its group in this round has {size}."
        else:
            return ""
        return f"needs groups of at least {self.min_group_size} silos; {found}"


def permitted(
    metrics: Mapping[str, float | int], policy: Policy, *, staying: Collection[str] = ()
) -> MetricRecord:
    """Return the metrics that may leave; those in ``staying`` never do."""
    usual = [name for name in NAMES if name not in policy.withheld]
    wanted = usual if policy.share_metrics is None else policy.share_metrics
    allowed = {*ALWAYS, *(key for name in wanted for key in METRICS.get(name, (name,)))}
    leaving = allowed - {*staying}
    return MetricRecord({key: value for key, value in metrics.items() if _base(key) in leaving})


def _base(key: str) -> str:
    return key.removesuffix(wire.LOW).removesuffix(wire.HIGH)


def number(value: object) -> float:
    """Return the value as a float; NaN if it is not a number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return float("nan")
    return float(value)
