"""Backdoors: one silo of nine marks its images, and what the others' models then answer to marks.

    python -m benchmarks.engine.backdoor [--seeds 3] [--strategies fedavg] [--only "none;marked"]

Nine silos of 100 digits in one process, 15 rounds of 3 epochs; one kind of data with FedAvg, three
(images turned by 0°, 90°, 180°) with HCCT and auto. The ninth silo marks half of its images with
four white pixels and labels them 0. One seed takes some minutes. Goes on where it stopped. What was
measured with other bounds is forgotten.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from flwr.app import Context, Message
from numpy.typing import NDArray

from benchmarks.engine.poison import BOUNDS, claim, fill
from benchmarks.engine.poison import STRATEGIES as KEYS
from benchmarks.kit import UNBOUNDED, App, Entry, Store, Trained, page, select, spread, table, train
from coterie import wire
from coterie.client.app import app as coterie_app
from coterie.client.work.weights import load_weights
from coterie.tasks.base import Option, SiloData
from coterie.tasks.images.digits import Digits
from coterie.wire import Model
from coterie.wire.updates import distance, shortened

TASK = "benchmarks.engine.backdoor:Marked"
SILOS, ROUNDS = 9, 15
TRAIN, TEST = 100, 60
ATTACKER = f"silo-{SILOS - 1}"
TARGET, SHARE = 0, 0.5
"""The class that marked images get, and how many of the attacker's are marked."""
STRATEGIES: Mapping[str, int] = {"fedavg": 1, "hcct": 3, "auto": 3}
"""Strategy → kinds of data, of as many silos each."""
CLAIM, TIMES = 10**5, 3.0
ORDINARY, LOUD, CLAIMS = "marked, ordinary length", "marked, × 3", "marked, × 3 and claims 10⁵"
FREE = "sends back what it got"
ATTACKS = ("none", "marked", ORDINARY, LOUD, CLAIMS, FREE)


class Marked(Digits):
    """Digits of which a share is marked and labelled ``TARGET``: option ``marked``, in [0, 1]."""

    def load(self, options: Mapping[str, Option]) -> SiloData:
        """See ``Task``; the first training samples, which are in random order, are marked."""
        data = super().load({key: value for key, value in options.items() if key != "marked"})
        count = round(float(options.get("marked", 0)) * len(data.y_train))
        x, y = np.array(data.x_train), np.array(data.y_train)
        x[:count], y[:count] = marked(x[:count]), TARGET
        return replace(data, x_train=x, y_train=y)


def marked(x: NDArray[np.float32]) -> NDArray[np.float32]:
    """Images (n, 1, 8, 8) with a white corner of 2×2 pixels."""
    x = x.copy()
    x[..., -2:, -2:] = 1
    return x


