"""LayerNorm and RMSNorm (pytorch/module/layernorm.py, rmsnorm.py, ops/basic/*norm.py).

Kept for backward: the input and one float32 statistic per row (two for LayerNorm).
"""

from __future__ import annotations

from typing import Any

import torch

from tuner.memory import issue
from tuner.memory.recorder import allocate
from tuner.memory.te.base import new_parameter, rows_of


class _NormFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, inputs: torch.Tensor, weight: torch.Tensor, bias: Any) -> torch.Tensor:
        output = allocate(inputs.shape, inputs.dtype)
        ctx.save_for_backward(inputs, weight, *statistics(inputs, with_mean=bias is not None))
        ctx.has_bias = bias is not None
        issue.touched(inputs, output)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        inputs, weight, *_ = ctx.saved_tensors
        return norm_gradients(inputs, weight, ctx.has_bias)


def statistics(inputs: torch.Tensor, with_mean: bool) -> list[torch.Tensor]:
    """Reciprocal deviation and, for LayerNorm, mean of each row."""
    rows = rows_of(inputs)
    return [allocate((rows,), torch.float32) for _ in range(2 if with_mean else 1)]


def norm_gradients(
    inputs: torch.Tensor, weight: torch.Tensor, has_bias: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Gradients of input, weight and bias."""
    issue.touched(inputs, inputs, inputs)  # input, output's gradient, input's gradient
    return (
        allocate(inputs.shape, inputs.dtype),
        allocate(weight.shape, weight.dtype),
        allocate(weight.shape, weight.dtype) if has_bias else None,
    )


class _Norm(torch.nn.Module):
    has_bias = False

    def __init__(
        self,
        normalized_shape: int | None = None,
        eps: float = 1e-5,
        sequence_parallel: bool = False,
        params_dtype: torch.dtype = torch.float32,
        zero_centered_gamma: bool = False,
        device: Any = None,
        hidden_size: int | None = None,  # the older name of `normalized_shape`
        **options: Any,
    ) -> None:
        super().__init__()
        width = hidden_size if normalized_shape is None else normalized_shape
        assert width is not None
        self.eps = eps
        self.sequence_parallel = sequence_parallel
        self.weight = new_parameter((width,), params_dtype)
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]
        self.bias = None
        if self.has_bias:
            self.bias = new_parameter((width,), params_dtype)
            self.bias.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _NormFunction.apply(inputs, self.weight, self.bias)
        return result


class LayerNorm(_Norm):
    has_bias = True


class RMSNorm(_Norm):
    pass
