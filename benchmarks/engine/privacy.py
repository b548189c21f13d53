"""What differential privacy costs, and whether the groups are found in spite of its noise.

    python -m benchmarks.engine.privacy --data FOLDER [--seeds 3] [--only ROWS] [--sets SETS]

Nine silos in three hidden kinds. *digits*: those of ``coterie demo``, of 40 to 120 samples,
upright, turned by 90°, and with labels shifted by 3; its small network. *mnist*: 3,000 images each,
upright, and turned by 90° and 180°; a softmax layer. Every silo's budget is spent by the run
exactly: its noise is the least with which Opacus' accountant allows all rounds, at δ = 1/(10 n).
Silos have no folder here, so that the noise comes of the seed. Runs are on the in-process Grid.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from itertools import product
from typing import Any

import numpy as np
from flwr.app import Context, Message
from opacus.accountants.utils import get_noise_multiplier
from sklearn.metrics import adjusted_rand_score

from benchmarks.kit import Entry, Node, Store, page, read, select, spread, table, train
from benchmarks.kit import nodes as nodes_of
from coterie import wire
from coterie.client.app import app
from coterie.client.work.session import close_all
from coterie.features.privacy import budget
from coterie.server.study.demo import KINDS, NUM_TEST, SIZES
from coterie.tasks.base import Option

SETS = ("digits", "mnist")
MNIST_SIZE, MNIST_TEST = 3000, 1000
ROTATIONS = "0,90,180"
EPSILONS: Mapping[str, float | None] = {"none": None, "8": 8.0, "2": 2.0}
PLAIN = "HCCT, known noise left in"
ROWS: dict[str, Mapping[str, Any]] = {
    "alone": {"strategy": "independent"},
    "FedAvg": {"strategy": "fedavg"},
    "HCCT": {"strategy": "hcct", "alpha": 50.0},
    PLAIN: {"strategy": "hcct", "alpha": 50.0},
}
TRAINING: dict[str, dict[str, Any]] = {
    "digits": {"rounds": 20, "local-epochs": 1, "batch-size": 40, "lr": 0.5},
    "mnist": {"rounds": 15, "local-epochs": 1, "batch-size": 600, "lr": 1.0},
}
"""The same with and without: as many steps as a budget of 2 can bear."""
ALPHA = {"digits": 50.0, "mnist": 2000.0}
"""Of HCCT, in samples: about two thirds of a silo's."""
CLIP = {"digits": 1.0, "mnist": 1.0}


def silos(on: str, seed: int, data: str) -> list[dict[str, Option]]:
    """The silos of a set; the first three are of the first kind, and so on."""
    if on == "digits":
        found: list[dict[str, Option]] = []
        skip = 0
        for kind, options in KINDS.items():
            for i, size in enumerate(SIZES):
                own = {"train": size, "test": NUM_TEST, "skip": skip, "split-seed": seed, **options}
                prefixed = {f"data.{key}": value for key, value in own.items()}
                found.append({"name": f"{kind}-{i}", "task": "digits", "threads": 1, **prefixed})
                skip += size + NUM_TEST
        return found
    split: dict[str, Option] = {
        "split": "iid",
        "silos": 9,
        "split-seed": seed,
        "split-rotations": ROTATIONS,
    }
    cut: dict[str, Option] = {"data": data, "train": MNIST_SIZE, "test": MNIST_TEST}
    return nodes_of("mnist/mclr", [f"silo-{i}" for i in range(9)], {**split, **cut})


def with_privacy(node: Mapping[str, Any], on: str, epsilon: float) -> dict[str, Any]:
    """The silo with the least noise that its budget allows for the whole run."""
    terms = {
        "epsilon": epsilon,
        "noise": least_noise(on, int(node["data.train"]), epsilon),
        "clip": CLIP[on],
    }
    return {**node, **{f"privacy-{key}": value for key, value in terms.items()}}


