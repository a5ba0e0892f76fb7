"""The pipeline schedule and point-to-point communication."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.constraints.registry import derived, rewrite, rule
from tuner.constraints.rules.parallel import MPC

INTERLEAVED = "pipeline_parallel/schedules.py: forward_backward_pipelining_with_interleaving"
PLAIN = "pipeline_parallel/schedules.py: forward_backward_pipelining_without_interleaving"


@derived
def microbatch_group_size(c: Any) -> int:
    """Micro-batches a virtual stage runs in a row: the pipeline size unless set."""
    size = c.microbatch_group_size_per_vp_stage
    return int(c.pipeline_model_parallel_size if size is None else size)


@rewrite("C06", "microbatch_group_size_per_vp_stage", MPC)
def group_size_defaults_to_stages(c: Any) -> object:
    """An unset microbatch_group_size_per_vp_stage becomes the pipeline size."""
    return c.microbatch_group_size


@derived
def interleaved(c: Any) -> bool:
    """Whether the interleaved schedule runs."""
    vpp = c.effective_virtual_pipeline_size
    return c.pipeline_model_parallel_size > 1 and vpp is not None


def _batch_for(c: Any, microbatches: int) -> Mapping[str, object]:
    return {"global_batch_size": microbatches * c.micro_batch_size * c.batch_ranks}


def _enough_micro_batches(c: Any) -> Mapping[str, object] | None:
    size = c.pipeline_model_parallel_size
    per_rank = c.global_batch_size // c.batch_ranks
    for micro_batch in range(min(c.micro_batch_size, per_rank // size), 0, -1):
        if per_rank % (micro_batch * size) == 0:
            return {"micro_batch_size": micro_batch}
    return None


def _larger_batch(c: Any) -> Mapping[str, object]:
    size = c.pipeline_model_parallel_size
    return _batch_for(c, -(-c.num_microbatches // size) * size)


_GROUP_UNSET: Mapping[str, object] = {"microbatch_group_size_per_vp_stage": None}
_NO_INTERLEAVING: Mapping[str, object] = {
    "virtual_pipeline_model_parallel_size": None,
    "overlap_p2p_comm": False,
}


@rule(
    "C01",
    INTERLEAVED,
    fix=[_GROUP_UNSET, _enough_micro_batches, _larger_batch, _NO_INTERLEAVING],
)
def interleaving_has_enough_micro_batches(c: Any) -> str | None:
    """Interleaved: the micro-batch group is larger than the step or smaller than PP."""
    count, size = c.num_microbatches, c.pipeline_model_parallel_size
    if not c.interleaved or count is None:
        return None
    group = c.microbatch_group_size
    if group > count or group < size:
        return (
            f"the interleaved schedule runs {group} micro-batches in a row, which must lie "
            f"between the {size} pipeline stages and the {count} micro-batches of a step"
        )
    return None


@rule(
    "C02",
    INTERLEAVED,
    fix=[_GROUP_UNSET, _enough_micro_batches, _larger_batch, _NO_INTERLEAVING],
)
def last_micro_batch_group_fills_the_pipeline(c: Any) -> str | None:
    """Interleaved: the last group has fewer micro-batches than pipeline stages."""
    count, size = c.num_microbatches, c.pipeline_model_parallel_size
    if not c.interleaved or not count or c.microbatch_group_size < 1:
        return None
    rest = count % c.microbatch_group_size
    if 0 < rest < size:
        return (
            f"{count} micro-batches leave a last group of {rest}, fewer than {size} pipeline stages"
        )
    return None


@rule("C03", INTERLEAVED, fix={"batch_p2p_comm": False})
def overlapped_exchange_is_not_batched(c: Any) -> str | None:
    """Interleaved: overlap_p2p_comm with batch_p2p_comm (which is on by default)."""
    if c.interleaved and c.overlap_p2p_comm and c.batch_p2p_comm:
        return "overlap_p2p_comm cannot be used with batch_p2p_comm"
    return None


@rule("C04", PLAIN, fix={"overlap_p2p_comm": False})
def plain_schedule_does_not_overlap(c: Any) -> str | None:
    """Pipeline without virtual stages: overlap_p2p_comm."""
    plain = c.pipeline_model_parallel_size > 1 and not c.interleaved
    if plain and c.overlap_p2p_comm:
        return "the non-interleaved schedule cannot overlap point-to-point communication"
    return None


@rule(
    "C05",
    MPC,
    fix=[
        {"overlap_p2p_comm_warmup_flush": False},
        {"overlap_p2p_comm": True, "batch_p2p_comm": False},
    ],
)
def warmup_overlap_needs_overlap(c: Any) -> str | None:
    """overlap_p2p_comm_warmup_flush without overlap_p2p_comm, or with batch_p2p_comm."""
    if c.overlap_p2p_comm_warmup_flush and (not c.overlap_p2p_comm or c.batch_p2p_comm):
        return "overlap in warm-up and flush needs overlap_p2p_comm and no batch_p2p_comm"
    return None


@rule("C07", MPC, fix={"defer_embedding_wgrad_compute": False})
def deferred_embedding_needs_pipeline(c: Any) -> str | None:
    """defer_embedding_wgrad_compute with one pipeline stage."""
    if c.defer_embedding_wgrad_compute and c.pipeline_model_parallel_size == 1:
        return "deferring the embedding gradient needs more than one pipeline stage"
    return None


@rule(
    "C08",
    MPC,
    fix=[{"gradient_accumulation_fusion": True}, {"defer_embedding_wgrad_compute": False}],
)
def deferred_embedding_needs_accumulation_fusion(c: Any) -> str | None:
    """defer_embedding_wgrad_compute without gradient_accumulation_fusion."""
    if c.defer_embedding_wgrad_compute and not c.gradient_accumulation_fusion:
        return "deferring the embedding gradient needs gradient_accumulation_fusion"
    return None


@rule("C09", MPC, fix={"wgrad_deferral_limit": 0})
def deferral_limit_is_not_negative(c: Any) -> str | None:
    """defer_embedding_wgrad_compute with a negative wgrad_deferral_limit."""
    if c.defer_embedding_wgrad_compute and c.wgrad_deferral_limit < 0:
        return f"wgrad_deferral_limit must not be negative, got {c.wgrad_deferral_limit}"
    return None
