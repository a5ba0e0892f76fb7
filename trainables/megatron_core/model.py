"""One rank's model chunks and optimizer, built from a `BuildPlan`.

Nothing here starts a process, measures or reports; it only needs Megatron-Core's parallel state.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, is_dataclass, replace
from typing import TYPE_CHECKING, Any

from trainables.errors import TrialSpecError
from trainables.megatron_core.hybrid import build_hybrid_chunk, is_hybrid
from trainables.megatron_core.weights import initialize_weights
from trainables.megatron_core.wrapping import wrapped_chunk

if TYPE_CHECKING:
    import torch
    from megatron.core.models.gpt import GPTModel
    from megatron.core.optimizer import MegatronOptimizer

    from trainables.megatron_core.plan import BuildPlan


@dataclass(frozen=True, slots=True)
class TrainingState:
    """What a training step works on: wrapped model chunks, their configuration, the optimizer."""

    chunks: list[torch.nn.Module]
    config: Any  # TransformerConfig
    optimizer: MegatronOptimizer


def build_training_state(plan: BuildPlan, *, initialize: bool = True) -> TrainingState:
    """Build the real model, distributed data parallel wrapper and optimizer of this rank.

    `initialize=False` leaves Megatron's own initial values, for runs that compute no losses.
    """
    from megatron.core.distributed import DistributedDataParallelConfig, finalize_model_grads
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.transformer.module import Float16Module

    config = plan.transformer_config()
    ddp_config = DistributedDataParallelConfig(**plan.ddp)
    chunks: list[torch.nn.Module] = []
    for index in range(plan.layout.num_model_chunks):
        model = build_model_chunk(plan, config, index)
        if initialize:
            initialize_weights(model, plan.seed)
        wrapped = Float16Module(config, model) if config.bf16 or config.fp16 else model
        chunks.append(
            wrapped_chunk(config, ddp_config, wrapped, first=index == 0, fsdp2=plan.torch_fsdp2)
        )
    optimizer = get_megatron_optimizer(
        OptimizerConfig(**plan.optimizer), chunks, use_gloo_process_groups=False
    )
    config.finalize_model_grads_func = finalize_model_grads
    config.grad_scale_func = optimizer.scale_loss
    _set_overlap_hooks(config, ddp_config, chunks)
    return TrainingState(chunks, config, optimizer)


def build_model_chunk(plan: BuildPlan, config: Any, index: int) -> GPTModel:
    """The bare model, most often a `GPTModel`, of one virtual pipeline stage of this rank."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel

    stage = index if plan.layout.num_model_chunks > 1 else None
    if is_hybrid(plan):
        return _on_device(plan, _hybrid_chunk(plan, config, stage))
    model = GPTModel(
        config=config,
        transformer_layer_spec=block_spec(plan, config, stage),
        vocab_size=plan.vocab_size,
        max_sequence_length=plan.max_sequence_length,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        mtp_block_spec=_mtp_spec(plan, config, stage),
        vp_stage=stage,
        **plan.model,
    )
    if not plan.use_transformer_engine:
        _unmark_expert_biases(model)
    return _on_device(plan, model)


def _hybrid_chunk(plan: BuildPlan, config: Any, stage: int | None) -> Any:
    from megatron.core import parallel_state

    return build_hybrid_chunk(
        plan,
        config,
        stage=stage,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
    )


def _on_device(plan: BuildPlan, model: Any) -> Any:
    if plan.device == "cuda":
        import torch

        model.cuda(torch.cuda.current_device())
    return model


def block_spec(plan: BuildPlan, config: Any, stage: int | None) -> Any:
    """The layer specification of one pipeline stage, mixed dense and expert layers included.

    Raises TrialSpecError for linear attention without Transformer Engine.
    """
    if getattr(config, "experimental_attention_variant", None) is not None:
        return _variant_spec(plan, config, stage)
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    spec = get_gpt_decoder_block_spec(
        config,
        use_transformer_engine=plan.use_transformer_engine,
        normalization=config.normalization,
        qk_l2_norm=config.qk_l2_norm,
        vp_stage=stage,
    )
    return spec if plan.use_transformer_engine else with_memory_lean_layers(spec)


