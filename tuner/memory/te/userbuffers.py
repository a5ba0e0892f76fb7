"""Communication buffers of overlapped tensor parallelism (pytorch/module/base.py, `initialize_ub`).

They are memory of the driver, not of PyTorch's allocator: one buffer for each of a layer's products
that communicates, made at the start and shared by all layers. Gathered tensors, and those not yet
reduced, lie in them instead of in tensors of their own. `tuner.memory.fixed_costs` counts them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from tuner.memory.recorder import active_recorder
from tuner.memory.te import state

_STREAMS = 3
"""Streams of an overlapped product, each with a workspace (`_NUM_MAX_UB_STREAMS`)."""

OVERLAPS = (
    "ub_overlap_ag",
    "ub_overlap_rs",
    "ub_bulk_dgrad",
    "ub_bulk_wgrad",
    "ub_overlap_rs_dgrad",
)
"""Arguments of layers that say which of their exchanges go through a buffer."""


def initialize() -> None:
    """What `initialize_ub` takes from PyTorch's allocator: workspaces of overlapped products."""
    while len(state.process.workspaces) < _STREAMS:
        state.process.workspaces.append(state.new_workspace())


@contextmanager
def in_userbuffer(used: bool) -> Iterator[None]:
    """With `used`, tensors allocated inside lie in a communication buffer."""
    recorder = active_recorder()
    if not used or recorder is None:
        yield
        return
    before, recorder.paused = recorder.paused, True
    try:
        yield
    finally:
        recorder.paused = before
