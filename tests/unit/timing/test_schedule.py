"""Pipeline schedules against Megatron-Core's own."""

from __future__ import annotations

import numpy as np
import pytest
from megatron_schedule import programs, replay

from tuner.timing.closed_form import pipeline_times
from tuner.timing.schedule import Pipeline, simulate

SHAPES = [
    Pipeline(2, 1),
    Pipeline(2, 5),
    Pipeline(4, 2),
    Pipeline(4, 9),
    Pipeline(7, 16),
    Pipeline(2, 2, 2),
    Pipeline(2, 8, 3),
    Pipeline(3, 3, 2),
    Pipeline(4, 8, 2),
    Pipeline(4, 12, 5),
    Pipeline(2, 5, 2, 3),
    Pipeline(3, 11, 2, 4),
    Pipeline(4, 16, 3, 8),
    Pipeline(4, 7, 2, 7),
]
MODES = [(False, False), (True, False), (True, True)]


def _name(pipeline):
    return "-".join(
        str(int(value or 0))
        for value in (
            pipeline.stages,
            pipeline.microbatches,
            pipeline.chunks,
            pipeline.group_size,
            pipeline.overlap_p2p,
            pipeline.overlap_warmup_flush,
        )
    )


def _cases():
    for shape in SHAPES:
        for overlap, flush in MODES if shape.chunks > 1 else MODES[:1]:
            yield Pipeline(
                shape.stages, shape.microbatches, shape.chunks, shape.group_size, overlap, flush
            )


@pytest.mark.parametrize("pipeline", list(_cases()), ids=_name)
def test_passes_run_when_megatron_core_runs_them(pipeline):
    noted = programs(pipeline)
    rng = np.random.default_rng(pipeline.microbatches)
    shape = (pipeline.stages, pipeline.chunks)
    for stage, notes in enumerate(noted):
        passes = [note[1:] for note in notes if note[0] == "pass"]
        assert passes == [(f, c, m) for f, c, m in pipeline.order(stage)]
    for p2p in (0.0, 0.2, rng.uniform(0.0, 0.5, pipeline.stages)):
        forward, backward = rng.uniform(0.5, 1.5, shape), rng.uniform(0.5, 3.0, shape)
        found = simulate(pipeline, forward, backward, p2p)
        expected, ends = replay(noted, forward, backward, np.broadcast_to(p2p, pipeline.stages))
        columns = found.passes
        for row in range(len(columns.stage)):
            key = (
                int(columns.stage[row]),
                bool(columns.forward[row]),
                int(columns.chunk[row]),
                int(columns.microbatch[row]),
            )
            assert (columns.start_s[row], columns.end_s[row]) == pytest.approx(expected[key]), key
        assert found.end_s == pytest.approx(ends)
    long = rng.uniform(0.5, 3.0, pipeline.stages)
    _, ends = replay(noted, forward, backward, long)
    assert simulate(pipeline, forward, backward, long).end_s == pytest.approx(ends, rel=0.05)


@pytest.mark.parametrize(
    "pipeline",
    [
        Pipeline(1, 5),
        Pipeline(1, 5, combined=True),
        Pipeline(3, 2),
        Pipeline(4, 60),
        Pipeline(3, 30, 2),
        Pipeline(4, 40, 3, overlap_p2p=True),
        Pipeline(4, 46, 2, 6, overlap_p2p=True),
        Pipeline(3, 30, 2, overlap_p2p=True),
        Pipeline(3, 32, 2, 4, overlap_p2p=True),
        Pipeline(3, 32, 2, 4, overlap_p2p=True, overlap_warmup_flush=True),
        Pipeline(2, 33, 2, 3, overlap_p2p=True, overlap_warmup_flush=True),
        Pipeline(4, 32, 2, overlap_p2p=True, combined=True),
    ],
    ids=_name,
)
def test_arrays_of_candidates_equal_simulations(pipeline):
    rng = np.random.default_rng(5)
    shape = (60, pipeline.stages, pipeline.chunks)
    forward = np.ones(shape)
    forward[20:] += rng.choice([0.0, 0.02, 0.3], (40, *shape[1:]))
    forward[:, 0, 0] += rng.uniform(0, 0.5, 60)
    forward[:, -1, -1] += rng.uniform(0, 1.0, 60)
    backward = 2.1 * forward
    p2p = rng.uniform(0.0, 0.3, 60)
    options = {
        "release_s": rng.uniform(0, 3, shape),
        "hidden_s": np.full(shape, 0.4) if pipeline.combined else None,
    }
    found = pipeline_times(pipeline, forward, backward, p2p, **options)
    for row in range(60):
        chosen = {name: None if x is None else x[row] for name, x in options.items()}
        step = simulate(pipeline, forward[row], backward[row], p2p[row], **chosen)
        assert found.end_s[row] == pytest.approx(step.end_s, rel=1e-11)
        assert found.last_backward_end_s[row] == pytest.approx(step.last_backward_end_s, rel=1e-11)
        assert found.gradient_sync_s[row] == pytest.approx(step.gradient_sync_s, rel=1e-11)


def test_marks_are_those_of_the_passes():
    pipeline = Pipeline(3, 6, 2, overlap_p2p=True)
    rng = np.random.default_rng(0)
    step = simulate(pipeline, rng.uniform(1, 2, (3, 2)), rng.uniform(1, 2, (3, 2)), 0.1)
    columns = step.passes
    for stage in range(3):
        backward = ~columns.forward & (columns.stage == stage)
        for chunk in range(2):
            last = backward & (columns.chunk == chunk) & (columns.microbatch == 5)
            assert step.last_backward_end_s[stage, chunk] == columns.end_s[last]
        # With align_grad_reduce, stage s reduces a chunk s backward passes after its last one.
        later = np.flatnonzero(backward & (columns.chunk == 1) & (columns.microbatch == 5)) + stage
        assert step.gradient_sync_s[stage, 1] == columns.end_s[later]


def test_even_stages_have_the_known_bubble():
    blocking = simulate(Pipeline(8, 32), np.ones((8, 1)), np.full((8, 1), 2.0))
    assert blocking.pipeline_s == pytest.approx((32 + 7) * 3.0)
    assert blocking.idle_s() == pytest.approx(7 * 3.0)
    interleaved = simulate(Pipeline(8, 32, 4), np.ones((8, 4)), np.full((8, 4), 2.0))
    assert interleaved.pipeline_s == pytest.approx((32 * 4 + 7) * 3.0)


def test_combined_passes_of_one_stage_hide_what_they_share():
    times = simulate(Pipeline(1, 4, combined=True), [[1.0]], [[2.0]], hidden_s=[[0.5]])
    assert times.pipeline_s == pytest.approx(4 * 3.0 - 3 * 0.5)


@pytest.mark.parametrize(
    "shape",
    [
        {"stages": 4, "microbatches": 8, "overlap_p2p": True},
        {"stages": 1, "microbatches": 8, "chunks": 2},
        {"stages": 4, "microbatches": 3, "chunks": 2},
        {"stages": 4, "microbatches": 10, "chunks": 2},
        {"stages": 4, "microbatches": 8, "chunks": 2, "group_size": 3},
    ],
)
def test_refuses_what_megatron_core_refuses(shape):
    with pytest.raises(ValueError, match=r"stages|chunk"):
        Pipeline(**shape)
