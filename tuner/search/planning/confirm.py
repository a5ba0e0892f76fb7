"""Full dry runs of a plan's finalists, kept on disk like profiles."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import Any

from tuner.candidate import Candidate
from tuner.memory.composition import ProfileSource
from tuner.search.planning.workplace import Workplace

Estimate = Callable[[Mapping[str, Any]], Mapping[str, Any]]
"""Gives the document of `tuner estimate` for an input document."""

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
    source = ProfileSource(place.seq_length, place.precision, place.gpu.architecture)
    # A profile's key holds everything in the software that a dry run depends on.
    software = profile_task(place.model, Candidate.from_flat({}), source).key
    text = json.dumps([document, software], sort_keys=True, default=str)
    folder = cache_folder() / "confirmed"
    path = folder / f"{hashlib.sha256(text.encode()).hexdigest()[:32]}.json"
    if path.exists():
        known: dict[str, Any] = json.loads(path.read_text())
        return known
    try:
        answer = estimate(document)
    except InputError as error:
        return {"fits": None, "reason": str(error)}
    found = {name: answer[name] for name in _KEPT if name in answer}
    folder.mkdir(parents=True, exist_ok=True)
    write_json_atomically(path, found)
    return found
