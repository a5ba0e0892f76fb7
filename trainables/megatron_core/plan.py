"""From a flat trial to the arguments of Megatron-Core's own classes.

A trial names everything by Megatron-Core field names. This module sorts the fields into the
classes that know them and adds what a training script would: precision, fusions, communication
defaults of the device. It creates no process group and no tensor, so it can be used, and tested,
without any.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from trainables.errors import TrialSpecError
from trainables.megatron_core.graphs import translate_cuda_graph_fields
from trainables.megatron_core.hybrid import PATTERN
from trainables.megatron_core.layout import Layout
from trainables.megatron_core.wrapping import TORCH_FSDP2, implied_fields
from tuner.measurement import TrialSpec

_MODEL_ARGUMENTS = (
    "position_embedding_type",
    "share_embeddings_and_output_weights",
    "rotary_base",
    "rotary_percent",
    "rope_scaling",
    "rope_scaling_factor",
    "fp16_lm_cross_entropy",
    "seq_len_interpolation_factor",
    "scatter_embedding_sequence_parallel",
    PATTERN,
)
"""Arguments of `GPTModel.__init__`, or of the hybrid model's, that a trial may set."""

_RUN_FIELDS = (
    "micro_batch_size",
    "env",
    "name",
    "vocab_size",
    "make_vocab_size_divisible_by",
    "max_position_embeddings",
    "cuda_graph_impl",
    "cuda_graph_modules",
    "cuda_graph_scope",
    TORCH_FSDP2,
)
"""Fields this trainable reads itself instead of handing them to a class."""

_CONFIG_ATTRIBUTE_PREFIX = "yarn_"
"""`GPTModel` reads its YaRN settings as plain attributes of the configuration."""

_YARN_OPTIONAL = frozenset(("yarn_mscale", "yarn_mscale_all_dim"))
"""Of these, the ones that models may leave open."""

_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16", "fp8": "uint8"}


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """Everything needed to build one rank's model, optimizer and schedule.

    `transformer`, `ddp` and `optimizer` are keyword arguments of the (MLA)TransformerConfig, the
    DistributedDataParallelConfig and the OptimizerConfig; `model` those of `GPTModel`;
    `attributes` is set on the transformer configuration after it is made. `vocab_size` is padded
    so that the tensor parallel size divides it.
    """

    layout: Layout
    transformer: Mapping[str, Any]
    attributes: Mapping[str, Any]
    model: Mapping[str, Any]
    ddp: Mapping[str, Any]
    optimizer: Mapping[str, Any]
    vocab_size: int
    max_sequence_length: int
    seq_length: int
    device: str
    precision: str
    seed: int
    use_transformer_engine: bool
    torch_fsdp2: bool = False

    def transformer_config(self) -> Any:  # a class of an untyped package
        """A fresh `TransformerConfig` or, for multi-latent attention, `MLATransformerConfig`."""
        config = _transformer_class(self.transformer)(**self.transformer)
        for name, value in self.attributes.items():
            setattr(config, name, value)
        return config


def build_plan(spec: TrialSpec, use_transformer_engine: bool) -> BuildPlan:
    """Sort the fields of `spec` into the classes that know them.

    Raises `TrialSpecError` for an unknown field (naming the nearest known one) and for an
    impossible layout. Values Megatron-Core refuses raise its own error when the configuration
    is made.
    """
    fields = {**spec.model, **spec.config}
    fields |= implied_fields(fields)
    layout = Layout.from_config(fields, spec.world_size, spec.global_batch_size)
    if spec.precision not in ("bf16", "fp16", "fp32"):
        raise TrialSpecError(
            f"precision={spec.precision!r} is unknown; use 'bf16', 'fp16' or 'fp32'"
        )
    if spec.device == "cpu" and spec.precision == "fp16":
        raise TrialSpecError("precision='fp16' needs a CUDA device; use 'bf16' on the CPU")
    if spec.device == "cpu" and layout.context_parallel_size > 1:
        raise TrialSpecError(
            "context_parallel_size > 1 needs the attention of Transformer Engine and so a CUDA "
            "device; set it to 1 on the CPU"
        )
    sorted_fields = _sort_fields(fields)
    transformer = (
        _transformer_defaults(spec, fields, layout, use_transformer_engine)
        | sorted_fields.transformer
        | translate_cuda_graph_fields(fields, _field_names(_transformer_class(fields)))
        | _transformer_sizes(layout)
    )
    ddp = {"grad_reduce_in_fp32": True} | sorted_fields.ddp
    return BuildPlan(
        layout=layout,
        transformer=transformer,
        attributes=sorted_fields.attributes,
        model=sorted_fields.model,
        ddp=ddp,
        optimizer=_optimizer_defaults(spec) | sorted_fields.optimizer,
        vocab_size=_padded_vocab_size(fields, layout.tensor_model_parallel_size),
        max_sequence_length=max(fields.get("max_position_embeddings") or 0, spec.seq_length),
        seq_length=spec.seq_length,
        device=spec.device,
        precision=spec.precision,
        seed=spec.seed,
        use_transformer_engine=use_transformer_engine,
        torch_fsdp2=bool(fields.get(TORCH_FSDP2)),
    )


