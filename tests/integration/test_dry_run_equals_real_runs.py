"""The dry run of the CPU's layers against real steps of Megatron-Core over gloo, rank by rank."""

from __future__ import annotations

import pytest
from real_cpu_memory import measure_ranks

from tuner.memory.dryrun import run_request
from tuner.memory.request import LOCAL, DryRunRequest

DENSE = {
    "num_layers": 4,
    "hidden_size": 128,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 256,
    "vocab_size": 512,
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": "silu",
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
EXPERTS = DENSE | {"num_moe_experts": 4, "moe_ffn_hidden_size": 128, "moe_router_topk": 2}
LATENT = EXPERTS | {
    "multi_latent_attention": True,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_head_dim": 32,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 32,
    "rope_type": "rope",
    "num_query_groups": 4,
}
# Padding every expert to the same capacity makes routing as even as the dry run takes it to be.
EVEN = {"moe_pad_expert_input_to_capacity": True, "moe_expert_capacity_factor": 1.0}

RUNS = {
    "one rank": (DENSE, {}, 1),
    "full recompute": (
        DENSE,
        {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        },
        1,
    ),
    "selective recompute": (
        DENSE,
        {"recompute_granularity": "selective", "recompute_modules": ["core_attn", "mlp"]},
        1,
    ),
    "tensor and sequence parallel": (
        DENSE,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        2,
    ),
    "pipeline": (DENSE, {"pipeline_model_parallel_size": 2}, 2),
    "interleaved pipeline": (
        DENSE,
        {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2},
        2,
    ),
    "data parallel": (DENSE, {}, 2),
    "experts": (EXPERTS, {"expert_model_parallel_size": 2, **EVEN}, 2),
    "latent attention and experts": (LATENT, EVEN, 1),
}
LARGEST_DEVIATION = 0.005


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_peak_and_static_bytes_equal_those_of_a_real_run(name, tmp_path) -> None:
    model, config, ranks = RUNS[name]
    config = {"micro_batch_size": 1, "recompute_granularity": None, **config}
    run = {"world_size": ranks, "seq_length": 128, "global_batch_size": 4 * ranks}
    real = measure_ranks({"model": model, "config": config, **run}, tmp_path)
    for rank, measured in enumerate(real):
        request = DryRunRequest(model=model, config=config, rank=rank, layers=LOCAL, **run)
        dry = run_request(request)
        assert dry.static_bytes == measured["static_bytes"]
        deviation = dry.peak_allocated_bytes / measured["peak_bytes"] - 1.0
        assert abs(deviation) <= LARGEST_DEVIATION, (rank, deviation)
