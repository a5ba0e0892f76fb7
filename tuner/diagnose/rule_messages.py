"""Upstream's refusals of a configuration, and the rules that know them.

`data/rule_messages.json` maps the text of each refusal, with `*` for what varies, to the functions
of `tuner.constraints.rules` that decide the same. It was made from the recorded verdicts of the
real packages: which rule is broken where the package says what.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any

from tuner.constraints.registry import Rule, load_rules
from tuner.diagnose.signatures import Fix

_OWN = re.compile(r"\b(?:invalid by |broken |violates? )?rule ([A-Z]\d\d)\b")


@dataclass(frozen=True, slots=True)
class Refusal:
    """One text of upstream. `key` is its longest part without a `*`, to look for first."""

    key: str
    pattern: re.Pattern[str]
    rules: tuple[str, ...]


@lru_cache(maxsize=1)
def refusals() -> tuple[Refusal, ...]:
    """All known texts, the longest first."""
    raw = json.loads((files("tuner.diagnose") / "data" / "rule_messages.json").read_text("utf-8"))
    found = [_refusal(text, names) for text, names in raw.items()]
    return tuple(sorted(found, key=lambda one: -len(one.pattern.pattern)))


def _refusal(text: str, names: list[str]) -> Refusal:
    parts = text.split("*")
    pattern = ".{0,200}?".join(re.escape(part) for part in parts)
    return Refusal(max(parts, key=len).strip(), re.compile(pattern), tuple(names))


@lru_cache(maxsize=1)
def _by_name() -> Mapping[str, Rule]:
    return {rule.name: rule for rule in load_rules()}


def rule_of(text: str) -> Rule | None:
    """The rule whose refusal the text holds; None where it holds none."""
    for refusal in refusals():
        if refusal.key in text and refusal.pattern.search(text):
            return _by_name().get(refusal.rules[0])
    own = _OWN.search(text)
    if own is not None:
        return next((rule for rule in load_rules() if rule.id == own[1]), None)
    return None


def fix_of(rule: Rule, config: Mapping[str, Any], mcore: str, frontend: str) -> Fix:
    """The fix of a broken rule: for this configuration where it is known, else in general."""
    if config:
        from tuner.constraints import check

        result = check(config, mcore=mcore, frontend=frontend)
        for violation in result.violations:
            if violation.rule == rule.id and violation.fix:
                return _fix(violation.fix)
    for fix in rule.fixes:
        if isinstance(fix, Mapping):
            return _fix(fix)
    return Fix(actions=(f"change what the rule asks for: {rule.what}",))


def _fix(changes: Mapping[str, Any]) -> Fix:
    env = changes.get("env")
    fields = {name: value for name, value in changes.items() if name != "env"}
    return Fix(fields, {str(k): str(v) for k, v in env.items()} if env else {})
