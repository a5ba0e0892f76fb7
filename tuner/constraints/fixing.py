"""Repair: the smallest set of field changes that makes a candidate valid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from tuner.constraints.checker import build_view, check, fix_changes, same_value
from tuner.constraints.fields import catalogue
from tuner.constraints.introspect import fields_read
from tuner.constraints.registry import Rule, resolve_version, rules_for
from tuner.constraints.result import Capabilities, CheckResult, Violation
from tuner.constraints.view import given_class, model_view

# What the user cannot trade: a repair never changes the model or the size of the cluster unless a
# rule itself proposes it.
_FIXED_FIELDS = frozenset(
    (
        *("num_layers", "hidden_size", "num_attention_heads", "num_query_groups", "kv_channels"),
        *("ffn_hidden_size", "num_moe_experts", "moe_ffn_hidden_size", "moe_router_topk"),
        *("moe_layer_freq", "multi_latent_attention", "gated_linear_unit", "activation_func"),
        *("normalization", "params_dtype", "bf16", "vocab_size", "seq_length", "world_size"),
        *("gpu", "te_version"),
    )
)
# Rules of the checker itself, without a function.
_BUILT_IN = ("V01", "T01", "T02")
_BEAM = 6
_MAX_STEPS = 8


@dataclass(frozen=True, slots=True)
class FixResult:
    """A repaired candidate, or the best that was found."""

    config: Mapping[str, object]
    changes: Mapping[str, object]
    """Fields that differ from the given candidate, with their new values."""
    result: CheckResult
    """The verdict on `config`."""

    def to_json(self) -> dict[str, object]:
        """`changes` and `config` as plain data, `valid`, and the verdict's violations."""
        verdict = self.result.to_json()
        return {"changes": dict(self.changes), "config": dict(self.config), **verdict}


def with_fixes(
    result: CheckResult,
    broken: Sequence[Rule],
    config: Mapping[str, object],
    mcore: str,
    frontend: str,
    capabilities: Capabilities | None,
) -> CheckResult:
    """The same verdict with a fix on every violation.

    Of the fixes a rule declares the one is taken that leaves the fewest errors; when the only
    error of a candidate is not cured by any of them, a repair is searched for.
    """
    search = _Search(mcore, frontend, capabilities)
    start = dict(config)
    rules = iter(broken)
    violations = []
    for violation in result.violations:
        if violation.kind == "rewrite" or violation.rule in _BUILT_IN:
            violations.append(violation)
            continue
        changes = search.best_declared(start, next(rules))
        violations.append(replace(violation, fix=changes))
    errors = [v for v in violations if v.kind == "error"]
    if len(errors) == 1 and not search.cures(start, errors[0]):
        found = search.repair(start)
        if found.result.valid:
            violations = [
                replace(v, fix=found.changes) if v is errors[0] else v for v in violations
            ]
    return replace(result, violations=tuple(violations))


def apply_fix(config: Mapping[str, object], result: CheckResult) -> dict[str, object]:
    """Apply the fixes a result proposes for its errors, first come first served, once."""
    fixed = dict(config)
    changed: set[str] = set()
    for violation in result.errors:
        if violation.fix and not changed & violation.fix.keys():
            if violation.rule == "V01":
                fixed = {n: v for n, v in fixed.items() if n not in violation.fields}
            else:
                fixed |= violation.fix
            changed |= violation.fix.keys()
    return fixed


def fix(
    config: Mapping[str, object],
    *,
    mcore: str = "0.16.1",
    frontend: str = "mcore",
    capabilities: Capabilities | None = None,
) -> FixResult:
    """Search for the smallest change that makes a candidate valid.

    Declared fixes of the broken rules are tried first, then other values of the fields they read;
    the few most promising partial repairs are kept at each step, and changes that turn out not to
    be needed are taken back at the end.

    Raises:
        InputError, ValueError: as `check`.
    """
    return _Search(mcore, frontend, capabilities).repair(dict(config))


def differences(before: Mapping[str, object], after: Mapping[str, object]) -> dict[str, object]:
    """Fields of `after` that differ from `before`; a removed field maps to None."""
    missing = object()
    changed = {
        name: value
        for name, value in after.items()
        if not same_value(before.get(name, missing), value)
    }
    return changed | {name: None for name in before if name not in after}


