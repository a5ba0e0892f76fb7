"""Training steps of one rank: pipeline instructions, and ZeRO-1 (src/scaling/core).

The order of instructions is that of nn/pipeline_schedule/train.py, what each keeps in its buffers
that of nn/parallel_module/parallel_module.py.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils import checkpoint

from tuner.memory import cublas
from tuner.memory.attribution import BACKWARD, BUILD, FORWARD, OPTIMIZER, STEP
from tuner.memory.categories import categorised
from tuner.memory.recorder import Recorder, allocate
from tuner.memory.trace import MODEL_BUILT, Trace, step_end, step_start
from tuner.memory.values import KnownValues
from tuner.validation.scaling import layers
from tuner.validation.scaling.optimizer import ShardedOptimizer
from tuner.validation.scaling.repeat import RECORDED, Segment, repeated
from tuner.validation.scaling.settings import ScalingRun

_STEPS = 2


def record_rank(
    run: ScalingRun, stage: int, architecture: str = "ampere", *, every_layer: bool = False
) -> Trace:
    """What a rank of pipeline stage `stage` allocates in two steps.

    Long stages are recorded with five layers, of which the middle one is repeated afterwards,
    unless `every_layer` is set.
    """
    _import_operators(_smallest(run))
    return _record_stage(run, stage, architecture, every_layer)


def _smallest(run: ScalingRun) -> ScalingRun:
    """A run of the same kind that takes no time."""
    ranks = run.tensor_ranks
    sizes: dict[str, Any] = {"layers": 1, "hidden": 8 * ranks, "heads": ranks}
    sizes |= {"intermediate": ranks, "vocabulary": ranks, "sequence": 2 * ranks}
    return replace(run, **sizes, stages=1, micro_batches=1)


@cache
def _import_operators(run: ScalingRun) -> None:
    """Let PyTorch import what operators need: exceptions caught meanwhile keep tensors alive."""
    _record_stage(run, 0, "ampere", True)


def _record_stage(run: ScalingRun, stage: int, architecture: str, every_layer: bool) -> Trace:
    recorder = Recorder(host_counts=False, handlers={}, values=KnownValues(None))
    size = cublas.workspace_bytes({}, architecture)
    backward = frozenset({recorder.phase_code(BACKWARD)})
    recorder.handlers.update(cublas.workspace_handlers(size, backward))
    kinds = _stage(run, stage)
    count = kinds.count(layers.Layer)
    recorded = count if every_layer else min(count, RECORDED)
    gc.disable()
    try:
        with recorder.recording(), checkpoint.set_checkpoint_early_stop(False):
            trace, segments = _record(run, stage, _shortened(kinds, recorded), count, recorder)
    finally:
        gc.enable()
    return repeated(trace, segments, 1 + count - recorded) if recorded < count else trace


def _stage(run: ScalingRun, stage: int) -> list[Any]:
    """The layers of a stage: embedding, layers, norm and head spread evenly, first ones larger
    (pipeline_partitioning.py, `pipe_partition_uniform`)."""
    kinds: list[Any] = [layers.Embedding, *[layers.Layer] * run.layers]
    kinds += [layers.FinalNorm, layers.Head]
    size, rest = divmod(len(kinds), run.stages)
    start = stage * size + min(stage, rest)
    return kinds[start : start + size + (stage < rest)]


def _shortened(kinds: list[Any], count: int) -> list[Any]:
    """The same stage with `count` layers."""
    left = iter(range(count))
    return [kind for kind in kinds if kind is not layers.Layer or next(left, None) is not None]


def _record(
    run: ScalingRun, stage: int, kinds: list[Any], count: int, recorder: Recorder
) -> tuple[Trace, list[Segment]]:
    import numpy as np

    with recorder.in_phase(BUILD):
        recorder.paused = True
        modules = nn.ModuleList(kind(run) for kind in kinds)
        recorder.paused = False
        optimizer = ShardedOptimizer(modules, count - kinds.count(layers.Layer), run.data_ranks)
    labels = {}
    for tensor, category in optimizer.tensors():
        block = recorder.block_of(tensor)
        if block is not None:
            labels[block] = category
    recorder.mark(MODEL_BUILT)
    rank = _Rank(run, stage, modules, recorder)
    ends: list[int] = []
    with recorder.in_phase(STEP):
        for number in range(1, _STEPS + 1):
            recorder.mark(step_start(number))
            ends += rank.step()
            with recorder.in_phase(OPTIMIZER):
                optimizer.step()
            recorder.mark(step_end(number))
            rank.forget()
    trace = categorised(recorder.trace(), labels, np.array(ends, dtype=np.int64))
    return trace, rank.segments.made


class _Segments:
    """Notes where the passes of layers begin and end."""

    def __init__(self, recorder: Recorder) -> None:
        self.made: list[Segment] = []
        self._recorder = recorder
        self._start = 0

    def begin(self) -> None:
        self._start = len(self._recorder)

    def end(self, layer: int, backward: bool) -> None:
        now = len(self._recorder)
        self.made.append(Segment(layer, backward, self._start, now))
        self._start = now


class _Boundary(torch.autograd.Function):
    """Between two layers; the gradient comes by when the later layer's backward pass is through.

    `layer` is the one before the boundary.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, layer: int, segments: _Segments) -> torch.Tensor:
        ctx.layer, ctx.segments = layer, segments
        return hidden.view_as(hidden)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        if ctx.layer + 1 < RECORDED:
            ctx.segments.end(ctx.layer + 1, backward=True)
        else:
            ctx.segments.begin()
        return gradients[0], None, None


