"""The allocator model: hand-computed cases, invariants, and a plain re-implementation."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuner.errors import InputError
from tuner.memory.allocator import Block, CachingAllocator, OutOfDeviceMemoryError
from tuner.memory.allocator_settings import AllocatorSettings

MIB = 1 << 20
GIB = 1 << 30
EXPANDABLE = AllocatorSettings(expandable_segments=True)


def chain_of(block: Block) -> list[Block]:
    while block.prev is not None:
        block = block.prev
    chain = [block]
    while chain[-1].next is not None:
        chain.append(chain[-1].next)
    return chain


def segments(allocator: CachingAllocator, live: list[Block]) -> list[list[Block]]:
    """Every segment as its blocks in address order."""
    cached = [
        entry[-1] for pool in allocator._pools.values() for entry in [*pool.free, *pool.unmapped]
    ]
    heads = {chain_of(block)[0].address: block for block in [*cached, *live]}
    return [chain_of(heads[address]) for address in sorted(heads)]


class TestSizes:
    @pytest.mark.parametrize(
        ("requested", "rounded"),
        [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, 1049088)],
    )
    def test_sizes_round_up_to_512_bytes(self, requested, rounded):
        assert AllocatorSettings().round_size(requested) == rounded

    @pytest.mark.parametrize(
        ("requested", "segment"),
        [
            (512, 2 * MIB),
            (MIB, 2 * MIB),
            (MIB + 512, 20 * MIB),
            (10 * MIB - 512, 20 * MIB),
            (10 * MIB, 10 * MIB),
            (10 * MIB + 512, 12 * MIB),
        ],
    )
    def test_segments_are_two_twenty_or_a_multiple_of_two_mebibytes(self, requested, segment):
        allocator = CachingAllocator()
        allocator.malloc(requested)
        assert allocator.reserved_bytes == segment

    def test_power_of_two_divisions_follow_the_example_of_pytorchs_documentation(self):
        # "if we need to round up size of 1200 and number of divisions is 4": 1280.
        rounded = AllocatorSettings.from_text("roundup_power2_divisions:4").round_size(1200 * MIB)
        assert rounded == 1280 * MIB

    @pytest.mark.parametrize(("elements", "divisions"), [(21 * MIB, 8), (100 * MIB, 2)])
    def test_power_of_two_divisions_apply_by_size(self, elements, divisions):
        # The list and the two sizes are those of PyTorch's test_cuda.py, test_allocator_settings.
        text = "roundup_power2_divisions:[64:8,128:2,256:2,512:2,1024:1,>:1]"
        size = 4 * elements
        floor = 1 << (size.bit_length() - 1)
        step = floor // divisions
        assert AllocatorSettings.from_text(text).round_size(size) == -(-size // step) * step

    def test_a_rest_of_at_most_one_mebibyte_is_not_split_off(self):
        allocator = CachingAllocator()
        allocator.malloc(11 * MIB)
        assert allocator.allocated_bytes == 12 * MIB
        allocator.malloc(10 * MIB + 512)
        assert allocator.allocated_bytes == 12 * MIB + 10 * MIB + 512

    def test_expandable_segments_split_at_512_bytes(self):
        allocator = CachingAllocator(EXPANDABLE)
        allocator.malloc(11 * MIB)
        assert (allocator.allocated_bytes, allocator.reserved_bytes) == (11 * MIB, 20 * MIB)


class TestReuse:
    def test_the_smallest_sufficient_block_serves(self):
        allocator = CachingAllocator()
        blocks = [allocator.malloc(size * MIB) for size in (64, 32, 48)]
        smallest = blocks[1].address
        for block in blocks:
            allocator.free(block)
        assert allocator.malloc(30 * MIB).address == smallest

    def test_equal_blocks_serve_lowest_address_first(self):
        allocator = CachingAllocator()
        blocks = [allocator.malloc(32 * MIB) for _ in range(3)]
        lowest = min(block.address for block in blocks)
        for block in reversed(blocks):
            allocator.free(block)
        assert allocator.malloc(32 * MIB).address == lowest

    def test_freed_neighbours_become_one_block_again(self):
        allocator = CachingAllocator()
        big = allocator.malloc(100 * MIB)
        allocator.free(big)
        parts = [allocator.malloc(25 * MIB) for _ in range(4)]
        for index in (0, 2, 1, 3):
            allocator.free(parts[index])
        assert allocator.malloc(100 * MIB) is not None
        assert allocator.reserved_bytes == 100 * MIB

    def test_streams_do_not_share_blocks(self):
        allocator = CachingAllocator()
        allocator.free(allocator.malloc(32 * MIB, stream=0))
        allocator.malloc(32 * MIB, stream=1)
        assert allocator.reserved_bytes == 64 * MIB

    def test_a_private_pool_does_not_take_from_the_default_one(self):
        allocator = CachingAllocator()
        allocator.free(allocator.malloc(32 * MIB))
        allocator.malloc(32 * MIB, private_pool="graph")
        assert allocator.reserved_bytes == 64 * MIB

    def test_small_requests_share_a_two_mebibyte_segment(self):
        allocator = CachingAllocator()
        for _ in range(8):
            allocator.malloc(256 * 1024)
        assert allocator.reserved_bytes == 2 * MIB

    def test_blocks_above_max_split_size_are_kept_whole(self):
        allocator = CachingAllocator(AllocatorSettings(max_split_size_bytes=64 * MIB))
        allocator.free(allocator.malloc(100 * MIB))
        allocator.malloc(32 * MIB)
        assert allocator.reserved_bytes == 132 * MIB
        allocator.malloc(90 * MIB)  # within 20 MiB of the cached block: served whole
        assert (allocator.reserved_bytes, allocator.allocated_bytes) == (132 * MIB, 132 * MIB)

    def test_a_grown_tensor_extends_an_expandable_segment(self):
        plain, expandable = CachingAllocator(), CachingAllocator(EXPANDABLE)
        for allocator in (plain, expandable):
            for size in (100 * MIB, 200 * MIB, 300 * MIB):
                allocator.free(allocator.malloc(size))
        assert (plain.reserved_bytes, expandable.reserved_bytes) == (600 * MIB, 300 * MIB)


class TestLimit:
    def test_cached_segments_are_given_back_before_giving_up(self):
        allocator = CachingAllocator(capacity_bytes=128 * MIB)
        allocator.free(allocator.malloc(100 * MIB))
        allocator.malloc(120 * MIB)
        assert (allocator.reserved_bytes, allocator.retries) == (120 * MIB, 1)

    def test_a_segment_in_part_use_cannot_be_given_back(self):
        allocator = CachingAllocator(capacity_bytes=128 * MIB)
        whole = allocator.malloc(100 * MIB)
        allocator.free(whole)
        allocator.malloc(30 * MIB)
        with pytest.raises(OutOfDeviceMemoryError):
            allocator.malloc(80 * MIB)

    def test_unused_pages_of_an_expandable_segment_can_be_given_back(self):
        allocator = CachingAllocator(EXPANDABLE, capacity_bytes=128 * MIB)
        small = [allocator.malloc(20 * MIB) for _ in range(6)]
        for block in small[::2]:
            allocator.free(block)
        allocator.malloc(60 * MIB)
        assert allocator.reserved_bytes == 120 * MIB
        assert allocator.allocated_bytes == 120 * MIB

    def test_no_memory_is_given_back_during_a_graph_capture(self):
        allocator = CachingAllocator(capacity_bytes=128 * MIB)
        allocator.free(allocator.malloc(100 * MIB))
        with pytest.raises(OutOfDeviceMemoryError):
            allocator.malloc(64 * MIB, private_pool="graph")
        assert allocator.retries == 0

    def test_the_memory_fraction_bounds_reserved_bytes(self):
        settings_ = AllocatorSettings(per_process_memory_fraction=0.5)
        allocator = CachingAllocator(settings_, capacity_bytes=128 * MIB)
        with pytest.raises(OutOfDeviceMemoryError):
            allocator.malloc(66 * MIB)
        allocator.malloc(64 * MIB)

    def test_garbage_collection_frees_old_segments_above_the_threshold(self):
        text = "garbage_collection_threshold:0.5,per_process_memory_fraction:1.0"
        allocator = CachingAllocator(AllocatorSettings.from_text(text), capacity_bytes=100 * MIB)
        for size in (20, 24, 28):  # each is too small for the next; 72 MiB reserved, all cached
            allocator.free(allocator.malloc(size * MIB))
        allocator.malloc(30 * MIB)
        assert allocator.reserved_bytes < 100 * MIB
        assert allocator.retries == 0
        assert allocator.driver_frees > 0


class TestSettings:
    def test_unset_environment_means_pytorchs_defaults(self):
        assert AllocatorSettings.from_environment({}) == AllocatorSettings()

    def test_the_environment_is_read_under_both_names(self):
        for name in ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF"):
            read = AllocatorSettings.from_environment({name: "expandable_segments:True"})
            assert read.expandable_segments

    def test_a_misspelt_option_is_named_with_its_neighbour(self):
        with pytest.raises(InputError, match="expandable_segments"):
            AllocatorSettings.from_text("expandable_segment:True")

    @pytest.mark.parametrize(
        "text",
        [
            "max_split_size_mb:10",
            "garbage_collection_threshold:1.5",
            "roundup_power2_divisions:3",
            "expandable_segments:yes",
            "backend:cudaMallocAsync",
            "expandable_segments",
        ],
    )
    def test_what_pytorch_refuses_is_refused(self, text):
        with pytest.raises(InputError):
            AllocatorSettings.from_text(text)

    def test_options_without_effect_on_bytes_are_accepted(self):
        text = "backend:native,pinned_use_background_threads:True, max_split_size_mb : 128"
        assert AllocatorSettings.from_text(text).max_split_size_bytes == 128 * MIB


@dataclass
class PlainAllocator:
    """The default settings re-implemented over lists of [offset, size, used], for comparison."""

    segments: list[tuple[int, bool, list[list]]] = field(default_factory=list)
    reserved: int = 0

    def malloc(self, requested: int) -> tuple[int, list]:
        size = max(512, (requested + 511) // 512 * 512)
        small = size <= MIB
        fitting = [
            (part[1], number, part)
            for number, is_small, parts in self.segments
            if is_small == small
            for part in parts
            if not part[2] and part[1] >= size
        ]
        if not fitting:
            bytes_ = (
                2 * MIB
                if small
                else 20 * MIB
                if size < 10 * MIB
                else -(-size // (2 * MIB)) * 2 * MIB
            )
            self.reserved += bytes_
            number = len(self.segments)
            part = [0, bytes_, False]
            self.segments.append((number, small, [part]))
        else:
            _, number, part = min(fitting, key=lambda entry: (entry[0], entry[1], entry[2][0]))
        rest = part[1] - size
        if rest >= 512 if small else rest > MIB:
            parts = self.segments[number][2]
            parts.insert(parts.index(part) + 1, [part[0] + size, rest, False])
            part[1] = size
        part[2] = True
        return number, part

    def free(self, number: int, part: list) -> None:
        part[2] = False
        merged: list[list] = []
        for other in self.segments[number][2]:
            if merged and not merged[-1][2] and not other[2]:
                merged[-1] = [merged[-1][0], merged[-1][1] + other[1], False]
            else:
                merged.append(other)
        self.segments[number][2][:] = merged


SIZES = st.one_of(
    st.integers(1, 4096),
    st.integers(MIB - 1024, MIB + 1024),
    st.integers(1, 32).map(lambda n: n * MIB),
    st.integers(1, 300 * MIB),
)
PROGRAMS = st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 2**30)), max_size=120)


@given(PROGRAMS)
@settings(max_examples=200, deadline=None)
def test_default_settings_agree_with_a_plain_re_implementation(program):
    model, plain, live = CachingAllocator(), PlainAllocator(), []
    for frees, size, choice in program:
        if frees and live:
            ours, theirs = live.pop(choice % len(live))
            model.free(ours)
            plain.free(*theirs)
        else:
            ours, theirs = model.malloc(size), plain.malloc(size)
            assert ours.size == theirs[1][1]
            live.append((ours, theirs))
        assert model.reserved_bytes == plain.reserved


@given(
    PROGRAMS,
    st.sampled_from(
        [
            "",
            "expandable_segments:True",
            "max_split_size_mb:32",
            "roundup_power2_divisions:8",
            "expandable_segments:True,roundup_power2_divisions:4",
            "garbage_collection_threshold:0.6,per_process_memory_fraction:0.9",
        ]
    ),
    st.sampled_from([None, 256 * MIB, GIB]),
)
@settings(max_examples=300, deadline=None)
def test_blocks_never_overlap_and_no_byte_is_lost(program, text, capacity):
    allocator = CachingAllocator(AllocatorSettings.from_text(text), capacity_bytes=capacity)
    live: list[Block] = []
    for frees, size, choice in program:
        if frees and live:
            allocator.free(live.pop(choice % len(live)))
        else:
            try:
                live.append(allocator.malloc(size))
            except OutOfDeviceMemoryError:
                assert capacity is not None
    everything = segments(allocator, live)
    mapped = [block for chain in everything for block in chain if block.mapped]
    assert sum(block.size for block in mapped) == allocator.reserved_bytes
    assert sum(block.size for block in mapped if block.allocated) == allocator.allocated_bytes
    assert {id(block) for block in mapped if block.allocated} == {id(block) for block in live}
    assert allocator.peak_reserved_bytes >= allocator.peak_allocated_bytes
    assert capacity is None or allocator.peak_reserved_bytes <= capacity
    position = 0
    for chain in everything:
        assert chain[0].address >= position
        for block, behind in itertools.pairwise(chain):
            assert block.address + block.size == behind.address
            both_free = not block.allocated and not behind.allocated
            assert not (both_free and block.mapped == behind.mapped)  # merges are complete
        position = chain[-1].address + chain[-1].size


@given(PROGRAMS, st.sampled_from(["", "expandable_segments:True"]))
@settings(max_examples=100, deadline=None)
def test_everything_freed_is_everything_given_back(program, text):
    allocator = CachingAllocator(AllocatorSettings.from_text(text))
    blocks = [allocator.malloc(size) for _, size, _ in program]
    random.Random(0).shuffle(blocks)
    for block in blocks:
        allocator.free(block)
    allocator.release_cached()
    assert (allocator.allocated_bytes, allocator.reserved_bytes) == (0, 0)


@given(PROGRAMS)
@settings(max_examples=100, deadline=None)
def test_pages_of_expandable_segments_follow_the_tiling_of_allocations(program):
    """Without frees an expandable segment wastes less than one page of each pool."""
    allocator = CachingAllocator(EXPANDABLE)
    for _, size, _ in program:
        allocator.malloc(size)
    assert allocator.reserved_bytes - allocator.allocated_bytes < 22 * MIB
