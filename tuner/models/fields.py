"""What a field of a model spec may hold, as annotated types.

Each alias is a type for the type checker and carries a `Check` for values that come from users'
files. A check describes itself in the words an error message needs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

MAX_SIZE = 2**40
"""Larger sizes are typing errors, and would only overflow later arithmetic."""

MAX_LAYERS = 10_000
"""Patterns over layers are held as one value a layer."""


@dataclass(frozen=True, slots=True)
class Check:
    """Accepts or refuses one value; `expected` completes the sentence "must be ..."."""

    expected: str
    accepts: Callable[[Any], bool]


def _is_int(value: object, low: int, high: int = MAX_SIZE) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def _is_number(value: object, low: float, high: float) -> bool:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return math.isfinite(value) and low <= value <= high


def _is_window(value: object) -> bool:
    return isinstance(value, tuple) and len(value) == 2 and all(_is_int(edge, -1) for edge in value)


def _is_frequency(value: object) -> bool:
    """An interval between layers, or one 0 or 1 for each layer."""
    if isinstance(value, tuple):
        return len(value) > 0 and all(_is_int(flag, 0, 1) for flag in value)
    return _is_int(value, 1)


def optional(check: Check) -> Check:
    """A check that also accepts null."""
    return Check(f"{check.expected} or null", lambda value: value is None or check.accepts(value))


def one_of(*choices: str) -> Check:
    """A check for a closed set of words."""
    return Check(
        "one of " + ", ".join(choices), lambda value: isinstance(value, str) and value in choices
    )


_SIZE = Check("a positive integer", lambda value: _is_int(value, 1))
_LAYERS = Check(f"an integer from 1 to {MAX_LAYERS}", lambda value: _is_int(value, 1, MAX_LAYERS))
_FLAG = Check("true or false", lambda value: isinstance(value, bool))
_NUMBER = Check("a finite number", lambda value: _is_number(value, -1e30, 1e30))
_POSITIVE = Check("a positive number", lambda value: _is_number(value, 1e-30, 1e30))
_WINDOW = Check("two integers [left, right], -1 for unlimited", _is_window)
_FREQUENCY = Check("a positive integer or a list of 0 and 1, one for each layer", _is_frequency)

Size = Annotated[int, _SIZE]
LayerCount = Annotated[int, _LAYERS]
OptionalLayerCount = Annotated[int | None, optional(_LAYERS)]
OptionalText = Annotated[
    str | None, Check("text or null", lambda value: value is None or isinstance(value, str))
]
OptionalSize = Annotated[int | None, optional(_SIZE)]
Flag = Annotated[bool, _FLAG]
OptionalFlag = Annotated[bool | None, optional(_FLAG)]
Number = Annotated[float, _NUMBER]
OptionalNumber = Annotated[float | None, optional(_NUMBER)]
Positive = Annotated[float, _POSITIVE]
OptionalPositive = Annotated[float | None, optional(_POSITIVE)]
Probability = Annotated[
    float, Check("a number from 0 to 1", lambda value: _is_number(value, 0.0, 1.0))
]
Window = Annotated[tuple[int, int] | None, optional(_WINDOW)]
Frequency = Annotated[int | tuple[int, ...], _FREQUENCY]
OptionalFrequency = Annotated[int | tuple[int, ...] | None, optional(_FREQUENCY)]
