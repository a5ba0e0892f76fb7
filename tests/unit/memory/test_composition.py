"""Composed peaks against full dry runs, on small candidates of many kinds."""

from __future__ import annotations

import pytest

from tuner.candidate import Candidate
from tuner.memory import dry_run
from tuner.memory.composition import ProfileSource, stage_memories
from tuner.models import ModelSpec

WORLD, SEQUENCE = 16, 2048
LLAMA = {
    "num_layers": 4,
    "hidden_size": 1024,
    "num_attention_heads": 8,
    "num_query_groups": 4,
    "ffn_hidden_size": 2816,
    "vocab_size": 16000,
    "gated_linear_unit": True,
    "activation_func": "silu",
    "normalization": "RMSNorm",
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
EXPERTS = {"num_moe_experts": 8, "moe_ffn_hidden_size": 512, "moe_router_topk": 2}
SELECTIVE = {"recompute_granularity": "selective"}
FULL = {"recompute_granularity": "full", "recompute_method": "uniform"}
PP2 = {"pipeline_model_parallel_size": 2}
TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
HOST = {
    "optimizer_cpu_offload": True,
    "use_precision_aware_optimizer": True,
    "overlap_cpu_optimizer_d2h_h2d": True,
}
CASES = {
    "one stage": ({}, {}),
    "bf16 gradients": ({}, {"grad_reduce_in_fp32": False, **TP2}),
    "no distributed optimizer": ({}, {"use_distributed_optimizer": False, **PP2}),
    "recomputed mlp": ({}, {**PP2, **SELECTIVE, "recompute_modules": ["core_attn", "mlp"]}),
    "recomputed in twos": ({}, {**PP2, **FULL, "recompute_num_layers": 2}),
    "interleaved": (
        {},
        {**PP2, **TP2, "virtual_pipeline_model_parallel_size": 2, "context_parallel_size": 2},
    ),
    "layout": ({}, {**PP2, "pipeline_model_parallel_layout": "Et|tt|t|L"}),
    "uneven": ({}, {**PP2, "num_layers_in_first_pipeline_stage": 1}),
    "tied": ({"share_embeddings_and_output_weights": True}, PP2),
    "windowed": ({"window_size": [511, 0], "window_attn_skip_freq": 2}, PP2),
    "fp8": ({}, {**PP2, "fp8": "hybrid", "fp8_recipe": "tensorwise"}),
    "host optimizer": ({}, {**HOST, "optimizer_offload_fraction": 0.5}),
    "layers offloaded": ({}, {"cpu_offloading": True, "cpu_offloading_num_layers": 2}),
    "modules offloaded": (
        {},
        {"fine_grained_activation_offloading": True, "offload_modules": ["core_attn"]},
    ),
    "experts": (EXPERTS, {**PP2, "expert_model_parallel_size": 4}),
    "experts with narrow moments": (
        EXPERTS | {"moe_layer_freq": [0, 1, 1, 1]},
        {
            "expert_model_parallel_size": 2,
            "use_precision_aware_optimizer": True,
            "exp_avg_dtype": "bf16",
            "exp_avg_sq_dtype": "bf16",
        },
    ),
    "experts recomputed": (EXPERTS, {**PP2, **SELECTIVE, "recompute_modules": ["moe"]}),
    "experts sharded otherwise": (
        {**EXPERTS, "moe_layer_freq": 2, "moe_shared_expert_intermediate_size": 512},
        {**TP2, "expert_model_parallel_size": 4, "expert_tensor_parallel_size": 1},
    ),
    "experts recomputed and interleaved": (
        EXPERTS,
        {
            **PP2,
            **SELECTIVE,
            "recompute_modules": ["moe"],
            "virtual_pipeline_model_parallel_size": 2,
        },
    ),
    "dropout recomputed": (
        {"hidden_dropout": 0.1},
        {**PP2, **FULL, "recompute_num_layers": 1, "virtual_pipeline_model_parallel_size": 2},
    ),
    "a stack that ignores full recompute": (
        {
            "hybrid_layer_pattern": "M-M-",
            "mamba_num_heads": 16,
            "mamba_head_dim": 64,
            "mamba_state_dim": 64,
            "mamba_num_groups": 4,
            "position_embedding_type": "none",
        },
        {**FULL, "recompute_num_layers": 2},
    ),
    "predicting more": ({"mtp_num_layers": 1}, PP2),
}


@pytest.mark.parametrize("name", CASES)
def test_a_composed_peak_is_that_of_a_full_dry_run(name, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MEGATRON_TUNER_CACHE", str(tmp_path))
    architecture, config = CASES[name]
    model = ModelSpec.from_flat({**LLAMA, **architecture})
    flat = {"use_distributed_optimizer": True, "grad_reduce_in_fp32": True, **config}
    candidate = Candidate.from_flat(flat)
    replicas = WORLD // candidate.model_parallel_size()
    run = {"world_size": WORLD, "global_batch_size": 4 * replicas}
    memories = stage_memories(model, candidate, ProfileSource(SEQUENCE), **run)
    stages = candidate.pipeline_model_parallel_size
    composed = max(int(memory.peak[0]) for memory in memories)
    alike = WORLD // stages
    if candidate.splits_optimizer:
        alike = candidate.tensor_model_parallel_size
    dry = max(
        dry_run(model, candidate, seq_length=SEQUENCE, rank=rank, **run).peak_allocated_bytes
        for rank in range(0, WORLD, alike)
    )
    assert composed == pytest.approx(dry, rel=0.01)


@pytest.mark.parametrize("limit", [0, 2])
def test_deferred_gradients_of_the_output_layer_pile_up(limit, tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("MEGATRON_TUNER_CACHE", str(tmp_path))
    model = ModelSpec.from_flat(LLAMA)
    flat = {**PP2, **TP2, "use_distributed_optimizer": True, "gradient_accumulation_fusion": True}
    deferred = {"defer_embedding_wgrad_compute": True, "wgrad_deferral_limit": limit}
    run = {"world_size": 4, "global_batch_size": 8}

    def last_stage(config: dict) -> tuple[int, int]:
        candidate = Candidate.from_flat(config)
        memory = stage_memories(model, candidate, ProfileSource(SEQUENCE), **run)[1]
        dry = dry_run(model, candidate, seq_length=SEQUENCE, rank=3, **run)
        return int(memory.peak[0]), dry.peak_allocated_bytes

    plain, kept = last_stage(flat), last_stage({**flat, **deferred})
    logits = 2 * SEQUENCE * LLAMA["vocab_size"] // 2
    waiting = limit or 8
    assert kept[1] - plain[1] > (waiting - 1) * logits
    assert abs(kept[0] - kept[1]) < 1.2 * logits
