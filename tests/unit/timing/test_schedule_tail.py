"""What stands around a pipeline: gradient reduction, optimizer, weights."""

from __future__ import annotations

import numpy as np
import pytest

from tuner.timing.closed_form import pipeline_times
from tuner.timing.schedule import Pipeline
from tuner.timing.tail import StepTail, finish_step

PIPELINE = Pipeline(2, 4, 2, overlap_p2p=True)


def _end(reduce_s, **options):
    shape = (1, 2, 2)
    backward = np.full(shape, 2.0)
    times = pipeline_times(PIPELINE, np.ones(shape), backward)
    tail = StepTail(
        np.full(shape, reduce_s), np.full((1, 2), 0.25), np.array([[0.5, 1.0]]), **options
    )
    return times, finish_step(times, backward, tail)


def test_without_overlap_reductions_follow_the_pipeline():
    times, end = _end(0.5)
    assert end.exposed_reduce_s[0] == pytest.approx(1.0)
    assert end.step_s[0] == pytest.approx(times.pipeline_s[0] + 1.0 + 1.0 + 0.25)


def test_overlap_leaves_the_last_bucket_exposed():
    _, end = _end(0.5, overlap=True, buckets=5)
    assert end.exposed_reduce_s[0] == pytest.approx(0.5 / 5)


def test_a_reduction_longer_than_what_it_overlaps_is_exposed():
    _, end = _end(10.0, overlap=True, buckets=5)
    # Chunk 1 starts a fifth into its last backward pass; both chunks share the link after it.
    times, _ = _end(0.0)
    start = times.last_backward_end_s[0, :, 1] - 2.0 * 4 / 5
    assert end.reduce_end_s[0, :, 0] == pytest.approx(start + 20.0)


def test_aligned_reductions_start_in_one_slot_on_all_stages():
    _, end = _end(0.1, overlap=True, align=True)
    times, _ = _end(0.1)
    assert end.reduce_start_s[0, :, 1] == pytest.approx(times.gradient_sync_s[0, :, 1])
    assert (end.reduce_start_s[0, :, 1] >= times.last_backward_end_s[0, :, 1]).all()


def test_deferred_weight_gradients_hold_up_the_optimizer():
    _, plain = _end(0.0)
    _, deferred = _end(0.0, deferred_s=np.array([[0.0, 9.0]]))
    assert deferred.optimizer_start_s[0] > plain.optimizer_start_s[0]
