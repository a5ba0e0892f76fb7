"""From what users hand to `tuner export` to what the exporters write."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tuner.candidate import Candidate
from tuner.errors import InputError
from tuner.formats.result import Settings

_PLACE = ("gpu", "gpus_per_node", "frontend")
_RUN_SHAPE = ("seq_length", "global_batch_size", "micro_batch_size")


def settings_of(
    document: Mapping[str, Any], *, mcore: str, where: str, base_folder: Path = Path()
) -> Settings:
    """The settings of `{model, world_size, config, ...}` or of a flat configuration.

    CUDA-graph fields take the spelling of `mcore`, a supported version. Raises InputError where
    the document cannot be read.
    """
    config = document.get("config", document)
    if not isinstance(config, Mapping):
        raise InputError("is not a mapping of fields to values", where=where, field="config")
    candidate = Candidate.from_flat(config)
    fields = candidate.to_flat(mcore=mcore)
    fields.pop("env", None)
    if "config" in document:
        shape = {name: document[name] for name in _RUN_SHAPE if document.get(name) is not None}
        fields = {**shape, **fields} if "micro_batch_size" in config else {**fields, **shape}
    precision = document.get("precision") if "config" in document else None
    return Settings(
        mcore=mcore,
        fields=fields,
        model=_architecture(document, where, base_folder),
        env={**_environment(document), **dict(candidate.env)},
        world_size=document.get("world_size") or config.get("world_size"),
        precision=str(precision) if precision else None,
        place={name: document[name] for name in _PLACE if document.get(name) is not None},
    )


def _architecture(document: Mapping[str, Any], where: str, base_folder: Path) -> dict[str, Any]:
    from tuner.configuration import resolve_model

    if "config" not in document or document.get("model") is None:
        return {}
    try:
        return dict(resolve_model(document["model"], base_folder).to_flat())
    except InputError as error:
        raise error.at(where, "model") from None
    except (ValueError, TypeError) as error:
        raise InputError(str(error), where=where, field="model") from None


def _environment(document: Mapping[str, Any]) -> dict[str, str]:
    env = document.get("env") if "config" in document else None
    return {str(name): str(value) for name, value in env.items()} if env else {}
