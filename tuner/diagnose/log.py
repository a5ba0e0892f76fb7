"""A log as numbered lines with the rank that wrote each, without colours and prefixes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_ANSI = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]")
_TIME = r"\d{4}-\d\d-\d\d[T ]\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d)?"
_PREFIXES = (
    # torchrun's --tee and --role prefixes, PyTorch's own, and Ray's
    re.compile(r"[EWIF]\d{4} \d\d:\d\d:\d\d\.\d+ +\d+ \S+:\d+\] ?"),  # glog
    re.compile(r"\[(?:default|rank|trainer|worker)(?P<rank>\d+)\][:\s]?\s?"),
    re.compile(r"\[Rank (?P<rank>\d+)\]:?\s?(?=Traceback|\s+File |\w*Error)"),
    re.compile(r"\((?:\w+ )?(?:pid|rank)=(?P<rank>\d+)(?:, ip=[\d.]+)?\)\s?"),
    # srun --label, and kubectl's or mpirun's per-process labels
    re.compile(r"\s*(?P<rank>\d{1,5}):\s(?=\S|\s)"),
    re.compile(r"\[\d+,(?P<rank>\d+)\]<std(?:out|err)>:\s?"),
    re.compile(rf"\[?{_TIME}\]?\s(?=\s*(?:Traceback|File |\w+Error|\[rank|\[default|raise ))"),
)
_MAX_PREFIXES = 4
MAX_LINE = 4000
"""Longer lines are cut: a dump of a tensor is no evidence."""


@dataclass(frozen=True, slots=True)
class Line:
    """One line: its number from 1, the rank that wrote it where known, and its text."""

    number: int
    rank: int | None
    text: str


@dataclass(frozen=True, slots=True)
class Log:
    """A whole log."""

    lines: tuple[Line, ...]

    def __iter__(self) -> Iterator[Line]:
        return iter(self.lines)

    def __len__(self) -> int:
        return len(self.lines)

    def after(self, number: int, count: int) -> tuple[Line, ...]:
        """The next `count` lines behind line `number`."""
        return self.lines[number : number + count]

    @property
    def text(self) -> str:
        """The cleaned text; line ends are kept, so offsets find lines."""
        return "\n".join(line.text for line in self.lines)


def read_log(text: str) -> Log:
    """The log of a text; carriage returns of progress bars count as line ends of their own line."""
    lines = []
    for number, raw in enumerate(text.split("\n"), start=1):
        last = raw.rstrip("\r").rsplit("\r", 1)[-1]
        rank, clean = _strip(_ANSI.sub("", last)[:MAX_LINE])
        lines.append(Line(number, rank, clean))
    while lines and not lines[-1].text.strip():
        lines.pop()
    return Log(tuple(lines))


def _strip(text: str) -> tuple[int | None, str]:
    """The rank of a prefix and the text behind all prefixes."""
    rank: int | None = None
    for _ in range(_MAX_PREFIXES):
        for pattern in _PREFIXES:
            match = pattern.match(text)
            if match is None:
                continue
            if "rank" in pattern.groupindex and rank is None:
                rank = int(match["rank"])
            text = text[match.end() :]
            break
        else:
            break
    return rank, text.rstrip()
