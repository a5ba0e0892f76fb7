"""Reading Megatron-LM command lines: options to Megatron-Core's field names.

Two readings of the same line: `given_fields` says what the user wrote, which the rules of the
`megatron-lm` front end judge; `effective_fields` adds what the command line hands to Megatron-Core
(its own defaults, `validate_args`, `core_transformer_config_from_args`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from tuner.constraints.fields import Field, catalogue, nearest
from tuner.errors import InputError
from tuner.formats.arguments import Argument, arguments, by_flag
from tuner.formats.megatron_fields import RENAMED
from tuner.models.spec import ModelSpec

_NUMBER = re.compile(r"[+-]?\d+")
_OPTION = re.compile(r"--[A-Za-z][\w.-]*(=.*)?", re.DOTALL)


@dataclass(slots=True)
class Options:
    """The options of one line by destination, and the words that are no option of Megatron-LM."""

    mcore: str
    values: dict[str, Any] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)


def read_options(words: Sequence[str], mcore: str) -> Options:
    """The options among the words. Raises InputError where one lacks its value."""
    options = Options(mcore)
    known = by_flag(mcore)
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        flag, equals, attached = word.partition("=")
        argument = known.get(flag)
        if argument is None:
            if _OPTION.fullmatch(word):
                options.unknown.append(word)
            continue
        taken = [attached] if equals else []
        while argument.kind in ("value", "values") and at < len(words):
            if (taken and argument.kind == "value") or _OPTION.fullmatch(words[at]):
                break
            taken.append(words[at])
            at += 1
        options.values[argument.dest] = _read(argument, flag, taken)
    return options


def _read(argument: Argument, flag: str, words: Sequence[str]) -> Any:
    if argument.kind == "switch":
        return not flag.startswith("--no-")
    if argument.kind in ("true", "false"):
        return argument.kind == "true"
    if not words:
        raise InputError("needs a value", field=flag)
    return list(words) if argument.kind == "values" else words[0]


_ALIKE = 0.85
_PROGRAM = re.compile(r".*\.py|pretrain_\w+")


def passed_by(words: Sequence[str], options: Options) -> list[str]:
    """What to say of options that Megatron-LM does not have: of each that looks like a slip, and of
    all that stand behind a program, which are not the launcher's."""
    known = by_flag(options.mcore)
    program = next((at for at, word in enumerate(words) if _PROGRAM.fullmatch(word)), len(words))
    own = set(words[program:])
    slips, others = [], []
    for word in dict.fromkeys(options.unknown):
        flag = word.partition("=")[0]
        meant = nearest(flag, known, least=_ALIKE)
        if meant is not None and not _has_words_of(flag, meant):
            slips.append(f"there is no option {flag}: did you mean {meant}?")
        elif word in own:
            others.append(flag)
    if others:
        slips.append(f"not Megatron-LM's and passed by: {', '.join(others)}")
    return slips


def _has_words_of(flag: str, other: str) -> bool:
    """Whether one name is the other with further words, as those of other programs are."""
    mine, theirs = (set(name.split("-")) for name in (flag, other))
    return mine <= theirs or theirs <= mine


def given_fields(options: Options) -> dict[str, Any]:
    """Fields of the options that stand on the line, architecture left out.

    Raises InputError for a value that is not of its field's type.
    """
    values, fields = options.values, {}
    for name, known in catalogue().items():
        dest = RENAMED.get(name, name)
        if dest in values and name not in _ARCHITECTURE and name not in _SPECIAL_DESTINATIONS:
            fields[name] = convert(known, values[dest])
    fields |= _special_fields(options)
    return fields


