"""A split from a few configuration keys: ``make_split`` and the table of kinds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from coterie.tasks.base import Option, TaskError
from coterie.tasks.splits import shares as kinds
from coterie.tasks.splits.shares import Indices, Matrix, checked_labels, count_classes, cut
from coterie.tasks.splits.shifts import permutation


@dataclass(frozen=True)
class Share:
    """One silo's share: sorted indices into the training part and into the test part.

    Without a test part, ``test`` indexes the training part too, disjoint from ``train``.
    ``rotation`` is in degrees; ``labels`` (num_classes,) is the label that each label becomes, or
    None.
    """

    train: Indices
    test: Indices
    rotation: float = 0.0
    labels: Indices | None = None


Plan = Callable[[Mapping[str, Any], Indices, np.random.Generator], tuple[Matrix, Matrix]]
"""Shares of the training and test parts; they differ if a paper tests on other sizes."""


def _drawn(draw: Callable[..., Matrix], *keys: str) -> Plan:
    """Return a plan that draws the shares with these keys and uses them for both parts."""

    def plan(
        chosen: Mapping[str, Any], counts: Indices, rng: np.random.Generator
    ) -> tuple[Matrix, Matrix]:
        own = {key.replace("-", "_"): chosen[key] for key in keys}
        shares = draw(counts, chosen["silos"], **own, rng=rng)
        return shares, shares

    return plan


def _plan_dirichlet(
    chosen: Mapping[str, Any], counts: Indices, rng: np.random.Generator
) -> tuple[Matrix, Matrix]:
    alpha, least = chosen["dirichlet-alpha"], chosen["min-samples"]
    shares = kinds.dirichlet_shares(
        counts, chosen["silos"], alpha=alpha, min_samples=least, rng=rng
    )
    return shares, shares


def _plan_sizes(
    chosen: Mapping[str, Any], counts: Indices, rng: np.random.Generator
) -> tuple[Matrix, Matrix]:
    wanted = _numbers(chosen, "sizes", _size_list)
    if len(wanted) != chosen["silos"]:
        raise TaskError(f"sizes must name {chosen['silos']} sizes, as many as silos. Got {wanted}.")
    return kinds.sizes_shares(wanted, int(counts.sum())), kinds.iid_shares(chosen["silos"])


def _plan_label_groups(
    chosen: Mapping[str, Any], counts: Indices, rng: np.random.Generator
) -> tuple[Matrix, Matrix]:
    groups = _numbers(chosen, "groups", lambda text: [_list(g, int) for g in text.split(";")])
    large = kinds.label_groups_shares(
        counts, chosen["silos"], groups=groups, own_share=chosen["own-share"]
    )
    # small silos are tested on as many samples as large ones (350 in the paper)
    return kinds.shrink(large, chosen["small-from"], chosen["small-share"]), large


def _plan_three_silos(
    chosen: Mapping[str, Any], counts: Indices, rng: np.random.Generator
) -> tuple[Matrix, Matrix]:
    if chosen["silos"] != 3:
        raise TaskError(f"split three-silos has 3 silos. Got {chosen['silos']}.")
    return kinds.three_silos_shares(counts, rng=rng)


@dataclass(frozen=True)
class Kind:
    """A kind of split: its own keys with defaults, and how to draw its shares."""

    keys: Mapping[str, Option]
    plan: Plan


KINDS: dict[str, Kind] = {
    "iid": Kind({}, _drawn(lambda counts, silos, rng: kinds.iid_shares(silos))),
    "sizes": Kind({"sizes": ""}, _plan_sizes),
    "half-normal": Kind({}, _drawn(kinds.half_normal_shares, "min-samples")),
    "dirichlet": Kind({"dirichlet-alpha": 1.0}, _plan_dirichlet),
    "classes-per-silo": Kind({"classes": 2}, _drawn(kinds.classes_per_silo_shares, "classes")),
    "one-class-shards": Kind({"shards": 100}, _drawn(kinds.one_class_shards_shares, "shards")),
    "power-law": Kind(
        {"classes": 2, "base": 5, "sigma": 2.0},
        _drawn(kinds.power_law_shares, "classes", "base", "sigma"),
    ),
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


def make_split(
    config: Mapping[str, Option],
    labels: ArrayLike,
    *,
    test_labels: ArrayLike | None = None,
    num_classes: int | None = None,
) -> list[Share]:
    """Cut a data set into one share per silo, as defined by the keys of ``config``.

    Keys of every kind:
        kind: one of ``KINDS``.
        silos: number of silos. Required (``three-silos``: 3).
        seed: ≥ 0. The same keys and labels give the same split on every machine.
        samples: total number of training samples, drawn at random; 0 = all.
        min-samples: minimum number of training samples per silo.
        test: ``own`` = test a silo on its own share of the test part; ``all`` = on the whole test
            part (FedGenP's global model).
        test-share: in (0, 1), only without ``test_labels``: the part of each silo's own samples
            held out for testing (as in HCCT and FedGroup).
        rotations: degrees, "a,b,…": silo i of N is rotated by entry ``i · len // N``.
        permutations: k: silo i of N has label permutation ``i · k // N``; 1 = none.

    Keys of one kind: ``dirichlet-alpha`` (dirichlet); ``classes`` (classes-per-silo, power-law);
    ``shards`` (one-class-shards); ``base``, ``sigma`` (power-law); ``sizes``, as "2500x10,340x10";
    ``groups`` as "0,1;1,2", ``own-share``, ``small-from``, ``small-share`` (label-groups).

    Args:
        labels: (n,) labels of the training part.
        test_labels: (m,) labels of the test part, cut by the same shares. None: see test-share.
        num_classes: number of classes, if some class may have no samples.

    Raises:
        TaskError: a kind or key is unknown, or the split is impossible with these samples.
    """
    kind, chosen = _read(config)
    y = checked_labels(labels, chosen["silos"])
    t = None if test_labels is None else checked_labels(test_labels, 1)
    rng = np.random.default_rng([chosen["seed"], 0])
    used = _subsample(len(y), chosen["samples"], rng)
    known = max(int(part.max()) + 1 for part in (y, t) if part is not None)
    counts = count_classes(y[used], num_classes or known)
    shares, test_shares = KINDS[kind].plan(chosen, counts, rng)
    trains = [used[part] for part in cut(y[used], shares, rng=rng)]
    if t is None:
        if chosen["test"] == "all":
            raise TaskError("test='all' needs test labels: these data have no test part.")
        pairs = [_hold_out(part, chosen["test-share"], rng) for part in trains]
    else:
        tests = _test_parts(t, test_shares, chosen, rng)
        pairs = list(zip(trains, tests, strict=True))
    _check_sizes(kind, pairs, chosen["min-samples"])
    return [_share(pair, silo, chosen, len(counts)) for silo, pair in enumerate(pairs)]


def _read(config: Mapping[str, Option]) -> tuple[str, dict[str, Any]]:
    """Return the kind, and its keys with defaults filled in and values checked."""
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
            f"samples must be at most the {available} available (0 = all). Got {wanted}."
        )
    if not wanted:
        return np.arange(available)
    return np.sort(rng.choice(available, size=wanted, replace=False))


def _hold_out(part: Indices, share: float, rng: np.random.Generator) -> tuple[Indices, Indices]:
    """Split a silo's samples into (train, test), at least one each if there are two."""
    if not 0 < share < 1:
        raise TaskError(
            "without a separate test part, a split needs test-share, the share of each silo's "
            f"samples held out for testing, in (0, 1). Got {share}."
        )
    count = len(part)
    least = 1 / count if count > 1 else 0.0
    kept = min(max(share, least), 1 - least)
    test, train = cut(part, np.array([[kept], [1 - kept]]), rng=rng)
    return part[train], part[test]


def _test_parts(
    labels: Indices,
    shares: Matrix,
    chosen: Mapping[str, Any],
    rng: np.random.Generator,
) -> list[Indices]:
    if chosen["test-share"]:
        raise TaskError(
            "test-share needs data without a separate test part; these data have one. Leave it "
            "out, or join the two parts first."
        )
    if chosen["test"] == "all":
        return [np.arange(len(labels))] * len(shares)
    return cut(labels, shares, rng=rng)


def _check_sizes(kind: str, pairs: Sequence[tuple[Indices, Indices]], min_samples: int) -> None:
    for silo, (train, test) in enumerate(pairs):
        if len(train) < max(min_samples, 1):
            raise TaskError(
                f"split {kind!r} leaves silo {silo} with {len(train)} training samples, fewer "
                f"than {max(min_samples, 1)}. Use fewer silos, more samples or another seed."
            )
        if len(test) == 0:
            raise TaskError(
                f"split {kind!r} leaves silo {silo} without test samples. Use fewer silos, a "
                "larger min-samples or test-share, test='all', or another seed."
            )


def _share(
    pair: tuple[Indices, Indices], silo: int, chosen: Mapping[str, Any], num_classes: int
) -> Share:
    silos = chosen["silos"]
    angles = [0.0]
    if chosen["rotations"]:
        angles = _numbers(chosen, "rotations", lambda text: _list(text, float))
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


def _list(text: str, kind: type[Any]) -> list[Any]:
    return [kind(word) for word in text.split(",")]


def _size_list(text: str) -> list[int]:
    """Parse ``"2500x10,340"`` as ten times 2500 and once 340."""
    found: list[int] = []
    for word in text.split(","):
        size, _, times = word.partition("x")
        found += [int(size)] * int(times or 1)
    return found
