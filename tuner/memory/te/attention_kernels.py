"""What each attention backend keeps (pytorch/attention/dot_product_attention/backends.py).

Fused (cuDNN) and flash attention keep query, key, value, output and the log-sum-exp of each query
row in float32. Unfused attention keeps the softmax and, with dropout, its mask and result, each
as large as all scores. All take `[s, b, heads, d]` and give `[s, b, heads * d]`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from tuner.memory import issue
from tuner.memory.recorder import allocate
from tuner.memory.te.offload import mark_activation_offload
from tuner.memory.te.offload_layers import offload_with_base


@dataclass(frozen=True, slots=True)
class Mask:
    """Which keys a query sees: all, those before it, or those in a window around it.

    `ranks` that split heads after an all-to-all each see whole sequences of that share of heads.
    """

    causal: bool = True
    window: tuple[int, int] | None = None
    ranks: int = 1

    def pairs(self, queries: int, keys: int) -> float:
        """Pairs of query and key that meet, the diagonal's half left out."""
        if self.window is not None and -1 not in self.window and sum(self.window) + 1 < keys:
            width = sum(self.window) + 1
            return width * queries - width * (width - 1) / 2
        return queries * keys * (0.5 if self.causal else 1.0)


def record(
    forward: bool,
    query: Any,
    key: Any,
    value: Any,
    mask: Mask,
    *,
    rows: int = 0,
    pairs: float = 0,
    recipe: Any = None,
) -> None:
    """Record the kernel on tensors of `[.., heads, d]` whose dimension `rows` is the sequence.

    `pairs` are those that meet in one head of one sequence where the mask does not say.
    """
    queries, keys = query.shape[rows] * mask.ranks, key.shape[rows] * mask.ranks
    heads = query.shape[1 - rows] * query.shape[2] / mask.ranks
    passes = 1 if forward else 2  # each tensor, and in backward also its gradient
    issue.attention(
        forward,
        query_rows=queries,
        key_rows=keys,
        pairs=pairs or mask.pairs(queries, keys),
        heads=round(heads),
        query_width=query.shape[-1],
        value_width=value.shape[-1],
        dtype=query.dtype,
        recipe=recipe,
        moved_bytes=passes * (issue.size_of([query, key, value]) + _output_bytes(query, value)),
    )


def _output_bytes(query: torch.Tensor, value: torch.Tensor) -> int:
    return query.numel() // query.shape[-1] * value.shape[-1] * query.element_size()


def fused_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    sink: Any,
    interleaved: bool,
    mask: Mask,
) -> torch.Tensor:
    """cuDNN; `interleaved` says that the three are slices of one tensor."""
    output: torch.Tensor = _Fused.apply(query, key, value, sink, interleaved, mask)
    return output.reshape(*output.shape[:-2], -1)


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sink: torch.Tensor | None,
        interleaved: bool,
        mask: Mask,
    ) -> torch.Tensor:
        output = allocate((*query.shape[:-1], value.shape[-1]), query.dtype)
        statistics = _statistics(query)
        mark_activation_offload(query, key, value, output, *statistics)
        offload_with_base(query, key, value)
        ctx.save_for_backward(query, key, value, output, *statistics, sink)
        ctx.interleaved, ctx.mask = interleaved, mask
        record(True, query, key, value, mask)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, *_, sink = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        sink_gradient = None if sink is None else allocate(sink.shape, sink.dtype)
        if ctx.interleaved:
            shape = (*query.shape[:-1], 3, query.shape[-1])
            parts = allocate(shape, query.dtype).unbind(-2)
        else:
            parts = tuple(allocate(part.shape, part.dtype) for part in (query, key, value))
        record(False, query, key, value, ctx.mask)
        del gradient
        return (*parts, sink_gradient, None, None)


def _statistics(query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-sum-exp of every row and the state of the random generator."""
    rows = query.numel() // query.shape[-1]
    return allocate((rows,), torch.float32), allocate((2,), torch.int64)


def flash_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Mask
) -> torch.Tensor:
    """flash-attn 2: works on `[b, s, heads, d]`, so the output is copied back unless b is 1."""
    length, batch = query.shape[:2]
    output: torch.Tensor = _Flash.apply(
        query.transpose(0, 1), key.transpose(0, 1), value.transpose(0, 1), mask
    )
    return output.view(batch, length, -1).transpose(0, 1).contiguous()


class _Flash(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Mask
    ) -> torch.Tensor:
        output = allocate((*query.shape[:-1], value.shape[-1]), query.dtype)
        statistics = _statistics(query)
        mark_activation_offload(query, key, value, output, *statistics)
        offload_with_base(query, key, value)
        ctx.save_for_backward(query, key, value, output, *statistics)
        ctx.mask = mask
        record(True, query, key, value, mask, rows=1)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, *_ = ctx.saved_tensors
        heads = query.shape[2]
        parts = [allocate(part.shape, part.dtype) for part in (query, key, value)]
        # flash_attn csrc/flash_attn/flash_api.cpp `mha_bwd`: the gradient of the query is summed
        # in float32, and key and value gradients are made for each query head first.
        wide = allocate(query.shape, torch.float32)
        rows = allocate((query.numel() // query.shape[-1],), torch.float32)
        expanded = [
            allocate((*part.shape[:2], heads, part.shape[-1]), part.dtype)
            for part in (key, value)
            if part.shape[2] != heads
        ]
        record(False, query, key, value, ctx.mask, rows=1)
        del wide, rows, expanded
        return (*parts, None)


def unfused_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float
) -> torch.Tensor:
    """PyTorch's matrix products around one softmax kernel."""
    length, batch, heads, _ = query.shape
    keys = key.shape[0]
    if key.shape[2] != heads:
        repeats = heads // key.shape[2]
        key, value = (part.repeat_interleave(repeats, dim=2) for part in (key, value))
    query = query.reshape(length, batch * heads, -1)
    key = key.reshape(keys, batch * heads, -1)
    scores = torch.empty(batch * heads, length, keys, dtype=query.dtype, device=query.device)
    scores = torch.baddbmm(
        scores, query.transpose(0, 1), key.transpose(0, 1).transpose(1, 2), beta=0.0
    ).view(batch, heads, length, keys)
    probabilities = _Softmax.apply(scores)
    del scores
    probabilities = torch.nn.functional.dropout(probabilities, dropout, training=True)
    value = value.reshape(keys, batch * heads, -1)
    context = torch.bmm(probabilities.view(batch * heads, length, keys), value.transpose(0, 1))
    context = context.view(batch, heads, length, -1).permute(2, 0, 1, 3).contiguous()
    return context.view(length, batch, -1)


class _Softmax(torch.autograd.Function):
    """Scaled and masked softmax in one kernel (softmax.py); keeps its result."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor) -> torch.Tensor:
        result = allocate(scores.shape, scores.dtype)
        ctx.save_for_backward(result)
        issue.touched(scores, result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        issue.touched(gradients[0], gradients[0], *ctx.saved_tensors)
        return gradients[0]  # written in place
