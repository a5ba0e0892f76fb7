"""Layers for runs without Transformer Engine that keep for backward what it would keep.

Megatron-Core's local layers store several copies of the same activation (the normalised input in
float32, the whole attention matrix), and its local norms refuse sequence parallelism. These two
replacements store the input and its statistics, and the attention's inputs, output and
log-sum-exp. Both take the constructor arguments Megatron-Core's specifications pass.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor


class FusedNorm(torch.nn.Module):
    """LayerNorm or RMSNorm over the last dimension, in place of `WrappedTorchNorm`.

    Marks its parameters `sequence_parallel` so that their gradients are summed over tensor
    parallel ranks (`finalize_model_grads`), as Transformer Engine's norms do.
    """

    def __init__(
        self,
        config: Any,  # TransformerConfig
        hidden_size: int,
        eps: float = 1e-5,
        persist_layer_norm: bool = False,
        zero_centered_gamma: bool = False,
        normalization: str | None = None,
    ) -> None:
        super().__init__()
        self.eps = eps
        self.offset = 1.0 if config.layernorm_zero_centered_gamma else 0.0
        self.weight = torch.nn.Parameter(torch.full((hidden_size,), 1.0 - self.offset))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]
        self.bias = None
        if config.normalization == "LayerNorm":
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size))
            self.bias.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, hidden_states: Tensor) -> Tensor:
        weight = self.weight + self.offset if self.offset else self.weight
        if self.bias is not None:
            return torch.nn.functional.layer_norm(
                hidden_states, weight.shape, weight, self.bias, self.eps
            )
        output: Tensor = _RMSNormFunction.apply(hidden_states, weight, self.eps)  # type: ignore[no-untyped-call]
        return output


class _RMSNormFunction(torch.autograd.Function):
    """RMSNorm that keeps its input, weight and one float32 statistic per row."""

    @staticmethod
    def forward(ctx: Any, inputs: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = inputs.float()
        inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        ctx.save_for_backward(inputs, weight, inverse_rms)
        return (wide * inverse_rms).to(inputs.dtype) * weight

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        inputs, weight, inverse_rms = ctx.saved_tensors
        gradient = gradients[0].float()
        normalized = inputs.float() * inverse_rms
        scaled = gradient * weight.float()
        mean = (scaled * normalized).mean(-1, keepdim=True)
        input_gradient = ((scaled - normalized * mean) * inverse_rms).to(inputs.dtype)
        weight_gradient = (gradient * normalized).flatten(0, -2).sum(0).to(weight.dtype)
        return input_gradient, weight_gradient, None


class DuplicatedLinear(torch.nn.Module):
    """A linear layer with the whole weight on every tensor parallel rank, without bias.

    Stands in for `TELinear(parallel_mode="duplicated")` in the down-projections of multi-latent
    attention. With the column-parallel layer of the local specification the positional part of
    the key would miss the gradients of other ranks' heads (`get_query_key_value_tensors` gathers
    it without a reduction in backward).
    """

    def __init__(
        self,
        input_size: int,
        output_size: int,
        *,
        config: Any,  # TransformerConfig
        init_method: Any,  # function of a tensor
        parallel_mode: str,
        bias: bool,
        **unused: object,
    ) -> None:
        super().__init__()
        if parallel_mode != "duplicated" or bias:
            raise ValueError(f"parallel_mode={parallel_mode!r}, bias={bias} are not supported")
        self.weight = torch.nn.Parameter(
            torch.empty(output_size, input_size, dtype=config.params_dtype)
        )
        init_method(self.weight)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inputs: Tensor) -> tuple[Tensor, None]:
        return torch.nn.functional.linear(inputs, self.weight), None


class FusedAttention(torch.nn.Module):
    """Causal attention on the CPU, in place of `DotProductAttention`.

    Grouped key and value heads are stored once, sliding windows and attention sinks
    (`softmax_type`) are supported. Dropout of attention probabilities is not.
    """

    def __init__(
        self,
        config: Any,  # TransformerConfig
        layer_number: int,
        attn_mask_type: Any,  # AttnMaskType, always causal in these models
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: Any = None,  # ProcessGroupCollection
        **head_sizes: int,
    ) -> None:
        super().__init__()
        from megatron.core import parallel_state
        from megatron.core.transformer.utils import is_layer_window_attention

        dropout = config.attention_dropout if attention_dropout is None else attention_dropout
        if dropout:
            raise ValueError(
                f"attention_dropout={dropout} is not supported on the CPU; set it to 0"
            )
        self.softmax_scale = softmax_scale
        self.layer_scale = 1.0 / max(1, layer_number) if config.apply_query_key_layer_scaling else 1
        windowed = config.window_size is not None and is_layer_window_attention(
            config.window_size, config.window_attn_skip_freq, layer_number
        )
        self.window = config.window_size[0] if windowed else -1
        ranks = (
            parallel_state.get_tensor_model_parallel_world_size()
            if pg_collection is None
            else pg_collection.tp.size()
        )
        heads = config.num_attention_heads // ranks
        self.softmax_offset: Tensor | None = None
        if config.softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.zeros(heads, dtype=config.params_dtype))
        elif config.softmax_type == "off-by-one":
            self.softmax_offset = torch.zeros(heads)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: Any = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> Tensor:
        """Query `[s, b, heads, d]`, key `[s, b, groups, d]`, value `[s, b, groups, dv]` to
        `[s, b, heads * dv]`."""
        scale = self.softmax_scale or 1.0 / math.sqrt(query.shape[-1])
        output: Tensor = _AttentionFunction.apply(  # type: ignore[no-untyped-call]
            query, key, value, self.softmax_offset, scale * self.layer_scale, self.window
        )
        return output.flatten(2)


class _AttentionFunction(torch.autograd.Function):
    """The CPU flash attention of PyTorch with unexpanded key and value heads and a sink.

    A sink with logit z adds exp(z) to every softmax denominator. With the log-sum-exp L of the
    plain softmax, the output is scaled by sigmoid(L - z) and the log-sum-exp becomes
    log(exp(L) + exp(z)); given both, the plain backward computes the right gradients.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        sink: Tensor | None,
        scale: float,
        window: int,
    ) -> Tensor:
        mask = _window_mask(query, window)
        output, log_sum_exp = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            *_as_heads(query, key, value), 0.0, mask is None, attn_mask=mask, scale=scale
        )
        if sink is not None:
            logits = sink.float().view(1, -1, 1)
            output = (output * torch.sigmoid(log_sum_exp - logits).unsqueeze(-1)).to(output.dtype)
            log_sum_exp = torch.logaddexp(log_sum_exp, logits)
        # [b, heads, s, d] to [s, b, heads, dv], the layout the output projection reads.
        result: Tensor = output[..., : value.shape[-1]].permute(2, 0, 1, 3).contiguous()
        ctx.save_for_backward(query, key, value, sink, result, log_sum_exp)
        ctx.scale, ctx.window = scale, window
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, sink, result, log_sum_exp = ctx.saved_tensors
        mask = _window_mask(query, ctx.window)
        width = query.shape[-1]
        gradient, output = (_padded_head(part, width) for part in (gradients[0], result))
        grads = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            gradient,
            *_as_heads(query, key, value),
            output,
            log_sum_exp,
            0.0,
            mask is None,
            attn_mask=mask,
            scale=ctx.scale,
        )
        query_grad, key_grad, value_grad = (part.permute(2, 0, 1, 3) for part in grads)
        sink_grad = None
        if sink is not None and ctx.needs_input_grad[3]:
            weight = torch.exp(sink.float().view(1, -1, 1) - log_sum_exp)
            dot = (gradients[0].float() * result.float()).sum(-1).permute(1, 2, 0)
            sink_grad = -(weight * dot).sum((0, 2)).to(sink.dtype)
        groups = key.shape[2]
        return (
            query_grad,
            _sum_groups(key_grad, groups),
            _sum_groups(value_grad[..., : value.shape[-1]], groups),
            sink_grad,
            None,
            None,
        )


