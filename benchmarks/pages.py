"""Tables of the documentation that benchmarks write."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path


def between(page: Path, start: str, end: str) -> str:
    """What stands between two marks of a page."""
    return page.read_text(encoding="utf-8").partition(start)[2].partition(end)[0]


def put_between(page: Path, start: str, end: str, lines: Sequence[str]) -> None:
    """Put lines in the place of what stands between two marks of a page."""
    before, _, rest = page.read_text(encoding="utf-8").partition(start)
    after = rest.partition(end)[2]
    page.write_text("\n".join([before + start, "", *lines, "", end + after]), encoding="utf-8")
