"""The one error this package raises for bad model descriptions."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class ModelSpecError(ValueError):
    """A model description that cannot be used.

    The message is one line that names the source (model or file), the field with its value, and
    the way out.
    """


def nearest(word: str, choices: Iterable[str], count: int = 3) -> list[str]:
    """The `count` choices spelt most like `word`, best first; empty when none comes close."""
    return difflib.get_close_matches(word, list(choices), n=count, cutoff=0.5)


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A fix for a misspelt word: the nearest choices, or all of them when none comes close."""
    known = sorted(choices)
    close = nearest(word, known)
    if close:
        return "did you mean " + " or ".join(close) + "?"
    return "use one of " + ", ".join(known)
