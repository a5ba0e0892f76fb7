"""Printing answers: one JSON document on stdout, or text for people."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

_QUIET = "TUNER_QUIET"


def take_display_flags(arguments: Sequence[str]) -> list[str]:
    """The arguments without `--quiet` and `--no-color`, which hold from now on.

    After `--` nothing is taken. Both are kept in the environment, where rich looks for NO_COLOR.
    """
    end = arguments.index("--") if "--" in arguments else len(arguments)
    names = {"--quiet": _QUIET, "--no-color": "NO_COLOR"}
    for flag in set(arguments[:end]) & set(names):
        os.environ[names[flag]] = "1"
    return [one for one in arguments[:end] if one not in names] + list(arguments[end:])


def print_json(document: object) -> None:
    """One JSON document on stdout; scripts read it."""
    print(json.dumps(document, indent=2, default=str))


def console(*, stderr: bool = False) -> Console:
    """A rich console that keeps long lines whole where the output is not a terminal.

    Text is printed as it stands, square brackets and all: colours come from `coloured`. That of
    stderr says nothing after `--quiet`.
    """
    from rich.console import Console

    quiet = stderr and os.environ.get(_QUIET) == "1"
    plain = partial(Console, stderr=stderr, highlight=False, markup=False, quiet=quiet)
    made = plain()
    return made if made.is_terminal else plain(width=200, soft_wrap=True)


def coloured(*parts: str | tuple[str, str]) -> Text:
    """A line of parts, each a text or a text with its style."""
    from rich.text import Text

    return Text.assemble(*parts)


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