@dataclass(slots=True)
class _SortedFields:
    transformer: dict[str, Any]
    attributes: dict[str, Any]
    model: dict[str, Any]
    ddp: dict[str, Any]
    optimizer: dict[str, Any]


def _sort_fields(fields: Mapping[str, Any]) -> _SortedFields:
    """Give every field to each class that declares it."""
    from megatron.core.distributed import DistributedDataParallelConfig
    from megatron.core.optimizer import OptimizerConfig

    result = _SortedFields({}, {}, {}, {}, {})
    owners: list[tuple[dict[str, Any], frozenset[str]]] = [
        (result.transformer, _field_names(_transformer_class(fields))),
        (result.ddp, _field_names(DistributedDataParallelConfig)),
        (result.optimizer, _field_names(OptimizerConfig)),
        (result.model, frozenset(_MODEL_ARGUMENTS)),
    ]
    known = set(_RUN_FIELDS).union(*(names for _, names in owners))
    for name, value in fields.items():
        if name in _RUN_FIELDS:
            continue
        if name not in known:
            if name.startswith(_CONFIG_ATTRIBUTE_PREFIX):
                result.attributes[name] = value
                continue
            raise TrialSpecError(_unknown_field(name, known))
        for values, names in owners:
            if name in names:
                values[name] = _python_value(name, value)
    if fields.get("position_embedding_type") == "yarn":
        for name in _YARN_OPTIONAL - known:
            result.attributes.setdefault(name, None)
    return result


def _unknown_field(name: str, known: set[str]) -> str:
    import megatron.core

    near = difflib.get_close_matches(name, sorted(known), n=1)
    hint = f"; did you mean {near[0]!r}?" if near else "; remove it"
    return (
        f"field {name!r} is none of Megatron-Core {megatron.core.__version__}'s transformer, "
        f"optimizer, distributed data parallel or GPTModel settings{hint}"
    )


def _field_names(config_class: type) -> frozenset[str]:
    import dataclasses

    return frozenset(field.name for field in dataclasses.fields(config_class) if field.init)


def _transformer_class(fields: Mapping[str, Any]) -> type:
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.transformer_config import MLATransformerConfig

    latent: type = MLATransformerConfig
    return latent if fields.get("multi_latent_attention") else TransformerConfig


def _python_value(name: str, value: object) -> object:
    """Turn a JSON value into what the field takes: functions, dtypes, enums and tuples."""
    if name == "activation_func" and isinstance(value, str):
        return _activation_function(value)
    if name.endswith("_dtype") and isinstance(value, str) and name != "moe_router_dtype":
        return _torch_dtype(name, value)
    if name == "attention_backend" and isinstance(value, str):
        from megatron.core.transformer.enums import AttnBackend

        return AttnBackend[value]
    if name == "window_size" and isinstance(value, list):
        return tuple(value)
    return list(value) if isinstance(value, tuple) else value


def _activation_function(name: str) -> Callable[..., Any]:
    import torch.nn.functional as functional
    from megatron.core.activations import squared_relu
    from megatron.core.fusions.fused_bias_geglu import quick_gelu

    functions: dict[str, Callable[..., Any]] = {
        "gelu": functional.gelu,
        "silu": functional.silu,
        "relu": functional.relu,
        "squared_relu": squared_relu,
        "quick_gelu": quick_gelu,
    }
    if name not in functions:
        raise TrialSpecError(f"activation_func={name!r} is unknown; use one of {list(functions)}")
    return functions[name]


def _torch_dtype(field: str, name: str) -> object:
    import torch

    dtype = getattr(torch, _DTYPES.get(name, name.removeprefix("torch.")), None)
    if not isinstance(dtype, torch.dtype):
        raise TrialSpecError(f"{field}={name!r} is no dtype; use one of {list(_DTYPES)}")
    return dtype


