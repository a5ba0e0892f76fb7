"""What an exporter gives, and how exporters are declared."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from tuner.errors import InputError


@dataclass(frozen=True, slots=True)
class Settings:
    """What is exported: a candidate's fields in the spelling of one Megatron-Core version.

    `fields` are flat Megatron names, run shape included; `model` the architecture, from which
    only formats without a recipe of their own need something; `env` the ranks' environment;
    `place` what the tuner's own form says besides: the GPU, and whose rules hold.
    """

    mcore: str
    fields: Mapping[str, Any]
    model: Mapping[str, Any]
    env: Mapping[str, str]
    world_size: int | None
    precision: str | None
    place: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Exported:
    """One export. `text` is what a file holds; `arguments` the words of a command line.

    `left_out` says of each field that the format cannot express why; the rest is exact.
    """

    format: str
    mcore: str
    text: str
    arguments: tuple[str, ...] = ()
    env: Mapping[str, str] | None = None
    left_out: Mapping[str, str] | None = None

    def to_json(self) -> dict[str, Any]:
        """The document of `tuner export --format json`."""
        return {
            "to": self.format,
            "mcore": self.mcore,
            "arguments": list(self.arguments),
            "env": dict(self.env or {}),
            "left_out": dict(self.left_out or {}),
            "text": self.text,
        }


Exporter = Callable[[Settings], Exported]
EXPORTERS: dict[str, Exporter] = {}


def exporter(name: str) -> Callable[[Exporter], Exporter]:
    """Register an exporter under the name that `--to` takes."""

    def register(function: Exporter) -> Exporter:
        EXPORTERS[name] = function
        return function

    return register


class CannotExpressError(InputError):
    """A format has no spelling for a value; the message is the reason."""