def _as_heads(query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """`[s, b, n, d]` to the kernel's `[b, heads, s, d]`: repeated groups, equal head widths."""
    repeats = query.shape[2] // key.shape[2]
    width = query.shape[-1]
    parts = []
    for part in (key, value):
        heads = _padded_head(part, width)
        parts.append(heads.repeat_interleave(repeats, 1) if repeats > 1 else heads)
    return query.permute(1, 2, 0, 3), parts[0], parts[1]


def _padded_head(part: Tensor, width: int) -> Tensor:
    """`[s, b, n, d]` to `[b, n, s, width]`, with zeros after d."""
    heads = part.permute(1, 2, 0, 3)
    missing = width - heads.shape[-1]
    return torch.nn.functional.pad(heads, (0, missing)) if missing else heads


def _sum_groups(gradient: Tensor, groups: int) -> Tensor:
    repeats = gradient.shape[2] // groups
    if repeats == 1:
        return gradient
    length, batch, _, width = gradient.shape
    return gradient.reshape(length, batch, groups, repeats, width).sum(3)


def _window_mask(query: Tensor, window: int) -> Tensor | None:
    """Additive mask `[s, s]` of causal attention to at most `window` earlier tokens."""
    length = query.shape[0]
    if window < 0 or window >= length - 1:
        return None
    distance = torch.arange(length).view(-1, 1) - torch.arange(length)
    hidden = (distance < 0) | (distance > window)
    return torch.zeros(length, length, dtype=query.dtype).masked_fill_(hidden, -math.inf)
