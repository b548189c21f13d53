"""The file of a run that fits models by sums, and the silos that are in none of its fits."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from coterie.features.sums.contract import State
from coterie.features.sums.coordinator import Fit, Fits
from coterie.server.runs import fitted
from coterie.server.runs.config import RunConfig
from coterie.server.runs.contribution import SUMS
from coterie.server.runs.fitted import Fitted, write_fitted


@pytest.mark.parametrize(
    ("parent", "masked", "why"),
    [
        ("", False, "it joined after the fit had begun."),
        ("hcct-1", True, "it is in no group of several silos of hcct-1."),
        ("hcct-1", False, "it is in no group of hcct-1."),
    ],
)
def test_a_silo_in_no_fit_is_named_with_the_reason(
    parent: str, masked: bool, why: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = {"model": "linear", "columns": [], "target": ""}
    begun = Fitted("heart", "regression", settings, parent, Fits((Fit("A", ("a", "b")),)))
    write_fitted(tmp_path / SUMS, replace(begun, masked=masked))

    def done(asking: Any, fits: Fits, save: Any) -> Fits:
        return replace(fits, fits=tuple(replace(one, state=State(done=True)) for one in fits.fits))

    monkeypatch.setattr(fitted, "fit_all", done)
    config = RunConfig.read({"strategy": "regression", "task": "heart"})
    silos: Any = {name: SimpleNamespace(name=name, trains=True) for name in "abc"}
    engine: Any = None
    found = fitted.fit_by_sums(engine, config, tmp_path, silos, {}, {})
    assert found.silent == {"c": why} and found.masked is masked
