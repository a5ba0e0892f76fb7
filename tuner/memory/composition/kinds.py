"""Kinds of layer: layers that allocate alike, and a short model that holds a few of each.

A kind is named by what its layers differ in: "dense" or "experts", "windowed" or "linear"
attention, weights kept in "bf16" under FP8. Layers of hybrid models are "mamba", "attention", "mlp"
or "experts".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tuner.models import ModelSpec
from tuner.models.hybrid import ATTENTION, EXPERTS, MAMBA, MLP

_REPEATS = 2
_REPEATS_OFFLOADED = 3
"""Layers of each kind in a profile: the first meets other neighbours than the rest, and the last
keeps on the device what others offload."""

_LETTERS = {MAMBA: "mamba", ATTENTION: "attention", MLP: "mlp", EXPERTS: "experts"}
_EXPERTS, _WINDOWED, _LINEAR, _BF16 = "experts", "windowed", "linear", "bf16"


def layer_kinds(model: ModelSpec, config: Mapping[str, Any]) -> tuple[str, ...]:
    """The kind of every decoder layer; `config` is flat."""
    count = model.num_layers
    first, last = _layers_in_bf16(config)
    names = []
    for layer in range(count):
        parts = [_EXPERTS if model.moe_layer_pattern[layer] else "dense"]
        if model.hybrid_pattern is not None:
            parts = [_LETTERS[model.hybrid_pattern.decoder[layer]]]
        if model.window_layer_pattern[layer]:
            parts.append(_WINDOWED)
        if model.linear_attention_pattern[layer]:
            parts.append(_LINEAR)
        if layer < first or layer >= count - last:
            parts.append(_BF16)
        names.append(" ".join(parts))
    return tuple(names)


def profile_model(
    model: ModelSpec, kinds: Sequence[str], config: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any], tuple[str, ...]]:
    """A model with a few layers of each of `kinds`, the second of which is typical.

    Gives its architecture, `config` with what depends on the number of layers changed, and the
    kind of each layer.
    """
    chosen = sorted(set(kinds), key=lambda kind: (_BF16 not in kind.split(), kind))
    offloads = config.get("fine_grained_activation_offloading") or config.get("cpu_offloading")
    repeats = _REPEATS_OFFLOADED if offloads else _REPEATS
    layers = tuple(kind for kind in chosen for _ in range(repeats))
    words = [kind.split() for kind in layers]
    architecture = model.to_flat()
    architecture["num_layers"] = len(layers)
    if model.hybrid_pattern is not None:
        letters = {name: letter for letter, name in _LETTERS.items()}
        decoder = "".join(letters[parts[0]] for parts in words)
        predicted = f"/{model.hybrid_pattern.prediction}" * model.hybrid_pattern.depths
        architecture["hybrid_layer_pattern"] = decoder + predicted
    elif model.num_moe_experts is not None:
        architecture["moe_layer_freq"] = [int(_EXPERTS in parts) for parts in words]
    if model.window_size is not None:
        windowed = [_WINDOWED in parts for parts in words]
        pattern = [*windowed, *model.window_layer_pattern[model.num_layers :]]
        architecture["window_attn_skip_freq"] = [int(flag) for flag in pattern]
    if model.experimental_attention_variant is not None:
        architecture["linear_attention_freq"] = [int(_LINEAR in parts) for parts in words]
    changed = dict(config)
    if config.get("cpu_offloading"):
        changed["cpu_offloading_num_layers"] = len(layers) - 1
    if sum(_layers_in_bf16(config)):
        changed["num_layers_at_start_in_bf16"] = sum(_BF16 in parts for parts in words)
        changed["num_layers_at_end_in_bf16"] = 0
    return architecture, changed, layers


def _layers_in_bf16(config: Mapping[str, Any]) -> tuple[int, int]:
    """How many of the first and last layers are kept in BF16 under FP8."""
    if not config.get("first_last_layers_bf16") or not (config.get("fp8") or config.get("fp4")):
        return 0, 0
    start, end = config.get("num_layers_at_start_in_bf16"), config.get("num_layers_at_end_in_bf16")
    return (1 if start is None else int(start)), (1 if end is None else int(end))


KIND_FIELDS = (
    "first_last_layers_bf16",
    "num_layers_at_start_in_bf16",
    "num_layers_at_end_in_bf16",
    "fp8",
    "fp4",
)
"""Fields of a configuration that `layer_kinds` reads."""
