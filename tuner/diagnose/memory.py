"""Out-of-memory messages of PyTorch's CUDA allocator: their numbers and what they mean.

The texts are those of `c10/cuda/CUDACachingAllocator.cpp`, in the wordings of PyTorch 1.x to 2.x.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_UNITS = {"bytes": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_UNITS |= {"kb": 2**10, "mb": 2**20, "gb": 2**30}
_SIZE = r"(\d{1,15}(?:\.\d+)?)\s*(bytes|[KMGT]i?B|B)"
OUT_OF_MEMORY = re.compile(
    r"(?:CUDA|HIP) out of memory\.? ?\(?Tried to allocate"
    r"|OutOfMemoryError: (?:CUDA|HIP) out of memory"
)
_PATTERNS = {
    "requested": re.compile(rf"Tried to allocate {_SIZE}"),
    "capacity": re.compile(rf"(?:has a total capac?i?ty of {_SIZE}|{_SIZE} total capac?i?ty)"),
    "free": re.compile(rf"(?:of which {_SIZE} is free|{_SIZE} free)"),
    "allocated": re.compile(rf"(?:{_SIZE} is allocated by PyTorch|{_SIZE} already allocated)"),
    "in_pools": re.compile(rf"with {_SIZE} allocated in private pools"),
    "unallocated": re.compile(rf"{_SIZE} is reserved by PyTorch but unallocated"),
    "reserved": re.compile(rf"{_SIZE} (?:reserved in total by PyTorch|cached)"),
    "this_process": re.compile(rf"this process has {_SIZE} memory in use"),
    "limit": re.compile(rf"{_SIZE} allowed"),
}
_OTHER_PROCESS = re.compile(rf"Process \d+ has {_SIZE} memory in use")
_GPU = re.compile(r"GPU (\d{1,9})")

_FRAGMENTED_SHARE = 0.04
"""Share of the device that unused reserved memory must reach to be worth an allocator setting."""
_POOL_SHARE = 0.2
_OTHERS_SHARE = 0.15


@dataclass(frozen=True, slots=True)
class MemoryNumbers:
    """What one message says, in bytes; None where it does not say it."""

    requested_bytes: int | None = None
    capacity_bytes: int | None = None
    free_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_unallocated_bytes: int | None = None
    graph_pools_bytes: int | None = None
    process_bytes: int | None = None
    other_processes_bytes: int | None = None
    gpu: int | None = None

    def to_json(self) -> dict[str, int]:
        """Only what the message says."""
        found = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return {name: value for name, value in found.items() if value is not None}


def read_numbers(message: str) -> MemoryNumbers:
    """The numbers of an out-of-memory message, in any of its wordings."""
    sizes = {name: _size(pattern.search(message)) for name, pattern in _PATTERNS.items()}
    unallocated = sizes["unallocated"]
    if unallocated is None and None not in (sizes["reserved"], sizes["allocated"]):
        unallocated = max(0, (sizes["reserved"] or 0) - (sizes["allocated"] or 0))
    process, others = _processes(message, sizes["this_process"])
    gpu = _GPU.search(message)
    return MemoryNumbers(
        requested_bytes=sizes["requested"],
        capacity_bytes=sizes["capacity"],
        free_bytes=sizes["free"],
        allocated_bytes=sizes["allocated"],
        reserved_unallocated_bytes=unallocated,
        graph_pools_bytes=sizes["in_pools"],
        process_bytes=process,
        other_processes_bytes=others,
        gpu=int(gpu[1]) if gpu else None,
    )


def _size(match: re.Match[str] | None) -> int | None:
    if match is None:
        return None
    groups = [group for group in match.groups() if group is not None]
    return int(float(groups[0]) * _UNITS[groups[1].lower()])


def _processes(message: str, this: int | None) -> tuple[int | None, int | None]:
    """Bytes of this process and of the others.

    Inside a container the driver does not know which process is ours, and the message lists it
    like any other: with a single process listed, that is ours.
    """
    listed = [_size(match) or 0 for match in _OTHER_PROCESS.finditer(message)]
    if this is not None:
        return this, sum(listed) or None
    if len(listed) == 1:
        return listed[0], None
    return (max(listed), sum(listed) - max(listed)) if listed else (None, None)


def kind_of(numbers: MemoryNumbers, *, expandable: bool) -> tuple[str, float, str]:
    """Cause, confidence and reason of a message; `expandable`: segments were expandable."""
    capacity = numbers.capacity_bytes or 0
    unused = numbers.reserved_unallocated_bytes or 0
    if capacity and (numbers.other_processes_bytes or 0) > _OTHERS_SHARE * capacity:
        return "oom_other_process", 0.9, "other processes hold a large part of the device"
    if capacity and (numbers.graph_pools_bytes or 0) > _POOL_SHARE * capacity:
        return "oom_graph_pools", 0.85, "CUDA graphs hold a large part in private pools"
    enough = unused >= (numbers.requested_bytes or 0) and unused > _FRAGMENTED_SHARE * capacity
    if capacity and enough and not expandable:
        return "oom_fragmentation", 0.9, "more reserved memory lies unused than was asked for"
    if expandable:
        return "oom_capacity", 0.9, "segments were expandable already: the memory is really used"
    return "oom_capacity", 0.85, "nearly all reserved memory is in use"
