"""A run as it went over the wire, message by message: what silos of an earlier release said.

    python -m tests.contract.machines.recorded tests/contract/machines/wire/0.1.0.json.gz

records one with the release that is installed. Do so when a release is made, and keep the file: the
tests of the next one play both sides of it.
"""

from __future__ import annotations

import base64
import gzip
import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flwr.app import Context, Message
from flwr.supercore.inflatable.inflatable_object import get_all_nested_objects

from coterie import wire
from coterie.engine.fast import objects
from coterie.engine.inprocess import InProcessGrid
from coterie.server.runs.config import RunConfig
from coterie.server.runs.run import execute
from coterie.server.study.silos import client_app

HERE = Path(__file__).parent / "wire"
SILOS = [
    {"name": name, "data.skip": 110 * i, "data.train": 80, "data.test": 30}
    for i, name in enumerate(("a", "b", "c"))
]
RUN = {
    "strategy": "hcct", "task": "digits", "rounds": 2, "min-silos": 3, "local-epochs": 1, "seed": 3,
}  # fmt: skip
Objects = dict[str, bytes]


@dataclass(frozen=True)
class Exchange:
    """A question to a node and its answer, each as (id of the whole, objects by id)."""

    node: int
    kind: str
    asked: tuple[str, Objects]
    answered: tuple[str, Objects]


def objects_of(message: Message) -> tuple[str, Objects]:
    """A message as it travels."""
    parts = {name: one.deflate() for name, one in get_all_nested_objects(message).items()}
    return list(parts)[-1], parts


def message_of(whole: str, parts: Objects) -> Message:
    """The inverse."""
    return objects.put_together(whole, parts, max_bytes=0)


class RecordingGrid(InProcessGrid):
    """One process that notes everything that is said."""

    def __init__(self, app: Callable[[Message, Context], Message], nodes: list[Any]) -> None:
        super().__init__(app, nodes)
        self.said: list[Exchange] = []

    def _answer(self, message: Message) -> Message:
        asked = objects_of(message)
        reply = super()._answer(message)
        meta = message.metadata
        self.said.append(Exchange(meta.dst_node_id, meta.message_type, asked, objects_of(reply)))
        return reply


class ReplayingGrid(RecordingGrid):
    """The nodes give the recorded answers, in their order; what is asked besides is noted."""

    def __init__(self, said: list[Exchange], nodes: list[Any]) -> None:
        self.left = list(said)

        def app(message: Message, context: Context) -> Message:
            meta = message.metadata
            for i, one in enumerate(self.left):
                if (one.node, one.kind) == (context.node_id, meta.message_type):
                    content = message_of(*self.left.pop(i).answered).content
                    return Message(content, reply_to=message)
            raise AssertionError(f"node {context.node_id} was not asked for {meta.message_type}")

        super().__init__(app, nodes)


def play(grid: InProcessGrid, runs_dir: Path) -> dict[str, Any]:
    """The run on a grid; its record."""
    folder = runs_dir / "run"
    execute(grid, RunConfig.read(RUN), run_id=1, folder=folder)
    found: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return found


def write(file: Path, release: str, said: list[Exchange], hashes: dict[str, str]) -> None:
    """Keep a recording."""
    entries = [
        {
            "node": one.node,
            "kind": one.kind,
            "asked": _text(one.asked),
            "answered": _text(one.answered),
        }
        for one in said
    ]
    whole = {"release": release, "protocol": wire.PROTOCOL, "hashes": hashes, "said": entries}
    file.write_bytes(gzip.compress(json.dumps(whole).encode(), mtime=0))


def read(file: Path) -> tuple[dict[str, Any], list[Exchange]]:
    """A recording: of what, and what was said."""
    whole = json.loads(gzip.decompress(file.read_bytes()))
    said = [
        Exchange(one["node"], one["kind"], _objects(one["asked"]), _objects(one["answered"]))
        for one in whole.pop("said")
    ]
    return whole, said


def _text(message: tuple[str, Objects]) -> list[Any]:
    whole, parts = message
    return [whole, {key: base64.b64encode(value).decode() for key, value in parts.items()}]


def _objects(stored: list[Any]) -> tuple[str, Objects]:
    return stored[0], {key: base64.b64decode(value) for key, value in stored[1].items()}


def recordings() -> Iterator[Path]:
    """All that are kept, oldest first."""
    return iter(sorted(HERE.glob("*.json.gz")))


if __name__ == "__main__":
    import tempfile
    from importlib.metadata import version

    recording = RecordingGrid(client_app(), SILOS)
    with tempfile.TemporaryDirectory() as place:
        record = play(recording, Path(place))
    write(Path(sys.argv[1]), version("coterie"), recording.said, record["model-hashes"])
    print(len(recording.said), "exchanges,", Path(sys.argv[1]).stat().st_size, "bytes")
