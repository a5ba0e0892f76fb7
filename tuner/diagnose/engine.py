"""From a log to its diagnosis: collect findings, and choose the one that explains the others."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tuner.diagnose.advice import advice_findings
from tuner.diagnose.diagnosis import Diagnosis, Finding
from tuner.diagnose.facts import Facts, known_config, read_facts
from tuner.diagnose.findings import (
    memory_findings,
    refusal_findings,
    rule_findings,
    signature_findings,
)
from tuner.diagnose.log import Line, Log, read_log
from tuner.diagnose.rule_messages import rule_of
from tuner.diagnose.signatures import Fix, signatures
from tuner.diagnose.tracebacks import Raised, exception_of, raised

_LEVELS = {"root": 3, "symptom": 2, "consequence": 1, "hint": 0}
_CERTAIN = 0.45
"""Below this a finding is shown beside the answer, never as the answer."""
_RECOVERED_AFTER = 2
"""A job that reports this many iterations after a failure has got over it."""
_LIKELY_LINES = 12
_TAIL = 4
_ALARM = re.compile(
    r"\b(?:error|exception|fatal|fail(?:ed|ure)|assert\w*|abort\w*|traceback|killed|panic|cannot|"
    r"unable|invalid|refused|denied|timed? ?out|corrupt\w*|crash\w*)\b",
    re.IGNORECASE,
)
_HARMLESS = re.compile(
    r"\b(?:warning|deprecat|no error|0 errors?|error_file|error file|on_error|error_handling)\b",
    re.IGNORECASE,
)


def diagnose(text: str, *, mcore: str, frontend: str = "mcore") -> Diagnosis:
    """What happened in the run that wrote this log.

    `mcore` and `frontend` say whose rules judge the settings that the log prints.
    """
    log = read_log(text)
    facts = read_facts(log)
    raises = raised(log)
    config = known_config(facts, mcore)
    found = [
        *memory_findings(log, raises, facts),
        *rule_findings(log, raises, config, mcore, frontend),
        *signature_findings(log),
        *refusal_findings(log, raises),
    ]
    found = _without_shadows(found) + _numeric_findings(facts)
    ranked = sorted(found, key=lambda one: _rank(one, facts), reverse=True)
    unexplained = [one for one in raises if not _is_known(one)]
    cause = ranked[0] if ranked and _is_answer(ranked[0], unexplained) else None
    outcome = _outcome(cause, facts, raises)
    if cause is None and not raises:
        advised = advice_findings(facts, config, mcore, frontend)
        cause, ranked = _quiet_end(log, facts, advised), [*ranked, *advised]
    also = tuple(one for one in ranked if one is not cause and one.cause != _name(cause))
    last = facts.iterations[-1] if facts.iterations else None
    return Diagnosis(
        outcome=outcome,
        cause=cause,
        also=_distinct(also)[:5],
        likely=() if cause is not None and cause.level == "root" else _likely(log, raises),
        iterations=last[1] if last else 0,
        train_iters=last[2] if last else None,
        lines=len(log),
    )


def _name(cause: Finding | None) -> str:
    return cause.cause if cause is not None else ""


def _rank(finding: Finding, facts: Facts) -> tuple[bool, int, bool, float, int]:
    """Order of explanation: still standing, level, memory first, the specific one, earliest.

    Memory that ran out explains whatever else happened, as in a trial's outcome.
    """
    standing = facts.progress_after(finding.line) < _RECOVERED_AFTER
    is_memory = finding.family == "memory"
    specific = finding.cause not in _GENERIC
    return standing, _LEVELS[finding.level], is_memory, float(specific), -finding.line


_GENERIC = frozenset(
    ("configuration_refused", "megatron_check_failed", "nccl_error", "child_failed")
)


def _is_known(exception: Raised) -> bool:
    """Whether a signature or a rule knows the exception's own line."""
    text = f"{exception.type}: {exception.message}"
    return any(one.matches(text) for one in signatures()) or rule_of(text) is not None


def _is_answer(finding: Finding, unexplained: Sequence[Raised]) -> bool:
    """Whether a finding is good enough to be the answer.

    A consequence is none where an exception that nothing knows stands in the log.
    """
    if finding.level == "consequence":
        foreign = [one for one in unexplained if one.type not in _LAUNCHER_ERRORS]
        return not foreign and finding.confidence >= _CERTAIN
    return finding.level != "hint" and finding.confidence >= _CERTAIN


_LAUNCHER_ERRORS = frozenset(
    ("ChildFailedError", "SignalException", "DistBackendError", "ProcessRaisedException")
)


def _without_shadows(found: list[Finding]) -> list[Finding]:
    """Findings without those that a more exact one has made of the same lines."""
    exact = {
        line.number for one in found if one.rule or one.family == "memory" for line in one.evidence
    }
    return [one for one in found if one.rule or one.family == "memory" or not {one.line} & exact]


def _numeric_findings(facts: Facts) -> list[Finding]:
    """NaN in the reported losses, where no check of Megatron stopped the run."""
    if facts.not_a_number is None:
        return []
    return [
        Finding(
            cause="nan_in_gradients",
            family="numerics",
            level="symptom",
            confidence=0.85,
            title="The loss or the gradients became NaN or infinite",
            why="The run went on, but an iteration reports NaN or skips its update.",
            evidence=(facts.not_a_number,),
            fix=Fix(actions=("lower the learning rate, and check the data around the iteration",)),
            source="megatron/training/training.py: training_log",
        )
    ]


def _outcome(cause: Finding | None, facts: Facts, raises: Sequence[Raised]) -> str:
    if cause is not None:
        return "failed"
    if raises:
        return "failed"
    return "completed" if facts.completed else "incomplete"


def _quiet_end(log: Log, facts: Facts, advised: Sequence[Finding]) -> Finding | None:
    """The answer for a log without a failure: done, with advice; or it just stops."""
    if not facts.iterations and facts.done is None:
        return None
    if advised:
        return advised[0]
    line = facts.done or facts.iterations[-1][0]
    if facts.completed:
        return Finding(
            "completed", "none", "root", 0.9, "The run completed", "No failure was found.",
            (line,), Fix(), "",
        )  # fmt: skip
    if len(facts.iterations) and any(_ALARM.search(one.text) for one in log.after(line.number, 50)):
        return None
    _, at, total = facts.iterations[-1]
    return Finding(
        cause="stopped_without_error",
        family="scheduler",
        level="symptom",
        confidence=0.6,
        title=f"The log stops at iteration {at} of {total} without an error",
        why="The job hangs, was killed from outside, or its output was cut off.",
        evidence=(line,),
        fix=Fix(actions=("look at the scheduler's record of the job, and at the other ranks",)),
        source="",
    )


def _distinct(found: Sequence[Finding]) -> tuple[Finding, ...]:
    kept: dict[str, Finding] = {}
    for one in found:
        kept.setdefault(one.cause, one)
    return tuple(kept.values())


def _likely(log: Log, raises: Sequence[Raised]) -> tuple[Line, ...]:
    """The lines most worth reading: exceptions, alarms, and the end."""
    chosen: dict[int, Line] = {}
    for one in raises[:_LIKELY_LINES]:
        chosen[one.line.number] = one.line
    for line in log:
        alarming = _ALARM.search(line.text) and not _HARMLESS.search(line.text)
        if (exception_of(line.text) or alarming) and len(chosen) < _LIKELY_LINES:
            chosen[line.number] = line
    for line in log.lines[-_TAIL:]:
        chosen[line.number] = line
    return tuple(chosen[number] for number in sorted(chosen))
