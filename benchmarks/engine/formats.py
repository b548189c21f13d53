"""What smaller wire formats cost and save: groups, errors and bytes beside float32.

    python -m benchmarks.engine.formats                     # the demo's silos, ten seeds
    python -m benchmarks.engine.formats --data FOLDER       # and Digit-five and FashionMNIST

What is stored is not measured again, so a benchmark that was interrupted goes on. Runs are in this
process: models and bytes are those of the real federation.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from flwr.app import Context, Message
from numpy.typing import NDArray

from benchmarks.kit import Entry, Store, Trained, columns, page, read, select, spread, train
from benchmarks.papers.hcct.experiments import EXPERIMENTS
from coterie import wire
from coterie.client.app import app
from coterie.server.study.demo import hidden_groups, silos
from coterie.wire.formats import LARGEST, LEAST_ROW

STRATEGIES: dict[str, dict[str, Any]] = {
    "hcct": {"alpha": 50.0},
    "fedgroup": {"cold-start-epochs": 25},
    "fedavg": {},
}
ROUNDS = 20
DEMO, FROM_DATA = "demo", {"digit-five": "digit", "fashion-mnist": "fmnist"}
"""Part → experiment of HCCT's paper whose silos it has."""
CHOICES = "choices"


def outcome(part: str, strategy: str, seed: int, rounds: int, folder: str, how: str) -> Entry:
    """A run: mean error in % over silos, groups, bytes a round, and what was lost."""
    keys = {"strategy": strategy, "seed": seed, "rounds": rounds, wire.WIRE_FORMAT: how}
    if part == DEMO:
        own = [spec.node_config() for spec in silos(seed)]
        done = train(own, {**keys, **STRATEGIES[strategy]})
        truth = hidden_groups([str(node["name"]) for node in own])
    else:
        experiment = EXPERIMENTS[FROM_DATA[part]]
        if part == "digit-five":  # the experiment's network has 57 MB: hours of so many runs
            experiment = replace(experiment, task="digit-five-mlp")
        more = {"num-groups": len(experiment.truth)} if strategy == "fedgroup" else {}
        more |= experiment.variants["HCCT"].keys if strategy == "hcct" else {}
        keys |= {"batch-size": 64, "local-epochs": experiment.epochs}
        done = train(experiment.nodes(folder, seed), {**keys, **STRATEGIES[strategy], **more})
        truth = sorted(sorted(experiment.silos[i] for i in group) for group in experiment.truth)
    return _measured(done, truth)


def _measured(done: Trained, truth: list[list[str]]) -> Entry:
    trained = [report for report in done.result.rounds if not report.final]
    groups = sorted(sorted(group) for group in trained[-1].groups)
    reports = [silo for report in trained for silo in report.silos.values()]
    lost = [silo.update_lost for silo in reports if silo.update_lost == silo.update_lost]
    return {
        "error": 100 * float(np.mean(list(done.errors.values()))),
        "groups": groups,
        "found": groups == truth,
        "up": sum(silo.bytes_received for silo in reports) / len(trained),
        "down": sum(silo.bytes_sent for silo in reports) / len(trained),
        "lost": float(np.mean(lost)) if lost else 0.0,
    }


def compare(part: str, strategy: str, seed: int, rounds: int, *, folder: str) -> Entry:
    """A strategy in every format, of one seed."""
    found = {how: outcome(part, strategy, seed, rounds, folder, how) for how in wire.WIRE_FORMATS}
    same = found[wire.FLOAT32]["groups"]
    return {
        how: {
            **{key: value for key, value in own.items() if key != "groups"},
            "same": own["groups"] == same,
        }
        for how, own in found.items()
    }


# ---------------------------------------------------------------- the choices within 8 bits


