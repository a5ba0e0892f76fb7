"""Device seconds of kernels: products by shape, attention by pairs, everything else by bytes.

A product is cut into output tiles that the multiprocessors work on in waves; the last wave runs
partly empty, and every tile fills and drains its pipeline once. Small tiles fill waves better and
run slower. The library picks the tile; so does the model.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tuner.hardware import Gpu
from tuner.memory.kernel_log import ARITHMETIC, FORMAT, KIND, KernelLog
from tuner.timing.rates import Rates

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Seconds = NDArray[np.float64]

_TILES = (
    (256, 128, 1.0),
    (128, 256, 1.0),
    (128, 128, 0.86),
    (256, 64, 0.8),
    (128, 64, 0.7),
    (64, 64, 0.5),
)
"""Rows, columns, and speed of one multiprocessor against the largest tile.

CUTLASS (media/docs/cpp/efficient_gemm.md): operands are read once per tile, so arithmetic for each
byte read from shared memory falls with the tile's edges.
"""

_PIPELINE_DEPTH_BYTES = 512
"""Length of k, in bytes of one operand row, that filling and draining a tile's pipeline costs."""

_ATTENTION_BLOCK = 128
"""Query rows of a block of fused attention; blocks on the mask's edge are computed in full."""

_NARROW_HEAD = 128
"""Width of a head from which on attention is limited by products and not by exponentials."""

_PEAK_NAMES = {
    "fp32": "tf32",
    "bf16": "bf16",
    "fp16": "fp16",
    "fp8_delayed": "fp8",
    "fp8_current": "fp8",
    "fp8_block": "fp8",
    "mxfp8": "fp8",
    "nvfp4": "fp4",
    "fp64": "fp32",
}
_OPERAND_BYTES = {"fp32": 4.0, "bf16": 2.0, "fp16": 2.0, "fp64": 8.0, "nvfp4": 0.5}


def device_seconds(log: KernelLog, gpu: Gpu, rates: Rates) -> Seconds:
    """Seconds of each operation on the device, without the gap before it; 0 for collectives."""
    seconds = np.zeros(len(log))
    bandwidth = gpu.memory_bandwidth_bytes_per_s
    for kind, share in (
        ("memory", rates.memory),
        ("optimizer", rates.memory),
        ("quantize", rates.quantize),
        ("permute", rates.permute),
    ):
        mine = log.kind == KIND[kind]
        seconds[mine] = log.bytes[mine] / (bandwidth * share)
    for kind in ("gemm", "grouped_gemm"):
        mine = np.flatnonzero(log.kind == KIND[kind])
        if len(mine):
            seconds[mine] = _products(log.select(mine), gpu, rates, kind == "grouped_gemm")
    for kind, share in (
        ("attention_forward", rates.attention_forward),
        ("attention_backward", rates.attention_backward),
    ):
        mine = np.flatnonzero(log.kind == KIND[kind])
        if len(mine):
            peak = gpu.peak_flops["bf16"] * share
            seconds[mine] = _attention(log.select(mine), peak, kind == "attention_forward")
    return seconds


def is_quantised(log: KernelLog) -> NDArray[np.bool_]:
    """Which operations compute in 8 or 4 bits."""
    return (log.dtype >= FORMAT["fp8_delayed"]) & (log.dtype <= FORMAT["nvfp4"])


def _products(log: KernelLog, gpu: Gpu, rates: Rates, grouped: bool) -> Seconds:
    share = np.where(is_quantised(log), rates.gemm, rates.half_gemm)
    if grouped:
        share = share * rates.grouped_gemm
    peak = np.array([_peak(gpu, ARITHMETIC[code]) for code in log.dtype])
    depth = np.array([_OPERAND_BYTES.get(ARITHMETIC[code], 1.0) for code in log.dtype])
    arithmetic = _tiled(log, gpu.multiprocessors, peak * share, _PIPELINE_DEPTH_BYTES / depth)
    moved = log.bytes / (gpu.memory_bandwidth_bytes_per_s * rates.memory)
    seconds: Seconds = np.maximum(arithmetic, moved)
    return seconds


def _tiled(log: KernelLog, processors: int, rate: Seconds, depth: Seconds) -> Seconds:
    """Seconds at `rate` operations a second when all multiprocessors are busy, by the best tile."""
    best = np.full(len(log), np.inf)
    for rows, columns, speed in _TILES:
        tiles = np.ceil(log.m / rows) * np.ceil(log.n / columns) * log.batch
        # Work of a part of a wave can be split along k over idle multiprocessors, at a cost.
        waves = np.maximum(tiles / processors, 1.0)
        waves = 0.5 * (waves + np.ceil(tiles / processors))
        tile = 2.0 * rows * columns * (log.k + depth)
        best = np.minimum(best, waves * tile * processors / (rate * speed))
    return best


def _peak(gpu: Gpu, arithmetic: str) -> float:
    name = _PEAK_NAMES.get(arithmetic, "bf16")
    for known in (name, "fp8", "bf16", "fp32"):
        if known in gpu.peak_flops:
            return gpu.peak_flops[known]
    raise KeyError(f"{gpu.name} has no peak rate of {name}")


def _attention(log: KernelLog, rate: float, forward: bool) -> Seconds:
    pairs = log.flops / (log.batch * log.k * (4.0 if forward else 10.0))
    edge = 1.0 + _ATTENTION_BLOCK * log.m / 2 / np.maximum(pairs, 1.0)
    width = np.minimum(1.0, (log.k / _NARROW_HEAD) ** 0.5)
    seconds: Seconds = log.flops * edge / (rate * width)
    return seconds
