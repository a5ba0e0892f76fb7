"""What PyTorch's allocator makes of a rank's allocations: reserved bytes, and out-of-memory why.

`replay` runs a trace through the allocator model; `explain_fit` answers whether the trace fits a
device and, where it does not, whether capacity or fragmentation is the cause.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from tuner.memory.allocator import Block, CachingAllocator, OutOfDeviceMemoryError
from tuner.memory.allocator_settings import AllocatorSettings
from tuner.memory.trace import EMPTY_CACHE

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from tuner.memory.trace import Trace


@dataclass(frozen=True, slots=True)
class OutOfMemory:
    """The request that could not be served, and what the allocator held at that moment."""

    event: int
    requested_bytes: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True, slots=True)
class AllocatorReplay:
    """The allocator over one trace.

    `allocated_bytes` and `reserved_bytes` (int64) hold one value per event, as
    `torch.cuda.memory_allocated()` and `memory_reserved()` would read after it; after an
    out-of-memory there are no further values. `retries` counts the times everything cached was
    given back because the driver refused, which stalls the device.
    """

    settings: AllocatorSettings
    capacity_bytes: int | None
    allocated_bytes: NDArray[np.int64]
    reserved_bytes: NDArray[np.int64]
    peak_allocated_bytes: int
    peak_reserved_bytes: int
    driver_allocations: int
    retries: int
    out_of_memory: OutOfMemory | None

    @property
    def fragmentation(self) -> float:
        """Share of the reserved peak that no live block ever filled at once, 0 to 1."""
        if self.peak_reserved_bytes == 0:
            return 0.0
        return 1.0 - self.peak_allocated_bytes / self.peak_reserved_bytes


def replay(
    trace: Trace,
    settings: AllocatorSettings | None = None,
    *,
    capacity_bytes: int | None = None,
) -> AllocatorReplay:
    """Run every event of `trace` through the allocator, or up to its first out-of-memory.

    `capacity_bytes` is the device memory that the allocator may reserve; None is unlimited.
    Blocks of private pools are served by those, and markers that empty the cache do so.
    """
    import numpy as np

    allocator = CachingAllocator(settings, capacity_bytes=capacity_bytes)
    malloc, free = allocator.malloc, allocator.free
    live: dict[int, Block] = {}
    allocated: list[int] = []
    reserved: list[int] = []
    failure = None
    empties = {event for event, name in trace.markers if name == EMPTY_CACHE}
    pools = [0] * len(trace) if trace.pool is None else trace.pool.tolist()
    for number, size, pool in zip(trace.block.tolist(), trace.bytes.tolist(), pools, strict=True):
        if len(allocated) in empties:
            allocator.release_cached()
        if size > 0:
            try:
                live[number] = malloc(size, private_pool=pool or None)
            except OutOfDeviceMemoryError:
                failure = OutOfMemory(
                    len(allocated), size, allocator.allocated_bytes, allocator.reserved_bytes
                )
                break
        elif size < 0:
            free(live.pop(number))
        allocated.append(allocator.allocated_bytes)
        reserved.append(allocator.reserved_bytes)
    return AllocatorReplay(
        settings=allocator.settings,
        capacity_bytes=capacity_bytes,
        allocated_bytes=np.array(allocated, dtype=np.int64),
        reserved_bytes=np.array(reserved, dtype=np.int64),
        peak_allocated_bytes=allocator.peak_allocated_bytes,
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        driver_allocations=allocator.driver_allocations,
        retries=allocator.retries,
        out_of_memory=failure,
    )


@dataclass(frozen=True, slots=True)
class Fit:
    """Whether a rank's allocations fit, with its settings and with expandable segments.

    `cause` is None where they fit as configured, "fragmentation" where they would fit with
    expandable segments, and "capacity" where no placement would help.
    """

    capacity_bytes: int
    as_configured: AllocatorReplay
    with_expandable_segments: AllocatorReplay

    @property
    def fits(self) -> bool:
        return self.as_configured.out_of_memory is None

    @property
    def fits_with_expandable_segments(self) -> bool:
        return self.with_expandable_segments.out_of_memory is None

    @property
    def cause(self) -> str | None:
        if self.fits:
            return None
        return "fragmentation" if self.fits_with_expandable_segments else "capacity"

    def to_json(self) -> dict[str, Any]:
        """The answer as plain values; bytes throughout."""
        run = self.as_configured
        failure = run.out_of_memory
        return {
            "fits": self.fits,
            "fits_with_expandable_segments": self.fits_with_expandable_segments,
            "cause": self.cause,
            "capacity_bytes": self.capacity_bytes,
            "retries": run.retries,
            "out_of_memory": None
            if failure is None
            else {
                "event": failure.event,
                "requested_bytes": failure.requested_bytes,
                "allocated_bytes": failure.allocated_bytes,
                "reserved_bytes": failure.reserved_bytes,
            },
        }


def explain_fit(
    trace: Trace, *, capacity_bytes: int, settings: AllocatorSettings | None = None
) -> Fit:
    """Replay `trace` under `capacity_bytes` with the given settings and with expandable ones."""
    settings = settings or AllocatorSettings()
    configured = replay(trace, settings, capacity_bytes=capacity_bytes)
    if settings.expandable_segments:
        return Fit(capacity_bytes, configured, configured)
    expandable = replace(settings, expandable_segments=True, max_split_size_bytes=None)
    return Fit(capacity_bytes, configured, replay(trace, expandable, capacity_bytes=capacity_bytes))
