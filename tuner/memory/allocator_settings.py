"""Settings of PyTorch's CUDA caching allocator, read from `PYTORCH_ALLOC_CONF`.

Names, defaults and limits are those of `AcceleratorAllocatorConfig` (c10/core/AllocatorConfig.h
and .cpp) and `CUDAAllocatorConfig` (c10/cuda/CUDAAllocatorConfig.h and .cpp) of PyTorch.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from tuner.errors import InputError, nearest_name

MIB = 1 << 20
MIN_BLOCK_BYTES = 512
"""Sizes are rounded up to this (`kMinBlockSize`)."""
SMALL_BYTES = 1 * MIB
"""The largest request served from the small pool (`kSmallSize`)."""
SMALL_SEGMENT_BYTES = 2 * MIB
"""Segments of the small pool (`kSmallBuffer`)."""
LARGE_SEGMENT_BYTES = 20 * MIB
"""Segments shared by requests between 1 and 10 MiB (`kLargeBuffer`, `large_segment_size`)."""
MIN_LARGE_BYTES = 10 * MIB
"""Requests from here on get a segment of their own (`kMinLargeAlloc`)."""
LARGE_ROUNDING_BYTES = 2 * MIB
"""... rounded up to this (`kRoundLarge`)."""

_POWER2_INTERVALS = 16  # 1 MiB to 64 GiB, `kRoundUpPowerOfTwoIntervals`
_ENVIRONMENT_NAMES = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")
_WITHOUT_EFFECT_ON_BYTES = (
    "release_lock_on_cudamalloc",
    "release_lock_on_hipmalloc",
    "graph_capture_record_stream_reuse",
    "throw_on_cudamalloc_oom",
)


@dataclass(frozen=True, slots=True)
class AllocatorSettings:
    """What decides where the allocator puts a block. Defaults are PyTorch's."""

    expandable_segments: bool = False
    max_split_size_bytes: int | None = None
    max_non_split_rounding_bytes: int = LARGE_SEGMENT_BYTES
    large_segment_bytes: int = LARGE_SEGMENT_BYTES
    garbage_collection_threshold: float = 0.0
    per_process_memory_fraction: float | None = None
    roundup_power2_divisions: tuple[int, ...] = (0,) * _POWER2_INTERVALS

    @classmethod
    def from_text(cls, text: str) -> AllocatorSettings:
        """The settings of an allocator configuration, e.g. "expandable_segments:True".

        Raises InputError for what PyTorch refuses, and for `backend:cudaMallocAsync`, whose
        allocator belongs to the CUDA driver and is not modelled.
        """
        values: dict[str, Any] = {}
        for key, value in _pairs(text):
            if key in _READERS:
                field, read = _READERS[key]
                values[field] = read(key, value)
            elif key == "backend":
                _check_backend(value)
            elif key not in _WITHOUT_EFFECT_ON_BYTES and not key.startswith("pinned_"):
                known = (*_READERS, "backend", *_WITHOUT_EFFECT_ON_BYTES)
                raise InputError(
                    "is not an option of PyTorch's allocator",
                    field=key,
                    fix=nearest_name(key, known) or "see PYTORCH_ALLOC_CONF",
                )
        return cls(**values)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> AllocatorSettings:
        """The settings of a process with this environment; the newest variable name wins."""
        for name in _ENVIRONMENT_NAMES:
            if environment.get(name):
                return cls.from_text(environment[name])
        return cls()

    def round_size(self, requested: int) -> int:
        """Bytes of the block that serves a request (`DeviceCachingAllocator::round_size`)."""
        if requested < MIN_BLOCK_BYTES:
            return MIN_BLOCK_BYTES
        interval = min(max(requested.bit_length() - MIB.bit_length(), 0), _POWER2_INTERVALS - 1)
        divisions = self.roundup_power2_divisions[interval]
        if divisions > 0 and requested > MIN_BLOCK_BYTES * divisions:
            return _round_up_power2(requested, divisions)
        return -(-requested // MIN_BLOCK_BYTES) * MIN_BLOCK_BYTES

    def segment_size(self, size: int) -> int:
        """Bytes asked of the driver for a block of `size` (`get_allocation_size`)."""
        if size <= SMALL_BYTES:
            return SMALL_SEGMENT_BYTES
        if size < MIN_LARGE_BYTES:
            return self.large_segment_bytes
        return -(-size // LARGE_ROUNDING_BYTES) * LARGE_ROUNDING_BYTES


def _round_up_power2(size: int, divisions: int) -> int:
    """`roundup_power2_next_division`: up to the next of `divisions` steps between powers of two."""
    if divisions <= 1 or size & (size - 1) == 0:
        return size
    floor = 1 << (size.bit_length() - 1)
    step = floor >> (divisions.bit_length() - 1)
    return 2 * floor if step == 0 else -(-size // step) * step


def _pairs(text: str) -> Iterator[tuple[str, str]]:
    """The `key:value` pairs of a configuration; a value may be a bracketed list."""
    compact = re.sub(r"\s", "", text)
    position = 0
    while position < len(compact):
        match = _PAIR.match(compact, position)
        if match is None:
            raise InputError(
                f"cannot read {compact[position:]!r}",
                field="PYTORCH_ALLOC_CONF",
                fix="write key:value,key:value",
            )
        yield match["key"], match["value"]
        position = match.end()


_PAIR = re.compile(r"(?P<key>[^,:\[\]]+):(?P<value>\[[^\[\]]*\]|[^,:\[\]]+)(?:,|$)")


def _check_backend(value: str) -> None:
    if value != "native":
        raise InputError(
            f"the allocator {value!r} is not modelled",
            field="backend",
            fix="use backend:native, PyTorch's own caching allocator",
        )


def _read_flag(key: str, value: str) -> bool:
    if value not in ("True", "False"):
        raise InputError(f"{value!r} must be True or False", field=key)
    return value == "True"


def _read_integer(key: str, value: str) -> int:
    if not value.isdigit():
        raise InputError(f"{value!r} must be a whole number", field=key)
    return int(value)


def _read_mebibytes(key: str, value: str) -> int:
    """PyTorch refuses limits below its shared large segment."""
    size = _read_integer(key, value) * MIB
    if size < LARGE_SEGMENT_BYTES:
        raise InputError(f"{value} is below {LARGE_SEGMENT_BYTES // MIB}", field=key)
    return size


def _read_fraction(key: str, value: str) -> float:
    try:
        fraction = float(value)
    except ValueError:
        fraction = -1.0
    inside = 0.0 < fraction < 1.0 or (fraction == 1.0 and key == "per_process_memory_fraction")
    if not inside:
        raise InputError(f"{value!r} must be above 0 and below 1", field=key)
    return fraction


def _read_divisions(key: str, value: str) -> tuple[int, ...]:
    """One number for all sizes, or a list `[256:1,512:2,>:4]` of first sizes in MiB."""
    if not value.startswith("["):
        return (_power2(key, value),) * _POWER2_INTERVALS
    divisions = [0] * _POWER2_INTERVALS
    last = 0
    for position, pair in enumerate(value.strip("[]").split(",")):
        size, _, count = pair.partition(":")
        chosen = _power2(key, count) if count != "0" else 0
        if size == ">":
            divisions[last:] = [chosen] * (_POWER2_INTERVALS - last)
            continue
        last = min(_power2(key, size).bit_length() - 1, _POWER2_INTERVALS - 1)
        if position == 0:
            divisions[:last] = [chosen] * last
        divisions[last] = chosen
    return tuple(divisions)


def _power2(key: str, value: str) -> int:
    number = _read_integer(key, value)
    if number < 1 or number & (number - 1):
        raise InputError(f"{value} must be a power of two", field=key)
    return number


_READERS = {
    "expandable_segments": ("expandable_segments", _read_flag),
    "max_split_size_mb": ("max_split_size_bytes", _read_mebibytes),
    "max_non_split_rounding_mb": ("max_non_split_rounding_bytes", _read_mebibytes),
    "large_segment_size_mb": ("large_segment_bytes", _read_mebibytes),
    "garbage_collection_threshold": ("garbage_collection_threshold", _read_fraction),
    "per_process_memory_fraction": ("per_process_memory_fraction", _read_fraction),
    "roundup_power2_divisions": ("roundup_power2_divisions", _read_divisions),
}
