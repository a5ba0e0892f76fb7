"""Gated-delta-rule kernels of the package fla (flash-linear-attention) for Megatron-Core.

Read from fla 0.4.0: ops/gated_delta_rule/chunk.py (`ChunkGatedDeltaRuleFunction`) and
modules/l2norm.py. The rule keeps query, key, value, decay, step and the inverse of each chunk's
triangular system; backward computes the states of all chunks again.
"""

from __future__ import annotations

from typing import Any

import torch

from tuner.memory import issue
from tuner.memory.recorder import allocate

_CHUNK = 64
"""Tokens of a chunk (`chunk_local_cumsum(..., chunk_size=64)`)."""


class _DeltaRule(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        decay: torch.Tensor,
        step: torch.Tensor,
    ) -> torch.Tensor:
        summed = allocate(decay.shape, torch.float32)
        system = allocate((*key.shape[:3], _CHUNK), torch.float32)
        inverse = allocate((*key.shape[:3], _CHUNK), key.dtype)
        del system
        states = _states(key, value)
        output = allocate(value.shape, value.dtype)
        _record(key, value, forward=True)
        del states
        ctx.save_for_backward(query, key, value, summed, step, inverse)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        _, key, value, decay, step, _ = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        states = _states(key, value)
        value_parts = [allocate(value.shape, value.dtype) for _ in range(2)]
        state_gradients = allocate(_state_shape(key, value), value.dtype)
        query_gradient, key_gradient, mapped = (allocate(key.shape, key.dtype) for _ in range(3))
        decay_gradient = allocate(decay.shape, torch.float32)
        key_part = allocate(key.shape, key.dtype)
        value_gradient = allocate(value.shape, value.dtype)
        decay_part = allocate(decay.shape, torch.float32)
        step_gradient = allocate(step.shape, step.dtype)
        _record(key, value, forward=False)
        del states, value_parts, state_gradients, mapped, key_part, decay_part, gradient
        summed = allocate(decay.shape, torch.float32)
        del decay_gradient
        return query_gradient, key_gradient, value_gradient, summed, step_gradient


def _state_shape(key: torch.Tensor, value: torch.Tensor) -> tuple[int, ...]:
    """One state `[key width, value width]` for each sequence, chunk and head."""
    batch, length, heads, width = key.shape
    return (batch, -(-length // _CHUNK), heads, width, value.shape[-1])


def _states(key: torch.Tensor, value: torch.Tensor) -> list[torch.Tensor]:
    """Transformed keys and values, states before each chunk, and corrected values."""
    return [
        allocate(key.shape, key.dtype),
        allocate(value.shape, value.dtype),
        allocate(_state_shape(key, value), key.dtype),
        allocate(value.shape, value.dtype),
    ]


def _record(key: torch.Tensor, value: torch.Tensor, *, forward: bool) -> None:
    """The products of one pass: within chunks, and of chunks with states."""
    batch, length, heads, width = key.shape
    chunks = batch * heads * -(-length // _CHUNK)
    depth = value.shape[-1]
    for _ in range(1 if forward else 2):
        issue.gemm(_CHUNK, _CHUNK, width, key.dtype, batch=2 * chunks)
        issue.gemm(_CHUNK, width, _CHUNK, key.dtype, batch=chunks)
        issue.gemm(_CHUNK, depth, _CHUNK, key.dtype, batch=2 * chunks)
        issue.gemm(_CHUNK, depth, width, key.dtype, batch=2 * chunks)
        issue.gemm(width, depth, _CHUNK, key.dtype, batch=chunks)
        issue.touched(key, key, value, value)


def chunk_gated_delta_rule(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    g: torch.Tensor,
    beta: torch.Tensor,
    **options: Any,
) -> tuple[torch.Tensor, None]:
    """The rule over `[b, s, heads, width]`; no final state is asked for."""
    return _DeltaRule.apply(q, k, v, g, beta), None


class _Normalize(torch.autograd.Function):
    """L2 norm of the last axis: keeps its result and one statistic for each row."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor) -> torch.Tensor:
        output = allocate(inputs.shape, inputs.dtype)
        ctx.save_for_backward(output, allocate(inputs.shape[:-1], torch.float32))
        issue.touched(inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        output, _ = ctx.saved_tensors
        result = allocate(output.shape, output.dtype)
        issue.touched(output, gradients[0], result)
        return result


def l2norm(x: torch.Tensor, **options: Any) -> torch.Tensor:
    result: torch.Tensor = _Normalize.apply(x)
    return result


class _Convolution(torch.autograd.Function):
    """Causal convolution with its activation over `[b, s, d]`: keeps the input."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        inputs = inputs.contiguous()
        output = allocate(inputs.shape, inputs.dtype)
        ctx.save_for_backward(inputs, weight, bias)
        issue.touched(inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        inputs, weight, bias = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        before_activation = allocate(inputs.shape, inputs.dtype)
        result = allocate(inputs.shape, inputs.dtype)
        issue.touched(inputs, gradient, before_activation, result)
        del before_activation
        bias_gradient = None if bias is None else allocate(bias.shape, bias.dtype)
        return result, allocate(weight.shape, weight.dtype), bias_gradient


def causal_conv1d(
    x: torch.Tensor, weight: torch.Tensor, bias: Any = None, **options: Any
) -> tuple[torch.Tensor, None]:
    return _Convolution.apply(x, weight, bias), None


def modules() -> dict[str, dict[str, Any]]:
    """Names of every module of the stand-in, by module."""
    return {
        "fla": {"__version__": "0.4.0"},
        "fla.modules": {},
        "fla.modules.convolution": {"causal_conv1d": causal_conv1d},
        "fla.modules.l2norm": {"l2norm": l2norm},
        "fla.ops": {},
        "fla.ops.gated_delta_rule": {"chunk_gated_delta_rule": chunk_gated_delta_rule},
    }
