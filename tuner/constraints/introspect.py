"""Which fields a rule can read, found from its code: for messages, docs and repairs."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from types import CodeType
from typing import Any

from tuner.constraints.fields import catalogue
from tuner.constraints.registry import DERIVED


@cache
def fields_read(function: Callable[..., Any]) -> tuple[str, ...]:
    """Field names that `function`, the helpers of its module and derived values read, in order."""
    found: dict[str, None] = {}
    _collect(function, found, set())
    return tuple(found)


def _collect(function: Callable[..., Any], found: dict[str, None], seen: set[int]) -> None:
    code = getattr(function, "__code__", None)
    if code is None or id(code) in seen:
        return
    seen.add(id(code))
    known = catalogue()
    scope = getattr(function, "__globals__", {})
    for name in _names(code):
        if name in known:
            found.setdefault(name)
        elif name in DERIVED:
            _collect(DERIVED[name], found, seen)
        elif _is_rule_helper(scope.get(name)):
            _collect(scope[name], found, seen)


def _names(code: CodeType) -> list[str]:
    names = list(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            names.extend(_names(constant))
    return names


def _is_rule_helper(value: object) -> bool:
    module = getattr(value, "__module__", None) or ""
    return callable(value) and module.startswith("tuner.constraints.rules")
