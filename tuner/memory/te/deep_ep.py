"""Dispatch of tokens to experts by the package deep_ep: DeepEP (1.2.1) and HybridEP.

Read from csrc/deep_ep.cpp (`intranode_dispatch`, `intranode_combine`) and, for HybridEP,
csrc/hybrid_ep/executor/executor.cu and hybrid_ep.cu. What arrives lies in PyTorch's memory; the
buffers that ranks write into each other lie outside it (`tuner/memory/expert_buffers.py`). Tokens
choose experts evenly and independently.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from trainables.megatron_core.cpu_device import replaced
from tuner.memory import issue
from tuner.memory.recorder import active_recorder, allocate
from tuner.memory.values import KnownValues

_CHANNELS = 10
"""Half of the multiprocessors that DeepEP uses (moe_deepep_num_sms)."""


class _Event:
    """A finished event."""

    def __init__(self, *args: Any) -> None:
        pass

    def current_stream_wait(self) -> None:
        pass


@dataclass(frozen=True, slots=True)
class _Config:
    """The sizes of buffers are counted elsewhere."""

    def get_nvl_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return 0

    def get_rdma_buffer_size_hint(self, hidden_bytes: int, ranks: int) -> int:
        return 0


@dataclass(slots=True)
class _Handle:
    """What combining needs of a dispatch, and the tensors it holds."""

    sent: int
    received: int
    experts: int
    tensors: tuple[torch.Tensor, ...]


class Buffer:
    """DeepEP: a token goes once to each rank that holds any of its experts."""

    num_nvl_bytes = num_rdma_bytes = 0

    def __init__(self, group: Any, num_nvl_bytes: int = 0, num_rdma_bytes: int = 0) -> None:
        self.group = group

    @staticmethod
    def get_dispatch_config(ranks: int) -> _Config:
        return _Config()

    get_combine_config = get_dispatch_config

    @staticmethod
    def set_num_sms(count: int) -> None:
        pass

    def get_dispatch_layout(self, topk_idx: torch.Tensor, num_experts: int, **options: Any) -> Any:
        ranks = self.group.size()
        by_rank = allocate((ranks,), torch.int32)
        by_expert = allocate((num_experts,), torch.int32)
        in_rank = allocate((topk_idx.shape[0], ranks), torch.bool)
        issue.touched(topk_idx, in_rank)
        return by_rank, None, by_expert, in_rank, _Event()

    def dispatch(
        self,
        x: torch.Tensor,
        handle: _Handle | None = None,
        topk_idx: Any = None,
        topk_weights: Any = None,
        num_tokens_per_expert: Any = None,
        is_token_in_rank: Any = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        ranks = self.group.size()
        if handle is not None:
            received = allocate((handle.received, x.shape[1]), x.dtype)
            issue.collective("all_to_all", issue.size_of([received]), self.group)
            return received, None, None, None, None, _Event()
        experts, chosen = num_tokens_per_expert.shape[0], topk_idx.shape[1]
        local = experts // ranks
        count = _received_tokens(x.shape[0] * ranks, experts, local, chosen)
        matrices = [
            allocate(shape, torch.int32) for shape in ((ranks, ranks), *[(ranks, _CHANNELS)] * 2)
        ]
        received = allocate((count, x.shape[1]), x.dtype)
        source = allocate((count,), torch.int32)
        head = allocate((x.shape[0], ranks), torch.int32)
        indices = allocate((count, chosen), topk_idx.dtype)
        weights = allocate((count, chosen), topk_weights.dtype)
        issue.collective("all_to_all", issue.size_of([received, indices, weights]), self.group)
        tensors = (*matrices, source, head, is_token_in_rank)
        by_expert = _tokens_by_expert(x.shape[0] * ranks, local, chosen / experts)
        made = _Handle(x.shape[0], count, experts, tensors)
        return received, indices, weights, by_expert.tolist(), made, _Event()

    def combine(
        self, x: torch.Tensor, handle: _Handle, topk_weights: Any = None, **options: Any
    ) -> tuple[Any, ...]:
        combined = allocate((handle.sent, x.shape[1]), x.dtype)
        issue.collective("all_to_all", issue.size_of([x]), self.group)
        weights = None
        if topk_weights is not None:
            weights = allocate((handle.sent, topk_weights.shape[1]), torch.float32)
        return combined, weights, _Event()


class HybridEPBuffer:
    """HybridEP: tokens arrive in the order of their experts, padded for products in FP8."""

    def __init__(self, group: Any, **options: Any) -> None:
        self.group = group

    def dispatch_with_permute(
        self,
        hidden: torch.Tensor,
        routing_map: Any = None,
        probs: Any = None,
        num_of_experts_per_rank: int = 0,
        pad_multiple: int | None = None,
        num_permuted_tokens: Any = None,
        handle: _Handle | None = None,
        **options: Any,
    ) -> tuple[Any, ...]:
        by_expert = None
        if handle is None:
            handle, by_expert = self._preprocessed(
                hidden, routing_map, num_of_experts_per_rank, pad_multiple, num_permuted_tokens
            )
        received = allocate((handle.received, hidden.shape[1]), hidden.dtype)
        weights = None
        if probs is not None:
            weights = allocate((handle.received,), torch.float32)
        issue.collective("all_to_all", issue.size_of([received]), self.group)
        issue.touched(received, received, kind="permute")
        return received, weights, None, by_expert, handle

    def _preprocessed(
        self, hidden: torch.Tensor, routing_map: Any, local: int, pad: Any, permuted: Any
    ) -> tuple[_Handle, torch.Tensor]:
        """Exchange routing maps and make the maps of where tokens go."""
        tokens, experts = routing_map.shape
        ranks = self.group.size()
        everywhere = allocate((tokens * ranks, experts), torch.bool)
        issue.collective("all_gather", issue.size_of([everywhere]), self.group)
        tensors = (
            allocate((tokens, ranks), torch.int32),
            allocate((-(-tokens // 16) * 16,), torch.bool),
            allocate((tokens * ranks, local), torch.bool),
            allocate((tokens * ranks, local), torch.int32),
            allocate((local,), torch.int32),
        )
        issue.touched(everywhere, *tensors)
        del everywhere
        by_expert = _tokens_by_expert(tokens * ranks, local, None)
        if pad:
            by_expert = -(-by_expert // pad) * pad
        count = int(by_expert.sum()) if permuted is None else int(permuted)
        return _Handle(tokens, count, experts, tensors), by_expert

    def combine_with_unpermute(
        self, hidden: torch.Tensor, handle: _Handle, probs: Any = None, **options: Any
    ) -> tuple[Any, ...]:
        combined = allocate((handle.sent, hidden.shape[1]), hidden.dtype)
        issue.touched(hidden, hidden, kind="permute")
        issue.collective("all_to_all", issue.size_of([hidden]), self.group)
        weights = None
        if probs is not None:
            weights = allocate((handle.sent, handle.experts), torch.float32)
        return combined, weights


def _received_tokens(tokens: int, experts: int, local: int, chosen: int) -> int:
    """Tokens of which at least one of the `chosen` experts is among `local` of all `experts`."""
    missed = math.comb(experts - local, chosen) / math.comb(experts, chosen)
    return round(tokens * (1 - missed))


def _tokens_by_expert(tokens: int, local: int, density: float | None) -> torch.Tensor:
    """Tokens for each local expert, on the host."""
    recorder = active_recorder()
    values = KnownValues(density) if density or recorder is None else recorder.values
    shape = torch.Size((local,))
    return values.spread(shape, values.count(torch.Size((tokens, local))), torch.int64)


class _Multihot(torch.autograd.Function):
    """`_DeepepManager._indices_to_multihot`: operator by operator, of which some read data."""

    @staticmethod
    def forward(
        ctx: Any, probs: torch.Tensor, indices: torch.Tensor, valid: int, experts: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = indices.shape[0]
        wide_map = allocate((rows, experts), torch.int64)
        wide_probs = allocate((rows, experts), torch.float32)
        mask = allocate(indices.shape, torch.bool)
        valid_indices = allocate((valid,), torch.int64)
        row_indices = allocate((valid,), torch.int64)
        selected = allocate((valid,), probs.dtype)
        routing_map = allocate((rows, experts), torch.bool)
        issue.touched(wide_map, wide_probs, mask, valid_indices, row_indices, selected, routing_map)
        ctx.save_for_backward(mask, row_indices, valid_indices)
        ctx.shape, ctx.dtype = probs.shape, probs.dtype
        ctx.mark_non_differentiable(routing_map)
        return routing_map, wide_probs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        _, row_indices, _ = ctx.saved_tensors
        selected = allocate(row_indices.shape, torch.float32)
        result = allocate(ctx.shape, ctx.dtype)
        issue.touched(gradients[1], selected, result)
        return result, None, None, None


@contextmanager
def indices_become_maps() -> Iterator[None]:
    """Let Megatron-Core's DeepEP dispatcher make routing maps of indices without their values."""
    from megatron.core.transformer.moe import token_dispatcher

    def to_multihot(manager: Any, indices: torch.Tensor, probs: torch.Tensor) -> Any:
        valid = int(manager.tokens_per_expert.sum())
        return _Multihot.apply(probs, indices, valid, manager.num_local_experts)

    with replaced(token_dispatcher._DeepepManager, _indices_to_multihot=to_multihot):
        yield


def modules() -> dict[str, dict[str, Any]]:
    """Names of every module of the stand-in, by module."""
    return {
        "deep_ep": {"Buffer": Buffer, "HybridEPBuffer": HybridEPBuffer},
        "deep_ep.utils": {"EventHandle": _Event, "EventOverlap": _Event},
    }
