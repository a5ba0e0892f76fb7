"""Summaries of errors and outcomes."""

from __future__ import annotations

import pytest

from tuner.validation.statistics import (
    ordered_pairs,
    outcome_summary,
    relative_error,
    summary,
    summary_by,
)


def test_errors_are_positive_where_the_estimate_is_too_high():
    assert relative_error(110, 100) == pytest.approx(0.1)
    assert relative_error(90, 100) == pytest.approx(-0.1)


def test_summary_counts_absolute_errors():
    found = summary([0.1, -0.3, 0.2, -0.4])
    assert found["n"] == 4
    assert found["median_abs_err"] == pytest.approx(0.25)
    assert found["mean_abs_err"] == pytest.approx(0.25)
    assert found["p90_abs_err"] == found["max_abs_err"] == 0.4


def test_an_empty_summary_has_no_figures():
    assert summary([]) == {
        "n": 0,
        "median_abs_err": None,
        "p90_abs_err": None,
        "max_abs_err": None,
    }


def test_sources_are_summarised_apart():
    found = summary_by([("a", 0.1), ("b", -0.5), ("a", 0.3)])
    assert found["n"] == 3
    assert found["by_source"]["a"]["median_abs_err"] == pytest.approx(0.2)
    assert found["by_source"]["b"]["max_abs_err"] == 0.5


def test_balanced_accuracy_weighs_both_outcomes_alike():
    outcomes = {
        "ran 1": (False, False),
        "ran 2": (False, True),
        "ran 3": (False, False),
        "ran 4": (False, False),
        "failed": (True, True),
    }
    found = outcome_summary(outcomes)
    assert found["balanced_accuracy"] == pytest.approx((0.75 + 1.0) / 2)
    assert (found["false_oom"], found["missed_oom"]) == (["ran 2"], [])


def test_near_ties_are_not_ordered():
    right, total = ordered_pairs({"a": 100, "b": 100.5, "c": 120}, {"a": 1, "b": 2, "c": 1.5})
    assert (right, total) == (1, 2)
