"""The checks of Megatron-Core a candidate passes through, each run by the package's own code.

A stage raises what the package raises. ``sanity`` is the one check no package makes.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from constraint_oracle import groups, runtime_stage, values
from constraint_oracle.candidate import RUN_KEYS, Candidate, field_names

HANG_AFTER_CHUNKS = 4096


class _PastTheChecksError(Exception):
    """Raised where checks end and work begins."""


def _classes() -> tuple[type, type]:
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    return DistributedDataParallelConfig, OptimizerConfig


def transformer_config(candidate: Candidate) -> None:
    """Constructs the real TransformerConfig (MLATransformerConfig with latent attention)."""
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    cls = (
        MLATransformerConfig
        if candidate.config.get("multi_latent_attention")
        else (TransformerConfig)
    )
    ddp_class, optimizer_class = _classes()
    known = field_names(cls)
    elsewhere = (field_names(ddp_class) | field_names(optimizer_class) | RUN_KEYS) - known
    arguments = {
        key: values.to_python(key, value)
        for key, value in candidate.config.items()
        if key not in elsewhere and key not in ("num_distributed_optimizer_instances",)
    }
    candidate.model = cls(**arguments)


def _build(cls: type, config: Mapping[str, Any]) -> Any:
    names = field_names(cls)
    given = {k: values.to_python(k, v) for k, v in config.items() if k in names}
    return cls(**given)


def ddp_config(candidate: Candidate) -> None:
    candidate.ddp = _build(_classes()[0], candidate.config)


def optimizer_config(candidate: Candidate) -> None:
    candidate.optimizer = _build(_classes()[1], candidate.config)


def _stage_layers(candidate: Candidate) -> Iterator[tuple[int, int | None, int]]:
    """(pipeline rank, virtual stage, layers) of every model chunk, as the package splits them."""
    from megatron.core.transformer.transformer_block import get_num_layers_to_build
    from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

    model = candidate.model
    stages = model.pipeline_model_parallel_size
    virtual = model.virtual_pipeline_model_parallel_size
    for rank in range(stages):
        chunks = [None] if virtual is None else range(virtual)
        for chunk in chunks:
            with _pipeline_rank(rank, virtual):
                count = get_num_layers_to_build(model, vp_stage=chunk, pp_rank=rank)
                get_transformer_layer_offset(model, vp_stage=chunk, pp_rank=rank)
            yield rank, chunk, count


@contextmanager
def _pipeline_rank(rank: int, virtual: int | None) -> Iterator[None]:
    """A pipeline layout asks parallel_state for rank and chunks instead of taking them."""
    from megatron.core import parallel_state

    answers = {
        "get_pipeline_model_parallel_rank": lambda: rank,
        "get_virtual_pipeline_model_parallel_world_size": lambda: virtual,
    }
    before = {name: getattr(parallel_state, name) for name in answers}
    for name, answer in answers.items():
        setattr(parallel_state, name, answer)
    try:
        yield
    finally:
        for name, function in before.items():
            setattr(parallel_state, name, function)


def layer_split(candidate: Candidate) -> None:
    candidate.layers = list(_stage_layers(candidate))


def sanity(candidate: Candidate) -> None:
    """No package checks that the stages together hold the model's layers."""
    counts = [count for _, _, count in candidate.layers]
    if any(count < 0 for count in counts):
        raise ValueError(f"own check: negative layer count for a pipeline stage: {counts}")
    if sum(counts) != candidate.model.num_layers:
        raise ValueError(
            f"own check: layers built {sum(counts)} != num_layers {candidate.model.num_layers}"
        )


def recompute_loop(candidate: Candidate) -> None:
    """Runs the block's checkpointed forward over plain layers, the checkpoint a plain call."""
    model = candidate.model
    if model.recompute_granularity != "full":
        return
    for count in sorted({count for _, _, count in candidate.layers}):
        _run_checkpointed_forward(model, count)


class _PlainLayer:
    layer_number = 1

    def __call__(self, hidden_states: Any, **_: Any) -> tuple[Any, None]:
        return hidden_states, None


