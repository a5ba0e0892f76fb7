"""Step time of candidates: the package's front door to everything below."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.candidate import Candidate
from tuner.hardware import Gpu, get_gpu
from tuner.models import ModelSpec, model_flops_per_step
from tuner.timing.calibration import Calibration
from tuner.timing.offload import activation_traffic
from tuner.timing.passes import Machine
from tuner.timing.rates import Rates
from tuner.timing.shipped import precision_key, shipped_calibration
from tuner.timing.step import BREAKDOWN, StepTimes, TimeTable, step_times
from tuner.timing.topology import Links
from tuner.timing.units import model_kernels

if TYPE_CHECKING:
    from numpy.typing import NDArray

_PEAK_OF = {"nvfp4": "fp4", "mxfp8": "fp8", "fp32": "tf32", "fp16": "fp16"}


@dataclass(frozen=True, slots=True)
class StepTime:
    """A predicted step.

    `tflops_per_gpu` counts model FLOPs as `tuner.models.model_flops_per_step`, `mfu` is its share
    of the peak rate of the precision. `breakdown` holds seconds by cause and sums to the step.
    `uncertainty` is one standard deviation of the step time's logarithm.
    """

    step_time_s: float
    tokens_per_s_per_gpu: float
    tflops_per_gpu: float
    mfu: float
    breakdown: Mapping[str, float]
    uncertainty: float

    def to_json(self) -> dict[str, Any]:
        """The fields of `tuner estimate`'s document."""
        return {
            "step_time_s": self.step_time_s,
            "tokens_per_s_per_gpu": self.tokens_per_s_per_gpu,
            "tflops_per_gpu": self.tflops_per_gpu,
            "mfu": self.mfu,
            "time_breakdown": dict(self.breakdown) | {"uncertainty": self.uncertainty},
        }


@dataclass(frozen=True, slots=True)
class TimeRun:
    """A model on a cluster with its batches: what candidates of one search share."""

    model: ModelSpec
    gpu: Gpu
    links: Links
    world_size: int
    seq_length: int
    global_batch_size: int
    precision: str = "bf16"

    @classmethod
    def of(
        cls,
        model: ModelSpec,
        *,
        world_size: int,
        seq_length: int,
        global_batch_size: int,
        gpu: str,
        gpus_per_node: int | None = None,
        link_domain_gpus: int | None = None,
        oversubscription: float = 1.0,
        precision: str = "bf16",
    ) -> TimeRun:
        """A run by the names of `tuner estimate`'s document."""
        device = get_gpu(gpu)
        links = Links.of(
            device,
            gpus_per_node=gpus_per_node,
            link_domain_gpus=link_domain_gpus,
            oversubscription=oversubscription,
        )
        return cls(model, device, links, world_size, seq_length, global_batch_size, precision)

    def table(self, rates: Rates) -> TimeTable:
        """An empty table of unit times."""
        return TimeTable(self.model, Machine(self.gpu, self.links, rates, self.world_size))

    def rows(self, table: TimeTable, candidate: Candidate) -> tuple[int, int]:
        """The row of a candidate in a table, and that of its setting without recompute.

        Makes the dry run of its units unless the cache has it. Raises UnsupportedError or
        InputError as dry runs do.
        """
        from tuner.memory.composition.measure import without_recompute

        own = self._row(table, candidate)
        if candidate.recompute_method != "block":
            return own, own
        return own, self._row(table, without_recompute(candidate))

    def _row(self, table: TimeTable, candidate: Candidate) -> int:
        run: dict[str, Any] = {
            "seq_length": self.seq_length,
            "precision": self.precision,
            "architecture": self.gpu.architecture,
        }
        kernels = model_kernels(self.model, candidate, **run)
        return table.row(kernels, candidate, activation_traffic(self.model, candidate, **run))

    def times(
        self, candidates: Sequence[Candidate], rates: Rates, table: TimeTable | None = None
    ) -> StepTimes:
        """Step times of candidates, arrays `[candidate]`; infinite where none can be given."""
        table = table or self.table(rates)
        rows = [self.rows(table, candidate) for candidate in candidates]
        return step_times(
            candidates,
            [own for own, _ in rows],
            [plain for _, plain in rows],
            table,
            global_batch_size=self.global_batch_size,
        )

    def peak_flops(self, candidate: Candidate) -> float:
        """The peak rate of the arithmetic a candidate's products use."""
        key = precision_key(candidate, self.precision)
        name = "fp8" if key.startswith("fp8") else _PEAK_OF.get(key, "bf16")
        return self.gpu.peak_flops.get(name, self.gpu.peak_flops["bf16"])


