"""Silos that come without labels: which model they are given, and how good it is for them.

    python -m benchmarks.papers.newcomers --data FOLDER [--seeds 3] [--only ROWS] [--kinds KINDS]

After FLUX (Fenoglio et al., NeurIPS 2025, https://arxiv.org/abs/2511.22305), whose newcomers are
unlabelled and differ in one of four ways: in features, P(X); in labels, P(Y); in what labels mean,
P(Y|X); in what a label looks like, P(X|Y). FOLDER holds MNIST as torchvision has it.

Here: four groups of three silos with 150 training samples each, and of each group one newcomer with
150 samples without labels. Its model is measured on 400 other samples of its kind. Groups differ as
much as they can, so this stands beside FLUX's hardest level, and is smaller than it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from benchmarks.kit import Entry, Node, Store, page, read, select, spread, table, train
from coterie import wire
from coterie.client.work.session import close_all
from coterie.client.work.weights import load_weights
from coterie.tasks import SiloData, Task, load_task
from coterie.tasks.base import Option
from coterie.tasks.splits.shifts import rotate

KINDS = {
    "features": "P(X): turned by 0, 90, 180 or 270°",
    "labels": "P(Y): digits 0 to 2, 3 to 5, 6 and 7, 8 and 9",
    "meaning": "P(Y|X): labels moved on by 0, 3, 5 or 7",
    "looks": "P(X|Y): another three digits are turned by 180° in every group",
}
GROUPS, EACH = 4, 3
TRAIN, TEST, NEW, MEASURED = 150, 50, 150, 400
LABELS = ((0, 1, 2), (3, 4, 5), (6, 7), (8, 9))
MOVED = (0, 3, 5, 7)
TURNED = ((), (0, 1, 2), (3, 4, 5), (6, 7, 9))
RUN = {"rounds": 12, "local-epochs": 3, "batch-size": 16, "lr": 0.05}
SETTINGS: Mapping[str, Mapping[str, Any]] = {
    "FedAvg": {"strategy": "fedavg"},
    "auto": {"strategy": "auto"},
    "FedCollab, c auto": {"strategy": "fedcollab", "c": "auto"},
    "HCCT": {"strategy": "hcct", "alpha": 50.0},
    "FedGroup, 4 groups": {"strategy": "fedgroup", "num-groups": 4},
}
FLUX = {"FedAvg": 79.4, "FLUX": 92.3}
"""Accuracy in % on MNIST at the hardest of FLUX's eight levels, as published."""

Images = NDArray[np.float32]
Labels = NDArray[np.int64]


class Shifted(Task):
    """MNIST in four groups. Options: ``data``, ``kind``, ``seed``, ``silo``: group · 4 + number."""

    num_classes = 10

    def model(self) -> nn.Module:
        """One hidden layer of 128."""
        return load_task("mnist/mlp-128").model()

    def load(self, options: Mapping[str, Option]) -> SiloData:
        """Of one silo."""
        group, number = divmod(int(options["silo"]), EACH + 1)
        x, y = samples(
            str(options["data"]), str(options["kind"]), int(options["seed"]), group, number
        )
        return SiloData(x[:TRAIN], y[:TRAIN], x[TRAIN:], y[TRAIN:], 10)


@lru_cache(maxsize=1)
def _mnist(folder: str) -> tuple[Images, Labels]:
    data = load_task("mnist/mlp-128").load({"data": folder})
    assert isinstance(data, SiloData)
    return data.x_train, data.y_train


def samples(folder: str, kind: str, seed: int, group: int, number: int) -> tuple[Images, Labels]:
    """Of a silo, or of the group's newcomer, whose number is the last; no two share any."""
    x, y = _mnist(folder)
    order = np.random.default_rng([seed, 21]).permutation(len(y))
    if kind == "labels":
        order = order[np.isin(y[order], LABELS[group])]
        place, parts = number, EACH + 1
    else:
        place, parts = group * (EACH + 1) + number, GROUPS * (EACH + 1)
    rows = order[place::parts][: NEW + MEASURED if number == EACH else TRAIN + TEST]
    x, y = x[rows], y[rows]
    if kind == "features":
        x = np.ascontiguousarray(rotate(x[:, 0], 90 * group)[:, None])
    if kind == "meaning":
        y = (y + MOVED[group]) % 10
    if kind == "looks":
        x = x.copy()
        turned = np.isin(y, TURNED[group])
        x[turned] = rotate(x[turned][:, 0], 180)[:, None]
    return x, y


def measure(kind: str, setting: str, seed: int, data: str) -> Entry:
    """One run: how good each newcomer's model is, and what other ways of choosing had given it."""
    close_all()
    options: Node = {"data.data": data, "data.kind": kind, "data.seed": seed}
    shared: Node = {"task": f"{__name__}:Shifted", "threads": 1, "device": "cpu"}
    known: list[Node] = [
        {"name": f"g{g}-{i}", **shared, **options, "data.silo": g * (EACH + 1) + i}
        for g, i in product(range(GROUPS), range(EACH))
    ]
    with TemporaryDirectory() as folder:
        new: list[Node] = []
        for group in range(GROUPS):
            x, _ = samples(data, kind, seed, group, EACH)
            file = Path(folder) / f"new-{group}.npy"
            np.save(file, x[:NEW])
            new.append({"name": f"g{group}-new", **shared, "unlabelled": str(file)})
        keys = {**RUN, **SETTINGS[setting], "seed": seed}
        done = train([*known, *new], {**keys, "min-silos": len(known)})
    final = done.result.rounds[-1]
    models = {name: wire.decode_arrays(record) for name, record in done.result.models.items()}
    shown = [group for group in final.groups if len(group) > 1]
    found = {
        f"g{g}-new": _newcomer(
            samples(data, kind, seed, g, EACH),
            {group: models[group[0]] for group in shown},
            f"g{g}-",
            tuple(final.details["unlabelled"][f"g{g}-new"]["group"]),
        )
        for g in range(GROUPS)
    }
    placing = [final.phases.get(k) for k in (wire.TRAIN_PLACING, wire.EVALUATE_PLACING)]
    phases = [r.phases.get(wire.TRAIN_PLACING) for r in done.result.rounds]
    moved = sum(p.bytes_sent + p.bytes_received for p in [*phases, *placing] if p is not None)
    return {"groups": [list(g) for g in final.groups], "newcomers": found, "placing-bytes": moved}


