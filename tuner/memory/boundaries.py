"""Marks in a trace where the units of a model begin and end: embedding, layers, head.

Forward ends are known by hooks. Backward ends are known by an identity in the graph before each
layer, whose backward runs when the layer's has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainables.megatron_core.cpu_device import replaced
from tuner.memory.attribution import FORWARD
from tuner.memory.recorder import Recorder

FORWARD_START = "forward start"
FORWARD_END = "forward end"
BACKWARD_START = "backward start"
BACKWARD_END = "backward end"
HEAD_BACKWARD_END = "head backward end"


def layer_forward_start(layer: int) -> str:
    return f"layer {layer} forward start"


def layer_forward_end(layer: int) -> str:
    return f"layer {layer} forward end"


def layer_backward_end(layer: int) -> str:
    return f"layer {layer} backward end"


class _Boundary(torch.autograd.Function):
    """The identity; its backward sets a marker."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, recorder: Recorder, name: str) -> torch.Tensor:
        ctx.recorder, ctx.name = recorder, name
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        ctx.recorder.mark(ctx.name)
        return gradients[0], None, None


@contextmanager
def boundaries_marked(recorder: Recorder, model: Any) -> Iterator[None]:
    """Set the markers of this module for `model`, a whole unwrapped model, inside this context."""
    from megatron.core.pipeline_parallel import schedules

    def marked(function: Any, start: str, end: str) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            recorder.mark(start)
            result = function(*args, **kwargs)
            recorder.mark(end)
            return result

        return run

    for number, layer in enumerate(model.decoder.layers):
        layer.register_forward_pre_hook(_before(recorder, number), with_kwargs=True)
        layer.register_forward_hook(_after(recorder, number))
    model.decoder.final_layernorm.register_forward_pre_hook(
        lambda module, args: (_Boundary.apply(args[0], recorder, HEAD_BACKWARD_END), *args[1:])
    )
    with replaced(
        schedules,
        forward_step=marked(schedules.forward_step, FORWARD_START, FORWARD_END),
        backward_step=marked(schedules.backward_step, BACKWARD_START, BACKWARD_END),
    ):
        yield


def _before(recorder: Recorder, number: int) -> Any:
    forward = recorder.phase_code(FORWARD)

    def hook(module: Any, args: Any, kwargs: Any) -> Any:
        if recorder.phase == forward:  # and not recomputing
            recorder.mark(layer_forward_start(number))
        end = layer_backward_end(number)
        if "hidden_states" in kwargs:
            hidden = _Boundary.apply(kwargs["hidden_states"], recorder, end)
            return args, {**kwargs, "hidden_states": hidden}
        return (_Boundary.apply(args[0], recorder, end), *args[1:]), kwargs

    return hook


def _after(recorder: Recorder, number: int) -> Any:
    forward = recorder.phase_code(FORWARD)

    def hook(module: Any, args: Any, output: Any) -> None:
        if recorder.phase == forward:
            recorder.mark(layer_forward_end(number))

    return hook
