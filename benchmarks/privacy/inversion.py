"""Gradient inversion: which training images come out of what leaves a silo.

    python -m benchmarks.privacy.inversion [--networks digits] [--only "plain;sum of 3"]

Silos of handwritten digits (8×8) train as the product does; the attacks see the whole update, the
sum of a group's, a sketch of it, or an update with differential privacy. What came out is compared
with the truth. Goes on where it stopped; ``results/inversion.png`` shows single samples.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from benchmarks.kit import RESULTS, Entry, Store, page, panels, read, select, table
from benchmarks.privacy.attacks import (
    Clipped,
    Images,
    Training,
    View,
    imprint,
    judge,
    match,
    rows_of,
    sketch_of,
    whole,
)
from benchmarks.privacy.noise import sigma_for
from coterie.client.work.data import Held
from coterie.client.work.sgd import TrainPlan, seed_of, train
from coterie.client.work.weights import load_weights, read_weights
from coterie.tasks import load_task
from coterie.tasks.base import SiloData
from coterie.tasks.images.digits import NUM_SAMPLES, Digits
from coterie.tasks.models import NETWORKS, SplitModel
from coterie.wire import Model

LR = 0.1  # the product's default
CANDIDATES = 200
ROUNDS, DELTA, CLIP = 20, 1e-5, 1.0
"""Of the run whose whole budget ε is; its δ; the length that gradients of samples are cut to."""
BUCKETS, SHARE = 4096, 10
"""A sketch has at most so many numbers, and at most one for so many of the update's."""
PRETRAINED = 400
"""Images that a model is trained on before, where it is."""
SHOWN = (0, 1, 3)
"""Trials whose first image is in the picture."""
SIDE = 8


@dataclass(frozen=True)
class Local:
    """Local training in a round: samples of a silo, in a mini-batch, and passes over them."""

    samples: int
    batch: int
    epochs: int

    @property
    def steps(self) -> int:
        """Of SGD."""
        return self.epochs * self.samples // self.batch

    @property
    def text(self) -> str:
        """As the tables call it."""
        passes = "" if self.epochs == 1 else f", {self.epochs} epochs"
        return f"{self.samples} in batches of {self.batch}{passes}"


ONE_STEP = tuple(Local(n, n, 1) for n in (1, 2, 4, 8, 16, 32, 64))
MORE_STEPS = (
    *(Local(8, 1, 1), Local(8, 8, 5), Local(16, 4, 1), Local(16, 16, 5), Local(32, 16, 1)),
    Local(32, 16, 5),
)
SOME = (Local(1, 1, 1), Local(8, 8, 1), Local(32, 32, 1), Local(8, 8, 5))
VIEWS: dict[str, tuple[Local, ...]] = {
    "labels alone": (Local(1, 1, 1), Local(8, 8, 1), Local(32, 32, 1)),
    "plain": (*ONE_STEP, *MORE_STEPS),
    "plain, trained model": (Local(1, 1, 1), Local(8, 8, 1), Local(32, 32, 1), Local(32, 16, 5)),
    "sum of 2": SOME,
    "sum of 3": (*SOME[:2], SOME[3]),
    "sum of 5": (*SOME[:2], SOME[3]),
    "sketch, projection known": (*ONE_STEP[:6], Local(8, 8, 5), Local(32, 16, 5)),
    "sketch, projection unknown": SOME,
    "plain, hostile model": (*ONE_STEP[3:], Local(32, 16, 5)),
    "sum of 5, hostile model": (Local(1, 1, 1), Local(8, 8, 1), Local(32, 32, 1)),
    "DP ε = 8": SOME[:3],
    "DP ε = 2": SOME[:3],
    "DP ε = 8, hostile model": (Local(8, 8, 1), Local(32, 32, 1)),
}
"""What the attacker sees → the local trainings it is tried on."""
HOSTILE = "hostile model"
NETS = ("mclr", "mlp-128", "digits")
"""``digits`` is the task's own network, two convolutions."""


class Drawn(Digits):
    """The digits with another network."""

    def __init__(self, network: str) -> None:
        self.network = network

    def model(self) -> nn.Module:
        """One of the product's."""
        if self.network == "digits":
            return super().model()
        return SplitModel(*NETWORKS[self.network](shape=(1, SIDE, SIDE), num_classes=10))