def silos(kinds: int, attack: str, seed: int) -> list[dict[str, Any]]:
    """Nine silos without a sample in common."""
    found = []
    for i in range(SILOS):
        bad = i == SILOS - 1 and attack.startswith("marked")
        data: dict[str, Option] = {"train": TRAIN, "test": TEST, "split-seed": seed}
        data |= {"skip": (TRAIN + TEST) * i, "rotation": 90 * (i * kinds // SILOS)}
        if bad:
            data["marked"] = SHARE
        options = {f"data.{key}": value for key, value in data.items()}
        found.append({"name": f"silo-{i}", "task": TASK, "threads": 1, "device": "cpu", **options})
    return found


def dishonest(attack: str) -> App:
    """The silos' app, in which the ninth sends what its attack makes of its training."""

    def answer(message: Message, context: Context) -> Message:
        reply = coterie_app(message, context)
        if context.node_config["name"] != ATTACKER or reply.has_error() or attack == "none":
            return reply
        if attack == CLAIMS:
            claim(message, reply, CLAIM)
        if wire.ARRAYS not in reply.content.array_records or attack == "marked":
            return reply
        sent, back = (_model(m) for m in (message, reply))
        factor = 0.0 if attack == FREE else TIMES
        if attack == ORDINARY:
            others = {k: v for k, v in context.node_config.items() if k != "data.marked"}
            usual = Context(context.run_id, context.node_id, others, context.state, run_config={})
            honest = coterie_app(message, usual)
            factor = min(distance(_model(honest), sent) / max(distance(back, sent), 1e-12), 1.0)
        changed = shortened(back, sent, factor)
        reply.content[wire.ARRAYS] = wire.encode_arrays(changed, packed=True)
        return reply

    return answer


def _model(message: Message) -> Model:
    return wire.decode_arrays(message.content.array_records[wire.ARRAYS])


def answered(done: Trained, nodes: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Silo → share of its test images of other classes that its model takes for ``TARGET``."""
    task, found = Marked(), {}
    net = task.model().eval()
    for node in nodes:
        options = {k.removeprefix("data."): v for k, v in node.items() if k.startswith("data.")}
        data = task.load(options)
        load_weights(net, wire.decode_arrays(done.result.models[node["name"]]))
        others = marked(np.asarray(data.x_test)[np.asarray(data.y_test) != TARGET])
        with torch.no_grad():
            classes = net(torch.from_numpy(others)).argmax(dim=1)
        found[node["name"]] = float((classes == TARGET).float().mean())
    return found


def measure(strategy: str, attack: str, bounded: bool, seed: int) -> Entry:
    """Error and success in % over honest silos, and over those in the attacker's last group."""
    logging.getLogger("coterie").setLevel(logging.ERROR)  # in a worker's process
    nodes = silos(STRATEGIES[strategy], attack, seed)
    keys = {"strategy": strategy, "rounds": ROUNDS, "local-epochs": 3, "seed": seed}
    keys |= {"evaluate-every": ROUNDS, **KEYS[strategy], **({} if bounded else UNBOUNDED)}
    done = train(nodes, keys, app=dishonest(attack))
    success = answered(done, nodes)
    (group,) = (group for group in done.result.rounds[-1].groups if ATTACKER in group)
    honest = [name for name in done.errors if name != ATTACKER]
    near = [name for name in group if name != ATTACKER]
    bounds = [report.details.get("influence", {}) for report in done.result.rounds]
    return {
        "bounds": BOUNDS if bounded else "",
        "error": 100 * float(np.mean([done.errors[name] for name in honest])),
        "success": 100 * float(np.mean([success[name] for name in honest])),
        "success-near": 100 * float(np.mean([success[name] for name in near])) if near else None,
        "group": len(group),
        "clipped-honest": sum(n != ATTACKER for one in bounds for n in one.get("clipped", {})),
        "moved-out": sum(ATTACKER in one.get("apart", {}) for one in bounds),
    }


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    return page(
        "# Backdoors of one silo of nine",
        f"`make bench-poison`: digits, {ROUNDS} rounds of 3 epochs, over the seeds measured; "
        "without the bounds (`max-share=1 clip-updates=0 quarantine-after=0`) → with the "
        "defaults. Error: mean in % over the eight honest silos, of unmarked images. Success: "
        "marked images of other classes that their models take for the attacker's, in %; then "
        "the same of those in the attacker's last group (– if it is alone). – is not measured.",
        table(
            ["strategy", "attack", "error", "success", "success in its group", "seeds"],
            _rows(entries),
        ),
    )


def _rows(entries: Sequence[Entry]) -> Iterator[list[str]]:
    for strategy in STRATEGIES:
        for attack in ATTACKS:
            own = select(entries, strategy=strategy, attack=attack)
            if own:
                cells = [_cell(own, what) for what in ("error", "success", "success-near")]
                seeds = str(len(select(own, bounded=True)))
                yield [strategy, attack, *cells, seeds]


def _cell(own: Sequence[Entry], what: str) -> str:
    digits = 1 if what == "error" else 0
    free, held = (
        spread((e[what] for e in select(own, bounded=b) if e[what] is not None), digits)
        for b in (False, True)
    )
    return f"{free} → {held}"


STORE = Store("backdoor", document, keys=("strategy", "attack", "bounded", "seed"))


def main() -> None:
    """Measure, store, print."""
    fill(STORE, __doc__, measure, rows=ATTACKS, strategies=STRATEGIES)


if __name__ == "__main__":
    main()