def estimate_time(
    model: ModelSpec,
    candidate: Candidate,
    *,
    world_size: int,
    seq_length: int,
    global_batch_size: int,
    gpu: str,
    gpus_per_node: int | None = None,
    link_domain_gpus: int | None = None,
    precision: str = "bf16",
    calibration: Calibration | None = None,
) -> StepTime:
    """The step time of one candidate, with its parts and its uncertainty.

    `seq_length` in tokens, `global_batch_size` in sequences. Without `calibration` the packaged one
    of the GPU and precision holds. Raises UnsupportedError or InputError for what cannot be run
    without data, ValueError where Megatron-Core would refuse the schedule.
    """
    run = TimeRun.of(
        model,
        world_size=world_size,
        seq_length=seq_length,
        global_batch_size=global_batch_size,
        gpu=gpu,
        gpus_per_node=gpus_per_node,
        link_domain_gpus=link_domain_gpus,
        precision=precision,
    )
    return run_time(run, candidate, calibration)


def run_time(run: TimeRun, candidate: Candidate, calibration: Calibration | None) -> StepTime:
    """`estimate_time` for a run that is described already."""
    from tuner.timing.fitting import prediction_spread

    known = calibration or shipped_calibration(
        run.gpu.name, precision_key(candidate, run.precision)
    )
    times = run.times([candidate], known.rates)
    step = float(times.step_s[0])
    if not np.isfinite(step):
        raise ValueError("Megatron-Core would refuse to run this pipeline schedule")

    def predict(rates: Rates) -> NDArray[np.float64]:
        return run.times([candidate], rates).step_s

    flops = model_flops_per_step(
        run.model,
        run.seq_length,
        run.global_batch_size,
        tensor_model_parallel_size=candidate.tensor_model_parallel_size,
    )
    rate = flops / step / run.world_size
    return StepTime(
        step_time_s=step,
        tokens_per_s_per_gpu=run.global_batch_size * run.seq_length / step / run.world_size,
        tflops_per_gpu=rate / 1e12,
        mfu=rate / run.peak_flops(candidate),
        breakdown=dict(zip(BREAKDOWN, times.parts[0].tolist(), strict=True)),
        uncertainty=float(prediction_spread(known, predict)[0]),
    )


def time_fields(
    request: Any, *, link_domain_gpus: int | None = None, calibration: Calibration | None = None
) -> dict[str, Any]:
    """The fields about time of the document of an `EstimateRequest`.

    They stand at null, with the reason in `time_breakdown`, where a step cannot be timed.
    """
    from tuner.errors import InputError
    from tuner.memory.worker_pool import DryRunError

    try:
        found = estimate_time(
            request.model,
            request.candidate,
            world_size=request.world_size,
            seq_length=request.seq_length,
            global_batch_size=request.global_batch_size,
            gpu=request.gpu.name,
            gpus_per_node=request.gpus_per_node,
            link_domain_gpus=link_domain_gpus,
            precision=request.precision,
            calibration=calibration,
        )
    except (InputError, ValueError, DryRunError) as error:
        names = ("step_time_s", "tokens_per_s_per_gpu", "tflops_per_gpu", "mfu")
        return dict.fromkeys(names) | {"time_breakdown": {"not_timed": str(error)}}
    return found.to_json()
