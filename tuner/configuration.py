"""The input document of `tuner check` and its kin: `{model, world_size, config, ...}`."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tuner.errors import InputError, one_line

if TYPE_CHECKING:
    from tuner.models import ModelSpec

_RUN_KEYS = ("world_size", "seq_length", "global_batch_size", "micro_batch_size", "gpu", "env")
_DEFAULT_MCORE = "0.16.1"
PRECISION_FIELDS: Mapping[str, Mapping[str, Any]] = {
    "bf16": {"bf16": True, "params_dtype": "bf16", "pipeline_dtype": "bf16"},
    "fp32": {"params_dtype": "fp32", "pipeline_dtype": "fp32"},
}
"""The dtype fields of Megatron-Core for each precision a user may name."""


def full_configuration(
    document: Mapping[str, Any], *, mcore: str, where: str, base_folder: Path = Path()
) -> dict[str, Any]:
    """Everything the rules look at, of an input `{model, world_size, config, ...}`.

    Fields inside `config` win over those of `model`; without a `config` key the whole document is
    the flat configuration. Raises InputError where `model` or `config` cannot be used.
    """
    if "config" not in document:
        return _plain(document, where)
    config = document["config"]
    if not isinstance(config, Mapping):
        raise InputError("is not a mapping of fields to values", where=where, field="config")
    model: dict[str, Any] = {}
    if document.get("model") is not None:
        try:
            model = rule_fields(resolve_model(document["model"], base_folder), mcore)
        except InputError as error:
            raise error.at(where, "model") from None
        except (ValueError, TypeError) as error:
            raise InputError(str(error), where=where, field="model") from None
    run = {key: document[key] for key in _RUN_KEYS if document.get(key) is not None}
    fields = _plain(config, where)
    if document.get("frontend") == "megatron-lm":
        fields = _without_model_arguments(fields)
    return {**model, **_precision(document, model), **run, **fields}


def _without_model_arguments(fields: Mapping[str, Any]) -> dict[str, Any]:
    """The fields of a command line without arguments of `GPTModel`, which no rule reads."""
    from tuner.constraints.fields import catalogue
    from tuner.models import MODEL_INPUTS

    known = catalogue()
    return {n: value for n, value in fields.items() if n in known or n not in MODEL_INPUTS}


_DOCUMENT_KEYS = frozenset(
    (*_RUN_KEYS, "model", "config", "precision", "frontend", "gpus_per_node", "te_version")
)


def misspelt_keys(document: Mapping[str, Any]) -> list[str]:
    """What to say of keys beside `config` that are not read but look like one that is."""
    if "config" not in document:
        return []  # a flat configuration, whose fields the rules know
    found = []
    for key in document:
        near = get_close_matches(str(key), _DOCUMENT_KEYS, n=1, cutoff=0.7)
        if key not in _DOCUMENT_KEYS and near:
            found.append(one_line(f"'{key}' is not read; did you mean '{near[0]}'?"))
    return found


def with_model(document: Mapping[str, Any], base_folder: Path) -> dict[str, Any]:
    """The document with its model, if it has one, written out as flat fields.

    Raises what `resolve_model` raises.
    """
    if document.get("model") is None:
        return dict(document)
    return {**document, "model": resolve_model(document["model"], base_folder).to_flat()}


def completed(document: Mapping[str, Any], run: Mapping[str, Any]) -> dict[str, Any]:
    """The document with what it leaves open taken from `run`, whose None says nothing."""
    return {**{name: value for name, value in run.items() if value is not None}, **document}


def resolve_model(model: str | Mapping[str, Any], base_folder: Path) -> ModelSpec:
    """A model as users name it: a catalogue name, `{hf_config: PATH}`, or architecture fields.

    A mapping of fields may start from a catalogue model with `base: NAME`; paths are relative to
    `base_folder`. Raises ModelSpecError or InputError (both ValueError).
    """
    from tuner.models import ModelSpec, from_hf_config, get_model

    if isinstance(model, Mapping) and "hf_config" in model:
        others = sorted(set(model) - {"hf_config"})
        if others:
            raise InputError(f"`hf_config` stands alone, without {', '.join(others)}")
        return from_hf_config(base_folder / str(model["hf_config"]))
    if isinstance(model, Mapping) and "base" in model:
        fields = {name: value for name, value in model.items() if name != "base"}
        base = get_model(str(model["base"]))
        return ModelSpec.from_flat({**base.to_flat(), **fields}, name=f"{base.name}, changed")
    return get_model(model)


def rule_fields(model: ModelSpec, mcore: str) -> dict[str, Any]:
    """The fields of a model that Megatron-Core `mcore` has in its configuration classes.

    What is left out are arguments of `GPTModel` (position embedding, tied embeddings, ...), which
    no rule reads and a configuration class would not know.
    """
    from tuner.constraints.fields import catalogue
    from tuner.constraints.registry import resolve_version

    known, version = catalogue(), resolve_version(mcore)
    fields = {
        name: value
        for name, value in model.to_flat().items()
        if name in known
        and version in known[name].default
        and (model.multi_latent_attention or not known[name].only_mla)
    }
    if fields.get("activation_func") == "quick_gelu":
        # Models have the function of fusions/fused_bias_geglu.py, which rules call by this name.
        fields["activation_func"] = "quick_geglu"
    return fields


def _precision(document: Mapping[str, Any], model: Mapping[str, Any]) -> dict[str, Any]:
    """Dtype fields of a catalogue model, which does not name them; bf16 unless said otherwise."""
    if not model:
        return {}
    fp32 = document.get("precision") == "fp32"
    return dict(PRECISION_FIELDS["fp32" if fp32 else "bf16"])


def _plain(config: Mapping[str, Any], where: str) -> dict[str, Any]:
    """The configuration with string keys only; `dp` and other derived names are refused later."""
    for key in config:
        if not isinstance(key, str):
            raise InputError(f"the key {key!r} is not a name", where=where, field="config")
    return dict(config)


def mcore_version() -> str:
    """The installed Megatron-Core's version, or the oldest supported one where none is."""
    try:
        return importlib.metadata.version("megatron-core")
    except importlib.metadata.PackageNotFoundError:
        return _DEFAULT_MCORE
