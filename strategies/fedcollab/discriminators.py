"""Discriminator rounds: measure how different the silos' data are, all pairs at once.

Bao, Wang, Wu, He: "Optimizing the Collaboration Structure in Cross-Silo Federated Learning", ICML
2023, step 1. For every pair of silos a client discriminator is trained with federated averaging;
silo i's samples are labelled 1 and j's 0 (i before j by name). A message carries all of the silo's
active discriminators; the reply returns them trained, and how often the received ones were right on
its held-out samples. The server takes the plain mean of every pair. A pair stops by itself
(``coterie.strategies.partition.distance.has_converged``).

A silo sends weights, hits and counts, and its number of samples. The weights reveal which labels it
has: in its first reply, weights of missing labels are as at the start, which the run's seed gives.

Differs from the paper, in which pairs take turns with one mini-batch a round for 101 to 2,000
rounds. A phase's first message carries no arrays: silos make the initial discriminator from the
run's seed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from pydantic import Field

from coterie import wire
from coterie.strategies.partition.distance import Distance, Score, distance, has_converged, scores
from coterie.strategies.rounds.algorithm import Answers, Exchanges, Order, Update, Updates
from coterie.strategies.rounds.handles import Arrays
from coterie.strategies.rounds.options import Count, NotNegative, Options, Positive, Times
from coterie.strategies.rounds.roster import Silo
from coterie.wire import Model

log = logging.getLogger("coterie.run")

PURPOSE = "discriminators"
TOLERANCE = 0.01
"""Gain of a distance that is not worth another round."""
PAIR_SIZE = 2
"""Silos whose discriminators are averaged; each can compute the other's from the mean."""

Pair = tuple[str, str]
"""Two silos, sorted by name."""


class Discriminators(Options):
    """Options of discriminators; none are trained if the byte budget is below ``fewest`` rounds."""

    rounds: Times = Field(
        10,
        alias="discriminator-rounds",
        description="Largest number of discriminator rounds. All pairs of silos are trained at "
        "once.",
    )
    patience: Times = Field(
        2,
        alias="discriminator-patience",
        description="Number of evaluations without a gain after which a pair's discriminator "
        "stops.",
    )
    gigabytes: NotNegative = Field(
        0.0,
        le=1e9,
        alias="discriminator-gigabytes",
        description="Largest total traffic of the discriminators, sent and received, in units of "
        "10⁹ bytes. 0: no limit.",
    )
    steps: Count = Field(
        20,
        alias="discriminator-steps",
        description="Mini-batches of 32 samples per discriminator round.",
    )
    samples: int = Field(
        500,
        ge=1,
        le=1_000_000,
        alias="discriminator-samples",
        description="Largest number of a silo's samples that train its discriminators. At least "
        "half of its samples are always held out.",
    )
    lr: Positive = Field(
        0.01, le=1000, alias="discriminator-lr", description="Learning rate of the discriminators."
    )
    score: Score = Field(
        "last",
        alias="distance",
        description="Score that is reported as the distance: that of the `last` round; `max`, the "
        "best of all rounds (the paper); or `cross-fit`, the best round on one half of the "
        "held-out samples, scored on the other half.",
    )
    min_rounds: int = Field(5, ge=1)
    fewest: int = Field(1, ge=1)
    batch_size: int = Field(32, ge=1)


@dataclass(frozen=True)
class Budget:
    """The maximum cost of a phase, known before it begins.

    ``bytes`` counts weights, sent and received, and is at most the limit that was set.
    """

    pairs: int
    silos: int
    rounds: int
    bytes: int


@dataclass(frozen=True)
class Measurement:
    """The result of a phase.

    Attributes:
        distances: pair → its distance.
        held_out: silo → its held-out samples; 0 if it has too few to hold any out.
        sizes: silo → training samples that it stated.
        unfinished: pairs whose training was interrupted because a silo was lost.
        missing: silo → why (some of) its pairs have no distance.
        refused: silos in ``missing`` that are not asked again: their own conditions forbid it.
        rounds: training rounds.
        bytes: bytes of arrays, sent and received.
        budget: the maximum cost; None if no pair could be measured.
    """

    distances: Mapping[Pair, Distance] = field(default_factory=dict)
    held_out: Mapping[str, int] = field(default_factory=dict)
    sizes: Mapping[str, float] = field(default_factory=dict)
    unfinished: frozenset[Pair] = frozenset()
    missing: Mapping[str, str] = field(default_factory=dict)
    refused: frozenset[str] = frozenset()
    rounds: int = 0
    bytes: int = 0
    budget: Budget | None = None


