"""From what each rank saw to the one result of a trial."""

from __future__ import annotations

import math
import platform
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from tuner.measurement import Measurement, Outcome, RankMeasurement, TrialResult, TrialSpec

if TYPE_CHECKING:
    import torch

    from trainables.megatron_core.plan import BuildPlan

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class RankReport:
    """One rank's measured steps (seconds each, warm-up left out) and memory peaks (bytes)."""

    rank: int
    step_times_s: tuple[float, ...]
    peak_allocated_bytes: int
    peak_reserved_bytes: int | None
    peak_device_bytes: int | None = None


def trial_result(
    spec: TrialSpec,
    plan: BuildPlan,
    report: RankReport,
    loss_shares: Sequence[torch.Tensor],
    notes: Mapping[str, str],
) -> TrialResult:
    """Combine all ranks' reports; collective, with the same result on every rank."""
    import torch

    losses = global_losses(spec, plan, loss_shares)
    reports: list[RankReport] = [report] * spec.world_size
    torch.distributed.all_gather_object(reports, report)
    for step, loss in enumerate(losses):
        if not math.isfinite(loss):
            return TrialResult(Outcome.DIVERGED, f"the loss of step {step} is {loss}")
    flops = _model_flops(spec, plan)
    return result_from_reports(spec, reports, losses, flops, {**package_versions(), **notes})


def result_from_reports(
    spec: TrialSpec,
    reports: Sequence[RankReport],
    losses: Sequence[float],
    model_flops_per_step: int,
    versions: Mapping[str, str],
) -> TrialResult:
    """The result of finite training: completed, or out of memory by `memory_limit_bytes`."""
    slowest = [max(times) for times in zip(*(r.step_times_s for r in reports), strict=True)]
    step_time_s = statistics.median(slowest)
    reserved = [r.peak_reserved_bytes for r in reports if r.peak_reserved_bytes is not None]
    largest = max(reports, key=lambda r: r.peak_allocated_bytes)
    per_gpu = step_time_s * spec.world_size
    measurement = Measurement(
        step_time_s=step_time_s,
        step_time_spread_s=max(slowest) - min(slowest),
        tokens_per_s_per_gpu=spec.global_batch_size * spec.seq_length / per_gpu,
        tflops_per_gpu=model_flops_per_step / per_gpu / 1e12,
        peak_memory_allocated_bytes=largest.peak_allocated_bytes,
        peak_memory_reserved_bytes=max(reserved) if reserved else None,
        losses=tuple(losses),
        step_times_s=tuple(slowest),
        ranks=tuple(
            RankMeasurement(
                rank=r.rank,
                step_time_s=statistics.median(r.step_times_s),
                peak_memory_allocated_bytes=r.peak_allocated_bytes,
                peak_memory_reserved_bytes=r.peak_reserved_bytes,
                peak_device_bytes=r.peak_device_bytes,
            )
            for r in reports
        ),
        versions=dict(versions),
    )
    limit = spec.memory_limit_bytes
    if spec.device == "cpu" and limit is not None and largest.peak_allocated_bytes > limit:
        return TrialResult(
            Outcome.OOM,
            f"rank {largest.rank} peaked at {largest.peak_allocated_bytes / _GIB:.4f} GiB, above "
            f"the limit of {limit / _GIB:.4f} GiB",
            measurement,
        )
    return TrialResult(Outcome.COMPLETED, "", measurement)


def package_versions() -> dict[str, str]:
    """Versions of what computed the figures."""
    import megatron.core
    import torch

    versions = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "megatron_core": megatron.core.__version__,
    }
    if torch.version.cuda:
        versions["cuda"] = torch.version.cuda
    try:
        from importlib.metadata import version

        versions["transformer_engine"] = version("transformer-engine")
    except ModuleNotFoundError:
        pass
    return versions


def global_losses(spec: TrialSpec, plan: BuildPlan, shares: Sequence[torch.Tensor]) -> list[float]:
    """Mean loss per token of each step's global batch, from every rank's share."""
    import torch

    total = torch.stack(list(shares)).to(torch.cuda.current_device())
    torch.distributed.all_reduce(total)
    # Tensor parallel ranks of the last stage each computed the loss of the same tokens.
    tokens = spec.global_batch_size * spec.seq_length
    duplicated = tokens * plan.layout.tensor_model_parallel_size
    return [float(loss) / duplicated for loss in total.tolist()]


def _model_flops(spec: TrialSpec, plan: BuildPlan) -> int:
    from tuner.models.flops import model_flops_per_step
    from tuner.models.spec import MODEL_INPUTS, ModelSpec

    fields = {**spec.model, **spec.config}
    model = ModelSpec.from_flat({k: v for k, v in fields.items() if k in MODEL_INPUTS})
    return model_flops_per_step(
        model,
        spec.seq_length,
        spec.global_batch_size,
        tensor_model_parallel_size=plan.layout.tensor_model_parallel_size,
    )