def _run_checkpointed_forward(model: Any, num_layers: int) -> None:
    import torch

    calls = 0

    def plain(function: Callable[..., Any], *arguments: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls > HANG_AFTER_CHUNKS:
            raise TimeoutError(
                f"recompute_num_layers={model.recompute_num_layers!r} with recompute_method="
                f"{model.recompute_method!r}: the loop over layers never ends"
            )
        tensors = [one for one in arguments if not callable(one)]
        return function(*tensors[1:])

    layers = [_PlainLayer() for _ in range(num_layers)]
    config = types.SimpleNamespace(
        **{name: getattr(model, name) for name in field_names(type(model))}
        | {"fp8": None, "fp4": None}
    )
    block = types.SimpleNamespace(
        config=config,
        layers=layers,
        num_layers_per_pipeline_rank=num_layers,
        pg_collection=None,
        _get_layer=lambda index: layers[index],
        vp_stage=None,
    )
    hidden = torch.zeros(1, requires_grad=True)
    with _checkpoint_replaced(plain):
        _checkpointed_forward()(block, hidden, None, None, None, None, None, None, False)


def _checkpointed_forward() -> Callable[..., Any]:
    """A method of the block up to 0.17, a module of its own from 0.18."""
    from megatron.core.transformer.transformer_block import TransformerBlock

    if hasattr(TransformerBlock, "_checkpointed_forward"):
        return TransformerBlock._checkpointed_forward
    from megatron.core import recompute

    return recompute.checkpointed_forward


@contextmanager
def _checkpoint_replaced(plain: Callable[..., Any]) -> Iterator[None]:
    from megatron.core import tensor_parallel

    before = tensor_parallel.checkpoint
    tensor_parallel.checkpoint = plain
    try:
        yield
    finally:
        tensor_parallel.checkpoint = before


def parallel_state(candidate: Candidate) -> None:
    """Builds every process group through the package's own rank arithmetic."""
    from megatron.core import parallel_state as state

    model = candidate.model
    remat = {}
    if hasattr(model, "gtp_weight_remat_size"):
        remat["gtp_remat_size"] = model.gtp_weight_remat_size
        remat["expert_gtp_remat_size"] = model.expert_gtp_weight_remat_size
    state.initialize_model_parallel(
        tensor_model_parallel_size=model.tensor_model_parallel_size,
        pipeline_model_parallel_size=model.pipeline_model_parallel_size,
        virtual_pipeline_model_parallel_size=model.virtual_pipeline_model_parallel_size,
        context_parallel_size=model.context_parallel_size,
        hierarchical_context_parallel_sizes=model.hierarchical_context_parallel_sizes,
        expert_model_parallel_size=model.expert_model_parallel_size,
        expert_tensor_parallel_size=model.expert_tensor_parallel_size,
        num_distributed_optimizer_instances=candidate.get("num_distributed_optimizer_instances", 1),
        pipeline_model_parallel_comm_backend=model.pipeline_model_parallel_comm_backend,
        order=candidate.get("order", "tp-cp-ep-dp-pp"),
        create_gloo_process_groups=False,
        **remat,
    )


def microbatches(candidate: Candidate) -> None:
    from megatron.core.num_microbatches_calculator import ConstantNumMicroBatchesCalculator

    model = candidate.model
    # Ranks along the weight-shard axis of 0.19 hold different data: the batch is split over them
    # too (megatron/core/parallel_state.py, full data-parallel groups).
    shards = (
        model.tensor_model_parallel_size
        * model.pipeline_model_parallel_size
        * model.context_parallel_size
    )
    calculator = ConstantNumMicroBatchesCalculator(
        candidate.get("global_batch_size"),
        candidate.get("micro_batch_size", 1),
        candidate.get("world_size") // shards,
        candidate.get("decrease_batch_size_if_needed", False),
        rank=1,
    )
    candidate.num_microbatches = calculator.get()


def model_parts(candidate: Candidate) -> None:
    """The divisions that the layers make when they are built."""
    from megatron.core.utils import divide

    model = candidate.model
    tensor = model.tensor_model_parallel_size
    if model.num_moe_experts is None or _has_dense_layers(model):
        divide(model.ffn_hidden_size, tensor)
    if model.num_moe_experts is not None:
        divide(model.moe_ffn_hidden_size, model.expert_tensor_parallel_size)
    if model.sequence_parallel and candidate.get("seq_length"):
        divide(candidate.get("seq_length") // model.context_parallel_size, tensor)


def attention_parts(candidate: Candidate) -> None:
    """Megatron-Core's own attention, which a job with transformer_impl local is built of."""
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.enums import AttnMaskType

    if candidate.model.transformer_impl != "local":
        return
    with _building_stops():
        DotProductAttention(
            candidate.model,
            layer_number=1,
            attn_mask_type=AttnMaskType.causal,
            attention_type="self",
            pg_collection=_Unbuilt(),
        )


class _Unbuilt:
    """Stands for what a layer is built of; the first look at it ends the building."""

    def __getattr__(self, name: str) -> Any:
        raise _PastTheChecksError


@contextmanager
def _building_stops() -> Iterator[None]:
    with contextlib.suppress(_PastTheChecksError):
        yield


def _has_dense_layers(model: Any) -> bool:
    frequency = model.moe_layer_freq
    if isinstance(frequency, int):
        return frequency > 1 and model.num_layers > 1
    return 0 in frequency


def moe_parts(candidate: Candidate) -> None:
    """What MoELayer asserts when it is built and at its first training forward."""
    from megatron.core.transformer.moe.moe_layer import BaseMoELayer, MoELayer

    model = candidate.model
    if model.num_moe_experts is None:
        return
    if model.moe_grouped_gemm and model.transformer_impl == "transformer_engine":
        _grouped_experts(model, pg_collection=_expert_groups(model))
    layer = MoELayer.__new__(MoELayer)
    BaseMoELayer.__init__(layer, model, layer_number=1, pg_collection=_expert_groups(model))
    layer.train()
    try:
        MoELayer.forward(layer, None)
    except ValueError:
        raise
    except Exception:  # past its checks the forward needs the parts that were not built
        return


def _grouped_experts(model: Any, pg_collection: Any) -> None:
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    local = max(1, model.num_moe_experts // model.expert_model_parallel_size)
    with _building_stops():
        TEGroupedMLP(local, model, _Unbuilt(), pg_collection=pg_collection)


def _expert_groups(model: Any) -> types.SimpleNamespace:
    tensor = groups.Group(range(model.tensor_model_parallel_size))
    expert = groups.Group(range(model.expert_model_parallel_size))
    expert_tensor = groups.Group(range(model.expert_tensor_parallel_size))
    both = groups.Group(range(model.expert_tensor_parallel_size * model.expert_model_parallel_size))
    return types.SimpleNamespace(
        tp=tensor, ep=expert, expt_tp=expert_tensor, tp_ep=both, cp=groups.Group([0])
    )


def schedule(candidate: Candidate) -> None:
    """Runs the prologue of the pipeline schedule the package chooses, up to its first work."""
    import torch
    from megatron.core.pipeline_parallel import schedules
    from megatron.core.process_groups_config import ProcessGroupCollection

    model = candidate.model
    stages = model.pipeline_model_parallel_size
    if stages == 1:
        return
    virtual = model.virtual_pipeline_model_parallel_size
    chunk = torch.nn.Module()
    chunk.config = model
    run = schedules.forward_backward_pipelining_without_interleaving
    chunks: Any = chunk
    if virtual is not None:
        run = schedules.forward_backward_pipelining_with_interleaving
        chunks = [chunk] * virtual
    world = ProcessGroupCollection()
    for name, group in {
        "tp": groups.Group(range(model.tensor_model_parallel_size)),
        "cp": groups.Group(range(model.context_parallel_size)),
        "embd": None,
        "pos_embd": None,
        "pp": groups.Group(range(stages)),
        "dp_cp": groups.Group([0]),
    }.items():
        setattr(world, name, group)
    communicator = types.SimpleNamespace(
        config=model, pp_group=world.pp, total_stages=stages, current_stage=0
    )
    with _stopped_at_first_work(schedules):
        run(
            forward_step_func=None,
            data_iterator=[None] * len(chunks) if virtual is not None else None,
            model=chunks,
            num_microbatches=candidate.num_microbatches,
            seq_length=candidate.get("seq_length", 1),
            micro_batch_size=candidate.get("micro_batch_size", 1),
            p2p_communicator=communicator,
            pg_collection=world,
        )


@contextmanager
def _stopped_at_first_work(schedules: Any) -> Iterator[None]:
    """``get_pp_rank_microbatches`` is called right after the last check of the interleaved
    schedule, ``get_tensor_shapes`` after that of the plain one."""
    import torch

    def stop(*_: Any, **__: Any) -> Any:
        raise _PastTheChecksError

    names = ("get_pp_rank_microbatches", "get_tensor_shapes", "get_model_type", "paged_stash_reset")
    before = {name: getattr(schedules, name, None) for name in names}
    zeros = torch.zeros
    schedules.get_pp_rank_microbatches = stop
    schedules.get_tensor_shapes = stop
    schedules.get_model_type = lambda model: None
    schedules.paged_stash_reset = lambda *_, **__: None
    torch.zeros = lambda *a, **k: zeros(*a, **{n: v for n, v in k.items() if n != "device"})
    try:
        yield
    except _PastTheChecksError:
        return
    finally:
        torch.zeros = zeros
        for name, function in before.items():
            setattr(schedules, name, function)


STAGES: tuple[Callable[[Candidate], None], ...] = (
    transformer_config,
    layer_split,
    parallel_state,
    recompute_loop,
    microbatches,
    schedule,
    ddp_config,
    optimizer_config,
    sanity,
    model_parts,
    attention_parts,
    moe_parts,
    runtime_stage.runtime_modelled,
)