@lru_cache(maxsize=1)
def digits() -> Held:
    """All images, in an order drawn once."""
    data = load_task("digits").load({"train": NUM_SAMPLES - 1, "test": 1})
    assert isinstance(data, SiloData)
    return Held(torch.from_numpy(data.x_train), torch.from_numpy(data.y_train))


def mean_of(models: Sequence[Model]) -> Model:
    """Of silos with as many samples each."""
    return {
        name: np.mean([np.asarray(model[name], np.float32) for model in models], axis=0)
        for name in models[0]
    }


@dataclass(frozen=True)
class Observed:
    """What happened at the silos of a group in one round, several times over.

    Attributes:
        net: the network.
        trainings: of the silos; what the attacker knows of them.
        seen: the mean update, from the product's own training, per learning rate, (trials, P).
        true: images of all silos after another, (trials, silos · n, height, width).
        labels: theirs.
        rest: images that no silo has.
    """

    net: nn.Module
    trainings: list[Training]
    seen: Tensor
    true: Images
    labels: NDArray[np.int64]
    rest: Held


def observe(network: str, local: Local, *, silos: int, model: str) -> Observed:
    """Train as the product does, on samples that no two silos or trials share.

    ``model`` is what the server sends: an initial one, ``trained model`` or ``hostile model``.
    """
    trials = max(4, 32 // local.samples)
    task, images = Drawn(network), digits()
    elsewhere = images.take(torch.arange(len(images) - PRETRAINED, len(images)))
    starts: list[Model] = []
    for trial in range(trials):
        torch.manual_seed(trial)
        net = task.model()
        if model == "trained model":  # elsewhere, on images that the silos do not have
            train(task, net, elsewhere, TrainPlan(epochs=20, batch_size=16, lr=LR), seed=0)
        start = read_weights(net)
        if model == HOSTILE:
            given = {name: torch.from_numpy(array) for name, array in start.items()}
            made = imprint(given, elsewhere.x.mean(dim=(1, 2, 3)))
            start = {name: array.numpy() for name, array in made.items()}
        starts.append(start)
    # The first sample of a trial is the same one whatever is measured: pictures compare them.
    taken = torch.arange(silos * local.samples * trials).reshape(silos, -1, trials).mT
    sent = {n: torch.from_numpy(np.stack([s[n] for s in starts])) for n in starts[0]}
    trainings, updates = [], []
    for silo, mine in enumerate(taken):
        seed = seed_of(0, f"silo-{silo}", 1, "")
        parts = [images.take(rows) for rows in mine]
        pairs = zip(starts, parts, strict=True)
        y = torch.stack([part.targets() for part in parts])
        order = _order(local, seed).expand(trials, -1, -1)
        trainings.append(Training(net, sent, y, order, LR))
        updates.append(torch.stack([_train(task, net, *p, local, seed) for p in pairs]))
    x, y = images.at(taken.transpose(0, 1).reshape(-1))
    rest = images.take(torch.arange(taken.numel(), len(images) - PRETRAINED))
    shape = (trials, silos * local.samples)
    return Observed(
        net,
        trainings,
        torch.stack(updates).mean(0),
        x.reshape(*shape, SIDE, SIDE).double().numpy(),
        y.reshape(shape).numpy(),
        rest,
    )


def _train(
    task: Digits, net: nn.Module, start: Model, part: Held, local: Local, seed: int
) -> Tensor:
    """The update per learning rate, (P,)."""
    load_weights(net, start)
    train(task, net, part, TrainPlan(epochs=local.epochs, batch_size=local.batch, lr=LR), seed=seed)
    end = read_weights(net)
    pairs = [(torch.from_numpy(start[n]), torch.from_numpy(end[n])) for n in start]
    return torch.cat([(before - after).flatten() for before, after in pairs]) / LR


def _order(local: Local, seed: int) -> Tensor:
    """Rows of every mini-batch, (steps, batch), as training draws them; the server has the seed."""
    shuffle = torch.Generator().manual_seed(seed)
    passes = [torch.randperm(local.samples, generator=shuffle) for _ in range(local.epochs)]
    return torch.cat(passes).reshape(-1, local.batch)


def attack(view: str, network: str, local: Local) -> tuple[Observed, dict[str, list[Images]]]:
    """Method → reconstructions of every trial."""
    what, _, model = view.partition(", ")
    silos = int(what.removeprefix("sum of ")) if what.startswith("sum") else 1
    now = observe(network, local, silos=silos, model=model)
    if what == "labels alone":
        return now, {"means": _means(now)}
    how: View = whole
    if what.startswith("DP"):
        now = _private(now, local, epsilon=float(what.split()[-1]))
    if what == "sketch":
        how = _sketch(now, seed=0)
    rows = rows_of(now.seen, now.net, pixels=SIDE**2, apart=model == HOSTILE)
    if model == HOSTILE:
        return now, {"imprint": rows or []}
    seen = how(now.seen)
    if model == "projection unknown":
        how = _sketch(now, seed=1)
    steps = 600 if local.steps <= 2 else 300
    images = match(now.trainings, seen, how, shape=(1, SIDE, SIDE), steps=steps)
    found = {"matching": list(images[:, :, 0].double().numpy())}
    return now, found if rows is None or how is not whole else {**found, "analytic": rows}


def _sketch(now: Observed, *, seed: int) -> View:
    num = now.seen.shape[1]
    return sketch_of(num, min(BUCKETS, num // SHARE), seed=seed)


def _private(now: Observed, local: Local, *, epsilon: float) -> Observed:
    """The same with DP-SGD at the silos. The attacker knows the clipping and not the noise."""
    sigma = sigma_for(epsilon, delta=DELTA, steps=ROUNDS * local.steps)
    (plain,) = now.trainings
    torch.manual_seed(0)
    noisy = replace(plain, clipped=Clipped(CLIP, sigma))
    x = torch.from_numpy(now.true).float()[:, :, None]
    known = replace(plain, clipped=Clipped(CLIP))
    return replace(now, trainings=[known], seen=noisy.update(x))


def _means(now: Observed) -> list[Images]:
    """What somebody who knows the labels would draw: the mean image of each label elsewhere."""
    x, y = now.rest.x[:, 0].double().numpy(), now.rest.y.numpy()
    means = np.stack([x[y == label].mean(axis=0) for label in range(10)])
    return list(means[now.labels])


def measure(view: str, network: str, samples: int, batch: int, epochs: int) -> Entry:
    """How good the better of the attack's methods is."""
    local = Local(samples, batch, epochs)
    now, methods = attack(view, network, local)
    rest = now.rest.x[:, 0].double().numpy()
    results: dict[str, Any] = {}
    pictures: list[list[tuple[float, list[int]]]] = [[] for _ in SHOWN]
    for method, found in methods.items():
        draw = np.random.default_rng(0)
        judged = []
        for true, images in zip(now.true, found, strict=True):
            others = rest[[draw.choice(len(rest), CANDIDATES - 1, replace=False) for _ in true]]
            judged.append(judge(true, images, others))
        results[method] = {
            "psnr": round(float(np.mean([j.psnr.mean() for j in judged])), 2),
            "recognised": round(100 * float(np.mean([j.recognised.mean() for j in judged])), 1),
        }
        for trial, shown in zip(SHOWN, pictures, strict=True):
            shown.append((float(judged[trial].psnr[0]), _grey(judged[trial].matched[0])))
    best = max(results, key=lambda m: (results[m]["recognised"], results[m]["psnr"]))
    num = sum(len(true) for true in now.true)
    each = {method: result["recognised"] for method, result in results.items()}
    entry = {"images": num, "method": best, "each": each, **results[best]}
    if (view, local) in [column[1:] for column in COLUMNS]:
        entry["shown"] = [max(shown)[1] for shown in pictures]
        if view == "plain":
            entry["true"] = [_grey(now.true[trial, 0]) for trial in SHOWN]
    return entry


def _grey(image: NDArray[np.float64]) -> list[int]:
    return [round(255 * float(pixel)) for pixel in image.ravel()]


TITLES = {
    "labels alone": "Nothing but the labels: the mean image of each, from other data",
    "plain": "The update, as the server sees it without `secure = true`",
    "plain, trained model": "The same, of a model that was trained on other images before",
    "sum of 2": "The sum of two silos' updates (each of so many samples)",
    "sum of 3": "The sum of three",
    "sum of 5": "The sum of five",
    "sketch, projection known": "A silo's sketch, by who knows the projection",
    "sketch, projection unknown": "A silo's sketch, by who does not",
    "DP ε = 8": "The update with DP-SGD at the silo, ε = 8 for the run",
    "DP ε = 2": "The same, ε = 2",
    "plain, hostile model": "The update of a model that a hostile server made for it",
    "sum of 5, hostile model": "The sum of five updates of such a model",
    "DP ε = 8, hostile model": "The update of such a model with DP-SGD, ε = 8",
}


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    return page(
        "## Training images from what leaves a silo",
        "`make bench-privacy`: digits of 8×8, each attack on 32 images or more. Share of the "
        f"training images that are recognised among {CANDIDATES} (chance: {100 / CANDIDATES:.1f} "
        "%), and mean PSNR of the best match in dB, of the better of two attacks: *m*, matching "
        "the update through all local steps, or *a*, the rows of a linear first layer (*i*: of "
        "one made for it). From about 20 dB on the eye sees the image. The attacker knows the "
        "labels and the samples' order.",
        *(block for view in VIEWS for block in _table(select(entries, view=view), view)),
        f"A sketch has one number for {SHARE} of the update's (65, 961 and 609). DP: "
        f"gradients of samples cut to length {CLIP:g}, every step on all samples, "
        f"{ROUNDS} rounds in all, δ = {DELTA:g}.",
    )


def _table(entries: Sequence[Entry], view: str) -> Iterator[str | list[str]]:
    if not entries:
        return
    yield f"**{TITLES[view]}**"
    rows = []
    for local in VIEWS[view]:
        own = {e["network"]: e for e in select(entries, **vars(local))}
        cells = [_cell(own[net]) if net in own else "–" for net in NETS]
        rows.append([local.text, str(local.steps), *cells])
    yield table(["samples", "steps", *NETS], rows)


def _cell(entry: Entry) -> str:
    how = {"analytic": " *a*", "imprint": " *i*", "matching": " *m*"}.get(entry["method"], "")
    return f"{entry['recognised']:.0f} %, {entry['psnr']:.0f} dB{how}"


COLUMNS = (
    ("original", "plain", Local(1, 1, 1)),
    ("plain,\n1 sample", "plain", Local(1, 1, 1)),
    ("plain,\n8 samples", "plain", Local(8, 8, 1)),
    ("plain,\n64 samples", "plain", Local(64, 64, 1)),
    ("sum of 2,\n1 sample each", "sum of 2", Local(1, 1, 1)),
    ("sum of 5,\n1 sample each", "sum of 5", Local(1, 1, 1)),
    ("sketch, known,\n1 sample", "sketch, projection known", Local(1, 1, 1)),
    ("sketch, unknown,\n1 sample", "sketch, projection unknown", Local(1, 1, 1)),
    ("DP ε = 8,\n1 sample", "DP ε = 8", Local(1, 1, 1)),
)


def draw(store: Store, file: Path) -> None:
    """The first image of each of the first trials, and what the attacks make of it."""
    with panels(
        file,
        len(NETS) * len(SHOWN),
        len(COLUMNS),
        figsize=(1.25 * len(COLUMNS), 1.12 * len(NETS) * len(SHOWN)),
    ) as axes:
        for row in range(len(NETS) * len(SHOWN)):
            network, shown = NETS[row // len(SHOWN)], row % len(SHOWN)
            for column, (title, view, local) in enumerate(COLUMNS):
                axis = axes[row, column]
                axis.set(xticks=[], yticks=[])
                if row == 0:
                    axis.set_title(title, fontsize=8)
                if column == 0:
                    axis.set_ylabel(network if shown == 0 else "", fontsize=9)
                entry = store.find(view=view, network=network, **vars(local))
                if entry is not None:
                    pixels = entry["true" if title == "original" else "shown"][shown]
                    image = np.array(pixels).reshape(SIDE, SIDE)
                    axis.imshow(image, cmap="gray", vmin=0, vmax=255)


STORE = Store("inversion", document, keys=("view", "network", "samples", "batch", "epochs"))


def main() -> None:
    """Measure, store, print."""
    names = ",".join(NETS)
    given = read(STORE, __doc__, rows=VIEWS, networks={"default": names})
    torch.set_num_threads(1)
    cells = (
        {"view": view, "network": network, **vars(local)}
        for view in given.only
        for network in given.networks.split(",")
        if network == "mlp-128" or HOSTILE not in view
        for local in VIEWS[view]
    )
    given.store.fill(cells, measure)
    draw(given.store, given.store.folder / "inversion.png")
    if given.results == RESULTS:
        shutil.copy(RESULTS / "inversion.png", RESULTS.parents[1] / "docs" / "images")
    print(given.store.text())


if __name__ == "__main__":
    main()
