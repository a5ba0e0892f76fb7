"""Rows of Hagemann et al. 2023 (arXiv:2311.05610): layout sweeps on A100 with OOM outcomes.

Their framework is in-house: Megatron-style tensor and pipeline parallelism with ZeRO-1. What
their sheets leave open (vocabulary, batch size, gradient type) is in the rows' `inferred_fields`
or assumed here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.validation.launch import Launch, UnmodelledError

_MODEL = {
    "normalization": "RMSNorm",
    "position_embedding_type": "rope",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "add_bias_linear": False,
    "share_embeddings_and_output_weights": False,
    "gated_linear_unit": True,
    "activation_func": "silu",
}
_SIZES = (
    "num_layers",
    "hidden_size",
    "ffn_hidden_size",
    "num_attention_heads",
    "num_query_groups",
    "kv_channels",
    "vocab_size",
)
_ASSUMPTIONS = (
    "in-house framework taken as Megatron-Core with local layers",
    "gradients accumulated in 16 bits: 14 G parameters ran unsharded on 80 GB",
)


def hagemann_launch(row: Mapping[str, Any]) -> Launch:
    """The launch of a layout-sweep row."""
    arch, extra = row["arch"], row.get("extra_config") or {}
    kernel = str(extra.get("kernel") or "")
    checkpointing = str(extra.get("activation_checkpointing_type") or "disabled")
    config: dict[str, Any] = {
        "tensor_model_parallel_size": row["tp"],
        "pipeline_model_parallel_size": row["pp"],
        "micro_batch_size": row["mbs"],
        "sequence_parallel": bool(row.get("sequence_parallel")) and row["tp"] > 1,
        "use_distributed_optimizer": True,
        "grad_reduce_in_fp32": False,
        "apply_rope_fusion": False,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "gradient_accumulation_fusion": False,
        "cross_entropy_loss_fusion": False,
        "create_attention_mask_in_dataloader": False,
        "attention_backend": "flash" if "flash" in kernel.lower() else "unfused",
    }
    if checkpointing == "every_layer":
        config |= {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    elif checkpointing not in ("disabled", "None"):
        raise UnmodelledError(f"activation checkpointing {checkpointing!r} is not known")
    return Launch(
        model=_MODEL | {name: arch[name] for name in _SIZES if arch.get(name)},
        config=config,
        world_size=row["num_gpus"],
        seq_length=row["seq_length"],
        global_batch_size=row["gbs"],
        gpu=row["gpu"],
        assumptions=_ASSUMPTIONS,
    )
