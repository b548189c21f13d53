"""IPR, RSD and mean accuracy by hand."""

from __future__ import annotations

import math

import pytest

from coterie.server.runs.record.metrics import Lead, collaboration, gains, ipr, mean_accuracy, rsd

ALONE = {"a": 0.3, "b": 0.2, "c": 0.5}
TOGETHER = {"a": 0.1, "b": 0.2, "c": 0.4, "late": 0.9}


def test_gains_are_of_the_silos_in_both_runs() -> None:
    assert gains(TOGETHER, ALONE) == pytest.approx({"a": 0.2, "b": 0.0, "c": 0.1})


def test_a_silo_that_is_as_good_as_alone_has_not_gained() -> None:
    assert ipr(TOGETHER, ALONE) == pytest.approx(2 / 3)


def test_rsd_is_the_population_s_standard_deviation() -> None:
    assert rsd(TOGETHER, ALONE) == pytest.approx(math.sqrt((0.1**2 + 0.1**2 + 0) / 3))
    assert rsd({"a": 0.0}, {"a": 0.4}) == 0


def test_all_figures_of_a_record_are_of_the_same_silos() -> None:
    found = collaboration(TOGETHER, ALONE)
    assert found.silos == 3
    assert found.mean_accuracy == pytest.approx(1 - 0.7 / 3)
    assert found.mean_accuracy_alone == pytest.approx(1 - 1.0 / 3)
    assert (found.ipr, found.rsd) == (ipr(TOGETHER, ALONE), rsd(TOGETHER, ALONE))


def test_no_silo_in_common_is_not_a_number() -> None:
    assert math.isnan(ipr(TOGETHER, {})) and math.isnan(rsd({}, ALONE))
    assert math.isnan(mean_accuracy({}))


@pytest.mark.parametrize(
    ("lead", "said"),
    [
        (Lead("loss"), "its loss was 0.2 ± 0.1 lower"),
        (Lead("mae", "days"), "its MAE was 0.2 ± 0.1 days lower"),
        (Lead("concordance"), "its concordance index was 20.0 ± 10.0 points higher"),
    ],
)
def test_a_difference_names_its_unit_once(lead: Lead, said: str) -> None:
    assert lead.compared(0.2, 0.1) == said
