"""What a silo agrees to: read from its own ``silo.toml``, held here, whatever the server sends.

Every message is checked before any work. A run that asks for more is refused with the reason;
a run that does not say what the silo has to know is refused as well.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass

from flwr.app import MetricRecord

from coterie import wire

METRICS = {
    "train-loss": (wire.TRAIN_LOSS,),
    "loss": (wire.LOSS, wire.RECEIVED_LOSS, wire.TRAINED_LOSS, wire.HOLDOUT_LOSS),
    "error": (
        *(wire.ERROR, wire.RECEIVED_ERROR, wire.TRAINED_ERROR, wire.HOLDOUT_ERROR),
        wire.RECEIVED_VALIDATION_ERROR,
    ),
    "seconds": (wire.SECONDS,),
    "trivial": (wire.TRIVIAL,),
}
"""Name in ``silo.toml`` → keys on the wire. Counts of samples are the weights and always leave."""
REVEALING = frozenset(
    {"balanced-accuracy", "sensitivity", "specificity", "average-precision", "f1", "trivial"}
)
"""Metrics that tell, several together or with the error, how frequent the classes are in the silo's
test data: they leave only if ``silo.toml`` names them. ``trivial`` is the leading metric of always
giving the best single answer."""
NAMES = (*METRICS, *(name for name in wire.KNOWN_METRICS if name not in METRICS))
"""Of metrics, as ``silo.toml`` has them. ``error`` is the leading metric, whatever that is."""
METRIC_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._:/-]{0,63}$"
"""What a metric of anybody's app may be called in ``silo.toml``."""

PEER_PATTERN = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63} [0-9a-f]{4}(-[0-9a-f]{4}){7}$"
"""A silo's name and the fingerprint of its key."""

STATISTICS = ("inputs", "targets")
"""Of what a silo may tell statistics."""
LEAST_CELL = 3
"""The least that ``statistics_from`` may be: of two, each knows the other."""

ALWAYS = (
    *(wire.NUM_EXAMPLES, wire.RECEIVED_EXAMPLES, wire.HOLDOUT_EXAMPLES, wire.HELD_OUT),
    *(wire.DISCRIMINATOR_BYTES, wire.UPDATE_NORM, wire.UPDATE_NOISE, wire.UPDATE_LOST),
)
"""Counts, of samples and of a discriminator's bytes, the length of an update that is kept back, and
how much noise is in one. Without them a silo cannot take part. Length of an update that leaves, and
what was rounded away of it, say nothing that it does not say itself."""


