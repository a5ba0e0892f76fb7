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

from trainables.megatron_core.cpu_device import _replaced
from trainables.megatron_core.schedule import unwrapped
from tuner.memory.recorder import Recorder

BUILD = "build"
FORWARD = "forward"
BACKWARD = "backward"
RECOMPUTE = "recompute"
GRADIENTS = "gradient reduction"
OPTIMIZER = "optimizer"
STEP = "step"
BACKWARD_PHASES = (BACKWARD, RECOMPUTE)
"""Phases whose work runs in autograd's thread."""

_LAYER = re.compile(r"^decoder\.layers\.\d+")


class Attribution:
    """Keeps `recorder.module` and `recorder.phase` up to date while a training step runs."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self._codes: dict[int, int] = {}
        self._outer: list[tuple[int, int]] = []
        self._recompute = recorder.phase_code(RECOMPUTE)
        self._backward = recorder.phase_code(BACKWARD)

    def name_modules(self, chunks: list[Any]) -> None:
        """Learn the names of all modules; decoder layers are numbered over the whole model."""
        for chunk in chunks:
            model = unwrapped(chunk)
            for name, module in model.named_modules():
                match = _LAYER.match(name)
                if match:
                    number = model.get_submodule(match[0]).layer_number - 1
                    name = f"decoder.layers.{number}{name[match.end() :]}"
                self._codes[id(module)] = self._recorder.module_code(name)

    @contextmanager
    def active(self) -> Iterator[None]:
        from megatron.core.pipeline_parallel import schedules

        recorder = self._recorder

        def in_phase(name: str, function: Any) -> Any:
            def run(*args: Any, **kwargs: Any) -> Any:
                with recorder.in_phase(name):
                    return function(*args, **kwargs)

            return run

        with ExitStack() as stack:
            before = torch_module.register_module_forward_pre_hook(self._enter)
            stack.callback(before.remove)
            after = torch_module.register_module_forward_hook(self._leave, always_call=True)
            stack.callback(after.remove)
            stack.enter_context(
                _replaced(
                    schedules,
                    forward_step=in_phase(FORWARD, schedules.forward_step),
                    backward_step=in_phase(BACKWARD, schedules.backward_step),
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