@dataclass
class _Work:
    """An ongoing phase. ``hits[pair]`` grows by one (2, 2) array per evaluation."""

    active: list[Pair]
    options: Discriminators
    bytes_each: int
    order: Callable[..., Order]
    models: dict[Pair, Model] = field(default_factory=dict)
    hits: dict[Pair, list[np.ndarray]] = field(default_factory=dict)
    counts: dict[str, np.ndarray] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)
    refused: set[str] = field(default_factory=set)
    unfinished: set[Pair] = field(default_factory=set)
    rounds: int = 0
    bytes: int = 0

    def mine(self, silo: str) -> list[Pair]:
        """Return the silo's active pairs, in order."""
        return [pair for pair in self.active if silo in pair]

    def silos(self) -> list[str]:
        return _silos_of(self.active)


def takes_part(silo: Silo) -> bool:
    """Return whether ``min_group_size`` lets a silo share a discriminator with one other silo."""
    return silo.min_group_size <= PAIR_SIZE


def measure(
    pairs: Iterable[Pair],
    silos: Sequence[Silo],
    options: Discriminators,
    *,
    announce: Callable[[Budget], None] = lambda budget: None,
    labelled: bool = True,
    bins: Arrays | None = None,
) -> Exchanges[Measurement]:
    """Train these pairs' discriminators; use it in ``prepare`` with ``yield from``.

    Args:
        silos: present silos; those that do not take part in pairs are not asked.
        announce: called before the training begins.
        labelled: discriminators see features and labels; otherwise features only.
        bins: that silos agreed on, of trees (``coterie.features.sums.trees.seen``).
    """
    train, evaluate = (
        (wire.TRAIN_DISCRIMINATOR, wire.EVALUATE_DISCRIMINATOR)
        if labelled
        else (wire.TRAIN_PLACING, wire.EVALUATE_PLACING)
    )
    here = {silo.name: silo for silo in silos}
    wanted = sorted(set(pairs))
    aside = {
        name: f"it accepts groups of at least {here[name].min_group_size} silos; a discriminator "
        "is the mean of two."
        for name in _silos_of(wanted)
        if not takes_part(here[name])
    }
    open_pairs = [pair for pair in wanted if not aside.keys() & set(pair)]
    names = _silos_of(open_pairs)
    most = _most_bytes_each(len(open_pairs), options)
    order = partial(_order, options=options, most_bytes=most, bins=bins)
    questions = [order(here[name], evaluate, []) for name in names]
    asked = (yield questions) if questions else Answers()
    held_out, bytes_each, unready = _ready(names, asked)
    missing = aside | unready
    for name, reason in missing.items():
        log.warning("discriminators: silo %s is not measured: %s", name, reason)
    active = [pair for pair in open_pairs if not missing.keys() & set(pair)]
    work = _Work(active, options, bytes_each, order, missing=missing, refused=set(asked.refused))
    budget = _budget(work) if active else None
    if budget is not None:
        announce(budget)
    while work.active and work.rounds < options.rounds and _affordable(work):
        work.rounds += 1
        purpose = f"{PURPOSE}-{work.rounds}"
        replies = yield _orders(work, here, train, purpose)
        _take(work, replies, trained=True)
    if work.active:  # the budget ends here: score what was averaged last
        replies = yield _orders(work, here, evaluate, f"{PURPOSE}-last")
        _take(work, replies, trained=False)
    found = {
        pair: distance(np.array(hits), _counts(work, pair), score=options.score)
        for pair, hits in sorted(work.hits.items())
    }
    log.info(
        "discriminators: %d of %d pairs measured in %d rounds, %.3g MB",
        len(found),
        len(wanted),
        work.rounds,
        work.bytes / 1e6,
    )
    return Measurement(
        distances=found,
        held_out=held_out,
        sizes={update.silo.name: update.num_examples for update in asked},
        unfinished=frozenset(work.unfinished),
        missing=work.missing,
        refused=frozenset(work.refused),
        rounds=work.rounds,
        bytes=work.bytes,
        budget=budget,
    )


def _silos_of(pairs: Iterable[Pair]) -> list[str]:
    return sorted({name for pair in pairs for name in pair})


