"""Calibrate a fresh machine: micro-benchmarks first, then the rates that explain them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from tuner.errors import EnvironmentLacksError, InputError
from tuner.timing.calibration import NAMES, Calibration, starting_rates
from tuner.timing.fitting import Fit, fit
from tuner.timing.microbench import Launches, Sample, cpu_figures, kernel_log, measure_device
from tuner.timing.microbench_ranks import measure_ranks, without_outliers

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from tuner.hardware import Gpu
    from tuner.timing.rates import Rates

_OPEN = ("gemm", "half_gemm", "attention_forward", "attention_backward", "memory", "host_link")
_FIXED = ("host_kernel_s", "kernel_gap_s", "graph_gap_s", "graph_launch_s")
_OPEN_SPREAD = 1.0
"""Rates that micro-benchmarks measure outright: what was believed of them counts for little."""

_RANK_RATES = ("link", "link_latency_s")
_RANK_SPREAD = 3.0
"""Between the processes of a CPU nothing is believed of these beforehand."""

_DIRECT_SPREAD = 0.1
"""Of the fixed times, each measured by itself."""

_ALONE_SPREAD = {"cuda": 0.1, "cpu": 0.3}
"""How far kernels inside a step may be from kernels measured by themselves: caches, clocks, and
ranks that wait for each other. One standard deviation of a rate's logarithm."""

_STEP_SPREAD = 0.1
"""Residual spread believed of whole steps before any is measured."""

_SECONDS = {"cuda": (90.0, 60.0), "cpu": (12.0, 8.0)}
"""Time for operations and for collectives, without the start of processes."""


@dataclass(frozen=True, slots=True)
class MachineCalibration:
    """A calibration with the samples it was made from and how well it explains them."""

    calibration: Calibration
    samples: tuple[Sample, ...]
    residuals: tuple[float, ...]

    def to_json(self) -> dict[str, Any]:
        """A calibration file with its samples; readers of calibrations ignore those."""
        pairs = zip(self.samples, self.residuals, strict=True)
        return {
            **self.calibration.to_json(),
            "samples": [{**s.to_json(), "residual": r} for s, r in pairs],
        }


def measure_machine(
    device: str,
    *,
    gpu: str | None = None,
    precision: str | None = None,
    ranks: int | None = None,
    scale: float = 1.0,
) -> MachineCalibration:
    """Measure this machine: its current CUDA device and the links between its GPUs, or its CPU.

    `ranks` take part in collectives: by default all GPUs, or four processes. `scale` stretches the
    time spent (1: under a minute on a CPU, under five on GPUs). Raises EnvironmentLacksError
    without CUDA, InputError for a GPU that the tuner does not know.
    """
    from tuner.hardware import get_gpu

    found = _cuda_name(gpu) if device == "cuda" else None
    ranks = ranks if ranks is not None else _ranks(device)
    for_device, for_ranks = (scale * seconds for seconds in _SECONDS[device])
    if found is not None:
        samples, launches = measure_device(device, seconds=for_device)
        collectives = without_outliers(measure_ranks(device, ranks, seconds=for_ranks).collectives)
        figures, own = get_gpu(found), None
    else:
        between = measure_ranks(device, ranks, seconds=for_ranks, operations_s=for_device)
        assert between.launches is not None
        samples, launches = list(between.operations), between.launches
        collectives = without_outliers(between.collectives)
        figures = cpu_figures(samples, collectives, _memory_bytes())
        own = {**asdict(figures), "compute_capability": list(figures.compute_capability)}
    prior = _prior(
        Calibration.prior(
            figures.name,
            precision or ("bf16" if device == "cuda" else "fp32"),
            starting_rates(),
            device=own,
            versions=_versions(),
        ),
        launches,
        wide_links=device == "cpu",
    )
    found_rates = fit_samples(prior, [*samples, *collectives], figures)
    calibration = _for_steps(found_rates.calibration, _ALONE_SPREAD[device])
    return replace(found_rates, calibration=calibration)


