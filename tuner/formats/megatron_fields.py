"""How Megatron-LM's command line spells Megatron-Core's fields, in both directions.

Most fields are options of the same name. The others follow `validate_args` and
`core_transformer_config_from_args` of `megatron/training/arguments.py` (in 0.18 and later
`argument_utils.py`) and the building of the DDP config in `megatron/training/training.py`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tuner.constraints.fields import catalogue
from tuner.formats.arguments import Argument, arguments
from tuner.formats.result import CannotExpressError

RENAMED: Mapping[str, str] = {
    "num_moe_experts": "num_experts",
    "num_layers_in_first_pipeline_stage": "decoder_first_pipeline_num_layers",
    "num_layers_in_last_pipeline_stage": "decoder_last_pipeline_num_layers",
    "virtual_pipeline_model_parallel_size": "num_virtual_stages_per_pipeline_rank",
    "fp8_param": "fp8_param_gather",
    "fp4_param": "fp4_param_gather",
    "bucket_size": "ddp_bucket_size",
    "num_buckets": "ddp_num_buckets",
    "pad_buckets_for_high_nccl_busbw": "ddp_pad_buckets_for_high_nccl_busbw",
    "reduce_scatter_with_fp32_accumulation": "ddp_reduce_scatter_with_fp32_accumulation",
    "average_in_collective": "ddp_average_in_collective",
    "param_name_patterns_for_fp32_local_accumulation": (
        "ddp_param_name_patterns_for_fp32_local_accumulation"
    ),
    "use_te_rng_tracker": "te_rng_tracker",
    "rope_scaling": "use_rope_scaling",
    "seq_len_interpolation_factor": "rotary_seq_len_interpolation_factor",
    "check_for_nan_in_loss": "check_for_nan_in_loss_and_grad",
    "check_for_nan_in_grad": "check_for_nan_in_loss_and_grad",
}
"""Fields whose option has another destination; values pass unchanged."""

NOT_ARGUMENTS = frozenset(("env", "gpu", "te_version", "world_size", "gpus_per_node"))
"""Keys of a configuration that describe the machine, not the command line."""

FROM_DTYPE = {"bf16": "--bf16", "fp16": "--fp16", "fp32": None}
_LAYERS = {"embedding": "E", "decoder": "t", "loss": "L", "mtp": "m"}


def tokens_of(fields: Mapping[str, Any], mcore: str) -> tuple[list[str], dict[str, str]]:
    """The command line of flat fields, and the fields it cannot express with the reason.

    The order is that of `fields`, so the same fields always give the same line.
    """
    options: dict[str, list[str]] = {}
    left_out: dict[str, str] = {}
    for name in fields:
        if name in NOT_ARGUMENTS:
            continue
        try:
            options[name] = _tokens(name, fields, mcore)
        except CannotExpressError as reason:
            left_out[name] = reason.message
    tokens: list[str] = []
    for words in options.values():
        if not _holds(tokens, words):
            tokens += words
    return tokens, left_out


def _holds(tokens: Sequence[str], words: Sequence[str]) -> bool:
    """Whether the option stands on the line already (two fields may share one)."""
    return not words or any(
        list(tokens[at : at + len(words)]) == list(words) for at in range(len(tokens))
    )


def _tokens(name: str, fields: Mapping[str, Any], mcore: str) -> list[str]:
    value = fields[name]
    special = _SPECIAL.get(name)
    if special is not None:
        return special(value, fields, mcore)
    if value is None:
        return []
    return plain_tokens(RENAMED.get(name, name), value, mcore)


def plain_tokens(dest: str, value: Any, mcore: str) -> list[str]:
    """The option of a destination with a value. Raises CannotExpressError without one."""
    rows = arguments(mcore).get(dest)
    if not rows:
        if _is_core_default(dest, value, mcore):
            return []
        raise CannotExpressError(f"Megatron-LM {mcore} has no option for it")
    for argument in rows:
        words = _spell(argument, value)
        if words is not None:
            return words
    raise CannotExpressError(f"no option of Megatron-LM {mcore} makes it {value!r}")


def _is_core_default(name: str, value: Any, mcore: str) -> bool:
    """Whether Megatron-Core has the value where nothing is said."""
    known = catalogue().get(name)
    return known is not None and mcore in known.default and known.default[mcore] == value


def _spell(argument: Argument, value: Any) -> list[str] | None:
    if isinstance(value, bool):
        if argument.kind == "value":
            return [argument.flags[0], str(value)]
        return argument.boolean(value)
    if argument.kind == "value":
        words = [_word(value)]
    elif argument.kind == "values":
        items = list(value) if isinstance(value, (list, tuple)) else [value]
        if not items:
            return [] if not argument.default else None
        words = [_word(item) for item in items]
    else:
        return None
    fits = not argument.choices or all(word in argument.choices for word in words)
    return [argument.flags[0], *words] if fits else None


def _word(value: Any) -> str:
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(str(item) for item in value) + "]"
    if isinstance(value, float):  # options of whole numbers take no decimal point
        return str(int(value)) if value.is_integer() and abs(value) < 2**53 else repr(value)
    return str(value)


def _dtype(value: Any, fields: Mapping[str, Any], mcore: str) -> list[str]:
    """Parameters take the type of --bf16 or --fp16 (`validate_args`)."""
    given = _given_dtype(fields)
    if value != given:
        raise CannotExpressError(f"the command line derives it from --bf16 and --fp16: {given}")
    flag = FROM_DTYPE.get(value)
    return [flag] if flag else []


def _given_dtype(fields: Mapping[str, Any]) -> str:
    if fields.get("bf16"):
        return "bf16"
    if fields.get("fp16"):
        return "fp16"
    named = fields.get("params_dtype")
    explicit = fields.get("bf16") is False or fields.get("fp16") is False
    return str(named) if named in FROM_DTYPE and not explicit else "fp32"


def _virtual(value: Any, fields: Mapping[str, Any], mcore: str) -> list[str]:
    """Left to the layout where there is one: the command line takes either."""
    if value in (None, 1) or fields.get("pipeline_model_parallel_layout") is not None:
        return []
    return plain_tokens("num_virtual_stages_per_pipeline_rank", value, mcore)


def _layout(value: Any, fields: Mapping[str, Any], mcore: str) -> list[str]:
    if value is None:
        return []
    return plain_tokens("pipeline_model_parallel_layout", layout_text(value), mcore)


def layout_text(value: Any) -> str:
    """A pipeline layout as the string that `PipelineParallelLayerLayout` parses."""
    if isinstance(value, str):
        return value
    stages = ["".join(_LAYERS[str(layer)] for layer in stage) for stage in value]
    return "|".join(stages)


def _activation(value: Any, fields: Mapping[str, Any], mcore: str) -> list[str]:
    gated = bool(fields.get("gated_linear_unit"))
    options = {
        ("silu", True): ["--swiglu"],
        ("swiglu", True): ["--swiglu"],
        ("gelu", False): [],
        ("squared_relu", False): ["--squared-relu"],
        ("quick_gelu", True): ["--quick-geglu"],
    }
    if (value, gated) not in options:
        kind = "gated " if gated else ""
        raise CannotExpressError(f"Megatron-LM has no option for {kind}{value}")
    return options[value, gated]


def _gated(value: Any, fields: Mapping[str, Any], mcore: str) -> list[str]:
    return _activation(fields.get("activation_func") or "gelu", fields, mcore)


def _bias_activation(value: Any, fields: Mapping[str, Any], mcore: str) -> list[str]:
    """One switch with SwiGLU, another without."""
    swiglu = fields.get("gated_linear_unit") and fields.get("activation_func") in ("silu", "swiglu")
    if value and not swiglu and fields.get("add_bias_linear") is False:
        raise CannotExpressError("without bias the command line keeps the fusion of SwiGLU only")
    return plain_tokens("bias_swiglu_fusion" if swiglu else "bias_gelu_fusion", bool(value), mcore)


def _query_groups(value: Any, fields: Mapping[str, Any], mcore: str) -> list[str]:
    if value is None or fields.get("multi_latent_attention"):
        return []
    return ["--group-query-attention", "--num-query-groups", str(value)]


def _tied(value: Any, fields: Mapping[str, Any], mcore: str) -> list[str]:
    return [] if value else ["--untie-embeddings-and-output-weights"]


def _persist(value: Any, fields: Mapping[str, Any], mcore: str) -> list[str]:
    return plain_tokens("no_persist_layer_norm", not value, mcore)


def _batched_exchange(value: Any, fields: Mapping[str, Any], mcore: str) -> list[str]:
    """The opposite of overlap; without virtual stages always on."""
    interleaved = (fields.get("virtual_pipeline_model_parallel_size") or 1) > 1
    overlapped = bool(fields.get("overlap_p2p_comm", True)) and (
        interleaved or fields.get("pipeline_model_parallel_layout") is not None
    )
    if overlapped and value:
        raise CannotExpressError("the command line makes it the opposite of overlap_p2p_comm")
    if not overlapped and not value:
        raise CannotExpressError("the command line turns it on without overlap_p2p_comm")
    return []


def _gradient_type(value: Any, fields: Mapping[str, Any], mcore: str) -> list[str]:
    """On with bf16 unless --grad-reduce-in-bf16 (`validate_args`)."""
    if _given_dtype(fields) != "bf16":
        return ["--accumulate-allreduce-grads-in-fp32"] if value else []
    return [] if value else ["--grad-reduce-in-bf16"]


def _offload(value: Any, fields: Mapping[str, Any], mcore: str) -> list[str]:
    """The number of layers is the switch."""
    layers = fields.get("cpu_offloading_num_layers") or 0
    if bool(value) != (layers > 0):
        raise CannotExpressError("cpu_offloading_num_layers above 0 is the only switch")
    return []


def _fixed(expected: Any) -> Any:
    """A field that the command line always hands over as `expected`."""

    def tokens(value: Any, fields: Mapping[str, Any], mcore: str) -> list[str]:
        if value != expected:
            raise CannotExpressError(f"Megatron-LM always makes it {expected!r}")
        return []

    return tokens


def _order(value: Any, fields: Mapping[str, Any], mcore: str) -> list[str]:
    known = {"tp-cp-ep-dp-pp": [], "tp-cp-ep-pp-dp": ["--use-tp-pp-dp-mapping"]}
    if value not in known:
        raise CannotExpressError(f"the command line knows the orders {', '.join(known)}")
    return known[value]


def _context_exchange(value: Any, fields: Mapping[str, Any], mcore: str) -> list[str]:
    return [] if value is None else plain_tokens("cp_comm_type", value, mcore)


def _numbers(value: Any, fields: Mapping[str, Any], mcore: str) -> list[str]:
    if value is None:
        return []
    return plain_tokens("window_size", ",".join(str(edge) for edge in value), mcore)


def _selective_modules(value: Any, fields: Mapping[str, Any], mcore: str) -> list[str]:
    """Selective recompute of no module is no recompute; the option needs a module."""
    return plain_tokens("recompute_modules", value, mcore) if value else []


def _granularity(value: Any, fields: Mapping[str, Any], mcore: str) -> list[str]:
    if value is None or (value == "selective" and fields.get("recompute_modules") == []):
        return []
    return plain_tokens("recompute_granularity", value, mcore)


_SPECIAL: Mapping[str, Any] = {
    "bf16": lambda value, fields, mcore: ["--bf16"] if value else [],
    "fp16": lambda value, fields, mcore: ["--fp16"] if value else [],
    "params_dtype": _dtype,
    "pipeline_dtype": _dtype,
    "virtual_pipeline_model_parallel_size": _virtual,
    "pipeline_model_parallel_layout": _layout,
    "activation_func": _activation,
    "gated_linear_unit": _gated,
    "bias_activation_fusion": _bias_activation,
    "num_query_groups": _query_groups,
    "share_embeddings_and_output_weights": _tied,
    "persist_layer_norm": _persist,
    "batch_p2p_comm": _batched_exchange,
    "grad_reduce_in_fp32": _gradient_type,
    "cpu_offloading": _offload,
    "deallocate_pipeline_outputs": _fixed(True),
    "variable_seq_lengths": _fixed(False),
    "store_param_remainders": _fixed(True),
    "order": _order,
    "cp_comm_type": _context_exchange,
    "window_size": _numbers,
    "recompute_modules": _selective_modules,
    "recompute_granularity": _granularity,
}
