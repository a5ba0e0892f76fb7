"""Hybrid models (Mamba or gated delta net layers among others): what their stack does not do."""

from __future__ import annotations

from typing import Any

from tuner.constraints.registry import rule

STACK = "ssm/mamba_block.py: MambaStack"
SEGMENT = (
    "ssm/mamba_block.py: MambaStack._select_layers_for_pipeline_parallel; "
    "models/hybrid/hybrid_layer_allocation.py: select_pipeline_segment"
)


@rule("Y01", SEGMENT, fix={"virtual_pipeline_model_parallel_size": None}, until="0.16.1")
def hybrid_models_are_not_interleaved(c: Any) -> str | None:
    """virtual_pipeline_model_parallel_size with a hybrid model."""
    if not c.is_hybrid_model or c.virtual_pipeline_model_parallel_size is None:
        return None
    return "a hybrid model of this Megatron-Core has no interleaved schedule"


@rule("Y02", SEGMENT, kind="advice", fix={"pipeline_model_parallel_layout": None})
def hybrid_models_have_no_layout(c: Any) -> str | None:
    """pipeline_model_parallel_layout with a hybrid model."""
    if not c.is_hybrid_model or c.pipeline_model_parallel_layout is None:
        return None
    return (
        "a hybrid model deals its layers out evenly, or by num_layers_in_first_pipeline_stage and "
        "its like, whatever the layout says"
    )


@rule("Y03", STACK, kind="advice", fix={"recompute_granularity": "selective"}, until="0.17.0")
def hybrid_models_ignore_full_recompute(c: Any) -> str | None:
    """Full recompute of a hybrid model."""
    if not c.is_hybrid_model or c.effective_recompute_granularity != "full":
        return None
    return "the stack of a hybrid model ignores full recompute until Megatron-Core 0.18"