def effective_fields(options: Options, given: Mapping[str, Any]) -> dict[str, Any]:
    """What reaches Megatron-Core: `given` over the command line's defaults, after its rewrites."""
    from tuner.constraints.registry import HANDED_OVER, load_rules
    from tuner.constraints.view import given_view, model_view

    load_rules()
    fields = {**_defaults(options.mcore), **given}
    view = model_view(given_view({**_architecture_of(options), **fields}, options.mcore, _FRONTEND))
    for name in HANDED_OVER[_FRONTEND]:
        if name in fields:
            fields[name] = getattr(view, name)
    return fields


_FRONTEND = "megatron-lm"
_ARCHITECTURE = frozenset(ModelSpec.__dataclass_fields__) - {"name", "vocab_size"}
_SPECIAL_DESTINATIONS = frozenset(
    (
        *("bf16", "fp16", "virtual_pipeline_model_parallel_size", "num_query_groups"),
        *("fp8_param", "fp4_param", "check_for_nan_in_grad", "cpu_offloading", "activation_func"),
    )
)
_MACHINE_DEFAULTS = frozenset(
    (
        *("attention_softmax_in_fp32", "bias_dropout_fusion", "gradient_accumulation_fusion"),
        *("masked_softmax_fusion", "apply_rope_fusion", "overlap_p2p_comm", "align_param_gather"),
        *("optimizer_offload_fraction", "data_parallel_sharding_strategy"),
    )
)
"""Options whose default differs from that of Megatron-Core's dataclasses and changes a run."""


def _defaults(mcore: str) -> dict[str, Any]:
    known = arguments(mcore)
    defaults = {name: known[name][0].default for name in _MACHINE_DEFAULTS if name in known}
    return {**defaults, "bias_activation_fusion": True}


def _special_fields(options: Options) -> dict[str, Any]:
    values = options.values
    dtype = "bf16" if values.get("bf16") else "fp16" if values.get("fp16") else "fp32"
    fields: dict[str, Any] = {"params_dtype": dtype, "pipeline_dtype": dtype}
    if dtype != "fp32":
        fields[dtype] = True
    fields["use_distributed_optimizer"] = bool(values.get("use_distributed_optimizer"))
    fields["grad_reduce_in_fp32"] = _reduces_in_fp32(values, dtype)
    fields["virtual_pipeline_model_parallel_size"] = _chunks(values)
    if values.get("fp8_param_gather"):
        fields["fp8_param_gather"] = fields["fp8_param"] = True
    if values.get("fp4_param_gather"):
        fields["fp4_param"] = True
    if values.get("no_persist_layer_norm"):
        fields["persist_layer_norm"] = False
    for switch in ("bias_swiglu_fusion", "bias_gelu_fusion"):
        swiglu = switch == "bias_swiglu_fusion"
        if values.get(switch) is False and swiglu == bool(values.get("swiglu")):
            fields["bias_activation_fusion"] = False
    if values.get("use_tp_pp_dp_mapping"):
        fields["order"] = "tp-cp-ep-pp-dp"
    if _whole(values.get("cpu_offloading_num_layers")) > 0:
        fields["cpu_offloading"] = True
    if values.get("recompute_activations"):
        fields["recompute_granularity"] = "selective"
    if "cuda_graph_scope_deprecated" in values:
        fields["cuda_graph_modules"] = list(values["cuda_graph_scope_deprecated"])
    return {name: value for name, value in fields.items() if value is not None}


def _whole(value: Any) -> int:
    return int(value) if value is not None and _NUMBER.fullmatch(str(value)) else 0


def _reduces_in_fp32(values: Mapping[str, Any], dtype: str) -> bool:
    """Off by default except with bf16 (`validate_args`)."""
    if dtype == "bf16" and not values.get("grad_reduce_in_bf16"):
        return True
    return bool(values.get("accumulate_allreduce_grads_in_fp32"))


