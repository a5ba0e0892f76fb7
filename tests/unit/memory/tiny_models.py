"""Models small enough for many dry runs, and their runs."""

from __future__ import annotations

from functools import cache

from tuner.candidate import Candidate
from tuner.memory import DryRun, dry_run
from tuner.models import ModelSpec

LAYERS = 4
WIDTH = 128
LENGTH = 512
HEADS = 4
HIDDEN_BYTES = 2 * WIDTH * LENGTH
"""Bytes of the hidden states of one micro-batch."""

_DENSE = {
    "num_layers": LAYERS,
    "hidden_size": WIDTH,
    "ffn_hidden_size": 256,
    "num_attention_heads": HEADS,
    "num_query_groups": 2,
    "gated_linear_unit": True,
    "activation_func": "silu",
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "vocab_size": 16384,  # so that the peak stands where the logits are
    "position_embedding_type": "rope",
    "max_position_embeddings": 4096,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
}
_MOE = _DENSE | {
    "num_moe_experts": 4,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 128,
    "moe_shared_expert_intermediate_size": 128,
}
_LATENT = {name: value for name, value in _MOE.items() if name != "num_query_groups"} | {
    "multi_latent_attention": True,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 8,
    "v_head_dim": 16,
}
_PLAIN = _DENSE | {
    "normalization": "LayerNorm",
    "gated_linear_unit": False,
    "activation_func": "gelu",
    "add_bias_linear": True,
    "num_query_groups": 4,
}
MODELS = {
    name: ModelSpec.from_flat(fields)
    for name, fields in {
        "dense": _DENSE,
        "moe": _MOE,
        "latent": _LATENT,
        "plain": _PLAIN,
    }.items()
}


@cache
def run(
    model: str,
    *,
    rank: int = 0,
    te_version: str = "2.9.0",
    precision: str = "bf16",
    **config: object,
) -> DryRun:
    """Two optimizer steps of four micro-batches on as few ranks as the layout needs.

    Lists in `config` are given as tuples.
    """
    fields = {name: list(v) if isinstance(v, tuple) else v for name, v in config.items()}
    candidate = Candidate.from_flat({"micro_batch_size": 1, **fields})
    world = (
        candidate.tensor_model_parallel_size
        * candidate.pipeline_model_parallel_size
        * candidate.context_parallel_size
    )
    return dry_run(
        MODELS[model],
        candidate,
        world_size=world,
        seq_length=LENGTH,
        global_batch_size=4,
        rank=rank,
        te_version=te_version,
        precision=precision,
    )


def kept(found: DryRun) -> int:
    """Bytes kept for backward when the peak stood."""
    return found.breakdown.get("activations", 0)
