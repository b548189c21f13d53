"""A split from a few configuration keys: ``make_split`` and the table of kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from coterie.tasks.base import Option, TaskError
from coterie.tasks.splits.shares import (
    Indices,
    Matrix,
    by_domain_shares,
    checked_labels,
    classes_per_silo_shares,
    count_classes,
    cut,
    dirichlet_shares,
    half_normal_shares,
    iid_shares,
    label_groups_shares,
    one_class_shards_shares,
    power_law_shares,
    shrink,
    sizes_shares,
    three_silos_shares,
)
from coterie.tasks.splits.shifts import permutation


@dataclass(frozen=True)
class Share:
    """What one silo gets.

    Attributes:
        train: indices into the training part, sorted.
        test: indices into the test part, or into the same part if only one was given; disjoint
            from ``train`` then.
        rotation: degrees by which its images are to be turned.
        labels: shape (num_classes,), the label that each label becomes, or None.
    """

    train: Indices
    test: Indices
    rotation: float = 0.0
    labels: Indices | None = None


@dataclass(frozen=True)
class _Shares:
    """Matrices for the two parts; they differ where a paper tests on other sizes."""

    train: Matrix
    test: Matrix


Plan = Callable[[Mapping[str, Any], Indices, np.random.Generator], _Shares]


def _same(shares: Matrix) -> _Shares:
    return _Shares(shares, shares)


def _plan_sizes(chosen: Mapping[str, Any], counts: Indices, rng: np.random.Generator) -> _Shares:
    wanted = _numbers(chosen, "sizes", _size_list)
    if len(wanted) != chosen["silos"]:
        raise TaskError(f"sizes must name {chosen['silos']} sizes, as many as silos. Got {wanted}.")
    return _Shares(sizes_shares(wanted, int(counts.sum())), iid_shares(chosen["silos"]))


def _plan_half_normal(
    chosen: Mapping[str, Any], counts: Indices, rng: np.random.Generator
) -> _Shares:
    return _same(
        half_normal_shares(
            chosen["silos"], int(counts.sum()), min_samples=chosen["min-samples"], rng=rng
        )
    )


def _plan_dirichlet(
    chosen: Mapping[str, Any], counts: Indices, rng: np.random.Generator
) -> _Shares:
    alpha, least = chosen["alpha"], chosen["min-samples"]
    return _same(dirichlet_shares(counts, chosen["silos"], alpha=alpha, min_samples=least, rng=rng))


def _plan_power_law(
    chosen: Mapping[str, Any], counts: Indices, rng: np.random.Generator
) -> _Shares:
    keys = {key: chosen[key] for key in ("classes", "base", "sigma")}
    return _same(power_law_shares(counts, chosen["silos"], **keys, rng=rng))


def _plan_label_groups(
    chosen: Mapping[str, Any], counts: Indices, rng: np.random.Generator
) -> _Shares:
    groups = _numbers(chosen, "groups", lambda text: [_ints(g) for g in text.split(";")])
    large = label_groups_shares(
        counts, chosen["silos"], groups=groups, own_share=chosen["own-share"]
    )
    # small silos are tested on as many samples as large ones (350 in the paper)
    return _Shares(shrink(large, chosen["small-from"], chosen["small-share"]), large)


def _plan_three_silos(
    chosen: Mapping[str, Any], counts: Indices, rng: np.random.Generator
) -> _Shares:
    if chosen["silos"] != 3:
        raise TaskError(f"split three-silos has 3 silos. Got {chosen['silos']}.")
    return _Shares(*three_silos_shares(counts, rng=rng))


@dataclass(frozen=True)
class Kind:
    """A kind of split: its own keys with their defaults, and how its shares are drawn."""

    keys: Mapping[str, Option]
    plan: Plan


KINDS: dict[str, Kind] = {
    "iid": Kind({}, lambda chosen, counts, rng: _same(iid_shares(chosen["silos"]))),
    "sizes": Kind({"sizes": ""}, _plan_sizes),
    "half-normal": Kind({}, _plan_half_normal),
    "dirichlet": Kind({"alpha": 1.0}, _plan_dirichlet),
    "classes-per-silo": Kind(
        {"classes": 2},
        lambda chosen, counts, rng: _same(
            classes_per_silo_shares(counts, chosen["silos"], classes=chosen["classes"], rng=rng)
        ),
    ),
    "one-class-shards": Kind(
        {"shards": 100},
        lambda chosen, counts, rng: _same(
            one_class_shards_shares(counts, chosen["silos"], shards=chosen["shards"], rng=rng)
        ),
    ),
    "power-law": Kind({"classes": 2, "base": 5, "sigma": 2.0}, _plan_power_law),
    "label-groups": Kind(
        {
            "groups": "0,1,2,3;1,2,3,4;5,6,7,8;6,7,8,9",
            "own-share": 0.25,
            "small-from": 10,
            "small-share": 14 / 2100,
        },
        _plan_label_groups,
    ),
    "three-silos": Kind({}, _plan_three_silos),
    "by-domain": Kind(
        {}, lambda chosen, counts, rng: _same(by_domain_shares(counts, chosen["silos"]))
    ),
}
"""Name → kind. The defaults are the papers' settings."""

