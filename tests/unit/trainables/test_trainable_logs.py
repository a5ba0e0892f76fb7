"""Figures from the lines that Megatron-LM, Megatron Bridge and user scripts print."""

import math

import pytest

from trainables.logs import MEGATRON_PATTERNS, LogPatternError, LogReader, log_pattern, merged

BRIDGE_STEP = (
    " [2026-03-01 10:00:00] iteration        3/      50 | consumed samples:          384 | "
    "elapsed time per iteration (ms): 8123.4 | throughput per GPU (TFLOP/s/GPU): 705.2 | "
    "learning rate: 3.000000E-05 | global batch size:   128 | lm loss: 1.178945E+01 | "
    "loss scale: 1.0 | grad norm: 3.214 | number of skipped iterations:   0 |"
)
BRIDGE_MEMORY = (
    "[Rank 5] (after 2 iterations) memory (GB) | mem-allocated-gigabytes: 30.1 | "
    "mem-active-gigabytes: 30.2 | mem-inactive-gigabytes: 1.1 | mem-reserved-gigabytes: 61.5 | "
    "mem-max-allocated-gigabytes: 55.123 | mem-max-active-gigabytes: 55.3 | "
    "mem-max-inactive-gigabytes: 2.2 | mem-max-reserved-gigabytes: 61.502 | mem-alloc-retires: 0"
)
MEGATRON_MEMORY = (
    "[Rank 1] (after 2 iterations) memory (MB) | allocated: 1000.5 | max allocated: 2048.25 | "
    "reserved: 2100.0 | max reserved: 2200.0"
)


def read(*lines, patterns=MEGATRON_PATTERNS):
    reader = LogReader(patterns)
    for line in lines:
        reader.feed(line)
    return reader.figures


def test_bridge_lines_give_step_rate_loss_and_decimal_gigabytes():
    figures = read(BRIDGE_STEP, BRIDGE_MEMORY)
    assert figures.steps == {3: pytest.approx(8.1234)}
    assert figures.tflops_per_gpu == {3: 705.2}
    assert figures.losses == {3: 11.78945}
    assert figures.allocated_bytes == {5: 55_123_000_000}
    assert figures.reserved_bytes == {5: 61_502_000_000}


def test_megatron_lm_counts_memory_in_mebibytes():
    figures = read(MEGATRON_MEMORY)
    assert figures.allocated_bytes == {1: int(2048.25 * 2**20)}
    assert figures.reserved_bytes == {1: 2200 * 2**20}


def test_lines_without_a_rate_or_in_colour_are_read_too():
    line = BRIDGE_STEP.replace("throughput per GPU (TFLOP/s/GPU): 705.2 | ", "")
    figures = read(f"\x1b[32m0: {line}\x1b[0m")
    assert figures.losses == {3: 11.78945}
    assert figures.tflops_per_gpu == {}


def test_a_loss_that_is_no_number_is_kept_as_such():
    assert math.isnan(read(BRIDGE_STEP.replace("1.178945E+01", "nan")).losses[3])


def test_figures_that_cannot_be_are_passed_over():
    figures = read(BRIDGE_STEP.replace("8123.4", "-1.e.5").replace("705.2", "9e99"))
    assert figures.steps == {}
    assert figures.tflops_per_gpu == {}


def test_own_patterns_number_steps_by_order_and_losses_join_them():
    patterns = [r"took (?P<step_time_s>[\d.]+) s", r"loss=(?P<loss>\S+)"]
    figures = read("took 1.5 s", "loss=2.5", "took 1.25 s", "loss=2.25", patterns=patterns)
    assert figures.steps == {1: 1.5, 2: 1.25}
    assert figures.losses == {1: 2.5, 2: 2.25}
    assert figures.measured_steps(warmup_steps=1) == {2: 1.25}
    assert figures.measured_steps(warmup_steps=9) == {2: 1.25}


def test_several_ranks_merge_to_the_slowest_step_and_the_largest_peaks():
    pattern = [r"(?P<step_time_s>[\d.]+) (?P<allocated_mb>[\d.]+) (?P<rank>\d)"]
    one, two = read("1.0 5 0", patterns=pattern), read("2.0 7 1", "1.0 9 1", patterns=pattern)
    together = merged([one, two])
    assert together.steps == {1: 2.0, 2: 1.0}
    assert together.allocated_bytes == {0: 5_000_000, 1: 9_000_000}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("(?P<step_time_s>", "no regular expression"),
        (r"(?P<seconds>\d+)", "unknown group 'seconds'"),
        (r"(?P<rank>\d+)", "no named group with a figure"),
    ],
)
def test_patterns_that_say_nothing_are_refused(text, reason):
    with pytest.raises(LogPatternError, match=reason):
        log_pattern(text)
