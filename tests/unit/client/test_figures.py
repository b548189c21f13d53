"""Metrics and their intervals, beside scikit-learn's."""

from __future__ import annotations

import numpy as np
import pytest
from sklearn import metrics

from coterie.client.work import figures


def some_answers(num_classes: int, n: int = 300, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Probabilities with many ties, and classes that they have something to do with."""
    draw = np.random.default_rng(seed)
    y = draw.integers(0, num_classes, n)
    scores = draw.normal(size=(n, num_classes)) + np.eye(num_classes)[y]
    chances = np.round(np.exp(scores) / np.exp(scores).sum(axis=1, keepdims=True), 2) + 0.01
    return chances / chances.sum(axis=1, keepdims=True), y


def at_once(found: dict[str, np.ndarray]) -> dict[str, float]:
    return {name: float(values[0]) for name, values in found.items()}


def calibration_error(chances: np.ndarray, y: np.ndarray) -> float:
    """Bin by bin: how far the mean certainty is from the share of right answers."""
    gap = chances.max(axis=1) - (chances.argmax(axis=1) == y)
    bins = np.digitize(chances.max(axis=1), np.linspace(0, 1, 16), right=True)
    return sum(abs(gap[bins == one].sum()) for one in np.unique(bins)) / len(y)


def test_two_classes_are_measured_as_scikit_learn_does() -> None:
    chances, y = some_answers(2)
    found = at_once(figures.of_classes(chances, y, np.ones((1, len(y)))))
    answers = chances.argmax(axis=1)
    assert found == pytest.approx(
        {
            "error": 1 - metrics.accuracy_score(y, answers),
            "balanced-accuracy": metrics.balanced_accuracy_score(y, answers),
            "auroc": metrics.roc_auc_score(y, chances[:, 1]),
            "average-precision": metrics.average_precision_score(y, chances[:, 1]),
            "f1": metrics.f1_score(y, answers),
            "sensitivity": metrics.recall_score(y, answers),
            "specificity": metrics.recall_score(y, answers, pos_label=0),
            "calibration-error": calibration_error(chances, y),
            "brier": metrics.brier_score_loss(y, chances[:, 1]),
        }
    )


def test_several_classes_and_labels_are_measured_as_scikit_learn_does() -> None:
    chances, y = some_answers(5)
    found = at_once(figures.of_classes(chances, y, np.ones((1, len(y)))))
    one_hot = np.eye(5)[y]
    assert found["auroc"] == pytest.approx(metrics.roc_auc_score(one_hot, chances))
    precision = metrics.average_precision_score(one_hot, chances)
    assert found["average-precision"] == pytest.approx(precision)
    macro = metrics.f1_score(y, chances.argmax(axis=1), average="macro")
    assert found["f1"] == pytest.approx(macro)
    assert "sensitivity" not in found
    draw = np.random.default_rng(1)
    several = draw.integers(0, 2, (200, 3))
    chances = np.clip(0.3 * several + draw.random((200, 3)) * 0.7, 0, 1)
    found = at_once(figures.of_labels(chances, several.astype(float), np.ones((1, 200))))
    assert found["auroc"] == pytest.approx(metrics.roc_auc_score(several, chances))
    macro = metrics.f1_score(several, chances > 0.5, average="macro")
    assert found["f1"] == pytest.approx(macro)


def test_real_targets_are_measured_as_scikit_learn_does() -> None:
    draw = np.random.default_rng(2)
    answers = draw.normal(size=(60, 2))
    y = answers + draw.normal(size=(60, 2))
    found = at_once(figures.of_numbers(answers, y, np.ones((1, 60))))
    assert found["mae"] == pytest.approx(metrics.mean_absolute_error(y, answers))
    assert found["r2"] == pytest.approx(metrics.r2_score(y, answers))
    root = np.sqrt(metrics.mean_squared_error(y, answers))
    assert found["rmse"] == pytest.approx(root)
    high = at_once(figures.of_numbers(answers + 101_325, y + 101_325, np.ones((1, 60))))
    assert high["r2"] == pytest.approx(found["r2"], rel=1e-6), "however high the mean"


def test_a_concordance_index_counts_the_pairs_whose_order_is_known() -> None:
    draw = np.random.default_rng(3)
    n = 80
    times, events = draw.integers(1, 20, n).astype(float), draw.integers(0, 2, n).astype(float)
    risks = np.round(-times + draw.normal(size=n) * 8)
    right = known = 0.0
    for i in range(n):
        for j in range(n):
            later = times[j] > times[i] or (times[j] == times[i] and events[j] == 0)
            if i != j and events[i] and later:
                known += 1
                right += (risks[i] > risks[j]) + 0.5 * (risks[i] == risks[j])
    found = at_once(figures.of_survival(risks, times, events, np.ones((1, n))))
    assert found["concordance"] == pytest.approx(right / known)


def test_masks_are_measured_image_by_image() -> None:
    counts = np.array([[[6.0, 2, 2]], [[0, 0, 0]], [[0, 0, 5]]])  # a good one, an empty one, a miss
    found = at_once(figures.of_masks(counts, np.ones((1, 3))))
    assert found["dice"] == pytest.approx((2 * 6 / 16 + 0) / 2)
    assert found["iou"] == pytest.approx((6 / 10 + 0) / 2)


@pytest.mark.parametrize("num_classes", [2, 4])
def test_a_weight_counts_a_sample_as_often_as_it_says(num_classes: int) -> None:
    chances, y = some_answers(num_classes, 120)
    often = np.random.default_rng(4).integers(0, 4, 120)
    weighted = at_once(figures.of_classes(chances, y, often[None].astype(float)))
    rows = np.repeat(np.arange(120), often)
    repeated = at_once(figures.of_classes(chances[rows], y[rows], np.ones((1, len(rows)))))
    assert weighted == {name: pytest.approx(value) for name, value in repeated.items()}


def test_what_one_class_alone_does_not_define_is_not_made_up() -> None:
    chances, _ = some_answers(2, 20)
    found = figures.with_intervals(
        lambda w: figures.of_classes(chances, np.ones(20, np.int64), w), 20
    )
    undefined = {name for name, figure in found.items() if np.isnan(figure.value)}
    assert undefined == {"auroc", "balanced-accuracy", "specificity"}
    assert np.isfinite(found["error"].low)


def test_equal_targets_have_no_r2() -> None:
    found = figures.of_numbers(np.zeros((5, 1)), np.full((5, 1), 0.1), np.ones((1, 5)))
    assert np.isnan(found["r2"][0]) and found["mae"][0] == pytest.approx(0.1)
    for value in (0.3, 1e9 / 3):
        found = figures.of_numbers(np.zeros((7, 1)), np.full((7, 1), value), np.ones((1, 7)))
        assert np.isnan(found["r2"][0])


def test_an_interval_covers_the_truth_about_as_often_as_it_says() -> None:
    draw = np.random.default_rng(5)
    inside = 0
    for trial in range(200):
        wrong = draw.random(150) < 0.2
        chances = np.where(wrong[:, None], [1.0, 0.0], [0.0, 1.0])
        found = figures.with_intervals(
            lambda w, c=chances: figures.of_classes(c, np.ones(150, np.int64), w), 150, seed=trial
        )["error"]
        inside += found.low <= 0.2 <= found.high
    assert 0.9 <= inside / 200 <= 0.99


def test_a_calibration_error_lies_in_its_own_interval() -> None:
    """Resamples of a calibrated model have a larger error: every repeated sample shifts its bin."""
    draw = np.random.default_rng(3)
    for trial in range(20):
        chance = draw.uniform(0.5, 1.0, 120)
        chances = np.stack([chance, 1 - chance], axis=1)
        y = (draw.random(120) > chance).astype(np.int64)
        own = figures.with_intervals(
            lambda w, c=chances, y=y: figures.of_classes(c, y, w), 120, seed=trial
        )["calibration-error"]
        assert 0 <= own.low <= own.value <= own.high


@pytest.mark.parametrize("num_classes", [2, 5])
def test_a_model_that_has_run_away_is_measured_as_far_as_can_be(num_classes: int) -> None:
    """Its answers are not numbers, as after a hostile update: the silo still says its error."""
    chances, y = some_answers(num_classes)
    chances[::2] = np.nan
    found = figures.with_intervals(lambda w: figures.of_classes(chances, y, w), len(y))
    assert 0 < found["error"].value < 1 and np.isnan(found["calibration-error"].value)
