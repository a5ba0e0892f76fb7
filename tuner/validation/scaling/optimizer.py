"""ZeRO-1 AdamW (src/scaling/core/optimizer).

Weights lie in one flat bf16 buffer; gradients are tensors of their own, as autograd makes them.
Gradients are summed over data-parallel ranks in buckets, each in a flat bf16 and an fp32 copy.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn

from tuner.memory.categories import OPTIMIZER_STATE, WEIGHTS
from tuner.memory.recorder import allocate
from tuner.validation.scaling.layers import Layer

_BUCKET = 500_000_000
"""optimizer_config.py, `allreduce_bucket_size`, in elements."""


class ShardedOptimizer:
    """The optimizer of one rank; its moments appear in the first step.

    `more_layers` further layers like those of `modules` are counted though they are not there. The
    weights of `modules` themselves were made unseen.
    """

    def __init__(self, modules: nn.ModuleList, more_layers: int, data_ranks: int) -> None:
        self._parameters = list(modules.parameters())
        self._sizes = _sizes(modules, more_layers)
        self._ranks = data_ranks
        separate = [allocate((size,), torch.bfloat16) for size in self._sizes]
        del separate  # to the host, from where they come back as one
        self._flat = allocate((sum(self._sizes),), torch.bfloat16)
        start = 0
        for parameter in self._parameters:
            size = parameter.numel()
            parameter.data = self._flat[start : start + size].view(parameter.shape)
            start += size
        self._shard = -(-sum(self._sizes) // data_ranks)
        self._master = allocate((self._shard,), torch.float32)
        self._moments: list[torch.Tensor] = []

    def tensors(self) -> Iterator[tuple[torch.Tensor, str]]:
        """What is kept from the start, with its category."""
        yield self._flat, WEIGHTS
        yield self._master, OPTIMIZER_STATE

    def step(self) -> None:
        """Reduce, update and gather; the gradients are gone afterwards."""
        if self._ranks > 1:
            self._reduce()
        gradient = allocate((self._shard,), torch.float32)
        for parameter in self._parameters:
            parameter.grad = None
        while len(self._moments) < 2:
            self._moments.append(allocate((self._shard,), torch.float32))
        roots = allocate((self._shard,), torch.float32)  # torch/optim/adamw.py, foreach
        del roots, gradient
        if self._ranks > 1:
            self._gather()

    def _reduce(self) -> None:
        """allreduce.py, `allreduce_no_retain` and `allreduce_and_copy`."""
        waiting = 0
        for size in self._sizes:
            waiting += size
            if waiting > _BUCKET:
                _reduce_bucket(waiting)
                waiting = 0
        if waiting:
            _reduce_bucket(waiting)

    def _gather(self) -> None:
        """parameter_group.py, `step_sequel`; NCCL's list form fills one flat buffer first."""
        rounds = max(1, self._shard * self._ranks // _BUCKET)
        for _ in range(rounds):
            allocate((self._shard // rounds * self._ranks,), torch.bfloat16)


def _sizes(modules: nn.ModuleList, more_layers: int) -> list[int]:
    """Elements of every weight, in order."""
    sizes: list[int] = []
    for module in modules:
        own = [parameter.numel() for parameter in module.parameters()]
        sizes += own
        if isinstance(module, Layer):
            sizes += own * more_layers
            more_layers = 0
    return sizes


def _reduce_bucket(size: int) -> None:
    flat = allocate((size,), torch.bfloat16)
    wide = allocate((size,), torch.float32)
    del flat, wide
