"""The dry run of the layout sweeps' framework."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tuner.memory.allocator_replay import replay
from tuner.memory.categories import ACTIVATIONS, OPTIMIZER_STATE, WEIGHTS, breakdown_at
from tuner.validation.conversion import launch_of
from tuner.validation.launch import UnmodelledError
from tuner.validation.scaling import ScalingRun
from tuner.validation.scaling.run import record_rank

RUN = ScalingRun(
    layers=8,
    hidden=128,
    intermediate=256,
    heads=2,
    vocabulary=64,
    sequence=256,
    batch=2,
    tensor_ranks=1,
    stages=1,
    data_ranks=4,
    micro_batches=2,
)
ROW_BYTES = RUN.batch * RUN.sequence * RUN.hidden * 2


def activations(**changes: object) -> int:
    trace = record_rank(replace(RUN, **changes), 0)
    return breakdown_at(trace, int(trace.live_bytes().argmax()))[ACTIVATIONS]


@pytest.mark.parametrize(
    "changes",
    [{"fused_norm": True}, {"checkpoint_layers": True}, {"layers": 16, "stages": 2}],
    ids=["plain", "checkpointed", "pipeline"],
)
def test_repeating_a_layer_gives_what_running_every_layer_gives(changes: dict[str, object]) -> None:
    run = replace(RUN, **changes)
    for stage in range(run.stages):
        every = record_rank(run, stage, every_layer=True)
        short = record_rank(run, stage)
        assert sorted(every.bytes.tolist()) == sorted(short.bytes.tolist())
        assert every.markers == short.markers
        peaks = [replay(trace) for trace in (every, short)]
        assert peaks[0].peak_allocated_bytes == peaks[1].peak_allocated_bytes
        assert peaks[0].peak_reserved_bytes == peaks[1].peak_reserved_bytes


def test_weights_and_optimizer_state_are_those_of_zero_1() -> None:
    trace = record_rank(RUN, 0)
    weights = 4 * RUN.hidden**2 + 3 * RUN.hidden * RUN.intermediate + 2 * RUN.hidden
    total = RUN.layers * weights + 2 * RUN.vocabulary * RUN.hidden + RUN.hidden
    held = breakdown_at(trace, int(trace.live_bytes().argmax()))
    assert held[WEIGHTS] == 2 * total
    assert held[OPTIMIZER_STATE] == pytest.approx(12 * total / RUN.data_ranks, rel=1e-6)


def test_the_fused_norm_keeps_two_hidden_states_less_for_each_norm() -> None:
    """The eager one keeps its input in float32 and the scaled one; the fused one its input."""
    saved = [
        activations(layers=layers) - activations(layers=layers, fused_norm=True)
        for layers in (RUN.layers - 1, RUN.layers)
    ]
    assert saved[1] - saved[0] == pytest.approx(2 * 2 * ROW_BYTES, rel=0.02)


def test_eager_attention_keeps_a_mask_for_each_layer_that_the_fused_softmax_does_not() -> None:
    mask = RUN.batch * RUN.sequence**2
    more = activations(attention="torch") - activations(attention="fused")
    assert more == RUN.layers * mask


def test_checkpointed_layers_keep_little_else_than_their_inputs() -> None:
    assert activations(checkpoint_layers=True) < 0.1 * activations()


def test_the_first_stage_holds_as_many_micro_batches_as_there_are_stages() -> None:
    run = replace(RUN, layers=13, stages=4, micro_batches=8)
    peaks = [int(record_rank(run, stage).live_bytes().max()) for stage in range(4)]
    assert peaks[1] > peaks[2]
    trace = record_rank(run, 0)
    live = trace.live_bytes()
    start = trace.marker("step 2 start")
    assert int(live[start:].max()) == int(np.max(live))


def test_grouped_queries_are_refused() -> None:
    row = {
        "id": "aleph-1",
        "arch": {"num_attention_heads": 8, "num_query_groups": 2},
        "extra_config": {},
        "measured": {},
    }
    with pytest.raises(UnmodelledError, match="grouped-query"):
        launch_of(row)
