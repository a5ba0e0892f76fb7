"""Kernels of NVIDIA Apex that Megatron-Core's own layers launch, in the containers that have it.

The norm of apex/contrib/layer_norm and apex/normalization, the softmaxes of csrc/megatron, and the
weight gradient added to `main_grad` (csrc/megatron/fused_weight_gradient_dense.cpp).
"""

from __future__ import annotations

from typing import Any

import torch

from tuner.memory import issue
from tuner.memory.recorder import allocate
from tuner.memory.te.base import rows_of
from tuner.memory.te.norm import norm_gradients, statistics


def _normed(ctx: Any, inputs: Any, weight: Any, memory_efficient: bool) -> torch.Tensor:
    """Keeps the input, or to save memory the output, which others keep as well."""
    output = allocate(inputs.shape, inputs.dtype)
    kept = output if memory_efficient else inputs
    ctx.save_for_backward(kept, weight, *statistics(inputs, with_mean=not memory_efficient))
    issue.touched(inputs, output)
    return output


def _norm_gradients(ctx: Any) -> tuple[Any, ...]:
    kept, weight, *_ = ctx.saved_tensors
    return (*norm_gradients(kept, weight, True), *(None,) * (len(ctx.needs_input_grad) - 3))


class _FastLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        epsilon: float,
        memory_efficient: bool = False,
    ) -> torch.Tensor:
        return _normed(ctx, inputs, weight, memory_efficient)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return _norm_gradients(ctx)


class _FusedLayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor,
        normalized_shape: Any,
        epsilon: float,
        memory_efficient: bool = False,
    ) -> torch.Tensor:
        return _normed(ctx, inputs, weight, memory_efficient)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return _norm_gradients(ctx)


def _softmax_forward(inputs: torch.Tensor, *options: Any) -> torch.Tensor:
    result = allocate(inputs.shape, inputs.dtype)
    issue.touched(inputs, result)
    return result


def _softmax_backward(gradient: torch.Tensor, result: torch.Tensor, *options: Any) -> torch.Tensor:
    """Written over the gradient it is given."""
    gradient = gradient.contiguous()
    issue.touched(gradient, gradient, result)
    return gradient


def _rows_per_block(queries: int, keys: int, batches: int, heads: int) -> int:
    """csrc/megatron/scaled_masked_softmax.h `get_batch_per_block`: rows of scores in one block."""
    width = 1 << max(0, keys - 1).bit_length()
    lanes = min(width, 32)
    return 128 // lanes * (2 if width <= 128 else 1)


def _weight_gradient(inputs: torch.Tensor, gradient: torch.Tensor, main_grad: torch.Tensor) -> None:
    width, depth = gradient.shape[-1], inputs.shape[-1]
    written = 2 * main_grad.element_size()
    issue.gemm(width, depth, rows_of(inputs), inputs.dtype, output_bytes=written)


_SOFTMAX = {"forward": _softmax_forward, "backward": _softmax_backward}

MODULES: dict[str, dict[str, Any]] = {
    "apex": {},
    "apex.contrib": {},
    "apex.contrib.layer_norm": {},
    "apex.contrib.layer_norm.layer_norm": {"FastLayerNormFN": _FastLayerNorm},
    "apex.normalization": {},
    "apex.normalization.fused_layer_norm": {"FusedLayerNormAffineFunction": _FusedLayerNorm},
    "scaled_softmax_cuda": _SOFTMAX,
    "scaled_masked_softmax_cuda": _SOFTMAX | {"get_batch_per_block": _rows_per_block},
    "scaled_upper_triang_masked_softmax_cuda": _SOFTMAX,
    "fused_weight_gradient_mlp_cuda": {
        "wgrad_gemm_accum_fp32": _weight_gradient,
        "wgrad_gemm_accum_fp16": _weight_gradient,
    },
}
"""Names of every module, by module."""