def _variant_spec(plan: BuildPlan, config: Any, stage: int | None) -> Any:
    """The layers of one pipeline stage of a model with linear attention."""
    if not plan.use_transformer_engine:
        raise TrialSpecError(
            "experimental_attention_variant needs Transformer Engine and the kernels of fla, and "
            "so a CUDA device; unset it on the CPU"
        )
    from megatron.core.models.gpt import experimental_attention_variant_module_specs as variants

    make = variants.get_transformer_block_with_experimental_attention_variant_spec
    return make(config, vp_stage=stage)


def _unmark_expert_biases(model: GPTModel) -> None:
    """Keep the gradients of different experts' biases apart.

    `RowParallelLinear` marks its bias `sequence_parallel`, also in an expert, and
    `finalize_model_grads` then adds it over tensor parallel ranks, which hold other experts.
    Transformer Engine's expert layers leave the mark out.
    """
    for name, parameter in model.named_parameters():
        if ".mlp.experts." in name and getattr(parameter, "sequence_parallel", False):
            parameter.sequence_parallel = False


def _mtp_spec(plan: BuildPlan, config: Any, stage: int | None) -> Any:
    if not config.mtp_num_layers:
        return None
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_decoder_layer_specs,
        get_gpt_mtp_block_spec,
    )

    layers = (config, plan.use_transformer_engine, config.normalization, config.qk_l2_norm)
    decoder = get_gpt_decoder_block_spec(*layers, stage)
    if not decoder.layer_specs:  # a stage without decoder layers, as Megatron-LM's model builder
        decoder = get_gpt_decoder_layer_specs(*layers)[-1]
    spec = get_gpt_mtp_block_spec(config, decoder, plan.use_transformer_engine, vp_stage=stage)
    return spec if plan.use_transformer_engine else with_memory_lean_layers(spec)


def with_memory_lean_layers(spec: Any) -> Any:  # any part of a specification
    """`spec` with the local norms and attention replaced by ones that keep what TE keeps."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    from trainables.megatron_core.layers import DuplicatedLinear, FusedAttention, FusedNorm

    return _substitute(
        spec,
        classes={
            WrappedTorchNorm: FusedNorm,
            gpt_layer_specs.LNImpl: FusedNorm,
            DotProductAttention: FusedAttention,
        },
        named={
            "linear_q_down_proj": DuplicatedLinear,
            "linear_kv_down_proj": DuplicatedLinear,
        },
    )


def _substitute(part: Any, classes: dict[type, type], named: dict[str, type]) -> Any:
    """`part` with classes replaced wherever they stand, and by the name of their field."""
    if isinstance(part, type):
        return classes.get(part, part)
    if isinstance(part, (list, tuple)):
        return type(part)(_substitute(item, classes, named) for item in part)
    if is_dataclass(part):
        values = {
            f.name: named.get(f.name) or _substitute(getattr(part, f.name), classes, named)
            for f in fields(part)
        }
        return replace(part, **values)  # type: ignore[type-var]
    return part


def _set_overlap_hooks(config: Any, ddp_config: Any, chunks: list[Any]) -> None:
    """Give the schedule the hooks that overlapping needs, as Megatron-LM's training loop does."""

    def per_chunk(functions: list[Any]) -> Any:
        return functions[0] if len(functions) == 1 else functions

    if ddp_config.overlap_grad_reduce:
        config.no_sync_func = per_chunk([chunk.no_sync for chunk in chunks])
        if len(chunks) > 1:
            config.grad_sync_func = per_chunk([chunk.start_grad_sync for chunk in chunks])
    if ddp_config.overlap_param_gather and ddp_config.align_param_gather:
        config.param_sync_func = per_chunk([chunk.start_param_sync for chunk in chunks])
