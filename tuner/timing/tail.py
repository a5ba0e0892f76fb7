"""What stands around the pipeline of a step: weights gathered, gradients reduced, weights updated.

Megatron-Core's distributed data parallelism (megatron/core/distributed/param_and_grad_buffer.py):
gradients are reduced by bucket, beside the last backward pass of their chunk
(`overlap_grad_reduce`) or after the pipeline; weights are gathered beside the first forward passes
(`overlap_param_gather`) or after the optimizer. The optimizer waits for all stages: the gradient
norm is one number for the whole model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tuner.timing.recurrence import PipelineTimes

    Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class StepTail:
    """Durations around a pipeline.

    `reduce_s` `[candidate, stage, chunk]`: reduction of a chunk's gradients. `gather_s`
    `[candidate, stage]`: gathering of weights after the optimizer, 0 where it runs beside forward
    passes. `optimizer_s` `[candidate, stage]`. `deferred_s` `[candidate, stage]`: gradients of the
    output layer computed after the pipeline (`defer_embedding_wgrad_compute`). `tied_s`
    `[candidate]`: reduction of tied embeddings' gradients between the first and the last stage.
    `buckets` `[candidate, stage, chunk]`: gradient buckets of a chunk. `overlap` and `align` are
    `overlap_grad_reduce` and `align_grad_reduce`.
    """

    reduce_s: Seconds
    gather_s: Seconds
    optimizer_s: Seconds
    deferred_s: Seconds | float = 0.0
    tied_s: Seconds | float = 0.0
    buckets: NDArray[np.int64] | int = 1
    overlap: bool = False
    align: bool = False


@dataclass(frozen=True, slots=True)
class StepEnd:
    """When the parts of a step's end happen, seconds from its start.

    `reduce_start_s`, `reduce_end_s` `[candidate, stage, chunk]`; `optimizer_start_s` `[candidate]`,
    `optimizer_end_s`, `gather_s` (a duration) `[candidate, stage]`; `step_s` `[candidate]`.
    `exposed_reduce_s` `[candidate]` is what the reductions add to the step.
    """

    reduce_start_s: Seconds
    reduce_end_s: Seconds
    optimizer_start_s: Seconds
    optimizer_end_s: Seconds
    gather_s: Seconds
    step_s: Seconds
    exposed_reduce_s: Seconds


def finish_step(times: PipelineTimes, backward_s: Seconds, tail: StepTail) -> StepEnd:
    """The end of steps whose pipelines are known.

    `backward_s` `[candidate, stage, chunk]` is that of the pipeline: buckets are taken to fill
    evenly over the pass.
    """
    computed = times.end_s + tail.deferred_s
    start, end = _reductions(times, backward_s, tail, computed)
    reduced = np.maximum(computed, end.max(axis=2))
    ready = reduced.max(axis=1) + tail.tied_s
    updated = ready[:, None] + tail.optimizer_s
    step = (updated + tail.gather_s).max(axis=1)
    exposed = reduced.max(axis=1) - computed.max(axis=1)
    return StepEnd(start, end, ready, updated, tail.gather_s, step, exposed)


def _reductions(
    times: PipelineTimes, backward_s: Seconds, tail: StepTail, computed: Seconds
) -> tuple[Seconds, Seconds]:
    """Start and end of each chunk's reduction; those of a stage follow one another."""
    start, end = np.zeros_like(tail.reduce_s), np.zeros_like(tail.reduce_s)
    buckets = np.broadcast_to(np.asarray(tail.buckets, dtype=float), tail.reduce_s.shape)
    free = np.zeros(computed.shape)
    for chunk in reversed(range(tail.reduce_s.shape[2])):
        whole = tail.reduce_s[:, :, chunk]
        if not tail.overlap:
            first, last = computed, computed
        elif tail.align:
            first = last = times.gradient_sync_s[:, :, chunk]
        else:
            last = times.last_backward_end_s[:, :, chunk]
            first = last - backward_s[:, :, chunk] * (1.0 - 1.0 / buckets[:, :, chunk])
        start[:, :, chunk] = np.maximum(free, first)
        free = np.maximum(start[:, :, chunk] + whole, last + whole / buckets[:, :, chunk])
        end[:, :, chunk] = free
    return start, end
