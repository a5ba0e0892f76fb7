"""Shrinks a candidate on which two judges disagree to the fields that matter."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

#: Without these no model is described, whatever else is asked.
KEPT = ("num_layers", "hidden_size", "num_attention_heads")
#: Simple values tried in place of a field that cannot be dropped.
SIMPLER: dict[str, tuple[Any, ...]] = {
    "hidden_size": (1024,),
    "num_attention_heads": (16,),
    "num_layers": (1, 2, 4, 8),
}

Config = dict[str, Any]


def minimise(config: Mapping[str, Any], persists: Callable[[Config], bool]) -> Config:
    """The candidate with every field dropped or simplified that the disagreement survives.

    Args:
        config: a candidate for which ``persists`` holds.
        persists: whether the disagreement is still there; must be deterministic.
    """
    smallest = dict(config)
    shrunk = True
    while shrunk:
        shrunk = False
        for field in list(smallest):
            for attempt in _attempts(smallest, field):
                if persists(attempt):
                    smallest = attempt
                    shrunk = True
                    break
    return smallest


def _attempts(config: Config, field: str) -> list[Config]:
    """Smaller neighbours of ``config`` in one field, smallest first."""
    attempts = []
    value = config[field]
    if field not in KEPT:
        attempts.append({key: one for key, one in config.items() if key != field})
    if isinstance(value, dict):
        attempts += [
            config | {field: {key: one for key, one in value.items() if key != gone}}
            for gone in value
        ]
    if isinstance(value, list) and field != "pipeline_model_parallel_layout":
        attempts += [
            config | {field: value[:index] + value[index + 1 :]} for index in range(len(value))
        ]
    simpler = SIMPLER.get(field, ())
    if value in simpler:
        simpler = simpler[: simpler.index(value)]
    attempts += [config | {field: one} for one in simpler]
    return attempts