@dataclass
class _Buffers:
    """nn/parallel_module/buffers.py: what a stage holds by buffer number."""

    inputs: dict[int, Any] = field(default_factory=dict)
    outputs: dict[int, Any] = field(default_factory=dict)
    losses: dict[int, Any] = field(default_factory=dict)
    targets: dict[int, Any] = field(default_factory=dict)


class _Rank:
    def __init__(
        self, run: ScalingRun, stage: int, modules: nn.ModuleList, recorder: Recorder
    ) -> None:
        self.run, self.stage, self.modules, self.recorder = run, stage, modules, recorder
        self.first, self.last = stage == 0, stage == run.stages - 1
        self.count = max(2, min(run.stages - stage + 1, run.micro_batches))
        self.buffers = _Buffers()
        self.segments = _Segments(recorder)
        self.received: dict[str, torch.Tensor] = {}
        self.positions = allocate((run.batch, run.sequence), torch.int64)

    def step(self) -> list[int]:
        """One pass over all micro-batches; the events at which forward passes ended."""
        ends = []
        before = None
        for forward, number in self._order():
            buffer = None if number is None else number % self.count
            if forward and buffer is not None and not self.first:
                self.buffers.inputs[buffer] = self._received_input()
            if forward and before is not None and not self.first:
                self.buffers.inputs[before] = None  # its gradient has been sent
            if buffer is not None and forward:
                with self.recorder.in_phase(FORWARD):
                    self._forward(buffer)
                ends.append(len(self.recorder))
            elif buffer is not None:
                with self.recorder.in_phase(BACKWARD):
                    self._backward(buffer)
            before = buffer
        return ends

    def forget(self) -> None:
        """`pipe_buffer.reset` at the start of the next step."""
        self.buffers = _Buffers()

    def _order(self) -> Iterator[tuple[bool, int | None]]:
        """(forward?, micro-batch) of each step; None where the stage idles."""
        stages, stage, count = self.run.stages, self.stage, self.run.micro_batches
        for step in range(2 * (count + stages - 1)):
            forward = step % 2 == stage % 2
            number = (step - stage) // 2 if forward else (step + stage + 1) // 2 - stages
            yield forward, number if 0 <= number < count else None

    def _forward(self, buffer: int) -> None:
        run, buffers = self.run, self.buffers
        if self.first:
            buffers.inputs[buffer] = allocate((run.batch, run.sequence), torch.int64)
        if self.last:
            buffers.targets[buffer] = allocate((run.batch, run.sequence), torch.int64)
        output = buffers.inputs[buffer]
        layer = -1
        for module in self.modules:
            is_layer = isinstance(module, layers.Layer)
            if is_layer or layer >= 0:
                output = _Boundary.apply(output, layer, self.segments)
            self.segments.begin()
            output = self._through(module, output)
            if is_layer:
                layer += 1
                self.segments.end(layer, backward=False)
            elif layer >= 0:
                layer = RECORDED  # what follows the layers has boundaries of no layer
        buffers.outputs[buffer] = output
        if self.last:
            buffers.losses[buffer] = layers.loss_of(output, buffers.targets[buffer])

    def _through(self, module: nn.Module, inputs: torch.Tensor) -> Any:
        if not self.run.checkpoint_layers:
            return module(inputs, self.positions)
        return checkpoint.checkpoint(
            module, inputs, self.positions, use_reentrant=False, preserve_rng_state=False
        )

    def _backward(self, buffer: int) -> None:
        self.segments.begin()
        if self.last:
            loss = self.buffers.losses.pop(buffer)
            (loss.float() / self.run.micro_batches).backward()
            return
        output = self.buffers.outputs.pop(buffer)
        torch.autograd.backward(output, self._receive("gradient", output.shape))

    def _received_input(self) -> torch.Tensor:
        run = self.run
        arrived = self._receive("activation", (run.batch, run.shard_length, run.hidden))
        return arrived.clone().detach().requires_grad_()

    def _receive(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """communicator.py receives into buffers that it keeps."""
        if name not in self.received:
            self.received[name] = allocate(shape, torch.bfloat16)
        return self.received[name]