def _chunks(values: Mapping[str, Any]) -> int | None:
    """Model chunks per pipeline rank, named or by their layers (`validate_args`)."""
    named = _whole(values.get("num_virtual_stages_per_pipeline_rank"))
    if named:
        return named
    layers = _whole(values.get("num_layers_per_virtual_pipeline_stage"))
    stages = _whole(values.get("pipeline_model_parallel_size")) or 1
    total = _whole(values.get("num_layers"))
    if not layers or stages == 1 or not total:
        return None
    chunks = total // stages // layers
    return chunks if chunks > 1 else None


def architecture(options: Options) -> dict[str, Any]:
    """Architecture fields of the line, the vocabulary only where it says one.

    Raises InputError for architectures that a model spec does not describe.
    """
    from tuner.validation.launch import UnmodelledError
    from tuner.validation.megatron_lm import model_fields

    named = dict(_named(dest, value, options.mcore) for dest, value in options.values.items())
    unnamed = False
    try:
        fields = model_fields(named)
    except UnmodelledError as error:
        if "vocabulary" not in str(error):
            raise InputError(str(error)) from None
        fields, unnamed = model_fields({**named, "vocab-size": 1}), True
    except KeyError as error:
        raise InputError("is missing", field=f"--{str(error.args[0]).replace('_', '-')}") from None
    if unnamed:
        fields.pop("vocab_size")
    if options.values.get("quick_geglu"):
        fields |= {"activation_func": "quick_gelu", "gated_linear_unit": True}
    known = catalogue()
    for name in _ARCHITECTURE - set(fields) - _SPECIAL_DESTINATIONS:
        if RENAMED.get(name, name) in options.values and name in known:
            fields[name] = convert(known[name], options.values[RENAMED.get(name, name)])
    return fields


def _architecture_of(options: Options) -> dict[str, Any]:
    """The architecture as the rules read it."""
    known = catalogue()
    return {
        name: list(value) if isinstance(value, tuple) else value
        for name, value in architecture(options).items()
        if name in known and options.mcore in known[name].default
    }


def _named(dest: str, value: Any, mcore: str) -> tuple[str, Any]:
    """The option without its dashes and its value, as Megatron-LM's own test recipes have them."""
    argument = arguments(mcore)[dest][0]
    present = argument.kind in ("true", "false")
    return argument.flags[0].removeprefix("--"), True if present else _scalar(value)


def _scalar(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    if _NUMBER.fullmatch(value):
        return int(value)
    try:
        return float(value)
    except ValueError:
        return value


def convert(known: Field, value: Any) -> Any:
    """A word or list of words as the field's type. Raises InputError where it is not one."""
    kind = known.kind
    try:
        return _convert(kind, value)
    except ValueError:
        unknown = "$" in str(value)
        raise InputError(
            f"the script does not say what {value!r} is"
            if unknown
            else f"{value!r} is not of kind {kind}",
            field=known.name,
            fix="write the value in its place, or set the variable by a plain NAME=VALUE"
            if unknown
            else "",
        ) from None


def _convert(kind: str, value: Any) -> Any:
    if isinstance(value, bool):
        return value
    if isinstance(value, list):
        items = [_item(kind, item) for item in value]
        single = kind in ("int|ints", "str|strs", "float|floats") and len(items) == 1
        return items[0] if single else items
    if kind in ("strs", "names") and isinstance(value, str):
        return value.strip("[]").replace(",", " ").split()
    if kind == "ints" and isinstance(value, str):
        return [int(item) for item in re.split(r"[,\s]+", value.strip("()[] "))]
    if kind == "int|ints" and isinstance(value, str) and not _NUMBER.fullmatch(value):
        from tuner.validation.megatron_lm import layer_frequency

        pattern = layer_frequency(value)
        return list(pattern) if isinstance(pattern, tuple) else pattern
    if kind == "bool":
        return {"true": True, "1": True, "false": False, "0": False}[str(value).lower()]
    return _item(kind, value)


def _item(kind: str, value: Any) -> Any:
    if kind in ("int", "ints", "int|ints"):
        return int(value)
    if kind in ("float", "float|floats"):
        return float(value)
    return str(value)