def _order(
    silo: Silo,
    kind: str,
    labels: Sequence[int],
    *,
    options: Discriminators,
    most_bytes: int,
    bins: Arrays | None,
    purpose: str = PURPOSE,
    stack: Model | None = None,
) -> Order:
    records = {wire.DISCRIMINATORS: stack, wire.BINS: bins}
    return Order(
        silo,
        {},
        purpose=purpose,
        kind=kind,
        config={
            wire.PAIR_LABELS: "".join(map(str, labels)),
            wire.STEPS: options.steps,
            wire.BATCH_SIZE: options.batch_size,
            wire.LR: options.lr,
            wire.LR_DECAY: 1.0,
            wire.SAMPLES: options.samples,
            wire.MOST_BYTES: most_bytes,
            wire.GROUP_SIZE: PAIR_SIZE,
        },
        extras={name: arrays for name, arrays in records.items() if arrays},
    )


def _ready(names: Sequence[str], asked: Answers) -> tuple[dict[str, int], int, dict[str, str]]:
    """Return held-out samples per silo, bytes of one discriminator, and who cannot take part."""
    held_out: dict[str, int] = {}
    missing = (
        dict.fromkeys(names, "it did not report how many samples it can hold out.") | asked.missing
    )
    sizes: dict[str, int] = {}
    for update in asked:
        name = update.silo.name
        held, size = (_stated(update, key) for key in (wire.HELD_OUT, wire.DISCRIMINATOR_BYTES))
        if held is None:
            continue
        held_out[name] = held
        if held < 1:
            missing[name] = _too_few_text(update.num_examples)
        elif size is None:
            missing[name] = "it did not report the size of its discriminator."
        else:
            del missing[name]
            sizes[name] = size
    usual = max(sizes.values(), key=list(sizes.values()).count, default=0)
    for name, size in sizes.items():
        if size != usual:
            missing[name] = f"its discriminator has {size} bytes, the others' {usual}."
    return held_out, usual, missing


def _too_few_text(num_examples: float) -> str:
    text = f"it has too few samples to hold any out: {num_examples:g}, "
    if num_examples < 2:
        return text + "at least 2 are needed."
    return text + "of which fewer than the required 2 remain (validation holds some out)."


def _stated(update: Update, key: str) -> int | None:
    """Return a count in a reply, or None if missing or invalid."""
    value = update.metrics.get(key, -1)
    return int(value) if 0 <= value < float("inf") else None


def _budget(work: _Work) -> Budget:
    options, pairs, silos = work.options, len(work.active), len(work.silos())
    most = 2 * options.rounds * 2 * work.bytes_each * pairs  # there and back, a pair's two silos
    limit = round(1e9 * options.gigabytes)
    log.info(
        f"discriminators: {pairs} pairs of {silos} silos, at most {options.rounds} rounds of "
        f"{options.steps} steps, {work.bytes_each / 1e6:.3g} MB each: at most {most / 1e9:.3g} GB"
        + (f", limited to {options.gigabytes:g} GB" if options.gigabytes else "")
    )
    return Budget(pairs, silos, options.rounds, bytes=min(most, limit) if limit else most)


def _most_bytes_each(num_pairs: int, options: Discriminators) -> int:
    """Return the largest discriminator for which all rounds fit the byte budget; 0 is any.

    Each round moves a pair's two both ways; only the first message has none, the last evaluation
    has.
    """
    if not options.gigabytes or not num_pairs:
        return 0
    return max(int(1e9 * options.gigabytes / (4 * num_pairs * options.rounds)), 1)


def _affordable(work: _Work) -> bool:
    """Return whether one more round and the last evaluation fit the byte budget."""
    one_way = 2 * work.bytes_each * len(work.active)
    ahead = (3 if work.models else 2 * work.options.fewest) * one_way
    limit = 1e9 * work.options.gigabytes
    if limit and work.bytes + ahead > limit:
        log.warning(
            "discriminators: the budget of %g GB ends the phase after %d rounds",
            work.options.gigabytes,
            work.rounds,
        )
        if not work.models:  # not even that
            fewest = work.options.fewest
            enough = "a single round" if fewest == 1 else f"the {fewest} rounds that they take"
            for name in work.silos():
                work.missing[name] = f"the budget of bytes does not allow {enough}."
            work.active = []
        return False
    return True


def _orders(work: _Work, here: Mapping[str, Silo], kind: str, purpose: str) -> list[Order]:
    orders = []
    for name in work.silos():
        mine = work.mine(name)
        models = [work.models[pair] for pair in mine if pair in work.models]
        stack = {key: np.stack([m[key] for m in models]) for key in models[0]} if models else None
        labels = [int(pair[0] == name) for pair in mine]
        orders.append(work.order(here[name], kind, labels, purpose=purpose, stack=stack))
    return orders


