"""Values of Hydra overrides (`key=value`): written so that Hydra's grammar reads them back.

The grammar is that of hydra-core 1.3, `hydra/grammar/OverrideLexer.g4`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from tuner.errors import InputError

_PLAIN = re.compile(r"[A-Za-z_][A-Za-z0-9_.]*")
_KEYWORDS = frozenset(("true", "false", "null", "nan", "inf", "none"))
_NUMBER = re.compile(r"[+-]?(\d[\d_]*)?(\.\d*)?([eE][+-]?\d+)?")


def write_value(value: Any) -> str:
    """One value in Hydra's grammar."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return "[" + ",".join(write_value(item) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{write_value(item)}" for key, item in value.items()) + "}"
    return _write_text(str(value))


def _write_text(text: str) -> str:
    if _PLAIN.fullmatch(text) and text.lower() not in _KEYWORDS:
        return text
    escaped = re.sub(r"(\\*)'", r"\1\1\\'", text)
    escaped = re.sub(r"(\\+)$", r"\1\1", escaped)
    return f"'{escaped}'"


def read_value(text: str) -> Any:
    """The value that Hydra would read. Raises InputError where brackets or quotes stay open."""
    parser = _Parser(text)
    try:
        value = parser.value()
    except RecursionError:
        raise InputError(f"{text[:40]!r}... is no override value: nested too deeply") from None
    parser.skip_spaces()
    if parser.at != len(text):
        return text.strip()  # Hydra reads what is no number, list or mapping as text
    return value


class _Parser:
    """A reader of one value; `at` is where it stands."""

    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0

    def skip_spaces(self) -> None:
        while self.at < len(self.text) and self.text[self.at].isspace():
            self.at += 1

    def value(self) -> Any:
        self.skip_spaces()
        first = self.text[self.at : self.at + 1]
        if first == "[":
            return self._list()
        if first == "{":
            return self._mapping()
        if first in ("'", '"'):
            return self._quoted(first)
        start = self.at
        while self.at < len(self.text) and self.text[self.at] not in ",]}":
            self.at += 1
        return _primitive(self.text[start : self.at].strip())

    def _list(self) -> list[Any]:
        items: list[Any] = []
        self.at += 1
        while not self._closes("]"):
            items.append(self.value())
        return items

    def _mapping(self) -> dict[str, Any]:
        items: dict[str, Any] = {}
        self.at += 1
        while not self._closes("}"):
            end = self.text.find(":", self.at)
            if end < 0:
                raise InputError(f"{self.text!r} is no override value: a ':' is missing")
            key = self.text[self.at : end].strip().strip("'\"")
            self.at = end + 1
            items[key] = self.value()
        return items

    def _closes(self, bracket: str) -> bool:
        self.skip_spaces()
        if self.text[self.at : self.at + 1] == ",":
            self.at += 1
            self.skip_spaces()
        if self.at >= len(self.text):
            raise InputError(f"{self.text!r} is no override value: '{bracket}' is missing")
        found = self.text[self.at]
        if found in "]}" and found != bracket:
            raise InputError(
                f"{self.text!r} is no override value: '{found}' stands for '{bracket}'"
            )
        self.at += found == bracket
        return found == bracket

    def _quoted(self, quote: str) -> str:
        found: list[str] = []
        self.at += 1
        while self.at < len(self.text):
            char = self.text[self.at]
            if char == "\\":
                run = len(self.text[self.at :]) - len(self.text[self.at :].lstrip("\\"))
                follows = self.text[self.at + run : self.at + run + 1]
                if follows == quote:
                    found.append("\\" * (run // 2) + (quote if run % 2 else ""))
                    self.at += run + (run % 2)
                else:
                    found.append("\\" * run)
                    self.at += run
                continue
            self.at += 1
            if char == quote:
                return "".join(found)
            found.append(char)
        raise InputError(f"{self.text!r} is no override value: a quote stays open")


def _primitive(text: str) -> Any:
    lowered = text.lower()
    if lowered in ("null", ""):
        return None
    if lowered in ("true", "false"):
        return lowered == "true"
    if _NUMBER.fullmatch(text) and any(char.isdigit() for char in text):
        digits = text.replace("_", "")
        return float(digits) if any(char in digits for char in ".eE") else int(digits)
    return text
