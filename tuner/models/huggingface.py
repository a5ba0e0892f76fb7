"""Model specs from the `config.json` of a Hugging Face model.

Only the file is read: no code of a model repository runs and `transformers` is not needed. Keys
that a file leaves out take the defaults of the `transformers` configuration classes
(src/transformers/models/*/configuration_*.py). Field names follow Megatron Bridge
(src/megatron/bridge/models/conversion/model_bridge.py).

To add an architecture, write one function from `HFDocument` to flat fields and register it under
its `model_type` and architecture name.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from tuner.models.errors import ModelSpecError, did_you_mean
from tuner.models.hf_document import HFDocument, read_document
from tuner.models.hf_hybrid import gated_delta_net, nemotron_h
from tuner.models.spec import ModelSpec

_Fields = dict[str, Any]
_Family = Callable[[HFDocument], _Fields]

_BY_MODEL_TYPE: dict[str, _Family] = {}
_BY_ARCHITECTURE: dict[str, _Family] = {}

_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_new": "gelu",
    "gelu_pytorch_tanh": "gelu",
    "relu": "relu",
    "relu2": "squared_relu",
    "quick_gelu": "quick_gelu",
}


def from_hf_config(path: str | Path) -> ModelSpec:
    """The spec of the model whose `config.json` is `path` or lies in that directory.

    The language model of a multimodal configuration (`text_config`) is taken. Raises
    `ModelSpecError`, in one line naming file, key and fix, for anything that is not a readable
    configuration of a known architecture that Megatron-Core can express.
    """
    document = read_document(path)
    family, document = _find_family(document)
    try:
        return ModelSpec.from_flat(family(document), name=_name(path, document))
    except ModelSpecError as error:
        if str(error).startswith(document.location):
            raise
        raise ModelSpecError(f"{document.location}: {error}") from error


def _name(path: str | Path, document: HFDocument) -> str:
    """The last part of the model's own name, else the name of the directory."""
    given = document.text("_name_or_path", "").rstrip("/").rsplit("/", 1)[-1]
    file = Path(path)
    folder = file.name if file.is_dir() else file.resolve().parent.name
    return given or folder or "custom"


def _find_family(document: HFDocument) -> tuple[_Family, HFDocument]:
    """The reader of the architecture, and the object it reads: the file or its text model."""
    family = _family_of(document)
    if family is not None:
        return family, document
    text = document.nested("text_config")
    if text is not None:
        if not text.has("tie_word_embeddings") and document.has("tie_word_embeddings"):
            tied = document.values["tie_word_embeddings"]
            text = HFDocument(text.location, {**text.values, "tie_word_embeddings": tied})
        family = _family_of(text)
        if family is not None:
            return family, text
        document = text
    kind = document.text("model_type", "")
    if not kind and not document.items("architectures", str):
        raise ModelSpecError(
            f"{document.location}: model_type is missing; set it to one of "
            + ", ".join(sorted(_BY_MODEL_TYPE))
        )
    raise document.error(
        "model_type" if kind else "architectures",
        f"is not an architecture read here; {did_you_mean(kind, _BY_MODEL_TYPE)} Those read are "
        + ", ".join(sorted(_BY_MODEL_TYPE)),
    )


def _family_of(document: HFDocument) -> _Family | None:
    family = _BY_MODEL_TYPE.get(document.text("model_type", ""))
    if family is not None:
        return family
    for architecture in document.items("architectures", str) or ():
        if architecture in _BY_ARCHITECTURE:
            return _BY_ARCHITECTURE[architecture]
    return None


def _register(model_type: str, architecture: str) -> Callable[[_Family], _Family]:
    def add(family: _Family) -> _Family:
        _BY_MODEL_TYPE[model_type] = family
        _BY_ARCHITECTURE[architecture] = family
        return family

    return add


def _common(hf: HFDocument, epsilon: float, theta: float = 10000.0) -> _Fields:
    """Fields that every architecture reads alike."""
    fields: _Fields = {
        "num_layers": hf.layers("num_hidden_layers"),
        "hidden_size": hf.size("hidden_size"),
        "num_attention_heads": hf.size("num_attention_heads"),
        "ffn_hidden_size": hf.size("intermediate_size"),
        "vocab_size": hf.size("vocab_size"),
        "gated_linear_unit": True,
        "activation_func": _activation(hf),
        "add_bias_linear": False,
        "normalization": "RMSNorm",
        "layernorm_epsilon": hf.number("rms_norm_eps", epsilon),
        "hidden_dropout": 0.0,
        "attention_dropout": hf.number("attention_dropout", 0.0),
        "share_embeddings_and_output_weights": hf.flag("tie_word_embeddings", False),
        "max_position_embeddings": hf.optional_size("max_position_embeddings"),
        "position_embedding_type": "rope",
    }
    rope = hf.nested("rope_parameters") or hf
    fields["rotary_base"] = rope.number("rope_theta", hf.number("rope_theta", theta))
    return fields


