"""The folders of trials that ran more than once, and of those a dead driver left behind."""

from __future__ import annotations

import json
from pathlib import Path

from tuner.measurement import RESULT_FILE, Outcome, TrialResult

_FINAL = (Outcome.COMPLETED, Outcome.OOM, Outcome.DIVERGED)


def keep_attempt(folder: Path, number: int) -> None:
    """Move what attempt `number` (from 1) left in a trial's folder into `attempt-N` inside it."""
    kept = folder / f"attempt-{number}"
    kept.mkdir(parents=True, exist_ok=True)
    for entry in list(folder.iterdir()):
        if not entry.name.startswith("attempt-"):
            entry.replace(kept / entry.name)


def finished_result(folder: Path) -> TrialResult | None:
    """The result of a trial that ran to its end although nobody was left to hear of it.

    Only ends that a second run would reach again: completed, out of memory, diverged.
    """
    try:
        result = TrialResult.from_json(json.loads((folder / RESULT_FILE).read_text()))
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return result if result.outcome in _FINAL else None
