"""The pipeline of a candidate, and ranks that share the cores of one machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tuner.candidate import Candidate
from tuner.timing.schedule import Pipeline

if TYPE_CHECKING:
    from numpy.typing import NDArray

    Seconds = NDArray[np.float64]


def pipeline_of(candidate: Candidate, microbatches: int) -> Pipeline:
    """The pipeline that Megatron-Core runs for a candidate.

    Transfers of interleaved schedules overlap unless the candidate says otherwise, as in
    Megatron-LM and Megatron Bridge. Raises ValueError where the schedule would refuse to run.
    """
    extra = dict(candidate.extra)
    chunks = candidate.virtual_pipeline_model_parallel_size or 1
    overlap = chunks > 1 and bool(extra.get("overlap_p2p_comm", True))
    combined = bool(extra.get("overlap_moe_expert_parallel_comm"))
    return Pipeline(
        stages=candidate.pipeline_model_parallel_size,
        microbatches=microbatches,
        chunks=chunks,
        group_size=extra.get("microbatch_group_size_per_vp_stage") if chunks > 1 else None,
        overlap_p2p=overlap,
        overlap_warmup_flush=overlap and bool(extra.get("overlap_p2p_comm_warmup_flush")),
        combined=combined and (chunks > 1 or candidate.pipeline_model_parallel_size == 1),
    )


def on_shared_cores(seconds: Seconds, core_s: Seconds, cores: int | None) -> Seconds:
    """Seconds of pipelines whose ranks share the cores of one machine.

    Ranks that wait leave their core to others: with more ranks than cores it is the work of all of
    them together, `core_s` `[candidate]` seconds of one core, that bounds the time.
    """
    if cores is None:
        return seconds
    shared: Seconds = np.maximum(seconds, core_s / cores)
    return shared
