"""Signs of life of a trial: a small file that its first local rank touches at every step.

A launcher that sees no change for long enough takes the trial for hung. Programs that never write
the file are watched by `timeout_s` alone.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tuner.measurement import write_json_atomically

PROGRESS_FILE = "progress-{node_rank}.json"
HANG_MULTIPLE = 10.0
"""A step may take this many times the longest step seen before the trial counts as hung."""


def write_progress(output_dir: Path, node_rank: int, phase: str, steps: int) -> None:
    """Note that a phase of the start ended, or that `steps` steps are done.

    Called by one process of a node. Replaced, not rewritten: a reader sees a whole document.
    """
    write_json_atomically(
        output_dir / PROGRESS_FILE.format(node_rank=node_rank),
        {"phase": phase, "steps": steps, "time_s": time.time()},
    )


@dataclass(slots=True)
class Watch:
    """Follows one node's progress file and says for how long nothing has changed."""

    path: Path
    allowed_s: float
    _seen_mtime_ns: int = 0
    _since: float = 0.0
    _steps: int = 0
    _longest_step_s: float = 0.0

    @classmethod
    def start(cls, output_dir: Path, node_rank: int, allowed_s: float) -> Watch:
        """Watch a trial that is about to start: a file of an earlier one is removed."""
        path = output_dir / PROGRESS_FILE.format(node_rank=node_rank)
        path.unlink(missing_ok=True)
        return cls(path, allowed_s, _since=time.monotonic())

    def stalled(self) -> str | None:
        """Why the trial counts as hung; None while it does not, or never wrote progress."""
        now = time.monotonic()
        try:
            mtime = self.path.stat().st_mtime_ns
        except FileNotFoundError:
            return None
        if mtime != self._seen_mtime_ns:
            self._note(mtime, now)
            return None
        quiet_s = now - self._since
        if quiet_s <= max(self.allowed_s, HANG_MULTIPLE * self._longest_step_s):
            return None
        return f"no step for {quiet_s:.0f} s after {self._steps} steps"

    def _note(self, mtime: int, now: float) -> None:
        document = self._read()
        steps = int(document.get("steps", self._steps))
        if steps > self._steps:
            if self._steps:
                self._longest_step_s = max(self._longest_step_s, now - self._since)
            self._steps = steps
        self._seen_mtime_ns, self._since = mtime, now

    def _read(self) -> dict[str, Any]:
        try:
            document = json.loads(self.path.read_text())
        except (OSError, ValueError):
            return {}
        return document if isinstance(document, dict) else {}
