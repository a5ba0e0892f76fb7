"""Parts of the dry run that need neither PyTorch nor Megatron-Core."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.candidate import Candidate
from tuner.memory.categories import ACTIVATIONS, FORWARD_TRANSIENTS, breakdown_at, categorised
from tuner.memory.errors import UnsupportedError
from tuner.memory.profile import check_composable, placeholder_bytes
from tuner.memory.schedule import layer_split, moments
from tuner.memory.script import megatron_core_config
from tuner.memory.trace import MODEL_BUILT, Trace


def trace_of(events, phases=("build", "forward", "backward")) -> Trace:
    """A trace of (block, bytes, phase) events, with the build ending before the first event."""
    block, size, phase = zip(*events, strict=True)
    zeros = np.zeros(len(events), dtype=np.int32)
    return Trace(
        block=np.array(block, dtype=np.int64),
        bytes=np.array(size, dtype=np.int64),
        module=zeros,
        phase=np.array([phases.index(name) for name in phase], dtype=np.int32),
        category=zeros,
        module_names=("layer",),
        phase_names=phases,
        category_names=("",),
        markers=((0, MODEL_BUILT),),
    )


def test_live_bytes_round_each_block_up() -> None:
    trace = trace_of([(0, 100, "forward"), (1, 513, "forward"), (0, -100, "backward")])
    assert trace.live_bytes(512).tolist() == [512, 1536, 1024]
    assert trace.alive_at(2).tolist() == [1]


def test_a_trace_survives_its_file(tmp_path) -> None:
    trace = trace_of([(0, 100, "forward"), (0, -100, "backward")])
    trace.save(tmp_path / "trace.npz")
    read = Trace.load(tmp_path / "trace.npz")
    assert read.markers == trace.markers
    assert read.phase_names == trace.phase_names
    np.testing.assert_array_equal(read.bytes, trace.bytes)


def test_what_outlives_its_forward_pass_is_an_activation() -> None:
    events = [
        (0, 10, "forward"),
        (1, 20, "forward"),
        (1, -20, "forward"),
        (0, -10, "backward"),
    ]
    trace = categorised(trace_of(events), {}, np.array([3]))
    assert breakdown_at(trace, 1) == {ACTIVATIONS: 10, FORWARD_TRANSIENTS: 20}


@pytest.mark.parametrize(("stage", "in_flight"), [(0, 4), (1, 3), (3, 1)])
def test_a_stage_of_1f1b_holds_a_micro_batch_for_each_later_stage(stage, in_flight) -> None:
    backward = [moment for moment in moments(4, 1, 16, stage) if not moment.forward]
    assert [moment.in_flight for moment in backward] == [(in_flight,)]


def test_the_first_stage_of_interleaved_1f1b_holds_its_whole_warmup() -> None:
    backward = [moment for moment in moments(4, 2, 16, 0) if not moment.forward]
    warmup = (4 - 0 - 1) * 2 + (2 - 1) * 4
    assert max(sum(moment.in_flight) for moment in backward) == warmup + 1


@given(stages=st.integers(1, 6), chunks=st.integers(1, 4), layers=st.integers(1, 5))
def test_a_split_deals_out_every_layer_once(stages, chunks, layers) -> None:
    total = stages * chunks * layers
    split = layer_split(total, stages, chunks)
    dealt = [layer for stage in split for chunk in stage for layer in chunk]
    assert sorted(dealt) == list(range(total))


def test_embedding_and_loss_may_count_as_layers() -> None:
    split = layer_split(6, 4, 1, embedding_counts=True, loss_counts=True)
    assert [len(stage[0]) for stage in split] == [1, 2, 2, 1]


def test_a_split_that_does_not_divide_names_the_field() -> None:
    with pytest.raises(UnsupportedError, match="pipeline_model_parallel_size"):
        layer_split(7, 2, 1)


def test_units_share_placeholders_of_equal_shape() -> None:
    shared = {"dense": {"a": 4, "b": 2}, "head": {"b": 2, "c": 1}}
    assert placeholder_bytes(shared, ["dense", "head"]) == 7
    assert placeholder_bytes(shared, ["head"]) == 3


@pytest.mark.parametrize("field", ["use_megatron_fsdp", "tp_comm_overlap"])
def test_settings_without_a_model_are_refused_by_name(field) -> None:
    with pytest.raises(UnsupportedError, match=field):
        megatron_core_config({field: True})


def test_cuda_graphs_are_not_composed() -> None:
    with pytest.raises(UnsupportedError, match="cuda_graph_impl"):
        check_composable(Candidate.from_flat({"cuda_graph_impl": "local"}))
