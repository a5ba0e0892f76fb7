"""Rotary embedding and the split of mixed projections (pytorch/attention/rope.py, utils.py)."""

from __future__ import annotations

from typing import Any

import torch

from tuner.memory import issue
from tuner.memory.recorder import allocate


class SplitAlongDim(torch.autograd.Function):
    """Views forward, one joined gradient backward."""

    @staticmethod
    def forward(
        ctx: Any, mixed: torch.Tensor, dim: int, sizes: Any, squeeze: bool = False
    ) -> tuple[torch.Tensor, ...]:
        ctx.dim = dim
        return tuple(torch.split(mixed, sizes, dim=dim))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        if len({id(gradient.untyped_storage()) for gradient in gradients}) == 1:
            # Gradients that lie side by side already are joined without a copy.
            shape = list(gradients[0].shape)
            shape[ctx.dim] = sum(gradient.shape[ctx.dim] for gradient in gradients)
            joined = gradients[0].as_strided(shape, _contiguous_strides(shape), 0)
            return joined, None, None, None
        return torch.cat(gradients, dim=ctx.dim), None, None, None


def _contiguous_strides(shape: list[int]) -> list[int]:
    strides, step = [], 1
    for size in reversed(shape):
        strides.append(step)
        step *= size
    return strides[::-1]


class _FusedRotary(torch.autograd.Function):
    """Rotary embedding in one kernel: keeps the frequencies alone."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, frequencies: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(frequencies)
        issue.touched(tensor, tensor)
        return allocate(tensor.shape, tensor.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        issue.touched(gradients[0], gradients[0])
        return allocate(gradients[0].shape, gradients[0].dtype), None


def apply_rotary_pos_emb(
    tensor: torch.Tensor, freqs: torch.Tensor, *args: Any, **options: Any
) -> torch.Tensor:
    result: torch.Tensor = _FusedRotary.apply(tensor, freqs)
    return result
