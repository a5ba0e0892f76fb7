"""Megatron Bridge: what comm_overlap sets."""

from __future__ import annotations

from typing import Any

from tuner.constraints.registry import UNCHANGED, derived, handed_over, rewrite, rule

SETUP = "bridge/training/comm_overlap.py: CommOverlapConfig.setup"
_BRIDGE = ("bridge",)
_BUCKET_BYTES = 128 * 1024 * 1024


@derived
def overlap_wishes(c: Any) -> dict[str, Any] | None:
    """What the user set on comm_overlap itself; None without comm_overlap."""
    if c.comm_overlap is None:
        return None
    return {name: value for name, value in c.comm_overlap.items() if value is not None}


@derived
def model_overlap(c: Any) -> dict[str, Any]:
    """Model fields comm_overlap overwrites; empty without comm_overlap."""
    wishes = c.overlap_wishes
    if wishes is None:
        return {}
    interleaved = (c.virtual_pipeline_model_parallel_size or 1) > 1
    pipelined = c.pipeline_model_parallel_size > 1
    values: dict[str, Any] = {
        "tp_comm_overlap": False,
        "overlap_p2p_comm": pipelined and interleaved,
        "batch_p2p_comm": pipelined and not interleaved,
        "defer_embedding_wgrad_compute": False,
        "wgrad_deferral_limit": -1,
        "overlap_moe_expert_parallel_comm": False,
        "delay_wgrad_compute": False,
    }
    values |= {name: value for name, value in wishes.items() if name in values}
    if c.tensor_model_parallel_size < 2 or not c.sequence_parallel or c.te_missing:
        values["tp_comm_overlap"] = False
    return values


