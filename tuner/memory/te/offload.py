"""Activation offload by layers until Transformer Engine 2.9 (pytorch/cpu_offload.py).

Tensors saved for backward by the offloaded layers leave the device when the layer after them
commits, in windows spread over the model, and come back window by window in backward. With double
buffering they come back into two sets of buffers that stay for good.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from tuner.errors import InputError
from tuner.memory import issue
from tuner.memory.recorder import allocate
from tuner.memory.te.offload_layers import layer_offload_context
from tuner.memory.te.state import process

_BY_LAYERS_SINCE = (2, 10)


class _Away:
    """A tensor on the host: what is needed to make room for it again."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tensor.shape, tensor.dtype
        self._copied()

    def back(self, buffer: torch.Tensor | None = None) -> torch.Tensor:
        """The tensor again, in `buffer` where there is one."""
        self._copied()
        return allocate(self.shape, self.dtype) if buffer is None else buffer

    def _copied(self) -> None:
        issue.memory(math.prod(self.shape) * self.dtype.itemsize, "host_copy")


@dataclass
class _State:
    """Whether saved tensors are being offloaded."""

    active: bool = False


state = _State()


def mark_activation_offload(*tensors: Any) -> None:
    """Say that these tensors may leave the device, where any are offloaded."""
    if not state.active:
        return
    for tensor in tensors:
        if isinstance(tensor, torch.Tensor) and not isinstance(tensor, torch.nn.Parameter):
            tensor.activation_offloading = True  # type: ignore[attr-defined]


class _Handler:
    """Groups are layers, counted up in forward and down in backward."""

    def __init__(self, groups: int, layers: int, double_buffering: bool) -> None:
        self.groups, self.layers = groups, layers
        self.double_buffering = double_buffering
        self.buffers: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
        self.group = 0
        self.count = 0
        self.windows_done = 0
        self.state: dict[tuple[int, int], Any] = {}
        self.on_device: dict[tuple[int, int], torch.Tensor] = {}
        share, extra = divmod(layers, groups) if groups else (0, 0)
        self.window = {
            group: share * (group + 1) - 1 + min(group + 1, extra) for group in range(groups)
        }

    def push(self, tensor: torch.Tensor) -> tuple[int, int]:
        tag = (self.group, self.count)
        self.count += 1
        self.state[tag] = tensor
        if self.group < self.groups and hasattr(tensor, "activation_offloading"):
            self.on_device[tag] = tensor
        return tag

    def pop(self, tag: tuple[int, int]) -> torch.Tensor:
        self.on_device.pop(tag, None)
        tensor = self.state.pop(tag)
        return tensor.back() if isinstance(tensor, _Away) else tensor

    def commit_forward(self) -> None:
        group = self.group
        if group == 0:
            if self.double_buffering and not self.buffers[1]:
                self.buffers[0][:] = _like(self.on_device.values())
            self._offload(0)
        if self.window.get(self.windows_done) == group:
            for tag in [tag for tag in self.on_device if tag[0] == self.windows_done]:
                del self.on_device[tag]
            if self.windows_done < self.groups - 1:
                self._offload(self.windows_done + 1)
            self.windows_done += 1
        if group == self.layers - 1 and self.double_buffering and not self.buffers[1]:
            self.buffers[1][:] = _like(self.buffers[0])
        self.group += 1
        self.count = 0

    def commit_backward(self) -> None:
        self.group -= 1
        if self.window.get(self.windows_done - 1) == self.group:
            self._reload(self.windows_done - 1)
            self.windows_done -= 1 if self.windows_done > 1 else 0
        if self.group == 0:
            self.windows_done = 0

    def _offload(self, group: int) -> None:
        for tag, tensor in self.state.items():
            if tag[0] == group and hasattr(tensor, "activation_offloading"):
                self.state[tag] = _Away(tensor)

    def _reload(self, group: int) -> None:
        buffers = iter(self.buffers[group % 2])
        for tag, tensor in self.state.items():
            if tag[0] == group and isinstance(tensor, _Away):
                buffer = next(buffers, None) if self.double_buffering else None
                self.state[tag] = tensor.back(buffer)


def _like(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    return [allocate(tensor.shape, tensor.dtype) for tensor in tensors]


class _Commit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, handler: _Handler) -> torch.Tensor:
        handler.commit_forward()
        ctx.handler = handler
        return tensor

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.handler.commit_backward()
        return gradients[0], None


def get_cpu_offload_context(
    enabled: bool = False,
    num_layers: int = 1,
    model_layers: int = 1,
    offload_activations: bool = True,
    offload_weights: bool = False,
    double_buffering: bool = False,
    retain_pinned_cpu_buffers: bool = False,
) -> tuple[AbstractContextManager[Any], Callable[[torch.Tensor], torch.Tensor]]:
    """A context in which saved tensors are handled, and the call that ends a layer.

    Weights stay on the device whatever `offload_weights` says; without activations Transformer
    Engine hands out no context, and Megatron-Core's layers fail where they ask it.
    """
    if enabled and not offload_activations:
        raise InputError(
            "only activations can be offloaded by layers; weights stay where they are",
            field="cpu_offloading_activations",
            fix="set it, or unset cpu_offloading",
        )
    if enabled and process.version >= _BY_LAYERS_SINCE:
        return layer_offload_context(num_layers, model_layers)
    handler = _Handler(num_layers, model_layers, double_buffering)

    def commit(tensor: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = _Commit.apply(tensor, handler)
        return result

    if not enabled:
        return nullcontext(), commit
    return _Context(handler), commit


class _Context(torch.autograd.graph.saved_tensors_hooks):
    """Saved tensors go through the handler; Megatron-Core asks whether it is inside."""

    inside_context = False

    def __init__(self, handler: _Handler) -> None:
        super().__init__(handler.push, handler.pop)

    def __enter__(self) -> None:
        self.inside_context = True
        state.active = True
        super().__enter__()

    def __exit__(self, *exception: object) -> None:
        self.inside_context = False
        state.active = False
        super().__exit__(*exception)
