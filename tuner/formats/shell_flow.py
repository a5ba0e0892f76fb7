"""Which commands of a script run: conditions, cases and loops, as far as its text decides them.

A script is read as if it were started as it stands: without arguments, and with no variable set but
by itself. What that does not decide (files, outputs of commands, cases on a variable that nobody
set) is told apart: such branches are all read, and the condition is kept as undecided.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

Value = Callable[[str], str | None]
"""The text that a word stands for; None where only a run would tell."""

_COMPARED: dict[str, Callable[[int, int], bool]] = {
    "-eq": lambda one, other: one == other,
    "-ne": lambda one, other: one != other,
    "-lt": lambda one, other: one < other,
    "-le": lambda one, other: one <= other,
    "-gt": lambda one, other: one > other,
    "-ge": lambda one, other: one >= other,
}
_SIGNS = {"==": "-eq", "!=": "-ne", "<=": "-le", ">=": "-ge", "<": "-lt", ">": "-gt"}
_OPENERS = frozenset(("then", "else", "do", "{"))
_CLOSED = {"fi": ("if",), "done": ("while", "until", "for"), "esac": ("case",), "}": ("{",)}
_ASKING = frozenset(("grep", "command", "which", "type", "hash", "pgrep", "diff", "cmp"))
"""Commands that are run for whether they succeed."""


@dataclass(slots=True)
class _Frame:
    """What is open under the keyword `kind`: whether its present branch runs, and whether one has
    run. `subject` is the text that a `case` compares."""

    kind: str
    runs: bool | None = True
    ran: bool = False
    deciding: bool = False  # between `if` and `then`
    decided: bool | None = None
    subject: str | None = None
    pattern_next: bool = False
    patterns: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Flow:
    """Follows the commands of a script in order."""

    undecided: list[str] = field(default_factory=list)
    _frames: list[_Frame] = field(default_factory=list)
    _last: bool | None = True

    def step(self, words: Sequence[str], joined: str, value: Value) -> list[str]:
        """What of a command is to be run; `joined` is the operator that stands before it."""
        words = list(words)
        while words:
            frame = self._frames[-1] if self._frames else None
            if frame is not None and frame.pattern_next:
                if words[0] == "esac":
                    self._frames.pop()
                    return []
                words = self._pattern(frame, words)
                continue
            first, rest = words[0], words[1:]
            if first in ("if", "while", "until"):
                self._frames.append(_Frame(first, deciding=True))
                words, joined = rest, ";"
            elif first == "elif" and frame is not None:
                self._else(frame)
                frame.deciding, words, joined = True, rest, ";"
            elif first == "else" and frame is not None:
                self._else(frame)
                words = rest
            elif first in ("then", "do") and frame is not None and frame.deciding:
                self._begin(frame)
                words = rest
            elif first == "for" and "do" not in rest:
                listed = rest[rest.index("in") + 1 :] if "in" in rest else ["$@"]
                some = any(value(word) != "" for word in listed)
                self._frames.append(_Frame("for", runs=some))
                return []
            elif first == "case" and "in" in rest:
                subject = value(rest[0]) or None  # nobody set it: no case is ruled out
                if subject is None and self._runs():
                    self.undecided.append(f"case {rest[0]}")
                self._frames.append(_Frame("case", subject=subject, pattern_next=True))
                words, joined = rest[rest.index("in") + 1 :], ";"
            elif first in _CLOSED and (first != "}" or (frame is not None and frame.kind == "{")):
                if frame is not None and frame.kind in _CLOSED[first]:
                    self._frames.pop()
                return []
            elif first == "{" and joined != ";":
                runs = self._last if joined == "&&" else _negated(self._last)
                self._frames.append(_Frame("{", runs=runs))
                words, joined = rest, ";"
            elif first in _OPENERS:
                words = rest
            elif frame is not None and frame.deciding:
                return self._condition(frame, words, joined, value)
            else:
                return self._command(words, joined, value)
        return []

    def end_of_case(self) -> None:
        """After `;;`: the next word is a pattern."""
        if self._frames and self._frames[-1].kind == "case":
            self._frames[-1].pattern_next = True

    def _runs(self) -> bool:
        return all(frame.runs is not False for frame in self._frames)

    def _command(self, words: list[str], joined: str, value: Value) -> list[str]:
        if joined == "|":
            self._last = None  # of a pipeline only a run tells
            return words if self._runs() else []
        wanted = joined == ";" or self._last is not (joined == "||")
        if wanted and joined != ";" and self._last is None and self._runs():
            self.undecided.append(f"{joined} {' '.join(words)}")
        truth = _test(words, value)
        if truth != "none":
            if wanted:
                self._last = truth if isinstance(truth, bool) else None
            return []
        if wanted:
            self._last = None if words[0] in _ASKING else True
        return words if wanted and self._runs() else []

    def _condition(self, frame: _Frame, words: list[str], joined: str, value: Value) -> list[str]:
        """Note the truth of a command; the command itself where it is no mere test."""
        truth = _test(words, value)
        asked = words[1:] if words[0] == "!" else words
        known = truth if isinstance(truth, bool) else None
        if joined == "|":
            known = None
        elif joined in ("&&", "||"):
            known = _chained((frame.decided, known), wins=joined == "||")
        frame.decided = known
        if known is None and self._outer_runs():
            self.undecided.append(f"{frame.kind} {' '.join(words)}")
        return asked if truth == "none" and self._outer_runs() else []

    def _outer_runs(self) -> bool:
        return all(frame.runs is not False for frame in self._frames[:-1])

    def _begin(self, frame: _Frame) -> None:
        truth, frame.deciding = frame.decided, False
        if frame.kind == "until":
            truth = _negated(truth)
        frame.runs = False if frame.ran else truth
        frame.ran = frame.ran or truth is True

    def _else(self, frame: _Frame) -> None:
        frame.runs = not frame.ran
        frame.decided = None

    def _pattern(self, frame: _Frame, words: list[str]) -> list[str]:
        """Read `a|b)`; the words after it."""
        text = words[0]
        if text == "|":
            return words[1:]
        frame.patterns += text.removeprefix("(").removesuffix(")").split("|")
        if text.endswith(")"):
            patterns, frame.patterns = frame.patterns, []
            frame.pattern_next = False
            if frame.subject is not None:
                subject = frame.subject
                frame.runs = not frame.ran and any(fnmatchcase(subject, p) for p in patterns)
                frame.ran = frame.ran or frame.runs
        return words[1:]


def _negated(truth: bool | None) -> bool | None:
    return None if truth is None else not truth


def _chained(truths: Sequence[bool | None], *, wins: bool) -> bool | None:
    """The truth of a chain of one operator, of which one side equal to `wins` decides."""
    if wins in truths:
        return wins
    return None if None in truths else not wins


def _test(words: Sequence[str], value: Value) -> bool | str | None:
    """The truth of a test; None where only a run would tell, "none" where it is no test."""
    negated = 0
    while words[negated] == "!" and negated + 1 < len(words):
        negated += 1
    truth = _plain_test(words[negated:], value)
    return truth != bool(negated % 2) if isinstance(truth, bool) else truth


def _plain_test(words: Sequence[str], value: Value) -> bool | str | None:
    first, last = words[0], words[-1]
    if words in (["true"], [":"], ["false"]):
        return words != ["false"]
    if (first, last) in (("[", "]"), ("[[", "]]")):
        return _either(list(words[1:-1]), value, patterns=first == "[[")
    if first == "test":
        return _either(list(words[1:]), value, patterns=False)
    if first.startswith("((") and last.endswith("))"):
        return _arithmetic(" ".join(words)[2:-2], value)
    return "none"


def _either(words: list[str], value: Value, *, patterns: bool) -> bool | None:
    return _joined(words, ("||", "-o"), True, value, patterns)


def _joined(
    words: list[str], operators: tuple[str, str], wins: bool, value: Value, patterns: bool
) -> bool | None:
    parts: list[list[str]] = [[]]
    for word in words:
        if word in operators:
            parts.append([])
        else:
            parts[-1].append(word)
    if wins:
        found = [_joined(part, ("&&", "-a"), False, value, patterns) for part in parts]
    else:
        found = [_primary(part, value, patterns) for part in parts]
    return _chained(found, wins=wins)


def _primary(words: list[str], value: Value, patterns: bool) -> bool | None:
    if any(word.startswith("(") or word == ")" for word in words):
        return None  # groups
    negated = 0
    while words[negated : negated + 1] == ["!"]:
        negated += 1
    truth = _relation(words[negated:], value, patterns)
    return None if truth is None else truth != bool(negated % 2)


def _relation(words: list[str], value: Value, patterns: bool) -> bool | None:
    if len(words) == 2 and words[0] in ("-z", "-n"):
        text = value(words[1])
        return None if text is None else (text == "") == (words[0] == "-z")
    if len(words) == 2 and words[0] == "-v":
        return value(f"${{{words[1]}}}") != ""
    if len(words) == 1 and not words[0].startswith("-"):
        text = value(words[0])
        return None if text is None else text != ""
    if len(words) != 3:
        return None
    one, other = value(words[0]), value(words[2])
    if one is None or other is None:
        return None
    if words[1] in _COMPARED:
        numbers = re.fullmatch(r"-?\d{1,15}", one), re.fullmatch(r"-?\d{1,15}", other)
        return _COMPARED[words[1]](int(one), int(other)) if all(numbers) else None
    if words[1] in ("=", "==", "!="):
        same = fnmatchcase(one, other) if patterns else one == other
        return same == (words[1] != "!=")
    return None


def _arithmetic(text: str, value: Value) -> bool | None:
    found = re.fullmatch(r"(.+?)(==|!=|<=|>=|<|>)(.+)", text)
    sides = (found[1], found[3]) if found else (text, "0")
    numbers = [value(f"$(({side}))") for side in sides]
    if any(number is None or not re.fullmatch(r"-?\d{1,15}", number) for number in numbers):
        return None
    one, other = (int(str(number)) for number in numbers)
    return _COMPARED[_SIGNS[found[2]] if found else "-ne"](one, other)
