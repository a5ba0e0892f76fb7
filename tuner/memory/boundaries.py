"""Marks in a trace where the units of a model begin and end: embedding, layers, MTP, head.

Forward ends are known by hooks. Backward ends are known by an identity in the graph before each
layer, whose backward runs when the layer's has ended.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from trainables.megatron_core.cpu_device import replaced
from tuner.memory.attribution import BACKWARD_PHASES, FORWARD
from tuner.memory.cublas import PRODUCTS
from tuner.memory.markers import (
    BACKWARD_END,
    BACKWARD_START,
    FORWARD_END,
    FORWARD_START,
    HEAD_BACKWARD_END,
    LAYERS_FORWARD_END,
    MTP_BACKWARD_END,
    MTP_FORWARD_END,
    OWN_PRODUCT,
    layer_backward_end,
    layer_forward_end,
    layer_forward_start,
)
from tuner.memory.recorder import Recorder


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
    after_layers = HEAD_BACKWARD_END
    if getattr(model, "mtp_process", False):
        model.mtp.register_forward_hook(_after_mtp(recorder))
        after_layers = MTP_BACKWARD_END
    _final_norm(model.decoder).register_forward_pre_hook(_after_layers(recorder, after_layers))
    _mark_products(recorder)
    with replaced(
        schedules,
        forward_step=marked(schedules.forward_step, FORWARD_START, FORWARD_END),
        backward_step=marked(schedules.backward_step, BACKWARD_START, BACKWARD_END),
    ):
        yield


def _mark_products(recorder: Recorder) -> None:
    """Mark PyTorch's own products, which need its workspace (`cublas`)."""
    backward = {recorder.phase_code(name) for name in BACKWARD_PHASES}

    def marking(handler: Any) -> Any:
        def run(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
            recorder.mark(OWN_PRODUCT[recorder.phase in backward])
            return handler(recorder, func, args, kwargs)

        return run

    for name in PRODUCTS:
        operator = getattr(torch.ops.aten, name).default
        if operator in recorder.handlers:
            recorder.handlers[operator] = marking(recorder.handlers[operator])


def _final_norm(decoder: Any) -> Any:
    """The norm after the last layer; hybrid models name it otherwise (ssm/mamba_block.py)."""
    return getattr(decoder, "final_layernorm", None) or decoder.final_norm


def _after_layers(recorder: Recorder, end: str) -> Any:
    def hook(module: Any, args: Any) -> Any:
        recorder.mark(LAYERS_FORWARD_END)
        return (_Boundary.apply(args[0], recorder, end), *args[1:])

    return hook


def _after_mtp(recorder: Recorder) -> Any:
    def hook(module: Any, args: Any, output: Any) -> Any:
        recorder.mark(MTP_FORWARD_END)
        return _Boundary.apply(output, recorder, HEAD_BACKWARD_END)

    return hook


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


def parameters_by_unit(model: Any) -> dict[str, list[int]]:
    """Dense and expert parameters of each unit, and the bytes of its weights.

    Units are "embedding", "layer N", "mtp" and "head".
    """
    counts: dict[str, list[int]] = {"embedding": [0, 0, 0], "head": [0, 0, 0]}
    for name, parameter in model.named_parameters():
        expert = not getattr(parameter, "allreduce", True)
        unit = counts.setdefault(_unit_of(name), [0, 0, 0])
        unit[expert] += parameter.numel()
        unit[2] += sum(part.numel() * part.element_size() for part in _parts(parameter))
    return counts


def shapes_by_unit(model: Any) -> dict[str, list[list[int]]]:
    """For each unit its parameters in order (`composition.shards.Parameter`)."""
    vocabulary = ("word_embeddings.weight", "output_layer.weight")
    shapes: dict[str, list[list[int]]] = {}
    for name, parameter in model.named_parameters():
        flat = parameter.dim() == 1 or name.endswith(".bias")
        expert = not getattr(parameter, "allreduce", True)
        flags = [int(flat), int(expert), int(name.endswith(vocabulary))]
        shapes.setdefault(_unit_of(name), []).append([parameter.numel(), *flags])
    return shapes


def low_precision_weights(model: Any, recorder: Recorder) -> list[int]:
    """The blocks that hold weights in low precision."""
    parts = [part for p in model.parameters() if hasattr(p, "copy") for part in _parts(p)]
    blocks = [recorder.block_of(part) for part in parts]
    return [block for block in blocks if block is not None]


def _parts(parameter: Any) -> list[torch.Tensor]:
    """The tensors that hold a weight: its rows, columns and scales in low precision."""
    return list(parameter.copy.tensors) if hasattr(parameter, "copy") else [parameter]


def placeholders_by_unit(model: Any) -> dict[str, dict[str, int]]:
    """Bytes of the placeholder gradients that the weights of each unit share, by shape."""
    from tuner.memory.te.state import process

    found: dict[str, dict[str, int]] = {}
    tied = getattr(model, "share_embeddings_and_output_weights", False)
    for name, parameter in model.named_parameters():
        unit = _unit_of(name)
        if unit == "embedding":  # looked up, and multiplied by the head where weights are tied
            if not (tied and name.endswith("word_embeddings.weight")):
                continue
            unit = "head"
        key = (*parameter.shape, parameter.dtype)
        if key in process.dummy_gradients:
            size = parameter.numel() * parameter.element_size()
            found.setdefault(unit, {})[str(key)] = size
    return found


def _unit_of(name: str) -> str:
    """The unit that the parameter `name` of a model belongs to."""
    parts = name.split(".")
    if parts[:2] == ["decoder", "layers"]:
        return f"layer {parts[2]}"
    return parts[0] if parts[0] in ("embedding", "mtp") else "head"
