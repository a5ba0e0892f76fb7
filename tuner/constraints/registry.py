"""Rules, derived values and front-end rewrites: how they are declared and found.

A rule is one small function that takes a `View` of a candidate and returns the message a user
should read when the candidate breaks the rule, or `None` when it does not apply.  The same
function serves one candidate (`check`) and arrays of candidates (`screen`).

A derived value is what upstream computes from the fields before it looks at them again (a default
filled in, a deprecated spelling translated); rules read it as an attribute of the view.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

MCORE_VERSIONS = ("0.16.1", "0.17.0", "0.18.0", "0.19.2")
BRIDGE_VERSIONS = dict(zip(MCORE_VERSIONS, ("0.3.1", "0.4.2", "0.5.1", "0.6.2"), strict=True))
FRONTENDS = ("mcore", "bridge", "megatron-lm")

Kind = Literal["error", "rewrite", "advice"]
# Errors and advice return a message or None; rewrites return the new value or `UNCHANGED`.
Check = Callable[[Any], Any]
FieldChanges = Mapping[str, object]
# One way out: fixed field values, or a function of the view that computes them (None: no way).
Fix = FieldChanges | Callable[[Any], FieldChanges | None]


class _Unchanged:
    """The answer of a rewrite that does not act."""

    def __repr__(self) -> str:
        return "UNCHANGED"


UNCHANGED = _Unchanged()


@dataclass(frozen=True, slots=True)
class Rule:
    """One validity condition of upstream, or one piece of measured advice."""

    id: str
    kind: Kind
    check: Check
    what: str
    """The condition in plain words (the docstring of the function)."""
    reference: str
    """File and symbol of the upstream package, or the source of a measured figure."""
    fixes: tuple[Fix, ...]
    versions: tuple[str, ...]
    frontends: tuple[str, ...]
    layer: Literal["given", "model"]
    """`given`: reads what the user wrote; `model`: what the front end hands to Megatron-Core."""
    field: str | None
    """The field a rewrite changes; None for errors and advice."""
    implicit: bool
    doomed: bool
    """Upstream's checks let it pass, and the run fails all the same: no search proposes it."""

    @property
    def name(self) -> str:
        return self.check.__name__


RULES: list[Rule] = []
DERIVED: dict[str, Callable[[Any], Any]] = {}


class DenseDefault:
    """A front end's default that models with multi-latent attention do not share.

    `value` may map each Megatron-Core version to its default.
    """

    def __init__(self, value: object) -> None:
        self.value = value


# Defaults of a front end that differ from those of Megatron-Core's own dataclasses.
FRONTEND_DEFAULTS: dict[str, dict[str, object]] = {
    name: {} for name in ("mcore", "bridge", "megatron-lm")
}
# frontend -> field -> function of the given view that says what reaches Megatron-Core.
HANDED_OVER: dict[str, dict[str, Callable[[Any], Any]]] = {name: {} for name in FRONTENDS}


def rule(
    rule_id: str,
    reference: str,
    *,
    kind: Kind = "error",
    fix: Fix | Sequence[Fix] = (),
    since: str = "0.16.1",
    until: str = "0.19.2",
    frontends: Sequence[str] = FRONTENDS,
    layer: Literal["given", "model"] = "model",
    field: str | None = None,
    implicit: bool = False,
    doomed: bool = False,
) -> Callable[[Check], Check]:
    """Register a rule; `since` and `until` are Megatron-Core versions, both included."""
    fixes = (fix,) if isinstance(fix, Mapping) or callable(fix) else tuple(fix)
    first, last = MCORE_VERSIONS.index(since), MCORE_VERSIONS.index(until)

    def register(check: Check) -> Check:
        RULES.append(
            Rule(
                id=rule_id,
                kind=kind,
                check=check,
                what=" ".join((check.__doc__ or "").split()),
                reference=reference,
                fixes=fixes,
                versions=MCORE_VERSIONS[first : last + 1],
                frontends=tuple(frontends),
                layer=layer,
                field=field,
                implicit=implicit,
                doomed=doomed,
            )
        )
        return check

    return register


def rewrite(
    rule_id: str,
    field: str,
    reference: str,
    *,
    since: str = "0.16.1",
    until: str = "0.19.2",
    frontends: Sequence[str] = FRONTENDS,
    layer: Literal["given", "model"] = "model",
    implicit: bool = False,
) -> Callable[[Check], Check]:
    """Register a silent change of `field`: the function returns the new value or `UNCHANGED`.

    `implicit` rewrites are reported even when the user did not set the field.
    """
    return rule(
        rule_id,
        reference,
        kind="rewrite",
        since=since,
        until=until,
        frontends=frontends,
        layer=layer,
        field=field,
        implicit=implicit,
    )


def derived(function: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Register a derived value under the function's name; it is computed at most once per view."""
    DERIVED[function.__name__] = function
    return function


def handed_over(frontend: str, *fields: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register what `frontend` passes to Megatron-Core for a field it may rewrite.

    With one field the function takes the given view; with several it also takes the field name.
    """

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for name in fields:
            if len(fields) == 1:
                HANDED_OVER[frontend][name] = function
            else:
                HANDED_OVER[frontend][name] = partial(_with_name, function, name)
        return function

    return register


def _with_name(function: Callable[..., Any], name: str, view: Any) -> Any:
    return function(view, name)


_loaded = False


def load_rules() -> list[Rule]:
    """Import every module of `tuner.constraints.rules` once and return all rules."""
    global _loaded
    if not _loaded:
        from tuner.constraints import rules

        for module in pkgutil.iter_modules(rules.__path__):
            importlib.import_module(f"{rules.__name__}.{module.name}")
        _loaded = True
    return RULES


_selection_cache: dict[tuple[str, str], tuple[Rule, ...]] = {}


def rules_for(mcore: str, frontend: str) -> tuple[Rule, ...]:
    """The rules that hold for one version and front end, in the order of their modules."""
    key = (mcore, frontend)
    if key not in _selection_cache:
        _selection_cache[key] = tuple(
            r for r in load_rules() if mcore in r.versions and frontend in r.frontends
        )
    return _selection_cache[key]


def resolve_version(mcore: str) -> str:
    """Map `0.16`, `0.16.0`, `core_v0.16.1` ... to the supported version with the same minor.

    Raises:
        ValueError: no supported version has that minor number.
    """
    text = str(mcore).strip().removeprefix("core_").removeprefix("v")
    minor = ".".join(text.split(".")[:2])
    for version in MCORE_VERSIONS:
        if minor == version.rpartition(".")[0]:
            return version
    known = ", ".join(MCORE_VERSIONS)
    raise ValueError(f"Megatron-Core version {mcore!r} is not supported; use one of {known}")
