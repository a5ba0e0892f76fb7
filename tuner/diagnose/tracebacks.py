"""Python tracebacks in a log: the exception, and the frames it came through."""

from __future__ import annotations

import re
from dataclasses import dataclass

from tuner.diagnose.log import Line, Log

_START = re.compile(r"Traceback \(most recent call last\)")
_FRAME = re.compile(
    r'(?P<indent>\s*)File "(?P<file>[^"]+)", line (?P<line>\d+), in (?P<function>\S+)'
)
_EXCEPTION = re.compile(
    r"(?:[\w.]*\.)?(?P<type>[A-Z]\w*(?:Error|Exception|Interrupt|Exit|Exceeded|Timeout|Failed))"
    r"(?::\s?(?P<message>.*))?$"
)
_MAX_LINES = 400
_MESSAGE_LINES = 12


@dataclass(frozen=True, slots=True)
class Frame:
    """One call: `file` as printed and the function's name."""

    file: str
    function: str


@dataclass(frozen=True, slots=True)
class Raised:
    """One exception that ended a traceback."""

    type: str
    message: str
    line: Line
    frames: tuple[Frame, ...]


def raised(log: Log) -> list[Raised]:
    """Every exception with a traceback, in the order of the lines that name them."""
    found = []
    for line in log:
        if _START.search(line.text):
            exception = _follow(log, line)
            if exception is not None:
                found.append(exception)
    return sorted(found, key=lambda one: one.line.number)


def exception_of(text: str) -> tuple[str, str] | None:
    """Type and message where a line names an exception at its start."""
    match = _EXCEPTION.match(text)
    return (match["type"], match["message"] or "") if match else None


def _follow(log: Log, start: Line) -> Raised | None:
    """The traceback that begins at `start`, read from lines of the same rank."""
    frames: list[Frame] = []
    indent = 0
    for line in log.after(start.number, _MAX_LINES):
        if line.rank != start.rank:
            continue
        frame = _FRAME.match(line.text)
        if frame is not None:
            frames.append(Frame(frame["file"], frame["function"]))
            indent = len(frame["indent"])
            continue
        if _START.search(line.text):
            return None
        text = line.text.lstrip()
        named = exception_of(text) if len(line.text) - len(text) < max(indent, 1) else None
        if named is not None and frames:
            return Raised(named[0], _message(log, line, named[1]), line, tuple(frames))
    return None


def _message(log: Log, line: Line, first: str) -> str:
    """The message with the lines that go on behind the first."""
    parts = [first]
    for follower in log.after(line.number, _MESSAGE_LINES):
        if follower.rank != line.rank:
            continue
        text = follower.text
        if not text.strip() or _START.search(text) or exception_of(text) or text.startswith("["):
            break
        parts.append(text.strip())
    return " ".join(part for part in parts if part)
