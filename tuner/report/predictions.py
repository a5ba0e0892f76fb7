"""What the models of memory and time say of one candidate, for the charts of a report."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from tuner.errors import InputError
from tuner.report.content import Predictions

Told = Callable[[str], None]
"""Hears what is being worked on."""


def predict(document: Mapping[str, Any], told: Told = lambda _: None) -> Predictions:
    """Predictions for an input document of `tuner estimate`; what cannot be said is a problem.

    The composed estimate covers every pipeline stage; only the fullest stage is dry-run in full.
    """
    from tuner.estimation import estimate
    from tuner.estimation_composed import estimate_composed

    problems: list[str] = []
    told("memory of every pipeline stage")
    composed = _tried("memory by stage", lambda: estimate_composed(document), problems)
    told("pipeline timeline")
    pipeline = _tried("pipeline timeline", lambda: _trace(document), problems)
    fullest = None
    if composed is not None:
        told("dry run of the fullest stage")
        rank = max(composed["ranks"], key=lambda one: one["allocated_bytes"])["rank"]
        dry = _tried("memory over a step", lambda: estimate(document, ranks=[rank]), problems)
        fullest = None if dry is None else dry["ranks"][0]
    return Predictions(composed, fullest, pipeline, tuple(problems))


def _trace(document: Mapping[str, Any]) -> dict[str, Any]:
    from tuner.timing.predicted import predicted_trace

    return predicted_trace(document)


def _tried(
    what: str, call: Callable[[], dict[str, Any]], problems: list[str]
) -> dict[str, Any] | None:
    """The answer, or None with the reason added to `problems`."""
    from tuner.memory import UnsupportedError
    from tuner.memory.worker_pool import DryRunError

    try:
        return call()
    except (InputError, UnsupportedError, DryRunError, ValueError) as error:
        problems.append(f"{what}: {' '.join(str(error).split())}")
        return None
