"""What the fast tests share: a ClientApp that knows nothing of coterie, and grids in one process.

The plain app's model has two float32 arrays. Training moves it half of the way towards the node's
own target, so that every expected model can be written down in a line of numpy.
"""

from __future__ import annotations

import functools
import gc
import os

os.environ.setdefault("FLWR_TELEMETRY_ENABLED", "0")
# Tests side by side keep all cores busy: a library's own threads would only wait for each other.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import typer.main
import typer.testing
from flwr.app import Array, ArrayRecord, Context, Error, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from hypothesis import settings

from coterie import wire
from coterie.client.cli.main import app as silo_command
from coterie.engine.inprocess import InProcessGrid
from coterie.wire import Model

torch.set_num_threads(1)
os.fsync = lambda descriptor: None  # tests of power cuts watch the call; no test cuts the power
# typer makes the tree of all commands anew for each that runs: 0.1 s.
_tree = functools.cache(typer.main.get_command)
typer.Typer.__call__ = lambda self, *line, **how: _tree(self)(*line, **how)  # type: ignore[method-assign]
typer.testing._get_command = _tree
gc.set_threshold(100_000)  # a twentieth of the tests' time
settings.register_profile("coterie", deadline=None, derandomize=True, database=None)
settings.load_profile("coterie")


def pytest_make_parametrize_id(val: object) -> str | None:
    """A case is named after the beginning of a long text: workers send each other the names."""
    return f"{val[:40]}…" if isinstance(val, str) and len(val) > 60 else None


def pytest_collection_finish() -> None:
    """What imports and tests are made of is there until the end: no collection looks through it."""
    gc.freeze()


def pytest_unconfigure() -> None:
    """Libraries that look for leaks when the process ends find none."""
    gc.unfreeze()


@pytest.hookimpl(tryfirst=True)  # before pytest-xdist puts the groups into the names
def pytest_collection_modifyitems(items: list[pytest.Function]) -> None:
    """What tests of a module share is made in one worker. Tests that wait for processes begin."""
    items.sort(key=lambda item: item.get_closest_marker("e2e") is None)
    for item in items:
        fixtures = (one for made in item._fixtureinfo.name2fixturedefs.values() for one in made)
        shared = any(one.scope == "module" for one in fixtures)
        if shared and item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.path.stem))


Fault = Callable[[Message, RecordDict], Message | RecordDict]
"""Takes the message and the plain app's good answer; gives another answer."""


def silo(arguments: Sequence[str]) -> int:
    """Run ``coterie silo`` in this process; return its exit status."""
    with pytest.raises(SystemExit) as ended:
        silo_command(arguments, prog_name="coterie silo")
    assert isinstance(ended.value.code, int)
    return ended.value.code


def plain_target(config: Mapping[str, Any]) -> Model:
    """What a node with this config moves towards: a direction per kind, and its own small part."""
    return dict(_target(int(config.get("kind", 0)), int(config.get("noise", 0))))


@functools.cache
def _target(kind: int, noise: int) -> Model:
    common, own = np.random.default_rng([7, kind]), np.random.default_rng([11, kind, noise])
    return {
        "w": (common.normal(size=(6, 5)) + 0.1 * own.normal(size=(6, 5))).astype(np.float32),
        "b": (common.normal(size=5) + 0.1 * own.normal(size=5)).astype(np.float32),
    }


def plain_model() -> Model:
    """w⁰ of the plain app."""
    return {"w": np.zeros((6, 5), np.float32), "b": np.ones(5, np.float32)}


def plain_initial() -> ArrayRecord:
    """w⁰ as Flower's examples send it."""
    return ArrayRecord({name: Array(array) for name, array in plain_model().items()})


def plain_trained(model: Model, config: Mapping[str, Any]) -> Model:
    """The model after one training at a node with this config."""
    target = plain_target(config)
    return {k: a + np.float32(0.5) * (target[k] - a) for k, a in model.items()}


def plain_app(fault: Fault | None = None) -> ClientApp:
    """A ClientApp as in Flower's examples: ``arrays``, ``config`` in; ``arrays``, ``metrics`` out.

    Args:
        fault: called with every training message and the answer that would be right.
    """
    app = ClientApp()

    @app.train("apfl")
    @app.train("pfedme")
    @app.train("per_fedavg")
    @app.train()
    def train(message: Message, context: Context) -> Message:
        received = {k: a.numpy() for k, a in message.content["arrays"].items()}
        _ = message.content["config"]["server-round"]
        trained = plain_trained(received, context.node_config)
        answer = RecordDict(
            {
                "arrays": ArrayRecord({k: Array(a) for k, a in trained.items()}),
                "metrics": MetricRecord(
                    {
                        "num-examples": int(context.node_config.get("samples", 100)),
                        "train-loss": 0.5,
                    }
                ),
            }
        )
        replied = answer if fault is None else fault(message, answer)
        return replied if isinstance(replied, Message) else Message(replied, reply_to=message)

    @app.evaluate()
    def evaluate(message: Message, context: Context) -> Message:
        received = {k: a.numpy() for k, a in message.content["arrays"].items()}
        target = plain_target(context.node_config)
        loss = float(np.mean((received["w"] - target["w"]) ** 2))
        metrics = {"num-examples": 10, "loss": loss, "accuracy": 1 / (1 + loss)}
        return Message(RecordDict({"metrics": MetricRecord(metrics)}), reply_to=message)

    return app


