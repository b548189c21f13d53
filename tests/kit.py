"""What many tests play with: a silo that is asked, a federation in this process, its record."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, RecordDict

import coterie.client.home.request_counts
import coterie.client.home.rounds
import coterie.client.work.answered
import coterie.client.work.session
import coterie.features.privacy.budget
import coterie.features.secure.memory
import coterie.features.secure.secrets
import coterie.features.secure.sketches
from coterie import wire
from coterie.client.app import app
from coterie.engine.inprocess import InProcessGrid
from coterie.server.machine.local import SiloSpec
from coterie.server.runs.config import RunConfig
from coterie.server.runs.initial import initial_arrays
from coterie.server.runs.run import execute
from coterie.strategies import RunResult
from coterie.strategies.rounds.roster import DescribedRoster
from coterie.wire import Model, decode_arrays, encode_arrays
from coterie.wire.games import Game, PlayedContext
from tests.conftest import arrays_of, assert_equal_models, digits_config, plain_initial

Node = Mapping[str, Any]


def dashed(entries: Mapping[str, Any]) -> dict[str, Any]:
    """Name the entries as messages and files do: ``local_epochs`` is ``local-epochs``.

    Names with a dot are the task's, and stay.
    """
    return {k if "." in k else k.replace("_", "-"): value for k, value in entries.items()}


# ---------------------------------------------------------------- one silo


def restart_silos() -> None:
    """Forget what silos' processes keep in memory; their disks stay."""
    coterie.client.work.session._sessions.clear()
    coterie.client.home.rounds._memory.clear()
    coterie.client.home.request_counts._memory.clear()
    coterie.features.privacy.budget._memory.clear()
    coterie.features.secure.memory._memories.clear()
    coterie.features.secure.secrets._memory.clear()
    coterie.features.secure.sketches._memory.clear()
    coterie.client.work.answered._answered.clear()


def context(node: Node | None = None, node_id: int = 3, game: Game | None = None) -> Context:
    """Return what a silo's app is called in: by default that of digits silo a, in a new game."""
    own = dict(digits_config("a") if node is None else node)
    return PlayedContext(game or Game(), 1, node_id, own, RecordDict(), run_config={})


def ask(
    kind: str,
    node: Node | None = None,
    *,
    model: Model | None = None,
    packed: bool = True,
    records: Mapping[str, Any] | None = None,
    game: Game | None = None,
    **config: Any,
) -> Message:
    """Send a silo one message with these entries of its config, but for None; return the answer.

    A type of message that only some strategies send names one of them, unless an entry does.
    """
    named = next(iter(wire.kind_of(kind).strategies), None)
    entries = {k: v for k, v in dashed({"strategy": named} | config).items() if v is not None}
    content = RecordDict({wire.CONFIG: ConfigRecord(entries), **(records or {})})
    if model is not None:
        content[wire.ARRAYS] = encode_arrays(model, packed=packed)
    message = Message(content, dst_node_id=3, message_type=kind, group_id="1")
    message.metadata.__dict__["_message_id"] = "id"  # without one it cannot be put off
    return app(message, context(node, game=game))


def answer(kind: str, node: Node | None = None, **how: Any) -> Message:
    """Ask as ``ask`` does, of a silo that must not refuse."""
    reply = ask(kind, node, **how)
    assert not reply.has_error(), reply.error.reason
    return reply


def initial(seed: int = 0, node: Node | None = None, **config: Any) -> Model:
    """Return the model that a silo begins from."""
    return model_in(ask(wire.INITIAL, node, seed=seed, **config))


TRAINING: dict[str, Any] = {
    "protocol": wire.PROTOCOL,
    "task": "digits",
    "seed": 0,
    "server_round": 1,
    "local_epochs": 1,
    "batch_size": 8,
    "lr": 0.05,
}


def train(model: Model, node: Node | None = None, **changes: Any) -> Message:
    """Have a silo train on the digits for one epoch, or as these changes say."""
    return ask(wire.TRAIN, node, model=model, **(TRAINING | changes))


def model_in(reply: Message) -> Model:
    """Return the model in an answer."""
    return decode_arrays(reply.content[wire.ARRAYS])


def reason(reply: Message, code: int = wire.REFUSED) -> str:
    """Return why a silo refuses."""
    assert reply.has_error(), "it was not refused"
    assert reply.error.code == code
    return str(reply.error.reason)