def _activation(hf: HFDocument, default: str = "silu") -> str:
    name = hf.text("hidden_act", default)
    if name not in _ACTIVATIONS:
        hf.refuse("hidden_act", f"is not known; {did_you_mean(name, _ACTIVATIONS)}")
    return _ACTIVATIONS[name]


def _grouped_query(hf: HFDocument, groups: int | None, channels: int | None) -> _Fields:
    """Query groups and head size; None as a default is one group a head, hidden over heads."""
    heads = hf.size("num_attention_heads")
    absent = heads if hf.has("num_key_value_heads") else groups or heads
    hidden_per_head = hf.size("hidden_size") // heads
    return {
        "num_query_groups": hf.size("num_key_value_heads", absent),
        "kv_channels": hf.size("head_dim", channels or max(hidden_per_head, 1)),
    }


def _scaled_rope(hf: HFDocument) -> tuple[str, HFDocument | None]:
    """The kind of rotary scaling ("default" for none) and the object with its parameters."""
    scaling = hf.nested("rope_scaling") or hf.nested("rope_parameters")
    if scaling is None:
        return "default", None
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    if kind not in ("default", "llama3", "yarn"):
        hf.refuse(
            "rope_scaling" if hf.has("rope_scaling") else "rope_parameters",
            f"is of type {kind!r}, which Megatron-Core's GPT model lacks; remove it (it changes "
            "neither size nor speed)",
        )
    return kind, scaling


def _rope(hf: HFDocument) -> _Fields:
    """Rotary scaling of a model with ordinary attention heads."""
    kind, scaling = _scaled_rope(hf)
    if scaling is None or kind == "default":
        return {}
    if kind == "llama3":
        return {"rope_scaling": True, "rope_scaling_factor": scaling.number("factor", 8.0)}
    return {
        "position_embedding_type": "yarn",
        "yarn_rotary_scaling_factor": scaling.number("factor", 32.0),
        "yarn_original_max_position_embeddings": scaling.size(
            "original_max_position_embeddings", 4096
        ),
        "yarn_beta_fast": scaling.number("beta_fast", 32.0),
        "yarn_beta_slow": scaling.number("beta_slow", 1.0),
        "yarn_correction_range_round_to_int": scaling.flag("truncate", True),
    }


def _no_attention_bias(hf: HFDocument) -> None:
    if hf.flag("attention_bias", False):
        hf.refuse(
            "attention_bias",
            "puts a bias on the attention output, which Megatron-Core has only together with MLP "
            "biases; set it to false",
        )


def _windows(window: int | None, layers: Sequence[bool]) -> _Fields:
    """Sliding windows of `window` tokens, the current one included, on the marked layers."""
    if window is None or not any(layers):
        return {}
    fields: _Fields = {"window_size": [window - 1, 0]}
    if not all(layers):
        fields["window_attn_skip_freq"] = _interval(layers) or [int(flag) for flag in layers]
    return fields


def _interval(windowed: Sequence[bool]) -> int | None:
    """N where every Nth layer is full and all others are windowed; None for another pattern."""
    interval = list(windowed).index(False) + 1
    regular = all(flag == ((index + 1) % interval != 0) for index, flag in enumerate(windowed))
    return interval if regular and interval > 1 else None


def _windowed_layers(hf: HFDocument, otherwise: Callable[[int], bool]) -> list[bool]:
    """From `layer_types` where the file has it, else from the rule of the architecture."""
    layers = hf.layers("num_hidden_layers")
    kinds = hf.items("layer_types", str)
    if kinds is None:
        return [otherwise(index) for index in range(layers)]
    if len(kinds) != layers or not set(kinds) <= {"sliding_attention", "full_attention"}:
        hf.refuse(
            "layer_types",
            f"must name sliding_attention or full_attention for each of {layers} layers",
        )
    return [kind == "sliding_attention" for kind in kinds]


def _qwen_windows(hf: HFDocument) -> _Fields:
    if not hf.flag("use_sliding_window", False):
        return {}
    first = hf.count("max_window_layers", 28)
    return _windows(
        hf.optional_size("sliding_window", absent=4096),
        _windowed_layers(hf, lambda index: index >= first),
    )


def _moe_layers(pattern: Sequence[bool]) -> int | list[int]:
    """`moe_layer_freq` in its shortest spelling."""
    return 1 if all(pattern) else [int(flag) for flag in pattern]


@_register("llama", "LlamaForCausalLM")
def _llama(hf: HFDocument) -> _Fields:
    bias = hf.flag("mlp_bias", False)
    if bias != hf.flag("attention_bias", False):
        hf.refuse(
            "attention_bias",
            "must equal mlp_bias: Megatron-Core has biases on all linear layers or on none",
        )
    return {
        **_common(hf, epsilon=1e-6),
        **_grouped_query(hf, groups=None, channels=None),
        **_rope(hf),
        "add_bias_linear": bias,
    }


