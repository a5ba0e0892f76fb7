"""Micro-benchmarks: rates from samples, and a real run on this CPU."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tuner.errors import EnvironmentLacksError
from tuner.hardware import get_gpu
from tuner.memory.kernel_log import KIND
from tuner.timing import collectives
from tuner.timing.calibration import Calibration, starting_rates
from tuner.timing.kernels import device_seconds
from tuner.timing.measure import fit_samples, measure_machine
from tuner.timing.microbench import Sample, kernel_log
from tuner.timing.microbench_ranks import without_outliers
from tuner.timing.topology import Links, Span

H100 = get_gpu("h100")


def _samples(rates):
    """Samples that took what the model says of these rates."""
    made = [
        Sample("gemm", "bf16", 1.0, 0.0, m=m, n=n, k=k, flops=2.0 * m * n * k, bytes=1.0)
        for m in (2048, 8192)
        for n, k in ((4096, 4096), (28672, 4096), (8192, 8192))
    ]
    made += [Sample("memory", "", 1.0, 0.0, bytes=float(1 << p)) for p in (24, 27, 30)]
    made += [Sample("host_copy", "", 1.0, 0.0, bytes=float(1 << 28))]
    seconds = device_seconds(kernel_log(made), H100, rates)
    seconds[-1] = made[-1].bytes / (H100.host_bandwidth_bytes_per_s * rates.host_link)
    local = [
        replace(s, seconds=float(t) + rates.kernel_gap_s)
        for s, t in zip(made, seconds, strict=True)
    ]
    links = Links.of(H100)
    between = [
        Sample(
            "collective",
            "",
            float(collectives.seconds("all_reduce", float(1 << p), Span(8, 8), links, rates)),
            0.0,
            bytes=float(1 << p),
            operation="all_reduce",
            group_size=8,
        )
        for p in (12, 20, 28)
    ]
    return [*local, *between]


def test_samples_give_back_the_rates_they_were_made_with():
    truth = starting_rates().with_values(
        {"half_gemm": 0.6, "memory": 0.7, "host_link": 0.5, "link": 0.6}
    )
    prior = Calibration.prior("H100-SXM-80GB", "bf16", starting_rates(), residual_spread=0.02)
    found = fit_samples(prior, _samples(truth), H100)
    rates = found.calibration.rates
    assert rates.half_gemm == pytest.approx(0.6, rel=0.05)
    assert rates.memory == pytest.approx(0.7, rel=0.05)
    assert rates.host_link == pytest.approx(0.5, rel=0.1)
    assert rates.link == pytest.approx(0.6, rel=0.1)
    assert np.abs(found.residuals).max() < 0.05


def test_samples_become_rows_of_a_kernel_log():
    log = kernel_log([Sample("gemm", "bf16", 1e-3, 0.0, m=2, n=3, k=4, flops=48.0)])
    assert (log.kind[0], log.m[0], log.n[0], log.k[0]) == (KIND["gemm"], 2, 3, 4)


def test_unsteady_samples_are_left_out_unless_there_is_nothing_else():
    steady = Sample("collective", "", 1.0, 0.1, operation="send")
    samples = [
        steady,
        replace(steady, spread=3.0),
        replace(steady, operation="all_reduce", spread=2.0),
        replace(steady, operation="all_reduce", spread=4.0),
    ]
    kept = without_outliers(samples)
    assert [(s.operation, s.spread) for s in kept] == [("send", 0.1), ("all_reduce", 2.0)]


@pytest.mark.slow
def test_this_cpu_is_measured_in_a_few_seconds(tmp_path):
    found = measure_machine("cpu", ranks=2, scale=0.05)
    kinds = {sample.operation or sample.kind for sample in found.samples}
    assert kinds >= {"gemm", "memory", "attention_forward", "all_reduce", "all_gather", "send"}
    gpu = found.calibration.measured_device()
    assert gpu is not None
    assert 1e9 < gpu.peak_flops["fp32"] < 1e14
    assert 1e8 < gpu.memory_bandwidth_bytes_per_s < 1e13
    rates = found.calibration.rates
    assert 1e-7 < rates.kernel_gap_s < 1e-3
    assert 0 < rates.half_gemm <= 1
    products = {(s.m, s.n, s.k): s.seconds for s in found.samples if s.dtype == "fp32" and s.n}
    assert products[1024, 4096, 256] > 5 * products[128, 128, 256]  # 256 times the work
    found.calibration.save(tmp_path / "cpu.json")
    again = Calibration.load(tmp_path / "cpu.json")
    assert again.measured_device() == gpu


def test_a_machine_without_cuda_says_so():
    import torch

    if torch.cuda.is_available():
        pytest.skip("CUDA is here")
    with pytest.raises(EnvironmentLacksError, match="--device cpu"):
        measure_machine("cuda")