def _precision_fields(precision: str) -> dict[str, Any]:
    import torch

    dtypes = {"bf16": torch.bfloat16, "fp16": torch.float16}
    return {
        "bf16": precision == "bf16",
        "fp16": precision == "fp16",
        "params_dtype": dtypes.get(precision, torch.float32),
    }


def _transformer_sizes(layout: Layout) -> dict[str, Any]:
    return {
        "tensor_model_parallel_size": layout.tensor_model_parallel_size,
        "pipeline_model_parallel_size": layout.pipeline_model_parallel_size,
        "virtual_pipeline_model_parallel_size": layout.virtual_pipeline_model_parallel_size,
        "context_parallel_size": layout.context_parallel_size,
        "expert_model_parallel_size": layout.expert_model_parallel_size,
        "expert_tensor_parallel_size": layout.expert_tensor_parallel_size,
    }


def _transformer_defaults(
    spec: TrialSpec, fields: Mapping[str, Any], layout: Layout, use_transformer_engine: bool
) -> dict[str, Any]:
    """What a training script sets besides the model; a trial's own fields override these."""
    precision = _precision_fields(spec.precision)
    interleaved = layout.num_model_chunks > 1
    cuda = spec.device == "cuda"
    defaults: dict[str, Any] = {
        **precision,
        "pipeline_dtype": precision["params_dtype"],
        "transformer_impl": "transformer_engine" if use_transformer_engine else "local",
        "bias_activation_fusion": _can_fuse_activation(fields),
        # TEGroupedMLP takes no experts with bias together with it (transformer/moe/experts.py)
        "bias_dropout_fusion": not (
            fields.get("num_moe_experts") and fields.get("add_bias_linear", True)
        ),
        "deallocate_pipeline_outputs": True,
        # Megatron-LM overlaps point-to-point transfers only under interleaving, and then cannot
        # batch them. Gloo has no batched transfers at all.
        "overlap_p2p_comm": cuda and interleaved,
        "batch_p2p_comm": cuda and not interleaved,
        "gradient_accumulation_fusion": cuda and _can_fuse_gradient_accumulation(fields),
    }
    if fields.get("num_moe_experts"):
        defaults["moe_token_dispatcher_type"] = "alltoall"
        defaults["moe_grouped_gemm"] = use_transformer_engine
    if use_transformer_engine and fields.get("position_embedding_type") == "rope":
        defaults["apply_rope_fusion"] = not fields.get("multi_latent_attention")
    return defaults


def _can_fuse_activation(fields: Mapping[str, Any]) -> bool:
    """Whether `TransformerConfig` and every MLP accept bias_activation_fusion.

    `MLP.forward` (transformer/mlp.py) fuses the activation of an expert, which has a weight per
    token, for SwiGLU without bias and gated quick GELU; of a dense MLP for SwiGLU and GELU.
    """
    activation = fields.get("activation_func", "gelu")
    gated = bool(fields.get("gated_linear_unit"))
    bias = bool(fields.get("add_bias_linear", True))
    experts = bool(fields.get("num_moe_experts"))
    only_experts = (
        experts
        and fields.get("moe_layer_freq", 1) == 1
        and not fields.get("moe_shared_expert_intermediate_size")
    )
    if activation == "gelu":
        return not experts and (gated or bias)
    if activation == "silu":
        return gated and not (experts and bias) and not fields.get("glu_linear_offset")
    return activation == "quick_gelu" and gated and only_experts


def _can_fuse_gradient_accumulation(fields: Mapping[str, Any]) -> bool:
    """Whether products may add to `main_grad`, which sharded gradients do not have all the time."""
    import importlib.util

    if fields.get("use_megatron_fsdp") or fields.get(TORCH_FSDP2):
        return False
    return importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None


def _optimizer_defaults(spec: TrialSpec) -> dict[str, Any]:
    return {
        **_precision_fields(spec.precision),
        "optimizer": "adam",
        "lr": 1e-3,
        "weight_decay": 0.01,
        "clip_grad": 1.0,
    }


def _padded_vocab_size(fields: Mapping[str, Any], tensor_model_parallel_size: int) -> int:
    """The vocabulary rounded up as Megatron-LM does before it makes the embedding."""
    multiple = (fields.get("make_vocab_size_divisible_by") or 128) * tensor_model_parallel_size
    vocab_size = fields.get("vocab_size")
    if not vocab_size:
        raise TrialSpecError("vocab_size is missing from the model; set it to a positive integer")
    return -(-int(vocab_size) // multiple) * multiple