def plain_app_without_answers(fault: Fault | None = None) -> ClientApp:
    """The plain app that knows of discriminators, but has nothing to say of them: FedCollab, which
    refuses apps that know none, measures nobody and leaves everybody alone."""
    app = plain_app(fault)

    @app.evaluate("discriminator")
    def evaluate(message: Message, context: Context) -> Message:
        metrics = MetricRecord({"num-examples": int(context.node_config["samples"])})
        return Message(RecordDict({"metrics": metrics}), reply_to=message)

    return app


def plain_nodes(*kinds: int, samples: Sequence[int] | None = None) -> list[dict[str, Any]]:
    """Node configs of the plain app, one per kind given."""
    counts = samples if samples is not None else [100] * len(kinds)
    return [
        {"kind": kind, "noise": i, "samples": count}
        for i, (kind, count) in enumerate(zip(kinds, counts, strict=True))
    ]


def at(node: int, round: int, change: Fault) -> Fault:
    """A fault at one node in one round only."""

    def fault(message: Message, answer: RecordDict) -> Message | RecordDict:
        meta = message.metadata
        here = meta.dst_node_id == node and meta.group_id == str(round)
        return change(message, answer) if here else answer

    return fault


def error_reply(message: Message, answer: RecordDict) -> Message:
    """A fault: the node answers with an error."""
    return Message(Error(wire.FAILED, "the disk is full"), reply_to=message)


class LossyGrid(InProcessGrid):
    """A grid that loses or delays what some nodes answer in some rounds.

    Attributes:
        lost: (node, round) whose training reply never comes.
        late: the same, but the reply comes with the next pull of another round.
    """

    def __init__(
        self,
        app: ClientApp,
        node_configs: Sequence[Mapping[str, Any]],
        *,
        lost: Iterable[tuple[int, int]] = (),
        late: Iterable[tuple[int, int]] = (),
    ) -> None:
        super().__init__(app, node_configs)
        self.lost, self.late = set(lost), set(late)
        self.delayed: list[tuple[str, Message]] = []

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Replies asked for, less those lost, and late ones that nobody asks for any more."""
        given = []
        for reply in super().pull_messages(message_ids):
            meta = reply.metadata
            key = (meta.src_node_id, int(meta.group_id))
            if meta.message_type == wire.TRAIN and key in self.late:
                self.delayed.append((meta.group_id, reply))
            elif meta.message_type != wire.TRAIN or key not in self.lost:
                given.append(reply)
        rounds = {reply.metadata.group_id for reply in given}
        due = [reply for group, reply in self.delayed if rounds and group not in rounds]
        self.delayed = [d for d in self.delayed if not any(d[1] is reply for reply in due)]
        return due + given


def known(reason: str) -> pytest.MarkDecorator:
    """A fault that is known: the test fails until it is mended, and then asks to lose this mark."""
    return pytest.mark.xfail(strict=True, reason=reason)


def digits_config(name: str, index: int = 0, **changes: Any) -> dict[str, Any]:
    """Node config of a small digits silo; silos of different indices share no sample."""
    config: dict[str, Any] = {
        "name": name,
        "task": "digits",
        "device": "cpu",
        "threads": 1,
        "data.train": 20,
        "data.test": 20,
        "data.skip": 40 * index,
    }
    return config | changes


def arrays_of(record: ArrayRecord) -> Model:
    """The arrays of a plain record."""
    return {name: array.numpy() for name, array in record.items()}


def assert_equal_models(got: Mapping[str, Any], expected: Mapping[str, Any]) -> None:
    """Bit for bit: names in order, types, shapes, values."""
    assert list(got) == list(expected)
    for name, array in expected.items():
        assert got[name].dtype == array.dtype and got[name].shape == array.shape, name
        np.testing.assert_array_equal(got[name], array, err_msg=name)


@pytest.fixture(autouse=True)
def own_home(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """Records of runs go to a folder of the test, never to the user's."""
    monkeypatch.setenv("COTERIE_HOME", str(tmp_path_factory.getbasetemp() / "coterie-home"))
    monkeypatch.delenv("COTERIE_RUNS", raising=False)
