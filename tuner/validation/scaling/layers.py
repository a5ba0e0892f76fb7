"""The framework's layers, on tensors without data (src/scaling/core/nn, src/scaling/transformer).

Tensors are `[batch, sequence, hidden]` bf16. The layers are eager PyTorch, so autograd itself
decides what is kept; only kernels that PyTorch lacks (flash attention, the fused norm and softmax)
and collectives stand here as functions that allocate what the real ones allocate.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional

from tuner.memory import issue
from tuner.memory.recorder import allocate
from tuner.validation.scaling.settings import FLASH_1, FLASH_2, FUSED, ScalingRun

_DTYPE = torch.bfloat16


def _parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(*shape, dtype=_DTYPE, device="meta"))


class _Gather(torch.autograd.Function):
    """linear/utils.py, `_GatherFromSequenceParallelRegion`: all-gather, reduce-scatter back."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, ranks: int) -> torch.Tensor:
        ctx.ranks = ranks
        batch, length, width = inputs.shape
        return allocate((batch, length * ranks, width), inputs.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        gradient = gradients[0].contiguous()
        batch, length, width = gradient.shape
        return allocate((batch, length // ctx.ranks, width), gradient.dtype), None


class _Scatter(torch.autograd.Function):
    """linear/utils.py, `_AllReduceScatterToSequenceParallel`: the reverse of `_Gather`."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, ranks: int) -> torch.Tensor:
        ctx.ranks = ranks
        batch, length, width = inputs.shape
        return allocate((batch, length // ranks, width), inputs.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        gradient = gradients[0].contiguous()
        batch, length, width = gradient.shape
        return allocate((batch, length * ctx.ranks, width), gradient.dtype), None


class _Concatenate(torch.autograd.Function):
    """linear/utils.py, `_AllConcat` over the last dimension; the list form of NCCL's all-gather
    fills one flat buffer first (ProcessGroupNCCL.cpp, `allgather`)."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, ranks: int) -> torch.Tensor:
        ctx.ranks = ranks
        parts = [inputs] + [allocate(inputs.shape, inputs.dtype) for _ in range(ranks - 1)]
        flat = allocate((ranks * inputs.numel(),), inputs.dtype)
        del flat
        return torch.cat(parts, dim=-1)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        width = gradients[0].shape[-1] // ctx.ranks
        return gradients[0].split(width, dim=-1)[0].contiguous(), None


class _Flash(torch.autograd.Function):
    """flash_attn_varlen_func (2.x) and flash_attn_unpadded_func (1.x), on `[tokens, heads, d]`.

    Backward sums the gradient of the query in float32; 1.x also its forward output, as its loop
    over keys needs (csrc/flash_attn/fmha_api.cpp, `mha_fwd` and `mha_bwd`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        first: bool,
        length: int,
    ) -> torch.Tensor:
        output = allocate(query.shape, query.dtype)
        sums = allocate(query.shape[:2], torch.float32)
        state = allocate((2,), torch.int64)
        summed = allocate(query.shape, torch.float32) if first else None
        del summed
        ctx.save_for_backward(query, key, value, output, sums, state)
        ctx.length = length
        _attend(True, query, length)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        gradient = gradients[0].contiguous()
        query, key, value, *_ = ctx.saved_tensors
        parts = [allocate(part.shape, part.dtype) for part in (query, key, value)]
        summed = allocate(query.shape, torch.float32)
        rows = allocate(query.shape[:2], torch.float32)
        del summed, rows, gradient
        _attend(False, query, ctx.length)
        return (*parts, None, None)


def _attend(forward: bool, query: torch.Tensor, length: int) -> None:
    """One pass of causal flash attention over sequences of `length` tokens."""
    tokens, heads, width = query.shape
    issue.attention(
        forward,
        query_rows=length,
        key_rows=length,
        pairs=tokens * length / 2,
        heads=heads,
        query_width=width,
        value_width=width,
        dtype=query.dtype,
        moved_bytes=(4 if forward else 8) * query.numel() * query.element_size(),
    )


class _FusedSoftmax(torch.autograd.Function):
    """A masked-softmax kernel with float32 results: keeps those, its gradient overwrites."""

    @staticmethod
    def forward(ctx: Any, scores: torch.Tensor) -> torch.Tensor:
        result = allocate(scores.shape, torch.float32)
        ctx.save_for_backward(result)
        ctx.dtype = scores.dtype
        issue.touched(scores, result)
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        issue.touched(*ctx.saved_tensors, gradients[0], gradients[0])
        return (gradients[0].to(ctx.dtype),)


class _FusedNorm(torch.autograd.Function):
    """flash_attn/ops/rms_norm.py: keeps its input and two statistics of each row."""

    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        rows = inputs.numel() // inputs.shape[-1]
        statistics = [allocate((rows,), torch.float32) for _ in range(2)]
        ctx.save_for_backward(inputs, weight, *statistics)
        issue.touched(inputs, inputs)
        return allocate(inputs.shape, inputs.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        gradient = gradients[0].contiguous()
        inputs, weight, *_ = ctx.saved_tensors
        issue.touched(inputs, gradient, inputs)
        del gradient
        return allocate(inputs.shape, inputs.dtype), allocate(weight.shape, weight.dtype)


class Norm(nn.Module):
    """norm/rms_norm.py; gathers the sequence afterwards under sequence parallelism.

    Without the fused kernel it works in float32 and is cast back before the weight, as Llama's
    does; the published file of 2024 casts later, but outcomes of the 2023 runs need the former.
    """

    def __init__(self, run: ScalingRun) -> None:
        super().__init__()
        self.run = run
        self.weight = _parameter(run.hidden)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        if self.run.fused_norm:
            output: torch.Tensor = _FusedNorm.apply(inputs, self.weight)
        else:
            wide = inputs.float()
            scaled = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)
            output = scaled.type_as(inputs) * self.weight
            del wide, scaled
        if self.run.sequence_parallel and self.run.tensor_ranks > 1:
            output = _Gather.apply(output, self.run.tensor_ranks)
        return output


class _Linear(nn.Module):
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.weight = _parameter(outputs, inputs)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return functional.linear(inputs.contiguous(), self.weight)


class Attention(nn.Module):
    """attention/attention.py, `ParallelSelfAttention`."""

    def __init__(self, run: ScalingRun) -> None:
        super().__init__()
        self.run = run
        self.heads = run.heads // run.tensor_ranks
        width = run.hidden // run.tensor_ranks
        self.query_key_value = _Linear(run.hidden, 3 * width)
        self.dense = _Linear(width, run.hidden)

    def forward(self, inputs: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        run = self.run
        mixed = self.query_key_value(inputs)
        mixed = mixed.view(*mixed.shape[:2], self.heads, -1).transpose(0, 1)
        query, key, value = mixed.chunk(3, dim=-1)
        query, key = self._rotated(query, positions), self._rotated(key, positions)
        if run.attention in (FLASH_1, FLASH_2):
            output = self._flash(query, key, value)
        else:
            output = self._eager(query, key, value)
        del query, key, value, mixed
        merged = output.view(run.batch, self.heads, run.sequence, -1).transpose(1, 2)
        return _reduced(self.dense(merged.reshape(run.batch, run.sequence, -1)), run)

    def _rotated(self, part: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """rotary.py, `apply_rotary_pos_emb`: cosines and sines gathered by position."""
        shape = (self.run.sequence, self.run.batch, 1, part.shape[-1])
        cosine, sine = (allocate(shape, part.dtype) for _ in range(2))
        half = part.shape[-1] // 2
        turned = torch.cat((-part[..., half:], part[..., :half]), dim=3)
        return (part * cosine) + (turned * sine)

    def _flash(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """`[s, b, n, d]` to `[(b n), s, d]`."""
        rows = self.run.batch * self.run.sequence
        flat = [part.transpose(0, 1).reshape(rows, self.heads, -1) for part in (query, key, value)]
        output: torch.Tensor = _Flash.apply(*flat, self.run.attention == FLASH_1, self.run.sequence)
        by_head = output.view(self.run.batch, self.run.sequence, self.heads, -1).transpose(1, 2)
        return by_head.reshape(self.run.batch * self.heads, self.run.sequence, -1)

    def _eager(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        """`multi_head_attention` and masked_softmax.py, to `[(b n), s, d]`.

        Weights are in float32 and cast for the product with the values, as Llama's are.
        """
        run, count = self.run, self.run.batch * self.heads
        parts = [part.reshape(run.sequence, count, -1) for part in (query, key, value)]
        query, key, value = (part.transpose(0, 1) for part in parts)
        scores = allocate((count, run.sequence, run.sequence), query.dtype)
        scores = torch.baddbmm(scores, query, key.transpose(1, 2), beta=0.0)
        scores = scores.view(run.batch, self.heads, run.sequence, run.sequence)
        if run.attention == FUSED:
            weights: torch.Tensor = _FusedSoftmax.apply(scores)
        else:
            mask = allocate((run.batch, 1, run.sequence, run.sequence), torch.bool)
            wide = scores.float()
            wide.masked_fill_(mask, -10000.0)
            weights = functional.softmax(wide, dim=-1)
            del wide
        del scores
        weights = weights.to(value.dtype)
        return torch.bmm(weights.view(count, run.sequence, run.sequence), value)


class _SwiGlu(nn.Module):
    """mlp.py, `ParallelSwiGLUMLP`."""

    def __init__(self, run: ScalingRun) -> None:
        super().__init__()
        self.run = run
        width = run.intermediate // run.tensor_ranks
        self.dense_in = _Linear(run.hidden, width)
        self.gate = _Linear(run.hidden, width)
        self.dense_out = _Linear(width, run.hidden)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        up, gate = self.dense_in(inputs), self.gate(inputs)
        return _reduced(self.dense_out(functional.silu(up) * gate), self.run)


def _reduced(output: torch.Tensor, run: ScalingRun) -> torch.Tensor:
    """A row-parallel product summed over ranks in place, or scattered along the sequence."""
    if run.sequence_parallel and run.tensor_ranks > 1:
        scattered: torch.Tensor = _Scatter.apply(output, run.tensor_ranks)
        return scattered
    return output


class Layer(nn.Module):
    """layers/layer.py, `TransformerLayer`."""

    def __init__(self, run: ScalingRun) -> None:
        super().__init__()
        self.input_norm, self.attention = Norm(run), Attention(run)
        self.middle_norm, self.mlp = Norm(run), _SwiGlu(run)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        hidden = self.attention(self.input_norm(hidden), positions) + hidden
        return self.mlp(self.middle_norm(hidden)) + hidden


class Embedding(nn.Module):
    """linear/vocab_parallel_embedding.py."""

    def __init__(self, run: ScalingRun) -> None:
        super().__init__()
        self.run = run
        self.weight = _parameter(run.vocabulary // run.tensor_ranks, run.hidden)

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return _reduced(functional.embedding(tokens, self.weight), self.run)


class FinalNorm(nn.Module):
    """layers/layernorm.py."""

    def __init__(self, run: ScalingRun) -> None:
        super().__init__()
        self.norm = Norm(run)

    def forward(self, inputs: torch.Tensor, positions: torch.Tensor) -> Any:
        return self.norm(inputs)


class Head(nn.Module):
    """layers/lm_head.py: every tensor-parallel rank ends up with all logits."""

    def __init__(self, run: ScalingRun) -> None:
        super().__init__()
        self.run = run
        self.linear = _Linear(run.hidden, run.vocabulary // run.tensor_ranks)

    def forward(self, inputs: torch.Tensor, positions: torch.Tensor) -> Any:
        logits = self.linear(inputs)
        if self.run.tensor_ranks == 1:
            return logits
        return _Concatenate.apply(logits, self.run.tensor_ranks)


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    """losses/cross_entropy.py, `CrossEntropyLoss`, with its accuracy."""
    flat = logits.float().reshape(-1, logits.shape[-1])
    weights = torch.ones_like(targets.flatten(), dtype=torch.float32)
    losses = functional.cross_entropy(flat, targets.flatten(), reduction="none")
    loss = torch.sum(losses * weights) / weights.sum()
    flat.argmax(-1)
    return loss
