"""Read-only views of one candidate: what the rules read.

`given_view` holds what the user wrote over the defaults of the version and front end;
`model_view` is what the front end hands to Megatron-Core after its own rewrites.  Attributes that
are neither are derived values, computed on first use and kept.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Any

from tuner.constraints.fields import catalogue
from tuner.constraints.registry import (
    DERIVED,
    FRONTEND_DEFAULTS,
    HANDED_OVER,
    MCORE_VERSIONS,
    DenseDefault,
    load_rules,
)


class _Unset:
    """In an array of candidates: this candidate does not set the field."""

    def __repr__(self) -> str:
        return "UNSET"


UNSET = _Unset()


class View:
    """A candidate as attributes. Values never change after construction."""

    mcore: str
    minor: int
    """16 to 19: the minor number of the Megatron-Core version."""
    frontend: str

    def __getattr__(self, name: str) -> Any:
        function = DERIVED.get(name)
        if function is None:
            raise AttributeError(f"no field and no derived value is called {name!r}")
        value = function(self)
        self.__dict__[name] = value
        return value


class ModelView(View):
    """What a front end hands over: reads the given view unless the front end rewrites a field."""

    def __init__(self, given: View) -> None:
        self.__dict__["given"] = given

    def __getattr__(self, name: str) -> Any:
        given = self.__dict__["given"]
        override = HANDED_OVER[given.frontend].get(name)
        if override is not None:
            value = override(given)
        elif name in DERIVED:
            value = DERIVED[name](self)
        else:
            value = getattr(given, name)
        self.__dict__[name] = value
        return value


class ByAttention:
    """Class attribute for a default that differs with multi-latent attention."""

    def __init__(self, dense: object, latent: object) -> None:
        self._dense = dense
        self._latent = latent

    def __get__(self, view: View | None, owner: type | None = None) -> object:
        latent = view is not None and bool(view.multi_latent_attention)
        return self._latent if latent else self._dense


@cache
def given_class(mcore: str, frontend: str) -> type[View]:
    """The class whose attributes are the defaults of one version and front end."""
    load_rules()
    attributes: dict[str, object] = {}
    for name, field in catalogue().items():
        attributes[name] = field.default.get(mcore, field.fallback)
        if field.mla_default is not None:
            attributes[name] = ByAttention(attributes[name], field.mla_default)
    for name, default in FRONTEND_DEFAULTS[frontend].items():
        if isinstance(default, DenseDefault):
            value = default.value[mcore] if isinstance(default.value, dict) else default.value
            attributes[name] = ByAttention(value, attributes[name])
        else:
            attributes[name] = default
    attributes |= {
        "mcore": mcore,
        "minor": 16 + MCORE_VERSIONS.index(mcore),
        "frontend": frontend,
        "capabilities": None,
    }
    return type("GivenView", (View,), attributes)


def given_view(values: Mapping[str, object], mcore: str, frontend: str) -> View:
    """The view of well-typed `values` over the defaults."""
    view = given_class(mcore, frontend)()
    view.__dict__.update(values)
    return view


def model_view(given: View) -> View:
    """What `given.frontend` hands to Megatron-Core (the same view when it changes nothing)."""
    return given if given.frontend == "mcore" else ModelView(given)
