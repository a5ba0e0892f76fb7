"""Printing answers: one JSON document on stdout, or text for people."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console


def print_json(document: object) -> None:
    """One JSON document on stdout; scripts read it."""
    print(json.dumps(document, indent=2, default=str))


def console(*, stderr: bool = False) -> Console:
    """A rich console that keeps long lines whole where the output is not a terminal."""
    from rich.console import Console

    made = Console(stderr=stderr, highlight=False)
    if not made.is_terminal:
        made = Console(stderr=stderr, highlight=False, width=200, soft_wrap=True)
    return made


@contextlib.contextmanager
def working(what: str) -> Iterator[Callable[[str], None]]:
    """A spinner on stderr with the time taken and what is being worked on; terminals only.

    Gives the function that says what comes next.
    """
    from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    err = console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    hidden = not err.is_terminal or err.quiet
    with Progress(*columns, console=err, transient=True, disable=hidden) as bar:
        task = bar.add_task(what)
        yield lambda now: bar.update(task, description=f"{what}: {now}")
