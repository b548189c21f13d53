"""Orders and models as messages to silos."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from coterie import wire
from coterie.strategies.rounds.algorithm import Order
from coterie.strategies.rounds.handles import Arrays, Masked, Model, is_seen, sent_for
from coterie.strategies.rounds.options import Config
from coterie.strategies.rounds.reports import Group
from coterie.strategies.rounds.roster import Silo

ABOUT = (wire.ROUNDS, wire.STRATEGY)
"""Entries of every message that identify its run."""


def own_entries(model: Model) -> dict[str, Any]:
    """Return the entries that replace a model that only its silo has."""
    if not isinstance(model, Masked):
        return {}
    entries: dict[str, Any] = {wire.OWN_ROUND: model.round, wire.OWN_PURPOSE: model.purpose}
    if model.limit is not None:
        entries |= {wire.OWN_LONGEST: model.limit.norm, wire.OWN_LONGEST_OF: model.limit.samples}
    return entries


class Encoder:
    """Encodes a model once, however many silos get it, so that it is stored and hashed once."""

    def __init__(self) -> None:
        self._made: dict[tuple[Any, ...], tuple[Arrays, ArrayRecord]] = {}

    def encode(self, model: Arrays, *, packed: bool) -> ArrayRecord:
        """Return the model's record; ``packed`` for silos that described themselves."""
        key = (id(model), packed)  # spares work alone: a model that is met again is only made again
        if key not in self._made:
            self._made[key] = (model, wire.encode_arrays(model, packed=packed))
        return self._made[key][1]

    def encode_order(self, order: Order, model: Arrays) -> ArrayRecord:
        """Return the record of an order's model, rounded if the order is."""
        if order.rounded:
            return self.encode_rounded(model, exact=order.silo.buffers)
        return self.encode(model, packed=order.silo.described)

    def encode_rounded(self, model: Arrays, *, exact: tuple[str, ...]) -> ArrayRecord:
        """Return the model's record as 16-bit numbers, except for the arrays ``exact``."""
        key = (id(model), exact)
        if key not in self._made:
            rounded = wire.round_model(model, exact=exact)
            self._made[key] = (model, wire.encode_arrays(rounded, packed=True))
        return self._made[key][1]


def training_messages(
    orders: Sequence[Order],
    *,
    number: int,
    config: Config,
    groups: Sequence[Group],
    evaluate: bool,
    action: str = "",
) -> list[Message]:
    """Return one message per order of an exchange.

    ``groups`` train together; ``evaluate`` makes silos also evaluate the model received; for
    ``action`` see ``Run``.
    """
    encoder = Encoder()
    sizes = {name: len(group) for group in groups for name in group}
    messages = []
    for order in orders:
        size = 1 if order.purpose else sizes.get(order.silo.name, 1)
        if order.content is not None:
            content = _of_another(order.content, size)
            messages.append(_message(content, order.silo, order.kind, number))
            continue
        entries = _entries(order, number, config, size, evaluate=evaluate)
        entries |= own_entries(order.model)
        content = RecordDict({wire.CONFIG: ConfigRecord(entries)})
        if is_seen(order.model):
            content[wire.ARRAYS] = encoder.encode_order(order, order.model)
        for name, part in order.extras.items():
            content[name] = encoder.encode(part, packed=order.silo.described)
        messages.append(_message(content, order.silo, _acting(order.kind, action), number))
    return messages


def _acting(kind: str, action: str) -> str:
    return f"{kind}.{action}" if action and kind in (wire.TRAIN, wire.EVALUATE) else kind


def _of_another(content: RecordDict, group_size: int) -> RecordDict:
    """Return a message of another strategy, which also states the size of the silo's group."""
    key = next(iter(content.config_records), wire.CONFIG)
    entries = dict(content.config_records.get(key, ConfigRecord()))
    entries.setdefault(wire.GROUP_SIZE, group_size)
    return RecordDict({**content, key: ConfigRecord(entries)})


def _entries(
    order: Order,
    number: int,
    config: Config,
    group_size: int,
    *,
    evaluate: bool,
) -> dict[str, Any]:
    entries: dict[str, Any] = {**config, **order.config}
    decay = entries.pop(wire.LR_DECAY, 1.0)
    if wire.LR in entries:
        entries[wire.LR] = float(entries[wire.LR]) * float(decay) ** (number - 1)
    entries[wire.ROUND] = number
    # Any ClientApp gets it: who runs its silo may have said that it trains in larger groups only.
    entries.setdefault(wire.GROUP_SIZE, group_size)
    if order.silo.described:
        entries[wire.PROTOCOL_KEY] = order.silo.protocol
        own_training = not order.evaluates and not order.purpose
        wanted = bool(order.config.get(wire.EVALUATE_RECEIVED, True))
        entries[wire.EVALUATE_RECEIVED] = evaluate and own_training and wanted
    if order.purpose:
        entries[wire.PURPOSE] = order.purpose
    return entries


def evaluation_messages(
    silos: Sequence[Silo],
    models: Mapping[str, Model],
    *,
    number: int,
    config: Config,
    more: Mapping[str, Any],
    own: Mapping[str, Mapping[str, Any]] | None = None,
    action: str = "",
) -> list[Message]:
    """Return messages that send every silo its own model to evaluate.

    Args:
        config: of the training; evaluations get a part of it.
        more: entries of all these messages.
        own: silo → further entries of its message.
        action: see ``Run``.
    """
    encoder = Encoder()
    keys = {*wire.evaluation_entries(config, *(own or {}).values()), *ABOUT}
    of_training = {
        key: value for key, value in config.items() if key in keys or key.startswith(wire.TASK_KEYS)
    }
    entries = {**of_training, **more, wire.ROUND: number}
    messages = []
    for silo in silos:
        model = sent_for(models[silo.name])
        mine = {**own_entries(model), **(own or {}).get(silo.name, {})}
        content = RecordDict({wire.CONFIG: ConfigRecord({**entries, **mine})})
        if is_seen(model):
            content[wire.ARRAYS] = encoder.encode(model, packed=silo.described)
        messages.append(_message(content, silo, _acting(wire.EVALUATE, action), number))
    return messages


def membership(
    silos: Sequence[Silo],
    groups: Sequence[Group],
    *,
    placed: Mapping[str, Group],
    name_members: bool,
) -> dict[str, dict[str, Any]]:
    """Return silo → entries that make it keep its model and describe its group.

    Groups are numbered from 1. ``placed``: silo that trained in no group → the group whose model it
    gets. With ``name_members`` silos receive the names of their group's members.
    """
    own = {name: group for group in groups for name in group} | dict(placed)
    numbers = {group: number for number, group in enumerate(groups, start=1)}
    entries: dict[str, dict[str, Any]] = {}
    for name in (silo.name for silo in silos):
        entries[name] = {wire.KEEP: True}
        if group := own.get(name):
            entries[name] |= {wire.GROUP_SIZE: len(group)}
            entries[name] |= {wire.GROUP: numbers[group]} if group in numbers else {}
            entries[name] |= {wire.MEMBERS: list(group)} if name_members else {}
    return entries


def _message(content: RecordDict, silo: Silo, kind: str, number: int) -> Message:
    return Message(content, dst_node_id=silo.node_id, message_type=kind, group_id=str(number))
