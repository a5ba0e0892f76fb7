"""Activation offload by layers from Transformer Engine 2.10 on (pytorch/cpu_offload.py).

Whatever the first layers save for backward leaves the device, parameters and low-precision weights
apart; views of the attention's inputs leave with their base. Layer i of n offloaded ones of N is
gone when layer N - n + i starts, and is asked back when layer N - 1 - n + i goes backward. Double
buffering has no effect any more.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from tuner.memory import issue
from tuner.memory.recorder import active_recorder, allocate

_KEEP = "_TE_do_not_offload"  # Megatron-Core reads it, too
_WITH_BASE = "_te_offload_base"


def keep_on_device(*tensors: Any) -> None:
    """`mark_not_offload`."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            setattr(tensor, _KEEP, True)


def offload_with_base(*tensors: Any) -> None:
    """`start_offload(..., offload_base_tensor=True)`: these may be views of one tensor."""
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor):
            setattr(tensor, _WITH_BASE, True)


class _Layer:
    """What one layer saved: `OffloadableLayerState`."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        self._saved: list[torch.Tensor] = []
        self._origins: list[torch.Tensor] = []
        self._shapes: list[tuple[torch.Size, torch.dtype]] = []
        self._away = False
        self._back: list[torch.Tensor] = []

    def push(self, tensor: torch.Tensor) -> Any:
        if not _leaves(tensor):
            return tensor
        self._saved.append(tensor)
        return len(self._saved) - 1

    def pop(self, tag: Any) -> torch.Tensor:
        if isinstance(tag, torch.Tensor):
            return tag
        if not self._away:
            return self._saved[tag]
        shape, stride, offset, index = self._views[tag]
        return self._back[index].as_strided(shape, stride, offset)

    def start(self) -> None:
        """Copy to the host; the tensors stay until `release`."""
        numbers: dict[int, int] = {}
        self._views: list[tuple[Any, Any, int, int]] = []
        for tensor in self._saved:
            origin = _origin(tensor)
            index = numbers.setdefault(id(origin), len(self._origins))
            if index == len(self._origins):
                self._origins.append(origin)
                self._shapes.append((origin.shape, origin.dtype))
                issue.memory(origin.numel() * origin.element_size(), "host_copy")
            offset = int(tensor.storage_offset())
            self._views.append((tensor.shape, tensor.stride(), offset, index))

    def release(self) -> None:
        self._away = True
        self._saved, self._origins = [], []

    def reload(self) -> None:
        for shape, dtype in self._shapes:
            self._back.append(allocate(shape, dtype))
            issue.memory(math.prod(shape) * dtype.itemsize, "host_copy")


def _leaves(tensor: torch.Tensor) -> bool:
    recorder = active_recorder()
    if isinstance(tensor, torch.nn.Parameter) or getattr(tensor, _KEEP, False):
        return False
    if recorder is not None and recorder.on_host(tensor):
        return False
    return tensor.is_contiguous() or bool(getattr(tensor, _WITH_BASE, False))


def _origin(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that is copied in its place."""
    base = tensor._base
    if base is None:
        return tensor
    if getattr(tensor, _WITH_BASE, False) or base.numel() == tensor.numel():
        return base
    return tensor


class _Synchronizer:
    """`DefaultOffloadSynchronizer`: which layers leave when, and come back when."""

    def __init__(self, layers: int, offloaded: int) -> None:
        self.count, self.offloaded = layers, offloaded
        self.layers = [_Layer() for _ in range(layers)]
        self.forward_layer: int | None = None
        self.current = 0
        self.last_backward: int | None = None

    def step_forward(self) -> int:
        if self.forward_layer is None or self.forward_layer == self.count - 1:
            for layer in self.layers:
                layer.forget()
            self.forward_layer = 0
        else:
            self.forward_layer += 1
        number = self.current = self.forward_layer
        if 0 <= number - 1 < self.offloaded:
            self.layers[number - 1].start()
        leaving = number - (self.count - self.offloaded)
        if 0 <= leaving < self.offloaded:
            self.layers[leaving].release()
        return number

    def step_backward(self, number: int) -> None:
        self.end_backward()
        self.last_backward = self.current = number
        returning = number - (self.count - 1 - self.offloaded)
        if 0 <= returning < self.offloaded:
            self.layers[returning].reload()

    def end_backward(self) -> None:
        if self.last_backward is not None:
            self.layers[self.last_backward].forget()
        self.last_backward = None

    def push(self, tensor: torch.Tensor) -> Any:
        assert self.forward_layer is not None
        return self.layers[self.forward_layer].push(tensor)

    def pop(self, tag: Any) -> torch.Tensor:
        return self.layers[self.current].pop(tag)


class _Context:
    """Entered around each layer; Megatron-Core asks whether it is inside."""

    inside_context = False

    def __init__(self, synchronizer: _Synchronizer) -> None:
        self._synchronizer = synchronizer
        self._layer = 0

    def __enter__(self) -> _Context:
        self.inside_context = True
        self._hooks = torch.autograd.graph.saved_tensors_hooks(
            self._synchronizer.push, self._synchronizer.pop
        )
        self._hooks.__enter__()
        self._layer = self._synchronizer.step_forward()
        return self

    def __exit__(self, *exception: object) -> None:
        self._hooks.__exit__(*exception)
        self.inside_context = False

    def commit(self, tensor: torch.Tensor) -> torch.Tensor:
        """Follow the backward pass from the output of the layer."""
        layer, synchronizer = self._layer, self._synchronizer

        def before_backward(gradients: Any) -> None:
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(synchronizer.end_backward)
            synchronizer.step_backward(layer)

        assert tensor.grad_fn is not None
        tensor.grad_fn.register_prehook(before_backward)
        return tensor


def layer_offload_context(
    num_layers: int, model_layers: int
) -> tuple[Any, Callable[[torch.Tensor], torch.Tensor]]:
    """The context of a layer that offloads `num_layers` of `model_layers`, and its end."""
    assert num_layers <= model_layers - 1, (
        "cpu_offloading_num_layers must be below the number of layers: the last is not offloaded"
    )
    context = _Context(_Synchronizer(model_layers, num_layers))
    return context, context.commit
