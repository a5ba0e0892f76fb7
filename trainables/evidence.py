"""What is kept of a failed trial: who failed, the last log lines, the allocator's figures."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainables.failures import (
    RankFailure,
    kind_of_failure,
    memory_evidence,
    outcome_of,
    root_cause,
    signal_name,
)
from tuner.measurement import Outcome, TrialResult

AGENT_LOG_FILE = "agent.log"

_LINES = 15
_LINE_LENGTH = 300
_TAIL_BYTES = 16_384
_ALLOCATOR_VARIABLES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")


def failed_result(
    failures: Sequence[RankFailure], output_dir: Path, env: Mapping[str, Any]
) -> TrialResult:
    """The result of a trial whose ranks failed; `env` are the candidate's variables."""
    cause = root_cause(failures)
    lines = last_lines(output_dir, cause.rank)
    outcome, reason = outcome_of([_explained(failure, lines, cause) for failure in failures])
    evidence: dict[str, Any] = {
        "rank": cause.rank,
        "exit_code": cause.exit_code,
        "failed_ranks": sorted(failure.rank for failure in failures),
        "log": lines,
        "traceback": _traceback(output_dir, cause.rank),
    }
    if outcome is Outcome.OOM:
        memory = memory_evidence(cause.message, expandable=uses_expandable_segments(env))
        evidence |= {"memory": memory} if memory else {}
    return TrialResult(outcome, reason, evidence=evidence)


def uses_expandable_segments(env: Mapping[str, Any]) -> bool:
    """Whether the allocator's variables ask for expandable segments."""
    texts = [str(env.get(name, "")).lower().replace(" ", "") for name in _ALLOCATOR_VARIABLES]
    return any("expandable_segments:true" in text for text in texts)


def last_lines(output_dir: Path, rank: int | None = None) -> list[str]:
    """The last lines of the rank's standard error, else of the launcher's log, redacted."""
    from tuner.redaction import redact

    logs = sorted(output_dir.glob("logs/**/stderr.log"))
    own = [path for path in logs if rank is not None and path.parent.name == str(rank)]
    for path in (*own, output_dir / AGENT_LOG_FILE, *logs):
        lines = _tail(path)
        if lines:
            return [redact(line)[:_LINE_LENGTH] for line in lines]
    return []


def _explained(failure: RankFailure, lines: Sequence[str], cause: RankFailure) -> RankFailure:
    """A process that aborted itself says why in its log: a watchdog, an assertion."""
    if failure is not cause or signal_name(failure.message) != "SIGABRT":
        return failure
    telling = [line for line in lines if kind_of_failure(line) is not Outcome.CRASHED]
    if not telling:
        return failure
    return replace(failure, message=f"{telling[0]} ({failure.message})")


def _traceback(output_dir: Path, rank: int) -> list[str]:
    """The end of the traceback in the error file of a rank, redacted."""
    from tuner.redaction import redact

    for path in sorted(output_dir.glob(f"logs/**/{rank}/error.json")):
        try:
            text = str(json.loads(path.read_text())["message"]["extraInfo"]["py_callstack"])
        except (OSError, ValueError, KeyError, TypeError):
            continue
        return [redact(line)[:_LINE_LENGTH] for line in text.splitlines()[-_LINES:]]
    return []


def _tail(path: Path) -> list[str]:
    try:
        with path.open("rb") as handle:
            handle.seek(max(0, path.stat().st_size - _TAIL_BYTES))
            text = handle.read().decode(errors="replace")
    except OSError:
        return []
    return [line.rstrip() for line in text.splitlines() if line.strip()][-_LINES:]
