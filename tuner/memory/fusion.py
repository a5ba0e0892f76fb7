"""Functions that a compiler turns into one kernel.

Megatron-Core hands its pointwise functions to `torch.compile` (megatron/core/jit.py). One kernel
allocates its outputs and nothing between; differentiated, it keeps what its backward kernel reads:
its inputs, since recomputing pointwise work is cheaper than storing it (the min-cut partition of
AOTAutograd). `fusing()` puts a compiler with this behaviour in the place of `torch.compile`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from trainables.megatron_core.cpu_device import _replaced
from tuner.memory.recorder import Recorder


class _Current:
    recorder: Recorder | None = None


_current = _Current()


@contextmanager
def fusing() -> Iterator[None]:
    """Functions compiled inside this context become single kernels.

    To be active while Megatron-Core is imported, which is when it compiles.
    """

    def compile_function(function: Any = None, **options: object) -> Any:
        if function is None:
            return lambda later: compile_function(later, **options)
        special = _SPECIAL.get(getattr(function, "__name__", ""))
        return special or fused(function)

    with _replaced(torch, compile=compile_function):
        yield


@contextmanager
def kernels_recorded_by(recorder: Recorder) -> Iterator[None]:
    """Record the outputs of fused functions, and not what they make on the way."""
    _current.recorder = recorder
    try:
        yield
    finally:
        _current.recorder = None


def fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` as one kernel; its tensor arguments may be nested in tuples and lists."""

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        leaves, structure = tree_flatten((args, kwargs))
        differentiated = torch.is_grad_enabled() and any(
            isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in leaves
        )
        if differentiated:
            return _Fused.apply(function, structure, *leaves)
        return _in_one_kernel(function, args, kwargs)

    return run


def _in_one_kernel(function: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    recorder = _current.recorder
    if recorder is None or recorder.paused:
        return function(*args, **kwargs)
    recorder.paused = True
    try:
        result = function(*args, **kwargs)
    finally:
        recorder.paused = False
    for leaf in tree_flatten(result)[0]:
        if isinstance(leaf, torch.Tensor):
            recorder.see(leaf)
    return result


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, function: Any, structure: Any, *leaves: Any) -> Any:
        args, kwargs = tree_unflatten(leaves, structure)
        result = _in_one_kernel(function, args, kwargs)
        ctx.save_for_backward(*(leaf for leaf in leaves if isinstance(leaf, torch.Tensor)))
        ctx.tensors = [isinstance(leaf, torch.Tensor) for leaf in leaves]
        return result

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        saved = iter(ctx.saved_tensors)
        grads = [
            _like(next(saved), needed) if is_tensor else None
            for is_tensor, needed in zip(ctx.tensors, ctx.needs_input_grad[2:], strict=True)
        ]
        return (None, None, *grads)


def _like(tensor: torch.Tensor, needed: bool) -> torch.Tensor | None:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta") if needed else None


class _BiasDropoutAdd(torch.autograd.Function):
    """fusions/fused_bias_dropout.py: linear but for the mask, which is all that is kept."""

    @staticmethod
    def forward(ctx: Any, inputs: Any, bias: Any, residual: torch.Tensor, prob: float) -> Any:
        ctx.dropped, ctx.has_bias = prob > 0.0, bias is not None
        ctx.dtypes = inputs.dtype, residual.dtype
        if ctx.dropped:
            ctx.save_for_backward(torch.empty(inputs.shape, dtype=torch.bool, device="meta"))
        if ctx.has_bias:
            ctx.bias_shape, ctx.bias_dtype = bias.shape, bias.dtype
        return torch.empty(inputs.shape, dtype=inputs.dtype, device="meta")

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        gradient = gradients[0]
        inputs = torch.empty_like(gradient) if ctx.dropped else gradient
        bias = None
        if ctx.has_bias:
            bias = torch.empty(ctx.bias_shape, dtype=ctx.bias_dtype, device="meta")
        residual = gradient if ctx.dtypes[1] is gradient.dtype else gradient.to(ctx.dtypes[1])
        return inputs, bias, residual, None


def bias_dropout_add(x_with_bias: Any, residual: torch.Tensor, prob: float) -> torch.Tensor:
    """Residual plus dropped-out sum of input and bias."""
    inputs, bias = x_with_bias
    result: torch.Tensor = _BiasDropoutAdd.apply(inputs, bias, residual, prob)
    return result


_SPECIAL: dict[str, Callable[..., Any]] = {"bias_dropout_add_fused_train": bias_dropout_add}