def _take(work: _Work, replies: Answers, *, trained: bool) -> None:
    """Score what the silos received, average what they trained, drop finished or lost pairs."""
    expected = {name: work.mine(name) for name in work.silos()}
    work.bytes += work.bytes_each * sum(
        p in work.models for mine in expected.values() for p in mine
    )
    good: dict[str, Update] = {}
    like = next(iter(work.models.values()), None) or _usual(replies, work.bytes_each)
    for update in replies:
        work.bytes += update.bytes_received
        reason = _objection(update, len(expected[update.silo.name]), like, work, trained=trained)
        if reason:
            work.missing[update.silo.name] = reason
        else:
            good[update.silo.name] = update
    work.refused |= replies.refused
    for name in expected:
        if name not in good:
            if name in replies.missing:
                why = replies.missing[name]
                work.missing[name] = f"during its discriminators: {why}"
            log.warning("discriminators: silo %s is lost: %s", name, work.missing[name])
    place = {name: {pair: k for k, pair in enumerate(mine)} for name, mine in expected.items()}
    still = []
    for pair in work.active:
        if not all(name in good for name in pair):
            work.unfinished.add(pair)
            continue
        rows = [(good[name], place[name][pair]) for name in pair]
        if pair in work.models:
            work.hits.setdefault(pair, []).append(
                np.stack([update.extras[wire.HITS]["hits"][k] for update, k in rows])
            )
            if has_converged(
                scores(np.array(work.hits[pair]), _counts(work, pair)).tolist(),
                floor=work.options.min_rounds,
                patience=work.options.patience,
                tolerance=TOLERANCE,
            ):
                continue
        if trained:
            still.append((pair, _average(rows)))
    work.active = [pair for pair, _ in still]
    work.models = dict(still)


def _usual(replies: Updates, num_bytes: int) -> Model | None:
    """Return the discriminator layout of most silos, of equally many the first silo's."""
    found = [one for update in replies if (one := _one_of(update, num_bytes)) is not None]
    looks = [sorted((key, a.shape, a.dtype.str) for key, a in one.items()) for one in found]
    most = max(map(looks.count, looks), default=0)
    usual = [one for one, look in zip(found, looks, strict=True) if looks.count(look) == most]
    return usual[0] if usual else None


def _one_of(update: Update, num_bytes: int) -> Model | None:
    """Return the layout of one discriminator in a plausible reply, else None."""
    stack = update.extras.get(wire.DISCRIMINATORS, {})
    if any(array.ndim < 1 or len(array) < 1 for array in stack.values()):
        return None
    one = {key: array[0] for key, array in stack.items()}
    return one if sum(array.nbytes for array in one.values()) == num_bytes else None


def _objection(
    update: Update, num_pairs: int, like: Model | None, work: _Work, *, trained: bool
) -> str:
    """Return why a reply is unusable, or "" if it is usable; store its held-out counts."""
    if trained:
        stack = update.extras.get(wire.DISCRIMINATORS, {})
        if like is None or set(stack) != set(like):
            return "its reply has no discriminators, or unexpected arrays."
        for key, array in stack.items():
            if array.shape != (num_pairs, *like[key].shape) or array.dtype != like[key].dtype:
                return (
                    f"its discriminators' array {key!r} must be {like[key].dtype} of shape "
                    f"{(num_pairs, *like[key].shape)}. Got {array.dtype} of shape {array.shape}."
                )
    if not work.models:
        return ""
    scored = update.extras.get(wire.HITS, {})
    hits, counts = scored.get("hits"), scored.get("counts")
    if hits is None or counts is None or hits.shape != (num_pairs, 2) or counts.shape != (2,):
        return "its reply does not report how often the discriminators were right."
    known = work.counts.setdefault(update.silo.name, counts)
    right, of = hits.astype(np.int64), counts.astype(np.int64)
    if (counts != known).any() or of.sum() < 1 or (right < 0).any() or (right > of).any():
        return "its hits and counts contradict each other."
    return ""


def _counts(work: _Work, pair: Pair) -> np.ndarray:
    return np.stack([work.counts[name] for name in pair])


def _average(rows: Sequence[tuple[Update, int]]) -> Model:
    """Return the plain mean of a pair's discriminators (as in the paper, for any sizes)."""
    (one, k), (other, m) = ((update.extras[wire.DISCRIMINATORS], at) for update, at in rows)
    return {
        key: np.asarray(
            np.mean([one[key][k], other[key][m]], axis=0, dtype=np.float32), dtype=one[key].dtype
        )
        for key in one
    }
