"""The HTML report of a study directory."""

from __future__ import annotations

import json
import re

import pytest

from tuner.errors import InputError
from tuner.report import render, study_report
from tuner.report.charts import Axis

GIB = 2**30


def trial(number: int, tflops: float | None, gib: float, **config) -> dict:
    measured = None
    if tflops is not None:
        measured = {
            "step_time_s": 1.0 / tflops,
            "tokens_per_s_per_gpu": 10 * tflops,
            "tflops_per_gpu": tflops,
            "peak_memory_allocated_bytes": int(gib * GIB),
        }
    return {
        "number": number,
        "config": {"micro_batch_size": 1, **config},
        "outcome": "oom" if tflops is None else "completed",
        "reason": "rank 0 <script>alert(1)</script>" if tflops is None else "",
        "duration_s": 1.0,
        "measured": measured,
    }


@pytest.fixture
def study(tmp_path):
    def make(trials, best):
        (tmp_path / "study.json").write_text(
            json.dumps({"study_id": "a", "job_folder": str(tmp_path)})
        )
        (tmp_path / "job.yaml").write_text("name: small\ncluster: {memory_limit_gib: 8}\n")
        summary = {
            "study": "small",
            "metric": "tflops_per_gpu",
            "ended_because": "budget spent",
            "best": best,
            "pareto": [] if best is None else [best],
            "rejected_by_rule": {"P10": 3},
            "trials": trials,
            "versions": {"python": "3.11"},
        }
        (tmp_path / "summary.json").write_text(json.dumps(summary))
        return tmp_path

    return make


def test_the_answer_comes_first_with_its_gain_over_the_control(study) -> None:
    trials = [
        trial(0, 100.0, 4.0, recompute_granularity="full"),
        trial(1, 150.0, 6.0, recompute_granularity="selective"),
        trial(2, 120.0, 7.0, recompute_granularity=None),
    ]
    page = render(study_report(study(trials, best=1)))
    assert page.index("Trial 1 is the best") < page.index("Throughput against memory")
    assert "+50.0% tflops_per_gpu, +2 GiB (trial 0)" in page
    assert "+25.0% tflops_per_gpu, -1 GiB (trial 2)" in page
    assert "P10" in page


def test_text_of_trials_cannot_become_markup(study) -> None:
    page = render(study_report(study([trial(0, 5.0, 1.0), trial(1, None, 1.0)], best=0)))
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert" in page


def test_the_page_asks_nothing_of_a_network(study) -> None:
    page = render(study_report(study([trial(0, 5.0, 1.0)], best=0)))
    assert re.findall(r"""(?:src|href)=["'](?!data:)[^"']+""", page) == []
    assert "http" not in page


def test_a_study_where_nothing_fits_says_so(study) -> None:
    page = render(study_report(study([trial(0, None, 1.0)], best=None)))
    assert "No candidate ran within the memory limit." in page


def test_a_thousand_trials_stay_below_five_megabytes(study) -> None:
    trials = [
        trial(n, 100.0 + n, 4.0 + n / 1000, micro_batch_size=n % 7, note=n) for n in range(1000)
    ]
    assert len(render(study_report(study(trials, best=999)))) < 5_000_000


def test_a_folder_that_is_no_study_is_bad_input(tmp_path) -> None:
    with pytest.raises(InputError, match="is not a study directory"):
        study_report(tmp_path)


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (3.0, 3.0), (0.061, 0.152), (-5.0, 1e6)])
def test_ticks_lie_inside_the_axis(low: float, high: float) -> None:
    ticks = Axis(low, high, 0.0, 100.0).ticks()
    assert ticks
    assert all(low - 1e-9 <= tick <= high + 1e-9 for tick in ticks)
