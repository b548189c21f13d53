"""The only table, for people, of what a silo's policy reveals about its data, and to whom.

A new policy setting that bounds what leaves the silo adds a row here or changes those it bounds.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from coterie.client.home.policy import REVEALING, Policy
from coterie.wire import NETWORK, TREES, page


@dataclass(frozen=True)
class About:
    """Facts about the silo that the table needs.

    Attributes:
        samples, tests: number of training and of test samples.
        metrics: names of the metrics that would leave.
        columns: number of numeric columns whose sums the task needs.
        epsilon: of differential privacy, over all runs; 0 without it.
        persons: persons behind the training samples; 0: each sample is from a different person.
        most: the most samples of one person.
        families: of the task's models: networks, trees, or both.
    """

    samples: int
    tests: int
    metrics: tuple[str, ...]
    columns: int = 0
    epsilon: float = 0.0
    persons: int = 0
    most: int = 1
    families: tuple[str, ...] = (NETWORK,)

    @property
    def behind(self) -> int:
        """The number that ``min_samples`` bounds."""
        return self.persons or self.samples

    @property
    def unit(self) -> str:
        """The unit of ``behind``."""
        return "persons" if self.persons else "samples"

    @property
    def of_a_person(self) -> str:
        """The meaning of ε for a person with several samples."""
        return f" (for a person, up to {self.most} times that)" if self.most > 1 else ""


def _updates(policy: Policy, about: About) -> str:
    kept = f", less the layers {policy.keep_layers!r}" if policy.keep_layers else ""
    if about.epsilon:
        kept += (
            f", with noise: of one row, added or removed, no more than "
            f"ε = {about.epsilon:g} allows{about.of_a_person}"
        )
    if policy.secure:
        return (
            f"the coordinator sees no update, but a sketch of each, and sums over groups{kept}; "
            f"a lying one can get them (see {page('Secure runs')})"
        )
    return (
        f"the coordinator sees each of them{kept}; in secure runs none, unless it lies (secure "
        '= "required" refuses all other runs)'
    )


def _sums(policy: Policy, about: About) -> str:
    if not policy.peers:
        return (
            "in secure runs with any silo that the coordinator vouches for: it could add fake "
            "silos (peers prevents that)"
        )
    named = ", ".join(peer.split()[0] for peer in policy.peers)
    return f"in secure runs only with {named}, whose keys you have compared"


def _behind(policy: Policy, about: About) -> str:
    called = " samples" if about.persons else ""
    step = f", of {policy.min_batch}{called} in each step" if policy.min_batch > 1 else ""
    if about.behind < policy.min_samples:
        called = " persons" if about.persons else ""
        return (
            f"all {about.behind}{called} of yours{step}, fewer than min_samples = "
            f"{policy.min_samples}: the coordinator may be able to reconstruct single ones"
        )
    return (
        f"at least {policy.min_samples} different {about.unit}{step}: from fewer, single ones "
        "can be reconstructed"
    )


def _group(policy: Policy, about: About) -> str:
    if policy.min_group_size <= 2:
        return (
            "sees the mean of its updates; in a group of two, each silo can compute the "
            "other's (min_group_size = 3 prevents that)"
        )
    return f"sees the mean of at least {policy.min_group_size} silos' updates"


def _own_model(policy: Policy, about: About) -> str:
    if policy.secure or (policy.strategies and "fedensemble" not in policy.strategies):
        return "is sent to no other silo"
    return "is sent to every other silo in fedensemble runs, in no others"


def _how_often(policy: Policy, about: About) -> str:
    rounds, tests = (
        f"at most {most:,}" if most else "any number of"
        for most in (policy.max_rounds, policy.max_evaluations)
    )
    return (
        f"updates of {rounds} rounds, {tests} evaluations in each; the coordinator's operator can "
        "start another"
    )


def _samples(policy: Policy, about: About) -> str:
    return f"the coordinator learns: {about.samples} for training, {about.tests} for tests"


def _metrics(policy: Policy, about: About) -> str:
    if not about.metrics:
        return "the coordinator learns none"
    found = f"the coordinator learns: {', '.join(about.metrics)}"
    if policy.subgroups:
        found += (
            f"; of models that it only evaluates also by {', '.join(policy.subgroups)}, for no "
            f"fewer than {policy.statistics_from} {'persons' if about.persons else 'samples'}"
        )
    return found


def _labels(policy: Policy, about: About) -> str:
    revealing = sorted(REVEALING & set(about.metrics))
    disclosed = (
        "in fedgen runs, the coordinator learns them, and every silo the labels' shares over "
        "all silos"
    )
    of_groups = " of groups" if policy.secure else ""
    found = [
        *(
            [f"their totals follow exactly from the sums{of_groups} for trees"]
            * (TREES in about.families and TREES in policy.sums and not about.epsilon)
        ),
        *([disclosed] * (policy.label_counts and not about.epsilon)),
        *([f"the coordinator can compute them from {', '.join(revealing)}"] if revealing else []),
        *(["partly, from discriminators"] if _discriminators_leave(policy, about) else []),
    ]
    # Wainakh et al. 2022, "User-level label leakage"
    if NETWORK in about.families and policy.keep_layers != "head":
        what = "sums over groups" if policy.secure else "updates"
        found.append(f"the coordinator can estimate them from {what} of the last layer")
    return "; ".join(found) or "not shared"


def _columns(policy: Policy, about: About) -> str:
    if not about.columns:
        return "not shared: this task needs none"
    if not policy.column_sums or about.epsilon:
        return "not shared (column_sums); the silo uses the other silos' scale"
    return (
        f"the coordinator learns count, mean and deviation of each of {about.columns} with at "
        f"least {policy.column_sums_from} "
        f"numbers{' of different persons' * bool(about.persons)}, and every silo those over all "
        "silos that allow it"
    )


def _statistics(policy: Policy, about: About) -> str:
    if not policy.statistics or about.epsilon:
        return "not shared (statistics)"
    return (
        "the coordinator learns how many samples are in each interval or category of "
        f"{' and '.join(policy.statistics)}, but "
        f"no number below {policy.statistics_from}{' persons' * bool(about.persons)}"
    )


def _fitted(policy: Policy, about: About) -> str:
    families = [family for family in policy.sums if family != "alone"]
    if not families or about.epsilon:
        return "not shared (sums)"
    unit = " persons" if about.persons else ""
    of = "your training rows together with other silos'" if policy.secure else "your training rows"
    return (
        f"the coordinator learns sums over {of}, for {' and '.join(families)}"
        f"{', also of you alone' * ('alone' in policy.sums)}; no sum is over fewer than "
        f"{policy.statistics_from}{unit}"
    )


def _discriminators(policy: Policy, about: About) -> str:
    if _discriminators_leave(policy, about):
        return (
            "in fedcollab and auto runs, the coordinator and the other silo of each pair can "
            "read from them which labels you have, or how your real targets lie; with unlabelled "
            "silos, what your samples look like, but no labels"
        )
    if _placing_leaves(policy, about):
        return "only with unlabelled silos: they show what your samples look like, but no labels"
    if policy.min_group_size > 2 and policy.auxiliary and not policy.secure:
        return "none leave: they are averaged in pairs"
    return "none leave"


def _discriminators_leave(policy: Policy, about: About) -> bool:
    takes_part = not policy.strategies or bool({"fedcollab", "auto"} & set(policy.strategies))
    return takes_part and _placing_leaves(policy, about)


def _placing_leaves(policy: Policy, about: About) -> bool:
    """Return whether feature-only discriminators, which place silos without labels, leave."""
    return policy.auxiliary and policy.min_group_size <= 2 and not (policy.secure or about.epsilon)


def _made(policy: Policy, about: About) -> str:
    if about.epsilon:
        return (
            "its recipients can tell whether one row was added or removed, but no better than "
            f"ε = {about.epsilon:g} allows{about.of_a_person}"
        )
    return (
        "its recipients may find out whether a sample that they have was trained on: no noise "
        "is added"
    )


ROWS: Mapping[str, Callable[[Policy, About], str]] = {
    "your updates": _updates,
    "behind an update": _behind,
    "a run gets": _how_often,
    "your group": _group,
    "sums": _sums,
    "your own model": _own_model,
    "the model made": _made,
    "numbers of samples": _samples,
    "metrics": _metrics,
    "label counts": _labels,
    "sums of columns": _columns,
    "statistics": _statistics,
    "sums for models": _fitted,
    "discriminators": _discriminators,
    "samples, labels": lambda policy, about: "never leave",
}
"""Item → who can learn what about it."""


def learned_lines(policy: Policy, about: About) -> Iterator[str]:
    """Yield the table, one line per item."""
    width = max(map(len, ROWS)) + 1
    for item, said in ROWS.items():
        yield f"  {item + ':':{width}} {said(policy, about)}"
