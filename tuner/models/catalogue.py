"""The packaged catalogue: one YAML file for each model in `tuner/models/catalogue/`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import cache
from importlib import resources
from typing import Any

import yaml

from tuner.models.errors import ModelSpecError, did_you_mean
from tuner.models.spec import ModelSpec

_VENDOR_SUFFIXES = ("-hf", "-base", "-instruct", "-chat", "-it")


def model_names() -> tuple[str, ...]:
    """Every name in the catalogue, sorted."""
    return tuple(sorted(_files()))


def get_model(model: str | Mapping[str, Any]) -> ModelSpec:
    """The spec of a catalogue name, or of a mapping of architecture fields.

    Names are matched without regard to case, underscores, dots, a leading organisation
    (`meta-llama/`) and the alternative spellings a catalogue file lists. A mapping may carry its
    own `name`. Raises `ModelSpecError` naming the nearest names, or the field at fault.
    """
    if isinstance(model, Mapping):
        fields = dict(model)
        name = fields.pop("name", "custom")
        if not isinstance(name, str):
            raise ModelSpecError(f"model: name={name!r} must be text")
        return ModelSpec.from_flat(fields, name=name)
    if not isinstance(model, str):
        raise ModelSpecError(
            f"model={model!r} must be a catalogue name or a mapping of architecture fields"
        )
    return _load(_resolve(model))


def read_entry(name: str) -> dict[str, Any]:
    """The whole catalogue file of an exact name: `model`, `source`, `published_parameters`."""
    text = _files()[name].read_text(encoding="utf-8")
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    entry = yaml.load(text, Loader=loader)  # noqa: S506 - a safe loader, the fast one if present
    if not isinstance(entry, dict):
        raise ModelSpecError(f"catalogue file of {name!r} is not a mapping")
    return entry


@cache
def _load(name: str) -> ModelSpec:
    return ModelSpec.from_flat(read_entry(name)["model"], name=name)


@cache
def _files() -> dict[str, resources.abc.Traversable]:
    folder = resources.files("tuner.models") / "catalogue"
    return {
        entry.name.removesuffix(".yaml"): entry
        for entry in folder.iterdir()
        if entry.name.endswith(".yaml")
    }


def _resolve(name: str) -> str:
    files = _files()
    if name in files:
        return name
    wanted = _normalise(name)
    by_normalised = {_normalise(known): known for known in files}
    if wanted in by_normalised:
        return by_normalised[wanted]
    for known in files:
        if wanted in {_normalise(alias) for alias in read_entry(known).get("aliases", ())}:
            return known
    raise ModelSpecError(f"unknown model {name!r}; {did_you_mean(name.lower(), files)}")


def _normalise(name: str) -> str:
    """Letters and digits only, lower case, without organisation and release suffix."""
    short = name.lower().rsplit("/", 1)[-1].replace("_", "-")
    for suffix in _VENDOR_SUFFIXES:
        short = short.removesuffix(suffix)
    return re.sub(r"[^a-z0-9]", "", short)
