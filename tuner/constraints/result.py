"""What a check answers: violations, rewrites, and their JSON form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from tuner import errors
from tuner.constraints.registry import Kind


class InputError(errors.InputError):
    """The input is not a candidate at all (not a mapping, keys that are not strings)."""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What the machine has. None means unknown: the rules that need it are not asked."""

    cuda: bool | None = None
    transformer_engine: str | None = None
    """Installed version, `"none"` when it is known to be missing."""
    compute_capability: tuple[int, int] | None = None
    torch: str | None = None


@dataclass(frozen=True, slots=True)
class Violation:
    """One rule a candidate breaks, one value upstream would change, or one unwise choice."""

    rule: str
    kind: Kind
    fields: tuple[str, ...]
    message: str
    fix: Mapping[str, object] | None
    reference: str
    doomed: bool = False
    """Advice on a run that upstream's checks let pass and that fails all the same."""

    def to_json(self) -> dict[str, object]:
        return {
            "rule": self.rule,
            "kind": self.kind,
            "fields": list(self.fields),
            "message": self.message,
            "fix": None if self.fix is None else dict(self.fix),
            "reference": self.reference,
        }


TYPE_RULES = ("T01", "T02")
"""Rules that a value breaks which no version of its field can have, or a field that is missing."""


@dataclass(frozen=True, slots=True)
class CheckResult:
    """The verdict on one candidate. `valid` is False when any violation is an error."""

    valid: bool
    violations: tuple[Violation, ...] = ()
    rewrites: Mapping[str, object] = field(default_factory=dict)

    @property
    def errors(self) -> tuple[Violation, ...]:
        return tuple(v for v in self.violations if v.kind == "error")

    @property
    def failures(self) -> tuple[Violation, ...]:
        """Errors, and advice that foretells a failure after upstream's checks."""
        return tuple(v for v in self.violations if v.kind == "error" or v.doomed)

    def to_json(self) -> dict[str, object]:
        return {
            "valid": self.valid,
            "violations": [violation.to_json() for violation in self.violations],
            "rewrites": dict(self.rewrites),
        }