def _newcomer(
    own: tuple[Images, Labels],
    models: Mapping[tuple[str, ...], wire.Model],
    kin: str,
    given: tuple[str, ...],
) -> dict[str, Any]:
    """Accuracy of what it was given, and of what it would have had by other ways."""
    x, y = (torch.from_numpy(part) for part in own)
    rights, confidence = {}, {}
    for group, weights in models.items():
        model = Shifted().model()
        load_weights(model, weights)
        model.eval()
        with torch.no_grad():
            answers = model(x).softmax(dim=1)
        confidence[group] = float(answers[:NEW].max(dim=1).values.mean())
        rights[group] = float((answers[NEW:].argmax(dim=1) == y[NEW:]).float().mean())
    if not rights:
        return {}
    like = max(rights, key=lambda g: (sum(name.startswith(kin) for name in g) / len(g), -len(g)))
    return {
        "given": rights.get(given),
        "kin": bool(given) and any(name.startswith(kin) for name in given),
        "told": rights[like],
        "confident": rights[max(confidence, key=lambda g: confidence[g])],
        "best": max(rights.values()),
        "any": float(np.mean(list(rights.values()))),
    }


# --- the tables -----------------------------------------------------------------------------------

WAYS = {
    "given": "placed by features",
    "confident": "the most confident model",
    "any": "any group's, mean",
    "told": "told its group",
    "best": "best for it",
}


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    rows = []
    for setting, way in product(SETTINGS, WAYS):
        if setting == "FedAvg" and way != "given":
            continue
        cells, means = [], []
        for kind in KINDS:
            runs = [
                [100 * one[way] for one in run["newcomers"].values() if one.get(way) is not None]
                for run in select(entries, kind=kind, setting=setting)
            ]
            by_seed = [float(np.mean(own)) for own in runs if own]
            cells.append(spread(np.array(by_seed), 1) if by_seed else "–")
            means += [float(np.mean(by_seed))] if by_seed else []
        if means:
            mean = f"{np.mean(means):.1f}" if len(means) == len(KINDS) else "–"
            name = setting if setting == "FedAvg" else f"{setting}: {WAYS[way]}"
            rows.append([f"**{name}**" if way == "given" else name, *cells, mean])
    return page(
        "# Newcomers without labels",
        "Made by `python -m benchmarks.papers.newcomers --data FOLDER`; 12 silos of 150 samples in "
        "four groups, 12 rounds of\n3 epochs. Accuracy in % on 400 samples of each newcomer's "
        "kind, mean over four newcomers ± standard deviation over\nseeds. *Told its group*: the "
        "model of the group with most silos of its kind, which nobody can know; *best*: by its "
        "own labels.",
        table(("way", *KINDS, "mean"), rows),
        "\n".join(f"- *{name}*, {what}." for name, what in KINDS.items()),
        f"FLUX on MNIST, at the hardest of its eight levels of shift: {FLUX['FLUX']}, FedAvg "
        f"{FLUX['FedAvg']}. It has other silos, more samples\nand a larger network: its figures "
        "stand beside these, and cannot be compared with them digit by digit.",
        "## Where they were placed",
        table(("strategy", *KINDS, "bytes of placing, MB"), _places(entries)),
    )


def _places(entries: Sequence[Entry]) -> list[list[str]]:
    """How many newcomers were placed with a silo of their own kind."""
    rows = []
    for setting in SETTINGS:
        own = select(entries, setting=setting)
        if not own or setting == "FedAvg":
            continue
        cells = []
        for kind in KINDS:
            ones = [n for run in select(own, kind=kind) for n in run["newcomers"].values()]
            cells.append(f"{sum(bool(n.get('kin')) for n in ones)} of {len(ones)}")
        moved = np.mean([run["placing-bytes"] for run in own]) / 1e6
        rows.append([setting, *cells, f"{moved:.0f}"])
    return rows


STORE = Store("newcomers", document, keys=("kind", "setting", "seed"))


def main() -> None:
    """Measure what is not stored yet."""
    kinds = {"default": ",".join(KINDS), "help": f"of {', '.join(KINDS)}"}
    given = read(STORE, __doc__, data=True, rows=SETTINGS, seeds=3, kinds=kinds)
    chosen = [kind for kind in given.kinds.split(",") if kind in KINDS]
    cells = (
        {"kind": kind, "setting": setting, "seed": seed}
        for seed, setting, kind in product(range(given.seeds), given.only, chosen)
    )
    given.store.fill(cells, lambda **cell: measure(data=given.data, **cell))
    print(given.store.text())


if __name__ == "__main__":
    main()
