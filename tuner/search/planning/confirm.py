"""Full dry runs of a plan's finalists, kept on disk like profiles.

A finalist is dry-run on the pipeline stages that composition says are fullest: what they need is
what it needs, and a pipeline of sixteen stages takes minutes to run on all of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from tuner.candidate import Candidate
from tuner.search.planning.workplace import Workplace

Estimate = Callable[[Mapping[str, Any], Sequence[int] | None], Mapping[str, Any]]
"""Gives the document of `tuner estimate` for an input document and the ranks to dry-run (None for
all that may hold the peak)."""

_STAGES = 2
_NEAR = 0.97
"""Stages that are dry-run: the fullest, and a second one that holds nearly as much."""

_KEPT = ("fits", "peak_allocated_bytes", "peak_reserved_bytes", "memory_fit")


def document_of(candidate: Candidate, place: Workplace) -> dict[str, Any]:
    """What `tuner estimate` takes for a candidate."""
    return {
        "model": place.model.to_flat(),
        "config": candidate.to_flat(),
        "world_size": place.world_size,
        "seq_length": place.seq_length,
        "global_batch_size": place.global_batch_size,
        "gpu": place.gpu.name,
        "gpus_per_node": place.gpus_per_node,
        "precision": place.precision,
        "frontend": place.frontend,
    }


def confirm(candidate: Candidate, place: Workplace, estimate: Estimate) -> dict[str, Any]:
    """What a full dry run says of a candidate: whether it fits, and its peaks in bytes.

    Where it cannot be dry-run, `fits` is None and `reason` says why. Answers are read from disk
    where the same software gave them before.
    """
    from tuner.errors import InputError
    from tuner.measurement import write_json_atomically
    from tuner.memory.composition.measure import cache_folder, profile_task

    document = document_of(candidate, place)
    # A profile's key holds everything in the software that a dry run depends on.
    software = profile_task(place.model, Candidate.from_flat({}), place.profile_source).key
    ranks = fullest_ranks(candidate, place)
    text = json.dumps([document, ranks, software], sort_keys=True, default=str)
    folder = cache_folder() / "confirmed"
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    if path.exists():
        known: dict[str, Any] = json.loads(path.read_text())
        return known
    found: dict[str, Any]
    try:
        answer = estimate(document, ranks)
        found = {name: answer[name] for name in _KEPT if name in answer}
    except InputError as error:
        found = {"fits": None, "reason": str(error)}
    folder.mkdir(parents=True, exist_ok=True)
    write_json_atomically(path, found)
    return found


def fullest_ranks(candidate: Candidate, place: Workplace) -> list[int] | None:
    """A rank of each stage that may be the fullest; None where composition does not say."""
    from tuner.errors import InputError
    from tuner.memory.composition.compose import stage_memories
    from tuner.memory.worker_pool import DryRunError

    try:
        stages = stage_memories(
            place.model,
            replace(candidate, cuda_graph_impl="none", cuda_graph_modules=()),
            place.profile_source,
            world_size=place.world_size,
            global_batch_size=place.global_batch_size,
        )
    except (InputError, DryRunError):
        return None
    peaks = [float(memory.peak[0]) for memory in stages]
    order = sorted(range(len(peaks)), key=lambda stage: -peaks[stage])[:_STAGES]
    chosen = [stage for stage in order if peaks[stage] >= _NEAR * peaks[order[0]]]
    per_stage = place.world_size // len(peaks)
    last = len(peaks) - 1
    return [place.world_size - 1 if stage == last else stage * per_stage for stage in chosen]
