"""The one error this package raises for bad model descriptions."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from tuner.errors import InputError


class ModelSpecError(InputError):
    """A model description that cannot be used.

    The message is one line that names the source (model or file), the field with its value, and
    the way out.
    """


_LISTED = 12  # a set this small is shown whole


def nearest(word: str, choices: Iterable[str], cutoff: float = 0.5) -> list[str]:
    """Up to three choices most like `word`: those it begins first, then those spelt like it."""
    known = sorted(choices)
    beginnings = [choice for choice in known if word and choice.startswith(word)]
    alike = difflib.get_close_matches(word, known, n=3, cutoff=cutoff)
    return list(dict.fromkeys(beginnings + alike))[:3]


def did_you_mean(word: str, choices: Iterable[str]) -> str:
    """A fix for a word that is none of `choices`: near ones, or all of a small set."""
    known = sorted(choices)
    close = nearest(word, known)
    if close:
        return "did you mean " + " or ".join(close) + "?"
    if len(known) <= _LISTED:
        return "use one of " + ", ".join(known)
    return "the nearest are " + ", ".join(nearest(word, known, cutoff=0.0))
