"""Parts of composition that need no dry run: splits, schedules, indices of candidates."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tuner.memory.composition.profile import placeholder_bytes
from tuner.memory.composition.schedule import Shape, moments
from tuner.memory.composition.split import layer_counts, split_units
from tuner.memory.errors import UnsupportedError


def backward_moments(stages, chunks, microbatches, stage):
    shape = Shape(stages, chunks, microbatches, group=stages, overlapped=chunks > 1)
    return [moment for moment in moments(shape, stage) if moment.forward is False]


@pytest.mark.parametrize(("stage", "in_flight"), [(0, 4), (1, 3), (3, 1)])
def test_a_stage_of_1f1b_holds_a_micro_batch_for_each_later_stage(stage, in_flight) -> None:
    found = backward_moments(4, 1, 16, stage)
    assert max(moment.in_flight for moment in found) == (in_flight,)


def test_the_first_stage_of_interleaved_1f1b_holds_its_whole_warmup() -> None:
    warmup = (4 - 0 - 1) * 2 + (2 - 1) * 4
    found = backward_moments(4, 2, 16, 0)
    assert max(sum(moment.in_flight) for moment in found) == warmup + 1


def test_a_middle_stage_holds_gradients_on_their_way() -> None:
    shape = Shape(4, 1, 16, group=4, overlapped=False)
    backward = max(m.buffers for m in moments(shape, 1) if m.forward is False)
    assert backward == 2  # of its output now, and of its input from the pass before
    last = max(m.buffers for m in moments(shape, 3) if m.forward is False)
    assert last == 1


@given(stages=st.integers(1, 6), chunks=st.integers(1, 4), layers=st.integers(1, 5))
def test_a_split_deals_out_every_layer_once(stages, chunks, layers) -> None:
    kinds = tuple(f"layer {number}" for number in range(stages * chunks * layers))
    config = {
        "pipeline_model_parallel_size": stages,
        "virtual_pipeline_model_parallel_size": chunks,
    }
    split = split_units(kinds, False, config)
    dealt = [unit for chunk in range(chunks) for stage in split for unit in stage[chunk]]
    assert dealt == ["embedding", *kinds, "head"]


def test_embedding_and_loss_may_count_as_layers() -> None:
    counts = layer_counts(6, 4, 1, embedding_counts=True, loss_counts=True)
    assert counts == ((1,), (2,), (2,), (1,))


def test_a_layout_says_where_every_unit_runs() -> None:
    config = {"pipeline_model_parallel_size": 2, "pipeline_model_parallel_layout": "Et|tt|t|mL"}
    split = split_units(("a", "b", "c", "d"), True, config)
    assert split == ((("embedding", "a"), ("d",)), (("b", "c"), ("mtp", "head")))


def test_a_split_that_does_not_divide_names_the_field() -> None:
    with pytest.raises(UnsupportedError, match="pipeline_model_parallel_size"):
        layer_counts(7, 2, 1)


def test_units_share_placeholders_of_equal_shape() -> None:
    shared = {"dense": {"a": 4, "b": 2}, "head": {"b": 2, "c": 1}}
    assert placeholder_bytes(shared, ["dense", "head"]) == 7
    assert placeholder_bytes(shared, ["head"]) == 3


def test_rows_of_one_run_share_setting_and_pipeline() -> None:
    from tuner.memory.composition import index_candidates
    from tuner.models import get_model

    columns = {
        "tensor_model_parallel_size": ([1, 2], np.array([0, 1, 1, 1])),
        "pipeline_model_parallel_size": ([2, 4], np.array([0, 0, 1, 1])),
        "env.PYTORCH_CUDA_ALLOC_CONF": (["a", "b"], np.array([0, 0, 0, 1])),
    }
    index = index_candidates(get_model("llama3-8b"), columns, world_size=64, global_batch_size=512)
    assert index.setting.tolist() == [0, 1, 1, 1]
    assert index.pipeline[2] == index.pipeline[3] != index.pipeline[1]
    assert len(index.settings) == 2