COMMON_KEYS: dict[str, Option] = {
    "silos": 0,
    "seed": 0,
    "samples": 0,
    "min-samples": 1,
    "test": "own",
    "test-share": 0.0,
    "rotations": "",
    "permutations": 1,
}
"""Keys of every kind; see ``make_split``."""

UNITS_KINDS = ("iid", "by-domain")


def make_split(
    config: Mapping[str, Option],
    labels: ArrayLike,
    *,
    test_labels: ArrayLike | None = None,
    num_classes: int | None = None,
    units: ArrayLike | None = None,
    test_units: ArrayLike | None = None,
) -> list[Share]:
    """Cut a data set into one share per silo, as a few keys say.

    Keys of every kind:
        kind: one of ``KINDS``.
        silos: how many. Required (``three-silos``: 3).
        seed: ≥ 0. The same keys and labels give the same split on every machine.
        samples: use only so many training samples in all, taken at random; 0 = all.
        min-samples: no silo gets fewer training samples.
        test: ``own`` = a silo is tested on its own share of the test part; ``all`` = on the
            whole test part (FedGenP's global model).
        test-share: in (0, 1), only without ``test_labels``: the part of each silo's own
            samples that it keeps for testing (HCCT and FedGroup cut their test data so).
        rotations: degrees, "a,b,…": silo i of N is turned by entry ``i · len // N``.
        permutations: k: silo i of N has its labels permuted by number ``i · k // N``; 1 = not.

    Keys of one kind: ``alpha`` (dirichlet); ``classes`` (classes-per-silo, power-law);
    ``shards`` (one-class-shards); ``base``, ``sigma`` (power-law); ``sizes``, as "2500x10,340x10";
    ``groups`` as "0,1;1,2", ``own-share``, ``small-from``, ``small-share`` (label-groups).

    Args:
        config: the keys above.
        labels: shape (n,), the training part's labels; the domains' numbers for ``by-domain``.
        test_labels: shape (m,), the test part's; cut by the same shares. None: see test-share.
        num_classes: number of classes, if some class may have no sample.
        units, test_units: as in ``cut``; for kinds ``iid`` and ``by-domain``. A unit is never on
            both sides of a silo's test-share either.

    Raises:
        TaskError: an unknown kind or key, or a split that is impossible with these samples.
    """
    kind, chosen = _read(config)
    y = checked_labels(labels, chosen["silos"])
    if units is not None and kind not in UNITS_KINDS:
        raise TaskError(f"units can be kept together only by {UNITS_KINDS}. Got {kind!r}.")
    t = None if test_labels is None else checked_labels(test_labels, 1)
    rng = np.random.default_rng([chosen["seed"], 0])
    used = _subsample(len(y), chosen["samples"], rng)
    known = max(int(part.max()) + 1 for part in (y, t) if part is not None)
    counts = count_classes(y[used], num_classes or known)
    shares = KINDS[kind].plan(chosen, counts, rng)
    own_units = None if units is None else np.asarray(units)
    cuts = cut(y[used], shares.train, rng=rng, units=None if own_units is None else own_units[used])
    trains = [used[part] for part in cuts]
    if t is None:
        if chosen["test"] == "all":
            raise TaskError("test='all' needs test labels: there is no test part here.")
        pairs = [_hold_out(part, chosen["test-share"], own_units, rng) for part in trains]
    else:
        tests = _test_parts(t, shares.test, chosen, test_units, rng)
        pairs = list(zip(trains, tests, strict=True))
    _check_sizes(kind, pairs, chosen["min-samples"])
    return [_share(pair, silo, chosen, len(counts)) for silo, pair in enumerate(pairs)]


