"""Where allocations come from: the module and the phase of the training step.

Modules are known by global forward hooks, phases by wrapping the functions of Megatron-Core's
schedules. Forward work inside a backward pass is recompute.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.modules import module as torch_module

from trainables.megatron_core.cpu_device import replaced
from trainables.megatron_core.schedule import unwrapped
from tuner.memory.categories import GRADIENTS, OPTIMIZER_STATE, WEIGHTS, categorised
from tuner.memory.recorder import Recorder
from tuner.memory.trace import Trace

BUILD = "build"
FORWARD = "forward"
BACKWARD = "backward"
RECOMPUTE = "recompute"
OPTIMIZER = "optimizer"
STEP = "step"
BACKWARD_PHASES = (BACKWARD, RECOMPUTE)
"""Phases whose work runs in autograd's thread."""

_SHARDED = {
    "model_weight_buffer": WEIGHTS,
    "transpose_weight_buffer": WEIGHTS,
    "main_weight_buffer": OPTIMIZER_STATE,
    "main_grad_buffer": GRADIENTS,
}
"""Buffers of a `ParameterGroup` of Megatron-FSDP."""

_LAYER = re.compile(r"^decoder\.layers\.\d+")


class Attribution:
    """Keeps `recorder.module` and `recorder.phase` up to date while a training step runs."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._codes: dict[int, int] = {}
        self._outer: list[tuple[int, int]] = []
        self._forward_ends: list[int] = []
        self._recompute = recorder.phase_code(RECOMPUTE)
        self._backward = recorder.phase_code(BACKWARD)

    def name_modules(self, chunks: list[Any]) -> None:
        """Learn the names of all modules; decoder layers are numbered over the whole model."""
        for chunk in chunks:
            model = unwrapped(chunk)
            root = "loss" if model.post_process else "model"
            for name, module in model.named_modules():
                match = _LAYER.match(name)
                if match:
                    number = model.get_submodule(match[0]).layer_number - 1
                    name = f"decoder.layers.{number}{name[match.end() :]}"
                self._codes[id(module)] = self._recorder.module_code(name or root)

    def labels(self, chunks: list[Any]) -> dict[int, str]:
        """The category of each block that holds weights or gradients."""
        labels: dict[int, str] = {}

        def label(tensor: Any, category: str) -> None:
            tensor = getattr(tensor, "_local_tensor", tensor)  # of a sharded one
            block = self._recorder.block_of(tensor) if isinstance(tensor, torch.Tensor) else None
            if block is not None:
                labels.setdefault(block, category)

        for chunk in chunks:
            for tensor, category in _sharded(chunk):
                label(tensor, category)
            for parameter in chunk.parameters():
                label(parameter.data, WEIGHTS)
                label(getattr(parameter, "main_grad", None), GRADIENTS)
            for buffer in _buffers(chunk):
                label(buffer.param_data, WEIGHTS)
                label(buffer.grad_data, GRADIENTS)
        return labels

    def categorised(self, labels: dict[int, str]) -> Trace:
        """The finished trace with the category of every event."""
        import numpy as np

        ends = np.array(self._forward_ends, dtype=np.int64)
        return categorised(self._recorder.trace(), labels, ends)

    @contextmanager
    def active(self) -> Iterator[None]:
        from megatron.core.pipeline_parallel import schedules
        from megatron.core.pipeline_parallel.utils import ScheduleNode

        recorder = self._recorder

        def in_phase(name: str, function: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                with recorder.in_phase(name):
                    result = function(*args, **kwargs)
                if name == FORWARD:
                    self._forward_ends.append(len(recorder))
                return result

            return run

        with ExitStack() as stack:
            before = torch_module.register_module_forward_pre_hook(self._enter)
            stack.callback(before.remove)
            after = torch_module.register_module_forward_hook(self._leave, always_call=True)
            stack.callback(after.remove)
            stack.enter_context(
                replaced(
                    schedules,
                    forward_step=in_phase(FORWARD, schedules.forward_step),
                    backward_step=in_phase(BACKWARD, schedules.backward_step),
                )
            )
            # The parts of a layer, where one micro-batch's are mixed with another's.
            stack.enter_context(
                replaced(
                    ScheduleNode,
                    forward=in_phase(FORWARD, ScheduleNode.forward),
                    backward=in_phase(BACKWARD, ScheduleNode.backward),
                )
            )
            yield

    def _enter(self, module: torch.nn.Module, args: Any) -> None:
        recorder = self._recorder
        self._outer.append((recorder.module, recorder.phase))
        recorder.module = self._codes.get(id(module), recorder.module)
        if recorder.phase == self._backward:
            recorder.phase = self._recompute

    def _leave(self, module: torch.nn.Module, args: Any, output: Any) -> None:
        self._recorder.module, self._recorder.phase = self._outer.pop()


def _sharded(chunk: Any) -> Iterator[tuple[Any, str]]:
    """What Megatron-FSDP holds of a chunk; its parameters are those that the optimizer steps."""
    for group in getattr(getattr(chunk, "param_and_grad_buffer", None), "parameter_groups", []):
        for name, category in _SHARDED.items():
            yield getattr(getattr(group, name), "data", None), category


def _buffers(chunk: Any) -> list[Any]:
    """The buffers of Megatron-Core's own data parallelism; other wrappers have none like them."""
    if not hasattr(chunk, "expert_parallel_buffers"):
        return []
    return [*chunk.buffers, *chunk.expert_parallel_buffers]