@dataclass(frozen=True)
class Policy:
    """A silo's conditions. The defaults allow what a study needs, and no label counts or sums.

    Attributes:
        strategies: of the runs to take part in; empty allows every one.
        min_group_size: the fewest silos whose updates may be averaged with this one's.
        keep_layers: ``head`` or a prefix of array names that never leave; empty keeps none.
        metrics: names of those that may leave: of ``NAMES``, or an app's own. None allows all but
            the ``REVEALING``.
        auxiliary: whether models other than the task's may leave, e.g. FedCollab's discriminators,
            from which the silo's labels can be read.
        max_local_epochs, max_rounds: the most that a run may ask for; 0 sets no limit. Epochs are
            passes over the silo's training data, in each training by itself: of the round's model,
            however it is counted, of the silo's own, and before a test.
        min_samples: the fewest different training samples behind an update, or persons where one
            may have several samples (``group``); a silo that has fewer trains with all it has, or
            not at all. From an update of few samples they can be worked
            out, in however many steps it was made; of 64 few of them (explanation/privacy.md).
        min_batch: the fewest samples of a step.
        max_evaluations: the most in one round of a run; 0 sets no limit.
        max_minutes: the longest that the work for one message may take; 0 sets no limit.
        max_message_mb: the largest message, in millions of bytes, before any of it is unpacked; 0
            sets no limit.
        max_kept_runs: of how many runs models are kept in the silo's folder; 0 sets no limit.
        approve: ``ask``: a run waits until a person at the silo has approved it; empty: none does.
        hours, days: when the silo trains and joins runs, as ``silo.toml`` has them
            (``coterie.client.home.hours``); empty: always.
        label_counts: consent to tell how many training samples of each label there are, which
            only FedGen asks for.
        column_sums: consent to tell count, mean and deviation of numeric columns and real targets
            of the training data, which runs of a task that scales by the federation ask for.
        column_sums_from: of a column with fewer numbers, or numbers of fewer persons, nothing is
            told.
        statistics: what may be told of the training samples, as counts by column, in a run that
            asks for nothing else: ``inputs``, ``targets``, both or neither.
        statistics_from: in these counts fewer samples, or samples of fewer persons, are hidden.
        secure: ``required``: nothing leaves from which an update could be read, but sketches and
            masked sums of secure runs; empty: a run may be either.
        peers: ``NAME FINGERPRINT`` of each silo with which this one takes part in sums; empty:
            every one for which the coordinator's CA vouches.
    """

    strategies: tuple[str, ...] = ()
    min_group_size: int = 1
    keep_layers: str = ""
    metrics: tuple[str, ...] | None = None
    auxiliary: bool = True
    max_local_epochs: int = 1000
    max_rounds: int = 10_000
    label_counts: bool = False
    column_sums: bool = False
    column_sums_from: int = 20
    statistics: tuple[str, ...] = ()
    statistics_from: int = 10
    secure: str = ""
    peers: tuple[str, ...] = ()
    min_samples: int = 64
    min_batch: int = 1
    max_evaluations: int = 200
    max_minutes: float = 720.0
    max_message_mb: float = 2000.0
    max_kept_runs: int = 100
    approve: str = ""
    hours: str = ""
    days: str = ""

    def unknown_metrics(self) -> tuple[str, ...]:
        """Metrics that the silo names and that no task has: only an app of others may."""
        return tuple(name for name in self.metrics or () if name not in NAMES)

    def objection(self, config: Mapping[str, object]) -> str:
        """Why a message with this configuration is refused; empty if it is not."""
        named = config.get(wire.STRATEGY)
        if self.strategies and named not in (*self.strategies, wire.ONLY_STATISTICS):
            said = named or "one that the run does not name"
            return f"takes part in {', '.join(self.strategies)}; this run's strategy is {said}."
        epochs = "epochs a round"
        for key, most, what in (
            (wire.LOCAL_EPOCHS, self.max_local_epochs, epochs),
            (wire.PRETRAIN_EPOCHS, self.max_local_epochs, epochs),
            (wire.PERSONAL_EPOCHS, self.max_local_epochs, epochs),
            (wire.ADAPT_STEPS, self.max_local_epochs, epochs),  # each on all training data
            (wire.ROUND, self.max_rounds, "rounds"),
            (wire.ROUNDS, self.max_rounds, "rounds"),
        ):
            if key == wire.LOCAL_EPOCHS and config.get(wire.LOCAL_STEPS):
                continue  # they take its place: passes_objection
            asked = config.get(key, 0)
            if most and not number(asked) <= most:  # also what is no number
                return f"trains at most {most} {what}; this run asks for {asked} ({key})."
        return self.label_counts_objection() if config.get(wire.ASKS_LABEL_COUNTS) else ""

    def type_objection(self, kind: str, config: Mapping[str, object]) -> str:
        """Why a message of this type is refused: only runs of some strategies send it.

        A run that names no strategy is refused by a silo that takes part in some only.
        """
        strategies, named = wire.kind_of(kind).strategies, config.get(wire.STRATEGY)
        asks = named == wire.ONLY_STATISTICS
        if asks and kind not in (wire.DESCRIBE, wire.STATISTICS):
            return f"answers no {kind} message in a run of statistics alone."
        if kind == wire.STATISTICS and not asks:
            return "tells statistics only in a run that asks for nothing else."
        if not strategies or named is None or named in strategies:
            return ""
        return f"answers {kind} messages only in runs of {', '.join(strategies)}, not of {named}."

    def secure_objection(self, kind: str, config: Mapping[str, object]) -> str:
        """Why a message that would show an update is refused; empty if it is not."""
        trains = kind.startswith(wire.TRAIN) and kind != wire.MASKED_SUM
        named = config.get(wire.STRATEGY, wire.ONLY_STATISTICS)
        joins = kind == wire.DESCRIBE and named != wire.ONLY_STATISTICS
        hidden = config.get(wire.SECURE) is True and (joins or wire.kind_of(kind).secret)
        if self.secure != "required" or not (trains or joins) or hidden:
            return ""
        return (
            'takes part in secure runs only (secure = "required" in silo.toml); this one would '
            "show its updates to the coordinator. Start the run with secure = true."
        )

    def peer_objection(self, name: str, fingerprint: str) -> str:
        """Why this silo takes part in no sum with another; empty if it does."""
        if not self.peers or f"{name} {fingerprint}" in self.peers:
            return ""
        return (
            f"takes part in sums only with the silos in its peers (silo.toml), and {name!r} with "
            f"key {fingerprint or 'of nobody'} is none of them."
        )

    def samples_objection(
        self, samples: int, batch: int, *, of: int, persons: tuple[int, int] | None = None
    ) -> str:
        """Why a training with too few samples is refused; empty if it is not.

        Args:
            samples: different ones that it sees at most.
            batch: samples of a step.
            of: training samples that the silo has.
            persons: the fewest that so many samples can belong to, and all that the silo has, where
                one may have several: they are counted then.
        """
        (behind, all_of), what = (samples, of), "samples"
        if persons is not None:
            (behind, all_of), what = persons, "persons"
        least = min(self.min_samples, all_of)
        if behind < least:
            return (
                f"lets no update leave that fewer than {least} {what} are behind (min_samples); "
                f"this run's would have {behind}. Raise local-steps or batch-size."
            )
        if batch < min(self.min_batch, of):
            return (
                f"trains with at least {self.min_batch} samples a step (min_batch); this run asks "
                f"for {batch} (batch-size)."
            )
        return ""

    def label_counts_objection(self) -> str:
        """Why a run that asks for label counts is refused; empty if it is not."""
        if self.label_counts:
            return ""
        return (
            "does not share its label counts. Who runs the silo can allow it with "
            "`label_counts = true` in silo.toml, or `--share-label-counts`."
        )

    def column_sums_objection(self) -> str:
        """Why a run that asks for sums of columns is refused; empty if it is not."""
        if self.column_sums:
            return ""
        return (
            "does not share sums of its columns. Who runs the silo can allow it with "
            "`column_sums = true` in silo.toml, or `--share-column-sums`."
        )

    def statistics_objection(self) -> str:
        """Why a run that asks for statistics is refused; empty if it is not."""
        if self.statistics:
            return ""
        return (
            "does not share statistics of its data. Who runs the silo can allow it with "
            '`statistics = ["inputs", "targets"]` in silo.toml, or `--share-statistics`.'
        )

    def auxiliary_objection(self) -> str:
        """Why a run that trains discriminators is refused; empty if it is not."""
        if self.auxiliary:
            return ""
        return "lets no model leave beside the task's; this run trains discriminators."

    def passes_objection(self, passes: int, key: str) -> str:
        """Why a training that goes over the silo's data so often is refused; empty if it is not.

        ``key`` is what asks for it.
        """
        if not self.max_local_epochs or passes <= self.max_local_epochs:
            return ""
        return (
            f"trains at most {self.max_local_epochs} epochs a round; the steps that this run asks "
            f"for ({key}) go over its training samples {passes} times."
        )

    def group_objection(self, config: Mapping[str, object]) -> str:
        """Why a training message is refused for its group; alone (a group of 1) is allowed."""
        if self.min_group_size <= 1:
            return ""
        size = config.get(wire.GROUP_SIZE)
        if size is None:
            found = "this run does not say how large its groups are."
        elif number(size) != 1 and number(size) < self.min_group_size:
            found = f"its group in this round has {size}."
        else:
            return ""
        return f"needs groups of at least {self.min_group_size} silos; {found}"


def permitted(
    metrics: Mapping[str, float | int], policy: Policy, *, staying: Collection[str] = ()
) -> MetricRecord:
    """The metrics that may leave; those of ``staying`` may not, whatever the policy says."""
    wanted = [n for n in NAMES if n not in REVEALING] if policy.metrics is None else policy.metrics
    allowed = {*ALWAYS, *(key for name in wanted for key in METRICS.get(name, (name,)))}
    leaving = allowed - {*staying}
    return MetricRecord({key: value for key, value in metrics.items() if _base(key) in leaving})


def _base(key: str) -> str:
    """The metric whose interval's end a key is."""
    return key.removesuffix(wire.LOW).removesuffix(wire.HIGH)


def number(value: object) -> float:
    """NaN for what is no number."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return float("nan")
    return float(value)
