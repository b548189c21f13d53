"""A silo's side of a regression."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from coterie.features.sums.contract import Answer, Family, FitError, Question, settings_text
from coterie.features.sums.regression.design import Design, design_of, sums_of
from coterie.features.sums.regression.newton import MODELS, Regression
from coterie.features.sums.rows import Rows


class Regressing:
    """Answers questions of ``Regression`` from the silo's rows."""

    def family(self) -> Family:
        """Return the family."""
        return Regression()

    def answer(
        self, question: Question, rows: Rows, least: int
    ) -> tuple[Answer, NDArray[np.bool_]]:
        """Return the sums over the rows that have a value in all columns, and which these are."""
        settings = question.settings
        model, columns = settings.get("model"), settings.get("columns")
        texts = isinstance(columns, list) and all(isinstance(one, str) for one in columns)
        if model not in MODELS or not texts or not isinstance(settings.get("target"), str):
            raise FitError(f"a regression is one of {', '.join(MODELS)}, of named columns")
        known = settings_text(settings), least
        if rows.kept.get("design", (None,))[0] != known:
            rows.kept["design"] = known, design_of(rows, settings, least)
        design: Design = rows.kept["design"][1]
        try:  # before the sums: arrays of other sizes cannot be used
            self.family().layout(question, design.words)
        except ValueError as error:
            raise FitError(str(error)) from None
        return Answer(sums_of(design, model, question.arrays, least), design.words), design.used
