"""Low precision: fp16, fp8 and fp4."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.constraints.registry import UNCHANGED, rewrite, rule
from tuner.constraints.rules import TRANSFORMER_CONFIG as TC

FP8_OFF: Mapping[str, object] = {"fp8": None}
FP4_OFF: Mapping[str, object] = {"fp4": None}


@rule("F01", TC, fix=[{"fp16": False}])
def one_half_precision(c: Any) -> str | None:
    """fp16 and bf16 both on."""
    if c.fp16 and c.bf16:
        return "fp16 and bf16 exclude each other"
    return None


@rule("F02", TC, fix=[{"fp8_param": False}, {"fp8": "hybrid"}])
def fp8_parameters_need_fp8(c: Any) -> str | None:
    """fp8_param without fp8."""
    if c.fp8_param and not c.fp8:
        return "fp8_param keeps parameters in fp8, so fp8 must be on"
    return None


@rule("F03", TC, fix=[{"fp4_param": False}])
def fp4_parameters_need_fp4(c: Any) -> str | None:
    """fp4_param without fp4."""
    if c.fp4_param and not c.fp4:
        return "fp4_param keeps parameters in fp4, so fp4 must be on"
    return None


@rule("F04", TC, fix=[FP4_OFF, FP8_OFF])
def one_low_precision(c: Any) -> str | None:
    """fp4 and fp8 both on."""
    if c.fp4 and c.fp8:
        return "fp4 and fp8 exclude each other"
    return None


@rule("F05", TC, fix=[{"first_last_layers_bf16": False}, {"fp8_recipe": "tensorwise"}])
def delayed_scaling_covers_all_layers(c: Any) -> str | None:
    """first_last_layers_bf16 with the delayed recipe."""
    if c.fp8 and c.first_last_layers_bf16 and c.fp8_recipe == "delayed":
        return "the delayed recipe cannot leave the first and last layers in bf16"
    return None


def _bf16_layers(c: Any) -> Mapping[str, object]:
    most = c.num_layers // c.pipeline_model_parallel_size
    names = ("num_layers_at_start_in_bf16", "num_layers_at_end_in_bf16")
    return {n: min(1, most) for n in names if not 0 <= getattr(c, n) <= most}


@rule("F06", TC, fix=[_bf16_layers, {"first_last_layers_bf16": False}])
def bf16_end_layers_fit_a_stage(c: Any) -> str | None:
    """Layers kept in bf16 are negative or more than a pipeline stage has."""
    if not c.fp8 or not c.first_last_layers_bf16:
        return None
    most = c.num_layers // c.pipeline_model_parallel_size
    for name in ("start", "end"):
        count = c.num_layers_at_start_in_bf16 if name == "start" else c.num_layers_at_end_in_bf16
        if not 0 <= count <= most:
            return f"0 to {most} layers at the {name} can stay in bf16, got {count}"
    return None


@rule("F07", TC, fix=[{"fp8_recipe": "tensorwise"}])
def custom_fp8_needs_factory(c: Any) -> str | None:
    """fp8_recipe custom without fp8_quantizer_factory."""
    if c.fp8 and c.fp8_recipe == "custom" and not c.fp8_quantizer_factory:
        return "the custom fp8 recipe needs fp8_quantizer_factory"
    return None


@rule("F07", TC, fix=[{"fp4_recipe": "nvfp4"}])
def custom_fp4_needs_factory(c: Any) -> str | None:
    """fp4_recipe custom without fp4_quantizer_factory."""
    if c.fp4 and c.fp4_recipe == "custom" and not c.fp4_quantizer_factory:
        return "the custom fp4 recipe needs fp4_quantizer_factory"
    return None


@rule("F08", TC, fix=[FP8_OFF])
def fp8_experts_need_te(c: Any) -> str | None:
    """Experts in fp8 with Transformer Engine before 1.7 (grouped gemm: 1.11), or without it."""
    if not c.num_moe_experts or not c.fp8:
        return None
    if c.te < (1, 7):
        return "fp8 experts need Transformer Engine 1.7"
    if c.moe_grouped_gemm and c.te < (1, 11):
        return "fp8 grouped gemm needs Transformer Engine 1.11"
    return None


@rule("F10", TC, fix=[{"fp8_output_proj": False}], since="0.18.0")
def fp8_output_projection_needs_mxfp8(c: Any) -> str | None:
    """fp8_output_proj without fp8 or with a recipe other than mxfp8."""
    if c.fp8_output_proj and not c.fp8:
        return "fp8_output_proj needs fp8"
    if c.fp8_output_proj and c.fp8_recipe != "mxfp8":
        return f"fp8_output_proj needs fp8_recipe mxfp8, got {c.fp8_recipe}"
    return None


@rule(
    "F15",
    TC,
    fix=[{"moe_router_padding_for_quantization": False, "moe_router_padding_for_fp8": False}],
)
def padded_routing_needs_low_precision(c: Any) -> str | None:
    """moe_router_padding_for_quantization without fp8 or fp4."""
    padded = c.moe_router_padding_for_quantization or c.moe_router_padding_for_fp8
    if padded and c.fp8 is None and c.fp4 is None:
        return "padding tokens for quantisation needs fp8 or fp4"
    return None


@rule(
    "F16",
    TC,
    fix=[
        {"moe_token_dispatcher_type": "alltoall"},
        {"moe_router_padding_for_quantization": False, "moe_router_padding_for_fp8": False},
    ],
)
def padded_routing_needs_alltoall(c: Any) -> str | None:
    """moe_router_padding_for_quantization with the allgather or alltoall_seq dispatcher."""
    padded = c.moe_router_padding_for_quantization or c.moe_router_padding_for_fp8
    if padded and c.moe_token_dispatcher_type in ("allgather", "alltoall_seq"):
        return f"the {c.moe_token_dispatcher_type} dispatcher cannot pad tokens for quantisation"
    return None


@rewrite("F17", "moe_router_padding_for_quantization", TC)
def old_padding_switch_sets_new(c: Any) -> object:
    """moe_router_padding_for_fp8 (deprecated) sets moe_router_padding_for_quantization."""
    return True if c.moe_router_padding_for_fp8 else UNCHANGED


@rewrite("F18", "pipeline_dtype", TC, since="0.17.0")
def residual_in_fp32_sets_pipeline_dtype(c: Any) -> object:
    """fp32_residual_connection makes stages exchange fp32 activations (twice the traffic)."""
    if c.fp32_residual_connection and c.pipeline_dtype is not None:
        return "fp32"
    return UNCHANGED


@rule("F19", TC, fix=[{"activation_func_fp8_input_store": False}])
def fp8_activation_input_needs_swiglu(c: Any) -> str | None:
    """activation_func_fp8_input_store with an activation other than SwiGLU."""
    swiglu = c.activation_func in ("silu", "swiglu") and c.gated_linear_unit
    if c.activation_func_fp8_input_store and not swiglu:
        return "only SwiGLU can keep its input in fp8"
    return None
