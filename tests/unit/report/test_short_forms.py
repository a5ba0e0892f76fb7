"""The report in short: sparklines, notes, effects, comparisons."""

from __future__ import annotations

import pytest

from tuner.report.comparison import best_comparisons, effects_of
from tuner.report.content import Report, Row
from tuner.report.markdown import note
from tuner.report.pipeline import pipeline_chart
from tuner.report.terminal import sparkline

GIB = 2**30


def trial(number: int, tflops: float | None, gib: float = 1.0, **config) -> dict:
    measured = {"tflops_per_gpu": tflops, "peak_memory_allocated_bytes": int(gib * GIB)}
    outcome = "oom" if tflops is None else "completed"
    return {
        "number": number,
        "config": config,
        "outcome": outcome,
        "measured": None if tflops is None else measured,
    }


def summary(*trials: dict, best: int) -> dict:
    return {"metric": "tflops_per_gpu", "trials": list(trials), "best": best}


@pytest.mark.parametrize(
    ("values", "line"),
    [
        ([], ""),
        ([None, None], ""),
        ([1.0], "█"),
        ([0.0, None, 7.0], "▁·█"),
        ([5.0, 5.0], "██"),
    ],
)
def test_a_sparkline_has_a_character_for_each_value(values, line) -> None:
    assert sparkline(values) == line


def test_a_long_series_shows_the_largest_of_each_part() -> None:
    line = sparkline([float(n % 10) for n in range(100)], width=10)
    assert line == "█" * 10


def test_a_starting_point_that_did_not_run_is_said() -> None:
    found = dict(best_comparisons(summary(trial(0, None), trial(1, 5.0), best=1), has_start=True))
    assert found["against your starting point"] == "that did not run: oom (trial 0)"


def test_where_no_trial_without_recompute_fits_that_is_the_answer() -> None:
    trials = [trial(0, None), trial(1, 5.0, recompute_granularity="full")]
    found = dict(best_comparisons(summary(*trials, best=1), has_start=False))
    assert found["without recompute"] == "no trial ran within the limit (1 oom)"


def test_an_effect_prefers_the_trial_that_differs_in_nothing_else() -> None:
    best = trial(0, 100.0, 10.0, a=1, b=1)
    near, far = trial(1, 80.0, 8.0, a=2, b=1), trial(2, 95.0, 9.0, a=2, b=2)
    effect = next(one for one in effects_of([best, near, far], best, "tflops_per_gpu"))
    assert (effect.field, effect.value, effect.others) == ("a", "2", 0)
    assert effect.change == pytest.approx(-0.2)
    assert effect.more_bytes == -2 * GIB


def test_text_in_a_note_stays_in_its_cell() -> None:
    row = Row(0, "completed", {"x": "a|b"}, GIB, 1.0, on_front=True)
    other = Row(1, "completed", {"x": "<b>"}, GIB, 2.0, on_front=True)
    report = Report("t", "m", "v", [], [], [], [row, other], None, [], {}, "")
    text = note(report)
    assert "a\\|b" in text
    assert "<b>" not in text


def test_passes_closer_than_a_pixel_share_one_bar() -> None:
    events = [
        {"ph": "X", "name": f"forward {n}", "pid": 0, "ts": 10.0 * n, "dur": 9.0}
        for n in range(5000)
    ]
    chart = pipeline_chart({"traceEvents": events})
    assert "in 5000 parts" in chart
    assert len(chart) < 60_000
