"""What Megatron-Core, Megatron Bridge and Megatron-LM accept, refuse and silently change.

`check` decides one candidate, `fix` repairs it, `screen` decides arrays of candidates and
`enumerate_valid` builds the valid ones of a space; all use the same rules (`RULES`).
"""

from __future__ import annotations

from tuner.constraints.checker import check
from tuner.constraints.registry import FRONTENDS, MCORE_VERSIONS, RULES, Rule, load_rules
from tuner.constraints.result import Capabilities, CheckResult, InputError, Violation

__all__ = [
    "FRONTENDS",
    "MCORE_VERSIONS",
    "RULES",
    "Capabilities",
    "CheckResult",
    "InputError",
    "Rule",
    "Violation",
    "check",
    "load_rules",
]
