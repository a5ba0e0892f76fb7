"""Step time of runs of the framework, from the kernels of its layers.

Device seconds are those of the time model (`tuner.timing`); what is the framework's own is which
collectives it waits for (src/scaling/core/nn/linear/utils.py), its 1F1B schedule with transfers
that nothing hides, and gradients reduced after the last pass (optimizer/allreduce.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

from tuner.hardware import Gpu
from tuner.memory.attribution import BACKWARD, FORWARD, OPTIMIZER
from tuner.memory.dryrun import BLOCK_BYTES
from tuner.memory.kernel_log import KIND, KernelLog
from tuner.memory.trace import Trace
from tuner.timing import collectives
from tuner.timing.kernels import device_seconds
from tuner.timing.rates import Rates
from tuner.timing.topology import Links, Span, span
from tuner.validation.scaling.run import record_rank
from tuner.validation.scaling.settings import FLASH_1, ScalingRun

_FLASH_1_SLOWER = 2.0
"""Dao 2023 (arXiv:2307.08691), abstract: FlashAttention-2 is about twice as fast as the first."""

_WIDTH = 2  # bytes of an element of weights, gradients and activations
_OPTIMIZER_STATE_BYTES = 12
_OPTIMIZER_BYTES = 40  # AdamW in float32 over a shard: gradient, master, moments read, written


@dataclass(frozen=True, slots=True)
class Passes:
    """Seconds on the device and launches of the forward and backward pass of something."""

    forward_s: float
    backward_s: float
    forward_launches: int
    backward_launches: int

    def plus(self, other: Passes, times: float) -> Passes:
        """This and `times` the other."""
        return Passes(
            self.forward_s + times * other.forward_s,
            self.backward_s + times * other.backward_s,
            int(self.forward_launches + times * other.forward_launches),
            int(self.backward_launches + times * other.backward_launches),
        )


def step_parts(
    run: ScalingRun, *, gpu: Gpu, links: Links, rates: Rates, global_batch_size: int
) -> dict[str, float]:
    """Seconds of a step by cause; they sum to the step's."""
    layer, ends = _units(_without_layout(run), gpu, rates)
    world = run.tensor_ranks * run.stages * run.data_ranks
    microbatches = max(1, global_batch_size // (run.batch * run.data_ranks))
    layers = run.layers / run.stages
    forward_c, backward_c = _collectives(run, span(run.tensor_ranks, 1, links, world), links, rates)
    busiest = ends.plus(layer, layers)
    compute = busiest.forward_s + busiest.backward_s
    host = rates.host_kernel_s * (busiest.forward_launches + busiest.backward_launches)
    tensor = layers * (forward_c + backward_c)
    head = _head_gather(run, span(run.tensor_ranks, 1, links, world), links, rates)
    once = max(compute + tensor + head, host)
    parts = {
        "compute": microbatches * compute,
        "tensor": microbatches * (tensor + head),
        "host": microbatches * max(0.0, host - compute - tensor - head),
        "bubble": (run.stages - 1) * once,
        "pipeline": _transfers(run, links, rates, world) * microbatches,
    }
    return {**parts, **_data(run, gpu, links, rates, world), "step": rates.step_s}


def rough_peak_bytes(run: ScalingRun, architecture: str) -> float:
    """Peak of the first stage, near enough to tell whether a dry run of it is worth its time.

    What a layer keeps for a micro-batch comes from runs of two and of three layers.
    """
    two, three = (
        _peak_of_passes(_trace(replace(_without_layout(run), layers=n), architecture))
        for n in (2, 3)
    )
    weights = _WIDTH + _OPTIMIZER_STATE_BYTES  # one micro-batch peaks before it has gradients
    layer = (4 * run.hidden**2 + 3 * run.hidden * run.intermediate) / run.tensor_ranks
    ends = 2 * run.vocabulary * run.hidden / run.tensor_ranks
    kept = three - two - weights * layer
    base = two - weights * (2 * layer + ends) - 2 * kept
    in_flight = min(run.stages, max(1, run.micro_batches))
    held = in_flight * kept * run.layers / run.stages + (base if run.stages == 1 else 0.0)
    return held + _parameters(run) * (2 * _WIDTH + _OPTIMIZER_STATE_BYTES / run.data_ranks)


def _peak_of_passes(trace: Trace) -> float:
    """Most bytes outside the optimizer's step, which on one data-parallel rank is larger."""
    live = trace.live_bytes(BLOCK_BYTES)
    return float(live[trace.phase != trace.phase_names.index(OPTIMIZER)].max())


def _units(run: ScalingRun, gpu: Gpu, rates: Rates) -> tuple[Passes, Passes]:
    """One layer, and embedding with head."""
    two, three = (
        _passes(_trace(replace(run, layers=count), gpu.architecture), run, gpu, rates)
        for count in (2, 3)
    )
    layer = three.plus(two, -1)
    return layer, two.plus(layer, -2)


@lru_cache(maxsize=1024)
def _trace(run: ScalingRun, architecture: str) -> Trace:
    return record_rank(run, 0, architecture)


def _without_layout(run: ScalingRun) -> ScalingRun:
    """The run whose kernels are those of one micro-batch of a stage that holds everything."""
    return replace(run, layers=2, stages=1, data_ranks=1, micro_batches=1)


def _passes(trace: Trace, run: ScalingRun, gpu: Gpu, rates: Rates) -> Passes:
    log = trace.kernels
    seconds = device_seconds(log, gpu, rates)
    if run.attention == FLASH_1:
        seconds = seconds * _slowdown(log)
    seconds = seconds + rates.kernel_gap_s
    found = []
    for phase in (FORWARD, BACKWARD):
        mine = log.phase == trace.phase_names.index(phase)
        found.append((float(seconds[mine].sum()) / 2, int(mine.sum()) // 2))  # of two steps
    (forward, forward_count), (backward, backward_count) = found
    return Passes(forward, backward, forward_count, backward_count)


def _slowdown(log: KernelLog) -> Any:
    import numpy as np

    attention = np.isin(log.kind, [KIND["attention_forward"], KIND["attention_backward"]])
    return np.where(attention, _FLASH_1_SLOWER, 1.0)


def _collectives(run: ScalingRun, ranks: Span, links: Links, rates: Rates) -> tuple[float, float]:
    """Tensor-parallel seconds of a layer's forward and backward pass."""
    if run.tensor_ranks == 1:
        return 0.0, 0.0
    size = float(run.batch * run.sequence * run.hidden * _WIDTH)

    def seconds(operation: str) -> float:
        return float(collectives.seconds(operation, size, ranks, links, rates))

    if run.sequence_parallel:
        forward = 2 * (seconds("all_gather") + seconds("all_reduce"))
        backward = 2 * (seconds("reduce_scatter") + seconds("all_gather"))
    else:
        forward = backward = 2 * seconds("all_reduce")
    return forward, backward + (forward if run.checkpoint_layers else 0.0)


def _head_gather(run: ScalingRun, ranks: Span, links: Links, rates: Rates) -> float:
    if run.tensor_ranks == 1:
        return 0.0
    size = float(run.batch * run.sequence * run.vocabulary * _WIDTH)
    return float(collectives.seconds("all_gather", size, ranks, links, rates)) / run.stages


def _transfers(run: ScalingRun, links: Links, rates: Rates, world: int) -> float:
    """Seconds a micro-batch waits for its activations and gradients to come and go."""
    if run.stages == 1:
        return 0.0
    ways = span(run.stages, max(1, world // run.stages), links, world)
    size = float(run.batch * run.shard_length * run.hidden * _WIDTH)
    return 2 * float(collectives.seconds("send", size, ways, links, rates))


def _data(run: ScalingRun, gpu: Gpu, links: Links, rates: Rates, world: int) -> Mapping[str, float]:
    parameters = _parameters(run)
    update = parameters / run.data_ranks * _OPTIMIZER_BYTES
    update += parameters * 4 * _WIDTH  # gradients to float32 and back
    optimizer = update / (gpu.memory_bandwidth_bytes_per_s * rates.memory)
    if run.data_ranks == 1:
        return {"gradients": 0.0, "optimizer": optimizer}
    ranks = span(run.data_ranks, run.tensor_ranks, links, world)
    moved = sum(
        float(collectives.seconds(operation, parameters * _WIDTH, ranks, links, rates))
        for operation in ("all_reduce", "all_gather")
    )
    return {"gradients": moved, "optimizer": optimizer}


def _parameters(run: ScalingRun) -> float:
    """Parameters of a rank of the fullest stage."""
    layer = 4 * run.hidden**2 + 3 * run.hidden * run.intermediate
    ends = run.vocabulary * run.hidden * (2 if run.stages == 1 else 1)
    return (layer * run.layers / run.stages + ends) / run.tensor_ranks
