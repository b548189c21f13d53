"""Acts of operators beyond Flower's calls, done in the federation's folder or through its gate."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from coterie.server.site import audit
from coterie.server.site.federation import Federation
from coterie.server.site.operator import enrol_silo, remove_silo, withdraw_silo
from coterie.server.site.queue import Queue, enqueue

Asked = Mapping[str, str]


def _enrol(made: Federation, who: str, asked: Asked) -> dict[str, Any]:
    lines, bundle = enrol_silo(made, asked["request"], who=who)
    return {"lines": lines, "bundle": bundle}


def _remove(made: Federation, who: str, asked: Asked) -> dict[str, Any]:
    return {"lines": [remove_silo(made, asked["name"], who=who)]}


def _withdraw(made: Federation, who: str, asked: Asked) -> dict[str, Any]:
    return {"lines": withdraw_silo(made, asked["name"], who=who)}


def _queue(made: Federation, who: str, asked: Asked) -> dict[str, Any]:
    """Queue a run; from elsewhere its record always goes to the federation's folder."""
    keys = {**json.loads(asked["keys"]), **({"runs-dir": str(made.runs)} if who else {})}
    priority, alone = int(asked["priority"]), asked["alone"] == "yes"
    return {"entry": asdict(enqueue(made, keys, priority=priority, alone=alone, who=who))}


def _waiting(made: Federation, who: str, asked: Asked) -> dict[str, Any]:
    return {"entries": [asdict(one) for one in Queue(made.folder).entries()]}


def _take_away(made: Federation, who: str, asked: Asked) -> dict[str, Any]:
    with audit.acting(made, "unqueue", who=who, entry=asked["id"]):
        Queue(made.folder).take_away(asked["id"])
    return {}


def _unknown(made: Federation, who: str, asked: Asked) -> dict[str, Any]:
    raise ValueError("no such action")


class Act(NamedTuple):
    """An act that operators may ask for, and the role that it needs.

    ``do`` takes the operator's name, empty for the account of the coordinator's folder.
    """

    role: str
    do: Callable[[Federation, str, Asked], dict[str, Any]]


ACTS = {
    "enrol": Act("enrol", _enrol),
    "remove": Act("enrol", _remove),
    "withdraw": Act("enrol", _withdraw),
    "queue": Act("run", _queue),
    "waiting": Act("look", _waiting),
    "take away": Act("run", _take_away),
}
UNKNOWN = Act("enrol", _unknown)
