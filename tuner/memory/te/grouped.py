"""GroupedLinear: one matrix product per expert (pytorch/module/grouped_linear.py).

Kept for backward: the input of all experts together, in low precision a copy of it.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from tuner.memory import issue
from tuner.memory.recorder import allocate
from tuner.memory.te import quantize
from tuner.memory.te.base import (
    TransformerEngineBaseModule,
    new_parameter,
    rows_of,
    weight_columns_needed,
)
from tuner.memory.te.offload_layers import keep_on_device
from tuner.memory.te.primary import QuantizedTensor
from tuner.memory.te.quantized import GRADIENT, INPUT, quantize_parts, saved_tensors
from tuner.memory.te.state import use_stream_workspaces, weight_gradient


class _GroupedFunction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        layer: Any,
        splits: list[int],
        use_bias: bool,
        cache_weights: bool,
        grad_enabled: bool,
        *parameters: torch.Tensor,
    ) -> torch.Tensor:
        count = layer.num_gemms
        weights = parameters[:count]
        low = quantize.state.enabled
        kept: Any = inputs
        copies = []
        if low:
            layer.prepare_low_precision(count)
            columns = grad_enabled and not layer.save_original_input
            operand = _parts(inputs, splits, INPUT, rows=True, columns=columns)
            kept = inputs if layer.save_original_input else operand
            columns = weight_columns_needed(inputs, grad_enabled)
            copies = [
                layer.quantized_weight(f"weight{index}", weight, cache_weights, columns=columns)
                for index, weight in enumerate(weights)
            ]
            if isinstance(weights[0], QuantizedTensor):
                copies = []  # saved as the parameters they are, whose columns may be freed
        use_stream_workspaces()
        output = allocate((rows_of(inputs), weights[0].shape[0]), inputs.dtype)
        width, depth = weights[0].shape
        rows = rows_of(inputs) // count
        recipe = quantize.state.recipe if low else None
        issue.gemm(rows, width, depth, inputs.dtype, recipe=recipe, batch=count, grouped=True)
        if grad_enabled:
            if low and kept is not inputs:
                kept.only_columns()
            ctx.save_for_backward(*saved_tensors([kept, *copies]), *parameters)
            keep_on_device(*saved_tensors(copies))
            ctx.splits = splits
            ctx.layer, ctx.low, ctx.recipe = layer, low, quantize.state.recipe
            ctx.input_shape, ctx.use_bias = inputs.shape, use_bias
        return output.view(-1, *inputs.shape[1:-1], weights[0].shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        layer, count = ctx.layer, ctx.layer.num_gemms
        kept = ctx.saved_tensors  # read once: offload brings tensors back at each reading
        parameters = kept[-len(list(layer.parameters())) :]
        gradient: Any = gradients[0].contiguous()
        if ctx.low:
            with quantize.using(ctx.recipe):
                gradient = _parts(gradient, ctx.splits, GRADIENT, rows=True, columns=True)
        input_gradient = allocate(ctx.input_shape, gradients[0].dtype)
        weights = parameters[:count]
        width, depth = weights[0].shape
        rows = rows_of(gradients[0]) // count
        recipe = ctx.recipe if ctx.low else None
        grouped = partial(
            issue.gemm, dtype=gradients[0].dtype, recipe=recipe, batch=count, grouped=True
        )
        grouped(rows, depth, width)
        operand = None
        if ctx.low and layer.save_original_input:
            with quantize.using(ctx.recipe):
                by_rows = ctx.recipe.per_tensor
                operand = _parts(kept[0], ctx.splits, INPUT, rows=by_rows, columns=True)
        written = 8 if layer.fuse_wgrad_accumulation else gradients[0].element_size()
        product = partial(grouped, width, depth, rows, output_bytes=written)
        if layer.delay_wgrad_compute:
            layer.keep_for_later(product, operand, gradient, kept)
        else:
            product()
        weight_grads: list[Any] = [None] * count
        if layer.fuse_wgrad_accumulation or not layer.delay_wgrad_compute:
            weight_grads = [
                weight_gradient(
                    getattr(layer, f"weight{index}"), layer.fuse_wgrad_accumulation, grouped=True
                )
                for index in range(count)
            ]
        del operand, gradient
        biases = parameters[count:]
        bias_grads = [allocate(bias.shape, bias.dtype) if ctx.use_bias else None for bias in biases]
        return (input_gradient, None, None, None, None, None, *weight_grads, *bias_grads)


def _parts(tensor: torch.Tensor, splits: list[int], role: str, *, rows: bool, columns: bool) -> Any:
    """Low-precision copies of the rows of each expert."""
    recipe = quantize.current_recipe()
    copy = quantize_parts(recipe, tensor.shape[-1], splits, role, rows=rows, columns=columns)
    issue.touched(tensor, *copy.tensors, kind="quantize")
    return copy


class GroupedLinear(TransformerEngineBaseModule):
    """`num_gemms` matrix products over consecutive rows of one input."""

    def __init__(
        self,
        num_gemms: int,
        in_features: int,
        out_features: int,
        fuse_wgrad_accumulation: bool = False,
        tp_size: int = 1,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype = torch.float32,
        parallel_mode: str | None = None,
        delay_wgrad_compute: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.num_gemms = num_gemms
        self.in_features, self.out_features = in_features, out_features
        self.parallel_mode = parallel_mode
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self.use_bias, self.return_bias = bias, return_bias
        split = {"column": 0, "row": 1}.get(parallel_mode or "")
        if parallel_mode == "column":
            self.out_features //= tp_size
        elif parallel_mode == "row":
            self.in_features //= tp_size
        for index in range(num_gemms):
            weight = new_parameter(
                (self.out_features, self.in_features), params_dtype, split_dim=split
            )
            self.register_parameter(f"weight{index}", weight)
        for index in range(num_gemms if bias else 0):
            self.register_parameter(
                f"bias{index}", new_parameter((self.out_features,), params_dtype)
            )
        self.delay_gradients()

    def forward(
        self, inputs: torch.Tensor, m_splits: list[int], is_first_microbatch: bool | None = None
    ) -> Any:
        weights = [getattr(self, f"weight{index}") for index in range(self.num_gemms)]
        biases = [getattr(self, f"bias{index}") for index in range(self.num_gemms * self.use_bias)]
        applied = self.use_bias and not self.return_bias
        self.updates_weight_copies = bool(is_first_microbatch)
        output = _GroupedFunction.apply(
            inputs,
            self,
            list(m_splits),
            applied,
            is_first_microbatch is not None,
            torch.is_grad_enabled(),
            *weights,
            *biases,
        )
        return (output, biases) if self.return_bias else output