class Updates:
    """The silos' ClientApp, which notes every update of a round's own training."""

    def __init__(self) -> None:
        self.of: dict[str, list[wire.Model]] = {}

    def __call__(self, message: Message, context: Context) -> Message:
        """See ``ClientApp``."""
        reply = app(message, context)
        if message.metadata.message_type == wire.TRAIN:
            sent, came = (
                wire.decode_arrays(one.content.array_records[wire.ARRAYS])
                for one in (message, reply)
            )
            update = {k: came[k] - a for k, a in sent.items() if a.ndim >= 2}  # type: ignore[operator]
            self.of.setdefault(str(context.node_config["name"]), []).append(update)
        return reply


Round = Callable[[NDArray[Any]], NDArray[Any]]
"""Scaled numbers → whole ones."""


def eight_bits(wanted: NDArray[Any], *, rows: bool, rounded: Round) -> NDArray[Any]:
    """What 8-bit numbers can say of an array, with a scale a row or one in all."""
    has_rows = rows and wanted.size >= LEAST_ROW * len(wanted)
    shaped = wanted.reshape(len(wanted) if has_rows else 1, -1)
    scales = np.abs(shaped).max(axis=1, keepdims=True) / LARGEST
    scales[scales == 0] = 1
    came: NDArray[Any] = (rounded(shaped / scales) * scales).reshape(wanted.shape)
    return came


def losses(updates: Sequence[wire.Model], *, rows: bool, rounded: Round, kept: bool) -> list[float]:
    """Relative errors of the updates, on average, and of their sum."""
    flat = [{k: a.astype(np.float64) for k, a in update.items()} for update in updates]
    owed: dict[str, Any] = dict.fromkeys(flat[0], 0.0)
    off: dict[str, Any] = dict.fromkeys(flat[0], 0.0)
    each = []
    for update in flat:
        came = {}
        for name, array in update.items():
            came[name] = eight_bits(array + owed[name], rows=rows, rounded=rounded)
            off[name] = off[name] + came[name] - array
            owed[name] = owed[name] + array - came[name] if kept else 0.0
        wrong = {name: came[name] - array for name, array in update.items()}
        each.append(length(wrong) / length(update))
    whole = {name: np.sum([update[name] for update in flat], axis=0) for name in flat[0]}
    return [float(np.mean(each)), length(off) / length(whole)]


def length(model: dict[str, Any]) -> float:
    """Euclidean norm of all its arrays together."""
    return float(np.sqrt(sum(np.square(array).sum() for array in model.values())))


def choices(part: str, strategy: str, seed: int) -> Entry:
    """Of updates on the demo's silos, what each way to round to 8 bits loses."""
    watched = Updates()
    own = [spec.node_config() for spec in silos(seed)]
    train(own, {"strategy": strategy, "rounds": ROUNDS, "seed": seed}, app=watched)
    rng = np.random.default_rng(seed)
    found = {}
    ways: dict[str, Round] = {
        "nearest": np.rint,
        "stochastic": lambda x: np.floor(x + rng.random(x.shape)),
    }
    for scales in ("an array", "a row"):
        for name, rounded in ways.items():
            for kept in (False, True):
                each = [
                    losses(updates, rows=scales == "a row", rounded=rounded, kept=kept)
                    for updates in watched.of.values()
                ]
                key = f"{scales}, {name}, {'yes' if kept else 'no'}"
                found[key] = np.mean(each, axis=0).tolist()
    return {"found": found}


# ---------------------------------------------------------------- the tables


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    tables = [block for part in (DEMO, *FROM_DATA) for block in _part(part, entries)]
    chosen = select(entries, part=CHOICES)
    return page(
        "# What smaller wire formats cost and save",
        "`make bench-formats`. Mean error in % over silos after the last round, mean ± deviation "
        "over seeds. Bytes are of the arrays of a round's training, of all silos. Models go to "
        "silos in 16 bits a number from round 2 on. What was lost is what the silo rounded away, "
        "as a share of the update's norm, and adds to its next update. Silos of data sets are "
        "those of HCCT's experiments, with its α there; on Digit-five with the network mlp-128 in "
        "place of the paper's, which is fifty times as large.",
        *tables,
        *(_choices(chosen[0]["found"]) if chosen else ()),
    )