@_register("mistral", "MistralForCausalLM")
def _mistral(hf: HFDocument) -> _Fields:
    layers = hf.layers("num_hidden_layers")
    return {
        **_common(hf, epsilon=1e-6),
        **_grouped_query(hf, groups=8, channels=None),
        **_rope(hf),
        **_windows(hf.optional_size("sliding_window", absent=4096), [True] * layers),
    }


@_register("qwen2", "Qwen2ForCausalLM")
def _qwen2(hf: HFDocument) -> _Fields:
    return {
        **_common(hf, epsilon=1e-6),
        **_grouped_query(hf, groups=32, channels=None),
        **_rope(hf),
        **_qwen_windows(hf),
        "add_qkv_bias": True,
    }


@_register("qwen3", "Qwen3ForCausalLM")
def _qwen3(hf: HFDocument) -> _Fields:
    _no_attention_bias(hf)
    return {
        **_common(hf, epsilon=1e-6),
        **_grouped_query(hf, groups=32, channels=128),
        **_rope(hf),
        **_qwen_windows(hf),
        "qk_layernorm": True,
    }


@_register("qwen3_moe", "Qwen3MoeForCausalLM")
def _qwen3_moe(hf: HFDocument) -> _Fields:
    _no_attention_bias(hf)
    layers = hf.layers("num_hidden_layers")
    step = hf.size("decoder_sparse_step", 1)
    dense = set(hf.items("mlp_only_layers", int) or ())
    pattern = [index not in dense and (index + 1) % step == 0 for index in range(layers)]
    fields = {
        **_common(hf, epsilon=1e-6),
        **_grouped_query(hf, groups=4, channels=None),
        **_rope(hf),
        "qk_layernorm": True,
    }
    if hf.flag("use_sliding_window", False):
        window = hf.optional_size("sliding_window", absent=4096)
        fields |= _windows(window, [True] * layers)
    if any(pattern):
        fields |= {
            "num_moe_experts": hf.size("num_experts", hf.size("num_local_experts", 128)),
            "moe_layer_freq": _moe_layers(pattern),
            "moe_ffn_hidden_size": hf.size("moe_intermediate_size", 768),
            "moe_router_topk": hf.size("num_experts_per_tok", 8),
            "moe_router_pre_softmax": not hf.flag("norm_topk_prob", False),
        }
    return fields


@_register("mixtral", "MixtralForCausalLM")
def _mixtral(hf: HFDocument) -> _Fields:
    layers = hf.layers("num_hidden_layers")
    return {
        **_common(hf, epsilon=1e-5, theta=1e6),
        **_grouped_query(hf, groups=8, channels=None),
        **_rope(hf),
        **_windows(hf.optional_size("sliding_window"), [True] * layers),
        "num_moe_experts": hf.size("num_local_experts", 8),
        "moe_ffn_hidden_size": hf.size("intermediate_size"),
        "moe_router_topk": hf.size("num_experts_per_tok", 2),
    }


@_register("gpt_oss", "GptOssForCausalLM")
def _gpt_oss(hf: HFDocument) -> _Fields:
    if not hf.flag("attention_bias", True):
        hf.refuse("attention_bias", "must be true: Megatron-Core has all biases or none")
    yarn = {
        "yarn_rotary_scaling_factor": 32.0,
        "yarn_original_max_position_embeddings": 4096,
        "yarn_beta_fast": 32.0,
        "yarn_beta_slow": 1.0,
        "yarn_correction_range_round_to_int": False,
    }
    return {
        **_common(hf, epsilon=1e-5, theta=150000.0),
        **_grouped_query(hf, groups=8, channels=64),
        "position_embedding_type": "yarn",
        **yarn,
        **_rope(hf),
        **_windows(
            hf.optional_size("sliding_window", absent=128),
            _windowed_layers(hf, lambda index: index % 2 == 0),
        ),
        "add_bias_linear": True,
        "activation_func": "quick_gelu",
        "activation_func_clamp_value": hf.number("swiglu_limit", 7.0),
        "glu_linear_offset": 1.0,
        "softmax_type": "learnable",
        "num_moe_experts": hf.size("num_local_experts", 128),
        "moe_ffn_hidden_size": hf.size("intermediate_size"),
        "moe_router_topk": hf.size("num_experts_per_tok", 4),
    }


