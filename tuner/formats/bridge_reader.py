"""Reading Megatron Bridge settings: override words, or the nested mapping of a YAML file."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tuner.constraints.fields import catalogue
from tuner.formats.bridge_fields import ACTIVATIONS, DTYPES
from tuner.formats.hydra import read_value

SECTIONS = frozenset(
    (
        *("model", "ddp", "optimizer", "train", "rng", "dist", "checkpoint", "dataset"),
        *("rerun_state_machine", "comm_overlap", "mixed_precision", "logger", "scheduler"),
        *("tokenizer", "validation", "profiling", "peft"),
    )
)
OVERRIDE = re.compile(r"(?:\+\+|\+|~)?([A-Za-z_]\w*)((?:\.\w+)*)=(.*)", re.DOTALL)
_FLAGS = {
    "-tp": "tensor_model_parallel_size",
    "-pp": "pipeline_model_parallel_size",
    "-cp": "context_parallel_size",
    "-vp": "virtual_pipeline_model_parallel_size",
    "-ep": "expert_model_parallel_size",
    "-etp": "expert_tensor_parallel_size",
    "-mb": "micro_batch_size",
    "-gb": "global_batch_size",
    "-sl": "seq_length",
}
"""Short options of `run_recipe.py`; the long ones are `--` and the field's name."""
_RUN_FIELDS = {
    "sequence_length": "seq_length",
    "use_tp_pp_dp_mapping": "order",
}
_DTYPE_NAMES = {f"torch.{torch_name}": name for name, torch_name in DTYPES.items()}
_OBJECT_NAMES = {target: name for name, target in ACTIVATIONS.items()}
_BACKEND = "megatron.core.transformer.enums.AttnBackend."
_IGNORED = frozenset(("_target_", "user_comm_overlap_cfg", "data_parallel_size"))


def is_override(word: str) -> bool:
    """Whether a word is `section.field=value`, or one of the container's own parts."""
    match = OVERRIDE.fullmatch(word)
    return match is not None and match[1] in SECTIONS


def read_overrides(words: Sequence[str]) -> dict[str, Any]:
    """Flat fields of override words and of the runner's short options; later words win."""
    fields: dict[str, Any] = {}
    for at, word in enumerate(words):
        match = OVERRIDE.fullmatch(word)
        if match is not None and match[1] in SECTIONS:
            path = [match[1], *match[2].split(".")[1:]]
            _place(path, read_value(match[3]), fields)
            continue
        flag, equals, attached = word.partition("=")
        name = _FLAGS.get(flag) or _long_option(flag)
        if name is None:
            continue
        text = attached if equals else words[at + 1] if at + 1 < len(words) else ""
        if re.fullmatch(r"\d+", text):
            fields[name] = int(text)
    return fields


def _long_option(flag: str) -> str | None:
    name = flag.removeprefix("--").replace("-", "_")
    return name if flag.startswith("--") and name in _FLAGS.values() else None


def read_nested(document: Mapping[str, Any]) -> dict[str, Any]:
    """Flat fields of a nested mapping of the container's parts."""
    fields: dict[str, Any] = {}
    for path, value in _leaves(document):
        _place(path, value, fields)
    return fields


def _leaves(document: Mapping[str, Any]) -> Iterator[tuple[list[str], Any]]:
    for section, content in document.items():
        if section not in SECTIONS:
            continue
        if isinstance(content, Mapping) and section != "comm_overlap":
            for name, value in content.items():
                yield [section, str(name)], value
        else:
            yield [section], content


def _place(path: Sequence[str], value: Any, fields: dict[str, Any]) -> None:
    """Put one assignment in, under the flat name; parts that hold no known field are passed by."""
    section = path[0]
    if section == "comm_overlap":
        _place_overlap(path[1:], value, fields)
        return
    if section == "mixed_precision" and len(path) == 1:
        fields["mixed_precision"] = value if isinstance(value, str) else None
        return
    if len(path) != 2:
        return
    name = _RUN_FIELDS.get(path[1], path[1])
    if name == "order":
        fields["order"] = "tp-cp-ep-pp-dp" if value else "tp-cp-ep-dp-pp"
    elif name in catalogue():
        fields[name] = _plain(value)


def _place_overlap(path: Sequence[str], value: Any, fields: dict[str, Any]) -> None:
    overlap = fields.get("comm_overlap") or {}
    if path:
        overlap = {**overlap, path[0]: value}
    elif isinstance(value, Mapping):
        overlap = {k: v for k, v in value.items() if k not in _IGNORED}
    else:
        overlap = None
    fields["comm_overlap"] = overlap


def _plain(value: Any) -> Any:
    """An instantiated object as the name the tuner has for it."""
    target = value.get("_target_") if isinstance(value, Mapping) else value
    if not isinstance(target, str):
        return value
    if target in _DTYPE_NAMES:
        return _DTYPE_NAMES[target]
    if target in _OBJECT_NAMES:
        return _OBJECT_NAMES[target]
    return target.removeprefix(_BACKEND)