class _Search:
    """One repair: version, front end and what was already checked."""

    def __init__(self, mcore: str, frontend: str, capabilities: Capabilities | None) -> None:
        self._version = resolve_version(mcore)
        self._frontend = frontend
        self._capabilities = capabilities
        # Keyed by identity; the candidate is kept so that its id stays its own.
        self._verdicts: dict[int, tuple[dict[str, object], CheckResult]] = {}
        rules: dict[str, list[Rule]] = {}
        for rule in rules_for(self._version, frontend):
            rules.setdefault(rule.id, []).append(rule)
        self._rules = rules

    def check(self, config: dict[str, object]) -> CheckResult:
        key = id(config)
        if key not in self._verdicts:
            verdict = check(
                config,
                mcore=self._version,
                frontend=self._frontend,
                capabilities=self._capabilities,
                fixes=False,
            )
            self._verdicts[key] = (config, verdict)
        return self._verdicts[key][1]

    def repair(self, start: dict[str, object]) -> FixResult:
        """Search in steps, keeping the few candidates with the fewest errors."""
        first = self.check(start)
        if not first.failures:
            return FixResult(start, {}, first)
        best = (len(first.failures), start, first)
        beam = [best]
        seen: set[str] = set()
        for _ in range(_MAX_STEPS):
            grown = []
            for _, candidate, verdict in beam:
                for changed in self.neighbours(candidate, verdict):
                    key = repr(sorted(changed.items(), key=lambda item: item[0]))
                    if key not in seen:
                        seen.add(key)
                        found = self.check(changed)
                        grown.append((len(found.failures), changed, found))
            if not grown:
                break
            grown.sort(key=lambda item: (item[0], len(differences(start, item[1]))))
            best = min(best, grown[0], key=lambda item: item[0])
            if best[0] == 0:
                break
            beam = grown[:_BEAM]
        final = self.minimise(start, best[1]) if best[0] == 0 else best[1]
        return FixResult(final, differences(start, final), self.check(final))

    def best_declared(self, config: dict[str, object], rule: Rule) -> Mapping[str, object] | None:
        """The declared fix of a broken rule that leaves the fewest errors."""
        options = [self.trim(config, c) for c in self._declared_changes(config, rule)]
        if len(options) < 2 or (rule.kind == "advice" and not rule.doomed):
            return options[0] if options else None
        return min(options, key=lambda c: (len(self.check({**config, **c}).failures), len(c)))

    def trim(
        self, config: dict[str, object], changes: Mapping[str, object]
    ) -> Mapping[str, object]:
        """The changes without those that change nothing or are not needed."""
        defaults = given_class(self._version, self._frontend)
        kept = {
            name: value
            for name, value in changes.items()
            if not same_value(config.get(name, getattr(defaults, name, None)), value)
        }
        if len(kept) < 2:
            return kept or changes
        errors = len(self.check({**config, **kept}).failures)
        for name in list(kept):
            fewer = {n: v for n, v in kept.items() if n != name}
            if fewer and len(self.check({**config, **fewer}).failures) <= errors:
                kept = fewer
        return kept

    def cures(self, config: dict[str, object], violation: Violation) -> bool:
        """Whether a violation's fix makes the candidate valid."""
        if violation.fix is None:
            return False
        if violation.rule == "V01":
            rest = {n: v for n, v in config.items() if n not in violation.fields}
            return not self.check(rest).failures
        return not self.check({**config, **violation.fix}).failures

    def _declared_changes(
        self, config: dict[str, object], rule: Rule
    ) -> Iterator[Mapping[str, object]]:
        known = {n: v for n, v in config.items() if n in catalogue()}
        given = build_view(known, self._version, self._frontend, self._capabilities)
        view = given if rule.layer == "given" else model_view(given)
        for declared in rule.fixes:
            changes = fix_changes(declared, view)
            if changes:
                yield changes

    def neighbours(
        self, config: dict[str, object], verdict: CheckResult
    ) -> Iterator[dict[str, object]]:
        """Candidates one repair step away: the declared fixes, then other field values."""
        errors = verdict.failures
        for violation in errors:
            yield from self._declared(config, violation)
        for violation in errors[:2]:
            yield from self._other_values(config, violation)

    def _declared(
        self, config: dict[str, object], violation: Violation
    ) -> Iterator[dict[str, object]]:
        if violation.rule in _BUILT_IN:
            rest = {n: v for n, v in config.items() if n not in violation.fields}
            yield rest
            return
        for rule in self._rules.get(violation.rule, ()):
            for changes in self._declared_changes(config, rule):
                yield {**config, **changes}

    def _other_values(
        self, config: dict[str, object], violation: Violation
    ) -> Iterator[dict[str, object]]:
        """Each field the broken rule reads, set to its default or to a neighbouring value."""
        read: dict[str, None] = dict.fromkeys(violation.fields)
        for rule in self._rules.get(violation.rule, ()):
            read.update(dict.fromkeys(fields_read(rule.check)))
        for name in read:
            if name in _FIXED_FIELDS or name not in catalogue():
                continue
            for value in self._alternatives(name, config.get(name)):
                yield {**config, name: value}

    def _alternatives(self, name: str, value: object) -> Iterator[object]:
        field = catalogue()[name]
        default = getattr(given_class(self._version, self._frontend), name, None)
        if not same_value(default, value) and (default is not None or field.optional):
            yield default
        if field.kind == "bool":
            yield not value
        elif field.choices:
            yield from (choice for choice in field.choices if choice != value)
        elif field.kind == "int" and isinstance(value, int) and value > 1:
            yield from (size for size in (value // 2, value * 2, 1) if size != value)
        if field.kind in ("names", "strs") and isinstance(value, (list, tuple)):
            yield from ([v for v in value if v != name] for name in value)

    def minimise(self, start: Mapping[str, object], fixed: dict[str, object]) -> dict[str, object]:
        """Take back every change that is not needed."""
        for name in differences(start, fixed):
            back = dict(fixed)
            if name in start:
                back[name] = start[name]
            else:
                back.pop(name, None)
            if not self.check(back).failures:
                fixed = back
        return fixed
