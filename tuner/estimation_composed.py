"""`tuner estimate --method composed`: the same document from profiles of a few layers.

Every pipeline stage is estimated. Reserved bytes are the allocated ones and the fragmentation that
the profile showed; a full dry run replays the allocator instead.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.estimation import EstimateRequest, assumptions, rank_fixed_costs
from tuner.memory.allocator_settings import AllocatorSettings
from tuner.memory.composition import ProfileSource, stage_memories
from tuner.memory.composition.arrays import StageMemory, breakdown


def estimate_composed(document: Mapping[str, Any]) -> dict[str, Any]:
    """The document of `tuner estimate` for one input document, from profiles.

    Raises InputError for unusable input, UnsupportedError for what only a full dry run covers.
    """
    from tuner.timing.estimate import time_fields

    request = EstimateRequest.from_document(document)
    memories = stage_memories(
        request.model,
        request.candidate,
        profile_source(request),
        world_size=request.world_size,
        global_batch_size=request.global_batch_size,
    )
    settings = AllocatorSettings.from_environment(dict(request.candidate.env))
    expandable = settings.expandable_segments
    fixed = rank_fixed_costs(request)
    capacity = request.gpu.usable_memory_bytes - fixed.total_bytes
    reserved = [_reserved(memory, expandable) for memory in memories]
    fits = max(reserved) <= capacity
    fits_expandable = max(_reserved(memory, True) for memory in memories) <= capacity
    return {
        "fits": fits,
        "peak_allocated_bytes": max(int(memory.peak[0]) for memory in memories),
        "peak_reserved_bytes": max(reserved),
        "ranks": [
            _stage_document(request, stage, memory, expandable)
            for stage, memory in enumerate(memories)
        ],
        **time_fields(request),
        "memory_fit": {
            "fits": fits,
            "fits_with_expandable_segments": fits_expandable,
            "cause": None if fits else "fragmentation" if fits_expandable else "capacity",
            "capacity_bytes": capacity,
            "retries": None,
            "out_of_memory": None,
        },
        "fixed_costs": fixed.to_json(),
        "assumptions": {**assumptions(request), "method": "composed"},
    }


def profile_source(request: EstimateRequest) -> ProfileSource:
    """How the profiles of a request are made."""
    options: dict[str, Any] = {"te_version": request.te_version} if request.te_version else {}
    return ProfileSource(
        request.seq_length,
        precision=request.precision,
        architecture=request.gpu.architecture,
        **options,
    )


def _reserved(memory: StageMemory, expandable: bool) -> int:
    lost = memory.fragmented_expandable if expandable else memory.fragmented
    return int(memory.peak[0] + lost[0])


def _stage_document(
    request: EstimateRequest, stage: int, memory: StageMemory, expandable: bool
) -> dict[str, Any]:
    stages = request.candidate.pipeline_model_parallel_size
    allocated, reserved = int(memory.peak[0]), _reserved(memory, expandable)
    parts = breakdown(memory, 0)
    return {
        "rank": stage * (request.world_size // stages),
        "stage": stage,
        "allocated_bytes": allocated,
        "reserved_bytes": reserved,
        "static_bytes": allocated - parts["activations"],
        "fragmentation": 1.0 - allocated / reserved,
        "breakdown": dict(parts),
        "activations": {},
        "timeline": {"event": [], "allocated_bytes": [], "reserved_bytes": [], "markers": []},
    }
