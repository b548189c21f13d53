"""The declarations of tables that many tests train on."""

from __future__ import annotations

import json
from collections.abc import Iterable


def declaration(
    *numeric: str,
    name: str = "study",
    target: str = "ill",
    network: str = "mclr",
    scale: str = "",
    **categorical: Iterable[str],
) -> str:
    """Return the task file of a table with the classes no and yes; columns by their names."""
    text = f'kind = "table"\nname = "{name}"\ntarget = "{target}"\nclasses = ["no", "yes"]\n'
    text += f'numeric = {_listed(numeric)}\nnetwork = "{network}"\n'
    text += f'scale = "{scale}"\n' if scale else ""
    text += "[categorical]\n" if categorical else ""
    return text + "".join(f"{column} = {_listed(own)}\n" for column, own in categorical.items())


def _listed(words: Iterable[str]) -> str:
    return json.dumps(list(words), ensure_ascii=False)
