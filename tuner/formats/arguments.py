"""The options of Megatron-LM's command line per Megatron-Core version, from the real parsers.

`data/megatron_arguments.json` lists every option that `add_megatron_arguments` of
`megatron/training/arguments.py` registers: flags, number of values, default and choices. The
oracle tests hold it against the parsers themselves.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.resources import files
from typing import Any, Literal

Kind = Literal["true", "false", "switch", "value", "values"]


@dataclass(frozen=True, slots=True)
class Argument:
    """One option. `kind` says what it does to its destination.

    "true" and "false" set it, "switch" does either (`--x`, `--no-x`), "value" takes one value and
    "values" one or more.
    """

    dest: str
    flags: tuple[str, ...]
    kind: Kind
    default: Any
    choices: tuple[str, ...] = ()

    def boolean(self, value: bool) -> list[str] | None:
        """The tokens that make the destination `value`; None where this option cannot."""
        if self.kind == "switch":
            positive = [flag for flag in self.flags if not flag.startswith("--no-")]
            negative = [flag for flag in self.flags if flag.startswith("--no-")]
            return [(positive if value else negative)[0]]
        if self.kind not in ("true", "false"):
            return None
        if value is (self.kind == "true"):
            return [self.flags[0]]
        return [] if bool(self.default) is value else None


@lru_cache(maxsize=4)
def arguments(mcore: str) -> Mapping[str, tuple[Argument, ...]]:
    """All options of a supported version, by destination."""
    raw = json.loads((files("tuner.formats") / "data" / "megatron_arguments.json").read_text())
    found: dict[str, tuple[Argument, ...]] = {}
    for dest, variants in raw.items():
        rows = tuple(
            Argument(
                dest,
                tuple(row["flags"]),
                row["kind"],
                row["default"],
                tuple(row.get("choices", ())),
            )
            for row in variants
            if mcore in row["versions"]
        )
        if rows:
            found[dest] = rows
    return found


@lru_cache(maxsize=4)
def by_flag(mcore: str) -> Mapping[str, Argument]:
    """All options of a supported version, by each of their flags."""
    return {
        flag: argument
        for rows in arguments(mcore).values()
        for argument in rows
        for flag in argument.flags
    }
