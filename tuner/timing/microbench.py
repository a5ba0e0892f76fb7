"""Micro-benchmarks of one device: products, attention, memory, copies, launches.

Every sample is a row of a kernel log with the seconds it took, so that the model of
`tuner.timing.kernels` is fitted to it as it is to whole steps. On the CPU a device is one process
with the threads it has been given; its peaks are the best that was seen.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from tuner.memory.kernel_log import FORMAT, GROUP, KIND, OPERATION, KernelLog, Row

if TYPE_CHECKING:
    from collections.abc import Sequence

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Sample:
    """One operation and the median of its times.

    Shapes, `flops` and `bytes` are those of `KernelLog`; `operation` and `group_size` are of
    collectives. `spread` is the largest minus the smallest of the middle half of the times, over
    their median.
    """

    kind: str
    dtype: str
    seconds: float
    spread: float
    m: int = 0
    n: int = 0
    k: int = 0
    batch: int = 1
    flops: float = 0.0
    bytes: float = 0.0
    operation: str = ""
    group_size: int = 1

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def row(self) -> Row:
        """The operation as a row of a kernel log."""
        return (
            *(0, 0, 0, KIND[self.kind], FORMAT.get(self.dtype, 0)),
            *(self.m, self.n, self.k, self.batch, self.flops, self.bytes),
            *(OPERATION[self.operation], GROUP["other"], self.group_size, False),
        )


def kernel_log(samples: Sequence[Sample]) -> KernelLog:
    """The operations of samples, in their order."""
    return KernelLog.from_rows([sample.row() for sample in samples])


@dataclass(frozen=True, slots=True)
class Launches:
    """Fixed times around kernels, in seconds.

    `host_kernel_s`: of the host to launch one. `kernel_gap_s`: between kernels that take no time,
    on the device. `graph_gap_s`: the same inside a CUDA graph. `graph_launch_s`: of the host to
    launch one graph. The last two are None without CUDA; on the CPU operations run as they are
    launched, so that all their fixed time is the gap.
    """

    host_kernel_s: float
    kernel_gap_s: float
    graph_gap_s: float | None = None
    graph_launch_s: float | None = None


class Clock:
    """Times of a device: medians over repetitions that fill a given time."""

    def __init__(self, device: str, seconds_each: float) -> None:
        self.device, self._each = device, seconds_each

    def median(self, run: Callable[[], object]) -> tuple[float, float]:
        """Median seconds of a call and the spread of its times, after a warm-up."""
        import numpy as np

        self.once(run)
        first = self.once(run)
        count = int(min(200, max(5, self._each / max(first, 1e-7))))
        times = np.array([self.once(run) for _ in range(count)])
        low, middle, high = np.percentile(times, [25, 50, 75])
        return float(middle), float((high - low) / middle)

    def once(self, run: Callable[[], object]) -> float:
        """Seconds of one call."""
        if self.device == "cpu":
            start = time.perf_counter()
            run()
            return time.perf_counter() - start
        import torch

        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        begin.record()
        run()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) * 1e-3


def measure_device(device: str, *, seconds: float) -> tuple[list[Sample], Launches]:
    """All samples of one device that fit into about `seconds`, and its launch times.

    `device` is "cuda" (the current one) or "cpu". Operations that it lacks are left out.
    """
    plans = list(_plans(device))
    clock = Clock(device, seconds / max(1, len(plans)))
    samples = []
    for make in plans:
        sample = make(clock)
        if sample is not None:
            samples.append(sample)
        _forget(device)
    return samples, _launches(device)


def _forget(device: str) -> None:
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()


_Plan = Callable[[Clock], "Sample | None"]

_TOKENS = {"cuda": (1024, 4096, 8192, 16384), "cpu": (128, 512, 1024)}
_WEIGHTS = {
    # (n, k): attention and MLP products of models with hidden sizes from 2,048 to 8,192, and of
    # parts of them under tensor parallelism
    "cuda": ((6144, 4096), (4096, 14336), (28672, 4096), (2560, 8192), (8192, 8192), (1536, 2048)),
    "cpu": ((256, 256), (1024, 256), (256, 1024), (4096, 256), (128, 256), (512, 512)),
}
_DTYPES = {"cuda": ("bf16", "fp8_current"), "cpu": ("fp32", "bf16")}
_ATTENTION = {
    # (sequences, heads, length, width)
    "cuda": ((1, 32, 4096, 128), (1, 16, 8192, 128), (2, 32, 2048, 64), (4, 8, 4096, 128)),
    "cpu": ((1, 8, 128, 32), (2, 8, 256, 32), (1, 4, 512, 64)),
}
_COPIED = {"cuda": (1 << 22, 1 << 26, 1 << 29), "cpu": (1 << 16, 1 << 20, 1 << 24)}


def _plans(device: str) -> Iterator[_Plan]:
    for dtype in _DTYPES[device]:
        for tokens in _TOKENS[device]:
            for n, k in _WEIGHTS[device]:
                yield partial(_product, dtype=dtype, m=tokens, n=n, k=k)
    for shape in _ATTENTION[device]:
        for forward in (True, False):
            yield partial(_attention, shape=shape, forward=forward)
    for size in _COPIED[device]:
        yield partial(_memory, size=size)
        if device == "cuda":
            yield partial(_host_copy, size=size, to_host=False)
            yield partial(_host_copy, size=size, to_host=True)


def _torch_dtype(name: str) -> Any:
    import torch

    return {"fp32": torch.float32, "bf16": torch.bfloat16}[name]


def _product(clock: Clock, dtype: str, m: int, n: int, k: int) -> Sample | None:
    import torch

    width = {"fp32": 4, "bf16": 2}.get(dtype, 1)
    if dtype == "fp8_current":
        run = _scaled_product(m, n, k)
    else:
        left = torch.randn(m, k, device=clock.device).to(_torch_dtype(dtype))
        right = torch.randn(n, k, device=clock.device).to(_torch_dtype(dtype))
        out = torch.empty(m, n, device=clock.device, dtype=left.dtype)

        def run() -> object:
            return torch.mm(left, right.t(), out=out)

    if run is None:
        return None
    seconds, spread = clock.median(run)
    moved = width * (m * k + n * k) + (4 if dtype == "fp32" else 2) * m * n
    return Sample(
        kind="gemm",
        dtype=dtype,
        seconds=seconds,
        spread=spread,
        m=m,
        n=n,
        k=k,
        flops=2.0 * m * n * k,
        bytes=float(moved),
    )


def _scaled_product(m: int, n: int, k: int) -> Callable[[], object] | None:
    """A product in FP8 with one scale for each operand, where the GPU has them."""
    import torch

    if torch.cuda.get_device_capability() < (8, 9):
        return None
    left = torch.randn(m, k, device="cuda").to(torch.float8_e4m3fn)
    right = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
    one = torch.ones((), device="cuda")

    def run() -> object:
        return torch._scaled_mm(left, right.t(), one, one, out_dtype=torch.bfloat16)

    return run


def _attention(clock: Clock, shape: tuple[int, int, int, int], forward: bool) -> Sample:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    sequences, heads, length, width = shape
    dtype = "bf16" if clock.device == "cuda" else "fp32"
    query, key, value = inputs = [
        torch.randn(*shape, device=clock.device, dtype=_torch_dtype(dtype), requires_grad=True)
        for _ in range(3)
    ]

    def run_forward() -> Any:
        return scaled_dot_product_attention(query, key, value, is_causal=True)

    if forward:
        with torch.no_grad():
            seconds, spread = clock.median(run_forward)
    else:
        output = run_forward()
        grad = torch.randn_like(output)
        seconds, spread = clock.median(
            lambda: torch.autograd.grad(output, inputs, grad, retain_graph=True)
        )
    batch = sequences * heads
    pairs = batch * length * (length + 1) / 2
    tensors = 4 if forward else 8
    return Sample(
        kind="attention_forward" if forward else "attention_backward",
        dtype=dtype,
        seconds=seconds,
        spread=spread,
        m=length,
        n=length,
        k=width,
        batch=batch,
        flops=(4.0 if forward else 10.0) * width * pairs,
        bytes=float(tensors * inputs[0].element_size() * inputs[0].numel()),
    )


def _memory(clock: Clock, size: int) -> Sample:
    """One pointwise kernel that reads two tensors and writes one."""
    import torch

    dtype = torch.bfloat16 if clock.device == "cuda" else torch.float32
    count = size // dtype.itemsize
    left, right, out = (torch.zeros(count, device=clock.device, dtype=dtype) for _ in range(3))
    seconds, spread = clock.median(lambda: torch.add(left, right, out=out))
    return Sample("memory", "", seconds, spread, bytes=3.0 * size)


def _host_copy(clock: Clock, size: int, *, to_host: bool) -> Sample:
    import torch

    there = torch.zeros(size, dtype=torch.uint8, device="cuda")
    here = torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    source, target = (there, here) if to_host else (here, there)
    seconds, spread = clock.median(lambda: target.copy_(source, non_blocking=True))
    return Sample("host_copy", "", seconds, spread, bytes=float(size))


def _launches(device: str, count: int = 1000) -> Launches:
    """Times of kernels that have nothing to do."""
    import torch

    value = torch.zeros(8, device=device)

    def issue() -> None:
        for _ in range(count):
            value.add_(1.0)

    issue()
    if device == "cpu":
        start = time.perf_counter()
        issue()
        return Launches(host_kernel_s=0.0, kernel_gap_s=(time.perf_counter() - start) / count)
    clock = Clock("cuda", 0.0)
    torch.cuda.synchronize()
    start = time.perf_counter()
    issue()
    host = (time.perf_counter() - start) / count
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        issue()
    empty = torch.cuda.CUDAGraph()
    with torch.cuda.graph(empty):
        value.add_(1.0)
    clock.once(graph.replay)
    inside = clock.once(graph.replay) / count
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(100):
        empty.replay()
    launch = (time.perf_counter() - start) / 100
    torch.cuda.synchronize()
    return Launches(host, _device_gap(value, inside), inside, launch)


def _device_gap(value: Any, inside_graph: float) -> float:
    """Device time per tiny kernel when the host is far enough ahead to never hold it up."""
    import torch

    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    count = 200
    torch.cuda.synchronize()
    torch.cuda._sleep(int(50e6))  # the queue fills while the device is busy
    begin.record()
    for _ in range(count):
        value.add_(1.0)
    end.record()
    end.synchronize()
    return max(inside_graph, float(begin.elapsed_time(end)) * 1e-3 / count)


def cpu_figures(samples: Sequence[Sample], ranks: Sequence[Sample], memory_bytes: int) -> Any:
    """A CPU as a device: peaks that no sample beats, bandwidths the best ones reach."""
    from tuner.hardware import Gpu

    def best(kind: str, quantity: str, operation: str = "") -> float:
        found = [s for s in samples if s.kind == kind]
        found += [s for s in ranks if s.kind == kind and s.operation == operation]
        return max((getattr(s, quantity) / s.seconds for s in found), default=1e9)

    memory, between = best("memory", "bytes"), best("collective", "bytes", "send")
    gpu = Gpu(
        name="cpu",
        vendor="",
        architecture="cpu",
        compute_capability=(0, 0),
        memory_bytes=memory_bytes,
        usable_memory_bytes=memory_bytes,
        memory_bandwidth_bytes_per_s=memory,
        peak_flops=dict.fromkeys(("fp32", "tf32", "bf16"), best("gemm", "flops")),
        multiprocessors=1,
        link_bandwidth_bytes_per_s=between,
        link_domain_gpus=1 << 20,
        gpus_per_node=1,
        host_bandwidth_bytes_per_s=memory,
        network_bandwidth_bytes_per_s=between,
    )
    full, half = (_unbeaten(samples, gpu, dtype) for dtype in ("fp32", "bf16"))
    return replace(gpu, peak_flops={"fp32": full, "tf32": full, "bf16": half})


def _unbeaten(samples: Sequence[Sample], gpu: Any, dtype: str) -> float:
    """The lowest peak under which the model of products is faster than every sample."""
    from tuner.timing.calibration import starting_rates
    from tuner.timing.kernels import device_seconds

    mine = [s for s in samples if s.kind == "gemm" and s.dtype == dtype]
    rates = starting_rates().with_values({"gemm": 1.0, "half_gemm": 1.0, "memory": 1.0})
    fast = replace(gpu, memory_bandwidth_bytes_per_s=1e18)
    modelled = device_seconds(kernel_log(mine), fast, rates)
    ahead = max(float(m) / s.seconds for m, s in zip(modelled, mine, strict=True))
    return float(gpu.peak_flops[dtype] * ahead)
