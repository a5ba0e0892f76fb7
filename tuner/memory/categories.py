"""What each block of a trace holds, from where and when it was made and how long it lived."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from tuner.memory.trace import MODEL_BUILT, Trace

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

WEIGHTS = "weights"
GRADIENTS = "gradients"
OPTIMIZER_STATE = "optimizer state"
ACTIVATIONS = "activations"
LOSS = "logits and loss"
FORWARD_TRANSIENTS = "forward transients"
RECOMPUTE_TRANSIENTS = "recompute transients"
BACKWARD_TRANSIENTS = "backward transients"
OPTIMIZER_TRANSIENTS = "optimizer transients"
CUDA_GRAPHS = "CUDA graphs"
COMMUNICATION = "communication buffers"
WORKSPACES = "library workspaces"
OTHER = "other"

CATEGORIES = (
    WEIGHTS,
    GRADIENTS,
    OPTIMIZER_STATE,
    ACTIVATIONS,
    LOSS,
    FORWARD_TRANSIENTS,
    RECOMPUTE_TRANSIENTS,
    BACKWARD_TRANSIENTS,
    OPTIMIZER_TRANSIENTS,
    CUDA_GRAPHS,
    COMMUNICATION,
    WORKSPACES,
    OTHER,
)
"""Every category; `Trace.category` of a categorised trace indexes this."""

_BY_PHASE = {
    "forward": FORWARD_TRANSIENTS,
    "recompute": RECOMPUTE_TRANSIENTS,
    "backward": BACKWARD_TRANSIENTS,
    "optimizer": OPTIMIZER_TRANSIENTS,
    "graph capture": CUDA_GRAPHS,
    "step": COMMUNICATION,
    "build": OTHER,
}
_LOSS_MODULES = ("output_layer", "loss")
CUBLAS_WORKSPACE = "cuBLAS workspace"
TRANSFORMER_ENGINE_WORKSPACE = "Transformer Engine workspace"
PLACEHOLDER_GRADIENT = "placeholder gradient"
"""Modules under which workspaces are filed."""
LOW_PRECISION_WEIGHTS = "low-precision weights"
"""Module under which weights in low precision, and copies kept of others, are filed."""
GATHERED = "gathered weights and gradients"
"""Module under which whole weights and gradients of sharded ones are filed."""


def categorised(trace: Trace, labels: Mapping[int, str], forward_ends: NDArray[np.int64]) -> Trace:
    """`trace` with the category of every event filled in.

    `labels` gives the category of blocks known by what they are (weights, gradients);
    `forward_ends` holds the event index at which each forward pass of a micro-batch ended. What a
    forward pass makes and leaves alive at its end is kept for backward.
    """
    import numpy as np

    codes = {name: code for code, name in enumerate(CATEGORIES)}
    allocated = np.flatnonzero(trace.bytes > 0)
    blocks = trace.block[allocated]
    count = int(trace.block.max()) + 1 if len(trace) else 0
    birth = np.zeros(count, dtype=np.int64)
    birth[blocks] = allocated
    death = np.full(count, np.iinfo(np.int64).max)
    freed = np.flatnonzero(trace.bytes < 0)
    death[trace.block[freed]] = freed

    category = np.full(count, codes[OTHER], dtype=np.int32)
    phase, module = trace.phase[birth], trace.module[birth]
    for name, fallback in _BY_PHASE.items():
        category[phase == _index(trace.phase_names, name)] = codes[fallback]
    in_forward = phase == _index(trace.phase_names, "forward")
    next_end = np.append(forward_ends, np.iinfo(np.int64).max - 1)[
        np.searchsorted(forward_ends, birth, side="right")
    ]
    category[in_forward & (death >= next_end)] = codes[ACTIVATIONS]
    for name in _LOSS_MODULES:
        category[in_forward & (module == _index(trace.module_names, name))] = codes[LOSS]
    end = trace.marker(MODEL_BUILT)
    built = (birth < end) & (death >= end)
    category[built] = codes[OPTIMIZER_STATE]
    last = len(trace)
    stays = (phase == _index(trace.phase_names, "optimizer")) & (death >= last)
    category[stays] = codes[OPTIMIZER_STATE]
    for block, label in labels.items():
        category[block] = codes[label]
    for name in (CUBLAS_WORKSPACE, TRANSFORMER_ENGINE_WORKSPACE, PLACEHOLDER_GRADIENT):
        category[module == _index(trace.module_names, name)] = codes[WORKSPACES]
    category[module == _index(trace.module_names, LOW_PRECISION_WEIGHTS)] = codes[WEIGHTS]
    category[module == _index(trace.module_names, GATHERED)] = codes[COMMUNICATION]
    return replace(trace, category=category[trace.block], category_names=CATEGORIES)


def _index(names: tuple[str, ...], name: str) -> int:
    return names.index(name) if name in names else -1


def breakdown_at(trace: Trace, event: int) -> dict[str, int]:
    """Bytes alive after `event`, by category; categories without any are left out."""
    return _totals(trace, event, trace.category, trace.category_names)


def activations_at(trace: Trace, event: int) -> dict[str, int]:
    """Bytes kept for backward that are alive after `event`, by the module that made them."""
    import numpy as np

    kept = np.array([name == ACTIVATIONS for name in trace.category_names])
    codes = np.where(kept[trace.category], trace.module, -1)
    return _totals(trace, event, codes, trace.module_names)


def _totals(
    trace: Trace, event: int, codes: NDArray[np.int32], names: tuple[str, ...]
) -> dict[str, int]:
    import numpy as np

    alive = trace.alive_at(event)
    alive = alive[codes[alive] >= 0]
    sums = np.bincount(codes[alive], weights=trace.bytes[alive], minlength=len(names))
    return {name: int(total) for name, total in zip(names, sums, strict=True) if total}
