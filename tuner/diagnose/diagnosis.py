"""What `tuner diagnose` answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from tuner.diagnose.log import Line
from tuner.diagnose.signatures import Fix, Level

UNKNOWN = "unknown"
_SHOWN = 400


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing found. `details` holds numbers; only out-of-memory messages have some."""

    cause: str
    family: str
    level: Level
    confidence: float
    title: str
    why: str
    evidence: tuple[Line, ...]
    fix: Fix
    source: str
    rule: str | None = None
    details: Mapping[str, Any] = field(default_factory=dict)

    @property
    def line(self) -> int:
        """Number of the first line of evidence."""
        return self.evidence[0].number if self.evidence else 0

    def to_json(self) -> dict[str, Any]:
        return {
            "cause": self.cause,
            "family": self.family,
            "confidence": round(self.confidence, 2),
            "title": self.title,
            "explanation": self.why,
            "evidence": [_shown(line) for line in self.evidence],
            "fix": self.fix.to_json(),
            "rule": self.rule,
            "source": self.source,
            **({"memory": dict(self.details)} if self.details else {}),
        }


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """The answer for one log.

    `outcome` is "failed", "completed" or "incomplete"; `cause` is None where nothing was
    recognised, and `likely` then holds the lines most worth reading.
    """

    outcome: str
    cause: Finding | None
    also: tuple[Finding, ...]
    likely: tuple[Line, ...]
    iterations: int
    train_iters: int | None
    lines: int

    def to_json(self) -> dict[str, Any]:
        """The document of `tuner diagnose --format json`."""
        cause = self.cause.to_json() if self.cause is not None else _unknown()
        if not self.lines:
            cause |= {"title": "The log is empty", "explanation": "It has no line to read."}
        return {
            "outcome": self.outcome,
            **cause,
            "also": [finding.to_json() for finding in self.also],
            "likely_lines": [_shown(line) for line in self.likely],
            "progress": {"iterations": self.iterations, "train_iters": self.train_iters},
            "lines": self.lines,
        }


def _unknown() -> dict[str, Any]:
    return {
        "cause": UNKNOWN,
        "family": UNKNOWN,
        "confidence": 0.0,
        "title": "This failure is not known",
        "explanation": "No known message was found; the likely lines are shown.",
        "evidence": [],
        "fix": Fix().to_json(),
        "rule": None,
        "source": "",
    }


def _shown(line: Line) -> dict[str, Any]:
    return {"line": line.number, "rank": line.rank, "text": line.text.strip()[:_SHOWN]}
