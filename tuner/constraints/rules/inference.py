"""Restrictions of the inference-optimized layers and of symmetric-memory reductions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.constraints.registry import rule
from tuner.constraints.rules import TRANSFORMER_CONFIG as TC

_TRAINING: Mapping[str, object] = {"transformer_impl": "transformer_engine"}


@rule("E14", TC, fix=[_TRAINING])
def inference_layers_are_plain(c: Any) -> str | None:
    """inference_optimized layers with another norm, biases or kitchen."""
    if c.transformer_impl != "inference_optimized":
        return None
    if c.normalization != "RMSNorm" or c.layernorm_zero_centered_gamma:
        return "inference-optimized layers need plain RMSNorm"
    if c.add_bias_linear or c.add_qkv_bias or c.use_kitchen:
        return "inference-optimized layers have no bias and no kitchen extensions"
    return None


@rule("E14", TC, fix=[_TRAINING], since="0.17.0")
def inference_experts_are_plain(c: Any) -> str | None:
    """inference_optimized experts with capacity, padding, ETP, a router dtype other than fp32."""
    if c.transformer_impl != "inference_optimized" or c.num_moe_experts is None:
        return None
    if c.effective_expert_tensor_parallel_size > 1:
        return "inference-optimized experts are not split over tensor ranks"
    if c.moe_expert_capacity_factor is not None or c.moe_router_padding_for_quantization:
        return "inference-optimized experts neither drop nor pad tokens"
    if c.moe_router_dtype != "fp32":
        return "inference-optimized experts need moe_router_dtype fp32"
    if c.gated_linear_unit and (c.minor >= 18 or c.cuda_graph_impl == "local"):
        return "inference-optimized experts do not support gated linear units here"
    backends = ("auto", "torch", "te") if c.minor == 17 else ("flashinfer", "torch", "vllm")
    if c.inference_grouped_gemm_backend not in backends:
        return f"inference_grouped_gemm_backend must be one of {', '.join(backends)}"
    if c.minor == 17 and c.cuda_graph_impl == "local" and c.inference_grouped_gemm_backend == "te":
        return "the te grouped gemm of inference cannot be captured"
    return None


@rule("E14", TC, fix=[{"inference_fuse_tp_communication": False}])
def fused_inference_communication_needs_inference_layers(c: Any) -> str | None:
    """inference_fuse_tp_communication without inference_optimized layers, or with experts."""
    if not c.inference_fuse_tp_communication:
        return None
    if c.transformer_impl != "inference_optimized":
        return "inference_fuse_tp_communication needs transformer_impl inference_optimized"
    if c.minor >= 17 and c.num_moe_experts is not None:
        return "inference_fuse_tp_communication does not support experts"
    return None


@rule("E14", TC, fix=[{"inference_disable_triton_nvls_kernels": False}], since="0.17.0")
def inference_kernels_need_inference_layers(c: Any) -> str | None:
    """inference_disable_triton_nvls_kernels without inference_optimized layers."""
    if c.inference_disable_triton_nvls_kernels and c.transformer_impl != "inference_optimized":
        return "inference_disable_triton_nvls_kernels needs transformer_impl inference_optimized"
    return None


@rule("E19", TC, fix=[{"symmetric_ar_type": None}])
def symmetric_reduction_needs_new_packages(c: Any) -> str | None:
    """symmetric_ar_type with torch before 2.7 or Transformer Engine before 2.3."""
    if c.symmetric_ar_type is not None and (c.torch_version < (2, 7) or c.te < (2, 3)):
        return "symmetric-memory reductions need torch 2.7 and Transformer Engine 2.3"
    return None
