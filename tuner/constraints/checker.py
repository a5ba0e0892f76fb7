"""The verdict on one candidate."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.constraints.fields import REQUIRED, catalogue, type_problem
from tuner.constraints.registry import (
    FRONTENDS,
    UNCHANGED,
    Fix,
    Rule,
    resolve_version,
    rules_for,
)
from tuner.constraints.result import Capabilities, CheckResult, InputError, Violation
from tuner.constraints.view import View, given_view, model_view

_TYPES_REFERENCE = "dataclass fields of TransformerConfig, DDP and optimizer configs"


def check(
    config: Mapping[str, object],
    *,
    mcore: str = "0.16.1",
    frontend: str = "mcore",
    capabilities: Capabilities | None = None,
    fixes: bool = True,
) -> CheckResult:
    """Decide one candidate.

    Args:
        config: flat mapping of fields, including the architecture and the keys of the run.
        mcore: Megatron-Core version, `0.16` to `0.19` or any patch of these.
        frontend: `mcore`, `bridge` or `megatron-lm`.
        capabilities: what the machine has; None asks no rule about it.
        fixes: look for the fix of each violation (costs a few extra rule evaluations).

    Raises:
        InputError: `config` is not a mapping with string keys.
        ValueError: unknown version or front end.
    """
    version = resolve_version(mcore)
    _require_frontend(frontend)
    _require_mapping(config)
    violations, values = screen_types(config, version, frontend)
    given = build_view(values, version, frontend, capabilities)
    model = model_view(given)
    rewrites: dict[str, object] = {}
    broken: list[Rule] = []
    for rule in rules_for(version, frontend):
        answer = evaluate(rule, given, model)
        if rule.kind == "rewrite":
            if answer is not UNCHANGED:
                _add_rewrite(rule, answer, given, config, violations, rewrites)
        elif answer:
            broken.append(rule)
            violations.append(
                Violation(
                    rule.id,
                    rule.kind,
                    rule_fields(rule),
                    answer,
                    None,
                    rule.reference,
                    rule.doomed,
                )
            )
    valid = all(v.kind != "error" for v in violations)
    result = CheckResult(valid, tuple(violations), rewrites)
    if not fixes or not (broken or not valid):
        return result
    from tuner.constraints.fixing import with_fixes

    return with_fixes(result, broken, config, version, frontend, capabilities)


def _require_frontend(frontend: str) -> None:
    if frontend not in FRONTENDS:
        raise ValueError(f"unknown front end {frontend!r}; use one of {', '.join(FRONTENDS)}")


def _require_mapping(config: object) -> None:
    if not isinstance(config, Mapping):
        raise InputError(f"a candidate is a mapping of fields, got {type(config).__name__}")
    for key in config:
        if not isinstance(key, str):
            raise InputError(f"field names are strings, got {key!r}")


def build_view(
    values: Mapping[str, object],
    version: str,
    frontend: str,
    capabilities: Capabilities | None,
) -> View:
    """The given view, with what is known of the machine filled in where the run does not say."""
    given = given_view(values, version, frontend)
    if capabilities is not None:
        given.__dict__["capabilities"] = capabilities
        if capabilities.transformer_engine is not None and given.te_version is None:
            given.__dict__["te_version"] = capabilities.transformer_engine
    return given


def evaluate(rule: Rule, given: View, model: View) -> Any:
    """The answer of one rule; a rule that cannot be evaluated says so instead of raising."""
    try:
        return rule.check(given if rule.layer == "given" else model)
    except Exception as error:  # the promise of `check` is a verdict for every input
        if rule.kind != "error":
            return UNCHANGED if rule.kind == "rewrite" else None
        return f"rule {rule.id} cannot be decided for these values ({error!r})"


def screen_types(
    config: Mapping[str, object], version: str, frontend: str
) -> tuple[list[Violation], dict[str, object]]:
    """Unknown fields and ill-typed values as violations, and the values that remain."""
    known = catalogue()
    violations: list[Violation] = []
    values: dict[str, object] = {}
    for name, value in config.items():
        problem = field_problem(name, value, config, version, frontend)
        if problem is None:
            values[name] = value
        else:
            violations.append(problem)
    for name in REQUIRED:
        if config.get(name) is None and name in known and name not in config:
            text = f"{name} is missing: the model is not described"
            violations.append(Violation("T02", "error", (name,), text, None, _TYPES_REFERENCE))
    return violations, values


def field_problem(
    name: str, value: object, config: Mapping[str, object], version: str, frontend: str
) -> Violation | None:
    """Rule V01 (this version has no such field) or T01 (ill-typed value) for one field."""
    from tuner.constraints.availability import unavailable

    field = catalogue().get(name)
    reason = unavailable(name, field, config, version, frontend)
    if reason is not None:
        message, fix = reason
        return Violation("V01", "error", (name,), message, fix, _TYPES_REFERENCE)
    assert field is not None
    problem = type_problem(field, value)
    if problem is None:
        return None
    default = field.default.get(version)
    return Violation("T01", "error", (name,), problem, {name: default}, _TYPES_REFERENCE)


def _add_rewrite(
    rule: Rule,
    after: object,
    given: View,
    config: Mapping[str, object],
    violations: list[Violation],
    rewrites: dict[str, object],
) -> None:
    name = rule.field
    assert name is not None
    before = getattr(given, name)
    if same_value(after, before) or not (rule.implicit or name in config):
        return
    message = f"{name}: {_show(before)} becomes {_show(after)}. {rule.what}"
    violations.append(
        Violation(rule.id, "rewrite", (name,), message, {name: after}, rule.reference)
    )
    rewrites[name] = after


def same_value(a: object, b: object) -> bool:
    """Equality that does not confuse 1 with True or a tuple with a different list."""
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return list(a) == list(b)
    return type(a) is type(b) and a == b


def _show(value: object) -> str:
    text = "not set" if value is None else repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def fix_changes(fix: Fix, view: View) -> Mapping[str, object] | None:
    """The field changes of a declared fix for this candidate."""
    if not callable(fix):
        return fix
    try:
        return fix(view)
    except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
        return None


def rule_fields(rule: Rule) -> tuple[str, ...]:
    """The fields a rule speaks about: the field names its code reads, derived values unfolded."""
    from tuner.constraints.introspect import fields_read

    return fields_read(rule.check)
