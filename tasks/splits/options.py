"""Split options of a task: silos that share one data set select their shares."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from numpy.typing import ArrayLike

from coterie.tasks.base import Option, TaskError
from coterie.tasks.splits.config import COMMON_KEYS, KINDS, Share, make_split

SPLIT_OPTIONS: dict[str, Option] = {"split": "none", "silos": 0, "silo": -1, "test-share": 0.0}
SPLIT_KEYS: dict[str, Option] = {
    f"split-{key}": default
    for keys in (COMMON_KEYS, *(kind.keys for kind in KINDS.values()))
    for key, default in keys.items()
    if key not in ("silos", "test-share")  # these two go by their own names
}


def check_split(options: Mapping[str, Option], chosen: Mapping[str, Any]) -> None:
    """Check the split options, as given and with defaults filled in (``chosen``).

    Raises:
        TaskError: a kind is unknown, a share is outside [0, 1), or split keys have no split.
    """
    if not 0 <= chosen["test-share"] < 1:
        raise TaskError(f"test-share must be in [0, 1). Got {chosen['test-share']}.")
    if chosen["split"] == "none":
        stray = [k for k in options if k in SPLIT_KEYS and k != "split-seed"]
        stray += [k for k in ("silos", "silo", "test-share") if k in options]
        if stray:
            raise TaskError(
                f"option {stray[0]!r} belongs to a split. Set split to one of "
                f"{', '.join(KINDS)}, or leave it out."
            )
    elif chosen["split"] not in KINDS:
        raise TaskError(
            f"split must be none or one of {', '.join(KINDS)}. Got {chosen['split']!r}."
        )


def shares_of(
    options: Mapping[str, Option],
    chosen: Mapping[str, Any],
    labels: ArrayLike,
    *,
    test_labels: ArrayLike | None,
    num_classes: int,
) -> list[Share]:
    """Return every silo's share of a data set; see ``check_split`` and ``make_split``."""
    # only the keys that were given: a key that the kind does not have must be refused
    config = {k.removeprefix("split-"): chosen[k] for k in options if k in SPLIT_KEYS}
    config["kind"] = chosen["split"]
    if chosen["silos"]:
        config["silos"] = chosen["silos"]
    if test_labels is None:
        config["test-share"] = chosen["test-share"]
    return make_split(config, labels, test_labels=test_labels, num_classes=num_classes)


def silos_asked(silos: Sequence[int] | None, num_silos: int) -> Sequence[int]:
    """Return the silos to load, by default all; raise ``TaskError`` for a number out of range."""
    wanted = range(num_silos) if silos is None else silos
    for silo in wanted:
        if not 0 <= silo < num_silos:
            raise TaskError(f"silo must be in [0, {num_silos - 1}]. Got {silo}.")
    return wanted
