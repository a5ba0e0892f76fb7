"""Attention that computes in FP8 (`FusedAttnFunc` under a recipe with `fp8_dpa`).

Query, key and value are quantised into one buffer, by rows alone, and kept as such. Delayed scaling
writes and keeps the output in FP8 too, current scaling in the type of the query (its default,
NVTE_DPA_FP8CS_O_in_F16). Kept of the softmax are maximum and sum of each query row.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from tuner.memory import issue
from tuner.memory.recorder import allocate
from tuner.memory.te import quantize
from tuner.memory.te.attention_kernels import Mask, record
from tuner.memory.te.offload import mark_activation_offload
from tuner.memory.te.recipes import Recipe


def fp8_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, interleaved: bool, mask: Mask
) -> torch.Tensor:
    """cuDNN in FP8 on `[s, b, heads, d]`, in the current recipe; gives `[s, b, heads * d]`."""
    recipe = quantize.current_recipe()
    output: torch.Tensor = _Attention.apply(query, key, value, interleaved, mask, recipe)
    return output.reshape(*output.shape[:-2], -1)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        interleaved: bool,
        mask: Mask,
        recipe: Recipe,
    ) -> torch.Tensor:
        parts = (query, key, value)
        copy = _quantized(parts, interleaved)
        shape = (*query.shape[:-1], value.shape[-1])
        kept = output = allocate(shape, torch.uint8 if recipe.delayed() else query.dtype)
        rows = query.numel() // query.shape[-1]
        statistics = [allocate((rows,), torch.float32) for _ in range(2)]
        statistics.append(allocate((2,), torch.int64))
        if recipe.delayed():
            output = allocate(shape, query.dtype)
            issue.touched(kept, output)
        mark_activation_offload(copy, kept, *statistics)
        ctx.save_for_backward(copy, kept, *statistics)
        ctx.shapes = [part.shape for part in parts]
        ctx.dtype, ctx.interleaved, ctx.mask, ctx.recipe = query.dtype, interleaved, mask, recipe
        record(True, *parts, mask, recipe=recipe)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        gradient = gradients[0].contiguous()
        low = allocate(gradient.shape, torch.uint8)
        issue.touched(gradient, low, kind="quantize")
        query, key, value = (
            torch.empty(shape, dtype=ctx.dtype, device="meta") for shape in ctx.shapes
        )
        record(False, query, key, value, ctx.mask, recipe=ctx.recipe)
        if not ctx.recipe.delayed():
            if ctx.interleaved:
                shape = (*ctx.shapes[0][:-1], 3, ctx.shapes[0][-1])
                return (*allocate(shape, ctx.dtype).unbind(-2), None, None, None)
            return (*(allocate(shape, ctx.dtype) for shape in ctx.shapes), None, None, None)
        sizes = [math.prod(shape) for shape in ctx.shapes]
        grads = [allocate(shape, torch.uint8) for shape in ctx.shapes]
        joined = None if ctx.interleaved else allocate((sum(sizes),), torch.uint8)
        whole = allocate((sum(sizes),), ctx.dtype)
        issue.touched(whole, *grads)
        del grads, joined
        if ctx.interleaved:
            shape = (*ctx.shapes[0][:-1], 3, ctx.shapes[0][-1])
            return (*whole.view(shape).unbind(-2), None, None, None)
        split = whole.split(sizes)
        views = [part.view(shape) for part, shape in zip(split, ctx.shapes, strict=True)]
        return (*views, None, None, None)


def _quantized(parts: tuple[torch.Tensor, ...], interleaved: bool) -> torch.Tensor:
    """One low-precision buffer of query, key and value (`combine_and_quantize`).

    Those that are not slices of one tensor already are joined first.
    """
    size = sum(part.numel() for part in parts)
    joined = None if interleaved else allocate((size,), parts[0].dtype)
    copy = allocate((size,), torch.uint8)
    issue.touched(*parts, copy, kind="quantize")
    del joined
    return copy