def _for_steps(calibration: Calibration, alone: float) -> Calibration:
    """A calibration of kernels as what is believed of steps before any is measured."""
    measured = [name in (*_OPEN, *_RANK_RATES, *_FIXED) for name in NAMES]
    return replace(
        calibration,
        covariance=calibration.covariance + np.diag(np.where(measured, alone**2, 0.0)),
        residual_spread=_STEP_SPREAD,
        source="measured",
    )


def fit_samples(prior: Calibration, samples: Sequence[Sample], gpu: Gpu) -> MachineCalibration:
    """The rates that explain samples of a device with these figures."""
    local = [sample for sample in samples if not sample.operation]
    between = [sample for sample in samples if sample.operation]
    log = kernel_log(local)

    def predict(rates: Rates) -> NDArray[np.float64]:
        return np.concatenate([_local(log, gpu, rates), _between(between, gpu, rates)])

    measured = [sample.seconds for sample in (*local, *between)]
    names = [name for name in NAMES if name in (*_OPEN, *_RANK_RATES)]
    found: Fit = fit(prior, predict, measured, parameters=names)
    return MachineCalibration(
        found.calibration, (*local, *between), tuple(found.residuals.tolist())
    )


def _local(log: Any, gpu: Gpu, rates: Rates) -> NDArray[np.float64]:
    from tuner.memory.kernel_log import KIND
    from tuner.timing.kernels import device_seconds

    seconds = device_seconds(log, gpu, rates)
    copies = log.kind == KIND["host_copy"]
    seconds[copies] = log.bytes[copies] / (gpu.host_bandwidth_bytes_per_s * rates.host_link)
    return seconds + rates.kernel_gap_s


def _between(samples: Sequence[Sample], gpu: Gpu, rates: Rates) -> NDArray[np.float64]:
    from tuner.timing import collectives
    from tuner.timing.topology import Links, Span

    links = Links.of(gpu, link_domain_gpus=1 << 20)
    return np.array(
        [
            collectives.seconds(
                sample.operation,
                sample.bytes,
                Span(sample.group_size, sample.group_size),
                links,
                rates,
            )
            for sample in samples
        ]
    )


def _prior(start: Calibration, launches: Launches, *, wide_links: bool) -> Calibration:
    """The starting calibration with the fixed times as measured, and measured rates left open."""
    direct = {name: value for name, value in asdict(launches).items() if value is not None}
    covariance = start.covariance.copy()
    for name in direct:
        covariance[NAMES.index(name), NAMES.index(name)] = _DIRECT_SPREAD**2
    for name in _OPEN:
        covariance[NAMES.index(name), NAMES.index(name)] = _OPEN_SPREAD**2
    for name in _RANK_RATES if wide_links else ():
        covariance[NAMES.index(name), NAMES.index(name)] = _RANK_SPREAD**2
    return Calibration(
        start.gpu,
        start.precision,
        start.rates.with_values(direct),
        covariance,
        residual_spread=0.2,
        device=start.device,
        versions=start.versions,
        source="measured",
    )


def _cuda_name(gpu: str | None) -> str:
    import torch

    from tuner.hardware import get_gpu

    if not torch.cuda.is_available():
        raise EnvironmentLacksError("PyTorch sees no CUDA device here; use --device cpu")
    name = gpu or torch.cuda.get_device_name()
    try:
        return get_gpu(name).name
    except InputError as error:
        raise InputError(str(error), field="gpu", fix="name it with --gpu") from None


def _ranks(device: str) -> int:
    if device == "cpu":
        return 4
    import torch

    return int(torch.cuda.device_count())


def _memory_bytes() -> int:
    import psutil

    return int(psutil.virtual_memory().total)


def _versions() -> dict[str, str]:
    import platform
    from importlib.metadata import version

    import torch

    found = {"torch": version("torch"), "megatron-tuner": version("megatron-tuner")}
    if torch.cuda.is_available():
        found["cuda"] = str(torch.version.cuda)
    return found | {"machine": platform.machine(), "python": platform.python_version()}