def varied_requests(
    count: int, *, seed: int = 0
) -> Iterator[tuple[str, dict[str, Any], dict[str, Any]]]:
    """Yield pairs of training requests, with the one entry that differs, as little as it can.

    Every declared entry is varied in turn, then those that describe the request, and unknown ones.
    """
    draw = np.random.default_rng(seed)
    others = (wire.ROUND, wire.PURPOSE, wire.GROUP, wire.EVALUATE_RECEIVED, "not-yet-known")
    names = [*(n for n in wire.entries() if n not in (wire.TASK, wire.STRATEGY)), *others]
    for number in range(count):
        name = names[number % len(names)]
        config = dashed(TRAINING) | {"local-steps": 6, "rounds": 4}
        config[wire.RUN] = f"run-{number % 80}"  # a silo answers one round only so often
        for key in draw.choice(sorted(USUAL_VALUES), size=3, replace=False):
            config[str(key)] = _drawn(draw, USUAL_VALUES[str(key)])
        if name in USUAL_VALUES:
            config[name] = _drawn(draw, USUAL_VALUES[name])
        before = config.get(name, wire.entries()[name].at.default if name in wire.entries() else 1)
        yield name, config, {**config, name: _varied(draw, name, before)}


USUAL_VALUES: dict[str, tuple[Any, ...]] = {
    "momentum": (0.0, 0.9),
    "weight-decay": (0.0, 0.01),
    "proximal-mu": (0.0, 0.5),
    "optimiser": ("sgd", "adamw", "adagrad", "rmsprop"),
    "schedule": ("constant", "cosine", "step"),
    "lr-warm-up": (0.0, 0.001, 0.0625, 0.3),
    "clip-norm": (0.0, 1.0),
    "accumulate": (1, 2),
    "personal": ("", "head", "head-first"),
    "personalise": ("partial", "finetune", "ditto"),
    "own-penalty": (0.0, 10.0),
    "validation": (0.0, 0.2),
    "holdout": (0.0, 0.2),
    "keep-optimiser": (False, True),
    "wire-format": ("float32", "delta-fp16", "delta-int8"),
    "cosine-lambda": (0.0, 0.1),
    "penalty": (0.0, 0.1),
    wire.ROUND: (1, 2, 3),
}
"""Entry → values that a silo accepts, for ``varied_requests``."""


def _drawn(draw: np.random.Generator, values: Sequence[Any]) -> Any:
    return values[int(draw.integers(len(values)))]


def _varied(draw: np.random.Generator, name: str, value: Any) -> Any:
    others = [one for one in USUAL_VALUES.get(name, ()) if one != value]
    if name in wire.entries() and wire.entries()[name].choices:
        others = [one for one in wire.entries()[name].choices if one != value]
    if others and (isinstance(value, str | bool) or draw.random() < 0.5):
        return _drawn(draw, others)
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return value + 1
    if isinstance(value, float):
        return value * (1 + 2.0 ** -int(draw.integers(4, 53))) if value else 0.125
    return f"{value}x"


# ---------------------------------------------------------------- a federation in this process


def digits(names: Iterable[str] = "abc", home: Path | None = None, **changes: Any) -> list[Node]:
    """Return nodes of the digits that share no sample, each with a folder below ``home``."""
    return [
        digits_config(name, i, **({} if home is None else {"home": str(home / name)}), **changes)
        for i, name in enumerate(names)
    ]


def nodes_of(specs: Iterable[SiloSpec]) -> list[Node]:
    """Return nodes of silos as the demo has them."""
    return [
        {"name": spec.name, "task": spec.task, "device": "cpu", "threads": 1}
        | {f"data.{key}": value for key, value in spec.options.items()}
        for spec in specs
    ]


