"""Pipeline schedules of Megatron-Core: their passes in order, and where each falls in time.

Read from megatron/core/pipeline_parallel/schedules.py: `get_schedule_table`,
`get_pp_rank_microbatches`, `forward_backward_pipelining_without_interleaving` and
`forward_backward_pipelining_with_interleaving`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import ArrayLike, NDArray

    Seconds = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The shape of a pipeline-parallel step.

    `chunks` is `virtual_pipeline_model_parallel_size` (1 without it), `group_size` is
    `microbatch_group_size_per_vp_stage` (default: the number of stages). `overlap_p2p` and
    `overlap_warmup_flush` are `overlap_p2p_comm` and `overlap_p2p_comm_warmup_flush`; `combined` is
    `overlap_moe_expert_parallel_comm`, which runs one more forward pass ahead and merges each
    forward pass with a backward pass. Raises ValueError for what Megatron-Core refuses to run.
    """

    stages: int
    microbatches: int
    chunks: int = 1
    group_size: int | None = None
    overlap_p2p: bool = False
    overlap_warmup_flush: bool = False
    combined: bool = False

    def __post_init__(self) -> None:
        if min(self.stages, self.microbatches, self.chunks) < 1:
            raise ValueError("stages, microbatches and chunks must be positive")
        if self.chunks == 1:
            if self.overlap_p2p:
                raise ValueError("overlap_p2p needs more than one chunk per stage")
            if self.combined and self.stages > 1:
                raise ValueError("combined passes of several stages need more than one chunk")
            return
        if self.stages == 1:
            raise ValueError("chunks need more than one stage")
        if self.overlap_warmup_flush and not self.overlap_p2p:
            raise ValueError("overlap_warmup_flush needs overlap_p2p")
        if not self.stages <= self.group <= self.microbatches:
            raise ValueError(
                f"group_size={self.group} must lie between stages={self.stages} and "
                f"microbatches={self.microbatches}"
            )
        if 0 < self.microbatches % self.group < self.stages:
            raise ValueError(
                f"the last of the groups of {self.group} holds "
                f"{self.microbatches % self.group} micro-batches, fewer than the stages"
            )

    @property
    def group(self) -> int:
        """Micro-batches that pass through one chunk before the next chunk's turn."""
        return self.group_size or self.stages

    @property
    def passes(self) -> int:
        """Forward passes of a stage: micro-batches times chunks."""
        return self.microbatches * self.chunks

    def warmup(self, stage: int) -> int:
        """Forward passes of a stage before its first backward pass."""
        if self.chunks == 1:
            ahead = self.stages - stage - 1
        else:
            ahead = 2 * (self.stages - stage - 1) + (self.chunks - 1) * self.group + self.combined
        return min(ahead, self.passes)

    def table(self) -> list[tuple[int, int]]:
        """(micro-batch, chunk) of each forward pass; backward passes count chunks from the end."""
        return [
            (microbatch, chunk)
            for first in range(0, self.microbatches, self.group)
            for chunk in range(self.chunks)
            for microbatch in range(first, min(first + self.group, self.microbatches))
        ]

    def order(self, stage: int) -> Iterator[tuple[bool, int, int]]:
        """(forward, chunk, micro-batch) in the order in which a stage runs them."""
        table, total, warmup = self.table(), self.passes, self.warmup(stage)
        for step in range(total + warmup):
            if step < total:
                yield True, table[step][1], table[step][0]
            if step >= warmup:
                microbatch, chunk = table[step - warmup]
                yield False, self.chunks - 1 - chunk, microbatch


@dataclass(frozen=True, slots=True)
class Passes:
    """Passes of a simulated step as columns: one row per pass, times in seconds from its start."""

    stage: NDArray[np.int64]
    forward: NDArray[np.bool_]
    chunk: NDArray[np.int64]
    microbatch: NDArray[np.int64]
    start_s: Seconds
    end_s: Seconds


@dataclass(frozen=True, slots=True)
class SimulatedStep:
    """Every pass of a step.

    `end_s` `[stage]` is when a stage has done its last backward pass and handed its result on;
    `last_backward_end_s` and `gradient_sync_s` `[stage, chunk]` are those of `PipelineTimes`.
    """

    passes: Passes
    end_s: Seconds
    last_backward_end_s: Seconds
    gradient_sync_s: Seconds

    @property
    def pipeline_s(self) -> float:
        """When the last stage to finish has finished."""
        return float(self.end_s.max())

    def idle_s(self) -> Seconds:
        """Seconds of the pipeline in which a stage runs no pass, `[stage]`."""
        import numpy as np

        lengths = self.passes.end_s - self.passes.start_s
        idle = np.full(len(self.end_s), self.pipeline_s)
        np.subtract.at(idle, self.passes.stage, lengths)
        return idle


def simulate(
    pipeline: Pipeline,
    forward_s: ArrayLike,
    backward_s: ArrayLike,
    p2p_s: ArrayLike = 0.0,
    *,
    release_s: ArrayLike | None = None,
    hidden_s: ArrayLike | None = None,
) -> SimulatedStep:
    """Run a step pass by pass, with stages as uneven as they are.

    `forward_s` and `backward_s` are seconds of one micro-batch, `[stage, chunk]` (recompute counts
    as backward). `p2p_s` is one transfer between a stage and the next: a number or `[stage]`, the
    last for the way from the last stage back to the first. `release_s` `[stage, chunk]` is when the
    weights of a chunk are there. `hidden_s` `[stage, chunk]` is how much shorter a forward and a
    backward pass are together than apart, by the chunk of the backward pass, where the pipeline
    combines them. How transfers and passes wait for each other: `tuner.timing.recurrence`.
    """
    import numpy as np

    from tuner.timing.recurrence import Durations, make_recurrence

    durations = Durations.of(
        pipeline,
        _one(forward_s),
        _one(backward_s),
        _one(p2p_s),
        None if release_s is None else _one(release_s),
        None if hidden_s is None else _one(hidden_s),
    )
    recurrence = make_recurrence(pipeline, durations)
    start, end = recurrence.run_all().passes()
    table = np.array(pipeline.table(), dtype=np.int64)
    stages, total = pipeline.stages, pipeline.passes
    stage = np.repeat(np.arange(stages), total)
    microbatch, chunk = np.tile(table[:, 0], stages), np.tile(table[:, 1], stages)
    passes = Passes(
        stage=np.tile(stage, 2),
        forward=np.repeat([True, False], stages * total),
        chunk=np.concatenate([chunk, pipeline.chunks - 1 - chunk]),
        microbatch=np.tile(microbatch, 2),
        start_s=start,
        end_s=end,
    )
    times = recurrence.times()
    return SimulatedStep(
        passes, times.end_s[0], times.last_backward_end_s[0], times.gradient_sync_s[0]
    )


def _one(value: ArrayLike) -> Seconds:
    """The same quantity for an array of one candidate."""
    import numpy as np

    return np.asarray(value, dtype=np.float64)[None]
