import pytest

from trainables.megatron_core.report import RankReport, result_from_reports
from tuner.measurement import Outcome, TrialSpec

GIB = 1 << 30
REPORTS = [
    RankReport(0, (1.0, 2.0, 9.0), 3 * GIB, 4 * GIB),
    RankReport(1, (3.0, 2.0, 4.0), 2 * GIB, 5 * GIB),
]


def spec(**fields: object) -> TrialSpec:
    values = {"model": {}, "config": {}, "world_size": 2, "seq_length": 10}
    return TrialSpec(**{**values, "global_batch_size": 6, "device": "cpu", **fields})


def test_the_slowest_rank_of_each_step_counts_and_their_median_is_the_step_time() -> None:
    measurement = result_from_reports(spec(), REPORTS, [1.0], 24 * 10**12, {}).measurement
    assert measurement is not None
    assert measurement.step_times_s == (3.0, 2.0, 9.0)
    assert measurement.step_time_s == 3.0
    assert measurement.step_time_spread_s == 7.0
    assert measurement.tokens_per_s_per_gpu == pytest.approx(60 / 6)
    assert measurement.tflops_per_gpu == pytest.approx(4.0)


def test_memory_is_the_largest_over_ranks() -> None:
    measurement = result_from_reports(spec(), REPORTS, [1.0], 1, {}).measurement
    assert measurement is not None
    assert measurement.peak_memory_allocated_bytes == 3 * GIB
    assert measurement.peak_memory_reserved_bytes == 5 * GIB
    assert [rank.step_time_s for rank in measurement.ranks] == [2.0, 3.0]


@pytest.mark.parametrize(
    ("device", "limit", "outcome"),
    [
        ("cpu", None, Outcome.COMPLETED),
        ("cpu", 3 * GIB, Outcome.COMPLETED),
        ("cpu", 3 * GIB - 1, Outcome.OOM),
        ("cuda", 1, Outcome.COMPLETED),
    ],
)
def test_only_on_the_cpu_does_the_limit_decide(
    device: str, limit: int | None, outcome: Outcome
) -> None:
    limited = spec(device=device, memory_limit_bytes=limit)
    result = result_from_reports(limited, REPORTS, [1.0], 1, {})
    assert result.outcome is outcome
    assert result.measurement is not None


def test_out_of_memory_names_the_rank_its_peak_and_the_limit() -> None:
    result = result_from_reports(spec(memory_limit_bytes=GIB), REPORTS, [1.0], 1, {})
    assert result.reason == "rank 0 peaked at 3.0000 GiB, above the limit of 1.0000 GiB"
