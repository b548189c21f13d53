"""A coordinator that asks one silo for sketches of updates that it has made up.

The silo is strict: it demands secure runs and groups of three, keeps its label counts, and has 100
samples, more than ``min_samples``. Each attack calls the silo's own code.
"""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from flwr.app import Message

from coterie import wire
from coterie.client.home.settings import SiloSettings
from coterie.features.secure.protocol import decode_peers, encode_peers
from coterie.features.secure.secrets import secrets_of
from coterie.features.secure.sketches import NORM_NOISE, Stream
from coterie.tasks import load_task
from tests.conftest import digits_config
from tests.kit import TRAINING, ask, initial, model_in, restart_silos, train

COUNT = 100
STEP = 2.0**-20
"""The i-th parameter moves by i + 1 of these, so that its number in a sketch names it."""
HALVED: dict[str, Any] = {"lr": 2.0**-30, "weight_decay": 2.0**29}
"""The update is minus half the model, whatever the data."""


class Liar:
    """A coordinator in front of silo ``a``."""

    def __init__(self, folder: Path, **policy: Any) -> None:
        home = str(folder / "a")
        strict = {"secure": "required", "min-group-size": 3, "data.train": COUNT, "home": home}
        self.node = digits_config("a", **{**strict, **policy})
        self.settings = SiloSettings("a", home=home)
        self.round = 0
        self.model = initial(1)
        reply = self.ask(wire.SECURE_KEY)
        self.peer = decode_peers(reply.content.config_records[wire.CONFIG][wire.PEERS])["a"]

    def ask(self, kind: str, **entries: Any) -> Message:
        usual = {"run": "r", "strategy": "hcct", "secure": True, "server_round": self.round}
        return ask(kind, self.node, **(TRAINING | usual | entries))

    def sketch(self, model: wire.Model, **entries: Any) -> Message:
        """Ask for one step on all data, from a model, in a new round."""
        self.round += 1
        usual = {"group_size": 3, "local_steps": 1, "batch_size": COUNT, "sketch_of": "parameters"}
        usual |= {"secure_peers": encode_peers([self.peer]), "model": model}
        return self.ask(wire.TRAIN, **{**usual, **entries})

    def projection(self, name: str, size: int) -> np.ndarray:
        """Return the matrix of a projection, which every silo with the seed can make."""
        secrets = secrets_of(self.settings, "r")
        total = flat_of(self.model).size
        drawn = Stream(hashlib.sha256(secrets.projection(f"{name} sketch")).digest()).take(total)
        matrix = np.zeros((size, total))
        matrix[drawn % np.uint32(size), np.arange(total)] = np.where(drawn >> 31, -1.0, 1.0)
        return matrix


def numbers_of(reply: Message) -> np.ndarray | None:
    """Return the sketch in a reply, if it was sent."""
    if reply.has_error():
        return None
    return wire.decode_arrays(reply.content.array_records[wire.SKETCH])["sketch"].astype(float)


def metrics_of(reply: Message) -> dict[str, Any]:
    return {} if reply.has_error() else dict(wire.read_metrics(reply.content))


def filled(model: wire.Model, flat: np.ndarray) -> wire.Model:
    """Return a model of the same shapes with these numbers."""
    found, start = {}, 0
    for name, array in model.items():
        part = flat[start : start + array.size]
        found[name] = part.reshape(array.shape).astype(array.dtype)
        start += array.size
    return found


def flat_of(model: wire.Model) -> np.ndarray:
    return np.concatenate([array.ravel().astype(float) for array in model.values()])


def learnt_places(liar: Liar, messages: int, *, live: int) -> tuple[np.ndarray, list[str]]:
    """Return for every parameter its signed place + 1 as far as the answers name it, else 0."""
    total = flat_of(liar.model).size
    rng, found, refused = np.random.default_rng(0), np.zeros(total, int), []
    for _ in range(messages):
        chosen = rng.choice(total, live, replace=False)
        start = np.zeros(total)
        start[chosen] = 2 * STEP * (chosen + 1)
        reply = liar.sketch(filled(liar.model, start), **HALVED)
        numbers = numbers_of(reply)
        if numbers is None:
            refused.append(str(reply.error.reason))
            continue
        named = np.rint(np.abs(numbers) / STEP).astype(int) - 1
        sure = (named >= 0) & (np.abs(np.abs(numbers) - (named + 1) * STEP) < STEP / 100)
        for place in np.flatnonzero(sure & np.isin(named, chosen)):
            found[named[place]] = (place + 1) * -np.sign(numbers[place])
    return found, refused