@cache
def least_noise(on: str, size: int, epsilon: float) -> float:
    """σ with which so many samples are trained for the whole run at this ε."""
    keys = TRAINING[on]
    batch = min(int(keys["batch-size"]), size)
    noise = get_noise_multiplier(
        target_epsilon=epsilon,
        target_delta=0.1 / size,
        sample_rate=batch / size,
        steps=int(keys["rounds"]) * int(keys["local-epochs"]) * -(-size // batch),
        accountant="rdp",
        epsilon_tolerance=1e-3,
    )
    return float(noise)


def silent(message: Message, context: Context) -> Message:
    """The silos' app that does not say how much noise its updates have."""
    reply = app(message, context)
    if not reply.has_error() and wire.METRICS in reply.content.metric_records:
        reply.content.metric_records[wire.METRICS].pop(wire.UPDATE_NOISE, None)
    return reply


def measure(on: str, epsilon: str, row: str, seed: int, data: str) -> Entry:
    """Error of every silo, the groups, how like the kinds they are, and the noise."""
    close_all()
    budget._memory.clear()
    nodes: list[Node] = list(silos(on, seed, data))
    limit = EPSILONS[epsilon]
    if limit is not None:
        nodes = [with_privacy(node, on, limit) for node in nodes]
    keys = {"seed": seed, **TRAINING[on], **ROWS[row]}
    if keys["strategy"] == "hcct":
        keys["alpha"] = ALPHA[on]
    done = train(nodes, keys, app=silent if row == PLAIN else app)
    groups = done.result.rounds[-1].groups
    number = {name: i for i, group in enumerate(groups) for name in group}
    names = [str(node["name"]) for node in nodes]
    rand = adjusted_rand_score([i // 3 for i in range(9)], [number[name] for name in names])
    noise = [round(float(node.get("privacy-noise", 0)), 3) for node in nodes]
    return {
        "errors": {name: round(error, 6) for name, error in done.errors.items()},
        "groups": [list(group) for group in groups],
        "rand": round(float(rand), 4),
        "noise": [min(noise), max(noise)],
        "answered": [len(r.silos) for r in done.result.rounds if not r.final],
        "seconds": round(done.seconds, 1),
    }


# --- the tables -----------------------------------------------------------------------------------


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    parts = []
    for on in SETS:
        own = select(entries, on=on)
        if not own:
            continue
        keys = TRAINING[on]
        parts += [
            f"## {on}",
            f"{keys['rounds']} rounds of {keys['local-epochs']} epoch, batches of "
            f"{keys['batch-size']}, lr {keys['lr']}, clip {CLIP[on]:g}; {_noise(own)}.",
            table(("ε", "strategy", "error, %", "groups", "adjusted Rand", "seeds"), _rows(own)),
        ]
    return page(
        "# Differential privacy",
        "Made by `python -m benchmarks.engine.privacy`. Nine silos of three hidden kinds; error on "
        "own test data, mean over\nsilos ± standard deviation over seeds. *Groups*: how many after "
        "the last round. *Adjusted Rand*: of the groups and\nthe kinds; 1 is equal, 0 is chance. "
        "*Known noise left in*: silos do not say how much noise their updates have, so that\nthe "
        "Gram matrix is not corrected for it.",
        *parts,
    )


def _noise(entries: Sequence[Entry]) -> str:
    parts = []
    for epsilon in EPSILONS:
        noise = [n for e in select(entries, epsilon=epsilon) for n in e["noise"] if n]
        parts += [f"noise at ε {epsilon}: {min(noise):.2g} to {max(noise):.2g}"] if noise else []
    return ", ".join(parts) or "no noise"


def _rows(entries: Sequence[Entry]) -> list[list[str]]:
    rows = []
    for epsilon, row in product(EPSILONS, ROWS):
        own = select(entries, epsilon=epsilon, row=row)
        if not own:
            continue
        errors = np.array([100 * np.mean(list(entry["errors"].values())) for entry in own])
        groups = np.array([len(entry["groups"]) for entry in own])
        rand = np.array([entry["rand"] for entry in own])
        found = [spread(groups, 1), spread(rand, 2)] if row.startswith("HCCT") else ["–", "–"]
        rows.append([epsilon, row, spread(errors, 1), *found, str(len(own))])
    return rows


STORE = Store("privacy", document, keys=("on", "epsilon", "row", "seed"))


def main() -> None:
    """Measure what is not stored yet."""
    sets = {"default": ",".join(SETS), "help": f"of {', '.join(SETS)}"}
    given = read(STORE, __doc__, data=True, rows=ROWS, seeds=3, sets=sets)
    cells = (
        {"on": on, "epsilon": epsilon, "row": row, "seed": seed}
        for seed, on, epsilon, row in product(
            range(given.seeds), given.sets.split(","), EPSILONS, given.only
        )
        if on in SETS and not (epsilon == "none" and row == PLAIN)
    )
    given.store.fill(cells, lambda **cell: measure(data=given.data, **cell))
    print(given.store.text())


if __name__ == "__main__":
    main()