def _read(config: Mapping[str, Option]) -> tuple[str, dict[str, Any]]:
    """Defaults filled in, types and bounds checked."""
    kind = str(config.get("kind", ""))
    if kind not in KINDS:
        raise TaskError(f"kind of split must be one of {', '.join(KINDS)}. Got {kind!r}.")
    chosen: dict[str, Any] = {**COMMON_KEYS, **KINDS[kind].keys}
    if kind == "three-silos":
        chosen["silos"] = 3
    for key, value in config.items():
        if key == "kind":
            continue
        if key not in chosen:
            raise TaskError(
                f"split {kind!r} has no key {key!r}. It has: {', '.join(sorted(chosen))}."
            )
        chosen[key] = _typed(key, value, type(chosen[key]))
    if chosen["silos"] < 1:
        raise TaskError(f"split {kind!r} needs silos, at least 1. Got {chosen['silos']}.")
    for key in ("seed", "samples", "min-samples"):
        if chosen[key] < 0:
            raise TaskError(f"{key} of a split must be at least 0. Got {chosen[key]}.")
    if chosen["test"] not in ("own", "all"):
        raise TaskError(f"test of a split must be 'own' or 'all'. Got {chosen['test']!r}.")
    if chosen["permutations"] < 1:
        raise TaskError(f"permutations must be at least 1. Got {chosen['permutations']}.")
    return kind, chosen


def _typed(key: str, value: Option, kind: type[Any]) -> Any:
    try:
        typed = kind(value)
        if kind is int and float(value) != typed:
            raise ValueError
    except (TypeError, ValueError):
        raise TaskError(
            f"key {key!r} of a split must be of type {kind.__name__}. Got {value!r}."
        ) from None
    return typed


def _subsample(available: int, wanted: int, rng: np.random.Generator) -> Indices:
    if wanted > available:
        raise TaskError(
            f"samples must be at most the {available} there are (0 = all). Got {wanted}."
        )
    if not wanted:
        return np.arange(available)
    return np.sort(rng.choice(available, size=wanted, replace=False))


def _hold_out(
    part: Indices, share: float, units: NDArray[Any] | None, rng: np.random.Generator
) -> tuple[Indices, Indices]:
    """A silo's own samples as (train, test), at least one on each side where there are two."""
    if not 0 < share < 1:
        raise TaskError(
            "without a test part of its own, a split needs test-share, the part of each silo's "
            f"samples that is kept for testing, in (0, 1). Got {share}."
        )
    count = len(part)
    least = 1 / count if count > 1 else 0.0
    kept = min(max(share, least), 1 - least)
    inner = None if units is None else units[part]
    test, train = cut(part, np.array([[kept], [1 - kept]]), rng=rng, units=inner)
    return part[train], part[test]


def _test_parts(
    labels: Indices,
    shares: Matrix,
    chosen: Mapping[str, Any],
    units: ArrayLike | None,
    rng: np.random.Generator,
) -> list[Indices]:
    if chosen["test-share"]:
        raise TaskError(
            "test-share is for data without a test part of its own; here there is one. "
            "Leave it out, or join the two parts first."
        )
    if chosen["test"] == "all":
        return [np.arange(len(labels))] * len(shares)
    return cut(labels, shares, rng=rng, units=units)


def _check_sizes(kind: str, pairs: Sequence[tuple[Indices, Indices]], min_samples: int) -> None:
    for silo, (train, test) in enumerate(pairs):
        if len(train) < max(min_samples, 1):
            raise TaskError(
                f"split {kind!r} leaves silo {silo} with {len(train)} training samples, fewer "
                f"than {max(min_samples, 1)}. Take fewer silos, more samples or another seed."
            )
        if len(test) == 0:
            raise TaskError(
                f"split {kind!r} leaves silo {silo} without test samples. Take fewer silos, "
                "a larger min-samples or test-share, test='all', or another seed."
            )


def _share(
    pair: tuple[Indices, Indices], silo: int, chosen: Mapping[str, Any], num_classes: int
) -> Share:
    silos = chosen["silos"]
    angles = _numbers(chosen, "rotations", _floats) if chosen["rotations"] else [0.0]
    number = silo * chosen["permutations"] // silos
    labels = permutation(num_classes, seed=chosen["seed"], number=number) if number else None
    return Share(*pair, rotation=angles[silo * len(angles) // silos], labels=labels)


def _numbers(chosen: Mapping[str, Any], key: str, parse: Callable[[str], Any]) -> Any:
    try:
        return parse(chosen[key])
    except ValueError:
        raise TaskError(
            f"{key} of a split cannot be read as numbers. Got {chosen[key]!r}."
        ) from None


def _ints(text: str) -> list[int]:
    return [int(word) for word in text.split(",")]


def _floats(text: str) -> list[float]:
    return [float(word) for word in text.split(",")]


def _size_list(text: str) -> list[int]:
    """``"2500x10,340"`` → ten times 2500, once 340."""
    found: list[int] = []
    for word in text.split(","):
        size, _, times = word.partition("x")
        found += [int(size)] * int(times or 1)
    return found
