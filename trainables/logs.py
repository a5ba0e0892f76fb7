"""Figures out of the lines that a training run prints.

A pattern is a regular expression whose named groups say what it found. The patterns of
Megatron-LM and Megatron Bridge are at hand; both print one line per logged iteration on the last
rank, and memory per rank once. Megatron Bridge writes gigabytes of 10^9 bytes
(`report_memory`, bridge/training/utils/train_utils.py), Megatron-LM megabytes of 2^20
(`report_memory`, megatron/training/utils.py).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field

_UNIT_BYTES = {
    "bytes": 1,
    "kb": 10**3,
    "kib": 2**10,
    "mb": 10**6,
    "mib": 2**20,
    "gb": 10**9,
    "gib": 2**30,
}
_STEP_GROUPS = {"step_time_s": 1.0, "step_time_ms": 1e-3}
_MEMORY_GROUPS = {
    f"{kind}_{unit}": (kind, size)
    for kind in ("allocated", "reserved")
    for unit, size in _UNIT_BYTES.items()
}
_OTHER_GROUPS = ("iteration", "loss", "tflops_per_gpu", "rank")
GROUPS = (*_STEP_GROUPS, *_OTHER_GROUPS, *_MEMORY_GROUPS)
"""Named groups that a pattern may have."""

_NUMBER = r"[-+\d.eE]+"
MEGATRON_PATTERNS = (
    rf"iteration\s+(?P<iteration>\d+)/\s*\d+ \|.*?elapsed time per iteration \(ms\): "
    rf"(?P<step_time_ms>{_NUMBER})(?:.*?throughput per GPU \(TFLOP/s/GPU\): "
    rf"(?P<tflops_per_gpu>{_NUMBER}))?(?:.*?lm loss: (?P<loss>\S+))?",
    rf"\[Rank (?P<rank>\d+)\] \(after \d+ iterations\) memory \(GB\).*?"
    rf"mem-max-allocated-gigabytes: (?P<allocated_gb>{_NUMBER})"
    rf"(?:.*?mem-max-reserved-gigabytes: (?P<reserved_gb>{_NUMBER}))?",
    rf"\[Rank (?P<rank>\d+)\] \(after \d+ iterations\) memory \(MB\).*?max allocated: "
    rf"(?P<allocated_mib>{_NUMBER})(?:.*?max reserved: (?P<reserved_mib>{_NUMBER}))?",
)
_CONTROL_SEQUENCE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")
_LONGEST_LINE = 20_000
_RATE_OF_NO_HARDWARE = 1e6
"""TFLOP/s per GPU above which a figure is a misread line."""


class LogPatternError(ValueError):
    """A pattern that cannot be used; the message says why."""


def log_pattern(text: str) -> re.Pattern[str]:
    """A compiled pattern. Raises LogPatternError where it is no pattern or names no figure."""
    try:
        pattern = re.compile(text)
    except (re.error, OverflowError, RecursionError) as error:
        raise LogPatternError(f"is no regular expression: {error}") from None
    unknown = sorted(set(pattern.groupindex) - set(GROUPS))
    if unknown:
        raise LogPatternError(f"unknown group {unknown[0]!r}; use {', '.join(GROUPS)}")
    if not set(pattern.groupindex) - {"iteration", "rank"}:
        raise LogPatternError("has no named group with a figure, e.g. (?P<step_time_ms>[\\d.]+)")
    return pattern


@dataclass(slots=True)
class LogFigures:
    """What the lines of one run, or of one rank, said.

    `steps` are seconds per step by iteration number (by order where lines carry none), `losses`
    likewise; `allocated_bytes` and `reserved_bytes` are peaks by rank.
    """

    steps: dict[int, float] = field(default_factory=dict)
    losses: dict[int, float] = field(default_factory=dict)
    tflops_per_gpu: dict[int, float] = field(default_factory=dict)
    allocated_bytes: dict[int, int] = field(default_factory=dict)
    reserved_bytes: dict[int, int] = field(default_factory=dict)

    def measured_steps(self, warmup_steps: int) -> dict[int, float]:
        """The steps after the warm-up; where the run printed too few, the last one at least."""
        timed = {index: s for index, s in sorted(self.steps.items()) if index > warmup_steps}
        return timed or dict(sorted(self.steps.items())[-1:])


def merged(figures: Iterable[LogFigures]) -> LogFigures:
    """One picture of several ranks' or nodes' figures: the slowest steps, the largest peaks."""
    result = LogFigures()
    for one in figures:
        for index, seconds in one.steps.items():
            result.steps[index] = max(seconds, result.steps.get(index, 0.0))
        for index, loss in one.losses.items():
            result.losses.setdefault(index, loss)
        for index, rate in one.tflops_per_gpu.items():
            result.tflops_per_gpu.setdefault(index, rate)
        for name in ("allocated_bytes", "reserved_bytes"):
            peaks = getattr(result, name)
            for rank, size in getattr(one, name).items():
                peaks[rank] = max(size, peaks.get(rank, 0))
    return result


class LogReader:
    """Reads lines as they come; `figures` holds what they said so far."""

    def __init__(self, patterns: Iterable[str], rank: int = 0) -> None:
        self.figures = LogFigures()
        self._patterns = [log_pattern(text) for text in patterns]
        self._rank = rank

    def feed(self, line: str) -> None:
        """Take one line. Lines that say nothing, and figures that are none, are passed over."""
        line = _CONTROL_SEQUENCE.sub("", line[:_LONGEST_LINE])
        for pattern in self._patterns:
            match = pattern.search(line)
            if match is not None:
                self._take({k: v for k, v in match.groupdict().items() if v is not None})
                return

    def _take(self, found: dict[str, str]) -> None:
        figures = self.figures
        rank = _integer(found.get("rank"), self._rank)
        index = _integer(found.get("iteration"), len(figures.steps) + 1)
        for group, scale in _STEP_GROUPS.items():
            seconds = _number(found.get(group)) * scale
            if 0 < seconds < math.inf:
                figures.steps[index] = seconds
        rate = _number(found.get("tflops_per_gpu"))
        if 0 < rate < _RATE_OF_NO_HARDWARE:
            figures.tflops_per_gpu[index] = rate
        loss = _number(found.get("loss"))
        if "loss" in found and (loss == loss or found["loss"].lower().lstrip("+-") == "nan"):
            last = max(figures.steps, default=index)
            figures.losses[index if _places_itself(found) else last] = loss
        for group, (kind, size) in _MEMORY_GROUPS.items():
            amount = _number(found.get(group)) * size
            if 0 < amount < 2**60:
                peaks = figures.allocated_bytes if kind == "allocated" else figures.reserved_bytes
                peaks[rank] = max(round(amount), peaks.get(rank, 0))


def _places_itself(found: dict[str, str]) -> bool:
    """Whether a match places itself: it names its iteration or times a step."""
    return "iteration" in found or any(group in found for group in _STEP_GROUPS)


def _number(text: str | None) -> float:
    """The number, NaN where there is none (also where a run printed "nan")."""
    try:
        return float(text) if text is not None else math.nan
    except ValueError:
        return math.nan


def _integer(text: str | None, otherwise: int) -> int:
    try:
        return int(text) if text is not None else otherwise
    except ValueError:
        return otherwise
