"""Reading a Hugging Face `config.json`: the file itself, and typed values out of it."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from tuner.models.errors import ModelSpecError
from tuner.models.fields import MAX_LAYERS, MAX_SIZE

_MAX_BYTES = 16 * 2**20  # the largest configs are some hundred kilobytes


@dataclass(frozen=True, slots=True)
class HFDocument:
    """The object of a `config.json`, or one nested in it, with typed access to its keys.

    `location` is the path of the file, and the key of the nested object where it is one. In every
    reader a key that is absent or null takes the default; without a default it must be there.
    Readers raise `ModelSpecError` naming file, key, value and fix.
    """

    location: str
    values: Mapping[str, Any]

    def has(self, key: str) -> bool:
        """Whether the key stands in the file, null included."""
        return key in self.values

    def size(self, key: str, default: int | None = None) -> int:
        """A positive integer."""
        return self._integer(key, default, 1, MAX_SIZE, "a positive integer")

    def layers(self, key: str) -> int:
        """A number of layers."""
        return self._integer(key, None, 1, MAX_LAYERS, f"an integer from 1 to {MAX_LAYERS}")

    def count(self, key: str, default: int) -> int:
        """An integer that may be zero."""
        return self._integer(key, default, 0, MAX_SIZE, "zero or a positive integer")

    def optional_size(self, key: str, absent: int | None = None) -> int | None:
        """A positive integer; None where the file says null, `absent` where it says nothing."""
        if not self.has(key):
            return absent
        return None if self.values[key] is None else self.size(key)

    def number(self, key: str, default: float) -> float:
        """A finite number."""
        value = self.values.get(key)
        if value is None:
            return default
        valid = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not valid or not -1e30 < value < 1e30 or not math.isfinite(value):
            self.refuse(key, "must be a finite number")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """true or false."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            self.refuse(key, "must be true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            self.refuse(key, "must be text")
        return value

    def items(self, key: str, kind: type) -> list[Any] | None:
        """A list whose entries are all of `kind`; None where there is no list."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(type(entry) is not kind for entry in value):
            self.refuse(key, f"must be a list of {kind.__name__}")
        return value

    def nested(self, key: str) -> HFDocument | None:
        """An object inside this one; None where there is none."""
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, dict):
            self.refuse(key, "must be an object")
        return HFDocument(f"{self.location}: {key}", value)

    def error(self, key: str, problem: str) -> ModelSpecError:
        """The error for a key whose value cannot be used."""
        shown = json.dumps(self.values.get(key), default=str)
        if len(shown) > 60:
            shown = shown[:57] + "..."
        return ModelSpecError(f"{self.location}: {key}={shown} {problem}")

    def refuse(self, key: str, problem: str) -> NoReturn:
        """Raise `error`."""
        raise self.error(key, problem)

    def _integer(self, key: str, default: int | None, low: int, high: int, expected: str) -> int:
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise ModelSpecError(f"{self.location}: {key} is missing; set it to {expected}")
            return default
        valid = isinstance(value, int) and not isinstance(value, bool)
        if not valid or not low <= value <= high:
            self.refuse(key, f"must be {expected}")
        return int(value)


def read_document(path: str | Path) -> HFDocument:
    """The object in `path`, a `config.json` or a directory that holds one."""
    file = Path(path)
    try:
        if file.is_dir():
            file = file / "config.json"
        with file.open("rb") as handle:
            content = handle.read(_MAX_BYTES + 1)
        if len(content) > _MAX_BYTES:
            raise ModelSpecError(f"{file}: too large for a model configuration; name a config.json")
        values = json.loads(content.decode("utf-8"))
    except OSError as error:
        reason = error.strerror or str(error)
        raise ModelSpecError(
            f"{file}: cannot be read ({reason}); name a config.json or the directory that holds it"
        ) from error
    except (ValueError, RecursionError) as error:
        if isinstance(error, ModelSpecError):
            raise
        reason = " ".join(str(error).split())[:100]
        raise ModelSpecError(
            f"{file}: not JSON ({reason}); name the config.json of a model"
        ) from error
    if not isinstance(values, dict):
        raise ModelSpecError(
            f"{file}: holds {type(values).__name__}, not an object; name the config.json of a model"
        )
    return HFDocument(str(file), values)
