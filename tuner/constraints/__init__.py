"""What Megatron-Core, Megatron Bridge and Megatron-LM accept, refuse and silently change.

`check` decides one candidate, `fix` repairs it, `screen` decides arrays of candidates and
`enumerate_valid` builds the valid ones of a space; all use the same rules (`RULES`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tuner.constraints.checker import check
from tuner.constraints.fixing import FixResult, apply_fix, fix
from tuner.constraints.registry import FRONTENDS, MCORE_VERSIONS, RULES, Rule, load_rules
from tuner.constraints.result import Capabilities, CheckResult, InputError, Violation

if TYPE_CHECKING:
    from tuner.constraints.enumeration import Candidates, enumerate_valid
    from tuner.constraints.screening import ScreenResult, Tables, screen

__all__ = [
    "FRONTENDS",
    "MCORE_VERSIONS",
    "RULES",
    "Candidates",
    "Capabilities",
    "CheckResult",
    "FixResult",
    "InputError",
    "Rule",
    "ScreenResult",
    "Tables",
    "Violation",
    "apply_fix",
    "check",
    "describe",
    "enumerate_valid",
    "fix",
    "load_rules",
    "screen",
]

# Names that need numpy are imported when they are first used: `check` starts without it.
_LAZY = {
    "Candidates": "enumeration",
    "enumerate_valid": "enumeration",
    "ScreenResult": "screening",
    "Tables": "screening",
    "screen": "screening",
}


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        import importlib

        return getattr(importlib.import_module(f"tuner.constraints.{_LAZY[name]}"), name)
    raise AttributeError(name)


def describe() -> list[dict[str, object]]:
    """Every rule as plain data: id, kind, what, fields, fixes, versions, front ends, reference."""
    from tuner.constraints.docs import describe_rules

    return describe_rules()
