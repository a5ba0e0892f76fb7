"""What a study proposes and remembers, as values."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from tuner.candidate import Candidate
from tuner.measurement import Measurement, Outcome

REJECTED = "rejected"
DUPLICATE = "duplicate"
RUNNING = "running"


@dataclass(frozen=True, slots=True)
class Rejection:
    """Why a candidate may not run: the rule's id and its message."""

    rule: str
    message: str


Checker = Callable[[Candidate], "Rejection | None"]


@dataclass(frozen=True, slots=True)
class Proposal:
    """A valid candidate to launch; `number` is its trial number in the study.

    `expected` holds what the search expects of it, where the sampler says: step time in seconds and
    the standard deviation of its log, peak bytes, the chance to fit and the reason.
    """

    number: int
    candidate: Candidate
    expected: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class TrialRecord:
    """What the study knows of one trial. `outcome` is an Outcome's value or "running"."""

    number: int
    candidate: Candidate
    outcome: str
    reason: str
    duration_s: float
    measurement: Measurement | None
    expected: Mapping[str, Any] | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)

    @property
    def feasible(self) -> bool:
        """Whether it ran through within the memory limit."""
        return self.outcome == Outcome.COMPLETED.value and self.measurement is not None

    @property
    def ran(self) -> Candidate:
        """The candidate as it ran at last: with the variables that a retry added."""
        env = self.evidence.get("env")
        if not env:
            return self.candidate
        return replace(
            self.candidate, env=tuple(sorted({**dict(self.candidate.env), **env}.items()))
        )

    @property
    def running(self) -> bool:
        """Whether it has not ended."""
        return self.outcome == RUNNING


def best_of(records: Iterable[TrialRecord], metric: str) -> TrialRecord | None:
    """The feasible record with the largest `metric` of its measurement; the earlier of equals."""
    feasible = [record for record in records if record.feasible]
    if not feasible:
        return None
    return max(feasible, key=lambda r: (getattr(r.measurement, metric), -r.number))


def pareto_front(records: Iterable[TrialRecord], metric: str) -> list[TrialRecord]:
    """Feasible trials that no other beats in both peak memory and `metric`, leanest first."""
    feasible = [(r, r.measurement) for r in records if r.feasible and r.measurement is not None]
    feasible.sort(key=lambda p: (p[1].peak_memory_allocated_bytes, -getattr(p[1], metric)))
    front: list[TrialRecord] = []
    reached = float("-inf")
    for record, measured in feasible:
        if getattr(measured, metric) > reached:
            reached = getattr(measured, metric)
            front.append(record)
    return front
