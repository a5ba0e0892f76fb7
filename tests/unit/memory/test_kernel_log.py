"""The kernels of dry runs: their arithmetic is the model's, their traffic that of its layers."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from tuner.candidate import Candidate
from tuner.memory import dry_run
from tuner.memory.kernel_log import GROUPS, KIND, OPERATIONS, KernelLog
from tuner.memory.trace import Trace, step_end, step_start
from tuner.models import ModelSpec, model_flops_per_step

DENSE = {
    "num_layers": 2,
    "hidden_size": 512,
    "ffn_hidden_size": 1024,
    "num_attention_heads": 8,
    "num_query_groups": 2,
    "vocab_size": 2048,
    "gated_linear_unit": True,
    "activation_func": "silu",
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "add_bias_linear": False,
    "share_embeddings_and_output_weights": False,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
LATENT_EXPERTS = DENSE | {
    "num_query_groups": 8,
    "multi_latent_attention": True,
    "q_lora_rank": 128,
    "kv_lora_rank": 64,
    "qk_head_dim": 64,
    "qk_pos_emb_head_dim": 32,
    "v_head_dim": 64,
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 256,
    "moe_layer_freq": [0, 1],
}
LENGTH = 1024


def kernels_of(model: dict, config: dict, world_size: int, batch: int) -> tuple[KernelLog, Trace]:
    """The operations of the second step of rank 0."""
    run = dry_run(
        ModelSpec.from_flat(model),
        Candidate.from_flat(config),
        world_size=world_size,
        seq_length=LENGTH,
        global_batch_size=batch,
    )
    return run.trace.kernels_between(step_start(2), step_end(2)), run.trace


def model_products(log: KernelLog) -> float:
    """FLOPs of a log as the model's are counted: without the scores computed again in backward."""
    attention = log.of_kind("attention_forward").flops.sum()
    return 3 * attention + log.of_kind("gemm", "grouped_gemm").flops.sum()


@pytest.mark.parametrize(
    ("config", "world_size"),
    [
        ({"micro_batch_size": 2}, 1),
        ({"tensor_model_parallel_size": 2, "sequence_parallel": True}, 2),
        ({"context_parallel_size": 2}, 2),
        ({"context_parallel_size": 2, "cp_comm_type": "a2a"}, 2),
    ],
)
def test_products_of_a_dense_step_are_the_models_flops(config, world_size):
    log, _ = kernels_of(DENSE, config, world_size, batch=4)
    expected = model_flops_per_step(
        ModelSpec.from_flat(DENSE),
        LENGTH,
        4,
        tensor_model_parallel_size=config.get("tensor_model_parallel_size", 1),
    )
    assert model_products(log) * world_size == pytest.approx(expected, rel=1e-9)


def test_products_of_latent_attention_and_experts_are_the_models_flops():
    config = {
        "expert_model_parallel_size": 2,
        "moe_token_dispatcher_type": "alltoall",
        "moe_grouped_gemm": True,
    }
    log, _ = kernels_of(LATENT_EXPERTS, config, 2, batch=4)
    expected = model_flops_per_step(ModelSpec.from_flat(LATENT_EXPERTS), LENGTH, 4)
    router = 3 * 2 * LENGTH * 4 * LATENT_EXPERTS["hidden_size"] * 8
    norms = 3 * 2 * LENGTH * 4 * 2 * (128 + 64)  # the definition counts latent norms as products
    assert model_products(log) * 2 == pytest.approx(expected + router - norms, rel=1e-9)


def test_recompute_repeats_the_products_of_its_modules():
    plain, _ = kernels_of(DENSE, {}, 1, batch=2)
    config = {"recompute_granularity": "selective", "recompute_modules": ["mlp"]}
    again, trace = kernels_of(DENSE, config, 1, batch=2)
    extra = again.flops.sum() - plain.flops.sum()
    assert extra == pytest.approx(2 * 2 * LENGTH * 3 * 2 * 512 * 1024)
    repeated = again.select(again.phase == trace.phase_names.index("recompute"))
    assert repeated.flops.sum() == pytest.approx(extra)


def test_collectives_carry_the_bytes_of_the_activations():
    log, _ = kernels_of(
        DENSE, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, 2, batch=1
    )
    activations = log.select(
        (log.kind == KIND["collective"])
        & (log.group == GROUPS.index("tp"))
        & (log.bytes == LENGTH * DENSE["hidden_size"] * 2)
    )
    count = {
        name: int((activations.op == OPERATIONS.index(name)).sum())
        for name in ("all_gather", "reduce_scatter")
    }
    # a layer: gathered before its two products, scattered after them, and the same in backward
    # with the inputs gathered once more; then the embedding's output and the head's input
    assert count == {"all_gather": 2 * 6 + 3, "reduce_scatter": 2 * 4 + 2}


def test_a_trace_file_keeps_the_kernels(tmp_path):
    log, trace = kernels_of(DENSE, {}, 1, batch=1)
    trace.save(tmp_path / "trace.npz")
    read = Trace.load(tmp_path / "trace.npz")
    for field in dataclasses.fields(KernelLog):
        before, after = getattr(trace.kernels, field.name), getattr(read.kernels, field.name)
        assert before.dtype == after.dtype
        assert np.array_equal(before, after)
    assert len(read.kernels_between(step_start(2), step_end(2))) == len(log)
