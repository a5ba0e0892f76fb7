"""Attention and the choice of its backend (pytorch/attention/dot_product_attention/*.py).

The layout rules are those of `get_qkv_layout`: inputs that are no supported view of one another
are copied to be contiguous. The backend is the one `get_attention_backend` picks where cuDNN and
flash-attn 2 are both installed.
"""

from __future__ import annotations

import math
import os
from typing import Any

import torch

from tuner.memory.errors import UnsupportedError
from tuner.memory.te import attention_kernels as kernels
from tuner.memory.te import context_parallel as parallel
from tuner.memory.te import quantize
from tuner.memory.te.attention_fp8 import fp8_attention
from tuner.memory.te.base import group_size, new_parameter
from tuner.memory.te.state import process


class DotProductAttention(torch.nn.Module):
    """Attention over `[s, b, heads, d]` query, key and value."""

    cp_stream = None

    def __init__(
        self,
        num_attention_heads: int,
        kv_channels: int | tuple[int, int],
        num_gqa_groups: int | None = None,
        attention_dropout: float = 0.0,
        tp_size: int = 1,
        cp_group: Any = None,
        cp_comm_type: str = "p2p",
        softmax_type: str = "vanilla",
        attn_mask_type: str = "causal",
        window_size: tuple[int, int] | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.attn_mask_type, self.window_size = attn_mask_type, window_size
        self.attention_dropout = attention_dropout
        self.set_context_parallel_group(cp_group, None, None, cp_comm_type)
        self.softmax_offset = None
        if softmax_type == "learnable":
            heads = num_attention_heads // tp_size
            self.softmax_offset = new_parameter((1, heads, 1, 1), torch.float32)
        self.softmax_type = softmax_type

    def set_context_parallel_group(
        self, group: Any, ranks: Any, stream: Any, cp_comm_type: str = "p2p"
    ) -> None:
        self.cp_group, self.cp_comm_type = group, cp_comm_type
        groups = group if isinstance(group, list) else [group]
        self.cp_size = math.prod(group_size(part) for part in groups)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Any = None,
        attn_mask_type: str | None = None,
        **options: Any,
    ) -> torch.Tensor:
        mask = kernels.Mask("causal" in (attn_mask_type or self.attn_mask_type), self.window_size)
        interleaved = _is_interleaved(query, key, value)
        if not interleaved:
            query, key, value = (part.contiguous() for part in (query, key, value))
        if self.cp_size > 1:
            return self._context_parallel(query, key, value, mask)
        if quantize.state.enabled and quantize.current_recipe().fp8_dpa:
            return fp8_attention(query, key, value, interleaved, mask)
        backend = self._backend(query, value)
        if backend == "unfused":
            return kernels.unfused_attention(query, key, value, self.attention_dropout)
        if backend == "flash":
            return kernels.flash_attention(query, key, value, mask)
        return kernels.fused_attention(query, key, value, self.softmax_offset, interleaved, mask)

    def _backend(self, query: torch.Tensor, value: torch.Tensor) -> str:
        fused = os.environ.get("NVTE_FUSED_ATTN", "1") != "0"
        flash = os.environ.get("NVTE_FLASH_ATTN", "1") != "0" and (
            query.dim() == 4
            and self.softmax_type == "vanilla"
            and query.shape[-1] == value.shape[-1] <= 256
        )
        deterministic = os.environ.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1") == "0"
        if deterministic and process.architecture != "hopper":
            fused = False  # cuDNN's deterministic backward is used on compute capability 9.0 alone
        if fused and flash:
            return "flash" if process.architecture == "ampere" else "fused"
        if flash:
            return "flash"
        return "fused" if fused else "unfused"

    def _context_parallel(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: kernels.Mask
    ) -> torch.Tensor:
        if quantize.state.enabled and quantize.current_recipe().fp8_dpa:
            raise UnsupportedError(
                "attention in FP8 under context parallelism is not modelled",
                field="fp8_dot_product_attention",
                fix="unset it, or set context_parallel_size to 1",
            )
        group = self.cp_group
        if self.cp_comm_type == "p2p":
            return parallel.ring_attention(query, key, value, group, mask)
        if self.cp_comm_type == "all_gather":
            return parallel.gathered_attention(query, key, value, group, mask)
        if self.cp_comm_type == "a2a":
            sink = self.softmax_offset
            return parallel.exchanged_attention(query, key, value, sink, group, mask)
        if self.cp_comm_type == "a2a+p2p":
            return parallel.hierarchical_attention(query, key, value, group, mask)
        raise UnsupportedError(
            f"context parallelism by {self.cp_comm_type} is not modelled",
            field="cp_comm_type",
            fix="use p2p, a2a, a2a+p2p or all_gather",
        )


def _is_interleaved(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> bool:
    """Whether the three are slices of one `[..., heads, 3, d]` tensor (the layout `sbh3d`)."""
    parts = (query, key, value)
    width = query.shape[-1]
    return (
        all(part.shape == query.shape and part.stride() == query.stride() for part in parts)
        and all(part.storage_offset() == i * width for i, part in enumerate(parts))
        and len({id(part.untyped_storage()) for part in parts}) == 1
    )
