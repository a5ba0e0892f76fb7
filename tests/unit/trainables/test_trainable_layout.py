import pytest

from trainables.errors import TrialSpecError
from trainables.megatron_core.layout import Layout


def test_absent_sizes_are_one_and_the_rest_is_data_parallel() -> None:
    layout = Layout.from_config({}, world_size=8, global_batch_size=16)
    assert layout.data_parallel_size == 8
    assert layout.num_microbatches == 2
    assert layout.num_model_chunks == 1


def test_expert_tensor_parallel_size_defaults_to_the_tensor_parallel_size() -> None:
    layout = Layout.from_config({"tensor_model_parallel_size": 4}, 8, 8)
    assert layout.expert_tensor_parallel_size == 4


def test_a_virtual_size_of_one_is_the_plain_schedule() -> None:
    config = {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 1}
    assert Layout.from_config(config, 2, 2).virtual_pipeline_model_parallel_size is None


def test_context_parallel_ranks_share_a_sequence() -> None:
    config = {"context_parallel_size": 2, "tensor_model_parallel_size": 2, "micro_batch_size": 2}
    layout = Layout.from_config(config, world_size=8, global_batch_size=8)
    assert layout.data_parallel_size == 2
    assert layout.num_microbatches == 2


def test_a_world_size_the_sizes_do_not_divide_is_refused() -> None:
    with pytest.raises(TrialSpecError, match="world_size=6 is not a multiple of"):
        Layout.from_config({"tensor_model_parallel_size": 4}, 6, 8)


def test_a_global_batch_the_micro_batches_do_not_divide_is_refused() -> None:
    with pytest.raises(TrialSpecError, match="global_batch_size=6 is not a multiple of"):
        Layout.from_config({"micro_batch_size": 4}, 1, 6)
