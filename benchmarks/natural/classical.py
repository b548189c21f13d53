"""What a statistician would do: regressions with a tuned penalty, partial pooling, boosted trees.

Each method is fitted outside any federation, on the rows of one silo or of all of them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import sparse

from benchmarks.natural.data import Floats, Fold, Silo
from benchmarks.natural.scores import score

GRID = (1e-3, 1e-2, 1e-1, 1.0, 10.0, 100.0, 1000.0)
"""Penalties that are tried: of half the squared norm, beside the sum of the rows' losses."""
INNER = 3
"""Parts of the training rows, one of which is held out in turn to choose the penalty."""
FREE = 1e-3
"""Penalty of intercepts and of slopes that all silos share in partial pooling: nearly none."""

Fitted = Callable[[Floats, int], NDArray[Any]]
"""Rows (m, p) of silo number k → probabilities (m, K), or answers (m,)."""


def fitted_linear(x: Any, y: NDArray[Any], classes: int, penalties: Floats) -> Any:
    """Fit a regression whose columns have penalties of their own; return rows → answers.

    A column's penalty is put into its scale, so that one common penalty of 1 does all.
    """
    from sklearn.linear_model import LogisticRegression

    if classes:
        scale = sparse.diags(1 / np.sqrt(penalties))
        present = np.unique(y)
        if len(present) == 1:
            return lambda rows: np.tile(np.eye(classes)[present[0]], (rows.shape[0], 1))
        model = LogisticRegression(C=1.0, max_iter=300, tol=1e-5, fit_intercept=False)
        model.fit(x @ scale, y)

        def probabilities(rows: Any) -> NDArray[Any]:
            found = np.zeros((rows.shape[0], classes))
            found[:, model.classes_] = model.predict_proba(rows @ scale)
            return found

        return probabilities
    # The normal equations: lsqr needs thousands of steps where penalties differ by 10^6.
    both = (x.T @ x).toarray() + np.diag(penalties)
    weights = np.linalg.solve(both, x.T @ y)
    return lambda rows: rows @ weights


def _with_intercept(x: Floats) -> Floats:
    return np.hstack([x, np.ones((len(x), 1))])


class Design:
    """Columns of a regression over several silos: common ones, and each silo's own.

    Args:
        slopes, intercepts: whether silos have their own.
        common: whether there are common ones.
    """

    def __init__(
        self, silos: int, width: int, *, slopes: bool, intercepts: bool, common: bool = True
    ) -> None:
        self.silos, self.width = silos, width
        self.slopes, self.intercepts, self.common = slopes, intercepts, common

    def rows(self, x: Floats, silo: int) -> Any:
        """Return (m, columns) of rows of one silo, sparse."""
        blocks: list[Any] = [_with_intercept(x)] if self.common else []
        for number in range(self.silos):
            own = [x] if self.slopes else []
            own += [np.ones((len(x), 1))] if self.intercepts else []
            if own:
                block = np.hstack(own)
                blocks.append(block if number == silo else sparse.csr_matrix(block.shape))
        return sparse.hstack([sparse.csr_matrix(b) for b in blocks], format="csr")

    def penalties(self, strength: float) -> Floats:
        """Return (columns,) penalties: ``strength`` of own slopes, or of common ones by itself."""
        shared = FREE if self.slopes else strength
        found = [shared] * self.width + [FREE] if self.common else []
        own = [strength] * self.width if self.slopes else []
        own += [FREE] if self.intercepts else []
        return np.array(found + own * self.silos)


def regression(design: Design, silos: Sequence[Silo], classes: int) -> tuple[Fitted, float]:
    """Fit a regression, its strength chosen by held-out rows of all silos; return it and that."""

    def fit(parts: Sequence[tuple[Floats, NDArray[Any]]], strength: float) -> Fitted:
        x = sparse.vstack([design.rows(x, k) for k, (x, _) in enumerate(parts)], format="csr")
        y = np.concatenate([y for _, y in parts])
        model = fitted_linear(x, y, classes, design.penalties(strength))
        return lambda rows, silo: model(design.rows(rows, silo))

    def held_out(strength: float) -> float:
        found = []
        for part in range(INNER):
            outside = [silo.blocks % INNER != part for silo in silos]
            both = list(zip(silos, outside, strict=True))
            model = fit([(s.x_train[out], s.y_train[out]) for s, out in both], strength)
            for number, (silo, out) in enumerate(both):
                if not out.all():
                    answers = model(silo.x_train[~out], number)
                    found.append(score(answers, silo.y_train[~out], classes)["loss"])
        return float(np.mean(found))

    strength = min(GRID, key=held_out)
    return fit([(s.x_train, s.y_train) for s in silos], strength), strength


