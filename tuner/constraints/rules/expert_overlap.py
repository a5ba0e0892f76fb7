"""Overlap of expert-parallel communication with computation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.constraints.registry import rule
from tuner.constraints.rules import TRANSFORMER_CONFIG as TC
from tuner.constraints.rules.cuda_graphs import no_recompute_of

_OFF: Mapping[str, object] = {
    "overlap_moe_expert_parallel_comm": False,
    "delay_wgrad_compute": False,
    "ep_overlap_early_attn_memory_release": False,
}


def overlap_off(c: Any) -> Mapping[str, object]:
    """Turn the overlap off, also where comm_overlap asks for it."""
    if c.comm_overlap is None:
        return _OFF
    wishes = {"overlap_moe_expert_parallel_comm": False, "delay_wgrad_compute": False}
    return {**_OFF, "comm_overlap": {**c.comm_overlap, **wishes}}


@rule("M21", TC, fix=[overlap_off])
def overlap_needs_expert_parallel(c: Any) -> str | None:
    """overlap_moe_expert_parallel_comm with one expert rank."""
    if c.overlap_moe_expert_parallel_comm and c.expert_model_parallel_size <= 1:
        return "with one expert rank there is no expert communication to overlap"
    return None


@rule("M22", TC, fix=[{"virtual_pipeline_model_parallel_size": 2}, overlap_off])
def overlap_in_a_pipeline_needs_interleaving(c: Any) -> str | None:
    """overlap_moe_expert_parallel_comm with a pipeline and no virtual stages."""
    if not c.overlap_moe_expert_parallel_comm or c.pipeline_model_parallel_size <= 1:
        return None
    if c.effective_virtual_pipeline_size is None:
        return "overlap in a pipeline needs virtual_pipeline_model_parallel_size"
    return None


@rule("M23", TC, fix=[{"moe_token_dispatcher_type": "alltoall"}, overlap_off])
def overlap_needs_alltoall(c: Any) -> str | None:
    """overlap_moe_expert_parallel_comm with a dispatcher other than alltoall or flex."""
    if not c.overlap_moe_expert_parallel_comm:
        return None
    if c.moe_token_dispatcher_type not in ("alltoall", "flex"):
        return "overlap needs the alltoall or flex dispatcher"
    return None


@rule(
    "M24",
    TC,
    fix=[
        {
            "recompute_granularity": None,
            "recompute_method": None,
            "recompute_num_layers": None,
        },
        overlap_off,
    ],
)
def overlap_excludes_full_recompute(c: Any) -> str | None:
    """overlap_moe_expert_parallel_comm with full recompute, a method or a number of layers."""
    if not c.overlap_moe_expert_parallel_comm:
        return None
    if c.effective_recompute_granularity == "full":
        return "overlap does not work with full recompute"
    if c.recompute_method is not None or c.recompute_num_layers is not None:
        return "with overlap recompute_method and recompute_num_layers must not be set"
    return None


@rule("M25", TC, fix=[no_recompute_of("moe"), overlap_off], since="0.17.0")
def overlap_excludes_moe_recompute(c: Any) -> str | None:
    """overlap_moe_expert_parallel_comm with moe listed for recompute, even when it is off."""
    if c.overlap_moe_expert_parallel_comm and "moe" in c.effective_recompute_modules:
        return "overlap does not work with moe in recompute_modules"
    return None


@rule("M26", TC, fix=[overlap_off])
def overlap_needs_half_precision(c: Any) -> str | None:
    """overlap_moe_expert_parallel_comm in fp32."""
    if c.overlap_moe_expert_parallel_comm and not (c.bf16 or c.fp16):
        return "overlap needs bf16 or fp16"
    return None


@rule("M27", TC, fix=[{"moe_shared_expert_overlap": False}, overlap_off])
def overlap_excludes_shared_expert_overlap(c: Any) -> str | None:
    """overlap_moe_expert_parallel_comm with moe_shared_expert_overlap."""
    if c.overlap_moe_expert_parallel_comm and c.moe_shared_expert_overlap:
        return "overlap of expert communication excludes overlap of shared experts"
    return None


@rule("M28", TC, fix=[overlap_off, {"mtp_num_layers": 1}])
def overlap_allows_one_mtp_layer(c: Any) -> str | None:
    """overlap_moe_expert_parallel_comm with more than one MTP layer (before 0.18: or one MTP
    layer without a pipeline; before 0.19 zero is refused too)."""
    count = c.mtp_num_layers
    if not c.overlap_moe_expert_parallel_comm or count is None:
        return None
    if count != 1 and (count != 0 or c.minor < 19):
        return f"overlap allows one MTP layer, got {count}"
    if count == 1 and c.minor < 18 and c.pipeline_model_parallel_size <= 1:
        return "overlap with an MTP layer needs a pipeline"
    return None


@rule("M29", TC, fix=[overlap_off])
def overlap_needs_new_torch(c: Any) -> str | None:
    """overlap_moe_expert_parallel_comm with torch before 2.6."""
    if c.overlap_moe_expert_parallel_comm and c.torch_version < (2, 6):
        return "overlap hangs with torch before 2.6"
    return None


@rule("M31", TC, fix=[{"delay_wgrad_compute": False}])
def delayed_weight_gradient_needs_overlap(c: Any) -> str | None:
    """delay_wgrad_compute without overlap_moe_expert_parallel_comm."""
    if c.delay_wgrad_compute and not c.overlap_moe_expert_parallel_comm:
        return "delaying weight gradients is part of overlap_moe_expert_parallel_comm"
    return None


@rule("M32", TC, fix=[{"moe_use_legacy_grouped_gemm": False}], until="0.16.1")
def delayed_weight_gradient_excludes_legacy_gemm(c: Any) -> str | None:
    """delay_wgrad_compute with the legacy grouped gemm."""
    if c.delay_wgrad_compute and c.moe_use_legacy_grouped_gemm:
        return "delaying weight gradients does not work with the legacy grouped gemm"
    return None


@rule("M33", TC, fix=[{"delay_wgrad_compute": False}])
def delayed_weight_gradient_in_graphs_needs_te(c: Any) -> str | None:
    """delay_wgrad_compute with transformer_engine graphs and Transformer Engine before 2.10."""
    graphs = c.effective_cuda_graph_impl == "transformer_engine"
    if c.delay_wgrad_compute and graphs and c.te < (2, 10):
        return "delaying weight gradients under graphs needs Transformer Engine 2.10"
    return None


@rule("M34", TC, fix=[{"ep_overlap_early_attn_memory_release": False}])
def early_release_needs_overlap(c: Any) -> str | None:
    """ep_overlap_early_attn_memory_release without overlap_moe_expert_parallel_comm."""
    if c.ep_overlap_early_attn_memory_release and not c.overlap_moe_expert_parallel_comm:
        return "the early release is part of overlap_moe_expert_parallel_comm"
    return None


@rule("M35", TC, fix=[{"overlap_dispatch_backward_with_experts_wgrad": False}], since="0.18.0")
def dispatch_overlap_stands_alone(c: Any) -> str | None:
    """overlap_dispatch_backward_with_experts_wgrad with expert overlap, delayed gradients or
    Transformer Engine before 2.3."""
    if not c.overlap_dispatch_backward_with_experts_wgrad:
        return None
    if c.overlap_moe_expert_parallel_comm or c.delay_wgrad_compute:
        return "choose one overlap: of dispatch with weight gradients or of expert communication"
    if c.te < (2, 3):
        return "overlapping the dispatch needs Transformer Engine 2.3"
    return None


@rule("M49", TC, fix=[overlap_off], since="0.19.2")
def ncclep_overlap_keeps_expert_input(c: Any) -> str | None:
    """overlap_moe_expert_parallel_comm over ncclep with expert_fc1 offloaded."""
    if not c.overlap_moe_expert_parallel_comm or c.moe_token_dispatcher_type != "flex":
        return None
    if c.effective_flex_backend == "ncclep" and "expert_fc1" in c.offloaded:
        return "overlap over ncclep frees the expert input that expert_fc1 would offload"
    return None
