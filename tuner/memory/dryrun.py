"""Dry runs: what one rank of a candidate allocates, by running Megatron-Core without data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from tuner.candidate import Candidate
from tuner.memory.categories import activations_at, breakdown_at
from tuner.memory.request import TRANSFORMER_ENGINE, DryRunRequest
from tuner.memory.trace import Trace, step_end, step_start
from tuner.models import ModelSpec

BLOCK_BYTES = 512
"""Smallest allocation of PyTorch's CUDA caching allocator; sizes are rounded up to it."""


@dataclass(frozen=True, slots=True)
class DryRun:
    """What one rank allocated.

    `resident_bytes` adds to the peak what private pools of CUDA graphs keep without using it: no
    placement of blocks needs less memory.
    `peak_allocated_bytes` is the largest sum of live blocks over the last step, each rounded up to
    512 bytes as `torch.cuda.max_memory_allocated` counts them; `first_step_peak_bytes` the same
    over the first step, before the optimizer has its state; `static_bytes` what is alive after the
    last step. `breakdown` sums the blocks alive at the peak by category, `activations` those kept
    for backward by module. `trace` holds every allocation. `assumptions` say what the run took
    for granted.
    """

    rank: int
    peak_allocated_bytes: int
    first_step_peak_bytes: int
    static_bytes: int
    resident_bytes: int
    breakdown: Mapping[str, int]
    activations: Mapping[str, int]
    trace: Trace
    assumptions: Mapping[str, str]

    @property
    def peak_event(self) -> int:
        """Index of the event after which the peak stood."""
        start, end = _counted_steps(self.trace)
        return start + int(self.trace.live_bytes(BLOCK_BYTES)[start:end].argmax())


def dry_run(
    model: ModelSpec,
    candidate: Candidate,
    *,
    world_size: int,
    seq_length: int,
    global_batch_size: int,
    precision: str = "bf16",
    rank: int = 0,
    mcore: Path | None = None,
    layers: str = TRANSFORMER_ENGINE,
    te_version: str = "2.9.0",
    architecture: str = "hopper",
) -> DryRun:
    """Run two steps of `rank` and say what it allocated.

    `seq_length` is in tokens, `global_batch_size` in sequences. `mcore` is a folder with another
    Megatron-Core than the installed one; `layers` and `architecture` are those of `DryRunRequest`.
    Raises UnsupportedError for what is not modelled and InputError for what Megatron-Core refuses.
    The step runs in a process of its own; the same request gives the same bytes in any of them.
    """
    request = dry_run_request(
        model,
        candidate,
        world_size=world_size,
        seq_length=seq_length,
        global_batch_size=global_batch_size,
        precision=precision,
        rank=rank,
        layers=layers,
        te_version=te_version,
        architecture=architecture,
    )
    return run_request(request, mcore=mcore)


def dry_run_request(
    model: ModelSpec, candidate: Candidate, *, rank: int, **run: Any
) -> DryRunRequest:
    """The plain-data form of the arguments of `dry_run`."""
    config = candidate.to_flat()
    environment = config.pop("env", {})
    return DryRunRequest(
        model=model.to_flat(), config=config, rank=rank, environment=environment, **run
    )


def run_request(request: DryRunRequest, *, mcore: Path | None = None) -> DryRun:
    """Run one request in a worker process and read its trace."""
    from tuner.memory.worker_pool import record

    trace, assumptions = record(request, mcore)
    return summarise(request.rank, trace, assumptions)


def summarise(rank: int, trace: Trace, assumptions: Mapping[str, str]) -> DryRun:
    """The figures of a finished trace of at least two steps."""
    live = trace.live_bytes(BLOCK_BYTES)
    start, end = _counted_steps(trace)
    first = slice(trace.marker(step_start(1)), trace.marker(step_end(1)))
    peak = start + int(live[start:end].argmax())
    return DryRun(
        rank=rank,
        peak_allocated_bytes=int(live[peak]),
        first_step_peak_bytes=int(live[first].max()),
        static_bytes=int(live[end - 1]),
        resident_bytes=int(trace.resident_bytes(BLOCK_BYTES)[start:end].max()),
        breakdown=breakdown_at(trace, peak),
        activations=activations_at(trace, peak),
        trace=trace,
        assumptions=dict(assumptions),
    )


def _counted_steps(trace: Trace) -> tuple[int, int]:
    """First and one-past-last event of the last step; with CUDA graphs of all, captures included.

    A capture may need more than any step, and a run has to survive it once.
    """
    steps = [index for index, name in trace.markers if name.endswith(" start")]
    return steps[0 if trace.pool is not None else -1], trace.marker(step_end(len(steps)))


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Dry runs of the ranks that may hold the peak; the largest decides."""

    runs: tuple[DryRun, ...]

    @property
    def peak_allocated_bytes(self) -> int:
        return max(run.peak_allocated_bytes for run in self.runs)


def estimate_memory(
    model: ModelSpec,
    candidate: Candidate,
    *,
    world_size: int,
    seq_length: int,
    global_batch_size: int,
    precision: str = "bf16",
    ranks: Sequence[int] | None = None,
    **options: Any,
) -> MemoryEstimate:
    """Dry-run `ranks`, by default one of the first, each middle and the last pipeline stage.

    `options` are the other arguments of `dry_run`.
    """
    request = dry_run_request(
        model,
        candidate,
        rank=0,
        world_size=world_size,
        seq_length=seq_length,
        global_batch_size=global_batch_size,
        precision=precision,
        **{name: value for name, value in options.items() if name != "mcore"},
    )
    chosen = ranks if ranks is not None else stage_ranks(candidate, world_size)
    mcore = options.get("mcore")
    return MemoryEstimate(
        tuple(run_request(replace(request, rank=rank), mcore=mcore) for rank in chosen)
    )


def stage_ranks(candidate: Candidate, world_size: int) -> list[int]:
    """The first rank of every pipeline stage but the last, and the last rank of all."""
    stages = candidate.pipeline_model_parallel_size
    per_stage = world_size // stages
    return [stage * per_stage for stage in range(stages - 1)] + [world_size - 1]
