"""Errors that are answers to the user, with the exit code each command gives them."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class InputError(ValueError):
    """What the user gave cannot be used. One line: where, what, and the way out (exit code 2)."""

    exit_code = 2

    def __init__(self, message: str, *, where: str = "", field: str = "", fix: str = "") -> None:
        self.message, self.where, self.field, self.fix = message, where, field, fix
        place = ": ".join(part for part in (where, field) if part)
        line = f"{place}: {message}" if place else message
        super().__init__(one_line(f"{line} ({fix})" if fix else line))

    def at(self, where: str, field: str = "") -> InputError:
        """The same error with its place in a file: `field` is put before the field it has."""
        path = ".".join(part for part in (field, self.field) if part)
        return type(self)(self.message, where=where or self.where, field=path, fix=self.fix)


class EnvironmentLacksError(RuntimeError):
    """Something the command needs is not on this machine: says what and how to get it (exit 3)."""

    exit_code = 3


def one_line(text: str) -> str:
    """`text` with what would break a line or steer a terminal written as escapes."""
    return "".join(char if char.isprintable() else repr(char)[1:-1] for char in text)


def nearest_name(name: str, known: Iterable[str]) -> str:
    """A hint "did you mean 'x'?" for a misspelt name, or "" where nothing is near."""
    lower = {candidate.lower(): candidate for candidate in known}
    found = difflib.get_close_matches(str(name).lower(), lower, n=1, cutoff=0.5)
    return f"did you mean '{lower[found[0]]}'?" if found else ""