@_register("nemotron", "NemotronForCausalLM")
def _nemotron(hf: HFDocument) -> _Fields:
    _no_attention_bias(hf)
    rotary = hf.number("partial_rotary_factor", hf.number("rope_percent", 0.5))
    return {
        **_common(hf, epsilon=1e-5),
        **_grouped_query(hf, groups=None, channels=None),
        **_rope(hf),
        "add_bias_linear": hf.flag("mlp_bias", False),
        "gated_linear_unit": False,
        "activation_func": _activation(hf, default="relu2"),
        "normalization": "LayerNorm",
        "layernorm_epsilon": hf.number("norm_eps", 1e-5),
        "layernorm_zero_centered_gamma": True,
        "rotary_percent": rotary,
    }


def _deepseek(hf: HFDocument) -> _Fields:
    """What the DeepSeek generations share: latent attention, dense first layers, experts."""
    _no_attention_bias(hf)
    layers = hf.layers("num_hidden_layers")
    value_channels = hf.size("v_head_dim", 128)
    fields = {
        **_common(hf, epsilon=1e-6),
        "kv_channels": value_channels,
        "qk_layernorm": True,
        "multi_latent_attention": True,
        "q_lora_rank": hf.optional_size("q_lora_rank", absent=1536),
        "kv_lora_rank": hf.size("kv_lora_rank", 512),
        "qk_head_dim": hf.size("qk_nope_head_dim", 128),
        "qk_pos_emb_head_dim": hf.size("qk_rope_head_dim", 64),
        "v_head_dim": value_channels,
        **_latent_rope(hf),
    }
    first = hf.count("first_k_dense_replace", 0)
    step = hf.size("moe_layer_freq", 1)
    pattern = [index >= first and index % step == 0 for index in range(layers)]
    if any(pattern):
        width = hf.size("moe_intermediate_size")
        shared = hf.count("n_shared_experts", 0)
        scaling = hf.number("routed_scaling_factor", 1.0)
        fields |= {
            "num_moe_experts": hf.size("n_routed_experts"),
            "moe_layer_freq": _moe_layers(pattern),
            "moe_ffn_hidden_size": width,
            "moe_router_topk": hf.size("num_experts_per_tok"),
            "moe_shared_expert_intermediate_size": shared * width or None,
            "moe_router_pre_softmax": True,
            "moe_router_topk_scaling_factor": None if scaling == 1.0 else scaling,
        }
    return fields


def _latent_rope(hf: HFDocument) -> _Fields:
    """Rotary scaling of multi-latent attention, under `MLATransformerConfig`'s names."""
    kind, scaling = _scaled_rope(hf)
    if scaling is None or kind == "default":
        return {"rope_type": "rope"}
    if kind == "llama3":
        hf.refuse("rope_scaling", "of type 'llama3' does not exist for latent attention; remove it")
    return {
        "rope_type": "yarn",
        "rotary_scaling_factor": scaling.number("factor", 40.0),
        "original_max_position_embeddings": scaling.size("original_max_position_embeddings", 4096),
        "beta_fast": scaling.number("beta_fast", 32.0),
        "beta_slow": scaling.number("beta_slow", 1.0),
        "mscale": scaling.number("mscale", 1.0),
        "mscale_all_dim": scaling.number("mscale_all_dim", 0.0),
    }


def _group_limits(hf: HFDocument) -> _Fields:
    """Routing restricted to some groups of experts, where there is more than one group."""
    groups, chosen = hf.size("n_group", 1), hf.size("topk_group", 1)
    if groups == 1:
        return {}
    return {"moe_router_num_groups": groups, "moe_router_group_topk": chosen}


@_register("deepseek_v2", "DeepseekV2ForCausalLM")
def _deepseek_v2(hf: HFDocument) -> _Fields:
    fields = _deepseek(hf)
    if hf.text("topk_method", "greedy") == "group_limited_greedy":
        fields |= _group_limits(hf)
    return {**fields, "make_vocab_size_divisible_by": 3200}


@_register("kimi_k2", "KimiK2ForCausalLM")
@_register("deepseek_v3", "DeepseekV3ForCausalLM")
def _deepseek_v3(hf: HFDocument) -> _Fields:
    return {
        **_deepseek(hf),
        **_group_limits(hf),
        "moe_router_score_function": hf.text("scoring_func", "sigmoid"),
        "moe_router_enable_expert_bias": True,
        "mtp_num_layers": hf.count("num_nextn_predict_layers", 0) or None,
        "make_vocab_size_divisible_by": 1280,
    }


@_register("qwen3_next", "Qwen3NextForCausalLM")
def _qwen3_next(hf: HFDocument) -> _Fields:
    absent = {"num_key_value_heads": 2, "head_dim": 256, "num_experts": 512}
    absent |= {"num_experts_per_tok": 10, "moe_intermediate_size": 512}
    return {
        **_qwen3_moe(HFDocument(hf.location, absent | dict(hf.values))),
        **gated_delta_net(hf),
    }


_register("nemotron_h", "NemotronHForCausalLM")(nemotron_h)
