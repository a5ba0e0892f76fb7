"""Decides candidates of one job with the rules: builds the full configuration they look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner.candidate import Candidate
from tuner.constraints import Capabilities, check
from tuner.search.space import SearchSpace
from tuner.search.study import Rejection

_LOOKED_AT = 20_000


@dataclass(frozen=True, slots=True)
class ValidityChecker:
    """Callable for `TuningStudy`: None for a valid candidate, else the first rule it breaks.

    `fixed` holds architecture and run fields (flat, Megatron-Core names); `world_size` is that of
    candidates that do not name their own.
    """

    fixed: Mapping[str, Any]
    world_size: int
    mcore: str
    frontend: str = "mcore"
    capabilities: Capabilities | None = None

    def configuration(self, candidate: Candidate) -> dict[str, Any]:
        """Everything the rules look at, as one flat mapping."""
        return {
            **self.fixed,
            "world_size": self.world_size,
            **candidate.to_flat(mcore=self.mcore),
        }

    def __call__(self, candidate: Candidate) -> Rejection | None:
        result = check(
            self.configuration(candidate),
            mcore=self.mcore,
            frontend=self.frontend,
            capabilities=self.capabilities,
            fixes=False,
        )
        for violation in result.violations:
            if violation.kind == "error":
                return Rejection(violation.rule, violation.message)
        return None


def why_nothing_is_valid(space: SearchSpace, checker: ValidityChecker) -> str | None:
    """None as soon as one point of the space is valid; else the rule that rejects most of it.

    Looks at the first 20,000 points.
    """
    rules: Counter[Rejection] = Counter()
    for position, flat in enumerate(space.enumerate()):
        if position >= _LOOKED_AT:
            return None
        rejection = checker(Candidate.from_flat(flat))
        if rejection is None:
            return None
        rules[rejection] += 1
    if not rules:
        return "the space has no point"
    (rejection, count), *_ = rules.most_common(1)
    return (
        f"all {sum(rules.values())} candidates are invalid; "
        f"rule {rejection.rule} rejects {count} of them: {rejection.message}"
    )
