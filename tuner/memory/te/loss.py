"""Cross-entropy over the vocabulary (pytorch/cross_entropy.py, triton/cross_entropy.py).

The gradient overwrites the logits, in their type, during the forward pass.
"""

from __future__ import annotations

from typing import Any

import torch

from tuner.memory import issue
from tuner.memory.recorder import allocate
from tuner.memory.te.base import group_size


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        logits: torch.Tensor,
        target: torch.Tensor,
        label_smoothing: float = 0.0,
        reduce_loss: bool = False,
        group: Any = None,
        *options: Any,
    ) -> torch.Tensor:
        rows = logits.numel() // logits.shape[-1]
        loss = allocate((rows,), torch.float32)
        maxima = allocate((rows * 3,), torch.float32)
        ranks = group_size(group)
        issue.touched(logits)  # maximum and sum of each row
        gathered = allocate((rows * 3 * ranks,), torch.float32) if ranks > 1 else maxima
        if ranks > 1:
            issue.collective("all_gather", issue.size_of([gathered]), group)
        issue.touched(logits, logits)  # read again, overwritten by their gradient
        del maxima, gathered
        ctx.save_for_backward(logits.detach())
        ctx.options = 5 + len(options) - 1
        return loss.view(logits.shape[:-1])

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        issue.touched(ctx.saved_tensors[0], ctx.saved_tensors[0])
        return (ctx.saved_tensors[0], *[None] * ctx.options)


parallel_cross_entropy = _CrossEntropy.apply
