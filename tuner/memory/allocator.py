"""PyTorch's CUDA caching allocator, without a GPU.

`CachingAllocator` takes the same decisions as `DeviceCachingAllocator` (PyTorch,
c10/cuda/CUDACachingAllocator.cpp): which free block serves a request, when it is split, which
neighbours merge, when the driver is asked for a segment, what is given back when the driver
refuses. It keeps addresses and sizes only, so that it answers what `torch.cuda.memory_stats()`
would: allocated bytes, reserved bytes, retries and out-of-memory.

Left out, because they move no byte of the runs modelled here: events of other streams
(`record_stream`), snapshots, and sharing between processes. Addresses of new segments ascend; the
driver promises no order, and equal sizes are the only place where it shows.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Hashable

from tuner.memory.allocator_settings import (
    MIN_BLOCK_BYTES,
    SMALL_BYTES,
    SMALL_SEGMENT_BYTES,
    AllocatorSettings,
)

_ADDRESS_SPACE_BYTES = 1 << 40  # virtual room of an expandable segment without a known capacity
_SEGMENT_GAP_BYTES = 1 << 21  # segments never touch, as separate driver allocations do not


class OutOfDeviceMemoryError(Exception):
    """No block could be had for a request, after everything cached was given back."""

    def __init__(self, requested_bytes: int) -> None:
        self.requested_bytes = requested_bytes
        super().__init__(f"out of device memory for a request of {requested_bytes} bytes")


class Block:
    """A range of a segment: in use, cached, or (expandable segments) without memory behind it."""

    __slots__ = (
        "address",
        "allocated",
        "base",
        "born",
        "expandable",
        "mapped",
        "next",
        "pool",
        "prev",
        "size",
    )

    def __init__(self, pool: _Pool, address: int, size: int, base: int, *, expandable: bool):
        self.pool, self.address, self.size = pool, address, size
        self.base = base  # address of the segment, from which pages are counted
        self.expandable = expandable
        self.prev: Block | None = None
        self.next: Block | None = None
        self.allocated = False
        self.mapped = True
        self.born = 0  # searches of the pool when it was cached, for garbage collection

    def is_split(self) -> bool:
        return self.prev is not None or self.next is not None


class _Pool:
    """Free blocks of one size class, of one CUDA stream, of the default or a private pool."""

    __slots__ = ("free", "page_bytes", "private", "searches", "small", "unmapped")

    def __init__(self, *, small: bool, page_bytes: int, private: bool) -> None:
        self.small, self.page_bytes, self.private = small, page_bytes, private
        self.free: list[tuple[int, int, Block]] = []  # by (size, address)
        self.unmapped: list[tuple[int, Block]] = []  # by address
        self.searches = 0

    def insert(self, block: Block) -> None:
        block.born = self.searches
        insort(self.free, (block.size, block.address, block))

    def remove(self, block: Block) -> None:
        del self.free[bisect_left(self.free, (block.size, block.address))]

    def insert_unmapped(self, block: Block) -> None:
        insort(self.unmapped, (block.address, block))

    def remove_unmapped(self, block: Block) -> None:
        del self.unmapped[bisect_left(self.unmapped, (block.address,))]


class CachingAllocator:
    """The allocator of one device in one process.

    `capacity_bytes` is what the driver can hand out to it: device memory less what the CUDA
    context and other libraries hold; None never refuses. Counters are those of
    `torch.cuda.memory_stats()`: `allocated_bytes` counts whole blocks, so a block that was not
    worth splitting counts more than was asked for.
    """

    def __init__(
        self,
        settings: AllocatorSettings | None = None,
        *,
        capacity_bytes: int | None = None,
    ) -> None:
        self.settings = settings or AllocatorSettings()
        self.capacity_bytes = capacity_bytes
        fraction = self.settings.per_process_memory_fraction
        self.allowed_bytes = (
            None if capacity_bytes is None or fraction is None else int(fraction * capacity_bytes)
        )
        self._limit = float("inf") if capacity_bytes is None else capacity_bytes
        self._collects_garbage = (
            self.allowed_bytes is not None and self.settings.garbage_collection_threshold > 0.0
        )
        self._max_split: float = self.settings.max_split_size_bytes or float("inf")
        self._expandable = self.settings.expandable_segments
        self._pools: dict[tuple[Hashable, int, bool], _Pool] = {}
        self._next_address = _SEGMENT_GAP_BYTES
        self.allocated_bytes = self.peak_allocated_bytes = 0
        self.reserved_bytes = self.peak_reserved_bytes = 0
        self.driver_allocations = self.driver_frees = self.retries = 0

    def malloc(self, requested: int, *, stream: int = 0, private_pool: Hashable = None) -> Block:
        """A block of at least `requested` bytes (above 0).

        `private_pool` names the memory pool of a CUDA graph under capture: only that pool serves
        it, and nothing cached is given back while it runs. Raises OutOfDeviceMemoryError.
        """
        size = self.settings.round_size(requested)
        small = size <= SMALL_BYTES
        pool = self._pools.get((private_pool, stream, small)) or self._new_pool(
            private_pool, stream, small
        )
        block = self._find_free(pool, size) or self._new_block(pool, size)
        remaining = block.size - size
        if remaining and self._is_worth_splitting(pool, size, remaining):
            block = self._split(block, size)
        block.allocated = True
        self.allocated_bytes += block.size
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        return block

    def free(self, block: Block) -> None:
        """Give a block back to its pool, joined with free neighbours."""
        block.allocated = False
        self.allocated_bytes -= block.size
        self._merge(block, block.prev)
        self._merge(block, block.next)
        block.pool.insert(block)

    def release_cached(self) -> None:
        """Give every unused segment, and unused pages of expandable ones, back to the driver."""
        for pool in list(self._pools.values()):
            if not pool.private:
                self._release_pool(pool)

    def _new_pool(self, private_pool: Hashable, stream: int, small: bool) -> _Pool:
        page = SMALL_SEGMENT_BYTES if small else self.settings.large_segment_bytes
        pool = _Pool(small=small, page_bytes=page, private=private_pool is not None)
        self._pools[(private_pool, stream, small)] = pool
        return pool

    def _find_free(self, pool: _Pool, size: int) -> Block | None:
        """`get_free_block`: the smallest cached block that may serve `size`, lowest address."""
        if self._collects_garbage:
            pool.searches += 1
        free = pool.free
        index = bisect_left(free, (size,))
        if index == len(free):
            return None
        block = free[index][2]
        if block.expandable:
            # A block that can grow counts with the room behind it.
            while index + 1 < len(free) and _growable(free[index + 1][2]) < _growable(block):
                index += 1
                block = free[index][2]
        if block.size >= self._max_split and size < self._max_split:
            return None
        if (
            size >= self._max_split
            and block.size >= size + self.settings.max_non_split_rounding_bytes
        ):
            return None
        del free[index]
        return block

    def _is_worth_splitting(self, pool: _Pool, size: int, remaining: int) -> bool:
        """`should_split`."""
        if pool.small or self._expandable:
            return remaining >= MIN_BLOCK_BYTES
        return size < self._max_split and remaining > SMALL_BYTES

    def _split(self, block: Block, size: int) -> Block:
        """The first `size` bytes of `block`; the rest goes back to the pool."""
        first = Block(block.pool, block.address, size, block.base, expandable=block.expandable)
        first.prev, first.next = block.prev, block
        if block.prev is not None:
            block.prev.next = first
        block.prev = first
        block.address += size
        block.size -= size
        block.pool.insert(block)
        return first

    def _merge(self, block: Block, other: Block | None) -> None:
        """`try_merge_blocks`: let `block` take over a free neighbour."""
        if other is None or other.allocated or other.mapped != block.mapped:
            return
        if other.mapped:
            other.pool.remove(other)
        else:
            other.pool.remove_unmapped(other)
        if block.prev is other:
            block.address, block.prev = other.address, other.prev
            if other.prev is not None:
                other.prev.next = block
        else:
            block.next = other.next
            if other.next is not None:
                other.next.prev = block
        block.size += other.size

    def _new_block(self, pool: _Pool, size: int) -> Block:
        """`malloc` from the point where no cached block serves: collect, ask, give back, ask."""
        if self._collects_garbage:
            self._collect_garbage()
        block = self._ask_driver(pool, size)
        if block is None and self._release_oversize(pool, size):
            block = self._ask_driver(pool, size)
        if block is None and not pool.private:
            self.release_cached()
            self.retries += 1
            block = self._ask_driver(pool, size)
        if block is None:
            raise OutOfDeviceMemoryError(size)
        return block

    def _ask_driver(self, pool: _Pool, size: int) -> Block | None:
        """`alloc_block`: a block from new device memory, or None where it is refused."""
        segment = self.settings.segment_size(size)
        if self.allowed_bytes is not None and self.reserved_bytes + segment > self.allowed_bytes:
            return None
        if self._expandable:
            return self._expand(pool, size)
        if self.reserved_bytes + segment > self._limit:
            return None
        self._reserve(segment)
        return self._new_segment(pool, segment)

    def _new_segment(self, pool: _Pool, size: int) -> Block:
        address = self._next_address
        self._next_address += size + _SEGMENT_GAP_BYTES
        return Block(pool, address, size, address, expandable=self._expandable)

    def _reserve(self, size: int) -> None:
        self.driver_allocations += 1
        self.reserved_bytes += size
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes

    def _expand(self, pool: _Pool, size: int) -> Block | None:
        """`try_allocate_expandable_block`: map pages until a free block of `size` exists."""
        block = self._expandable_candidate(pool, size)
        if not block.mapped and not self._map(block, min(block.size, size)):
            return None
        while block.size < size:
            room = block.next
            assert room is not None  # _expandable_candidate saw to it
            if not self._map(room, min(size - block.size, room.size)):
                return None
            block = room
        pool.remove(block)
        return block

    def _expandable_candidate(self, pool: _Pool, size: int) -> Block:
        """`find_expandable_block`: the lowest address with room for `size`, mapped or not."""
        for _, block in pool.unmapped:
            first = block.prev if block.prev is not None and not block.prev.allocated else block
            room, at = 0, first
            while at is not None and not at.allocated and room < size:
                room += at.size
                at = at.next  # type: ignore[assignment]
            if room >= size:
                return first
        device = _ADDRESS_SPACE_BYTES if self.capacity_bytes is None else self.capacity_bytes
        pages = -(-(device + device // 8) // pool.page_bytes)
        block = self._new_segment(pool, max(pages * pool.page_bytes, size + pool.page_bytes))
        block.mapped = False
        pool.insert_unmapped(block)
        return block

    def _map(self, block: Block, size: int) -> bool:
        """`map_block`: back the first `size` bytes with pages and join them to free neighbours."""
        page = block.pool.page_bytes
        mapped = -(-size // page) * page
        if self.reserved_bytes + mapped > self._limit:
            return False
        pool = block.pool
        pool.remove_unmapped(block)
        block.mapped = True
        if mapped < block.size:
            rest = Block(
                pool, block.address + mapped, block.size - mapped, block.base, expandable=True
            )
            rest.mapped = False
            rest.prev, rest.next = block, block.next
            if block.next is not None:
                block.next.prev = rest
            block.next = rest
            pool.insert_unmapped(rest)
            block.size = mapped
        self._merge(block, block.prev)
        self._merge(block, block.next)
        pool.insert(block)
        self._reserve(mapped)
        return True

    def _release_oversize(self, pool: _Pool, size: int) -> bool:
        """`release_available_cached_blocks`: give back only as many unsplittable blocks as help."""
        if self.settings.max_split_size_bytes is None:
            return False
        wanted = max(size, self.settings.max_split_size_bytes)
        index = bisect_left(pool.free, (wanted,))
        if index < len(pool.free):
            self._release(pool.free[index][2])
            return True
        released = 0
        while pool.free and released < wanted and pool.free[-1][0] >= self._max_split:
            released += pool.free[-1][0]
            self._release(pool.free[-1][2])
        return released >= wanted

    def _release(self, block: Block) -> None:
        """`release_block`: a whole segment back to the driver."""
        block.pool.remove(block)
        self.reserved_bytes -= block.size
        self.driver_frees += 1

    def _release_pool(self, pool: _Pool) -> None:
        for _, _, block in list(pool.free):
            if block.expandable:
                self._unmap(block)
            elif not block.is_split():
                self._release(block)

    def _unmap(self, block: Block) -> None:
        """`unmap_block`: give back the whole pages inside a free block."""
        pool, page = block.pool, block.pool.page_bytes
        start = block.base + -(-(block.address - block.base) // page) * page
        end = block.base + (block.address + block.size - block.base) // page * page
        if start >= end:
            return
        pool.remove(block)
        if start > block.address:
            self._cut_off(block, block.address, start - block.address, before=True)
        if block.address + block.size > end:
            self._cut_off(block, end, block.address + block.size - end, before=False)
        block.mapped = False
        self._merge(block, block.prev)
        self._merge(block, block.next)
        pool.insert_unmapped(block)
        self.reserved_bytes -= end - start
        self.driver_frees += 1
        if not block.is_split():
            pool.remove_unmapped(block)  # `release_expandable_segment`

    def _cut_off(self, block: Block, address: int, size: int, *, before: bool) -> None:
        """Keep an end of `block` as a free block of its own."""
        part = Block(block.pool, address, size, block.base, expandable=True)
        if before:
            part.prev, part.next = block.prev, block
            if block.prev is not None:
                block.prev.next = part
            block.prev = part
            block.address += size
        else:
            part.prev, part.next = block, block.next
            if block.next is not None:
                block.next.prev = part
            block.next = part
        block.size -= size
        block.pool.insert(part)

    def _collect_garbage(self) -> None:
        """`garbage_collect_cached_blocks`: give back old cached segments above the threshold."""
        assert self.allowed_bytes is not None
        threshold = int(self.settings.garbage_collection_threshold * self.allowed_bytes)
        target = self.reserved_bytes - threshold
        pools = [p for p in self._pools.values() if not p.private and not p.small]
        old = {
            id(block): (pool.searches - block.born, block)
            for pool in pools
            for _, _, block in pool.free
            if not block.is_split() and not block.expandable
        }
        reclaimed = 0
        while target > 0 and reclaimed < target and old:
            mean_age = sum(age for age, _ in old.values()) / len(old)
            for key, (age, block) in list(old.items()):
                if age >= mean_age:
                    reclaimed += block.size
                    self._release(block)
                    del old[key]


def _growable(block: Block) -> int:
    """Bytes a free block of an expandable segment can grow to."""
    behind = block.next
    return block.size + (behind.size if behind is not None and not behind.mapped else 0)
