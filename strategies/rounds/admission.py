"""Admission: why a silo that describes itself cannot take part in a run."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import cache
from importlib.metadata import PackageNotFoundError, version

from coterie import wire

MAX_EXAMPLES = 1e9
"""More training samples than any silo has; one that states more is wrong or wants more weight."""

_NAMED = (
    "other arrays as statistics",
    "another number of columns to scale",
    "another primary metric",
)
"""How two descriptions of one schema may differ, in the order of ``wire.Description.common``."""
_WEIGHTS = re.compile(r"/([\w.-]{1,64}):([0-9a-f]{16})$")
"""The end of a schema whose model starts from a file or has a frozen part: its name and SHA-256."""


def objection(described: wire.Description, task: str) -> str:
    """Return why a silo cannot take part in any run of this task; empty if it can."""
    if not wire.is_spoken(described.protocol):
        return (
            f"it speaks protocol {described.protocol}, the run speaks "
            f"{wire.OLDEST_PROTOCOL} to {wire.PROTOCOL}."
        )
    if described.task != task:
        own = ", ".join(map(repr, described.tasks)) or repr(described.task)
        return f"it serves task {own}, {wire.OTHER_TASK} {task!r}."
    theirs = release_of(described)
    if not wire.talk(theirs, own_release()):
        return (
            f"it has coterie {theirs}, the coordinator has {own_release()}: each release works "
            "with the previous and the next one. Upgrade the older side."
        )
    if not wire.is_silo_name(described.name):
        return "its name must have 1 to 64 letters, digits, '.', '_' or '-'."
    if described.alpha is not None and not 0 <= described.alpha < float("inf"):
        return f"its alpha must be finite and at least 0. Got {described.alpha}."
    if described.min_group_size < 1:
        return f"its min_group_size must be at least 1. Got {described.min_group_size}."
    if described.max_local_epochs < 0:
        return f"its max_local_epochs must be at least 0. Got {described.max_local_epochs}."
    if not 0 < described.num_examples <= MAX_EXAMPLES:
        return (
            f"it states {described.num_examples} training samples; it must be at least 1 and "
            f"at most {MAX_EXAMPLES:g}."
        )
    return ""


def difference(
    described: wire.Description,
    schema: str,
    parts: wire.Parts,
    agreed: wire.Description | None,
    silos: Iterable[str],
) -> str:
    """Return what differs, as far as schemas show; they may end in a file and its checksum."""
    ours, theirs = map(_WEIGHTS.search, (schema, described.schema))
    here = ", ".join(sorted(silos)) or "the run's silos"
    if described.schema == schema and agreed is not None:
        pairs = zip(described.common[1:], agreed.common[1:], _NAMED, strict=True)
        other = [name for own, common, name in pairs if own != common]
        return (
            f"it states {' and '.join(other)} than {here} for the same task. Install the same "
            "code and release at every silo."
        )
    known = parts and described.parts
    if found := wire.differences(parts, described.parts) if known else []:
        return (
            f"its task is not that of {here}: {', '.join(found)} "
            f"{'differs' if len(found) == 1 else 'differ'} (schema differs). Use the same "
            "declaration or code of the task at every silo."
        )
    if ours is not None and theirs is not None and ours[0] != theirs[0]:
        return (
            f"its initial weights differ: its {theirs[1]} has SHA-256 {theirs[2]}…, that of "
            f"{here} ({ours[1]}) {ours[2]}… (schema differs). Use the same file at every silo."
        )
    return f"its model has different arrays or classes than that of {here} (schema differs)."


@cache
def own_release() -> str:
    """Return the version of coterie here; empty if it runs from its source."""
    try:
        return version("coterie")
    except PackageNotFoundError:
        return ""


def release_of(described: wire.Description) -> str:
    """Return the version of coterie that a silo states; empty if it states none."""
    return (described.versions or {}).get("coterie", "")
