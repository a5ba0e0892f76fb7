"""Fused attention (pytorch/attention/dot_product_attention/backends.py, rope.py).

Kept for backward: query, key, value and output of this rank, and the log-sum-exp of each query
row in float32. The layout rules are those of `get_qkv_layout`: inputs that are no supported view
of one another are copied to be contiguous.
"""

from __future__ import annotations

from typing import Any

import torch

from tuner.memory.errors import UnsupportedError
from tuner.memory.recorder import allocate
from tuner.memory.te.base import group_size, new_parameter


class _FusedAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sink: torch.Tensor | None,
        interleaved: bool,
    ) -> torch.Tensor:
        output = allocate((*query.shape[:-1], value.shape[-1]), query.dtype)
        rows = query.numel() // query.shape[-1]
        log_sum_exp = allocate((rows,), torch.float32)
        random_state = allocate((2,), torch.int64)
        ctx.save_for_backward(query, key, value, output, log_sum_exp, random_state, sink)
        ctx.interleaved = interleaved
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, *_, sink = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        sink_gradient = None if sink is None else allocate(sink.shape, sink.dtype)
        if ctx.interleaved:
            shape = (*query.shape[:-1], 3, query.shape[-1])
            parts = allocate(shape, query.dtype).unbind(-2)
            return (*parts, sink_gradient, None)
        parts = tuple(allocate(part.shape, part.dtype) for part in (query, key, value))
        del gradient
        return (*parts, sink_gradient, None)


class DotProductAttention(torch.nn.Module):
    """Attention over `[s, b, heads, d]` (or packed `[t, heads, d]`) query, key and value."""

    cp_stream = None

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        tp_size: int = 1,
        cp_group: Any = None,
        cp_comm_type: str = "p2p",
        softmax_type: str = "vanilla",
        params_dtype: torch.dtype = torch.bfloat16,
        **options: Any,
    ) -> None:
        super().__init__()
        self.attention_dropout = attention_dropout
        self.cp_comm_type = cp_comm_type
        self.cp_size = 1
        if isinstance(cp_group, list):
            raise UnsupportedError(
                "hierarchical context parallelism is not modelled", field="cp_comm_type"
            )
        self.set_context_parallel_group(cp_group, None, None, cp_comm_type)
        self.softmax_offset = None
        if softmax_type == "learnable":
            heads = num_attention_heads // tp_size
            self.softmax_offset = new_parameter((1, heads, 1, 1), torch.float32)

    def set_context_parallel_group(
        self, group: Any, ranks: Any, stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        self.cp_size = group_size(group)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        **options: Any,
    ) -> torch.Tensor:
        interleaved = _is_interleaved(query, key, value)
        if not interleaved:
            query, key, value = (part.contiguous() for part in (query, key, value))
        output: torch.Tensor = _FusedAttention.apply(
            query, key, value, self.softmax_offset, interleaved
        )
        return output.reshape(*output.shape[:-2], -1)


def _is_interleaved(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the three are slices of one `[..., heads, 3, d]` tensor (the layout `sbh3d`)."""
    parts = (query, key, value)
    width = query.shape[-1]
    return (
        all(part.shape == query.shape and part.stride() == query.stride() for part in parts)
        and all(part.storage_offset() == i * width for i, part in enumerate(parts))
        and len({id(part.untyped_storage()) for part in parts}) == 1
    )


class SplitAlongDim(torch.autograd.Function):
    """pytorch/utils.py: views forward, one joined gradient backward."""

    @staticmethod
    def forward(
        ctx: Any, mixed: torch.Tensor, dim: int, sizes: Any, squeeze: bool = False
    ) -> tuple[torch.Tensor, ...]:
        ctx.dim = dim
        return tuple(torch.split(mixed, sizes, dim=dim))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        if len({id(gradient.untyped_storage()) for gradient in gradients}) == 1:
            whole = sum(gradient.shape[ctx.dim] for gradient in gradients)
            shape = list(gradients[0].shape)
            shape[ctx.dim] = whole
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
        return allocate(tensor.shape, tensor.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        gradient = gradients[0]
        return allocate(gradient.shape, gradient.dtype), None


def apply_rotary_pos_emb(
    tensor: torch.Tensor, freqs: torch.Tensor, *args: Any, **options: Any
) -> torch.Tensor:
    result: torch.Tensor = _FusedRotary.apply(tensor, freqs)
    return result
