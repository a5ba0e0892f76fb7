"""Rows of Hagemann et al. 2023 (arXiv:2311.05610): layout sweeps on A100 with OOM outcomes.

They ran Aleph Alpha's framework, whose dry run is `tuner.validation.scaling`. What their sheets
leave open (batch size, vocabulary, GPU) is in the rows' `inferred_fields`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.validation.launch import Launch, UnmodelledError
from tuner.validation.scaling.settings import FLASH_1, FLASH_2, FUSED, TORCH, ScalingRun

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
_CHECKPOINTING = {"disabled": False, "none": False, "every_layer": True}
_ASSUMPTIONS = (
    "Aleph Alpha's framework as published in 2024; the runs are of 2023",
    "communicators as Megatron-Core opens them",
)


def hagemann_launch(row: Mapping[str, Any]) -> Launch:
    """The launch of a layout-sweep row."""
    arch, extra = row["arch"], row.get("extra_config") or {}
    if arch["num_query_groups"] != arch["num_attention_heads"]:
        raise UnmodelledError("grouped-query attention is not in the framework's dry run")
    return Launch(
        model=_MODEL | {name: arch[name] for name in _SIZES if arch.get(name)},
        config={
            "tensor_model_parallel_size": row["tp"],
            "pipeline_model_parallel_size": row["pp"],
            "micro_batch_size": row["mbs"],
            "sequence_parallel": bool(row.get("sequence_parallel")) and row["tp"] > 1,
            "use_distributed_optimizer": True,
            "grad_reduce_in_fp32": False,
        },
        world_size=row["num_gpus"],
        seq_length=row["seq_length"],
        global_batch_size=row["gbs"],
        gpu=row["gpu"],
        framework=_settings(row, extra),
        assumptions=_ASSUMPTIONS,
    )


def _settings(row: Mapping[str, Any], extra: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of `ScalingRun`; enough micro-batches to fill the pipeline and its buffers."""
    arch, kernel = row["arch"], str(extra.get("kernel") or "")
    checkpointing = str(extra.get("activation_checkpointing_type") or "disabled").lower()
    if checkpointing not in _CHECKPOINTING:
        raise UnmodelledError(f"activation checkpointing {checkpointing!r} is not known")
    data_ranks = row["num_gpus"] // (row["tp"] * row["pp"])
    run = ScalingRun(
        layers=arch["num_layers"],
        hidden=arch["hidden_size"],
        intermediate=arch["ffn_hidden_size"],
        heads=arch["num_attention_heads"],
        vocabulary=arch["vocab_size"],
        sequence=row["seq_length"],
        batch=row["mbs"],
        tensor_ranks=row["tp"],
        stages=row["pp"],
        data_ranks=data_ranks,
        micro_batches=max(1, min(row["gbs"] // (row["mbs"] * data_ranks), row["pp"] + 1)),
        attention=_attention(kernel),
        fused_norm="rms" in kernel.lower(),
        checkpoint_layers=_CHECKPOINTING[checkpointing],
        sequence_parallel=bool(row.get("sequence_parallel")) and row["tp"] > 1,
    )
    return run.to_json()


def _attention(kernel: str) -> str:
    name = kernel.lower().replace(" ", "").split("+")[0]
    if "flash" in name:
        return FLASH_2 if name.endswith("2") or "v2" in name else FLASH_1
    if name == "torch":
        return TORCH
    if name in ("fused", "megatron"):
        return FUSED
    raise UnmodelledError(f"attention kernel {kernel!r} is not known")
