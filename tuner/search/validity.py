"""Decides candidates of one job with the rules: builds the full configuration they look at."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from random import Random
from typing import Any

from tuner.candidate import Candidate
from tuner.constraints import Capabilities, Violation, check
from tuner.search.records import Rejection
from tuner.search.space import SearchSpace

_LOOKED_AT = 5_000


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
        broken = self.errors(candidate)
        return Rejection(broken[0].rule, broken[0].message) if broken else None

    def errors(self, candidate: Candidate, *, fixes: bool = False) -> list[Violation]:
        """The rules that a candidate breaks, with a way out of each where `fixes` are wanted.

        Those that foretell a failure after upstream's checks count, too.
        """
        result = check(
            self.configuration(candidate),
            mcore=self.mcore,
            frontend=self.frontend,
            capabilities=self.capabilities,
            fixes=fixes,
        )
        return list(result.failures)


def why_nothing_is_valid(space: SearchSpace, checker: ValidityChecker) -> str | None:
    """None as soon as one point of the space is valid; else the rule that rejects most of it.

    Looks at every point, or at random ones where the space has more than 5,000.
    """
    rejections: Counter[Rejection] = Counter()
    for flat in space.points(_LOOKED_AT, Random(0)):
        rejection = checker(Candidate.from_flat(flat))
        if rejection is None:
            return None
        rejections[rejection] += 1
    if not rejections:
        return "the space has no point"
    (worst, count), *_ = rejections.most_common(1)
    looked_at = sum(rejections.values())
    which = "all" if looked_at < _LOOKED_AT else "the"
    return (
        f"{which} {looked_at} candidates looked at are invalid; "
        f"rule {worst.rule} rejects {count} of them: {worst.message}"
    )
