"""The catalogue of known fields: type, default and versions, read from `data/fields.json`.

Names, types and defaults are those of the dataclasses `TransformerConfig`, `MLATransformerConfig`,
`DistributedDataParallelConfig` and `OptimizerConfig` of Megatron-Core, plus the keys that describe
a run (`world_size`, `seq_length`, `env`, ...).
"""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files

from tuner.constraints.registry import MCORE_VERSIONS

REQUIRED = ("num_layers", "hidden_size", "num_attention_heads")
DTYPES = ("fp32", "bf16", "fp16", "fp64", "uint8", "fp8")
_MAX_LIST = 100_000


@dataclass(frozen=True, slots=True)
class Field:
    """One known field. `default` maps each version that has the field to its default."""

    name: str
    kind: str
    sections: tuple[str, ...]
    default: Mapping[str, object]
    fallback: object
    """What rules read in versions without the field."""
    optional: bool
    choices: tuple[object, ...] | None
    bounds: tuple[int, int] | None
    mla_default: object
    """The default with multi-latent attention, where it differs; None otherwise."""
    also: Mapping[str, tuple[str, ...]]
    """Front ends that offer the field in versions where Megatron-Core's dataclasses lack it."""

    @property
    def only_mla(self) -> bool:
        return self.sections == ("mla",)


@lru_cache(maxsize=1)
def catalogue() -> Mapping[str, Field]:
    """All known fields by name."""
    raw = json.loads((files("tuner.constraints") / "data" / "fields.json").read_text("utf-8"))
    return {name: _field(name, entry) for name, entry in raw.items()}


def _field(name: str, entry: Mapping[str, object]) -> Field:
    versions = entry.get("versions", MCORE_VERSIONS)
    assert isinstance(versions, (list, tuple))
    default = entry["default"]
    by_version = default.get("by_version") if isinstance(default, dict) else None
    choices, bounds = entry.get("choices"), entry.get("bounds")
    sections = entry["sections"]
    also = entry.get("also", {})
    assert isinstance(sections, list)
    assert isinstance(also, dict)
    return Field(
        name=name,
        kind=str(entry["kind"]),
        sections=tuple(sections),
        default=by_version or dict.fromkeys(versions, default),
        fallback=next(iter(by_version.values())) if by_version else default,
        optional=bool(entry.get("optional", False)),
        choices=tuple(choices) if isinstance(choices, list) else None,
        bounds=(bounds[0], bounds[1]) if isinstance(bounds, list) else None,
        mla_default=entry.get("mla_default"),
        also={name: tuple(found) for name, found in also.items()},
    )


def nearest(name: str, names: Iterable[str], *, least: float = 0.6) -> str | None:
    """The most similar known name, or None when nothing is alike by `least` (0 to 1)."""
    found = difflib.get_close_matches(name, list(names), n=1, cutoff=least)
    return found[0] if found else None


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return _is_int(value) or (isinstance(value, float) and math.isfinite(value))


def _is_list(value: object, item: Callable[[object], bool]) -> bool:
    return isinstance(value, (list, tuple)) and len(value) <= _MAX_LIST and all(map(item, value))


def _is_str(value: object) -> bool:
    return isinstance(value, str) and len(value) <= _MAX_LIST


def _is_layout(value: object) -> bool:
    return _is_str(value) or _is_list(value, lambda stage: _is_list(stage, _is_str))


def _is_env(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(k, str) and (isinstance(v, str) or _is_int(v)) for k, v in value.items()
    )


def _is_overlap(value: object) -> bool:
    return isinstance(value, Mapping) and all(
        isinstance(k, str) and (v is None or isinstance(v, (bool, int, str)))
        for k, v in value.items()
    )


_KINDS: dict[str, tuple[str, Callable[[object], bool]]] = {
    "bool": ("true or false", lambda v: isinstance(v, bool)),
    "int": ("a whole number", _is_int),
    "float": ("a finite number", _is_number),
    "str": ("a string", _is_str),
    "dtype": (f"one of {', '.join(DTYPES)}", lambda v: v in DTYPES if _is_str(v) else False),
    "names": ("a list of names", lambda v: _is_str(v) or _is_list(v, _is_str)),
    "strs": ("a list of names", lambda v: _is_list(v, _is_str)),
    "ints": ("a list of whole numbers", lambda v: _is_list(v, _is_int)),
    "int|ints": (
        "a whole number or a list of them",
        lambda v: _is_int(v) or _is_list(v, _is_int),
    ),
    "str|strs": ("a name or a list of names", lambda v: _is_str(v) or _is_list(v, _is_str)),
    "float|floats": (
        "a number or a list of numbers",
        lambda v: _is_number(v) or _is_list(v, _is_number),
    ),
    "layout": ("a layout string or a list of lists of layer names", _is_layout),
    "env": ("a mapping of environment variables to strings", _is_env),
    "mapping": ("a mapping of settings", _is_overlap),
    "any": ("anything", lambda v: True),
}


def type_problem(field: Field, value: object) -> str | None:
    """Why `value` cannot stand in `field`, or None when it can."""
    if value is None:
        return None if field.optional else f"{field.name} must not be null"
    expected, accepts = _KINDS[field.kind]
    if not accepts(value):
        return f"{field.name} must be {expected}, got {_short(value)}"
    if field.bounds and _is_int(value):
        low, high = field.bounds
        if not low <= value <= high:  # type: ignore[operator]
            return f"{field.name} must be between {low} and {high}, got {_short(value)}"
    return None


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