class Tap(InProcessGrid):
    """A grid that keeps what passes and lets a test act on it.

    Args:
        nodes: of coterie's own silos unless ``client`` is given.
        before: called with the messages of each exchange before they are sent.
        change: (silo's name, reply) → reply, or None for one that is lost.
    """

    def __init__(
        self,
        nodes: Sequence[Node],
        client: Any = app,
        *,
        before: Callable[[list[Message]], object] = lambda messages: None,
        change: Callable[[str, Message], Message | None] = lambda silo, reply: reply,
    ) -> None:
        super().__init__(client, nodes)
        self.before, self.change = before, change
        self.sent: list[Message] = []
        self.got: list[Message] = []

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send them; ``sent`` has them too."""
        messages = list(messages)
        self.before(messages)
        self.sent += messages
        return super().push_messages(messages)

    def pull_messages(self, message_ids: Iterable[str]) -> Iterable[Message]:
        """Return the replies as they are changed; ``got`` has them as they came."""
        found = []
        for reply in super().pull_messages(message_ids):
            self.got.append(reply)
            changed = self.change(self.name_of(reply.metadata.src_node_id), reply)
            found += [] if changed is None else [changed]
        return found

    def name_of(self, node_id: int) -> str:
        """Return the name of the silo at a node; empty if it is gone."""
        return str(self.configs.get(node_id, {}).get("name", ""))

    def asked(self, kind: str) -> list[ConfigRecord]:
        """Return the configs of the messages of a type, in order."""
        return [m.content[wire.CONFIG] for m in self.sent if m.metadata.message_type == kind]


class PowerCutError(BaseException):
    """The coordinator's process is gone: nothing of it may run any more."""


class CutGrid(Tap):
    """A grid whose coordinator vanishes: before, during or after the training of a round.

    Args:
        at: messages of this type and round are the last.
        answered: how many of them are still answered, so that those silos have moved on.
    """

    def __init__(
        self, nodes: Sequence[Node], at: tuple[str, int] | None = None, answered: int = 0
    ) -> None:
        super().__init__(nodes)
        self.at, self.answered = at, answered

    def push_messages(self, messages: Iterable[Message]) -> Iterable[str]:
        """Send them until the cut."""
        messages = list(messages)
        first = messages[0].metadata
        if self.at == (first.message_type, int(first.group_id)):
            super().push_messages(messages[: self.answered])
            raise PowerCutError
        return super().push_messages(messages)


def run(
    folder: Path, who: InProcessGrid | Sequence[Node], *, run_id: int = 1, **keys: Any
) -> RunResult:
    """Play a run by its keys, recorded in ``folder``: fedavg, all silos, 3 rounds of an epoch."""
    grid = who if isinstance(who, InProcessGrid) else InProcessGrid(app, who)
    usual = {
        "strategy": "fedavg",
        "rounds": 3,
        "local-epochs": 1,
        "min-silos": len(grid.configs),
        "wait-for-silos": 1.0,
    }
    return execute(grid, RunConfig.read(usual | dashed(keys)), run_id=run_id, folder=folder)


def interrupted(
    folder: Path, grid: InProcessGrid, *, play: Callable[..., object] = run, **keys: Any
) -> None:
    """Play until the grid's power cut; what the dying process would still write is undone."""
    with pytest.raises(PowerCutError):
        play(folder, grid, **keys)
    text = json.dumps(record_of(folder) | {"status": "running"})
    (folder / "run.json").write_text(text, encoding="utf-8")
    restart_silos()


def assert_same_models(one: Any, other: Any, names: Iterable[str] = ()) -> None:
    """Assert that these silos, or all of the first run, have the same model after both, exactly."""
    for name in names or one.models:
        assert_equal_models(arrays_of(other.models[name]), arrays_of(one.models[name]))


def start(strategy: Any, grid: InProcessGrid, rounds: int = 3, **more: Any) -> Any:
    """Start a strategy of one's own program on nodes of the plain app."""
    usual = {"initial_arrays": plain_initial(), "timeout": 0.05}
    return strategy.start(grid=grid, num_rounds=rounds, **(usual | more))


def first_arrays(grid: InProcessGrid, roster: Any = None, **keys: Any) -> ArrayRecord:
    """Return the model that coterie's silos on a grid begin from."""
    who = roster or DescribedRoster("digits", min_silos=len(grid.configs))
    return initial_arrays(grid, who.present(grid, number=1), RunConfig.read(dashed(keys)))


def record_of(folder: Path) -> dict[str, Any]:
    """Read a run's record."""
    record: dict[str, Any] = json.loads((folder / "run.json").read_text(encoding="utf-8"))
    return record


def mean_error(result: RunResult) -> float:
    """Return the mean error of all silos after the last round."""
    return float(np.mean([error for _, error, _ in result.rounds[-1].evaluation.values()]))


def until(
    condition: Callable[[], Any], what: str, *, deadline_s: float = 60.0, every_s: float = 0.005
) -> None:
    """Wait for a condition, with a deadline that says what was waited for."""
    deadline = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < deadline, f"waited {deadline_s:.0f} s for {what}"
        time.sleep(every_s)
