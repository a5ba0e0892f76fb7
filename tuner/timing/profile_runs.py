"""Kernels read from dry runs that were made for memory.

A memory profile runs two layers of each kind, so its trace holds the kernels of every unit as well.
Where it ran what a dry run for kernels alone would run, that one is spared.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tuner.memory.request import DryRunRequest
from tuner.memory.trace import Trace
from tuner.timing.units import kernels_path, read_kernels, save_kernels

_BY_LAYER = (
    "num_layers",
    "moe_layer_freq",
    "window_attn_skip_freq",
    "hybrid_layer_pattern",
    "position_embedding_type",
)
"""Fields of the architecture that say which layers there are, or with which frequencies."""

_DEFAULTS = {"optimizer": "adam"}


def keep_kernels(
    request: DryRunRequest, run: DryRunRequest, trace: Trace, stated: Mapping[str, str]
) -> None:
    """Keep on disk, as the kernels of `request`, those in the trace of `run` and what it stated.

    Does nothing where they are kept already, or where `run` is not known to run the same kernels.
    """
    path = kernels_path(request)
    if not runs_alike(request, run) or path.exists():
        return
    save_kernels(path, read_kernels(trace, run, json.loads(stated["parameters"])))


def runs_alike(request: DryRunRequest, run: DryRunRequest) -> bool:
    """Whether `run`, made for memory, has the units of `request` with the same kernels in each."""
    if "/" in str(run.model.get("hybrid_layer_pattern", "")):  # prediction runs in `run` alone
        return False
    return replace(request, model=_architecture(request), config=_settings(request)) == replace(
        run, model=_architecture(run), config=_settings(run)
    )


def _architecture(request: DryRunRequest) -> dict[str, Any]:
    return {name: value for name, value in request.model.items() if name not in _BY_LAYER}


def _settings(request: DryRunRequest) -> dict[str, Any]:
    return {**_DEFAULTS, **request.config}
