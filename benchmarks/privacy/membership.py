"""Membership inference: whether a sample was trained on, found out from a model that is kept.

    python -m benchmarks.privacy.membership [--seeds 2]

Ten silos of 100 digits each, one kind of data; a model that a silo trains alone, and one of all ten
(FedAvg); both without and with DP-SGD at the silos. Whoever has the model asks of every sample of
one silo, and of as many of nobody's:

- *loss*: it was trained on if its loss is below the training samples' mean (Yeom, Giacomelli,
  Fredrikson and Jha 2018, "Privacy risk in machine learning", adversary 2);
- *shadow models*: the same of the loss compared with those of models that were trained in the same
  way on other samples, where it was in and where it was out (Carlini et al. 2022, "Membership
  inference attacks from first principles", Gaussian likelihood ratio, online).

The advantage is the share of members found less the share of others taken for members.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.stats import norm
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from benchmarks.kit import Entry, Store, page, read, select, spread, table
from benchmarks.privacy.attacks import Clipped, Training
from benchmarks.privacy.inversion import CLIP, DELTA, LR, ROUNDS, digits, mean_of
from benchmarks.privacy.noise import sigma_for
from coterie.client.work.sgd import TrainPlan, seed_of, train
from coterie.client.work.weights import load_weights, read_weights
from coterie.tasks import load_task
from coterie.wire import Model

SILOS, SAMPLES, EPOCHS, BATCH = 10, 100, 5, 16
SHADOWS = 8
Ratio = Callable[[NDArray[np.float64]], NDArray[np.float64]]
TESTS = 400
"""Images that the error is measured on."""
BUDGETS = (0.0, 8.0, 2.0)
"""ε of the run, of each silo's samples; 0: without differential privacy."""
KEPT = {"one silo alone": 1, "the group of ten": SILOS}
PRIVATE_STEPS, PRIVATE_LR = 4, 1.0
"""With DP: steps a round, each on all samples of a silo, and rate; the best of seven pairs."""


def model_of(silos: Sequence[Tensor], epsilon: float, seed: int) -> nn.Module:
    """Train a model on silos with these rows: 20 rounds of the mean of all."""
    task, images = load_task("digits"), digits()
    torch.manual_seed(seed)
    net = task.model()
    model = read_weights(net)
    for number in range(1, ROUNDS + 1):
        if epsilon:
            drawn = seed_of(seed, "silos", number, "")
            model = mean_of(_privately(net, model, torch.stack(list(silos)), epsilon, drawn))
            continue
        made: list[Model] = []
        for i, rows in enumerate(silos):
            load_weights(net, model)
            plan = TrainPlan(epochs=EPOCHS, batch_size=BATCH, lr=LR)
            train(task, net, images.take(rows), plan, seed=seed_of(seed, f"silo-{i}", number, ""))
            made.append(read_weights(net))
        model = mean_of(made)
    load_weights(net, model)
    return net.eval()


def _privately(
    net: nn.Module, model: Model, rows: Tensor, epsilon: float, seed: int
) -> list[Model]:
    """What silos with these rows, (silos, samples), make of the model by DP-SGD, all at once."""
    x, y = digits().at(rows.flatten())
    silos, samples = rows.shape
    torch.manual_seed(seed)
    sigma = sigma_for(epsilon, delta=DELTA, steps=ROUNDS * PRIVATE_STEPS)
    start = {
        name: torch.from_numpy(array).expand(silos, *array.shape) for name, array in model.items()
    }
    order = torch.arange(samples).expand(silos, PRIVATE_STEPS, -1)
    clipped = Clipped(CLIP, sigma)
    training = Training(net, start, y.reshape(silos, -1), order, PRIVATE_LR, clipped)
    with torch.no_grad():
        updates = training.update(x.reshape(silos, samples, *x.shape[1:]))
    sizes = [array.size for array in model.values()]
    parts = zip(model.items(), updates.split(sizes, dim=1), strict=True)
    ends = {
        name: array - PRIVATE_LR * part.reshape(silos, *array.shape).numpy()
        for (name, array), part in parts
    }
    return [{name: end[silo] for name, end in ends.items()} for silo in range(silos)]


@torch.no_grad()
def losses(net: nn.Module, rows: Tensor) -> NDArray[np.float64]:
    """Of these images."""
    x, y = digits().at(rows)
    return cross_entropy(net(x), y, reduction="none").double().numpy()


def cut(seed: int, silos: int) -> tuple[list[Tensor], Tensor]:
    """Rows of every silo, and of as many images as silo 0 has that nobody trains on."""
    rows = torch.randperm(len(digits()) - TESTS, generator=torch.Generator().manual_seed(seed))
    parts = rows[: (SILOS + 1) * SAMPLES].split(SAMPLES)
    return list(parts[:silos]), parts[-1]


