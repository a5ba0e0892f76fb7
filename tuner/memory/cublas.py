"""Workspaces of PyTorch's own matrix products on CUDA.

aten/src/ATen/cuda/CublasHandlePool.cpp: each pair of cuBLAS handle and stream gets one workspace
at its first product, taken from the caching allocator and never given back. Handles belong to
threads, and backward passes run in a thread of their own. The size comes from
`CUBLAS_WORKSPACE_CONFIG`, a list of `:KiB:count`, or the default of the GPU.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch

from tuner.memory.categories import CUBLAS_WORKSPACE
from tuner.memory.recorder import Handler, Recorder, allocate

_KIB = 1024
_HOPPER_BYTES = 8 * 4096 * _KIB
_OTHER_BYTES = 2 * 4096 * _KIB + 8 * 16 * _KIB

PRODUCTS = ("mm", "addmm", "bmm", "baddbmm")
"""Operators that need a workspace."""


def workspace_bytes(environment: Mapping[str, str], architecture: str) -> int:
    """Size of one workspace; 0 where the configuration turns workspaces off."""
    setting = environment.get("CUBLAS_WORKSPACE_CONFIG")
    if setting:
        pairs = re.findall(r":(\d+):(\d+)", setting)
        return sum(int(size) * int(count) * _KIB for size, count in pairs)
    return _OTHER_BYTES if architecture == "ampere" else _HOPPER_BYTES


def workspace_handlers(size_bytes: int, backward_phases: frozenset[int]) -> dict[Any, Handler]:
    """Handlers of matrix products that allocate the workspace of their thread at first use."""
    kept: dict[bool, torch.Tensor] = {}

    def product(
        recorder: Recorder, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        in_backward = recorder.phase in backward_phases
        if size_bytes and in_backward not in kept:
            with recorder.in_module(CUBLAS_WORKSPACE):
                kept[in_backward] = allocate((size_bytes,), torch.uint8)
        return func(*args, **kwargs)

    return {getattr(torch.ops.aten, name).default: product for name in PRODUCTS}
