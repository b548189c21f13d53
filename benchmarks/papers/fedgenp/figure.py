"""Three silos with different data: decision boundaries of FedAvg and of FedGenP.

    python -m benchmarks.papers.fedgenp.figure [--rounds 40] [--seed 0]

After Figure 4 of the FedGenP paper, whose data is not published: three silos, two classes, as many
samples of each class everywhere, but from other regions of the plane. The first row shows the
silos' data, the second the global models over all of it. Writes ``results/fedgenp_figure.png``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from benchmarks.kit import RESULTS, nodes, panels, read, train
from coterie import wire
from coterie.client.work.weights import load_weights
from coterie.tasks.base import Option, SiloData, Task
from coterie.tasks.models import SplitModel

SAMPLES, SPREAD = 60, 0.3
"""Of a class at a silo; standard deviation of its cloud."""
ANGLES, RADII = (90, 210, 330), (2.0, 0.8)
CENTRES = tuple(
    tuple((r * np.cos(np.deg2rad(angle)), r * np.sin(np.deg2rad(angle))) for r in RADII)
    for angle in ANGLES
)
"""Silo → centre of class 0 and of class 1: class 1 is the inner of two rings, of which every silo
sees one side, so that what separates the classes at one silo does not at the others."""
EDGE = (-3.2, 3.2, -2.4, 3.2)


class Plane(Task):
    """Two classes of points in the plane; option ``silo`` says from where, ``seed`` which."""

    name = "benchmarks.papers.fedgenp.figure:Plane"
    num_classes = 2

    def model(self) -> nn.Module:
        """Latents of width 8."""
        body = nn.Sequential(nn.Linear(2, 16), nn.ReLU(), nn.Linear(16, 8), nn.ReLU())
        return SplitModel(body, nn.Linear(8, 2))

    def load(self, options: Mapping[str, Option]) -> SiloData:
        """As many training as test samples."""
        silo, seed = int(options["silo"]), int(options.get("seed", 0))
        rng = np.random.default_rng([seed, silo])
        y = np.tile([0, 1], 2 * SAMPLES).astype(np.int64)
        centres = np.array(CENTRES[silo])
        x = (centres[y] + SPREAD * rng.standard_normal((len(y), 2))).astype(np.float32)
        half = len(y) // 2
        return SiloData(x[:half], y[:half], x[half:], y[half:], self.num_classes)


def global_model(strategy: str, rounds: int, seed: int) -> nn.Module:
    """The global model after so many rounds, with the paper's 20 mini-batches of 32 at 0.01."""
    names = [f"silo-{i + 1}" for i in range(len(CENTRES))]
    keys = {
        **{"strategy": strategy, "rounds": rounds, "seed": seed},
        **{"local-steps": 20, "batch-size": 32, "lr": 0.01, "lr-decay": 1.0},
    }
    result = train(nodes(Plane.name, names, {"seed": seed}), keys).result
    model = Plane().model()
    load_weights(model, wire.decode_arrays(result.arrays))
    return model.eval()


@torch.no_grad()
def accuracy(model: nn.Module, silos: list[SiloData]) -> float:
    """Over all silos' test data, %."""
    hits = [
        float((model(torch.from_numpy(s.x_test)).argmax(dim=1).numpy() == s.y_test).mean())
        for s in silos
    ]
    return 100 * float(np.mean(hits))


def main() -> None:
    """Train, draw, save."""
    given = read(None, __doc__, rounds=40, seed={"type": int, "default": 0})
    silos = [Plane().load({"silo": i, "seed": given.seed}) for i in range(len(CENTRES))]
    shown = (("fedavg", 1.0), ("fedavg", 2.5), ("fedgenp", 1.0))
    names = {"fedavg": "FedAvg", "fedgenp": "FedGenP"}
    file = RESULTS / "fedgenp_figure.png"
    with panels(file, 2, 3, figsize=(10, 6.6), sharex=True, sharey=True) as axes:
        for i, (axis, silo) in enumerate(zip(axes[0], silos, strict=True)):
            _points(axis, silo, size=14)
            axis.set_title(f"silo {i + 1}")
        for axis, (strategy, factor) in zip(axes[1], shown, strict=True):
            rounds = round(factor * given.rounds)
            model = global_model(strategy, rounds, given.seed)
            _boundary(axis, model)
            for silo in silos:
                _points(axis, silo, size=6)
            axis.set_title(f"{names[strategy]}, {rounds} rounds: {accuracy(model, silos):.1f} %")
            print(strategy, rounds, round(accuracy(model, silos), 2), flush=True)


def _points(axis: Any, silo: SiloData, *, size: int) -> None:
    for label, colour in enumerate(("tab:blue", "tab:red")):
        x = silo.x_train[silo.y_train == label]
        axis.scatter(x[:, 0], x[:, 1], s=size, c=colour, linewidths=0)


@torch.no_grad()
def _boundary(axis: Any, model: nn.Module) -> None:
    a, b = np.meshgrid(np.linspace(*EDGE[:2], 200), np.linspace(*EDGE[2:], 200))
    plane = torch.from_numpy(np.stack([a.ravel(), b.ravel()], axis=1).astype(np.float32))
    share = torch.softmax(model(plane), dim=1)[:, 1].numpy().reshape(a.shape)
    axis.contourf(a, b, share, levels=np.linspace(0, 1, 11), cmap="RdBu_r", alpha=0.35)
    axis.contour(a, b, share, levels=[0.5], colors="black", linewidths=1.2)


if __name__ == "__main__":
    main()