def correlation(one: np.ndarray, other: np.ndarray) -> float:
    return float(np.corrcoef(one, other)[0, 1])


def with_few_channels(model: wire.Model) -> wire.Model:
    """Return a model in which no more than 170 numbers of the head learn anything."""
    few = {name: array.copy() for name, array in model.items()}
    few["representation.3.weight"][4:] = few["representation.3.bias"][4:] = 0
    few["head.weight"][:] = few["head.bias"][:] = 0
    return few


def zeros(model: wire.Model) -> wire.Model:
    return {name: np.zeros_like(array) for name, array in model.items()}


def update_of(liar: Liar, model: wire.Model, number: int) -> np.ndarray:
    """Return the true update of the last sketch, from a silo with the same data that shows it."""
    node = {k: v for k, v in liar.node.items() if k not in ("secure", "min-group-size", "home")}
    usual = {"run": "r", "server_round": number, "local_steps": 1, "batch_size": COUNT}
    return flat_of(model_in(train(model, node, **usual))) - flat_of(model)


FEW = "too few parameters changed"


def test_the_projection_does_not_follow_from_one_silo_s_answers(tmp_path: Path) -> None:
    """Before, 160 messages named 95% of all places, without a mistake."""
    liar = Liar(tmp_path)
    found, refused = learnt_places(liar, 8, live=150)
    assert not found.any() and len(refused) == 8 and all(FEW in why for why in refused)


def test_a_dense_update_of_one_s_own_making_tells_nothing_either(tmp_path: Path) -> None:
    """Every round has its own projection, and no silo answers often by the same one."""
    liar = Liar(tmp_path)
    rng = np.random.default_rng(0)
    total = flat_of(liar.model).size
    replies = [
        liar.sketch(filled(liar.model, rng.normal(size=total)), **HALVED, sketch_as="1 ")
        for _ in range(5)
    ]
    assert [reply.has_error() for reply in replies] == [False] * 3 + [True] * 2
    assert "3 different updates by this projection" in replies[3].error.reason
    restart_silos()
    again = liar.sketch(filled(liar.model, rng.normal(size=total)), **HALVED, sketch_as="1 ")
    assert again.has_error(), "it remembers them in its folder"
    one, other = (liar.sketch(liar.model, lr=0.05) for _ in range(2))
    first, second = numbers_of(one), numbers_of(other)
    assert first is not None and second is not None
    assert abs(correlation(first, second)) < 0.2, "nearly the same update, by two projections"


def test_the_projection_reveals_little_of_an_update(tmp_path: Path) -> None:
    """A silo that colludes has the seed. Before, four channels gave the update to 10⁻⁷."""
    liar = Liar(tmp_path)
    few = liar.sketch(with_few_channels(liar.model), lr=0.05)
    assert few.has_error() and FEW in few.error.reason
    found = []
    for _ in range(10):
        numbers = numbers_of(liar.sketch(liar.model, lr=0.05))
        assert numbers is not None
        matrix = liar.projection(f"{liar.round} ", len(numbers))
        guess = matrix.T @ numbers
        found.append(correlation(guess, update_of(liar, liar.model, liar.round)))
    assert 0.15 < np.mean(found) < 0.35, found


def test_the_same_update_is_sent_with_the_same_noise(tmp_path: Path) -> None:
    """Otherwise the mean of repetitions would be the exact sketch."""
    liar = Liar(tmp_path)
    sent = []
    for _ in range(2):
        liar.round = 0
        numbers = numbers_of(liar.sketch(liar.model, lr=0.05))
        assert numbers is not None
        sent.append(numbers)
        restart_silos()
    np.testing.assert_array_equal(*sent)
    exact = liar.projection("1 ", len(sent[0])) @ update_of(liar, liar.model, 1)
    noise = np.linalg.norm(sent[0] - exact) / np.linalg.norm(exact)
    assert 0.9 < noise < 1.1


