"""What stands in for a silo's own parts: data that is read once for all, and apps that watch.

An *app* here is what answers a message: coterie's ClientApp, or one of these around it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from functools import lru_cache

import torch
from flwr.app import Context, Message, RecordDict

from benchmarks.kit.runs import App
from coterie import wire
from coterie.client.app import app as coterie_app
from coterie.tasks import Task, load_task
from coterie.tasks.base import Option, SiloData
from coterie.wire import Model

MEMORY_LIMIT = 4 << 30
"""Bytes of replies that are remembered."""


class Shared(Task):
    """A built-in task whose ``load`` reads the folder once for all silos of a split."""

    def __init__(self, name: str) -> None:
        self.inner = load_task(name)
        self.name, self.num_classes = self.inner.name, self.inner.num_classes

    def model(self) -> torch.nn.Module:
        """The built-in model, channels last (a quarter faster), BatchNorm without its counters.

        The counters take no part in training or testing where BatchNorm has a momentum.
        """
        model = self.inner.model().to(memory_format=torch.channels_last)
        for module in model.modules():
            if isinstance(module, torch.nn.modules.batchnorm._BatchNorm):
                module.num_batches_tracked = None
        return model

    def load(self, options: Mapping[str, Option]) -> SiloData:
        """See ``Task``."""
        others = {key: value for key, value in options.items() if key != "silo"}
        return _all_silos(self.inner.name, tuple(sorted(others.items())))[int(options["silo"])]


@lru_cache(maxsize=1)
def _all_silos(task: str, options: tuple[tuple[str, Option], ...]) -> list[SiloData]:
    loaded = load_task(task).load_all(dict(options))
    return [data for data in loaded if isinstance(data, SiloData)]


class Remembering:
    """The silos' ClientApp, which answers what it answered before from memory.

    Silos are deterministic, so runs of one seed are computed only where they differ. Where memory
    is short the replies of the latest rounds go first: runs part and do not meet again, so what
    they share lies at their beginning.
    """

    def __init__(self) -> None:
        self._replies: dict[str, tuple[int, int, RecordDict]] = {}
        self._held = 0

    def __call__(self, message: Message, context: Context) -> Message:
        """See ``ClientApp``."""
        if message.metadata.message_type not in (wire.TRAIN, wire.EVALUATE):
            return coterie_app(message, context)
        config = message.content.config_records[wire.CONFIG]
        if config.get(wire.PERSONAL):
            return coterie_app(message, context)  # its answer depends on what it keeps
        key = _fingerprint(message, context)
        if key in self._replies:
            return Message(self._replies[key][2], reply_to=message)
        reply = coterie_app(message, context)
        if not reply.has_error():
            round_number = config[wire.ROUND]
            assert isinstance(round_number, int)
            self._keep(key, round_number, _num_bytes(reply.content), reply.content)
        return reply

    def _keep(self, key: str, round_number: int, size: int, content: RecordDict) -> None:
        while self._held + size > MEMORY_LIMIT:
            last = max(self._replies, key=lambda k: self._replies[k][0], default=None)
            if last is None or self._replies[last][0] <= round_number:
                return
            self._held -= self._replies.pop(last)[1]
        self._replies[key] = (round_number, size, content)
        self._held += size


def _num_bytes(content: RecordDict) -> int:
    arrays = (a for record in content.array_records.values() for a in record.values())
    return sum(len(array.data) for array in arrays)


def _fingerprint(message: Message, context: Context) -> str:
    """Everything that a silo's answer depends on."""
    config = {k: v for k, v in message.content.config_records[wire.CONFIG].items() if k != wire.RUN}
    known = [message.metadata.message_type, config, dict(context.node_config)]
    digest = hashlib.sha1(json.dumps(known, sort_keys=True, default=str).encode())
    for array in message.content.array_records[wire.ARRAYS].values():
        digest.update(array.data)
    return digest.hexdigest()


class Watched:
    """An app whose training is looked at.

    Attributes:
        trained: silo → the model that it was sent and what it made of it, in the last round.
    """

    def __init__(self, app: App = coterie_app) -> None:
        self.app = app
        self.trained: dict[str, tuple[Model, Model]] = {}

    def __call__(self, message: Message, context: Context) -> Message:
        """See ``ClientApp``."""
        reply = self.app(message, context)
        if message.metadata.message_type == wire.TRAIN and not reply.has_error():
            sent, back = (
                wire.decode_arrays(content.array_records[wire.ARRAYS])
                for content in (message.content, reply.content)
            )
            self.trained[str(context.node_config["name"])] = sent, back
        return reply
