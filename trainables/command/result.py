"""From what the processes of a command read to the one result of the trial."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from trainables.logs import LogFigures, merged
from tuner.measurement import Measurement, Outcome, RankMeasurement, TrialResult, TrialSpec

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class CommandReport:
    """What one process read, and the peak it saw (bytes) with what that is a peak of."""

    rank: int
    figures: LogFigures
    sampled_peak_bytes: int
    sampled: str


def trial_result(spec: TrialSpec, reports: Sequence[CommandReport]) -> TrialResult:
    """Completed, diverged, out of memory by the job's limit, or crashed where nothing was read.

    Peaks the output names are taken before sampled ones.
    """
    figures = merged(report.figures for report in reports)
    if not figures.steps:
        return TrialResult(
            Outcome.CRASHED, "the command ended, but no line of its output told a step time"
        )
    for index, loss in sorted(figures.losses.items()):
        if not math.isfinite(loss):
            return TrialResult(Outcome.DIVERGED, f"the loss of step {index} is {loss}")
    measurement = _measurement(spec, reports, figures)
    limit, peak = spec.memory_limit_bytes, measurement.peak_memory_allocated_bytes
    if limit is not None and peak > limit:
        return TrialResult(
            Outcome.OOM,
            f"{peak / _GIB:.4f} GiB are above the limit of {limit / _GIB:.4f} GiB",
            measurement,
        )
    return TrialResult(Outcome.COMPLETED, "", measurement)


def _measurement(
    spec: TrialSpec, reports: Sequence[CommandReport], figures: LogFigures
) -> Measurement:
    steps = figures.measured_steps(spec.warmup_steps)
    times = tuple(steps.values())
    step_time_s = statistics.median(times)
    per_gpu = step_time_s * spec.world_size
    sampled = {report.rank: report.sampled_peak_bytes for report in reports}
    allocated = figures.allocated_bytes or sampled
    reserved = figures.reserved_bytes
    rates = [rate for index, rate in figures.tflops_per_gpu.items() if index in steps]
    return Measurement(
        step_time_s=step_time_s,
        step_time_spread_s=max(times) - min(times),
        tokens_per_s_per_gpu=spec.global_batch_size * spec.seq_length / per_gpu,
        tflops_per_gpu=statistics.median(rates) if rates else _model_tflops(spec, per_gpu),
        peak_memory_allocated_bytes=max(allocated.values()),
        peak_memory_reserved_bytes=max(reserved.values(), default=None),
        losses=tuple(loss for _, loss in sorted(figures.losses.items())),
        step_times_s=times,
        ranks=tuple(
            RankMeasurement(rank, step_time_s, peak, reserved.get(rank))
            for rank, peak in sorted(allocated.items())
        ),
        versions={"memory": "the output" if figures.allocated_bytes else reports[0].sampled},
    )


def _model_tflops(spec: TrialSpec, gpu_seconds: float) -> float:
    """Model TFLOP/s per GPU of the job's model, where the output names none."""
    from tuner.models.flops import model_flops_per_step
    from tuner.models.spec import MODEL_INPUTS, ModelSpec

    fields = {**spec.model, **spec.config}
    model = ModelSpec.from_flat({k: v for k, v in fields.items() if k in MODEL_INPUTS})
    flops = model_flops_per_step(model, spec.seq_length, spec.global_batch_size)
    return flops / gpu_seconds / 1e12
