"""Printing answers: one JSON document on stdout, or text for people."""

from __future__ import annotations

import json
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