def linear_alone(fold: Fold, *, common_strength: bool = False) -> list[NDArray[Any]]:
    """Every silo's own regression; its penalty is its own, or one that is best for all."""
    silos = list(fold.silos.values())
    if common_strength:
        design = Design(len(silos), fold.width, slopes=True, intercepts=True, common=False)
        model, _ = regression(design, silos, fold.classes)
        return [model(silo.x_test, number) for number, silo in enumerate(silos)]
    design = Design(1, fold.width, slopes=False, intercepts=False)
    return [regression(design, [s], fold.classes)[0](s.x_test, 0) for s in silos]


def linear_together(fold: Fold, *, slopes: bool, intercepts: bool) -> list[NDArray[Any]]:
    """One regression of all rows, with own intercepts, or own slopes shrunk to the common ones."""
    silos = list(fold.silos.values())
    design = Design(len(silos), fold.width, slopes=slopes, intercepts=intercepts)
    model, _ = regression(design, silos, fold.classes)
    return [model(silo.x_test, number) for number, silo in enumerate(silos)]


def boosted(fold: Fold, *, pooled: bool, silo_column: bool) -> list[NDArray[Any]]:
    """Histogram gradient boosting with scikit-learn's defaults, alone or on all rows."""
    silos = list(fold.silos.values())
    given = [_numbered(s.x_train, k, silo_column) for k, s in enumerate(silos)]
    asked = [_numbered(s.x_test, k, silo_column) for k, s in enumerate(silos)]
    if not pooled:
        each = zip(silos, given, asked, strict=True)
        return [_trees(x, s.y_train, fold.classes, False)(rows) for s, x, rows in each]
    y = np.concatenate([s.y_train for s in silos])
    model = _trees(np.concatenate(given), y, fold.classes, silo_column)
    return [model(rows) for rows in asked]


def _numbered(x: Floats, silo: int, wanted: bool) -> Floats:
    return np.hstack([x, np.full((len(x), 1), float(silo))]) if wanted else x


def _trees(x: Floats, y: NDArray[Any], classes: int, silo_column: bool) -> Any:
    from sklearn.ensemble import HistGradientBoostingClassifier, HistGradientBoostingRegressor

    how = {"categorical_features": [x.shape[1] - 1] if silo_column else None, "random_state": 0}
    if not classes:
        return HistGradientBoostingRegressor(**how).fit(x, y).predict
    if len(present := np.unique(y)) == 1:
        return lambda rows: np.tile(np.eye(classes)[present[0]], (len(rows), 1))
    model = HistGradientBoostingClassifier(**how).fit(x, y)

    def probabilities(rows: Floats) -> NDArray[Any]:
        found = np.zeros((len(rows), classes))
        found[:, model.classes_] = model.predict_proba(rows)
        return found

    return probabilities


METHODS: Mapping[str, Callable[[Fold], list[NDArray[Any]]]] = {
    "tuned alone": lambda fold: linear_alone(fold, common_strength=True),
    "tuned alone, each its own": linear_alone,
    "pooled": lambda fold: linear_together(fold, slopes=False, intercepts=False),
    "pooled + own intercept": lambda fold: linear_together(fold, slopes=False, intercepts=True),
    "partial pooling": lambda fold: linear_together(fold, slopes=True, intercepts=True),
    "trees alone": lambda fold: boosted(fold, pooled=False, silo_column=False),
    "trees pooled": lambda fold: boosted(fold, pooled=True, silo_column=False),
    "trees pooled + silo's id": lambda fold: boosted(fold, pooled=True, silo_column=True),
}
"""Name → predictions for every silo's test rows."""


def measured(method: str, fold: Fold) -> dict[str, dict[str, float]]:
    """Return silo → scores of a method on a fold."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a strength of the grid that does not converge is not best
        answers = METHODS[method](fold)
    parts = zip(fold.silos.items(), answers, strict=True)
    return {name: score(given, silo.y_test, fold.classes) for (name, silo), given in parts}
