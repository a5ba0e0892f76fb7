"""Recompute of a whole function (pytorch/distributed.py, `_CheckpointFunction`).

Keeps the tensor arguments; with `distribute_saved_activations` the first one shrinks to this
rank's part, and is gathered again for the second forward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from tuner.memory import issue
from tuner.memory.recorder import allocate
from tuner.memory.te import quantize
from tuner.memory.te.base import group_size


@contextmanager
def activation_recompute_forward(
    activation_recompute: bool = False, recompute_phase: bool = False
) -> Iterator[None]:
    flags = quantize.recompute
    saved = flags.enabled, flags.replaying
    flags.enabled = activation_recompute and quantize.state.enabled
    flags.replaying = recompute_phase
    try:
        yield
    finally:
        flags.enabled, flags.replaying = saved


def is_fp8_activation_recompute_enabled() -> bool:
    return quantize.recompute.enabled


def in_fp8_activation_recompute_phase() -> bool:
    return quantize.recompute.replaying


class _Checkpoint(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        function: Callable[..., Any],
        distribute: bool,
        group: Any,
        kwargs: Any,
        *args: Any,
    ) -> Any:
        with torch.no_grad(), activation_recompute_forward(True, False):
            outputs = function(*args, **kwargs)
        ctx.distribute = distribute
        if distribute:
            first = args[0]
            ctx.first_shape = first.shape
            first.data = allocate((first.numel() // group_size(group),), first.dtype)
        ctx.arguments = [None if isinstance(arg, torch.Tensor) else arg for arg in args]
        ctx.save_for_backward(*(arg if isinstance(arg, torch.Tensor) else None for arg in args))
        ctx.function, ctx.kwargs, ctx.group = function, kwargs, group
        ctx.quantization = (quantize.state.enabled, quantize.state.recipe)
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> tuple[Any, ...]:
        saved = ctx.saved_tensors
        inputs = [
            arg if tensor is None else tensor
            for tensor, arg in zip(saved, ctx.arguments, strict=True)
        ]
        if ctx.distribute:
            inputs[0].data = allocate(ctx.first_shape, inputs[0].dtype)
            issue.collective("all_gather", issue.size_of([inputs[0]]), ctx.group)
        detached = []
        for item in inputs:
            if isinstance(item, torch.Tensor):
                required = item.requires_grad
                item = item.detach()
                item.requires_grad = required
            detached.append(item)
        enabled, recipe = ctx.quantization
        with (
            torch.enable_grad(),
            activation_recompute_forward(True, True),
            quantize.fp8_autocast(enabled=enabled, fp8_recipe=recipe),
        ):
            outputs = ctx.function(*detached, **ctx.kwargs)
        if isinstance(outputs, torch.Tensor):
            outputs = (outputs,)
        pairs = [
            (output, gradient)
            for output, gradient in zip(outputs, gradients, strict=False)
            if isinstance(output, torch.Tensor) and output.requires_grad
        ]
        torch.autograd.backward([pair[0] for pair in pairs], [pair[1] for pair in pairs])
        grads = [item.grad if isinstance(item, torch.Tensor) else None for item in detached]
        return (None, None, None, None, *grads)


def checkpoint(
    function: Callable[..., Any],
    *args: Any,
    distribute_saved_activations: bool = False,
    get_rng_state_tracker: Any = None,
    tp_group: Any = None,
    **kwargs: Any,
) -> Any:
    return _Checkpoint.apply(function, distribute_saved_activations, tp_group, kwargs, *args)
