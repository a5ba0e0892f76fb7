"""The signatures of failures in `data/signatures.yaml`, compiled once."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal

Level = Literal["root", "symptom", "consequence", "hint"]


@dataclass(frozen=True, slots=True)
class Fix:
    """A way out: fields of the candidate (null removes one), variables, and what else to do."""

    changes: Mapping[str, Any] = field(default_factory=dict)
    env: Mapping[str, str] = field(default_factory=dict)
    actions: tuple[str, ...] = ()

    def to_json(self) -> dict[str, Any]:
        return {
            "changes": dict(self.changes),
            "env": dict(self.env),
            "actions": list(self.actions),
        }


@dataclass(frozen=True, slots=True)
class Signature:
    """One cause and how it looks; see the head of the data file."""

    id: str
    family: str
    level: Level
    confidence: float
    pattern: re.Pattern[str]
    unless: re.Pattern[str] | None
    title: str
    why: str
    fix: Fix
    source: str

    def matches(self, text: str) -> bool:
        """Whether a line is evidence of this cause."""
        if self.unless is not None and self.unless.search(text):
            return False
        return self.pattern.search(text) is not None


@lru_cache(maxsize=1)
def signatures() -> tuple[Signature, ...]:
    """All signatures, in the order of the file."""
    import yaml

    text = (files("tuner.diagnose") / "data" / "signatures.yaml").read_text(encoding="utf-8")
    return tuple(_signature(entry) for entry in yaml.safe_load(text))


def _joined(pattern: str) -> str:
    """A pattern as one branch of an alternation: a leading `(?i)` holds for itself only."""
    if pattern.startswith("(?i)"):
        return f"(?i:{pattern.removeprefix('(?i)')})"
    return f"(?:{pattern})"


def _signature(entry: Mapping[str, Any]) -> Signature:
    unless = entry.get("unless")
    return Signature(
        id=entry["id"],
        family=entry["family"],
        level=entry["level"],
        confidence=float(entry["confidence"]),
        pattern=re.compile("|".join(_joined(pattern) for pattern in entry["patterns"])),
        unless=re.compile(unless) if unless else None,
        title=entry["title"],
        why=entry["why"],
        fix=Fix(entry.get("changes", {}), entry.get("env", {}), tuple(entry.get("actions", ()))),
        source=entry["source"],
    )
