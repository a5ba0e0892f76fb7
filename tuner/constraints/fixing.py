"""Repair: the smallest set of field changes that makes a candidate valid."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

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


def apply_fix(config: Mapping[str, object], result: CheckResult) -> dict[str, object]:
    """Apply the fixes a result proposes for its errors, first come first served, once."""
    fixed = dict(config)
    changed: set[str] = set()
    for violation in result.errors:
        if violation.fix and not changed & violation.fix.keys():
            fixed |= violation.fix
            changed |= violation.fix.keys()
        elif violation.fix is None and violation.rule == "V01":
            for name in violation.fields:
                fixed.pop(name, None)
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
    search = _Search(mcore, frontend, capabilities)
    start = dict(config)
    first = search.check(start)
    if first.valid:
        return FixResult(start, {}, first)
    best = (len(first.errors), start, first)
    beam = [best]
    seen: set[str] = set()
    for _ in range(_MAX_STEPS):
        grown = []
        for _, candidate, verdict in beam:
            for changed in search.neighbours(candidate, verdict):
                key = repr(sorted(changed.items(), key=lambda item: item[0]))
                if key in seen:
                    continue
                seen.add(key)
                grown.append((len(search.check(changed).errors), changed, search.check(changed)))
        if not grown:
            break
        grown.sort(key=lambda item: (item[0], len(differences(start, item[1]))))
        if grown[0][0] < best[0]:
            best = grown[0]
        if best[0] == 0:
            break
        beam = grown[:_BEAM]
    final = search.minimise(start, best[1]) if best[0] == 0 else best[1]
    return FixResult(final, differences(start, final), search.check(final))


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
        self._verdicts: dict[int, CheckResult] = {}
        rules: dict[str, list[Rule]] = {}
        for rule in rules_for(self._version, frontend):
            rules.setdefault(rule.id, []).append(rule)
        self._rules = rules

    def check(self, config: dict[str, object]) -> CheckResult:
        key = id(config)
        if key not in self._verdicts:
            self._verdicts[key] = check(
                config,
                mcore=self._version,
                frontend=self._frontend,
                capabilities=self._capabilities,
                fixes=False,
            )
        return self._verdicts[key]

    def neighbours(
        self, config: dict[str, object], verdict: CheckResult
    ) -> Iterator[dict[str, object]]:
        """Candidates one repair step away: the declared fixes, then other field values."""
        errors = verdict.errors
        for violation in errors:
            yield from self._declared(config, violation)
        for violation in errors[:2]:
            yield from self._other_values(config, violation)

    def _declared(
        self, config: dict[str, object], violation: Violation
    ) -> Iterator[dict[str, object]]:
        if violation.rule in ("V01", "T01"):
            rest = {n: v for n, v in config.items() if n not in violation.fields}
            yield rest
            return
        view = build_view(
            {n: v for n, v in config.items() if n in catalogue()},
            self._version,
            self._frontend,
            self._capabilities,
        )
        for rule in self._rules.get(violation.rule, ()):
            for declared in rule.fixes:
                changes = fix_changes(declared, view if rule.layer == "given" else model_view(view))
                if changes:
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
            if self.check(back).valid:
                fixed = back
        return fixed
