"""Full dry runs of a plan's finalists, kept on disk like profiles.

A finalist is dry-run on the pipeline stages that composition says are fullest: what they need is
what it needs, and a pipeline of sixteen stages takes minutes to run on all of them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from tuner.candidate import Candidate
from tuner.memory.errors import RefusedError
from tuner.search.guide import ALLOCATOR
from tuner.search.planning.front import Ranked
from tuner.search.planning.plan import Plan
from tuner.search.planning.whole import Progress
from tuner.search.planning.workplace import Workplace

Estimate = Callable[[Mapping[str, Any], Sequence[int] | None], Mapping[str, Any]]
"""Gives the document of `tuner estimate` for an input document and the ranks to dry-run (None for
all that may hold the peak)."""

_STAGES = 2
_NEAR = 0.97
"""Stages that are dry-run: the fullest, and a second one that holds nearly as much."""

_TRIES = 4
"""Finalists that are dry-run at most, for each that is to be found to fit."""

_LEAST_SHORTFALL = 0.002
"""Share of the limit by which a finalist that does not fit is too large at the least."""

_KEPT = ("fits", "peak_allocated_bytes", "peak_reserved_bytes", "memory_fit")


@dataclass(frozen=True, slots=True)
class Confirmed:
    """A plan after dry runs of its finalists: `plan` without what they say does not fit.

    `answers` holds what they said (`confirm`), by the key of the candidate. Of candidates that were
    not dry-run those are left out, too, whose estimate leaves less room than one that lacked some:
    `left_out` counts both.
    """

    plan: Plan
    answers: Mapping[str, Mapping[str, Any]]
    left_out: int


def confirm_plan(
    plan: Plan,
    place: Workplace,
    count: int,
    estimate: Estimate,
    progress: Progress = lambda stage, done, total: None,
) -> Confirmed:
    """Dry-run the best candidates, fastest first, until `count` of them fit.

    What one of them lacks, others of its kind are taken to lack; where Megatron-Core refuses one,
    it is taken to refuse others with that combination of settings. `progress` is told how many fit.
    """
    answers: dict[str, Mapping[str, Any]] = {}
    room = _Room()
    refused: set[tuple[object, ...]] = set()
    fitting, tries = 0, _TRIES * count

    def open_to(one: Ranked) -> bool:
        return room.has(one) and _combination(one.candidate) not in refused

    with ThreadPoolExecutor(max_workers=max(1, count)) as pool:
        while fitting < count and tries > 0:
            progress("dry runs of finalists", fitting, count)
            left = (one for one in plan.best if one.candidate.key not in answers and open_to(one))
            batch = list(islice(left, min(count - fitting, tries)))
            if not batch:
                break
            tries -= len(batch)
            found = pool.map(lambda one: confirm(one.candidate, place, estimate), batch)
            for one, answer in zip(batch, found, strict=True):
                answers[one.candidate.key] = answer
                fitting += answer["fits"] is True
                if answer["fits"] is False and "memory_fit" in answer:
                    room.note(one, answer)
                elif answer["fits"] is False:
                    refused.add(_combination(one.candidate))

    def stays(one: Ranked) -> bool:
        answer = answers.get(one.candidate.key)
        return open_to(one) if answer is None else answer["fits"] is not False

    best = tuple(one for one in plan.best if stays(one))
    pareto = tuple(one for one in plan.pareto if stays(one))
    left_out = len(plan.best) - len(best)
    return Confirmed(replace(plan, best=best, pareto=pareto), answers, left_out)


class _Room:
    """Bytes below the limit that estimates must stay, by kind of candidate.

    What the allocator loses depends on its settings and on the pools of CUDA graphs.
    """

    def __init__(self) -> None:
        self._needed: dict[tuple[object, ...], float] = {}

    def has(self, one: Ranked) -> bool:
        """Whether a candidate's estimate leaves the room that others lacked."""
        needed = self._needed.get(_kind(one.candidate))
        return needed is None or one.limit_bytes - one.memory_bytes >= needed

    def note(self, one: Ranked, answer: Mapping[str, Any]) -> None:
        """Learn from the dry run of a candidate that does not fit."""
        lacking = max(
            answer["peak_reserved_bytes"] - answer["memory_fit"]["capacity_bytes"],
            _LEAST_SHORTFALL * one.limit_bytes,
        )
        kind = _kind(one.candidate)
        needed = one.limit_bytes - one.memory_bytes + lacking
        self._needed[kind] = max(self._needed.get(kind, 0.0), needed)


def _kind(candidate: Candidate) -> tuple[object, ...]:
    pools = candidate.cuda_graph_impl not in ("none", "full_iteration")  # one for each layer
    return dict(candidate.env).get(ALLOCATOR), pools


def _combination(candidate: Candidate) -> tuple[object, ...]:
    """What Megatron-Core's parts see of each other: which are on, not how far."""
    return (
        candidate.pipeline_model_parallel_size > 1,
        candidate.virtual_pipeline_model_parallel_size is not None,
        candidate.recompute_granularity,
        candidate.cuda_graph_impl,
        candidate.cuda_graph_modules,
        candidate.fine_grained_activation_offloading,
        candidate.cpu_offloading,
        candidate.optimizer_cpu_offload,
    )


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

    Where it cannot be dry-run, `fits` is None, or False if Megatron-Core itself refuses it, and
    `reason` says why. Answers are read from disk where the same software gave them before.
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
        found = _fullest_answer(document, ranks, estimate)
    except InputError as error:
        refused = isinstance(error, RefusedError)
        found = {"fits": False if refused else None, "reason": str(error)}
    folder.mkdir(parents=True, exist_ok=True)
    write_json_atomically(path, found)
    return found


def _fullest_answer(
    document: Mapping[str, Any], ranks: Sequence[int] | None, estimate: Estimate
) -> dict[str, Any]:
    """The answer for the rank that needs most; for the first one that does not fit."""
    answers: list[Mapping[str, Any]] = []
    for chosen in [None] if ranks is None else [[rank] for rank in ranks]:
        answers.append(estimate(document, chosen))
        if not answers[-1]["fits"]:
            break
    fullest = max(answers, key=lambda answer: (not answer["fits"], answer["peak_reserved_bytes"]))
    return {name: fullest[name] for name in _KEPT if name in fullest}


def fullest_ranks(candidate: Candidate, place: Workplace) -> list[int] | None:
    """A rank of each stage that may be the fullest; None where composition does not say.

    Two of each where a part of the optimizer is on the host: what that leaves on the device
    differs within a stage.
    """
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
    if candidate.splits_optimizer:
        firsts = [stage * per_stage for stage in chosen]
        return sorted({*firsts, *(first + per_stage // 2 for first in firsts)})
    return [place.world_size - 1 if stage == last else stage * per_stage for stage in chosen]
