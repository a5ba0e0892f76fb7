"""Parallel sizes, world size and batch: what must divide what."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.constraints.registry import UNCHANGED, derived, rewrite, rule
from tuner.constraints.rules import TRANSFORMER_CONFIG as TC

MPC = "model_parallel_config.py: ModelParallelConfig.__post_init__"
GROUPS = "parallel_state.py: initialize_model_parallel"
BATCH = "num_microbatches_calculator.py: ConstantNumMicroBatchesCalculator"
DIVIDE = "utils.py: divide"


@derived
def effective_expert_tensor_parallel_size(c: Any) -> int:
    """Expert tensor parallelism defaults to the tensor-parallel size."""
    size = c.expert_tensor_parallel_size
    return int(c.tensor_model_parallel_size if size is None else size)


@derived
def query_groups(c: Any) -> int:
    """Without grouped-query attention every head is its own group."""
    groups = c.num_query_groups
    return int(c.num_attention_heads if groups is None else groups)


@derived
def weight_remat_size(c: Any) -> int:
    """Ranks that share one weight shard beyond tensor parallelism (0.19 and later)."""
    return _remat(
        c.tensor_model_parallel_size, c.tensor_parallel_num_weight_shards, c.gtp_weight_remat_size
    )


@derived
def expert_weight_remat_size(c: Any) -> int:
    """The same for expert weights."""
    return _remat(
        c.effective_expert_tensor_parallel_size,
        c.expert_tensor_parallel_num_weight_shards,
        c.expert_gtp_weight_remat_size,
    )


def _remat(parallel: int, shards: int | None, remat: int) -> int:
    return remat if shards is None else max(1, shards // parallel)


@derived
def model_parallel_size(c: Any) -> int:
    """Ranks that hold one copy of the dense weights."""
    size: int = c.tensor_model_parallel_size * c.pipeline_model_parallel_size
    size *= c.context_parallel_size
    return size * c.weight_remat_size if c.minor >= 19 else size


@derived
def expert_model_size(c: Any) -> int:
    """Ranks that hold one copy of the expert weights."""
    size: int = c.effective_expert_tensor_parallel_size * c.expert_model_parallel_size
    size *= c.pipeline_model_parallel_size
    return size * c.expert_weight_remat_size if c.minor >= 19 else size


@derived
def data_parallel_size(c: Any) -> int | None:
    """Copies of the dense weights; None when the world size is unknown or does not divide."""
    if c.world_size is None or c.world_size % c.model_parallel_size:
        return None
    return int(c.world_size // c.model_parallel_size)


@derived
def expert_data_parallel_size(c: Any) -> int | None:
    """Copies of the expert weights; None when the world size is unknown or does not divide."""
    if c.world_size is None or c.world_size % c.expert_model_size:
        return None
    return int(c.world_size // c.expert_model_size)


@derived
def batch_ranks(c: Any) -> int | None:
    """Ranks over which one global batch is split."""
    size = c.data_parallel_size
    return size * c.weight_remat_size if size is not None and c.minor >= 19 else size


@derived
def num_microbatches(c: Any) -> int | None:
    """Micro-batches of one step; None when unknown or not whole."""
    if None in (c.global_batch_size, c.micro_batch_size, c.batch_ranks):
        return None
    whole, rest = divmod(c.global_batch_size, c.micro_batch_size * c.batch_ranks)
    if rest and not c.decrease_batch_size_if_needed:
        return None
    return int(whole)


@rule("P01", MPC, fix={"sequence_parallel": False})
def sequence_parallel_needs_tensor_parallel(c: Any) -> str | None:
    """sequence_parallel with tensor_model_parallel_size 1."""
    if c.sequence_parallel and c.tensor_model_parallel_size <= 1:
        return "sequence_parallel splits activations over tensor-parallel ranks, and there is one"
    return None


@rule("P02", MPC, fix=[lambda c: {"pipeline_dtype": c.params_dtype}])
def pipeline_needs_dtype(c: Any) -> str | None:
    """pipeline_model_parallel_size above 1 without pipeline_dtype."""
    if c.pipeline_model_parallel_size > 1 and c.pipeline_dtype is None:
        return "pipeline stages exchange activations, so pipeline_dtype must be set"
    return None


@rewrite("P03", "expert_tensor_parallel_size", MPC)
def expert_tensor_parallel_defaults_to_tensor_parallel(c: Any) -> object:
    """An unset expert_tensor_parallel_size becomes tensor_model_parallel_size."""
    if c.expert_tensor_parallel_size is None:
        return c.effective_expert_tensor_parallel_size
    return UNCHANGED


def largest_divisor(number: int, limit: int) -> int:
    """The largest divisor of `number` that is at most `limit`; 1 when either is below 1."""
    return next((d for d in range(min(number, limit), 0, -1) if number % d == 0), 1)


def _fewer_tensor_ranks(number: int, c: Any) -> Mapping[str, object]:
    return tensor_parallel_change(c, largest_divisor(number, c.tensor_model_parallel_size))


def tensor_parallel_change(c: Any, size: int) -> Mapping[str, object]:
    """Change the tensor-parallel size and, when it becomes 1, what cannot stay."""
    changes: dict[str, object] = {"tensor_model_parallel_size": size}
    if size == 1 and c.sequence_parallel:
        changes["sequence_parallel"] = False
    return changes


@rule("P04", TC, fix=[lambda c: _fewer_tensor_ranks(c.num_attention_heads, c)])
def heads_divide_over_tensor_ranks(c: Any) -> str | None:
    """num_attention_heads is not a multiple of tensor_model_parallel_size."""
    heads, size = c.num_attention_heads, c.tensor_model_parallel_size
    if heads % size:
        return f"{heads} attention heads cannot be split over {size} tensor-parallel ranks"
    return None


@rewrite("P28", "num_query_groups", TC)
def query_groups_default_to_heads(c: Any) -> object:
    """Unset num_query_groups become num_attention_heads."""
    return c.query_groups if c.num_query_groups is None else UNCHANGED


@rewrite("P28", "kv_channels", TC)
def head_size_defaults_to_share_of_hidden(c: Any) -> object:
    """Unset kv_channels become hidden_size divided by the heads."""
    if c.kv_channels is None and c.num_attention_heads:
        return c.hidden_size // c.num_attention_heads
    return UNCHANGED


@rule("P05", TC, fix=[lambda c: _fewer_tensor_ranks(c.query_groups, c)])
def query_groups_match_tensor_ranks(c: Any) -> str | None:
    """num_query_groups is neither a multiple nor a divisor of tensor_model_parallel_size."""
    groups, size = c.query_groups, c.tensor_model_parallel_size
    if groups % size and size % groups:
        return (
            f"{groups} query groups are neither a multiple nor a divisor of {size} "
            "tensor-parallel ranks"
        )
    return None


@rule("P06", TC, fix={"expert_model_parallel_size": 1})
def expert_parallel_needs_experts(c: Any) -> str | None:
    """expert_model_parallel_size above 1 on a model without experts."""
    if c.expert_model_parallel_size > 1 and c.num_moe_experts is None:
        return "expert parallelism needs num_moe_experts"
    return None


@rule("P07", TC, fix={"num_moe_experts": None})
def expert_count_is_positive(c: Any) -> str | None:
    """num_moe_experts is 0 or negative."""
    if c.num_moe_experts is not None and c.num_moe_experts <= 0:
        return f"num_moe_experts must be positive, got {c.num_moe_experts}"
    return None


def _fewer_expert_ranks(c: Any) -> Mapping[str, object]:
    return {
        "expert_model_parallel_size": largest_divisor(
            c.num_moe_experts, c.expert_model_parallel_size
        )
    }


@rule("P08", "transformer/moe/moe_layer.py: BaseMoELayer.__init__", fix=[_fewer_expert_ranks])
def experts_divide_over_expert_ranks(c: Any) -> str | None:
    """num_moe_experts is not a multiple of expert_model_parallel_size."""
    experts, ranks = c.num_moe_experts, c.expert_model_parallel_size
    if experts and experts > 0 and experts % ranks:
        return f"{experts} experts cannot be split over {ranks} expert-parallel ranks"
    return None


def _fitting_context_size(c: Any) -> Mapping[str, object] | None:
    rest = c.model_parallel_size // c.context_parallel_size
    if c.world_size % rest:
        return None
    return {"context_parallel_size": largest_divisor(c.world_size // rest, c.context_parallel_size)}


def _fitting_tensor_size(c: Any) -> Mapping[str, object] | None:
    rest = c.model_parallel_size // c.tensor_model_parallel_size
    if c.world_size % rest:
        return None
    heads = c.num_attention_heads
    sizes = range(c.tensor_model_parallel_size, 0, -1)
    fitting = next(s for s in sizes if c.world_size // rest % s == 0 and heads % s == 0)
    return tensor_parallel_change(c, fitting)


def _larger_world(c: Any) -> Mapping[str, object]:
    size = c.model_parallel_size
    return {"world_size": -(-c.world_size // size) * size}


@rule("P10", GROUPS, fix=[_fitting_context_size, _fitting_tensor_size, _larger_world])
def world_divides_by_model_size(c: Any) -> str | None:
    """world_size is not a multiple of tensor x pipeline x context parallel sizes."""
    if c.world_size is not None and c.world_size % c.model_parallel_size:
        return (
            f"{c.world_size} GPUs cannot hold whole copies of a model that takes "
            f"{c.model_parallel_size} (tensor x pipeline x context)"
        )
    return None


def _fitting_expert_size(c: Any) -> Mapping[str, object] | None:
    rest = c.expert_model_size // c.expert_model_parallel_size
    if c.world_size % rest or not c.num_moe_experts:
        return None
    sizes = range(c.expert_model_parallel_size, 0, -1)
    room = c.world_size // rest
    fitting = next(s for s in sizes if room % s == 0 and c.num_moe_experts % s == 0)
    return {"expert_model_parallel_size": fitting}


def _fitting_expert_tensor_size(c: Any) -> Mapping[str, object] | None:
    rest = c.expert_model_size // c.effective_expert_tensor_parallel_size
    if c.world_size % rest:
        return None
    room = c.world_size // rest
    size = largest_divisor(room, c.effective_expert_tensor_parallel_size)
    return {"expert_tensor_parallel_size": size}


@rule(
    "P11",
    GROUPS,
    fix=[_fitting_expert_size, _fitting_expert_tensor_size, {"expert_tensor_parallel_size": 1}],
)
def world_divides_by_expert_model_size(c: Any) -> str | None:
    """world_size is not a multiple of expert tensor x expert x pipeline parallel sizes.

    A model without experts breaks it with P10, which says it in the model's own terms.
    """
    if not c.num_moe_experts and world_divides_by_model_size(c) is not None:
        return None
    if c.world_size is not None and c.world_size % c.expert_model_size:
        return (
            f"{c.world_size} GPUs cannot hold whole copies of the experts, which take "
            f"{c.expert_model_size} (expert tensor x expert x pipeline)"
        )
    return None


@rule("P12", GROUPS, fix={"virtual_pipeline_model_parallel_size": None})
def virtual_pipeline_needs_pipeline(c: Any) -> str | None:
    """virtual_pipeline_model_parallel_size is set (even to 1) with one pipeline stage."""
    vpp = c.effective_virtual_pipeline_size
    if vpp is not None and c.pipeline_model_parallel_size == 1:
        return "interleaving needs more than one pipeline stage"
    return None


@rule("P13", GROUPS, fix={"order": "tp-cp-ep-dp-pp"})
def rank_order_ends_in_pipeline(c: Any) -> str | None:
    """The rank order does not end in pp and dense and expert data-parallel sizes differ."""
    if c.order.endswith("pp") or c.pipeline_model_parallel_size == 1:
        return None
    dense, expert = c.data_parallel_size, c.expert_data_parallel_size
    if None not in (dense, expert) and dense != expert:
        return (
            f"order {c.order} does not end in pp, so the data-parallel sizes of dense ({dense}) "
            f"and expert ({expert}) layers must be equal"
        )
    return None


@rule("P14", GROUPS, fix={"num_distributed_optimizer_instances": 1})
def optimizer_instances_divide_data_ranks(c: Any) -> str | None:
    """Data x context parallel size is not a multiple of the optimizer instances."""
    size, count = c.data_parallel_size, c.num_distributed_optimizer_instances
    if size is not None and size * c.context_parallel_size % count:
        return f"{size * c.context_parallel_size} ranks cannot form {count} optimizer instances"
    return None


@rule("P15", GROUPS, fix={"num_distributed_optimizer_instances": 1})
def optimizer_instances_divide_expert_data_ranks(c: Any) -> str | None:
    """The expert data-parallel size is not a multiple of the optimizer instances."""
    size, count = c.expert_data_parallel_size, c.num_distributed_optimizer_instances
    if size is not None and size % count:
        return f"{size} expert data-parallel ranks cannot form {count} optimizer instances"
    return None


@rule("P27", GROUPS, fix={"num_distributed_optimizer_instances": 1}, since="0.19.2")
def weight_shards_need_one_optimizer_instance(c: Any) -> str | None:
    """More weight shards than tensor ranks with several optimizer instances."""
    remat = c.weight_remat_size > 1 or c.expert_weight_remat_size > 1
    if remat and c.num_distributed_optimizer_instances > 1:
        return "weight shards beyond tensor parallelism work with one optimizer instance only"
    return None


@rule("P16", GROUPS, fix={"hierarchical_context_parallel_sizes": None})
def hierarchical_context_sizes_multiply_up(c: Any) -> str | None:
    """hierarchical_context_parallel_sizes do not multiply to context_parallel_size."""
    sizes = c.hierarchical_context_parallel_sizes
    if not sizes:
        return None
    product = 1
    for size in sizes:
        product *= size
    if product != c.context_parallel_size:
        return f"hierarchical context sizes {list(sizes)} multiply to {product}, not to " + str(
            c.context_parallel_size
        )
    return None


@rule("P18", TC, fix={"cp_comm_type": "p2p"})
def context_communication_list_covers_layers(c: Any) -> str | None:
    """cp_comm_type is a list whose length is not num_layers, with context parallelism on."""
    kinds = c.cp_comm_type
    if c.context_parallel_size <= 1 or not isinstance(kinds, (list, tuple)):
        return None
    if len(kinds) != c.num_layers:
        return f"cp_comm_type lists {len(kinds)} layers, the model has {c.num_layers}"
    return None


def _shard_problem(shards: int | None, parallel: int) -> str | None:
    if shards is None:
        return None
    if shards < parallel or shards % parallel:
        return f"{shards} weight shards must be a multiple of {parallel} tensor-parallel ranks"
    return None


@rule("P21", MPC, fix={"tensor_parallel_num_weight_shards": None}, since="0.19.2")
def weight_shards_divide_by_tensor_ranks(c: Any) -> str | None:
    """tensor_parallel_num_weight_shards is no multiple of tensor_model_parallel_size."""
    return _shard_problem(c.tensor_parallel_num_weight_shards, c.tensor_model_parallel_size)


@rule("P21", MPC, fix={"expert_tensor_parallel_num_weight_shards": None}, since="0.19.2")
def expert_weight_shards_divide_by_tensor_ranks(c: Any) -> str | None:
    """expert_tensor_parallel_num_weight_shards is no multiple of the expert TP size."""
    return _shard_problem(
        c.expert_tensor_parallel_num_weight_shards, c.effective_expert_tensor_parallel_size
    )


def _whole_batch(c: Any) -> Mapping[str, object]:
    unit = c.micro_batch_size * c.batch_ranks
    return {"global_batch_size": max(1, round(c.global_batch_size / unit)) * unit}


def _smaller_micro_batch(c: Any) -> Mapping[str, object] | None:
    if c.global_batch_size % c.batch_ranks:
        return None
    return {
        "micro_batch_size": largest_divisor(
            c.global_batch_size // c.batch_ranks, c.micro_batch_size
        )
    }


@rule("P22", BATCH, fix=[_smaller_micro_batch, _whole_batch])
def global_batch_divides_over_data_ranks(c: Any) -> str | None:
    """global_batch_size is not a multiple of micro_batch_size x data-parallel size."""
    if None in (c.global_batch_size, c.micro_batch_size, c.batch_ranks):
        return None
    if c.decrease_batch_size_if_needed:
        return None
    if c.global_batch_size % (c.micro_batch_size * c.batch_ranks):
        return (
            f"global batch {c.global_batch_size} is no multiple of micro-batch "
            f"{c.micro_batch_size} x {c.batch_ranks} data-parallel ranks"
        )
    return None


@rule("P23", BATCH, fix=[_whole_batch])
def global_batch_holds_one_micro_batch(c: Any) -> str | None:
    """decrease_batch_size_if_needed rounds the global batch down to nothing."""
    if c.decrease_batch_size_if_needed and c.num_microbatches == 0:
        return (
            f"global batch {c.global_batch_size} is smaller than one micro-batch on each of "
            f"{c.batch_ranks} data-parallel ranks"
        )
    return None


def _undivided(number: int | None, size: int, what: str) -> str | None:
    if number is not None and number % size:
        return f"{what} {number} cannot be split over {size} ranks"
    return None


@derived
def effective_ffn_hidden_size(c: Any) -> int:
    """Four times the hidden size unless set."""
    size = c.ffn_hidden_size
    return int(4 * c.hidden_size if size is None else size)


@derived
def has_dense_layers(c: Any) -> bool:
    """Whether any layer has an ordinary feed-forward block."""
    if not c.num_moe_experts:
        return True
    freq = c.moe_layer_freq
    return 0 in freq if isinstance(freq, (list, tuple)) else freq > 1


@rule(
    "P26",
    DIVIDE,
    fix=[lambda c: _fewer_tensor_ranks(c.effective_ffn_hidden_size, c)],
)
def ffn_divides_over_tensor_ranks(c: Any) -> str | None:
    """ffn_hidden_size of dense layers is not a multiple of tensor_model_parallel_size."""
    if not c.has_dense_layers:
        return None
    return _undivided(c.effective_ffn_hidden_size, c.tensor_model_parallel_size, "ffn_hidden_size")


@rule("P26", DIVIDE, fix=[{"expert_tensor_parallel_size": 1}])
def expert_ffn_divides_over_expert_tensor_ranks(c: Any) -> str | None:
    """moe_ffn_hidden_size is not a multiple of expert_tensor_parallel_size."""
    if not c.num_moe_experts:
        return None
    size = c.effective_moe_ffn_hidden_size
    return _undivided(size, c.effective_expert_tensor_parallel_size, "moe_ffn_hidden_size")


@rule("P26", DIVIDE, fix=[{"sequence_parallel": False}])
def sequence_divides_over_ranks(c: Any) -> str | None:
    """With sequence_parallel, the sequence of a context rank is no multiple of the TP size."""
    if c.sequence_parallel and c.seq_length is not None:
        length = c.seq_length // c.context_parallel_size
        return _undivided(length, c.tensor_model_parallel_size, "a sequence part of length")
    return None
