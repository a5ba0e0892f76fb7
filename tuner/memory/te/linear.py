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
    weight_columns_needed,
)
from tuner.memory.te.norm import norm_gradients, statistics
from tuner.memory.te.offload import mark_activation_offload
from tuner.memory.te.offload_layers import keep_on_device
from tuner.memory.te.primary import QuantizedTensor
from tuner.memory.te.quantized import (
    GRADIENT,
    INPUT,
    Quantized,
    flat_shape,
    gathered,
    saved_tensors,
)
from tuner.memory.te.state import use_workspace, weight_gradient
from tuner.memory.te.userbuffers import OVERLAPS, in_userbuffer

_REDUCING_DGRAD = {"ub_bulk_wgrad", "ub_overlap_rs_dgrad"}
"""Overlaps that reduce the gradient of a column-parallel layer's input."""


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
        if low:
            layer.prepare_low_precision(1)
        if norm_weight is not None:
            stats = statistics(inputs, with_mean=norm_bias is not None)
            operand = None if low else allocate(inputs.shape, inputs.dtype)
            issue.touched(inputs, inputs)
        if low:
            normalizes = norm_weight is not None
            operand = _low_operand(layer, inputs, gathers, normalizes, grad_enabled)
        whole = _gathered(inputs, operand, layer) if gathers else None
        weight_copy = None
        if low:
            columns = grad_enabled
            if norm_weight is None:
                columns = weight_columns_needed(inputs, grad_enabled)
            weight_copy = layer.quantized_weight("weight", weight, cache_weight, columns=columns)
            if isinstance(weight, QuantizedTensor):
                weight_copy = None  # saved as the parameter it is, whose columns may be freed
        rows = rows_of(inputs) * (layer.tp_size if gathers else 1)
        use_workspace()
        with in_userbuffer(layer.parallel_mode == "row" and "ub_overlap_rs" in layer.overlaps):
            output = allocate((rows, weight.shape[0]), inputs.dtype)
        recipe = quantize.state.recipe if low else None
        issue.gemm(rows, weight.shape[0], weight.shape[1], inputs.dtype, recipe=recipe)
        del whole
        if layer.parallel_mode == "row" and layer.tp_size > 1:
            output = _reduced(layer, output, rows)
        if grad_enabled:
            kept = _kept_operand(layer, inputs, operand, gathers)
            saved = saved_tensors([weight, norm_weight, kept, *stats, weight_copy])
            if norm_weight is not None:
                saved.append(inputs)
            mark_activation_offload(inputs, *saved_tensors([kept]), *stats)
            keep_on_device(*saved_tensors([weight_copy]))
            ctx.save_for_backward(*saved)
            ctx.kept_low = isinstance(kept, Quantized)
            ctx.layer, ctx.gathers, ctx.low = layer, gathers, low
            ctx.input_shape, ctx.dtype = inputs.shape, inputs.dtype
            ctx.has_bias, ctx.has_norm_bias = bias is not None, norm_bias is not None
            ctx.normalizes = norm_weight is not None
            ctx.recipe = quantize.state.recipe
        return output.view(-1, *inputs.shape[1:-1], weight.shape[0])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        layer = ctx.layer
        saved = ctx.saved_tensors  # read once: offload brings tensors back at each reading
        weight, norm_weight, *_ = saved
        gradient = _output_gradient(ctx, gradients[0])
        operand = _backward_operand(ctx, saved[2])
        width = ctx.input_shape[-1]
        rows = math.prod(ctx.input_shape[:-1])
        all_rows = rows * (layer.tp_size if ctx.gathers else 1)
        # The GEMM's output stays until the function returns, also where it is reduced to a shard.
        with in_userbuffer(ctx.gathers and bool(_REDUCING_DGRAD & layer.overlaps)):
            whole = allocate((all_rows, width), ctx.dtype)
        recipe = ctx.recipe if ctx.low else None
        issue.gemm(all_rows, width, weight.shape[0], ctx.dtype, recipe=recipe)
        input_gradient = allocate((rows, width), ctx.dtype) if ctx.gathers else whole
        if layer.parallel_mode == "column" and layer.tp_size > 1:
            operation = "reduce_scatter" if ctx.gathers else "all_reduce"
            issue.collective(operation, issue.size_of([whole]), layer.tp_group, asynchronous=True)
        if isinstance(operand, Quantized):
            operand.add_columns()
        product = partial(_weight_product, weight, all_rows, ctx.dtype, recipe, layer)
        if layer.delay_wgrad_compute:
            layer.keep_for_later(product, operand, gradient, saved)
        else:
            product()
        weight_grad = None
        if layer.fuse_wgrad_accumulation or not layer.delay_wgrad_compute:
            # Not the saved weight: offload gives it back without its attributes.
            weight_grad = weight_gradient(layer.weight, layer.fuse_wgrad_accumulation)
        bias_grad = allocate((weight.shape[0],), weight.dtype) if ctx.has_bias else None
        del operand, gradient
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
    beside = "ub_overlap_rs" in layer.overlaps
    issue.collective("reduce_scatter", size, layer.tp_group, asynchronous=beside)
    return allocate((rows // layer.tp_size, output.shape[1]), output.dtype)


def _low_operand(
    layer: Any, inputs: torch.Tensor, gathers: bool, normalizes: bool, grad_enabled: bool
) -> Quantized:
    """The low-precision input of the forward product, as this rank holds it.

    Only delayed scaling quantises in the kernel of the norm; others norm to a tensor first
    (`apply_normalization`).
    """
    recipe = quantize.current_recipe()
    columns = grad_enabled and not layer.save_original_input
    if gathers and recipe.per_tensor:
        columns = False  # gathered by rows again in backward
    normed = None
    if normalizes and recipe.kind != "delayed":
        normed = allocate(inputs.shape, inputs.dtype)
    operand = quantize.quantized(inputs, INPUT, rows=True, columns=columns)
    del normed
    return operand


def _kept_operand(layer: Any, inputs: torch.Tensor, operand: Any, gathers: bool) -> Any:
    """What is kept of the product's input: of a low-precision one, what backward reads."""
    if not isinstance(operand, Quantized):
        return operand
    if layer.save_original_input:
        return inputs
    if gathers and operand.recipe.per_tensor:
        operand.only_rows()
    else:
        operand.only_columns()
    return operand


def _gathered(inputs: torch.Tensor, operand: Any, layer: Any) -> Any:
    """The input of all ranks for the forward product."""
    if isinstance(operand, Quantized):
        return _gathered_copies(operand, layer, columns=False, overlap="ub_overlap_ag")
    return _full_rows(inputs.shape, inputs.dtype, layer, overlap="ub_overlap_ag")


def _gathered_copies(
    source: Quantized, layer: Any, *, columns: bool, overlap: str, beside: bool = False
) -> Quantized:
    buffered = overlap in layer.overlaps
    with in_userbuffer(buffered):
        whole = gathered(source, layer.tp_size, columns=columns)
    size = issue.size_of(whole.columns or whole.rows)
    issue.collective("all_gather", size, layer.tp_group, asynchronous=beside or buffered)
    return whole


def _full_rows(
    shape: torch.Size, dtype: torch.dtype, layer: Any, *, overlap: str, beside: bool = False
) -> torch.Tensor:
    """The buffer an all-gather along the first dimension fills, `beside` other work or not.

    It is a userbuffer where the layer overlaps the exchange `overlap`.
    """
    buffered = overlap in layer.overlaps
    with in_userbuffer(buffered):
        whole = allocate((shape[0] * layer.tp_size, *shape[1:]), dtype)
    size = issue.size_of([whole])
    issue.collective("all_gather", size, layer.tp_group, asynchronous=beside or buffered)
    return whole


def _backward_operand(ctx: Any, kept: torch.Tensor) -> Any:
    """The input for the weight gradient where it is not the kept one: quantised, gathered."""
    layer = ctx.layer
    if not ctx.low:
        if not ctx.gathers:
            return None
        return _full_rows(ctx.input_shape, ctx.dtype, layer, overlap="ub_bulk_dgrad", beside=True)
    by_rows = ctx.recipe.per_tensor
    if ctx.kept_low:
        if not ctx.gathers:
            return None
        source = Quantized(ctx.recipe, INPUT, flat_shape(ctx.input_shape))
    else:
        columns = not (by_rows and ctx.gathers)
        with quantize.using(ctx.recipe):
            source = quantize.quantized(kept, INPUT, rows=by_rows, columns=columns)
    if not ctx.gathers:
        return source
    return _gathered_copies(
        source, layer, columns=not by_rows, overlap="ub_bulk_dgrad", beside=True
    )


def _output_gradient(ctx: Any, gradient: torch.Tensor) -> Any:
    """The gradient as the products read it: gathered over ranks, in low precision by rows and
    by columns (`grad_output_preprocess`)."""
    layer = ctx.layer
    gradient = gradient.contiguous()
    gathers = layer.parallel_mode == "row" and layer.sequence_parallel and layer.tp_size > 1
    if not ctx.low:
        if not gathers:
            return gradient
        return _full_rows(gradient.shape, gradient.dtype, layer, overlap="ub_overlap_ag")
    with quantize.using(ctx.recipe):
        columns = not (gathers and ctx.recipe.per_tensor)
        copy = quantize.quantized(gradient, GRADIENT, rows=True, columns=columns)
    if not gathers:
        return copy
    whole = _gathered_copies(copy, layer, columns=False, overlap="ub_overlap_ag")
    if ctx.recipe.per_tensor:
        whole.add_columns()
    else:
        columns_gathered = _gathered_copies(copy, layer, columns=True, overlap="ub_overlap_ag")
        whole.columns = columns_gathered.columns
    return whole


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
        self.overlaps = frozenset(
            name for name in OVERLAPS if self.sequence_parallel and options.get(name)
        )
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
        self.delay_gradients()

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