def measure(kept: str, epsilon: float, seed: int) -> Entry:
    """Error of the model, and what both attacks find out of silo 0's samples."""
    parts, outside = cut(seed, KEPT[kept])
    net = model_of(parts, epsilon, seed)
    asked = torch.cat([parts[0], outside])
    member = np.arange(len(asked)) < SAMPLES
    found, known = losses(net, asked), losses(net, torch.cat(parts))
    tests = torch.arange(len(digits()) - TESTS, len(digits()))
    x, y = digits().at(tests)
    with torch.no_grad():
        error = float((net(x).argmax(dim=1) != y).float().mean())
    guessed = found <= known.mean()
    ratio = _shadows(asked, parts, epsilon, seed)(found)
    return {
        "error": 100 * error,
        "loss": 100 * float(guessed[member].mean() - guessed[~member].mean()),
        "shadows": 100 * float((ratio > 0)[member].mean() - (ratio > 0)[~member].mean()),
        "auc": float((ratio[member][:, None] > ratio[~member][None]).mean()),
    }


def _shadows(asked: Tensor, parts: Sequence[Tensor], epsilon: float, seed: int) -> Ratio:
    """Losses of the asked samples → log of the likelihood ratio of in to out.

    A shadow is trained on a half of the asked samples, drawn anew, in silo 0's place, and on the
    other silos' own samples: somebody who knows those is the strongest attacker.
    """
    draw = np.random.default_rng([seed, 1])
    logits = np.zeros((SHADOWS, len(asked)))
    inside = np.zeros((SHADOWS, len(asked)), bool)
    for shadow in range(SHADOWS):
        # Pairs of shadows complement each other, so that each sample is in half of them.
        if shadow % 2 == 0:
            inside[shadow, draw.permutation(len(asked))[:SAMPLES]] = True
        else:
            inside[shadow] = ~inside[shadow - 1]
        mine = asked[torch.from_numpy(inside[shadow])]
        net = model_of([mine, *parts[1:]], epsilon, 1000 + SHADOWS * seed + shadow)
        logits[shadow] = _logit(losses(net, asked))
    means = [np.where(inside == there, logits, np.nan) for there in (True, False)]
    (mean_in, mean_out) = (np.nanmean(part, axis=0) for part in means)
    both = np.concatenate([means[0] - mean_in, means[1] - mean_out])
    deviation = float(np.sqrt(np.nanmean(both**2)))  # one for all: there are few shadows

    def ratio(found: NDArray[np.float64]) -> NDArray[np.float64]:
        observed = _logit(found)
        return np.asarray(
            norm.logpdf(observed, mean_in, deviation) - norm.logpdf(observed, mean_out, deviation)
        )

    return ratio


def _logit(found: NDArray[np.float64]) -> NDArray[np.float64]:
    """log(p / (1 − p)) of p = exp(−loss), which is about normal (Carlini et al., §IV-C)."""
    p = np.exp(-found).clip(1e-9, 1 - 1e-9)
    return np.asarray(np.log(p / (1 - p)))


def document(entries: Sequence[Entry]) -> str:
    """Everything stored, as Markdown."""
    rows = []
    for kept in KEPT:
        for epsilon in BUDGETS:
            own = select(entries, kept=kept, epsilon=epsilon)
            budget = f"ε = {epsilon:g}" if epsilon else "without"
            cells = [spread([e[key] for e in own], 0) for key in ("error", "loss", "shadows")]
            rows.append([kept, budget, *cells, spread([e["auc"] for e in own])])
    return page(
        "## Who was trained on, from a kept model",
        f"`make bench-privacy`: digits, silos of {SAMPLES} samples, {ROUNDS} rounds of {EPOCHS} "
        f"epochs; with DP {PRIVATE_STEPS} steps a round, each on all of a silo's samples, "
        f"gradients cut to length {CLIP:g}, δ = {DELTA:g}. Error on {TESTS} images of nobody in "
        "%; advantage in percentage points (0: guessing, 100: certain) by the loss alone and with "
        "shadow models, and the latter's area under the curve (0.5: guessing).",
        table(["model", "DP", "error", "loss", "shadow models", "AUC"], rows),
    )


STORE = Store("membership", document, keys=("kept", "epsilon", "seed"))


def main() -> None:
    """Measure, store, print."""
    given = read(STORE, __doc__, seeds=2)
    torch.set_num_threads(1)
    cells = (
        {"kept": kept, "epsilon": epsilon, "seed": seed}
        for seed in range(given.seeds)
        for kept in KEPT
        for epsilon in BUDGETS
    )
    given.store.fill(cells, measure)
    print(given.store.text())


if __name__ == "__main__":
    main()
