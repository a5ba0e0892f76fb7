"""Device seconds of kernels: products by shape, attention by pairs, everything else by bytes.

A product is cut into output tiles that the multiprocessors work on in waves; the last wave runs
partly empty, and every tile fills and drains its pipeline once. Small tiles fill waves better and
run slower. The library picks the tile; so does the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

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


@dataclass(frozen=True, slots=True)
class Work:
    """Operations of a log on one GPU, at full rates: what does not depend on what is sustained.

    `arithmetic_s` are seconds of products and attention at peak, `moved_s` those of the bytes at
    the full memory bandwidth; 0 where an operation has none. `arithmetic` and `moved` index
    `SUSTAINED`: the share that divides each.
    """

    arithmetic_s: Seconds
    moved_s: Seconds
    arithmetic: NDArray[np.int64]
    moved: NDArray[np.int64]


SUSTAINED = (
    "gemm",
    "half_gemm",
    "grouped",
    "half_grouped",
    "batched_gemm",
    "attention_forward",
    "attention_backward",
    "memory",
    "quantize",
    "permute",
)


def device_seconds(log: KernelLog, gpu: Gpu, rates: Rates) -> Seconds:
    """Seconds of each operation on the device, without the gap before it.

    Collectives and transfers to the host take none here.
    """
    work = _work(Same(log), Same(gpu))
    shares = np.array(
        [
            rates.gemm,
            rates.half_gemm,
            rates.gemm * rates.grouped_gemm,
            rates.half_gemm * rates.grouped_gemm,
            rates.batched_gemm,
            rates.attention_forward,
            rates.attention_backward,
            rates.memory,
            rates.quantize,
            rates.permute,
        ]
    )
    seconds: Seconds = np.maximum(
        work.arithmetic_s / shares[work.arithmetic], work.moved_s / shares[work.moved]
    )
    return seconds


class Same:
    """Something that does not change as a dictionary key: by identity."""

    __slots__ = ("item",)

    def __init__(self, item: Any) -> None:
        self.item = item

    def __hash__(self) -> int:
        return id(self.item)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.item is other.item


@lru_cache(maxsize=16384)
def _work(key: Same, device: Same) -> Work:
    log, gpu = key.item, device.item
    count = len(log)
    arithmetic_s, moved_s = np.zeros(count), np.zeros(count)
    arithmetic = np.zeros(count, dtype=np.int64)
    moved = np.full(count, SUSTAINED.index("memory"))
    for kind, share in _MOVING.items():
        mine = log.kind == KIND[kind]
        moved_s[mine] = log.bytes[mine] / gpu.memory_bandwidth_bytes_per_s
        moved[mine] = SUSTAINED.index(share)
    low = is_quantised(log)
    for kind, shares in (("gemm", (1, 0)), ("grouped_gemm", (3, 2))):
        mine = np.flatnonzero(log.kind == KIND[kind])
        if len(mine):
            arithmetic_s[mine] = _products(log.select(mine), gpu)
            arithmetic[mine] = np.where(low[mine], shares[1], shares[0])
    arithmetic[(log.kind == KIND["gemm"]) & (log.batch > 1)] = SUSTAINED.index("batched_gemm")
    for kind in ("attention_forward", "attention_backward"):
        mine = np.flatnonzero(log.kind == KIND[kind])
        if len(mine):
            forward = kind == "attention_forward"
            arithmetic_s[mine] = _attention(log.select(mine), gpu.peak_flops["bf16"], forward)
            arithmetic[mine] = SUSTAINED.index(kind)
    return Work(arithmetic_s, moved_s, arithmetic, moved)


_MOVING = {
    # kinds whose bytes take time, and the share of the bandwidth they reach
    "memory": "memory",
    "optimizer": "memory",
    "quantize": "quantize",
    "permute": "permute",
    "gemm": "memory",
    "grouped_gemm": "memory",
}


def is_quantised(log: KernelLog) -> NDArray[np.bool_]:
    """Which operations compute in 8 or 4 bits."""
    return (log.dtype >= FORMAT["fp8_delayed"]) & (log.dtype <= FORMAT["nvfp4"])


def _products(log: KernelLog, gpu: Gpu) -> Seconds:
    peak = np.array([_peak(gpu, ARITHMETIC[code]) for code in log.dtype])
    depth = np.array([_OPERAND_BYTES.get(ARITHMETIC[code], 1.0) for code in log.dtype])
    return _tiled(log, gpu.multiprocessors, peak, _PIPELINE_DEPTH_BYTES / depth)


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