def test_the_first_seed_of_a_run_stays(tmp_path: Path) -> None:
    liar = Liar(tmp_path)
    assert not liar.sketch(liar.model).has_error()
    refused = liar.sketch(liar.model, seed=5)
    assert refused.has_error() and "the first one stays" in refused.error.reason
    restart_silos()
    assert liar.sketch(liar.model, seed=6).has_error()
    assert not liar.sketch(liar.model).has_error()


def test_label_counts_do_not_follow_from_a_sketch(tmp_path: Path) -> None:
    """Of a model of zeros only the head's bias moves: before, all ten counts followed exactly."""
    liar = Liar(tmp_path)
    reply = liar.sketch(zeros(liar.model), lr=1.0)
    assert reply.has_error() and FEW in reply.error.reason
    assert not any(character.isdigit() for character in reply.error.reason.partition("of 609")[0])


def test_label_counts_do_not_follow_from_ten_norms(tmp_path: Path) -> None:
    """Of features that are alike for all samples: before, all ten counts followed exactly."""
    liar = Liar(tmp_path)
    squares, usual = [], 1 + NORM_NOISE + NORM_NOISE**2 / 3  # the mean square of what is added
    for label in range(10):
        model = zeros(liar.model)
        model["representation.3.bias"][:] = 1
        model["head.bias"][[label, (label + 1) % 10]] = 100
        reply = liar.sketch(model, lr=1.0, sketch_of=None)
        squares.append(metrics_of(reply)[wire.UPDATE_NORM] ** 2 / (128 + 1) / usual)
    # |(e_i + e_j) / 2 − f|² = 1/2 − f_i − f_j + |f|² of the frequencies f, which add up to 1
    square = (sum(squares) - 3) / 10
    pairs = COUNT * (0.5 + square - np.array(squares))
    options = {"train": COUNT, "test": 20, "skip": 0}
    labels = np.bincount(np.asarray(load_task("digits").load(options).y_train), minlength=10)
    true = labels + np.roll(labels, -1)
    assert np.abs(pairs - true).mean() > 1.5, "the guess that all are equal is 2.2 off"


@pytest.mark.parametrize("strategy", ["hcct", "ifca", None])
def test_label_counts_do_not_follow_from_losses_on_training_data(
    strategy: str | None, tmp_path: Path
) -> None:
    """With a bias against one label, its count is in the loss: before, ten messages gave all."""
    liar = Liar(tmp_path)
    model = zeros(liar.model)
    model["head.bias"][3] = -100
    reply = liar.ask(wire.EVALUATE_TRAINING, model=model, strategy=strategy)
    assert reply.has_error(), metrics_of(reply)
    trained = metrics_of(liar.sketch(liar.model, lr=0.05))
    assert wire.TRAIN_LOSS not in trained, "the same by a training that hardly moves"


@pytest.mark.parametrize("kind", [wire.EVALUATE_DISCRIMINATOR, wire.EVALUATE_PLACING])
def test_label_counts_do_not_follow_from_scores_of_discriminators(
    kind: str, tmp_path: Path
) -> None:
    """Of one that tells a label from all others, the hits were its count, exactly."""
    reply = Liar(tmp_path).ask(kind, strategy="auto", secure=True)
    assert "does not measure models on its training data" in reply.error.reason


def test_losses_on_training_data_leave_where_the_silo_says_so(tmp_path: Path) -> None:
    liar = Liar(tmp_path, **{"share-metrics": "train-loss,loss,error"})
    assert wire.TRAIN_LOSS in metrics_of(liar.sketch(liar.model, lr=0.05))
    reply = liar.ask(wire.EVALUATE_TRAINING, model=liar.model, run="s", strategy="ifca")
    assert not reply.has_error(), reply.error.reason
