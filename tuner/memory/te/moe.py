"""Permutation of tokens and routing in single kernels (pytorch/permutation.py, router.py)."""

from __future__ import annotations

from typing import Any

import torch

from tuner.memory import issue
from tuner.memory.recorder import allocate


class _Permute(torch.autograd.Function):
    """Copies tokens, and probabilities where given, into the order of their experts."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, routing_map: torch.Tensor, out_tokens: int, probs: Any
    ) -> tuple[Any, ...]:
        tokens, experts = routing_map.shape
        row_ids = allocate((tokens, experts * 2 + 1), torch.int32)
        output = allocate((out_tokens, inputs.shape[1]), inputs.dtype)
        permuted = None if probs is None else allocate((out_tokens,), probs.dtype)
        ctx.save_for_backward(row_ids)
        issue.touched(routing_map, row_ids)
        issue.touched(output, output, row_ids, kind="permute")
        ctx.input_shape = inputs.shape
        ctx.probs_shape = None if probs is None else probs.shape
        return output, row_ids, permuted

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        gradient, _, probs_gradient = gradients
        issue.touched(gradient, gradient, *ctx.saved_tensors, kind="permute")
        probs = None if ctx.probs_shape is None else allocate(ctx.probs_shape, probs_gradient.dtype)
        return allocate(ctx.input_shape, gradient.dtype), None, None, probs


class _Unpermute(torch.autograd.Function):
    """Sums the copies of each token back; keeps its input only to weight by probabilities."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, row_ids: torch.Tensor, probs: Any, shape: Any
    ) -> torch.Tensor:
        output = allocate(inputs.shape if shape is None else shape, inputs.dtype)
        issue.touched(inputs, output, row_ids, kind="permute")
        ctx.input_shape = inputs.shape
        if probs is None:
            ctx.save_for_backward(row_ids)
        else:
            ctx.save_for_backward(row_ids, inputs, probs)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        result = allocate(ctx.input_shape, gradients[0].dtype)
        issue.touched(result, result, *saved[:2], kind="permute")
        probs = allocate(saved[2].shape, saved[2].dtype) if len(saved) == 3 else None
        return result, None, probs, None


class _SortChunks(torch.autograd.Function):
    """Reorders whole runs of tokens."""

    @staticmethod
    def forward(
        ctx: Any, inputs: torch.Tensor, sizes: torch.Tensor, order: torch.Tensor, probs: Any
    ) -> tuple[Any, ...]:
        row_ids = allocate((inputs.shape[0],), torch.int32)
        issue.touched(inputs, inputs, kind="permute")
        ctx.save_for_backward(row_ids)
        sorted_probs = None if probs is None else allocate(probs.shape, probs.dtype)
        return allocate(inputs.shape, inputs.dtype), sorted_probs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        gradient, probs = gradients
        issue.touched(gradient, gradient, kind="permute")
        return (
            allocate(gradient.shape, gradient.dtype),
            None,
            None,
            None if probs is None else allocate(probs.shape, probs.dtype),
        )


def moe_permute(
    inp: torch.Tensor, routing_map: torch.Tensor, num_out_tokens: int = -1, **options: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    output, row_ids, _ = _Permute.apply(inp, routing_map, int(num_out_tokens), None)
    return output, row_ids


def moe_permute_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    routing_map: torch.Tensor,
    num_out_tokens: int = -1,
    **options: Any,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    output, row_ids, permuted = _Permute.apply(inp, routing_map, int(num_out_tokens), probs)
    return output, permuted, row_ids


def moe_unpermute(
    inp: torch.Tensor,
    row_id_map: torch.Tensor,
    merging_probs: torch.Tensor | None = None,
    restore_shape: Any = None,
    **options: Any,
) -> torch.Tensor:
    result: torch.Tensor = _Unpermute.apply(inp, row_id_map, merging_probs, restore_shape)
    return result


def moe_sort_chunks_by_index(
    inp: torch.Tensor, split_sizes: torch.Tensor, sorted_index: torch.Tensor
) -> torch.Tensor:
    result: torch.Tensor = _SortChunks.apply(inp, split_sizes, sorted_index, None)[0]
    return result


def moe_sort_chunks_by_index_with_probs(
    inp: torch.Tensor,
    probs: torch.Tensor,
    split_sizes: torch.Tensor,
    sorted_index: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    output, sorted_probs = _SortChunks.apply(inp, split_sizes, sorted_index, probs)
    return output, sorted_probs


class _TopK(torch.autograd.Function):
    """Scores, selection and weights of the router in one kernel."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        probs = allocate(logits.shape, logits.dtype)
        routing_map = allocate(logits.shape, torch.bool)
        issue.touched(logits, probs, probs, routing_map)
        ctx.save_for_backward(routing_map, allocate(logits.shape, logits.dtype))
        return probs, routing_map

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        issue.touched(gradients[0], gradients[0], *ctx.saved_tensors)
        return allocate(gradients[0].shape, gradients[0].dtype)


def fused_topk_with_score_function(
    logits: torch.Tensor, *options: Any, **more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    probs, routing_map = _TopK.apply(logits)
    return probs, routing_map


def fused_compute_score_for_moe_aux_loss(
    logits: torch.Tensor, *options: Any, **more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    scores, routing_map = _TopK.apply(logits)
    return routing_map, scores


class _AuxLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, probs: torch.Tensor) -> torch.Tensor:
        ctx.shape = probs.shape
        issue.touched(probs)
        return allocate((), probs.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        result = allocate(ctx.shape, gradients[0].dtype)
        issue.touched(result)
        return result


def fused_moe_aux_loss(probs: torch.Tensor, *options: Any, **more: Any) -> torch.Tensor:
    result: torch.Tensor = _AuxLoss.apply(probs)
    return result


class Fp8Padding(torch.nn.Module):
    """pytorch/module/fp8_padding.py: pads each expert's rows to the alignment of its GEMM."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()
        self.align_size = align_size or 16

    def forward(self, inputs: torch.Tensor, m_splits: list[int]) -> tuple[torch.Tensor, list[int]]:
        align = self.align_size
        padded = [-(-rows // align) * align for rows in m_splits]
        if padded == list(m_splits):
            return inputs, padded
        return _Resize.apply(inputs, sum(padded)), padded


class Fp8Unpadding(torch.nn.Module):
    """pytorch/module/fp8_unpadding.py: undoes `Fp8Padding`."""

    def __init__(self, num_gemms: int, align_size: int | None = None) -> None:
        super().__init__()

    def forward(self, inputs: torch.Tensor, m_splits: list[int]) -> torch.Tensor:
        if sum(m_splits) == inputs.shape[0]:
            return inputs
        result: torch.Tensor = _Resize.apply(inputs, sum(m_splits))
        return result


class _Resize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, rows: int) -> torch.Tensor:
        ctx.shape = inputs.shape
        issue.touched(inputs, inputs)
        return allocate((rows, *inputs.shape[1:]), inputs.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        issue.touched(gradients[0], gradients[0])
        return allocate(ctx.shape, gradients[0].dtype), None
