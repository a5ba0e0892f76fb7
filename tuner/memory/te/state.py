"""Tensors Transformer Engine keeps for the life of a process, and its version.

pytorch/module/base.py: cuBLAS workspaces and one dummy weight gradient for each shape and type of
weight. Megatron-Core's data parallelism gets its gradients from `main_grad`; autograd still wants
a tensor, and the dummies are what it gets.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch

from tuner.memory.categories import PLACEHOLDER_GRADIENT, TRANSFORMER_ENGINE_WORKSPACE
from tuner.memory.recorder import active_recorder, allocate

_CACHE_SINCE = (2, 3)
"""Linear layers hand out cached dummies from here on; before, they allocated them anew."""

_GROUPED_CACHE_SINCE = (2, 11)
"""GroupedLinear hands out cached dummies from here on; before, it allocated them anew."""

_ONE_WORKSPACE_PER_STREAM = 4
"""Streams of a grouped GEMM (`tex.get_num_cublas_streams`)."""


@dataclass
class ProcessState:
    """State of one imitated process."""

    version: tuple[int, ...] = (2, 9, 0)
    architecture: str = "hopper"
    dummy_gradients: dict[tuple[int, int, torch.dtype], torch.Tensor] = field(default_factory=dict)
    workspaces: list[torch.Tensor] = field(default_factory=list)
    stream_workspaces: list[torch.Tensor] = field(default_factory=list)


process = ProcessState()


def reset(version: str, architecture: str) -> None:
    """Forget what a former dry run kept and imitate `version` on a GPU of `architecture`."""
    process.version = tuple(int(part) for part in version.split(".")[:3])
    process.architecture = architecture
    process.dummy_gradients.clear()
    process.workspaces.clear()
    process.stream_workspaces.clear()


def use_workspace() -> torch.Tensor:
    """The workspace of single GEMMs, made at its first use (`get_workspace`)."""
    if not process.workspaces:
        process.workspaces.append(new_workspace())
    return process.workspaces[0]


def use_stream_workspaces() -> list[torch.Tensor]:
    """The workspaces of grouped GEMMs (`get_multi_stream_cublas_workspace`)."""
    while len(process.stream_workspaces) < _ONE_WORKSPACE_PER_STREAM:
        process.stream_workspaces.append(new_workspace())
    return process.stream_workspaces


def new_workspace() -> torch.Tensor:
    """A workspace of one stream (`get_cublas_workspace_size_bytes`)."""
    size = 32 * 1024 * 1024 + 1024 if process.architecture != "ampere" else 4_194_304
    with filed_under(TRANSFORMER_ENGINE_WORKSPACE):
        return allocate((size,), torch.uint8)


@contextmanager
def filed_under(name: str) -> Iterator[None]:
    """File allocations inside under the module `name`, where a recorder is active."""
    recorder = active_recorder()
    if recorder is None:
        yield
        return
    with recorder.in_module(name):
        yield


def weight_gradient(
    weight: torch.Tensor, fused: bool, *, grouped: bool = False
) -> torch.Tensor | None:
    """What a linear layer's backward returns for `weight` after its weight-gradient GEMM.

    Without `fused` accumulation the GEMM wrote a new tensor. With it, the gradient went into
    `main_grad`, and autograd gets a dummy where Megatron-Core's data parallelism asks for one.
    """
    if not fused:
        return allocate(weight.shape, weight.dtype)
    if not hasattr(weight, "grad_added_to_main_grad"):
        return None
    weight.grad_added_to_main_grad = True
    if process.version < (_GROUPED_CACHE_SINCE if grouped else _CACHE_SINCE):
        return allocate(weight.shape, weight.dtype)
    return dummy_gradient(list(weight.shape), weight.dtype).detach()


def dummy_gradient(shape: list[int], dtype: torch.dtype, zero: bool = False) -> torch.Tensor:
    """`get_dummy_wgrad`: one cached tensor for each shape and type."""
    key = (shape[0], shape[1], dtype)
    if key not in process.dummy_gradients:
        with filed_under(PLACEHOLDER_GRADIENT):
            process.dummy_gradients[key] = allocate(shape, dtype)
    return process.dummy_gradients[key].detach()
