"""The dry run on other Megatron-Core versions than the installed one, from their real wheels."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
from constraint_oracle import wheels

from tuner.candidate import Candidate
from tuner.memory import dry_run
from tuner.models import ModelSpec

DENSE = {
    "num_layers": 4,
    "hidden_size": 512,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "ffn_hidden_size": 1024,
    "vocab_size": 4096,
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "activation_func": "silu",
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
LATENT = DENSE | {
    "num_moe_experts": 8,
    "moe_ffn_hidden_size": 256,
    "moe_router_topk": 2,
    "moe_shared_expert_intermediate_size": 256,
    "multi_latent_attention": True,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_head_dim": 64,
    "qk_pos_emb_head_dim": 32,
    "v_head_dim": 64,
    "num_query_groups": 8,
}
EXPERTS = {
    "expert_model_parallel_size": 2,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
}
RUNS = {
    "tensor and context parallel": (
        DENSE,
        {
            "tensor_model_parallel_size": 2,
            "sequence_parallel": True,
            "context_parallel_size": 2,
        },
    ),
    "selective recompute in FP8": (
        DENSE,
        {
            "pipeline_model_parallel_size": 2,
            "virtual_pipeline_model_parallel_size": 2,
            "recompute_granularity": "selective",
            "recompute_modules": ["layernorm", "mlp"],
            "fp8": "hybrid",
            "fp8_recipe": "tensorwise",
        },
    ),
    "full recompute": (
        DENSE,
        {
            "pipeline_model_parallel_size": 2,
            "recompute_granularity": "full",
            "recompute_method": "block",
            "recompute_num_layers": 1,
        },
    ),
    "latent attention and experts": (
        LATENT,
        {
            **EXPERTS,
            "recompute_granularity": "selective",
            "recompute_modules": ["mla_up_proj", "moe_act"],
        },
    ),
}
LARGEST_DIFFERENCE = 0.02
"""Between versions: newer ones allocate a little differently, but not more than this."""


@pytest.fixture(scope="module", params=[v for v in wheels.MCORE_VERSIONS if v != "0.16.1"])
def folder(request) -> Path:
    """The unpacked wheel of one version; skips loudly without it."""
    try:
        return wheels.unpacked("megatron-core", request.param)
    except wheels.WheelUnavailableError as missing:
        warnings.warn(f"NOT PROVED on Megatron-Core {request.param}: {missing}", stacklevel=1)
        pytest.skip(f"the wheel of Megatron-Core {request.param} cannot be fetched: {missing}")


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_another_version_runs_and_needs_about_as_much(name, folder) -> None:
    installed, other = _run(name, None), _run(name, folder)
    assert other.assumptions["megatron_core"] != installed.assumptions["megatron_core"]
    assert other.static_bytes == pytest.approx(installed.static_bytes, rel=LARGEST_DIFFERENCE)
    assert other.peak_allocated_bytes == pytest.approx(
        installed.peak_allocated_bytes, rel=LARGEST_DIFFERENCE
    )


def _run(name: str, mcore: Path | None):
    architecture, config = RUNS[name]
    return dry_run(
        ModelSpec.from_flat(architecture),
        Candidate.from_flat({"micro_batch_size": 1, **config}),
        world_size=4,
        seq_length=1024,
        global_batch_size=16,
        mcore=mcore,
    )