@derived
def bridge_data_parallel_size(c: Any) -> int | None:
    """Data-parallel size as Bridge computes it, weight shards not counted."""
    size = c.tensor_model_parallel_size * c.pipeline_model_parallel_size * c.context_parallel_size
    return None if c.world_size is None or c.world_size % size else int(c.world_size // size)


@derived
def optimizer_overlap(c: Any) -> dict[str, Any]:
    """DDP and optimizer fields comm_overlap overwrites; empty where it does not act."""
    wishes = c.overlap_wishes
    if wishes is None or not c.use_distributed_optimizer:
        return {}
    many = (c.bridge_data_parallel_size or 1) > 1
    interleaved = (c.virtual_pipeline_model_parallel_size or 1) > 1
    values: dict[str, Any] = {
        "bucket_size": _BUCKET_BYTES if many else None,
        "overlap_grad_reduce": many,
        "overlap_param_gather": many,
        "overlap_param_gather_with_optimizer_step": False,
        "align_param_gather": many and c.pipeline_model_parallel_size > 1 and interleaved,
    }
    return values | {name: value for name, value in wishes.items() if name in values}


_MODEL_FIELDS = (
    "tp_comm_overlap",
    "overlap_p2p_comm",
    "batch_p2p_comm",
    "defer_embedding_wgrad_compute",
    "wgrad_deferral_limit",
    "overlap_moe_expert_parallel_comm",
)
_OPTIMIZER_FIELDS = (
    "bucket_size",
    "overlap_grad_reduce",
    "overlap_param_gather",
    "overlap_param_gather_with_optimizer_step",
    "align_param_gather",
)


@handed_over("bridge", *_MODEL_FIELDS, "delay_wgrad_compute")
def model_field_after_overlap(c: Any, name: str) -> Any:
    """comm_overlap wins over what the model says."""
    return c.model_overlap.get(name, getattr(c, name))


@handed_over("bridge", *_OPTIMIZER_FIELDS)
def optimizer_field_after_overlap(c: Any, name: str) -> Any:
    """comm_overlap wins over what DDP and the optimizer say."""
    return c.optimizer_overlap.get(name, getattr(c, name))


def _report(rule_id: str, name: str, source: str, why: str) -> None:
    def overwrite(c: Any) -> object:
        return getattr(c, source).get(name, UNCHANGED)

    overwrite.__name__ = f"overlap_overwrites_{name}"
    overwrite.__doc__ = why
    rewrite(rule_id, name, SETUP, frontends=_BRIDGE, layer="given")(overwrite)


for _name in _MODEL_FIELDS:
    _report(
        "C11" if _name == "tp_comm_overlap" else "C12",
        _name,
        "model_overlap",
        "comm_overlap decides it from the layout; only a value on comm_overlap itself wins.",
    )
for _name in _OPTIMIZER_FIELDS:
    _report(
        "C13",
        _name,
        "optimizer_overlap",
        "comm_overlap decides it from the data-parallel size when the distributed optimizer is on.",
    )


@rewrite("C12", "delay_wgrad_compute", SETUP, frontends=_BRIDGE, layer="given")
def overlap_overwrites_delay_wgrad_compute(c: Any) -> object:
    """comm_overlap decides it on the model, and the copy on DDP is lost with the distributed
    optimizer."""
    if not c.model_overlap:
        return UNCHANGED
    after = c.model_overlap["delay_wgrad_compute"]
    said = "delay_wgrad_compute" in c.overlap_wishes
    lost = c.optimizer_overlap and not said and after == bool(c.delay_wgrad_compute)
    return None if lost else after


@rule("B06", SETUP, frontends=_BRIDGE, layer="given", fix=[{"comm_overlap": None}])
def overlap_needs_several_experts(c: Any) -> str | None:
    """comm_overlap.overlap_moe_expert_parallel_comm with at most one expert."""
    wished = (c.overlap_wishes or {}).get("overlap_moe_expert_parallel_comm")
    if wished is True and (c.num_moe_experts or 0) <= 1:
        return "overlap of expert communication needs more than one expert"
    return None


@rule("B06", SETUP, frontends=_BRIDGE, layer="given", fix=[{"comm_overlap": None}])
def overlap_needs_virtual_stages_beside_the_layout(c: Any) -> str | None:
    """comm_overlap.overlap_moe_expert_parallel_comm looks for virtual_pipeline_model_parallel_size
    before it is read from pipeline_model_parallel_layout."""
    wished = (c.overlap_wishes or {}).get("overlap_moe_expert_parallel_comm")
    unread = c.pipeline_model_parallel_layout and c.virtual_pipeline_model_parallel_size is None
    if wished is True and c.pipeline_model_parallel_size > 1 and unread:
        return "set virtual_pipeline_model_parallel_size too, as the layout has it"
    return None


@rule("E16", SETUP, frontends=_BRIDGE, layer="given", fix=[{"comm_overlap": None}])
def delayed_weight_gradient_is_supported(c: Any) -> str | None:
    """comm_overlap.delay_wgrad_compute with an old Transformer Engine, or (from 0.18) inside a
    graph without accumulation fusion or with attention bias."""
    wishes = c.overlap_wishes or {}
    if wishes.get("delay_wgrad_compute") is not True:
        return None
    overlapped = c.overlap_grad_reduce or wishes.get("overlap_grad_reduce")
    if c.te < (2, 7) and (overlapped or c.bridge_accumulation_fusion):
        return "delaying weight gradients needs Transformer Engine 2.7"
    if not (c.overlap_moe_expert_parallel_comm or wishes.get("overlap_moe_expert_parallel_comm")):
        return "delaying weight gradients needs overlap_moe_expert_parallel_comm"
    return _graphed_gradient_problem(c) if c.minor >= 18 else None


def _graphed_gradient_problem(c: Any) -> str | None:
    graphed = c.graph_names
    shared = c.moe_shared_expert_intermediate_size is not None and not c.moe_shared_expert_overlap
    if "attn" not in graphed and not ("moe_router" in graphed and shared):
        return None
    if c.te < (2, 12):
        return "delaying weight gradients inside a graph needs Transformer Engine 2.12"
    if not c.bridge_accumulation_fusion:
        return "delaying weight gradients inside a graph needs gradient_accumulation_fusion"
    if "attn" in graphed and (c.add_bias_linear or c.add_qkv_bias):
        return "delaying weight gradients inside a graph excludes attention bias"
    return None


@derived
def graph_names(c: Any) -> frozenset[str]:
    """Names in either spelling of the captured region, as Bridge reads them."""
    names: list[str] = []
    for value in (c.cuda_graph_modules, c.cuda_graph_scope):
        if isinstance(value, str):
            names += [] if value in ("", "full") else value.split(",")
        elif value is not None:
            names += value
    return frozenset(name.rpartition(".")[2] for name in names)
