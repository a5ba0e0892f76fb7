"""Attention over a sequence that lies on several ranks.

From pytorch/attention/dot_product_attention/context_parallel.py: keys and values go around a ring,
or are gathered, or an all-to-all turns a part of the sequence of all heads into all of it for a
part of the heads. The hierarchical way does the last in small groups and a ring between them. All
take `[s, b, heads, d]` of this rank and give `[s, b, heads * d]`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tuner.memory import issue
from tuner.memory.recorder import allocate
from tuner.memory.te.attention_kernels import Mask, fused_attention, record
from tuner.memory.te.base import group_size


def exchanged_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, sink: Any, group: Any, mask: Mask
) -> torch.Tensor:
    """Whole sequences of fewer heads ("a2a"): as many elements, in new tensors."""
    query, key, value = (_Exchange.apply(part, group) for part in (query, key, value))
    mask = replace(mask, ranks=group_size(group))
    output: torch.Tensor = _Exchange.apply(
        fused_attention(query, key, value, sink, False, mask), group
    )
    return output


def hierarchical_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, groups: list[Any], mask: Mask
) -> torch.Tensor:
    """All-to-all in the first of `groups`, a ring over the second ("a2a+p2p")."""
    inner, outer = groups
    query, key, value = (_Exchange.apply(part, inner) for part in (query, key, value))
    mask = replace(mask, ranks=group_size(inner))
    output: torch.Tensor = _Exchange.apply(ring_attention(query, key, value, outer, mask), inner)
    return output


class _Exchange(torch.autograd.Function):
    """An all-to-all: a new tensor of the same size, forward and backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, group: Any) -> torch.Tensor:
        ctx.group = group
        return _exchanged(tensor, group)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return _exchanged(gradients[0], ctx.group), None


def _exchanged(tensor: torch.Tensor, group: Any) -> torch.Tensor:
    issue.touched(tensor, tensor, kind="permute")  # in the order of the ranks, and back
    issue.collective("all_to_all", issue.size_of([tensor]), group)
    return allocate(tensor.shape, tensor.dtype)


def gathered_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: Any, mask: Mask
) -> torch.Tensor:
    """Each rank gathers all keys and values ("all_gather")."""
    output: torch.Tensor = _Gathered.apply(query, key, value, group, mask)
    return output.reshape(*output.shape[:-2], -1)


def _key_ranges(rank: int, ranks: int, half: int, mask: Mask) -> list[tuple[int, int]]:
    """Keys that each half of this rank's queries reads (`get_kv_seq_info_after_all_gather`).

    Rank r holds parts r and 2 n - 1 - r of a sequence in 2 n parts, so that work is even.
    """
    left, right = mask.window or ((-1, 0) if mask.causal else (-1, -1))
    whole = 2 * ranks * half
    found = []
    for part in (rank, 2 * ranks - 1 - rank):
        end = (part + 1) * half
        stop = whole if right == -1 else min(whole, end + right)
        found.append((0 if left == -1 else max(0, end - half - left), stop))
    return found


