"""What an out-of-memory result proves of other candidates."""

import pytest

from tuner.candidate import Candidate
from tuner.search.dominance import needs_at_least

BASE = {"tensor_model_parallel_size": 2, "sequence_parallel": True, "micro_batch_size": 2}
SELECTIVE = {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]}
FULL = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 4}


def heavier(other: dict, one: dict) -> bool:
    return needs_at_least(
        Candidate.from_flat({**BASE, **other}), Candidate.from_flat({**BASE, **one})
    )


@pytest.mark.parametrize(
    ("other", "one"),
    [
        ({}, SELECTIVE),
        ({**SELECTIVE, "recompute_modules": ["mlp"]}, SELECTIVE),
        ({**FULL, "recompute_num_layers": 2}, FULL),
        ({}, FULL),
        ({"sequence_parallel": False}, {}),
        ({}, {"cpu_offloading": True, "cpu_offloading_num_layers": 4}),
        ({}, {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}),
        ({"use_distributed_optimizer": False}, SELECTIVE),
    ],
)
def test_taking_away_a_saving_is_ruled_out_and_adding_one_is_not(other, one):
    assert heavier(other, one)
    assert not heavier(one, other)


@pytest.mark.parametrize(
    "other",
    [
        {"micro_batch_size": 4},
        {"pipeline_model_parallel_size": 2},
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        {"tensor_model_parallel_size": 1, "sequence_parallel": False},
        {"cuda_graph_impl": "transformer_engine"},
        {"attention_backend": "unfused"},
        FULL,
    ],
)
def test_settings_that_move_the_peak_are_never_ruled_out(other):
    assert not heavier(other, SELECTIVE)


def test_one_recompute_granularity_proves_nothing_of_the_other():
    assert not heavier(SELECTIVE, FULL)
