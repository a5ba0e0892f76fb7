"""Replaying traces: peaks, out-of-memory and its cause, speed."""

from __future__ import annotations

import random
import time

import numpy as np
import pytest

from tuner.memory.allocator_replay import explain_fit, replay
from tuner.memory.allocator_settings import AllocatorSettings
from tuner.memory.trace import Trace

MIB = 1 << 20


def trace_of(events: list[tuple[int, int]]) -> Trace:
    """A trace of (block, signed bytes) events without names."""
    names = np.zeros(len(events), dtype=np.int32)
    return Trace(
        block=np.array([block for block, _ in events], dtype=np.int64),
        bytes=np.array([size for _, size in events], dtype=np.int64),
        module=names,
        phase=names,
        category=names,
        module_names=("",),
        phase_names=("",),
        category_names=("",),
        markers=(),
    )


def comb_trace() -> Trace:
    """Ten 40 MiB blocks, every second freed, then one of 180 MiB: it fits the sum of the holes."""
    events = [(number, 40 * MIB) for number in range(10)]
    events += [(number, -40 * MIB) for number in range(0, 10, 2)]
    return trace_of([*events, (10, 180 * MIB)])


def carved_trace() -> Trace:
    """One 400 MiB block freed and carved up, every second part freed, then one of 180 MiB.

    The holes add up to 200 MiB inside one segment that cannot be given back.
    """
    events = [(100, 400 * MIB), (100, -400 * MIB)]
    events += comb_trace_events()
    return trace_of([*events, (10, 180 * MIB)])


def comb_trace_events() -> list[tuple[int, int]]:
    events = [(number, 40 * MIB) for number in range(10)]
    return events + [(number, -40 * MIB) for number in range(0, 10, 2)]


def test_values_after_each_event_are_those_of_the_allocator():
    run = replay(trace_of([(0, 100), (1, 30 * MIB), (0, -100)]))
    assert run.allocated_bytes.tolist() == [512, 30 * MIB + 512, 30 * MIB]
    assert run.reserved_bytes.tolist() == [2 * MIB, 32 * MIB, 32 * MIB]
    assert run.fragmentation == pytest.approx(1 - (30 * MIB + 512) / (32 * MIB))


def test_empty_tensors_ask_nothing_of_the_allocator():
    run = replay(trace_of([(0, 0), (0, 0)]))
    assert run.peak_reserved_bytes == 0
    assert len(run.allocated_bytes) == 2


def test_a_run_that_fits_has_no_cause():
    fit = explain_fit(comb_trace(), capacity_bytes=600 * MIB)
    assert (fit.fits, fit.cause) == (True, None)


def test_whole_cached_segments_are_reclaimed_under_the_limit():
    fit = explain_fit(comb_trace(), capacity_bytes=420 * MIB)
    assert fit.fits
    assert fit.as_configured.retries == 1


def test_holes_in_a_segment_in_use_are_fragmentation():
    fit = explain_fit(carved_trace(), capacity_bytes=420 * MIB)
    assert (fit.fits, fit.fits_with_expandable_segments) == (False, True)
    assert fit.cause == "fragmentation"
    failure = fit.to_json()["out_of_memory"]
    assert failure["requested_bytes"] == 180 * MIB
    assert failure["reserved_bytes"] == 400 * MIB
    assert failure["allocated_bytes"] == 200 * MIB


def test_more_live_bytes_than_the_device_has_is_capacity():
    fit = explain_fit(carved_trace(), capacity_bytes=370 * MIB)
    assert fit.cause == "capacity"


def test_expandable_settings_are_their_own_comparison():
    settings = AllocatorSettings(expandable_segments=True)
    fit = explain_fit(carved_trace(), capacity_bytes=420 * MIB, settings=settings)
    assert fit.as_configured is fit.with_expandable_segments
    assert fit.fits


@pytest.mark.parametrize("text", ["", "expandable_segments:True"])
def test_a_quarter_million_events_take_at_most_five_seconds(text):
    generator = random.Random(0)
    events: list[tuple[int, int]] = []
    live: list[tuple[int, int]] = []
    for number in range(250_000):
        if len(live) > 3000 or (live and generator.random() < 0.5):
            block, size = live.pop(generator.randrange(len(live)))
            events.append((block, -size))
        else:
            live.append((number, int(2 ** generator.uniform(4, 28))))
            events.append(live[-1])
    trace = trace_of(events)
    start = time.process_time()
    replay(trace, AllocatorSettings.from_text(text))
    assert time.process_time() - start < 5.0