class _Gathered(torch.autograd.Function):
    """Keeps query, key and value of this rank, and the output of each half apart from the whole."""

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: Any,
        mask: Mask,
    ) -> torch.Tensor:
        ctx.group, ctx.mask = group, mask
        half = query.shape[0] // 2
        ctx.ranges = _key_ranges(torch.distributed.get_rank(group), group_size(group), half, mask)
        everywhere = _gathered((key, value), group)
        output = allocate((*query.shape[:-1], value.shape[-1]), query.dtype)
        kept = []
        for start, stop in ctx.ranges:
            kept.append(allocate((half, *output.shape[1:]), output.dtype))
            kept.append(allocate((half * query.shape[1] * query.shape[2],), torch.float32))
            kept.append(allocate((2,), torch.int64))
            _record_half(True, query, (key, value), stop - start, mask)
            issue.touched(kept[-3], kept[-3])  # into its place in the whole
        ctx.save_for_backward(query, key, value, *kept)
        del everywhere
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        query, key, value, *_ = ctx.saved_tensors
        group = ctx.group
        query_gradient = allocate(query.shape, query.dtype)
        whole = [_whole(part, group) for part in (key, value)]
        issue.touched(*whole)  # set to zero
        everywhere = _gathered((key, value), group)
        halves = []
        for start, stop in ctx.ranges:
            halves.append(allocate((query.shape[0] // 2, *query.shape[1:]), query.dtype))
            halves += [allocate((stop - start, *part.shape[1:]), part.dtype) for part in whole]
            _record_half(False, query, (key, value), stop - start, ctx.mask)
            issue.touched(*halves[-3:], *halves[-3:], *halves[-2:])
        for number, part in enumerate(whole):
            issue.touched(part, part, kind="permute")
            whole[number] = allocate(part.shape, part.dtype)
        key_gradient, value_gradient = (
            _scattered(part, like, group) for part, like in zip(whole, (key, value), strict=True)
        )
        del everywhere, halves
        return query_gradient, key_gradient, value_gradient, None, None


def _whole(part: torch.Tensor, group: Any) -> torch.Tensor:
    """A buffer for this part of every rank."""
    return allocate((part.shape[0] * group_size(group), *part.shape[1:]), part.dtype)


def _gathered(parts: tuple[torch.Tensor, ...], group: Any) -> list[torch.Tensor]:
    """All ranks' parts, gathered and then put into the order of the sequence."""
    found = [_whole(part, group) for part in parts]
    for number, part in enumerate(found):
        issue.collective("all_gather", issue.size_of([part]), group)
        issue.touched(part, part, kind="permute")
        found[number] = allocate(part.shape, part.dtype)
    return found


def _scattered(whole: torch.Tensor, like: torch.Tensor, group: Any) -> torch.Tensor:
    issue.collective("reduce_scatter", issue.size_of([whole]), group)
    return allocate(like.shape, like.dtype)


def _record_half(
    forward: bool,
    query: torch.Tensor,
    pair: tuple[torch.Tensor, torch.Tensor],
    keys: int,
    mask: Mask,
) -> None:
    """The kernel over half of the queries and the first `keys` keys."""
    half = query.shape[0] // 2
    key, value = pair
    heads = query.shape[1] * query.shape[2]
    read = issue.size_of(pair) * keys / key.shape[0]
    touched = issue.size_of([query[:half]]) * (1 + value.shape[-1] / query.shape[-1]) + read
    issue.attention(
        forward,
        query_rows=half,
        key_rows=keys,
        pairs=half * keys - (half * half / 2 if mask.causal else 0.0),
        heads=heads,
        query_width=query.shape[-1],
        value_width=value.shape[-1],
        dtype=query.dtype,
        moved_bytes=(1 if forward else 2) * touched,
    )


def ring_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, group: Any, mask: Mask
) -> torch.Tensor:
    """Keys and values go around the ranks ("p2p")."""
    output: torch.Tensor = _Ring.apply(query, key, value, group, mask)
    return output.reshape(*output.shape[:-2], -1)


def _ring_pairs(mask: Mask, query: torch.Tensor) -> float:
    """Pairs of one ring step: with a causal mask, half of them on every rank and in every step."""
    return (query.shape[0] * mask.ranks) ** 2 * (0.5 if mask.causal else 1.0)


class _Ring(torch.autograd.Function):
    """Keeps query, output, log-sum-exp and the last keys and values received.

    Each step has its own output until all are summed in float32. Under a causal mask, steps after
    the own rank's number see half of the queries.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        group: Any,
        mask: Mask,
    ) -> torch.Tensor:
        ranks, rank = (
            torch.distributed.get_world_size(group),
            torch.distributed.get_rank(group),
        )
        pair = key.numel() + value.numel()
        width = value.shape[-1]
        buffers = [allocate((pair,), key.dtype)]
        partial = []
        rows = query.numel() // query.shape[-1]
        for step in range(ranks):
            if step + 1 < ranks:
                buffers.append(allocate((pair,), key.dtype))
                issue.collective("send", issue.size_of([key, value]), group, asynchronous=True)
            seen = rows if step <= rank else rows // 2
            partial.append(allocate((seen, width), query.dtype))
            partial.append(allocate((seen,), torch.float32))
            record(True, query, key, value, mask, pairs=_ring_pairs(mask, query))
            issue.memory(seen * width * (query.element_size() + 2 * 4))  # added up in float32
        log_sum_exp = allocate((rows,), torch.float32)
        wide = allocate((rows, width), torch.float32)
        output = allocate((*query.shape[:-1], width), query.dtype)
        ctx.save_for_backward(query, buffers[-1], output, log_sum_exp)
        ctx.shapes = key.shape, value.shape
        ctx.group, ctx.mask, ctx.ranks = group, mask, ranks
        del wide, partial
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        query, pair, *_ = ctx.saved_tensors
        gradient = gradients[0].contiguous()
        query_gradient = allocate(query.shape, query.dtype)
        buffers = [allocate((2, *pair.shape), pair.dtype) for _ in range(2)]
        step = [allocate(query.shape, query.dtype), allocate(pair.shape, pair.dtype)]
        split = ctx.shapes[0].numel()
        key, value = pair[:split].view(ctx.shapes[0]), pair[split:].view(ctx.shapes[1])
        for number in range(ctx.ranks):
            if number + 1 < ctx.ranks:  # keys and values, and their gradients so far
                size = 2 * issue.size_of([pair])
                issue.collective("send", size, ctx.group, asynchronous=True)
            record(False, query, key, value, ctx.mask, pairs=_ring_pairs(ctx.mask, query))
            issue.touched(*step, *step)
        del step, gradient
        summed = buffers[0][1]
        return (
            query_gradient,
            summed[:split].view(ctx.shapes[0]),
            summed[split:].view(ctx.shapes[1]),
            None,
            None,
        )
