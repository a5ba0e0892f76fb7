"""Plain JSON values to the Python objects the packages take, and back."""

from __future__ import annotations

import copy
import enum
from collections.abc import Mapping
from typing import Any

ACTIVATIONS = ("silu", "gelu", "relu", "quick_gelu", "squared_relu")
DTYPES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16", "uint8": "uint8"}


def to_python(field: str, value: Any) -> Any:
    """The object ``field`` takes: data types, activation functions, or a copy of the value."""
    import torch

    if isinstance(value, str) and field.endswith("_dtype") and value in DTYPES:
        return getattr(torch, DTYPES[value])
    if field == "activation_func" and value in ACTIVATIONS:
        return _activation(value)
    if field == "attention_backend" and isinstance(value, str):
        from megatron.core.transformer.enums import AttnBackend

        return AttnBackend[value]
    return copy.deepcopy(value)


def _activation(name: str) -> Any:
    import torch.nn.functional as functional
    from megatron.core import activations

    if name in ("silu", "gelu", "relu"):
        return getattr(functional, name)
    return getattr(activations, name)


def to_json(value: Any) -> Any:
    """The JSON spelling of what a package holds; anything unknown becomes its text."""
    import torch

    if isinstance(value, torch.dtype):
        names = {getattr(torch, torch_name): name for name, torch_name in DTYPES.items()}
        return names.get(value, str(value))
    if isinstance(value, enum.Enum):
        return value.name
    if isinstance(value, list | tuple):
        return [to_json(one) for one in value]
    if isinstance(value, dict):
        return {str(key): to_json(one) for key, one in value.items()}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    return getattr(value, "__name__", str(value))


#: Objects rather than values once a package has read them.
OPAQUE = frozenset(("activation_func", "pipeline_model_parallel_layout"))


def changes(given: Mapping[str, Any], holder: Any) -> dict[str, list[Any]]:
    """Fields of ``given`` whose value in ``holder`` differs: ``{field: [given, held]}``."""
    changed = {}
    for name, value in given.items():
        if name in OPAQUE or not hasattr(holder, name):
            continue
        held = to_json(getattr(holder, name))
        if held != value:
            changed[name] = [value, held]
    return changed
