"""The architecture of a GPT-like model under Megatron-Core's own field names."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Annotated, Any, get_type_hints

from tuner.models.errors import ModelSpecError, did_you_mean
from tuner.models.fields import (
    Check,
    Flag,
    Frequency,
    LayerCount,
    Number,
    OptionalFlag,
    OptionalFrequency,
    OptionalLayerCount,
    OptionalNumber,
    OptionalPositive,
    OptionalSize,
    OptionalText,
    Positive,
    Probability,
    Size,
    Window,
    one_of,
    optional,
)
from tuner.models.hybrid import EXPERTS, HybridPattern, parse_pattern

ACTIVATIONS = ("gelu", "silu", "relu", "squared_relu", "quick_gelu")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSpec:
    """One model: every field that changes its parameters, its arithmetic or what it computes.

    Fields bear the names, meanings and defaults of `TransformerConfig` and
    `MLATransformerConfig` (megatron/core/transformer/transformer_config.py) and of the arguments
    of `GPTModel`; `max_position_embeddings` and `make_vocab_size_divisible_by` are those of the
    Megatron-LM command line. The six sizes without a default are always explicit, also where
    Megatron-Core would derive them; `from_flat` derives them the same way.

    Raises `ModelSpecError` when a value has the wrong type or contradicts another.
    """

    name: str

    # Decoder
    num_layers: LayerCount
    hidden_size: Size
    num_attention_heads: Size
    num_query_groups: Size
    kv_channels: Size
    ffn_hidden_size: Size
    gated_linear_unit: Flag = False
    activation_func: Annotated[str, one_of(*ACTIVATIONS)] = "gelu"
    activation_func_clamp_value: OptionalPositive = None
    glu_linear_offset: Number = 0.0
    add_bias_linear: Flag = True
    add_qkv_bias: Flag = False
    normalization: Annotated[str, one_of("LayerNorm", "RMSNorm")] = "LayerNorm"
    layernorm_epsilon: Positive = 1e-5
    layernorm_zero_centered_gamma: Flag = False
    qk_layernorm: Flag = False
    attention_output_gate: Flag = False
    softmax_type: Annotated[str, one_of("vanilla", "off-by-one", "learnable")] = "vanilla"
    window_size: Window = None
    window_attn_skip_freq: OptionalFrequency = None
    hidden_dropout: Probability = 0.1
    attention_dropout: Probability = 0.1

    # Mixture of experts
    num_moe_experts: OptionalSize = None
    moe_layer_freq: Frequency = 1
    moe_ffn_hidden_size: OptionalSize = None
    moe_router_topk: Size = 2
    moe_shared_expert_intermediate_size: OptionalSize = None
    moe_shared_expert_gate: Flag = False
    moe_latent_size: OptionalSize = None
    moe_router_score_function: Annotated[str, one_of("softmax", "sigmoid")] = "softmax"
    moe_router_pre_softmax: Flag = False
    moe_router_num_groups: OptionalSize = None
    moe_router_group_topk: OptionalSize = None
    moe_router_topk_scaling_factor: OptionalPositive = None
    moe_router_enable_expert_bias: Flag = False

    # Multi-latent attention; read only when `multi_latent_attention` is set
    multi_latent_attention: Flag = False
    q_lora_rank: OptionalSize = 512
    kv_lora_rank: Size = 512
    qk_head_dim: Size = 128
    qk_pos_emb_head_dim: Size = 64
    v_head_dim: Size = 128
    rope_type: Annotated[str, one_of("rope", "yarn")] = "yarn"
    rotary_scaling_factor: Positive = 40.0
    original_max_position_embeddings: Size = 4096
    beta_fast: Number = 32.0
    beta_slow: Number = 1.0
    mscale: Number = 1.0
    mscale_all_dim: Number = 0.0

    # Multi-token prediction
    mtp_num_layers: OptionalLayerCount = None
    mtp_use_repeated_layer: Flag = False

    # Hybrid models: a letter for each layer, and the sizes of Mamba layers
    is_hybrid_model: Flag = False
    hybrid_layer_pattern: OptionalText = None
    mamba_state_dim: Size = 128
    mamba_head_dim: Size = 64
    mamba_num_groups: Size = 8
    mamba_num_heads: OptionalSize = None

    # Linear attention in place of most attention layers
    experimental_attention_variant: Annotated[str | None, optional(one_of("gated_delta_net"))] = (
        None
    )
    linear_attention_freq: OptionalFrequency = None
    linear_conv_kernel_dim: Size = 4
    linear_key_head_dim: Size = 128
    linear_value_head_dim: Size = 128
    linear_num_key_heads: Size = 16
    linear_num_value_heads: Size = 32

    # Vocabulary and positions
    vocab_size: Size
    make_vocab_size_divisible_by: Size = 128
    share_embeddings_and_output_weights: Flag = False
    max_position_embeddings: OptionalSize = None
    position_embedding_type: Annotated[str, one_of("learned_absolute", "rope", "yarn", "none")] = (
        "learned_absolute"
    )
    rotary_base: Positive = 10000
    rotary_percent: Probability = 1.0
    rotary_interleaved: Flag = False
    rope_scaling: Flag = False
    rope_scaling_factor: Positive = 8.0
    yarn_rotary_scaling_factor: OptionalPositive = None
    yarn_original_max_position_embeddings: OptionalSize = None
    yarn_beta_fast: OptionalNumber = None
    yarn_beta_slow: OptionalNumber = None
    yarn_mscale: OptionalNumber = None
    yarn_mscale_all_dim: OptionalNumber = None
    yarn_correction_range_round_to_int: OptionalFlag = None

    def __post_init__(self) -> None:
        for field, check in _checks().items():
            value = getattr(self, field)
            if not check.accepts(value):
                _refuse(self.name, field, value, f"must be {check.expected}")
        _check_consistency(self)

    @classmethod
    def from_flat(cls, flat: Mapping[str, Any], name: str = "custom") -> ModelSpec:
        """The spec that `flat`, a mapping keyed by field names, describes.

        Sizes that Megatron-Core derives may be left out: `num_query_groups`, `kv_channels`,
        `ffn_hidden_size`, `moe_ffn_hidden_size`, and `normalization` of a model with multi-latent
        attention, and `num_layers` of a hybrid model. Its pattern may also bear the name
        `hybrid_override_pattern`, as before Megatron-Core 0.17. Raises `ModelSpecError` for an
        unknown field (naming the nearest one), a missing field, and a wrong or contradictory
        value.
        """
        values = _with_one_pattern(dict(flat), name)
        for key in values:
            if key not in MODEL_FIELDS:
                fix = did_you_mean(str(key), MODEL_FIELDS)
                raise ModelSpecError(f"model {name!r}: unknown field {_shorten(key)}; {fix}")
        for key in ("num_layers", "hidden_size", "num_attention_heads", "vocab_size"):
            if values.get(key) is None:
                option = f" (--{key.replace('_', '-')} of a command line)"
                raise ModelSpecError(
                    f"model {name!r}: {key} is missing; set it to a positive integer{option}"
                )
        for key, value in values.items():
            if isinstance(value, list):
                values[key] = tuple(value)
        _derive_sizes(values, name)
        return cls(name=name, **values)

    def to_flat(self) -> dict[str, Any]:
        """The fields as plain JSON values, ready to merge into a configuration.

        Left out are fields at Megatron-Core's default that cannot be mistaken for unset:
        sizes, `normalization` and, where used, the multi-latent attention fields always stand.
        `from_flat` reads the result back to an equal spec.
        """
        flat: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            explicit = field.name in _ALWAYS_EXPLICIT or (
                self.multi_latent_attention and field.name in _LATENT_FIELDS
            )
            if field.name == "name" or (value == field.default and not explicit):
                continue
            flat[field.name] = list(value) if isinstance(value, tuple) else value
        return flat

    @property
    def moe_layer_pattern(self) -> tuple[bool, ...]:
        """For each decoder layer, whether it is a mixture of experts."""
        if self.hybrid_pattern is not None:
            return tuple(letter == EXPERTS for letter in self.hybrid_pattern.decoder)
        if self.num_moe_experts is None:
            return (False,) * self.num_layers
        if isinstance(self.moe_layer_freq, int):
            return tuple(index % self.moe_layer_freq == 0 for index in range(self.num_layers))
        return tuple(flag == 1 for flag in self.moe_layer_freq)

    @property
    def hybrid_pattern(self) -> HybridPattern | None:
        """The letters of a hybrid model's layers; None for a transformer."""
        if self.hybrid_layer_pattern is None:
            return None
        return parse_pattern(self.hybrid_layer_pattern)

    @property
    def linear_attention_pattern(self) -> tuple[bool, ...]:
        """For each decoder layer, whether it has linear attention (`get_linear_attention_pattern`).

        Layers of multi-token prediction have standard attention.
        """
        frequency = self.linear_attention_freq
        if self.experimental_attention_variant is None or frequency is None:
            return (False,) * self.num_layers
        if isinstance(frequency, int):
            return tuple((index + 1) % frequency != 0 for index in range(self.num_layers))
        return tuple(flag == 1 for flag in frequency)

    @property
    def mamba_heads(self) -> int:
        """Heads of a Mamba layer: given, or as many as twice the hidden size holds."""
        return self.mamba_num_heads or 2 * self.hidden_size // self.mamba_head_dim

    @property
    def window_layer_pattern(self) -> tuple[bool, ...]:
        """For each layer, whether its attention is confined to `window_size`.

        Decoder layers come first, then those of multi-token prediction, which continue the count
        (`is_layer_window_attention` in megatron/core/transformer/utils.py).
        """
        layers = self.num_layers + (self.mtp_num_layers or 0)
        if self.window_size is None:
            return (False,) * layers
        if self.window_attn_skip_freq is None:
            return (True,) * layers
        if isinstance(self.window_attn_skip_freq, int):
            return tuple((index + 1) % self.window_attn_skip_freq != 0 for index in range(layers))
        pattern = tuple(flag == 1 for flag in self.window_attn_skip_freq[:layers])
        return pattern + (False,) * (layers - len(pattern))

    def padded_vocab_size(self, tensor_model_parallel_size: int = 1) -> int:
        """Rows of the embedding table: the vocabulary rounded up so that TP divides it."""
        multiple = self.make_vocab_size_divisible_by * tensor_model_parallel_size
        return -(-self.vocab_size // multiple) * multiple


MODEL_FIELDS: tuple[str, ...] = tuple(
    field.name for field in dataclasses.fields(ModelSpec) if field.name != "name"
)
"""Every architecture field of a spec."""

MODEL_INPUTS = (*MODEL_FIELDS, "hybrid_override_pattern")
"""Every architecture field a flat mapping may hold, older spellings included."""

_LATENT_FIELDS = (
    "q_lora_rank",
    "kv_lora_rank",
    "qk_head_dim",
    "qk_pos_emb_head_dim",
    "v_head_dim",
    "rope_type",
    "rotary_scaling_factor",
    "original_max_position_embeddings",
    "beta_fast",
    "beta_slow",
    "mscale",
    "mscale_all_dim",
)
_ALWAYS_EXPLICIT = ("normalization",)
_MAMBA_FIELDS = ("mamba_state_dim", "mamba_head_dim", "mamba_num_groups", "mamba_num_heads")
_LINEAR_ATTENTION_FIELDS = (
    "linear_attention_freq",
    "linear_conv_kernel_dim",
    "linear_key_head_dim",
    "linear_value_head_dim",
    "linear_num_key_heads",
    "linear_num_value_heads",
)


@cache
def _checks() -> dict[str, Check]:
    """The check of every field, read from the annotations of `ModelSpec`."""
    hints = get_type_hints(ModelSpec, include_extras=True)
    return {
        field: next(item for item in hints[field].__metadata__ if isinstance(item, Check))
        for field in MODEL_FIELDS
    }


def _with_one_pattern(values: dict[str, Any], name: str) -> dict[str, Any]:
    """`values` of a hybrid model with the pattern under one name, and what follows from it."""
    older = values.pop("hybrid_override_pattern", None)
    if older is not None:
        if values.get("hybrid_layer_pattern") not in (None, older):
            _refuse(name, "hybrid_override_pattern", older, "contradicts hybrid_layer_pattern")
        values["hybrid_layer_pattern"] = older
    text = values.get("hybrid_layer_pattern")
    if not isinstance(text, str):
        return values
    try:
        pattern = parse_pattern(text)
    except ValueError as error:
        raise ModelSpecError(
            f"model {name!r}: hybrid_layer_pattern={_shorten(text)} {error}"
        ) from error
    derived = {"num_layers": len(pattern.decoder), "is_hybrid_model": True}
    if pattern.depths:
        derived["mtp_num_layers"] = pattern.depths
    for field, value in derived.items():
        if values.get(field) is None:
            values[field] = value
    return values


def _refuse(name: str, field: str, value: object, problem: str) -> None:
    raise ModelSpecError(f"model {name!r}: {field}={_shorten(value)} {problem}")


def _shorten(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 60 else shown[:57] + "..."


def _derive_sizes(values: dict[str, Any], name: str) -> None:
    """Fill sizes left out, as `TransformerConfig.__post_init__` does."""
    checks = _checks()
    for field in ("hidden_size", "num_attention_heads", "num_moe_experts"):
        if field in values and not checks[field].accepts(values[field]):
            _refuse(name, field, values[field], f"must be {checks[field].expected}")
    hidden, heads = values["hidden_size"], values["num_attention_heads"]
    derived = {
        "num_query_groups": heads,
        "kv_channels": hidden // heads,
        "ffn_hidden_size": 4 * hidden,
    }
    for field, value in derived.items():
        if values.get(field) is None:
            values[field] = value
    if values.get("num_moe_experts") is not None and values.get("moe_ffn_hidden_size") is None:
        values["moe_ffn_hidden_size"] = values["ffn_hidden_size"]
    if values.get("multi_latent_attention") is True:
        values.setdefault("normalization", "RMSNorm")


def _check_consistency(spec: ModelSpec) -> None:
    """Refuse values that no Megatron-Core model can have together."""
    name = spec.name
    if spec.num_attention_heads % spec.num_query_groups:
        _refuse(
            name,
            "num_query_groups",
            spec.num_query_groups,
            f"must divide num_attention_heads={spec.num_attention_heads}",
        )
    if spec.position_embedding_type == "learned_absolute" and spec.max_position_embeddings is None:
        _refuse(
            name,
            "max_position_embeddings",
            None,
            "must be set for position_embedding_type='learned_absolute'; "
            "set it, or position_embedding_type to 'rope'",
        )
    if spec.multi_latent_attention:
        if spec.attention_output_gate:
            _refuse(
                name, "attention_output_gate", True, "does not work with multi_latent_attention"
            )
    else:
        _refuse_unused(spec, _LATENT_FIELDS, "multi_latent_attention: true")
    if spec.num_moe_experts is None:
        _refuse_unused(spec, ("moe_ffn_hidden_size", "moe_latent_size"), "num_moe_experts")
    else:
        _check_experts(spec, spec.num_moe_experts)
    _check_hybrid(spec)
    layers = spec.num_layers
    if isinstance(spec.linear_attention_freq, tuple) and len(spec.linear_attention_freq) != layers:
        _refuse_length(spec, "linear_attention_freq", len(spec.linear_attention_freq))
    if isinstance(spec.window_attn_skip_freq, tuple):
        lengths = {layers, layers + (spec.mtp_num_layers or 0)}
        if len(spec.window_attn_skip_freq) not in lengths:
            _refuse_length(spec, "window_attn_skip_freq", len(spec.window_attn_skip_freq))
    if isinstance(spec.moe_layer_freq, tuple) and len(spec.moe_layer_freq) != layers:
        _refuse_length(spec, "moe_layer_freq", len(spec.moe_layer_freq))


def _check_hybrid(spec: ModelSpec) -> None:
    """Refuse contradictions between a hybrid pattern, linear attention and the rest."""
    name, pattern = spec.name, spec.hybrid_pattern
    if spec.experimental_attention_variant is None:
        _refuse_unused(spec, _LINEAR_ATTENTION_FIELDS, "experimental_attention_variant")
    elif spec.linear_attention_freq is None:
        _refuse(name, "linear_attention_freq", None, "must be set for linear attention")
    elif spec.linear_num_value_heads % spec.linear_num_key_heads:
        problem = f"must be a multiple of linear_num_key_heads={spec.linear_num_key_heads}"
        _refuse(name, "linear_num_value_heads", spec.linear_num_value_heads, problem)
    if pattern is None:
        _refuse_unused(spec, _MAMBA_FIELDS, "hybrid_layer_pattern")
        return
    if len(pattern.decoder) != spec.num_layers:
        _refuse_length(spec, "hybrid_layer_pattern", len(pattern.decoder))
    if pattern.depths != (spec.mtp_num_layers or 0):
        problem = f"contradicts the {pattern.depths} depths of hybrid_layer_pattern"
        _refuse(name, "mtp_num_layers", spec.mtp_num_layers, problem)
    if EXPERTS in pattern.all_layers and spec.num_moe_experts is None:
        _refuse(name, "num_moe_experts", None, "must be set for a pattern with 'E'")
    if spec.experimental_attention_variant is not None or spec.multi_latent_attention:
        field = "experimental_attention_variant"
        if spec.multi_latent_attention:
            field = "multi_latent_attention"
        _refuse(name, field, getattr(spec, field), "does not work with hybrid_layer_pattern")
    inner = spec.mamba_heads * spec.mamba_head_dim
    if spec.mamba_heads % spec.mamba_num_groups or (
        spec.mamba_num_heads is None and inner != 2 * spec.hidden_size
    ):
        _refuse(
            name,
            "mamba_num_groups",
            spec.mamba_num_groups,
            f"must divide the {spec.mamba_heads} heads of {spec.mamba_head_dim} channels",
        )


def _refuse_unused(spec: ModelSpec, fields: tuple[str, ...], needed: str) -> None:
    defaults = {field.name: field.default for field in dataclasses.fields(spec)}
    for field in fields:
        value = getattr(spec, field)
        if value != defaults[field]:
            _refuse(spec.name, field, value, f"has no effect without {needed}; remove it or set it")


def _refuse_length(spec: ModelSpec, field: str, length: int) -> None:
    _refuse(
        spec.name,
        field,
        getattr(spec, field),
        f"has {length} entries for num_layers={spec.num_layers}; give one entry for each layer",
    )


def _check_experts(spec: ModelSpec, experts: int) -> None:
    name = spec.name
    if spec.moe_ffn_hidden_size is None:
        _refuse(name, "moe_ffn_hidden_size", None, "must be set when num_moe_experts is")
    if spec.moe_router_topk > experts:
        _refuse(name, "moe_router_topk", spec.moe_router_topk, f"exceeds num_moe_experts={experts}")
    if spec.moe_shared_expert_intermediate_size is not None and spec.add_bias_linear:
        _refuse(
            name,
            "add_bias_linear",
            True,
            "does not work with moe_shared_expert_intermediate_size; set it to false",
        )
    groups, chosen = spec.moe_router_num_groups, spec.moe_router_group_topk
    if groups is not None and experts % groups:
        _refuse(name, "moe_router_num_groups", groups, f"must divide num_moe_experts={experts}")
    if chosen is not None and (groups is None or chosen > groups):
        _refuse(
            name,
            "moe_router_group_topk",
            chosen,
            f"must be at most moe_router_num_groups={groups}",
        )
