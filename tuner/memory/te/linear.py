"""Linear and LayerNormLinear (pytorch/module/linear.py, layernorm_linear.py).

Kept for backward: the GEMM's input as this rank holds it (under sequence parallelism the shard,
gathered again in backward), and for LayerNormLinear also the norm's input and statistics. In low
precision the GEMM's input is kept as a low-precision copy, and so are the weights.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch

from tuner.memory import issue
from tuner.memory.recorder import allocate
from tuner.memory.te import quantize
from tuner.memory.te.base import (
    Initializer,
    TransformerEngineBaseModule,
    group_size,
    new_parameter,
    rows_of,
)
from tuner.memory.te.norm import norm_gradients, statistics
from tuner.memory.te.offload import mark_activation_offload
from tuner.memory.te.state import use_workspace, weight_gradient


class _LinearFunction(torch.autograd.Function):
    """Norm (where `norm_weight` is given) and matrix product, with tensor-parallel exchange."""

    @staticmethod
    def forward(
        ctx: Any,
        inputs: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        norm_bias: torch.Tensor | None,
        layer: Any,
        cache_weight: bool,
        grad_enabled: bool,
    ) -> torch.Tensor:
        low = quantize.state.enabled
        gathers = layer.parallel_mode == "column" and layer.sequence_parallel and layer.tp_size > 1
        stats: list[torch.Tensor] = []
        operand: Any = inputs
        if norm_weight is not None:
            stats = statistics(inputs, with_mean=norm_bias is not None)
            operand = None if low else allocate(inputs.shape, inputs.dtype)
            issue.touched(inputs, inputs)
        kept = _kept_input(layer, inputs, operand, gathers, low, grad_enabled)
        weight_copy = (
            layer.quantized_weight("weight", weight, cache_weight, columns=grad_enabled)
            if low
            else []
        )
        rows = rows_of(inputs) * (layer.tp_size if gathers else 1)
        gathered = _gathered(inputs, layer, low) if gathers else None
        use_workspace()
        output = allocate((rows, weight.shape[0]), inputs.dtype)
        recipe = quantize.state.recipe if low else None
        issue.gemm(rows, weight.shape[0], weight.shape[1], inputs.dtype, recipe=recipe)
        del gathered, operand
        if layer.parallel_mode == "row" and layer.tp_size > 1:
            output = _reduced(layer, output, rows)
        if grad_enabled:
            saved = [weight, norm_weight, *kept, *stats, *weight_copy]
            if norm_weight is not None:
                saved.append(inputs)
            mark_activation_offload(inputs, *kept, *stats)
            ctx.save_for_backward(*saved)
            ctx.layer, ctx.gathers, ctx.low = layer, gathers, low
            ctx.input_shape, ctx.dtype = inputs.shape, inputs.dtype
            ctx.has_bias, ctx.has_norm_bias = bias is not None, norm_bias is not None
            ctx.normalizes = norm_weight is not None
            ctx.recipe = quantize.state.recipe
            ctx.kept = len(kept)
        return output.view(-1, *inputs.shape[1:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        layer = ctx.layer
        saved = ctx.saved_tensors  # read once: offload brings tensors back at each reading
        weight, norm_weight, *_ = saved
        gradient = _output_gradient(ctx, gradients[0])
        gathered = None
        if ctx.gathers:
            gathered = _full_rows(ctx.input_shape, ctx.dtype, layer, low=ctx.low, beside=True)
        width = ctx.input_shape[-1]
        rows = math.prod(ctx.input_shape[:-1])
        all_rows = rows * (layer.tp_size if ctx.gathers else 1)
        # The GEMM's output stays until the function returns, also where it is reduced to a shard.
        whole = allocate((all_rows, width), ctx.dtype)
        recipe = ctx.recipe if ctx.low else None
        issue.gemm(all_rows, width, weight.shape[0], ctx.dtype, recipe=recipe)
        input_gradient = allocate((rows, width), ctx.dtype) if ctx.gathers else whole
        if layer.parallel_mode == "column" and layer.tp_size > 1:
            operation = "reduce_scatter" if ctx.gathers else "all_reduce"
            issue.collective(operation, issue.size_of([whole]), layer.tp_group, asynchronous=True)
        product = partial(_weight_product, weight, all_rows, ctx.dtype, recipe, layer)
        if layer.delay_wgrad_compute:
            layer.keep_for_later(product, gathered, gradient, saved)
            weight_grad = None
        else:
            product()
            weight_grad = weight_gradient(weight, layer.fuse_wgrad_accumulation)
        bias_grad = allocate((weight.shape[0],), weight.dtype) if ctx.has_bias else None
        del gathered, gradient
        norm_grads: tuple[Any, Any] = (None, None)
        if ctx.normalizes:
            inputs = saved[-1]
            input_gradient, *norms = norm_gradients(inputs, norm_weight, ctx.has_norm_bias)
            norm_grads = (norms[0], norms[1])
        return (
            input_gradient.view(ctx.input_shape),
            weight_grad,
            bias_grad,
            *norm_grads,
            None,
            None,
            None,
        )


def _weight_product(
    weight: torch.Tensor, rows: int, dtype: torch.dtype, recipe: Any, layer: Any
) -> None:
    """Record the GEMM of a weight gradient; fused, it adds to a float32 `main_grad`."""
    width, depth = weight.shape
    written = 8 if layer.fuse_wgrad_accumulation else dtype.itemsize
    issue.gemm(width, depth, rows, dtype, recipe=recipe, output_bytes=written)


def _reduced(layer: Any, output: torch.Tensor, rows: int) -> torch.Tensor:
    """The output of a row-parallel product summed over ranks: this rank's rows, or all."""
    size = issue.size_of([output])
    if not layer.sequence_parallel:
        issue.collective("all_reduce", size, layer.tp_group)
        return output
    issue.collective("reduce_scatter", size, layer.tp_group)
    return allocate((rows // layer.tp_size, output.shape[1]), output.dtype)


def _kept_input(
    layer: Any, inputs: torch.Tensor, operand: Any, gathers: bool, low: bool, grad_enabled: bool
) -> list[torch.Tensor]:
    """What is kept of the GEMM's input; in low precision also what the forward GEMM reads."""
    if not low:
        return [operand]
    if layer.save_original_input:
        quantize.quantized(inputs, rows=True, columns=False)
        return [inputs]
    per_tensor = quantize.state.recipe.float8_per_tensor_scaling()
    by_rows = gathers and per_tensor  # gathered by rows again in backward
    copies = quantize.quantized(inputs, rows=True, columns=grad_enabled and not by_rows)
    # The forward GEMM has read the rows; the weight gradient will read the columns.
    return copies[:1] if by_rows else copies[-1:]


def _gathered(inputs: torch.Tensor, layer: Any, low: bool) -> torch.Tensor:
    return _full_rows(inputs.shape, inputs.dtype, layer, low=low)


def _full_rows(
    shape: torch.Size, dtype: torch.dtype, layer: Any, *, low: bool, beside: bool = False
) -> torch.Tensor:
    """The buffer an all-gather along the first dimension fills; `beside` other work or not."""
    size = (shape[0] * layer.tp_size, *shape[1:])
    whole = allocate(size, torch.uint8 if low else dtype)
    issue.collective("all_gather", issue.size_of([whole]), layer.tp_group, asynchronous=beside)
    return whole


def _output_gradient(ctx: Any, gradient: torch.Tensor) -> Any:
    """The gradient as the GEMMs read it: gathered over ranks, in low precision twice."""
    layer = ctx.layer
    gradient = gradient.contiguous()
    if layer.parallel_mode == "row" and layer.sequence_parallel and layer.tp_size > 1:
        gradient = _full_rows(gradient.shape, gradient.dtype, layer, low=False)
    if not ctx.low:
        return gradient
    saved = quantize.state.recipe
    quantize.state.recipe = ctx.recipe
    try:
        return quantize.quantized(gradient, rows=True, columns=True)
    finally:
        quantize.state.recipe = saved


class Linear(TransformerEngineBaseModule):
    """Matrix product, split over the ranks of `tp_group` by columns or rows of the weight."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        sequence_parallel: bool = False,
        fuse_wgrad_accumulation: bool = False,
        tp_group: Any = None,
        tp_size: int = 1,
        get_rng_state_tracker: Any = None,
        init_method: Initializer | None = None,
        bias: bool = True,
        return_bias: bool = False,
        params_dtype: torch.dtype = torch.float32,
        parallel_mode: str | None = None,
        delay_wgrad_compute: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.tp_group = tp_group
        self.tp_size = group_size(tp_group) if tp_group is not None else tp_size
        self.parallel_mode = parallel_mode
        self.sequence_parallel = self.tp_size > 1 and sequence_parallel
        self.fuse_wgrad_accumulation = fuse_wgrad_accumulation
        self.delay_wgrad_compute = delay_wgrad_compute
        self.use_bias, self.return_bias = bias, return_bias
        if parallel_mode == "column":
            self.out_features //= self.tp_size
        elif parallel_mode == "row":
            self.in_features //= self.tp_size
        split = {"column": 0, "row": 1}.get(parallel_mode or "")
        self.weight = new_parameter(
            (self.out_features, self.in_features), params_dtype, split_dim=split
        )
        self.bias = None
        if bias:
            self.bias = new_parameter(
                (self.out_features,),
                params_dtype,
                split_dim=0 if parallel_mode == "column" else None,
                sequence_parallel=parallel_mode == "row" and self.sequence_parallel,
            )

    def forward(self, inputs: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        applied = None if self.return_bias else self.bias
        self.updates_weight_copies = bool(is_first_microbatch)
        output = _LinearFunction.apply(
            inputs,
            self.weight,
            applied,
            None,
            None,
            self,
            is_first_microbatch is not None,
            torch.is_grad_enabled(),
        )
        return (output, self.bias) if self.return_bias else output


class LayerNormLinear(Linear):
    """LayerNorm or RMSNorm, then a matrix product."""

    def __init__(
        self,
        in_features: int,
        out_features: int,
        eps: float = 1e-5,
        normalization: str = "LayerNorm",
        zero_centered_gamma: bool = False,
        params_dtype: torch.dtype = torch.float32,
        **options: Any,
    ) -> None:
        super().__init__(in_features, out_features, params_dtype=params_dtype, **options)
        self.eps = eps
        self.normalization = normalization
        self.zero_centered_gamma = zero_centered_gamma
        self.layer_norm_weight = new_parameter((in_features,), params_dtype)
        self.layer_norm_weight.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]
        self.layer_norm_bias = None
        if normalization == "LayerNorm":
            self.layer_norm_bias = new_parameter((in_features,), params_dtype)
            self.layer_norm_bias.sequence_parallel = self.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, inputs: torch.Tensor, is_first_microbatch: bool | None = None) -> Any:
        applied = None if self.return_bias else self.bias
        self.updates_weight_copies = bool(is_first_microbatch)
        output = _LinearFunction.apply(
            inputs,
            self.weight,
            applied,
            self.layer_norm_weight,
            self.layer_norm_bias,
            self,
            is_first_microbatch is not None,
            torch.is_grad_enabled(),
        )
        return (output, self.bias) if self.return_bias else output