def _part(part: str, entries: Sequence[Entry]) -> Iterator[str | list[str]]:
    own = select(entries, part=part)
    rows = [
        {"strategy": name, "format": how, "runs": [e[how] for e in mine], "plain": plain}
        for name in STRATEGIES
        if (mine := select(own, strategy=name))
        for plain in [[e[wire.FLOAT32] for e in mine]]
        for how in wire.WIRE_FORMATS
    ]
    if not rows:
        return
    yield f"## {part}, {own[0]['rounds']} rounds"
    yield columns(
        rows,
        {
            "strategy": "{strategy}",
            "format": "`{format}`",
            "seeds": lambda row: str(len(row["runs"])),
            "error": lambda row: spread(one["error"] for one in row["runs"]),
            "beside float32": lambda row: spread(
                (a["error"] - b["error"] for a, b in zip(row["runs"], row["plain"], strict=True)),
                sign="+",
            ),
            "hidden groups": lambda row: str(sum(one["found"] for one in row["runs"])),
            "groups as in float32": lambda row: str(sum(one["same"] for one in row["runs"])),
            "kB up": lambda row: f"{_mean(row['runs'], 'up') / 1e3:.0f}",
            "kB down": lambda row: f"{_mean(row['runs'], 'down') / 1e3:.0f}",
            "up": lambda row: _share(row, "up"),
            "both ways": lambda row: _share(row, "up", "down"),
            "lost": lambda row: f"{100 * _mean(row['runs'], 'lost'):.2f} %",
        },
    )


def _mean(runs: Sequence[Entry], key: str) -> float:
    return float(np.mean([one[key] for one in runs]))


def _share(row: Entry, *keys: str) -> str:
    own, plain = (sum(_mean(row[which], key) for key in keys) for which in ("runs", "plain"))
    return f"{100 * own / plain:.0f} %"


def _choices(found: dict[str, list[float]]) -> Iterator[str | list[str]]:
    yield "## Ways to round to 8 bits"
    yield (
        f"Of the updates of {ROUNDS} rounds of FedAvg on the demo's silos: relative error of one, "
        "and of their sum, mean over silos."
    )
    rows = [
        {"key": key.split(", "), "each": each, "all": of_all}
        for key, (each, of_all) in found.items()
    ]
    yield columns(
        rows,
        {
            "a scale for": "{key[0]}",
            "rounding": "{key[1]}",
            "error feedback": "{key[2]}",
            "of one": lambda row: f"{100 * row['each']:.2f} %",
            "of the sum": lambda row: f"{100 * row['all']:.3f} %",
        },
    )


STORE = Store("formats", document, keys=("part", "strategy", "seed"))


def cells(
    parts: Sequence[str], seeds: int, from_data: int, rounds: int
) -> Iterator[dict[str, Any]]:
    """What is measured: seeds of the demo, and as many of each part from the data sets."""
    counts = {DEMO: seeds, **dict.fromkeys(FROM_DATA, from_data)}
    for part in parts:
        for seed in range(counts[part]):
            for strategy in STRATEGIES:
                yield {"part": part, "strategy": strategy, "seed": seed, "rounds": rounds}


def main() -> None:
    """Measure what is not stored yet, and write after every figure."""
    few = {"type": int, "default": 3, "help": "of the parts from the data sets"}
    parts = (DEMO, *FROM_DATA)
    given = read(STORE, __doc__, parts=parts, seeds=10, rounds=ROUNDS, data=None, data_seeds=few)
    from_data = given.data_seeds if given.data else 0
    every = cells(given.parts, given.seeds, from_data, given.rounds)
    given.store.fill(every, partial(compare, folder=given.data))
    given.store.fill([{"part": CHOICES, "strategy": "fedavg", "seed": 0}], choices)
    print(given.store.text())


if __name__ == "__main__":
    main()
